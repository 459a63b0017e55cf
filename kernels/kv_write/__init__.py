"""A token's keys and values into the places of a cache of fixed size, its queries and keys turned by its position.

    q_t = R_t q,   K[P + (n + i) mod S] = R_t k_i,   V[P + (n + i) mod S] = v_i  for i = 0..N-1,   n' = n + N

The first P places are those of tokens that every token sees; key n of a row, counted from 0, is in place n mod S of the
others, so that a token is written over one that has left a window of S. Where a segment starts anew behind S keys, n is
taken mod S first. `R_t` turns coordinates j and j + D/2 by an angle of the position (rotary embedding, arXiv
2104.09864, Eq 34).

Where the host knows how many keys the rows have, on a CPU, torch's own copies are fewer and no mask is needed: see
`memzoo.modeling.mixers.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.registry import Backend, Op, Problem, chosen, expect, select, triton_refuses

MAX_WIDTH = 1024


def _triton_refuses(problem: Problem) -> str | None:
    if problem.sizes["D"] > MAX_WIDTH:
        return f"holds a head of up to {MAX_WIDTH} coordinates on chip, got {problem.sizes['D']}"
    return triton_refuses(problem)


OP = Op(
    name="kv_write",
    backends=(
        Backend("triton", "memzoo.kernels.kv_write.triton:kv_write", _triton_refuses),
        Backend("chunked", "memzoo.kernels.kv_write.chunked:kv_write"),
        Backend("reference", "memzoo.kernels.kv_write.reference:kv_write"),
    ),
)


def kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    *,
    prefix: int = 0,
    restarts: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Write one token of each row, without gradients.

    Args:
        query: `[B, 1, H D]`, of any floating dtype.
        key: `[B, N, G D]`, at the token's one position; N at most S, of which it is a divisor with `restarts`.
        value: `[B, N, G D]`.
        rotary: cosines and sines of the angles, each `[B, 1, D]` or `[1, 1, D]`, the sines of the first half negative.
        keys: `[B, G, P + S, D]`, contiguous; changed in place.
        values: the same.
        length: own keys n of each row so far, `[B]`, int64.
        prefix: P.
        restarts: whether S keys end a segment, behind which n starts at 0 again.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        Turned queries `[B, H, 1, D]` in the dtype of `query`; the new lengths `[B]`; which of the keys there are,
        `[B, P + S]`, bool.

    Raises:
        ValueError: shapes that do not fit, keys or values that are not contiguous.

    Cost: a token's `H + 2 N G` heads read and written once; nothing of the cache is read.

    Example:
        >>> query, length, exists = kv_write(**make_inputs())  # of rows with 0, 4 and 13 keys, in 5 places
        >>> exists.sum(1) - 2, length  # beside the prefix: 1, 5 and 5; 1, 5 and 14
    """
    kind = (
        *("kv_write", query.shape, key.shape, value.shape, rotary[0].shape, rotary[1].shape, keys.shape, values.shape),
        *(length.shape, keys.stride(), values.stride(), query.dtype, keys.dtype, query.device.type, prefix, restarts),
        backend,
    )
    compute = chosen(kind, _choose, query, key, value, rotary, keys, values, length, prefix, restarts, backend)
    return compute(query, key, value, rotary, keys, values, length, prefix, restarts)


def _choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    prefix: int,
    restarts: bool,
    backend: str,
) -> Callable[..., Any]:
    """The backend, after a check of the shapes."""
    expect(OP, keys.ndim == 4 and keys.shape[2] > prefix >= 0, "keys", f"[B, G, {prefix} + S, D]", keys.shape)
    batch, groups, rows, width = keys.shape
    expect(OP, width % 2 == 0, "width of a head", "an even number", width)
    expect(OP, keys.is_contiguous() and values.is_contiguous(), "keys and values", "contiguous ones", "views")
    expect(OP, values.shape == keys.shape, "values", keys.shape, values.shape)
    expected = (batch, *key.shape[1:2], groups * width)
    for name, x in (("key", key), ("value", value)):
        expect(OP, x.shape == expected, name, expected, x.shape)
    each, places = expected[1], rows - prefix
    expect(OP, 0 < each <= places, "keys of a token", f"from 1 to {places}", each)
    expect(OP, not restarts or places % each == 0, "keys of a segment", f"a multiple of {each}", places)
    heads = query.shape[-1] // width
    expect(OP, query.shape == (batch, 1, max(1, heads) * width), "query", f"[{batch}, 1, H * {width}]", query.shape)
    for name, x in (("cosines", rotary[0]), ("sines", rotary[1])):
        fits = x.shape == (batch, 1, width) or x.shape == (1, 1, width)
        expect(OP, fits, name, f"[{batch} or 1, 1, {width}]", x.shape)
    expect(OP, rotary[1].shape == rotary[0].shape, "sines", rotary[0].shape, rotary[1].shape)
    expect(OP, length.shape == (batch,), "length", (batch,), length.shape)
    problem = Problem(query.device.type, str(query.dtype), {"H": heads, "G": groups, "D": width})
    return select(OP, problem, backend)


def make_inputs(
    batch: int = 3,
    heads: int = 4,
    groups: int = 2,
    width: int = 6,
    places: int = 5,
    prefix: int = 2,
    each: int = 1,
    lengths: tuple[int, ...] = (0, 4, 13),
    restarts: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Random inputs for tests and benchmarks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    angle = draw(batch, 1, width // 2).double()
    rotary = torch.cat([angle, angle], -1).cos().to(dtype), torch.cat([-angle, angle], -1).sin().to(dtype)
    return {
        "query": draw(batch, 1, heads * width),
        "key": draw(batch, each, groups * width),
        "value": draw(batch, each, groups * width),
        "rotary": rotary,
        "keys": draw(batch, groups, prefix + places, width),
        "values": draw(batch, groups, prefix + places, width),
        "length": torch.tensor(lengths)[torch.arange(batch) % len(lengths)],
        "prefix": prefix,
        "restarts": restarts,
    }
