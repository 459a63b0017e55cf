"""The token of all rows at once, by torch's scatter."""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.registry import cast


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[..., D]` turned by angles of which the first half of the sines are negative: coordinates j and j + D / 2 are a
    plane's."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def turned_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A token's queries and keys `[B, 1, H D]`, turned together, `[B, H, 1, D]` each."""
    both = rotated(torch.cat([query, key], dim=-1).view(len(query), -1, cos.shape[-1]), cos, sin)[:, :, None]
    heads = query.shape[-1] // cos.shape[-1]
    return both[:, :heads], both[:, heads:]


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
) -> tuple[Tensor, Tensor, Tensor]:
    """See `memzoo.kernels.kv_write.kv_write`."""
    batch, groups, rows, width = keys.shape
    query, key = turned_heads(query, key, *rotary)
    put(keys, values, key, value.view(batch, groups, 1, width), length, prefix)
    length = length + 1
    return query, length, torch.arange(-prefix, rows - prefix, device=length.device) < length[:, None]
