"""A model of ours as a repository of the Hub, which loads with `trust_remote_code=True` where memzoo is installed.

python -m memzoo.conversion.hub SRC DST --card card.json   # a folder, ready to be pushed
python -m memzoo.conversion.hub DST --push me/name --dry-run   # what a push would upload
python -m memzoo.conversion.hub DST --push me/name             # the push; may be joined with the first line

What `trust_remote_code` runs is one line, `from memzoo import ...`, and no copy of this package.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig

import memzoo
from memzoo.configuration.base import SHIM, MemoryConfig
from memzoo.conversion.checkpoint import COMPANIONS, INDEX, WEIGHTS, Checkpoint, copy_files, expect_new, new_folder
from memzoo.conversion.convert import expect_shapes, read_source

AUTO_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
"""Of the classes in a row of `memzoo.ARCHITECTURES`."""
TASKS = {"ForCausalLM": "text-generation", "ForSequenceClassification": "text-classification"}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NOT_STATED = "Not stated."


@dataclass(frozen=True)
class Result:
    """A number that was measured.

    Args:
        metric: its name, such as `"perplexity"`.
        value: the number.
        dataset: what it was measured on.
        how: the conditions, in a few words.
    """

    metric: str
    value: float
    dataset: str
    how: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)) or not math.isfinite(self.value):
            raise ValueError(f"card: result {self.metric!r}: expected a finite number, got {self.value!r}.")


@dataclass(frozen=True)
class Card:
    """What a model card says that a checkpoint does not know. What is left out is said to be left out.

    Args:
        name: of the model: its repository, or any.
        license: an identifier of the Hub, such as `"apache-2.0"`.
        training: on what and how the model was trained, in Markdown.
        datasets: data sets of the Hub among that.
        base_model: the model of the Hub that this one comes from.
        language: codes of the languages, such as `"en"`.
        results: what was measured.
    """

    name: str
    license: str | None = None
    training: str | None = None
    datasets: Sequence[str] = ()
    base_model: str | None = None
    language: Sequence[str] = ()
    results: Sequence[Result] = field(default=())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], subject: str = "card") -> Card:
        """A card of plain values, as in a JSON file.

        Raises:
            ValueError: unknown or missing fields.
        """
        results = values.get("results", ())
        parts: list[tuple[type[Card] | type[Result], Any]] = [(cls, values), *((Result, result) for result in results)]
        for kind, found in parts:
            known = {f.name for f in fields(kind)}
            if not isinstance(found, Mapping) or not set(found) <= known:
                raise ValueError(f"{subject}: expected a {kind.__name__} of {sorted(known)}, got {found!r}.")
        try:
            return cls(**{**values, "results": tuple(Result(**result) for result in results)})
        except TypeError as error:
            raise ValueError(f"{subject}: {error}. Add the field.") from error

    def write(self, config: PreTrainedConfig, checkpoint: Checkpoint, folder: Path) -> None:
        """README.md of `folder`: the Hub's metadata and a description."""
        (architecture,) = config.architectures or [""]
        task = next((task for ending, task in TASKS.items() if architecture.endswith(ending)), None)
        papers = re.findall(r"arXiv (\d{4}\.\d{5})", inspect.getdoc(type(config)) or "")
        results = [EvalResult(task or "other", r.dataset, r.dataset, r.metric, r.value) for r in self.results]
        data = ModelCardData(
            model_name=self.name,
            license=self.license,
            library_name="transformers",
            pipeline_tag=task,
            tags=["memzoo", config.model_type, *(f"arxiv:{paper}" for paper in dict.fromkeys(papers))],
            datasets=list(self.datasets) or None,
            base_model=self.base_model,
            language=list(self.language) or None,
            eval_results=results or None,
        )
        tokenizer = any(folder.glob("tokenizer*"))
        lines = ["---", data.to_yaml(), "---", "", *self._sections(architecture, config, checkpoint, tokenizer), ""]
        ModelCard("\n".join(lines), ignore_metadata_errors=False).save(folder / "README.md")

    def _sections(
        self, architecture: str, config: PreTrainedConfig, checkpoint: Checkpoint, tokenizer: bool
    ) -> list[str]:
        summary = (inspect.getdoc(type(config)) or "").split("\n\n")[0].replace("\n", " ")
        ending = next((ending for ending in TASKS if architecture.endswith(ending)), "")
        kinds = ["AutoTokenizer"] if tokenizer else []
        measured = [(r.metric, str(r.value), r.dataset, r.how) for r in self.results]
        loads = [f'tokenizer = AutoTokenizer.from_pretrained("{self.name}")'] if tokenizer else []
        return [
            f"# {self.name}",
            "",
            f"`{architecture}` of memzoo. {summary}",
            "",
            "## Sizes",
            "",
            *_table(("", ""), _sizes(config, checkpoint)),
            "",
            "## Use",
            "",
            f"With the Python package `memzoo` (written by version {memzoo.__version__}), to which the code of this "
            "repository leads in one line:",
            "",
            "```python",
            f"from transformers import {', '.join(sorted([f'AutoModel{ending}', *kinds]))}",
            "",
            *loads,
            f'model = AutoModel{ending}.from_pretrained("{self.name}", trust_remote_code=True)',
            "```",
            "",
            "## Training data",
            "",
            self.training or NOT_STATED,
            "",
            "## Results",
            "",
            *(_table(("metric", "value", "data", "how"), measured) if measured else [NOT_STATED]),
            "",
            "## Licence",
            "",
            self.license or NOT_STATED,
        ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _sizes(config: PreTrainedConfig, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """The checkpoint's sizes, and the other options in which its config differs from a new one."""
    count = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.files)
    plain = {f.name for f in fields(PreTrainedConfig)}
    own = {f.name for f in fields(config)} - plain
    changed = [name for name in config.to_diff_dict() if name in own]
    return [
        ("parameters", f"{count:,}"),
        ("dtype", str(config.dtype).removeprefix("torch.")),
        *((f"`{name}`", f"`{getattr(config, name)}`") for name in dict.fromkeys((*SIZES, *changed))),
    ]


def export(source: str | Path, destination: str | Path, card: Card) -> Path:
    """Make a folder that is a repository of the Hub of a checkpoint of ours.

    It holds the checkpoint's weights, tokenizer and generation options as they are, a config.json whose `auto_map`
    leads through a module of one line to this package, and a model card. It loads with `trust_remote_code=True` in a
    process that has not imported memzoo; where memzoo is not installed, transformers says that it is missing. What is
    saved of a model that was loaded so has the module again.

    Args:
        source: a folder with a checkpoint, or the name of a repository on the Hub.
        destination: a folder that does not exist yet; written beside and renamed.
        card: what the model card shall say.

    Returns:
        The destination.

    Raises:
        ValueError: an existing destination, a checkpoint that is none of ours, weights that do not fit the config.
    """
    destination = Path(destination)
    expect_new(destination)
    folder, raw = read_source(source)
    row = next((row for row in memzoo.ARCHITECTURES if row[0].model_type == raw.get("model_type")), None)
    if row is None:
        raise ValueError(
            f"{source}: expected a checkpoint of memzoo, got model_type={raw.get('model_type')!r}. Convert it first "
            "(python -m memzoo.conversion.convert)."
        )
    config: MemoryConfig = row[0].from_pretrained(folder)
    kind = next((kind for kind in row[1:] if [kind.__name__] == config.architectures), None)
    if kind is None:
        raise ValueError(
            f"{source}: expected one of {[kind.__name__ for kind in row[1:]]} as its architecture, got "
            f"{config.architectures}. Save the model with save_pretrained."
        )
    with Checkpoint(folder) as checkpoint:
        with torch.device("meta"):
            model = kind(config)
        expect_shapes({name: tuple(checkpoint.shape(name)) for name in checkpoint.files}, model, str(source))
        config.auto_map = {auto: f"{SHIM}.{kind.__name__}" for auto, kind in zip(AUTO_CLASSES, row, strict=True)}
        with new_folder(destination) as fresh:
            copy_files(folder, fresh, (*COMPANIONS, *set(checkpoint.files.values()), INDEX))
            config.save_pretrained(fresh)
            card.write(config, checkpoint, fresh)
    return destination


def push(
    folder: str | Path, repository: str, *, private: bool = False, token: str | None = None, dry_run: bool = False
) -> dict[str, int]:
    """Upload a folder that `export` made, as one commit; the repository is made where there is none.

    Args:
        folder: from `export`.
        repository: its name on the Hub, `"owner/name"`.
        private: whether a repository that is made is private.
        token: of the Hub; `None` for the one that `hf auth login` keeps.
        dry_run: only say what would be uploaded, without a network.

    Returns:
        The files and their sizes in bytes.

    Raises:
        ValueError: a folder that `export` has not made, a name that the Hub does not take.
    """
    folder = Path(folder)
    validate_repo_id(repository)
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    missing = sorted({"README.md", "config.json", f"{SHIM}.py"} - set(files))
    if missing or not {WEIGHTS, INDEX} & set(files):
        raise ValueError(
            f"{folder}: expected a folder that export made, got none of {missing or [WEIGHTS]}. Export it."
        )
    if not dry_run:
        api = HfApi(token=token)
        name = api.create_repo(repository, private=private, exist_ok=True).repo_id
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by memzoo")
    return files


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m memzoo.conversion.hub",
        description="Export a checkpoint of memzoo as a repository of the Hub, and push it.",
    )
    parser.add_argument("source", metavar="SRC", help="a folder, or a repository of the Hub")
    parser.add_argument("destination", metavar="DST", nargs="?", help="a new folder; none if SRC is exported already")
    parser.add_argument("--card", type=Path, metavar="JSON", help=f"file of {', '.join(f.name for f in fields(Card))}")
    parser.add_argument("--push", metavar="OWNER/NAME", help="repository to upload to")
    parser.add_argument("--private", action="store_true", help="make it a private one")
    parser.add_argument("--dry-run", action="store_true", help="only show what --push would upload")
    given = parser.parse_args(arguments)
    if (given.private or given.dry_run) and given.push is None:
        parser.error("--private and --dry-run belong to --push")
    if (given.card is None) != (given.destination is None):
        parser.error("DST and --card belong together")
    if given.destination is None and given.push is None:
        parser.error("expected DST and --card for an export, or --push for a folder that is exported already")
    try:
        path = given.source
        if given.destination is not None:
            card = Card.from_dict(json.loads(given.card.read_text()), str(given.card))
            path = export(given.source, given.destination, card)
        if given.push is not None:
            files = push(path, given.push, private=given.private, dry_run=given.dry_run)
            for name, size in files.items():
                print(f"{size:>15,}  {name}")
            print(f"{'would upload' if given.dry_run else 'uploaded'} {len(files)} files to {given.push}")
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(path)


if __name__ == "__main__":
    main()
