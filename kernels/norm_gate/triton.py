"""The norm and the gate in one pass, in Triton.

A program holds a tile of some rows, whole, in registers: norms are sums along them, and nothing is read twice. There is
one forward kernel, for a token as for a sequence. The backward makes norms and gate anew from the inputs; each of at
most `PARTS` programs walks tiles and sums its share of the weights' gradients in registers.

On the chip: a tile of `TILE` numbers of x, the gate and y forward, of these, their gradients and the gradient of y
backward, 16 numbers of each for every thread; no shared memory but for sums along rows.

Bytes of an element of s bytes: forward `3 s` (x and gate in, y out), backward `5 s` (x, gate and dy in, dx and dgate
out), and `4 PARTS` for each column's weight at most. Operations: about 10 and 25. Memory is the floor: at 3.35 TB/s
(H100) and bfloat16 1.8 ps forward and 3.0 ps backward per element, so 11 and 19 us for 4096 tokens of 1536 channels. By
torch's own functions it is 7 passes forward instead of 3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.norm_gate import MAX_WIDTH
from memzoo.kernels.triton_support import contiguous, gradients_like, launch, tile, wanted

TILE = 2048
"""Numbers of a tile: 16 for each of 128 threads, as two loads of 16 bytes in bfloat16; a wider row is a tile of
its own, with more threads."""
PARTS = 1024
"""Programs of the backward: eight for each of an H100's 132 processors, and few enough that their sums of the weights'
gradients are little beside the rows."""


def norm_gate(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor,
    gate_weight: Tensor | None,
    activation: str,
    scale: float,
    eps: float,
) -> Tensor:
    """See `memzoo.kernels.norm_gate.norm_gate`."""
    return _gated(x, weight, gate, gate_weight, activation == "silu", scale, eps)


@triton.jit
def _place(i, R, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Offsets and mask of the i-th tile of rows, `[BR, BW]`."""
    row, column = tl.cast(i, tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BW).to(tl.int64)
    return row[:, None] * W + column[None, :], (row < R)[:, None] & (column < W)[None, :]


@triton.jit
def _weight(p_weight, W: tl.constexpr, BW: tl.constexpr):
    """`[1, BW]`."""
    column = tl.arange(0, BW).to(tl.int64)
    return tl.load(p_weight + column, mask=column < W, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _shrink(x, W: tl.constexpr, EPS: tl.constexpr):
    """`1 / sqrt(mean(x^2) + eps)` of each row, `[BR, 1]`."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / W + EPS)[:, None]


@triton.jit(do_not_specialize=["R"])
def _forward_kernel(
    p_x,
    p_weight,
    p_gate,
    p_gate_weight,
    p_y,
    R,
    W: tl.constexpr,
    SILU: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    o, mask = _place(tl.program_id(0), R, W, BR, BW)
    x = tl.load(p_x + o, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(p_gate + o, mask=mask, other=0.0).to(tl.float32)
    if p_weight is not None:
        x *= _shrink(x, W, EPS) * _weight(p_weight, W, BW)
    if p_gate_weight is not None:
        gate *= _shrink(gate, W, EPS) * _weight(p_gate_weight, W, BW)
    opening = tl.sigmoid(gate)
    if SILU:
        opening *= gate
    tl.store(p_y + o, (SCALE * x * opening).to(p_y.dtype.element_ty), mask=mask)


@triton.jit
def _through_norm(d, x, p_weight, W: tl.constexpr, EPS: tl.constexpr, BW: tl.constexpr):
    """From the gradient `d` of a row's norm those of the row and of the weight."""
    shrink = _shrink(x, W, EPS)
    x *= shrink
    d_weight = tl.sum(d * x, axis=0)
    d *= _weight(p_weight, W, BW)
    return (d - x * (tl.sum(d * x, axis=1) / W)[:, None]) * shrink, d_weight


@triton.jit(do_not_specialize=["R"])
def _backward_kernel(
    p_dy,
    p_x,
    p_weight,
    p_gate,
    p_gate_weight,
    p_dx,
    p_dweight,
    p_dgate,
    p_dgate_weight,
    R,
    W: tl.constexpr,
    SILU: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    """Of every `num_programs`-th tile; and what these rows give to the gradients of the weights."""
    i_part, column = tl.program_id(0).to(tl.int64), tl.arange(0, BW).to(tl.int64)
    d_weight, d_gate_weight = tl.zeros([BW], tl.float32), tl.zeros([BW], tl.float32)
    for i in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        o, mask = _place(i, R, W, BR, BW)
        x = tl.load(p_x + o, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(p_gate + o, mask=mask, other=0.0).to(tl.float32)
        d_y = SCALE * tl.load(p_dy + o, mask=mask, other=0.0).to(tl.float32)
        normed, logit = x, gate
        if p_weight is not None:
            normed = x * _shrink(x, W, EPS) * _weight(p_weight, W, BW)
        if p_gate_weight is not None:
            logit = gate * _shrink(gate, W, EPS) * _weight(p_gate_weight, W, BW)
        opening = tl.sigmoid(logit)
        slope = opening * (1 - opening)
        if SILU:
            slope = opening + logit * slope
            opening *= logit
        d_x, d_gate = d_y * opening, d_y * normed * slope
        if p_weight is not None:
            d_x, more = _through_norm(d_x, x, p_weight, W, EPS, BW)
            d_weight += more
        if p_gate_weight is not None:
            d_gate, more = _through_norm(d_gate, gate, p_gate_weight, W, EPS, BW)
            d_gate_weight += more
        tl.store(p_dx + o, d_x.to(p_dx.dtype.element_ty), mask=mask)
        tl.store(p_dgate + o, d_gate.to(p_dgate.dtype.element_ty), mask=mask)
    if p_weight is not None:
        tl.store(p_dweight + i_part * W + column, d_weight, mask=column < W)
    if p_gate_weight is not None:
        tl.store(p_dgate_weight + i_part * W + column, d_gate_weight, mask=column < W)


def _sizes(x: Tensor, silu: bool, scale: float, eps: float) -> tuple[int, dict[str, Any]]:
    """How many tiles there are, and what every kernel takes besides tensors."""
    width = x.shape[-1]
    rows, block = x.shape[:-1].numel(), tile(width, MAX_WIDTH)
    sizes = {"R": rows, "W": width, "BR": max(1, TILE // block), "BW": block}
    options = {"SILU": silu, "SCALE": scale, "EPS": eps, "num_warps": 4 * max(1, block // TILE)}
    return triton.cdiv(rows, sizes["BR"]), {**sizes, **options}


def forward(
    x: Tensor, weight: Tensor | None, gate: Tensor, gate_weight: Tensor | None, silu: bool, scale: float, eps: float
) -> Tensor:
    y = _like_output(x, weight, gate, gate_weight, silu, scale, eps)
    x, weight, gate, gate_weight = contiguous(x, weight, gate, gate_weight)
    tiles, sizes = _sizes(x, silu, scale, eps)
    launch(
        _forward_kernel,
        (tiles,),
        p_x=x,
        p_weight=weight,
        p_gate=gate,
        p_gate_weight=gate_weight,
        p_y=y,
        **sizes,
    )
    return y


def backward(
    d_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor,
    gate_weight: Tensor | None,
    silu: bool,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of all inputs; that of an absent weight is empty."""
    d_y, x, weight, gate, gate_weight = contiguous(d_y, x, weight, gate, gate_weight)
    tiles, sizes = _sizes(x, silu, scale, eps)
    parts = min(tiles, PARTS)
    weights = weight, gate_weight
    shares = [None if w is None else w.new_empty(parts, sizes["W"], dtype=torch.float32) for w in weights]
    d_x, d_gate = torch.empty_like(x), torch.empty_like(gate)
    launch(
        _backward_kernel,
        (parts,),
        p_dy=d_y,
        p_x=x,
        p_weight=weight,
        p_gate=gate,
        p_gate_weight=gate_weight,
        p_dx=d_x,
        p_dweight=shares[0],
        p_dgate=d_gate,
        p_dgate_weight=shares[1],
        **sizes,
    )
    d_weight, d_gate_weight = (
        x.new_empty(0) if w is None or share is None else share.sum(0).to(w.dtype)
        for w, share in zip(weights, shares, strict=True)
    )
    return d_x, d_weight, d_gate, d_gate_weight


# What autograd and torch.compile see.

_INPUTS = "Tensor x, Tensor? weight, Tensor gate, Tensor? gate_weight, bool silu, float scale, float eps"


def _like_output(x: Tensor, weight: Tensor | None, gate: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(gate, dtype=torch.promote_types(x.dtype, gate.dtype), memory_format=torch.contiguous_format)


_gated = torch.library.custom_op("memzoo::norm_gate", forward, mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
_gated.register_fake(_like_output)
_gradient = torch.library.custom_op(
    "memzoo::norm_gate_backward",
    backward,
    mutates_args=(),
    schema=f"(Tensor d_y, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
_gradient.register_fake(lambda d_y, *inputs: gradients_like(inputs[:4], inputs[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu, ctx.scale, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _pull_back(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    return *wanted(tensors, _gradient(d_y, *tensors, ctx.silu, ctx.scale, ctx.eps)), None, None, None


_gated.register_autograd(_pull_back, setup_context=_keep)
