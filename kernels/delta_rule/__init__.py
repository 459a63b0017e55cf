"""The delta rule: a matrix per head that erases what it holds at a key before it writes there.

    S_t = retention_t S_{t-1} - strength_t k_t (p_t^T S') + strength_t k_t v_t^T,    y_t = S_t^T q_t,    S in R^{K x V}

with an erase key `p` and `S' = S_{t-1}`, or `S' = retention_t S_{t-1}` when the erase comes after the decay.

- DeltaNet (arXiv 2406.06484): retention 1, `p = k`.
- Gated DeltaNet (arXiv 2412.06464): `p = k`, erase after the decay.
- Comba (arXiv 2506.02475, Eq 5): `p = b k`, erase before the decay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels import registry
from memzoo.kernels.registry import Backend, Op, Problem, as_given, cast, caster, chosen, select, triton_refuses


def _triton_refuses(problem: Problem) -> str | None:
    width = problem.sizes["K"]
    return triton_refuses(problem) or (None if width <= 256 else f"holds key widths up to 256 on chip, got {width}")


OP = Op(
    name="delta_rule",
    backends=(
        Backend("triton", "memzoo.kernels.delta_rule.triton:delta_rule", _triton_refuses),
        Backend("chunked", "memzoo.kernels.delta_rule.chunked:delta_rule"),
        Backend("reference", "memzoo.kernels.delta_rule.reference:delta_rule"),
    ),
)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    *,
    erase_key: Tensor | None = None,
    erase_after_decay: bool = False,
    lengths: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Write T more tokens into the memory and read after each.

    Args:
        query: `[B, T, H, K]`, with any scale already in it.
        key: `[B, T, H, K]`; the rule is stable for `strength |k . p|` of at most 2.
        value: `[B, T, H, V]`.
        strength: `[B, T, H]`.
        log_retention: log of the keep factor, `[B, T, H]`, in `[-inf, 0]`; `None` keeps everything.
        state: `S` before the first token, `[B, H, K, V]`, float32 or float64.
        erase_key: `p`, `[B, T, H, K]`; the key when `None`.
        erase_after_decay: whether the erase reads the state after its decay.
        lengths: real tokens per row `[B]`, int64, for right-padded input; all `T` when `None`. Outputs beyond a row's
            length are unspecified.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        `y` `[B, T, H, V]` in the dtype of `query`, and the new state. Inputs are computed in the state's dtype
        (by Triton, matrix products in that of the values). They have first derivatives only.

    Raises:
        ValueError: shapes that do not fit.

    Cost, per token and head, in chunks of C: about `3 K V + C (2 K + 2 V) + C^2 / 3` multiply-adds; the backward keeps
    the inputs and a state per some chunks.

    Example:
        >>> q, k, v = torch.randn(3, 2, 50, 4, 8)
        >>> k = torch.nn.functional.normalize(k, dim=-1)
        >>> y, state = delta_rule(q, k, v, torch.rand(2, 50, 4), None, torch.zeros(2, 4, 8, 8))
    """
    kind = (
        "delta_rule",
        query.shape,
        key.shape,
        value.shape,
        strength.shape,
        None if log_retention is None else log_retention.shape,
        None if erase_key is None else erase_key.shape,
        state.shape,
        query.dtype,
        state.dtype,
        query.device.type,
        erase_after_decay,
        backend,
    )
    tensors = query, key, value, strength, log_retention, state, erase_key
    compute = chosen(kind, _choose, *tensors, erase_after_decay, backend)
    given = caster(compute, state.dtype)
    if lengths is not None:  # a token beyond a row's length writes nothing and keeps all
        real = (torch.arange(query.shape[1], device=query.device) < lengths[:, None])[..., None]
        strength = torch.where(real, strength, 0)
        if log_retention is not None:
            log_retention = torch.where(real, log_retention, 0)
    with as_given(query.device):
        y, state = compute(
            given(query),
            given(key),
            given(value),
            given(strength),
            given(log_retention),
            state,
            given(erase_key),
            erase_after_decay,
        )
    return cast(y, query.dtype), state


def _choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    erase_key: Tensor | None,
    erase_after_decay: bool,
    backend: str,
) -> Callable[..., Any]:
    """The backend, after a check of the shapes."""
    expect = partial(registry.expect, OP)
    expect(query.ndim == 4 and query.shape[1] > 0, "query", "[B, T, H, K] with T >= 1", query.shape)
    batch, tokens, heads, width = query.shape
    for name, x in (("key", key), ("erase_key", erase_key)):
        if x is not None:
            expect(x.shape == query.shape, name, query.shape, x.shape)
    expect(value.ndim == 4 and value.shape[:3] == query.shape[:3], "value", "[B, T, H, V] like the query", value.shape)
    for name, gate in (("strength", strength), ("log_retention", log_retention)):
        if gate is not None:
            expect(gate.shape == query.shape[:3], name, query.shape[:3], gate.shape)
    expect(state.dtype in (torch.float32, torch.float64), "dtype of the state", "float32 or float64", state.dtype)
    expected = (batch, heads, width, value.shape[-1])
    expect(state.shape == expected, "state", expected, state.shape)
    sizes = {"B": batch, "T": tokens, "H": heads, "K": width, "V": value.shape[-1]}
    options = {
        "erase_after_decay": erase_after_decay,
        "erase_key": erase_key is not None,
        "state": str(state.dtype),
    }
    return select(OP, Problem(query.device.type, str(query.dtype), sizes, options), backend)


def make_inputs(
    batch: int = 2,
    tokens: int = 13,
    heads: int = 3,
    key_dim: int = 8,
    value_dim: int = 6,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random arguments for tests and benchmarks: unit keys, lively gates and a lively state."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    key = torch.nn.functional.normalize(draw(batch, tokens, heads, key_dim), dim=-1)
    return {
        "query": draw(batch, tokens, heads, key_dim) / key_dim**0.5,
        "key": key,
        "value": draw(batch, tokens, heads, value_dim),
        "strength": torch.sigmoid(draw(batch, tokens, heads)),
        "log_retention": torch.nn.functional.logsigmoid(draw(batch, tokens, heads) + 2),
        "state": draw(batch, heads, key_dim, value_dim),
        "erase_key": 0.7 * key + 0.1 * draw(batch, tokens, heads, key_dim),
    }
