"""Where Comba (arXiv 2506.02475, Eq 5) reads, writes and erases.

    p = sigmoid(e) k,   q' = q - d k                           of unit vectors q and k (paper)
    p = u(sigmoid(e) k),   q' = u(q - d sigmoid(e) k),   k' = u(k)   with u(x) = x / sqrt(|x|^2 + eps)   (fla)

The second form is flash-linear-attention's; without an epsilon, where `u(x) = x / max(|x|, 1e-6)`, its p is k'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.registry import Backend, Op, Problem, chosen, expect, select, triton_refuses

MAX_WIDTH = 1024


def _triton_refuses(problem: Problem) -> str | None:
    if problem.sizes["K"] > MAX_WIDTH:
        return f"holds vectors of up to {MAX_WIDTH} on chip, got {problem.sizes['K']}"
    return triton_refuses(problem)


OP = Op(
    name="addresses",
    backends=(
        Backend("triton", "memzoo.kernels.addresses.triton:addresses", _triton_refuses),
        Backend("chunked", "memzoo.kernels.addresses.chunked:addresses"),
        Backend("reference", "memzoo.kernels.addresses.reference:addresses"),
    ),
)
Addresses = tuple[Tensor, Tensor, Tensor | None]


def addresses(
    query: Tensor,
    key: Tensor,
    erase: Tensor,
    correction: Tensor,
    *,
    unit_eps: float | None = None,
    backend: str = "auto",
) -> Addresses:
    """The corrected query, the key, and the erase key.

    Args:
        query, key: `[B, T, H, K]`, of any floating dtype.
        erase: e, `[B, T, H]`; that of a parameter may be expanded.
        correction: d, the same.
        unit_eps: eps of vectors that are scaled to unit length here; `None` for those that have it.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        `q'`, `k'` and `p`, each `[B, T, H, K]`, in the inputs' widest dtype (with `unit_eps` in float32 or wider);
        no `p` where it is `k'`, with a `unit_eps` of 0.

    Raises:
        ValueError: shapes that do not fit.

    Cost: some 10 operations a coordinate; it is the passes over memory that count, 2 in and 2 or 3 out where all is one
    kernel.

    Example:
        >>> read, write, erased = addresses(**make_inputs())
    """
    kind = (
        *("addresses", query.shape, key.shape, erase.shape, correction.shape, query.dtype, key.dtype, erase.dtype),
        *(query.device.type, unit_eps, backend),
    )
    compute = chosen(kind, _choose, query, key, erase, correction, unit_eps, backend)
    return compute(query, key, erase, correction, unit_eps)


def _choose(
    query: Tensor, key: Tensor, erase: Tensor, correction: Tensor, unit_eps: float | None, backend: str
) -> Callable[..., Any]:
    """The backend, after a check of the shapes."""
    expect(OP, query.ndim == 4, "query", "[B, T, H, K]", query.shape)
    expect(OP, key.shape == query.shape, "key", query.shape, key.shape)
    for name, x in (("erase", erase), ("correction", correction)):
        expect(OP, x.shape == query.shape[:3], name, query.shape[:3], x.shape)
    expect(OP, unit_eps is None or unit_eps >= 0, "unit_eps", "at least 0", unit_eps)
    return select(OP, Problem(query.device.type, str(query.dtype), {"K": query.shape[3]}), backend)


def make_inputs(
    batch: int = 2,
    tokens: int = 5,
    heads: int = 3,
    key_dim: int = 6,
    shared: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random arguments for tests and benchmarks; `shared`: numbers of the heads alone, expanded."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    of_heads = [draw(heads).expand(batch, tokens, -1) if shared else draw(batch, tokens, heads) for _ in range(2)]
    shape = batch, tokens, heads, key_dim
    return {"query": draw(*shape), "key": draw(*shape), "erase": of_heads[0], "correction": of_heads[1]}
