"""Who solves what: the six tasks of `managed_tasks.py` as bare mechanisms on random embeddings, without any training.

    python benchmarks/managed.py --json benchmarks/results/managed_tasks.json

Every key, value and filler token has a random vector of unit length; the answer is the value whose vector is nearest to
what a mechanism reads. All see the same events, but only the managed memory is told more than their keys and values:
its oracle says key ids, versions and how sure a writer would be of an event (`SURE`), never what will be asked.

    linear           a matrix, S = sum_e k_e v_e^T, that keeps everything
    fifo             the last M events; reads the newest of those most like the query
    window           the events of the last W tokens, read like that
    sparse           the events of the top chunks and of the running one, softmax over the likeness of their keys
    sparse newest    the same chunks; reads the newest of the events most like the query
    memory           the slot table of `memzoo.kernels.slot_table` with M slots
    hybrid           the slot table where it knows the key (rho of at least `ROUTE`), `sparse` where it does not

With `--tokens` every stream is spread over so many tokens between random filler, in chunks of 1024: the mechanism
test.

    python benchmarks/managed.py --tokens 2097152 --json benchmarks/results/managed_long.json

Active chunks of a question: the running one, those of the slots that were read and those that were retrieved.

Source: the names of tasks and mechanisms are those of Memory-Managed Long-Context Attention (arXiv 2606.28876); sizes,
forms and coefficients are ours. It tests a mechanism that is given its metadata; nothing here has read a language.
"""

from __future__ import annotations

import argparse
import itertools
import math
import operator
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from managed_tasks import (
    FACT,
    FILL,
    GENERATORS,
    INVALID,
    NOISE,
    UPDATE,
    Event,
    Query,
    Sample,
    Sizes,
    Task,
    Vocabulary,
    long_sample,
    sample,
    uniform_bound,
)
from record import about, table, write_json
from run import peak_bytes
from torch import Tensor
from torch.nn import functional as F

from memzoo import MemoryManagedConfig
from memzoo.kernels import slot_table
from memzoo.kernels.slot_table import OUTCOMES, ReadWeights, Rules
from memzoo.modeling.mixers.managed import Chunks


class Grid(NamedTuple):
    """How a stream is cut into chunks."""

    chunk: int
    """Tokens of one."""
    top: int
    """Chunks that a look-up finds at most."""


WIDTH, SHARPNESS, WINDOW, TOP_SLOTS, ROUTE = 64, 32.0, 512, 3, 0.5
SURE = {FACT: 0.9, UPDATE: 0.9, NOISE: 0.6, INVALID: 0.3}
"""How probable a writer finds it that an event is worth keeping; of noise it is not sure, so that only a full table of
better facts keeps noise out. Filler events are no candidates."""
RULES = Rules(versions_per_key=4)
SIZES = Sizes(slots=32, facts=16, filler=256)
LONG_SIZES, LONG_VOCABULARY = Sizes(slots=32, facts=16, filler=0, crowd=64), Vocabulary(keys=4096, filler=16384)
MECHANISMS = ("linear", "fifo", "window", "sparse", "sparse newest", "memory", "hybrid")
LONG_TASKS = ("recall", "overwrite", "temporal", "pollution", "uniform")


class Space:
    """Random unit vectors of keys, values and filler tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        generator = torch.Generator().manual_seed(0)
        counts = (vocabulary.keys, vocabulary.values, vocabulary.filler)
        self.keys, self.values, self.filler = (
            F.normalize(torch.randn(count, WIDTH, generator=generator), dim=-1) for count in counts
        )

    def pairs(self, events: Sequence[Event]) -> tuple[Tensor, Tensor]:
        """Keys and values, `[E, WIDTH]` each; those of a filler event are two of its tokens."""
        pairs = [
            (self.filler[event.filler[0]], self.filler[event.filler[1]])
            if event.kind == FILL
            else (self.keys[event.key], self.values[event.value])
            for event in events
        ]
        keys, values = zip(*pairs, strict=True)
        return torch.stack(keys), torch.stack(values)

    def value(self, found: Tensor) -> int:
        """The value nearest to `[WIDTH]`."""
        return int((self.values @ found).argmax())


def linear(keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
    """Read a matrix into which all was written."""
    return (keys @ query) @ values


def softmax(keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
    """Read by content alone."""
    return (SHARPNESS * keys @ query).softmax(0) @ values


def newest(keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
    """Read the last of those most like the query."""
    like = keys @ query
    best = like > like.max() - 1e-6 if len(like) else like > 0
    return values[best][-1:].sum(0)


class Reading(NamedTuple):
    """What the slot table says to a question."""

    found: Tensor
    """`[WIDTH]`."""
    confidence: float
    sources: frozenset[int]
    """Chunks that the slots were written in."""


def as_event(items: Sequence[tuple[int, Event] | None], space: Space) -> slot_table.Event:
    """One event per row as the oracle tells it to the table, or none."""
    given = [(0, Event(INVALID)) if item is None else item for item in items]
    keys, values = space.pairs([event for _, event in given])
    sure = torch.tensor([SURE[event.kind] for _, event in given])
    return slot_table.Event(
        present=torch.tensor([item is not None for item in items]),
        position=torch.tensor([position for position, _ in given]),
        key=keys,
        value=values,
        confidence=sure,
        importance=torch.tensor([float(event.write) for _, event in given]),
        key_id=torch.tensor([event.key + 1 for _, event in given]),
        version=torch.tensor([event.version for _, event in given]),
        protect=torch.zeros(len(given), dtype=torch.bool),
    )


def remembered(
    samples: Sequence[Sample], space: Space, slots: int, chunk: int
) -> tuple[list[list[Reading]], dict[str, int]]:
    """What tables, one per stream, say to their questions, and what became of all events."""
    streams = []
    for one in samples:
        items = [*zip(one.ends, one.events, strict=True), *zip(one.asks, one.queries, strict=True)]
        items = [(position, item) for position, item in items if isinstance(item, Query) or item.kind != FILL]
        streams.append(sorted(items, key=lambda item: item[0]))
    memory = slot_table.empty_table(len(samples), slots, WIDTH, WIDTH, space.keys)
    readings: list[list[Reading]] = [[] for _ in samples]
    for items in itertools.zip_longest(*streams):
        events = [item if item is not None and isinstance(item[1], Event) else None for item in items]
        memory, _ = slot_table.write(memory, as_event(events, space), RULES)
        asking = {row: item for row, item in enumerate(items) if item is not None and isinstance(item[1], Query)}
        if not asking:
            continue
        asked = torch.zeros(3, len(samples), 1, dtype=torch.long)
        asked[0, :, 0] = torch.tensor([len(one.ids) for one in samples])  # after all events where nothing is asked
        for row, (position, query) in asking.items():
            asked[:, row, 0] = torch.tensor([position, query.answer.key + 1, query.version])
        position, key_id, version = asked
        keys = space.keys[(key_id - 1).clamp(min=0)]
        found = slot_table.read(memory, keys, position, RULES, ReadWeights(), TOP_SLOTS, key_id, version)
        memory = slot_table.noted(memory, found, key_id > 0)
        for row in asking:
            used = found.slots[row, 0]
            sources = (memory.written[row, used[used >= 0]] - 1) // chunk
            readings[row].append(
                Reading(found.output[row, 0], float(found.confidence[row, 0]), frozenset(sources.tolist()))
            )
    return readings, dict(zip(OUTCOMES, memory.counts.sum(0).tolist(), strict=True))


class Answer(NamedTuple):
    """What a mechanism says to a question."""

    mechanism: str
    query: Query
    value: int
    chunks: frozenset[int] = frozenset()
    """The active ones, of a mechanism that has chunks."""


class LookUp:
    """The model's look-up of chunks (`memzoo.modeling.mixers.managed.Chunks`) over the complete chunks of a stream.

    A chunk's longest keys are here those of events that end in it; filler between events has none.
    """

    def __init__(self, one: Sample, keys: Tensor, vocabulary: Vocabulary, grid: Grid) -> None:
        bits = -(-vocabulary.size // 8) * 8
        shape = {"hidden_size": WIDTH, "memory_dim": WIDTH, "num_attention_heads": 1}
        options = {"chunk_size": grid.chunk, "fallback_chunks": grid.top, "sketch_bits": bits}
        self.chunks = Chunks(MemoryManagedConfig(**shape, **options))
        self.ids, chunk, count = torch.tensor(one.ids), grid.chunk, len(one.ids) // grid.chunk
        salient = torch.zeros(1, count, self.chunks.salient, 2 * WIDTH)
        taken = [0] * count
        for key, end, event in zip(keys, one.ends, one.events, strict=True):
            at = end // chunk
            if event.kind != FILL and at < count and taken[at] < self.chunks.salient:
                salient[0, at, taken[at], :WIDTH] = key
                taken[at] += 1
        sketches = self.chunks._sketched(self.ids[: count * chunk].view(1, count, chunk) + 1)
        self.index = self.chunks.begin(1, keys)._replace(chunks=salient, sketches=sketches)
        self.bits = sketches.transpose(1, 2)

    def __call__(self, query: Tensor, ask: int) -> list[int]:
        """The best complete chunks before the question that ends at `ask`, best first."""
        recent = self.ids[None, ask - self.chunks.window + 1 : ask + 1] + 1
        before = torch.arange(self.index.chunks.shape[1]) < ask // self.chunks.size
        chosen, held = self.chunks._found(query[None, None], self.index.chunks, self.bits, recent, before[None, None])
        return chosen[held].tolist()


def answers(one: Sample, readings: Sequence[Reading], task: Task, space: Space, grid: Grid) -> Iterator[Answer]:
    """What every mechanism says to the questions of a stream, given what its table says."""
    ends, (keys, values) = torch.tensor(one.ends), space.pairs(one.events)
    look_up = LookUp(one, keys, task.vocabulary, grid)
    for query, ask, reading in zip(one.queries, one.asks, readings, strict=True):
        here = ask // grid.chunk
        asked = space.keys[query.answer.key]
        chosen = look_up(asked, ask)
        before = ends < ask
        last = torch.arange(len(ends)) >= int(before.sum()) - task.sizes.slots
        inside = torch.isin(ends // grid.chunk, torch.tensor([*chosen, here]))
        said = {}
        for name, read, seen, chunks in (
            ("linear", linear, before, ()),
            ("fifo", newest, before & last, ()),
            ("window", newest, before & (ends > ask - WINDOW), ()),
            ("sparse", softmax, before & inside, (*chosen, here)),
            ("sparse newest", newest, before & inside, (*chosen, here)),
        ):
            found = read(keys[seen], values[seen], asked)
            said[name] = Answer(name, query, space.value(found), frozenset(chunks))
        memory = Answer("memory", query, space.value(reading.found), reading.sources | {here})
        hybrid = memory if reading.confidence >= ROUTE else said["sparse"]
        chunks = reading.sources | hybrid.chunks
        yield from (*said.values(), memory, hybrid._replace(mechanism="hybrid", chunks=chunks))


def chance(right: int, count: int, share: float) -> float:
    """Probability of at least so many of `count` right answers if each is right with probability `share`."""
    return sum(math.comb(count, n) * share**n * (1 - share) ** (count - n) for n in range(right, count + 1))


def summed(said: Sequence[Answer]) -> dict[str, Any]:
    """Right answers, likely mistakes made, fewest and most active chunks."""
    misleading = [answer for answer in said if answer.query.stale is not None]
    active = [len(answer.chunks) for answer in said]
    return {
        "questions": len(said),
        "right": sum(answer.value == answer.query.answer.value for answer in said),
        "misleading": len(misleading),
        "misled": sum(answer.value == answer.query.stale.value for answer in misleading),
        "active_chunks": [min(active), max(active)] if max(active) else None,
    }


Part = tuple[Task, list[Sample], Grid]


def grid_of(tokens: int | None) -> Grid:
    """Of the table, or of a mechanism test with streams of so many tokens: a look-up finds a sixteenth of them."""
    return Grid(64, 4) if tokens is None else Grid(1024, max(1, tokens // 1024 // 16))


def short(streams: int) -> Iterator[Part]:
    """The streams of the table, task by task."""
    for name in GENERATORS:
        task = Task(name, replace(SIZES, queries=4 if name == "streaming" else 1), "any")
        yield task, [sample(task, 0, index) for index in range(streams)], grid_of(None)


def long(streams: int, tokens: int) -> Iterator[Part]:
    """Those of the mechanism test, one at a time, since they are long."""
    for name, seed in itertools.product(LONG_TASKS, range(streams)):
        task = Task(name, LONG_SIZES, "any", LONG_VOCABULARY)
        yield task, [long_sample(task, seed, 0, tokens)], grid_of(tokens)


def measure(parts: Iterator[Part]) -> list[dict[str, Any]]:
    """A row per task and mechanism."""
    said: dict[Task, list[Answer]] = {}
    outcomes: dict[Task, Counter[str]] = {}
    for task, samples, grid in parts:
        space = Space(task.vocabulary)
        readings, counts = remembered(samples, space, task.sizes.slots, grid.chunk)
        for one, recalled in zip(samples, readings, strict=True):
            said.setdefault(task, []).extend(answers(one, recalled, task, space, grid))
        outcomes.setdefault(task, Counter()).update(counts)
    rows = []
    for task, mechanism in itertools.product(said, MECHANISMS):
        row = {"task": task.name, "mechanism": mechanism}
        row |= summed([answer for answer in said[task] if answer.mechanism == mechanism])
        if mechanism == "memory":
            row["outcomes"] = dict(outcomes[task])
            if task.name == "uniform":
                bound = uniform_bound(task.sizes, task.vocabulary.values)
                row |= {"bound": bound, "chance_at_bound": chance(row["right"], row["questions"], bound)}
        rows.append(row)
    return rows


def pooled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per mechanism, over all tasks."""
    found = []
    for mechanism in MECHANISMS:
        mine = [row for row in rows if row["mechanism"] == mechanism]
        ranges = [row["active_chunks"] for row in mine if row["active_chunks"]]
        active = [min(low for low, _ in ranges), max(high for _, high in ranges)] if ranges else None
        sums = {key: sum(row[key] for row in mine) for key in ("questions", "right", "misleading", "misled")}
        found.append({"task": "all", "mechanism": mechanism, **sums, "active_chunks": active})
    return found


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Shares of right answers, in brackets those of likely mistakes; active chunks."""

    def cell(row: dict[str, Any]) -> str:
        misled = f" ({row['misled'] / row['misleading']:.0%})" if row["misled"] else ""
        return f"{row['right'] / row['questions']:.1%}{misled}"

    lines = []
    for mechanism in MECHANISMS:
        mine = {row["task"]: row for row in rows if row["mechanism"] == mechanism}
        active = mine["all"]["active_chunks"]
        chunks = f"{active[0]}-{active[1]}" if active else "-"
        lines.append({"mechanism": mechanism, **{task: cell(row) for task, row in mine.items()}, "chunks": chunks})
    return table([(head, operator.itemgetter(head)) for head in lines[0]], lines)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, help="per task; default 200, with --tokens 10")
    parser.add_argument("--tokens", type=int, help="the mechanism test with streams of so many tokens")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(argv)
    streams = args.streams or (10 if args.tokens else 200)
    torch.set_num_threads(1)
    begin, used = time.perf_counter(), time.process_time()
    rows = measure(long(streams, args.tokens) if args.tokens else short(streams))
    settings = {
        "width": WIDTH,
        "sharpness": SHARPNESS,
        "window": WINDOW,
        "grid": grid_of(args.tokens)._asdict(),
        "top_slots": TOP_SLOTS,
        "route": ROUTE,
        "sure": {"fact": SURE[FACT], "update": SURE[UPDATE], "noise": SURE[NOISE], "invalid": SURE[INVALID]},
        "rules": RULES._asdict(),
        "sizes": asdict(LONG_SIZES if args.tokens else SIZES),
        "vocabulary": asdict(LONG_VOCABULARY if args.tokens else Vocabulary()),
        "tokens": args.tokens,
        "streams": streams,
        "dtype": "float32",
        "threads": 1,
    }
    content = {
        **about("managed.py", argv, settings),
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - used,
        "peak_bytes": peak_bytes("cpu"),
        "rows": [*rows, *pooled(rows)],
    }
    if args.json:
        write_json(args.json, content)
    print(report(content["rows"]))
    print(f"{content['seconds']:.0f} s, {content['peak_bytes'] / 2**20:.0f} MiB at most")


if __name__ == "__main__":
    main()
