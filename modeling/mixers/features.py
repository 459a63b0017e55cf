"""Feature maps of queries and keys: what a memory is given in place of a vector of unit length.

A memory of d inputs stores about d pairs; one of D features of them stores about D (ATLAS, arXiv 2505.23735, section
3.1). The first coordinates of every map are the vector itself times its coefficient, which a residual memory adds.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from memzoo.kernels.unit_length import unit_length


class FeatureMap(nn.Module):
    """`phi(x)` of unit vectors `x`, the identity.

    Args:
        heads: heads H.
        inputs: width K of x.

    Attributes:
        width: D, the features.
    """

    def __init__(self, heads: int, inputs: int) -> None:
        super().__init__()
        self.inputs = self.width = inputs

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H, K]` to `[..., H, D]`."""
        return x


class Polynomial(FeatureMap):
    """What the maps up to a degree p share: a coefficient `a_i = b_i^2` per head and degree, `b_i` starting at
    `1/sqrt(i!)` (ATLAS Eq 5), and a division by `sqrt(sum_i a_i)`, so that features of a unit vector are no longer than
    1 and the memory's step size keeps its meaning (ours)."""

    def __init__(self, heads: int, inputs: int, degree: int) -> None:
        super().__init__(heads, inputs)
        self.degree = degree
        for i in range(1, 1 + degree):
            self.register_parameter(f"coefficient_{i}", nn.Parameter(torch.empty(heads)))

    @property
    def coefficients(self) -> list[Tensor]:
        """`b_1` to `b_p`, `[H]` each."""
        return [getattr(self, f"coefficient_{i}") for i in range(1, 1 + self.degree)]

    def init_weights(self) -> None:
        for degree, b in enumerate(self.coefficients, start=1):
            init.constant_(b, math.factorial(degree) ** -0.5)

    def scales(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """`b_i / sqrt(sum a)`, `[H, 1]` for each degree."""
        b = torch.stack(self.coefficients).to(dtype)
        return (b / b.square().sum(0).sqrt())[..., None].unbind(0)


class Powers(Polynomial):
    """`phi(x) = (b_1 x, b_2 x^2, ..., b_p x^p)`, elementwise: cheap, and not the map of ATLAS, whose products of
    different coordinates it leaves out."""

    def __init__(self, heads: int, inputs: int, degree: int) -> None:
        super().__init__(heads, inputs, degree)
        self.width = inputs * degree

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([b * x**i for i, b in enumerate(self.scales(x.dtype), start=1)], dim=-1)


class Monomials(Polynomial):
    """All monomials of degree 1 to p (ATLAS Eq 5 and 22), so that, up to the division,

        phi(x) . phi(y) = sum_i a_i (x . y)^i

    Each monomial stands once, with the root of its multiplicity, for the entries of `x^(x)i` that equal it. With a
    projection, degrees 2 and more are those of `P x / |P x|` with a learned `P` per head.

    Deviations: no constant, which in a deep memory would be one more bias (`feature_dim` and this are ours).
    """

    def __init__(self, heads: int, inputs: int, degree: int, projected: int | None) -> None:
        super().__init__(heads, inputs, degree)
        rank = inputs if projected is None else projected
        self.width = inputs + sum(math.comb(rank + i - 1, i) for i in range(2, 1 + degree))
        unused = projected is None or degree == 1
        self.projection = None if unused else nn.Parameter(torch.empty(heads, inputs, projected))  # type: ignore[arg-type]

    def init_weights(self) -> None:
        super().init_weights()
        if self.projection is not None:
            init.normal_(self.projection, 0.0, self.inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.scales(x.dtype)
        if self.projection is None:
            z = x
        else:
            z = unit_length((x[..., None, :] @ self.projection.to(x.dtype))[..., 0, :])
        parts = [first * x]
        for degree, b in enumerate(rest, start=2):
            places, roots = _monomials(z.shape[-1], degree, z.device)
            factors = [z[..., place] for place in places]
            parts.append(b * roots.to(z) * math.prod(factors[1:], start=factors[0]))
        return torch.cat(parts, dim=-1)


@cache
def _monomials(width: int, degree: int, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """The factors' coordinates of every monomial, a tensor per factor, and the roots of their multiplicities."""
    every = list(itertools.combinations_with_replacement(range(width), degree))
    counts = [math.factorial(degree) // math.prod(math.factorial(one.count(i)) for i in set(one)) for one in every]
    with torch.inference_mode(False):  # whatever the mode of the first caller
        places = torch.tensor(every, device=device).unbind(1)
        return places, torch.tensor(counts, dtype=torch.float64, device=device).sqrt()


def feature_map(config: PreTrainedConfig) -> FeatureMap:
    """The map that a config asks for."""
    heads, inputs, degree = config.num_attention_heads, config.head_dim, config.feature_degree
    if config.feature_map == "monomials":
        return Monomials(heads, inputs, degree, config.feature_dim)
    if config.feature_map == "powers":
        return Powers(heads, inputs, degree)
    return FeatureMap(heads, inputs)
