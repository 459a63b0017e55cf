"""Causal depthwise convolution over a few tokens, with its last inputs carried as state.

    y[t, d] = act(sum_{j=0}^{W-1} weight[d, j] x[t - W + 1 + j, d])

and of the channels that are queries and keys, each head's vector scaled to unit length, `y / max(|y|, 1e-6)`.

Source: the short convolution of Titans (arXiv 2501.00663, section 4.4); width 4 as in ATLAS (arXiv 2505.23735, App. E).
Deviations: the papers name the two steps apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.registry import Backend, Op, Problem, chosen, select, triton_refuses

MAX_DIM = 2048
"""Widest vector that the Triton backend holds in registers."""


def _triton_refuses(problem: Problem) -> str | None:
    if problem.sizes.get("K", 0) > MAX_DIM:
        return f"holds vectors of up to {MAX_DIM} on chip, got {problem.sizes['K']}"
    return triton_refuses(problem)


OP = Op(
    name="short_conv",
    backends=(
        Backend("triton", "memzoo.kernels.short_conv.triton:short_conv", _triton_refuses),
        Backend("chunked", "memzoo.kernels.short_conv.chunked:short_conv"),
        Backend("reference", "memzoo.kernels.short_conv.reference:short_conv"),
    ),
)
ACTIVATION: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda x: x, "silu": F.silu}


class Vectors(NamedTuple):
    """The first `per_head * heads * dim` channels of a convolution: for each head `per_head` vectors that are scaled to
    unit length, `y / max(|y|, 1e-6)`, or with `eps` `y / sqrt(|y|^2 + eps)`."""

    heads: int
    dim: int
    per_head: int = 2
    eps: float = 0.0

    @property
    def channels(self) -> int:
        return self.per_head * self.heads * self.dim


def short_conv(
    x: Tensor,
    weight: Tensor,
    tail: Tensor | None = None,
    *,
    activation: str | None = None,
    vectors: Vectors | None = None,
    lengths: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Any, Tensor]:
    """Convolve each channel with its own causal filter.

    Args:
        x: new tokens `[B, T, D]`, right-padded when `lengths` is given.
        weight: filters `[D, W]`; `weight[:, -1]` multiplies the current token.
        tail: the `W - 1` tokens before `x`, `[B, W - 1, D]`; zeros when `None`.
        activation: `"silu"`, or `None` for the identity.
        vectors: the first channels as unit vectors, N for each of H heads; `None` for none.
        lengths: real tokens per row `[B]`, int64; all `T` when `None`. Outputs beyond a row's length are unspecified.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        `y` `[B, T, D]` and the new tail `[B, W - 1, D]`: each row's last `W - 1` real tokens (older ones from `tail`).
        With `vectors`, `y` is a pair: these, `[B, T, N, H, K]` in float32 or wider, and the other channels,
        `[B, T, D - N H K]`.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, more channels in vectors than there are.

    Cost: `2 W` operations per token and channel.

    Example:
        >>> y, tail = short_conv(torch.randn(2, 5, 8), torch.randn(8, 4))
        >>> y1, tail = short_conv(torch.randn(2, 1, 8), torch.randn(8, 4), tail)
        >>> (qk, v), tail = short_conv(torch.randn(2, 5, 12), torch.randn(12, 4), vectors=Vectors(heads=2, dim=2))
    """
    if tail is None:
        tail = x.new_zeros(x.shape[0], weight.shape[-1] - 1, x.shape[-1])
    kind = (
        *("short_conv", x.shape, weight.shape, tail.shape, x.dtype, x.device.type),
        *(activation, vectors, backend),
    )
    compute = chosen(kind, _choose, x, weight, tail, activation, vectors, backend)
    return compute(x, weight, tail, lengths, activation, vectors)


def _choose(
    x: Tensor, weight: Tensor, tail: Tensor, activation: str | None, vectors: Vectors | None, backend: str
) -> Callable[..., Any]:
    """The backend, after a check of shapes and options."""
    shape, filters = x.shape, weight.shape
    if len(shape) != 3 or len(filters) != 2 or filters[0] != shape[2]:
        raise ValueError(
            f"short_conv: expected x [B, T, D] and weight [D, W], got {tuple(shape)} and {tuple(filters)}."
        )
    if activation not in ACTIVATION:
        raise ValueError(f"short_conv: activation: expected one of {[*ACTIVATION]}, got {activation!r}.")
    if vectors is not None and not 0 < vectors.channels <= shape[2]:
        raise ValueError(f"short_conv: vectors: expected 1 to {shape[2]} = D channels, got {vectors}.")
    expected = shape[0], filters[1] - 1, shape[2]
    if tail.shape != expected:
        raise ValueError(f"short_conv: expected tail {expected} = [B, W - 1, D], got {tuple(tail.shape)}.")
    sizes = {"B": shape[0], "T": shape[1], "D": shape[2], "W": filters[1]}
    if vectors is not None:
        sizes["K"] = vectors.dim
    return select(OP, Problem(x.device.type, str(x.dtype), sizes), backend)


def new_tail(x: Tensor, tail: Tensor, lengths: Tensor | None) -> Tensor:
    """The `W - 1` tokens that end at each row's last real one, of `tail` `[B, W-1, D]` and new tokens `[B, T, D]`."""
    before, tokens = tail.shape[1], x.shape[1]
    if lengths is None:  # copies: a view would keep all of `x` alive in a cache
        return x[:, tokens - before :].clone() if tokens >= before else torch.cat([tail[:, tokens:], x], dim=1)
    index = lengths[:, None] + torch.arange(before, device=x.device)
    return torch.cat([tail, x], dim=1).gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def make_inputs(
    batch: int = 2,
    tokens: int = 7,
    channels: int = 6,
    width: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random inputs for tests and benchmarks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    return {
        "x": draw(batch, tokens, channels),
        "weight": draw(channels, width),
        "tail": draw(batch, width - 1, channels),
    }
