"""Weights: drawn, saved, loaded, tied, resized, reported missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zoo
from accelerate import dispatch_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def settings(config: PreTrainedConfig) -> dict[str, object]:
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


def load(path: Path, **kwargs: object) -> PreTrainedModel:
    """A saved model in evaluation mode, its weights moved from the file's memory to fresh memory.

    Matrix products may round differently on weights that are aligned differently.
    """
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different, different


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_are_bit_equal(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """`_init_weights` touches no loaded weight, and the logits are the same bits."""
    model, ids = zoo.build(name, dtype).eval(), zoo.tokens(2, 9)
    model.save_pretrained(tmp_path)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = load(tmp_path)
    assert loaded.dtype == dtype
    assert_same(state(loaded), state(model))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert settings(AutoConfig.from_pretrained(tmp_path)) == settings(model.config)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert_same(state(backbone), state(model.model))


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_only_missing_weights_are_drawn_and_they_are_reported(name: str, tmp_path: Path) -> None:
    model = zoo.build(name)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = [key for key in weights if "layers.1.mixer" in key]
    save_file(
        {key: x for key, x in weights.items() if key not in lost} | {"model.extra": torch.zeros(1)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == set(lost)
    assert set(info["unexpected_keys"]) == {"model.extra"}
    for key, value in loaded.state_dict().items():
        assert torch.isfinite(value).all()
        if key in lost:
            assert value.abs().max() < 20, f"{key} is not initialised"
        else:
            assert torch.equal(value, weights[key])


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_every_weight_is_drawn_as_its_owner_says(name: str) -> None:
    """No matrix is left as `torch.empty` made it, norms start at one, means as means, and two seeds differ."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(AutoModelForCausalLM.from_config(zoo.config_of(name)))
    for (key, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if "norm" in key:
            assert bool((a == 1).all()), key
        elif key.endswith("conv_weight"):
            assert bool((a == 1 / a.shape[1]).all()), key  # a mean
        elif a.ndim >= 2 and not key.endswith("bias"):
            assert not torch.equal(a, b), key
            assert 1e-3 < float(a.detach().std()) < 2, f"{key}: {float(a.detach().std())}"
    torch.manual_seed(0)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(zoo.config_of(name))
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        parameter.data.fill_(torch.nan)
    empty.init_weights()
    assert all(torch.isfinite(p).all() for p in empty.parameters())
    assert torch.isfinite(empty(zoo.tokens(1, 9)).logits).all()


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_tied_weights_and_resized_embeddings(name: str, tmp_path: Path) -> None:
    model = zoo.build(name, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "tied")
    loaded = load(tmp_path / "tied")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    ids = zoo.tokens(1, 9)
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    for tied in (True, False):
        model = zoo.build(name, tie_word_embeddings=tied).eval()
        before = model(ids).logits
        model.resize_token_embeddings(zoo.VOCAB + 3)
        # After their first chunk levels that learn in context have learned from the logits of the whole vocabulary.
        learns = getattr(model.config, "chain_learning", None) == "in_context"
        same = zoo.CHUNK if learns else ids.shape[1]
        assert torch.equal(model(ids).logits[:, :same, : zoo.VOCAB], before[:, :same])
        assert model.config.vocab_size == zoo.VOCAB + 3
        assert model(ids + 3).logits.shape[-1] == zoo.VOCAB + 3
        model.save_pretrained(tmp_path / f"resized-{tied}")
        again = load(tmp_path / f"resized-{tied}")
        assert torch.equal(again(ids + 3).logits, model(ids + 3).logits)


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_heads_have_weights_of_their_own(name: str) -> None:
    """No parameter is a view of another: after one optimizer step each has moved by itself."""
    model = zoo.build(name)
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)
    classifier = AutoModelForSequenceClassification.from_config(zoo.config_of(name, num_labels=3))
    assert classifier.score.out_features == 3


# What the configuration says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.NAMES)
def test_config_round_trip(name: str, tmp_path: Path) -> None:
    config = zoo.config_of(name)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(config)
    assert settings(again) == settings(config)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == config.model_type


@pytest.mark.parametrize(("config_class", "size", "options", "parameters"), zoo.PRESETS)
def test_presets_can_be_built_on_the_meta_device(
    config_class: type, size: str, options: dict[str, object], parameters: int
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_class.preset(size, **options))
    assert sum(p.numel() for p in model.parameters()) == parameters
    with pytest.raises(ValueError, match=r"unknown size '9b'; expected one of"):
        config_class.preset("9b")


@pytest.mark.parametrize("name", zoo.NAMES)
@torch.no_grad()
def test_blocks_may_lie_on_the_disk(name: str, tmp_path: Path) -> None:
    """From where accelerate fetches the weights of a module that is called, among them those that are used later, of
    norms and convolutions. Levels that learn in context say that they cannot."""
    model, ids = zoo.build(name).eval(), zoo.tokens(1, 5)
    want = model(ids).logits
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    model = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    if getattr(model.config, "chain_learning", None) == "in_context":
        with pytest.raises(ValueError, match="a device_map that moves blocks"):
            model(ids)
    else:
        assert torch.equal(model(ids).logits, want)
