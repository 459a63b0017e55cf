"""The causal depthwise convolution in Triton.

Each program makes a tile of `BT` tokens x `BD` channels, its taps in registers, no shared memory. It reads the tile W
times, shifted by a token, of which the first read comes from device memory and the others from the first-level cache.

Bytes, for an element of s bytes: forward `2 s` per token and channel (x in, y out), backward `3 s` (x and dy in, dx
out), with 4 W bytes of partial sums for the filters per `BT` tokens and channel. Operations: forward 2 W, backward
`2 W^2 + 4 W`, since each token's pre-activation is made anew for each of the W inputs that it read. Both are bound by
memory: at 3.35 TB/s (H100) and bfloat16 1.2 ps forward and 1.8 ps backward per token and channel are the floor, so 20
and 30 us for 4096 tokens of 4096 channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.short_conv import new_tail
from memzoo.kernels.triton_support import contiguous, fresh, gradients_like, launch, tile

TOKENS, CHANNELS = 32, 128
"""Of a tile: 128 channels are whole lines of 128 bytes or more; 32 tokens keep W partial tiles in registers."""


def short_conv(
    x: Tensor, weight: Tensor, tail: Tensor, lengths: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """See `memzoo.kernels.short_conv.short_conv`."""
    if x.shape[1] == 1 and lengths is None and not torch.is_grad_enabled():
        return _step(x, weight, tail, activation == "silu")
    return _convolution(x, weight, tail, activation == "silu"), new_tail(x, tail, lengths)


@triton.jit
def _padded(p_x, p_tail, token, channel, mask, T, D: tl.constexpr, W: tl.constexpr):
    """Tokens `[BT, 1]` from `1 - W` to `T - 1` of a row, those below 0 from its tail; 0 elsewhere."""
    p = tl.where(token < 0, p_tail + (token + (W - 1)) * D, p_x + token * D) + channel
    return tl.load(p, mask=mask & (token >= 1 - W) & (token < T), other=0.0).to(tl.float32)


@triton.jit
def _tap(p_weight, j, channel, D: tl.constexpr, W: tl.constexpr):
    return tl.load(p_weight + channel * W + j, mask=channel < D, other=0.0).to(tl.float32)


@triton.jit
def _mixed(p_x, p_weight, p_tail, token, channel, mask, T, D: tl.constexpr, W: tl.constexpr):
    """`sum_j weight[d, j] x[t - W + 1 + j, d]`."""
    y = _padded(p_x, p_tail, token, channel, mask, T, D, W) * _tap(p_weight, W - 1, channel, D, W)
    for j in tl.static_range(W - 1):
        y += _padded(p_x, p_tail, token + (j + 1 - W), channel, mask, T, D, W) * _tap(p_weight, j, channel, D, W)
    return y


@triton.jit
def _place(count, BT: tl.constexpr, BD: tl.constexpr, D: tl.constexpr):
    """Row, tokens `[BT, 1]` and channels `[1, BD]` of this program, of rows of `count` tokens."""
    i_d = tl.program_id(0) % tl.cdiv(D, BD)
    i_rest = tl.program_id(0) // tl.cdiv(D, BD)
    i_b = (i_rest // tl.cdiv(count, BT)).to(tl.int64)
    i_t = (i_rest % tl.cdiv(count, BT)).to(tl.int64)
    token = i_t * BT + tl.arange(0, BT)[:, None]
    channel = i_d * BD + tl.arange(0, BD)[None, :].to(tl.int64)
    return i_b, token, channel


@triton.jit(do_not_specialize=["T"])
def _forward_kernel(
    p_x,
    p_weight,
    p_tail,
    p_y,
    T,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    i_b, token, channel = _place(T, BT, BD, D)
    mask = channel < D
    y = _mixed(p_x + i_b * T * D, p_weight, p_tail + i_b * (W - 1) * D, token, channel, mask, T, D, W)
    if SILU:
        y = y * tl.sigmoid(y)
    p_out = p_y + i_b * T * D + token * D + channel
    tl.store(p_out, y.to(p_y.dtype.element_ty), mask=mask & (token < T))


@triton.jit
def _pre_gradient(
    p_dy, p_x, p_weight, p_tail, token, channel, mask, T, D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr
):
    """Gradient of the sum before the activation; 0 beyond the row."""
    d_y = tl.load(p_dy + token * D + channel, mask=mask & (token >= 0) & (token < T), other=0.0).to(tl.float32)
    if SILU:
        y = _mixed(p_x, p_weight, p_tail, token, channel, mask, T, D, W)
        gate = tl.sigmoid(y)
        d_y *= gate * (1 + y * (1 - gate))
    return d_y


@triton.jit(do_not_specialize=["T"])
def _backward_kernel(
    p_dy,
    p_x,
    p_weight,
    p_tail,
    p_dx,
    p_dtail,
    p_dweight,
    T,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """`dx_s = sum_j weight[j] dpre_{s + W - 1 - j}` of the tail and the row, and what this program's `x_s` give to
    `dweight[j] = sum_s dpre_{s + W - 1 - j} x_s`."""
    i_b, place, channel = _place(T + (W - 1), BT, BD, D)
    token, mask = place - (W - 1), channel < D
    p_dy, p_x, p_tail = p_dy + i_b * T * D, p_x + i_b * T * D, p_tail + i_b * (W - 1) * D
    x = _padded(p_x, p_tail, token, channel, mask, T, D, W)
    d_x = tl.zeros([BT, BD], tl.float32)
    i_part = i_b * tl.cdiv(T + (W - 1), BT) + (tl.program_id(0) // tl.cdiv(D, BD)) % tl.cdiv(T + (W - 1), BT)
    for j in tl.static_range(W):
        at = token + (W - 1 - j)
        d_pre = _pre_gradient(p_dy, p_x, p_weight, p_tail, at, channel, mask, T, D, W, SILU)
        d_x += d_pre * _tap(p_weight, j, channel, D, W)
        d_tap = tl.sum(d_pre * x, axis=0)[None, :]
        tl.store(p_dweight + (i_part * W + j) * D + channel, d_tap, mask=mask)
    tl.store(
        p_dx + i_b * T * D + token * D + channel,
        d_x.to(p_dx.dtype.element_ty),
        mask=mask & (token >= 0) & (token < T),
    )
    tl.store(
        p_dtail + i_b * (W - 1) * D + place * D + channel, d_x.to(p_dtail.dtype.element_ty), mask=mask & (token < 0)
    )


@triton.jit
def _step_kernel(
    p_x,
    p_weight,
    p_tail,
    p_y,
    p_new,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BD: tl.constexpr,
):
    """One token: its output, and the tail moved on by it."""
    i_b = (tl.program_id(0) // tl.cdiv(D, BD)).to(tl.int64)
    channel = (tl.program_id(0) % tl.cdiv(D, BD)) * BD + tl.arange(0, BD).to(tl.int64)
    mask = channel < D
    p_tail, p_new = p_tail + i_b * (W - 1) * D + channel, p_new + i_b * (W - 1) * D + channel
    x = tl.load(p_x + i_b * D + channel, mask=mask, other=0.0).to(tl.float32)
    y = x * _tap(p_weight, W - 1, channel, D, W)
    for j in tl.static_range(W - 1):
        old = tl.load(p_tail + j * D, mask=mask, other=0.0).to(tl.float32)
        y += old * _tap(p_weight, j, channel, D, W)
        if j > 0:
            tl.store(p_new + (j - 1) * D, old.to(p_new.dtype.element_ty), mask=mask)
    if W > 1:
        tl.store(p_new + (W - 2) * D, x.to(p_new.dtype.element_ty), mask=mask)
    if SILU:
        y = y * tl.sigmoid(y)
    tl.store(p_y + i_b * D + channel, y.to(p_y.dtype.element_ty), mask=mask)


def forward(x: Tensor, weight: Tensor, tail: Tensor, silu: bool) -> Tensor:
    x, weight, tail = contiguous(x, weight, tail.to(x.dtype))
    batch, tokens, channels = x.shape
    y = _like_output(x, weight, tail, silu)
    BT, BD = TOKENS, tile(channels, CHANNELS)
    launch(
        _forward_kernel,
        (batch, triton.cdiv(tokens, BT), triton.cdiv(channels, BD)),
        p_x=x,
        p_weight=weight,
        p_tail=tail,
        p_y=y,
        T=tokens,
        D=channels,
        W=weight.shape[1],
        SILU=silu,
        BT=BT,
        BD=BD,
    )
    return y


def backward(d_y: Tensor, x: Tensor, weight: Tensor, given_tail: Tensor, silu: bool) -> tuple[Tensor, Tensor, Tensor]:
    d_y, x, weight, tail = contiguous(d_y, x, weight, given_tail.to(x.dtype))
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    BT, BD = TOKENS // 2, tile(channels, CHANNELS)
    parts = triton.cdiv(tokens + width - 1, BT)
    d_x, d_tail = torch.empty_like(x), fresh(given_tail)
    d_taps = x.new_empty(batch * parts, width, channels, dtype=torch.float32)
    launch(
        _backward_kernel,
        (batch, parts, triton.cdiv(channels, BD)),
        p_dy=d_y,
        p_x=x,
        p_weight=weight,
        p_tail=tail,
        p_dx=d_x,
        p_dtail=d_tail,
        p_dweight=d_taps,
        T=tokens,
        D=channels,
        W=width,
        SILU=silu,
        BT=BT,
        BD=BD,
    )
    return d_x, d_taps.sum(0).mT.to(weight.dtype, memory_format=torch.contiguous_format), d_tail


def one_token(x: Tensor, weight: Tensor, tail: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    x, weight, tail = contiguous(x, weight, tail)
    batch, _, channels = x.shape
    y, new = _like_output(x, weight, tail, silu), torch.empty_like(tail)
    BD = tile(channels, CHANNELS)
    launch(
        _step_kernel,
        (batch, triton.cdiv(channels, BD)),
        num_warps=1,
        p_x=x,
        p_weight=weight,
        p_tail=tail,
        p_y=y,
        p_new=new,
        D=channels,
        W=weight.shape[1],
        SILU=silu,
        BD=BD,
    )
    return y, new


def _like_output(x: Tensor, weight: Tensor, tail: Tensor, silu: bool) -> Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype), memory_format=torch.contiguous_format)


# What autograd and torch.compile see: three operators that say what shapes they return.

_convolution = torch.library.custom_op(
    "memzoo::short_conv", forward, mutates_args=(), schema="(Tensor x, Tensor weight, Tensor tail, bool silu) -> Tensor"
)
_convolution.register_fake(_like_output)
_gradient = torch.library.custom_op(
    "memzoo::short_conv_backward",
    backward,
    mutates_args=(),
    schema="(Tensor d_y, Tensor x, Tensor weight, Tensor tail, bool silu) -> (Tensor, Tensor, Tensor)",
)
_gradient.register_fake(lambda d_y, *inputs: gradients_like(inputs[:3], inputs[2]))
_step = torch.library.custom_op(
    "memzoo::short_conv_step",
    one_token,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor tail, bool silu) -> (Tensor, Tensor)",
)
_step.register_fake(lambda x, weight, tail, silu: (_like_output(x, weight, tail, silu), fresh(tail)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _pull_back(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradient(d_y, *ctx.saved_tensors, ctx.silu), None


_convolution.register_autograd(_pull_back, setup_context=_keep)
