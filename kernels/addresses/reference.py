"""Token by token and head by head."""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.addresses import Addresses
from memzoo.kernels.unit_length import SHORTEST


def addresses(query: Tensor, key: Tensor, erase: Tensor, correction: Tensor, unit_eps: float | None) -> Addresses:
    """See `memzoo.kernels.addresses.addresses`."""

    def unit(x: Tensor) -> Tensor:
        square = (x * x).sum()
        return x / (square + unit_eps).sqrt() if unit_eps else x / square.sqrt().clamp(min=SHORTEST)

    found = []
    for q, k, e, d in zip(*(x.flatten(0, 2) for x in (query, key, erase, correction)), strict=True):
        p = k / (1 + torch.exp(-e))
        found.append((q - d * k, k, p) if unit_eps is None else (unit(q - d * p), unit(k), unit(p)))
    read, write, erased = (torch.stack(x).unflatten(0, query.shape[:3]) for x in zip(*found, strict=True))
    return read, write, None if unit_eps == 0 else erased
