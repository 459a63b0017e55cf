"""Every bound that a test compares with, and where it comes from.

An error is measured relative to the largest expected value (see `close`). One sum of n products in a dtype of unit
round-off u errs by about sqrt(n) u; a memory feeds its errors back, so each bound allows a growth over one such sum.
A bound that must grow means a cause to find, not a number to change.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Reference and chunked form of one op: sums of < 1e3 products, feedback over < 50 tokens.
# In bfloat16 a number is off by up to 2^-8, and what a kernel keeps in it between two products (scaled keys, states,
# deltas, their gradients) is a factor of the next one: in the longest chain, from d_y to d_key, about sixteen of them.
OP = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 16 * 2**-8}
# Newton-Schulz multiplies what is near zero by 3.4445 a step, and in a Gram matrix, with its rounding errors, by the
# square of that: four times in five steps.
NEWTON_SCHULZ = {dtype: 3.4445**8 * torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32)}
# Two ways of computing the same logits, a few layers deep: what the issue promises in float64.
MODEL = {torch.float64: 1e-9, torch.float32: 1e-3}
# Two programs for one model in float64, of which transformers' rotary embedding takes its angles in float32.
WITNESS = 1e-5
# A bfloat16 model beside its float32 twin (`follows`), in units of what rounding the weights alone does: an activation
# is rounded as a weight is, some fifteen times for each weight on its way; in quadrature sqrt(1 + 15).
BF16 = 4
# Gradients summed in another order, in float32 (accumulation, processes).
GRADIENT = 1e-4
# What training on one small batch leaves of the first loss: random ids, so nothing but memorising lowers it.
OVERFIT = 0.1
# Finite differences of step 1e-6 in float64.
GRADCHECK = {"eps": 1e-6, "atol": 1e-6, "rtol": 1e-4}


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value."""
    actual, expected = actual.detach(), expected.detach()
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((actual.to(expected.dtype) - expected).abs().max() / scale)


def close(actual: Tensor, expected: Tensor, bound: float) -> None:
    """Assert that `actual` is finite and within `bound` of `expected`."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), "not finite"
    got = error(actual, expected)
    assert got <= bound, f"relative error {got:.2e} > {bound:.0e}"


def follows(actual: Tensor, expected: Tensor, rounded: Tensor) -> None:
    """Assert that a low-precision result stays with `expected`.

    Args:
        rounded: what full precision gives with weights rounded to the low one: how much rounding moves the model.
    """

    def distance(x: Tensor) -> float:
        return float((x.float() - expected).norm() / expected.norm())

    assert torch.isfinite(actual).all(), "not finite"
    assert distance(actual) <= BF16 * distance(rounded), f"{distance(actual):.2e} > {BF16} * {distance(rounded):.2e}"
