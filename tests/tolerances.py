"""Every bound that a test compares with, and where it comes from.

An error is measured relative to the largest expected value (see `close`). One sum of n products in a dtype of unit
round-off u errs by about sqrt(n) u; a memory feeds its errors back, so each bound allows a growth over one such sum.
A bound that must grow means a cause to find, not a number to change.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Reference and chunked form of one op: sums of < 1e3 products, feedback over < 50 tokens.
OP = {torch.float64: 1e-12, torch.float32: 2e-5}
# Two ways of computing the same logits, a few layers deep: what the issue promises in float64.
MODEL = {torch.float64: 1e-9, torch.float32: 1e-3}
# A bfloat16 model beside its float32 twin, in the root mean square (`follows`): unit round-off 2^-8 in each weight and
# in each of some tens of activations, adding up in quadrature, times a small gain of lively weights.
BF16 = 16 * 2**-8
# Gradients summed in another order, in float32 (accumulation, processes).
GRADIENT = 1e-4
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


def follows(actual: Tensor, expected: Tensor, bound: float) -> None:
    """Assert that `actual` is finite and its root-mean-square error is within `bound` of the expected value's."""
    assert torch.isfinite(actual).all(), "not finite"
    got = float((actual.float() - expected.float()).norm() / expected.float().norm())
    assert got <= bound, f"relative root-mean-square error {got:.2e} > {bound:.0e}"
