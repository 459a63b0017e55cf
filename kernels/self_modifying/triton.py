"""Self-modifying memories in Triton: one token without gradients. More tokens, and gradients, take the chunked form,
whose recurrences are the kernels of the delta rule and of linear attention.

- `make`, a program for each row, head and memory of k, v, eta, alpha (and q): what it says of u.
- `step`, a program for each row, head and memory: unit keys, gates, its error and gradient, what M_memory says of the
  query, the new weights over the old ones and, where the token begins a chunk of the memory, the old ones over its
  anchor. Which tokens do, it asks their positions on the device: the host asks for nothing, shapes and addresses stay.

Two launches, since each memory's step needs what four others say: in one a program would read weights that others have
begun to write, or go through all memories of a head by itself, with N times fewer programs. Within a launch nobody but
its own program touches a memory, so that writing in place is free of races.

On the chip: vectors of d numbers, and a tile of each layer, of as many hidden units as `TILE` numbers hold. The units
meet only in sums, so `step` goes through them three times: for the error, for the gradient's norm (the bound), and to
write; the second layer it reads again is in the cache. The pre-activations and the first layer's deltas of its token
lie in device memory in between, `2 F` numbers. No kernel spills at heads of 48 to 256.

Bytes per row and head, P = 2 d F weights in a memory: `4 P` for each that makes something, and for each of N at most
`12 P`, the anchor and the old weights in, the new ones out; at a boundary the old weights are the ones it reads at, and
the anchor is written. Operations `8 N P + 2 A P + 2 P`, with A that make something.
At d = 48, F = 192, N = 5: 1.4 MB and 0.9 MFLOP; 0.42 us on an H100 (3.35 TB/s), of which memory is the floor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.deep_memory.triton_units import slope_of, value_of
from memzoo.kernels.linear_attention.triton import columns, load_rows, store_rows
from memzoo.kernels.registry import writable
from memzoo.kernels.self_modifying import FORGET, KEY, MEMORY, QUERY, STEP, VALUE, Weights, chunked
from memzoo.kernels.triton_support import contiguous, launch, tile
from memzoo.kernels.unit_length import SHORTEST

TILE = 4096
"""Numbers in a tile of a layer: 32 registers of a thread of `make`, 16 of `step`, which holds more beside them."""


@triton.jit
def _rows(x, w):
    """`w^T x` of `[K]` and `[K, F]`."""
    return tl.sum(w * x[:, None], axis=0)


@triton.jit
def _unit(x, SHORTEST: tl.constexpr):
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, axis=0)), SHORTEST)


@triton.jit
def _logit(p_said, p_weight, p_bias, K: tl.constexpr, BK: tl.constexpr):
    """`r . n(x) + b`; the norm has the epsilon of torch's in float32."""
    column = columns(0, BK)
    x = tl.load(p_said + column, mask=column < K, other=0.0)
    weight = tl.load(p_weight + column, mask=column < K, other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(x * x, axis=0) / K + 1.1920928955078125e-07)
    return tl.sum(x * weight, axis=0) * norm + tl.load(p_bias).to(tl.float32)


@triton.jit
def _begins(position, i_n, MEMORY: tl.constexpr, C: tl.constexpr, SELF: tl.constexpr):
    """Whether the token that `position` others precede begins a chunk of the memory."""
    return position % tl.where(i_n == MEMORY, C, SELF) == 0


@triton.jit
def make_kernel(
    p_u,
    p_now_first,
    p_now_second,
    p_first,
    p_second,
    p_position,
    p_made,
    stride,
    H: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    N: tl.constexpr,
    MAKERS: tl.constexpr,
    MEMORY: tl.constexpr,
    QUERY: tl.constexpr,
    C: tl.constexpr,
    SELF: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
):
    """What one of the first four memories, or the one of the queries, says of u."""
    i = tl.program_id(0).to(tl.int64)
    i_m, i_row = i % MAKERS, i // MAKERS
    i_b, i_h = i_row // H, i_row % H
    i_n = tl.where(i_m == MEMORY, QUERY, i_m)
    if _begins(tl.load(p_position + i_b), i_n, MEMORY, C, SELF):
        p_first, p_second = p_now_first, p_now_second
    p_first += i_row * K * N * F + i_n * F
    p_second += (i_row * N + i_n) * F * K
    column = columns(0, BK)
    u = tl.load(p_u + i_b * stride + i_h * K + column, mask=column < K, other=0.0).to(tl.float32)
    said = u
    for i_f in range(tl.cdiv(F, BF)):
        unit = columns(i_f, BF)
        up = load_rows(p_first, column, unit, N * F, column < K, F)
        down = load_rows(p_second, unit, column, K, unit < F, K)
        said += _rows(value_of(_rows(u, up), ACTIVATION), down)
    tl.store(p_made + i * K + column, said, mask=column < K)


@triton.jit
def step_kernel(
    p_query,
    p_made,
    p_gate_weight,
    p_gate_bias,
    p_now_first,
    p_now_second,
    p_anchor_first,
    p_anchor_second,
    p_position,
    p_lengths,
    p_hidden,
    p_slope,
    p_y,
    stride,
    H: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    N: tl.constexpr,
    MAKERS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    STEP: tl.constexpr,
    FORGET: tl.constexpr,
    MEMORY: tl.constexpr,
    C: tl.constexpr,
    SELF: tl.constexpr,
    LIMIT: tl.constexpr,
    MAX_NORM: tl.constexpr,
    SHORTEST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
):
    """One memory and one token: its gradient, the weights after it, and where it is M_memory what the query reads.

    `MAX_NORM` is 0 for no bound. A row of length 0 keeps all its weights.
    """
    i = tl.program_id(0).to(tl.int64)
    i_n, i_row = i % N, i // N
    i_b, i_h = i_row // H, i_row % H
    o_first, o_second = i_row * K * N * F + i_n * F, i * F * K
    p_now_first, p_now_second = p_now_first + o_first, p_now_second + o_second
    p_anchor_first, p_anchor_second = p_anchor_first + o_first, p_anchor_second + o_second
    p_hidden, p_slope = p_hidden + i * F, p_slope + i * F
    begins = _begins(tl.load(p_position + i_b), i_n, MEMORY, C, SELF)
    p_first, p_second = p_anchor_first, p_anchor_second
    if begins:
        p_first, p_second = p_now_first, p_now_second

    # What the token is.
    column = columns(0, BK)
    m_column = column < K
    p_made += i_row * MAKERS * K
    k = _unit(tl.load(p_made + KEY * K + column, mask=m_column, other=0.0), SHORTEST)
    v = tl.load(p_made + VALUE * K + column, mask=m_column, other=0.0)
    p_weight, p_bias = p_gate_weight + i_h * K, p_gate_bias + i_h
    step = LIMIT * tl.sigmoid(_logit(p_made + STEP * K, p_weight, p_bias, K, BK))
    keep = tl.sigmoid(-_logit(p_made + FORGET * K, p_weight + H * K, p_bias + H, K, BK))
    if MAKERS > MEMORY:
        q = tl.load(p_made + MEMORY * K + column, mask=m_column, other=0.0)
    else:
        q = tl.load(p_query + i_b * stride + i_h * K + column, mask=m_column, other=0.0).to(tl.float32)
    q = _unit(q, SHORTEST)

    # What the memory says of it.
    error, y, square_x = k - v, q, 0.0
    for i_f in range(tl.cdiv(F, BF)):
        unit = columns(i_f, BF)
        up = load_rows(p_first, column, unit, N * F, m_column, F)
        down = load_rows(p_second, unit, column, K, unit < F, K)
        hidden = _rows(k, up)
        x = value_of(hidden, ACTIVATION)
        tl.store(p_hidden + unit, hidden, mask=unit < F)
        square_x += tl.sum(x * x, axis=0)
        error += _rows(x - value_of(_rows(v, up), ACTIVATION), down)
        if i_n == MEMORY:
            y += _rows(value_of(_rows(q, up), ACTIVATION), down)
    if i_n == MEMORY:
        tl.store(p_y + i_row * K + column, y.to(p_y.dtype.element_ty), mask=m_column)
    tl.debug_barrier()

    # Its gradient.
    square_d = 0.0
    for i_f in range(tl.cdiv(F, BF)):
        unit = columns(i_f, BF)
        down = load_rows(p_second, unit, column, K, unit < F, K)
        hidden = tl.load(p_hidden + unit, mask=unit < F, other=0.0)
        slope = tl.sum(down * error[None, :], axis=1) * slope_of(hidden, ACTIVATION)
        tl.store(p_slope + unit, slope, mask=unit < F)
        square_d += tl.sum(slope * slope, axis=0)
    clip = 1.0
    if MAX_NORM > 0:
        square = square_x * tl.sum(error * error, axis=0) + square_d
        clip = tl.rsqrt(tl.maximum(square / (MAX_NORM * MAX_NORM), 1.0))
    tl.debug_barrier()

    # The weights after it.
    is_real = True
    if p_lengths is not None:
        is_real = tl.load(p_lengths + i_b) > 0
    if is_real:
        error *= -step * clip
        for i_f in range(tl.cdiv(F, BF)):
            unit = columns(i_f, BF)
            up = load_rows(p_now_first, column, unit, N * F, m_column, F)
            down = load_rows(p_now_second, unit, column, K, unit < F, K)
            if begins:
                store_rows(p_anchor_first, up, column, unit, N * F, m_column, F)
                store_rows(p_anchor_second, down, unit, column, K, unit < F, K)
            x = value_of(tl.load(p_hidden + unit, mask=unit < F, other=0.0), ACTIVATION)
            slope = tl.load(p_slope + unit, mask=unit < F, other=0.0)
            delta = -step * (_rows(k, up) + clip * slope)
            store_rows(p_now_first, keep * up + k[:, None] * delta[None, :], column, unit, N * F, m_column, F)
            store_rows(p_now_second, keep * down + x[:, None] * error[None, :], unit, column, K, unit < F, K)


def _in_rows(x: Tensor) -> Tensor:
    """One token of each row, `[B, 1, H, d]`, with any stride from row to row."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def one_token(
    u: Tensor,
    query: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor,
    now_first: Tensor,
    now_second: Tensor,
    anchor_first: Tensor,
    anchor_second: Tensor,
    position: Tensor,
    lengths: Tensor | None,
    chunk_size: int,
    self_chunk_size: int,
    step_limit: float,
    activation: str,
    max_norm: float,
) -> Tensor:
    """The output, `[B, 1, H, d]`; the weights are written to."""
    batch, _, heads, width = u.shape
    units, count = now_second.shape[2], now_second.shape[1] // heads
    u, query = _in_rows(u), None if query is None else _in_rows(query)
    gate_weight, gate_bias, position, lengths = contiguous(gate_weight, gate_bias, position, lengths)
    makers, rows = 5 if query is None else 4, batch * heads
    made = now_first.new_empty(rows, makers, width)
    hidden, slope = (now_first.new_empty(rows, count, units) for _ in range(2))
    y = u.new_empty(batch, 1, heads, width)
    block = tile(width, 256)
    sizes: dict[str, Any] = {
        "H": heads,
        "K": width,
        "F": units,
        "N": count,
        "MAKERS": makers,
        "MEMORY": MEMORY,
        "C": chunk_size,
        "SELF": self_chunk_size,
        "ACTIVATION": activation,
        "BK": block,
        "BF": tile(units, TILE // block),
    }
    launch(
        make_kernel,
        (rows, makers),
        p_u=u,
        p_now_first=now_first,
        p_now_second=now_second,
        p_first=anchor_first,
        p_second=anchor_second,
        p_position=position,
        p_made=made,
        stride=u.stride(0),
        QUERY=QUERY,
        **sizes,
    )
    launch(
        step_kernel,
        (rows, count),
        num_warps=8,
        p_query=query,
        p_made=made,
        p_gate_weight=gate_weight,
        p_gate_bias=gate_bias,
        p_now_first=now_first,
        p_now_second=now_second,
        p_anchor_first=anchor_first,
        p_anchor_second=anchor_second,
        p_position=position,
        p_lengths=lengths,
        p_hidden=hidden,
        p_slope=slope,
        p_y=y,
        stride=0 if query is None else query.stride(0),
        KEY=KEY,
        VALUE=VALUE,
        STEP=STEP,
        FORGET=FORGET,
        LIMIT=step_limit,
        MAX_NORM=max_norm,
        SHORTEST=SHORTEST,
        **sizes,
    )
    return y


# What torch.compile sees.

_step = torch.library.custom_op(
    "memzoo::self_modifying_step",
    one_token,
    mutates_args=("now_first", "now_second", "anchor_first", "anchor_second"),
    schema="(Tensor u, Tensor? query, Tensor gate_weight, Tensor gate_bias, Tensor(a!) now_first, "
    "Tensor(b!) now_second, Tensor(c!) anchor_first, Tensor(d!) anchor_second, Tensor position, Tensor? lengths, "
    "int chunk_size, int self_chunk_size, float step_limit, str activation, float max_norm) -> Tensor",
)


@_step.register_fake
def _(u: Tensor, *others: Any) -> Tensor:
    return u.new_empty(u.shape)


def self_modifying(
    u: Tensor,
    query: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor,
    now: Weights,
    anchor: Weights,
    position: Tensor,
    *,
    lengths: Tensor | None,
    backend: str,
    **rule: Any,
) -> tuple[Tensor, Weights, Weights]:
    """See `memzoo.kernels.self_modifying.self_modifying`."""
    given = u, query, gate_weight, gate_bias
    if u.shape[1] > 1 or torch.is_grad_enabled():
        return chunked.self_modifying(*given, now, anchor, position, lengths=lengths, backend=backend, **rule)
    shared = now.first is anchor.first
    now = Weights(*map(writable, now))
    anchor = Weights(*(x.clone(memory_format=torch.contiguous_format) if shared else writable(x) for x in anchor))
    bound = rule.pop("max_gradient_norm")
    y = _step(*given, *now, *anchor, position, lengths, **rule, max_norm=0.0 if bound == math.inf else bound)
    return y, now, anchor
