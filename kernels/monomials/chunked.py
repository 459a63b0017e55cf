"""The monomials of a degree at once, as products of gathered coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.monomials import multiplicity, places
from memzoo.kernels.registry import cast
from memzoo.kernels.unit_length import unit_length


def monomials(x: Tensor, coefficients: Sequence[Tensor], projection: Tensor | None) -> Tensor:
    """See `memzoo.kernels.monomials.monomials`."""
    b = cast(torch.stack(tuple(coefficients)), x.dtype)
    first, *rest = (b / torch.linalg.vector_norm(b, dim=0))[..., None].unbind(0)
    z = x if projection is None or not rest else unit_length(_projected(x, cast(projection, x.dtype)))
    parts = [first * x]
    for degree, scale in enumerate(rest, start=2):
        gathered, roots = _places(z.shape[-1], degree, z.device, z.dtype)
        factors = [z[..., place] for place in gathered]
        parts.append(scale * roots * math.prod(factors[1:], start=factors[0]))
    return torch.cat(parts, dim=-1)


def _projected(x: Tensor, projection: Tensor) -> Tensor:
    """`P x` per head, all vectors of a head at once."""
    rows = x.flatten(0, -3) if x.ndim > 2 else x[None]
    return (rows.transpose(0, 1) @ projection).transpose(0, 1).reshape(*x.shape[:-1], -1)


_made: dict[tuple[Any, ...], tuple[tuple[Tensor, ...], Tensor]] = {}


def _places(width: int, degree: int, device: torch.device, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """The factors' coordinates of every monomial, a tensor per factor, and the roots of their multiplicities; made
    once."""
    kind = width, degree, device, dtype
    if kind in _made and not torch.compiler.is_compiling():
        return _made[kind]
    every = places(width, degree)
    roots = [multiplicity(place) ** 0.5 for place in every]
    with torch.inference_mode(False):  # whatever the mode of the first caller
        made = torch.tensor(every, device=device).unbind(1), torch.tensor(roots, dtype=dtype, device=device)
    if type(made[1]) is Tensor and not torch.compiler.is_compiling():  # not a tracer's
        _made[kind] = made
    return made
