"""The memory on exponential features, some tokens at a time.

In a segment with `A(t, j) = prod_{n=j+1..t} retention_n`, and `w_{n,j} = -step_size_{n,j} e_{n,j}` what token n writes
at the key of the token j before,

    y_t = A(t, 0) M_0 phi(q_t) + sum_{n<=t, j} A(t, n) w_{n,j} phi(k_{n-j}) . phi(q_t)

For "dot" every w is given by its value. For "l2" they solve the triangular system

    w_{t,j} + step_size_{t,j} sum_{n<t, i} A(t-1, n) (phi(k_{n-i}) . phi(k_{t-j})) w_{n,i}
        = step_size_{t,j} (v_{t-j} - A(t-1, 0) M_0 phi(k_{t-j}))

A single token has no system: its errors are those at `M_0`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.decay import interval_products
from memzoo.kernels.exponential_memory import ExponentialState, kernel
from memzoo.kernels.exponential_memory.places import Memory, Tokens, by_torch

SEGMENT = 64
"""Tokens at a time."""


@by_torch
def exponential_memory(tokens: Tokens, state: ExponentialState, scale: float, objective: str) -> tuple[Tensor, Tensor]:
    """Outputs `[B, H, T, V]`, and what is written at the keys of the pairs, `[B, H, c - 1 + T, V]`."""
    if tokens.query.shape[2] == 1:
        return _token(tokens, state, scale, objective)
    before = tokens.keys.shape[2] - tokens.query.shape[2]
    passed, added, outputs = None, torch.zeros_like(tokens.values[:, :, :before]), []
    for start in range(0, tokens.query.shape[2], SEGMENT):
        part, pairs = slice(start, start + SEGMENT), slice(start, start + SEGMENT + before)
        segment = Tokens(
            tokens.query[:, :, part],
            tokens.keys[:, :, pairs],
            tokens.values[:, :, pairs],
            tokens.log_retention[:, :, part],
            tokens.step_size[:, :, part],
        )
        memory = Memory(state.keys, state.written, passed, tokens.keys[:, :, : start + before], added)
        y, keep, added = _segment(segment, memory, scale, objective)
        passed = keep if passed is None else passed * keep
        outputs.append(y)
    return torch.cat(outputs, dim=2), added


def _token(tokens: Tokens, state: ExponentialState, scale: float, objective: str) -> tuple[Tensor, Tensor]:
    asking, step = tokens.query, tokens.step_size.flip(-1).mT
    if objective == "l2":
        asking = torch.cat([tokens.keys, asking], dim=2)
    said, write = kernel(asking, state.keys, scale) @ state.written, step * tokens.values
    if objective == "l2":
        write = write - step * said[:, :, :-1]
    keep = tokens.log_retention[..., None].exp()
    return keep * said[:, :, -1:] + kernel(tokens.query, tokens.keys, scale) @ write, write


def _segment(tokens: Tokens, memory: Memory, scale: float, objective: str) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of S tokens, the retention that what was written before them has passed, `[B, H, 1, 1]`, and what has
    been written in this call after them."""
    query, step_size = tokens.query, tokens.step_size
    size, window = step_size.shape[2:]
    keep = interval_products(tokens.log_retention)  # A(t, j), [B, H, 1+S, 1+S]
    step = step_size.flip(-1).flatten(2)[..., None]  # of each write (n, j), the oldest pair of a token first
    at_keys, at_values = _writes(tokens.keys, window), _writes(tokens.values, window)  # [B, H, S c, ...]
    write = step * at_values
    if objective == "l2":
        decayed = keep[:, :, :size].repeat_interleave(window, dim=2)  # A(t-1, .) of each write
        known = _writes(memory.read(tokens.keys, scale), window)
        between = decayed[..., 1:].repeat_interleave(window, dim=3) * kernel(at_keys, at_keys, scale)
        write = write - step * decayed[..., :1] * known
        write = torch.linalg.solve_triangular(step * between, write, upper=False, unitriangular=True)
    scores = keep[:, :, 1:, 1:].repeat_interleave(window, dim=3) * kernel(query, at_keys, scale)
    y = scores @ write + keep[:, :, 1:, :1] * memory.read(query, scale)
    left = (keep[:, :, -1, 1:].repeat_interleave(window, dim=2)[..., None] * write).unflatten(2, (size, window))
    added = torch.stack([F.pad(left[:, :, :, at], (0, 0, at, window - 1 - at)) for at in range(window)]).sum(0)
    passed, before = keep[:, :, -1, :1, None], memory.added
    if before.shape[2] > 0:
        added = F.pad(passed * before, (0, 0, 0, size)) + F.pad(added, (0, 0, before.shape[2] - window + 1, 0))
    return y, passed, added


def _writes(x: Tensor, window: int) -> Tensor:
    """Rows `[B, H, c - 1 + S, D]` as the writes take them, `[B, H, S c, D]`."""
    return x.unfold(2, window, 1).movedim(4, 3).flatten(2, 3)
