"""The causal depthwise convolution, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.short_conv import ACTIVATION, new_tail


def short_conv(
    x: Tensor, weight: Tensor, tail: Tensor, lengths: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """See `memzoo.kernels.short_conv.short_conv`."""
    width = weight.shape[1]
    window = [tail[:, j] for j in range(width - 1)]
    outputs = []
    for t in range(x.shape[1]):
        window.append(x[:, t])
        outputs.append(sum((weight[:, j] * window[t + j] for j in range(width)), torch.zeros_like(x[:, t])))
    return ACTIVATION[activation](torch.stack(outputs, dim=1)), new_tail(x, tail, lengths)
