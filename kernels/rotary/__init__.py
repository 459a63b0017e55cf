"""Rotary embedding: the coordinates j and j + D/2 of a vector turned by an angle of its token's position.

    y_j = cos_j x_j + sin_j x_{(j + D/2) mod D},   the sines of the first half negative

Source: RoFormer (arXiv 2104.09864), Eq 34, with the planes of Llama. Deviations: none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.registry import Backend, Op, Problem, chosen, expect, select, triton_refuses

MAX_WIDTH = 1024


def _triton_refuses(problem: Problem) -> str | None:
    if problem.sizes["D"] > MAX_WIDTH:
        return f"holds vectors of up to {MAX_WIDTH} on chip, got {problem.sizes['D']}"
    return triton_refuses(problem)


OP = Op(
    name="rotary",
    backends=(
        Backend("triton", "memzoo.kernels.rotary.triton:rotary", _triton_refuses),
        Backend("chunked", "memzoo.kernels.rotary.chunked:rotary"),
        Backend("reference", "memzoo.kernels.rotary.reference:rotary"),
    ),
)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "auto") -> Tensor:
    """Turn vectors; a gradient goes to them alone.

    Args:
        x: `[B, T, ..., D]`, of any floating dtype.
        cos: cosines of the tokens' angles, `[B, T, D]` or `[1, T, D]`, each half the same.
        sin: their sines, those of the first half negative.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        In the shape and dtype of `x`.

    Raises:
        ValueError: shapes that do not fit, an odd width.

    Cost: 3 operations a number; it is the passes over memory that count, one in and one out where all is one kernel.

    Example:
        >>> y = rotary(**make_inputs())
    """
    kind = "rotary", x.shape, cos.shape, sin.shape, x.dtype, x.device.type, backend
    return chosen(kind, _choose, x, cos, sin, backend)(x, cos, sin)


def _choose(x: Tensor, cos: Tensor, sin: Tensor, backend: str) -> Callable[..., Any]:
    """The backend, after a check of the shapes."""
    expect(OP, x.ndim >= 3 and x.shape[-1] % 2 == 0, "x", "[B, T, ..., D] with an even D", x.shape)
    batch, tokens, width = x.shape[0], x.shape[1], x.shape[-1]
    for name, angle in (("cosines", cos), ("sines", sin)):
        # Not `in`, which finds nothing among sizes that a graph does not know.
        fits = angle.shape == (batch, tokens, width) or angle.shape == (1, tokens, width)
        expect(OP, fits, name, f"[{batch} or 1, {tokens}, {width}]", angle.shape)
    expect(OP, cos.shape == sin.shape, "sines", cos.shape, sin.shape)
    return select(OP, Problem(x.device.type, str(x.dtype), {"D": width}), backend)


def make_inputs(
    batch: int = 2,
    tokens: int = 5,
    inner: tuple[int, ...] = (2, 3),
    width: int = 6,
    shared: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random arguments for tests and benchmarks; `shared`: the same angles for all rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, *inner, width, generator=generator, dtype=torch.float64)
    angle = torch.randn(1 if shared else batch, tokens, width // 2, generator=generator, dtype=torch.float64)
    cos, sin = torch.cat([angle, angle], dim=-1).cos(), torch.cat([-angle, angle], dim=-1).sin()
    return {"x": x.to(dtype), "cos": cos.to(dtype), "sin": sin.to(dtype)}
