"""The token of all rows at once, by torch's scatter."""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.registry import cast


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[..., D]` turned by angles of which the first half of the sines are negative: coordinates j and j + D / 2 are a
    plane's."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


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
    places = rows - prefix
    both = rotated(torch.cat([query, key], dim=-1).view(batch, -1, width), *rotary)[:, :, None]
    index = (length % places).view(-1, 1, 1, 1).expand(-1, groups, -1, width)
    for to, new in ((keys, both[:, -groups:]), (values, value.view(batch, groups, 1, width))):
        to.narrow(2, prefix, places).scatter_(2, index, cast(new, to.dtype))
    length = length + 1
    exists = torch.arange(-prefix, places, device=length.device) < length[:, None]
    return both[:, :-groups], length, exists
