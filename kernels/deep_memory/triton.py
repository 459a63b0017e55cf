"""The deep memory of one or two layers in Triton: the walk over the chunks of `walk.py` as kernels.

Layout, coefficients (with them windows, capacity blocks, ragged rows and chunks taken up in the middle) and the final
state are those of the chunked backend, made by torch before and after. What depends on the memory is left:

- `walk`, a program per row and head, chunk after chunk: the inner gradients at the anchor, and the next anchor. It
  leaves the anchors and factors (layer inputs `x`, deltas `d`) of all chunks in device memory.
- `read`, a program per chunk, all at once: what the queries read.
- `read_back`, `query_back`, a program per chunk: the backward of `read`, down to what the units were given and from
  there; they leave each chunk's share of its anchor's gradient.
- `walk_back`, a program per row and head, from the last chunk to the first: the backward of `walk`, from the stored
  anchors and factors.
- `ends_back`, a program per chunk, all at once: what the walk's coefficients at the ends of chunks get.
A single token without autograd has kernels of its own, see `triton_step.py`; activations and tiles are in
`triton_units.py`.

So half of the products do not wait for the walk, and one long row fills more of the chip than one multiprocessor. The
hidden units meet only in sums, so every kernel goes through them in tiles of `UNITS`, several times where such a sum
comes first: the error before the deltas, the gradient's norm before what its bound leaves. With one layer the units are
the key's coordinates. The bound multiplies coefficients, never rows.

On the chip: float32 weights and momentum of 64 x 256 units are 256 KiB, as much as the registers of a multiprocessor,
and are not held there: tiles of them come from the second-level cache, where the program itself has just written them
(33 MiB for 132 programs, of 50). Registers hold keys, errors and scores of a chunk, 16 KiB each at C = K = V = 64. The
tiles are chosen for each kind of chip (`UNITS`) so that in bfloat16 no kernel spills at heads of 48 with 192 units.
What helps: loops from which the compiler lifts nothing (`disable_licm`), factors that are loaded again after a loop, an
`erf` that does not branch, and outside of the loop over the chunks what a single one of them needs: pointers that no
chunk changes stay in registers through the loop. float32, without tensor cores, spills up to 552 bytes, which neither
more threads nor another order of instructions makes fewer: every thread holds its share of both factors of a product.
`benchmarks/results/triton_resources.json` has the numbers.

Bytes per token and head, P weights, F hidden units, inputs of s bytes: forward `16 P / C` for anchors written and read,
`2 s (K + V + 2 F)` for factors and inputs; the backward about three times that. Without autograd a few chunks' anchors
are kept at a time (`ANCHOR_BYTES`). Operations: forward about `22 P + 12 C F`, backward three times that.
At K = V = C = 64, F = 256 and bfloat16: 10.8 KB and 0.9 MFLOP forward: on an H100 (3.35 TB/s, about 800 TFLOP/s) 3.2 ns
for the bytes, 1.1 ns for the products. Memory is the floor while B H fills the chip; below that the walk is, in which
one multiprocessor has 30 MFLOP a chunk, about 5 us on its tensor cores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.deep_memory import DeepMemoryState, chunked, triton_step
from memzoo.kernels.deep_memory.chunk import Network
from memzoo.kernels.deep_memory.triton_units import (
    RULE,
    Rule,
    block_of,
    curvature_of,
    launch_tiled,
    of_blocks,
    rule_of,
    slope_of,
    value_of,
)
from memzoo.kernels.deep_memory.walk import Ends, Tensors
from memzoo.kernels.linear_attention.triton import columns, load_rows, store_rows
from memzoo.kernels.registry import mixed_precision
from memzoo.kernels.triton_support import contiguous, fresh, gradients_like, product, tile, wanted

ANCHOR_BYTES = 1 << 28
"""Of anchors that an inference keeps at a time."""


# Tiles ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _of_units(p, row, unit, has_row, U: tl.constexpr, E: tl.constexpr):
    """Of coefficients per row and block `[rows, E]` those of the units: `[R, BU]`, or `[R, 1]` where E = 1."""
    if E == 1:
        found = tl.load(p + row, mask=has_row, other=0.0)[:, None]
    else:
        mask = has_row[:, None] & (unit < U)[None, :]
        found = tl.load(p + row[:, None] * E + block_of(unit, U, E)[None, :], mask=mask, other=0.0)
    return found


@triton.jit
def _spread(n, like):
    """The number `n` in every place of an int64 tensor."""
    return tl.zeros_like(like) + n


@triton.jit
def _at_end(p, unit, n, done, otherwise, U: tl.constexpr, E: tl.constexpr):
    """The units' coefficients `[BU]` at the end of chunk n, from one per block; `otherwise` if the row stops in it."""
    return tl.where(_spread(n, unit) < done, of_blocks(p, unit, U, E), otherwise)


@triton.jit
def _per_block(x, unit, U: tl.constexpr, E: tl.constexpr, BE: tl.constexpr):
    """Sum over the units of each block, `[R, BU]` to `[R, BE]`."""
    if E == 1:
        found = tl.sum(x, axis=1)[:, None]
    else:
        own = (block_of(unit, U, E)[:, None] == tl.arange(0, BE)[None, :]) & (unit < U)[:, None]
        if x.shape[0] == 1:
            found = tl.sum(tl.where(own, tl.trans(x), 0.0), axis=0)[None, :]
        else:
            found = product(x, tl.where(own, 1.0, 0.0))
    return found


@triton.jit
def _hidden(k, p_up, unit, part, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr):
    """What the units of a tile are given by `k` `[R, BK]`, of the part-th of their rows."""
    w = load_rows(p_up, unit * PARTS + part, columns(0, BK), K, unit < U, K).to(k.dtype)
    return product(k, tl.trans(w))


# The walk ------------------------------------------------------------------------------------------------------------


@triton.jit
def _bound(p_norms, row, R: tl.constexpr, MAX_NORM: tl.constexpr):
    """The factor that keeps each row's gradient within its bound, `[BR]`."""
    clip = tl.zeros_like(row).to(tl.float32) + 1
    if MAX_NORM > 0:
        clip = tl.load(p_norms + row, mask=row < R, other=1.0)
    return clip


@triton.jit
def _running(
    p_x,
    p_d0,
    p_d1,
    p_norms,
    p_run_x,
    p_run_d0,
    p_run_d1,
    n,
    i_m,
    row,
    v_column,
    count,
    M,
    R: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BU: tl.constexpr,
):
    """The factors, their deltas bounded, of the chunk n that a row does not complete, if it is one of these."""
    if (n >= 0) & (n < count):
        i = n * M + i_m
        clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)[:, None]
        d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V).to(tl.float32)
        store_rows(p_run_d1 + i_m * R * V, d1 * clip, row, v_column, V, row < R, V)
        if DEPTH == 2:
            o_d0, o_run = i * R * PARTS * U, i_m * R * PARTS * U
            for i_u in range(tl.cdiv(U, BU)):
                unit = columns(i_u, BU)
                x = load_rows(p_x + i * R * U, row, unit, U, row < R, U)
                store_rows(p_run_x + i_m * R * U, x, row, unit, U, row < R, U)
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    d0 = load_rows(p_d0 + o_d0, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    store_rows(p_run_d0 + o_run, d0 * clip, row, at, PARTS * U, row < R, PARTS * U)


@triton.jit(do_not_specialize=["count", "M"])
def walk_kernel(
    p_key,
    p_value,
    p_open,
    p_write,
    p_slot_write,
    p_keep,
    p_read,
    p_slot,
    p_held,
    p_held_x,
    p_held_d0,
    p_held_d1,
    p_done,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x,
    p_d0,
    p_d1,
    p_norms,
    p_run_x,
    p_run_d0,
    p_run_d1,
    count,
    M,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    HELD: tl.constexpr,
    ENDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """`count` chunks of a row: their factors, and the anchors after them; the anchor n is followed by n + 1.

    With one layer the units are the key's coordinates, and `p_x` is given. `p_norms` takes, per row, the bound's factor
    and the squares of |x| and |d| of the hidden units. `p_done` counts the chunks that the row completes; `p_run_*`
    take the factors of the one it does not.
    """
    i_m = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BR).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(0, BV)
    like: tl.constexpr = p_d1.dtype.element_ty
    done = tl.cast(count, tl.int64)
    if ENDS:
        done = tl.load(p_done + i_m)
    held = tl.cast(0, tl.int64)
    if HELD:
        held = tl.load(p_held + i_m)
    for step in range(count):
        n = tl.cast(step, tl.int64)
        i = n * M + i_m
        here = _spread(n, row)
        m_end, is_held = (row < R) & (here < done), (row < held) & (here == 0)
        o_up, o_down = i * PARTS * U * K, i * V * U
        o_up_next, o_down_next = (i + M) * PARTS * U * K, (i + M) * V * U
        k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        v = load_rows(p_value + i * R * V, row, v_column, V, row < R, V).to(tl.float32)

        # The units, and the error.
        error = -v
        if L2 and RESIDUAL:
            error += load_rows(p_key + i * R * K, row, v_column, K, row < R, V).to(tl.float32)
        square_x = tl.zeros([BR], tl.float32)
        for i_u in range(tl.cdiv(U, BU)):
            unit = columns(i_u, BU)
            if DEPTH == 1:
                x = load_rows(p_x + i * R * U, row, unit, U, row < R, U)
            else:
                h = _hidden(k, p_up + o_up, unit, 0, K, U, PARTS, BK)
                x = value_of(h, ACTIVATION)
                if PARTS == 2:
                    x *= _hidden(k, p_up + o_up, unit, 1, K, U, PARTS, BK)
                if E > 1:
                    x *= _of_units(p_open + i * R * E, row, unit, row < R, U, E)
                keep = x
                if HELD:
                    keep = tl.where(is_held[:, None], load_rows(p_held_x + i_m * R * U, row, unit, U, row < R, U), x)
                store_rows(p_x + i * R * U, keep, row, unit, U, row < R, U)
            if MAX_NORM > 0:
                square_x += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
            if L2:
                w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
                error += product(x.to(like), tl.trans(w))

        # The deltas, and the bound on the gradient.
        square_d = tl.zeros([BR], tl.float32)
        d1 = error
        if HELD:
            d1 = tl.where(is_held[:, None], load_rows(p_held_d1 + i_m * R * V, row, v_column, V, row < R, V), error)
        d1 = d1.to(like)
        store_rows(p_d1 + i * R * V, d1, row, v_column, V, row < R, V)
        if DEPTH == 2:
            for i_u in range(tl.cdiv(U, BU)):
                unit = columns(i_u, BU)
                w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
                back = product(error.to(like), w)
                if E > 1:
                    back *= _of_units(p_open + i * R * E, row, unit, row < R, U, E)
                h = _hidden(k, p_up + o_up, unit, 0, K, U, PARTS, BK)
                d0 = back * slope_of(h, ACTIVATION)
                if PARTS == 2:
                    d_gate = back * value_of(h, ACTIVATION)
                    square_d += tl.sum(d_gate * d_gate, axis=1)
                    if HELD:
                        old = load_rows(p_held_d0 + i_m * R * 2 * U, row, unit * 2 + 1, 2 * U, row < R, 2 * U)
                        d_gate = tl.where(is_held[:, None], old, d_gate)
                    store_rows(p_d0 + i * R * 2 * U, d_gate, row, unit * 2 + 1, 2 * U, row < R, 2 * U)
                    d0 *= _hidden(k, p_up + o_up, unit, 1, K, U, PARTS, BK)
                square_d += tl.sum(d0 * d0, axis=1)
                if HELD:
                    old = load_rows(p_held_d0 + i_m * R * PARTS * U, row, unit * PARTS, PARTS * U, row < R, PARTS * U)
                    d0 = tl.where(is_held[:, None], old, d0)
                store_rows(p_d0 + i * R * PARTS * U, d0, row, unit * PARTS, PARTS * U, row < R, PARTS * U)
        clip = tl.zeros([BR], tl.float32) + 1
        if MAX_NORM > 0:
            square = square_x * tl.sum(error * error, axis=1)
            if DEPTH == 2:
                square += square_d * tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
            clip = tl.rsqrt(tl.maximum(square / (MAX_NORM * MAX_NORM), 1.0))
            clip = tl.where(is_held, 1.0, clip)
            p_norm = p_norms + i * 3 * R + row
            tl.store(p_norm, clip, mask=row < R)
            tl.store(p_norm + R, square_x, mask=row < R)
            tl.store(p_norm + 2 * R, square_d, mask=row < R)
        tl.debug_barrier()  # the factors are there for all threads

        # The next anchor.
        write = tl.load(p_write + (i * C + (C - 1)) * R + row, mask=m_end, other=0.0) * clip
        d1_write = tl.trans((d1.to(tl.float32) * write[:, None]).to(like))
        if MOMENTUM:
            slot_write = tl.load(p_slot_write + i * R + row, mask=m_end, other=0.0) * clip
            d1_slot = tl.trans((d1.to(tl.float32) * slot_write[:, None]).to(like))
        for i_u in range(tl.cdiv(U, BU)):
            unit = columns(i_u, BU)
            x = load_rows(p_x + i * R * U, row, unit, U, row < R, U)
            keep = _at_end(p_keep + i * E, unit, n, done, 1.0, U, E)
            w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U) * keep[None, :] - product(d1_write, x)
            if MOMENTUM:
                read = _at_end(p_read + i * E, unit, n, done, 0.0, U, E)
                slot = _at_end(p_slot + i * E, unit, n, done, 1.0, U, E)
                s = load_rows(p_down_slot + o_down, v_column, unit, U, v_column < V, U)
                w += s * read[None, :]
                s = s * slot[None, :] - product(d1_slot, x)
                store_rows(p_down_slot + o_down_next, s, v_column, unit, U, v_column < V, U)
            store_rows(p_down + o_down_next, w, v_column, unit, U, v_column < V, U)
            if DEPTH == 2:
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    d0 = load_rows(p_d0 + i * R * PARTS * U, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    w = load_rows(p_up + o_up, at, k_column, K, unit < U, K) * keep[:, None]
                    w -= product(tl.trans((d0 * write[:, None]).to(like)), k)
                    if MOMENTUM:
                        s = load_rows(p_up_slot + o_up, at, k_column, K, unit < U, K)
                        w += s * read[:, None]
                        s = s * slot[:, None] - product(tl.trans((d0 * slot_write[:, None]).to(like)), k)
                        store_rows(p_up_slot + o_up_next, s, at, k_column, K, unit < U, K)
                    store_rows(p_up + o_up_next, w, at, k_column, K, unit < U, K)
        tl.debug_barrier()  # and so is the anchor
    if ENDS:  # outside of the loop, see above
        _running(
            *(p_x, p_d0, p_d1, p_norms, p_run_x, p_run_d0, p_run_d1, done, i_m, row, v_column, count, M),
            *(R, V, U, DEPTH, PARTS, MAX_NORM, BU),
        )


# Reads ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _read_hidden(
    q,
    scores,
    p_up,
    p_up_slot,
    p_d0,
    row,
    unit,
    part,
    keep,
    read,
    R: tl.constexpr,
    K: tl.constexpr,
    U: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    BK: tl.constexpr,
):
    """What the queries give a tile of units by the first layer, `[BC, BU]`, and by its anchor's weights, momentum."""
    plain = _hidden(q, p_up, unit, part, K, U, PARTS, BK)
    plain_slot = plain
    y = plain * keep
    if MOMENTUM:
        plain_slot = _hidden(q, p_up_slot, unit, part, K, U, PARTS, BK)
        y += plain_slot * read
    d0 = load_rows(p_d0, row, unit * PARTS + part, PARTS * U, row < R, PARTS * U)
    return y - product(scores, d0), plain, plain_slot


@triton.jit(do_not_specialize=["M"])
def read_kernel(
    p_query,
    p_key,
    p_write,
    p_keep,
    p_read,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x,
    p_d0,
    p_d1,
    p_norms,
    p_y,
    M,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """What the queries of a chunk read."""
    i = tl.program_id(0).to(tl.int64)
    token, row = tl.arange(0, BC).to(tl.int64), tl.arange(0, BR).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(0, BV)
    like: tl.constexpr = p_d1.dtype.element_ty
    p_query, p_x, o_d0 = p_query + i * C * K, p_x + i * R * U, i * R * PARTS * U
    o_up, o_down = i * PARTS * U * K, i * V * U
    clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
    write = load_rows(p_write + i * C * R, token, row, R, token < C, R) * clip[None, :]
    if DEPTH == 2:
        q = load_rows(p_query, token, k_column, K, token < C, K)
        k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        scores = (product(q, tl.trans(k)) * write).to(like)
    y = tl.zeros([BC, BV], tl.float32)
    inner = tl.zeros([BC, BR], tl.float32)
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        keep = _of_units(p_keep + i * C * E, token, unit, token < C, U, E)
        read = keep
        if MOMENTUM:
            read = _of_units(p_read + i * C * E, token, unit, token < C, U, E)
        if DEPTH == 1:
            z = load_rows(p_query, token, unit, U, token < C, U).to(tl.float32)
        else:
            p_slot_n = p_up
            if MOMENTUM:
                p_slot_n = p_up_slot + o_up
            p_up_n, p_d0_n = p_up + o_up, p_d0 + o_d0
            h = _read_hidden(
                q, scores, p_up_n, p_slot_n, p_d0_n, row, unit, 0, keep, read, R, K, U, PARTS, MOMENTUM, BK
            )[0]
            z = value_of(h, ACTIVATION)
            if PARTS == 2:
                z *= _read_hidden(
                    q, scores, p_up_n, p_slot_n, p_d0_n, row, unit, 1, keep, read, R, K, U, PARTS, MOMENTUM, BK
                )[0]
        x = load_rows(p_x, row, unit, U, row < R, U)
        inner += product(z.to(like), tl.trans(x))
        w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
        y += product((z * keep).to(like), tl.trans(w))
        if MOMENTUM:
            s = load_rows(p_down_slot + o_down, v_column, unit, U, v_column < V, U).to(like)
            y += product((z * read).to(like), tl.trans(s))
    d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V)
    y -= product((inner * write).to(like), d1)
    if RESIDUAL:
        y += load_rows(p_query, token, v_column, K, token < C, V).to(tl.float32)
    store_rows(p_y + i * C * V, y, token, v_column, V, token < C, V)


@triton.jit(do_not_specialize=["M"])
def read_back_kernel(
    p_dy,
    p_query,
    p_key,
    p_write,
    p_keep,
    p_read,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x,
    p_d0,
    p_d1,
    p_norms,
    p_inner,
    p_dh,
    p_dquery,
    p_dkeep,
    p_dread,
    p_ddown,
    p_ddown_slot,
    p_dx,
    M,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
    BE: tl.constexpr,
):
    """The backward of `read_kernel` from the outputs to what its units were given, `p_dh`: the gradients of the last
    layer's anchor and inputs, and of `keep` and `momentum_read`. With one layer the units are the queries. `p_inner`
    takes the last layer's scores."""
    i = tl.program_id(0).to(tl.int64)
    token, row = tl.arange(0, BC).to(tl.int64), tl.arange(0, BR).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(0, BV)
    like: tl.constexpr = p_d1.dtype.element_ty
    p_query, p_x, o_d0 = p_query + i * C * K, p_x + i * R * U, i * R * PARTS * U
    p_dquery, p_dx = p_dquery + i * C * K, p_dx + i * R * U
    o_up, o_down = i * PARTS * U * K, i * V * U
    clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
    write = load_rows(p_write + i * C * R, token, row, R, token < C, R) * clip[None, :]
    g = load_rows(p_dy + i * C * V, token, v_column, V, token < C, V).to(like)
    d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V)
    d_scores = (product(g, tl.trans(d1)) * write).to(like)
    if DEPTH == 2:
        q = load_rows(p_query, token, k_column, K, token < C, K)
        k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        scores = (product(q, tl.trans(k)) * write).to(like)
    inner = tl.zeros([BC, BR], tl.float32)
    d_keep = tl.zeros([BC, BE], tl.float32)
    d_read = tl.zeros([BC, BE], tl.float32)
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        keep = _of_units(p_keep + i * C * E, token, unit, token < C, U, E)
        read = keep
        if MOMENTUM:
            read = _of_units(p_read + i * C * E, token, unit, token < C, U, E)
        if DEPTH == 1:
            z = load_rows(p_query, token, unit, U, token < C, U).to(tl.float32)
        else:
            p_slot_n = p_up
            if MOMENTUM:
                p_slot_n = p_up_slot + o_up
            p_up_n, p_d0_n = p_up + o_up, p_d0 + o_d0
            a, plain, plain_slot = _read_hidden(
                q, scores, p_up_n, p_slot_n, p_d0_n, row, unit, 0, keep, read, R, K, U, PARTS, MOMENTUM, BK
            )
            z = value_of(a, ACTIVATION)
            if PARTS == 2:
                b, plain_gate, plain_gate_slot = _read_hidden(
                    q, scores, p_up_n, p_slot_n, p_d0_n, row, unit, 1, keep, read, R, K, U, PARTS, MOMENTUM, BK
                )
                z *= b
        # The second layer.
        x = load_rows(p_x, row, unit, U, row < R, U)
        w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
        inner += product(z.to(like), tl.trans(x))
        store_rows(p_dx, -product(tl.trans(d_scores), z.to(like)), row, unit, U, row < R, U)
        g_w = product(g, w)
        d_keep += _per_block(g_w * z, unit, U, E, BE)
        d_z = g_w * keep - product(d_scores, x)
        d_w = product(tl.trans(g), (z * keep).to(like))
        store_rows(p_ddown + o_down, d_w, v_column, unit, U, v_column < V, U)
        if MOMENTUM:
            s = load_rows(p_down_slot + o_down, v_column, unit, U, v_column < V, U).to(like)
            g_s = product(g, s)
            d_read += _per_block(g_s * z, unit, U, E, BE)
            d_z += g_s * read
            d_s = product(tl.trans(g), (z * read).to(like))
            store_rows(p_ddown_slot + o_down, d_s, v_column, unit, U, v_column < V, U)
        # The first.
        if DEPTH == 1:
            store_rows(p_dquery, d_z, token, unit, U, token < C, U)
        else:
            for part in tl.static_range(PARTS):
                if part == 0:
                    d_h = d_z * slope_of(a, ACTIVATION)
                    if PARTS == 2:
                        d_h *= b
                else:
                    d_h = d_z * value_of(a, ACTIVATION)
                    plain, plain_slot = plain_gate, plain_gate_slot
                at = unit * PARTS + part
                d_keep += _per_block(plain * d_h, unit, U, E, BE)
                if MOMENTUM:
                    d_read += _per_block(plain_slot * d_h, unit, U, E, BE)
                store_rows(p_dh + i * C * PARTS * U, d_h, token, at, PARTS * U, token < C, PARTS * U)
    block = columns(0, BE)
    store_rows(p_dkeep + i * C * E, d_keep, token, block, E, token < C, E)
    store_rows(p_dread + i * C * E, d_read, token, block, E, token < C, E)

    store_rows(p_inner + i * C * R, inner, token, row, R, token < C, R)


@triton.jit(do_not_specialize=["M"])
def query_back_kernel(
    p_dy,
    p_query,
    p_key,
    p_write,
    p_keep,
    p_read,
    p_up,
    p_up_slot,
    p_d0,
    p_d1,
    p_norms,
    p_inner,
    p_dh,
    p_dquery,
    p_dkey,
    p_dwrite,
    p_dup,
    p_dup_slot,
    p_dd0,
    p_dd1,
    p_dclip,
    M,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """The rest of it, but for what the residual gives the queries: from the outputs and `p_dh` the gradients of `write`
    (with `p_dclip` for the bound's factor), of the last layer's deltas, and of the first of two layers all."""
    i = tl.program_id(0).to(tl.int64)
    token, row = tl.arange(0, BC).to(tl.int64), tl.arange(0, BR).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(0, BV)
    like: tl.constexpr = p_d1.dtype.element_ty
    clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
    write = load_rows(p_write + i * C * R, token, row, R, token < C, R) * clip[None, :]
    if DEPTH == 2:
        o_up, o_d0 = i * PARTS * U * K, i * R * PARTS * U
        q = load_rows(p_query + i * C * K, token, k_column, K, token < C, K)
        k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        d_q = tl.zeros([BC, BK], tl.float32)
        weighted = tl.trans((product(q, tl.trans(k)) * write).to(like))
        d_weighted = tl.zeros([BC, BR], tl.float32)
        for i_u in range(tl.cdiv(U, BU)):
            unit = columns(i_u, BU)
            for part in tl.static_range(PARTS):
                at = unit * PARTS + part
                d_h = load_rows(p_dh + i * C * PARTS * U, token, at, PARTS * U, token < C, PARTS * U)
                d0 = load_rows(p_d0 + o_d0, row, at, PARTS * U, row < R, PARTS * U)
                d_weighted += product(d_h, tl.trans(d0))
                store_rows(p_dd0 + o_d0, -product(weighted, d_h), row, at, PARTS * U, row < R, PARTS * U)
                d_kept = d_h.to(tl.float32) * _of_units(p_keep + i * C * E, token, unit, token < C, U, E)
                d_kept = d_kept.to(like)
                w = load_rows(p_up + o_up, at, k_column, K, unit < U, K).to(like)
                d_q += product(d_kept, w)
                store_rows(p_dup + o_up, product(tl.trans(d_kept), q), at, k_column, K, unit < U, K)
                if MOMENTUM:
                    d_kept = d_h.to(tl.float32) * _of_units(p_read + i * C * E, token, unit, token < C, U, E)
                    d_kept = d_kept.to(like)
                    s = load_rows(p_up_slot + o_up, at, k_column, K, unit < U, K).to(like)
                    d_q += product(d_kept, s)
                    store_rows(p_dup_slot + o_up, product(tl.trans(d_kept), q), at, k_column, K, unit < U, K)
        tl.debug_barrier()  # what follows is made and loaded again, so that it takes no registers in the loop
        q = load_rows(p_query + i * C * K, token, k_column, K, token < C, K)
        k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        write = load_rows(p_write + i * C * R, token, row, R, token < C, R) * clip[None, :]
        d_write = -d_weighted * product(q, tl.trans(k))
        d_scores = (d_weighted * write).to(like)
        d_q -= product(d_scores, k)
        store_rows(p_dquery + i * C * K, d_q, token, k_column, K, token < C, K)
        store_rows(p_dkey + i * R * K, -product(tl.trans(d_scores), q), row, k_column, K, row < R, K)
    else:
        d_write = tl.zeros([BC, BR], tl.float32)
    tl.debug_barrier()
    g = load_rows(p_dy + i * C * V, token, v_column, V, token < C, V).to(like)
    d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V)
    inner = load_rows(p_inner + i * C * R, token, row, R, token < C, R)
    store_rows(p_dd1 + i * R * V, -product(tl.trans((inner * write).to(like)), g), row, v_column, V, row < R, V)
    d_write -= product(g, tl.trans(d1)) * inner
    store_rows(p_dwrite + i * C * R, d_write * clip[None, :], token, row, R, token < C, R)
    if MAX_NORM > 0:
        write = load_rows(p_write + i * C * R, token, row, R, token < C, R)
        tl.store(p_dclip + i * R + row, tl.sum(d_write * write, axis=0), mask=row < R)


@triton.jit
def _add_rows(p, x, row, column, stride, has_row, width):
    """To what is there."""
    x += load_rows(p, row, column, stride, has_row, width).to(tl.float32)
    store_rows(p, x, row, column, stride, has_row, width)


@triton.jit
def _running_back(
    p_done,
    p_d0,
    p_d1,
    p_norms,
    p_drun_x,
    p_drun_d0,
    p_drun_d1,
    p_dx,
    p_dd0,
    p_dd1,
    p_dclip,
    i_m,
    row,
    v_column,
    count,
    M,
    R: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BU: tl.constexpr,
):
    """What the factors of the chunk that a row does not complete, which are outputs, give those that the walk made."""
    n = tl.load(p_done + i_m)
    if n < count:
        i = n * M + i_m
        clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
        d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V).to(tl.float32)
        d_d1 = load_rows(p_drun_d1 + i_m * R * V, row, v_column, V, row < R, V)
        d_clip = tl.sum(d_d1 * d1, axis=1)
        _add_rows(p_dd1 + i * R * V, d_d1 * clip[:, None], row, v_column, V, row < R, V)
        if DEPTH == 2:
            o_d0, o_run = i * R * PARTS * U, i_m * R * PARTS * U
            for i_u in range(tl.cdiv(U, BU)):
                unit = columns(i_u, BU)
                d_x = load_rows(p_drun_x + i_m * R * U, row, unit, U, row < R, U)
                _add_rows(p_dx + i * R * U, d_x, row, unit, U, row < R, U)
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    d0 = load_rows(p_d0 + o_d0, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    d_d0 = load_rows(p_drun_d0 + o_run, row, at, PARTS * U, row < R, PARTS * U)
                    d_clip += tl.sum(d_d0 * d0, axis=1)
                    _add_rows(p_dd0 + o_d0, d_d0 * clip[:, None], row, at, PARTS * U, row < R, PARTS * U)
        if MAX_NORM > 0:
            p_dclip_n = p_dclip + i * R + row
            tl.store(p_dclip_n, tl.load(p_dclip_n, mask=row < R, other=0.0) + d_clip, mask=row < R)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["count", "M"])
def walk_back_kernel(
    p_key,
    p_open,
    p_write,
    p_slot_write,
    p_keep,
    p_read,
    p_slot,
    p_held,
    p_done,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x,
    p_d0,
    p_d1,
    p_norms,
    p_drun_x,
    p_drun_d0,
    p_drun_d1,
    p_dkey,
    p_dvalue,
    p_dwrite,
    p_dslot_write,
    p_dheld_x,
    p_dheld_d0,
    p_dheld_d1,
    p_dup,
    p_ddown,
    p_dup_slot,
    p_ddown_slot,
    p_dx,
    p_dd0,
    p_dd1,
    p_dclip,
    count,
    M,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    HELD: tl.constexpr,
    ENDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    L2: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """The backward of `walk_kernel`, but for what the residual gives the keys and the next anchor its coefficients.

    What `read_back_kernel` has left in the gradients of factors, keys and anchors is added to; the gradient of the
    anchor after the last chunk is given. `p_dvalue` takes that of the values; with one layer `p_dx` that of the inputs.
    """
    i_m = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BR).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(0, BV)
    like: tl.constexpr = p_d1.dtype.element_ty
    if ENDS:  # outside of the loop, see above
        _running_back(
            *(p_done, p_d0, p_d1, p_norms, p_drun_x, p_drun_d0, p_drun_d1, p_dx, p_dd0, p_dd1, p_dclip),
            *(i_m, row, v_column, count, M, R, V, U, DEPTH, PARTS, MAX_NORM, BU),
        )
    for step in tl.range(count, disable_licm=True):
        done = tl.cast(count, tl.int64)
        if ENDS:
            done = tl.load(p_done + i_m)
        held = tl.cast(0, tl.int64)
        if HELD:
            held = tl.load(p_held + i_m)
        n = count - 1 - tl.cast(step, tl.int64)
        i = n * M + i_m
        here = _spread(n, row)
        m_end, is_held = (row < R) & (here < done), (row < held) & (here == 0)
        o_up, o_down = i * PARTS * U * K, i * V * U
        o_up_next, o_down_next = (i + M) * PARTS * U * K, (i + M) * V * U
        # The step from this anchor to the next: the anchor itself,
        for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
            unit, m_v = columns(i_u, BU), v_column < V
            keep = _at_end(p_keep + i * E, unit, n, done, 1.0, U, E)
            d_w = load_rows(p_ddown + o_down_next, v_column, unit, U, m_v, U)
            kept = d_w * keep[None, :] + load_rows(p_ddown + o_down, v_column, unit, U, m_v, U)
            store_rows(p_ddown + o_down, kept, v_column, unit, U, m_v, U)
            if MOMENTUM:
                read = _at_end(p_read + i * E, unit, n, done, 0.0, U, E)
                slot = _at_end(p_slot + i * E, unit, n, done, 1.0, U, E)
                d_s = load_rows(p_ddown_slot + o_down_next, v_column, unit, U, m_v, U)
                kept = d_s * slot[None, :] + d_w * read[None, :]
                kept += load_rows(p_ddown_slot + o_down, v_column, unit, U, m_v, U)
                store_rows(p_ddown_slot + o_down, kept, v_column, unit, U, m_v, U)
        if DEPTH == 2:
            for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
                unit = columns(i_u, BU)
                keep = _at_end(p_keep + i * E, unit, n, done, 1.0, U, E)
                if MOMENTUM:
                    read = _at_end(p_read + i * E, unit, n, done, 0.0, U, E)
                    slot = _at_end(p_slot + i * E, unit, n, done, 1.0, U, E)
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    d_w = load_rows(p_dup + o_up_next, at, k_column, K, unit < U, K)
                    kept = d_w * keep[:, None] + load_rows(p_dup + o_up, at, k_column, K, unit < U, K)
                    store_rows(p_dup + o_up, kept, at, k_column, K, unit < U, K)
                    if MOMENTUM:
                        d_s = load_rows(p_dup_slot + o_up_next, at, k_column, K, unit < U, K)
                        kept = d_s * slot[:, None] + d_w * read[:, None]
                        kept += load_rows(p_dup_slot + o_up, at, k_column, K, unit < U, K)
                        store_rows(p_dup_slot + o_up, kept, at, k_column, K, unit < U, K)
        tl.debug_barrier()

        # what was written to its last layer,
        d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V)
        clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
        p_write_n = p_write + (i * C + (C - 1)) * R + row
        write = tl.load(p_write_n, mask=m_end, other=0.0) * clip
        d_write = tl.zeros([BR], tl.float32)
        d_clip = tl.zeros([BR], tl.float32)
        d_d1 = load_rows(p_dd1 + i * R * V, row, v_column, V, row < R, V).to(tl.float32)
        if MOMENTUM:
            slot_write = tl.load(p_slot_write + i * R + row, mask=m_end, other=0.0) * clip
            d_slot_write = tl.zeros([BR], tl.float32)
        for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
            unit, m_v = columns(i_u, BU), v_column < V
            x = load_rows(p_x + i * R * U, row, unit, U, row < R, U).to(tl.float32)
            d_w = load_rows(p_ddown + o_down_next, v_column, unit, U, m_v, U).to(like)
            g = product(d1, d_w)
            d_write -= tl.sum(g * x, axis=1)
            d_x = load_rows(p_dx + i * R * U, row, unit, U, row < R, U).to(tl.float32) - g * write[:, None]
            d_d1 -= product((x * write[:, None]).to(like), tl.trans(d_w))
            if MOMENTUM:
                d_s = load_rows(p_ddown_slot + o_down_next, v_column, unit, U, m_v, U).to(like)
                g = product(d1, d_s)
                d_slot_write -= tl.sum(g * x, axis=1)
                d_x -= g * slot_write[:, None]
                d_d1 -= product((x * slot_write[:, None]).to(like), tl.trans(d_s))
            if DEPTH == 2 and HELD:
                store_rows(p_dheld_x + i_m * R * U, d_x, row, unit, U, is_held, U)
            store_rows(p_dx + i * R * U, d_x, row, unit, U, row < R, U)
        if HELD:
            store_rows(p_dheld_d1 + i_m * R * V, d_d1, row, v_column, V, is_held, V)
        store_rows(p_dd1 + i * R * V, d_d1, row, v_column, V, row < R, V)
        tl.debug_barrier()

        # and to its first.
        if DEPTH == 2:
            k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
            d_k = load_rows(p_dkey + i * R * K, row, k_column, K, row < R, K).to(tl.float32)
            for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
                unit = columns(i_u, BU)
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    d0 = load_rows(p_d0 + i * R * PARTS * U, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    d_d0 = load_rows(p_dd0 + i * R * PARTS * U, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    d_w = load_rows(p_dup + o_up_next, at, k_column, K, unit < U, K).to(like)
                    g = product(k, tl.trans(d_w))
                    d_write -= tl.sum(g * d0, axis=1)
                    d_d0 -= g * write[:, None]
                    d_k -= product((d0 * write[:, None]).to(like), d_w)
                    if MOMENTUM:
                        d_s = load_rows(p_dup_slot + o_up_next, at, k_column, K, unit < U, K).to(like)
                        g = product(k, tl.trans(d_s))
                        d_slot_write -= tl.sum(g * d0, axis=1)
                        d_d0 -= g * slot_write[:, None]
                        d_k -= product((d0 * slot_write[:, None]).to(like), d_s)
                    store_rows(p_dd0 + i * R * PARTS * U, d_d0, row, at, PARTS * U, row < R, PARTS * U)
                    if HELD:
                        store_rows(p_dheld_d0 + i_m * R * PARTS * U, d_d0, row, at, PARTS * U, is_held, PARTS * U)
            store_rows(p_dkey + i * R * K, d_k, row, k_column, K, row < R, K)
        p_dwrite_n = p_dwrite + (i * C + (C - 1)) * R + row
        tl.store(p_dwrite_n, tl.load(p_dwrite_n, mask=m_end, other=0.0) + d_write * clip, mask=m_end)
        if MOMENTUM:
            tl.store(p_dslot_write + i * R + row, d_slot_write * clip, mask=m_end)
        tl.debug_barrier()

        # The inner gradients. Of a row that was held nothing goes further back. What is loaded again takes no registers
        # in between.
        d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V)
        clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
        if DEPTH == 2:
            k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        is_new = (row < R) & ((row >= held) | (here > 0))
        d_norm = tl.zeros([BR], tl.float32)  # of the square of the gradient's norm, times 2
        square_k = tl.zeros([BR], tl.float32)
        square_x = tl.zeros([BR], tl.float32)
        square_d0 = tl.zeros([BR], tl.float32)
        square_d1 = tl.zeros([BR], tl.float32)
        if MAX_NORM > 0:
            d_clip += tl.load(p_dclip + i * R + row, mask=row < R, other=0.0)
            d_clip += d_write * tl.load(p_write_n, mask=m_end, other=0.0)
            if MOMENTUM:
                d_clip += d_slot_write * tl.load(p_slot_write + i * R + row, mask=m_end, other=0.0)
            d_norm = tl.where(is_new & (clip < 1), -d_clip * clip * clip * clip / (MAX_NORM * MAX_NORM), 0.0)
            square_x = tl.load(p_norms + i * 3 * R + R + row, mask=row < R, other=0.0)
            square_d0 = tl.load(p_norms + i * 3 * R + 2 * R + row, mask=row < R, other=0.0)
            square_d1 = tl.sum(d1.to(tl.float32) * d1.to(tl.float32), axis=1)
            if DEPTH == 2:
                square_k = tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
        d_error = load_rows(p_dd1 + i * R * V, row, v_column, V, is_new, V).to(tl.float32)
        d_error += d1.to(tl.float32) * (d_norm * square_x)[:, None]
        if DEPTH == 2:
            for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
                unit = columns(i_u, BU)
                w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
                back = product(d1, w)
                a = _hidden(k, p_up + o_up, unit, 0, K, U, PARTS, BK)
                is_open = tl.where(is_new, 1.0, 0.0)[:, None]
                if E > 1:
                    is_open *= _of_units(p_open + i * R * E, row, unit, row < R, U, E)
                p_at, p_dat = p_d0 + i * R * PARTS * U, p_dd0 + i * R * PARTS * U
                d0 = load_rows(p_at, row, unit * PARTS, PARTS * U, row < R, PARTS * U).to(tl.float32)
                d_d0 = load_rows(p_dat, row, unit * PARTS, PARTS * U, row < R, PARTS * U).to(tl.float32)
                d_d0 = (d_d0 + d0 * (d_norm * square_k)[:, None]) * is_open
                d_back = d_d0 * slope_of(a, ACTIVATION)
                d_h = d_d0 * back * curvature_of(a, ACTIVATION)
                if PARTS == 2:
                    b = _hidden(k, p_up + o_up, unit, 1, K, U, PARTS, BK)
                    d0 = load_rows(p_at, row, unit * 2 + 1, 2 * U, row < R, 2 * U).to(tl.float32)
                    d_gate = load_rows(p_dat, row, unit * 2 + 1, 2 * U, row < R, 2 * U).to(tl.float32)
                    d_gate = (d_gate + d0 * (d_norm * square_k)[:, None]) * is_open
                    slope = slope_of(a, ACTIVATION)
                    d_back = d_back * b + d_gate * value_of(a, ACTIVATION)
                    d_h = d_h * b + d_gate * back * slope
                    store_rows(p_dat, d_d0 * back * slope, row, unit * 2 + 1, 2 * U, row < R, 2 * U)
                store_rows(p_dat, d_h, row, unit * PARTS, PARTS * U, row < R, PARTS * U)
                d_back = d_back.to(like)
                d_error += product(d_back, tl.trans(w))
                p_dw = p_ddown + o_down
                d_w = load_rows(p_dw, v_column, unit, U, v_column < V, U) + product(tl.trans(d1), d_back)
                store_rows(p_dw, d_w, v_column, unit, U, v_column < V, U)
        store_rows(p_dvalue + i * R * V, -d_error, row, v_column, V, row < R, V)
        tl.debug_barrier()
        d_v = load_rows(p_dvalue + i * R * V, row, v_column, V, row < R, V)  # of the error but for the sign
        for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
            unit = columns(i_u, BU)
            x = load_rows(p_x + i * R * U, row, unit, U, row < R, U)
            d_x = load_rows(p_dx + i * R * U, row, unit, U, row < R, U).to(tl.float32)
            d_x += x.to(tl.float32) * (d_norm * square_d1)[:, None]
            if L2:
                w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
                d_x -= product(d_v, w)
                p_dw = p_ddown + o_down
                d_w = load_rows(p_dw, v_column, unit, U, v_column < V, U) - product(tl.trans(d_v), x)
                store_rows(p_dw, d_w, v_column, unit, U, v_column < V, U)
            store_rows(p_dx + i * R * U, d_x, row, unit, U, row < R, U)
        tl.debug_barrier()

        if DEPTH == 2:
            k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
            d_k = load_rows(p_dkey + i * R * K, row, k_column, K, row < R, K).to(tl.float32)
            d_k += k.to(tl.float32) * (d_norm * square_d0)[:, None]
            for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
                unit = columns(i_u, BU)
                d_x = load_rows(p_dx + i * R * U, row, unit, U, is_new, U).to(tl.float32)
                if E > 1:
                    d_x *= _of_units(p_open + i * R * E, row, unit, row < R, U, E)
                a = _hidden(k, p_up + o_up, unit, 0, K, U, PARTS, BK)
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    if part == 0:
                        d_h = d_x * slope_of(a, ACTIVATION)
                        if PARTS == 2:
                            d_h *= _hidden(k, p_up + o_up, unit, 1, K, U, PARTS, BK)
                    else:
                        d_h = d_x * value_of(a, ACTIVATION)
                    d_h += load_rows(p_dd0 + i * R * PARTS * U, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    d_h = d_h.to(like)
                    w = load_rows(p_up + o_up, at, k_column, K, unit < U, K).to(like)
                    d_k += product(d_h, w)
                    p_dw = p_dup + o_up
                    d_w = tl.trans(load_rows(p_dw, at, k_column, K, unit < U, K)) + product(tl.trans(k), d_h)
                    store_rows(p_dw, tl.trans(d_w), at, k_column, K, unit < U, K)
            store_rows(p_dkey + i * R * K, d_k, row, k_column, K, row < R, K)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["M"])
def ends_back_kernel(
    p_done,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_dup,
    p_ddown,
    p_dup_slot,
    p_ddown_slot,
    p_dkeep,
    p_dread,
    p_dslot,
    M,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ENDS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
    BE: tl.constexpr,
):
    """The gradients of the coefficients of a chunk's anchor in the next one, from both and the next one's gradient."""
    i = tl.program_id(0).to(tl.int64)
    k_column, v_column, block = columns(0, BK), columns(0, BV), columns(0, BE)
    o_up, o_down = i * PARTS * U * K, i * V * U
    o_up_next, o_down_next = (i + M) * PARTS * U * K, (i + M) * V * U
    d_keep = tl.zeros([1, BE], tl.float32)
    d_read = tl.zeros([1, BE], tl.float32)
    d_slot = tl.zeros([1, BE], tl.float32)
    for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
        unit, m_v = columns(i_u, BU), v_column < V
        w = load_rows(p_down + o_down, v_column, unit, U, m_v, U)
        d_w = load_rows(p_ddown + o_down_next, v_column, unit, U, m_v, U)
        of_keep = tl.sum(w * d_w, axis=0)
        if MOMENTUM:
            s = load_rows(p_down_slot + o_down, v_column, unit, U, m_v, U)
            of_read = tl.sum(s * d_w, axis=0)
            of_slot = tl.sum(s * load_rows(p_ddown_slot + o_down_next, v_column, unit, U, m_v, U), axis=0)
        if DEPTH == 2:
            for part in tl.static_range(PARTS):
                at = unit * PARTS + part
                w = load_rows(p_up + o_up, at, k_column, K, unit < U, K)
                d_w = load_rows(p_dup + o_up_next, at, k_column, K, unit < U, K)
                of_keep += tl.sum(w * d_w, axis=1)
                if MOMENTUM:
                    s = load_rows(p_up_slot + o_up, at, k_column, K, unit < U, K)
                    of_read += tl.sum(s * d_w, axis=1)
                    of_slot += tl.sum(s * load_rows(p_dup_slot + o_up_next, at, k_column, K, unit < U, K), axis=1)
        d_keep += _per_block(of_keep[None, :], unit, U, E, BE)
        if MOMENTUM:
            d_read += _per_block(of_read[None, :], unit, U, E, BE)
            d_slot += _per_block(of_slot[None, :], unit, U, E, BE)
    m_block = block < E
    if ENDS:
        m_block = m_block & (_spread(i // M, block) < tl.load(p_done + i % M))
    tl.store(p_dkeep + i * E + block, tl.sum(d_keep, axis=0), mask=m_block)
    if MOMENTUM:
        tl.store(p_dread + i * E + block, tl.sum(d_read, axis=0), mask=m_block)
        tl.store(p_dslot + i * E + block, tl.sum(d_slot, axis=0), mask=m_block)


# Host code -----------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What a walk takes, contiguous; see `walk.Tensors` and `chunk.Coefficients`. `units` are the inputs of a lone
    layer; `held` counts the rows that the first chunk holds, `done` the chunks that are completed, `[M]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    units: Tensor | None
    keep: Tensor
    momentum_read: Tensor
    write: Tensor
    keep_end: Tensor
    momentum_read_end: Tensor
    momentum_keep_end: Tensor
    momentum_write_end: Tensor
    up: Tensor | None
    down: Tensor
    up_slot: Tensor | None
    down_slot: Tensor | None
    held_x: Tensor | None
    held_d0: Tensor | None
    held_d1: Tensor | None
    is_open: Tensor | None
    held: Tensor | None
    done: Tensor | None

    def part(self, low: int, high: int) -> Inputs:
        """Of some chunks."""
        found: dict[str, Any] = {n: x[low:high] for n, x in self._asdict().items() if n in _SEQUENCES and x is not None}
        if low > 0:
            found |= dict.fromkeys(("held", "held_x", "held_d0", "held_d1"))
        return self._replace(**found, done=None if self.done is None else self.done - low)


_SEQUENCES = (*Inputs._fields[:11], "is_open")
_DIFFERENTIABLE = 18
"""The first of the inputs, that have gradients."""


class Kept(NamedTuple):
    """What a backward needs, per chunk; the anchors with the one after the last."""

    up: Tensor | None
    down: Tensor
    up_slot: Tensor | None
    down_slot: Tensor | None
    x: Tensor
    d0: Tensor | None
    d1: Tensor
    norms: Tensor


def _sizes(inputs: Inputs, rule: Rule) -> dict[str, Any]:
    query, value = inputs.query, inputs.value
    width, value_dim, units = query.shape[3], value.shape[3], inputs.down.shape[2]
    parts = 1 if inputs.up is None else inputs.up.shape[1] // units
    return {
        "C": query.shape[2],
        "R": value.shape[2],
        "K": width,
        "V": value_dim,
        "U": units,
        "E": inputs.keep.shape[3],
        "DEPTH": 1 if inputs.up is None else 2,
        "PARTS": parts,
        "MOMENTUM": inputs.down_slot is not None,
        "ACTIVATION": rule.activation,
        "MAX_NORM": rule.max_norm,
        "BC": tile(query.shape[2], 64),
        "BR": tile(value.shape[2], 128),
        "BK": tile(width, 128),
        "BV": tile(value_dim, 128),
    }


def _memory(x: Inputs | Kept) -> dict[str, Any]:
    return {"p_up": x.up, "p_down": x.down, "p_up_slot": x.up_slot, "p_down_slot": x.down_slot}


def _room(x: Tensor | None, *shape: int) -> Tensor | None:
    return None if x is None else x.new_empty(*shape, *x.shape[-2:])


def forward(inputs: Inputs, rule: Rule, with_backward: bool) -> tuple[list[Tensor | None], Kept]:
    """Outputs, the last anchor, the running chunk's factors but for the first layer's inputs; and, `with_backward`,
    what it needs."""
    sizes = _sizes(inputs, rule)
    like, (count, rows, size, _) = inputs.value, inputs.query.shape
    held_rows, width = like.shape[2:]
    memory = [inputs.up, inputs.down, inputs.up_slot, inputs.down_slot]
    bytes_of_one = sum(4 * x.numel() for x in memory if x is not None)
    span = count if with_backward else min(count, max(1, ANCHOR_BYTES // bytes_of_one))
    anchors = [_room(x, span + 1, rows) for x in memory]
    for anchor, x in zip(anchors, memory, strict=True):
        if anchor is not None and x is not None:
            anchor[0].copy_(x)
    up, down, up_slot, down_slot = anchors
    assert down is not None
    outs = 0 if inputs.up is None else inputs.up.shape[1]
    factors: dict[str, Any] = {
        "x": like.new_empty(span, rows, held_rows, sizes["U"]) if outs else None,
        "d0": like.new_empty(span, rows, held_rows, outs) if outs else None,
        "d1": torch.empty_like(like[:span]),
        "norms": inputs.down.new_empty(span, rows, 3, held_rows),
    }
    run = [inputs.down.new_zeros(rows, held_rows, d) for d in (sizes["U"] if outs else 0, outs, width)]
    y = like.new_empty(count, rows, size, width)
    for low in range(0, count, span):
        high = min(count, low + span)
        some = inputs.part(low, high)
        kept = Kept(up, down, up_slot, down_slot, **{**factors, "x": factors["x"] if outs else some.units})
        _walk(some, kept, run, rule, sizes)
        launch_tiled(
            read_kernel,
            (high - low, rows),
            p_query=some.query,
            p_key=some.key,
            p_write=some.write,
            p_keep=some.keep,
            p_read=some.momentum_read,
            **_memory(kept),
            p_x=kept.x,
            p_d0=kept.d0,
            p_d1=kept.d1,
            p_norms=kept.norms,
            p_y=y[low:high],
            M=rows,
            RESIDUAL=rule.residual,
            **sizes,
        )
        if high < count:
            for anchor in anchors:
                if anchor is not None:
                    anchor[0].copy_(anchor[high - low])
    ends = [None if anchor is None else anchor[high - low].clone() for anchor in anchors]
    return [y, *ends, *run], kept


def _walk(inputs: Inputs, kept: Kept, run: list[Tensor], rule: Rule, sizes: dict[str, Any]) -> None:
    count, rows = inputs.query.shape[:2]
    launch_tiled(
        walk_kernel,
        (rows,),
        p_key=inputs.key,
        p_value=inputs.value,
        p_open=inputs.is_open,
        p_write=inputs.write,
        p_slot_write=inputs.momentum_write_end,
        p_keep=inputs.keep_end,
        p_read=inputs.momentum_read_end,
        p_slot=inputs.momentum_keep_end,
        p_held=inputs.held,
        p_held_x=inputs.held_x,
        p_held_d0=inputs.held_d0,
        p_held_d1=inputs.held_d1,
        p_done=inputs.done,
        **_memory(kept),
        p_x=kept.x,
        p_d0=kept.d0,
        p_d1=kept.d1,
        p_norms=kept.norms,
        p_run_x=run[0],
        p_run_d0=run[1],
        p_run_d1=run[2],
        count=count,
        M=rows,
        HELD=inputs.held is not None,
        ENDS=inputs.done is not None,
        RESIDUAL=rule.residual,
        L2=rule.l2,
        **sizes,
    )


def backward(inputs: Inputs, rule: Rule, kept: Kept, d_outputs: list[Tensor | None]) -> Inputs:
    """Gradients of the inputs, from those of outputs, last anchor and running factors."""
    sizes = _sizes(inputs, rule)
    count, rows = inputs.query.shape[:2]
    d_y, *d_ends, d_run_x, d_run_d0, d_run_d1 = d_outputs
    anchors = [kept.up, kept.down, kept.up_slot, kept.down_slot]
    d_anchors = [None if x is None else torch.empty_like(x) for x in anchors]
    for d_anchor, d_end in zip(d_anchors, d_ends, strict=True):
        if d_anchor is not None and d_end is not None:
            d_anchor[-1].copy_(d_end)
    d_up, d_down, d_up_slot, d_down_slot = d_anchors
    d_x, d_d1 = torch.empty_like(kept.x), torch.empty_like(kept.d1)
    d_d0 = None if kept.d0 is None else torch.empty_like(kept.d0)
    d_clip = kept.norms.new_empty(count, rows, sizes["R"])
    d_inputs = inputs._replace(
        **{n: torch.zeros_like(x) for n, x in inputs._asdict().items() if n in _ZEROED and x is not None},
        **{
            n: fresh(x)
            for n, x in inputs._asdict().items()
            if n in ("query", "value", "keep", "momentum_read", "write")
        },
        units=None if inputs.units is None else d_x,
    )
    shared: dict[str, Any] = {
        "p_key": inputs.key,
        "p_write": inputs.write,
        "p_d1": kept.d1,
        "p_norms": kept.norms,
        "M": rows,
    }
    layers: dict[str, Any] = {
        "p_up": kept.up,
        "p_up_slot": kept.up_slot,
        "p_d0": kept.d0,
        "p_dup": d_up,
        "p_dup_slot": d_up_slot,
    }
    last: dict[str, Any] = {
        "p_down": kept.down,
        "p_down_slot": kept.down_slot,
        "p_ddown": d_down,
        "p_ddown_slot": d_down_slot,
    }
    queries: dict[str, Any] = {
        "p_dy": d_y,
        "p_query": inputs.query,
        "p_keep": inputs.keep,
        "p_read": inputs.momentum_read,
        "p_inner": torch.empty_like(inputs.write),
        "p_dh": None if kept.up is None else kept.d1.new_empty(*inputs.query.shape[:3], kept.up.shape[2]),
        "p_dquery": d_inputs.query,
    }
    BE = 1 if sizes["E"] == 1 else tile(sizes["E"], 64)
    launch_tiled(
        read_back_kernel,
        (count, rows),
        p_up=kept.up,
        p_up_slot=kept.up_slot,
        p_x=kept.x,
        p_d0=kept.d0,
        p_dkeep=d_inputs.keep,
        p_dread=d_inputs.momentum_read,
        p_dx=d_x,
        BE=BE,
        **last,
        **queries,
        **shared,
        **sizes,
    )
    launch_tiled(
        query_back_kernel,
        (count, rows),
        p_dkey=d_inputs.key,
        p_dwrite=d_inputs.write,
        p_dd0=d_d0,
        p_dd1=d_d1,
        p_dclip=d_clip,
        **layers,
        **queries,
        **shared,
        **{name: size for name, size in sizes.items() if name != "ACTIVATION"},
    )
    launch_tiled(
        walk_back_kernel,
        (rows,),
        p_open=inputs.is_open,
        p_slot_write=inputs.momentum_write_end,
        p_keep=inputs.keep_end,
        p_read=inputs.momentum_read_end,
        p_slot=inputs.momentum_keep_end,
        p_held=inputs.held,
        p_done=inputs.done,
        p_drun_x=d_run_x,
        p_drun_d0=d_run_d0,
        p_drun_d1=d_run_d1,
        p_dkey=d_inputs.key,
        p_dvalue=d_inputs.value,
        p_dwrite=d_inputs.write,
        p_dslot_write=d_inputs.momentum_write_end,
        p_dheld_x=d_inputs.held_x,
        p_dheld_d0=d_inputs.held_d0,
        p_dheld_d1=d_inputs.held_d1,
        p_x=kept.x,
        p_dx=d_x,
        p_dd0=d_d0,
        p_dd1=d_d1,
        p_dclip=d_clip,
        count=count,
        HELD=inputs.held is not None,
        ENDS=inputs.done is not None,
        L2=rule.l2,
        **layers,
        **last,
        **shared,
        **{name: size for name, size in sizes.items() if name != "BC"},
    )
    launch_tiled(
        ends_back_kernel,
        (count, rows),
        p_done=inputs.done,
        **_memory(kept),
        p_dup=d_up,
        p_ddown=d_down,
        p_dup_slot=d_up_slot,
        p_ddown_slot=d_down_slot,
        p_dkeep=d_inputs.keep_end,
        p_dread=d_inputs.momentum_read_end,
        p_dslot=d_inputs.momentum_keep_end,
        M=rows,
        ENDS=inputs.done is not None,
        BE=BE,
        **{name: sizes[name] for name in ("K", "V", "U", "E", "DEPTH", "PARTS", "MOMENTUM", "BK", "BV")},
    )
    width = sizes["V"]
    if rule.residual:
        assert d_y is not None
        d_inputs.query[..., :width] += d_y
        if rule.l2:
            d_inputs.key[..., :width] -= d_inputs.value
    up, down, up_slot, down_slot = (None if x is None else x[0].clone() for x in d_anchors)
    assert down is not None
    return d_inputs._replace(up=up, down=down, up_slot=up_slot, down_slot=down_slot)


_ZEROED = (
    "key", "keep_end", "momentum_read_end", "momentum_keep_end", "momentum_write_end", "held_x", "held_d0", "held_d1",
)  # fmt: skip
"""Gradients that a kernel writes in part."""


# What autograd and torch.compile see ---------------------------------------------------------------------------------

_GIVEN = ", ".join(f"Tensor{'?' if 'None' in str(t) else ''} {n}" for n, t in Inputs.__annotations__.items())


def _tensors(found: Any, like: Tensor) -> tuple[Tensor, ...]:
    """An operator returns no `None`."""
    return tuple(like.new_empty(0) if x is None else x for x in found)


def _or_none(found: Any) -> list[Any]:
    return [None if x is None or x.numel() == 0 else x for x in found]


def _forward(*given: Any) -> tuple[Tensor, ...]:
    *tensors, activation, residual, l2, max_norm, with_backward = given
    inputs = Inputs(*contiguous(*tensors))
    outputs, kept = forward(inputs, Rule(activation, residual, l2, max_norm), with_backward)
    kept = kept._replace(x=None if inputs.up is None else kept.x)  # type: ignore[arg-type]
    return _tensors([*outputs, *(kept if with_backward else [None] * len(kept))], inputs.down)


def _fake(*given: Any) -> tuple[Tensor, ...]:
    inputs, with_backward = Inputs(*given[: len(Inputs._fields)]), given[-1]
    query, value, down, up = inputs.query, inputs.value, inputs.down, inputs.up
    (count, rows), held = query.shape[:2], value.shape[2]
    memory = (up, down, inputs.up_slot, inputs.down_slot)
    units, outs = (0, 0) if up is None else (down.shape[2], up.shape[1])
    found = [value.new_empty(*query.shape[:3], value.shape[3])]
    found += [down.new_empty(0) if x is None else fresh(x) for x in memory]
    found += [down.new_empty(rows, held, d) for d in (units, outs, value.shape[3])]
    if not with_backward:
        return *found, *(down.new_empty(0) for _ in Kept._fields)
    found += [down.new_empty(0) if x is None else x.new_empty(count + 1, *x.shape) for x in memory]
    found += [value.new_empty(count, rows, held, d) if d else down.new_empty(0) for d in (units, outs, value.shape[3])]
    return *found, down.new_empty(count, rows, 3, held)


def _backward(*given: Any) -> tuple[Tensor, ...]:
    tensors, rest = given[: len(Inputs._fields)], given[len(Inputs._fields) :]
    (*rule, kept, d_outputs) = rest
    inputs = Inputs(*contiguous(*tensors))
    kept = Kept(*_or_none(kept))
    if inputs.units is not None:
        kept = kept._replace(x=inputs.units)
    d_inputs = backward(inputs, Rule(*rule), kept, contiguous(*d_outputs))
    return _tensors(d_inputs[:_DIFFERENTIABLE], inputs.down)


_walked = torch.library.custom_op(
    "memzoo::deep_memory",
    _forward,
    mutates_args=(),
    schema=f"({_GIVEN}, {RULE}, bool with_backward) -> ({', '.join(['Tensor'] * 16)})",
)
_walked.register_fake(_fake)
_gradient = torch.library.custom_op(
    "memzoo::deep_memory_backward",
    _backward,
    mutates_args=(),
    schema=f"({_GIVEN}, {RULE}, Tensor[] kept, Tensor[] d_outputs) -> ({', '.join(['Tensor'] * _DIFFERENTIABLE)})",
)
_gradient.register_fake(lambda *given: gradients_like(given[:_DIFFERENTIABLE], given[Inputs._fields.index("down")]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, activation, residual, l2, max_norm, _ = inputs
    ctx.rule = activation, residual, l2, max_norm
    ctx.save_for_backward(*tensors, *output[8:])
    ctx.shapes = [x.shape for x in output[:8]]
    ctx.set_materialize_grads(False)


def _pull_back(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    tensors, kept = saved[: len(Inputs._fields)], saved[len(Inputs._fields) :]
    down = tensors[Inputs._fields.index("down")]
    given = [down.new_zeros(shape) if d is None else d for d, shape in zip(d_outputs[:8], ctx.shapes, strict=True)]
    gradients = _gradient(*tensors, *ctx.rule, list(kept), given)
    found = wanted(tensors[:_DIFFERENTIABLE], gradients)
    return *found, *[None] * (len(tensors) - _DIFFERENTIABLE), *[None] * 5


_walked.register_autograd(_pull_back, setup_context=_save)


def _walk_of(network: Network, ends: Ends, tensors: Tensors, differentiable: bool) -> tuple[Tensor, ...]:
    """`walk.walk` by the operator; under Muon by torch, what of a single token its kernel does not compute."""
    if network.newton_schulz_steps is not None:
        return chunked._walk(network, ends, tensors.wide(), differentiable)
    depth, like, c = network.depth, tensors.value.dtype, tensors.coefficients
    weights, slots = tensors.memory[:depth], tensors.memory[depth:]
    key, units, held = tensors.key, None, ends.held
    rows = key.shape[2]
    if depth == 1 and tensors.is_open is not None:
        units = network.scale(key, tensors.is_open, 0)
    elif depth == 1:
        units = key
    held_factors: tuple[Tensor, ...] = ()
    if held is not None:
        held_factors = tensors.held
        if ends.halo > 0:
            held = torch.where(held > 0, ends.halo + held, 0)
        is_held = (torch.arange(rows, device=key.device) < held[:, None])[..., None]
        # Its first inputs are the keys of the chunk's first slots, which hold no new token.
        if depth == 2:
            key = torch.cat([torch.where(is_held, held_factors[0], key[0])[None], key[1:]])
        else:
            assert units is not None
            units = torch.cat([torch.where(is_held, held_factors[0], units[0])[None], units[1:]])
    outputs = _walked(
        tensors.query.to(like),
        key.to(like),
        tensors.value,
        None if units is None else units.to(like),
        c.keep,
        c.momentum_read,
        c.write,
        c.keep_end,
        c.momentum_read_end,
        c.momentum_keep_end,
        c.momentum_write_end,
        weights[0] if depth == 2 else None,
        weights[-1],
        slots[0] if depth == 2 and slots else None,
        slots[-1] if slots else None,
        held_factors[1] if held_factors and depth == 2 else None,
        held_factors[2] if held_factors and depth == 2 else None,
        held_factors[-1] if held_factors else None,
        tensors.is_open if depth == 2 else None,
        held,
        ends.done,
        *rule_of(network),
        differentiable,
    )
    y, up, down, up_slot, down_slot, run_x, run_d0, run_d1, *_ = outputs
    inputs = key if units is None else units
    first = torch.zeros_like(inputs[0])
    if ends.done is not None:  # the inputs of the first layer in the running chunk
        running = ends.done.clamp(max=inputs.shape[0] - 1)
        first = inputs[running, torch.arange(inputs.shape[1], device=key.device)]
        first = torch.where((ends.done < inputs.shape[0])[:, None, None], first, 0)
    first = first.to(run_d1.dtype)
    if depth == 1:
        return (y, down, *([down_slot] if slots else []), first, run_d1)
    return (y, up, down, *([up_slot, down_slot] if slots else []), first, run_x, run_d0, run_d1)


@mixed_precision
def deep_memory(*inputs: Any, **options: Any) -> tuple[Tensor, DeepMemoryState]:
    """See `memzoo.kernels.deep_memory.deep_memory`; matrix products take factors in the dtype of the values."""
    return chunked.computed(_walk_of, triton_step.step, *inputs, **options)
