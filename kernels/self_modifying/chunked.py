"""Self-modifying memories in torch, the tokens of a chunk at once.

At the anchor the gradient of token t has rank one in each layer: with `x = act(W_2 k)`, `e = M(k) - M(v)` and
`s = act'(W_2 k) * W_1^T e` it is `s k^T` in the first and `e x^T` in the second, of norm `sqrt(|e|^2 |x|^2 + |s|^2)`.
So all memories' first layers side by side are one delta rule of the values `-s`, their second ones linear attention of
the keys x and the values `-eta e`; what shortens a gradient multiplies s and e.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.deep_memory.activations import ACTIVATION
from memzoo.kernels.delta_rule import delta_rule
from memzoo.kernels.linear_attention import linear_attention
from memzoo.kernels.registry import cast, may_be
from memzoo.kernels.self_modifying import FORGET, KEY, MEMORY, QUERY, Weights
from memzoo.kernels.unit_length import unit_length


def self_modifying(
    u: Tensor,
    query: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor,
    now: Weights,
    anchor: Weights,
    position: Tensor,
    *,
    chunk_size: int,
    self_chunk_size: int,
    step_limit: float,
    activation: str,
    max_gradient_norm: float,
    lengths: Tensor | None,
    backend: str,
) -> tuple[Tensor, Weights, Weights]:
    """See `memzoo.kernels.self_modifying.self_modifying`."""
    dtype, heads, given = now.first.dtype, u.shape[2], u.dtype
    count, act = now.second.shape[1] // heads, ACTIVATION[activation]
    anchor = _anchored(now, anchor, position, lengths, (chunk_size, self_chunk_size))

    def read(x: Tensor, memories: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """`M(x)` `[B, T, H, n, d]` for `x` `[B, T, H, d]` or `[B, T, H, n, d]`, and the pre-activations
        `[B, T, H, n, F]`."""
        # Views of its own, so that gradients, which lie as each product leaves them, are added up flat again.
        up = _chosen(anchor.first.unflatten(-1, (count, -1)), 3, memories)
        down = _chosen(anchor.second.unflatten(1, (heads, -1)), 2, memories)
        if x.ndim == 4:
            x = x.unsqueeze(3)
        hidden = torch.einsum("blhnd,bhdnf->blhnf", x.expand(-1, -1, -1, up.shape[3], -1), up)
        return x + torch.einsum("blhnf,bhnfd->blhnd", act.value(hidden), down), hidden

    every = [slice(0, count)]
    asked = [slice(KEY, FORGET + 1), *([slice(QUERY, QUERY + 1)] if query is None else [])]
    made = read(cast(u, dtype), asked)[0].unbind(3)
    k, v = unit_length(made[0]), made[1]
    step_size, log_retention = _gates(made[2], made[3], gate_weight, gate_bias, step_limit)
    q = unit_length(made[-1] if query is None else cast(query, dtype))
    y = read(q, [slice(MEMORY, MEMORY + 1)])[0][:, :, :, 0]

    wanted, _ = read(v, every)
    got, hidden = read(k, every)
    error, units = got - wanted, act.value(hidden)
    second = anchor.second.unflatten(1, (heads, -1))
    slope = act.pullback(torch.einsum("blhnd,bhnfd->blhnf", error, second), hidden)
    scale = _bounded(error, units, slope, max_gradient_norm)
    write = -step_size[..., None, None] * scale
    _, up = delta_rule(
        torch.zeros_like(k),
        k,
        (-scale * slope).flatten(3),
        step_size,
        log_retention,
        now.first,
        lengths=lengths,
        backend=backend,
    )
    _, down = linear_attention(
        torch.zeros_like(units).flatten(2, 3),
        units.flatten(2, 3)[:, :, None],
        (write * error).flatten(2, 3)[:, :, None],
        log_retention.repeat_interleave(count, 2),
        now.second,
        lengths=lengths,
        backend=backend,
    )
    return cast(y, given), Weights(up, down), anchor


def _anchored(
    now: Weights, anchor: Weights, position: Tensor, lengths: Tensor | None, sizes: tuple[int, int]
) -> Weights:
    """The weights to read at in rows that have read `position` tokens: of now, where a token begins a chunk."""
    if not may_be(position, lambda read: read % sizes[0] == 0):
        return anchor  # of all weights no copy
    heads, columns = now.first.shape[1], now.first.shape[3]
    count = now.second.shape[1] // heads
    is_memory = torch.arange(count, device=position.device) == MEMORY
    of_memory, of_others = ((position % size == 0)[:, None] for size in sizes)
    ends = torch.where(is_memory, of_memory, of_others)  # [B, N]
    if lengths is not None:
        ends &= (lengths > 0)[:, None]
    first = torch.where(ends.repeat_interleave(columns // count, 1)[:, None, None], now.first, anchor.first)
    second = torch.where(ends.repeat(1, heads)[:, :, None, None], now.second, anchor.second)
    return Weights(first, second)


def _chosen(x: Tensor, axis: int, memories: Sequence[slice]) -> Tensor:
    """Some of the memories along an axis, as views where they can be: a list of indices would be copied to the device
    first."""
    parts = [x.narrow(axis, some.start, some.stop - some.start) for some in memories]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def _gates(step: Tensor, forget: Tensor, weight: Tensor, bias: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Step size and log retention `[B, T, H]` from what two memories say, each `[B, T, H, d]`."""
    normed = (F.rms_norm(x, x.shape[-1:]) for x in (step, forget))
    logits = [(x * w).sum(-1) + b for x, w, b in zip(normed, weight, bias, strict=True)]
    return limit * torch.sigmoid(logits[0]), F.logsigmoid(-logits[1])


def _bounded(error: Tensor, units: Tensor, slope: Tensor, limit: float) -> Tensor:
    """What shortens each memory's gradient of a token, `[B, T, H, n, 1]`, to the limit; keys are of unit length."""
    if limit == math.inf:
        return torch.ones_like(error[..., :1])
    squares = error.square().sum(-1) * units.square().sum(-1) + slope.square().sum(-1)
    return (limit * squares.clamp(min=limit**2).rsqrt())[..., None]
