"""The adapter over a frozen language model: what is live, what it learns, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from memzoo.kernels.slot_table import Rules
from memzoo.modeling.managed_adapter import MemoryManagedAdapter

KEYS, FIRST_KEY, QUERY, EVENTS = 24, 8, 1, 6


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=FIRST_KEY + KEYS, initializer_range=0.05, **sizes))


def batch(seed: int, rows: int = 32) -> dict[str, Tensor]:
    """Events `[value, key]`, some keys twice; a query for one of them. Two slots hold the last two keys: another is
    looked up."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.stack([torch.randperm(KEYS, generator=generator)[:EVENTS] for _ in range(rows)])
    again = torch.rand(rows, generator=generator) < 0.5
    keys[again, 4] = keys[again, 2]
    values = torch.randint(2, FIRST_KEY, keys.shape, generator=generator)
    which = torch.randint(EVENTS, (rows,), generator=generator)
    which[again & (which == 2)] = 4  # the newest event of its key
    asked = keys.gather(1, which[:, None])
    pairs = torch.stack([values, keys + FIRST_KEY], dim=2).flatten(1)
    ids = torch.cat([pairs, torch.full((rows, 1), QUERY), asked + FIRST_KEY], dim=1)
    ends = (2 * torch.arange(EVENTS) + 1).expand(rows, -1)
    return {
        "ids": ids,
        "event_ends": ends,
        "key_ids": keys,
        "key": asked + FIRST_KEY,
        "pointers": which,
        "routes": (which < EVENTS - 2).long(),
        "query_ends": torch.full((rows,), ids.shape[1] - 1),
    }


def inputs(adapter: MemoryManagedAdapter, said: dict[str, Tensor]) -> dict[str, Tensor]:
    encoded = {"hidden": adapter.encode(said["ids"]), "key_hidden": adapter.encode(said["key"])[:, -1]}
    return encoded | {name: x for name, x in said.items() if name not in ("ids", "key")}


def test_learns_to_point_while_the_model_stays_frozen() -> None:
    """Recency keeps the last two keys in two slots; pointers and routes of held-out streams."""
    model = language_model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    adapter = MemoryManagedAdapter(model, width=16, num_slots=2, rules=Rules(keep_age=4.0, age_scale=8.0))
    assert not any("language_model" in name for name in adapter.state_dict())
    optimizer = torch.optim.Adam(adapter.parameters(), lr=2e-2)
    for at in range(80):
        loss = adapter(**inputs(adapter, batch(at))).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    said = batch(1000, rows=200)
    with torch.no_grad():
        out = adapter(**inputs(adapter, said))
    assert torch.equal(out.live.long(), (torch.arange(EVENTS) >= EVENTS - 2).long().expand(200, -1))
    assert float((out.pointers == said["pointers"]).double().mean()) > 0.9
    assert float((out.routes == said["routes"]).double().mean()) > 0.9
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_metadata_decides_what_is_live() -> None:
    """A newer version replaces, an older one does not; protection keeps; events behind the query do not count."""
    adapter = MemoryManagedAdapter(language_model(), width=8, num_slots=2)
    said = batch(0, rows=1) | {"key_ids": torch.tensor([[3, 3, 3, 5, 7, 9]])}
    versions = torch.tensor([[1, 3, 2, 1, 1, 1]])
    protect = torch.tensor([[False, True, False, True, False, False]])
    out = adapter(**inputs(adapter, said), versions=versions, protect=protect)
    assert out.live.tolist() == [[False, True, False, True, False, False]]
    said["query_ends"] = torch.tensor([4])
    early = adapter(**inputs(adapter, said | {"pointers": torch.tensor([1])}), versions=versions, protect=protect)
    assert early.live.tolist() == [[False, True, False, False, False, False]]
    assert early.pointer_logits.isinf().tolist() == [[False, False, True, True, True, True]]
    assert int(early.pointers) in (0, 1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("key_ids", torch.zeros(2, 3), r"key_ids: expected \(2, 6\), got \(2, 3\)"),
        ("key_ids", -torch.ones(2, 6).long(), "key_ids: expected at least 0, got -1"),
        ("event_ends", torch.full((2, 6), 99), "event_ends: expected places from -1 to 13"),
        ("query_ends", torch.tensor([-1, 3]), "query_ends: expected places from 0 to 13"),
        ("key_hidden", torch.zeros(2, 3), r"key_hidden: expected \(2, 32\)"),
        ("hidden", torch.zeros(2, 3), r"expected hidden \[B, T, D\]"),
    ],
)
def test_refusals(name: str, value: Tensor, message: str) -> None:
    adapter = MemoryManagedAdapter(language_model())
    with pytest.raises(ValueError, match=message):
        adapter(**inputs(adapter, batch(0, rows=2)) | {name: value})
