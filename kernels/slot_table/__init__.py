"""A small table of editable slots per row: hard decisions about events, differentiable contents.

An event `(k_e, v_e, p_e)` (a key, a value, the probability that it is worth writing) meets the slots
`(k_i, v_i, c_i, u_i, ...)`:

    match    same key id, or without ids  j = argmax_i k_e . k_i  if that is at least `same_threshold`
    reject   p_e < write_threshold; older than the match; the match is protected and p_e < c_j - protect_margin
    replace  the match's key, value and confidence (never an average)
    insert   into the first empty slot, else in place of the unprotected slot with the least
                 keep_i = a_c c_i + a_u log(1 + u_i) + a_i importance_i - a_t age_i / (age_i + T)
             if the event's own keep (age 0, unused) is not below it

    read     s_i = beta q . k_i + w_c log c_i + w_u log(1 + u_i) - w_t age_i / (age_i + T)
             y = sum_{i in top-K of s} softmax_i(s) v_i,    rho = sigmoid(alpha (max_i q . k_i - theta))

Decisions carry no gradient; keys, values and confidences of what stays in the table do, as do a read's weights and its
confidence rho.

Source: Memory-Managed Long-Context Attention (arXiv 2606.28876). From the paper: slots with key, value, confidence,
usage, time and version, and conflict features; hard writes that replace; eviction by confidence, usage, recency and
importance; protection. Ours, since no formula of the paper was at hand: every coefficient and form above, the
admission test, ties, and what "stale" means.

All zeros are an empty table: a slot is empty where `written` is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from memzoo.kernels.registry import as_given

OUTCOMES = (
    "inserted",
    "overwritten",
    "evicted",
    "unconvincing",
    "stale",
    "guarded",
    "outranked",
    "no_room",
    "not_finite",
)
"""What may become of an event, the accepted ones first: written to an empty slot; over its match; in place of another
key (or of its key's oldest version). Rejected: p below the threshold; older than its match; its match is protected;
every unprotected slot is worth more; every slot is protected; NaN or infinity in it."""
ACCEPTED = 3
"""How many of `OUTCOMES` are accepted."""
INSERTED, OVERWRITTEN, EVICTED, UNCONVINCING, STALE, GUARDED, OUTRANKED, NO_ROOM, NOT_FINITE = range(len(OUTCOMES))
EPS = 1e-6
"""Inside the logarithm of a confidence."""


class SlotTable(NamedTuple):
    """The tables of B rows of M slots. Floats are float32 or wider, `written` to `overwrites` int64."""

    keys: Tensor
    """Of unit length, `[B, M, K]`."""
    values: Tensor
    """`[B, M, V]`."""
    confidence: Tensor
    """c, the probability with which the slot was written, `[B, M]`."""
    importance: Tensor
    """As the writer gave it, `[B, M]`."""
    usage: Tensor
    """u, a decayed count of reads up to the last event, `[B, M]`."""
    recent_usage: Tensor
    """Reads since the last event, `[B, M]`."""
    written: Tensor
    """1 + position of the last write, `[B, M]`; 0 where the slot is empty."""
    version: Tensor
    """Of the fact, from 1; 0 for none, `[B, M]`."""
    key_id: Tensor
    """1 + the id that the writer gave the key; 0 for none, `[B, M]`."""
    conflicts: Tensor
    """Events of the slot's key that were rejected, `[B, M]`."""
    overwrites: Tensor
    """Events of the slot's key that were accepted after the first, `[B, M]`."""
    rejected: Tensor
    """p of the last of the conflicts, `[B, M]`."""
    protected: Tensor
    """`[B, M]`, bool."""
    counts: Tensor
    """Events by `OUTCOMES`, `[B, 9]`, int64."""


class Event(NamedTuple):
    """At most one event per row."""

    present: Tensor
    """Which rows have one, `[B]`, bool."""
    position: Tensor
    """Tokens before it, `[B]`, int64."""
    key: Tensor
    """Of unit length, `[B, K]`."""
    value: Tensor
    """`[B, V]`."""
    confidence: Tensor
    """p, `[B]`, in [0, 1]."""
    importance: Tensor
    """`[B]`."""
    key_id: Tensor
    """1 + the key's id, or 0 for a key that is matched by similarity, `[B]`, int64."""
    version: Tensor
    """`[B]`, int64, 0 for none."""
    protect: Tensor
    """Whether the slot shall be protected from now on, `[B]`, bool."""


class Rules(NamedTuple):
    """The constants of a table's decisions."""

    write_threshold: float = 0.5
    same_threshold: float = 0.9
    protect_margin: float = 0.1
    versions_per_key: int = 1
    """1: a slot per key. More: a slot per key and version, so many of a key at most."""
    keep_confidence: float = 1.0
    keep_usage: float = 0.1
    keep_importance: float = 0.5
    keep_age: float = 0.5
    age_scale: float = 1024.0
    """T, in tokens."""
    usage_decay: float = 0.9
    """Of the usage at each event."""


class Outcome(NamedTuple):
    """What became of an event."""

    kind: Tensor
    """Index into `OUTCOMES`, -1 where there was no event, `[B]`, int64."""
    slot: Tensor
    """The slot written, or the one that a rejected event matched; -1 for none, `[B]`, int64."""

    @property
    def accepted(self) -> Tensor:
        """`[B]`, bool."""
        return (self.kind >= 0) & (self.kind < ACCEPTED)


class ReadWeights(NamedTuple):
    """What a read weighs, scalars: tensors or numbers."""

    sharpness: Tensor | float = 8.0
    """beta."""
    confidence: Tensor | float = 1.0
    usage: Tensor | float = 0.0
    age: Tensor | float = 0.0
    match_scale: Tensor | float = 16.0
    """alpha."""
    match_threshold: Tensor | float = 0.5
    """theta."""


class Reading(NamedTuple):
    """What a read found; 0 throughout where nothing could be read."""

    output: Tensor
    """`[B, L, V]`."""
    confidence: Tensor
    """rho, `[B, L]`."""
    weights: Tensor
    """Of every slot, 0 outside the top K, `[B, L, M]`."""
    slots: Tensor
    """The top K slots, best first, -1 where there were fewer, `[B, L, K]`, int64."""
    nearest: Tensor
    """The slot whose key is most like the query, of any confidence, usage and age, -1 for none, `[B, L]`, int64."""


def empty_table(batch: int, slots: int, key_dim: int, value_dim: int, like: Tensor) -> SlotTable:
    """Tables without a fact, on the device of `like`, in its dtype but at least float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(batch, *shape, dtype=dtype, device=like.device)

    whole = torch.int64
    return SlotTable(
        keys=zeros(slots, key_dim),
        values=zeros(slots, value_dim),
        confidence=zeros(slots),
        importance=zeros(slots),
        usage=zeros(slots),
        recent_usage=zeros(slots),
        written=zeros(slots, dtype=whole),
        version=zeros(slots, dtype=whole),
        key_id=zeros(slots, dtype=whole),
        conflicts=zeros(slots, dtype=whole),
        overwrites=zeros(slots, dtype=whole),
        rejected=zeros(slots),
        protected=zeros(slots, dtype=torch.bool),
        counts=zeros(len(OUTCOMES), dtype=whole),
    )


def alikeness(table: SlotTable, event: Event) -> Tensor:
    """How alike each slot's key and the event's are, `[B, M]`; of no meaning where a slot is empty."""
    return torch.bmm(table.keys, event.key[..., None])[..., 0]  # what `@` does around it costs more than the product


def keep(table: SlotTable, position: Tensor, rules: Rules) -> Tensor:
    """What each slot is worth at `position` `[B]`, `[B, M]`; of no meaning where a slot is empty."""
    return (
        rules.keep_confidence * table.confidence
        + rules.keep_usage * torch.log1p(table.usage)
        + rules.keep_importance * table.importance
        - rules.keep_age * _aged(position[:, None] - table.written + 1, rules, table.keys.dtype)
    )


def write(table: SlotTable, event: Event, rules: Rules) -> tuple[SlotTable, Outcome]:
    """Decide about one event per row and apply it.

    Args:
        table: from `empty_table` or an earlier call.
        event: shapes as said there, key, value, confidence and importance in the table's dtype.
        rules: constants.

    Returns:
        The new table, in which an accepted event has changed one slot's contents and a rejected one none, and what
        became of the event.

    Raises:
        ValueError: shapes that do not fit the table.

    Cost: some fifty operations on `[B, M]` and three on `[B, M, K]`, whatever B.
    """
    rows = table.keys.shape[0]
    wide = {"key": (rows, table.keys.shape[2]), "value": (rows, table.values.shape[2])}
    for name, x in zip(Event._fields, event, strict=True):
        _expect(f"event.{name}", x, wide.get(name, (rows,)))
    with torch.no_grad(), as_given(table.keys.device):
        # `usage` is what it was at the last event until the next: reads in between, in any cut, change no decision.
        present = event.present[:, None]
        usage = torch.where(present, rules.usage_decay * table.usage + table.recent_usage, table.usage)
        table = table._replace(usage=usage, recent_usage=table.recent_usage.masked_fill(present, 0))
        outcome = _decide(table, event, rules)
        kind = outcome.kind[:, None]
        here = torch.arange(usage.shape[1], device=usage.device) == outcome.slot[:, None]
        at, contested = here & (kind < ACCEPTED), here & (kind >= ACCEPTED)
        over = here & (kind == OVERWRITTEN)
        new = at & ~over
        counts = table.counts.scatter_add(1, kind.clamp(min=0), present.to(torch.int64))
    # A rejected event may hold NaN, which no product with 0 removes.
    written = SlotTable(
        keys=torch.where(at[..., None], event.key[:, None], table.keys),
        values=torch.where(at[..., None], event.value[:, None], table.values),
        confidence=torch.where(at, event.confidence[:, None], table.confidence),
        importance=torch.where(at, event.importance.detach()[:, None], table.importance),
        usage=usage.masked_fill(at, 0),
        recent_usage=table.recent_usage,
        written=torch.where(at, event.position[:, None] + 1, table.written),
        version=torch.where(at, event.version[:, None], table.version),
        key_id=torch.where(at, event.key_id[:, None], table.key_id),
        conflicts=(table.conflicts + contested).masked_fill(new, 0),
        overwrites=(table.overwrites + over).masked_fill(new, 0),
        rejected=torch.where(contested, event.confidence.detach()[:, None], table.rejected.masked_fill(new, 0)),
        protected=(table.protected & ~new) | (at & event.protect[:, None]),
        counts=counts,
    )
    return written, outcome


def read(
    table: SlotTable,
    query: Tensor,
    position: Tensor,
    rules: Rules,
    weights: ReadWeights,
    count: int,
    key_id: Tensor | None = None,
    version: Tensor | None = None,
) -> Reading:
    """Read the tables at L queries per row.

    Args:
        table: not changed; `noted` counts the reads.
        query: of unit length, `[B, L, K]`.
        position: tokens before each query, `[B, L]`, int64.
        rules: the table's constants, of which `age_scale`, `versions_per_key` and `same_threshold` matter here.
        weights: of the score and of rho.
        count: K of the top K, at most M.
        key_id: 1 + the id that is asked for, or 0 to ask by similarity, `[B, L]`, int64.
        version: the newest version that may be read, or 0 for any, `[B, L]`, int64.

    Returns:
        See `Reading`; equal scores go to the lower slot.

    Raises:
        ValueError: shapes that do not fit the table, or a `count` outside 1 to M.

    Cost: about `L M (K + V)` multiply-adds per row, and a sort of M numbers per query.
    """
    rows, slots, width = table.keys.shape
    queries = query.shape[1] if query.ndim == 3 else 1
    for name, x, shape in (
        ("query", query, (rows, queries, width)),
        ("position", position, (rows, queries)),
        ("key_id", key_id, (rows, queries)),
        ("version", version, (rows, queries)),
    ):
        _expect(name, x, shape)
    if not 1 <= count <= slots:
        raise ValueError(f"slot_table: count={count}: expected 1 to the table's {slots} slots.")
    with as_given(query.device):
        eligible = _eligible(table, rules, key_id, version)
        found = torch.bmm(query.to(table.keys.dtype), table.keys.mT)
        if key_id is not None:
            found = torch.where(key_id[..., None] > 0, 1.0, found)
        age = _aged(position[..., None] - table.written[:, None] + 1, rules, table.keys.dtype)
        score = _score(weights, found, table.confidence[:, None], table.usage[:, None], age)
        # No infinity enters what is differentiated: 0 times it would be NaN.
        order = score.detach().masked_fill(~eligible, -torch.inf).sort(dim=-1, descending=True, stable=True)
        top = order.indices[..., :count]
        held = eligible.expand_as(score).gather(-1, top)
        chosen = _shares(score.gather(-1, top), held)
        spread = torch.zeros_like(score).scatter(-1, top, chosen)
        any_held = held.any(-1)
        best, nearest = found.masked_fill(~eligible, -torch.inf).max(-1)
        return Reading(
            torch.bmm(spread, table.values),
            _rho(weights, best, any_held),
            spread,
            torch.where(held, top, -1),
            torch.where(any_held, nearest, -1),
        )


class Found(NamedTuple):
    """What a reading has chosen: the contents of the top K slots of each query, and the key most like it."""

    keys: Tensor
    """`[B, L, K, D]`."""
    values: Tensor
    """`[B, L, K, V]`."""
    confidence: Tensor
    """`[B, L, K]`, as are the next three."""
    usage: Tensor
    age: Tensor
    """In tokens."""
    held: Tensor
    """Whether there was such a slot, bool; of no meaning elsewhere."""
    nearest: Tensor
    """`[B, L, D]`."""


def weigh(
    found: Found, query: Tensor, rules: Rules, weights: ReadWeights, key_id: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output `[B, L, V]` and confidence `[B, L]` of a reading, once more: for gradients, when the decisions are made.

    Args:
        found: contents, with their gradients.
        query, rules, weights, key_id: as the reading had them.
    """
    with as_given(query.device):
        query = query.to(found.keys.dtype)
        alike, best = (found.keys @ query[..., None])[..., 0], (found.nearest * query).sum(-1)
        if key_id is not None:
            alike, best = torch.where(key_id[..., None] > 0, 1.0, alike), torch.where(key_id > 0, 1.0, best)
        age = _aged(found.age, rules, query.dtype)
        chosen = _shares(_score(weights, alike, found.confidence, found.usage, age), found.held)
        return (chosen[:, :, None] @ found.values)[:, :, 0], _rho(weights, best, found.held.any(-1))


def _score(weights: ReadWeights, found: Tensor, confidence: Tensor, usage: Tensor, age: Tensor) -> Tensor:
    standing = weights.confidence * torch.log(confidence + EPS) + weights.usage * torch.log1p(usage)
    return weights.sharpness * found + standing - weights.age * age


def _shares(score: Tensor, held: Tensor) -> Tensor:
    return score.masked_fill(~held, torch.finfo(score.dtype).min).softmax(-1) * held


def _rho(weights: ReadWeights, best: Tensor, any_held: Tensor) -> Tensor:
    best = torch.where(any_held, best, 0.0)
    return torch.where(any_held, torch.sigmoid(weights.match_scale * (best - weights.match_threshold)), 0.0)


def noted(table: SlotTable, reading: Reading, real: Tensor | None = None) -> SlotTable:
    """The table with the reads counted that are `real` `[B, L]`, bool (`None`: all)."""
    weights = reading.weights.detach()
    if real is not None:
        weights = torch.where(real[..., None], weights, 0)  # what padding asks may be anything
    return table._replace(recent_usage=table.recent_usage + weights.sum(1))


def _expect(name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is not None and tuple(x.shape) != shape:
        raise ValueError(f"slot_table: {name}: expected {shape}, got {tuple(x.shape)}.")


def _decide(table: SlotTable, event: Event, rules: Rules) -> Outcome:
    occupied, free = table.written > 0, table.protected.logical_not()
    key_id, version, confidence = (x[:, None] for x in (event.key_id, event.version, event.confidence))
    similarity = alikeness(table, event)
    same = occupied & torch.where(key_id > 0, table.key_id == key_id, similarity >= rules.same_threshold)
    is_match = same if rules.versions_per_key == 1 else same & (table.version == version)
    matched = is_match.any(1, keepdim=True)
    match = similarity.masked_fill(~is_match, -torch.inf).argmax(1, keepdim=True)

    match_version = table.version.gather(1, match)
    weaker = confidence < table.confidence.gather(1, match) - rules.protect_margin
    guards = table.protected.gather(1, match) & weaker & (version <= match_version)
    over = _first([(version < match_version, STALE), (guards, GUARDED)], OVERWRITTEN)

    worth = keep(table, event.position, rules)
    victim = _least(worth, free, table.written)
    own = rules.keep_confidence * confidence + rules.keep_importance * event.importance[:, None]
    outranked = own < worth.gather(1, victim)
    empty = occupied.logical_not()
    has_room, has_free = empty.any(1, keepdim=True), free.any(1, keepdim=True)
    slot = torch.where(has_room, empty.int().argmax(1, keepdim=True), victim)
    new = _first([(has_room, INSERTED), (~has_free, NO_ROOM), (outranked, OUTRANKED)], EVICTED)
    if rules.versions_per_key > 1:
        full, mine = same.sum(1, keepdim=True) >= rules.versions_per_key, same & free
        oldest = _least(table.version, mine, table.written)
        older = version < table.version.gather(1, oldest)
        of_key = _first([(~mine.any(1, keepdim=True), NO_ROOM), (older, STALE)], EVICTED)
        new, slot = torch.where(full, of_key, new), torch.where(full, oldest, slot)

    content = torch.cat([event.key, event.value, confidence, event.importance[:, None]], dim=1)
    kind = torch.where(matched, over, new).masked_fill(confidence < rules.write_threshold, UNCONVINCING)
    not_finite = (0 * content).sum(1, keepdim=True) != 0  # 0 times NaN or infinity is NaN, which is not 0
    kind = kind.masked_fill(not_finite, NOT_FINITE).masked_fill(~event.present[:, None], -1)
    known = (matched | (kind < ACCEPTED)) & (kind >= 0) & (kind != NOT_FINITE)
    slot = torch.where(known, torch.where(matched, match, slot), -1)
    return Outcome(kind[:, 0], slot[:, 0])


def _first(cases: list[tuple[Tensor, int]], otherwise: int) -> Tensor:
    """In each row the number of the first case that holds."""
    kind = torch.full_like(cases[0][0], otherwise, dtype=torch.int64)
    for holds, number in reversed(cases):
        kind = kind.masked_fill(holds, number)
    return kind


def _least(x: Tensor, among: Tensor, written: Tensor) -> Tensor:
    """The slot with the least `x` `[B, M]` among some, `[B, 1]`; of equals the one written first, then the lowest."""
    largest = torch.finfo(x.dtype).max if x.is_floating_point() else torch.iinfo(x.dtype).max
    x = x.masked_fill(~among, largest)
    least = among & (x == x.amin(1, keepdim=True))
    return written.masked_fill(~least, torch.iinfo(written.dtype).max).argmin(1, keepdim=True)


def _eligible(table: SlotTable, rules: Rules, key_id: Tensor | None, version: Tensor | None) -> Tensor:
    """Which slots a query may read, `[B, L or 1, M]`: those of the id asked for, and of a key the newest version up to
    the one asked for."""
    eligible = (table.written > 0)[:, None]
    if key_id is not None:
        eligible = eligible & ((key_id[..., None] == 0) | (table.key_id[:, None] == key_id[..., None]))
    if version is not None:
        eligible = eligible & ((version[..., None] == 0) | (table.version[:, None] <= version[..., None]))
    if rules.versions_per_key > 1:
        keys = table.keys.detach()
        alike = torch.bmm(keys, keys.mT) >= rules.same_threshold
        ids = table.key_id[:, :, None], table.key_id[:, None]
        alike = torch.where((ids[0] > 0) | (ids[1] > 0), ids[0] == ids[1], alike)
        newer = alike & (table.version[:, None] > table.version[:, :, None])  # slot i has a newer one of its key, j
        eligible = eligible & ~(newer[:, None] & eligible[:, :, None]).any(-1)
    return eligible


def _aged(age: Tensor, rules: Rules, dtype: torch.dtype) -> Tensor:
    """`age / (age + T)`."""
    age = age.to(dtype)
    return age / (age + rules.age_scale)
