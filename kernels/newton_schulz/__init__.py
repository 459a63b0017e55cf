"""Newton-Schulz iteration: the matrix with the same singular vectors, and singular values near 1.

    X_0 = S / |S|_F,   X_{n+1} = a X_n + (b G_n + c G_n^2) X_n,   G_n = X_n X_n^T

with the quintic's `a, b, c` of Jordan et al.'s Muon, which ATLAS (arXiv 2505.23735, Eq 32 and section 5) applies to the
momentum of its memory. Five steps bring singular values of `S / |S|_F` from 0.01 up into about [0.7, 1.2]: an
approximate `U V^T`, not an exact one, and none of the scale of `S` is left.
Deviations: none; a matrix of norm below `TINY` counts as zero and gives zero, with no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.registry import Backend, Op, Problem, as_given, expect, select, triton_refuses

MAX_NARROW = 64
"""Widest Gram matrix that the Triton backend holds on the chip; a wider one is for a library's matrix products."""


def _triton_refuses(problem: Problem) -> str | None:
    narrow = min(problem.sizes["M"], problem.sizes["N"])
    if narrow > MAX_NARROW:
        return f"holds the Gram matrix of a narrower side of up to {MAX_NARROW} on chip, got {narrow}"
    return triton_refuses(problem)


OP = Op(
    name="newton_schulz",
    backends=(
        Backend("triton", "memzoo.kernels.newton_schulz.triton:newton_schulz", _triton_refuses),
        Backend("chunked", "memzoo.kernels.newton_schulz.chunked:newton_schulz"),
        Backend("reference", "memzoo.kernels.newton_schulz.reference:newton_schulz"),
    ),
)
QUINTIC = (3.4445, -4.7750, 2.0315)
TINY = 1e-7


def newton_schulz(x: Tensor, *, steps: int = 5, backend: str = "auto") -> Tensor:
    """Orthogonalise each matrix approximately.

    Args:
        x: matrices `[..., M, N]` of any shape, float32 or float64; of norms below 1e19 in float32, for the squares.
        steps: iterations; 0 returns `x` as it is, neither scaled nor turned.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        `[..., M, N]` in the dtype of `x`. It has first derivatives only.

    Raises:
        ValueError: fewer than two dimensions, another dtype, a negative number of steps.

    Cost: with m the narrower side and n the wider, `4 m^2 n` operations and `steps` times `8 m^3` (the reference:
    `steps` times `4 m^2 n + 2 m^3`).

    Example:
        >>> torch.linalg.svdvals(newton_schulz(torch.randn(32, 128)))  # 0.7 to 1.2
    """
    expect(OP, x.ndim >= 2, "x", "[..., M, N]", tuple(x.shape))
    expect(OP, x.dtype in (torch.float32, torch.float64), "dtype of x", "float32 or float64", x.dtype)
    expect(OP, steps >= 0, "steps", "at least 0", steps)
    problem = Problem(x.device.type, str(x.dtype), {"M": x.shape[-2], "N": x.shape[-1]}, {"steps": steps})
    with as_given(x.device):
        return select(OP, problem, backend)(x, steps)


def make_inputs(
    *batch: int, rows: int = 8, columns: int = 20, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    """Random matrices for tests and benchmarks."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(*batch, rows, columns, generator=generator, dtype=torch.float64).to(dtype)}
