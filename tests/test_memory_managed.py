"""What the managed memory adds to the model-level tests: who writes, what is said about tokens, the chunk look-up."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
import zoo
from tolerances import MODEL, close, error
from torch import Tensor
from transformers import PreTrainedModel
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

import memzoo
from memzoo import MemoryCache, MemoryManagedConfig
from memzoo.kernels import slot_table
from memzoo.kernels.slot_table import SlotTable
from memzoo.modeling import memory_managed
from memzoo.modeling.decoder import Step
from memzoo.modeling.mixers import managed
from memzoo.modeling.mixers.attention import CausalAttention

BOUND = MODEL[torch.float64]
LENGTH = 6 * zoo.CHUNK + 3
NAMES = ["memory_managed-e1", "memory_managed-fallback"]
EXTERNAL = {"write_trigger": "external", "write_threshold": 0.0}


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor | None, **kwargs: Any) -> Any:
    return model(ids, output_memory=True, **kwargs)


def at(shape: tuple[int, int], **places: int) -> Tensor:
    """Zeros but at columns `c3=value` of every row."""
    x = torch.zeros(shape, dtype=torch.long)
    for name, value in places.items():
        x[:, int(name[1:])] = value
    return x


BACKBONES = {
    "titans": {"chunk_size": zoo.CHUNK},
    "transformer_pp": {},
    "hope": {"chunk_size": 3, "self_chunk_size": 6, "max_step_size": 0.25},
}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_another_backbone(backbone: str) -> None:
    """Prefill and decode equal one pass, and rows on the left of padding what they are alone."""
    options = {"backbone": backbone, "backbone_options": BACKBONES[backbone], "memory_layers": [0, 1]}
    model = zoo.build("memory_managed-e1", torch.float64, **options).eval()
    ids = zoo.tokens(2, LENGTH)
    assert len(read(model, ids).write_prob) == 2
    want, cache = read(model, ids).logits, MemoryCache(model.config)
    parts = [read(model, part, cache=cache).logits for part in ids.split([9, 1, 1, LENGTH - 11], dim=1)]
    close(torch.cat(parts, dim=1), want, BOUND)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    close(read(model, ids, attention_mask=mask).logits[1, 5:], read(model, ids[1:, 5:]).logits[0], BOUND)
    model.set_attn_implementation("eager")  # the mixers' attention follows
    found = [module.config for module in model.modules() if isinstance(module, CausalAttention)]
    assert len(found) == (2 if backbone == "transformer_pp" else 0)
    assert all(config._attn_implementation == "eager" for config in found)


def one_after_the_other(
    slots: managed.Slots, x: Tensor, qkv: managed.QKV, step: Step, table: SlotTable, events: managed.Events
) -> tuple[managed.SlotsRead, SlotTable]:
    """What `Slots` computes, under autograd all the way: a segment is read, its event written, and so on."""
    cuts = managed.Cuts(events.candidate, step.added)
    position = step.position[:, None] + torch.arange(x.shape[1])
    weights, facts = slots._read_weights(qkv.query.dtype), slots._facts(x, qkv, position, events, cuts)
    pieces = [cuts.split(cuts.gather(each)) for each in (qkv.query, position)]
    outputs, logits, accepted = [], [], []
    for index, (query, place, real) in enumerate(zip(*pieces, cuts.split(cuts.real), strict=True)):
        if query.shape[1]:
            reading = slot_table.read(table, query, place, slots.rules, weights, slots.count)
            outputs.append((reading.output, reading.confidence, reading.slots + 1))
            table = slot_table.noted(table, reading, real)
        if index < cuts.count:
            event = slot_table.Event(*(each[:, index] for each in facts.event))
            seen = slots.controller.seen(table, event, slots.rules)
            logits.append(slots.controller(facts.hidden[:, index], seen, event.importance))
            p = torch.sigmoid(logits[-1])
            event = event._replace(confidence=p, value=p[:, None] * event.value)
            table, outcome = slot_table.write(table, event, slots.rules)
            accepted.append(outcome.accepted)
    joined = (cuts.joined(list(each)) for each in zip(*outputs, strict=True))
    of_tokens = slots._of_tokens(cuts, torch.stack(logits, dim=1), torch.stack(accepted, dim=1))
    return managed.SlotsRead(*joined, *of_tokens), table


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_event_after_the_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of padded rows, and through a table that a cache hands on."""
    ids, mask, found = zoo.tokens(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.long), []
    mask[1, -6:] = 0
    mask[2, :6] = 0
    for way in (managed.Slots.forward, one_after_the_other):
        monkeypatch.setattr(managed.Slots, "forward", way)
        model = zoo.build(name, torch.float64).train()
        loss, cache = torch.zeros((), dtype=torch.float64), None
        for start, stop in pairwise((0, 11, 14, LENGTH)):  # the last reads what the first wrote and the second kept
            said = {"attention_mask": mask[:, :stop], "cache": cache, "use_cache": True, "output_memory": True}
            out = model(ids[:, start:stop], **said)
            assert any(bool(each.any()) for each in out.write_accept)
            loss, cache = loss + out.logits.square().mean(), out.cache
        loss.backward()
        found.append({key: p.grad for key, p in model.named_parameters()})
    assert all(bool(found[0][key].any()) for key in found[0] if "controller" in key)
    for key, gradient in found[0].items():
        close(gradient, found[1][key], BOUND)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_padding_keeps_its_state(name: str) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(2, 2 * zoo.CHUNK)
    cache = MemoryCache(model.config)
    before = [x[1].clone() for layer in read(model, ids, cache=cache).cache.layers for x in layer.tensors]
    mask = torch.tensor([[1] * zoo.CHUNK, [0] * zoo.CHUNK])
    out = read(model, ids[:, : zoo.CHUNK], cache=cache, attention_mask=mask)
    assert bool(out.logits.isfinite().all())
    after = [x[1] for layer in cache.layers for x in layer.tensors]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[: len(old)], old)
        assert not new[len(old) :].any()  # room for another row's chunks


def test_an_empty_table_adds_nothing() -> None:
    """Without an event the block is the backbone's; so it is up to the first event's own token, and not after it."""
    model = zoo.build("memory_managed-e1", torch.float64, **EXTERNAL).eval()
    ids = zoo.tokens(1, 9)
    with torch.no_grad():
        plain, out = read(model, ids), read(model, ids, event_mask=at((1, 9), c4=1))
        for parameter in (model.model.layers[1].memory.o_proj.weight,):
            parameter.zero_()
        assert torch.equal(read(model, ids).logits, plain.logits)
    assert torch.equal(out.logits[:, :5], plain.logits[:, :5])
    assert error(out.logits[:, 5:], plain.logits[:, 5:]) > 1e-6
    assert out.write_accept[0].nonzero().tolist() == [[0, 4]]
    assert not out.read_confidence[0][:, :5].any()
    assert bool((out.read_confidence[0][:, 5:] > 0).all())


def test_metadata_decides_what_is_kept() -> None:
    """Ids match, protection keeps, versions can be asked for; the same through a cache, padding and packing."""
    model = zoo.build("memory_managed-e1", torch.float64, **EXTERNAL, version_mode="history", protect_margin=1.0).eval()
    ids, shape = zoo.tokens(2, 12), (2, 12)
    said = {
        "event_mask": at(shape, c1=1, c3=1, c5=1, c7=1, c8=1),
        "key_ids": at(shape, c1=7, c3=7, c5=9, c7=7, c8=3),
        "versions": at(shape, c1=1, c3=2, c7=1, c8=1),
        "protect": at(shape, c1=1, c3=1, c5=1),
    }
    out = read(model, ids, **said)
    assert out.memory_stats[0].tolist() == [[3, 1, 0, 0, 0, 0, 0, 1, 0]] * 2
    rows = model.memory_table(out.cache, row=1)
    assert [(r.slot, r.key, r.version, r.protected, r.written) for r in rows] == [
        (0, 7, 1, True, 7),
        (1, 7, 2, True, 3),
        (2, 9, 0, True, 5),
    ]
    lines = str(model.memory_table(out.cache, text=lambda position: f"fact of {position}")).splitlines()
    assert lines[0].split() == ["slot", "key", "value", "confidence", "usage", "version", "protected", "written", "at"]
    assert [word in line for word, line in zip(("fact of 7", "#7", "no"), lines[1:], strict=True)] == [
        True,
        True,
        False,
    ]
    asks = [torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)]
    asks[0][:, 10:], asks[1][:, 10] = 7, 1
    asked = read(model, ids, **said, query_key_ids=asks[0], query_versions=asks[1])
    older, newer = asked.read_confidence[0][0, 10:]
    assert older == newer > 0  # a match by id is a whole one
    assert error(asked.logits[:, 10], out.logits[:, 10]) > 1e-6
    newest = read(model, ids, **said, query_key_ids=asks[0])
    assert error(asked.logits[:, 10], newest.logits[:, 10]) > 1e-6

    cache, parts = MemoryCache(model.config), []
    for low, high in ((0, 3), (3, 4), (4, 8), (8, 12)):
        part = {name: x[:, low:high] for name, x in said.items()}
        parts.append(read(model, ids[:, low:high], cache=cache, **part).logits)
    close(torch.cat(parts, dim=1), out.logits, BOUND)
    mask = torch.ones_like(ids)
    mask[0, :1] = 0
    close(read(model, ids, attention_mask=mask, **said).logits[1], out.logits[1], BOUND)
    packed = {"position_ids": torch.arange(12).repeat(2)[None]}
    flat = {name: x.reshape(1, -1) for name, x in (said | {"input_ids": ids}).items()}
    together = read(model, flat.pop("input_ids"), **packed, **flat)
    close(together.logits[0].view(2, 12, -1), out.logits, BOUND)
    assert torch.equal(together.write_accept[0].view(2, 12), out.write_accept[0])
    assert together.memory_stats is None


def test_generation_takes_what_is_said_about_the_prompt() -> None:
    model = zoo.build("memory_managed-e1", torch.float64, **EXTERNAL).eval()
    ids, said = zoo.tokens(2, 9), {"event_mask": at((2, 9), c2=1, c5=1), "key_ids": at((2, 9), c2=4, c5=6)}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "num_beams": 2}
    cached, cache = model.generate(ids, **said, **options), MemoryCache(model.config)
    assert torch.equal(cached, model.generate(ids, **said, **options, use_cache=False))
    read(model, ids, cache=cache, **said)
    assert [row.key for row in model.memory_table(cache)] == [4, 6]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_do_not_cross_decisions(name: str) -> None:
    """The controller learns from labels and without them; the table's gradient comes through what was read."""
    model, ids = zoo.build(name, torch.float64), zoo.tokens(2, LENGTH)
    controller = model.model.layers[model.config.table_layers[0]].memory.slots.controller
    weights = list(controller.parameters())
    plain = model(ids, labels=ids)
    gradients = torch.autograd.grad(plain.loss, weights, retain_graph=True)
    assert all(bool(g.any() and g.isfinite().all()) for g in gradients)
    out = model(ids, labels=ids, write_labels=torch.ones_like(ids), output_memory=True)
    expected = torch.stack([-p[p > 0].log().mean() for p in out.write_prob]).mean()
    close(out.loss - plain.loss, model.config.write_loss_weight * expected.to(out.loss.dtype), MODEL[torch.float32])
    labelled = torch.autograd.grad(out.loss, weights)
    assert all(error(a, b) > 1e-9 for a, b in zip(labelled, gradients, strict=True))
    none = model(ids, labels=ids, write_labels=torch.full_like(ids, -100))
    assert torch.equal(none.loss, plain.loss)


def test_the_look_up_finds_a_token_among_many() -> None:
    """One chunk holds an id that is asked for again; mean vectors would not find it (the sketch does), and both ways of
    attending give the same."""
    model = zoo.build(
        "memory_managed-fallback",
        torch.float64,
        fallback_chunks=1,
        sketch_bits=64,
        read_threshold=1.0,
        event_token_ids=[60],
        memory_layers=[1],
    ).eval()
    ids = torch.randint(1, 40, (1, 20 * zoo.CHUNK), generator=torch.Generator().manual_seed(0))
    ids[0, 5] = ids[0, -1] = 50
    chunks = model.model.layers[1].memory.chunks
    found, count = [], chunks.count
    hook = chunks._found

    def spy(*args: Any) -> tuple[Tensor, Tensor]:
        found.append(hook(*args))
        return found[-1]

    chunks._found = spy
    want = read(model, ids)
    assert int(found[-1][0][0, -1, 0]) == 5 // zoo.CHUNK
    assert bool((want.active_chunks[0][0, zoo.CHUNK :] == 2).all())
    assert bool((want.active_chunks[0][0, : zoo.CHUNK] == 1).all())
    cache = MemoryCache(model.config)
    read(model, ids[:, :-1], cache=cache)
    stepped = read(model, ids[:, -1:], cache=cache)  # few queries gather their chunks
    assert torch.equal(found[-1][0][0, -1], found[0][0][0, -1])
    close(stepped.logits[:, -1], want.logits[:, -1], BOUND)
    assert count == 1


@pytest.mark.parametrize("way", ["_sorted", "_gathered"])
def test_the_attention_to_chunks_is_that_of_one_token_after_the_other(way: str) -> None:
    """Outputs and gradients; tokens with several chunks, fewer and none, chunks that nobody asks."""
    rows, tokens, stored, count = 2, 9, 5, 3
    model = zoo.build("memory_managed-fallback", torch.float64, fallback_chunks=count)
    chunks, draw = model.model.layers[0].memory.chunks, torch.Generator().manual_seed(0)
    q, kept = torch.randn(rows, tokens, 6, generator=draw), torch.randn(rows, stored, zoo.CHUNK, 12, generator=draw)
    q, kept = q.double().requires_grad_(), kept.double().requires_grad_()
    chosen = torch.rand(rows, tokens, stored - 1, generator=draw).argsort(-1)[..., :count]
    held = torch.arange(count) < torch.randint(count + 1, (rows, tokens, 1), generator=draw)
    assert held.sum(-1).unique().tolist() == [0, 1, 2, 3]

    def one(row: int, token: int) -> Tensor:
        found = kept[row, chosen[row, token][held[row, token]]].flatten(0, 1)
        keys, values = found.split(6, dim=-1)
        return (keys @ q[row, token]).softmax(0) @ values

    want = torch.stack([torch.stack([one(row, token) for token in range(tokens)]) for row in range(rows)])
    got = getattr(chunks, way)(q, kept, chosen, held)
    close(got, want, BOUND)
    assert not got[~held.any(-1)].any()
    weight = torch.randn(want.shape, generator=draw).double()
    found = (torch.autograd.grad((each * weight).sum(), (q, kept)) for each in (got, want))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs, BOUND)


def test_only_the_stored_chunks_grow_with_the_context() -> None:
    model, sizes = zoo.causal_lm("memory_managed-fallback"), []
    for length in (20, 200):
        cache = MemoryCache(model.config)
        read(model, zoo.tokens(1, length), cache=cache)
        mixer, (table, stored, tail) = cache.states[0]
        assert {x.shape[1] for x in stored[:2]} == {length // zoo.CHUNK}
        sizes.append([tuple(x.shape) for x in pytree.tree_leaves((mixer, table, stored[2:], tail, cache.states[1]))])
    assert sizes[0] == sizes[1]


def test_many_queries_look_up_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.causal_lm("memory_managed-fallback"), zoo.tokens(2, LENGTH)
    want = read(model, ids).logits
    monkeypatch.setattr(managed, "QUERY_BLOCK", 5)
    close(read(model, ids).logits, want, BOUND)


def test_a_confident_reader_asks_no_chunk() -> None:
    """With a threshold of 0 the chunks change nothing; between, they do where the confidence is below it."""
    ids = zoo.tokens(2, LENGTH)
    never, always = (
        read(zoo.build("memory_managed-fallback", torch.float64, read_threshold=x).eval(), ids) for x in (0.0, 1.0)
    )
    assert error(never.logits, always.logits) > 1e-6
    assert bool((never.active_chunks[0] <= 1 + 2).all())
    some = read(zoo.causal_lm("memory_managed-fallback"), ids)
    looked = some.active_chunks[0] > never.active_chunks[0]
    late = torch.arange(LENGTH) >= zoo.CHUNK
    assert torch.equal(looked, (some.read_confidence[0] < 0.7) & late)
    assert bool(looked.any())
    assert not bool(looked[:, late].all())


def test_the_block_adds_what_its_formula_says() -> None:
    """`W_o (gate * (rho slots + [rho < theta] (1 - rho) chunks))` of what slots and chunks gave."""
    model = zoo.build("memory_managed-fallback", torch.float64).eval()
    memory, seen = model.model.layers[0].memory, {}
    hooks = [
        part.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: (inputs, output)}))
        for name, part in (("all", memory), ("slots", memory.slots), ("chunks", memory.chunks))
    ]
    read(model, zoo.tokens(2, LENGTH))
    for hook in hooks:
        hook.remove()
    slots, chunks, (x, *_) = seen["slots"][1][0], seen["chunks"][1][0], seen["all"][0]
    rho = slots.confidence[..., None]
    assert 0 < float((rho >= 0.7).double().mean()) < 1
    y = rho * slots.output + (rho < 0.7) * (1 - rho) * chunks
    close(seen["all"][1][0], memory.o_proj(torch.sigmoid(memory.gate_proj(x)) * y), BOUND)


def test_a_longer_context_than_calibrated_warns_once() -> None:
    model, ids = zoo.build("memory_managed-fallback", calibrated_lengths=[4, 8]).eval(), zoo.tokens(2, 9)
    logging.warning_once.cache_clear()
    warnings = []
    for length in (8, 9, 9):
        with CaptureLogger(memory_managed.logger) as log:
            read(model, ids[:, :length])
        warnings.append(log.out)  # which is there at the end
    assert warnings[0] == warnings[2] == ""
    assert warnings[1].count("was calibrated on contexts of 4 to 8 tokens and this one is longer") == 1


def test_a_hidden_state_that_is_not_finite_is_not_stored() -> None:
    model = zoo.build("memory_managed-e1", torch.float64, **EXTERNAL).eval()
    cache, embeds = MemoryCache(model.config), model.get_input_embeddings()(zoo.tokens(1, 6)).detach()
    read(model, None, inputs_embeds=embeds[:, :3], event_mask=at((1, 3), c1=1), cache=cache)
    embeds[0, 4] = torch.nan
    out = read(model, None, inputs_embeds=embeds[:, 3:], event_mask=at((1, 3), c1=1), cache=cache)
    assert out.memory_stats[0].tolist() == [[1, 0, 0, 0, 0, 0, 0, 0, 1]]
    table = cache.states[1].memory.table
    assert int((table.written > 0).sum()) == 1
    assert all(bool(table._asdict()[name].isfinite().all()) for name in ("keys", "values", "confidence"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots=0: expected at least 1"),
        ({"read_top_k": 5, "num_slots": 4}, "read_top_k=5: expected at most num_slots=4"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"write_threshold": 1.5}, "write_threshold=1.5: expected 0 to 1"),
        ({"read_threshold": -0.1}, "read_threshold=-0.1: expected 0 to 1"),
        ({"write_trigger": "token"}, "event_token_ids=None: expected ids that end an event"),
        ({"write_trigger": "never"}, "write_trigger='never': expected one of"),
        ({"event_token_ids": [99], "vocab_size": 9}, "expected ids below vocab_size=9"),
        ({"memory_layers": [12]}, r"memory_layers=\[12\]: expected None, or ascending blocks from 0 to 11"),
        ({"calibrated_lengths": [9, 3]}, "calibrated_lengths"),
        ({"backbone": "lstm"}, "backbone='lstm': expected one of"),
        ({"backbone_options": {"windows": 3}}, "backbone_options=.*: expected None, or fields of SWLAConfig"),
        ({"backbone_options": {"hidden_size": 3}}, "fields of SWLAConfig that this config does not have itself"),
        ({"backbone_options": {"window": 0}}, "SWLAConfig: window=0"),
        ({"backbone": "hope", "backbone_options": {"chain_periods": [2, 1]}}, "fields of HopeConfig that this config"),
    ],
)
def test_configs_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryManagedConfig(**options)


def test_refuses_what_is_said_wrongly() -> None:
    model = zoo.build("memory_managed-e1", torch.float64, **EXTERNAL).eval()
    ids, cache = zoo.tokens(2, 6), MemoryCache(model.config)
    read(model, ids, cache=cache)
    before = [x.clone() for layer in cache.layers for x in layer.tensors]
    ends, mask = at((2, 6), c0=1), torch.ones_like(ids)
    mask[1, 0] = 0
    cases: list[tuple[dict[str, Any], str]] = [
        ({"event_mask": ends[:, :5]}, r"event_mask: expected integers or bools \(2, 6\), got \(2, 5\)"),
        ({"event_mask": ends, "key_ids": -ends}, "key_ids: expected at least 0, got -1"),
        ({"versions": -ends}, "versions: expected at least 0"),
        ({"query_key_ids": -2 * ends}, "query_key_ids: expected at least -1"),
        ({"key_ids": ends.double()}, "key_ids: expected integers"),
        ({"event_mask": ends, "attention_mask": mask}, "row 1 has an event on padding"),
        ({"write_labels": ends[:, :3]}, "write_labels: expected"),
        ({"write_labels": 2 * ends}, "write_labels: expected 0, 1, or -100"),
    ]
    for said, message in cases:
        with pytest.raises(ValueError, match=message):
            model(ids, cache=cache, **said)
    assert all(torch.equal(x, y) for x, y in zip(before, (x for c in cache.layers for x in c.tensors), strict=True))
    with pytest.raises(ValueError, match="since write_trigger='stride' finds the events"):
        zoo.causal_lm("memory_managed-e1")(ids, event_mask=ends)
    with pytest.raises(ValueError, match=r"layer=0: expected one of \[1\]"):
        model.memory_table(cache, layer=0)
    with pytest.raises(ValueError, match="a MemoryCache with a row 2"):
        model.memory_table(cache, row=2)
    assert list(model.memory_table(MemoryCache(model.config))) == []
    assert str(memzoo.modeling.memory_managed.MemoryTable()).startswith("slot")
