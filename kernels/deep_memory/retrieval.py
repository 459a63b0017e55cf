"""Reading a memory without writing to it: Titans (arXiv 2501.00663), Eq 15 and 21."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memzoo.kernels.deep_memory import block_of_unit, is_gated
from memzoo.kernels.deep_memory.activations import GatedUnits, Units
from memzoo.kernels.registry import as_given, constant


def retrieve(
    query: Tensor,
    weights: Sequence[Tensor],
    position: Tensor,
    *,
    activation: str = "gelu",
    residual: bool = True,
    unlock: Sequence[int] = (0,),
) -> Tensor:
    """`M(q)` at one set of weights for all queries.

    Args:
        query: `[B, T, H, K]`.
        weights: `[B, H, out_l, in_l]`.
        position: tokens of each row before its first query, `[B]`, int64; query t sees the blocks open at its token.
        activation, residual, unlock: as in `deep_memory`.

    Returns:
        `[B, T, H, V]` in the dtype of `query`.

    Cost: P multiply-adds per token and head.
    """
    units = (GatedUnits if is_gated(weights) else Units)(activation)
    depth, dtype = len(weights), weights[0].dtype
    with as_given(query.device):
        q = query.to(dtype).movedim(2, 1)
        if len(unlock) > 1:
            token = position[:, None] + torch.arange(query.shape[1], device=query.device)
            is_open = (token[..., None] >= constant(tuple(unlock), position)).to(dtype)[:, None]  # [B, 1, T, E]

        def mask(x: Tensor) -> Tensor:
            return x if len(unlock) == 1 else x * is_open[..., block_of_unit(x.shape[-1], len(unlock), x.device)]

        x = mask(q) if depth == 1 else q
        for layer, weight in enumerate(weights):
            x = x @ weight.mT
            if layer < depth - 1:
                x = mask(units.value(x))
        y = x + q[..., : x.shape[-1]] if residual else x
    return y.movedim(1, 2).to(query.dtype)
