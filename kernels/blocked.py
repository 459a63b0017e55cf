"""A map over tokens, computed some tokens at a time, whose backward recomputes it.

On a CPU an elementwise pass over a whole sequence waits for memory; a block of tokens that fits the cache does not.
Nothing but the inputs is kept for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 17
"""Elements of `x` in a block: half a MiB in float32."""
MIN_TOKENS = 16


def blocked(f: Callable[..., Tensor], x: Tensor, *params: Tensor, before: Tensor | None = None) -> Tensor:
    """`f([before, x], *params)`, for an `f` whose output at a token depends on it and the H tokens before it.

    Args:
        f: `[B, H + L, ...]` and `params` to `[B, L, ...]`, for any L; differentiable.
        x: `[B, T, ...]`.
        params: what else `f` takes, with gradients.
        before: the H tokens before `x`, `[B, H, ...]`; `None` for H = 0.

    Returns:
        `[B, T, ...]`. It has first derivatives only where there is more than one block.
    """
    halo = 0 if before is None else before.shape[1]
    size = max(MIN_TOKENS, halo, BLOCK_ELEMENTS // max(1, x[:, :1].numel()))
    if x.shape[1] <= size or x.device.type != "cpu" or torch.compiler.is_compiling():
        return f(x if before is None or halo == 0 else torch.cat([before, x], dim=1), *params)
    if before is None:
        before = x[:, :0]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, before, *params)):
        return _Blocked.apply(f, size, x, before, *params)
    return _forward(f, size, x, before, params)


def _window(x: Tensor, before: Tensor, start: int, size: int) -> Tensor:
    halo = before.shape[1]
    if halo == 0 or start >= halo:
        return x[:, start - halo : start + size]
    return torch.cat([before[:, start:], x[:, : start + size]], dim=1)


def _forward(f: Callable[..., Tensor], size: int, x: Tensor, before: Tensor, params: tuple[Tensor, ...]) -> Tensor:
    first = f(_window(x, before, 0, size), *params)
    y = first.new_empty(x.shape[0], x.shape[1], *first.shape[2:])
    y[:, :size] = first
    for start in range(size, x.shape[1], size):
        y[:, start : start + size] = f(_window(x, before, start, size), *params)
    return y


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Callable[..., Tensor], size: int, x: Tensor, before: Tensor, *params: Tensor) -> Tensor:
        ctx.f, ctx.size = f, size
        ctx.save_for_backward(x, before, *params)
        return _forward(f, size, x, before, params)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        x, before, *params = ctx.saved_tensors
        size, halo = ctx.size, before.shape[1]
        d_x, d_before = torch.empty_like(x), torch.zeros_like(before)
        d_params = [torch.zeros_like(p) for p in params]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        for start in range(0, x.shape[1], size):
            window = _window(x, before, start, size).detach().requires_grad_()
            leaves = [p.detach().requires_grad_(i in wanted) for i, p in enumerate(params)]
            with torch.enable_grad():
                y = ctx.f(window, *leaves)
            d_window, *found = torch.autograd.grad(
                y, [window, *(leaves[i] for i in wanted)], d_y[:, start : start + size]
            )
            for i, d in zip(wanted, found, strict=True):
                d_params[i] += d
            d_x[:, start : start + size] = d_window[:, halo:]
            if start == 0:
                d_before += d_window[:, :halo]
            else:
                d_x[:, start - halo : start] += d_window[:, :halo]
        return (None, None, d_x, d_before, *d_params)
