"""Checkpoints of other libraries in and out.

python -m memzoo.conversion.convert SRC DST              # a known checkpoint to memzoo
python -m memzoo.conversion.convert SRC DST --to qwen3   # a checkpoint of memzoo to another library
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from memzoo.conversion import fla, llama
from memzoo.conversion.checkpoint import COMPANIONS, INDEX, Checkpoint, copy_files, expect_new, new_folder, write
from memzoo.conversion.formats import Format
from memzoo.conversion.tables import Recipe, expect_names

FORMATS = (*llama.FORMATS, *fla.FORMATS)
TARGETS = tuple(dict.fromkeys(format.name for format in FORMATS))
OURS = "memzoo"


def convert(
    source: str | Path,
    destination: str | Path,
    to: str | None = None,
    *,
    revision: str | None = None,
    ignore: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
) -> Path:
    """Convert a checkpoint of a causal language model; every tensor keeps its bits.

    Args:
        source: a folder, or the name of a repository on the Hub.
        destination: a folder that does not exist yet; written beside and renamed.
        to: `"memzoo"`, or for a checkpoint of memzoo `"llama"`, `"qwen2"`, `"qwen3"` or `"fla"`; `None` for memzoo.
        revision: of the repository.
        ignore: options of the source's config.json that are left out.
        max_shard_size: of a file of weights.

    Returns:
        The destination.

    Raises:
        ValueError: an existing destination, an unknown architecture, an option that the other side cannot represent,
            tensors that are missing, unknown or of another shape.
    """
    destination = Path(destination)
    expect_new(destination)
    folder, raw = read_source(source, revision, ignore)
    format, config = plan(raw, to, str(source))
    to_ours = to in (None, OURS)
    with Checkpoint(folder) as checkpoint:
        recipes = inward(format, config, checkpoint) if to_ours else outward(format, config, checkpoint)
        with new_folder(destination) as fresh:
            write(recipes, checkpoint, fresh, max_shard_size)
            if to_ours:
                config.save_pretrained(fresh)
            else:
                (fresh / "config.json").write_text(_json(format.to_theirs(config)))
            copy_files(folder, fresh)
    return destination


def read_source(
    source: str | Path, revision: str | None = None, ignore: Sequence[str] = ()
) -> tuple[Path, dict[str, Any]]:
    """The folder of a checkpoint, fetched from the Hub where it is none here, and its options but the ignored ones."""
    folder = Path(source)
    if not folder.is_dir():
        patterns = ["config.json", "model*.safetensors", INDEX, *COMPANIONS]
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns))
    if not (folder / "config.json").exists():
        raise ValueError(f"{source}: expected a checkpoint with a config.json, got none.")
    raw = json.loads((folder / "config.json").read_text())
    absent = sorted(set(ignore) - set(raw))
    if absent:
        raise ValueError(f"{source}: expected the ignored options in config.json, got none called {absent}.")
    return folder, {name: value for name, value in raw.items() if name not in ignore}


def plan(raw: dict[str, Any], to: str | None, source: str) -> tuple[Format, PreTrainedConfig]:
    """The format concerned and our config."""
    if to not in (None, OURS, *TARGETS):
        raise ValueError(f"to={to!r}: expected one of {(OURS, *TARGETS)}.")
    model_type = raw.get("model_type")
    to_ours = to in (None, OURS)
    if str(model_type).startswith(f"{OURS}_"):
        if to_ours:
            raise ValueError(f"{source}: a checkpoint of memzoo already; expected a target, one of {TARGETS} (--to).")
        config = AutoConfig.for_model(**raw)
        for format in FORMATS:
            if format.name == to and type(config) is format.options.config_class:
                format.to_theirs(config)  # what it cannot represent is found before anything is written
                return format, config
        can = sorted({format.name for format in FORMATS if type(config) is format.options.config_class})
        raise ValueError(f"{source}: to={to!r}: {type(config).__name__} converts to {can or 'nothing else'}.")
    if not to_ours:
        raise ValueError(f"{source}: to={to!r} expects a checkpoint of memzoo, got {model_type!r}. Convert it first.")
    for format in FORMATS:
        if format.model_type == model_type:
            return format, format.to_ours(raw)
    known = sorted(format.model_type for format in FORMATS)
    raise ValueError(
        f"{source}: model_type={model_type!r}: expected one of {known}. Other architectures have no counterpart here."
    )


def inward(format: Format, config: PreTrainedConfig, source: Checkpoint) -> dict[str, Recipe]:
    """Recipes of our tensors."""
    wanted = {name for row in format.table.rows(config) for name in row.parts}
    found = {name for name in source.files if not format.table.is_dropped(name)}
    for name, original in (format.table.copies or {}).items():
        if name in found - wanted and original in found and _equal(source, name, original):
            found.remove(name)
    expect_names(found, wanted, f"{source.folder} ({format.model_type})")
    recipes = format.table.to_ours(config, source)
    model = meta_model(config)
    config.architectures = [type(model).__name__]
    expect_shapes({name: recipe.shape(source) for name, recipe in recipes.items()}, model, str(source.folder))
    return recipes


def outward(format: Format, config: PreTrainedConfig, source: Checkpoint) -> dict[str, Recipe]:
    """Recipes of their tensors."""
    expect_names(source.files, {row.ours for row in format.table.rows(config)}, f"{source.folder} ({OURS})")
    expect_shapes({name: tuple(source.shape(name)) for name in source.files}, meta_model(config), str(source.folder))
    return format.table.to_theirs(config, source)


def _equal(source: Checkpoint, name: str, other: str) -> bool:
    """Whether two tensors are the same, as an output head that is tied but stored is the same as its embedding."""
    return source.shape(name) == source.shape(other) and torch.equal(
        *(source.read(n, 0, source.shape(n)[0]) for n in (name, other))
    )


def meta_model(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A language model of a config without its numbers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **({} if dtype is None else {"dtype": dtype}))


def expect_shapes(shapes: dict[str, tuple[int, ...]], model: torch.nn.Module, subject: str) -> None:
    """Hold the table to the model itself: it must name every parameter of ours, in its shape."""
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expect_names(shapes, wanted, f"{subject} as {type(model).__name__}")
    wrong = {name: (shape, wanted[name]) for name, shape in shapes.items() if shape != wanted[name]}
    if wrong:
        name, (got, expected) = next(iter(wrong.items()))
        raise ValueError(f"{subject}: {name}: expected the shape {expected}, got {got}. Does config.json belong to it?")


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command takes that makes one checkpoint of another."""
    parser.add_argument("source", metavar="SRC", help="a folder, or a repository of the Hub")
    parser.add_argument("destination", metavar="DST", help="a folder that does not exist yet")
    parser.add_argument("--revision", help="of a repository of the Hub")
    parser.add_argument("--ignore", nargs="*", default=(), metavar="NAME", help="options of config.json to leave out")
    parser.add_argument("--max-shard-size", default="5GB", help="of a file of weights")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m memzoo.conversion.convert", description="Convert a checkpoint.")
    add_arguments(parser)
    parser.add_argument("--to", choices=(OURS, *TARGETS), help="library or architecture to write; memzoo by default")
    given = parser.parse_args(arguments)
    try:
        path = convert(
            given.source,
            given.destination,
            given.to,
            revision=given.revision,
            ignore=given.ignore,
            max_shard_size=given.max_shard_size,
        )
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(path)


if __name__ == "__main__":
    main()
