"""Gated linear attention: a matrix per head that decays and takes up outer products.

    S_t = retention_t S_{t-1} + sum_j k^j_t (v^j_t)^T,    y_t = S_t^T q_t,    S in R^{K x V}

with J streams of keys and values. RetNet (arXiv 2307.08621) is one stream and a fixed retention; so is SWLA (arXiv
2505.23735, Eq 20), whose c writes of a pair `modeling.mixers.matrix_memory` puts into one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels import registry
from memzoo.kernels.registry import Backend, Op, Problem, as_given, cast, caster, chosen, select, triton_refuses

OP = Op(
    name="linear_attention",
    backends=(
        Backend("triton", "memzoo.kernels.linear_attention.triton:linear_attention", triton_refuses),
        Backend("chunked", "memzoo.kernels.linear_attention.chunked:linear_attention"),
        Backend("reference", "memzoo.kernels.linear_attention.reference:linear_attention"),
    ),
)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    *,
    lengths: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Write T more tokens into the memory and read after each.

    Args:
        query: `[B, T, H, K]`, with any scale already in it.
        key: `[B, T, J, H, K]`.
        value: `[B, T, J, H, V]`, with any strength already in it.
        log_retention: log of the keep factor, `[B, T, H]`, in `[-inf, 0]`; `None` keeps everything.
        state: `S` before the first token, `[B, H, K, V]`, float32 or float64.
        lengths: real tokens per row `[B]`, int64, for right-padded input; all `T` when `None`. Outputs beyond a row's
            length are unspecified.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        `y` `[B, T, H, V]` in the dtype of `query`, and the new state. Inputs are computed in the state's dtype
        (by Triton, matrix products in that of the values). They have first derivatives only.

    Raises:
        ValueError: shapes that do not fit.

    Cost, per token and head, in chunks of C: about `2 K V + C J (K + V)` multiply-adds; the backward keeps the inputs
    and a state per some chunks.

    Example:
        >>> q, k, v = torch.randn(2, 50, 4, 8), torch.randn(2, 50, 1, 4, 8), torch.randn(2, 50, 1, 4, 16)
        >>> y, state = linear_attention(q, k, v, -torch.rand(2, 50, 4), torch.zeros(2, 4, 8, 16))
    """
    kind = (
        "linear_attention",
        query.shape,
        key.shape,
        value.shape,
        None if log_retention is None else log_retention.shape,
        state.shape,
        query.dtype,
        state.dtype,
        query.device.type,
        backend,
    )
    compute = chosen(kind, _choose, query, key, value, log_retention, state, backend)
    given = caster(compute, state.dtype)
    if lengths is not None:  # a token beyond a row's length writes nothing and keeps all
        real = torch.arange(query.shape[1], device=query.device) < lengths[:, None]
        value = torch.where(real[:, :, None, None, None], value, 0)
        if log_retention is not None:
            log_retention = torch.where(real[:, :, None], log_retention, 0)
    with as_given(query.device):
        y, state = compute(given(query), given(key), given(value), given(log_retention), state)
    return cast(y, query.dtype), state


def _choose(
    query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None, state: Tensor, backend: str
) -> Callable[..., Any]:
    """The backend, after a check of the shapes."""
    expect = partial(registry.expect, OP)
    expect(query.ndim == 4 and query.shape[1] > 0, "query", "[B, T, H, K] with T >= 1", query.shape)
    batch, tokens, heads, width = query.shape
    fits = key.ndim == 5 and key.shape[2] > 0 and key.shape == (batch, tokens, key.shape[2], heads, width)
    expect(fits, "key", "[B, T, J, H, K] like the query", key.shape)
    expect(value.ndim == 5 and value.shape[:4] == key.shape[:4], "value", "[B, T, J, H, V] like the key", value.shape)
    if log_retention is not None:
        expect(log_retention.shape == query.shape[:3], "log_retention", query.shape[:3], log_retention.shape)
    expect(state.dtype in (torch.float32, torch.float64), "dtype of the state", "float32 or float64", state.dtype)
    expected = (batch, heads, width, value.shape[-1])
    expect(state.shape == expected, "state", expected, state.shape)
    sizes = {"B": batch, "T": tokens, "H": heads, "K": width, "V": value.shape[-1], "J": key.shape[2]}
    return select(OP, Problem(query.device.type, str(query.dtype), sizes, {"state": str(state.dtype)}), backend)


def make_inputs(
    batch: int = 2,
    tokens: int = 13,
    heads: int = 3,
    key_dim: int = 8,
    value_dim: int = 6,
    streams: int = 1,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random arguments for tests and benchmarks, with lively gates and a lively state."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "query": draw(batch, tokens, heads, key_dim) / key_dim**0.5,
        "key": draw(batch, tokens, streams, heads, key_dim) / key_dim**0.5,
        "value": draw(batch, tokens, streams, heads, value_dim),
        "log_retention": torch.nn.functional.logsigmoid(draw(batch, tokens, heads) + 2),
        "state": draw(batch, heads, key_dim, value_dim),
    }
