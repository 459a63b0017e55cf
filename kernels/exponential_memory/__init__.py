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
from typing import NamedTuple

import torch
from torch import Tensor

from memzoo.kernels import registry
from memzoo.kernels.registry import Backend, Op, Problem, as_given, cast, select

OP = Op(
    name="exponential_memory",
    backends=(
        Backend("chunked", "memzoo.kernels.exponential_memory.chunked:exponential_memory"),
        Backend("reference", "memzoo.kernels.exponential_memory.reference:exponential_memory"),
    ),
)
OBJECTIVES = ("l2", "dot")


class ExponentialState(NamedTuple):
    """The memory after some tokens, right-aligned: the last row of each is the last token's, those before the first
    token's are 0. Float32 or wider."""

    keys: Tensor
    """`[B, H, R, K]`, at least c - 1 of them."""
    written: Tensor
    """What stands at each key now, `[B, H, R, V]`."""
    recent_values: Tensor
    """Values of the last c - 1 tokens, `[B, H, c - 1, V]`."""
    position: Tensor
    """Tokens read, `[B]`, int64."""


def initial_state(
    batch: int, heads: int, key_dim: int, value_dim: int, *, window: int, like: Tensor
) -> ExponentialState:
    """The state before the first token, in the dtype and on the device of `like`, for a window of c."""
    return ExponentialState(
        like.new_zeros(batch, heads, window - 1, key_dim),
        like.new_zeros(batch, heads, window - 1, value_dim),
        like.new_zeros(batch, heads, window - 1, value_dim),
        torch.zeros(batch, dtype=torch.int64, device=like.device),
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
    lengths: Tensor | None = None,
    grows: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, ExponentialState]:
    """Write T more tokens into the memory and read after each.

    Args:
        query, key: `[B, T, H, K]`, of unit length.
        value: `[B, T, H, V]`; a last coordinate of 1 makes the last of `y` the softmax's denominator.
        log_retention: log of the keep factor, `[B, T, H]`, in `[-inf, 0]`; `None` keeps everything.
        step_size: step size times window gate for the token j before, `[B, T, H, c]`, at least 0.
        state: from `initial_state` or from an earlier call.
        scale: s.
        objective: `"dot"` or `"l2"`.
        lengths: real tokens per row `[B]`, int64, for right-padded input; all `T` when `None`. Outputs beyond a row's
            length are unspecified.
        grows: whether the new state has a key more per token. `False` keeps as many as there are, the last ones: those
            in front must be zeros, which stand for no token.
        backend: `"auto"`, `"chunked"` or `"reference"`.

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
    expect(state.written.shape[3] == value.shape[3], "value width of the state", value.shape[3], state.written.shape[3])
    expect(objective in OBJECTIVES, "objective", f"one of {OBJECTIVES}", objective)
    expect(scale > 0, "scale", "above 0", scale)
    problem = Problem(query.device.type, str(query.dtype), {"T": query.shape[1], "W": window}, {"objective": objective})
    dtype = state.keys.dtype
    with as_given(query.device):
        log_retention, step_size = written_steps(log_retention, step_size, state.position, lengths)
        q, k, v, gate, step = (cast(x, dtype).movedim(2, 1) for x in (query, key, value, log_retention, step_size))
        y, keys, written = select(OP, problem, backend)(q, k, v, gate, step, state, scale, objective)
        rows = (keys if grows else state.keys).shape[2]
        state = ExponentialState(
            aligned(keys, lengths, query.shape[1], rows),
            aligned(written, lengths, query.shape[1], rows),
            aligned(torch.cat([state.recent_values, v], dim=2), lengths, query.shape[1], window - 1),
            state.position + (query.shape[1] if lengths is None else lengths),
        )
    return cast(y.movedim(1, 2), query.dtype), state


def retrieve(query: Tensor, keys: Tensor, written: Tensor, *, scale: float) -> Tensor:
    """`M phi(q)` of a memory as its state holds it, for all queries `[B, T, H, K]`: `[B, T, H, V]` in the state's
    dtype."""
    with as_given(query.device):
        return (kernel(cast(query, keys.dtype).movedim(2, 1), keys, scale) @ written).movedim(1, 2)


def kernel(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """`phi(x) . phi(y)` of all pairs, `[..., X, K]` and `[..., Y, K]` to `[..., X, Y]`."""
    return torch.exp(scale * (x @ y.mT - 1))


def written_steps(
    log_retention: Tensor | None, step_size: Tensor, position: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gates, `[B, T, H]` and `[B, T, H, c]`, with which padding changes nothing and a token before the first has no
    pair."""
    tokens, window = step_size.shape[1], step_size.shape[3]
    place = torch.arange(tokens, device=step_size.device)
    if log_retention is None:
        log_retention = torch.zeros_like(step_size[..., 0])
    if lengths is not None:
        real = place < lengths[:, None]  # [B, T]
        log_retention = torch.where(real[..., None], log_retention, 0)
        step_size = torch.where(real[..., None, None], step_size, 0)
    exists = torch.arange(window, device=place.device) <= (position[:, None] + place)[..., None]  # [B, T, c]
    return log_retention, torch.where(exists[:, :, None], step_size, 0)


def aligned(x: Tensor, lengths: Tensor | None, tokens: int, rows: int) -> Tensor:
    """The last `rows` of `x` `[B, H, R + T, D]` up to each row's last real token, 0 where there are none."""
    if lengths is None:
        return x[:, :, x.shape[2] - rows :].clone() if rows < x.shape[2] else x
    padded = torch.nn.functional.pad(x, (0, 0, tokens, 0))
    index = (lengths + x.shape[2] - rows)[:, None] + torch.arange(rows, device=x.device)
    return padded.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def make_inputs(
    batch: int = 2,
    tokens: int = 13,
    heads: int = 3,
    key_dim: int = 6,
    value_dim: int = 5,
    window: int = 1,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, object]:
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
        "state": initial_state(batch, heads, key_dim, value_dim, window=window, like=query),
        "scale": 2.0,
    }
