"""One token of the deep memory on exponential features in Triton, without gradients; what else is asked, torch has.

    W_2 phi(x) = first x + sum_i written_i exp(s (k_i . x - 1))   at M_{t-1}, for the pairs' keys and the query

of which the sum is what `memzoo.kernels.exponential_memory.triton` makes in parts, in its first kernel, with hidden
units for columns. Two kernels, because every error needs the sums over all keys. The second:

- `network`, a program per row and head: the answers' errors, the gradients and what the bound leaves of each; then
  both layers and the rows of the pairs, in place, and the read-out. The hidden units meet in sums, so that it goes
  through them in tiles three times: for the errors, for the gradients' norms (not without a bound), for the writes.
  What a pair's write adds to the query's units is `-gate_j delta_j phi(k_j) . phi(q)`: nothing is read again.

On the chip: keys, errors and values of the pairs, a tile of both layers, 32 KiB of products before they are summed.
Bytes per token, row and head with R tokens before: `4 R (K + 2 F)`, the keys once for each 256 hidden units, and
`8 F (K + V)` for the layers, which the second and third time come from the second-level cache. Operations
`2 (c + 1) R (K + F)` and about `12 c F (K + V)`, on the plain units. At K = V = 64, F = 256, c = 1 and R = 8192: 19 MB
and 11 MFLOP: on an H100 (3.35 TB/s, 67 TFLOP/s in float32) 5.7 us for the bytes, 0.2 us for the operations. Memory is
the floor, and for few rows and heads the network, which one processor has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.deep_exponential_memory import DeepExponentialState
from memzoo.kernels.deep_memory.triton_units import slope_of, value_of
from memzoo.kernels.exponential_memory.triton import (
    added_to,
    gone_on,
    retention_of,
    summed,
    total,
    with_place,
)
from memzoo.kernels.linear_attention.triton import columns, load_rows, store_rows
from memzoo.kernels.registry import writable
from memzoo.kernels.triton_support import contiguous, fresh, launch

PRODUCT = 8192
"""Elements of a product of pairs, units and columns before it is summed."""


def deep_exponential_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    step_size: Tensor,
    state: DeepExponentialState,
    lengths: Tensor | None,
    grows: bool,
    scale: float,
    objective: str,
    activation: str,
    max_gradient_norm: float,
) -> tuple[Tensor, DeepExponentialState]:
    """See `memzoo.kernels.deep_exponential_memory.deep_exponential_memory`."""
    keys, written = with_place(state.keys, grows), with_place(state.written, grows)
    first, second = writable(state.first), writable(state.second)
    bound = 0.0 if max_gradient_norm == math.inf else max_gradient_norm
    y, recent, position, length = _step(
        *(query, key, value, log_retention, step_size, keys, written, first, second, state.recent_values),
        *(state.position, state.length, lengths, scale, objective == "l2", activation, bound),
    )
    return y, DeepExponentialState(keys, written, first, second, recent, position, length)


@triton.jit
def hidden(
    p_first,
    p_sums,
    x,
    lag,
    unit,
    k_column,
    used,
    F: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BP: tl.constexpr,
):
    """`W_2 phi(x)` of the pairs' keys `x` `[BJ, BK]`, `[BJ, BU]`."""
    first = load_rows(p_first, unit, k_column, K, unit < F, K)
    part = columns(0, BP)
    mask = (part < used)[:, None, None] & (lag < N - 1)[None, :, None] & (unit < F)[None, None, :]
    place = part[:, None, None] * (N * F) + (lag + 1)[None, :, None] * F + unit[None, None, :]
    sums = tl.sum(tl.load(p_sums + place, mask=mask, other=0.0), axis=0)
    return sums + tl.sum(x[:, None, :] * first[None, :, :], axis=2)


@triton.jit(do_not_specialize=["places", "parts"])
def network_kernel(
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
    p_first,
    p_second,
    p_y,
    p_new_recent,
    p_new_position,
    p_new_length,
    places,
    parts,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    L2: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MAX_NORM: tl.constexpr,
    SCALE: tl.constexpr,
    BP: tl.constexpr,
    BR: tl.constexpr,
    BJ: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """From the sums, of the query and the `N - 1` pairs; no bound where `MAX_NORM` is 0."""
    i_row = tl.program_id(0).to(tl.int64)
    i_b = i_row // H
    k_column, v_column, lag = columns(0, BK), columns(0, BV), columns(0, BJ)
    position, length = tl.load(p_position + i_b), tl.minimum(tl.load(p_length + i_b), places)
    added = added_to(p_added, i_b)
    p_query, p_key, p_value = p_query + i_row * K, p_key + i_row * K, p_value + i_row * V
    p_keys, p_written = p_keys + i_row * places * K, p_written + i_row * places * F
    p_first, p_second, p_sums = p_first + i_row * F * K, p_second + i_row * V * F, p_sums + i_row * parts * (N * F)
    used = tl.minimum(parts, tl.cdiv(length, BR))
    keep = retention_of(p_gate, p_added, i_row, i_b)

    # The pairs, the newest first, those that exist.
    exists = lag < tl.where(added > 0, tl.minimum(position + 1, WINDOW), 0)
    is_new, is_old = (lag == 0)[:, None], exists & (lag > 0)
    place = length - lag
    query = tl.load(p_query + k_column, mask=k_column < K, other=0.0).to(tl.float32)
    new = tl.load(p_key + k_column, mask=k_column < K, other=0.0).to(tl.float32)
    x = tl.where(is_new, new[None, :], load_rows(p_keys, place, k_column, K, is_old, K))
    new = tl.load(p_value + v_column, mask=v_column < V, other=0.0).to(tl.float32)
    p_before = p_recent + i_row * ((WINDOW - 1) * V)
    error = -tl.where(is_new, new[None, :], load_rows(p_before, WINDOW - 1 - lag, v_column, V, is_old, V))
    if L2:
        new = tl.load(p_key + v_column, mask=v_column < V, other=0.0).to(tl.float32)
        error += tl.where(is_new, new[None, :], load_rows(p_keys, place, v_column, K, is_old, V))
    gate = tl.load(p_step + i_row * WINDOW + lag, mask=exists, other=0.0).to(tl.float32)

    # What is wrong with the answers, and how long the gradients are.
    squares = tl.zeros([BJ], tl.float32)
    for i_u in range(tl.cdiv(F, BU)):
        unit = columns(i_u, BU)
        act = value_of(hidden(p_first, p_sums, x, lag, unit, k_column, used, F, K, N, BP), ACTIVATION)
        squares += tl.sum(act * act, axis=1)
        if L2:
            second = load_rows(p_second, v_column, unit, F, v_column < V, F)
            error += tl.sum(act[:, None, :] * second[None, :, :], axis=2)
    if MAX_NORM > 0:
        squares *= tl.sum(error * error, axis=1)
        for i_u in range(tl.cdiv(F, BU)):
            unit = columns(i_u, BU)
            slope = slope_of(hidden(p_first, p_sums, x, lag, unit, k_column, used, F, K, N, BP), ACTIVATION)
            second = load_rows(p_second, v_column, unit, F, v_column < V, F)
            delta = slope * tl.sum(error[:, :, None] * second[None, :, :], axis=1)
            squares += tl.sum(delta * delta, axis=1)
        gate *= tl.rsqrt(tl.maximum(squares / (MAX_NORM * MAX_NORM), 1.0))

    # The writes, and what the query reads of them.
    alike = tl.exp(SCALE * (tl.sum(x * query[None, :], axis=1) - 1))
    gated, has_place = gate[:, None] * error, exists & (place < places)
    y = tl.load(p_query + v_column, mask=v_column < V, other=0.0).to(tl.float32)
    for i_u in range(tl.cdiv(F, BU)):
        unit = columns(i_u, BU)
        h = hidden(p_first, p_sums, x, lag, unit, k_column, used, F, K, N, BP)
        second = load_rows(p_second, v_column, unit, F, v_column < V, F)
        delta = slope_of(h, ACTIVATION) * tl.sum(error[:, :, None] * second[None, :, :], axis=1)
        change = gate[:, None] * delta
        act = value_of(h, ACTIVATION)
        second = keep * second - tl.sum(gated[:, :, None] * act[:, None, :], axis=0)
        first = load_rows(p_first, unit, k_column, K, unit < F, K)
        asked = keep * (tl.sum(first * query[None, :], axis=1) + total(p_sums, 0, unit, used, N, F, BP))
        asked -= tl.sum(change * alike[:, None], axis=0)
        y += tl.sum(second * value_of(asked, ACTIVATION)[None, :], axis=1)
        before = load_rows(p_written, place, unit, F, has_place, F)
        tl.debug_barrier()  # for what is written over, all threads have read
        store_rows(p_second, second, v_column, unit, F, v_column < V, F)
        if p_gate is not None:
            store_rows(p_first, keep * first, unit, k_column, K, unit < F, K)
        store_rows(p_written, before - change, place, unit, F, has_place, F)
    tl.store(p_y + i_row * V + v_column, y.to(p_y.dtype.element_ty), mask=v_column < V)
    gone_on(
        *(p_key, p_value, p_keys, p_recent, p_new_recent, p_new_position, p_new_length, i_row, position, length),
        *(added, places, H, K, V, WINDOW, BK, BV),
    )


def one_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    step_size: Tensor,
    keys: Tensor,
    written: Tensor,
    first: Tensor,
    second: Tensor,
    recent_values: Tensor,
    position: Tensor,
    length: Tensor,
    lengths: Tensor | None,
    scale: float,
    l2: bool,
    activation: str,
    max_norm: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, the last values, and the new position and length."""
    query, key, value, gate, step, recent, position, length, added = contiguous(
        query, key, value, log_retention, step_size, recent_values, position, length, lengths
    )
    y, new_recent, *counts = _like_output(
        query, key, value, None, None, keys, written, first, second, recent, position, length
    )
    window, width, units = step.shape[3], value.shape[3], first.shape[2]
    sums, shared = summed(query, key, gate, position, length, added, keys, written, window + 1, scale)
    BJ, BV = triton.next_power_of_2(window), triton.next_power_of_2(width)
    BU = min(triton.next_power_of_2(units), max(1, PRODUCT // (BJ * max(shared["BK"], BV, shared["BP"]))), 32)
    launch(
        network_kernel,
        (y.shape[0], shared["H"]),
        num_warps=8,
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
        p_first=first,
        p_second=second,
        p_y=y,
        p_new_recent=new_recent,
        p_new_position=counts[0],
        p_new_length=counts[1],
        V=width,
        F=units,
        WINDOW=window,
        L2=l2,
        ACTIVATION=activation,
        MAX_NORM=max_norm,
        BJ=BJ,
        BV=BV,
        BU=BU,
        **shared,
    )
    return y, new_recent, counts[0], counts[1]


# What torch.compile sees.


def _like_output(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return query.new_empty(value.shape), *(fresh(x) for x in others[6:9])  # type: ignore[return-value]


_step: Any = torch.library.custom_op(
    "memzoo::deep_exponential_memory_step",
    one_token,
    mutates_args=("keys", "written", "first", "second"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? log_retention, Tensor step_size, Tensor(a!) keys, "
    "Tensor(b!) written, Tensor(c!) first, Tensor(d!) second, Tensor recent_values, Tensor position, Tensor length, "
    "Tensor? lengths, float scale, bool l2, str activation, float max_norm) -> (Tensor, Tensor, Tensor, Tensor)",
)
_step.register_fake(_like_output)
