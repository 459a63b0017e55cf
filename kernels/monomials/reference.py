"""The monomials, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memzoo.kernels.monomials import multiplicity, places


def monomials(x: Tensor, coefficients: Sequence[Tensor], projection: Tensor | None) -> Tensor:
    """See `memzoo.kernels.monomials.monomials`."""
    b = [each.to(x.dtype) for each in coefficients]
    size = sum(each.square() for each in b).sqrt()  # type: ignore[union-attr]
    z = x
    if projection is not None:
        z = torch.einsum("...hk,hkr->...hr", x, projection.to(x.dtype))
        z = z / z.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
    found = [(b[0] / size)[:, None] * x]
    for degree in range(2, 1 + len(b)):
        for place in places(z.shape[-1], degree):
            product = torch.ones_like(z[..., 0])
            for i in place:
                product = product * z[..., i]
            found.append((multiplicity(place) ** 0.5 * b[degree - 1] / size * product)[..., None])
    return torch.cat(found, dim=-1)
