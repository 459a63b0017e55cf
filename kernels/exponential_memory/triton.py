"""One token of the memory on exponential features in Triton, without gradients; what else is asked, torch has.

Everything that a token asks of the memory it asks of `M_{t-1}`, the query too, since

    y_t = retention_t M_{t-1} phi(q_t) - sum_j step_{t,j} e_{t,j} phi(k_{t-j}) . phi(q_t)

So the keys and what stands at them pass by once. Two kernels, because the errors need the sums over all keys:

- `sums`, a program per row, head, part of the keys and tile of columns: what its keys say of the query and, for l2, of
  the pairs' keys; over what is written there, the same times the retention. A part is every P-th block of the places
  that are taken, so that P programs share what there is, however much room there is for more.
- `write`, a program per row and head: the parts' sums, the errors, the rows of the c pairs, the new key, the read-out
  over its normaliser, the last values, and the counts.

A state that grows is first copied to one with a place more. Pairs exist or not by the row's position, which is on the
device, as is its length: a step asks for nothing, and with room it keeps shapes and addresses. A row that goes on
without room is lost, and no other.

On the chip: a block of keys and of what is written, 16 KiB in registers, and the sums.
Bytes per token, row and head with R tokens before: `4 R (K + 2 V)`, without retention `4 R (K + V)`; the parts' sums
are `8 P N V` for N vectors, P at most 32. Operations `2 N R (K + V)`, N = 1 or for l2 c + 1, on the plain units. At
K = V = 64 and R = 8192: 6.3 MB and 2 MFLOP: on an H100 (3.35 TB/s, 67 TFLOP/s in float32) 1.9 us for the bytes, 31 ns
for the sums. Memory is the floor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.exponential_memory import ExponentialState
from memzoo.kernels.linear_attention.triton import columns, load_rows, store_rows
from memzoo.kernels.registry import writable
from memzoo.kernels.triton_support import contiguous, fresh, launch, tile

PARTS = 32
"""Most parts that the keys of a row and head are cut into."""
PROGRAMS = 512
"""That keep a chip busy: more parts than it takes to have as many only add to what is joined."""
BLOCK = 2048
"""Elements of a block of keys, or of what is written at them."""


def exponential_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    step_size: Tensor,
    state: ExponentialState,
    lengths: Tensor | None,
    grows: bool,
    scale: float,
    objective: str,
    normalizer: bool,
) -> tuple[Tensor, ExponentialState]:
    """See `memzoo.kernels.exponential_memory.exponential_memory`."""
    keys, written = with_place(state.keys, grows), with_place(state.written, grows)
    y, recent, position, length = _step(
        *(query, key, value, log_retention, step_size, keys, written, state.recent_values, state.position),
        *(state.length, lengths, scale, objective == "l2", normalizer),
    )
    return y, ExponentialState(keys, written, recent, position, length)


def with_place(x: Tensor, grows: bool) -> Tensor:
    """`x` `[B, H, R, D]` or a copy, contiguous, that may be written to; with a place more if it `grows`."""
    return writable(F.pad(x, (0, 0, 0, 1)) if grows else x)


@triton.jit
def retention_of(p_gate, p_added, i_row, i_b):
    """1 for a row that gets no token."""
    keep = 1.0
    if p_gate is not None:
        keep = tl.exp(tl.load(p_gate + i_row).to(tl.float32))
        if p_added is not None:
            keep = tl.where(tl.load(p_added + i_b) > 0, keep, 1.0)
    return keep


@triton.jit
def pair_key(p_key, p_keys, length, position, column, J: tl.constexpr, K: tl.constexpr):
    """The key of the token J before, 0 if there is none; `p_key` and `p_keys` of the row and head."""
    if J == 0:
        found = tl.load(p_key + column, mask=column < K, other=0.0).to(tl.float32)
    else:
        found = tl.load(p_keys + (length - J) * K + column, mask=column < tl.where(position >= J, K, 0), other=0.0)
    return found


@triton.jit(do_not_specialize=["places", "parts"])
def sums_kernel(
    p_query,
    p_key,
    p_gate,
    p_position,
    p_length,
    p_added,
    p_keys,
    p_written,
    p_sums,
    places,
    parts,
    H: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
):
    """`sum_i written_i phi(k_i) . phi(x)` over a part of the keys, `[N, W]`, for the query and N - 1 pairs."""
    i = tl.program_id(0).to(tl.int64)
    i_part, i_w, i_row = i % parts, i // parts % tl.cdiv(W, BW), i // (parts * tl.cdiv(W, BW))
    i_b = i_row // H
    k_column, w_column, vector = columns(0, BK), columns(i_w, BW), columns(0, BN)
    position, length = tl.load(p_position + i_b), tl.minimum(tl.load(p_length + i_b), places)
    keep = retention_of(p_gate, p_added, i_row, i_b)
    p_query, p_key = p_query + i_row * K, p_key + i_row * K
    p_keys, p_written = p_keys + i_row * places * K, p_written + i_row * places * W
    sums = tl.zeros([BN, BW], tl.float32)
    for i_block in range(i_part, tl.cdiv(length, BR), parts):
        place = columns(i_block, BR)
        keys = load_rows(p_keys, place, k_column, K, place < length, K)
        written = load_rows(p_written, place, w_column, W, place < length, W)
        if p_gate is not None:
            store_rows(p_written, written * keep, place, w_column, W, place < length, W)
        for n in tl.static_range(N):
            if n == 0:
                x = tl.load(p_query + k_column, mask=k_column < K, other=0.0).to(tl.float32)
            else:
                x = pair_key(p_key, p_keys, length, position, k_column, n - 1, K)
            alike = tl.exp(SCALE * (tl.sum(keys * x[None, :], axis=1) - 1))
            found = tl.sum(written * alike[:, None], axis=0)
            sums = tl.where(vector[:, None] == n, sums + found[None, :], sums)
    p_sums += (i_row * parts + i_part) * (N * W)
    store_rows(p_sums, sums, vector, w_column, W, vector < N, W)


@triton.jit
def total(p_sums, n, column, used, N: tl.constexpr, W: tl.constexpr, BP: tl.constexpr):
    """Of the n-th vector the sum over the parts, of which `used` had keys; `p_sums` of the row and head."""
    part = columns(0, BP)
    return tl.sum(load_rows(p_sums + n * W, part, column, N * W, part < used, W), axis=0)


@triton.jit
def gone_on(
    p_key,
    p_value,
    p_keys,
    p_recent,
    p_new_recent,
    p_new_position,
    p_new_length,
    i_row,
    position,
    length,
    added,
    places,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WINDOW: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """The new key in its place, the last values with the new one, and the counts, of a row that has `added` a token;
    `p_key`, `p_value` and `p_keys` of the row and head."""
    k_column, v_column = columns(0, BK), columns(0, BV)
    key = tl.load(p_key + k_column, mask=k_column < K, other=0.0).to(tl.float32)
    has_place = (added > 0) & (length < places)
    tl.store(p_keys + length * K + k_column, key, mask=k_column < tl.where(has_place, K, 0))
    p_recent, p_new_recent = p_recent + i_row * ((WINDOW - 1) * V), p_new_recent + i_row * ((WINDOW - 1) * V)
    for n in tl.static_range(WINDOW - 1):
        if n == WINDOW - 2:
            value = tl.load(p_value + v_column, mask=v_column < V, other=0.0).to(tl.float32)
        else:
            value = tl.load(p_recent + (n + 1) * V + v_column, mask=v_column < V, other=0.0)
        before = tl.load(p_recent + n * V + v_column, mask=v_column < V, other=0.0)
        tl.store(p_new_recent + n * V + v_column, tl.where(added > 0, value, before), mask=v_column < V)
    if i_row % H == 0:
        tl.store(p_new_position + i_row // H, position + added)
        tl.store(p_new_length + i_row // H, length + added)


@triton.jit
def added_to(p_added, i_b):
    """How many of one token the row gets."""
    added = tl.full([], 1, tl.int64)
    if p_added is not None:
        added = tl.load(p_added + i_b)
    return added


@triton.jit(do_not_specialize=["places", "parts"])
def write_kernel(
    p_query,
    p_key,
    p_value,
    p_gate,
    p_step,
    p_position,
    p_length,
    p_added,
    p_recent,
    p_sums,
    p_keys,
    p_written,
    p_y,
    p_new_recent,
    p_new_position,
    p_new_length,
    places,
    parts,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    NORMALIZER: tl.constexpr,
    SCALE: tl.constexpr,
    BP: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
):
    """From the sums: with `N > 1` the errors of the pairs are those of l2. A row's values have a last coordinate of 1
    with `NORMALIZER`."""
    W: tl.constexpr = V + NORMALIZER
    i_row = tl.program_id(0).to(tl.int64)
    i_b = i_row // H
    k_column, w_column = columns(0, BK), columns(0, BW)
    position, length = tl.load(p_position + i_b), tl.minimum(tl.load(p_length + i_b), places)
    added = added_to(p_added, i_b)
    p_query, p_key, p_value = p_query + i_row * K, p_key + i_row * K, p_value + i_row * V
    p_keys, p_written = p_keys + i_row * places * K, p_written + i_row * places * W
    p_sums += i_row * parts * (N * W)
    used = tl.minimum(parts, tl.cdiv(length, BR))
    query = tl.load(p_query + k_column, mask=k_column < K, other=0.0).to(tl.float32)
    y = retention_of(p_gate, p_added, i_row, i_b) * total(p_sums, 0, w_column, used, N, W, BP)
    for j in tl.static_range(WINDOW):
        if j == 0:
            value = tl.load(p_value + w_column, mask=w_column < V, other=1.0).to(tl.float32)
        else:
            p_before = p_recent + (i_row * (WINDOW - 1) + WINDOW - 1 - j) * V
            value = tl.load(p_before + w_column, mask=w_column < V, other=1.0)
        if N > 1:
            value -= total(p_sums, j + 1, w_column, used, N, W, BP)
        key = pair_key(p_key, p_keys, length, position, k_column, j, K)
        exists = (position >= j) & (added > 0)
        change = tl.load(p_step + i_row * WINDOW + j, mask=exists, other=0.0).to(tl.float32) * value
        y += change * tl.exp(SCALE * (tl.sum(key * query, axis=0) - 1))
        place = length - j
        here = w_column < tl.where(exists & (place < places), W, 0)
        if j > 0:
            change += tl.load(p_written + place * W + w_column, mask=here, other=0.0)
        tl.store(p_written + place * W + w_column, change, mask=here)
    if NORMALIZER:
        weight = tl.sum(tl.where(w_column == V, y, 0.0), axis=0)
        y /= tl.where(weight > 0, weight, 1.0)
    tl.store(p_y + i_row * V + w_column, y.to(p_y.dtype.element_ty), mask=w_column < V)
    gone_on(
        *(p_key, p_value, p_keys, p_recent, p_new_recent, p_new_position, p_new_length, i_row, position, length),
        *(added, places, H, K, V, WINDOW, BK, BW),
    )


def summed(
    query: Tensor,
    key: Tensor,
    gate: Tensor | None,
    position: Tensor,
    length: Tensor,
    added: Tensor | None,
    keys: Tensor,
    written: Tensor,
    vectors: int,
    scale: float,
) -> tuple[Tensor, dict[str, Any]]:
    """The parts' sums `[B H, P, N, W]` for N vectors, with what is written decayed; and what the kernel that joins them
    has to know of the parts."""
    batch, heads, places, width = keys.shape
    W, BK = written.shape[3], tile(width, 256)
    BW = tile(W, 256)
    BR = max(16, min(64, BLOCK // max(BK, BW)))
    tiles = batch * heads * triton.cdiv(W, BW)
    parts = min(PARTS, triton.cdiv(places, BR), triton.cdiv(PROGRAMS, tiles))
    sums = written.new_empty(batch * heads, parts, vectors, W)
    launch(
        sums_kernel,
        (batch * heads, triton.cdiv(W, BW), parts),
        p_query=query,
        p_key=key,
        p_gate=gate,
        p_position=position,
        p_length=length,
        p_added=added,
        p_keys=keys,
        p_written=written,
        p_sums=sums,
        places=places,
        parts=parts,
        H=heads,
        K=width,
        W=W,
        N=vectors,
        SCALE=scale,
        BN=triton.next_power_of_2(vectors),
        BR=BR,
        BK=BK,
        BW=BW,
    )
    shared = {"places": places, "parts": parts, "H": heads, "K": width, "N": vectors, "SCALE": scale}
    return sums, {**shared, "BP": triton.next_power_of_2(PARTS), "BR": BR, "BK": BK}


def one_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    step_size: Tensor,
    keys: Tensor,
    written: Tensor,
    recent_values: Tensor,
    position: Tensor,
    length: Tensor,
    lengths: Tensor | None,
    scale: float,
    l2: bool,
    normalizer: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, the last values, and the new position and length."""
    query, key, value, gate, step, recent, position, length, added = contiguous(
        query, key, value, log_retention, step_size, recent_values, position, length, lengths
    )
    y, new_recent, *counts = _like_output(query, key, value, None, None, keys, written, recent, position, length)
    window, width = step.shape[3], value.shape[3]
    vectors = window + 1 if l2 else 1
    sums, shared = summed(query, key, gate, position, length, added, keys, written, vectors, scale)
    launch(
        write_kernel,
        (y.shape[0], shared["H"]),
        num_warps=4 if width <= 128 else 8,
        p_query=query,
        p_key=key,
        p_value=value,
        p_gate=gate,
        p_step=step,
        p_position=position,
        p_length=length,
        p_added=added,
        p_recent=recent,
        p_sums=sums,
        p_keys=keys,
        p_written=written,
        p_y=y,
        p_new_recent=new_recent,
        p_new_position=counts[0],
        p_new_length=counts[1],
        V=width,
        WINDOW=window,
        NORMALIZER=int(normalizer),
        BW=triton.next_power_of_2(width + normalizer),
        **shared,
    )
    return y, new_recent, counts[0], counts[1]


# What torch.compile sees.


def _like_output(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return query.new_empty(value.shape), *(fresh(x) for x in others[4:7])  # type: ignore[return-value]


_step: Any = torch.library.custom_op(
    "memzoo::exponential_memory_step",
    one_token,
    mutates_args=("keys", "written"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? log_retention, Tensor step_size, Tensor(a!) keys, "
    "Tensor(b!) written, Tensor recent_values, Tensor position, Tensor length, Tensor? lengths, float scale, bool l2, "
    "bool normalizer) -> (Tensor, Tensor, Tensor, Tensor)",
)
_step.register_fake(_like_output)
