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
from memzoo.kernels.registry import cast
from memzoo.kernels.short_conv import Vectors, new_tail
from memzoo.kernels.unit_length import length, unit_gradient, unit_length, widened


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
    if block_size((x,), tail.shape[1]) == x.shape[1]:
        unit, rest, newest = _Convolution.apply(x, tail, weight, activation, vectors)
        return rest if vectors is None else (unit, rest), newest if lengths is None else new_tail(x, tail, lengths)
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
    return _Convolution.apply(padded, None, weight, activation, None)[1]


def _blocks(x: Tensor, tokens: int) -> list[slice]:
    """Tokens of the output in blocks that fit the cache of a CPU, which several passes go over."""
    whole = x.device.type != "cpu" or torch.compiler.is_compiling()
    count = 1 if whole else max(1, min(tokens, 4 * x.numel() // (3 * BLOCK_ELEMENTS)))
    size = -(-tokens // count)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _window(x: Tensor, tail: Tensor | None, block: slice, halo: int) -> Tensor:
    """A block and the `halo` tokens before it."""
    if tail is None:
        return x[:, block.start : block.stop + halo]
    if block.start >= halo:
        return x[:, block.start - halo : block.stop]
    return torch.cat([tail[:, block.start :], x[:, : block.stop]], dim=1)


class _Convolution(torch.autograd.Function):
    """Of `x` `[B, L, D]` behind the W - 1 tokens of `tail`, or without one of `x` `[B, W - 1 + L, D]`: the `vectors`,
    the other channels, activated, and the last W - 1 tokens."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tail: Tensor | None, weight: Tensor, activation: str | None, vectors: Vectors | None
    ) -> tuple[Tensor | None, ...]:
        (rows, tokens, width), halo = x.shape, weight.shape[1] - 1
        tokens -= halo if tail is None else 0
        taps, blocks = weight.mT.contiguous().unbind(), _blocks(x, tokens)
        keeps = activation == "silu" and any(ctx.needs_input_grad)
        convolved = x.new_empty(rows, tokens if keeps else blocks[0].stop, width)
        channels = 0 if vectors is None else vectors.channels
        first = x.new_empty(rows, tokens, channels)
        rest = x.new_empty(rows, tokens, width - channels)
        for block in blocks:
            window, size = _window(x, tail, block, halo), block.stop - block.start
            part = convolved[:, block] if keeps else convolved[:, :size]
            torch.mul(window[:, halo:], taps[-1], out=part)
            for j, tap in enumerate(taps[:-1]):
                part.addcmul_(window[:, j : j + size], tap)
            for y, of in ((first, part[..., :channels]), (rest, part[..., channels:]))[channels == 0 :]:
                if activation == "silu":
                    torch.ops.aten.silu.out(of, out=y[:, block])
                else:
                    y[:, block] = of
        unit, norm = None, None
        if vectors is not None:
            vector = widened(first).view(rows, tokens, vectors.per_head, vectors.heads, vectors.dim)
            norm = length(vector, vectors.eps)
            unit = vector.div_(norm)
        ctx.save_for_backward(x, tail, weight, convolved if keeps else None, unit, norm)
        ctx.vectors = vectors
        return unit, rest, None if tail is None else new_tail(x, tail, None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_unit: Tensor, d_rest: Tensor, d_tail: Tensor | None) -> tuple[Tensor | None, ...]:
        x, tail, weight, convolved, unit, norm = ctx.saved_tensors
        (rows, tokens, _), halo, vectors = d_rest.shape, weight.shape[1] - 1, ctx.vectors
        taps, blocks = weight.mT.contiguous().unbind(), _blocks(x, tokens)
        d_weight = torch.zeros_like(weight.mT, dtype=torch.promote_types(weight.dtype, torch.float32))
        d_taps = d_weight.unbind()
        d_padded = x.new_empty(rows, halo + tokens, x.shape[2])
        d_padded[:, :halo] = 0
        product = torch.empty_like(d_padded[:, blocks[0]])
        if vectors is not None:
            d_first = cast(unit_gradient(d_unit, unit, norm, vectors.eps).flatten(2), x.dtype)
        for block in blocks:
            window, size = _window(x, tail, block, halo), block.stop - block.start
            parts = [d_rest[:, block]] if vectors is None else [d_first[:, block], d_rest[:, block]]
            if convolved is not None:
                d, widths = torch.empty_like(convolved[:, block]), [part.shape[-1] for part in parts]
                for part, of, to in zip(parts, *(y.split(widths, -1) for y in (convolved[:, block], d)), strict=True):
                    torch.ops.aten.silu_backward.grad_input(part, of, grad_input=to)
            else:
                d = parts[0] if vectors is None else torch.cat(parts, dim=-1)
            d_window = d_padded[:, block.start : block.stop + halo]
            d_window[:, halo:] = 0  # the others have been written to
            for j, tap in enumerate(taps):
                d_window[:, j : j + size].addcmul_(d, tap)
                torch.mul(window[:, j : j + size], d, out=product[:, :size])
                d_taps[j].add_(product[:, :size].sum((0, 1), dtype=d_weight.dtype))
        if d_tail is not None:
            d_padded[:, tokens:] += d_tail
        d_x, d_before = (d_padded, None) if tail is None else (d_padded[:, halo:], d_padded[:, :halo])
        return d_x, d_before, d_weight.mT.to(weight.dtype), None, None
