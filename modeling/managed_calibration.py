"""From which confidence of the reader a memory-managed model does without its chunks: found on given sequences.

Source: Memory-Managed Long-Context Attention (arXiv 2606.28876), whose second version calibrates its fallback and
finds that a threshold from short contexts keeps it shut in long ones. The rule here is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

BESIDE = ("input_ids", "inputs_embeds", "attention_mask", "labels")
"""What a batch may hold beside what a caller says about tokens."""


class Tried(NamedTuple):
    """What one threshold does."""

    threshold: float
    recall: float
    """Of the answers that are right where the chunks are always asked, the share that is right with this threshold."""
    asked: float
    """The share of the answers' reads whose confidence is below the threshold, so that they ask the chunks."""


class Calibration(NamedTuple):
    """What `calibrate_fallback` has found."""

    threshold: float
    lengths: tuple[int, int]
    """The shortest and the longest sequence."""
    tried: list[Tried]
    """From 1.0 down to the first threshold that forgets too much."""


class Answered(NamedTuple):
    """All answers of the batches, A, in their order."""

    right: Tensor
    """`[A]`, bool."""
    confidence: Tensor
    """rho where the answer was made, of each of the tables, `[A, tables]`."""


@torch.no_grad()
def calibrate_fallback(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    said: tuple[str, ...],
    recall: float = 0.99,
    candidates: int = 16,
) -> Calibration:
    """See `MemoryManagedForCausalLM.calibrate_fallback`; `said` are the names of what a caller may say about tokens."""
    batches = list(batches)
    lengths = _checked(model, batches, (*BESIDE, *said), recall, candidates)
    config = model.config
    given = config.read_threshold, config.calibrated_lengths
    config.calibrated_lengths = None  # no warning of lengths while they are measured
    try:
        always = _answered(model, batches, 1.0)
        if not bool(always.right.any()):
            raise ValueError(
                "calibrate_fallback: no answer is right even where the chunks are always asked; expected sequences "
                "that the model has learned to answer."
            )
        rho = always.confidence.flatten().double()
        places = torch.linspace(0, 1, candidates, dtype=rho.dtype, device=rho.device)
        thresholds = rho.quantile(places, interpolation="higher").unique().tolist()
        tried = [Tried(1.0, 1.0, _asked(always, 1.0))]
        for threshold in sorted((each for each in thresholds if each < 1.0), reverse=True):
            found = _answered(model, batches, threshold)
            kept = float(found.right[always.right].double().mean())
            tried.append(Tried(threshold, kept, _asked(found, threshold)))
            if kept < recall:
                break
        chosen = [each.threshold for each in tried if each.recall >= recall][-1]
        given = chosen, list(lengths)
        return Calibration(chosen, lengths, tried)
    finally:
        config.read_threshold, config.calibrated_lengths = given


def _answered(model: PreTrainedModel, batches: list[Mapping[str, Tensor]], threshold: float) -> Answered:
    model.config.read_threshold = threshold
    right, confidence = [], []
    for batch in batches:
        inputs = {name: x.to(model.device) for name, x in batch.items()}
        labels = inputs.pop("labels")[:, 1:]
        out = model(**inputs, use_cache=False, output_memory=True)
        answers = labels != -100
        right.append((out.logits[:, :-1].argmax(-1) == labels)[answers])
        confidence.append(torch.stack(out.read_confidence, dim=-1)[:, :-1][answers])
    return Answered(torch.cat(right), torch.cat(confidence))


def _asked(found: Answered, threshold: float) -> float:
    return float((found.confidence < threshold).double().mean())


def _checked(
    model: PreTrainedModel, batches: list[Any], known: tuple[str, ...], recall: float, candidates: int
) -> tuple[int, int]:
    """The shortest and the longest of the sequences, if the request makes sense."""

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"calibrate_fallback: {what}")

    require(model.config.fallback_chunks > 0, "fallback_chunks=0: expected a model that stores chunks.")
    require(not model.training, "the model is in training mode; expected model.eval().")
    require(0 < recall <= 1, f"recall={recall}: expected more than 0, up to 1.")
    require(candidates >= 2, f"candidates={candidates}: expected at least 2.")
    require(bool(batches), "batches: expected at least one, got none.")
    shortest, longest, answers = math.inf, 0, 0
    for at, batch in enumerate(batches):
        require(
            isinstance(batch, Mapping) and {"labels"} <= batch.keys() <= set(known),
            f"batch {at}: expected a mapping with labels and beside them some of {', '.join(known)} (a sequence per "
            f"row), got {sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__}.",
        )
        tokens = batch["input_ids"] if "input_ids" in batch else batch.get("inputs_embeds")
        require(tokens is not None, f"batch {at}: expected input_ids or inputs_embeds.")
        labels, mask = batch["labels"], batch.get("attention_mask")
        expected = tuple(tokens.shape[:2])
        require(len(expected) == 2, f"batch {at}: expected ids [B, T], got {expected}.")
        for name in ("labels", "attention_mask"):
            shape = tuple(batch[name].shape) if batch.get(name) is not None else expected
            require(shape == expected, f"batch {at}: {name}: expected {expected}, got {shape}.")
        real = torch.ones_like(labels) if mask is None else mask != 0
        per_row = real.sum(1)[real.any(1)].tolist()
        shortest, longest = min([shortest, *per_row]), max([longest, *per_row])
        answers += int((labels[:, 1:] != -100).sum())
    require(answers > 0, "labels: expected an answer to predict, got -100 everywhere behind the first tokens.")
    return int(shortest), longest
