"""The Newton-Schulz iteration on the Gram matrix of the narrower side.

Every factor `P_n = a I + b G_n + c G_n^2` is a polynomial of `G_0`, so they commute with one another and with `G_n`:

    G_{n+1} = P_n G_n P_n,    X_n = Q_n X_0,    Q_n = P_{n-1} ... P_0

The wide matrix is multiplied twice, whatever the number of steps. The backward keeps nothing but the input. With `W`
the gradient of `G_{n+1}` and `V` that of `Q_{n+1}`, those of `P_n`, `Q_n` and `G_n` are, up to what is skew in them,

    dP = V Q_n^T + 2 A G_n,    P_n V,    P_n A + b dP + c (dP G_n + G_n dP),    A = W P_n
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.newton_schulz import QUINTIC, TINY
from memzoo.kernels.registry import as_given


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """See `memzoo.kernels.newton_schulz.newton_schulz`."""
    if steps == 0:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _Iteration.apply(x, steps)
    unit, _ = _unit(_wide(x))
    return _wide_as(_factors(unit, steps)[2][-1] @ unit, x)


def value_and_pullback(x: Tensor, steps: int, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """`y = newton_schulz(x)`, and the gradient of `x` from that of `y`."""
    if steps == 0:
        return x, d_y
    _, b, c = QUINTIC
    (unit, shrink), d_wide = _unit(_wide(x)), _wide(d_y)
    grams, factors, products = _factors(unit, steps)
    d_unit, d_product = products[-1].mT @ d_wide, d_wide @ unit.mT
    d_gram = torch.zeros_like(grams[0])
    for step in reversed(range(steps)):
        gram, factor = grams[step], factors[step]
        d_factor = d_product
        if step > 0:
            d_factor, d_product = d_product @ products[step - 1].mT, factor @ d_product
        if step < steps - 1:
            turned = d_gram @ factor
            d_factor = torch.baddbmm(d_factor, turned, gram, alpha=2)
            d_gram = factor @ turned
        d_factor = _symmetric(d_factor)
        d_gram = _symmetric(torch.baddbmm(d_gram, d_factor, gram, alpha=2 * c).add_(d_factor, alpha=b))
    d_unit = torch.baddbmm(d_unit, d_gram, unit, alpha=2)
    along = (unit * d_unit).sum((-2, -1), keepdim=True)
    return _wide_as(products[-1] @ unit, x), _wide_as((d_unit - unit * along) * shrink, x)


def _factors(unit: Tensor, steps: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """`G_n`, `P_n` and `Q_{n+1}` for every step n."""
    a, b, c = QUINTIC
    gram = unit @ unit.mT
    grams: list[Tensor] = [gram]
    factors: list[Tensor] = []
    products: list[Tensor] = []
    for step in range(steps):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        factors.append(factor)
        products.append(factor if step == 0 else factor @ products[-1])
        if step < steps - 1:
            # Rounding leaves a product of commuting matrices a little skew, and each step would add to it.
            gram = _symmetric(factor @ (factor @ gram))
            grams.append(gram)
    return grams, factors, products


def _symmetric(x: Tensor) -> Tensor:
    return 0.5 * (x + x.mT)


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x / |x|` and `1 / |x|`; both 0 where `x` is."""
    squares = x.square().sum((-2, -1), keepdim=True)
    shrink = torch.where(squares < TINY**2, 0, squares.clamp(min=TINY**2).rsqrt())
    return x * shrink, shrink


def _wide(x: Tensor) -> Tensor:
    """The matrices `[..., M, N]` in a row, `[B, m, n]`, on their sides where they are tall."""
    x = x.reshape(-1, *x.shape[-2:])
    return x.mT if x.shape[-2] > x.shape[-1] else x


def _wide_as(y: Tensor, x: Tensor) -> Tensor:
    """What was computed on its side, as `x` stands."""
    return (y.mT if x.shape[-2] > x.shape[-1] else y).reshape(x.shape)


class _Iteration(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        ctx.steps = steps
        ctx.save_for_backward(x)
        return newton_schulz(x, steps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with as_given(d_y.device):  # the quintic expands what bfloat16 rounds away
            return value_and_pullback(x, ctx.steps, d_y)[1], None
