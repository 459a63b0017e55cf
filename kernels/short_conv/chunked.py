"""The causal depthwise convolution for blocks of tokens at once, as `W` shifted products.

In the layout `[B, T, D]` of the projections this needs no transpose, which for `W` = 4 costs more than the products.
The backward is written out: that of `W` overlapping slices would fill and add a whole block for each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.blocked import blocked
from memzoo.kernels.short_conv import ACTIVATION, Vectors, new_tail
from memzoo.kernels.unit_length import length, unit_length, widened


def short_conv(
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    lengths: Tensor | None,
    activation: str | None,
    vectors: Vectors | None,
) -> tuple[Any, Tensor]:
    """See `memzoo.kernels.short_conv.short_conv`."""
    if x.shape[1] == 1 and lengths is None and not torch.is_grad_enabled():
        return _step(x, weight, tail, activation, vectors)
    y = blocked(partial(_convolved, activation=activation), x, params=[weight], before=tail)
    tail = new_tail(x, tail, lengths)
    if vectors is None:
        return y, tail
    first, rest = y.split([vectors.channels, y.shape[2] - vectors.channels], dim=-1)
    return (unit_length(first.unflatten(-1, (-1, vectors.heads, vectors.dim)), vectors.eps), rest), tail


def _step(
    x: Tensor, weight: Tensor, tail: Tensor, activation: str | None, vectors: Vectors | None
) -> tuple[Any, Tensor]:
    """One token, in as few calls as there are: at their size it is these that take the time."""
    window = torch.cat([tail, x], dim=1)
    y, tail = (window * weight.mT).sum(1, keepdim=True), window[:, 1:]
    if activation == "silu":
        F.silu(y, inplace=True)
    if vectors is None:
        return y, tail
    heads, dim, per_head, eps = vectors
    channels = per_head * heads * dim
    first, rest = y.split_with_sizes((channels, y.shape[2] - channels), dim=-1)
    vector = widened(first).view(-1, 1, per_head, heads, dim)
    return (vector.div_(length(vector, eps)), rest), tail


def _convolved(padded: Tensor, weight: Tensor, activation: str | None) -> Tensor:
    return ACTIVATION[activation](_Convolution.apply(padded, weight))


class _Convolution(torch.autograd.Function):
    """`[B, W - 1 + L, D]` and `[D, W]` to `[B, L, D]`."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(padded, weight)
        width = weight.shape[1]
        tokens = padded.shape[1] - width + 1
        taps = weight.mT.contiguous()
        y = padded[:, width - 1 :] * taps[width - 1]
        for j in range(width - 1):
            y.addcmul_(padded[:, j : j + tokens], taps[j])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        padded, weight = ctx.saved_tensors
        width, tokens = weight.shape[1], d_y.shape[1]
        taps = weight.mT.contiguous()
        d_padded = torch.zeros_like(padded)
        d_taps = torch.empty_like(taps)
        for j in range(width):
            part = slice(j, j + tokens)
            d_padded[:, part].addcmul_(d_y, taps[j])
            d_taps[j] = (padded[:, part] * d_y).sum((0, 1))
        return d_padded, d_taps.mT
