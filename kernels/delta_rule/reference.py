"""The delta rule, token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    erase_key: Tensor | None,
    erase_after_decay: bool,
) -> tuple[Tensor, Tensor]:
    """See `memzoo.kernels.delta_rule.delta_rule`."""
    erase = key if erase_key is None else erase_key
    outputs = []
    for t in range(query.shape[1]):
        decayed = state if log_retention is None else log_retention[:, t].exp()[..., None, None] * state
        held = ((decayed if erase_after_decay else state) * erase[:, t, ..., None]).sum(-2)  # p^T S'
        delta = strength[:, t, :, None] * (value[:, t] - held)
        state = decayed + key[:, t, ..., None] * delta[..., None, :]
        outputs.append((state * query[:, t, ..., None]).sum(-2))
    return torch.stack(outputs, dim=1), state
