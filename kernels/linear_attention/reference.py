"""Gated linear attention, token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `memzoo.kernels.linear_attention.linear_attention`."""
    outputs = []
    for t in range(query.shape[1]):
        if log_retention is not None:
            state = log_retention[:, t].exp()[..., None, None] * state
        for j in range(key.shape[2]):
            state = state + key[:, t, j, :, :, None] * value[:, t, j, :, None, :]
        outputs.append((state * query[:, t, ..., None]).sum(-2))
    return torch.stack(outputs, dim=1), state
