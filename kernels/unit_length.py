"""Vectors of unit length, in what keys and queries are compared."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.blocked import blocked
from memzoo.kernels.registry import cast

SHORTEST = 1e-6
"""A vector below it stays as much below unit length."""


def unit_length(x: Tensor, eps: float = 0.0) -> Tensor:
    """`x / max(|x|, 1e-6)`, or `x / sqrt(|x|^2 + eps)`, over the last dimension, in float32 or wider (float16 has no
    1e-6)."""
    return blocked(partial(_unit_length, eps=eps), x)


def _unit_length(x: Tensor, eps: float) -> Tensor:
    x = widened(x)
    if eps:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return _Unit.apply(x) if torch.is_grad_enabled() and x.requires_grad else x / length(x)


def length(x: Tensor, eps: float = 0.0) -> Tensor:
    """What `unit_length` divides by, `[..., 1]`."""
    if eps:
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(eps).sqrt_()
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=SHORTEST)


class _Unit(torch.autograd.Function):
    """`y = x / max(|x|, 1e-6)`; `dx = (dy - y (y . dy)) / |x|`, a third of the passes of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm = length(x)
        y = x / norm
        ctx.save_for_backward(y, norm)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        y, norm = ctx.saved_tensors
        return unit_gradient(d_y, y, norm)


def unit_gradient(d_y: Tensor, y: Tensor, norm: Tensor, eps: float = 0.0) -> Tensor:
    """`dx` of `y = x / norm`: `(dy - y (y . dy)) / norm`, where the norm is not the bound."""
    product = (y * d_y).contiguous()  # torch.compile takes no other one to write into
    along = product.sum(-1, keepdim=True)
    torch.mul(y, along if eps else torch.where(norm > SHORTEST, along, 0), out=product)
    return torch.sub(d_y, product, out=product).mul_(1 / norm)


def widened(x: Tensor) -> Tensor:
    """`x` in float32 or wider."""
    return x if x.dtype == torch.float32 else cast(x, torch.promote_types(x.dtype, torch.float32))
