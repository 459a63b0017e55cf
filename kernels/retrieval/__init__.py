"""Reading a deep memory without writing to it, by its own queries or at the weights of the running segment's start.

    y_t = M(q_t),   M(q) = W_L act(... act(W_1 q)) (+ the first V coordinates of q)

    W = the past; where a segment of `segment` tokens starts, the memory's own weights, which become the past

Source: Titans (arXiv 2501.00663), Eq 15 and 21; Proteus (arXiv 2608.16844), Eq 11, for the blocks that a token sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.deep_memory import ACTIVATIONS, is_gated
from memzoo.kernels.registry import Backend, Op, Problem, as_given, cast, chosen, expect, select, triton_refuses

Weights = tuple[Tensor, ...]


def _triton_refuses(problem: Problem) -> str | None:
    sizes = problem.sizes
    if sizes["T"] > 1 or problem.options["differentiable"]:
        return "answers one query without gradients; more are products of matrices, which torch has"
    if sizes["L"] > 2:
        return f"reads memories of one or two layers, got {sizes['L']}"
    if max(sizes["K"], sizes["V"]) > 1024 or sizes["E"] > 64:
        return f"holds heads up to 1024 wide and 64 capacity blocks, got {sizes['K']}, {sizes['V']} and {sizes['E']}"
    return triton_refuses(problem)


OP = Op(
    name="retrieval",
    backends=(
        Backend("triton", "memzoo.kernels.retrieval.triton:retrieve", _triton_refuses),
        Backend("chunked", "memzoo.kernels.retrieval.chunked:retrieve"),
        Backend("reference", "memzoo.kernels.retrieval.reference:retrieve"),
    ),
)


def retrieve(
    query: Tensor,
    weights: Sequence[Tensor],
    position: Tensor,
    *,
    past: Sequence[Tensor] = (),
    segment: int = 1,
    activation: str = "gelu",
    residual: bool = True,
    unlock: Sequence[int] = (0,),
    unit: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Weights]:
    """Answers at one set of weights for all queries of a row.

    Args:
        query: `[B, T, H, K]`.
        weights: the memory's, `[B, H, out_l, in_l]`, float32 or float64.
        position: tokens of each row before its first query, `[B]`, int64; query t sees the blocks open at its token.
        past: the memory's weights at the start of the running segment, shaped and typed like `weights`; none where this
            is it. Without gradients a single query may write the past of a segment that starts into these tensors.
        segment: tokens after which another segment starts.
        activation, residual, unlock: as in `deep_memory`.
        unit: whether `q_t` is `SiLU(query)` at unit length (`x / max(|x|, 1e-6)`), else it is the query.
        backend: `"auto"`, `"triton"` (for single queries without gradients; others are `"chunked"`), `"chunked"` or
            `"reference"`.

    Returns:
        `[B, T, H, V]` in the dtype of `query`, and the past of these tokens: tensors of their own, which a memory that
        is written to does not change.

    Raises:
        ValueError: shapes or options that do not fit.

    Cost: P multiply-adds per token and head, of P weights.

    Example:
        >>> y, past = retrieve(**make_inputs(tokens=3))
    """
    weights, past, unlock = tuple(weights), tuple(past), tuple(unlock)
    differentiable = torch.is_grad_enabled()
    if query.shape[1] > 1 or differentiable:
        backend = "chunked" if backend == "triton" else backend
    kind = (
        *("retrieval", query.shape, position.shape, query.dtype, weights[0].dtype, query.device.type, activation),
        *(tuple([x.shape for x in weights]), tuple([x.shape for x in past])),
        *(segment, residual, unlock, unit, differentiable, backend),
    )
    compute = chosen(
        kind, _choose, query, weights, position, past, segment, activation, unlock, unit, differentiable, backend
    )
    with as_given(query.device):
        y, kept_past = compute(query, weights, position, past, segment, activation, residual, unlock, unit)
    return cast(y, query.dtype), kept_past


def _choose(
    query: Tensor,
    weights: Weights,
    position: Tensor,
    past: Weights,
    segment: int,
    activation: str,
    unlock: tuple[int, ...],
    unit: bool,
    differentiable: bool,
    backend: str,
) -> Callable[..., Any]:
    """The backend, after a check of the shapes."""
    expect(OP, query.ndim == 4 and query.shape[1] > 0, "query", "[B, T, H, K] with T >= 1", query.shape)
    batch, tokens, heads, width = query.shape
    inner = width
    for layer, weight in enumerate(weights):
        shape = (batch, heads, weight.shape[2] if weight.ndim == 4 else "out", inner)
        expect(OP, weight.shape == shape, f"weights of layer {layer + 1}", shape, weight.shape)
        inner = weight.shape[2] // (2 if layer == 0 and is_gated(weights) else 1)
    expect(OP, position.shape == (batch,), "position", (batch,), position.shape)
    same = [x.shape for x in past] == [x.shape for x in weights] or not past
    expect(OP, same, "past", [tuple(x.shape) for x in weights], [tuple(x.shape) for x in past])
    expect(OP, segment >= 1, "segment", "at least 1", segment)
    expect(OP, activation in ACTIVATIONS, "activation", f"one of {ACTIVATIONS}", activation)
    expect(OP, unlock[:1] == (0,) and list(unlock) == sorted(unlock), "unlock", "ascending from 0", unlock)
    sizes = {"T": tokens, "L": len(weights), "K": width, "V": inner, "E": len(unlock)}
    options = {"differentiable": differentiable, "state": str(weights[0].dtype)}
    return select(OP, Problem(query.device.type, str(query.dtype), sizes, options), backend)


def kept(weights: Weights) -> Weights:
    """The weights as a past, which stays as it is when the memory is written in place: with gradients, too, since what
    follows may do without."""
    return tuple([x.clone() for x in weights])


def make_inputs(
    batch: int = 3,
    tokens: int = 1,
    heads: int = 2,
    key_dim: int = 6,
    value_dim: int = 4,
    hidden: tuple[int, ...] = (8,),
    gated: bool = False,
    position: tuple[int, ...] = (0, 5, 8),
    segment: int = 4,
    blocks: int = 1,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Random arguments for tests and benchmarks; the weights are float32 or float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    sizes, wide = [key_dim, *hidden, value_dim], torch.promote_types(dtype, torch.float32)
    shapes = [
        (batch, heads, outer * (2 if gated and layer == 0 else 1), inner)
        for layer, (inner, outer) in enumerate(pairwise(sizes))
    ]
    weights, past = (tuple((draw(*shape) * shape[-1] ** -0.5).to(wide) for shape in shapes) for _ in range(2))
    return {
        "query": draw(batch, tokens, heads, key_dim).to(dtype),
        "weights": weights,
        "position": torch.tensor(position)[torch.arange(batch) % len(position)],
        "past": past,
        "segment": segment,
        "unlock": tuple(3 * block for block in range(blocks)),
    }
