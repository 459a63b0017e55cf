"""The delta rule in Triton, in chunks of C tokens, in the WY form of the chunked backend (see there for the letters).

Forward: `prepare`, one program per chunk, inverts the triangular system and makes `U` and `W`, free of the state;
`walk`, one program per tile of V columns of a row and head, goes through the chunks with all K rows of the state on
chip and writes each chunk's first state and its deltas `X = U - W S`; the read-out is that of linear attention with
the deltas for values. `(I + L)^-1` is made in blocks of 16 on the diagonal, by forward substitution in all of them at
once, which are then joined two by two; in float32 whatever the inputs, since errors of an inverse do not average out.

Backward: forward's parts anew; the gradient of the deltas inside their chunk; `walk_back` for the gradient `D` of the
state at each chunk's end and the rest of that of the deltas,

    dX = (Q K^T * P)^T dY + diag(P(C, .)) K D,    D' = P(C, 0) D + (diag(P(., 0)) Q)^T dY - W^T dX

and, per chunk in parallel, the system's own, `dR = (I + L)^-T [dX, -dX S^T]` for its right-hand sides and `dL = -dR
[U, W]^T` below the diagonal.

On the chip, at K = V = 64, C = 64, bfloat16: `prepare` four tiles of 64 x 64 float32 in registers (64 KiB), keys and
values in shared memory; `walk` 64 x 64 float32 of state.
Bytes per token and head, inputs of s bytes: forward `s (8 K + 6 V)` (inputs, U, W, deltas out and in, outputs) and
`2 s K V / C` for states. Operations forward `6 K V + 2 C (3 K + 2 V) + 3 C^2` of which the last are float32's.
At K = V = C = 64 and bfloat16: 2.0 KB, 86 kFLOP: on an H100 (3.35 TB/s, about 800 TFLOP/s) 0.6 ns for the bytes, 0.1 ns
for the products; backward about three times both. Memory is the floor.
One token: the state in and out, `8 K V` bytes per row and head: 10 ns at K = V = 64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.linear_attention.triton import (
    columns,
    from_start,
    intervals,
    load_rows,
    query_key_gradients,
    read_out,
    sizes_of,
    store_rows,
    tiles,
    to_end,
    value_gradient,
    whole,
)
from memzoo.kernels.registry import mixed_precision
from memzoo.kernels.triton_support import chip_of, contiguous, fresh, gradients_like, launch, product, tile, wanted


@mixed_precision
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    erase_key: Tensor | None,
    erase_after_decay: bool,
) -> tuple[Tensor, Tensor]:
    """See `memzoo.kernels.delta_rule.delta_rule`; matrix products take factors in the dtype of the values."""
    compute = _step if query.shape[1] == 1 and not torch.is_grad_enabled() else _rule
    return compute(query, key, value, strength, log_retention, state, erase_key, erase_after_decay)


@triton.jit
def joined(lower, inverses, C: tl.constexpr, B: tl.constexpr):
    """From the inverses `[C / B, B, B]` of the blocks on the diagonal those of blocks twice as wide:
    `[[X, 0], [-Y L X, Y]]` inverts `[[X^-1, 0], [L, Y^-1]]`."""
    N: tl.constexpr = C // (2 * B)
    row, column = tl.arange(0, 2 * N)[:, None, None, None], tl.arange(0, 2 * N)[None, None, :, None]
    between = tl.where((row % 2 == 1) & (column == row - 1), tl.reshape(lower, [2 * N, B, 2 * N, B]), 0.0)
    between = tl.sum(tl.reshape(tl.sum(between, axis=2), [N, 2, B, B]), axis=1)
    pairs, is_second = tl.reshape(inverses, [N, 2, B, B]), tl.arange(0, 2)[None, :, None, None] == 1
    above, below = tl.sum(tl.where(is_second, 0.0, pairs), axis=1), tl.sum(tl.where(is_second, pairs, 0.0), axis=1)
    corner = -product(product(below, between), above)
    row, column = tl.arange(0, 2)[None, :, None, None, None], tl.arange(0, 2)[None, None, None, :, None]
    left = tl.where(row == 0, above[:, None, :, None, :], corner[:, None, :, None, :])
    whole = tl.where(column == 0, left, tl.where(row == 0, 0.0, below[:, None, :, None, :]))
    return tl.reshape(whole, [N, 2 * B, 2 * B])


@triton.jit
def inverse(lower, C: tl.constexpr):
    """`(I + lower)^-1` for `lower` `[C, C]` with nothing on or above the diagonal."""
    N: tl.constexpr = C // 16
    place = tl.arange(0, 16)
    is_own = tl.arange(0, N)[:, None, None, None] == tl.arange(0, N)[None, None, :, None]
    own = tl.sum(tl.where(is_own, tl.reshape(lower, [N, 16, N, 16]), 0.0), axis=2)  # [N, 16, 16]
    inverses = tl.where(place[None, :, None] == place[None, None, :], 1.0, tl.zeros_like(own))
    for i in range(1, 16):  # row i of every block, from the rows above it
        factors = tl.sum(tl.where(place[None, :, None] == i, own, 0.0), axis=1)
        known = tl.sum(factors[:, :, None] * inverses, axis=1)
        inverses = tl.where(place[None, :, None] == i, inverses - known[:, None, :], inverses)
    if C > 16:
        inverses = joined(lower, inverses, C, 16)
    if C > 32:
        inverses = joined(lower, inverses, C, 32)
    return tl.reshape(inverses, [C, C])


@triton.jit
def overlaps(p_p, p_k, token, T, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, like):
    """`p_i . k_j`, with factors in the dtype of `like`."""
    found = tl.zeros([C, C], tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        k_column = columns(i_k, BK)
        p = load_rows(p_p, token, k_column, H * K, token < T, K).to(like)
        k = load_rows(p_k, token, k_column, H * K, token < T, K).to(like)
        found += product(p, tl.trans(k))
    return found


@triton.jit(do_not_specialize=["T"])
def prepare_kernel(
    p_p,
    p_k,
    p_v,
    p_strength,
    p_gate,
    p_u,
    p_w,
    p_inverse,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BACK: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """`U` and `W` of a chunk, and the inverse of its system."""
    i_chunk = tl.program_id(0).to(tl.int64)
    chunks = tl.cdiv(T, C)
    n, i_row = i_chunk % chunks, i_chunk // chunks
    i_b, i_h = i_row // H, i_row % H
    first = n * C
    last = tl.minimum(first + C, T)
    token = first + tl.arange(0, C).to(tl.int64)
    o_k, o_v = (i_b * T * H + i_h) * K, (i_b * T * H + i_h) * V
    if HAS_GATE:
        p_gate += i_b * T * H + i_h
    strength = tl.load(p_strength + i_b * T * H + i_h + token * H, mask=token < T, other=0.0).to(tl.float32)
    like: tl.constexpr = p_u.dtype.element_ty
    system = overlaps(p_p + o_k, p_k + o_k, token, T, H, K, C, BK, like)
    system *= intervals(p_gate, first, last, H, HAS_GATE, C, BACK) * strength[:, None]
    inner, outer = tl.arange(0, C)[None, :], tl.arange(0, C)[:, None]
    solve = inverse(tl.where(inner < outer, system, 0.0), C)
    tl.store(p_inverse + (i_chunk * C * C + outer.to(tl.int64) * C + inner), solve.to(like))
    solve = solve.to(like)
    for i_v in range(tl.cdiv(V, BV)):
        v_column = columns(i_v, BV)
        v = load_rows(p_v + o_v, token, v_column, H * V, token < T, V).to(tl.float32) * strength[:, None]
        store_rows(p_u + o_v, product(solve, v.to(like)), token, v_column, H * V, token < T, V)
    erase = strength * from_start(p_gate, first, last, H, HAS_GATE, C, BACK)
    for i_k in range(tl.cdiv(K, BK)):
        k_column = columns(i_k, BK)
        p = load_rows(p_p + o_k, token, k_column, H * K, token < T, K).to(tl.float32) * erase[:, None]
        store_rows(p_w + o_k, product(solve, p.to(like)), token, k_column, H * K, token < T, K)


@triton.jit(do_not_specialize=["T"])
def walk_kernel(
    p_k,
    p_u,
    p_w,
    p_gate,
    p_begin,
    p_states,
    p_deltas,
    p_end,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_GATE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """The state before each chunk and after all, and the deltas of all tokens."""
    i_v, i_row = tl.program_id(0) % tl.cdiv(V, BV), (tl.program_id(0) // tl.cdiv(V, BV)).to(tl.int64)
    i_b, i_h = i_row // H, i_row % H
    k_column, v_column = columns(0, BK), columns(i_v, BV)
    o_k, o_v = (i_b * T * H + i_h) * K, (i_b * T * H + i_h) * V
    if HAS_GATE:
        p_gate += i_b * T * H + i_h
    chunks = tl.cdiv(T, C)
    p_states += i_row * chunks * K * V
    state = load_rows(p_begin + i_row * K * V, k_column, v_column, V, k_column < K, V)
    for step in range(chunks):
        n = tl.cast(step, tl.int64)
        first = n * C
        last = tl.minimum(first + C, T)
        token = first + tl.arange(0, C).to(tl.int64)
        store_rows(p_states + n * K * V, state, k_column, v_column, V, k_column < K, V)
        w = load_rows(p_w + o_k, token, k_column, H * K, token < T, K)
        u = load_rows(p_u + o_v, token, v_column, H * V, token < T, V)
        deltas = (u.to(tl.float32) - product(w, state.to(w.dtype))).to(u.dtype)
        store_rows(p_deltas + o_v, deltas, token, v_column, H * V, token < T, V)
        k = load_rows(p_k + o_k, token, k_column, H * K, token < T, K).to(tl.float32)
        k *= to_end(p_gate, first, last, H, HAS_GATE, C)[:, None]
        state *= whole(p_gate, first, last, H, HAS_GATE, C)
        state += product(tl.trans(k.to(u.dtype)), deltas)
    store_rows(p_end + i_row * K * V, state, k_column, v_column, V, k_column < K, V)


@triton.jit(do_not_specialize=["T"])
def walk_back_kernel(
    p_q,
    p_k,
    p_w,
    p_gate,
    p_dy,
    p_inside,
    p_dend,
    p_dstates,
    p_ddeltas,
    p_dbegin,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_GATE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """The gradients of the state at each chunk's end and before all, and of the deltas, of which `p_inside` is what
    they give inside of their chunk."""
    i_v, i_row = tl.program_id(0) % tl.cdiv(V, BV), (tl.program_id(0) // tl.cdiv(V, BV)).to(tl.int64)
    i_b, i_h = i_row // H, i_row % H
    k_column, v_column = columns(0, BK), columns(i_v, BV)
    o_k, o_v = (i_b * T * H + i_h) * K, (i_b * T * H + i_h) * V
    if HAS_GATE:
        p_gate += i_b * T * H + i_h
    chunks = tl.cdiv(T, C)
    p_dstates += i_row * chunks * K * V
    d_state = load_rows(p_dend + i_row * K * V, k_column, v_column, V, k_column < K, V)
    for step in range(chunks):
        n = chunks - 1 - tl.cast(step, tl.int64)
        first = n * C
        last = tl.minimum(first + C, T)
        token = first + tl.arange(0, C).to(tl.int64)
        store_rows(p_dstates + n * K * V, d_state, k_column, v_column, V, k_column < K, V)
        w = load_rows(p_w + o_k, token, k_column, H * K, token < T, K)
        k = load_rows(p_k + o_k, token, k_column, H * K, token < T, K).to(w.dtype)
        inside = load_rows(p_inside + o_v, token, v_column, H * V, token < T, V)
        d_deltas = product(k, d_state.to(w.dtype)) * to_end(p_gate, first, last, H, HAS_GATE, C)[:, None] + inside
        store_rows(p_ddeltas + o_v, d_deltas, token, v_column, H * V, token < T, V)
        q = load_rows(p_q + o_k, token, k_column, H * K, token < T, K).to(tl.float32)
        q *= from_start(p_gate, first, last, H, HAS_GATE, C, 0)[:, None]
        d_y = load_rows(p_dy + o_v, token, v_column, H * V, token < T, V).to(w.dtype)
        d_state *= whole(p_gate, first, last, H, HAS_GATE, C)
        d_state += product(tl.trans(q.to(w.dtype)), d_y)
        d_state -= product(tl.trans(w), d_deltas.to(w.dtype))
    store_rows(p_dbegin + i_row * K * V, d_state, k_column, v_column, V, k_column < K, V)


@triton.jit(do_not_specialize=["T"])
def right_gradient_kernel(
    p_v,
    p_strength,
    p_u,
    p_w,
    p_inverse,
    p_states,
    p_ddeltas,
    p_dv,
    p_dright,
    p_dstrength,
    p_dsystem,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Of a chunk's right-hand sides `diag(strength) V` and (`p_dright`, as it is) `diag(strength P(e, 0)) p`, of the
    system, and of the strength as far as the first goes."""
    i_chunk = tl.program_id(0).to(tl.int64)
    chunks = tl.cdiv(T, C)
    n, i_row = i_chunk % chunks, i_chunk // chunks
    i_b, i_h = i_row // H, i_row % H
    token = n * C + tl.arange(0, C).to(tl.int64)
    o_gate, o_k, o_v = i_b * T * H + i_h, (i_b * T * H + i_h) * K, (i_b * T * H + i_h) * V
    p_states += i_chunk * K * V
    strength = tl.load(p_strength + o_gate + token * H, mask=token < T, other=0.0).to(tl.float32)
    inner, outer = tl.arange(0, C)[None, :], tl.arange(0, C)[:, None]
    back = tl.trans(tl.load(p_inverse + (i_chunk * C * C + outer.to(tl.int64) * C + inner)))
    d_system = tl.zeros([C, C], tl.float32)
    d_strength = tl.zeros([C], tl.float32)
    for i_v in range(tl.cdiv(V, BV)):
        v_column = columns(i_v, BV)
        d_u = load_rows(p_ddeltas + o_v, token, v_column, H * V, token < T, V)
        d_right = product(back, d_u)
        v = load_rows(p_v + o_v, token, v_column, H * V, token < T, V).to(tl.float32)
        u = load_rows(p_u + o_v, token, v_column, H * V, token < T, V)
        d_system -= product(d_right.to(u.dtype), tl.trans(u))
        d_strength += tl.sum(d_right * v, axis=1)
        store_rows(p_dv + o_v, d_right * strength[:, None], token, v_column, H * V, token < T, V)
    for i_k in range(tl.cdiv(K, BK)):
        k_column = columns(i_k, BK)
        d_w = tl.zeros([C, BK], tl.float32)
        for i_v in range(tl.cdiv(V, BV)):
            v_column = columns(i_v, BV)
            d_deltas = load_rows(p_ddeltas + o_v, token, v_column, H * V, token < T, V)
            state = load_rows(p_states, k_column, v_column, V, k_column < K, V)
            d_w -= product(d_deltas, tl.trans(state))
        d_right = product(back, d_w.to(back.dtype))
        w = load_rows(p_w + o_k, token, k_column, H * K, token < T, K)
        d_system -= product(d_right.to(w.dtype), tl.trans(w))
        store_rows(p_dright + o_k, d_right, token, k_column, H * K, token < T, K)
    tl.store(p_dstrength + o_gate + token * H, d_strength, mask=token < T)
    d_system = tl.where(inner < outer, d_system, 0.0)
    tl.store(p_dsystem + (i_chunk * C * C + outer.to(tl.int64) * C + inner), d_system)


@triton.jit(do_not_specialize=["T"])
def system_gradient_kernel(
    p_p,
    p_k,
    p_strength,
    p_gate,
    p_dright,
    p_dsystem,
    p_dk_before,
    p_dstrength_before,
    p_dgate_before,
    p_dp,
    p_dk,
    p_dstrength,
    p_dgate,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_ERASE: tl.constexpr,
    BACK: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """What the system of a chunk adds to the gradients of the keys, the strength and the gate, and the gradient of the
    erase key, which without `HAS_ERASE` is the key."""
    i_chunk = tl.program_id(0).to(tl.int64)
    chunks = tl.cdiv(T, C)
    n, i_row = i_chunk % chunks, i_chunk // chunks
    i_b, i_h = i_row // H, i_row % H
    first = n * C
    last = tl.minimum(first + C, T)
    token = first + tl.arange(0, C).to(tl.int64)
    o_gate, o_k = i_b * T * H + i_h, (i_b * T * H + i_h) * K
    if HAS_GATE:
        p_gate += o_gate
    strength = tl.load(p_strength + o_gate + token * H, mask=token < T, other=0.0).to(tl.float32)
    inner, outer = tl.arange(0, C)[None, :], tl.arange(0, C)[:, None]
    like: tl.constexpr = p_dright.dtype.element_ty
    d_system = tl.load(p_dsystem + (i_chunk * C * C + outer.to(tl.int64) * C + inner))
    d_system *= intervals(p_gate, first, last, H, HAS_GATE, C, BACK)
    passing = d_system * overlaps(p_p + o_k, p_k + o_k, token, T, H, K, C, BK, like)
    d_strength = tl.load(p_dstrength_before + o_gate + token * H, mask=token < T, other=0.0) + tl.sum(passing, axis=1)
    d_overlaps = (d_system * strength[:, None]).to(like)
    until = from_start(p_gate, first, last, H, HAS_GATE, C, BACK)
    erased = tl.zeros([C], tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        k_column = columns(i_k, BK)
        p = load_rows(p_p + o_k, token, k_column, H * K, token < T, K).to(like)
        k = load_rows(p_k + o_k, token, k_column, H * K, token < T, K).to(like)
        d_right = load_rows(p_dright + o_k, token, k_column, H * K, token < T, K).to(tl.float32)
        erased += tl.sum(d_right * p.to(tl.float32), axis=1)
        d_p = d_right * (strength * until)[:, None] + product(d_overlaps, k)
        d_k = load_rows(p_dk_before + o_k, token, k_column, H * K, token < T, K).to(tl.float32)
        d_k += product(tl.trans(d_overlaps), p)
        if HAS_ERASE:
            store_rows(p_dp + o_k, d_p, token, k_column, H * K, token < T, K)
        else:
            d_k += d_p
        store_rows(p_dk + o_k, d_k, token, k_column, H * K, token < T, K)
    erased *= until
    d_strength += erased
    tl.store(p_dstrength + o_gate + token * H, d_strength.to(p_dstrength.dtype.element_ty), mask=token < T)
    if HAS_GATE:
        passing *= strength[:, None]
        into = erased * strength
        over = tl.cumsum(passing, axis=0, reverse=True)
        over_start = tl.cumsum(into, axis=0, reverse=True)
        if BACK:  # a token's erase has not passed its own gate
            over -= passing
            over_start -= into
        d_gate = tl.load(p_dgate_before + o_gate + token * H, mask=token < T, other=0.0) + over_start
        d_gate += tl.sum(tl.where(inner < outer, over, 0.0), axis=1)
        tl.store(p_dgate + o_gate + token * H, d_gate.to(p_dgate.dtype.element_ty), mask=token < T)


@triton.jit
def _step_kernel(
    p_q,
    p_k,
    p_p,
    p_v,
    p_strength,
    p_gate,
    p_begin,
    p_y,
    p_end,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BACK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One token: a tile of V columns of a state, decayed, erased, written and read."""
    i_v, i_row = tl.program_id(0) % tl.cdiv(V, BV), (tl.program_id(0) // tl.cdiv(V, BV)).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(i_v, BV)
    state = load_rows(p_begin + i_row * K * V, k_column, v_column, V, k_column < K, V)
    q = tl.load(p_q + i_row * K + k_column, mask=k_column < K, other=0.0).to(tl.float32)
    k = tl.load(p_k + i_row * K + k_column, mask=k_column < K, other=0.0).to(tl.float32)
    p = tl.load(p_p + i_row * K + k_column, mask=k_column < K, other=0.0).to(tl.float32)
    v = tl.load(p_v + i_row * V + v_column, mask=v_column < V, other=0.0).to(tl.float32)
    held = tl.sum(state * p[:, None], axis=0)
    if HAS_GATE:
        keep = tl.exp(tl.load(p_gate + i_row).to(tl.float32))
        state *= keep
        if not BACK:
            held *= keep
    delta = tl.load(p_strength + i_row).to(tl.float32) * (v - held)
    state += k[:, None] * delta[None, :]
    store_rows(p_end + i_row * K * V, state, k_column, v_column, V, k_column < K, V)
    y = tl.sum(state * q[:, None], axis=0)
    tl.store(p_y + i_row * V + v_column, y.to(p_y.dtype.element_ty), mask=v_column < V)


def _prepared(
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    gate: Tensor | None,
    erase: Tensor,
    back: int,
    sizes: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """`U`, `W` and the inverse of every chunk's system `[B H N, C, C]`, in the dtype of the products."""
    rows, chunks = key.shape[0] * sizes["H"], triton.cdiv(sizes["T"], sizes["C"])
    u, w = torch.empty_like(value), torch.empty_like(key, dtype=value.dtype)
    solve = value.new_empty(rows * chunks, sizes["C"], sizes["C"])
    launch(
        prepare_kernel,
        (rows, chunks),
        p_p=erase,
        p_k=key,
        p_v=value,
        p_strength=strength,
        p_gate=gate,
        p_u=u,
        p_w=w,
        p_inverse=solve,
        BACK=back,
        **sizes,
        **tiles(sizes["K"], sizes["V"], value.dtype),
    )
    return u, w, solve


def _walk_tiles(sizes: dict[str, Any], like: Tensor) -> dict[str, int]:
    """All K rows of a state, and fewer columns the more rows there are: 8 KiB of registers hold a tile.

    Products of float32 factors take them from registers: then twice the threads, and no second copy of the tiles in
    flight, so that none spills on an NVIDIA chip; the others have registers enough.
    """
    rows = tile(sizes["K"], 256)
    found = {"BK": rows, "BV": tile(sizes["V"], min(64, max(16, 2048 // rows))), "num_stages": 2 if rows < 256 else 1}
    if like.dtype == torch.float32 and not chip_of(like.device).startswith("gfx"):
        found |= {"num_warps": 8, "num_stages": 1}
    return found


def _walk(
    key: Tensor, u: Tensor, w: Tensor, gate: Tensor | None, state: Tensor, sizes: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The state before each chunk `[B H, N, K, V]`, the deltas, the last state."""
    rows, block = key.shape[0] * sizes["H"], _walk_tiles(sizes, u)
    states = u.new_empty(rows, triton.cdiv(sizes["T"], sizes["C"]), sizes["K"], sizes["V"])
    deltas, end = torch.empty_like(u), torch.empty_like(state)
    launch(
        walk_kernel,
        (rows, triton.cdiv(sizes["V"], block["BV"])),
        p_k=key,
        p_u=u,
        p_w=w,
        p_gate=gate,
        p_begin=state,
        p_states=states,
        p_deltas=deltas,
        p_end=end,
        **sizes,
        **block,
    )
    return states, deltas, end


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    erase_key: Tensor | None,
    erase_after_decay: bool,
) -> tuple[Tensor, Tensor]:
    query, key, value, strength, gate, state, erase_key = contiguous(
        query, key, value, strength, log_retention, state, erase_key
    )
    sizes = sizes_of(query, value, gate)
    erase = key if erase_key is None else erase_key
    u, w, _ = _prepared(key, value, strength, gate, erase, 1 - erase_after_decay, sizes)
    states, deltas, end = _walk(key, u, w, gate, state, sizes)
    return read_out(query, key, deltas, gate, states, sizes), end


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    erase_key: Tensor | None,
    erase_after_decay: bool,
    d_y: Tensor,
    d_end: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, strength, gate, state and erase key; those of what is absent are empty."""
    query, key, value, strength, gate, state, erase_key, d_y, d_end = contiguous(
        query, key, value, strength, log_retention, state, erase_key, d_y, d_end
    )
    sizes, back = sizes_of(query, value, gate), 1 - erase_after_decay
    erase = key if erase_key is None else erase_key
    u, w, solve = _prepared(key, value, strength, gate, erase, back, sizes)
    states, deltas, _ = _walk(key, u, w, gate, state, sizes)
    inside = value_gradient(query, key, deltas, gate, d_y, None, sizes)

    rows, chunks, block = key.shape[0] * sizes["H"], states.shape[1], _walk_tiles(sizes, u)
    d_states, d_deltas, d_begin = torch.empty_like(states), torch.empty_like(deltas), torch.empty_like(state)
    launch(
        walk_back_kernel,
        (rows, triton.cdiv(sizes["V"], block["BV"])),
        p_q=query,
        p_k=key,
        p_w=w,
        p_gate=gate,
        p_dy=d_y,
        p_inside=inside,
        p_dend=d_end,
        p_dstates=d_states,
        p_ddeltas=d_deltas,
        p_dbegin=d_begin,
        **sizes,
        **block,
    )
    d_query, d_key_read, d_gate_read = query_key_gradients(query, key, deltas, gate, d_y, states, d_states, sizes)

    d_value, d_right = torch.empty_like(value), torch.empty_like(w)
    d_strength_right = torch.empty_like(strength, dtype=torch.float32)
    d_system = torch.empty_like(solve, dtype=torch.float32)
    plain = {name: size for name, size in sizes.items() if name != "HAS_GATE"}
    launch(
        right_gradient_kernel,
        (rows, chunks),
        num_warps=8,
        p_v=value,
        p_strength=strength,
        p_u=u,
        p_w=w,
        p_inverse=solve,
        p_states=states,
        p_ddeltas=d_deltas,
        p_dv=d_value,
        p_dright=d_right,
        p_dstrength=d_strength_right,
        p_dsystem=d_system,
        **plain,
        **tiles(sizes["K"], sizes["V"], value.dtype),
    )
    d_key, d_strength = torch.empty_like(key), torch.empty_like(strength)
    d_gate = None if gate is None else torch.empty_like(gate)
    d_erase = None if erase_key is None else torch.empty_like(erase_key)
    launch(
        system_gradient_kernel,
        (rows, chunks),
        num_warps=8,
        p_p=erase,
        p_k=key,
        p_strength=strength,
        p_gate=gate,
        p_dright=d_right,
        p_dsystem=d_system,
        p_dk_before=d_key_read,
        p_dstrength_before=d_strength_right,
        p_dgate_before=d_gate_read,
        p_dp=d_erase,
        p_dk=d_key,
        p_dstrength=d_strength,
        p_dgate=d_gate,
        HAS_ERASE=erase_key is not None,
        BACK=back,
        **sizes,
        **tiles(sizes["K"], sizes["V"], value.dtype),
    )
    absent = state.new_empty(0)
    given = (d_query, d_key, d_value, d_strength, d_gate, d_begin, d_erase)
    return tuple(absent.clone() if x is None else x for x in given)


def one_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    erase_key: Tensor | None,
    erase_after_decay: bool,
) -> tuple[Tensor, Tensor]:
    query, key, value, strength, gate, state, erase_key = contiguous(
        query, key, value, strength, log_retention, state, erase_key
    )
    (batch, _, heads, width), value_dim = query.shape, value.shape[-1]
    y, end = query.new_empty(batch, 1, heads, value_dim), torch.empty_like(state)
    rows = tile(width, 256)
    block = {"BK": rows, "BV": tile(value_dim, 32)}
    launch(
        _step_kernel,
        (batch * heads, triton.cdiv(value_dim, block["BV"])),
        num_warps=2 if rows <= 64 else 4,
        p_q=query,
        p_k=key,
        p_p=key if erase_key is None else erase_key,
        p_v=value,
        p_strength=strength,
        p_gate=gate,
        p_begin=state,
        p_y=y,
        p_end=end,
        K=width,
        V=value_dim,
        HAS_GATE=gate is not None,
        BACK=1 - erase_after_decay,
        **block,
    )
    return y, end


# What autograd and torch.compile see.

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor strength, Tensor? log_retention, Tensor state, Tensor? erase_key, "
    "bool erase_after_decay"
)
_rule = torch.library.custom_op(
    "memzoo::delta_rule", forward, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
_step = torch.library.custom_op(
    "memzoo::delta_rule_step", one_token, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
_gradient = torch.library.custom_op(
    "memzoo::delta_rule_backward",
    backward,
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor d_y, Tensor d_end) -> ({', '.join(['Tensor'] * 7)})",
)


@_rule.register_fake
@_step.register_fake
def _fake(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:3], value.shape[-1]), fresh(others[2])


_gradient.register_fake(lambda *inputs: gradients_like(inputs[:7], inputs[5]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.erase_after_decay = inputs
    ctx.save_for_backward(*tensors)


def _pull_back(ctx: Any, d_y: Tensor, d_end: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    return *wanted(tensors, _gradient(*tensors, ctx.erase_after_decay, d_y, d_end)), None


_rule.register_autograd(_pull_back, setup_context=_keep)
