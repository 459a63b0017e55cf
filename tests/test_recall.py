"""Associative recall: the task is what it says, and a delta rule learns it where the benchmark trains it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from scripts import load


@pytest.fixture(scope="module")
def recall() -> ModuleType:
    return load("benchmarks/recall.py")


def test_every_asked_key_was_stated_with_its_value(recall: ModuleType) -> None:
    ids, labels = recall.make_batch(5, 64, 4, seed=3)
    assert torch.equal(ids, recall.make_batch(5, 64, 4, seed=3)[0])
    assert not torch.equal(ids, recall.make_batch(5, 64, 4, seed=4)[0])
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        stated = dict(zip(row[:8:2], row[1:8:2], strict=True))
        assert len(stated) == 4
        places = [t for t, x in enumerate(label) if x != recall.IGNORED]
        assert len(places) == 4
        assert {row[t - 1]: label[t] for t in places} == stated
        assert min(places) > 8
    with pytest.raises(ValueError, match="expected at most 16 pairs"):
        recall.make_batch(5, 64, 17, seed=3)


def test_the_script_writes_what_it_says(
    recall: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "TASKS", {"16": (16, 2)})
    results = tmp_path / "recall.json"
    recall.main(["--tasks", "16", "--seeds", "2", "--steps", "2", "--json", str(results)])
    content = json.loads(results.read_text())
    assert {"date", "command", "machine", "versions", "settings", "rows"} <= content.keys()
    assert [row["model"] for row in content["rows"]] == list(recall.MODELS) == list(content["settings"]["models"])
    for row in content["rows"]:
        assert (row["tokens"], row["pairs"], len(row["accuracy"])) == (16, 2, 2)
    assert "atlas" in capsys.readouterr().out


def test_models_have_equal_memories(recall: ModuleType) -> None:
    """One matrix of the model's width per layer, each in whatever the cache calls it."""
    for name, config in recall.MODELS.items():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        state = model(recall.make_batch(1, 16, 2, seed=0)[0], use_cache=True).cache.states[0].memory
        matrix = state if isinstance(state, torch.Tensor) else state.weights[0]
        assert matrix.shape == (1, 1, 32, 32), name


@pytest.mark.slow
def test_the_delta_rule_recalls(recall: ModuleType) -> None:
    assert recall.train(recall.MODELS["deltanet"], 16, 2, steps=400, seed=0) > 0.9
