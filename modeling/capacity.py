"""Proteus: the memory's capacity opens block by block as a sequence is read.

    Delta = max(1, floor(N / E)),   k(t) = min(E, 1 + floor((t - 1) / Delta)),   t = 1, 2, ...

Blocks 1..k(t) of E are open at token t; a closed block neither reads nor writes nor decays. The schedule is the same in
training and evaluation, is full from `t = (E - 1) Delta + 1` on, and with E = 1 there is nothing to open.

Source: Proteus (arXiv 2608.16844), Eq 7-13. Deviations: t counts the tokens of one sequence (padding and packed
neighbours do not count), since the state, not the batch, carries the position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from memzoo.kernels.opened import opened
from memzoo.kernels.opened.chunked import is_open


@dataclass(frozen=True)
class CapacitySchedule:
    """When each block opens. It knows no architecture: memories map their coordinates to blocks themselves.

    Args:
        blocks: E.
        context: N, in tokens.
    """

    blocks: int
    context: int

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.context < 1:
            raise ValueError(
                f"CapacitySchedule: blocks={self.blocks}, context={self.context}: expected both to be at least 1."
            )

    @cached_property
    def interval(self) -> int:
        """Delta, the tokens between two openings."""
        return max(1, self.context // self.blocks)

    @cached_property
    def unlock(self) -> tuple[int, ...]:
        """For each block the number of tokens before it opens: `(e - 1) Delta`."""
        return tuple(block * self.interval for block in range(self.blocks))

    @property
    def full_from(self) -> int:
        """The first token t with every block open."""
        return self.unlock[-1] + 1

    def open_blocks(self, token: Tensor) -> Tensor:
        """`k(t)` for tokens `t` counted from 1 (any shape, int64)."""
        return (1 + torch.div(token - 1, self.interval, rounding_mode="floor")).clamp(max=self.blocks)

    def is_open(self, units: int, position: Tensor, tokens: int) -> Tensor:
        """Which of `units` each of the `tokens` after `position` `[B]` sees, `[B, T, units]`, bool."""
        return is_open(position, tokens, units, self.blocks, self.interval)

    def opened(self, x: Tensor, position: Tensor, *, axis: int, backend: str) -> Tensor:
        """`x` `[B, T, ...]` of the tokens after `position` `[B]`, with 0 in what they do not see of the units along
        `axis`."""
        if self.blocks == 1:
            return x
        return opened(x, position, blocks=self.blocks, interval=self.interval, axis=axis, backend=backend)
