"""All tokens at once."""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.deep_memory import block_of_unit
from memzoo.kernels.registry import cast, may_be


def opened(x: Tensor, position: Tensor, blocks: int, interval: int, axis: int) -> Tensor:
    """See `memzoo.kernels.opened.opened`."""
    full = (blocks - 1) * interval
    if not may_be(position, lambda n: n < full):
        return x
    shape = [1] * x.ndim
    shape[0], shape[1], shape[axis] = x.shape[0], x.shape[1], x.shape[axis]
    return x * cast(is_open(position, x.shape[1], x.shape[axis], blocks, interval), x.dtype).view(shape)


def is_open(position: Tensor, tokens: int, units: int, blocks: int, interval: int) -> Tensor:
    """Which units each token sees, `[B, T, U]`, bool."""
    before = position[:, None] + torch.arange(tokens, device=position.device)
    return block_of_unit(units, blocks, position.device) * interval <= before[..., None]
