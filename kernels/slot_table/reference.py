"""The slot table one event and one query at a time, in plain Python: a list of dictionaries per row.

Slots stand in a list of M entries, each `None` or a dictionary; every number is a Python float or int.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from memzoo.kernels.slot_table import EPS, OUTCOMES, ReadWeights, Rules

Slot = dict[str, Any]


@dataclass
class Table:
    """The table of one row."""

    size: int
    rules: Rules
    slots: list[Slot | None] = field(init=False)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))

    def __post_init__(self) -> None:
        self.slots = [None] * self.size

    # Writing ----------------------------------------------------------------------------------------------------------

    def write(self, event: dict[str, Any]) -> tuple[str, int]:
        """Decide about an event, apply it, and say what became of it and at which slot (-1: at none)."""
        for _, slot in self._occupied():
            slot["usage"] = self.rules.usage_decay * slot["usage"] + slot["recent_usage"]
            slot["recent_usage"] = 0.0
        outcome, at = self._decide(event)
        self.counts[outcome] += 1
        if outcome in ("inserted", "evicted"):
            self.slots[at] = {"usage": 0.0, "recent_usage": 0.0, "conflicts": 0, "overwrites": 0, "rejected": 0.0}
            self._fill(at, event, protected=event["protect"])
        elif outcome == "overwritten":
            slot = self._at(at)
            slot["overwrites"] += 1
            slot["usage"] = 0.0
            self._fill(at, event, protected=slot["protected"] or event["protect"])
        elif at >= 0:
            slot = self._at(at)
            slot["conflicts"] += 1
            slot["rejected"] = event["confidence"]
        return outcome, at

    def _fill(self, at: int, event: dict[str, Any], protected: bool) -> None:
        copied = ("key", "value", "confidence", "importance", "version", "key_id")
        self._at(at).update({name: event[name] for name in copied})
        self._at(at).update(written=event["position"] + 1, protected=protected)

    def _decide(self, event: dict[str, Any]) -> tuple[str, int]:
        numbers = [*event["key"], *event["value"], event["confidence"], event["importance"]]
        if not all(map(math.isfinite, numbers)):
            return "not_finite", -1
        group = [(i, slot) for i, slot in self._occupied() if self._is_same(slot, event)]
        history = self.rules.versions_per_key > 1
        matches = [(i, slot) for i, slot in group if not history or slot["version"] == event["version"]]
        match = max(matches, key=lambda found: (_dot(found[1]["key"], event["key"]), -found[0]), default=None)
        if event["confidence"] < self.rules.write_threshold:
            return "unconvincing", -1 if match is None else match[0]
        if match is not None:
            return self._decide_on_match(*match, event), match[0]
        if history and len(group) >= self.rules.versions_per_key:
            return self._replace_oldest(group, event)
        return self._insert(event)

    def _decide_on_match(self, at: int, slot: Slot, event: dict[str, Any]) -> str:
        if event["version"] < slot["version"]:
            return "stale"
        weaker = event["confidence"] < slot["confidence"] - self.rules.protect_margin
        if slot["protected"] and weaker and event["version"] <= slot["version"]:
            return "guarded"
        return "overwritten"

    def _replace_oldest(self, group: list[tuple[int, Slot]], event: dict[str, Any]) -> tuple[str, int]:
        free = [(i, slot) for i, slot in group if not slot["protected"]]
        if not free:
            return "no_room", -1
        at, oldest = min(free, key=lambda found: (found[1]["version"], found[1]["written"], found[0]))
        return ("stale", -1) if event["version"] < oldest["version"] else ("evicted", at)

    def _insert(self, event: dict[str, Any]) -> tuple[str, int]:
        for at, slot in enumerate(self.slots):
            if slot is None:
                return "inserted", at
        free = [(i, slot) for i, slot in self._occupied() if not slot["protected"]]
        if not free:
            return "no_room", -1
        worth = {i: self._keep(slot, event["position"]) for i, slot in free}
        at, _ = min(free, key=lambda found: (worth[found[0]], found[1]["written"], found[0]))
        own = self.rules.keep_confidence * event["confidence"] + self.rules.keep_importance * event["importance"]
        return ("outranked", -1) if own < worth[at] else ("evicted", at)

    def _keep(self, slot: Slot, position: int) -> float:
        rules = self.rules
        return (
            rules.keep_confidence * slot["confidence"]
            + rules.keep_usage * math.log1p(slot["usage"])
            + rules.keep_importance * slot["importance"]
            - rules.keep_age * self._aged(slot, position)
        )

    # Reading ----------------------------------------------------------------------------------------------------------

    def read(
        self,
        query: list[float],
        position: int,
        weights: ReadWeights,
        count: int,
        key_id: int = 0,
        version: int = 0,
    ) -> dict[str, Any]:
        """The output (`None`: nothing to read), rho, the top slots and their weights; the read is counted."""
        found = [(i, slot) for i, slot in self._occupied() if key_id in (0, slot["key_id"])]
        found = [(i, slot) for i, slot in found if version == 0 or slot["version"] <= version]
        if self.rules.versions_per_key > 1:
            found = [(i, slot) for i, slot in found if not any(self._is_newer(other, slot) for _, other in found)]
        if not found:
            return {"output": None, "confidence": 0.0, "slots": [], "weights": []}
        similarity = {i: 1.0 if key_id else _dot(query, slot["key"]) for i, slot in found}
        score = {
            i: float(weights.sharpness) * similarity[i]
            + float(weights.confidence) * math.log(slot["confidence"] + EPS)
            + float(weights.usage) * math.log1p(slot["usage"])
            - float(weights.age) * self._aged(slot, position)
            for i, slot in found
        }
        top = sorted(score, key=lambda i: (-score[i], i))[:count]
        shares = [math.exp(score[i] - score[top[0]]) for i in top]
        shares = [share / sum(shares) for share in shares]
        output = [0.0] * len(self._at(top[0])["value"])
        for i, share in zip(top, shares, strict=True):
            slot = self._at(i)
            slot["recent_usage"] += share
            output = [y + share * v for y, v in zip(output, slot["value"], strict=True)]
        match = float(weights.match_scale) * (max(similarity.values()) - float(weights.match_threshold))
        return {"output": output, "confidence": 1 / (1 + math.exp(-match)), "slots": top, "weights": shares}

    # Slots ------------------------------------------------------------------------------------------------------------

    def _occupied(self) -> list[tuple[int, Slot]]:
        return [(i, slot) for i, slot in enumerate(self.slots) if slot is not None]

    def _at(self, at: int) -> Slot:
        slot = self.slots[at]
        assert slot is not None
        return slot

    def _is_same(self, slot: Slot, event: dict[str, Any]) -> bool:
        if event["key_id"] > 0:
            return slot["key_id"] == event["key_id"]
        return _dot(slot["key"], event["key"]) >= self.rules.same_threshold

    def _is_newer(self, other: Slot, slot: Slot) -> bool:
        """Whether `other` is a newer version of the key of `slot`."""
        if slot["key_id"] > 0 or other["key_id"] > 0:
            alike = slot["key_id"] == other["key_id"]
        else:
            alike = _dot(slot["key"], other["key"]) >= self.rules.same_threshold
        return alike and other["version"] > slot["version"]

    def _aged(self, slot: Slot, position: int) -> float:
        age = position - slot["written"] + 1
        return age / (age + self.rules.age_scale)


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
