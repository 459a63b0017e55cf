"""The memory on exponential features, some tokens at a time.

In a segment with `A(t, j) = prod_{n=j+1..t} retention_n`, and `w_{n,j} = -step_size_{n,j} e_{n,j}` what token n writes
at the key of the token j before,

    y_t = A(t, 0) M_0 phi(q_t) + sum_{n<=t, j} A(t, n) w_{n,j} phi(k_{n-j}) . phi(q_t)

For "dot" every w is given by its value. For "l2" they solve the triangular system

    w_{t,j} + step_size_{t,j} sum_{n<t, i} A(t-1, n) (phi(k_{n-i}) . phi(k_{t-j})) w_{n,i}
        = step_size_{t,j} (v_{t-j} - A(t-1, 0) M_0 phi(k_{t-j}))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.decay import interval_products
from memzoo.kernels.exponential_memory import ExponentialState, kernel

SEGMENT = 64
"""Tokens at a time."""


def exponential_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor,
    step_size: Tensor,
    state: ExponentialState,
    scale: float,
    objective: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, keys and what is written at them, `[B, H, T or R + T, ...]`; inputs are `[B, H, T, ...]`."""
    keys, written, outputs = state.keys, state.written, []
    values = torch.cat([state.recent_values, value], dim=2)
    before = state.recent_values.shape[2]
    for start in range(0, query.shape[2], SEGMENT):
        part = slice(start, start + SEGMENT)
        k, gate = key[:, :, part], log_retention[:, :, part]
        pairs = torch.cat([keys[:, :, keys.shape[2] - before :], k], dim=2), values[:, :, start : part.stop + before]
        y, written = _segment(query[:, :, part], *pairs, gate, step_size[:, :, part], keys, written, scale, objective)
        keys = torch.cat([keys, k], dim=2)
        outputs.append(y)
    return torch.cat(outputs, dim=2), keys, written


def _segment(
    query: Tensor,
    pair_keys: Tensor,
    pair_values: Tensor,
    log_retention: Tensor,
    step_size: Tensor,
    keys: Tensor,
    written: Tensor,
    scale: float,
    objective: str,
) -> tuple[Tensor, Tensor]:
    """Outputs of S tokens and what is then written at all keys; the pairs are those of the c - 1 tokens before, too."""
    size, window = step_size.shape[2:]
    keep = interval_products(log_retention)  # A(t, j), [B, H, 1+S, 1+S]
    step = step_size.flip(-1).flatten(2)[..., None]  # of each write (n, j), the oldest pair of a token first
    at_keys, at_values = _writes(pair_keys, window), _writes(pair_values, window)  # [B, H, S c, ...]
    write = step * at_values
    if objective == "l2":
        decayed = keep[:, :, :size].repeat_interleave(window, dim=2)  # A(t-1, .) of each write
        known = _writes(kernel(pair_keys, keys, scale) @ written, window)
        between = decayed[..., 1:].repeat_interleave(window, dim=3) * kernel(at_keys, at_keys, scale)
        write = write - step * decayed[..., :1] * known
        write = torch.linalg.solve_triangular(step * between, write, upper=False, unitriangular=True)
    scores = keep[:, :, 1:, 1:].repeat_interleave(window, dim=3) * kernel(query, at_keys, scale)
    y = scores @ write + keep[:, :, 1:, :1] * (kernel(query, keys, scale) @ written)
    left = (keep[:, :, -1, 1:].repeat_interleave(window, dim=2)[..., None] * write).unflatten(2, (size, window))
    added = torch.stack([F.pad(left[:, :, :, at], (0, 0, at, window - 1 - at)) for at in range(window)]).sum(0)
    written = F.pad(keep[:, :, -1, :1, None] * written, (0, 0, 0, size))
    return y, written + F.pad(added, (0, 0, written.shape[2] - size - window + 1, 0))


def _writes(x: Tensor, window: int) -> Tensor:
    """Rows `[B, H, c - 1 + S, D]` as the writes take them, `[B, H, S c, D]`."""
    return x.unfold(2, window, 1).movedim(4, 3).flatten(2, 3)
