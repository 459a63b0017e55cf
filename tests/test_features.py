"""Feature maps: the inner products they stand for, their coefficients, their size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tolerances import GRADCHECK, OP, close
from torch import Tensor

from memzoo.kernels.unit_length import unit_length
from memzoo.modeling.mixers.features import FeatureMap, Monomials, Powers

HEADS, WIDTH = 3, 5


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(*shape, HEADS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    return unit_length(draw[0]), unit_length(draw[1])


def started(features: FeatureMap) -> FeatureMap:
    with torch.no_grad():
        getattr(features, "init_weights", lambda: None)()
    return features.double()


def lively(features: Monomials | Powers) -> FeatureMap:
    with torch.no_grad():
        for b, value in zip(features.coefficients, torch.linspace(0.3, 1.7, features.degree), strict=True):
            b.copy_(value * torch.linspace(1, 2, HEADS))
    return features


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("projected", [None, 3])
def test_monomials_are_a_polynomial_of_the_inner_product(degree: int, projected: int | None) -> None:
    """phi(x) . phi(y) = sum_i a_i (x . y)^i / sum_i a_i (ATLAS Eq 5), a_i = b_i^2, over C(r + p, p) monomials."""
    features = lively(started(Monomials(HEADS, WIDTH, degree, projected)))
    x, y = pair(2, 7)
    z, w = x, y
    if features.projection is not None:
        z, w = (unit_length(torch.einsum("bthk,hkr->bthr", one, features.projection)) for one in pair(2, 7))
    a = torch.stack(features.coefficients, dim=1).square()
    want = a[:, 0] * (x * y).sum(-1) + sum(a[:, i] * (z * w).sum(-1) ** (i + 1) for i in range(1, degree))
    got = features(x)
    close((got * features(y)).sum(-1) * a.sum(-1), want, OP[torch.float64])
    rank = projected or WIDTH
    assert got.shape[-1] == features.width == WIDTH - rank + math.comb(rank + degree, degree) - 1
    close(got.norm(dim=-1), torch.ones_like(got[..., 0]), OP[torch.float64])


@pytest.mark.parametrize("make", [lambda p: Monomials(HEADS, WIDTH, p, None), lambda p: Powers(HEADS, WIDTH, p)])
def test_coefficients_start_as_those_of_the_exponential(make: Any) -> None:
    features = started(make(4))
    start = torch.tensor([1, 1 / 2, 1 / 6, 1 / 24], dtype=torch.float64).expand(HEADS, 4)
    close(torch.stack(features.coefficients, dim=1).square(), start, OP[torch.float32])  # drawn in float32
    x, y = pair(2, 7)
    if isinstance(features, Monomials):  # and so is the product, but for its constant and what follows the fourth term
        s = (x * y).sum(-1)
        assert ((features(x) * features(y)).sum(-1) * start[0].sum() - (s.exp() - 1)).abs().max() < math.e / 120


@pytest.mark.parametrize("projected", [None, 3])
@pytest.mark.parametrize("degree", [2, 3])
def test_the_first_degree_alone_is_the_identity(degree: int, projected: int | None) -> None:
    x, _ = pair(2, 7)
    for features in (Monomials(HEADS, WIDTH, degree, projected), Powers(HEADS, WIDTH, degree)):
        started(features)
        with torch.no_grad():
            for i, b in enumerate(features.coefficients):
                b.fill_(float(i == 0))
        got = features(x)
        assert torch.equal(got[..., :WIDTH], x)
        assert not got[..., WIDTH:].any()
    assert torch.equal(FeatureMap(HEADS, WIDTH)(x), x)
    assert FeatureMap(HEADS, WIDTH).width == WIDTH


def test_powers_are_elementwise() -> None:
    features = lively(started(Powers(HEADS, WIDTH, 3)))
    x, _ = pair(2, 7)
    b = torch.stack(features.coefficients, dim=1)
    b = b / b.norm(dim=-1, keepdim=True)
    want = torch.stack([b[:, i, None] * x ** (i + 1) for i in range(3)], dim=-2).flatten(-2)
    close(features(x), want, OP[torch.float64])
    assert features(x).shape[-1] == features.width == 3 * WIDTH
    assert bool((features(x).norm(dim=-1) <= 1).all())


@pytest.mark.parametrize("projected", [None, 3])
def test_gradcheck(projected: int | None) -> None:
    features = lively(started(Monomials(HEADS, WIDTH, 3, projected)))
    parameters = list(features.parameters())
    x = pair(1, 2)[0].requires_grad_()

    def call(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip([name for name, _ in features.named_parameters()], values, strict=True))
        return torch.func.functional_call(features, named, (x,))

    assert torch.autograd.gradcheck(call, (x, *parameters), **GRADCHECK)
