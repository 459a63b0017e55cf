"""The Newton-Schulz iteration as it is printed."""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.newton_schulz import QUINTIC, TINY


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """See `memzoo.kernels.newton_schulz.newton_schulz`."""
    if steps == 0:
        return x
    a, b, c = QUINTIC
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    squares = x.square().sum((-2, -1), keepdim=True)
    is_zero = squares < TINY**2
    x = torch.where(is_zero, 0, x * torch.where(is_zero, 1, squares).rsqrt())
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
