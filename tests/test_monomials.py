"""The monomials: in every backend those that the reference names one after another; their refusals. What they are for,
the inner products, is in test_features.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import GRADCHECK, OP, close
from torch import Tensor

from memzoo.kernels.monomials import OP as MONOMIALS
from memzoo.kernels.monomials import make_inputs, monomials

BACKENDS = [name for name in MONOMIALS.names() if name != "triton"]  # which has no float64: tests/triton_parity.py


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("batch", [(), (2,), (2, 5), (2, 1, 2)], ids=str)
def test_backends_agree(batch: tuple[int, ...], rank: int | None, degree: int) -> None:
    args = make_inputs(*batch, rank=rank, degree=degree)
    close(monomials(**args), monomials(**args, backend="reference"), OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_two_coordinates(backend: str) -> None:
    """(3, 4) / 5 and b = (1, 2): degree 2 has x^2, sqrt(2) x y, y^2."""
    x = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    want = torch.tensor([[0.6, 0.8, 2 * 0.36, 2 * 2**0.5 * 0.48, 2 * 0.64]], dtype=torch.float64) / 5**0.5
    b = torch.ones(1), torch.full((1,), 2.0)
    close(monomials(x, b, backend=backend), want, OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str) -> None:
    x, coefficients, projection = make_inputs(2).values()
    leaves = [each.requires_grad_() for each in (x, *coefficients, projection)]

    def of(x: Tensor, first: Tensor, second: Tensor, projection: Tensor) -> Tensor:
        return monomials(x, [first, second], projection, backend=backend)

    assert torch.autograd.gradcheck(of, tuple(leaves), **GRADCHECK)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(6)}, r"x: expected \[..., H, K\], got \(6,\)"),
        ({"coefficients": []}, r"coefficients: expected one or more of \(3,\) = \[H\], got \[\]"),
        ({"coefficients": [torch.ones(3), torch.ones(2)]}, r"coefficients: .* got \[\(3,\), \(2,\)\]"),
        ({"projection": torch.ones(3, 5, 4)}, r"projection: expected \(3, 6, R\), got \(3, 5, 4\)"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        monomials(**{**make_inputs(2), **changes})
