"""A single token of the deep memory without autograd, in Triton: a step of decoding.

Which rows complete a chunk, the kernels ask their positions on the device: the host asks for nothing, shapes and
addresses stay, and a step can be part of a CUDA graph. Each is a program per row and head, in float32:

- `step`: a row of factors, the coefficients, what the query reads and, where the token completes a chunk, the next
  anchor over the old one. Under Muon once a chunk, of which the walk is torch's, it makes the anchor's momentum alone,
  and for each layer a kernel of Newton-Schulz follows (`newton_schulz.triton.advance`), which makes the anchor's
  weights where the chunk has ended and else returns.
- Under Muon at every token, in its place `momentum`: the row of factors, the coefficients and `S_t`; for each layer
  the same kernel of Newton-Schulz, which makes `M_t = a M_{t-1} + l NS(S_t)` over `M_{t-1}`; and `recall`: what the
  query reads of `M_t` and, where the token completes a chunk, both over the anchor. `2 + L` launches.

What a CPU clears of dust (`decay.without_dust`) costs a GPU nothing and stays.

Bytes per row and head, P weights, F hidden units, chunks of C: weights and momentum (the weights three times, from the
cache) and the rows, `8 P + 8 C F`; at K = V = C = 64, F = 256 an H100 (3.35 TB/s) moves them in 120 ns. Under Muon at
every token `S_t` is written and read besides, and `M_t` read, written and read, `28 P + 8 C F`: 310 ns, less where the
cache holds what the kernel before has written. Operations: `12 P` for a gradient, `2 C P` at most for `S_t`, and those
of Newton-Schulz, 26 million of 31: 0.5 us at the 67 TFLOP/s in float32. One program has one of 132 processors: 8 us
for `S_t` and 26 us for each layer's Newton-Schulz, for up to 132 rows and heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.deep_memory import DeepMemoryState
from memzoo.kernels.deep_memory.chunk import Network
from memzoo.kernels.deep_memory.triton_units import (
    RULE,
    block_of,
    is_open_at,
    launch_tiled,
    of_blocks,
    rule_of,
    slope_of,
    value_of,
)
from memzoo.kernels.linear_attention.triton import columns, load_rows, store_rows
from memzoo.kernels.newton_schulz import triton as newton_schulz
from memzoo.kernels.registry import writable
from memzoo.kernels.triton_support import contiguous, fresh, product, tile

# Pieces --------------------------------------------------------------------------------------------------------------


@triton.jit
def _seen(k, p_up, unit, part, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr):
    """What one token gives a tile of units by the part-th of their rows, `[BU]`."""
    w = load_rows(p_up, unit * PARTS + part, columns(0, BK), K, unit < U, K)
    return tl.sum(w * k[None, :], axis=1)


@triton.jit
def _units(
    p_x,
    p_up,
    position,
    unit,
    K: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    UNLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BK: tl.constexpr,
):
    """What the last layer is given by a tile of units where the network is given `p_x`, `[BU]`; by closed ones 0."""
    if DEPTH == 1:
        z = tl.load(p_x + unit, mask=unit < U, other=0.0).to(tl.float32)
    else:
        k_column = columns(0, BK)
        x = tl.load(p_x + k_column, mask=k_column < K, other=0.0).to(tl.float32)
        z = value_of(_seen(x, p_up, unit, 0, K, U, PARTS, BK), ACTIVATION)
        if PARTS == 2:
            z *= _seen(x, p_up, unit, 1, K, U, PARTS, BK)
    return z * is_open_at(position, block_of(unit, U, E), E, UNLOCK)


@triton.jit
def _learn(
    p_key,
    p_value,
    position,
    p_up,
    p_down,
    p_x0,
    p_x1,
    p_d0,
    p_d1,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    UNLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """The factors of one token's gradient, each written to the row that is pointed to."""
    k_column, v_column = columns(0, BK), columns(0, BV)
    error = -tl.load(p_value + v_column, mask=v_column < V, other=0.0).to(tl.float32)
    if L2 and RESIDUAL:
        error += tl.load(p_key + v_column, mask=v_column < V, other=0.0).to(tl.float32)
    if DEPTH == 2:
        k = tl.load(p_key + k_column, mask=k_column < K, other=0.0).to(tl.float32)
        tl.store(p_x0 + k_column, k, mask=k_column < K)
    square_x = 0.0
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        x = _units(p_key, p_up, position, unit, K, U, E, UNLOCK, DEPTH, PARTS, ACTIVATION, BK)
        tl.store(p_x1 + unit, x, mask=unit < U)
        square_x += tl.sum(x * x, axis=0)
        if L2:
            w = load_rows(p_down, v_column, unit, U, v_column < V, U)
            error += tl.sum(w * x[None, :], axis=1)
    square = square_x * tl.sum(error * error, axis=0)
    if DEPTH == 2:
        square_d = 0.0
        for i_u in range(tl.cdiv(U, BU)):
            unit = columns(i_u, BU)
            w = load_rows(p_down, v_column, unit, U, v_column < V, U)
            back = tl.sum(w * error[:, None], axis=0) * is_open_at(position, block_of(unit, U, E), E, UNLOCK)
            a = _seen(k, p_up, unit, 0, K, U, PARTS, BK)
            d0 = back * slope_of(a, ACTIVATION)
            p_unit = p_d0 + unit * PARTS
            if PARTS == 2:
                d_gate = back * value_of(a, ACTIVATION)
                square_d += tl.sum(d_gate * d_gate, axis=0)
                tl.store(p_unit + 1, d_gate, mask=unit < U)
                d0 *= _seen(k, p_up, unit, 1, K, U, PARTS, BK)
            square_d += tl.sum(d0 * d0, axis=0)
            tl.store(p_unit, d0, mask=unit < U)
        square += square_d * tl.sum(k * k, axis=0)
    if MAX_NORM > 0:
        clip = tl.rsqrt(tl.maximum(square / (MAX_NORM * MAX_NORM), 1.0))
        error *= clip
        if DEPTH == 2:
            tl.debug_barrier()
            for i_u in range(tl.cdiv(PARTS * U, BU)):
                at = columns(i_u, BU)
                d0 = tl.load(p_d0 + at, mask=at < PARTS * U, other=0.0)
                tl.store(p_d0 + at, d0 * clip, mask=at < PARTS * U)
    tl.store(p_d1 + v_column, error, mask=v_column < V)


@triton.jit
def _shifted(p_old, p_new, p_last, width, HALO: tl.constexpr, BH: tl.constexpr, B: tl.constexpr):
    """Of the last `HALO` tokens one more and the first no longer."""
    row = tl.arange(0, BH).to(tl.int64)
    for i_c in range(tl.cdiv(width, B)):
        column = columns(i_c, B)
        old = load_rows(p_old + width, row, column, width, row < HALO - 1, width)
        last = tl.load(p_last + column, mask=column < width, other=0.0).to(tl.float32)
        store_rows(
            p_new, tl.where((row == HALO - 1)[:, None], last[None, :], old), row, column, width, row < HALO, width
        )


@triton.jit
def _learn_all(
    p_key,
    p_value,
    p_recent_key,
    p_recent_value,
    p_new_recent_key,
    p_new_recent_value,
    position,
    p_up,
    p_down,
    p_x0,
    p_x1,
    p_d0,
    p_d1,
    i,
    C: tl.constexpr,
    HALO: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    UNLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """The factors of the token's gradient and, where it is the first of a chunk, of those of the `HALO` tokens before,
    at the chunk's anchor, each in its row of the `i`-th row and head; which tokens will be the last `HALO`."""
    here = HALO + position % C
    p_key, p_value = p_key + i * K, p_value + i * V
    p_x0_here, p_d0_here = p_x0, p_d0
    if DEPTH == 2:
        p_x0_here, p_d0_here = p_x0 + here * K, p_d0 + here * PARTS * U
    _learn(
        *(p_key, p_value, position, p_up, p_down, p_x0_here, p_x1 + here * U, p_d0_here, p_d1 + here * V),
        *(K, V, U, E, UNLOCK, DEPTH, PARTS, ACTIVATION, RESIDUAL, L2, MAX_NORM, BK, BV, BU),
    )
    if HALO > 0:
        p_recent_key, p_recent_value = p_recent_key + i * HALO * K, p_recent_value + i * HALO * V
        for index in range(tl.where(position % C == 0, HALO, 0)):
            before = tl.cast(index, tl.int64)
            if DEPTH == 2:
                p_x0_here, p_d0_here = p_x0 + before * K, p_d0 + before * PARTS * U
            _learn(
                *(p_recent_key + before * K, p_recent_value + before * V, position, p_up, p_down),
                *(p_x0_here, p_x1 + before * U, p_d0_here, p_d1 + before * V),
                *(K, V, U, E, UNLOCK, DEPTH, PARTS, ACTIVATION, RESIDUAL, L2, MAX_NORM, BK, BV, BU),
            )
        _shifted(p_recent_key, p_new_recent_key + i * HALO * K, p_key, K, HALO, BH, BK)
        _shifted(p_recent_value, p_new_recent_value + i * HALO * V, p_value, V, HALO, BH, BV)


@triton.jit
def _window(p_gate, i, row, here, WINDOW: tl.constexpr):
    """The weight of each row's gradient in what the token of row `here` writes."""
    if WINDOW > 0:
        lag = here - row
        weight = tl.load(p_gate + i * WINDOW + lag, mask=(lag >= 0) & (lag < WINDOW), other=0.0)
    else:
        weight = tl.where(row == here, 1.0, 0.0)
    return weight


@triton.jit
def _outer(p_c, p_d, p_x, of_d, of_x, d_stride, x_stride, rows, D: tl.constexpr, X: tl.constexpr):
    """`sum_r c_r d_r x_r^T` over the first `rows`, `[of_d, of_x]`; in slices of 16, which take few registers."""
    found = tl.zeros([of_d.shape[0], of_x.shape[0]], tl.float32)
    for i_r in range(tl.cdiv(rows, 16)):
        row = columns(i_r, 16)
        c = tl.load(p_c + row, mask=row < rows, other=0.0)
        d = load_rows(p_d, row, of_d, d_stride, row < rows, D) * c[:, None]
        found += product(tl.trans(d), load_rows(p_x, row, of_x, x_stride, row < rows, X))
    return found


# Plain steps, and Muon once a chunk ----------------------------------------------------------------------------------


@triton.jit
def step_kernel(
    p_query,
    p_key,
    p_value,
    p_retention,
    p_decay,
    p_step,
    p_gate,
    p_position,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x0,
    p_x1,
    p_d0,
    p_d1,
    p_write,
    p_slot_write,
    p_keep,
    p_read,
    p_slot,
    p_recent_key,
    p_recent_value,
    p_orthogonal,
    p_new_write,
    p_new_slot_write,
    p_new_keep,
    p_new_read,
    p_new_slot,
    p_new_recent_key,
    p_new_recent_value,
    p_new_position,
    p_new_orthogonal,
    p_end_keep,
    p_end_orthogonal,
    p_y,
    H: tl.constexpr,
    C: tl.constexpr,
    HALO: tl.constexpr,
    WINDOW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    UNLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    MUON: tl.constexpr,
    RETENTION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
    BE: tl.constexpr,
):
    """One token of a row: its factors, written to its row of the state's, the coefficients after it, and what its
    query reads. With one layer the units are the key's coordinates, and `p_x1` are the inputs.

    Before the first token of a chunk the `HALO` rows are made anew, at the chunk's anchor; after the last one the next
    anchor takes the place of the old. Whether a token is one of them the program asks its row's position: the host
    need not know. `UNLOCK` says after how many tokens each of `E > 1` blocks opens.

    Under `MUON` (once a chunk) the anchor's momentum is made here and not its weights, of which `p_end_*` take the
    coefficients: those of weights and orthogonal momentum after a token that completes a chunk, 1 and 0 after others.
    """
    R: tl.constexpr = HALO + C
    i = tl.program_id(0).to(tl.int64)
    row, block = tl.arange(0, BR).to(tl.int64), columns(0, BE)
    k_column, v_column = columns(0, BK), columns(0, BV)
    position = tl.load(p_position + i // H)
    place = position % C
    p_x1, p_d1 = p_x1 + i * R * U, p_d1 + i * R * V
    p_down = p_down + i * V * U
    if DEPTH == 2:
        p_up, p_x0, p_d0 = p_up + i * PARTS * U * K, p_x0 + i * R * K, p_d0 + i * R * PARTS * U
    if MOMENTUM:
        p_down_slot = p_down_slot + i * V * U
        if DEPTH == 2:
            p_up_slot = p_up_slot + i * PARTS * U * K
    _learn_all(
        *(p_key, p_value, p_recent_key, p_recent_value, p_new_recent_key, p_new_recent_value, position),
        *(p_up, p_down, p_x0, p_x1, p_d0, p_d1, i, C, HALO, K, V, U, E, UNLOCK),
        *(DEPTH, PARTS, ACTIVATION, RESIDUAL, L2, MAX_NORM, BH, BK, BV, BU),
    )

    # The coefficients after it.
    rate = tl.load(p_step + i)
    step = _window(p_gate, i, row, HALO + place, WINDOW)
    if not MUON:
        step *= rate
    retention = 1.0
    if RETENTION:
        retention = tl.exp(tl.load(p_retention + i))
    write = tl.load(p_write + i * R + row, mask=row < R, other=0.0) * retention
    keep = tl.load(p_keep + i * E + block, mask=block < E, other=0.0)
    read = tl.load(p_read + i * E + block, mask=block < E, other=0.0)
    slot = tl.load(p_slot + i * E + block, mask=block < E, other=0.0)
    is_open = is_open_at(position, block, E, UNLOCK) > 0
    if MOMENTUM:
        decay = tl.exp(tl.load(p_decay + i))
        step += tl.load(p_slot_write + i * R + row, mask=row < R, other=0.0) * decay
        tl.store(p_new_slot_write + i * R + row, step, mask=row < R)
        slot = tl.where(is_open, slot * decay, slot)
        added = slot
        if MUON:  # whose step size is outside of the momentum
            added *= rate
            step *= rate
        read = tl.where(is_open, read * retention + added, read)
    write += step
    keep = tl.where(is_open, keep * retention, keep)
    tl.store(p_new_write + i * R + row, write, mask=row < R)
    tl.store(p_new_keep + i * E + block, keep, mask=block < E)
    tl.store(p_new_read + i * E + block, read, mask=block < E)
    tl.store(p_new_slot + i * E + block, slot, mask=block < E)
    if MUON:
        is_done, p_block = place == C - 1, i * E + block
        orthogonal = tl.load(p_orthogonal + p_block, mask=block < E, other=0.0)
        orthogonal = tl.where(is_open, orthogonal * retention + rate, orthogonal)
        tl.store(p_new_orthogonal + p_block, tl.where(is_done, 0.0, orthogonal), mask=block < E)
        tl.store(p_end_keep + p_block, tl.where(is_done, keep, 1.0), mask=block < E)
        tl.store(p_end_orthogonal + p_block, tl.where(is_done, orthogonal, 0.0), mask=block < E)
    if i % H == 0:
        tl.store(p_new_position + i // H, position + 1)
    tl.debug_barrier()

    # What its query reads.
    p_query = p_query + i * K
    if DEPTH == 2:
        q = tl.load(p_query + k_column, mask=k_column < K, other=0.0).to(tl.float32)
        x0 = load_rows(p_x0, row, k_column, K, row < R, K)
        scores = tl.sum(x0 * q[None, :], axis=1) * write
    y = tl.zeros([BV], tl.float32)
    inner = tl.zeros([BR], tl.float32)
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        unit_open = is_open_at(position, block_of(unit, U, E), E, UNLOCK)
        w_keep = of_blocks(p_new_keep + i * E, unit, U, E) * unit_open
        s_keep = of_blocks(p_new_read + i * E, unit, U, E) * unit_open
        if DEPTH == 1:
            z = tl.load(p_query + unit, mask=unit < U, other=0.0).to(tl.float32)
        else:
            z = _seen(q, p_up, unit, 0, K, U, PARTS, BK) * w_keep
            if MOMENTUM:
                z += _seen(q, p_up_slot, unit, 0, K, U, PARTS, BK) * s_keep
            d0 = load_rows(p_d0, row, unit * PARTS, PARTS * U, row < R, PARTS * U)
            z = value_of(z - tl.sum(d0 * scores[:, None], axis=0), ACTIVATION)
            if PARTS == 2:
                b = _seen(q, p_up, unit, 1, K, U, PARTS, BK) * w_keep
                if MOMENTUM:
                    b += _seen(q, p_up_slot, unit, 1, K, U, PARTS, BK) * s_keep
                d0 = load_rows(p_d0, row, unit * PARTS + 1, PARTS * U, row < R, PARTS * U)
                z *= b - tl.sum(d0 * scores[:, None], axis=0)
        x = load_rows(p_x1, row, unit, U, row < R, U)
        inner += tl.sum(x * z[None, :], axis=1)
        w = load_rows(p_down, v_column, unit, U, v_column < V, U)
        y += tl.sum(w * (z * w_keep)[None, :], axis=1)
        if MOMENTUM:
            s = load_rows(p_down_slot, v_column, unit, U, v_column < V, U)
            y += tl.sum(s * (z * s_keep)[None, :], axis=1)
    d1 = load_rows(p_d1, row, v_column, V, row < R, V)
    y -= tl.sum(d1 * (inner * write)[:, None], axis=0)
    if RESIDUAL:
        y += tl.load(p_query + v_column, mask=v_column < V, other=0.0).to(tl.float32)
    tl.store(p_y + i * V + v_column, y.to(p_y.dtype.element_ty), mask=v_column < V)

    # The next anchor.
    if place == C - 1:
        tl.debug_barrier()
        p_c, p_c_slot = p_new_write + i * R, p_new_slot_write + i * R
        for i_u in range(tl.cdiv(U, BU)):
            unit = columns(i_u, BU)
            w_keep = of_blocks(p_new_keep + i * E, unit, U, E)
            s_read = of_blocks(p_new_read + i * E, unit, U, E)
            s_keep = of_blocks(p_new_slot + i * E, unit, U, E)
            if not MUON:
                w = load_rows(p_down, v_column, unit, U, v_column < V, U) * w_keep[None, :]
            if MOMENTUM:
                s = load_rows(p_down_slot, v_column, unit, U, v_column < V, U)
                if not MUON:
                    w += s * s_read[None, :]
                s = s * s_keep[None, :] - _outer(p_c_slot, p_d1, p_x1, v_column, unit, V, U, R, V, U)
                store_rows(p_down_slot, s, v_column, unit, U, v_column < V, U)
            if not MUON:
                w -= _outer(p_c, p_d1, p_x1, v_column, unit, V, U, R, V, U)
                store_rows(p_down, w, v_column, unit, U, v_column < V, U)
            if DEPTH == 2:
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    if not MUON:
                        w = load_rows(p_up, at, k_column, K, unit < U, K) * w_keep[:, None]
                    if MOMENTUM:
                        s = load_rows(p_up_slot, at, k_column, K, unit < U, K)
                        if not MUON:
                            w += s * s_read[:, None]
                        s = s * s_keep[:, None]
                        s -= _outer(p_c_slot, p_d0, p_x0, at, k_column, PARTS * U, K, R, PARTS * U, K)
                        store_rows(p_up_slot, s, at, k_column, K, unit < U, K)
                    if not MUON:
                        w -= _outer(p_c, p_d0, p_x0, at, k_column, PARTS * U, K, R, PARTS * U, K)
                        store_rows(p_up, w, at, k_column, K, unit < U, K)
        tl.debug_barrier()
        tl.store(p_new_write + i * R + row, tl.zeros([BR], tl.float32), mask=row < R)
        fresh = tl.zeros([BE], tl.float32)
        tl.store(p_new_keep + i * E + block, fresh + 1, mask=block < E)
        tl.store(p_new_read + i * E + block, fresh, mask=block < E)
        if MOMENTUM:
            tl.store(p_new_slot_write + i * R + row, tl.zeros([BR], tl.float32), mask=row < R)
            fresh += 1
        tl.store(p_new_slot + i * E + block, fresh, mask=block < E)


# Muon at every token -------------------------------------------------------------------------------------------------


@triton.jit
def momentum_kernel(
    p_key,
    p_value,
    p_retention,
    p_decay,
    p_step,
    p_gate,
    p_position,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x0,
    p_x1,
    p_d0,
    p_d1,
    p_slot_write,
    p_slot,
    p_recent_key,
    p_recent_value,
    p_now_up_slot,
    p_now_down_slot,
    p_new_slot_write,
    p_new_slot,
    p_new_recent_key,
    p_new_recent_value,
    p_keep,
    p_rate,
    H: tl.constexpr,
    C: tl.constexpr,
    HALO: tl.constexpr,
    WINDOW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    UNLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    RETENTION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
    BE: tl.constexpr,
):
    """The momentum `S_t` of a row after one token: as in `step_kernel` the token's factors and, before the first one of
    a chunk, those of the `HALO` tokens, and the momentum's coefficients. `p_keep` and `p_rate` take those of `M_{t-1}`
    and `NS(S_t)` in `M_t`, of each unit where `E > 1` blocks open one after another."""
    R: tl.constexpr = HALO + C
    i = tl.program_id(0).to(tl.int64)
    row, block = tl.arange(0, BR).to(tl.int64), columns(0, BE)
    k_column, v_column = columns(0, BK), columns(0, BV)
    position = tl.load(p_position + i // H)
    place = position % C
    p_x1, p_d1 = p_x1 + i * R * U, p_d1 + i * R * V
    p_down, p_down_slot, p_now_down_slot = p_down + i * V * U, p_down_slot + i * V * U, p_now_down_slot + i * V * U
    if DEPTH == 2:
        p_x0, p_d0, of_row = p_x0 + i * R * K, p_d0 + i * R * PARTS * U, i * PARTS * U * K
        p_up, p_up_slot, p_now_up_slot = p_up + of_row, p_up_slot + of_row, p_now_up_slot + of_row
    _learn_all(
        *(p_key, p_value, p_recent_key, p_recent_value, p_new_recent_key, p_new_recent_value, position),
        *(p_up, p_down, p_x0, p_x1, p_d0, p_d1, i, C, HALO, K, V, U, E, UNLOCK),
        *(DEPTH, PARTS, ACTIVATION, RESIDUAL, L2, MAX_NORM, BH, BK, BV, BU),
    )

    decay = tl.exp(tl.load(p_decay + i))
    p_write, p_slot_keep = p_new_slot_write + i * R, p_new_slot + i * E
    write = tl.load(p_slot_write + i * R + row, mask=row < R, other=0.0) * decay
    tl.store(p_write + row, write + _window(p_gate, i, row, HALO + place, WINDOW), mask=row < R)
    slot = tl.load(p_slot + i * E + block, mask=block < E, other=0.0)
    slot = tl.where(is_open_at(position, block, E, UNLOCK) > 0, slot * decay, slot)
    tl.store(p_slot_keep + block, slot, mask=block < E)
    retention, rate = 1.0, tl.load(p_step + i)
    if RETENTION:
        retention = tl.exp(tl.load(p_retention + i))
    if E == 1:
        tl.store(p_keep + i, retention)
        tl.store(p_rate + i, rate)
    tl.debug_barrier()

    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        if E > 1:
            is_open = is_open_at(position, block_of(unit, U, E), E, UNLOCK)
            tl.store(p_keep + i * U + unit, tl.where(is_open > 0, retention, 1.0), mask=unit < U)
            tl.store(p_rate + i * U + unit, rate * is_open, mask=unit < U)
        keep = of_blocks(p_slot_keep, unit, U, E)
        s = load_rows(p_down_slot, v_column, unit, U, v_column < V, U) * keep[None, :]
        s -= _outer(p_write, p_d1, p_x1, v_column, unit, V, U, HALO + place + 1, V, U)
        store_rows(p_now_down_slot, s, v_column, unit, U, v_column < V, U)
        if DEPTH == 2:
            for part in tl.static_range(PARTS):
                at = unit * PARTS + part
                s = load_rows(p_up_slot, at, k_column, K, unit < U, K) * keep[:, None]
                s -= _outer(p_write, p_d0, p_x0, at, k_column, PARTS * U, K, HALO + place + 1, PARTS * U, K)
                store_rows(p_now_up_slot, s, at, k_column, K, unit < U, K)
    if place == C - 1:  # the next anchor's momentum is this one
        tl.debug_barrier()
        tl.store(p_write + row, tl.zeros([BR], tl.float32), mask=row < R)
        tl.store(p_slot_keep + block, tl.zeros([BE], tl.float32) + 1, mask=block < E)


@triton.jit
def _copied(p_from, p_to, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for i in range(tl.cdiv(SIZE, BLOCK)):
        at = columns(i, BLOCK)
        tl.store(p_to + at, tl.load(p_from + at, mask=at < SIZE, other=0.0), mask=at < SIZE)


@triton.jit
def recall_kernel(
    p_query,
    p_position,
    p_now_up,
    p_now_down,
    p_now_up_slot,
    p_now_down_slot,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_new_position,
    p_y,
    H: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    UNLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """What a query reads of `M_t`, which is the next anchor after a token that completes a chunk, with `S_t`."""
    i = tl.program_id(0).to(tl.int64)
    v_column = columns(0, BV)
    position = tl.load(p_position + i // H)
    p_query, of_down = p_query + i * K, i * V * U
    p_now_down = p_now_down + of_down
    if DEPTH == 2:
        of_up = i * PARTS * U * K
        p_now_up = p_now_up + of_up
    y = tl.zeros([BV], tl.float32)
    if RESIDUAL:
        y += tl.load(p_query + v_column, mask=v_column < V, other=0.0).to(tl.float32)
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        z = _units(p_query, p_now_up, position, unit, K, U, E, UNLOCK, DEPTH, PARTS, ACTIVATION, BK)
        w = load_rows(p_now_down, v_column, unit, U, v_column < V, U)
        y += tl.sum(w * z[None, :], axis=1)
    tl.store(p_y + i * V + v_column, y.to(p_y.dtype.element_ty), mask=v_column < V)
    if i % H == 0:
        tl.store(p_new_position + i // H, position + 1)
    if position % C == C - 1:
        _copied(p_now_down, p_down + of_down, V * U, 1024)
        _copied(p_now_down_slot + of_down, p_down_slot + of_down, V * U, 1024)
        if DEPTH == 2:
            _copied(p_now_up, p_up + of_up, PARTS * U * K, 1024)
            _copied(p_now_up_slot + of_up, p_up_slot + of_up, PARTS * U * K, 1024)


# Host code -----------------------------------------------------------------------------------------------------------


def _sizes(key_dim: int, up: Tensor | None, down: Tensor, blocks: int, unlock: Sequence[int]) -> dict[str, Any]:
    """What every kernel takes of the network."""
    value_dim, units = down.shape[1:]
    return {
        "K": key_dim,
        "V": value_dim,
        "U": units,
        "E": blocks,
        "UNLOCK": tuple(unlock) if blocks > 1 else None,
        "DEPTH": 1 if up is None else 2,
        "PARTS": 1 if up is None else up.shape[1] // units,
        "BK": tile(key_dim, 128),
        "BV": tile(value_dim, 128),
    }


def _of_token(
    token: Sequence[Any], memory: Sequence[Any], held: int, recent: Tensor, keep: Tensor, unlock: list[int], *rule: Any
) -> dict[str, Any]:
    """What the kernels that learn a token take of it, of the memory with the rows of factors, and of the rule.

    Args:
        token: key, value, gates (log retention and momentum, step size, of the window) and position.
        memory: weights, momentum, inputs and deltas, of both layers each.
        held: rows of factors.
        recent: the last tokens' keys, `[M, R - C, K]`.
        keep: a coefficient per block, `[M, E]`.
    """
    key, _, retention, _, _, gate, position = token
    names = ("key", "value", "retention", "decay", "step", "gate", "position")
    places = ("up", "down", "up_slot", "down_slot", "x0", "x1", "d0", "d1")
    (rows, blocks), halo = keep.shape, recent.shape[1]
    return {
        **{f"p_{name}": x for name, x in zip(names, token, strict=True)},
        **{f"p_{name}": x for name, x in zip(places, memory, strict=True)},
        **{"H": rows // position.shape[0], "C": held - halo, "HALO": halo},
        **{"WINDOW": 0 if gate is None else gate.shape[1], "RETENTION": retention is not None},
        **dict(zip(("ACTIVATION", "RESIDUAL", "L2", "MAX_NORM"), rule, strict=True)),
        **{"BR": tile(held, 128), "BH": tile(halo, 64), "BE": triton.next_power_of_2(blocks)},
        **_sizes(key.shape[2], memory[0], memory[1], blocks, unlock),
    }


def one_token(*given: Any) -> tuple[Tensor, ...]:
    """Output `[M, 1, V]`, the new coefficients, the last tokens' keys and values, the new position, and under Muon the
    new `orthogonal_step` and what `step_kernel` says of the chunk's end. The factors are written to their rows, and
    over the anchor the next one, if the token completes a chunk: under Muon its momentum alone."""
    (*tensors, unlock), rule = given[:-4], given[-4:]
    query, *token = contiguous(*tensors[:8])
    memory, (*old, orthogonal) = tensors[8:16], contiguous(*tensors[16:])
    write, keep, recent_key = old[0], old[2], old[5]
    new = [torch.empty_like(x) for x in (*old, token[-1])]
    ends = [write.new_empty(0) if orthogonal is None else torch.empty_like(orthogonal) for _ in range(3)]
    recent, new_recent = (old[5:], new[5:7]) if recent_key.shape[1] else ([None] * 2, [None] * 2)
    y = torch.empty_like(token[1])
    launch_tiled(
        step_kernel,
        (write.shape[0],),
        p_query=query,
        p_write=write,
        p_slot_write=old[1],
        p_keep=keep,
        p_read=old[3],
        p_slot=old[4],
        p_recent_key=recent[0],
        p_recent_value=recent[1],
        p_orthogonal=orthogonal,
        p_new_write=new[0],
        p_new_slot_write=new[1],
        p_new_keep=new[2],
        p_new_read=new[3],
        p_new_slot=new[4],
        p_new_recent_key=new_recent[0],
        p_new_recent_value=new_recent[1],
        p_new_position=new[7],
        **dict(zip(("p_new_orthogonal", "p_end_keep", "p_end_orthogonal"), ends, strict=True)),
        p_y=y,
        MOMENTUM=memory[3] is not None,
        MUON=orthogonal is not None,
        **_of_token(token, memory, write.shape[1], recent_key, keep, unlock, *rule),
    )
    return y, *new, *ends


def token_momentum(*given: Any) -> tuple[Tensor, ...]:
    """`S_t` of each layer, its new coefficients, the last tokens' keys and values, and what `momentum_kernel` says of
    `M_t`: of each unit, or of all alike, `[M, U or 1]`. The factors are written to their rows."""
    (*tensors, unlock), rule = given[:-4], given[-4:]
    token, memory, old = contiguous(*tensors[:7]), tensors[7:15], contiguous(*tensors[15:])
    write, keep, recent_key = old[:3]
    rows, held = write.shape
    now = [None if x is None else torch.empty_like(x) for x in memory[2:4]]
    new = [torch.empty_like(x) for x in old]
    of_units = [write.new_empty(rows, memory[1].shape[2] if keep.shape[1] > 1 else 1) for _ in range(2)]
    recent, new_recent = (old[2:], new[2:]) if recent_key.shape[1] else ([None] * 2, [None] * 2)
    launch_tiled(
        momentum_kernel,
        (rows,),
        p_slot_write=write,
        p_slot=keep,
        p_recent_key=recent[0],
        p_recent_value=recent[1],
        p_now_up_slot=now[0],
        p_now_down_slot=now[1],
        p_new_slot_write=new[0],
        p_new_slot=new[1],
        p_new_recent_key=new_recent[0],
        p_new_recent_value=new_recent[1],
        p_keep=of_units[0],
        p_rate=of_units[1],
        **_of_token(token, memory, held, recent_key, keep, unlock, *rule),
    )
    return write.new_empty(0) if now[0] is None else now[0], now[1], *new, *of_units


def recalled(
    query: Tensor,
    position: Tensor,
    now: Sequence[Tensor],
    anchor: Sequence[Tensor],
    size: int,
    unlock: Sequence[int],
    activation: str,
    residual: bool,
) -> tuple[Tensor, Tensor]:
    """Output `[M, 1, V]` and the new position; over the anchor `M_t` and `S_t`, if the token completes a chunk of this
    size. `now` and `anchor` are weights, then momentum."""
    query, position = contiguous(query, position)
    depth = len(now) // 2
    down = now[depth - 1]
    y, new_position = query.new_empty(query.shape[0], 1, down.shape[1]), torch.empty_like(position)
    names = ("up", "down", "up_slot", "down_slot") if depth == 2 else ("down", "down_slot")
    memory: dict[str, Any] = dict.fromkeys(("p_now_up", "p_now_up_slot", "p_up", "p_up_slot"))
    for prefix, tensors in (("p_now", now), ("p", anchor)):
        memory |= {f"{prefix}_{name}": x for name, x in zip(names, tensors, strict=True)}
    launch_tiled(
        recall_kernel,
        (query.shape[0],),
        p_query=query,
        p_position=position,
        **memory,
        p_new_position=new_position,
        p_y=y,
        H=query.shape[0] // position.shape[0],
        C=size,
        ACTIVATION=activation,
        RESIDUAL=residual,
        **_sizes(query.shape[2], now[0] if depth == 2 else None, down, len(unlock), unlock),
    )
    return y, new_position


_one = torch.library.custom_op(
    "memzoo::deep_memory_step",
    one_token,
    mutates_args=("up", "down", "up_slot", "down_slot", "x0", "x1", "d0", "d1"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? log_retention, Tensor? log_momentum, Tensor step_size, "
    "Tensor? window_gate, Tensor position, Tensor(a!)? up, Tensor(b!) down, Tensor(c!)? up_slot, "
    "Tensor(d!)? down_slot, Tensor(e!)? x0, Tensor(f!) x1, Tensor(g!)? d0, Tensor(h!) d1, Tensor write, "
    "Tensor momentum_write, Tensor weight_keep, Tensor momentum_read, Tensor momentum_keep, Tensor recent_keys, "
    f"Tensor recent_values, Tensor? orthogonal_step, int[] unlock, {RULE}) -> ({', '.join(['Tensor'] * 12)})",
)


@_one.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    orthogonal = others[20]
    ends = (others[13].new_empty(0) if orthogonal is None else fresh(orthogonal) for _ in range(3))
    return *(fresh(x) for x in (value, *others[13:20], others[4])), *ends


_momentum: Any = torch.library.custom_op(
    "memzoo::deep_memory_momentum",
    token_momentum,
    mutates_args=("x0", "x1", "d0", "d1"),
    schema="(Tensor key, Tensor value, Tensor? log_retention, Tensor log_momentum, Tensor step_size, "
    "Tensor? window_gate, Tensor position, Tensor? up, Tensor down, Tensor? up_slot, Tensor down_slot, "
    "Tensor(a!)? x0, Tensor(b!) x1, Tensor(c!)? d0, Tensor(d!) d1, Tensor momentum_write, Tensor momentum_keep, "
    f"Tensor recent_keys, Tensor recent_values, int[] unlock, {RULE}) -> ({', '.join(['Tensor'] * 8)})",
)
_recalled: Any = torch.library.custom_op(
    "memzoo::deep_memory_recall",
    recalled,
    mutates_args=("anchor",),
    schema="(Tensor query, Tensor position, Tensor[] now, Tensor(a!)[] anchor, int size, int[] unlock, "
    "str activation, bool residual) -> (Tensor, Tensor)",
)


@_momentum.register_fake
def _(key: Tensor, *given: Any) -> tuple[Tensor, ...]:
    (down, up_slot, down_slot), old = given[7:10], given[14:18]
    of_units = (down.new_empty(down.shape[0], down.shape[2] if old[1].shape[1] > 1 else 1) for _ in range(2))
    return down.new_empty(0) if up_slot is None else fresh(up_slot), fresh(down_slot), *map(fresh, old), *of_units


@_recalled.register_fake
def _(query: Tensor, position: Tensor, now: Sequence[Tensor], *given: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape[0], 1, now[len(now) // 2 - 1].shape[1]), fresh(position)


def step(
    network: Network,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    log_momentum: Tensor | None,
    step_size: Tensor,
    window_gate: Tensor | None,
    state: DeepMemoryState,
    unlock: tuple[int, ...],
) -> tuple[Tensor, DeepMemoryState]:
    """`chunked.step` by kernels that ask the device for nothing: a step can be part of a CUDA graph.

    It writes into more than `chunked.step` does: where the token completes a chunk, over the anchor, and under Muon at
    every token over `M_t`.
    """
    batch, heads, _ = state.write.shape
    rows = batch, heads
    q, k, v = (x.reshape(batch * heads, 1, -1) for x in (query, key, value))
    gates = [None if x is None else x.flatten() for x in (log_retention, log_momentum, step_size)]
    gates.append(None if window_gate is None else window_gate.reshape(batch * heads, -1))
    held = _Held(*(_own(x) for x in (state.weights, state.momentum, state.inputs, state.deltas)))
    compute = _per_token if state.current else _plain
    y, changed = compute(network, (q, k, v), gates, held, state, unlock)
    changed |= {name: tuple(x.unflatten(0, rows) for x in tensors) for name, tensors in held._asdict().items()}
    return y.reshape(batch, 1, heads, -1), state._replace(**changed)


class _Held(NamedTuple):
    """What a state holds of each layer, `[M, ...]`, to be written into."""

    weights: list[Tensor]
    momentum: list[Tensor]
    inputs: list[Tensor]
    deltas: list[Tensor]

    def flat(self) -> list[Tensor | None]:
        """Of both layers side by side, `None` for the first of a single one."""
        return [x for tensors in self for x in ([None] * (2 - len(tensors)) + tensors)]


def _own(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [writable(x).flatten(0, 1) for x in tensors]


def _plain(
    network: Network,
    sequences: Sequence[Tensor],
    gates: Sequence[Tensor | None],
    held: _Held,
    state: DeepMemoryState,
    unlock: tuple[int, ...],
) -> tuple[Tensor, dict[str, Any]]:
    """What the query reads, and what of the state is new but for what is `held`: by one kernel. Under Muon once a chunk
    one for each layer follows, which looks whether the token completes one."""
    names = (
        *("write", "momentum_write", "weight_keep", "momentum_read", "momentum_keep"),
        *("recent_keys", "recent_values"),
    )
    old, muon = [getattr(state, name) for name in names], network.newton_schulz_steps
    y, *new, position, orthogonal, end_keep, end_orthogonal = _one(
        *sequences,
        *gates,
        state.position,
        *held.flat(),
        *(x.flatten(0, 1) for x in old),
        None if muon is None else state.orthogonal_step.flatten(0, 1),
        list(unlock),
        *rule_of(network),
    )
    changed = {name: x.view_as(before) for name, x, before in zip(names, new, old, strict=True)}
    if not held.momentum:
        del changed["momentum_write"]
    if muon is not None:
        changed["orthogonal_step"] = orthogonal.view_as(state.orthogonal_step)
        for layer, (weight, slot) in enumerate(zip(held.weights, held.momentum, strict=True)):
            ends = (network.per_weight(x, layer).expand_as(weight) for x in (end_keep, end_orthogonal))
            w, x, keep, rate = (network.matrices(each, layer) for each in (weight, slot, *ends))
            newton_schulz.advance(w, x, keep, rate, muon)
    return y, {**changed, "position": position}


def _per_token(
    network: Network,
    sequences: Sequence[Tensor],
    gates: Sequence[Tensor | None],
    held: _Held,
    state: DeepMemoryState,
    unlock: tuple[int, ...],
) -> tuple[Tensor, dict[str, Any]]:
    """The same under Muon at every token: a kernel for `S_t`, one for `M_t` of each layer, one for what it reads."""
    names = ("momentum_write", "momentum_keep", "recent_keys", "recent_values")
    assert network.newton_schulz_steps is not None
    (query, *pair), depth, now = sequences, network.depth, _own(state.current)
    old = [getattr(state, name) for name in names]
    *found, keep, rate = _momentum(
        *pair, *gates, state.position, *held.flat(), *(x.flatten(0, 1) for x in old), list(unlock), *rule_of(network)
    )
    slots, new = found[2 - depth : 2], found[2:]
    for layer, (weight, slot) in enumerate(zip(now, slots, strict=True)):
        w, x = (network.matrices(each, layer) for each in (weight, slot))
        units = (1, -1) if layer == depth - 1 else (-1, 1)  # the inputs of the last layer, else the outputs
        of_m, of_s = (c.view(len(c), *[1] * (w.ndim - 3), *units).expand_as(w) for c in (keep, rate))
        newton_schulz.advance(w, x, of_m, of_s, network.newton_schulz_steps)
    y, position = _recalled(
        query,
        state.position,
        [*now, *slots],
        [*held.weights, *held.momentum],
        state.write.shape[2] - state.halo,
        list(unlock),
        network.activation,
        network.residual,
    )
    changed: dict[str, Any] = {name: x.view_as(before) for name, x, before in zip(names, new, old, strict=True)}
    current = tuple(x.unflatten(0, state.write.shape[:2]) for x in now)
    return y, {**changed, "current": current, "position": position}
