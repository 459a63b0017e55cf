"""The causal depthwise convolution for blocks of tokens at once, as `W` shifted products.

In the layout `[B, T, D]` of the projections this needs no transpose, which for `W` = 4 costs more than the products.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from memzoo.kernels.blocked import blocked
from memzoo.kernels.short_conv import ACTIVATION, new_tail


def short_conv(
    x: Tensor, weight: Tensor, tail: Tensor, lengths: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """See `memzoo.kernels.short_conv.short_conv`."""
    if x.shape[1] == 1 and lengths is None:
        window = torch.cat([tail, x], dim=1)
        return ACTIVATION[activation]((window * weight.mT).sum(1, keepdim=True)), window[:, 1:].clone()
    y = blocked(partial(_convolved, activation=activation), x, params=[weight], before=tail)
    return y, new_tail(x, tail, lengths)


def _convolved(padded: Tensor, weight: Tensor, activation: str | None) -> Tensor:
    width = weight.shape[1]
    tokens = padded.shape[1] - width + 1
    y = padded[:, width - 1 :] * weight[:, width - 1]
    for j in range(width - 1):
        y = torch.addcmul(y, padded[:, j : j + tokens], weight[:, j])
    return ACTIVATION[activation](y)
