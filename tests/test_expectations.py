"""What a user of transformers takes for granted beside the numbers of one pass: Trainer's options, the config's wishes,
metadata in generation, and errors that say what is wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from tolerances import close
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

import memzoo

NAMES = [name for name in ("gated_deltanet-e1", "titans-mag-e1", "memory_managed-e1") if name in zoo.TINY]
EXACT = 1e-10


def first_loss(
    model: PreTrainedModel, rows: list[dict[str, Any]], folder: Path, cuts: int = 1, **options: Any
) -> float:
    """The loss that Trainer reports of one batch, taken in `cuts` steps of accumulation."""
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=1,
        learning_rate=0.0,
        per_device_train_batch_size=len(rows) // cuts,
        gradient_accumulation_steps=cuts,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        remove_unused_columns=False,
        **options,
    )
    return Trainer(model, arguments, train_dataset=rows).train().training_loss


def external(**options: Any) -> PreTrainedModel:
    return zoo.build("memory_managed-e1", torch.float64, write_trigger="external", **options).eval()


@pytest.mark.parametrize("name", NAMES)
def test_smoothed_labels_are_shifted(name: str, tmp_path: Path) -> None:
    ids = zoo.tokens(4, 9)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    model = zoo.build(name, torch.float64)
    want = LabelSmoother(0.1)(model(ids), ids, shift_labels=True)
    close(torch.tensor(first_loss(model, rows, tmp_path, label_smoothing_factor=0.1)), want.detach().float(), 1e-6)


def test_losses_do_not_depend_on_how_a_batch_is_accumulated(tmp_path: Path) -> None:
    ids, wanted = zoo.tokens(4, 9), torch.ones(9, dtype=torch.long)
    writes = [{"input_ids": row, "labels": row, "write_labels": wanted} for row in ids]
    classes = [{"input_ids": row, "labels": at % 3} for at, row in enumerate(ids)]
    model, classifier = zoo.build("memory_managed-e1", torch.float64), zoo.classifier("gated_deltanet-e1").train()
    plain = first_loss(model, [{k: v for k, v in row.items() if k != "write_labels"} for row in writes], tmp_path)
    whole = first_loss(model, writes, tmp_path)
    assert whole > plain + 0.01  # the labels of writes count
    assert first_loss(model, writes, tmp_path, cuts=4) == pytest.approx(whole, abs=1e-6)
    whole = first_loss(classifier, classes, tmp_path)
    assert first_loss(classifier, classes, tmp_path, cuts=4) == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("name", [*NAMES, *(["hope-e1"] if "hope-e1" in zoo.TINY else [])])
def test_the_config_says_what_is_returned(name: str) -> None:
    model, ids = zoo.build(name, torch.float64).eval(), zoo.tokens(1, 5)
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == model.config.num_hidden_layers + 1
    model.config._output_attentions = True
    with pytest.raises(ValueError, match="no attention map is kept"):
        model(ids)


def test_metadata_of_new_tokens_goes_with_them() -> None:
    """A question that continues a cache, alone or with the text before it, is asked as in a forward pass."""
    model = external()
    document, question = zoo.tokens(1, 6), zoo.tokens(1, 4, seed=1)
    events, keys = torch.tensor([[0, 1, 0, 1, 0, 1]]), torch.tensor([[0, 5, 0, 6, 0, 7]])
    asked = torch.tensor([[-1, -1, -1, 5]])
    whole, mask = torch.cat([document, question], dim=1), torch.ones(1, 10, dtype=torch.long)
    options: dict[str, Any] = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}

    def read() -> memzoo.MemoryCache:
        return model(document, event_mask=events, key_ids=keys).cache

    with torch.no_grad():
        want = model(question, cache=read(), query_key_ids=asked).logits[:, -1]
        assert (model(question, cache=read()).logits[:, -1] - want).abs().max() > 0.01
        every = torch.nn.functional.pad(asked, (6, 0), value=-1)
        for ids, said in ((question, asked), (whole, asked), (whole, every)):
            got = model.generate(ids, attention_mask=mask, cache=read(), query_key_ids=said, **options)
            close(got.logits[0].double(), want, 1e-5)  # `generate` gives float32
        with pytest.raises(ValueError, match=r"query_key_ids: expected 10 columns.*or 4, one per new token; got 2"):
            model.generate(whole, attention_mask=mask, cache=read(), query_key_ids=asked[:, :2], **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_made_in_inference_mode_works(name: str, tmp_path: Path) -> None:
    ids = zoo.tokens(1, 6)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_config(zoo.config_of(name)).eval()
        cache = model(ids).cache
        memzoo.save_memory(cache, tmp_path / "memory")
        again = memzoo.load_memory(tmp_path / "memory", model)
        close(model(ids, cache=again).logits, model(ids, cache=cache).logits, EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_with_a_graph_is_copied_in_it(name: str) -> None:
    model, ids = zoo.build(name, torch.float64).eval(), zoo.tokens(1, 11)
    cache = model(ids[:, :6]).cache
    copied = copy.deepcopy(cache)
    losses = [model(ids[:, 6:], cache=each).logits.square().mean() for each in (cache, copied)]
    weights = [p for p in model.parameters() if p.requires_grad]
    found = [torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True) for loss in losses]
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b, EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_of_inference_mode_cannot_begin_a_graph(name: str) -> None:
    model, ids = zoo.build(name, torch.float64).eval(), zoo.tokens(1, 11)
    with torch.inference_mode():
        cache = model(ids[:, :6]).cache
    with pytest.raises(ValueError, match=r"filled under torch.inference_mode.*cache.detach\(\)"):
        model(ids[:, 6:], cache=cache)
    model(ids[:, 6:], cache=cache.detach()).logits.sum().backward()


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_padding_alone_is_read_as_nothing(name: str) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(2, 5)
    with torch.no_grad():
        cache = model(ids, attention_mask=torch.zeros(2, 5, dtype=torch.long)).cache
        mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)], dim=1)
        close(model(ids, attention_mask=mask, cache=cache).logits, model(ids).logits, EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(2, 5)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("input_ids: expected integers .* with B >= 1", {"input_ids": ids[:0]}),
        ("inputs_embeds: expected .* with B >= 1", {"inputs_embeds": torch.zeros(0, 5, model.config.hidden_size)}),
        ("got floats of at most 0", {"input_ids": ids, "attention_mask": torch.zeros(2, 5)}),
    ]
    for message, inputs in refused:
        with pytest.raises(ValueError, match=message):
            model(**inputs)
    with pytest.raises(ValueError, match="expected at least one token to go on from"):
        model.generate(ids[:1, :0])
    with pytest.raises(ValueError, match="cache: expected a MemoryCache, got DynamicCache"):
        model.generate(ids, past_key_values=DynamicCache())


def test_a_note_on_the_config_changes_no_memory(tmp_path: Path) -> None:
    model, ids = zoo.build("gated_deltanet-e1", torch.float64).eval(), zoo.tokens(1, 5)
    with torch.no_grad():
        cache = model(ids).cache
        memzoo.save_memory(cache, tmp_path / "memory")
        model.config.my_note = "x"
        model(ids, cache=memzoo.load_memory(tmp_path / "memory", model))


def test_weights_that_were_cast_since_are_refused(tmp_path: Path) -> None:
    model = zoo.build("gated_deltanet-e1").eval()
    cache = model(zoo.tokens(1, 5)).cache
    model.half()
    with pytest.raises(ValueError, match="the model's weights have changed"):
        memzoo.save_memory(cache, tmp_path / "memory")
    assert not list(tmp_path.iterdir())


def test_a_classifier_must_find_the_ends_of_its_rows() -> None:
    model, ids = zoo.classifier("gated_deltanet-e1"), zoo.tokens(2, 5)
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="2 rows without an attention_mask"):
        model(ids)
    assert model(ids, attention_mask=torch.ones_like(ids)).logits.shape == (2, 3)
    assert model(ids[:1]).logits.shape == (1, 3)


def test_numbers_may_be_whole() -> None:
    memzoo.DeltaNetConfig(unit_eps=0)
    memzoo.CombaConfig(correction=1, expand_k=1)
    memzoo.GatedDeltaNetConfig(expand_k=1, expand_v=2, attention_dropout=0)
    memzoo.MemoryManagedConfig(same_threshold=0, read_threshold=1)


@pytest.mark.parametrize(
    "options", [{"num_slots": 8.5}, {"num_slots": "8"}, {"write_trigger": "token", "event_token_ids": 5}]
)
def test_options_of_another_type_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=list(options)[-1]):
        memzoo.MemoryManagedConfig(**options)


def test_the_backbone_takes_its_arguments_in_one_order() -> None:
    ids, mask = zoo.tokens(1, 6), torch.ones(1, 6, dtype=torch.long)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    for name in NAMES:
        model: Any = zoo.causal_lm(name).model
        with torch.no_grad():
            want: Tensor = model(ids, attention_mask=mask, position_ids=packed).last_hidden_state
            close(model(ids, mask, packed).last_hidden_state, want, EXACT)
