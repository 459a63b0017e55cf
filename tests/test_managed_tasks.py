"""The six tasks of a managed memory: what they are, by a second reading of their tokens."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from scripts import load

NAMES = ("recall", "overwrite", "temporal", "pollution", "streaming", "uniform")
KEYS, VALUES, VERSIONS = range(32, 288), range(288, 800), range(800, 864)


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    return load("benchmarks/managed_tasks.py")


@pytest.fixture(scope="module")
def small(tasks: ModuleType) -> Any:
    return tasks.Sizes(slots=16, facts=16, filler=5, queries=4)


class Read(NamedTuple):
    """An event or a question as its tokens say."""

    kind: int
    key: int
    value: int
    version: int
    last: int


def reading(tasks: ModuleType, ids: list[int]) -> list[Read]:
    """A parser of its own: everything but single filler tokens."""
    found, t = [], 0
    while t < len(ids):
        kind = ids[t]
        if kind in (tasks.QUERY, tasks.QUERY_AT):
            key, version, end = ids[t + 1 : t + 4]
            assert (key in KEYS, end) == (True, tasks.ANS)
            assert version in VERSIONS if kind == tasks.QUERY_AT else version == tasks.LATEST
            found.append(Read(kind, key, 0, version - 799 if version in VERSIONS else 64, t + 3))
            t += 4
        elif kind in (tasks.FACT, tasks.UPDATE, tasks.NOISE, tasks.INVALID):
            key, value, version, end = ids[t + 1 : t + 5]
            assert (key in KEYS, value in VALUES, end) == (True, True, tasks.END)
            assert version in VERSIONS or version == tasks.NONE
            found.append(Read(kind, key, value, version - 799 if version in VERSIONS else 0, t + 4))
            t += 5
        elif kind == tasks.FILL:
            assert all(864 <= x < 1024 for x in ids[t + 1 : t + 4])
            assert ids[t + 4] == tasks.END
            found.append(Read(kind, 0, 0, 0, t + 4))
            t += 5
        else:
            assert kind in (tasks.BOS, tasks.PAD) or kind >= 864
            t += 1
    return found


def replay(tasks: ModuleType, read: list[Read]) -> list[int]:
    """Answers in order: of the valid events on the asked key so far, the newest that is not too new."""
    valid: dict[int, list[Read]] = defaultdict(list)
    answers = []
    for item in read:
        if item.kind in (tasks.FACT, tasks.UPDATE):
            valid[item.key].append(item)
        elif item.kind in (tasks.QUERY, tasks.QUERY_AT):
            allowed = [event for event in valid[item.key] if event.version <= item.version]
            answers.append(max(allowed, key=lambda event: (event.version, event.last)).value)
    return answers


@pytest.mark.parametrize("name", NAMES)
def test_answers_labels_and_mistakes_are_those_of_a_replay(tasks: ModuleType, small: Any, name: str) -> None:
    for index in range(6):
        one = tasks.sample(tasks.Task(name, small), 0, index)
        read = reading(tasks, one.ids)
        events = [item for item in read if item.kind not in (tasks.QUERY, tasks.QUERY_AT)]
        asked = [item for item in read if item.kind in (tasks.QUERY, tasks.QUERY_AT)]
        assert [item.last for item in events] == one.ends
        assert [item.last for item in asked] == one.asks
        answers = [288 + query.answer.value for query in one.queries]
        assert answers == replay(tasks, read)
        assert answers == [events[i].value for i in one.pointers]
        for item, event in zip(events, one.events, strict=True):
            assert event.write == (item.kind in (tasks.FACT, tasks.UPDATE))
            assert event.version == item.version
            assert item.kind == tasks.FILL or 32 + event.key == item.key
        for query, item, pointer in zip(one.queries, asked, one.pointers, strict=True):
            assert events[pointer].key == item.key
            if query.stale is not None:
                wrong = events[one.events.index(query.stale)]
                assert wrong.key == item.key
                assert wrong.value != 288 + query.answer.value
                assert wrong.last < item.last


def test_recall_and_uniform_state_each_key_once(tasks: ModuleType, small: Any) -> None:
    for name, count in (("recall", 16), ("uniform", 128)):
        one = tasks.sample(tasks.Task(name, small), 0, 0)
        facts = [event for event in one.events if event.kind == tasks.FACT]
        assert len({event.key for event in facts}) == len(facts) == count
        assert len(one.events) == count + 5
        assert max(one.ends) < min(one.asks)
    places = Counter(tasks.sample(tasks.Task("uniform", small), 0, i).pointers[0] // 34 for i in range(40))
    assert set(places) == {0, 1, 2, 3}  # the asked fact is anywhere


@pytest.mark.parametrize("queries", [1, 3])
def test_overwrite_asks_for_what_was_rewritten(tasks: ModuleType, small: Any, queries: int) -> None:
    for index in range(20):
        one = tasks.sample(tasks.Task("overwrite", replace(small, queries=queries)), 0, index)
        facts = [event for event in one.events if event.write]
        times = Counter(event.key for event in facts)
        assert len(times) == 16
        assert set(times.values()) <= {1, 2, 3, 4}
        assert sum(times[query.answer.key] > 1 for query in one.queries) >= queries / 2
        for query in one.queries:
            first = next(event for event in facts if event.key == query.answer.key)
            assert query.stale is (first if times[first.key] > 1 else None)
            assert first.kind == tasks.FACT
            assert query.answer.kind == (tasks.UPDATE if times[first.key] > 1 else tasks.FACT)


def test_a_quarter_of_the_versions_come_late(tasks: ModuleType, small: Any) -> None:
    kinds: Counter[int] = Counter()
    for index in range(40):
        one = tasks.sample(tasks.Task("temporal", small), 0, index)
        newest: dict[int, int] = defaultdict(int)
        late = 0
        facts = [event for event in one.events if event.write]
        for event in facts:
            late += event.version < newest[event.key]
            newest[event.key] = max(newest[event.key], event.version)
        assert late == round(len(facts) / 4)
        assert len({(event.key, event.version) for event in facts}) == len(facts) <= 16
        for query in one.queries:
            assert query.stale is not None
            assert query.version or query.answer.version == newest[query.answer.key]
            kinds[bool(query.version) + (query.answer.version < newest[query.answer.key])] += 1
    assert min(kinds[kind] for kind in range(3)) > 20, kinds  # newest, newest by its number, an older one


def test_pollution_is_noise_and_invalid_events(tasks: ModuleType, small: Any) -> None:
    for sizes in (small, tasks.Sizes(slots=32, facts=32, queries=2)):  # there, fewer keys are left than noise events
        one = tasks.sample(tasks.Task("pollution", sizes), 0, 0)
        by_kind = {kind: [e for e in one.events if e.kind == kind] for kind in (tasks.FACT, tasks.NOISE, tasks.INVALID)}
        facts, noise, invalid = by_kind.values()
        assert (len(facts), len(noise), len(invalid)) == (sizes.facts, 8 * sizes.slots, sizes.facts)
        assert one.events[: sizes.facts] == facts
        right = {event.key: event.value for event in facts}
        fresh = {event.key for event in noise}
        assert len(fresh) == min(len(noise), 256 - sizes.facts)
        assert not fresh & set(right)
        assert {event.key for event in invalid} == {query.answer.key for query in one.queries}
        assert all(right[event.key] != event.value for event in invalid)
        for query in one.queries:
            assert query.stale is [event for event in invalid if event.key == query.answer.key][-1]


def test_streaming_asks_in_between(tasks: ModuleType, small: Any) -> None:
    in_between = rewritten = 0
    for index in range(20):
        one = tasks.sample(tasks.Task("streaming", small), 0, index)
        kinds = Counter(event.kind for event in one.events)
        assert kinds[tasks.UPDATE] / (kinds[tasks.FACT] + kinds[tasks.UPDATE]) == 0.2
        in_between += sum(ask < max(one.ends) for ask in one.asks)
        rewritten += sum(query.stale is not None for query in one.queries)
    assert in_between > 60
    assert rewritten > 5


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_pure(tasks: ModuleType, small: Any, name: str) -> None:
    one = tasks.sample(tasks.Task(name, small), 3, 5)
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate()
    tasks.sample(tasks.Task(name, small), 3, 4)
    again = tasks.sample(tasks.Task(name, small), 3, 5)
    assert one.ids == again.ids
    assert one.pointers == again.pointers
    assert random.getstate() == before
    others = [tasks.sample(tasks.Task(name, small), seed, index).ids for seed, index in ((3, 4), (4, 5), (5, 3))]
    others += [tasks.sample(tasks.Task(name, small, split), 3, 5).ids for split in ("held_out", "new_pairs", "any")]
    assert one.ids not in others


def test_splits_and_pairs_are_disjoint(tasks: ModuleType, small: Any) -> None:
    pairs, streams = defaultdict(set), defaultdict(set)
    for split in tasks.SPLITS:
        for name in NAMES:
            for index in range(3):
                one = tasks.sample(tasks.Task(name, small, split), 0, index)
                streams[split].add(tuple(one.ids))
                pairs[split] |= {(event.key, event.value) for event in one.events if event.kind != tasks.FILL}
    assert not streams["train"] & streams["held_out"]
    assert not (pairs["train"] | pairs["held_out"]) & pairs["new_pairs"]
    assert pairs["train"] & pairs["held_out"]
    for values in (16, 512):
        found = [tasks.quarters(key, values) for key in range(40)]
        assert all(Counter(one) == dict.fromkeys(range(4), values // 4) for one in found)
        assert len({tuple(one) for one in found}) == 40


@pytest.mark.parametrize("name", NAMES)
def test_long_streams_are_the_same_between_filler(tasks: ModuleType, small: Any, name: str) -> None:
    task = tasks.Task(name, replace(small, filler=0), vocabulary=tasks.Vocabulary(filler=16384))
    one, other = tasks.long_sample(task, 0, 1, 4096), tasks.sample(task, 0, 1)
    assert len(one.ids) == 4096
    strip = [item._replace(last=0) for item in reading(tasks, one.ids)]
    assert strip == [item._replace(last=0) for item in reading(tasks, other.ids)]
    assert [item.last for item in reading(tasks, one.ids)] == sorted(one.ends + one.asks)
    assert max(one.ids) > 16384
    if name != "streaming":
        assert one.asks[-1] == 4095
    gaps = [b - a for a, b in zip(one.ends, one.ends[1:], strict=False)]
    assert max(gaps) < 4096 / 2
    assert one.ids == tasks.long_sample(task, 0, 1, 4096).ids
    with pytest.raises(ValueError, match="expected at least"):
        tasks.long_sample(task, 0, 1, 30)


def test_batches_say_what_samples_say(tasks: ModuleType, small: Any) -> None:
    samples = [tasks.sample(tasks.Task(name, small), 0, 2) for name in NAMES]
    batch = tasks.collate(samples, tasks.Vocabulary())
    assert batch.mask.sum(1).tolist() == [len(one.ids) for one in samples]
    for row, one in enumerate(samples):
        assert batch.ids[row, : len(one.ids)].tolist() == one.ids
        assert batch.events[row].nonzero().flatten().tolist() == one.ends
        assert batch.write[row, one.ends].tolist() == [int(event.write) for event in one.events]
        assert batch.versions[row, one.ends].tolist() == [event.version for event in one.events]
        known = [end for event, end in zip(one.events, one.ends, strict=True) if event.kind != tasks.FILL]
        assert torch.equal(batch.key_ids[row, known] + 32, batch.ids[row, [end - 3 for end in known]])
        assert torch.equal(batch.answers[row, one.asks], batch.ids[row, batch.pointers[row, one.asks] - 2])
        assert torch.equal(batch.asked_keys[row, one.asks] + 32, batch.ids[row, [ask - 2 for ask in one.asks]])
        assert batch.asked_versions[row, one.asks].tolist() == [query.version for query in one.queries]
        stale = [tasks.IGNORED if q.stale is None else 288 + q.stale.value for q in one.queries]
        assert batch.stale[row, one.asks].tolist() == stale
    for field, marks in (("answers", "asks"), ("asked_keys", "asks"), ("pointers", "asks"), ("write", "ends")):
        assert (getattr(batch, field) != tasks.IGNORED).sum() == sum(len(getattr(one, marks)) for one in samples)


def test_impossible_streams_are_refused(tasks: ModuleType) -> None:
    for options, message in (
        (("recal",), "task: expected one of recall, overwrite"),
        (("recall", tasks.Sizes(), "test"), "split: expected one of train"),
        (("recall", tasks.Sizes(facts=33)), "expected 4 <= facts <= slots"),
        (("temporal", tasks.Sizes(queries=5)), "queries <= 4"),
        (("recall", tasks.Sizes(crowd=7)), "crowd >= 8"),
        (("uniform", tasks.Sizes(crowd=9)), "expected at least 288 keys"),
        (("recall", tasks.Sizes(), "train", tasks.Vocabulary(values=15)), "expected at least 16 values"),
    ):
        with pytest.raises(ValueError, match=message):
            tasks.Task(*options)


def test_the_bound(tasks: ModuleType) -> None:
    assert tasks.uniform_bound(tasks.Sizes()) == pytest.approx(1 / 8 + 7 / 8 / 512)
