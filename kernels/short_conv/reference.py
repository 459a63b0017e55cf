"""The causal depthwise convolution, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.short_conv import ACTIVATION, Vectors, new_tail
from memzoo.kernels.unit_length import widened


def short_conv(
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    lengths: Tensor | None,
    activation: str | None,
    vectors: Vectors | None,
) -> tuple[Any, Tensor]:
    """See `memzoo.kernels.short_conv.short_conv`."""
    width = weight.shape[1]
    window = [tail[:, j] for j in range(width - 1)]
    outputs = []
    for t in range(x.shape[1]):
        window.append(x[:, t])
        outputs.append(sum((weight[:, j] * window[t + j] for j in range(width)), torch.zeros_like(x[:, t])))
    y = ACTIVATION[activation](torch.stack(outputs, dim=1))
    tail = new_tail(x, tail, lengths)
    if vectors is None:
        return y, tail
    first, rest = y[..., : vectors.channels], y[..., vectors.channels :]
    return (_unit(widened(first).unflatten(-1, (-1, vectors.heads, vectors.dim)), vectors.eps), rest), tail


def _unit(y: Tensor, eps: float) -> Tensor:
    """`y / max(|y|, 1e-6)`, or `y / sqrt(|y|^2 + eps)`."""
    square = y.square().sum(-1, keepdim=True)
    return y / ((square + eps).sqrt() if eps else square.clamp(min=1e-12).sqrt())
