"""Row by row and plane by plane."""

from __future__ import annotations

import torch
from torch import Tensor


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
    width, places = keys.shape[3], keys.shape[2] - prefix
    cos, sin = (x.expand(len(key), -1, -1)[:, 0, width // 2 :] for x in rotary)

    def turned(x: Tensor, row: int) -> Tensor:
        real, imaginary = x.view(-1, width).split(width // 2, dim=1)
        return torch.cat([real * cos[row] - imaginary * sin[row], imaginary * cos[row] + real * sin[row]], dim=1)

    exists = torch.zeros(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)
    exists[:, :prefix] = True
    queries, counts = [], []
    for row, count in enumerate(length.tolist()):
        count = 0 if restarts and count == places else count
        queries.append(turned(query[row, 0], row))
        for own_key, own_value in zip(key[row], value[row], strict=True):
            keys[row, :, prefix + count % places] = turned(own_key, row).to(keys.dtype)
            values[row, :, prefix + count % places] = own_value.view(-1, width).to(values.dtype)
            count += 1
        exists[row, prefix : prefix + min(count, places)] = True
        counts.append(count)
    return torch.stack(queries)[:, :, None], length.new_tensor(counts), exists
