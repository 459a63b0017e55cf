"""A recurrence over pieces of a sequence whose backward recomputes each piece.

What is kept for the backward is the inputs and the state at each piece's start, whatever a piece computes in between;
and what it computes is small enough for the caches of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from memzoo.kernels.blocked import piece

State = TypeVar("State")


def scan(
    f: Callable[..., tuple[Tensor, State]], state: State, pieces: Sequence[tuple[Any, ...]], kept: int = 0
) -> tuple[Tensor, State]:
    """Outputs `[B, T, ...]` and the final state of `f(state, *piece) -> (output, state)` over the pieces.

    Args:
        f: reads a piece; differentiable, once where a piece is recomputed; without random numbers; every tensor it
            uses is among its arguments: what it closes over gets no gradient then, and changes unnoticed.
        state: before the first token, a tensor or a tree of them.
        pieces: the arguments of `f`, as `split` makes them. A single one is not recomputed.
        kept: how many of the last pieces are not either, which takes memory for what they compute.
    """
    if len(pieces) == 1:
        return f(state, *pieces[0])
    recompute = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    outputs = []
    for index, arguments in enumerate(pieces):
        if recompute and index < len(pieces) - kept:
            leaves, spec = pytree.tree_flatten((state, arguments))
            y, spec, *leaves = _Piece.apply(f, spec, *leaves)
            state = pytree.tree_unflatten(leaves, spec)
        else:
            y, state = _read(f, state, arguments)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


class _Piece(torch.autograd.Function):
    """`f` of one piece, flat, which keeps what it is given and computes it again in the backward: what
    `torch.utils.checkpoint` does, without its look at every tensor that is kept in between."""

    @staticmethod
    def forward(ctx: Any, f: Callable[..., Any], spec: pytree.TreeSpec, *leaves: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.f, ctx.spec = f, spec
        ctx.others = [None if isinstance(x, Tensor) else x for x in leaves]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in leaves))
        y, state = _read(f, *pytree.tree_unflatten(leaves, spec))
        device = y.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        found, spec = pytree.tree_flatten(state)
        return y, spec, *found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor | None, _: None, *d_state: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[2:]
        leaves = [
            x if saved is None else saved.detach().requires_grad_(is_needed)
            for x, saved, is_needed in zip(ctx.others, ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            y, state = _read(ctx.f, *pytree.tree_unflatten(leaves, ctx.spec))
        given = zip((y, *pytree.tree_leaves(state)), (d_y, *d_state), strict=True)
        pairs = [(x, d) for x, d in given if d is not None and x.requires_grad]
        wanted = [x for x, is_needed in zip(leaves, needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad([x for x, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True))
        return (None, None, *(next(found) if is_needed else None for is_needed in needed))


def _read(f: Callable[..., tuple[Tensor, State]], state: State, arguments: tuple[Any, ...]) -> tuple[Tensor, State]:
    if torch.compiler.is_compiling():  # where nothing is cut
        return f(state, *arguments)
    with piece():
        return f(state, *arguments)


def split(inputs: Sequence[Tensor | None], size: int) -> list[tuple[Tensor | None, ...]]:
    """Inputs `[B, T, ...]`, the first a tensor and others a tensor or `None`, as pieces of `size` tokens."""
    first: Any = inputs[0]
    if first.shape[1] <= size:
        return [tuple(inputs)]
    count = -(-first.shape[1] // size)
    return list(zip(*([None] * count if x is None else x.split(size, dim=1) for x in inputs), strict=True))
