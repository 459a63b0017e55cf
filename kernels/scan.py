"""A recurrence over pieces of a sequence whose backward recomputes each piece.

What is kept for the backward is the inputs and the state at each piece's start, whatever a piece computes in between;
and what it computes is small enough for the caches of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memzoo.kernels.blocked import piece

State = TypeVar("State")


def scan(
    f: Callable[..., tuple[Tensor, State]], state: State, pieces: Sequence[tuple[Any, ...]]
) -> tuple[Tensor, State]:
    """Outputs `[B, T, ...]` and the final state of `f(state, *piece) -> (output, state)` over the pieces.

    Args:
        f: reads a piece; differentiable, without random numbers; every tensor it uses is among its arguments, so that
            a weight that has changed until the backward is noticed.
        state: before the first token, a tensor or a tree of them.
        pieces: the arguments of `f`, as `split` makes them. A single one is not recomputed.
    """
    if len(pieces) == 1:
        return f(state, *pieces[0])
    recompute = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    outputs = []
    for arguments in pieces:
        if recompute:
            # Flat: `checkpoint` guards the tensors among its own arguments against changes, no nested ones.
            leaves, spec = pytree.tree_flatten((state, arguments))
            y, state = checkpoint(partial(_unflat, f, spec), *leaves, use_reentrant=False, preserve_rng_state=False)
        else:
            y, state = _read(f, state, arguments)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def _unflat(f: Callable[..., tuple[Tensor, State]], spec: pytree.TreeSpec, *leaves: Any) -> tuple[Tensor, State]:
    return _read(f, *pytree.tree_unflatten(leaves, spec))


def _read(f: Callable[..., tuple[Tensor, State]], state: State, arguments: tuple[Any, ...]) -> tuple[Tensor, State]:
    if torch.compiler.is_compiling():  # where nothing is cut
        return f(state, *arguments)
    with piece():
        return f(state, *arguments)


def split(inputs: Sequence[Tensor | None], size: int) -> list[tuple[Tensor | None, ...]]:
    """Inputs `[B, T, ...]`, or `None`, as pieces of `size` tokens."""
    count = -(-next(x for x in inputs if x is not None).shape[1] // size)
    if count == 1:
        return [tuple(inputs)]
    return list(zip(*([None] * count if x is None else x.split(size, dim=1) for x in inputs), strict=True))
