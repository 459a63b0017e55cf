"""Configs by table: which option of theirs is which of ours. What one side cannot say is an error, never dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import PreTrainedConfig

Values = dict[str, Any]
GENERIC = {f.name for f in fields(PreTrainedConfig)} - {"architectures", "transformers_version"}
"""Fields that every config of transformers has; they are carried over as they are."""
BOOKKEEPING = {
    "model_type",
    "architectures",
    "transformers_version",
    "auto_map",
    "_name_or_path",
    "_model_name_or_path",  # this and the next one where the model was read from a GGUF
    "unk_token_id",
    "torch_dtype",
    "output_attentions",
}
"""What a config.json says of itself and of the form of outputs."""


def refuse(subject: str, name: str, got: Any, expected: str, cure: str = "") -> ValueError:
    """An error that names the option, what was expected, what was found and what to do."""
    return ValueError(f"{subject}: {name}={got!r}: expected {expected}.{' ' if cure else ''}{cure}")


@dataclass(frozen=True)
class Option:
    """One or several options of theirs and fields of ours that say the same thing.

    Args:
        theirs: names, each with the value of a config.json without it; `...` where there must be one.
        ours: field names.
        read: their values to ours.
        write: our config to theirs.

    `read` and `write` raise `Unfit` for what the other side cannot say.
    """

    theirs: Values
    ours: tuple[str, ...]
    read: Callable[[Values], Values]
    write: Callable[[PreTrainedConfig], Values]


class Unfit(Exception):  # noqa: N818  # never leaves this package: becomes a ValueError that names the config
    """A name, its value, what was expected, and a cure."""


def same(theirs: str, ours: str | None = None, default: Any = ..., cast: Callable[[Any], Any] = lambda x: x) -> Option:
    """The same value under two names."""
    name = ours or theirs
    return Option({theirs: default}, (name,), lambda v: {name: cast(v[theirs])}, lambda c: {theirs: getattr(c, name)})


def only(theirs: str, value: Any, why: str) -> Option:
    """An option of theirs that must have one value, since we have nothing like it."""

    def read(values: Values) -> Values:
        if values[theirs] != value:
            raise Unfit(theirs, values[theirs], repr(value), why)
        return {}

    return Option({theirs: value}, (), read, lambda c: {theirs: value})


def ours_only(name: str, value: Any, why: str = "") -> Option:
    """A field of ours that must have one value, since they have nothing like it."""

    def write(config: PreTrainedConfig) -> Values:
        if getattr(config, name) != value:
            raise Unfit(name, getattr(config, name), repr(value), why)
        return {}

    return Option({}, (name,), lambda v: {name: value}, write)


def free(*ours: str, **theirs: Any) -> Option:
    """Fields that change nothing that the other side computes; theirs are written with the values given."""
    return Option(theirs, ours, lambda v: {}, lambda c: dict(theirs))


@dataclass(frozen=True)
class Options:
    """All options of an architecture.

    Args:
        config_class: our config.
        table: an option for every field of it.
    """

    config_class: type[PreTrainedConfig]
    table: tuple[Option, ...]
    known: set[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", {name for option in self.table for name in option.theirs})
        ours = [name for option in self.table for name in option.ours]
        wanted = {f.name for f in fields(self.config_class)} - {f.name for f in fields(PreTrainedConfig)}
        if sorted(ours) != sorted(wanted):
            twice = {name for name in ours if ours.count(name) > 1}
            raise ValueError(
                f"Options of {self.config_class.__name__}: expected each field once, missing "
                f"{sorted(wanted - set(ours))}, besides {sorted(set(ours) - wanted)}, twice {sorted(twice)}."
            )

    def to_ours(self, theirs: Mapping[str, Any], subject: str) -> PreTrainedConfig:
        """Our config from their options."""
        unknown = set(theirs) - self.known - GENERIC - BOOKKEEPING
        if unknown:
            found = {name: theirs[name] for name in sorted(unknown)}
            raise ValueError(
                f"{subject}: unknown options {found}. Expected those of a known version; if they change no numbers, "
                "name them to be ignored (--ignore)."
            )
        values = {name: theirs[name] for name in GENERIC & set(theirs)}
        if "torch_dtype" in theirs:
            values.setdefault("dtype", theirs["torch_dtype"])
        for option in self.table:
            given = {name: theirs.get(name, default) for name, default in option.theirs.items()}
            missing = sorted(name for name, value in given.items() if value is ...)
            if missing:
                raise ValueError(f"{subject}: expected the options {missing}, got none. Add them to config.json.")
            values |= self._fit(option.read, given, subject)
        return self.config_class(**values)

    def to_theirs(self, config: PreTrainedConfig, subject: str) -> Values:
        """Their options from our config."""
        values = {name: value for name, value in config.to_diff_dict().items() if name in GENERIC}
        for option in self.table:
            values |= self._fit(option.write, config, subject)
        return values

    @staticmethod
    def _fit(function: Callable[[Any], Values], given: Any, subject: str) -> Values:
        try:
            return function(given)
        except Unfit as unfit:
            raise refuse(subject, *unfit.args) from None
