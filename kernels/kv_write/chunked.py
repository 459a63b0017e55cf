"""The token of all rows at once, by torch's scatter."""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.registry import cast
from memzoo.kernels.rotary.chunked import rotated


def turned_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A token's queries `[B, 1, H D]` and keys `[B, N, G D]`, turned together, `[B, H, 1, D]` and `[B, G, N, D]`."""
    width, (rows, each, _) = cos.shape[-1], key.shape
    both = torch.cat([query, key] if each == 1 else [query, key.view(rows, 1, -1)], dim=-1)
    both = rotated(both.view(rows, -1, width), cos, sin)[:, :, None]
    heads = query.shape[-1] // width
    query, key = both[:, :heads], both[:, heads:]
    return query, key if each == 1 else key.view(rows, each, -1, width).transpose(1, 2)


def put(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, length: Tensor, prefix: int) -> None:
    """New `[B, G, L, D]` into their places `[B, G, P + S, D]`, of rows that had `length` `[B]` keys before."""
    places, tokens = keys.shape[2] - prefix, key.shape[2]
    place = length[:, None] if tokens == 1 else length[:, None] + torch.arange(tokens, device=key.device)
    index = (place % places)[:, None, :, None].expand(key.shape)
    for to, new in ((keys, key), (values, value)):
        to.narrow(2, prefix, places).scatter_(2, index, cast(new, to.dtype))


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
    batch, groups, rows, width = keys.shape
    query, key = turned_heads(query, key, *rotary)
    if restarts:
        length = length % (rows - prefix)
    put(keys, values, key, value.view(batch, -1, groups, width).transpose(1, 2), length, prefix)
    length = length + key.shape[2]
    return query, length, torch.arange(-prefix, rows - prefix, device=length.device) < length[:, None]
