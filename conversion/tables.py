"""Weights by table: which tensor of ours is made of which of theirs. One table serves both directions.

    ours = concatenation of theirs along dimension 0,   theirs = that part of ours

Every rotary embedding concerned turns the two halves of a head against each other, so nothing has to be permuted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

LAYER = "model.layers.{}."
"""Where a block lies, in our models and in all those that the tables know."""
SHOWN = 8
"""Names in an error message."""


class Source(Protocol):
    """Tensors by name, of which parts can be read."""

    def read(self, name: str, start: int, stop: int) -> Tensor: ...

    def shape(self, name: str) -> Sequence[int]: ...


class Piece(NamedTuple):
    """Rows `start` to `stop` of a tensor; all of it where they are as many as it has."""

    name: str
    start: int
    stop: int


class Recipe(NamedTuple):
    """How to make one tensor: pieces of the source's, one behind the other."""

    pieces: tuple[Piece, ...]
    channel: int
    """Of a dimension of size 1 at place 1: -1 to take it away, 1 to add it, 0 for neither."""

    def make(self, source: Source) -> Tensor:
        parts = [source.read(*piece) for piece in self.pieces]
        if len({part.dtype for part in parts}) > 1:
            found = {piece.name: str(part.dtype) for piece, part in zip(self.pieces, parts, strict=True)}
            raise ValueError(
                f"Tensors that become one: expected a single dtype, got {found}. Cast the checkpoint first."
            )
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self.channel:
            whole = whole.squeeze(1) if self.channel < 0 else whole.unsqueeze(1)
        return whole.contiguous()

    def shape(self, source: Source) -> tuple[int, ...]:
        """Of the tensor to be made."""
        rest = list(source.shape(self.pieces[0].name))[1:]
        if self.channel:
            rest = rest[1:] if self.channel < 0 else [1, *rest]
        return (sum(piece.stop - piece.start for piece in self.pieces), *rest)


@dataclass(frozen=True)
class Row:
    """One tensor of ours and the ones of theirs that it is made of.

    Args:
        ours, theirs: names; in a block without its prefix.
        sizes: lengths of the parts along dimension 0, by our config; `None` where there is one part.
        channel: whether theirs has a dimension of size 1 at place 1, as the weight of a depthwise `nn.Conv1d`.
        when: whether a model of this config has it; `None` for always.
    """

    ours: str
    theirs: str | tuple[str, ...]
    sizes: Callable[[PreTrainedConfig], Sequence[int]] | None = None
    channel: bool = False
    when: Callable[[PreTrainedConfig], bool] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def within(self, prefix: str) -> Row:
        return replace(self, ours=prefix + self.ours, theirs=tuple(prefix + name for name in self.parts))


@dataclass(frozen=True)
class Table:
    """All tensors of an architecture.

    Args:
        model: rows outside of the blocks.
        block: rows of every block.
        mixers: further rows of a block by the kind of its mixer, as in `config.mixer_types`.
        dropped: patterns of their tensors that only repeat what the config says.
        copies: names of theirs that, where they are there without a row, must equal another of theirs.
    """

    model: tuple[Row, ...]
    block: tuple[Row, ...]
    mixers: Mapping[str, tuple[Row, ...]]
    dropped: tuple[str, ...] = ()
    copies: Mapping[str, str] | None = None

    def rows(self, config: PreTrainedConfig) -> list[Row]:
        """The rows of a model of ours, each name written out and used once.

        Raises:
            ValueError: the table uses a name twice.
        """
        rows = [*self.model]
        for layer, kind in enumerate(config.mixer_types):
            rows += [row.within(LAYER.format(layer)) for row in (*self.block, *self.mixers[kind])]
        rows = [row for row in rows if row.when is None or row.when(config)]
        for names in ([row.ours for row in rows], [name for row in rows for name in row.parts]):
            twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
            if twice:
                raise ValueError(f"Conversion table: expected every name once, got twice: {some(twice)}.")
        return rows

    def to_ours(self, config: PreTrainedConfig, source: Source) -> dict[str, Recipe]:
        """Recipes of our tensors from theirs."""
        recipes = {}
        for row in self.rows(config):
            sizes = row.sizes(config) if row.sizes else [source.shape(name)[0] for name in row.parts]
            pieces = tuple(Piece(name, 0, size) for name, size in zip(row.parts, sizes, strict=True))
            for piece in pieces:
                if source.shape(piece.name)[0] != piece.stop:
                    got = source.shape(piece.name)
                    raise ValueError(
                        f"{piece.name}: expected {piece.stop} rows by the config, got the shape {tuple(got)}. Do the "
                        "weights belong to this config.json?"
                    )
            recipes[row.ours] = Recipe(pieces, -1 if row.channel else 0)
        return recipes

    def to_theirs(self, config: PreTrainedConfig, source: Source) -> dict[str, Recipe]:
        """Recipes of their tensors from ours."""
        recipes = {}
        for row in self.rows(config):
            sizes = row.sizes(config) if row.sizes else [source.shape(row.ours)[0]]
            start = 0
            for name, size in zip(row.parts, sizes, strict=True):
                recipes[name] = Recipe((Piece(row.ours, start, start + size),), 1 if row.channel else 0)
                start += size
        return recipes

    def is_dropped(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.dropped)


def expect_names(found: Iterable[str], wanted: Iterable[str], subject: str) -> None:
    """Raise a ValueError that says which names are missing and which are unknown, unless they are the same."""
    found, wanted = set(found), set(wanted)
    wrong = [
        f"{word} {some(sorted(names))}"
        for word, names in (("is missing", wanted - found), ("has the unknown", found - wanted))
        if names
    ]
    if wrong:
        raise ValueError(
            f"{subject}: {' and '.join(wrong)}. Expected the tensors that its config.json asks for; another version of "
            "the library may name them differently."
        )


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
