"""A token into the cache by one kernel, in Triton, without gradients.

A program turns one head of a row's queries, or turns one of its keys and writes it with its values; the row's first
program also counts the token and says which keys there are. Bytes of a row: `2 (H + 2 N G) D` numbers and `P + S` for
the mask. At one token it is one launch in place of ten.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.linear_attention.triton import columns
from memzoo.kernels.triton_support import contiguous, fresh, launch

MASK_TILE = 1024


def kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    prefix: int,
    restarts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `memzoo.kernels.kv_write.kv_write`."""
    turned, length, exists = _written(query, key, value, *rotary, keys, values, length, prefix, restarts)
    return turned.view(len(length), -1, 1, keys.shape[3]), length, exists.view(torch.bool)


@triton.jit
def _write_kernel(
    p_query,
    p_key,
    p_value,
    p_cos,
    p_sin,
    p_keys,
    p_values,
    p_length,
    p_turned,
    p_new_length,
    p_exists,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    PREFIX: tl.constexpr,
    RESTARTS: tl.constexpr,
    ANGLES: tl.constexpr,
    BD: tl.constexpr,
    TILE: tl.constexpr,
    places,
):
    """`ANGLES` is D where each row has its own angles, and 0 where all share them."""
    i = tl.program_id(0).to(tl.int64)
    i_row, head = i // (H + N * G), i % (H + N * G)
    at = tl.arange(0, BD).to(tl.int64)
    inside, other = at < D, (at + D // 2) % D
    cos = tl.load(p_cos + i_row * ANGLES + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(p_sin + i_row * ANGLES + at, mask=inside, other=0.0).to(tl.float32)
    length = tl.load(p_length + i_row)
    if RESTARTS:
        length = length % places
    if head < H:
        start = (i_row * H + head) * D
        x = tl.load(p_query + start + at, mask=inside, other=0.0).to(tl.float32)
        partner = tl.load(p_query + start + other, mask=inside, other=0.0).to(tl.float32)
        tl.store(p_turned + start + at, (x * cos + partner * sin).to(p_turned.dtype.element_ty), mask=inside)
    else:
        each, group = (head - H) // G, (head - H) % G
        start = (i_row * N * G + head - H) * D
        to = ((i_row * G + group) * (PREFIX + places) + PREFIX + (length + each) % places) * D + at
        x = tl.load(p_key + start + at, mask=inside, other=0.0).to(tl.float32)
        partner = tl.load(p_key + start + other, mask=inside, other=0.0).to(tl.float32)
        tl.store(p_keys + to, (x * cos + partner * sin).to(p_keys.dtype.element_ty), mask=inside)
        value = tl.load(p_value + start + at, mask=inside, other=0.0)
        tl.store(p_values + to, value.to(p_values.dtype.element_ty), mask=inside)
    if head == 0:
        tl.store(p_new_length + i_row, length + N)
        for i_tile in range(tl.cdiv(PREFIX + places, TILE)):
            place = columns(i_tile, TILE)
            exists = (place - PREFIX < length + N).to(tl.int8)
            tl.store(p_exists + i_row * (PREFIX + places) + place, exists, mask=place < PREFIX + places)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    prefix: int,
    restarts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The turned queries as `query`, the new lengths, and which keys there are, in int8."""
    batch, groups, rows, width = keys.shape
    heads, each = query.shape[2] // width, key.shape[1]
    query, key, value, cos, sin, length = contiguous(query, key, value, cos, sin, length)
    turned, now, exists = _like_output(query, key, value, cos, sin, keys, values, length)
    launch(
        _write_kernel,
        (batch, heads + each * groups),
        num_warps=1,
        p_query=query,
        p_key=key,
        p_value=value,
        p_cos=cos,
        p_sin=sin,
        p_keys=keys,
        p_values=values,
        p_length=length,
        p_turned=turned,
        p_new_length=now,
        p_exists=exists,
        H=heads,
        G=groups,
        N=each,
        D=width,
        PREFIX=prefix,
        RESTARTS=restarts,
        ANGLES=width if cos.shape[0] > 1 else 0,
        BD=triton.next_power_of_2(width),
        TILE=MASK_TILE,
        places=rows - prefix,
    )
    return turned, now, exists


# What torch.compile sees.


def _like_output(query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    keys, length = others[3], others[5]
    return fresh(query), fresh(length), length.new_empty(keys.shape[0], keys.shape[2], dtype=torch.int8)


_written: Any = torch.library.custom_op(
    "memzoo::kv_write",
    forward,
    mutates_args=("keys", "values"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor length, int prefix, bool restarts) -> (Tensor, Tensor, Tensor)",
)
_written.register_fake(_like_output)
