"""Training computes what one plain pass in full precision does, whatever is done to the batch, the graph or the dtype.

Losses are compared in float64 where the claim is exact. transformers computes its loss in float32; `exact` gives a
model the same loss in the dtype of its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
import zoo
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tolerances import GRADIENT, MODEL, OVERFIT, close, error, follows
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from memzoo import MemoryCache
from memzoo.kernels.slot_table import SlotTable
from memzoo.modeling import decoder
from memzoo.modeling.mixers.attention import CausalAttention
from memzoo.modeling.mixers.deep_memory import MemoryState
from memzoo.modeling.mixers.matrix_memory import MatrixState
from memzoo.modeling.mixers.self_modifying import SelfModifyingState

BOUND = MODEL[torch.float64]
LENGTH = 6 * zoo.CHUNK + 3


def _loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    **kwargs: object,
) -> Tensor:
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return fixed_cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), num_items_in_batch)


def exact(name: str, **overrides: object) -> PreTrainedModel:
    """A model of one's own in float64, its loss included."""
    model = zoo.build(name, torch.float64, **overrides)
    model.loss_function = _loss
    return model


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients that have gathered, which are taken away."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def step(model: PreTrainedModel, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one batch."""
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def same(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float = BOUND) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert error(actual[name], tensor) <= bound, f"{name}: relative error {error(actual[name], tensor):.2e}"


def masked(ids: Tensor) -> Tensor:
    """Labels that leave out another number of tokens in each row."""
    return ids.masked_fill(torch.arange(ids.shape[1]) < 3 * torch.arange(1, len(ids) + 1)[:, None], -100)


def kernel_states(cache: MemoryCache) -> Iterator[Tensor]:
    """The floating-point tensors of every kernel's state."""

    def is_memory(node: object) -> bool:
        return isinstance(node, (MemoryState, MatrixState, SelfModifyingState, SlotTable))

    for node in pytree.tree_leaves(cache.states, is_leaf=is_memory):
        if is_memory(node):
            state = (node.now, node.anchor) if isinstance(node, SelfModifyingState) else getattr(node, "memory", node)
            yield from (x for x in pytree.tree_leaves(state) if x.is_floating_point())


# Gradients and loss ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_entry_gets_a_gradient(name: str) -> None:
    """On a sequence long enough to open every capacity block; an embedding gets one if its token has a next one."""
    model = zoo.build(name)
    ids = zoo.tokens(2, model.config.capacity_context + LENGTH)
    embedding = next(key for key, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    _, got = step(model, input_ids=ids, labels=ids)
    assert got.keys() == {key for key, _ in model.named_parameters()}
    got[embedding] = got[embedding][ids[:, :-1].unique()]
    for key, gradient in got.items():
        assert torch.isfinite(gradient).all(), key
        assert gradient.ne(0).all(), key


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_overfits_one_batch(name: str) -> None:
    """On three different ids, so that the last one alone does not tell the next: that would leave ln 3, about 20 %."""
    model, ids = zoo.build(name), zoo.tokens(1, 3 * zoo.CHUNK + 2) % 3 + 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < OVERFIT * losses[0]


FORMS: dict[str, tuple[dict[str, bool], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "position_ids": ({}, dict),
    "seq_idx": ({"return_position_ids": False, "return_seq_idx": True}, dict),
    "cu_seq_lens_q": ({"return_position_ids": False, "return_flash_attn_kwargs": True}, dict),
    "all": ({"return_seq_idx": True, "return_flash_attn_kwargs": True}, dict),
    "cu_seqlens": (
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        lambda batch: {key: batch[key] for key in ("input_ids", "labels")} | {"cu_seqlens": batch["cu_seq_lens_q"]},
    ),
}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_packed_training_equals_sequences_alone(name: str) -> None:
    """Loss and gradients of transformers' flattened batch are the mean over the sequences' targets.

    Every form of it becomes the same rows, so that their gradients are taken once.
    """
    model = exact(name)
    parts = [zoo.tokens(length, seed=length) for length in (5, 1, 13, zoo.CHUNK, 7)]
    targets = sum(len(part) - 1 for part in parts)
    loss = torch.zeros((), dtype=torch.float64)
    for part in parts:
        alone = model(part[None], labels=part[None], num_items_in_batch=targets).loss
        alone.backward()
        loss += alone.detach()
    want = gradients(model)
    for form, (options, renamed) in FORMS.items():
        batch = renamed(DataCollatorWithFlattening(**options)([{"input_ids": part} for part in parts]))
        assert form == "all" or form in batch
        with torch.set_grad_enabled(form == "all"):
            got = model(**batch).loss
        close(got, loss, BOUND)
        if form == "all":
            got.backward()
    same(gradients(model), want)


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_accumulation_equals_one_batch(name: str) -> None:
    """Rows with unequal numbers of targets, one by one under `num_items_in_batch`, or together."""
    model, ids = exact(name), zoo.tokens(4, LENGTH)
    labels = masked(ids)
    targets = (labels[:, 1:] != -100).sum()
    loss, want = step(model, input_ids=ids, labels=labels)
    parts = []
    for row, target in zip(ids.split(1), labels.split(1), strict=True):
        parts.append(model(row, labels=target, num_items_in_batch=targets).loss)
        parts[-1].backward()
    close(torch.stack(parts).sum(), loss, BOUND)
    same(gradients(model), want)


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_the_loss_takes_what_transformers_gives_it(name: str) -> None:
    """transformers' own loss, in float32: `num_items_in_batch` divides, `shift_labels` are not shifted again."""
    model, ids = zoo.build(name), zoo.tokens(2, LENGTH)
    labels = masked(ids)
    mean = model(ids, labels=labels).loss
    targets = int((labels[:, 1:] != -100).sum())
    close(model(ids, labels=labels, num_items_in_batch=2 * targets).loss, mean / 2, MODEL[torch.float32])
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    close(model(ids, labels=ids, shift_labels=shifted).loss, mean, MODEL[torch.float32])


@pytest.mark.parametrize("name", zoo.PLAIN)
@pytest.mark.parametrize("items", [None, 7])
def test_without_targets_as_in_a_library_model(name: str, items: int | None) -> None:
    """No mean of nothing (NaN), a sum of 0, as Llama has them; and never an infinite or NaN gradient."""
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=zoo.VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    )
    ids = zoo.tokens(2, LENGTH)
    inputs = {"input_ids": ids, "labels": torch.full_like(ids, -100), "num_items_in_batch": items}
    want, _ = step(llama, **inputs)
    got, gradient = step(zoo.build(name), **inputs)
    assert torch.equal(got.isnan(), want.isnan())
    assert items is None or got == want
    assert all(torch.isfinite(g).all() for g in gradient.values())


# The graph ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    """Nor does it with dropout, and every block is computed twice: nothing was checkpointed otherwise."""
    model, ids = exact(name, attention_dropout=0.2), zoo.tokens(2, LENGTH)
    calls: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mixer.register_forward_hook(lambda *_, index=index: calls.append(index))

    def run(**options: object) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(1)
        return step(model, input_ids=ids, labels=ids, **options)

    loss, want = run()
    once = len(calls)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    for use_cache in (None, True):
        calls.clear()
        logging.warning_once.cache_clear()
        with CaptureLogger(decoder.logger) as log:
            got, gradient = run(use_cache=use_cache)
        assert ("incompatible with gradient checkpointing" in log.out) == (use_cache is True)
        assert len(calls) == 2 * once
        close(got, loss, BOUND)
        same(gradient, want)
    with pytest.raises(ValueError, match="gradient checkpointing replays the blocks"):
        model(ids, cache=MemoryCache(model.config))
    assert model.eval()(ids, cache=MemoryCache(model.config)).cache is not None


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("cut", [zoo.CHUNK, 2 * zoo.CHUNK + 1])
def test_training_through_a_cache(name: str, cut: int) -> None:
    """Segments, single tokens among them, joined by their cache: the gradients of one pass."""
    model, ids = exact(name), zoo.tokens(2, LENGTH)
    loss, want = step(model, input_ids=ids, labels=ids)
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    count = (targets != -100).sum()
    pieces = [cut, 1, 1, LENGTH - cut - 2]
    cache = MemoryCache(model.config)
    total = torch.zeros((), dtype=torch.float64)
    for part, target in zip(ids.split(pieces, dim=1), targets.split(pieces, dim=1), strict=True):
        total = total + model(part, cache=cache, labels=part, shift_labels=target, num_items_in_batch=count).loss
    total.backward()
    close(total, loss, BOUND)
    same(gradients(model), want)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_truncated_back_propagation(name: str) -> None:
    """After `detach` a segment's gradient is that on states computed without a graph, and weights may move between."""
    model, (first, second, third) = exact(name), zoo.tokens(2, LENGTH).split([9, 9, 9], dim=1)
    given = MemoryCache(model.config)
    with torch.no_grad():
        model(first, cache=given)
    _, want = step(model, input_ids=second, labels=second, cache=given)

    cache = MemoryCache(model.config)
    step(model, input_ids=first, labels=first, cache=cache)
    assert any(x.requires_grad for layer in cache.layers for x in layer.tensors)
    assert cache.detach() is cache
    assert not any(x.requires_grad for layer in cache.layers for x in layer.tensors)
    model(second, labels=second, cache=cache).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    same(gradients(model), want)
    after, gradient = step(model, input_ids=third, labels=third, cache=cache.detach())
    assert after.isfinite()
    assert gradient.keys() == want.keys()


# Low precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_training(name: str, autocast: bool) -> None:
    """Logits and gradients follow float32; kernels' states are float32; parameters keep their dtype."""
    ids = zoo.tokens(2, LENGTH)
    full = zoo.build(name)
    want = full(ids).logits
    model = zoo.build(name) if autocast else zoo.build(name).to(torch.bfloat16)
    dtype = model.dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cache = MemoryCache(model.config)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(ids, labels=ids)
        for part in ids.split([zoo.CHUNK + 1, 1, LENGTH - zoo.CHUNK - 2], dim=1):
            model(part, cache=cache)
    follows(out.logits, want, zoo.rounded(name)(ids).logits)
    assert out.logits.dtype == torch.bfloat16
    states = list(kernel_states(cache))
    remembers = "linear_attention" in getattr(model.config, "mixer_types", ["linear_attention"])
    assert {x.dtype for x in states} == ({torch.float32} if remembers else set())
    out.loss.backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == dtype for p in model.parameters())
    optimizer.step()
    assert {p.dtype for p in model.parameters()} == {dtype}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert model(ids, labels=ids).loss < out.loss


@pytest.mark.parametrize("name", [name for name in zoo.PLAIN if hasattr(zoo.TINY[name], "attention_dropout")])
def test_dropout_acts_in_training_alone(name: str) -> None:
    """And only on attention: a wiring without it has nothing to drop."""
    model, ids = zoo.build(name, attention_dropout=0.5), zoo.tokens(2, LENGTH)
    attends = any(isinstance(module, CausalAttention) for module in model.modules())
    first, second = (step(model, input_ids=ids, labels=ids)[0] for _ in range(2))
    assert torch.equal(first, second) != attends
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, zoo.causal_lm(name, torch.float32)(ids).logits)


# Tools ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_lora(name: str, tmp_path: Path) -> None:
    """Only adapters train, also under reentrant checkpointing; saved, loaded and merged they give the same logits."""
    ids, wanted = zoo.tokens(2, LENGTH), {"q_proj", "k_proj", "v_proj", "o_proj"}
    base = zoo.build(name)
    before = {key: x.clone() for key, x in base.state_dict().items()}
    targets = sorted(wanted & {key.rpartition(".")[2] for key, _ in base.named_modules()})
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    untrained = model(ids).logits.detach()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0)
    for _ in range(2):  # the first moves B alone, since it starts at zero
        model(ids, labels=ids).loss.backward()
        assert {key for key, p in model.named_parameters() if p.grad is not None} == {
            key for key, _ in model.named_parameters() if "lora_" in key
        }
        optimizer.step()
        optimizer.zero_grad()
    assert all(
        torch.equal(x, before[key.replace(".base_layer", "")])
        for key, x in base.state_dict().items()
        if "lora" not in key
    )
    _, want = step(model, input_ids=ids, labels=ids)
    model.enable_input_require_grads()
    base.activation_checkpointing_enable({"use_reentrant": True})
    same(step(model, input_ids=ids, labels=ids)[1], want, GRADIENT)

    model.eval()
    with torch.no_grad():
        trained = model(ids).logits
        assert error(trained, untrained) > MODEL[torch.float32]
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(zoo.build(name), tmp_path).eval()
        assert torch.equal(again(ids).logits, trained)
        answer = again.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
        merged = again.merge_and_unload()
        close(merged(ids).logits, trained, MODEL[torch.float32])
        assert torch.equal(merged.generate(input_ids=ids, max_new_tokens=5, do_sample=False), answer)


def trainer(model: PreTrainedModel, folder: Path, rows: list[Tensor], collate: Any = None, **options: Any) -> Trainer:
    """A trainer of six steps of four rows, on rows whose first token is no target."""
    data = Dataset.from_dict(
        {"input_ids": [row.tolist() for row in rows], "labels": [[-100, *row[1:].tolist()] for row in rows]}
    )
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        **{"save_strategy": "no", "optim": "sgd", "learning_rate": 0.1, **options},
    )
    return Trainer(model, arguments, data_collator=collate, train_dataset=data, eval_dataset=data.select(range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [zoo.NAMES[0], zoo.NAMES[-1]])
@pytest.mark.parametrize("low", [False, True])
def test_trainer_resumes(name: str, low: bool, tmp_path: Path) -> None:
    """Accumulation, checkpointing of activations, bf16 autocast or not, evaluation; resumed in the middle: same end."""
    rows = list(zoo.tokens(24, LENGTH))
    options = {
        "bf16": low,
        "activation_checkpointing": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
    }
    run = trainer(zoo.build(name), tmp_path, rows, **options)
    # Evaluation collects every output but the cache.
    run.compute_metrics = lambda seen: {"width": seen.predictions.shape[-1]}
    run.train()
    history = {key: [x[key] for x in run.state.log_history if key in x] for key in ("loss", "eval_loss", "eval_width")}
    assert history["eval_width"] == [zoo.VOCAB, zoo.VOCAB]
    assert len(history["loss"]) == 6
    assert torch.tensor(history["loss"] + history["eval_loss"]).isfinite().all()
    assert history["eval_loss"][1] < history["eval_loss"][0]

    resumed = trainer(zoo.enliven(zoo.build(name), seed=1), tmp_path / "again", rows, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    want = run.model.state_dict()
    assert {x.dtype for x in want.values()} == {torch.float32}
    for model in (resumed.model, AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")):
        got = model.state_dict()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], x) for key, x in want.items())


def padded(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Rows of one batch, padded on the right."""
    columns = {key: [torch.tensor(row[key]) for row in features] for key in ("input_ids", "labels")}
    columns["attention_mask"] = [torch.ones_like(row) for row in columns["input_ids"]]
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {key: pad_sequence(rows, batch_first=True, padding_value=fill[key]) for key, rows in columns.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [zoo.NAMES[1]])
def test_trainer_packed_equals_padded(name: str, tmp_path: Path) -> None:
    rows = [zoo.tokens(3 + 7 * i % 20, seed=i) for i in range(24)]
    ends = []
    for collate in (padded, DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)):
        run = trainer(zoo.build(name), tmp_path, rows, collate)
        run.train()
        assert run.evaluate()["eval_loss"] > 0
        ends.append(dict(run.model.named_parameters()))
    start = dict(zoo.build(name).named_parameters())
    moved = [{key: x.detach() - start[key].detach() for key, x in end.items()} for end in ends]
    same(moved[1], moved[0], GRADIENT)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.BLOCKS)
def test_compiled_model_equals_the_model(name: str) -> None:
    """Logits of one pass and of decoding; after a chunk of decoding nothing compiles again, and nothing gave up."""
    model, ids = zoo.build(name, torch.float64, num_hidden_layers=1).eval(), zoo.tokens(2, 3 * zoo.CHUNK)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    cache, start = MemoryCache(model.config), zoo.CHUNK + 1
    parts, counts = [], []
    with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        want = model(ids).logits
        close(compiled(input_ids=ids[:, :start], use_cache=False).logits, want[:, :start], BOUND)
        for part in ids.split([start, *[1] * (ids.shape[1] - start)], dim=1):
            parts.append(compiled(input_ids=part, cache=cache).logits)
            counts.append(counter.frame_count)
    close(torch.cat(parts, dim=1), want, BOUND)
    assert counter.frame_count > 0
    assert counts[-1] == counts[zoo.CHUNK]
