"""Gated linear attention in Triton, in chunks of C tokens; `P(t, i)` is the product of the retentions after i up to t.

Two kernels forward: `states` walks the chunks of a row and head with a tile of the state in registers and writes the
state at each chunk's start; `outputs`, one program per chunk, reads it and adds what the chunk's own tokens give. The
walk is short (a product per chunk and tile), and the rest of the work fills the chip for one long row as for many
short ones. Backward the same two steps: the states anew, `states` run backward for the gradient `D` of the state at
each chunk's end, and per chunk, in parallel,

    dQ = diag(P(., 0)) dY S^T + (dY V^T * P) K,      dK = diag(P(C, .)) V D^T + (dY V^T * P)^T Q
    dV = diag(P(C, .)) K D    + (Q K^T * P)^T dY,    dlog a_n = sum of what passes over n

where `log a_n` takes the sum of `gradient * value` over every `P(t, i)` with `i < n <= t`: by cumulative sums of that
matrix and of its margins (`i` before the chunk, `t` after it), with no difference of long sums. Products of gates are
exponentials of sums over each interval, so that gates of 0 are exact.

On the chip, for K = V = 64 and C = 64: `states` a tile of 64 x 64 float32 (16 KiB of registers), keys and values of a
chunk in shared memory; `outputs` the scores and the read-out (32 KiB of registers); the backward five such tiles.

Bytes per token and head, inputs of s bytes: forward `s (2 K + 2 V)` in and out, `s (K + V)` once more for the walk,
`2 s K V / C` for the states written and read; backward about three times that. Operations forward `4 K V + 2 C (K + V)`
(J = 1), backward `12 K V + 6 C K + 4 C V`. At K = V = C = 64 and bfloat16 that is 1.0 KB and 33 kFLOP forward: on an
H100 (3.35 TB/s, about 800 TFLOP/s) 0.3 ns for the bytes, 0.04 ns for the products. Memory is the floor.
One token: the state in and out, `8 K V` bytes per row and head, and nothing to hide it behind: 10 ns at K = V = 64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.registry import mixed_precision
from memzoo.kernels.triton_support import contiguous, fresh, gradients_like, launch, product, tile, wanted

CHUNK = {torch.float32: 32, torch.bfloat16: 64}
"""Tokens of a chunk, by the dtype of the products. Tensor cores want 64; float32, which has none of them, takes twice
the registers."""
TILE = {torch.float32: 32, torch.bfloat16: 64}
"""Widest tile of key and value columns, for the same reason."""


@mixed_precision
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `memzoo.kernels.linear_attention.linear_attention`; factors of products have the dtype of the values."""
    if query.shape[1] == 1 and not torch.is_grad_enabled():
        return _step(query, key, value, log_retention, state)
    return _attention(query, key, value, log_retention, state)


@triton.jit
def load_rows(p, row, column, stride, has_row, width):
    """`[R, W]` of a matrix with `stride` from row to row; 0 where it has no such row or column."""
    mask = has_row[:, None] & (column < width)[None, :]
    return tl.load(p + row[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(p, x, row, column, stride, has_row, width):
    mask = has_row[:, None] & (column < width)[None, :]
    tl.store(p + row[:, None] * stride + column[None, :], x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def columns(i, B: tl.constexpr):
    """Of the i-th tile of B columns, int64."""
    return i * B + tl.arange(0, B).to(tl.int64)


@triton.jit
def log_gate(p_gate, token, first, last, H: tl.constexpr, HAS_GATE: tl.constexpr):
    """Log of the retention of each token, 0 outside of `[first, last)`."""
    if HAS_GATE:
        return tl.load(p_gate + token * H, mask=(token >= first) & (token < last), other=0.0).to(tl.float32)
    return tl.zeros_like(token).to(tl.float32)


@triton.jit
def intervals(p_gate, first, last, H: tl.constexpr, HAS_GATE: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr):
    """`P(t - BACK, i)` of a chunk's tokens t, i; 0 where `i > t - BACK`."""
    t, i = tl.arange(0, C)[:, None] - BACK, tl.arange(0, C)[None, :]
    if HAS_GATE:
        token = first + tl.arange(0, C).to(tl.int64) - BACK
        gate = log_gate(p_gate, token, first, last, H, HAS_GATE)
        return tl.where(t >= i, tl.exp(tl.cumsum(tl.where(t > i, gate[:, None], 0.0), axis=0)), 0.0)
    return tl.where(t >= i, 1.0, 0.0)


@triton.jit
def from_start(p_gate, first, last, H: tl.constexpr, HAS_GATE: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr):
    """`P(t - BACK, .)` over all of the chunk up to there."""
    token = first + tl.arange(0, C).to(tl.int64) - BACK
    return tl.exp(tl.cumsum(log_gate(p_gate, token, first, last, H, HAS_GATE), axis=0))


@triton.jit
def to_end(p_gate, first, last, H: tl.constexpr, HAS_GATE: tl.constexpr, C: tl.constexpr):
    """`P(C, i)`."""
    token = first + tl.arange(0, C).to(tl.int64) + 1
    return tl.exp(tl.cumsum(log_gate(p_gate, token, first, last, H, HAS_GATE), axis=0, reverse=True))


@triton.jit
def whole(p_gate, first, last, H: tl.constexpr, HAS_GATE: tl.constexpr, C: tl.constexpr):
    """`P(C, 0)`."""
    token = first + tl.arange(0, C).to(tl.int64)
    return tl.exp(tl.sum(log_gate(p_gate, token, first, last, H, HAS_GATE), axis=0))


@triton.jit
def over_gates(passing, C: tl.constexpr):
    """`sum over t >= n > i` of `[t, i]`, for each n."""
    n, i = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.sum(tl.where(i < n, tl.cumsum(passing, axis=0, reverse=True), 0.0), axis=1)


@triton.jit(do_not_specialize=["T"])
def states_kernel(
    p_k,
    p_v,
    p_gate,
    p_begin,
    p_states,
    p_end,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_GATE: tl.constexpr,
    REVERSE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """The state before each chunk, and after all. Backward in time with `REVERSE`: there `p_k` are queries and `p_v`
    gradients of the outputs, and the state is the gradient of the memory."""
    i_v, i_rest = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    i_k, i_row = i_rest % tl.cdiv(K, BK), (i_rest // tl.cdiv(K, BK)).to(tl.int64)
    i_b, i_h = i_row // H, i_row % H
    k_column, v_column = columns(i_k, BK), columns(i_v, BV)
    p_k, p_v = p_k + (i_b * T * J * H + i_h) * K, p_v + (i_b * T * J * H + i_h) * V
    if HAS_GATE:
        p_gate += i_b * T * H + i_h
    chunks = tl.cdiv(T, C)
    p_states += i_row * chunks * K * V
    state = load_rows(p_begin + i_row * K * V, k_column, v_column, V, k_column < K, V)
    for step in range(chunks):
        n = tl.cast(step, tl.int64)
        if REVERSE:
            n = chunks - 1 - n
        store_rows(p_states + n * K * V, state, k_column, v_column, V, k_column < K, V)
        first = n * C
        last = tl.minimum(first + C, T)
        token = first + tl.arange(0, C).to(tl.int64)
        if REVERSE:
            keep = from_start(p_gate, first, last, H, HAS_GATE, C, 0)
        else:
            keep = to_end(p_gate, first, last, H, HAS_GATE, C)
        state *= whole(p_gate, first, last, H, HAS_GATE, C)
        for stream in range(J):
            j = tl.cast(stream, tl.int64)
            k = load_rows(p_k + j * H * K, token, k_column, J * H * K, token < T, K).to(tl.float32) * keep[:, None]
            v = load_rows(p_v + j * H * V, token, v_column, J * H * V, token < T, V).to(p_states.dtype.element_ty)
            state += product(tl.trans(k.to(v.dtype)), v)
    store_rows(p_end + i_row * K * V, state, k_column, v_column, V, k_column < K, V)


@triton.jit(do_not_specialize=["T"])
def outputs_kernel(
    p_q,
    p_k,
    p_v,
    p_gate,
    p_states,
    p_y,
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
    """`Y = diag(P(., 0)) Q S + sum_j (Q K_j^T * P) V_j`, a tile of V columns of a chunk."""
    i_v, i_rest = tl.program_id(0) % tl.cdiv(V, BV), (tl.program_id(0) // tl.cdiv(V, BV)).to(tl.int64)
    chunks = tl.cdiv(T, C)
    n, i_row = i_rest % chunks, i_rest // chunks
    i_b, i_h = i_row // H, i_row % H
    first = n * C
    last = tl.minimum(first + C, T)
    token = first + tl.arange(0, C).to(tl.int64)
    v_column = columns(i_v, BV)
    p_q, p_y = p_q + (i_b * T * H + i_h) * K, p_y + (i_b * T * H + i_h) * V
    p_k, p_v = p_k + (i_b * T * J * H + i_h) * K, p_v + (i_b * T * J * H + i_h) * V
    p_states += i_rest * K * V
    if HAS_GATE:
        p_gate += i_b * T * H + i_h
    y = tl.zeros([C, BV], tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        k_column = columns(i_k, BK)
        state = load_rows(p_states, k_column, v_column, V, k_column < K, V)
        y += product(load_rows(p_q, token, k_column, H * K, token < T, K).to(state.dtype), state)
    y *= from_start(p_gate, first, last, H, HAS_GATE, C, 0)[:, None]
    decay = intervals(p_gate, first, last, H, HAS_GATE, C, 0)
    for stream in range(J):
        j = tl.cast(stream, tl.int64)
        v = load_rows(p_v + j * H * V, token, v_column, J * H * V, token < T, V).to(p_states.dtype.element_ty)
        scores = tl.zeros([C, C], tl.float32)
        for i_k in range(tl.cdiv(K, BK)):
            k_column = columns(i_k, BK)
            q = load_rows(p_q, token, k_column, H * K, token < T, K).to(v.dtype)
            k = load_rows(p_k + j * H * K, token, k_column, J * H * K, token < T, K).to(v.dtype)
            scores += product(q, tl.trans(k))
        y += product((scores * decay).to(v.dtype), v)
    store_rows(p_y, y, token, v_column, H * V, token < T, V)


@triton.jit(do_not_specialize=["T"])
def query_key_gradient_kernel(
    p_q,
    p_k,
    p_v,
    p_gate,
    p_dy,
    p_states,
    p_dstates,
    p_dq,
    p_dk,
    p_dgate,
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
    """Of a tile of K columns of a chunk; and what these columns give to the gradient of the gates."""
    i_k, i_rest = tl.program_id(0) % tl.cdiv(K, BK), (tl.program_id(0) // tl.cdiv(K, BK)).to(tl.int64)
    chunks = tl.cdiv(T, C)
    n, i_row = i_rest % chunks, i_rest // chunks
    i_b, i_h = i_row // H, i_row % H
    first = n * C
    last = tl.minimum(first + C, T)
    token = first + tl.arange(0, C).to(tl.int64)
    k_column = columns(i_k, BK)
    o_q, o_dy = (i_b * T * H + i_h) * K, (i_b * T * H + i_h) * V
    o_k, o_v = (i_b * T * J * H + i_h) * K, (i_b * T * J * H + i_h) * V
    p_states, p_dstates = p_states + i_rest * K * V, p_dstates + i_rest * K * V
    if HAS_GATE:
        p_gate += i_b * T * H + i_h
    q = load_rows(p_q + o_q, token, k_column, H * K, token < T, K).to(p_states.dtype.element_ty)
    d_q = tl.zeros([C, BK], tl.float32)
    over_chunk = 0.0
    for i_v in range(tl.cdiv(V, BV)):
        v_column = columns(i_v, BV)
        state = load_rows(p_states, k_column, v_column, V, k_column < K, V)
        d_y = load_rows(p_dy + o_dy, token, v_column, H * V, token < T, V).to(state.dtype)
        d_q += product(d_y, tl.trans(state))
        if HAS_GATE:
            d_state = load_rows(p_dstates, k_column, v_column, V, k_column < K, V)
            over_chunk += tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
    d_q *= from_start(p_gate, first, last, H, HAS_GATE, C, 0)[:, None]
    if HAS_GATE:
        # What passes from before the chunk to t, from before it to after it, and, below, from i to after it and to t.
        d_gate = tl.cumsum(tl.sum(d_q * q.to(tl.float32), axis=1), axis=0, reverse=True)
        d_gate += over_chunk * whole(p_gate, first, last, H, HAS_GATE, C)
    keep = to_end(p_gate, first, last, H, HAS_GATE, C)
    for stream in range(J):
        j = tl.cast(stream, tl.int64)
        d_scores = tl.zeros([C, C], tl.float32)
        d_k = tl.zeros([C, BK], tl.float32)
        for i_v in range(tl.cdiv(V, BV)):
            v_column = columns(i_v, BV)
            v = load_rows(p_v + o_v + j * H * V, token, v_column, J * H * V, token < T, V).to(q.dtype)
            d_y = load_rows(p_dy + o_dy, token, v_column, H * V, token < T, V).to(q.dtype)
            d_state = load_rows(p_dstates, k_column, v_column, V, k_column < K, V)
            d_scores += product(d_y, tl.trans(v))
            d_k += product(v, tl.trans(d_state))
        tl.debug_barrier()  # what follows is made and loaded here, so that it takes no registers in the loop
        q = load_rows(p_q + o_q, token, k_column, H * K, token < T, K).to(p_states.dtype.element_ty)
        k = load_rows(p_k + o_k + j * H * K, token, k_column, J * H * K, token < T, K).to(q.dtype)
        d_k *= keep[:, None]
        d_scores *= intervals(p_gate, first, last, H, HAS_GATE, C, 0)
        if HAS_GATE:
            out = tl.sum(d_k * k.to(tl.float32), axis=1)
            d_gate += tl.cumsum(out, axis=0) - out
            d_gate += over_gates(d_scores * product(q, tl.trans(k)), C)
        d_q += product(d_scores.to(q.dtype), k)
        d_k += product(tl.trans(d_scores.to(q.dtype)), q)
        store_rows(p_dk + o_k + j * H * K, d_k, token, k_column, J * H * K, token < T, K)
    store_rows(p_dq + o_q, d_q, token, k_column, H * K, token < T, K)
    if HAS_GATE:
        p_dgate += ((i_k * (tl.num_programs(0) // (chunks * H * tl.cdiv(K, BK))) + i_b) * T * H) + i_h
        tl.store(p_dgate + token * H, d_gate, mask=token < T)


@triton.jit(do_not_specialize=["T"])
def value_gradient_kernel(
    p_q,
    p_k,
    p_gate,
    p_dy,
    p_dstates,
    p_dv,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_GATE: tl.constexpr,
    INSIDE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """`dV_j = (Q K_j^T * P)^T dY`, and unless `INSIDE` the rest, `diag(P(C, .)) K_j D`."""
    i_v, i_rest = tl.program_id(0) % tl.cdiv(V, BV), (tl.program_id(0) // tl.cdiv(V, BV)).to(tl.int64)
    chunks = tl.cdiv(T, C)
    n, i_row = i_rest % chunks, i_rest // chunks
    i_b, i_h = i_row // H, i_row % H
    first = n * C
    last = tl.minimum(first + C, T)
    token = first + tl.arange(0, C).to(tl.int64)
    v_column = columns(i_v, BV)
    p_q, p_dy = p_q + (i_b * T * H + i_h) * K, p_dy + (i_b * T * H + i_h) * V
    p_k, p_dv = p_k + (i_b * T * J * H + i_h) * K, p_dv + (i_b * T * J * H + i_h) * V
    if HAS_GATE:
        p_gate += i_b * T * H + i_h
    decay = intervals(p_gate, first, last, H, HAS_GATE, C, 0)
    keep = to_end(p_gate, first, last, H, HAS_GATE, C)
    d_y = load_rows(p_dy, token, v_column, H * V, token < T, V).to(p_dstates.dtype.element_ty)
    for stream in range(J):
        j = tl.cast(stream, tl.int64)
        scores = tl.zeros([C, C], tl.float32)
        d_v = tl.zeros([C, BV], tl.float32)
        for i_k in range(tl.cdiv(K, BK)):
            k_column = columns(i_k, BK)
            q = load_rows(p_q, token, k_column, H * K, token < T, K).to(d_y.dtype)
            k = load_rows(p_k + j * H * K, token, k_column, J * H * K, token < T, K).to(d_y.dtype)
            scores += product(q, tl.trans(k))
            if not INSIDE:
                d_state = load_rows(p_dstates + i_rest * K * V, k_column, v_column, V, k_column < K, V)
                d_v += product(k, d_state)
        d_v = d_v * keep[:, None] + product(tl.trans((scores * decay).to(d_y.dtype)), d_y)
        store_rows(p_dv + j * H * V, d_v, token, v_column, J * H * V, token < T, V)


@triton.jit
def _step_kernel(
    p_q,
    p_k,
    p_v,
    p_gate,
    p_begin,
    p_y,
    p_end,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One token: a tile of V columns of a state, decayed, written and read."""
    i_v, i_row = tl.program_id(0) % tl.cdiv(V, BV), (tl.program_id(0) // tl.cdiv(V, BV)).to(tl.int64)
    i_b, i_h = i_row // H, i_row % H
    v_column = columns(i_v, BV)
    keep = 1.0
    if HAS_GATE:
        keep = tl.exp(tl.load(p_gate + i_row).to(tl.float32))
    y = tl.zeros([BV], tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        k_column = columns(i_k, BK)
        state = load_rows(p_begin + i_row * K * V, k_column, v_column, V, k_column < K, V) * keep
        for stream in range(J):
            j = tl.cast(stream, tl.int64)
            o = (i_b * J + j) * H + i_h
            k = tl.load(p_k + o * K + k_column, mask=k_column < K, other=0.0).to(tl.float32)
            v = tl.load(p_v + o * V + v_column, mask=v_column < V, other=0.0).to(tl.float32)
            state += k[:, None] * v[None, :]
        q = tl.load(p_q + i_row * K + k_column, mask=k_column < K, other=0.0).to(tl.float32)
        y += tl.sum(state * q[:, None], axis=0)
        store_rows(p_end + i_row * K * V, state, k_column, v_column, V, k_column < K, V)
    tl.store(p_y + i_row * V + v_column, y.to(p_y.dtype.element_ty), mask=v_column < V)


def tiles(key_dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """`BK` and `BV`."""
    return {"BK": tile(key_dim, TILE[dtype]), "BV": tile(value_dim, TILE[dtype])}


def sizes_of(query: Tensor, value: Tensor, log_retention: Tensor | None, streams: int = 1) -> dict[str, Any]:
    """What every kernel takes besides tensors and tiles."""
    _, tokens, heads, width = query.shape
    return {
        "T": tokens,
        "H": heads,
        "J": streams,
        "K": width,
        "V": value.shape[-1],
        "HAS_GATE": log_retention is not None,
        "C": CHUNK[value.dtype],
    }


def chunk_states(
    key: Tensor, value: Tensor, gate: Tensor | None, begin: Tensor, sizes: dict[str, Any], *, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The state before each chunk `[B H, N, K, V]`, in the dtype of the products, and the one after all."""
    batch, width, value_dim = key.shape[0], sizes["K"], sizes["V"]
    states = value.new_empty(batch * sizes["H"], triton.cdiv(sizes["T"], sizes["C"]), width, value_dim)
    end, block = fresh(begin), tiles(width, value_dim, value.dtype)
    launch(
        states_kernel,
        (batch * sizes["H"], triton.cdiv(width, block["BK"]), triton.cdiv(value_dim, block["BV"])),
        p_k=key,
        p_v=value,
        p_gate=gate,
        p_begin=begin,
        p_states=states,
        p_end=end,
        REVERSE=reverse,
        **sizes,
        **block,
    )
    return states, end


def read_out(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None, states: Tensor, sizes: dict[str, Any]
) -> Tensor:
    """`Y` `[B, T, H, V]` in the dtype of the query."""
    batch, tokens, heads, width = query.shape
    value_dim, block = sizes["V"], tiles(width, sizes["V"], states.dtype)
    y = query.new_empty(batch, tokens, heads, value_dim)
    launch(
        outputs_kernel,
        (batch * heads, triton.cdiv(tokens, sizes["C"]), triton.cdiv(value_dim, block["BV"])),
        p_q=query,
        p_k=key,
        p_v=value,
        p_gate=gate,
        p_states=states,
        p_y=y,
        **sizes,
        **block,
    )
    return y


def query_key_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    d_y: Tensor,
    states: Tensor,
    d_states: Tensor,
    sizes: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the query, the key and the gate, of what `read_out` and `chunk_states` do."""
    batch, tokens, heads, width = query.shape
    block = tiles(width, sizes["V"], states.dtype)
    parts = triton.cdiv(width, block["BK"])
    d_query, d_key = torch.empty_like(query), torch.empty_like(key)
    d_gate = None if gate is None else query.new_empty(parts, batch, tokens, heads, dtype=torch.float32)
    launch(
        query_key_gradient_kernel,
        (batch * heads, triton.cdiv(tokens, sizes["C"]), parts),
        num_warps=8,
        num_stages=1,
        p_q=query,
        p_k=key,
        p_v=value,
        p_gate=gate,
        p_dy=d_y,
        p_states=states,
        p_dstates=d_states,
        p_dq=d_query,
        p_dk=d_key,
        p_dgate=d_gate,
        **sizes,
        **block,
    )
    return d_query, d_key, None if d_gate is None else d_gate.sum(0)


def value_gradient(
    query: Tensor,
    key: Tensor,
    like: Tensor,
    gate: Tensor | None,
    d_y: Tensor,
    d_states: Tensor | None,
    sizes: dict[str, Any],
) -> Tensor:
    """Gradient of the value, shaped as `like`; of what it gives inside of its chunk alone without `d_states`."""
    batch, tokens, heads, width = query.shape
    block, d_value = tiles(width, sizes["V"], like.dtype), torch.empty_like(like)
    launch(
        value_gradient_kernel,
        (batch * heads, triton.cdiv(tokens, sizes["C"]), triton.cdiv(sizes["V"], block["BV"])),
        num_warps=8,
        p_q=query,
        p_k=key,
        p_gate=gate,
        p_dy=d_y,
        p_dstates=d_value if d_states is None else d_states,
        p_dv=d_value,
        INSIDE=d_states is None,
        **sizes,
        **block,
    )
    return d_value


def forward(
    query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    query, key, value, gate, state = contiguous(query, key, value, log_retention, state)
    sizes = sizes_of(query, value, gate, key.shape[2])
    states, end = chunk_states(key, value, gate, state, sizes)
    return read_out(query, key, value, gate, states, sizes), end


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    d_y: Tensor,
    d_end: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of all inputs; that of an absent gate is empty."""
    query, key, value, gate, state, d_y, d_end = contiguous(query, key, value, log_retention, state, d_y, d_end)
    sizes = sizes_of(query, value, gate, key.shape[2])
    states, _ = chunk_states(key, value, gate, state, sizes)
    d_states, d_begin = chunk_states(query, d_y.to(value.dtype), gate, d_end, {**sizes, "J": 1}, reverse=True)
    d_query, d_key, d_gate = query_key_gradients(query, key, value, gate, d_y, states, d_states, sizes)
    d_value = value_gradient(query, key, value, gate, d_y, d_states, sizes)
    d_gate = state.new_empty(0) if d_gate is None or gate is None else d_gate.to(gate.dtype)
    return d_query, d_key, d_value, d_gate, d_begin


def one_token(
    query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    query, key, value, gate, state = contiguous(query, key, value, log_retention, state)
    (batch, _, heads, width), value_dim = query.shape, value.shape[-1]
    y, end = query.new_empty(batch, 1, heads, value_dim), torch.empty_like(state)
    block = {"BK": tile(width, 64), "BV": tile(value_dim, 32)}  # more programs, since each has little to do
    launch(
        _step_kernel,
        (batch * heads, triton.cdiv(value_dim, block["BV"])),
        num_warps=2,
        p_q=query,
        p_k=key,
        p_v=value,
        p_gate=gate,
        p_begin=state,
        p_y=y,
        p_end=end,
        H=heads,
        J=key.shape[2],
        K=width,
        V=value_dim,
        HAS_GATE=gate is not None,
        **block,
    )
    return y, end


# What autograd and torch.compile see.

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? log_retention, Tensor state"


def _fake(
    query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:3], value.shape[-1]), fresh(state)


_attention = torch.library.custom_op(
    "memzoo::linear_attention", forward, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
_step = torch.library.custom_op(
    "memzoo::linear_attention_step", one_token, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
_gradient = torch.library.custom_op(
    "memzoo::linear_attention_backward",
    backward,
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor d_y, Tensor d_end) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_attention.register_fake(_fake)
_step.register_fake(_fake)


_gradient.register_fake(lambda *inputs: gradients_like(inputs[:5], inputs[4]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _pull_back(ctx: Any, d_y: Tensor, d_end: Tensor) -> tuple[Tensor | None, ...]:
    return wanted(ctx.saved_tensors, _gradient(*ctx.saved_tensors, d_y, d_end))


_attention.register_autograd(_pull_back, setup_context=_keep)
