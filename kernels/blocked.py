"""A map over tokens, computed some tokens at a time, whose backward recomputes it.

On a CPU an elementwise pass over a whole sequence waits for memory; a block of tokens that fits the cache does not.
Nothing but the inputs is kept for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ELEMENTS = 1 << 17
"""Elements of the widest input in a block: half a MiB in float32."""
MIN_TOKENS = 16
in_piece: ContextVar[bool] = ContextVar("in_piece", default=False)


@contextmanager
def piece() -> Iterator[None]:
    """Inside it nothing is cut further: the sequence has been already, and its backward recomputes what is inside."""
    token = in_piece.set(True)
    try:
        yield
    finally:
        in_piece.reset(token)


def blocked(
    f: Callable[..., Tensor], *inputs: Tensor, params: Sequence[Tensor] = (), before: Tensor | None = None
) -> Tensor:
    """`f(*inputs, *params)`, for an `f` whose output at a token depends on the inputs at it alone.

    Args:
        f: inputs `[B, L, ...]` and `params` to `[B, L, ...]`, for any L; differentiable.
        inputs: `[B, T, ...]` each.
        params: what else `f` takes, with gradients.
        before: the H tokens before the first input, `[B, H, ...]`, for an `f` that depends on them as well and takes
            `[before, input]` there; `None` for H = 0.

    Returns:
        `[B, T, ...]`. It has first derivatives only where there is more than one block.
    """
    first, halo = inputs[0], 0 if before is None else before.shape[1]
    size = block_size(inputs, halo)
    if first.shape[1] <= size:
        return f(torch.cat([before, first], dim=1) if before is not None and halo else first, *inputs[1:], *params)
    if before is None:
        before = first[:, :0].detach()
    tensors = (*inputs, *params)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (before, *tensors)):
        return _Blocked.apply(f, size, len(inputs), before, *tensors)
    return _forward(f, size, before, inputs, params)


def block_size(inputs: Sequence[Tensor], halo: int) -> int:
    """Tokens of a block; all of them where nothing is to be cut."""
    first = inputs[0]
    tokens = first.shape[1]
    if tokens <= MIN_TOKENS or first.device.type != "cpu" or torch.compiler.is_compiling() or in_piece.get():
        return tokens
    return max(MIN_TOKENS, halo, BLOCK_ELEMENTS * tokens // max(1, *(x.numel() for x in inputs)))


def _window(inputs: Sequence[Tensor], before: Tensor, start: int, size: int) -> list[Tensor]:
    first, *others = inputs
    halo = before.shape[1]
    if halo == 0 or start >= halo:
        first = first[:, start - halo : start + size]
    else:
        first = torch.cat([before[:, start:], first[:, : start + size]], dim=1)
    return [first, *(x[:, start : start + size] for x in others)]


def _forward(
    f: Callable[..., Tensor], size: int, before: Tensor, inputs: Sequence[Tensor], params: Sequence[Tensor]
) -> Tensor:
    tokens = inputs[0].shape[1]
    block = f(*_window(inputs, before, 0, size), *params)
    y = block.new_empty(block.shape[0], tokens, *block.shape[2:])
    y[:, :size] = block
    for start in range(size, tokens, size):
        y[:, start : start + size] = f(*_window(inputs, before, start, size), *params)
    return y


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Callable[..., Tensor], size: int, count: int, before: Tensor, *tensors: Tensor) -> Tensor:
        ctx.f, ctx.size, ctx.count = f, size, count
        ctx.autocast = {"dtype": torch.get_autocast_dtype("cpu"), "enabled": torch.is_autocast_enabled("cpu")}
        ctx.save_for_backward(before, *tensors)
        return _forward(f, size, before, tensors[:count], tensors[count:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        before, *tensors = ctx.saved_tensors
        size, count, halo = ctx.size, ctx.count, before.shape[1]
        inputs, params = tensors[:count], tensors[count:]
        _, *needed = ctx.needs_input_grad[3:]
        needed[0] = needed[0] or ctx.needs_input_grad[3]  # the halo's gradient comes with the first input's
        wanted = [i for i, is_needed in enumerate(needed) if is_needed]
        d_before = torch.zeros_like(before)
        d_tensors = [
            (torch.empty_like(x) if i < count else torch.zeros_like(x, dtype=_wide(x))) if needed[i] else None
            for i, x in enumerate(tensors)
        ]
        for start in range(0, inputs[0].shape[1], size):
            leaves = [x.detach() for x in (*_window(inputs, before, start, size), *params)]
            for i in wanted:
                leaves[i].requires_grad_()
            with torch.enable_grad(), torch.autocast("cpu", **ctx.autocast):
                y = ctx.f(*leaves)
            found = torch.autograd.grad(y, [leaves[i] for i in wanted], d_y[:, start : start + size])
            for i, d in zip(wanted, found, strict=True):
                whole: Any = d_tensors[i]
                if i >= count:
                    whole += d
                elif i > 0 or halo == 0:
                    whole[:, start : start + size] = d
                else:
                    whole[:, start : start + size] = d[:, halo:]
                    if start == 0:
                        d_before += d[:, :halo]
                    else:
                        whole[:, start - halo : start] += d[:, :halo]
        narrow = (None if d is None else d.to(x.dtype) for d, x in zip(d_tensors, tensors, strict=True))
        return (None, None, None, d_before, *narrow)


def _wide(x: Tensor) -> torch.dtype:
    """In which many gradients are summed."""
    return torch.promote_types(x.dtype, torch.float32)


def gated_product(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """`act(gate) * up` in blocks of tokens, with the product's backward written out: it makes few copies of a block.

    Args:
        act: elementwise and differentiable; `torch.nn.functional.silu` is the fastest.
        gate, up: `[B, T, D]`, of any floating dtype.

    Returns:
        `[B, T, D]`. It has first derivatives only where there is more than one block.
    """
    size = block_size((gate, up), 0)
    if gate.shape[1] <= size or gate.dtype != up.dtype:
        return act(gate) * up
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _GatedProduct.apply(act, size, gate, up)
    return _gated_product(act, size, gate, up)


def _gated_product(act: Callable[[Tensor], Tensor], size: int, gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(up)
    for to, g, u in zip(*(x.split(size, dim=1) for x in (y, gate, up)), strict=True):
        if act is F.silu:
            torch.ops.aten.silu.out(g, out=to).mul_(u)
        else:
            torch.mul(act(g), u, out=to)
    return y


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, act: Callable[[Tensor], Tensor], size: int, gate: Tensor, up: Tensor) -> Tensor:
        ctx.act, ctx.size = act, size
        ctx.save_for_backward(gate, up)
        return _gated_product(act, size, gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        for to_gate, to_up, d, g, u in zip(
            *(x.split(ctx.size, dim=1) for x in (d_gate, d_up, d_y, gate, up)), strict=True
        ):
            if ctx.act is F.silu:
                torch.ops.aten.silu.out(g, out=to_up).mul_(d)
                torch.mul(d, u, out=to_gate)
                torch.ops.aten.silu_backward.grad_input(to_gate, g, grad_input=to_gate)
                continue
            leaf = g.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.act(leaf)
            torch.mul(y.detach(), d, out=to_up)
            to_gate.copy_(torch.autograd.grad(y, leaf, d * u)[0])
        return None, None, d_gate, d_up
