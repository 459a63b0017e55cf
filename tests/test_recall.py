"""Associative recall: the task is what it says, and a delta rule learns it where the benchmark trains it."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
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


@pytest.mark.slow
def test_the_delta_rule_recalls(recall: ModuleType) -> None:
    assert recall.train(recall.MODELS["deltanet"], 16, 2, steps=400, seed=0) > 0.9
