"""What a token sees of a memory whose capacity opens block by block (Proteus, arXiv 2608.16844, Eq 7-13).

    y_t = x_t * [block(unit) < k(t)],   block(unit) = min(E - 1, floor(unit / floor(U / E))),
    k(t) = min(E, 1 + floor(n_t / Delta))   for a token that n_t others precede in its sequence

Keys, values or read-outs of closed blocks are 0, so that they neither read nor write. Deviations: see
`memzoo.modeling.capacity`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.registry import Backend, Op, Problem, chosen, expect, select, triton_refuses

OP = Op(
    name="opened",
    backends=(
        Backend("triton", "memzoo.kernels.opened.triton:opened", triton_refuses),
        Backend("chunked", "memzoo.kernels.opened.chunked:opened"),
        Backend("reference", "memzoo.kernels.opened.reference:opened"),
    ),
)


def opened(x: Tensor, position: Tensor, *, blocks: int, interval: int, axis: int = -1, backend: str = "auto") -> Tensor:
    """Vectors with 0 in closed blocks.

    Args:
        x: `[B, T, ...]`, of any floating dtype; its units U, at least E, are along `axis`.
        position: tokens of each row before its first one here, `[B]`, int64.
        blocks: E.
        interval: Delta, tokens between two openings.
        axis: of the units, from 2 or from the end.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        In the shape and dtype of `x`; on a CPU `x` itself where all is open.

    Raises:
        ValueError: shapes or numbers that do not fit.

    Cost: a pass over memory.

    Example:
        >>> y = opened(**make_inputs())
    """
    axis = axis % x.ndim
    kind = "opened", x.shape, position.shape, x.dtype, x.device.type, blocks, interval, axis, backend
    return chosen(kind, _choose, x, position, blocks, interval, axis, backend)(x, position, blocks, interval, axis)


def _choose(x: Tensor, position: Tensor, blocks: int, interval: int, axis: int, backend: str) -> Callable[..., Any]:
    """The backend, after a check of shapes and numbers."""
    expect(OP, axis >= 2, "axis", f"from 2 to {x.ndim - 1}", axis)
    expect(OP, position.shape == x.shape[:1], "position", x.shape[:1], position.shape)
    expect(OP, 1 <= blocks <= x.shape[axis], "blocks", f"from 1 to the units, {x.shape[axis]}", blocks)
    expect(OP, interval >= 1, "interval", "at least 1", interval)
    return select(OP, Problem(x.device.type, str(x.dtype), {"U": x.shape[axis]}), backend)


def make_inputs(
    batch: int = 3,
    tokens: int = 7,
    shape: tuple[int, ...] = (2, 6),
    axis: int = -1,
    blocks: int = 3,
    interval: int = 2,
    position: tuple[int, ...] = (0, 3, 50),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Random arguments for tests and benchmarks."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64).to(dtype),
        "position": torch.tensor(position)[torch.arange(batch) % len(position)],
        "blocks": blocks,
        "interval": interval,
        "axis": axis,
    }
