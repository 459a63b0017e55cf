"""A recurrence over segments of tokens whose backward recomputes each segment.

What is kept for the backward is the inputs and the state at each segment's start: `O(T K + T / L states)`, whatever the
segment computes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Segment = Callable[..., tuple[Tensor, Tensor]]


def scan(f: Segment, size: int, state: Tensor, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, ...]` and the final state of `f(state, *segment) -> (output, state)` over segments.

    Args:
        f: reads a segment of at most `size` tokens; differentiable.
        state: before the first token.
        inputs: `[B, T, ...]` each, or `None`.
    """
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (state, *inputs))
    if wanted and not torch.compiler.is_compiling():
        return _Scan.apply(f, size, state, *inputs)
    return _run(f, size, state, inputs)[:2]


def _run(f: Segment, size: int, state: Tensor, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, the final state, and the state at each segment's start."""
    tokens = next(x for x in inputs if x is not None).shape[1]
    starts, outputs = [], []
    for start in range(0, tokens, size):
        starts.append(state)
        y, state = f(state, *_segment(inputs, start, size))
        outputs.append(y)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state, starts


def _segment(inputs: Sequence[Tensor | None], start: int, size: int) -> list[Tensor | None]:
    return [None if x is None else x[:, start : start + size] for x in inputs]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Segment, size: int, state: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        y, final, starts = _run(f, size, state, inputs)
        ctx.f, ctx.size, ctx.count = f, size, len(inputs)
        ctx.save_for_backward(*inputs, *starts)
        return y, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_output: Tensor, d_state: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: checkpointing hands each of them out a single time
        inputs, starts = saved[: ctx.count], saved[ctx.count :]
        gradients = [None if x is None else torch.empty_like(x) for x in inputs]
        with torch.autocast(d_output.device.type, enabled=False):
            for index in reversed(range(len(starts))):
                part = slice(index * ctx.size, (index + 1) * ctx.size)
                leaves = [None if x is None else x[:, part].detach().requires_grad_() for x in inputs]
                state = starts[index].detach().requires_grad_()
                with torch.enable_grad():
                    y, new_state = ctx.f(state, *leaves)
                given = [x for x in leaves if x is not None]
                d_state, *found = torch.autograd.grad(
                    [y, new_state], [state, *given], [d_output[:, part], d_state], allow_unused=True
                )
                rest = iter(found)
                for whole in gradients:
                    if whole is not None:
                        piece = next(rest)
                        whole[:, part] = 0 if piece is None else piece
        return (None, None, d_state, *gradients)
