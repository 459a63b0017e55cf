"""New tokens in the parts that fall between two boundaries of a grid, which each row counts from its first token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from memzoo.modeling.decoder import Step


class Part(NamedTuple):
    """New tokens that fall into one chunk of each row."""

    size: int
    """Tokens of a chunk."""
    step: Step
    columns: slice | Tensor | None
    """Where they are among the new tokens: the same slice in all rows, or indices `[R, L']`; `None`: they are all."""
    whole: bool
    """Whether the chunk is known to begin here in every row."""

    @property
    def begun(self) -> Tensor:
        """Tokens that the chunk held before, `[R]`."""
        return self.step.position % self.size

    def of(self, x: Tensor) -> Tensor:
        """The part's columns of `[R, L, ...]`."""
        return x if self.columns is None else _taken(x, self.columns)


@torch.compiler.disable  # indexing alone, by numbers that are other ones at every call
def _taken(x: Tensor, columns: slice | Tensor) -> Tensor:
    if isinstance(columns, slice):
        return x[:, columns]
    return x.gather(1, columns.view(*columns.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


def parts_of(step: Step, tokens: int, size: int, *, fresh: bool = False) -> Iterator[Part]:
    """The new tokens, cut where chunks end; each row has its own cuts. `fresh`: whether they are the first ones."""
    if tokens == 1:  # whatever the rows' positions, which a device is not asked for
        yield Part(size, step, None, whole=fresh and step.lengths is None)
    elif fresh and step.lengths is None:
        yield from _sliced(step, tokens, size, 0)
    else:
        yield from _cut(step, tokens, size)


def _sliced(step: Step, tokens: int, size: int, first: int) -> Iterator[Part]:
    """Parts of rows whose chunks all hold `first` tokens before."""
    zero = torch.zeros_like(step.position)
    for low, high in pairwise([0, *range(size - first, tokens, size), tokens]):
        columns = slice(low, high)
        rotary = {key: (cos[:, columns], sin[:, columns]) for key, (cos, sin) in step.rotary.items()}
        part = step._replace(position=step.position + low, added=zero + (high - low), rotary=rotary)
        yield Part(size, part, columns, whole=low > 0 or first == 0)


@torch.compiler.disable
def _cut(step: Step, tokens: int, size: int) -> Iterator[Part]:
    """Parts of rows with a chunk each, about which the device is asked."""
    begun = step.position % size
    if step.lengths is None and bool((begun == begun[0]).all()):
        yield from _sliced(step, tokens, size, int(begun[0]))
        return
    for index in range(max(1, -(-int((begun + step.added).max()) // size))):
        start = (index * size - begun).clamp(min=0)
        added = (torch.minimum(step.added, (index + 1) * size - begun) - start).clamp(min=0)
        start = torch.minimum(start, step.added)
        place = start[:, None] + torch.arange(max(1, int(added.max())), device=added.device)
        at = place.clamp(max=tokens - 1)
        part = Part(size, step, at, whole=False)
        rotary = {key: (part.of(cos), part.of(sin)) for key, (cos, sin) in step.rotary.items()}
        position = step.position + start
        yield part._replace(step=step._replace(position=position, lengths=added, added=added, rotary=rotary))


def joined(parts: Sequence[Part], outputs: list[Tensor], like: Tensor) -> Tensor:
    """The parts' outputs `[R, L', D]` in the order of the new tokens."""
    if not isinstance(parts[0].columns, Tensor):
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    joined = torch.zeros_like(like, dtype=outputs[0].dtype)
    place = torch.arange(like.shape[1], device=like.device)
    for part, output in zip(parts, outputs, strict=True):
        joined = placed(place, part.columns[:, 0], part.step.added, output, joined)  # type: ignore[index]
    return joined


def placed(place: Tensor, first: Tensor, count: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` `[R, L', ...]` at the columns from `first` on, `count` of them in each row; `old` elsewhere."""
    offset = place - first[:, None]
    inside = (offset >= 0) & (offset < count[:, None])
    shape = *offset.shape, *[1] * (old.ndim - 2)
    index = offset.clamp(0, new.shape[1] - 1).view(shape).expand(-1, -1, *old.shape[2:])
    return torch.where(inside.view(shape), new.gather(1, index), old)
