"""A matrix memory on exponential features: attention whose values are written, decayed and corrected like a memory's.

With `phi(x) . phi(y) = exp(s (x . y - 1))`, features of unbounded degree (ATLAS, arXiv 2505.23735, Eq 22-23),

    M_t = retention_t M_{t-1} - step_size_t sum_{j<c} window_gate_{t,j} e_{t,j} phi(k_{t-j})^T,    y_t = M_t phi(q_t)
    e_{t,j} = -v_{t-j}                            objective "dot": DeepTransformer (Eq 25-26), SWDT for c > 1
    e_{t,j} = M_{t-1} phi(k_{t-j}) - v_{t-j}      objective "l2": Dot (Eq 27-31)

`M_t` has no finite matrix; it is kept as `M_t = sum_i written_i(t) phi(k_i)^T` over all tokens i read so far, so the
state grows with the context as attention's does. There is no chunk: gradients are taken at `M_{t-1}`, exactly.

Deviations: the printed closed forms give the value term a minus, the derivation a plus; the equations print no
retention, the paper's Table 1 does; the division by `exp(s)` makes features of unit vectors as long as 1, which an l2
step size of at most 1 (over c) needs to contract.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memzoo.kernels import registry
from memzoo.kernels.registry import Backend, Op, Problem, as_given, cast, select

MAX_WIDTH, MAX_WINDOW = 256, 16


def triton_refuses_all_but_a_token(problem: Problem) -> str | None:
    """Why the kernels of this memory or of the deep one do not compute the problem."""
    sizes = problem.sizes
    if sizes["T"] > 1:
        return f"computes one token, got {sizes['T']}"
    if problem.options["gradients"]:
        return "computes no gradients, which are enabled"
    if max(sizes["K"], sizes["V"]) > MAX_WIDTH or sizes["W"] > MAX_WINDOW:
        got = f"{sizes['K']}, {sizes['V']} and {sizes['W']}"
        return f"computes keys and values of up to {MAX_WIDTH} and windows of up to {MAX_WINDOW}, got {got}"
    return registry.triton_refuses(problem)


OP = Op(
    name="exponential_memory",
    backends=(
        Backend(
            "triton", "memzoo.kernels.exponential_memory.triton:exponential_memory", triton_refuses_all_but_a_token
        ),
        Backend("chunked", "memzoo.kernels.exponential_memory.chunked:exponential_memory"),
        Backend("reference", "memzoo.kernels.exponential_memory.reference:exponential_memory"),
    ),
)
OBJECTIVES = ("l2", "dot")


class ExponentialState(NamedTuple):
    """The memory after some tokens; token n of a row, counted from its first, in place n. Float32 or wider."""

    keys: Tensor
    """`[B, H, R, K]`, 0 in places that no token has yet."""
    written: Tensor
    """What stands at each key now, `[B, H, R, V]`, with a normaliser `[B, H, R, V + 1]`, 0 in those places."""
    recent_values: Tensor
    """Values of the last c - 1 tokens, the last one's last, `[B, H, c - 1, V]`."""
    position: Tensor
    """Tokens read, `[B]`, int64: those that pairs may reach."""
    length: Tensor
    """Places taken, `[B]`, int64: by the tokens read, and by those that stand before the first of them."""


def initial_state(
    batch: int, heads: int, key_dim: int, value_dim: int, *, window: int, like: Tensor, normalizer: bool = False
) -> ExponentialState:
    """The state before the first token, in the dtype and on the device of `like`, for a window of c."""
    none = torch.zeros(batch, dtype=torch.int64, device=like.device)
    return ExponentialState(
        like.new_zeros(batch, heads, 0, key_dim),
        like.new_zeros(batch, heads, 0, value_dim + normalizer),
        like.new_zeros(batch, heads, window - 1, value_dim),
        none,
        none.clone(),
    )


def exponential_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    step_size: Tensor,
    state: ExponentialState,
    *,
    scale: float,
    objective: str = "dot",
    normalizer: bool = False,
    lengths: Tensor | None = None,
    grows: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, ExponentialState]:
    """Write T more tokens into the memory and read after each.

    Without gradients a single token may be written into the state's tensors in place, if it has room: go on from the
    state that is returned, and copy one from which two texts shall go on.

    Args:
        query, key: `[B, T, H, K]`, of unit length.
        value: `[B, T, H, V]`.
        log_retention: log of the keep factor, `[B, T, H]`, in `[-inf, 0]`; `None` keeps everything.
        step_size: step size times window gate for the token j before, `[B, T, H, c]`, at least 0.
        state: from `initial_state` or from an earlier call.
        scale: s.
        objective: `"dot"` or `"l2"`.
        normalizer: whether the values get a last coordinate of 1 and read-outs are divided by their last, the
            softmax's denominator, where that is above 0.
        lengths: real tokens per row `[B]`, int64, for right-padded input; all `T` when `None`. Outputs beyond a row's
            length are unspecified.
        grows: whether the new state has a place more per token. `False` keeps as many as there are, among which there
            must be one for each.
        backend: `"auto"`, `"triton"` (one token without gradients), `"chunked"` or `"reference"`.

    Returns:
        `y` `[B, T, H, V]` in the dtype of `query`, and the new state. Inputs are computed in the state's dtype.

    Raises:
        ValueError: shapes or options that do not fit.

    Cost, per token and head with R tokens before: about `R (K + V)` multiply-adds, as attention; l2 as much again, and
    some `64 c^2 (K + V)`, for its errors. The state holds `R (K + V)` floats.

    Example:
        >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 9, 4, 8), dim=-1)
        >>> state = initial_state(1, 4, 8, 8, window=1, like=q)
        >>> y, state = exponential_memory(q, k, torch.randn(1, 9, 4, 8), None, torch.ones(1, 9, 4, 1), state, scale=3.0)
    """
    expect = partial(registry.expect, OP)
    expect(query.ndim == 4 and query.shape[1] > 0, "query", "[B, T, H, K] with T >= 1", query.shape)
    expect(key.shape == query.shape, "key", query.shape, key.shape)
    expect(value.shape[:3] == query.shape[:3], "value", (*query.shape[:3], "V"), value.shape)
    window = state.recent_values.shape[2] + 1
    expect(step_size.shape == (*query.shape[:3], window), "step_size", (*query.shape[:3], window), step_size.shape)
    if log_retention is not None:
        expect(log_retention.shape == query.shape[:3], "log_retention", query.shape[:3], log_retention.shape)
    batch, _, heads, width = query.shape
    fits = (*state.keys.shape[:2], state.keys.shape[3]) == (batch, heads, width)
    expect(fits, "keys of the state", (batch, heads, "R", width), state.keys.shape)
    held = state.written.shape[3] - normalizer
    expect(held == value.shape[3], "value width of the state", value.shape[3], held)
    expect(objective in OBJECTIVES, "objective", f"one of {OBJECTIVES}", objective)
    expect(scale > 0, "scale", "above 0", scale)
    problem = problem_of(query, value, state, {"objective": objective})
    compute = select(OP, problem, backend)
    with as_given(query.device):
        inputs = (query, key, value, log_retention, step_size, state, lengths, grows)
        y, state = compute(*inputs, scale, objective, normalizer)
    return cast(y, query.dtype), state


def problem_of(query: Tensor, value: Tensor, state: Any, options: dict[str, Any]) -> Problem:
    """What a backend of this memory or of the deep one is asked."""
    sizes = {"T": query.shape[1], "K": query.shape[3], "V": value.shape[3], "W": state.recent_values.shape[2] + 1}
    asked = {**options, "state": str(state.keys.dtype), "gradients": torch.is_grad_enabled()}
    return Problem(query.device.type, str(query.dtype), sizes, asked)


def retrieve(query: Tensor, keys: Tensor, written: Tensor, *, scale: float, normalizer: bool = False) -> Tensor:
    """`M phi(q)` of a memory as its state holds it, for all queries `[B, T, H, K]`: `[B, T, H, V]` in the state's
    dtype."""
    with as_given(query.device):
        y = (kernel(cast(query, keys.dtype).movedim(2, 1), keys, scale) @ written).movedim(1, 2)
        return normalized(y, normalizer)


def normalized(y: Tensor, normalizer: bool) -> Tensor:
    """Read-outs over their last coordinate, if that is the normaliser's; it is 0 only where nothing is written."""
    if not normalizer:
        return y
    total = y[..., -1:]
    return y[..., :-1] / torch.where(total > 0, total, 1)


def kernel(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """`phi(x) . phi(y)` of all pairs, `[..., X, K]` and `[..., Y, K]` to `[..., X, Y]`."""
    return torch.exp(scale * (x @ y.mT - 1))


def make_inputs(
    batch: int = 2,
    tokens: int = 13,
    heads: int = 3,
    key_dim: int = 6,
    value_dim: int = 5,
    window: int = 1,
    normalizer: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Random arguments of `exponential_memory` for tests and benchmarks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    query, key = torch.nn.functional.normalize(draw(2, batch, tokens, heads, key_dim), dim=-1)
    return {
        "query": query,
        "key": key,
        "value": draw(batch, tokens, heads, value_dim),
        "log_retention": torch.nn.functional.logsigmoid(draw(batch, tokens, heads) + 2),
        "step_size": torch.sigmoid(draw(batch, tokens, heads, window)) / window,
        "state": initial_state(batch, heads, key_dim, value_dim, window=window, like=query, normalizer=normalizer),
        "scale": 2.0,
        "normalizer": normalizer,
    }
