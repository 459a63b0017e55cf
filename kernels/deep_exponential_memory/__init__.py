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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memzoo.kernels import exponential_memory, registry
from memzoo.kernels.deep_memory import ACTIVATIONS
from memzoo.kernels.deep_memory.activations import ACTIVATION, Activation
from memzoo.kernels.exponential_memory import OBJECTIVES, kernel, problem_of, triton_refuses_all_but_a_token
from memzoo.kernels.registry import Backend, Op, Problem, as_given, cast, select

MAX_HIDDEN = 1024


def _triton_refuses(problem: Problem) -> str | None:
    if problem.sizes["F"] > MAX_HIDDEN:
        return f"computes up to {MAX_HIDDEN} hidden units, got {problem.sizes['F']}"
    return triton_refuses_all_but_a_token(problem)


OP = Op(
    name="deep_exponential_memory",
    backends=(
        Backend("triton", "memzoo.kernels.deep_exponential_memory.triton:deep_exponential_memory", _triton_refuses),
        Backend("reference", "memzoo.kernels.deep_exponential_memory.reference:deep_exponential_memory"),
    ),
)


class DeepExponentialState(NamedTuple):
    """The memory after some tokens; token n of a row, counted from its first, in place n. Float32 or wider."""

    keys: Tensor
    """`[B, H, R, K]`, 0 in places that no token has yet."""
    written: Tensor
    """What stands at each key now, `[B, H, R, F]`, 0 in those places."""
    first: Tensor
    """The initial `W_2`, decayed, `[B, H, F, K]`."""
    second: Tensor
    """`W_1`, `[B, H, V, F]`."""
    recent_values: Tensor
    """Values of the last c - 1 tokens, the last one's last, `[B, H, c - 1, V]`."""
    position: Tensor
    """Tokens read, `[B]`, int64: those that pairs may reach."""
    length: Tensor
    """Places taken, `[B]`, int64: by the tokens read, and by those that stand before the first of them."""


def initial_state(weights: Sequence[Tensor], batch: int, *, window: int) -> DeepExponentialState:
    """The state before the first token, from `W_2` `[H, F, K]` and `W_1` `[H, V, F]`, for a window of c."""
    # Expanded ones are not written in place, but for those of a single row.
    first, second = (w[None].clone() if batch == 1 else w.expand(batch, *w.shape) for w in weights)
    (heads, hidden, key_dim), value_dim = weights[0].shape, weights[1].shape[1]
    linear = exponential_memory.initial_state(batch, heads, key_dim, value_dim, window=window, like=first)
    written = first.new_zeros(batch, heads, 0, hidden)
    return DeepExponentialState(linear.keys, written, first, second, *linear[2:])


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

    Without gradients a single token may be written into the state's tensors in place, if it has room: go on from the
    state that is returned, and copy one from which two texts shall go on.

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
        grows: whether the new state has a place more per token. `False` keeps as many as there are, among which there
            must be one for each.
        backend: `"auto"`, `"triton"` (one token without gradients) or `"reference"`.

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
    problem = problem_of(query, value, state, {"objective": objective, "activation": activation})
    problem = problem._replace(sizes={**problem.sizes, "F": state.first.shape[2]})
    compute = select(OP, problem, backend)
    with as_given(query.device):
        inputs = (query, key, value, log_retention, step_size, state, lengths, grows)
        y, state = compute(*inputs, scale, objective, activation, max_gradient_norm)
    return cast(y, query.dtype), state


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
        hidden = q @ first.mT + kernel(q, keys, scale) @ written
        return answer(q, hidden, second, ACTIVATION[activation]).movedim(1, 2)


def answer(x: Tensor, hidden: Tensor, second: Tensor, activation: Activation) -> Tensor:
    """`M(x)`, `[B, H, X, V]`, from `x` `[B, H, X, K]` and `W_2 phi(x)` `[B, H, X, F]`."""
    return x[..., : second.shape[2]] + activation.value(hidden) @ second.mT


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
) -> dict[str, Any]:
    """Random arguments of `deep_exponential_memory` for tests and benchmarks."""
    sizes = (batch, tokens, heads, key_dim, value_dim, window)
    args = exponential_memory.make_inputs(*sizes, dtype=dtype, seed=seed)
    del args["normalizer"]
    generator = torch.Generator().manual_seed(seed + 1)
    weights = [
        torch.randn(heads, *shape, generator=generator, dtype=torch.float64).to(dtype) / shape[1] ** 0.5
        for shape in ((hidden, key_dim), (value_dim, hidden))
    ]
    step = 0.3 * args["step_size"]
    return {**args, "step_size": step, "state": initial_state(weights, batch, window=window)}
