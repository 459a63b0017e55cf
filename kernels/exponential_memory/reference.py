"""The memory on exponential features, token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.exponential_memory import ExponentialState, kernel
from memzoo.kernels.exponential_memory.places import Tokens, by_torch


@by_torch
def exponential_memory(tokens: Tokens, state: ExponentialState, scale: float, objective: str) -> tuple[Tensor, Tensor]:
    """Outputs `[B, H, T, V]`, and what is written at the keys of the pairs, `[B, H, c - 1 + T, V]`."""
    window, outputs = tokens.step_size.shape[-1], []
    held = state.keys.shape[2]
    known = torch.cat([state.keys, tokens.keys[:, :, : window - 1]], dim=2)  # the last c - 1, where pairs write, again
    written = F.pad(state.written, (0, 0, 0, window - 1))
    for t in range(tokens.query.shape[2]):
        pairs = slice(t, t + window)  # of the last c tokens, the oldest first
        error = -tokens.values[:, :, pairs]
        if objective == "l2":
            error = error + kernel(tokens.keys[:, :, pairs], known, scale) @ written  # M_{t-1} phi(k) - v (ATLAS Eq 27)
        update = tokens.step_size[:, :, t].flip(-1)[..., None] * error
        known = torch.cat([known, tokens.keys[:, :, t + window - 1, None]], dim=2)
        written = tokens.log_retention[:, :, t, None, None].exp() * F.pad(written, (0, 0, 0, 1))
        written = written - F.pad(update, (0, 0, known.shape[2] - window, 0))
        outputs.append(kernel(tokens.query[:, :, t, None], known, scale) @ written)
    return torch.cat(outputs, dim=2), written[:, :, held:]
