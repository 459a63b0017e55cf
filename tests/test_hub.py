"""Repositories of the Hub: loading in a process that knows nothing of memzoo, saving again, cards, pushes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from huggingface_hub import ModelCard
from tolerances import OP, close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import memzoo
from memzoo.conversion import hub
from memzoo.conversion.hub import Card, Result, export, push

CARD = Card(
    name="someone/tiny",
    license="apache-2.0",
    training="Sixty-one tokens, in no order.",
    datasets=("someone/tokens",),
    base_model="someone/base",
    language=("en",),
    results=(Result("perplexity", 60.93, "held-out tokens", "one pass"), Result("accuracy", 0.25, "held-out tokens")),
)
LOAD = """
import sys, torch, transformers
from pathlib import Path
assert "memzoo" not in sys.modules
for folder, auto in zip(map(Path, sys.argv[2::2]), sys.argv[3::2]):
    model = getattr(transformers, auto).from_pretrained(folder / sys.argv[1], trust_remote_code=True).eval()
    with torch.no_grad():
        torch.save(model(torch.load("ids.pt")).logits, folder / "logits.pt")
    model.save_pretrained(folder / "again")
    type(model.config)(**{**model.config.to_diff_dict(), "auto_map": None}).save_pretrained(folder / "plain")
"""
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "memzoo":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
"""


def checkpoint(folder: Path, name: str = "titans-mag-e1", **options: Any) -> Path:
    """A lively model saved the usual way."""
    zoo.build(name, **options).save_pretrained(folder)
    return folder


def run(code: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess:
    """In a fresh process, which keeps its copies of remote code to itself."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(cwd / "modules")}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400)


# Loading where nothing of ours is imported


@pytest.mark.slow
def test_it_loads_in_a_fresh_process_and_again_when_saved(tmp_path: Path) -> None:
    """Models and a classifier, all by the same two processes, since most of their time is spent on imports."""
    models = {
        ("titans", "AutoModelForCausalLM"): zoo.build("titans-mag-e1"),
        ("deltanet", "AutoModelForCausalLM"): zoo.build("deltanet-e4"),
        ("classifier", "AutoModelForSequenceClassification"): zoo.classifier("swla-e1", torch.float32),
    }
    ids, folders = zoo.tokens(2, 11), [tmp_path / name for name, _ in models]
    torch.save(ids, tmp_path / "ids.pt")
    for folder, ((_, auto), model) in zip(folders, models.items(), strict=True):
        model.save_pretrained(folder / "source")
        export(folder / "source", folder / "exported", CARD)
        assert f'{auto}.from_pretrained("someone/tiny"' in (folder / "exported" / "README.md").read_text()
    for source in ("exported", "again"):
        done = run(LOAD, tmp_path, source, *itertools.chain(*models))
        assert done.returncode == 0, done.stderr
        for folder, model in zip(folders, models.values(), strict=True):
            with torch.no_grad():
                wanted = model.eval()(ids).logits
            close(torch.load(folder / "logits.pt"), wanted, OP[torch.float32])  # processes may align sums otherwise
            (folder / "logits.pt").unlink()
    for folder in folders:
        again, plain = folder / "again", folder / "plain"
        assert (again / "modeling_memzoo.py").read_text() == (folder / "exported" / "modeling_memzoo.py").read_text()
        assert json.loads((again / "config.json").read_text())["auto_map"].keys() == set(hub.AUTO_CLASSES)
        # What has nothing to do with the Hub is saved as ever, in that process too.
        assert [path.name for path in plain.iterdir()] == ["config.json"]
        assert json.loads((plain / "config.json").read_text()).get("auto_map") is None


def test_a_tokenizer_of_its_own_beside_the_shim(tmp_path: Path) -> None:
    """A tokenizer's entry of `auto_map` is a pair."""
    config = zoo.config_of("deltanet-e4")
    config.auto_map = {"AutoConfig": f"{hub.SHIM}.DeltaNetConfig", "AutoTokenizer": ["other.SlowTokenizer", None]}
    config.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", f"{hub.SHIM}.py"]
    assert (tmp_path / f"{hub.SHIM}.py").read_text() == "from memzoo import DeltaNetConfig\n"


@pytest.mark.slow
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    export(checkpoint(tmp_path / "source"), tmp_path / "exported", CARD)
    done = run(WITHOUT + LOAD, tmp_path, "exported", ".", "AutoModelForCausalLM")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "requires the following packages that were not found in your environment: memzoo" in last, done.stderr


@pytest.mark.parametrize("row", memzoo.ARCHITECTURES, ids=lambda row: row[0].model_type)
def test_every_architecture_is_exported(row: tuple, tmp_path: Path) -> None:
    name = next(name for name, config in zoo.TINY.items() if type(config) is row[0])
    source = checkpoint(tmp_path / "source", name)
    (source / "tokenizer.json").write_text("a tokenizer")
    (source / "README.md").write_text("another card")
    (source / "optimizer.pt").write_text("not for others")
    folder = export(source, tmp_path / "exported", CARD)
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_memzoo.py"}
    assert {path.name for path in folder.iterdir()} == names | {"tokenizer.json"}
    (line,) = (folder / "modeling_memzoo.py").read_text().splitlines()
    assert line == f"from memzoo import {', '.join(sorted(kind.__name__ for kind in row))}"
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    text = (folder / "README.md").read_text()
    assert "another card" not in text
    assert 'AutoTokenizer.from_pretrained("someone/tiny")' in text
    assert f"| parameters | {zoo.build(name).num_parameters():,} |" in text
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is row[2]
    assert isinstance(AutoModelForSequenceClassification.from_pretrained(folder), row[3])


def test_a_memory_fits_the_exported_model(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    memzoo.save_memory(model(zoo.tokens(1, 9)).cache, tmp_path / "memory.safetensors")
    exported = AutoModelForCausalLM.from_pretrained(export(source, tmp_path / "exported", CARD)).eval()
    assert memzoo.load_memory(tmp_path / "memory.safetensors", exported).get_seq_length() == 9


def test_shards_are_exported(tmp_path: Path) -> None:
    zoo.build("swla-e1").save_pretrained(tmp_path / "source", max_shard_size="20KB")
    folder = export(tmp_path / "source", tmp_path / "exported", CARD)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    for name, weight in zoo.build("swla-e1").state_dict().items():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder).state_dict()[name], weight)


# Cards


def test_the_card_says_what_it_was_told(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", tie_word_embeddings=True)
    card = ModelCard.load(export(source, tmp_path / "exported", CARD) / "README.md")
    data = card.data
    assert (data.license, data.base_model, data.datasets, data.language) == (
        "apache-2.0",
        "someone/base",
        ["someone/tokens"],
        ["en"],
    )
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.tags == ["memzoo", "memzoo_titans", "arxiv:2501.00663"]
    assert [(r.metric_type, r.metric_value, r.dataset_name) for r in data.eval_results] == [
        ("perplexity", 60.93, "held-out tokens"),
        ("accuracy", 0.25, "held-out tokens"),
    ]
    assert "| perplexity | 60.93 | held-out tokens | one pass |" in card.text
    assert "Sixty-one tokens, in no order." in card.text
    assert "| `variant` | `mag` |" in card.text
    assert "| `num_hidden_layers` | `2` |" in card.text
    assert "`TitansForCausalLM` of memzoo. Titans: a deep memory trained by gradient descent" in card.text
    tied = AutoModelForCausalLM.from_pretrained(source).num_parameters()
    assert f"| parameters | {tied:,} |" in card.text
    assert "Not stated." not in card.text


def test_what_the_card_was_not_told_it_does_not_say(tmp_path: Path) -> None:
    card = ModelCard.load(export(checkpoint(tmp_path / "source"), tmp_path / "exported", Card("x")) / "README.md")
    assert card.text.count("Not stated.") == 3
    assert card.data.eval_results is None
    assert not {"license", "datasets", "base_model", "language", "model-index"} & card.data.to_dict().keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "missing 1 required positional argument: 'name'"),
        ({"name": "x", "perplexity": 3}, r"expected a Card of \['base_model', .*got {'name': 'x', 'perplexity': 3}"),
        ({"name": "x", "results": [{"metric": "loss"}]}, "missing 2 required positional arguments"),
        ({"name": "x", "results": [{"metric": "loss", "score": 1}]}, "expected a Result of .*'score'"),
        ({"name": "x", "results": [{"metric": "loss", "dataset": "y", "value": "low"}]}, "expected a finite number"),
        ({"name": "x", "results": [{"metric": "loss", "dataset": "y", "value": float("nan")}]}, "got nan"),
    ],
    ids=str,
)
def test_bad_cards_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Card.from_dict(values)


# What is refused


def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())

    def refused(message: str, **options: Any) -> None:
        (source / "config.json").write_text(json.dumps({**raw, **options}))
        with pytest.raises(ValueError, match=message):
            export(source, tmp_path / "exported", CARD)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    refused("expected a checkpoint of memzoo, got model_type='llama'. Convert it first", model_type="llama")
    refused(r"expected one of \['TitansModel', .*got \['Other'\]", architectures=["Other"])
    refused("expected the shape|is missing", variant="lmm")
    (tmp_path / "exported").mkdir()
    with pytest.raises(ValueError, match="exported: expected a new folder"):
        export(source, tmp_path / "exported", CARD)


# Pushes


def test_a_dry_run_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a dry run has no business with the Hub")

    monkeypatch.setattr(hub, "HfApi", refuse)
    folder = export(checkpoint(tmp_path / "source"), tmp_path / "exported", CARD)
    files = push(folder, "someone/tiny", dry_run=True)
    assert files == {path.name: path.stat().st_size for path in folder.iterdir()}
    with pytest.raises(ValueError, match=r"got none of \['README.md', 'modeling_memzoo.py'\]. Export it"):
        push(tmp_path / "source", "someone/tiny", dry_run=True)
    with pytest.raises(ValueError, match="Repo id must"):
        push(folder, "not/a/name", dry_run=True)


def test_a_push_makes_the_repository_and_uploads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Api:
        def __init__(self, token: str | None) -> None:
            calls.append(("token", token))

        def create_repo(self, name: str, **options: Any) -> Any:
            calls.append((name, options))
            return type("Url", (), {"repo_id": f"team/{name}"})

        def upload_folder(self, **options: Any) -> None:
            calls.append(("upload", options))

    monkeypatch.setattr(hub, "HfApi", Api)
    folder = export(checkpoint(tmp_path / "source"), tmp_path / "exported", CARD)
    files = push(folder, "tiny", private=True, token="secret")
    assert calls == [
        ("token", "secret"),
        ("tiny", {"private": True, "exist_ok": True}),
        ("upload", {"repo_id": "team/tiny", "folder_path": folder, "commit_message": "Upload by memzoo"}),
    ]
    assert "config.json" in files


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder, card = (str(tmp_path / name) for name in ("source", "exported", "card.json"))
    checkpoint(tmp_path / "source")
    (tmp_path / "card.json").write_text('{"name": "someone/tiny", "results": []}')
    hub.main([source, folder, "--card", card, "--push", "someone/tiny", "--dry-run"])
    shown = capsys.readouterr().out
    assert "would upload 5 files to someone/tiny" in shown
    assert shown.splitlines()[-1] == folder
    hub.main([folder, "--push", "someone/tiny", "--dry-run"])
    assert "modeling_memzoo.py" in capsys.readouterr().out
    for arguments, message in (
        ([source, folder, "--card", card], "expected a new folder"),
        ([source, folder], "DST and --card belong together"),
        ([source, "--dry-run"], "belong to --push"),
        ([source], "expected DST and --card for an export"),
        ([source, "--push", "someone/tiny", "--dry-run"], "Export it"),
    ):
        with pytest.raises(SystemExit) as exit_:
            hub.main(arguments)
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err
