"""All monomials of a vector up to a degree p: features of keys and queries, up to a division

    phi(x) . phi(y) = sum_i a_i (x . y)^i,    a_i = b_i^2

Each monomial stands once, with the root of its multiplicity, for the entries of `x^(x)i` that equal it. With a
projection, degrees 2 and more are those of `z = P x / |P x|`, `P` per head.

    phi(x) = (b_1 x, b_2 r_ij z_i z_j, b_3 r_ijk z_i z_j z_k, ...) / sqrt(sum_i a_i),    i <= j <= k

Source: ATLAS (arXiv 2505.23735), Eq 5 and 22. Deviations: no constant, which in a deep memory would be one more bias;
the projection; the division, so that features of a unit vector are no longer than 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.registry import Backend, Op, Problem, chosen, select, triton_refuses

MAX_WIDTH = 1024
MAX_RANK = 64


def _triton_refuses(problem: Problem) -> str | None:
    if problem.sizes["p"] != 2:
        return f"computes degree 2, got {problem.sizes['p']}"
    if problem.sizes["K"] > MAX_WIDTH or problem.sizes["R"] > MAX_RANK:
        return (
            f"holds vectors of up to {MAX_WIDTH} and squares of up to {MAX_RANK} on chip, got "
            f"{problem.sizes['K']} and {problem.sizes['R']}"
        )
    return triton_refuses(problem)


OP = Op(
    name="monomials",
    backends=(
        Backend("triton", "memzoo.kernels.monomials.triton:monomials", _triton_refuses),
        Backend("chunked", "memzoo.kernels.monomials.chunked:monomials"),
        Backend("reference", "memzoo.kernels.monomials.reference:monomials"),
    ),
)


def monomials(
    x: Tensor, coefficients: Sequence[Tensor], projection: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Features of vectors.

    Args:
        x: `[..., H, K]`, of unit length where the features shall be.
        coefficients: `b_1` to `b_p`, `[H]` each.
        projection: `P`, `[H, K, R]`; `None` for none, and R = K.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        `[..., H, D]` in the dtype of `x`, `D = K + sum_{i=2}^p binomial(R + i - 1, i)`.

    Raises:
        ValueError: shapes that do not fit, no coefficient.

    Cost: `2 K R` operations a vector and `p` for each of its features. With gradients they are torch's in all backends.

    Example:
        >>> x = torch.nn.functional.normalize(torch.randn(2, 5, 3, 8), dim=-1)
        >>> monomials(x, [torch.ones(3), torch.ones(3)], torch.randn(3, 8, 4)).shape  # [2, 5, 3, 18]
    """
    kind = (
        *("monomials", x.shape, *[b.shape for b in coefficients], None if projection is None else projection.shape),
        *(x.dtype, x.device.type, backend),
    )
    return chosen(kind, _choose, x, coefficients, projection, backend)(x, coefficients, projection)


def _choose(
    x: Tensor, coefficients: Sequence[Tensor], projection: Tensor | None, backend: str
) -> Callable[..., Tensor]:
    """The backend, after a check of the shapes."""
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(f"monomials: x: expected [..., H, K], got {tuple(x.shape)}.")
    heads, width = x.shape[-2:]
    if not coefficients or any(b.shape != (heads,) for b in coefficients):
        got = [tuple(b.shape) for b in coefficients]
        raise ValueError(f"monomials: coefficients: expected one or more of {(heads,)} = [H], got {got}.")
    if projection is not None and (projection.ndim != 3 or projection.shape[:2] != (heads, width)):
        raise ValueError(f"monomials: projection: expected ({heads}, {width}, R), got {tuple(projection.shape)}.")
    rank = width if projection is None else projection.shape[2]
    sizes = {"K": width, "R": rank, "p": len(coefficients)}
    return select(OP, Problem(x.device.type, str(x.dtype), sizes), backend)


def places(width: int, degree: int) -> list[tuple[int, ...]]:
    """The factors' coordinates of every monomial, in the order of the features."""
    found: list[tuple[int, ...]] = [()]
    for _ in range(degree):
        found = [(*place, i) for place in found for i in range(place[-1] if place else 0, width)]
    return found


def multiplicity(place: tuple[int, ...]) -> int:
    """Of how many entries of `z^(x)i` a monomial is one."""
    count = math.factorial(len(place))
    for at in range(len(place)):
        count //= place[: at + 1].count(place[at])
    return count


def make_inputs(
    *batch: int,
    heads: int = 3,
    width: int = 6,
    rank: int | None = 4,
    degree: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Random inputs for tests and benchmarks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "x": torch.nn.functional.normalize(draw(*batch, heads, width), dim=-1).to(dtype),
        "coefficients": [draw(heads).to(dtype) for _ in range(degree)],
        "projection": None if rank is None else draw(heads, width, rank).to(dtype),
    }
