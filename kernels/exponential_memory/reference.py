"""The memory on exponential features, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.exponential_memory import ExponentialState, kernel


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
    keys, written = state.keys, state.written
    values = torch.cat([state.recent_values, value], dim=2)
    window, outputs = step_size.shape[-1], []
    for t in range(query.shape[2]):
        keys = torch.cat([keys, key[:, :, t : t + 1]], dim=2)
        written = torch.nn.functional.pad(written, (0, 0, 0, 1))
        pairs = keys[:, :, keys.shape[2] - window :]  # of the last c tokens, the oldest first
        error = -values[:, :, t : t + window]
        if objective == "l2":
            error = error + kernel(pairs, keys, scale) @ written  # M_{t-1} phi(k) - v (ATLAS Eq 27)
        update = step_size[:, :, t].flip(-1)[..., None] * error
        before = keys.shape[2] - window
        written = log_retention[:, :, t, None, None].exp() * written
        written = written - torch.nn.functional.pad(update, (0, 0, before, 0))
        outputs.append(kernel(query[:, :, t : t + 1], keys, scale) @ written)
    return torch.cat(outputs, dim=2), keys, written
