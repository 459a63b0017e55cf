"""Comba's addresses in one pass, in Triton.

A program holds a tile of whole vectors q and k in registers, so that lengths are sums along them. The backward makes
everything anew from the inputs and gives each vector's share of the gradients of its two numbers, which autograd adds
up where these are a head's parameters.

Bytes of a coordinate of s bytes: forward `2 s` in and 8 (paper) or 12 (fla) out in float32, backward these and the two
gradients of q and k; operations: about 10 and 30. At 3.35 TB/s (H100) and float32 4.8 ps a coordinate, so 10 us for
4096 tokens of 512 key channels. It is one launch in place of three (paper) and eleven (fla).
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.addresses import Addresses
from memzoo.kernels.triton_support import contiguous, launch, tile
from memzoo.kernels.unit_length import SHORTEST

TILE = 1024
"""Coordinates of a tile: 8 of each vector for each of 128 threads."""


def addresses(query: Tensor, key: Tensor, erase: Tensor, correction: Tensor, unit_eps: float | None) -> Addresses:
    """See `memzoo.kernels.addresses.addresses`."""
    if unit_eps is None:
        read, erased, _ = _addressed(query, key, erase, correction, 0.0, False)
        return read, key, erased
    read, erased, write = _addressed(query, key, erase, correction, unit_eps, True)
    return read, write, erased if unit_eps else None


@triton.jit
def _place(R, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """Rows `[BR]`, offsets and mask `[BR, BK]` of a program's vectors."""
    row, column = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BK).to(tl.int64)
    return row, row[:, None] * K + column[None, :], (row < R)[:, None] & (column < K)[None, :]


@triton.jit
def _number(p, row, R, H: tl.constexpr, SHARED: tl.constexpr):
    """A number per vector `[BR, 1]`; `SHARED`: one per head."""
    return tl.load(p + (row % H if SHARED else row), mask=row < R, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _shrink(x, EPS: tl.constexpr, SHORTEST: tl.constexpr):
    """What scales each vector to unit length, `[BR, 1]`."""
    square = tl.sum(x * x, axis=1)
    return (tl.rsqrt(square + EPS) if EPS > 0 else 1 / tl.maximum(tl.sqrt(square), SHORTEST))[:, None]


@triton.jit
def _through_unit(d, x, EPS: tl.constexpr, SHORTEST: tl.constexpr):
    """From the gradient of `x` at unit length that of `x`."""
    shrink = _shrink(x, EPS, SHORTEST)
    y = x * shrink
    along = tl.sum(d * y, axis=1)[:, None]
    if EPS == 0:
        along = tl.where(shrink * SHORTEST < 1, along, 0.0)
    return (d - y * along) * shrink


@triton.jit(do_not_specialize=["R"])
def _forward_kernel(
    p_query,
    p_key,
    p_erase,
    p_correction,
    p_read,
    p_erased,
    p_write,
    R,
    H: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    UNIT: tl.constexpr,
    EPS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    row, at, mask = _place(R, K, BR, BK)
    q = tl.load(p_query + at, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(p_key + at, mask=mask, other=0.0).to(tl.float32)
    d = _number(p_correction, row, R, H, SHARED)
    p = tl.sigmoid(_number(p_erase, row, R, H, SHARED)) * k
    if UNIT:
        q -= d * p
        q *= _shrink(q, EPS, SHORTEST)
        tl.store(p_write + at, (k * _shrink(k, EPS, SHORTEST)).to(p_write.dtype.element_ty), mask=mask)
        p *= _shrink(p, EPS, SHORTEST)
    else:
        q -= d * k
    tl.store(p_read + at, q.to(p_read.dtype.element_ty), mask=mask)
    if not UNIT or EPS > 0:
        tl.store(p_erased + at, p.to(p_erased.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def _backward_kernel(
    p_dread,
    p_derased,
    p_dwrite,
    p_query,
    p_key,
    p_erase,
    p_correction,
    p_dquery,
    p_dkey,
    p_derase,
    p_dcorrection,
    R,
    H: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    UNIT: tl.constexpr,
    EPS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    row, at, mask = _place(R, K, BR, BK)
    k = tl.load(p_key + at, mask=mask, other=0.0).to(tl.float32)
    d = _number(p_correction, row, R, H, SHARED)
    share = tl.sigmoid(_number(p_erase, row, R, H, SHARED))
    p = share * k
    d_q = tl.load(p_dread + at, mask=mask, other=0.0).to(tl.float32)
    d_p = tl.zeros_like(k)
    if not UNIT or EPS > 0:
        d_p = tl.load(p_derased + at, mask=mask, other=0.0).to(tl.float32)
    if UNIT:
        q = tl.load(p_query + at, mask=mask, other=0.0).to(tl.float32) - d * p
        d_q = _through_unit(d_q, q, EPS, SHORTEST)
        if EPS > 0:
            d_p = _through_unit(d_p, p, EPS, SHORTEST)
        d_p -= d * d_q
        d_k = _through_unit(tl.load(p_dwrite + at, mask=mask, other=0.0).to(tl.float32), k, EPS, SHORTEST)
        d_d = -tl.sum(d_q * p, axis=1)
    else:
        d_k = -d * d_q
        d_d = -tl.sum(d_q * k, axis=1)
    d_share = tl.sum(d_p * k, axis=1)[:, None]
    tl.store(p_dquery + at, d_q.to(p_dquery.dtype.element_ty), mask=mask)
    tl.store(p_dkey + at, (d_k + share * d_p).to(p_dkey.dtype.element_ty), mask=mask)
    d_e = d_share * share * (1 - share)
    tl.store(p_derase + row[:, None], d_e.to(p_derase.dtype.element_ty), mask=(row < R)[:, None])
    tl.store(p_dcorrection + row, d_d.to(p_dcorrection.dtype.element_ty), mask=row < R)


def _given(
    query: Tensor, key: Tensor, erase: Tensor, correction: Tensor, unit_eps: float, unit: bool
) -> tuple[int, dict[str, Any]]:
    """How many programs there are, and what every kernel takes of the inputs."""
    heads, width = query.shape[2:]
    shared = all(x.stride()[:2] == (0, 0) and x.stride(2) == 1 for x in (erase, correction))
    query, key = contiguous(query, key)
    if not shared:
        erase, correction = contiguous(erase, correction)
    block = tile(width, 1024, 1)
    tall = max(1, TILE // block)
    tensors = {"p_query": query, "p_key": key, "p_erase": erase, "p_correction": correction}
    sizes = {"R": query.numel() // width, "H": heads, "K": width, "SHARED": shared, "BR": tall, "BK": block}
    options = {"UNIT": unit, "EPS": unit_eps, "SHORTEST": SHORTEST}
    return triton.cdiv(sizes["R"], tall), {**tensors, **sizes, **options}


def forward(
    query: Tensor, key: Tensor, erase: Tensor, correction: Tensor, unit_eps: float, unit: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What is read at, erased at (empty where it is written at) and written at (empty where it is the key)."""
    read, erased, write = _like_outputs(query, key, erase, correction, unit_eps, unit)
    programs, given = _given(query, key, erase, correction, unit_eps, unit)
    launch(_forward_kernel, (programs,), p_read=read, p_erased=erased, p_write=write, **given)
    return read, erased, write


def backward(
    d_read: Tensor,
    d_erased: Tensor,
    d_write: Tensor,
    query: Tensor,
    key: Tensor,
    erase: Tensor,
    correction: Tensor,
    unit_eps: float,
    unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_query, d_key, d_erase, d_correction = _like_inputs(query, key, erase, correction)
    d_read, d_erased, d_write = contiguous(d_read, d_erased, d_write)
    programs, given = _given(query, key, erase, correction, unit_eps, unit)
    launch(
        _backward_kernel,
        (programs,),
        p_dread=d_read,
        p_derased=d_erased,
        p_dwrite=d_write,
        p_dquery=d_query,
        p_dkey=d_key,
        p_derase=d_erase,
        p_dcorrection=d_correction,
        **given,
    )
    return d_query, d_key, d_erase, d_correction


# What autograd and torch.compile see.

_INPUTS = "Tensor query, Tensor key, Tensor erase, Tensor correction, float unit_eps, bool unit"


def _like_outputs(
    query: Tensor, key: Tensor, erase: Tensor, correction: Tensor, unit_eps: float, unit: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtypes = (x.dtype for x in (key, erase, correction))
    dtype = reduce(
        torch.promote_types, dtypes, torch.promote_types(query.dtype, torch.float32) if unit else query.dtype
    )
    none = query.new_empty(0, dtype=dtype)
    return (
        query.new_empty(query.shape, dtype=dtype),
        none if unit and unit_eps == 0 else query.new_empty(query.shape, dtype=dtype),
        query.new_empty(query.shape, dtype=dtype) if unit else none.clone(),
    )


def _like_inputs(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs)


_addressed: Any = torch.library.custom_op(
    "memzoo::addresses", forward, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor)"
)
_addressed.register_fake(_like_outputs)
_gradient: Any = torch.library.custom_op(
    "memzoo::addresses_backward",
    backward,
    mutates_args=(),
    schema=f"(Tensor d_read, Tensor d_erased, Tensor d_write, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
_gradient.register_fake(lambda d_read, d_erased, d_write, *inputs: _like_inputs(*inputs[:4]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.unit_eps, ctx.unit = inputs
    ctx.save_for_backward(*tensors)


def _pull_back(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradient(*d_outputs, *ctx.saved_tensors, ctx.unit_eps, ctx.unit), None, None


_addressed.register_autograd(_pull_back, setup_context=_keep)
