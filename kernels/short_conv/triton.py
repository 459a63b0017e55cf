"""The causal depthwise convolution in Triton.

Each program makes a tile of `BT` tokens x `BD` channels, its taps in registers, no shared memory but for sums along
vectors. It reads the tile W times, shifted by a token, of which the first read comes from device memory and the others
from the first-level cache. Where channels are unit vectors the tile's are those of one vector, whole.

Bytes, for an element of s bytes: forward `2 s` per token and channel (x in, y out; of a vector `s + 4`), backward `3 s`
(x and dy in, dx out; of a vector `2 s + 4`), with 4 W bytes of partial sums for the filters per `BT` tokens and
channel. Operations: forward 2 W, backward
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

from memzoo.kernels.short_conv import MAX_DIM, Vectors, new_tail
from memzoo.kernels.triton_support import contiguous, fresh, gradients_like, launch, tile

TOKENS, CHANNELS = 32, 128
"""Of a tile: 128 channels are whole lines of 128 bytes or more; 32 tokens keep W partial tiles in registers. Of longer
vectors it has fewer."""
NONE = Vectors(heads=1, dim=1, per_head=0)


def short_conv(
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    lengths: Tensor | None,
    activation: str | None,
    vectors: Vectors | None,
) -> tuple[Any, Tensor]:
    """See `memzoo.kernels.short_conv.short_conv`."""
    form = activation == "silu", *(NONE if vectors is None else vectors)
    if x.shape[1] == 1 and lengths is None and not torch.is_grad_enabled():
        unit, y, tail = _step(x, weight, tail, *form)
    else:
        (unit, y), tail = _convolution(x, weight, tail, *form), new_tail(x, tail, lengths)
    return y if vectors is None else (unit.movedim(0, 2), y), tail


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
def _place(count, BT: tl.constexpr, BD: tl.constexpr, D: tl.constexpr, K: tl.constexpr):
    """Row, tokens `[BT, 1]`, group of K channels, channels `[1, BD]` and their mask of this program, of rows of `count`
    tokens."""
    i_g = tl.program_id(0) % tl.cdiv(D, K)
    i_rest = tl.program_id(0) // tl.cdiv(D, K)
    i_b = (i_rest // tl.cdiv(count, BT)).to(tl.int64)
    i_t = (i_rest % tl.cdiv(count, BT)).to(tl.int64)
    token = i_t * BT + tl.arange(0, BT)[:, None]
    lane = tl.arange(0, BD)[None, :].to(tl.int64)
    channel = i_g * K + lane
    return i_b, token, i_g, channel, (lane < K) & (channel < D)


@triton.jit
def _unit_place(i_b, token, i_g, channel, B, T, H: tl.constexpr, K: tl.constexpr):
    """Offsets of a vector in `[per_head, B, T, H, K]`."""
    return ((i_g // H * tl.cast(B, tl.int64) + i_b) * T + token) * (H * K) + channel - i_g // H * (H * K)


@triton.jit
def _shrink(square, EPS: tl.constexpr):
    """`1 / max(|y|, 1e-6)` or `1 / sqrt(|y|^2 + eps)`, of `|y|^2`."""
    if EPS == 0.0:
        return 1 / tl.maximum(tl.sqrt(square), 1e-6)
    return tl.rsqrt(square + EPS)


@triton.jit(do_not_specialize=["B", "T"])
def _forward_kernel(
    p_x,
    p_weight,
    p_tail,
    p_unit,
    p_y,
    B,
    T,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """The first N groups of K channels are vectors."""
    i_b, token, i_g, channel, mask = _place(T, BT, BD, D, K)
    y = _mixed(p_x + i_b * T * D, p_weight, p_tail + i_b * (W - 1) * D, token, channel, mask, T, D, W)
    if SILU:
        y = y * tl.sigmoid(y)
    mask &= token < T
    if N > 0:
        unit = y * _shrink(tl.sum(y * y, axis=1)[:, None], EPS)
        tl.store(p_unit + _unit_place(i_b, token, i_g, channel, B, T, H, K), unit, mask=mask & (channel < N * K))
    p_out = p_y + (i_b * T + token) * (D - N * K) + channel - N * K
    tl.store(p_out, y.to(p_y.dtype.element_ty), mask=mask & (channel >= N * K))


@triton.jit
def _pre_gradient(
    p_dunit,
    p_dy,
    p_x,
    p_weight,
    p_tail,
    i_b,
    token,
    i_g,
    channel,
    mask,
    B,
    T,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
):
    """Gradient of the sum before the activation; 0 beyond the row."""
    inside = mask & (token >= 0) & (token < T)
    p_dy += (i_b * T + token) * (D - N * K) + channel - N * K
    d_y = tl.load(p_dy, mask=inside & (channel >= N * K), other=0.0).to(tl.float32)
    if SILU or N > 0:
        pre = _mixed(p_x, p_weight, p_tail, token, channel, mask, T, D, W)
        gate = tl.sigmoid(pre) if SILU else 1.0
        if N > 0:
            p_dunit += _unit_place(i_b, token, i_g, channel, B, T, H, K)
            d_unit = tl.load(p_dunit, mask=inside & (channel < N * K), other=0.0).to(tl.float32)
            y = pre * gate
            square = tl.sum(y * y, axis=1)[:, None]
            shrink = _shrink(square, EPS)
            y *= shrink
            along = tl.sum(y * d_unit, axis=1)[:, None]
            if EPS == 0.0:
                along = tl.where(tl.sqrt(square) > 1e-6, along, 0.0)
            d_y += (d_unit - y * along) * shrink
        if SILU:
            d_y *= gate * (1 + pre * (1 - gate))
    return d_y


@triton.jit(do_not_specialize=["B", "T"])
def _backward_kernel(
    p_dunit,
    p_dy,
    p_x,
    p_weight,
    p_tail,
    p_dx,
    p_dtail,
    p_dweight,
    B,
    T,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """`dx_s = sum_j weight[j] dpre_{s + W - 1 - j}` of the tail and the row, and what this program's `x_s` give to
    `dweight[j] = sum_s dpre_{s + W - 1 - j} x_s`."""
    i_b, place, i_g, channel, mask = _place(T + (W - 1), BT, BD, D, K)
    token = place - (W - 1)
    p_x, p_tail = p_x + i_b * T * D, p_tail + i_b * (W - 1) * D
    x = _padded(p_x, p_tail, token, channel, mask, T, D, W)
    d_x = tl.zeros([BT, BD], tl.float32)
    i_part = i_b * tl.cdiv(T + (W - 1), BT) + (tl.program_id(0) // tl.cdiv(D, K)) % tl.cdiv(T + (W - 1), BT)
    for j in tl.static_range(W):
        at = token + (W - 1 - j)
        d_pre = _pre_gradient(
            *(p_dunit, p_dy, p_x, p_weight, p_tail, i_b, at, i_g, channel, mask, B, T, D, W),
            *(SILU, H, K, N, EPS),
        )
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


@triton.jit(do_not_specialize=["B"])
def _step_kernel(
    p_x,
    p_weight,
    p_tail,
    p_unit,
    p_y,
    p_new,
    B,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    EPS: tl.constexpr,
    BD: tl.constexpr,
):
    """One token: its output, and the tail moved on by it."""
    i_g, i_b = tl.program_id(0) % tl.cdiv(D, K), (tl.program_id(0) // tl.cdiv(D, K)).to(tl.int64)
    lane = tl.arange(0, BD).to(tl.int64)
    channel = i_g * K + lane
    mask = (lane < K) & (channel < D)
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
    if N > 0:
        unit = y * _shrink(tl.sum(y * y, axis=0), EPS)
        tl.store(p_unit + _unit_place(i_b, 0, i_g, channel, B, 1, H, K), unit, mask=mask & (channel < N * K))
    p_out = p_y + i_b * (D - N * K) + channel - N * K
    tl.store(p_out, y.to(p_y.dtype.element_ty), mask=mask & (channel >= N * K))


def _sizes(x: Tensor, weight: Tensor, silu: bool, heads: int, dim: int, per_head: int, eps: float) -> dict[str, Any]:
    """What every kernel takes besides tensors, but for tokens."""
    BD = tile(dim, MAX_DIM) if per_head else tile(x.shape[2], CHANNELS)
    form = {"SILU": silu, "H": heads, "K": dim if per_head else BD, "N": per_head * heads, "EPS": eps}
    return {"B": x.shape[0], "D": x.shape[2], "W": weight.shape[1], **form, "BD": BD}


def forward(x: Tensor, weight: Tensor, tail: Tensor, *form: Any) -> tuple[Tensor, Tensor]:
    x, weight, tail = contiguous(x, weight, tail.to(x.dtype))
    unit, y = _like_output(x, weight, tail, *form)
    sizes = _sizes(x, weight, *form)
    BT = min(TOKENS, TOKENS * CHANNELS // sizes["BD"])
    launch(
        _forward_kernel,
        (x.shape[0], triton.cdiv(x.shape[1], BT), triton.cdiv(x.shape[2], sizes["K"])),
        p_x=x,
        p_weight=weight,
        p_tail=tail,
        p_unit=unit,
        p_y=y,
        T=x.shape[1],
        BT=BT,
        **sizes,
    )
    return unit, y


def backward(
    d_unit: Tensor, d_y: Tensor, x: Tensor, weight: Tensor, given_tail: Tensor, *form: Any
) -> tuple[Tensor, Tensor, Tensor]:
    d_unit, d_y, x, weight, tail = contiguous(d_unit, d_y, x, weight, given_tail.to(x.dtype))
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    sizes = _sizes(x, weight, *form)
    BT = min(TOKENS, TOKENS * CHANNELS // sizes["BD"]) // 2
    parts = triton.cdiv(tokens + width - 1, BT)
    d_x, d_tail = torch.empty_like(x), fresh(given_tail)
    d_taps = x.new_empty(batch * parts, width, channels, dtype=torch.float32)
    launch(
        _backward_kernel,
        (batch, parts, triton.cdiv(channels, sizes["K"])),
        p_dunit=d_unit,
        p_dy=d_y,
        p_x=x,
        p_weight=weight,
        p_tail=tail,
        p_dx=d_x,
        p_dtail=d_tail,
        p_dweight=d_taps,
        T=tokens,
        BT=BT,
        **sizes,
    )
    return d_x, d_taps.sum(0).mT.contiguous().to(weight.dtype), d_tail


def one_token(x: Tensor, weight: Tensor, tail: Tensor, *form: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, tail = contiguous(x, weight, tail)
    (unit, y), new = _like_output(x, weight, tail, *form), torch.empty_like(tail)
    sizes = _sizes(x, weight, *form)
    launch(
        _step_kernel,
        (x.shape[0], triton.cdiv(x.shape[2], sizes["K"])),
        num_warps=1,
        p_x=x,
        p_weight=weight,
        p_tail=tail,
        p_unit=unit,
        p_y=y,
        p_new=new,
        **sizes,
    )
    return unit, y, new


def _like_output(x: Tensor, weight: Tensor, tail: Tensor, *form: Any) -> tuple[Tensor, Tensor]:
    """The vectors `[per_head, B, T, H, K]`, so that queries and keys are whole tensors, and the other channels."""
    _, heads, dim, per_head, _ = form
    batch, tokens, channels = x.shape
    y = x.new_empty(batch, tokens, channels - per_head * heads * dim, dtype=torch.promote_types(x.dtype, weight.dtype))
    return x.new_empty(per_head, batch, tokens, heads, dim, dtype=torch.float32), y


# What autograd and torch.compile see: three operators that say what shapes they return.

_INPUTS = "Tensor x, Tensor weight, Tensor tail, bool silu, int heads, int dim, int per_head, float eps"
_convolution = torch.library.custom_op(
    "memzoo::short_conv", forward, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
_convolution.register_fake(_like_output)
_gradient = torch.library.custom_op(
    "memzoo::short_conv_backward",
    backward,
    mutates_args=(),
    schema=f"(Tensor d_unit, Tensor d_y, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
)
_gradient.register_fake(lambda d_unit, d_y, *inputs: gradients_like(inputs[:3], inputs[2]))
_step = torch.library.custom_op(
    "memzoo::short_conv_step", one_token, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor)"
)
_step.register_fake(lambda *inputs: (*_like_output(*inputs), fresh(inputs[2])))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.form = inputs[3:]
    ctx.save_for_backward(*inputs[:3])


def _pull_back(ctx: Any, d_unit: Tensor, d_y: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradient(d_unit, d_y, *ctx.saved_tensors, *ctx.form), *[None] * len(ctx.form)


_convolution.register_autograd(_pull_back, setup_context=_keep)
