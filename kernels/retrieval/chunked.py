"""All queries at once, as products with the weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.deep_memory import block_of_unit, is_gated
from memzoo.kernels.deep_memory.activations import GatedUnits, Units
from memzoo.kernels.registry import cast, constant, may_be
from memzoo.kernels.retrieval import Weights, kept
from memzoo.kernels.unit_length import unit_length


def retrieve(
    query: Tensor,
    weights: Weights,
    position: Tensor,
    past: Weights,
    segment: int,
    activation: str,
    residual: bool,
    unlock: tuple[int, ...],
    unit: bool,
) -> tuple[Tensor, Weights]:
    """See `memzoo.kernels.retrieval.retrieve`."""
    past = past_of(weights, position, past, segment)
    units = (GatedUnits if is_gated(past) else Units)(activation)
    depth = len(past)
    q = cast(unit_length(F.silu(query)) if unit else query, past[0].dtype).movedim(2, 1)
    is_open: Tensor | None = None
    if len(unlock) > 1:
        token = position[:, None] + torch.arange(query.shape[1], device=query.device)
        is_open = (token[..., None] >= constant(unlock, position)).to(q.dtype)[:, None]  # [B, 1, T, E]

    def mask(x: Tensor) -> Tensor:
        return x if is_open is None else x * is_open[..., block_of_unit(x.shape[-1], len(unlock), x.device)]

    x = mask(q) if depth == 1 else q
    for layer, weight in enumerate(past):
        x = x @ weight.mT
        if layer < depth - 1:
            x = mask(units.value(x))
    y = x + q[..., : x.shape[-1]] if residual else x
    return y.movedim(1, 2), past


def past_of(weights: Weights, position: Tensor, past: Weights, segment: int) -> Weights:
    """The weights at the start of the segments in which the rows' next tokens are; or what else a memory holds, `[B, H,
    N, ...]`, of which there may have been fewer N: zeros, which stand for no token, follow them."""
    if not past:
        return kept(weights)
    if not may_be(position, lambda n: n % segment == 0):
        return past
    starts = (position % segment == 0)[:, None, None, None]
    return tuple([_of_rows(starts, new, old) for new, old in zip(weights, past, strict=True)])


def _of_rows(starts: Tensor, new: Tensor, old: Tensor) -> Tensor:
    count = max(new.shape[2], old.shape[2])
    new, old = (x if x.shape[2] == count else F.pad(x, (0, 0, 0, count - x.shape[2])) for x in (new, old))
    return torch.where(starts, new, old)
