"""A query's answer by one kernel, in Triton, without gradients.

A program answers one row's head: the query stays in registers, and the layers' weights pass by once, in tiles of hidden
units; where a segment starts, they come from the memory and go to the past. Of P weights per head in float32 that is
`4 P` bytes read (12 KiB for a matrix of 48 to 64; 72 KiB for a network of 48 to 192 to 48) and, at a segment's start,
as many written; `2 P` operations, far below what the bytes cost: 16 heads of such a network take 0.4 us of 3.35 TB/s.
It is one launch in place of twenty-five.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.deep_memory import is_gated
from memzoo.kernels.deep_memory.triton_units import block_of, is_open_at, value_of
from memzoo.kernels.linear_attention.triton import columns
from memzoo.kernels.registry import writable
from memzoo.kernels.retrieval import Weights, kept
from memzoo.kernels.triton_support import contiguous, launch, tile
from memzoo.kernels.unit_length import SHORTEST


def retrieve(
    query: Tensor,
    weights: Weights,
    position: Tensor,
    past: Weights,
    segment: int,
    activation: str,
    residual: bool,
    unlock: tuple[int, ...],
    unit: bool,
) -> tuple[Tensor, Weights]:
    """See `memzoo.kernels.retrieval.retrieve`."""
    if not past:
        past, segment = kept(weights), 0
    past = tuple([writable(x) for x in past])
    up, down = (None, weights[0]) if len(weights) == 1 else weights
    past_up, past_down = (None, past[0]) if len(past) == 1 else past
    y = _retrieved(
        query, up, down, position, past_up, past_down, segment, is_gated(weights), activation, residual, unlock, unit
    )
    return y, past


@triton.jit
def _weights(p, p_past, row, column, stride, has_row, width, begun, SEGMENT: tl.constexpr):
    """A tile of a layer at the segment's start, which of a segment with no token yet (`begun`) goes to the past."""
    at, mask = row[:, None] * stride + column[None, :], has_row[:, None] & (column < width)[None, :]
    if SEGMENT == 0:
        w = tl.load(p_past + at, mask=mask, other=0.0)
    else:
        old = tl.zeros_like(at) + begun > 0
        w = tl.load(p_past + at, mask=mask & old, other=0.0) + tl.load(p + at, mask=mask & (old == 0), other=0.0)
        tl.store(p_past + at, w, mask=mask & (old == 0))
    return w


@triton.jit
def _retrieve_kernel(
    p_query,
    p_up,
    p_down,
    p_position,
    p_past_up,
    p_past_down,
    p_y,
    SEGMENT: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    UNLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    UNIT: tl.constexpr,
    SHORTEST: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """With one layer the units are the query's coordinates. `SEGMENT` is 0 where the past is given as it is."""
    i = tl.program_id(0).to(tl.int64)
    position = tl.load(p_position + i // H)
    begun = position % SEGMENT if SEGMENT > 0 else position
    p_query, p_down, p_past_down = p_query + i * K, p_down + i * V * U, p_past_down + i * V * U
    if DEPTH == 2:
        p_up, p_past_up = p_up + i * PARTS * U * K, p_past_up + i * PARTS * U * K
    k_column, v_column = columns(0, BK), columns(0, BV)
    q = tl.load(p_query + k_column, mask=k_column < K, other=0.0).to(tl.float32)
    scale = 1.0
    if UNIT:
        q *= tl.sigmoid(q)
        scale = 1 / tl.maximum(tl.sqrt(tl.sum(q * q, axis=0)), SHORTEST)
        q *= scale
    y = tl.zeros([BV], tl.float32)
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        if DEPTH == 1:
            x = tl.load(p_query + unit, mask=unit < U, other=0.0).to(tl.float32)
            if UNIT:
                x *= tl.sigmoid(x) * scale
        else:
            w = _weights(p_up, p_past_up, unit * PARTS, k_column, K, unit < U, K, begun, SEGMENT)
            x = value_of(tl.sum(w * q[None, :], axis=1), ACTIVATION)
            if PARTS == 2:
                w = _weights(p_up, p_past_up, unit * PARTS + 1, k_column, K, unit < U, K, begun, SEGMENT)
                x *= tl.sum(w * q[None, :], axis=1)
        x *= is_open_at(position, block_of(unit, U, E), E, UNLOCK)
        w = _weights(p_down, p_past_down, v_column, unit, U, v_column < V, U, begun, SEGMENT)
        y += tl.sum(w * x[None, :], axis=1)
    if RESIDUAL:
        x = tl.load(p_query + v_column, mask=v_column < V, other=0.0).to(tl.float32)
        y += x * tl.sigmoid(x) * scale if UNIT else x
    tl.store(p_y + i * V + v_column, y.to(p_y.dtype.element_ty), mask=v_column < V)


def forward(
    query: Tensor,
    up: Tensor | None,
    down: Tensor,
    position: Tensor,
    past_up: Tensor | None,
    past_down: Tensor,
    segment: int,
    gated: bool,
    activation: str,
    residual: bool,
    unlock: list[int],
    unit: bool,
) -> Tensor:
    """`[B, 1, H, V]` in the dtype of `query`; `segment` 0 reads the past as it is."""
    batch, _, heads, width = query.shape
    value_dim, units = down.shape[2:]
    query, up, down, position = contiguous(query, up, down, position)
    y = query.new_empty(batch, 1, heads, value_dim)
    wide_k, wide_v = (tile(size, 1024, 1) for size in (width, value_dim))
    launch(
        _retrieve_kernel,
        (batch, heads),
        num_warps=4,
        p_query=query,
        p_up=up,
        p_down=down,
        p_position=position,
        p_past_up=past_up,
        p_past_down=past_down,
        p_y=y,
        SEGMENT=segment,
        H=heads,
        K=width,
        V=value_dim,
        U=units,
        E=len(unlock),
        UNLOCK=tuple(unlock),
        DEPTH=1 if up is None else 2,
        PARTS=2 if gated else 1,
        ACTIVATION=activation,
        RESIDUAL=residual,
        UNIT=unit,
        SHORTEST=SHORTEST,
        BK=wide_k,
        BV=wide_v,
        BU=tile(units, max(1, TILE // max(wide_k, wide_v)), 1),
    )
    return y


TILE = 1024
"""Weights of a tile: 8 registers of each of 128 threads, and as many for the one that is read meanwhile."""


# What torch.compile sees.


def _like_output(query: Tensor, up: Tensor | None, down: Tensor, *others: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], down.shape[2])


_retrieved: Any = torch.library.custom_op(
    "memzoo::retrieve",
    forward,
    mutates_args=("past_up", "past_down"),
    schema="(Tensor query, Tensor? up, Tensor down, Tensor position, Tensor(a!)? past_up, Tensor(b!) past_down, "
    "int segment, bool gated, str activation, bool residual, int[] unlock, bool unit) -> Tensor",
)
_retrieved.register_fake(_like_output)
