"""Folders of safetensors, read a part of a tensor at a time and written a shard at a time."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from memzoo.conversion.tables import Recipe, Source, some

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
"""What comes along unchanged: the tokenizer, how to generate, and under which terms."""


class Checkpoint:
    """The tensors of a folder with `model.safetensors`, or with shards and their index. A context manager.

    Raises:
        ValueError: no safetensors, or an index that does not fit the shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / INDEX).exists():
            self.files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        elif (folder / WEIGHTS).exists():
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), WEIGHTS)
        else:
            found = sorted(path.name for path in folder.iterdir())
            raise ValueError(
                f"{folder}: expected {WEIGHTS} or {INDEX}, got {some(found) or 'nothing'}. Save the model with "
                "transformers' save_pretrained, which writes safetensors."
            )

    def __enter__(self) -> Checkpoint:
        self._open: dict[str, Any] = {}
        with ExitStack() as stack:
            for name in sorted(set(self.files.values())):
                path = self.folder / name
                if not path.exists():
                    raise ValueError(
                        f"{self.folder}: {INDEX} expects the shard {name}, which is not there. Fetch it again."
                    )
                self._open[name] = stack.enter_context(safe_open(path, framework="pt"))
            held = {name: set(file.keys()) for name, file in self._open.items()}
            wrong = [name for name, file in self.files.items() if name not in held[file]]
            if wrong:
                raise ValueError(f"{self.folder}: {INDEX} expects {some(wrong)} in shards that do not have them.")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _slice(self, name: str) -> Any:
        return self._open[self.files[name]].get_slice(name)

    def shape(self, name: str) -> Sequence[int]:
        return self._slice(name).get_shape()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`."""
        return self._slice(name)[start:stop]


def expect_new(destination: Path) -> None:
    """Raise a ValueError where there is something already."""
    if destination.exists():
        raise ValueError(
            f"{destination}: expected a new folder, got one that exists. Remove it or choose another name."
        )


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder to fill, which is renamed to `destination` once that has gone well."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as beside:
        fresh = Path(beside) / "checkpoint"
        fresh.mkdir()
        yield fresh
        fresh.rename(destination)


def copy_files(source: Path, folder: Path, patterns: Sequence[str] = COMPANIONS) -> None:
    """Copy the files of `source` that fit one of the patterns."""
    for path in sorted({path for pattern in patterns for path in source.glob(pattern) if path.is_file()}):
        shutil.copy(path, folder / path.name)


def write(recipes: Mapping[str, Recipe], source: Source, folder: Path, max_shard_size: int | str) -> None:
    """Make every tensor and write it; no more than a shard is held at a time."""
    plan = {}
    for name, recipe in recipes.items():
        dtype = source.read(recipe.pieces[0].name, 0, 0).dtype
        plan[name] = torch.empty(recipe.shape(source), dtype=dtype, device="meta")
    shards = split_torch_state_dict_into_shards(plan, max_shard_size=max_shard_size)
    with tqdm(total=len(plan), desc="Converting", unit="tensor") as bar:
        for file, names in shards.filename_to_tensors.items():
            tensors = {}
            for name in names:
                tensors[name] = recipes[name].make(source)
                bar.update()
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
