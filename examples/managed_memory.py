"""Watch facts being written, overwritten, protected and evicted while text streams through a managed memory.

    python examples/managed_memory.py
    python examples/managed_memory.py --slots 3

The model is fresh: what a fact is about, its version and its protection are told to it (`event_mask`, `key_ids`,
`versions`, `protect`), as a program that reads structured records would. A trained model decides without being told
what to write and which keys are the same.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

from memzoo import MemoryCache, MemoryManagedConfig, MemoryManagedForCausalLM
from memzoo.kernels.slot_table import OUTCOMES


class Fact(NamedTuple):
    """A sentence, what it is about (`None`: it states nothing to keep), its version, and whether it is protected."""

    text: str
    about: str | None = None
    version: int = 0
    protect: bool = False


STREAM: list[tuple[str, list[Fact]]] = [
    (
        "Facts are written to empty slots; one of them is protected.",
        [
            Fact("Ada lives in Rome .", "Ada", 1),
            Fact("the weather is fine today ."),
            Fact("the door code is 4711 .", "code", 1, protect=True),
        ],
    ),
    ("A newer version replaces the old one, which does not come back.", [Fact("Ada lives in Oslo .", "Ada", 2)]),
    ("", [Fact("Ada lives in Rome .", "Ada", 1)]),
    (
        "More facts than slots: the least valuable one makes room, never the protected one.",
        [Fact("Bob drinks tea .", "Bob", 1), Fact("Cleo paints .", "Cleo", 1), Fact("Dan sings .", "Dan", 1)],
    ),
]


def make_model(slots: int, words: int) -> MemoryManagedForCausalLM:
    """A small fresh model that writes where it is told to, and forgets what is old first."""
    torch.manual_seed(0)
    config = MemoryManagedConfig(
        vocab_size=words,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_slots=slots,
        memory_dim=16,
        read_top_k=1,
        write_trigger="external",
        write_threshold=0.0,
        keep_age=4.0,
        age_scale=16.0,
        fallback_chunks=0,
    )
    return MemoryManagedForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slots", type=int, default=3, help="slots of the table, at least 1")
    slots = parser.parse_args().slots
    facts = [fact for _, part in STREAM for fact in part]
    words = sorted({word for fact in facts for word in fact.text.split()})
    subjects = sorted({fact.about for fact in facts if fact.about})
    model, read = make_model(slots, len(words)), list[str]()
    cache, ends, counts = MemoryCache(model.config), dict[int, str](), torch.zeros(1, len(OUTCOMES))

    for title, part in STREAM:
        if title:
            print(f"\n# {title}")
        for fact in part:
            ids = torch.tensor([[words.index(word) for word in fact.text.split()]])
            last = torch.zeros_like(ids)
            last[0, -1] = 1
            said = (
                {}
                if fact.about is None
                else {
                    "event_mask": last,
                    "key_ids": last * subjects.index(fact.about),
                    "versions": last * fact.version,
                    "protect": last * fact.protect,
                }
            )
            before = counts
            with torch.no_grad():
                (counts,) = model(ids, cache=cache, output_memory=True, **said).memory_stats
            read += fact.text.split()
            ends[len(read) - 1] = fact.text
            new = [name for name, count in zip(OUTCOMES, (counts - before)[0].tolist(), strict=True) if count]
            print(f"  {fact.text:26} {new[0] if new else 'no event'}")
        print(model.memory_table(cache, text=ends.__getitem__))


if __name__ == "__main__":
    main()
