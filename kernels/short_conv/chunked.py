"""The causal depthwise convolution for all tokens at once, as `W` shifted products.

In the layout `[B, T, D]` of the projections this needs no transpose, which for `W` = 4 costs more than the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.short_conv import new_tail


def short_conv(x: Tensor, weight: Tensor, tail: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `memzoo.kernels.short_conv.short_conv`."""
    tokens, width = x.shape[1], weight.shape[1]
    padded = torch.cat([tail, x], dim=1)
    if tokens == 1:
        return (padded * weight.mT).sum(1, keepdim=True), new_tail(padded, width - 1, lengths)
    y = padded[:, width - 1 :] * weight[:, width - 1]
    for j in range(width - 1):
        y = torch.addcmul(y, padded[:, j : j + tokens], weight[:, j])
    return y, new_tail(padded, width - 1, lengths)
