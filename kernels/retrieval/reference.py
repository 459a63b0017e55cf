"""Row by row, head by head and token by token, unit by unit."""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.deep_memory import block_of_unit, is_gated
from memzoo.kernels.deep_memory.activations import ACTIVATION
from memzoo.kernels.retrieval import Weights, kept
from memzoo.kernels.unit_length import SHORTEST


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
    count, gated, blocks = position.tolist(), is_gated(weights), len(unlock)
    if past:
        pairs = zip(weights, past, strict=True)
        past = tuple(
            torch.stack([(new if n % segment == 0 else old)[row] for row, n in enumerate(count)]) for new, old in pairs
        )
    else:
        past = kept(weights)

    def answer(q: Tensor, layers: list[Tensor], token: int) -> Tensor:
        is_open = torch.tensor([float(token >= first) for first in unlock]).to(q)
        x = q
        for layer, weight in enumerate(layers):
            if layer > 0 or len(layers) == 1:
                x = x * is_open[block_of_unit(len(x), blocks)]
            x = weight @ x
            if layer < len(layers) - 1:
                act = ACTIVATION[activation].value
                x = act(x[0::2]) * x[1::2] if gated else act(x)
        return x + q[: len(x)] if residual else x

    q = query.to(past[0].dtype)
    if unit:
        q = q * torch.sigmoid(q)
        q = q / q.norm(dim=-1, keepdim=True).clamp(min=SHORTEST)
    answers = [
        answer(q[row, t, head], [w[row, head] for w in past], count[row] + t)
        for row in range(q.shape[0])
        for t in range(q.shape[1])
        for head in range(q.shape[2])
    ]
    return torch.stack(answers).unflatten(0, q.shape[:3]), past
