"""Six tasks for a managed memory, as streams of events and questions: pure functions of a split, a seed and an index.

    sample(Task("overwrite"), seed=0, index=7)

An event is five tokens, `[TYPE key value version END]` (`NONE` where it has no version), a filler event
`[FILL f f f END]`, a question `[QUERY key LATEST ANS]` or `[QUERY_AT key version ANS]`; what follows `ANS` is the
answer, which the stream does not state. With M slots, F facts and 8 or more events per slot of what is too many,

    recall      F facts of different keys
    overwrite   F keys, each written one to four times in any order; at least half of the asked keys were rewritten
    temporal    F / 4 keys of two to four versions, a quarter of the events older than one that was there before; asks
                for the newest version or for the newest that is not newer than a given one
    pollution   F facts, then noise: 8 M events of other keys, and F invalid events on asked keys with wrong values
    streaming   facts, updates (a fifth of the events) and questions interleaved; an answer is the one of that moment
    uniform     8 M facts, nothing says which will be asked: a table of M slots that was filled before the question
                cannot answer more than M / n + (1 - M / n) / values

Every event has its write label (facts and updates: 1), every question the event that answers it, and where there is
one, the event whose value a memory would say that gets this kind of thing wrong (the first value of an overwritten key,
the last invalid one, ...). Labels of `uniform` are all 1: they do not say which fact to keep.

Splits draw from different seeds. Which values a key may have also depends on the split: pairs of `new_pairs` are never
seen in `train`.

Source: the names of the five families and of uniform recall are those of Memory-Managed Long-Context Attention (arXiv
2606.28876); it was not open to us, and every definition here is ours.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

PAD, BOS, FACT, UPDATE, NOISE, INVALID, FILL, QUERY, QUERY_AT, LATEST, END, ANS, NONE = range(13)
IGNORED = -100
# The quarters of all (key, value) pairs that a split draws from.
SPLITS = {"train": (0, 1, 2), "held_out": (0, 1, 2), "new_pairs": (3,), "any": (0, 1, 2, 3)}


@dataclass(frozen=True)
class Vocabulary:
    """How many ids there are of each kind: specials first, then keys, values, versions, filler."""

    keys: int = 256
    values: int = 512
    versions: int = 64
    filler: int = 160

    @property
    def first_key(self) -> int:
        return 32

    @property
    def first_value(self) -> int:
        return self.first_key + self.keys

    @property
    def first_version(self) -> int:
        return self.first_value + self.values

    @property
    def first_filler(self) -> int:
        return self.first_version + self.versions

    @property
    def size(self) -> int:
        return self.first_filler + self.filler


@dataclass(frozen=True)
class Sizes:
    """How much a stream holds."""

    slots: int = 32
    facts: int = 16
    filler: int = 16
    """Filler events."""
    queries: int = 1
    crowd: int = 8
    """Noise events (`pollution`) or facts (`uniform`) per slot."""


@dataclass(frozen=True, eq=False)
class Event:
    """Something stated; two events are the same if they are one object."""

    kind: int
    key: int = 0
    """From 0; in a filler event, meaningless."""
    value: int = 0
    version: int = 0
    """From 1; 0: none."""
    filler: tuple[int, int, int] = (0, 0, 0)

    @property
    def write(self) -> bool:
        """Whether a memory should keep it."""
        return self.kind in (FACT, UPDATE)


@dataclass(frozen=True, eq=False)
class Query:
    """A question, and the event whose value answers it."""

    answer: Event
    stale: Event | None = None
    """The event with the wrong value that a likely mistake would answer."""
    version: int = 0
    """The newest version that may answer; 0: any."""


Item = Event | Query


class Sample(NamedTuple):
    """A stream as tokens, its events and questions in order, and where they end."""

    ids: list[int]
    events: list[Event]
    ends: list[int]
    """Position of each event's `END`."""
    queries: list[Query]
    asks: list[int]
    """Position of each question's `ANS`."""
    pointers: list[int]
    """Index of the event that answers each question."""


@functools.cache
def quarters(key: int, values: int) -> list[int]:
    """Which quarter of all pairs those of a key belong to, by value: a random quarter of its values is in each."""
    found = [4 * rank // values for rank in range(values)]
    random.Random(f"pairs/{key}").shuffle(found)
    return found


class Draw:
    """Random choices of one sample."""

    def __init__(self, name: str, vocabulary: Vocabulary, quarters: Sequence[int]) -> None:
        self.random = random.Random(name)  # of a string: its SHA-512, the same everywhere
        self.vocabulary, self.quarters = vocabulary, quarters

    def keys(self, count: int) -> list[int]:
        """Different keys."""
        return self.random.sample(range(self.vocabulary.keys), count)

    def value(self, key: int, *others: Event) -> int:
        """A value that this split allows the key and that none of the other events has."""
        taken, of_key = {event.value for event in others}, quarters(key, self.vocabulary.values)
        while True:
            value = self.random.randrange(self.vocabulary.values)
            if value not in taken and of_key[value] in self.quarters:
                return value

    def fact(self, key: int, *before: Event, version: int = 0) -> Event:
        """A fact, or an update if there was something before, whose value it changes."""
        return Event(UPDATE if before else FACT, key, self.value(key, *before), version)

    def filler(self, count: int) -> list[Event]:
        ids = range(self.vocabulary.filler)
        return [Event(FILL, filler=tuple(self.random.choices(ids, k=3))) for _ in range(count)]

    def shuffled(self, items: Iterable) -> list:
        found = list(items)
        self.random.shuffle(found)
        return found

    def between(self, items: Sequence[Item], others: Sequence[Item]) -> list[Item]:
        """Both, each in its order, in a random interleaving."""
        rest = (iter(items), iter(others))
        return [next(rest[which]) for which in self.shuffled([0] * len(items) + [1] * len(others))]


def recall(draw: Draw, sizes: Sizes) -> list[Item]:
    facts = [draw.fact(key) for key in draw.keys(sizes.facts)]
    asked = [Query(fact) for fact in draw.random.sample(facts, sizes.queries)]
    return [*draw.between(facts, draw.filler(sizes.filler)), *asked]


def overwrite(draw: Draw, sizes: Sizes) -> list[Item]:
    keys = draw.keys(sizes.facts)
    asked = keys[: sizes.queries]
    rewritten = asked[: -(-sizes.queries // 2)]
    times = {key: draw.random.randint(2 if key in rewritten else 1, 4) for key in keys}
    written: dict[int, list[Event]] = {key: [] for key in keys}
    events = []
    for key in draw.shuffled(k for k in keys for _ in range(times[k])):
        events.append(draw.fact(key, *written[key]))
        written[key].append(events[-1])
    queries = [Query(written[key][-1], written[key][0] if times[key] > 1 else None) for key in draw.shuffled(asked)]
    return [*draw.between(events, draw.filler(sizes.filler)), *queries]


def temporal(draw: Draw, sizes: Sizes) -> list[Item]:
    keys = draw.keys(sizes.facts // 4)
    versions = range(1, draw.vocabulary.versions + 1)
    arriving = {key: sorted(draw.random.sample(versions, draw.random.randint(2, 4))) for key in keys}
    # Two neighbours that change places are one event that comes too late.
    neighbours = [(key, i) for key, found in arriving.items() for i in range(0, len(found) - 1, 2)]
    late = round(sum(map(len, arriving.values())) / 4)
    for key, i in draw.random.sample(neighbours, late):
        arriving[key][i : i + 2] = reversed(arriving[key][i : i + 2])
    written: dict[int, list[Event]] = {key: [] for key in keys}
    events = []
    for key in draw.shuffled(k for k in keys for _ in arriving[k]):
        events.append(draw.fact(key, *written[key], version=arriving[key][len(written[key])]))
        written[key].append(events[-1])
    queries = []
    for key in draw.random.sample(keys, sizes.queries):
        ordered = sorted(written[key], key=lambda event: event.version)
        asked = draw.random.choice((0, draw.random.randint(ordered[0].version, draw.vocabulary.versions)))
        answer = [event for event in ordered if event.version <= (asked or versions[-1])][-1]
        mistakes = (written[key][-1], ordered[-1], written[key][0])  # last to come, newest, first to come
        queries.append(Query(answer, next(event for event in mistakes if event is not answer), asked))
    return [*draw.between(events, draw.filler(sizes.filler)), *queries]


def pollution(draw: Draw, sizes: Sizes) -> list[Item]:
    count = sizes.crowd * sizes.slots
    keys = draw.keys(min(draw.vocabulary.keys, sizes.facts + count))
    facts = [draw.fact(key) for key in keys[: sizes.facts]]
    asked, fresh = facts[: sizes.queries], keys[sizes.facts :]
    noise = [Event(NOISE, key, draw.value(key)) for key in (fresh[i % len(fresh)] for i in range(count))]
    wrong = [(fact, draw.value(fact.key, fact)) for fact in (asked[i % len(asked)] for i in range(sizes.facts))]
    invalid = [(fact, Event(INVALID, fact.key, value)) for fact, value in draw.shuffled(wrong)]
    last = dict(invalid)
    noisy = draw.between([event for _, event in invalid], draw.shuffled(noise))
    queries = [Query(fact, last[fact]) for fact in draw.shuffled(asked)]
    return [*draw.shuffled(facts), *draw.between(noisy, draw.filler(sizes.filler)), *queries]


def streaming(draw: Draw, sizes: Sizes) -> list[Item]:
    keys = iter(draw.keys(sizes.facts))
    kinds = draw.shuffled([FACT] * (sizes.facts - 1) + [UPDATE] * (sizes.facts // 4) + [QUERY] * sizes.queries)
    written: dict[int, list[Event]] = {}
    items: list[Item] = []
    for kind in (FACT, *kinds):
        key = next(keys) if kind == FACT else draw.random.choice(list(written))
        events = written.setdefault(key, [])
        if kind == QUERY:
            items.append(Query(events[-1], events[0] if len(events) > 1 else None))
        else:
            items.append(draw.fact(key, *events))
            events.append(items[-1])
    return draw.between(items, draw.filler(sizes.filler))


def uniform(draw: Draw, sizes: Sizes) -> list[Item]:
    return recall(draw, replace(sizes, facts=sizes.crowd * sizes.slots))


GENERATORS: dict[str, Callable[[Draw, Sizes], list[Item]]] = {
    f.__name__: f for f in (recall, overwrite, temporal, pollution, streaming, uniform)
}


def uniform_bound(sizes: Sizes, values: int = Vocabulary().values) -> float:
    """Share of right answers that a table filled before the question cannot exceed on `uniform`."""
    kept = 1 / sizes.crowd
    return kept + (1 - kept) / values


@dataclass(frozen=True)
class Task:
    """A family of streams.

    Raises:
        ValueError: an unknown name or split, or sizes for which there is no such stream.
    """

    name: str
    sizes: Sizes = Sizes()
    split: str = "train"
    vocabulary: Vocabulary = Vocabulary()

    def __post_init__(self) -> None:
        for subject, given, known in (("task", self.name, GENERATORS), ("split", self.split, SPLITS)):
            if given not in known:
                raise ValueError(f"managed_tasks: {subject}: expected one of {', '.join(known)}; got {given!r}.")
        sizes, facts, crowd = self.sizes, self.sizes.facts, self.sizes.crowd
        most = facts // 4 if self.name == "temporal" else facts
        if not (4 <= facts <= sizes.slots and 1 <= sizes.queries <= most and sizes.filler >= 0 and crowd >= 8):
            raise ValueError(
                f"managed_tasks: {self.name}: expected 4 <= facts <= slots, 1 <= queries <= {most}, filler >= 0 and "
                f"crowd >= 8; got {sizes}."
            )
        needed = {"uniform": crowd * sizes.slots, "pollution": facts + 1}.get(self.name, facts)
        if needed > self.vocabulary.keys:
            raise ValueError(f"managed_tasks: {self.name}: expected at least {needed} keys; got {self.vocabulary}.")

        if self.vocabulary.values < 16:  # four of a key in a quarter of them
            raise ValueError(f"managed_tasks: {self.name}: expected at least 16 values; got {self.vocabulary}.")

    def named(self, seed: int, index: int) -> str:
        """What the random choices of a stream start from."""
        return f"{self.split}/{self.name}/{seed}/{index}"

    def items(self, seed: int, index: int) -> list[Item]:
        """Events and questions of one stream, in order."""
        draw = Draw(self.named(seed, index), self.vocabulary, SPLITS[self.split])
        return GENERATORS[self.name](draw, self.sizes)


def spelled(item: Item, vocabulary: Vocabulary) -> list[int]:
    """An event or a question as tokens."""
    if isinstance(item, Query):
        asked = vocabulary.first_version + item.version - 1 if item.version else LATEST
        return [QUERY_AT if item.version else QUERY, vocabulary.first_key + item.answer.key, asked, ANS]
    if item.kind == FILL:
        return [FILL, *(vocabulary.first_filler + token for token in item.filler), END]
    version = vocabulary.first_version + item.version - 1 if item.version else NONE
    return [item.kind, vocabulary.first_key + item.key, vocabulary.first_value + item.value, version, END]


def assembled(ids: list[int], stream: Sequence[Item], lasts: Sequence[int]) -> Sample:
    """A sample of the items, whose last tokens are at `lasts`."""
    events, ends, queries, asks = [], [], [], []
    for item, last in zip(stream, lasts, strict=True):
        if isinstance(item, Query):
            queries.append(item)
            asks.append(last)
        else:
            events.append(item)
            ends.append(last)
    places = {event: i for i, event in enumerate(events)}
    return Sample(ids, events, ends, queries, asks, [places[query.answer] for query in queries])


def sample(task: Task, seed: int, index: int) -> Sample:
    """One stream, `BOS` first."""
    stream = task.items(seed, index)
    ids, lasts = [BOS], []
    for item in stream:
        ids += spelled(item, task.vocabulary)
        lasts.append(len(ids) - 1)
    return assembled(ids, stream, lasts)


def long_sample(task: Task, seed: int, index: int, tokens: int) -> Sample:
    """The same at random places among `tokens` tokens, filler everywhere else; questions of the end at the end."""
    stream = task.items(seed, index)
    words = [spelled(item, task.vocabulary) for item in stream]
    draw = random.Random(f"{task.named(seed, index)}/places")
    asked = next(i for i in reversed(range(len(stream))) if isinstance(stream[i], Event)) + 1
    spare = tokens - sum(map(len, words))
    if spare < 0:
        raise ValueError(f"managed_tasks: {task.name}: expected at least {tokens - spare} tokens, got {tokens}.")
    # Filler up to each item: uniform places, and all of it up to the questions at the end.
    upto = sorted(draw.randint(0, spare) for _ in range(asked)) + [spare] * (len(stream) - asked)
    generator = torch.Generator().manual_seed(draw.getrandbits(63))
    filler = torch.randint(task.vocabulary.first_filler, task.vocabulary.size, (spare,), generator=generator).tolist()
    ids: list[int] = []
    lasts, used = [], 0
    for place, word in zip(upto, words, strict=True):
        ids += filler[used:place]
        ids += word
        used = place
        lasts.append(len(ids) - 1)
    return assembled(ids + filler[used:], stream, lasts)


class Batch(NamedTuple):
    """Samples as tensors `[B, T]`, padded to the right."""

    ids: Tensor
    mask: Tensor
    """1 where a token is."""
    answers: Tensor
    """At `ANS` the id that answers, `IGNORED` elsewhere."""
    stale: Tensor
    """At `ANS` the id of the likely mistake where there is one, `IGNORED` elsewhere."""
    events: Tensor
    """Whether an event ends here."""
    write: Tensor
    """At an event's end its write label, `IGNORED` elsewhere."""
    key_ids: Tensor
    """At the end of an event that has one, its key, from 0; `IGNORED` elsewhere."""
    versions: Tensor
    """At an event's end its version, from 1; 0 elsewhere."""
    asked_keys: Tensor
    """At `ANS` the key that is asked for, `IGNORED` elsewhere."""
    asked_versions: Tensor
    """At `ANS` the newest version that may answer, from 1; 0 for any and elsewhere."""
    pointers: Tensor
    """At `ANS` the position of the `END` of the event that answers, `IGNORED` elsewhere."""


def collate(samples: Sequence[Sample], vocabulary: Vocabulary) -> Batch:
    """One batch of them."""
    shape = len(samples), max(len(one.ids) for one in samples)
    ids, zero = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.long)
    fills = (IGNORED, IGNORED, 0, IGNORED, IGNORED, 0, IGNORED, 0, IGNORED)
    batch = Batch(ids, zero, *(torch.full(shape, fill) for fill in fills))
    for row, one in enumerate(samples):
        batch.ids[row, : len(one.ids)] = torch.tensor(one.ids)
        batch.mask[row, : len(one.ids)] = 1
        for event, end in zip(one.events, one.ends, strict=True):
            batch.events[row, end] = 1
            batch.write[row, end] = int(event.write)
            batch.versions[row, end] = event.version
            if event.kind != FILL:
                batch.key_ids[row, end] = event.key
        for query, ask, pointer in zip(one.queries, one.asks, one.pointers, strict=True):
            batch.answers[row, ask] = vocabulary.first_value + query.answer.value
            batch.asked_keys[row, ask] = query.answer.key
            batch.asked_versions[row, ask] = query.version
            batch.pointers[row, ask] = one.ends[pointer]
            if query.stale is not None:
                batch.stale[row, ask] = vocabulary.first_value + query.stale.value
    return batch._replace(events=batch.events.bool())
