"""Chains of levels: what they reduce to, and what their configs refuse."""

from __future__ import annotations

import pytest
import torch
import zoo
from tolerances import MODEL, close
from torch import Tensor
from transformers import PreTrainedModel

from memzoo import HopeAttentionConfig, HopeAttentionForCausalLM

LENGTH = 6 * zoo.CHUNK + 3


def plus_plus(name: str = "transformer_pp-mixed") -> PreTrainedModel:
    return zoo.build(name, torch.float64).eval()


def chained(base: PreTrainedModel, **options: object) -> PreTrainedModel:
    """Hope-Attention with the options of a Transformer++."""
    fields = {key: value for key, value in base.config.to_diff_dict().items() if key != "model_type"}
    torch.manual_seed(0)
    return HopeAttentionForCausalLM(HopeAttentionConfig(**{**fields, **options})).double().eval()


def one_level(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Transformer++'s weights under the names of a chain of one level."""
    for old, new in ((".mlp_norm.", ".chain.levels.0.norm."), (".mlp.", ".chain.levels.0.mlp.")):
        weights = {key.replace(old, new): value for key, value in weights.items()}
    return weights


@pytest.mark.parametrize("chain", ["sequential", "independent"])
def test_one_level_is_transformer_plus_plus(chain: str) -> None:
    """To the bit: logits, loss, every gradient, decoding."""
    base = plus_plus()
    model = chained(base, chain_periods=[1], chain=chain)
    loaded = model.load_state_dict(one_level(base.state_dict()), strict=chain == "sequential")
    assert not loaded.unexpected_keys
    ids = zoo.tokens(2, LENGTH)
    results = []
    for each in (base, model):
        out = each(ids, labels=ids)
        out.loss.backward()
        results.append((out, {key: p.grad for key, p in each.named_parameters()}))
    (want, gradients), (got, found) = results
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.loss, want.loss)
    for key, gradient in one_level(gradients).items():
        assert torch.equal(found[key], gradient), key
    answer = base.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), answer)


def test_independent_levels_share_one_feed_forward() -> None:
    """Eq 74 with the hidden units of one feed-forward dealt out to the levels is that feed-forward."""
    base = plus_plus("transformer_pp-e1")
    model = chained(base, chain_sizes=[11, 12, 17], chain="independent")
    weights = model.state_dict()
    for key, value in one_level(base.state_dict()).items():
        if ".chain." not in key:
            weights[key] = value
            continue
        axis = None if "norm" in key else 1 if "down_proj" in key else 0
        parts = [value] * 3 if axis is None else value.split([11, 12, 17], dim=axis)
        weights.update({key.replace("levels.0", f"levels.{level}"): part for level, part in enumerate(parts)})
    model.load_state_dict(weights)
    ids = zoo.tokens(2, LENGTH)
    close(model(ids).logits, base(ids).logits, MODEL[torch.float64])


def test_the_levels_take_their_turns() -> None:
    """Eq 70: a sequential chain's order matters and the last level reads the others."""
    model = zoo.build("hope_attention-e1", torch.float64).eval()
    ids = zoo.tokens(1, 9)
    chain = model.model.layers[0].chain
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    slow, fast = chain.levels
    close(chain(x), (x + slow(x)) + fast(x + slow(x)), MODEL[torch.float64])
    before = model(ids).logits
    for layer in model.model.layers:
        layer.chain.levels = torch.nn.ModuleList(reversed(layer.chain.levels))
    assert (model(ids).logits - before).abs().max() > 1e-2


def test_level_sizes() -> None:
    assert HopeAttentionConfig.preset("170m").level_sizes == [640, 704, 704]
    assert HopeAttentionConfig(intermediate_size=40, chain_periods=[2, 1]).level_sizes == [20, 20]
    assert HopeAttentionConfig(chain_sizes=[3, 5], chain_periods=[2, 1]).level_sizes == [3, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chain_periods": []}, r"chain_periods=\[\]: expected None, or periods of at least 1"),
        ({"chain_periods": [2, 0]}, r"chain_periods=\[2, 0\]"),
        ({"chain_periods": [2, 1], "chain_sizes": [8]}, r"chain_sizes=\[8\]: expected None, or 2 widths"),
        ({"chain_sizes": [8, 0, 8]}, r"chain_sizes=\[8, 0, 8\]"),
        ({"chain": "parallel"}, "chain='parallel': expected one of"),
        ({"capacity_blocks": 2}, "capacity_blocks=2"),
    ],
)
def test_bad_values_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HopeAttentionConfig(**options)
