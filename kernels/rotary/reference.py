"""As products of complex numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `memzoo.kernels.rotary.rotary`."""
    half = x.shape[-1] // 2
    inner = (1,) * (x.ndim - 3)
    real, imaginary = (a[..., half:].view(*a.shape[:2], *inner, half) for a in (cos, sin))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(*torch.broadcast_tensors(real, imaginary))
    return torch.cat([turned.real, turned.imag], dim=-1)
