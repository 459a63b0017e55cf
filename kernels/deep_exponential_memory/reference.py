"""The deep memory on exponential features, token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.deep_exponential_memory import DeepExponentialState, answer, before
from memzoo.kernels.deep_memory.activations import ACTIVATION


def deep_exponential_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor,
    step_size: Tensor,
    state: DeepExponentialState,
    scale: float,
    objective: str,
    activation: str,
    max_gradient_norm: float,
) -> tuple[Tensor, DeepExponentialState]:
    """Outputs `[B, H, T, V]` and the memory after them, with a key per token; inputs are `[B, H, T, ...]`."""
    keys, written, first, second = state[:4]
    values = torch.cat([state.recent_values, value], dim=2)
    window, outputs = step_size.shape[-1], []
    for t in range(query.shape[2]):
        known, keys = keys, torch.cat([keys, key[:, :, t : t + 1]], dim=2)
        pairs = keys[:, :, keys.shape[2] - window :]  # of the last c tokens, the oldest first
        # u_i at M_{t-1}: error act^T for W_1, delta phi(k)^T for W_2.
        act, slope = ACTIVATION[activation].derivatives(before(pairs, known, written, first, scale), 1)
        error = -values[:, :, t : t + window]
        if objective == "l2":
            error = error + pairs[..., : error.shape[-1]] + act @ second.mT  # M_{t-1}(k) - v
        delta = slope * (error @ second)
        square = error.square().sum(-1) * act.square().sum(-1) + delta.square().sum(-1)  # |phi(k)| = 1
        shorten = (square / max_gradient_norm**2).clamp(min=1).rsqrt()
        gate = (step_size[:, :, t].flip(-1) * shorten)[..., None]
        keep = log_retention[:, :, t, None, None].exp()
        first, second = keep * first, keep * second - (gate * error).mT @ act
        written = keep * F.pad(written, (0, 0, 0, 1)) - F.pad(gate * delta, (0, 0, keys.shape[2] - window, 0))
        outputs.append(answer(query[:, :, t : t + 1], keys, written, first, second, scale, activation))
    return torch.cat(outputs, dim=2), state._replace(keys=keys, written=written, first=first, second=second)
