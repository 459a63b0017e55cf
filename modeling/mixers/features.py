"""Feature maps of queries and keys: what a memory is given in place of a vector of unit length.

A memory of d inputs stores about d pairs; one of D features of them stores about D (ATLAS, arXiv 2505.23735, section
3.1). The first coordinates of every map are the vector itself times its coefficient, which a residual memory adds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from memzoo.kernels.monomials import monomials


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


class Powers(Polynomial):
    """`phi(x) = (b_1 x, b_2 x^2, ..., b_p x^p)`, elementwise: cheap, and not the map of ATLAS, whose products of
    different coordinates it leaves out."""

    def __init__(self, heads: int, inputs: int, degree: int) -> None:
        super().__init__(heads, inputs, degree)
        self.width = inputs * degree

    def forward(self, x: Tensor) -> Tensor:
        b = torch.stack(self.coefficients).to(x.dtype)
        scales = (b / torch.linalg.vector_norm(b, dim=0))[..., None]
        return torch.cat([scale * x**i for i, scale in enumerate(scales, start=1)], dim=-1)


class Monomials(Polynomial):
    """All monomials of degree 1 to p; see `memzoo.kernels.monomials`. With a projection, those of degree 2 and more are
    of `P x / |P x|` with a learned `P` per head."""

    def __init__(self, heads: int, inputs: int, degree: int, projected: int | None, backend: str = "auto") -> None:
        super().__init__(heads, inputs, degree)
        self.backend = backend
        rank = inputs if projected is None else projected
        self.width = inputs + sum(math.comb(rank + i - 1, i) for i in range(2, 1 + degree))
        unused = projected is None or degree == 1
        self.projection = None if unused else nn.Parameter(torch.empty(heads, inputs, projected))  # type: ignore[arg-type]

    def init_weights(self) -> None:
        super().init_weights()
        if self.projection is not None:
            init.normal_(self.projection, 0.0, self.inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return monomials(x, self.coefficients, self.projection, backend=self.backend)


def feature_map(config: PreTrainedConfig) -> FeatureMap:
    """The map that a config asks for."""
    heads, inputs, degree = config.num_attention_heads, config.head_dim, config.feature_degree
    if config.feature_map == "monomials":
        return Monomials(heads, inputs, degree, config.feature_dim, config.kernel_backend)
    if config.feature_map == "powers":
        return Powers(heads, inputs, degree)
    return FeatureMap(heads, inputs)
