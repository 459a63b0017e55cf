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

from memzoo.kernels.blocked import BLOCK_ELEMENTS, block_size, blocked
from memzoo.kernels.short_conv import Vectors, new_tail
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
    if block_size((x,), tail.shape[1]) < x.shape[1]:
        y = blocked(partial(_convolved, activation=activation), x, params=[weight], before=tail)
        tail = new_tail(x, tail, lengths)
    else:
        y, newest = _Convolution.apply(torch.cat([tail, x], dim=1), weight, activation)
        tail = newest if lengths is None else new_tail(x, tail, lengths)
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
    return _Convolution.apply(padded, weight, activation)[0]


def _blocks(padded: Tensor, width: int) -> list[slice]:
    """Tokens of the output in blocks that fit the cache of a CPU, which several passes go over."""
    tokens = padded.shape[1] - width + 1
    whole = padded.device.type != "cpu" or torch.compiler.is_compiling()
    count = 1 if whole else max(1, min(tokens, 4 * padded.numel() // (3 * BLOCK_ELEMENTS)))
    size = -(-tokens // count)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _shifted(block: slice, by: int) -> slice:
    return slice(block.start + by, block.stop + by)


class _Convolution(torch.autograd.Function):
    """`[B, W - 1 + L, D]` and `[D, W]` to `[B, L, D]`, activated, and the last W - 1 tokens."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
        width = weight.shape[1]
        taps = weight.mT.contiguous().unbind()
        x = padded.new_empty(padded.shape[0], padded.shape[1] - width + 1, padded.shape[2])
        y = torch.empty_like(x) if activation == "silu" and any(ctx.needs_input_grad) else x
        for block in _blocks(padded, width):
            part = x[:, block]
            torch.mul(padded[:, _shifted(block, width - 1)], taps[-1], out=part)
            for j, tap in enumerate(taps[:-1]):
                part.addcmul_(padded[:, _shifted(block, j)], tap)
            if activation == "silu":
                torch.ops.aten.silu.out(part, out=y[:, block])
        ctx.save_for_backward(padded, weight, x if y is not x else None)
        return y, padded[:, y.shape[1] :].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_tail: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, x = ctx.saved_tensors
        width, taps = weight.shape[1], weight.mT.contiguous().unbind()
        d_weight = torch.zeros_like(weight.mT, dtype=torch.promote_types(weight.dtype, torch.float32))
        d_taps = d_weight.unbind()
        d_padded, blocks = torch.empty_like(padded), _blocks(padded, width)
        d_padded[:, : width - 1] = 0
        product = torch.empty_like(padded[:, blocks[0]])
        for block in blocks:
            d = d_y[:, block] if x is None else torch.ops.aten.silu_backward(d_y[:, block], x[:, block])
            d_padded[:, _shifted(block, width - 1)] = 0  # the others have been written to
            for j, tap in enumerate(taps):
                part = _shifted(block, j)
                d_padded[:, part].addcmul_(d, tap)
                torch.mul(padded[:, part], d, out=product[:, : d.shape[1]])
                d_taps[j].add_(product[:, : d.shape[1]].sum((0, 1), dtype=d_weight.dtype))
        d_padded[:, d_y.shape[1] :] += d_tail
        return d_padded, d_weight.mT.to(weight.dtype), None
