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

    start: Tensor
    """Index of each row's first one among its new tokens, `[R]`."""
    begun: Tensor
    """Tokens that the chunk held before, `[R]`."""
    step: Step
    columns: slice | Tensor
    """Where they are among the new tokens: the same slice in all rows, or indices `[R, L']`."""

    @torch.compiler.disable  # indexing alone, by numbers that are other ones at every call
    def of(self, x: Tensor) -> Tensor:
        """The part's columns of `[R, L, ...]`."""
        if isinstance(self.columns, slice):
            return x[:, self.columns]
        return x.gather(1, self.columns.view(*self.columns.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


@torch.compiler.disable
def parts_of(step: Step, tokens: int, size: int) -> Iterator[Part]:
    """The new tokens, cut where chunks end; each row has its own cuts."""
    begun, zero = step.position % size, torch.zeros_like(step.position)
    if tokens == 1 and step.lengths is None:  # whatever the rows' positions, which a device is not asked for
        yield Part(zero, begun, step, slice(0, 1))
        return
    if step.lengths is None and bool((begun == begun[0]).all()):
        first = int(begun[0])
        bounds = [0, *range(size - first, tokens, size), tokens]
        for low, high in pairwise(bounds):
            columns = slice(low, high)
            rotary = {width: (cos[:, columns], sin[:, columns]) for width, (cos, sin) in step.rotary.items()}
            part = step._replace(position=step.position + low, added=zero + (high - low), rotary=rotary)
            yield Part(zero + low, begun if low == 0 else zero, part, columns)
        return
    for index in range(max(1, -(-int((begun + step.added).max()) // size))):
        start = (index * size - begun).clamp(min=0)
        added = (torch.minimum(step.added, (index + 1) * size - begun) - start).clamp(min=0)
        start = torch.minimum(start, step.added)
        place = start[:, None] + torch.arange(max(1, int(added.max())), device=added.device)
        at = place.clamp(max=tokens - 1)
        whole = Part(start, begun if index == 0 else zero, step, at)
        rotary = {width: (whole.of(cos), whole.of(sin)) for width, (cos, sin) in step.rotary.items()}
        part = step._replace(position=step.position + start, lengths=added, added=added, rotary=rotary)
        yield whole._replace(step=part)


def joined(parts: Sequence[Part], outputs: list[Tensor], like: Tensor) -> Tensor:
    """The parts' outputs `[R, L', D]` in the order of the new tokens."""
    if isinstance(parts[0].columns, slice):
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    joined = torch.zeros_like(like, dtype=outputs[0].dtype)
    place = torch.arange(like.shape[1], device=like.device)
    for part, output in zip(parts, outputs, strict=True):
        joined = placed(place, part.start, part.step.added, output, joined)
    return joined


def placed(place: Tensor, first: Tensor, count: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` `[R, L', ...]` at the columns from `first` on, `count` of them in each row; `old` elsewhere."""
    offset = place - first[:, None]
    inside = (offset >= 0) & (offset < count[:, None])
    shape = *offset.shape, *[1] * (old.ndim - 2)
    index = offset.clamp(0, new.shape[1] - 1).view(shape).expand(-1, -1, *old.shape[2:])
    return torch.where(inside.view(shape), new.gather(1, index), old)
