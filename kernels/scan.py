"""A recurrence over pieces of a sequence whose backward recomputes each piece.

What is kept for the backward is the inputs and the state at each piece's start, whatever a piece computes in between;
and what it computes is small enough for the caches of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

State = TypeVar("State")


def scan(
    f: Callable[..., tuple[Tensor, State]], state: State, pieces: Sequence[tuple[Any, ...]]
) -> tuple[Tensor, State]:
    """Outputs `[B, T, ...]` and the final state of `f(state, *piece) -> (output, state)` over the pieces.

    Args:
        f: reads a piece; differentiable, without random numbers.
        state: before the first token, a tensor or a tree of them.
        pieces: the arguments of `f`, as `split` makes them. A single one is not recomputed.
    """
    recompute = len(pieces) > 1 and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    outputs = []
    for piece in pieces:
        if recompute:
            y, state = checkpoint(f, state, *piece, use_reentrant=False, preserve_rng_state=False)
        else:
            y, state = f(state, *piece)
        outputs.append(y)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state


def split(inputs: Sequence[Tensor | None], size: int) -> list[tuple[Tensor | None, ...]]:
    """Inputs `[B, T, ...]`, or `None`, as pieces of `size` tokens."""
    count = -(-next(x for x in inputs if x is not None).shape[1] // size)
    if count == 1:
        return [tuple(inputs)]
    return list(zip(*([None] * count if x is None else x.split(size, dim=1) for x in inputs), strict=True))
