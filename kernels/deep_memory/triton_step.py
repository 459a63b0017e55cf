"""One token."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.deep_memory import DeepMemoryState, chunked
from memzoo.kernels.deep_memory.chunk import Network
from memzoo.kernels.deep_memory.triton_units import (
    RULE,
    block_of,
    launch_tiled,
    of_blocks,
    rule_of,
    slope_of,
    value_of,
)
from memzoo.kernels.linear_attention.triton import columns, load_rows, store_rows
from memzoo.kernels.newton_schulz import triton as newton_schulz
from memzoo.kernels.triton_support import contiguous, fresh, product, tile

# One token -----------------------------------------------------------------------------------------------------------


@triton.jit
def _seen(k, p_up, unit, part, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr):
    """`_hidden` of one token."""
    w = load_rows(p_up, unit * PARTS + part, columns(0, BK), K, unit < U, K)
    return tl.sum(w * k[None, :], axis=1)


@triton.jit
def _is_open(position, block, E: tl.constexpr, UNLOCK: tl.constexpr):
    """Whether each block is open to the token that `position` others precede, 1 or 0."""
    found = tl.zeros_like(block).to(tl.float32) + 1
    for e in tl.static_range(1, E):
        found = tl.where((block == e) & (position < UNLOCK[e]), 0.0, found)
    return found


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
        is_open = _is_open(position, block_of(unit, U, E), E, UNLOCK)
        if DEPTH == 1:
            x = tl.load(p_key + unit, mask=unit < U, other=0.0).to(tl.float32) * is_open
        else:
            x = value_of(_seen(k, p_up, unit, 0, K, U, PARTS, BK), ACTIVATION) * is_open
            if PARTS == 2:
                x *= _seen(k, p_up, unit, 1, K, U, PARTS, BK)
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
            back = tl.sum(w * error[:, None], axis=0) * _is_open(position, block_of(unit, U, E), E, UNLOCK)
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
def _outer(p_c, p_d, p_x, of_d, of_x, d_stride, x_stride, ROWS: tl.constexpr, D: tl.constexpr, X: tl.constexpr):
    """`sum_r c_r d_r x_r^T` over all rows, `[of_d, of_x]`; in slices of 16, which take few registers."""
    found = tl.zeros([of_d.shape[0], of_x.shape[0]], tl.float32)
    for i_r in range(tl.cdiv(ROWS, 16)):
        row = columns(i_r, 16)
        c = tl.load(p_c + row, mask=row < ROWS, other=0.0)
        d = load_rows(p_d, row, of_d, d_stride, row < ROWS, D) * c[:, None]
        found += product(tl.trans(d), load_rows(p_x, row, of_x, x_stride, row < ROWS, X))
    return found


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
    """One token of a row, in float32: its factors, written to its row of the state's, the coefficients after it, and
    what its query reads. With one layer the units are the key's coordinates, and `p_x1` are the inputs.

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
    here = HALO + place
    p_query, p_key, p_value = p_query + i * K, p_key + i * K, p_value + i * V
    p_x1, p_d1 = p_x1 + i * R * U, p_d1 + i * R * V
    p_down = p_down + i * V * U
    p_x0_here, p_d0_here = p_x0, p_d0
    if DEPTH == 2:
        p_up, p_x0, p_d0 = p_up + i * PARTS * U * K, p_x0 + i * R * K, p_d0 + i * R * PARTS * U
        p_x0_here, p_d0_here = p_x0 + here * K, p_d0 + here * PARTS * U
    if MOMENTUM:
        p_down_slot = p_down_slot + i * V * U
        if DEPTH == 2:
            p_up_slot = p_up_slot + i * PARTS * U * K

    # Its gradient, and those before the chunk.
    _learn(
        *(p_key, p_value, position, p_up, p_down, p_x0_here, p_x1 + here * U, p_d0_here, p_d1 + here * V),
        *(K, V, U, E, UNLOCK, DEPTH, PARTS, ACTIVATION, RESIDUAL, L2, MAX_NORM, BK, BV, BU),
    )
    if HALO > 0:
        p_recent_key, p_recent_value = p_recent_key + i * HALO * K, p_recent_value + i * HALO * V
        for index in range(tl.where(place == 0, HALO, 0)):
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

    # The coefficients after it.
    rate = tl.load(p_step + i)
    if WINDOW > 0:
        lag = here - row
        m_window = (lag >= 0) & (lag < WINDOW)
        step = tl.load(p_gate + i * WINDOW + lag, mask=m_window, other=0.0)
    else:
        step = tl.where(row == here, 1.0, 0.0)
    if not MUON:
        step *= rate
    retention = 1.0
    if RETENTION:
        retention = tl.exp(tl.load(p_retention + i))
    write = tl.load(p_write + i * R + row, mask=row < R, other=0.0) * retention
    keep = tl.load(p_keep + i * E + block, mask=block < E, other=0.0)
    read = tl.load(p_read + i * E + block, mask=block < E, other=0.0)
    slot = tl.load(p_slot + i * E + block, mask=block < E, other=0.0)
    is_open = _is_open(position, block, E, UNLOCK) > 0
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
    if DEPTH == 2:
        q = tl.load(p_query + k_column, mask=k_column < K, other=0.0).to(tl.float32)
        x0 = load_rows(p_x0, row, k_column, K, row < R, K)
        scores = tl.sum(x0 * q[None, :], axis=1) * write
    y = tl.zeros([BV], tl.float32)
    inner = tl.zeros([BR], tl.float32)
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        unit_open = _is_open(position, block_of(unit, U, E), E, UNLOCK)
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


# Host code -----------------------------------------------------------------------------------------------------------


def one_token(*given: Any) -> tuple[Tensor, ...]:
    """Output `[M, 1, V]`, the new coefficients, the last tokens' keys and values, the new position, and under Muon the
    new `orthogonal_step` and what `step_kernel` says of the chunk's end. The factors are written to their rows, and
    over the anchor the next one, if the token completes a chunk: under Muon its momentum alone."""
    *tensors, unlock, activation, residual, l2, max_norm = given
    query, key, value, retention, decay, step, gate, position = contiguous(*tensors[:8])
    up, down, up_slot, down_slot, x0, x1, d0, d1 = tensors[8:16]
    *old, orthogonal = contiguous(*tensors[16:])
    write, keep, recent_key = old[0], old[2], old[5]
    new = [torch.empty_like(x) for x in (*old, position)]
    ends = [write.new_empty(0) if orthogonal is None else torch.empty_like(orthogonal) for _ in range(3)]
    recent, new_recent = (old[5:], new[5:7]) if recent_key.shape[1] else ([None] * 2, [None] * 2)
    y = torch.empty_like(value)
    (rows, held), units, blocks, halo = write.shape, down.shape[2], keep.shape[1], recent_key.shape[1]
    launch_tiled(
        step_kernel,
        (rows,),
        p_query=query,
        p_key=key,
        p_value=value,
        p_retention=retention,
        p_decay=decay,
        p_step=step,
        p_gate=gate,
        p_position=position,
        p_up=up,
        p_down=down,
        p_up_slot=up_slot,
        p_down_slot=down_slot,
        p_x0=x0,
        p_x1=x1,
        p_d0=d0,
        p_d1=d1,
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
        H=rows // position.shape[0],
        C=held - halo,
        HALO=halo,
        WINDOW=0 if gate is None else gate.shape[1],
        K=key.shape[2],
        V=value.shape[2],
        U=units,
        E=blocks,
        UNLOCK=tuple(unlock) if blocks > 1 else None,
        DEPTH=1 if up is None else 2,
        PARTS=1 if up is None else up.shape[1] // units,
        MOMENTUM=down_slot is not None,
        MUON=orthogonal is not None,
        RETENTION=retention is not None,
        ACTIVATION=activation,
        RESIDUAL=residual,
        L2=l2,
        MAX_NORM=max_norm,
        BR=tile(held, 128),
        BH=tile(halo, 64),
        BK=tile(key.shape[2], 128),
        BV=tile(value.shape[2], 128),
        BE=triton.next_power_of_2(blocks),
    )
    return y, *new, *ends


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
    """`chunked.step` by one kernel, which asks the device for nothing: a step can be part of a CUDA graph.

    It writes into more than `chunked.step` does: where the token completes a chunk, over the anchor. Under Muon once a
    chunk a kernel for each layer follows, which looks whether the token does.
    """
    batch, heads, _ = state.write.shape
    depth = network.depth

    def own(tensors: tuple[Tensor, ...]) -> list[Tensor]:
        return [chunked.writable(x).flatten(0, 1).contiguous() for x in tensors]

    weights, slots, inputs, deltas = (own(x) for x in (state.weights, state.momentum, state.inputs, state.deltas))
    old = (
        *(state.write, state.momentum_write, state.weight_keep, state.momentum_read, state.momentum_keep),
        *(state.recent_keys, state.recent_values),
    )
    muon = network.newton_schulz_steps
    y, *new, position, orthogonal, end_keep, end_orthogonal = _one(
        *(x.reshape(batch * heads, 1, -1) for x in (query, key, value)),
        *(None if x is None else x.flatten() for x in (log_retention, log_momentum, step_size)),
        None if window_gate is None else window_gate.reshape(batch * heads, -1),
        state.position,
        weights[0] if depth == 2 else None,
        weights[-1],
        slots[0] if depth == 2 and slots else None,
        slots[-1] if slots else None,
        inputs[0] if depth == 2 else None,
        inputs[-1],
        deltas[0] if depth == 2 else None,
        deltas[-1],
        *(x.flatten(0, 1) for x in old),
        None if muon is None else state.orthogonal_step.flatten(0, 1),
        list(unlock),
        *rule_of(network),
    )
    if muon is not None:
        for layer, (weight, slot) in enumerate(zip(weights, slots, strict=True)):
            ends = (network.per_weight(x, layer).expand_as(weight) for x in (end_keep, end_orthogonal))
            w, x, keep, rate = (network.matrices(each, layer) for each in (weight, slot, *ends))
            newton_schulz.advance(w, x, keep, rate, muon)
    write, momentum_write, *rest = (x.view_as(before) for x, before in zip(new, old, strict=True))
    of_rows = (tuple(x.unflatten(0, (batch, heads)) for x in tensors) for tensors in (weights, slots, inputs, deltas))
    names = ("weight_keep", "momentum_read", "momentum_keep", "recent_keys", "recent_values")
    changed: dict[str, Any] = dict(zip(("weights", "momentum", "inputs", "deltas"), of_rows, strict=True))
    changed |= dict(zip(names, rest, strict=True))
    if not slots:
        momentum_write = state.momentum_write
    if muon is not None:
        changed["orthogonal_step"] = orthogonal.view_as(state.orthogonal_step)
    state = state._replace(write=write, momentum_write=momentum_write, **changed, position=position)
    return y.reshape(batch, 1, heads, -1), state
