"""A memory-managed language model learns the six tasks of `managed_tasks.py`.

    python benchmarks/managed_train.py --metadata versions --json results.json
    python benchmarks/managed_train.py --setup twin --steps 100 --json results.json

Streams are drawn anew for every step, one task after the other, and are shorter than those held out (`Setup.scales`);
the loss is the cross-entropy of the answers (one token after each `ANS`) and, with the weight in the config, that of
the write decisions on a random share of the events (`--labels`; the paper's "lite" supervision, of which nothing else
is known: a quarter is ours). Nothing says which slot to match, replace, drop or read, and by default nothing is told
beside the tokens; `--metadata` gives the model what an oracle knows of events and questions: versions, or versions and
key ids.

Reported: of held-out samples (other seeds; and once more with pairs of keys and values that were never seen together)
the share in which every answer is right, per task and pooled, and the share of likely mistakes. `--models backbone` is
the same model without its memory. With `--calibrate` the trained model's fallback is calibrated on further held-out
streams and the test repeated. The paper reports 595 of 600 for its trainable model of 2.74M parameters, whose shape,
data and steps are not known to us.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from managed_tasks import END, GENERATORS, IGNORED, Batch, Sizes, Task, Vocabulary, collate, sample
from record import about, table, write_json
from torch import Tensor
from torch.nn import functional as F
from tqdm import trange

import memzoo

METADATA = ("none", "versions", "keys")
MODELS = ("managed", "backbone")
HELD_OUT = ("held_out", "new_pairs")
CANDIDATES = 8
"""Thresholds that a calibration tries."""


@dataclass(frozen=True)
class Setup:
    """A model, its streams and its training."""

    shape: dict[str, Any]
    vocabulary: Vocabulary
    sizes: Sizes
    """Of the held-out streams, which have one question (`streaming`: four)."""
    scales: tuple[int, ...]
    """Slots that the sizes of a training step's streams are cut to, one of these at random."""
    tokens: int
    """Of a training step, about."""
    tasks: tuple[str, ...] = tuple(GENERATORS)
    learning_rate: float = 3e-3
    """Of the memory, the embeddings and the last norm."""
    backbone_rate: float = 5e-4
    """Of the mixers and the feed-forwards: at the other rate they drown what tells tokens apart."""
    embeddings: float = 0.2
    """Their standard deviation at the start, for the same reason."""
    last_norm: float = 0.3
    """The last norm's weight at the start: with it logits, which the embeddings also give, start small."""
    memory: dict[str, Any] = field(default_factory=dict)

    def config(self) -> memzoo.MemoryManagedConfig:
        return memzoo.MemoryManagedConfig(
            vocab_size=self.vocabulary.size,
            tie_word_embeddings=True,
            write_trigger="token",
            event_token_ids=[END],
            version_mode="history",
            num_slots=self.sizes.slots,
            sketch_bits=-(-self.vocabulary.size // 8) * 8,
            **self.shape,
            **self.memory,
        )

    def task(self, name: str, split: str, scale: int | None = None) -> Task:
        """The task as it is held out, or as it is trained at a scale."""
        sizes = self.sizes
        if scale is None:
            return Task(name, replace(sizes, queries=4 if name == "streaming" else 1), split, self.vocabulary)
        facts = min(sizes.facts, scale)
        asked = min(sizes.queries, facts // 4 if name == "temporal" else facts)
        cut = replace(sizes, slots=scale, facts=facts, filler=min(sizes.filler, scale), queries=asked)
        return Task(name, cut, split, self.vocabulary)


SETUPS = {
    # 2.7M parameters.
    "full": Setup(
        {"hidden_size": 192, "intermediate_size": 372, "num_hidden_layers": 6, "num_attention_heads": 4},
        Vocabulary(),
        Sizes(slots=32, facts=16, filler=16, queries=8),
        scales=(8,),
        tokens=1200,
    ),
    # 57k, on small streams of two tasks.
    "twin": Setup(
        {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        Vocabulary(keys=32, values=32, versions=8, filler=8),
        Sizes(slots=8, facts=8, filler=2, queries=8),
        scales=(8,),
        tokens=1500,
        tasks=("recall", "overwrite"),
        learning_rate=4e-3,
        backbone_rate=4e-3,
        last_norm=1.0,
        memory={"memory_dim": 24, "memory_layers": [1], "fallback_chunks": 0},
    ),
}


def drawn(task: Task, seed: int, indices: range) -> Batch:
    return collate([sample(task, seed, index) for index in indices], task.vocabulary)


def said(batch: Batch, vocabulary: Vocabulary, metadata: str) -> dict[str, Tensor]:
    """What the oracle says; events without a key share an id that no question asks for."""
    given = {}
    if metadata != "none":
        given |= {"versions": batch.versions, "query_versions": batch.asked_versions}
    if metadata == "keys":
        given["key_ids"] = torch.where(batch.key_ids == IGNORED, vocabulary.keys, batch.key_ids)
        given["query_key_ids"] = batch.asked_keys.clamp(min=-1)
    return given


class Learner:
    """A model with what trains and tests it."""

    def __init__(self, setup: Setup, model: str, metadata: str, seed: int) -> None:
        transformers.set_seed(seed)
        self.setup, self.managed, self.metadata, self.seed = setup, model == "managed", metadata, seed
        config = setup.config()
        self.model = transformers.AutoModelForCausalLM.from_config(config if self.managed else config.backbone_config)
        torch.nn.init.normal_(self.model.get_input_embeddings().weight, std=setup.embeddings)
        torch.nn.init.constant_(self.model.model.norm.weight, setup.last_norm)

    def logits(self, batch: Batch, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits after each `ANS` and, of a managed model with labels, the loss of its write decisions."""
        given = said(batch, self.setup.vocabulary, self.metadata) if self.managed else {}
        if self.managed and labels is not None:
            given["write_labels"] = labels
        out = self.model(batch.ids, attention_mask=batch.mask, use_cache=False, **given)
        return out.logits[batch.answers != IGNORED], out.loss

    def train(self, steps: int, labelled: float, seconds: float = float("inf")) -> Iterator[dict[str, Any]]:
        """Train for so many steps or CPU seconds; yields what each step lost."""
        mixing = {id(p) for p in self.model.model.layers.parameters()}
        mixing -= {id(p) for name, p in self.model.named_parameters() if ".memory" in name}
        rates = self.setup.learning_rate, self.setup.backbone_rate
        groups = [
            {"params": [p for p in self.model.parameters() if (id(p) in mixing) == slow], "lr": rates[slow]}
            for slow in (False, True)
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, min(20, steps // 10), steps)
        chosen, scales = torch.Generator().manual_seed(self.seed), random.Random(self.seed)
        begin = time.process_time()
        self.model.train()
        for step, name in zip(range(steps), itertools.cycle(self.setup.tasks), strict=False):
            task, first = self.setup.task(name, "train", scales.choice(self.setup.scales)), step * self.setup.tokens
            rows = max(1, self.setup.tokens // len(sample(task, self.seed, first).ids))
            batch = drawn(task, self.seed, range(first, first + rows))
            keep = torch.rand(batch.write.shape, generator=chosen) < labelled
            logits, extra = self.logits(batch, batch.write.masked_fill(~keep, IGNORED) if labelled else None)
            wanted = batch.answers[batch.answers != IGNORED]
            loss = F.cross_entropy(logits, wanted)
            (loss if extra is None else loss + extra).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            elapsed = time.process_time() - begin
            yield {
                "step": step,
                "task": name,
                "scale": task.sizes.slots,
                "tokens": int(batch.mask.sum()),
                "loss": loss.item(),
                "right": float((logits.argmax(-1) == wanted).double().mean()),
                "write_loss": None if extra is None else extra.item(),
                "seconds": elapsed,
            }
            if elapsed > seconds:
                return

    @torch.no_grad()
    def test(self, split: str, samples: int) -> dict[str, dict[str, int]]:
        """Per task: samples, those with nothing but right answers, questions, right answers, likely mistakes."""
        self.model.eval()
        found = {}
        for name in self.setup.tasks:
            task, size = self.setup.task(name, split), 16
            counts = {"samples": samples, "right_samples": 0, "questions": 0, "right": 0, "misleading": 0, "misled": 0}
            for low in range(0, samples, size):
                batch = drawn(task, 0, range(low, min(low + size, samples)))
                asked = batch.answers != IGNORED
                answer = torch.full_like(batch.ids, IGNORED - 1)
                answer[asked] = self.logits(batch)[0].argmax(-1)
                right = answer == batch.answers
                counts["right_samples"] += int((right | ~asked).all(1).sum())
                counts["questions"] += int(asked.sum())
                counts["right"] += int(right.sum())
                counts["misleading"] += int((batch.stale != IGNORED).sum())
                counts["misled"] += int((answer == batch.stale).sum())
            found[name] = counts
        self.model.train()
        return found

    def calibrate(self, samples: int) -> dict[str, Any]:
        """Calibrate the fallback on so many streams per task, held out as the tested ones are, and not among them."""
        batches = []
        for name in self.setup.tasks:
            batch = drawn(self.setup.task(name, "held_out"), 1, range(samples))
            given = said(batch, self.setup.vocabulary, self.metadata) | {"input_ids": batch.ids}
            given |= {"attention_mask": batch.mask, "labels": batch.answers}
            # A label stands where the answer does: behind `ANS`, which may be the last token.
            labels = F.pad(given.pop("labels"), (1, 0), value=IGNORED)
            batches.append({"labels": labels, **{key: F.pad(x, (0, 1)) for key, x in given.items()}})
        self.model.eval()
        found = self.model.calibrate_fallback(batches, candidates=CANDIDATES)
        self.model.train()
        return {**found._asdict(), "tried": [each._asdict() for each in found.tried]}


def pooled(found: dict[str, dict[str, int]]) -> dict[str, int]:
    """The counts of all tasks together."""
    counts = list(found.values())
    return {key: sum(count[key] for count in counts) for key in counts[0]}


def run(setup: Setup, model: str, labelled: float, args: argparse.Namespace) -> dict[str, Any]:
    """Train one model and test it: a row of the results."""
    learner = Learner(setup, model, args.metadata, args.seed)
    begin = time.process_time()
    log = []
    bar = trange(args.steps, desc=f"{model}, {labelled:.0%} labels, seed {args.seed}")
    for record in learner.train(args.steps, labelled, 60 * args.minutes):
        bar.update()
        bar.set_postfix(record)
        log.append(record)
    bar.close()
    found: dict[str, Any] = {split: learner.test(split, args.samples) for split in args.splits.split(",")}
    found = {split: {**counts, "all": pooled(counts)} for split, counts in found.items()}
    if args.calibrate and learner.managed:
        found["calibration"] = learner.calibrate(args.calibrate)
        counts = learner.test("held_out", args.samples)
        found["calibrated"] = {**counts, "all": pooled(counts)}
    return {
        "model": model,
        "parameters": learner.model.num_parameters(),
        "labelled": labelled,
        "seed": args.seed,
        "steps": len(log),
        "planned_steps": args.steps,
        "cpu_seconds": time.process_time() - begin,
        "log": log,
        **found,
    }


def report(rows: Sequence[dict[str, Any]], split: str) -> str:
    """Shares of samples with nothing but right answers, in brackets those of likely mistakes."""

    def cell(counts: dict[str, int]) -> str:
        misled = f" ({counts['misled'] / counts['misleading']:.0%})" if counts["misled"] else ""
        return f"{counts['right_samples'] / counts['samples']:.1%}{misled}"

    lines = [
        {
            split: f"{row['model']}, {row['labelled']:.0%} labels, seed {row['seed']}",
            "steps": f"{row['steps']}/{row['planned_steps']}",
            **{task: cell(counts) for task, counts in row[split].items()},
            "right": "{right_samples}/{samples}".format(**row[split]["all"]),
        }
        for row in rows
    ]
    return table([(head, lambda line, head=head: line[head]) for head in lines[0]], lines)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", choices=SETUPS, default="full")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated; default all")
    parser.add_argument("--labels", default="0.25,0,1", help="shares of events with a write label; default 0.25,0,1")
    parser.add_argument("--metadata", choices=METADATA, default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="CPU minutes of a training at most")
    parser.add_argument("--splits", default=",".join(HELD_OUT), help="to test on, comma-separated; default all")
    parser.add_argument("--samples", type=int, default=100, help="held-out samples per task; default 100")
    parser.add_argument("--calibrate", type=int, default=0, help="calibrate on so many streams per task; default 0")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(argv)
    models, labels = args.models.split(","), [float(share) for share in args.labels.split(",")]
    for given, known in ((models, MODELS), (args.splits.split(","), HELD_OUT)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown {sorted(unknown)}; expected some of {', '.join(known)}")
    if not all(0 <= share <= 1 for share in labels) or min(args.steps, args.samples) < 1 or args.calibrate < 0:
        parser.error("expected --labels of 0 to 1, --steps and --samples of at least 1 and --calibrate of at least 0")
    torch.set_num_threads(1)
    setup = SETUPS[args.setup]
    settings = {
        **asdict(setup),
        "config": setup.config().to_diff_dict(),
        "metadata": args.metadata,
        "optimizer": "AdamW, weight decay 0.01, gradients clipped at 1",
        "schedule": "cosine, after a warm-up of 20 steps, or of a tenth of all if that is less",
        "dtype": "float32",
        "threads": 1,
    }
    content: dict[str, Any] = {**about("managed_train.py", argv, settings), "rows": []}
    for model in models:
        for labelled in labels if model == "managed" else [0.0]:
            content["rows"].append(run(setup, model, labelled, args))
            if args.json:
                write_json(args.json, content)
    for split in args.splits.split(","):
        print(report(content["rows"], split), end="\n\n")


if __name__ == "__main__":
    main()
