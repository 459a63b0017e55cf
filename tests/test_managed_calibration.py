"""The threshold of a managed memory's fallback: chosen by its rule, kept in the config, refused where that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from transformers import PreTrainedModel
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from memzoo import MemoryManagedForCausalLM
from memzoo.modeling import memory_managed

LENGTHS = 5 * zoo.CHUNK, 6 * zoo.CHUNK + 3


def model_of(threshold: float) -> PreTrainedModel:
    return zoo.build("memory_managed-fallback", torch.float64, read_threshold=threshold).eval()


@torch.no_grad()
def answered(threshold: float, batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """The answers and the reader's confidences of the batches, `[N]` each, of a model made with a threshold."""
    answers, confidences = [], []
    for batch in batches:
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        out = model_of(threshold)(**inputs, output_memory=True)
        asked = batch["labels"][:, 1:] != -100
        answers.append(out.logits[:, :-1].argmax(-1)[asked])
        confidences.append(out.read_confidence[0][:, :-1][asked])
    return torch.cat(answers), torch.cat(confidences)


@pytest.fixture(scope="module")
def batches() -> list[dict[str, Tensor]]:
    """Sequences of two lengths, one row padded, whose right answers are what the model says that always looks up; every
    fourth is not asked, and some are wrong."""
    made = []
    for seed, length in enumerate(LENGTHS):
        ids = zoo.tokens(4, length, seed=seed)
        mask = torch.ones_like(ids)
        mask[0, -1:] = 0
        with torch.no_grad():
            says = model_of(1.0)(ids, attention_mask=mask).logits.argmax(-1)
        labels = torch.nn.functional.pad(says, (1, 0))[:, :-1]
        labels[:, 1::7] = (labels[:, 1::7] + 1) % zoo.VOCAB
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)})
        made[-1]["labels"][:, ::4] = -100
    return made


@pytest.mark.parametrize("recall", [1.0, 0.9])
def test_the_threshold_follows_the_rule(batches: list[dict[str, Tensor]], recall: float, tmp_path: Path) -> None:
    """Of thresholds from 1.0 down, the last with which enough answers stay right; each as a model made with it says."""
    model = model_of(0.7)
    found = model.calibrate_fallback(iter(batches), recall, candidates=5)
    thresholds = [each.threshold for each in found.tried]
    wanted = torch.cat([batch["labels"][:, 1:][batch["labels"][:, 1:] != -100] for batch in batches])
    always, confidence = answered(1.0, batches)
    assert thresholds[0] == 1.0
    assert thresholds == sorted(set(thresholds), reverse=True)
    assert set(thresholds[1:]) <= set(confidence.tolist())
    for threshold, kept, asked in found.tried:
        answers, confidence = answered(threshold, batches)
        right = always == wanted
        assert 0 < int(right.sum()) < len(right)
        assert kept == pytest.approx(float((answers == wanted)[right].double().mean()))
        assert asked == pytest.approx(float((confidence < threshold).double().mean()))
    enough = [each.recall >= recall for each in found.tried]
    assert all(enough[:-1])
    assert found.threshold == thresholds[sum(enough) - 1]
    assert found.lengths == (LENGTHS[0] - 1, LENGTHS[1])
    assert (model.config.read_threshold, model.config.calibrated_lengths) == (found.threshold, list(found.lengths))

    model.save_pretrained(tmp_path)
    loaded = MemoryManagedForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert loaded.config.read_threshold == found.threshold
    ids = batches[1]["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert torch.equal(loaded(ids).logits, model_of(found.threshold)(ids).logits)


def test_less_recall_asks_less(batches: list[dict[str, Tensor]]) -> None:
    strict, lax = (model_of(1.0).calibrate_fallback(batches, recall) for recall in (1.0, 0.2))
    assert strict.threshold > lax.threshold
    assert lax.tried[-1].asked < strict.tried[-1].asked


def test_a_calibrated_model_warns_beyond_its_lengths(batches: list[dict[str, Tensor]]) -> None:
    model = model_of(1.0)
    found = model.calibrate_fallback(batches, recall=0.5, candidates=4)
    assert found.threshold < 1.0
    assert found.lengths == (LENGTHS[0] - 1, LENGTHS[1])
    beyond = f"calibrated on contexts of {LENGTHS[0] - 1} to {LENGTHS[1]} tokens and this one is longer"

    def said(work: Callable[[], Any]) -> str:
        logging.warning_once.cache_clear()
        with CaptureLogger(memory_managed.logger) as log, torch.no_grad():
            work()
        return log.out  # which is there at the end

    assert said(lambda: model(zoo.tokens(1, LENGTHS[1]))) == ""
    assert said(lambda: model(zoo.tokens(1, LENGTHS[1] + 1))).count(beyond) == 1
    model.config.calibrated_lengths = [1, 2]
    assert said(lambda: model.calibrate_fallback(batches, recall=0.5, candidates=4)) == ""  # it reads longer ones
    model.config.read_threshold = 1.0  # the cure that the warning names
    assert said(lambda: model(zoo.tokens(1, LENGTHS[1] + 1))) == ""


def test_refuses_what_cannot_be_calibrated(batches: list[dict[str, Tensor]]) -> None:
    model, (batch, _) = model_of(0.7), batches
    nothing = batch["labels"].new_full(batch["labels"].shape, -100)
    nothing[:, 0] = 1  # which nothing predicts
    wrong = torch.where(batch["labels"] == -100, -100, (batch["labels"] + 2) % zoo.VOCAB)
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        ([], {}, "batches: expected at least one"),
        ([batch["input_ids"]], {}, "batch 0: expected a mapping .*, got Tensor"),
        ([batch, {"input_ids": batch["input_ids"]}], {}, r"batch 1: expected a mapping .*, got \['input_ids'\]"),
        ([{**batch, "position_ids": batch["input_ids"]}], {}, "a sequence per row"),
        ([{"labels": nothing}], {}, "batch 0: expected input_ids or inputs_embeds"),
        ([{**batch, "labels": nothing[:, 1:]}], {}, r"labels: expected \(4, 20\), got \(4, 19\)"),
        ([{**batch, "attention_mask": nothing[:, 1:]}], {}, r"attention_mask: expected \(4, 20\)"),
        ([{**batch, "labels": nothing}], {}, "expected an answer to predict"),
        ([{**batch, "labels": wrong}], {}, "no answer is right"),
        (batches, {"recall": 0.0}, "recall=0.0: expected more than 0, up to 1"),
        (batches, {"recall": 1.1}, "recall=1.1"),
        (batches, {"candidates": 1}, "candidates=1: expected at least 2"),
    ]
    for given, options, message in cases:
        with pytest.raises(ValueError, match=message):
            model.calibrate_fallback(given, **options)
        assert (model.config.read_threshold, model.config.calibrated_lengths) == (0.7, None)
    with pytest.raises(ValueError, match="fallback_chunks=0: expected a model that stores chunks"):
        zoo.causal_lm("memory_managed-e1").calibrate_fallback(batches)
    with pytest.raises(ValueError, match=r"expected model.eval\(\)"):
        model.train().calibrate_fallback(batches)
