"""The Newton-Schulz iteration on the Gram matrix of the narrower side.

Every factor `P_n = a I + b G_n + c G_n^2` is a polynomial of `G_0`, so they commute with one another and with `G_n`:

    G_{n+1} = P_n^2 G_n,    X_n = (P_{n-1} ... P_0) X_0

The wide matrix is multiplied twice, whatever the number of steps. Nothing but the input is kept for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.newton_schulz import QUINTIC, TINY


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """See `memzoo.kernels.newton_schulz.newton_schulz`."""
    if steps == 0:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _Iteration.apply(x, steps)
    return _iterate(x, steps)


def _iterate(x: Tensor, steps: int) -> Tensor:
    a, b, c = QUINTIC
    is_tall = x.shape[-2] > x.shape[-1]
    squares = x.square().sum((-2, -1), keepdim=True)
    is_zero = squares < TINY**2
    unit = torch.where(is_zero, 0, x * torch.where(is_zero, 1, squares).rsqrt())
    gram = unit.mT @ unit if is_tall else unit @ unit.mT
    identity = torch.eye(gram.shape[-1], dtype=x.dtype, device=x.device)
    product = None
    for step in range(steps):
        factor = a * identity + b * gram + c * (gram @ gram)
        product = factor if product is None else factor @ product
        if step < steps - 1:
            gram = factor @ (factor @ gram)
            # Rounding leaves the product of commuting symmetric matrices a little skew, and each step would add to it.
            gram = 0.5 * (gram + gram.mT)
    assert product is not None
    return unit @ product if is_tall else product @ unit


class _Iteration(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        ctx.steps = steps
        ctx.save_for_backward(x)
        return _iterate(x, steps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return value_and_pullback(x, ctx.steps, d_y)[1], None


def value_and_pullback(x: Tensor, steps: int, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """`y = newton_schulz(x)`, and the gradient of `x` from that of `y`."""
    if steps == 0:
        return x, d_y
    x = x.detach().requires_grad_()
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        y = _iterate(x, steps)
        (d_x,) = torch.autograd.grad(y, x, d_y)
    return y.detach(), d_x
