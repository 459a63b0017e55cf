"""The gates in one pass, in Triton.

A program holds a tile of some tokens and heads and goes through their logits; what it reads of one it needs for no
other. There is one forward kernel, for a token as for a sequence. All gates are written to one buffer, each of them
whole, so that what takes one up need not copy it.

`log(1 + e)` for `e = exp(-|x|)` is `2 artanh(e / (2 + e))`, by its series: a logarithm of `1 + e` would lose what a
retention near 1 differs by from it.

Bytes of a logit of s bytes: forward `s + 4`, backward `2 s + 4`. Operations: about 20. At one token it is one launch in
place of five or more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.gates import KINDS, Decay, Gate
from memzoo.kernels.triton_support import contiguous, gradients_like, launch, tile, wanted

TILE = 512
"""Tokens and heads of a tile: four for each of 128 threads."""
MOST_HEADS = 128


def gates(logits: Tensor, kinds: tuple[Gate, ...], decay: Decay | None) -> tuple[Tensor, ...]:
    """See `memzoo.kernels.gates.gates`."""
    rows = [gate.rows for gate in kinds] + ([1] if decay is not None else [])
    each = [KINDS.index(gate.kind) for gate in kinds], [gate.scale for gate in kinds], [gate.rows for gate in kinds]
    parts = _gates(logits, *(decay or (None, None, None)), *each).split(rows)
    shape = *logits.shape[:2], parts[0].shape[1] // logits.shape[:2].numel()
    lags = [gate.lags for gate in kinds] + [0]
    return tuple(part.view(*shape, c) if c else part.view(shape) for part, c in zip(parts, lags, strict=False))


@triton.jit
def _softplus(x):
    """`max(x, 0) + log(1 + exp(-|x|))`."""
    e = tl.exp(-tl.abs(x))
    s = e / (2 + e)  # at most 1/3
    q = s * s
    series = 1 / 13 + q * (1 / 15)
    series = 1 / 9 + q * (1 / 11 + q * series)
    series = 1 / 5 + q * (1 / 7 + q * series)
    return tl.maximum(x, 0.0) + 2 * s * (1 + q * (1 / 3 + q * series))


@triton.jit
def _place(R, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):
    """Tokens `[BR, 1]`, heads `[1, BH]` and mask of this program."""
    i_h, i_r = tl.program_id(0) % tl.cdiv(H, BH), (tl.program_id(0) // tl.cdiv(H, BH)).to(tl.int64)
    row = i_r * BR + tl.arange(0, BR)[:, None]
    head = i_h * BH + tl.arange(0, BH)[None, :].to(tl.int64)
    return row, head, (row < R) & (head < H)


@triton.jit(do_not_specialize=["R"])
def _forward_kernel(
    p_x,
    p_decay,
    p_log_rate,
    p_bias,
    p_y,
    R,
    H: tl.constexpr,
    G: tl.constexpr,
    OF: tl.constexpr,
    SCALES: tl.constexpr,
    LAGS: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
):
    """`OF` says of each gate which kind it is."""
    row, head, mask = _place(R, H, BR, BH)
    place, size = row * H + head, tl.cast(R, tl.int64) * H
    p_x += row * (G * H) + head
    for n in tl.static_range(len(OF)):
        for lag in tl.static_range(LAGS[n]):
            x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
            if OF[n] == 0:
                y = SCALES[n] * tl.sigmoid(x)
            elif OF[n] == 1:
                y = -_softplus(-x)
            else:
                y = -_softplus(x)
            tl.store(p_y + place * LAGS[n] + lag, y, mask=mask)
            p_x += H
        p_y += size * LAGS[n]
    if p_decay is not None:
        z = tl.load(p_decay + place, mask=mask, other=0.0).to(tl.float32)
        bias = tl.load(p_bias + head, mask=head < H, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(p_log_rate + head, mask=head < H, other=0.0).to(tl.float32))
        tl.store(p_y + place, -rate * _softplus(z + bias), mask=mask)


@triton.jit(do_not_specialize=["R"])
def _backward_kernel(
    p_dy,
    p_x,
    p_decay,
    p_log_rate,
    p_bias,
    p_dx,
    p_ddecay,
    p_shares,
    R,
    H: tl.constexpr,
    G: tl.constexpr,
    OF: tl.constexpr,
    SCALES: tl.constexpr,
    LAGS: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
):
    """And what these tokens give to the gradients of the decay's two parameters."""
    row, head, mask = _place(R, H, BR, BH)
    place, size = row * H + head, tl.cast(R, tl.int64) * H
    p_x, p_dx = p_x + row * (G * H) + head, p_dx + row * (G * H) + head
    for n in tl.static_range(len(OF)):
        for lag in tl.static_range(LAGS[n]):
            x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(p_dy + place * LAGS[n] + lag, mask=mask, other=0.0)
            if OF[n] == 0:
                d *= SCALES[n] * tl.sigmoid(x) * tl.sigmoid(-x)
            elif OF[n] == 1:
                d *= tl.sigmoid(-x)
            else:
                d *= -tl.sigmoid(x)
            tl.store(p_dx, d.to(p_dx.dtype.element_ty), mask=mask)
            p_x, p_dx = p_x + H, p_dx + H
        p_dy += size * LAGS[n]
    if p_decay is not None:
        d = tl.load(p_dy + place, mask=mask, other=0.0)
        z = tl.load(p_decay + place, mask=mask, other=0.0).to(tl.float32)
        z += tl.load(p_bias + head, mask=head < H, other=0.0).to(tl.float32)
        d *= -tl.exp(tl.load(p_log_rate + head, mask=head < H, other=0.0).to(tl.float32))
        d_z = d * tl.sigmoid(z)
        tl.store(p_ddecay + place, d_z.to(p_ddecay.dtype.element_ty), mask=mask)
        p_shares += (tl.program_id(0) // tl.cdiv(H, BH)).to(tl.int64) * (2 * H) + head
        tl.store(p_shares, tl.sum(d * _softplus(z), axis=0)[None, :], mask=head < H)
        tl.store(p_shares + H, tl.sum(d_z, axis=0)[None, :], mask=head < H)


def _sizes(x: Tensor, kinds: list[int], scales: list[float], lags: list[int]) -> dict[str, Any]:
    """What every kernel takes besides tensors."""
    heads = x.shape[2] // sum(lags)
    BH = tile(heads, MOST_HEADS, 1)
    sizes = {"R": x.shape[:2].numel(), "H": heads, "G": sum(lags), "BR": TILE // BH, "BH": BH}
    return {**sizes, "OF": tuple(kinds), "SCALES": tuple(scales), "LAGS": tuple(lags)}


def forward(x: Tensor, decay: Tensor | None, log_rate: Tensor | None, bias: Tensor | None, *each: Any) -> Tensor:
    y = _like_output(x, decay, log_rate, bias, *each)
    x, decay, log_rate, bias = contiguous(x, decay, log_rate, bias)
    sizes = _sizes(x, *each)
    launch(
        _forward_kernel,
        (triton.cdiv(sizes["R"], sizes["BR"]), triton.cdiv(sizes["H"], sizes["BH"])),
        p_x=x,
        p_decay=decay,
        p_log_rate=log_rate,
        p_bias=bias,
        p_y=y,
        **sizes,
    )
    return y


def backward(
    d_y: Tensor, x: Tensor, decay: Tensor | None, log_rate: Tensor | None, bias: Tensor | None, *each: Any
) -> tuple[Tensor, ...]:
    """Gradients of all tensors; that of an absent one is empty."""
    d_y, x, decay, log_rate, bias = contiguous(d_y, x, decay, log_rate, bias)
    sizes = _sizes(x, *each)
    parts = triton.cdiv(sizes["R"], sizes["BR"])
    d_x = torch.empty_like(x)
    d_decay = None if decay is None else torch.empty_like(decay)
    shares = None if decay is None else x.new_empty(parts, 2, sizes["H"], dtype=torch.float32)
    launch(
        _backward_kernel,
        (parts, triton.cdiv(sizes["H"], sizes["BH"])),
        p_dy=d_y,
        p_x=x,
        p_decay=decay,
        p_log_rate=log_rate,
        p_bias=bias,
        p_dx=d_x,
        p_ddecay=d_decay,
        p_shares=shares,
        **sizes,
    )
    if d_decay is None or shares is None or log_rate is None or bias is None:
        return d_x, *(x.new_empty(0) for _ in range(3))
    d_rate, d_bias = shares.sum(0)
    return d_x, d_decay, d_rate.to(log_rate.dtype, copy=True), d_bias.to(bias.dtype, copy=True)


# What autograd and torch.compile see.

_INPUTS = "Tensor x, Tensor? decay, Tensor? log_rate, Tensor? bias, int[] kinds, float[] scales, int[] lags"


def _like_output(x: Tensor, decay: Tensor | None, *others: Any) -> Tensor:
    """A row for each logit of a head, the decay's last, of all tokens and heads."""
    rows = sum(others[-1])
    return x.new_empty(rows + (decay is not None), x.numel() // rows, dtype=torch.float32)


_gates = torch.library.custom_op("memzoo::gates", forward, mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
_gates.register_fake(_like_output)
_gradient = torch.library.custom_op(
    "memzoo::gates_backward",
    backward,
    mutates_args=(),
    schema=f"(Tensor d_y, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
_gradient.register_fake(lambda d_y, *inputs: gradients_like(inputs[:4], inputs[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.each = inputs[4:]
    ctx.save_for_backward(*inputs[:4])


def _pull_back(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    return *wanted(tensors, _gradient(d_y, *tensors, *ctx.each)), None, None, None


_gates.register_autograd(_pull_back, setup_context=_keep)
