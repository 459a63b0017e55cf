"""The memory-managed model on the six tasks: what it is told, how it is scored, that its memory is what it needs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scripts import load

from memzoo.modeling.managed_calibration import Calibration, Tried


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return load("benchmarks/managed_train.py")


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    return load("benchmarks/managed_speed.py")


def test_sizes_are_those_promised(training: ModuleType) -> None:
    counts = {name: training.Learner(setup, "managed", "none", 0) for name, setup in training.SETUPS.items()}
    assert counts["full"].model.num_parameters() == 2_702_553  # 2.74M in the paper
    assert counts["twin"].model.num_parameters() == pytest.approx(60e3, rel=0.05)
    assert counts["full"].setup.vocabulary.size == 1024


def test_the_oracle_says_no_more_than_asked(training: ModuleType) -> None:
    setup = training.SETUPS["full"]
    batch = training.drawn(setup.task("temporal", "train", 16), 0, range(3))
    assert training.said(batch, setup.vocabulary, "none") == {}
    versions = training.said(batch, setup.vocabulary, "versions")
    assert set(versions) == {"versions", "query_versions"}
    keys = training.said(batch, setup.vocabulary, "keys")
    assert set(keys) == {"versions", "query_versions", "key_ids", "query_key_ids"}
    asked = batch.answers != training.IGNORED
    assert bool((keys["query_key_ids"][~asked] == -1).all())
    assert torch.equal(keys["query_key_ids"][asked] + 32, batch.ids[:, :-2][asked[:, 2:]])
    assert int(keys["key_ids"].min()) >= 0


def test_streams_are_trained_at_a_scale_and_tested_whole(training: ModuleType) -> None:
    setup = training.SETUPS["full"]
    assert setup.task("uniform", "held_out").sizes == replace(setup.sizes, queries=1)
    assert setup.task("streaming", "held_out").sizes == replace(setup.sizes, queries=4)
    small = setup.task("pollution", "train", 8).sizes
    assert (small.slots, small.facts, small.filler, small.queries, small.crowd) == (8, 8, 8, 8, 8)
    assert setup.task("temporal", "train", 32).sizes == replace(setup.sizes, queries=4)


def test_scores_are_of_the_answers(training: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(training.SETUPS["twin"], tasks=("overwrite", "streaming"))
    learner = training.Learner(setup, "backbone", "none", 0)

    def saying(field: str) -> dict[str, dict[str, int]]:
        def logits(batch: training.Batch, labels: object = None) -> tuple[torch.Tensor, None]:
            words = getattr(batch, field)[batch.answers != training.IGNORED].clamp(min=0)
            return torch.nn.functional.one_hot(words, setup.vocabulary.size).float(), None

        monkeypatch.setattr(learner, "logits", logits)
        return learner.test("held_out", 20)

    right, stale = saying("answers"), saying("stale")
    assert training.pooled(right)["right_samples"] == training.pooled(right)["samples"] == 40
    assert right["streaming"]["questions"] == right["streaming"]["right"] == 80
    assert right["overwrite"]["misled"] == 0
    assert stale["overwrite"] == {**right["overwrite"], "right": 0, "right_samples": 0, "misled": 20}


def test_calibrates_on_other_streams_than_it_tests(training: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, given = training.Learner(training.SETUPS["twin"], "managed", "versions", 0), []

    def calibrated(batches: list[dict[str, torch.Tensor]], candidates: int) -> Calibration:
        assert not learner.model.training
        given.extend(batches)
        return Calibration(0.5, (3, 4), [Tried(1.0, 1.0, 0.25)])

    monkeypatch.setattr(learner.model, "calibrate_fallback", calibrated)
    found = learner.calibrate(3)
    assert found == {
        "threshold": 0.5,
        "lengths": (3, 4),
        "tried": [{"threshold": 1.0, "recall": 1.0, "asked": 0.25}],
    }
    for name, batch in zip(learner.setup.tasks, given, strict=True):
        tested = training.drawn(learner.setup.task(name, "held_out"), 0, range(3))
        assert batch["input_ids"].shape != tested.ids.shape or not torch.equal(batch["input_ids"][:, :-1], tested.ids)
        asked = batch["labels"] != training.IGNORED
        assert int(asked.sum()) == 3
        assert set(batch["input_ids"][asked.roll(-1, 1)].tolist()) == {load("benchmarks/managed_tasks.py").ANS}
        assert {x.shape for x in batch.values()} == {batch["labels"].shape}
        assert set(batch) == {"input_ids", "attention_mask", "labels", "versions", "query_versions"}


@pytest.mark.slow
def test_the_twin_needs_its_memory(training: ModuleType) -> None:
    """About 60k parameters, told nothing: which key is which, what to store and how to read it, it learns."""
    setup, found = training.SETUPS["twin"], {}
    for model in training.MODELS:
        learner = training.Learner(setup, model, "none", 0)
        for record in learner.train(100, 0.25):
            assert math.isfinite(record["loss"])
        found[model] = learner.test("held_out", 48)
    for task in setup.tasks:
        right = {model: counts[task]["right"] / counts[task]["questions"] for model, counts in found.items()}
        assert right["managed"] > 0.8, right
        assert right["backbone"] < 0.4, right


def test_the_script_writes_what_it_says(
    training: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "train.json"
    command = ["--setup", "twin", "--steps", "3", "--samples", "2", "--labels", "0.5,0", "--json", str(results)]
    training.main(command)
    content = json.loads(results.read_text())
    assert {"date", "command", "machine", "versions", "settings", "rows"} <= content.keys()
    assert [(row["model"], row["labelled"]) for row in content["rows"]] == [
        ("managed", 0.5),
        ("managed", 0.0),
        ("backbone", 0.0),
    ]
    for row in content["rows"]:
        assert row["steps"] == 3
        assert row["held_out"]["all"]["samples"] == 4
        labelled = [record["write_loss"] is not None for record in row["log"]]
        assert labelled == [row["labelled"] > 0] * 3
    assert "managed, 50% labels, seed 0" in capsys.readouterr().out
    training.main([*command[:-2], "--minutes", "0", "--models", "backbone"])
    assert "1/3" in capsys.readouterr().out


@pytest.mark.parametrize("good", [True, False])
def test_promises_of_speed_are_judged(speed: ModuleType, good: bool) -> None:
    times = {"managed": 8.0 if good else 6.0, "managed-slots": 9.0 if good else 6.5, "managed-backbone": 10.0}
    training = [{"case": name, "tokens": 64, "tokens_per_second": value} for name, value in times.items()]
    far = {"managed": 9.0, "managed-slots": 1.1 if good else 1.2}
    near = {"managed": 1.5, "managed-slots": 1.0}
    decoding = [
        {"case": name, "context": context, "ms_per_token": cost[name]}
        for context, cost in ((speed.NEAR, near), (speed.FAR, far))
        for name in cost
    ]
    table = {"1": 1.0, "8": 1.9 if good else 2.1}
    results = {"training": training, "decoding": decoding, "table_seconds": table}
    found = speed.promises(results)
    assert [promise["holds"] for promise in found] == [good] * 4
    assert f"0.50 ms after 256, {far['managed'] - far['managed-slots']:.2f} ms after 65536" in speed.look_ups(results)


def test_the_speed_of_the_table_is_measured(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "EVENTS", 3)
    assert speed.through_table(2, 1) > 0
    assert speed.config().write_stride == speed.STRIDE == 16
    backbone = speed.run.CASES["managed-backbone"].build().model
    runner = speed.run.CASES["managed"].build()
    ids = speed.run.token_ids(80, "cpu")
    assert speed.run.counted_flops(lambda: runner.loss(ids).backward()) > 0  # by hooks on the modules
    managed = runner.model
    assert type(backbone).__name__ == "SWLAForCausalLM"
    own = {name for name, _ in managed.named_parameters()} - {name for name, _ in backbone.named_parameters()}
    assert own
    assert all("memory" in name for name in own)
