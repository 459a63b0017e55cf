"""A deep memory on exponential features: experimental, since how the paper evaluates one is not published.

With the features `phi(x) . phi(y) = exp(s (x . y - 1))` of `memzoo.kernels.exponential_memory`, whose part of degree 1
holds x itself, the memory is a network of two layers, `M(x) = x + W_1 act(W_2 phi(x))`, trained at every token:

    u_i = d/dM loss(M_{t-1}; k_i, v_i),   loss = -<M(k), v> (DeepTransformer, SWDT) or 1/2 |M(k) - v|^2 (Dot)
    M_t = retention_t M_{t-1} - step_size_t sum_{j<c} window_gate_{t,j} u_{t-j},    y_t = M_t(q_t)

`W_2` has no finite matrix. Its gradient at a key is `d phi(k)^T`, so that it is kept as its initial matrix, which acts
on x and only decays, and what is written at each key (ours):

    W_2(t) phi(x) = (prod_{n<=t} retention_n) W_2(0) x + sum_i written_i(t) exp(s (k_i . x - 1))

Source: ATLAS (arXiv 2505.23735), Eq 25 and 27 for the memory, Eq 22-23 for the features. Deviations: the state grows
with the context; every gradient is taken at `M_{t-1}`, so there is no chunk and no parallel form; a gradient is
shortened to a bound, without which each layer's growth feeds the other's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from memzoo.kernels import exponential_memory, registry
from memzoo.kernels.deep_memory import ACTIVATIONS
from memzoo.kernels.deep_memory.activations import ACTIVATION
from memzoo.kernels.exponential_memory import OBJECTIVES, aligned, kernel, written_steps
from memzoo.kernels.registry import Backend, Op, Problem, as_given, cast, select

OP = Op(
    name="deep_exponential_memory",
    backends=(Backend("reference", "memzoo.kernels.deep_exponential_memory.reference:deep_exponential_memory"),),
)


class DeepExponentialState(NamedTuple):
    """The memory after some tokens; keys and what belongs to them right-aligned, as in `ExponentialState`. Float32 or
    wider."""

    keys: Tensor
    """`[B, H, R, K]`, at least c - 1 of them."""
    written: Tensor
    """What stands at each key now, `[B, H, R, F]`."""
    first: Tensor
    """The initial `W_2`, decayed, `[B, H, F, K]`."""
    second: Tensor
    """`W_1`, `[B, H, V, F]`."""
    recent_values: Tensor
    """Values of the last c - 1 tokens, `[B, H, c - 1, V]`."""
    position: Tensor
    """Tokens read, `[B]`, int64."""


def initial_state(weights: Sequence[Tensor], batch: int, *, window: int) -> DeepExponentialState:
    """The state before the first token, from `W_2` `[H, F, K]` and `W_1` `[H, V, F]`, for a window of c."""
    first, second = (w.expand(batch, *w.shape) for w in weights)
    (heads, hidden, key_dim), value_dim = weights[0].shape, weights[1].shape[1]
    linear = exponential_memory.initial_state(batch, heads, key_dim, value_dim, window=window, like=first)
    written = first.new_zeros(batch, heads, window - 1, hidden)
    return DeepExponentialState(linear.keys, written, first, second, linear.recent_values, linear.position)


def deep_exponential_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    step_size: Tensor,
    state: DeepExponentialState,
    *,
    scale: float,
    objective: str = "dot",
    activation: str = "gelu",
    max_gradient_norm: float = math.inf,
    lengths: Tensor | None = None,
    grows: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, DeepExponentialState]:
    """Write T more tokens into the memory and read after each.

    Args:
        query, key: `[B, T, H, K]`, of unit length.
        value: `[B, T, H, V]`; `V <= K`.
        log_retention: log of the keep factor, `[B, T, H]`, in `[-inf, 0]`; `None` keeps everything.
        step_size: step size times window gate for the token j before, `[B, T, H, c]`, at least 0.
        state: from `initial_state` or from an earlier call.
        scale: s.
        objective: `"dot"` or `"l2"`.
        activation: one of `memzoo.kernels.deep_memory.ACTIVATIONS`.
        max_gradient_norm: bound of |u_i|, over both layers; a longer u_i is shortened to it.
        lengths: real tokens per row `[B]`, int64, for right-padded input; all `T` when `None`. Outputs beyond a row's
            length are unspecified.
        grows: whether the new state has a key more per token. `False` keeps as many as there are, the last ones: those
            in front must be zeros, which stand for no token.
        backend: `"auto"` or `"reference"`.

    Returns:
        `y` `[B, T, H, V]` in the dtype of `query`, and the new state. Inputs are computed in the state's dtype.

    Raises:
        ValueError: shapes or options that do not fit.

    Cost, per token and head with R tokens before: about `(c + 1) R (K + F)` multiply-adds, token after token. The state
    holds `R (K + F)` floats and both layers.

    Example:
        >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 9, 4, 8), dim=-1)
        >>> v, step = torch.randn(1, 9, 4, 8), torch.full((1, 9, 4, 1), 0.1)
        >>> state = initial_state([torch.randn(4, 32, 8), torch.randn(4, 8, 32) / 32], batch=1, window=1)
        >>> y, state = deep_exponential_memory(q, k, v, None, step, state, scale=3.0)
    """
    expect = partial(registry.expect, OP)
    window = state.recent_values.shape[2] + 1
    expect(query.ndim == 4 and query.shape[1] > 0, "query", "[B, T, H, K] with T >= 1", query.shape)
    expect(key.shape == query.shape, "key", query.shape, key.shape)
    (batch, tokens, heads, width), value_dim = query.shape, state.second.shape[2]
    expect(value.shape == (batch, tokens, heads, value_dim), "value", (batch, tokens, heads, value_dim), value.shape)
    expect(value_dim <= width, "value width of a residual memory", f"at most {width}", value_dim)
    expect(step_size.shape == (*query.shape[:3], window), "step_size", (*query.shape[:3], window), step_size.shape)
    if log_retention is not None:
        expect(log_retention.shape == query.shape[:3], "log_retention", query.shape[:3], log_retention.shape)
    fits = (*state.first.shape[:2], state.first.shape[3]) == (batch, heads, width)
    expect(fits, "first layer of the state", (batch, heads, "F", width), state.first.shape)
    expect(objective in OBJECTIVES, "objective", f"one of {OBJECTIVES}", objective)
    expect(activation in ACTIVATIONS, "activation", f"one of {ACTIVATIONS}", activation)
    expect(scale > 0, "scale", "above 0", scale)
    expect(max_gradient_norm > 0, "max_gradient_norm", "above 0", max_gradient_norm)
    problem = Problem(query.device.type, str(query.dtype), {"T": tokens, "W": window}, {"objective": objective})
    compute = select(OP, problem, backend)
    dtype = state.keys.dtype
    with as_given(query.device):
        log_retention, step_size = written_steps(log_retention, step_size, state.position, lengths)
        q, k, v, gate, step = (cast(x, dtype).movedim(2, 1) for x in (query, key, value, log_retention, step_size))
        y, grown = compute(q, k, v, gate, step, state, scale, objective, activation, max_gradient_norm)
        rows = (grown if grows else state).keys.shape[2]
        state = grown._replace(
            keys=aligned(grown.keys, lengths, tokens, rows),
            written=aligned(grown.written, lengths, tokens, rows),
            recent_values=aligned(torch.cat([state.recent_values, v], dim=2), lengths, tokens, window - 1),
            position=state.position + (tokens if lengths is None else lengths),
        )
    return cast(y.movedim(1, 2), query.dtype), state


def retrieve(
    query: Tensor,
    keys: Tensor,
    written: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    scale: float,
    activation: str = "gelu",
) -> Tensor:
    """`M(q)` of a memory as its state holds it, for all queries `[B, T, H, K]`: `[B, T, H, V]` in the state's dtype."""
    with as_given(query.device):
        q = cast(query, keys.dtype).movedim(2, 1)
        return answer(q, keys, written, first, second, scale, activation).movedim(1, 2)


def answer(
    x: Tensor, keys: Tensor, written: Tensor, first: Tensor, second: Tensor, scale: float, activation: str
) -> Tensor:
    """`M(x)`, `[B, H, X, K]` to `[B, H, X, V]`."""
    hidden = ACTIVATION[activation].value(before(x, keys, written, first, scale))
    return x[..., : second.shape[2]] + hidden @ second.mT


def before(x: Tensor, keys: Tensor, written: Tensor, first: Tensor, scale: float) -> Tensor:
    """`W_2 phi(x)`, `[B, H, X, K]` to `[B, H, X, F]`."""
    return x @ first.mT + kernel(x, keys, scale) @ written


def make_inputs(
    batch: int = 2,
    tokens: int = 13,
    heads: int = 3,
    key_dim: int = 6,
    value_dim: int = 5,
    hidden: int = 7,
    window: int = 1,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, object]:
    """Random arguments of `deep_exponential_memory` for tests and benchmarks."""
    args = exponential_memory.make_inputs(batch, tokens, heads, key_dim, value_dim, window, dtype, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = [
        torch.randn(heads, *shape, generator=generator, dtype=torch.float64).to(dtype) / shape[1] ** 0.5
        for shape in ((hidden, key_dim), (value_dim, hidden))
    ]
    step = 0.3 * args["step_size"]  # type: ignore[operator]
    return {**args, "step_size": step, "state": initial_state(weights, batch, window=window)}
