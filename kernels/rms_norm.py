"""The root-mean-square norm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.registry import constant

_constants: dict[tuple[int, float, torch.dtype], tuple[Tensor, Tensor, float]] = {}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    It is torch's; that of single tokens on a CPU, without gradients, takes fewer calls, since torch's costs as much as
    their product with a small matrix there, and differs from it by rounding:

        y = sqrt(D) (x weight) / hypot(|x|, sqrt(D eps))

    Args:
        x: `[B, T, ..., D]`, of any floating dtype.
        weight: `[D]`.
        eps: added to the mean square.

    Returns:
        As `x` in shape, and in dtype where both have the same.
    """
    dtype = x.dtype
    plain = dtype == weight.dtype and dtype in (torch.float32, torch.float64) and type(x) is Tensor and x.is_cpu
    differentiable = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if x.ndim < 3 or x.shape[1] > 1 or differentiable or not plain or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    kind = x.shape[-1], eps, dtype
    if kind not in _constants:
        least, zero = (constant((number,), x, dtype) for number in (math.sqrt(kind[0] * eps), 0.0))
        _constants[kind] = least, zero, math.sqrt(kind[0])
    least, zero, root = _constants[kind]
    length = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), least)
    return torch.addcdiv(zero, x * weight, length, value=root)
