"""Multi-query associative recall (MQAR): which memory can be asked for what it read?

    python benchmarks/recall.py --json benchmarks/results/recall.json

A sequence states P pairs `key value`, then asks for each key once, at random places between filler tokens; the token
after an asked key must be its value. Keys and values are drawn anew for every sequence, so nothing but the memory of
this sequence can answer. Source of the task: Arora et al. (arXiv 2312.04927), section 3; the generator is our own.

Models of two blocks, equal width and equal state (a K x V matrix per head; Titans: an MLP), trained alike on fresh
sequences. Reported: share of right answers on unseen sequences, per seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import trange

import memzoo

VOCAB = 64
IGNORED = -100
TASKS = {"64": (64, 4), "128": (128, 8)}
SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MODELS: dict[str, transformers.PreTrainedConfig] = {
    "deltanet": memzoo.DeltaNetConfig(**SHAPE, num_attention_heads=2),
    "comba": memzoo.CombaConfig(**SHAPE, num_attention_heads=2, expand_k=1.0, expand_v=1.0),
    "titans": memzoo.TitansConfig(**SHAPE, num_attention_heads=2, chunk_size=8, memory_expansion=2),
    "retnet": memzoo.RetNetConfig(**SHAPE, num_attention_heads=2, expand_v=1.0),
}


def make_batch(count: int, tokens: int, pairs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids and labels `[count, tokens]`; a label is the value after an asked key, `IGNORED` elsewhere.

    Token 0 is the filler, ids below `VOCAB / 2` are keys, the others values.
    """
    slots = (tokens - 2 * pairs) // 2
    if slots < pairs or pairs >= VOCAB // 2:
        raise ValueError(
            f"recall: {pairs} pairs in {tokens} tokens: expected at most {min(tokens // 4, VOCAB // 2 - 1)} pairs."
        )
    generator = torch.Generator().manual_seed(seed)
    keys = 1 + torch.rand(count, VOCAB // 2 - 1, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(VOCAB // 2, VOCAB, (count, pairs), generator=generator)
    ids = torch.zeros(count, tokens, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    ids[:, : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    places = 2 * pairs + 2 * torch.rand(count, slots, generator=generator).argsort(1)[:, :pairs]
    ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
    labels.scatter_(1, places + 1, values)
    return ids, labels


@torch.no_grad()
def accuracy(model: torch.nn.Module, ids: Tensor, labels: Tensor) -> float:
    """Share of the asked keys whose value is the likeliest next token."""
    found = model(ids, use_cache=False).logits[:, :-1].argmax(-1)
    asked = labels[:, 1:] != IGNORED
    return float((found == labels[:, 1:])[asked].double().mean())


def train(
    config: transformers.PreTrainedConfig, tokens: int, pairs: int, steps: int, seed: int, batch: int = 32
) -> float:
    """Accuracy on 256 unseen sequences after training on `steps` fresh batches; stops early once it has them all."""
    transformers.set_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    test = make_batch(256, tokens, pairs, seed=10**9 + seed)
    for step in trange(steps, desc=f"{config.model_type} {tokens}/{pairs} seed {seed}"):
        ids, labels = make_batch(batch, tokens, pairs, seed=seed * 10**6 + step)
        model(ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99 and accuracy(model, *test) > 0.995:
            break
    return accuracy(model.eval(), *test)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated; default all")
    parser.add_argument("--tasks", default=",".join(TASKS), help="lengths, comma-separated; default all")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500, help="training steps at most")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    for given, known in ((args.models, MODELS), (args.tasks, TASKS)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"unknown {sorted(unknown)}; expected some of {sorted(known)}")
    torch.set_num_threads(1)
    begin, rows = time.perf_counter(), []
    for task in args.tasks.split(","):
        tokens, pairs = TASKS[task]
        for name in args.models.split(","):
            found = [train(MODELS[name], tokens, pairs, args.steps, seed) for seed in range(args.seeds)]
            rows.append({"model": name, "tokens": tokens, "pairs": pairs, "accuracy": found})
            print(f"{name:10} {tokens:4} tokens {pairs:2} pairs  " + "  ".join(f"{100 * x:5.1f} %" for x in found))
    results: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/recall.py", *(argv if argv is not None else sys.argv[1:])]),
        "machine": platform.machine(),
        "versions": {x.__name__: x.__version__ for x in (torch, transformers, memzoo)},
        "seconds": time.perf_counter() - begin,
        "rows": rows,
    }
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        beside = args.json.with_suffix(".partial")
        beside.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(beside, args.json)


if __name__ == "__main__":
    main()
