"""The root-mean-square norm."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.blocked import block_size, in_piece
from memzoo.kernels.registry import constant

_constants: dict[tuple[int, float, torch.dtype], tuple[Tensor, Tensor, float, float]] = {}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    It is torch's; that of single tokens on a CPU, without gradients, takes fewer calls, since torch's costs as much as
    their product with a small matrix there, and differs from it by rounding:

        y = sqrt(D) (x weight) / hypot(|x|, sqrt(D eps))

    of a single vector with a length that is Python's number.

    That of a long sequence on a CPU, with gradients, is torch's to the bit, in blocks of tokens, with the backward
    written out.

    Args:
        x: `[B, T, ..., D]`, of any floating dtype.
        weight: `[D]`.
        eps: added to the mean square.

    Returns:
        As `x` in shape, and in dtype where both have the same. It has first derivatives only where there is more than
        one block.
    """
    dtype = x.dtype
    plain = dtype == weight.dtype and dtype in (torch.float32, torch.float64) and type(x) is Tensor and x.is_cpu
    differentiable = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    compiling = torch.compiler.is_compiling()
    if x.ndim < 3 or x.shape[1] > 1 or differentiable or not plain or compiling:
        if plain and x.ndim > 2 and differentiable and not compiling:
            size = block_size((x,), 0)
            if size < x.shape[1] or in_piece.get():
                return _RMSNorm.apply(x, weight, eps, size)
        return F.rms_norm(x, weight.shape, weight, eps)
    kind = x.shape[-1], eps, dtype
    known = _constants.get(kind)
    if known is None:
        shortest = math.sqrt(kind[0] * eps)
        least, zero = (constant((number,), x, dtype) for number in (shortest, 0.0))
        known = least, zero, math.sqrt(kind[0]), shortest
        if type(zero) is Tensor:  # not a tracer's
            _constants[kind] = known
    least, zero, root, shortest = known
    # A single vector's length is a number, which forward-mode derivatives and `vmap` do not see through.
    if x.numel() == kind[0] and eps > 0 and not torch.is_grad_enabled():
        return torch.addcmul(zero, x, weight, value=root / math.hypot(torch.linalg.vector_norm(x).item(), shortest))
    length = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), least)
    return torch.addcdiv(zero, x * weight, length, value=root)


class _RMSNorm(torch.autograd.Function):
    """With `n = x / r`, `r = sqrt(mean(x^2) + eps)`: `dw = sum(dy n)`, `dx = dy w / r - x mean(dy n w) / r^2`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
        y = torch.empty_like(x)
        inverse = x.new_empty(*x.shape[:-1], 1)
        for to, to_inverse, part in zip(*(a.split(size, dim=1) for a in (y, inverse, x)), strict=True):
            torch.rsqrt(part.square().mean(-1, keepdim=True).add_(eps), out=to_inverse)
            torch.mul(part, to_inverse, out=to).mul_(weight)
        ctx.save_for_backward(x, weight, inverse)
        ctx.size = size
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), torch.zeros_like(weight)
        for to, d, part, r in zip(*(a.split(ctx.size, dim=1) for a in (d_x, d_y, x, inverse)), strict=True):
            torch.mul(d, r, out=to)
            found = to * part
            d_weight += found.flatten(0, -2).sum(0)
            mean = (found @ weight).div_(len(weight))[..., None]
            to.mul_(weight).addcmul_(part, mean.mul_(r).mul_(r), value=-1)
        return d_x, d_weight, None, None
