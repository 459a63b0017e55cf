"""The mechanisms on random embeddings: who solves what, the bound that no memory passes, a long stream."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts import load


@pytest.fixture(scope="module")
def managed() -> ModuleType:
    return load("benchmarks/managed.py")


@pytest.fixture(scope="module")
def rows(managed: ModuleType) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["task"], row["mechanism"]): row for row in managed.measure(managed.short(8))}


def test_hybrid_solves_all_and_memory_what_was_signalled(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    for (task, mechanism), row in rows.items():
        assert row["questions"] == (32 if task == "streaming" else 8)
        if mechanism == "hybrid" or (mechanism == "memory" and task != "uniform"):
            assert (row["right"], row["misled"]) == (row["questions"], 0), (task, mechanism)
    assert rows["uniform", "memory"]["right"] < 6
    outcomes = rows["pollution", "memory"]["outcomes"]
    assert outcomes["inserted"] == 8 * 32  # with noise, until the table is full
    assert outcomes["unconvincing"] == 8 * 16  # every invalid event
    assert outcomes["evicted"] + outcomes["overwritten"] == 8 * (16 + 256 - 32)  # noise makes room for noise


def test_memory_answers_for_every_version(managed: ModuleType) -> None:
    task = managed.Task("temporal", managed.Sizes(filler=0, queries=4), "any")
    samples, space = [managed.sample(task, 0, index) for index in range(12)], managed.Space(task.vocabulary)
    readings, _ = managed.remembered(samples, space, 32, 64)
    for one, recalled in zip(samples, readings, strict=True):
        found = [space.value(reading.found) for reading in recalled]
        assert found == [query.answer.value for query in one.queries]


def test_what_has_no_life_cycle_fails(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    for mechanism, task in (
        ("linear", "overwrite"),
        ("linear", "pollution"),
        ("fifo", "recall"),
        ("fifo", "pollution"),
        ("window", "uniform"),
        ("window", "pollution"),
        ("sparse", "overwrite"),
        ("sparse", "temporal"),
        ("sparse newest", "temporal"),
        ("sparse newest", "pollution"),
    ):
        assert rows[task, mechanism]["right"] <= 6, (task, mechanism)
    assert rows["uniform", "sparse"]["right"] == 8


def chance_of_memory(managed: ModuleType, streams: int = 300) -> float:
    """How probable it is that a memory within the bound is right so often on streams of 64 facts for 8 slots."""
    task = managed.Task("uniform", managed.Sizes(slots=8, facts=8, filler=0), "any")
    samples = [managed.sample(task, 0, index) for index in range(streams)]
    space = managed.Space(task.vocabulary)
    readings, _ = managed.remembered(samples, space, 8, 64)
    right = sum(space.value(r.found) == s.queries[0].answer.value for s, (r,) in zip(samples, readings, strict=True))
    return managed.chance(right, streams, managed.uniform_bound(task.sizes, task.vocabulary.values))


def test_no_memory_passes_the_bound_unless_it_knows_the_question(
    managed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chance_of_memory(managed) > 1e-3
    assert managed.chance(3, 3, 0.5) == pytest.approx(1 / 8)
    # A writer that sees one in four questions beforehand is caught.
    plain = managed.as_event
    asked = {}

    def leaking(items: Any, space: Any) -> Any:
        event = plain(items, space)
        keep = [item is not None and (row % 4 > 0 or item[1] in asked[row]) for row, item in enumerate(items)]
        return event._replace(present=event.present & torch.tensor(keep))

    remembered = managed.remembered

    def peeking(samples: Any, *args: Any) -> Any:
        asked.update({row: {query.answer for query in one.queries} for row, one in enumerate(samples)})
        return remembered(samples, *args)

    monkeypatch.setattr(managed, "as_event", leaking)
    monkeypatch.setattr(managed, "remembered", peeking)
    assert chance_of_memory(managed) < 1e-6


@pytest.mark.slow
def test_a_stream_of_131072_tokens(managed: ModuleType) -> None:
    rows = managed.measure(managed.long(1, 131072))
    pooled = {row["mechanism"]: row for row in managed.pooled(rows)}
    assert (pooled["hybrid"]["right"], pooled["hybrid"]["questions"]) == (5, 5)
    low, high = pooled["hybrid"]["active_chunks"]
    assert low <= 2
    assert 8 <= high <= 12  # 8 that the look-up finds of 128, the running one, up to three of slots
    found = {(row["task"], row["mechanism"]): row["right"] for row in rows}
    assert found["uniform", "memory"] == 0  # of 2048 facts the table holds 32
    assert found["uniform", "sparse"] == 1
    assert sum(found[task, "sparse"] for task in ("overwrite", "temporal", "pollution")) < 3
    assert all(found[task, "memory"] for task in ("recall", "overwrite", "temporal", "pollution"))


def test_the_look_up_finds_an_event_across_a_border(managed: ModuleType) -> None:
    """Its key is the last token of one chunk and its end in the next: both are found."""
    task = managed.Task("recall", replace(managed.SIZES, filler=0), "any")
    one = managed.sample(task, 0, 0)
    space = managed.Space(task.vocabulary)
    keys, _ = space.pairs(one.events)
    end = one.ends[7]
    assert end == 40
    look_up = managed.LookUp(one, keys, task.vocabulary, managed.Grid(chunk=38, top=2))
    ids = one.ids.copy()
    ids[-3] = ids[end - 3]
    look_up.ids = torch.tensor(ids)
    assert sorted(look_up(keys[7], len(ids) - 1)) == [0, 1]
    assert look_up(keys[7], 38 + 5) == [0]  # what is not complete is not there yet


def test_the_script_writes_what_it_says(
    managed: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "managed.json"
    managed.main(["--streams", "1", "--json", str(results)])
    content = json.loads(results.read_text())
    assert {"date", "command", "machine", "versions", "settings", "seconds", "peak_bytes", "rows"} <= content.keys()
    assert len(content["rows"]) == 7 * 7
    assert "sparse newest" in capsys.readouterr().out
