"""Causal depthwise convolution over a few tokens, with its last inputs carried as state.

    y[t, d] = act(sum_{j=0}^{W-1} weight[d, j] x[t - W + 1 + j, d])

Source: the short convolution of Titans (arXiv 2501.00663, section 4.4); width 4 as in ATLAS (arXiv 2505.23735, App. E).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.registry import Backend, Op, Problem, select, triton_refuses

OP = Op(
    name="short_conv",
    backends=(
        Backend("triton", "memzoo.kernels.short_conv.triton:short_conv", triton_refuses),
        Backend("chunked", "memzoo.kernels.short_conv.chunked:short_conv"),
        Backend("reference", "memzoo.kernels.short_conv.reference:short_conv"),
    ),
)
ACTIVATION: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda x: x, "silu": F.silu}


def short_conv(
    x: Tensor,
    weight: Tensor,
    tail: Tensor | None = None,
    *,
    activation: str | None = None,
    lengths: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own causal filter.

    Args:
        x: new tokens `[B, T, D]`, right-padded when `lengths` is given.
        weight: filters `[D, W]`; `weight[:, -1]` multiplies the current token.
        tail: the `W - 1` tokens before `x`, `[B, W - 1, D]`; zeros when `None`.
        activation: `"silu"`, or `None` for the identity.
        lengths: real tokens per row `[B]`, int64; all `T` when `None`. Outputs beyond a row's length are unspecified.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        `y` `[B, T, D]` and the new tail `[B, W - 1, D]`: each row's last `W - 1` real tokens (older ones from `tail`).

    Raises:
        ValueError: shapes that do not fit, an unknown activation.

    Cost: `2 W` operations per token and channel.

    Example:
        >>> y, tail = short_conv(torch.randn(2, 5, 8), torch.randn(8, 4))
        >>> y1, tail = short_conv(torch.randn(2, 1, 8), torch.randn(8, 4), tail)
    """
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"short_conv: expected x [B, T, D] and weight [D, W], got {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    if activation not in ACTIVATION:
        raise ValueError(f"short_conv: activation: expected one of {[*ACTIVATION]}, got {activation!r}.")
    before = weight.shape[1] - 1
    if tail is None:
        tail = x.new_zeros(x.shape[0], before, x.shape[-1])
    elif tail.shape != (x.shape[0], before, x.shape[-1]):
        raise ValueError(
            f"short_conv: expected tail {(x.shape[0], before, x.shape[-1])} = [B, W - 1, D], got {tuple(tail.shape)}."
        )
    problem = Problem(
        x.device.type, str(x.dtype), {"B": x.shape[0], "T": x.shape[1], "D": x.shape[2], "W": weight.shape[1]}
    )
    return select(OP, problem, backend)(x, weight, tail, lengths, activation)


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
