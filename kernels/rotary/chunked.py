"""All vectors at once."""

from __future__ import annotations

from torch import Tensor

from memzoo.kernels.registry import cast


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `memzoo.kernels.rotary.rotary`."""
    inner = (1,) * (x.ndim - 3)
    return cast(rotated(x, *(a.view(*a.shape[:2], *inner, a.shape[2]) for a in (cos, sin))), x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same with angles `[..., D]` that broadcast."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))
