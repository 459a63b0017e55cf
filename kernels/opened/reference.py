"""Row by row, token by token and block by block."""

from __future__ import annotations

import torch
from torch import Tensor


def opened(x: Tensor, position: Tensor, blocks: int, interval: int, axis: int) -> Tensor:
    """See `memzoo.kernels.opened.opened`."""
    width, rows = x.shape[axis] // blocks, []
    for row, count in enumerate(position.tolist()):
        tokens = []
        for t in range(x.shape[1]):
            parts = list(x[row, t].split([width] * (blocks - 1) + [x.shape[axis] - width * (blocks - 1)], axis - 2))
            seen = min(blocks, 1 + (count + t) // interval)
            tokens.append(torch.cat([*parts[:seen], *(torch.zeros_like(part) for part in parts[seen:])], axis - 2))
        rows.append(torch.stack(tokens))
    return torch.stack(rows)
