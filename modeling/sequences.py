"""From a user's batch to rows of single sequences, and back.

A batch may be padded on the left or the right, or hold several sequences per row. The model computes on *rows*: one
sequence each, its real tokens first, padding last. Causal layers then need no mask at all: what comes last is seen by
no real token. This file is the only place that knows about masks and packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rows:
    """The rows of one forward pass.

    Args:
        batch: the user's `[B, T]`.
        position: tokens that each row's sequence has read before, `[R]`, int64.
        lengths: real tokens of each row, `[R]`, int64; `None` when the batch is the rows: R = B, every token real.
        source: flat index into `[B * T]` of each row's tokens, `[R, L]`; 0 beyond a row's length.
        target: flat index into `[R * L]` of each of the batch's tokens, `[B, T]`; -1 for padding.
        packed: whether a row of the batch holds several sequences.
        room: tokens for which a state that holds them all has room from its first on; `None` for one that grows.
    """

    batch: tuple[int, int]
    position: Tensor
    lengths: Tensor | None = None
    source: Tensor | None = None
    target: Tensor | None = None
    packed: bool = False
    room: int | None = None

    def gather(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` to rows `[R, L, ...]`, zero beyond a row's length."""
        if self.source is None or self.lengths is None:
            return x
        real = torch.arange(self.source.shape[1], device=x.device) < self.lengths[:, None]
        rows = x.flatten(0, 1)[self.source]
        return torch.where(real.view(*real.shape, *[1] * (rows.ndim - 2)), rows, 0)

    def scatter(self, rows: Tensor) -> Tensor:
        """Rows `[R, L, ...]` to the batch `[B, T, ...]`, zero at padding."""
        if self.target is None:
            return rows
        batch = rows.flatten(0, 1)[self.target.clamp(min=0)]
        return torch.where((self.target >= 0).view(*self.target.shape, *[1] * (rows.ndim - 2)), batch, 0)

    def groups(self) -> list[Rows]:
        """Packed rows in groups of like length: one long sequence must not pad a hundred short ones.

        A group's lengths are within a factor of two, so that its rows hold at most twice its tokens. In a distributed
        run there is one group: processes must make the same calls.
        """
        if not self.packed or self.lengths is None or self.source is None or self.target is None or _is_distributed():
            return [self]
        width, groups = self.source.shape[1], []
        row = torch.where(self.target >= 0, self.target // width, -1)
        octave = torch.log2(self.lengths.clamp(min=1).double()).floor()
        for value in octave.unique():
            chosen = (octave == value).nonzero()[:, 0]
            longest = int(self.lengths[chosen].max())
            place = torch.full((len(self.lengths) + 1,), -1, device=row.device)  # the last for padding
            place[chosen] = torch.arange(len(chosen), device=row.device)
            at = place[row]
            target = torch.where(at >= 0, at * longest + self.target % width, -1)
            groups.append(
                Rows(
                    self.batch, self.position[chosen], self.lengths[chosen], self.source[chosen, :longest], target, True
                )
            )
        return groups

    @property
    def added(self) -> Tensor:
        """Real tokens of each row, `[R]`."""
        return torch.full_like(self.position, self.batch[1]) if self.lengths is None else self.lengths


def layout(
    batch: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    position: Tensor | None = None,
    columns: int = 0,
) -> Rows:
    """The rows of a batch of new tokens.

    Args:
        batch: `(B, T)`.
        device: of the tokens.
        attention_mask: `[B, T]` or `[B, columns + T]`, nonzero for real tokens.
        position_ids: `[B, T]` or `[1, T]`; a return to 0 starts another sequence. A constant offset has no effect:
            rotary embeddings are relative, and memories count their own tokens.
        seq_idx: `[B, T]`, the index of each token's sequence.
        cu_seqlens: `[S + 1]`, the bounds of the sequences in a batch of one row.
        position: tokens that each row's sequence has read before, `[B]`; `None` for none.
        columns: columns of the batch read before, padding included.

    Raises:
        ValueError: a mask that is not 2-D or has holes; positions that jump; bounds that do not fit; packing
            conventions that contradict one another; packing on top of a cache.
    """
    count, tokens = batch
    start = torch.zeros(count, dtype=torch.int64, device=device) if position is None else position
    if attention_mask is not None and attention_mask.is_floating_point() and bool((attention_mask <= 0).all()):
        raise ValueError(
            "attention_mask: expected 1 at real tokens and 0 at padding, got floats of at most 0, as of a mask that is "
            "added to scores. Pass integers or bools."
        )
    real = _real_tokens(batch, attention_mask, columns)
    first = _sequence_starts(batch, device, real, position_ids, seq_idx, cu_seqlens)
    if real is None and first is None:
        return Rows(batch, start)

    is_real = torch.ones(count, tokens, dtype=torch.bool, device=device) if real is None else real
    begins = is_real & ~torch.nn.functional.pad(is_real, (1, 0))[:, :-1]
    if first is not None:
        begins = begins | (first & is_real)
    # The sequence of each token by what the batch says, to be constant wherever real tokens follow one another.
    sequence = torch.zeros_like(is_real, dtype=torch.int64) if first is None else first.long().cumsum(1)
    row_sequence = torch.where(begins, sequence, -1)
    again = begins & (row_sequence == torch.nn.functional.pad(row_sequence.cummax(1).values, (1, 0), value=-1)[:, :-1])
    if bool(again.any()):
        row = int(again.nonzero()[0, 0])
        raise ValueError(
            f"attention_mask: row {row} has padding between real tokens of one sequence; expected padding on the left "
            "or on the right only. Remove the holes, or say that another sequence starts after them."
        )
    if position is not None and bool((begins.sum(1) > 1).any()):
        raise ValueError(
            "Packed sequences cannot continue a cache: its rows are single sequences. Pass the packed batch without a "
            "cache, or one sequence per row with it."
        )
    packed = bool((begins.sum(1) > 1).any())
    if packed:
        row_of = begins.flatten().cumsum(0) - 1
        row_count = int(row_of[-1]) + 1
        start = start.new_zeros(row_count)
    else:
        row_of = torch.arange(count, device=device).repeat_interleave(tokens)
        row_count = count
    flat_real = is_real.flatten()
    index = torch.arange(count * tokens, device=device)
    lengths = torch.zeros(row_count, dtype=torch.int64, device=device).index_add(
        0, row_of[flat_real], flat_real[flat_real].long()
    )
    before = flat_real.long().cumsum(0) - 1  # real tokens before each, over the whole batch
    row_first = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
    column = before - row_first[row_of.clamp(min=0)]
    width = max(1, int(lengths.max()))
    source = torch.zeros(row_count, width, dtype=torch.int64, device=device)
    source[row_of[flat_real], column[flat_real]] = index[flat_real]
    target = torch.where(flat_real, row_of * width + column, -1).view(count, tokens)
    return Rows(batch, start, lengths, source, target, packed)


def _real_tokens(batch: tuple[int, int], attention_mask: Tensor | None, columns: int) -> Tensor | None:
    """`[B, T]` bool, or `None` when every token is real."""
    if attention_mask is None:
        return None
    count, tokens = batch
    shapes = [(count, tokens), *([(count, columns + tokens)] if columns else [])]
    if tuple(attention_mask.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"attention_mask: expected {expected}, got {list(attention_mask.shape)}. Memories take a 2-D mask of "
            "real tokens: of the new ones, or of the cached and the new ones."
        )
    real = attention_mask[:, attention_mask.shape[1] - tokens :] != 0
    return None if bool(real.all()) else real


def _sequence_starts(
    batch: tuple[int, int],
    device: torch.device,
    real: Tensor | None,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor | None:
    """`[B, T]` bool: where another sequence starts inside a row; `None` when nowhere."""
    found: dict[str, Tensor] = {}
    if position_ids is not None:
        found["position_ids"] = _starts_of_positions(batch, position_ids, real)
    if seq_idx is not None:
        _expect_shape("seq_idx", seq_idx, batch)
        found["seq_idx"] = torch.nn.functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    if cu_seqlens is not None:
        found["cu_seqlens"] = _starts_of_bounds(batch, cu_seqlens, device)
    if not found:
        return None
    (name, starts), *others = found.items()
    for other, more in others:
        if not torch.equal(starts if real is None else starts & real, more if real is None else more & real):
            raise ValueError(f"{name} and {other} divide the batch differently; pass one of them, or make them agree.")
    return starts if bool(starts.any()) else None


def _starts_of_positions(batch: tuple[int, int], position_ids: Tensor, real: Tensor | None) -> Tensor:
    if position_ids.ndim != 2 or position_ids.shape[1] != batch[1] or position_ids.shape[0] not in (1, batch[0]):
        raise ValueError(f"position_ids: expected {batch} or (1, {batch[1]}), got {tuple(position_ids.shape)}.")
    position_ids = position_ids.expand(batch)
    step = position_ids[:, 1:] - position_ids[:, :-1]
    restart = position_ids[:, 1:] == 0
    jump = (step != 1) & ~restart
    if real is not None:
        jump = jump & real[:, 1:] & real[:, :-1]
    if bool(jump.any()):
        row, column = (int(i) for i in jump.nonzero()[0])
        before, after = (int(x) for x in position_ids[row, column : column + 2])
        raise ValueError(
            f"position_ids: row {row} goes from {before} to {after}; expected steps of 1, or a return to 0 where "
            "another sequence starts."
        )
    return torch.nn.functional.pad(restart & (step != 1), (1, 0))


def _starts_of_bounds(batch: tuple[int, int], cu_seqlens: Tensor, device: torch.device) -> Tensor:
    count, tokens = batch
    bounds = cu_seqlens.to(device=device, dtype=torch.int64)
    while bounds.ndim == 1 and bounds.numel() > 2 and int(bounds[-1]) == int(bounds[-2]):
        bounds = bounds[:-1]  # some collators repeat the last bound up to a fixed number
    if count != 1 or bounds.ndim != 1 or bounds.numel() < 2:
        raise ValueError(
            f"cu_seqlens: expected the bounds [S + 1] of sequences in a batch of one row, got bounds of shape "
            f"{tuple(bounds.shape)} for {count} rows."
        )
    if int(bounds[0]) != 0 or int(bounds[-1]) != tokens or bool((bounds[1:] <= bounds[:-1]).any()):
        raise ValueError(f"cu_seqlens: expected ascending bounds from 0 to {tokens}, got {bounds.tolist()}.")
    starts = torch.zeros(1, tokens, dtype=torch.bool, device=device)
    starts[0, bounds[1:-1]] = True
    return starts


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _expect_shape(name: str, x: Tensor, shape: tuple[int, int]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected {shape}, got {tuple(x.shape)}.")
