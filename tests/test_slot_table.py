"""The slot table: the batched form against the plain one, and the life cycle's promises on random streams of events."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import GRADCHECK, OP, close
from torch import Tensor

from memzoo.kernels.slot_table import (
    ACCEPTED,
    OUTCOMES,
    Event,
    Outcome,
    ReadWeights,
    Rules,
    SlotTable,
    empty_table,
    noted,
    read,
    write,
)
from memzoo.kernels.slot_table.reference import Table

ROWS, SLOTS, WIDTH, EVENTS = 3, 4, 6, 18
BOUND = OP[torch.float64]
WEIGHTS = ReadWeights(sharpness=4.0, confidence=0.7, usage=0.3, age=0.5, match_scale=8.0, match_threshold=0.4)
LIKE = torch.zeros((), dtype=torch.float64)
CONTENTS = ("keys", "values", "confidence", "importance", "written", "version", "key_id", "protected")
MODES = {
    "ids": Rules(age_scale=20.0),
    "similarity": Rules(age_scale=20.0, same_threshold=0.8),
    "history": Rules(age_scale=20.0, same_threshold=0.8, versions_per_key=2),
    "id history": Rules(age_scale=20.0, versions_per_key=2),
}
streams = settings(max_examples=6, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
modes = st.sampled_from(sorted(MODES))


def stream(seed: int, mode: str, rows: int = ROWS, events: int = EVENTS, keys: int = 7, **fixed: Any) -> list[Event]:
    """Random events, a few of them missing, about a few keys; some stale, weak or protecting."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    known = F.normalize(torch.randn(keys, WIDTH, generator=generator, dtype=torch.float64), dim=-1)
    found = []
    for position in range(events):
        which = torch.randint(keys, (rows,), generator=generator)
        noise = 0.1 * torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        values = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        event = Event(
            present=uniform(rows) < 0.9,
            position=torch.full((rows,), 2 * position),
            key=F.normalize(known[which] + noise, dim=-1),
            value=values,
            confidence=0.3 + 0.7 * uniform(rows),
            importance=uniform(rows),
            key_id=which + 1 if "id" in mode.split() or mode == "ids" else torch.zeros_like(which),
            version=torch.randint(4, (rows,), generator=generator),
            protect=uniform(rows) < 0.2,
        )
        found.append(event._replace(**{name: torch.full_like(getattr(event, name), x) for name, x in fixed.items()}))
    return found


def row_of(x: Any, row: int) -> Any:
    return type(x)(*(field[row : row + 1] for field in x))


def fresh(rows: int = ROWS, slots: int = SLOTS) -> SlotTable:
    return empty_table(rows, slots, WIDTH, WIDTH, LIKE)


def queries(event: Event, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Two per row, near the event's key and its opposite, and their positions."""
    return torch.stack([event.key, -event.key], dim=1), event.position[:, None] + torch.tensor([0, 1])


def run(events: list[Event], rules: Rules, table: SlotTable | None = None, reading: bool = True) -> Any:
    """The tables after each event, the first one before all, and the events' outcomes; with reads in between."""
    tables, outcomes = [fresh(len(events[0].present)) if table is None else table], []
    for event in events:
        table, outcome = write(tables[-1], event, rules)
        if reading:
            table = noted(table, read(table, *queries(event), rules, WEIGHTS, 2))
        tables.append(table)
        outcomes.append(outcome)
    return tables, outcomes


def same(a: SlotTable | Outcome, b: SlotTable | Outcome) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# The plain form -------------------------------------------------------------------------------------------------------


@streams
@given(seeds, modes)
def test_equals_the_reference_field_by_field(seed: int, mode: str) -> None:
    """Every slot, outcome and reading after every event, in rows that differ."""
    rules, plain = MODES[mode], [Table(SLOTS, MODES[mode]) for _ in range(ROWS)]
    table = fresh()
    for number, event in enumerate(stream(seed, mode)):
        if number % 9 == 8:
            event = event._replace(value=event.value.masked_fill(torch.arange(ROWS)[:, None] == 1, torch.nan))
        table, outcome = write(table, event, rules)
        query, position = queries(event)
        asked = event.key_id[:, None].expand(-1, 2) * torch.tensor([1, 0])
        version = event.version[:, None].expand(-1, 2) * torch.tensor([0, 1])
        reading = read(table, query, position, rules, WEIGHTS, 2, asked, version)
        table = noted(table, reading)
        for row, reference in enumerate(plain):
            one = row_of(event, row)
            if bool(one.present):
                plain_event = {name: x[0].tolist() if x.ndim == 2 else x.item() for name, x in one._asdict().items()}
                kind, slot = reference.write(plain_event)
                assert (OUTCOMES[int(outcome.kind[row])], int(outcome.slot[row])) == (kind, slot)
            else:
                assert (int(outcome.kind[row]), int(outcome.slot[row])) == (-1, -1)
            for at in range(2):
                ids, newest = int(asked[row, at]), int(version[row, at])
                want = reference.read(query[row, at].tolist(), int(position[row, at]), WEIGHTS, 2, ids, newest)
                agrees(reading, row, at, want)
            if number % 4 == 1:
                equal_slots(row_of(table, row), reference)


def agrees(reading: Any, row: int, at: int, want: dict[str, Any]) -> None:
    slots = [int(i) for i in reading.slots[row, at] if i >= 0]
    assert slots == want["slots"]
    close(reading.confidence[row, at], torch.tensor(want["confidence"], dtype=torch.float64), BOUND)
    if want["output"] is None:
        assert not reading.output[row, at].any()
        assert not reading.weights[row, at].any()
    else:
        close(reading.output[row, at], torch.tensor(want["output"], dtype=torch.float64), BOUND)
        close(reading.weights[row, at, slots], torch.tensor(want["weights"], dtype=torch.float64), BOUND)


def equal_slots(table: SlotTable, reference: Table) -> None:
    assert table.counts[0].tolist() == list(reference.counts.values())
    plural = {"keys": "key", "values": "value"}
    for at, slot in enumerate(reference.slots):
        for name, tensor in table._asdict().items():
            if name == "counts":
                continue
            got = tensor[0, at]
            if slot is None:
                assert not got.any(), name
                continue
            want = torch.tensor(slot[plural.get(name, name)], dtype=got.dtype)
            if got.is_floating_point():
                close(got, want, BOUND)
            else:
                assert got == want, name


def test_the_streams_meet_every_outcome() -> None:
    """What the other tests would not see if it never happened."""
    seen = torch.zeros(len(OUTCOMES), dtype=torch.int64)
    for mode, rules in MODES.items():
        tables, _ = run(stream(0, mode, events=60), rules)
        seen += tables[-1].counts.sum(0)
    tables, _ = run(stream(0, "ids", protect=True, confidence=1.0), MODES["ids"])
    seen += tables[-1].counts.sum(0)
    assert [name for name, count in zip(OUTCOMES, seen.tolist(), strict=True) if count == 0] == ["not_finite"]


# Invariants -----------------------------------------------------------------------------------------------------------


@streams
@given(seeds, modes)
def test_a_rejected_event_changes_nothing_and_an_accepted_one_a_single_slot(seed: int, mode: str) -> None:
    """Piecewise stability; protection keeps; occupied slots are never vacated."""
    events = stream(seed, mode)
    tables, outcomes = run(events, MODES[mode])
    for before, after, outcome in zip(tables[:-1], tables[1:], outcomes, strict=True):
        changed = torch.stack([_differs(getattr(before, name), getattr(after, name)) for name in CONTENTS]).any(0)
        assert torch.equal(changed.sum(1) > 0, outcome.accepted)
        assert bool((changed.sum(1) <= 1).all())
        assert bool((after.written[before.written > 0] > 0).all())
        assert bool((after.protected | ~before.protected).all())
        # A protected slot is written by its own key alone.
        replaced = changed & before.protected
        assert bool((outcome.kind[replaced.any(1)] == OUTCOMES.index("overwritten")).all())


def _differs(a: Tensor, b: Tensor) -> Tensor:
    return (a != b).flatten(2).any(2) if a.ndim == 3 else a != b


@streams
@given(seeds, modes)
def test_no_two_slots_share_a_key(seed: int, mode: str) -> None:
    """Nor a key and version where versions are kept; and no key has more versions than it may."""
    rules = MODES[mode]
    exact = [event._replace(key=F.one_hot((event.key_id + 5) % WIDTH, WIDTH).double()) for event in stream(seed, mode)]
    tables, _ = run(exact, rules)
    for table, row in itertools.product(tables, range(ROWS)):
        occupied = table.written[row] > 0
        by_id = bool((table.key_id[row] > 0).any())
        names = table.key_id[row] if by_id else table.keys[row].argmax(-1)
        found = [(int(n), int(v)) for n, v in zip(names[occupied], table.version[row][occupied], strict=True)]
        keys = [name for name, _ in found]
        if rules.versions_per_key == 1:
            assert len(set(keys)) == len(keys)
        else:
            assert len(set(found)) == len(found)
            assert max(map(keys.count, keys), default=0) <= rules.versions_per_key


@streams
@given(seeds)
def test_overwriting_keeps_the_newest(seed: int) -> None:
    """With room for every key, certain writes and one version, each slot holds its key's last event."""
    events = stream(seed, "ids", keys=SLOTS, confidence=1.0, version=0)
    tables, outcomes = run(events, MODES["ids"])
    last: dict[tuple[int, int], Tensor] = {}
    for event, outcome in zip(events, outcomes, strict=True):
        assert torch.equal(outcome.accepted, event.present)
        for row in event.present.nonzero()[:, 0].tolist():
            last[row, int(event.key_id[row])] = event.value[row]
    table = tables[-1]
    assert int((table.written > 0).sum()) == len(last)
    for (row, name), value in last.items():
        assert torch.equal(table.values[row][table.key_id[row] == name][0], value)


@streams
@given(seeds)
def test_a_full_protected_table_takes_no_new_key(seed: int) -> None:
    fill = stream(seed, "ids", events=SLOTS, protect=True, confidence=1.0, present=True)
    fill = [event._replace(key_id=torch.full((ROWS,), at + 1)) for at, event in enumerate(fill)]
    more = stream(seed + 1, "ids", confidence=1.0)
    more = [event._replace(key_id=event.key_id + 100, position=event.position + 50) for event in more]
    tables, _ = run(fill, MODES["ids"])
    after, outcomes = run(more, MODES["ids"], tables[-1])
    for name in CONTENTS:
        assert torch.equal(getattr(after[-1], name), getattr(tables[-1], name)), name
    assert not torch.stack([outcome.accepted for outcome in outcomes]).any()


@streams
@given(seeds, modes)
def test_rows_do_not_know_of_one_another(seed: int, mode: str) -> None:
    """A row of a batch equals the row alone, bit by bit; permuted rows give permuted tables."""
    events, rules = stream(seed, mode), MODES[mode]
    tables, outcomes = run(events, rules)
    order = torch.tensor([2, 0, 1])
    moved, _ = run([Event(*(x[order] for x in event)) for event in events], rules)
    same(moved[-1], SlotTable(*(x[order] for x in tables[-1])))
    for row in range(ROWS):
        alone, kinds = run([row_of(event, row) for event in events], rules)
        for name, x in row_of(tables[-1], row)._asdict().items():
            got = getattr(alone[-1], name)
            close(got, x, BOUND) if x.is_floating_point() and x.any() else same((got,), (x,))  # type: ignore[arg-type]
        assert [int(k.kind[0]) for k in kinds] == [int(k.kind[row]) for k in outcomes]


@pytest.mark.parametrize("noise", [0, SLOTS, 100 * SLOTS])
def test_noise_does_not_push_out_what_matters(noise: int) -> None:
    """Capacity pressure by fresh keys and validity pressure on the facts' own keys, protected or worth more."""
    rules = MODES["ids"]
    for protect, importance in ((True, 0.0), (False, 1.0)):
        facts = stream(
            3, "ids", events=SLOTS - 1, present=True, confidence=1.0, importance=importance, version=0, protect=protect
        )
        facts = [event._replace(key_id=torch.full((ROWS,), at + 1)) for at, event in enumerate(facts)]
        tables, _ = run(facts, rules, reading=False)
        noisy = stream(4, "ids", events=noise, confidence=0.6, importance=0.0, protect=False)
        noisy = [event._replace(key_id=torch.full((ROWS,), 50 + at)) for at, event in enumerate(noisy)]
        wrong = stream(5, "ids", events=noise, confidence=0.4, protect=False, keys=SLOTS - 1)
        mixed = [event for pair in zip(noisy, wrong, strict=True) for event in pair]
        table = run(mixed, rules, tables[-1], reading=False)[0][-1]
        for event in facts:
            position, asked = event.position[:, None] + 999, event.key_id[:, None]
            reading = read(table, event.key[:, None], position, rules, WEIGHTS, 1, asked)
            close(reading.output[:, 0], event.value, BOUND)


def test_an_event_is_seen_by_the_reads_after_it_alone() -> None:
    (event,) = stream(0, "similarity", events=1, present=True, confidence=0.9)
    rules = MODES["similarity"]
    before = read(fresh(), event.key[:, None], event.position[:, None], rules, WEIGHTS, 2)
    assert not before.output.any()
    assert not before.confidence.any()
    assert bool((before.slots == -1).all())
    table, _ = write(fresh(), event, rules)
    after = read(table, event.key[:, None], event.position[:, None] + 1, rules, WEIGHTS, 2)
    close(after.output[:, 0], event.value, BOUND)


def test_reads_between_two_events_change_no_score() -> None:
    """However they are cut: usage is what it was at the last event."""
    events = stream(1, "similarity", present=True)
    rules, table = MODES["similarity"], run(events, MODES["similarity"])[0][-1]
    query = torch.cat([queries(event)[0] for event in events[:4]], dim=1)
    position = 60 + torch.arange(query.shape[1]).expand(ROWS, -1)
    whole = read(table, query, position, rules, WEIGHTS, 2)
    pieces, stepped = [], table
    for part, at in zip(query.split([1, 3, 4], dim=1), position.split([1, 3, 4], dim=1), strict=True):
        pieces.append(read(stepped, part, at, rules, WEIGHTS, 2))
        stepped = noted(stepped, pieces[-1])
    close(torch.cat([piece.output for piece in pieces], dim=1), whole.output, BOUND)
    close(stepped.recent_usage, noted(table, whole).recent_usage, BOUND)
    half = torch.arange(query.shape[1]).expand(ROWS, -1) < 4
    want = table.recent_usage + whole.weights[:, :4].sum(1)
    close(noted(table, whole, half).recent_usage, want, BOUND)
    assert torch.equal(table.usage, stepped.usage)


def test_equal_scores_go_to_the_lower_slot() -> None:
    key = F.one_hot(torch.tensor([0]), WIDTH).double()
    event = row_of(stream(0, "ids", events=1, present=True, confidence=1.0)[0], 0)._replace(key=key)
    table = fresh(1)
    for name in (3, 1, 2):
        table, _ = write(table, event._replace(key_id=torch.tensor([name])), MODES["ids"])
    found = read(table, key[:, None], torch.tensor([[9]]), MODES["ids"], WEIGHTS, 2)
    assert found.slots.tolist() == [[[0, 1]]]


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["similarity", "history"])
def test_gradients_of_keys_values_and_confidences(mode: str) -> None:
    """Finite differences through three events, one of them an overwrite; what is overwritten unread gets none."""
    torch.manual_seed(0)
    rules = MODES[mode]
    a, b, c = stream(2, mode, rows=1, events=3, present=True, version=1, protect=False)
    b = b._replace(key=F.normalize(torch.randn_like(b.key), dim=-1))
    b = b._replace(key=F.normalize(b.key - (b.key * a.key).sum() * a.key, dim=-1))
    c = c._replace(key=F.normalize(a.key + 0.05 * b.key, dim=-1))
    inputs = [x.clone().requires_grad_() for event in (a, b, c) for x in (event.key, event.value, event.confidence)]
    with torch.no_grad():
        for x in inputs[2::3]:
            x.copy_(0.8 + 0.1 * torch.rand_like(x))
    query = F.normalize(a.key + b.key, dim=-1)[:, None].requires_grad_()
    beta, theta = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (4.0, 0.4))

    def outputs(beta: Tensor, theta: Tensor, query: Tensor, *contents: Tensor) -> tuple[Tensor, ...]:
        table = fresh(1)
        for event, key, value, confidence in zip((a, b, c), *(contents[at::3] for at in range(3)), strict=True):
            table, outcome = write(table, event._replace(key=key, value=value, confidence=confidence), rules)
            assert bool(outcome.accepted)
        weights = WEIGHTS._replace(sharpness=beta, match_threshold=theta)
        found = read(table, query, torch.tensor([[9]]), rules, weights, 2)
        return found.output, found.confidence

    assert torch.autograd.gradcheck(outputs, (beta, theta, query, *inputs), **GRADCHECK)
    gradients = torch.autograd.grad(outputs(beta, theta, query, *inputs)[0].sum(), inputs, allow_unused=True)
    assert [bool(g.any()) for g in gradients] == [False] * 3 + [True] * 6


def test_an_event_that_is_not_finite_is_counted_and_never_stored() -> None:
    event = stream(0, "similarity", events=1, present=True, confidence=0.9)[0]
    for name, at in itertools.product(("key", "value", "confidence", "importance"), range(ROWS)):
        x = getattr(event, name).clone()
        x[at] = torch.inf if name == "value" else torch.nan
        table, outcome = write(fresh(), event._replace(**{name: x}), MODES["similarity"])
        assert (outcome.kind == OUTCOMES.index("not_finite")).nonzero().tolist() == [[at]]
        assert all(bool(x.isfinite().all()) for x in table)
        assert int((table.written > 0).sum()) == ROWS - 1
        assert table.counts[:, ACCEPTED:].sum() == 1


def test_shapes_that_do_not_fit_are_refused() -> None:
    (event,) = stream(0, "ids", events=1)
    rules, query, position = MODES["ids"], event.key[:, None], event.position[:, None]
    for name, shape in (("key", rf"\({ROWS}, {WIDTH}\)"), ("version", rf"\({ROWS},\)")):
        with pytest.raises(ValueError, match=rf"event.{name}: expected {shape}, got \({ROWS - 1},"):
            write(fresh(), event._replace(**{name: getattr(event, name)[1:]}), rules)
    with pytest.raises(ValueError, match="query: expected"):
        read(fresh(), event.key, position, rules, WEIGHTS, 2)
    with pytest.raises(ValueError, match="key_id: expected"):
        read(fresh(), query, position, rules, WEIGHTS, 2, key_id=event.key_id)
    with pytest.raises(ValueError, match=f"count=5: expected 1 to the table's {SLOTS} slots"):
        read(fresh(), query, position, rules, WEIGHTS, 5)
