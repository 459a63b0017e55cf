"""Multi-query associative recall (MQAR): which memory can be asked for what it read?

    python benchmarks/recall.py --json benchmarks/results/recall.json

A sequence states P pairs `key value`, then asks for each key once, at random places between filler tokens; the token
after an asked key must be its value. Keys and values are drawn anew for every sequence, so nothing but the memory of
this sequence can answer. Source of the task: Arora et al. (arXiv 2312.04927), section 3; the generator is our own.

Models of two blocks, equal width and equal memory (one K x V matrix; Titans and ATLAS: and its momentum), trained alike
on fresh sequences: the same batches, learning rate and steps at most. What is not a default is in `MODELS`: chunks of 4
tokens for memories whose gradients are taken at a chunk's start, step sizes that can replace what a key holds, and for
Comba (as in flash-linear-attention) and Titans a sigmoid as output gate: SiLU, which starts near zero, learns later.
Reported: share of right answers on unseen sequences, per seed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from record import about, write_json
from torch import Tensor
from tqdm import trange

import memzoo

VOCAB = 64
IGNORED = -100
BATCH, LEARNING_RATE = 32, 3e-3
TASKS = {"64": (64, 4), "128": (128, 8)}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
}
MATRIX = {"expand_k": 1.0, "expand_v": 1.0}
DEEP = {"memory_depth": 1, "chunk_size": 4, "num_persistent_tokens": 0}
OMEGA = {**DEEP, "window": 2, "feature_map": "identity"}
MODELS: dict[str, transformers.PreTrainedConfig] = {
    "deltanet": memzoo.DeltaNetConfig(**SHAPE, **MATRIX),
    "comba": memzoo.CombaConfig(**SHAPE, **MATRIX, output_gate="sigmoid"),
    "titans": memzoo.TitansConfig(**SHAPE, **DEEP, max_step_size=2.0, output_gate="sigmoid"),
    "omeganet": memzoo.OmegaNetConfig(**SHAPE, **OMEGA, max_step_size=6.0),
    "atlas": memzoo.AtlasConfig(**SHAPE, **OMEGA, max_step_size=1.0),
    "retnet": memzoo.RetNetConfig(**SHAPE, **MATRIX, output_gate="sigmoid"),
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


def train(config: transformers.PreTrainedConfig, tokens: int, pairs: int, steps: int, seed: int) -> float:
    """Accuracy on 256 unseen sequences after training on `steps` fresh batches; stops early once it has them all."""
    transformers.set_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    test = make_batch(256, tokens, pairs, seed=10**9 + seed)
    for step in trange(steps, desc=f"{config.model_type} {tokens}/{pairs} seed {seed}"):
        ids, labels = make_batch(BATCH, tokens, pairs, seed=seed * 10**6 + step)
        model(ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99 and accuracy(model, *test) > 0.995:
            break
    return accuracy(model.eval(), *test)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated; default all")
    parser.add_argument("--tasks", default=",".join(TASKS), help="lengths, comma-separated; default all")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000, help="training steps at most")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(argv)
    for given, known in ((args.models, MODELS), (args.tasks, TASKS)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"unknown {sorted(unknown)}; expected some of {sorted(known)}")
    torch.set_num_threads(1)
    settings = {
        "steps": args.steps,
        "batch": BATCH,
        "learning_rate": LEARNING_RATE,
        "models": {name: MODELS[name].to_diff_dict() for name in args.models.split(",")},
        "dtype": "float32",
        "threads": 1,
    }
    content: dict[str, Any] = {**about("recall.py", argv, settings), "rows": []}
    for task, name in itertools.product(args.tasks.split(","), args.models.split(",")):
        tokens, pairs = TASKS[task]
        begin = time.process_time()
        found = [train(MODELS[name], tokens, pairs, args.steps, seed) for seed in range(args.seeds)]
        row = {"model": name, "tokens": tokens, "pairs": pairs, "accuracy": found}
        content["rows"].append({**row, "cpu_seconds": time.process_time() - begin})
        print(f"{name:10} {tokens:4} tokens {pairs:2} pairs  " + "  ".join(f"{100 * x:5.1f} %" for x in found))
        if args.json is not None:
            write_json(args.json, content)


if __name__ == "__main__":
    main()
