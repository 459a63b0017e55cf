"""Self-modifying memories: networks per head that make their own keys, values, gates and targets, and learn from them.

Every memory is `M(x) = x + W_1 act(W_2 x)`. With `n` an RMS norm and `|k_t| = 1`, for each token

    k_t = unit(M_k(u_t)),   v_t = M_v(u_t),   q_t = unit(M_q(u_t)), or a unit query that is given
    eta_t = limit sigmoid(r . n(M_eta(u_t)) + b),   alpha_t = sigmoid(-r' . n(M_alpha(u_t)) - b')
    y_t = M_memory(q_t)

and each memory m of k, v, eta, alpha and memory, and of q where it is one, learns to say of `k_t` what it says of v_t:

    g_m = gradient of 1/2 |M_m(k_t) - vhat|^2,  vhat = M_m(v_t) constant, |g_m| bounded over both layers
    W_2 <- W_2 (alpha_t I - eta_t k_t k_t^T) - eta_t g_m,    W_1 <- alpha_t W_1 - eta_t g_m

All reads and gradients are taken at the anchor, the weights at the memory's last boundary: those before the last token
whose number, from 0 in each sequence, is a multiple of C, `chunk_size` for M_memory and `self_chunk_size` for the
others. There the gradient has rank one in each layer, so that a memory reads and writes as fast as a matrix: its first
layer is a delta rule and its second one linear attention.

Source: Nested Learning (arXiv 2512.24695), Eq 83-93. Deviations: a boundary is the end of the last chunk, where the
printed index would be the end of the current one; keys and queries are scaled to unit length; Eq 88 as printed fits the
first layer alone, the second has no `k k^T`; gates are one number per head and token, by learned r and b; one token's
gradient is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memzoo.kernels import registry
from memzoo.kernels.deep_memory import ACTIVATIONS
from memzoo.kernels.registry import Backend, Op, Problem, chosen, select, triton_refuses

MAX_WIDTH = 256
KEY, VALUE, STEP, FORGET, MEMORY, QUERY = range(6)


def _triton_refuses(problem: Problem) -> str | None:
    width = problem.sizes["K"]
    return triton_refuses(problem) or (None if width <= MAX_WIDTH else f"holds heads up to 256 wide, got {width}")


OP = Op(
    name="self_modifying",
    backends=(
        Backend("triton", "memzoo.kernels.self_modifying.triton:self_modifying", _triton_refuses),
        Backend("chunked", "memzoo.kernels.self_modifying.chunked:self_modifying"),
        Backend("reference", "memzoo.kernels.self_modifying.reference:self_modifying"),
    ),
)


class Weights(NamedTuple):
    """All memories' layers."""

    first: Tensor
    """`W_2^T` of every memory side by side, `[B, H, d, N F]`."""
    second: Tensor
    """`W_1^T` of every memory, `[B, H N, F, d]`."""


def self_modifying(
    u: Tensor,
    query: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor,
    now: Weights,
    anchor: Weights,
    position: Tensor,
    *,
    chunk_size: int,
    self_chunk_size: int,
    step_limit: float,
    activation: str = "gelu",
    max_gradient_norm: float = math.inf,
    lengths: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Weights, Weights]:
    """Read T more tokens of one chunk into the memories: of a row's tokens none but its first may be at a boundary.

    Args:
        u: what the memories read, `[B, T, H, d]`, T at most C.
        query: of M_memory, of any length, `[B, T, H, d]`; `None` where a sixth memory makes it.
        gate_weight: r of the step size and r' of the retention, `[2, H, d]`.
        gate_bias: their b, `[2, H]`.
        now: the weights with every token written, N = 5 memories in the order k, v, eta, alpha, memory, or 6 with q;
            float32 or float64. Without gradients a call with one token may write into `now` and `anchor`: go on from
            those that are returned, and copy the ones from which two texts shall go on.
        anchor: the weights at each memory's last boundary; before the first token any, `now` itself for one.
        position: tokens that each row has read before, `[B]`, int64.
        chunk_size: C of M_memory, at least 1.
        self_chunk_size: C of the others, a multiple of it.
        step_limit: upper end of eta.
        activation: one of `memzoo.kernels.deep_memory.ACTIVATIONS`.
        max_gradient_norm: bound of |g_m|; a longer one is shortened to it.
        lengths: real tokens per row `[B]`, int64, for right-padded input; all `T` when `None`. Outputs beyond a row's
            length are unspecified.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`; also of the delta rule and linear attention within.

    Returns:
        `y` `[B, T, H, d]` in the dtype of `u`; the new `now` and `anchor`. Computed in the dtype of the weights.

    Raises:
        ValueError: shapes or options that do not fit.

    Cost, per token, head and memory with F hidden units: reads of about `7 d F` multiply-adds, and the recurrences.

    Example:
        >>> args = make_inputs(tokens=3)
        >>> y, now, anchor = self_modifying(**args, chunk_size=3, self_chunk_size=6, step_limit=0.25)
    """
    kind = (
        *("self_modifying", u.shape, None if query is None else query.shape, gate_weight.shape, gate_bias.shape),
        *(now.first.shape, now.second.shape, anchor.first.shape, anchor.second.shape, position.shape),
        *(u.dtype, now.first.dtype, u.device.type, chunk_size, self_chunk_size, activation, max_gradient_norm, backend),
    )
    given = u, query, gate_weight, gate_bias, now, anchor, position
    compute = chosen(kind, _choose, *given, chunk_size, self_chunk_size, activation, max_gradient_norm, backend)
    # Autocast is left as it is: it rounds reads, whose products are most of the work, and sums stay in float32.
    return compute(
        *given,
        chunk_size=chunk_size,
        self_chunk_size=self_chunk_size,
        step_limit=step_limit,
        activation=activation,
        max_gradient_norm=max_gradient_norm,
        lengths=lengths,
        backend=backend,
    )


def _choose(
    u: Tensor,
    query: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor,
    now: Weights,
    anchor: Weights,
    position: Tensor,
    chunk_size: int,
    self_chunk_size: int,
    activation: str,
    max_gradient_norm: float,
    backend: str,
) -> Callable[..., Any]:
    """The backend, after a check of shapes and options."""
    expect = partial(registry.expect, OP)
    expect(u.ndim == 4 and u.shape[1] > 0, "u", "[B, T, H, d] with T >= 1", u.shape)
    batch, tokens, heads, width = u.shape
    expect(query is None or query.shape == u.shape, "query", u.shape, None if query is None else query.shape)
    expect(gate_weight.shape == (2, heads, width), "gate_weight", (2, heads, width), gate_weight.shape)
    expect(gate_bias.shape == (2, heads), "gate_bias", (2, heads), gate_bias.shape)
    expect(position.shape == (batch,), "position", (batch,), position.shape)
    count, units = 6 if query is None else 5, now.second.shape[-2]
    first, second = (batch, heads, width, count * units), (batch, heads * count, units, width)
    for name, weights in (("now", now), ("anchor", anchor)):
        expect(weights.first.shape == first, f"{name}.first", first, weights.first.shape)
        expect(weights.second.shape == second, f"{name}.second", second, weights.second.shape)
    dtype = now.first.dtype
    expect(dtype in (torch.float32, torch.float64), "dtype of the weights", "float32 or float64", dtype)
    fits = chunk_size >= 1 and self_chunk_size >= 1 and self_chunk_size % chunk_size == 0
    expect(fits, "self_chunk_size", f"a multiple of chunk_size={chunk_size}", self_chunk_size)
    expect(tokens <= chunk_size, "tokens of a chunk", f"at most chunk_size={chunk_size}", tokens)
    expect(activation in ACTIVATIONS, "activation", f"one of {ACTIVATIONS}", activation)
    expect(max_gradient_norm > 0, "max_gradient_norm", "above 0", max_gradient_norm)
    sizes = {"B": batch, "T": tokens, "H": heads, "K": width, "F": units, "N": count}
    options = {"activation": activation, "state": str(dtype)}
    return select(OP, Problem(u.device.type, str(u.dtype), sizes, options), backend)


def make_inputs(
    batch: int = 2,
    tokens: int = 3,
    heads: int = 2,
    width: int = 6,
    units: int = 10,
    adaptive_query: bool = False,
    positions: tuple[int, ...] = (0,),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Random arguments for tests and benchmarks: lively memories and gates, anchors of their own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    count = 6 if adaptive_query else 5

    def weights() -> Weights:
        first = draw(batch, heads, width, count * units) / width**0.5
        return Weights(first, draw(batch, heads * count, units, width) / units**0.5)

    return {
        "u": draw(batch, tokens, heads, width),
        "query": None if adaptive_query else draw(batch, tokens, heads, width),
        "gate_weight": draw(2, heads, width) / width**0.5,
        "gate_bias": draw(2, heads) - 1,
        "now": weights(),
        "anchor": weights(),
        "position": torch.tensor(positions)[torch.arange(batch) % len(positions)],
    }
