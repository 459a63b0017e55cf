"""Chains of levels: what they reduce to, what they learn in context, and what their configs refuse."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import zoo
from accelerate import dispatch_model
from tolerances import MODEL, close, error
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.logging import warning_once as logging_once

from memzoo import HopeAttentionConfig, HopeAttentionForCausalLM, HopeConfig, MemoryCache

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


# In context -----------------------------------------------------------------------------------------------------------

CONTEXT = "hope_attention-context-e1"
C = zoo.CHUNK
CHAINS = [
    {},
    {"chain": "nested", "chain_periods": [2 * C, 4 * C, C]},
    {"chain": "independent", "layer_types": ["sliding_attention"] * 2, "mlp_bias": True},
    {"chain_periods": [C]},
]


def in_context(**options: object) -> PreTrainedModel:
    return zoo.build(CONTEXT, torch.float64, **options).eval()


def by_equation(model: PreTrainedModel, ids: Tensor, second_order: bool = False) -> Tensor:
    """Eq 71 and 72 of arXiv 2512.24695 for one sequence `[1, T]`: a static model whose weights are exchanged chunk by
    chunk, with its ordinary cache. Differentiable with respect to the parameters, through the updates or not."""
    config = model.config
    chain = "independent" if config.chain == "independent" else "sequential"
    kept = ("chain_periods", "layer_types", "mlp_bias")
    static = in_context(chain_learning="stream", chain=chain, **{key: getattr(config, key) for key in kept})
    weights = dict(model.named_parameters())
    fast = [name for name in weights if "chain.levels" in name and "_proj.weight" in name]
    period = {name: config.level_periods[int(name.split("levels.")[1][0])] for name in fast}
    slower = {name: [p for p in config.level_periods if p > period[name]] for name in fast}
    outer = {name: min(slower[name]) if slower[name] and config.chain == "nested" else None for name in fast}
    own, start = ({name: weights[name] for name in fast} for _ in range(2))
    gathered, gathered_start = ({name: torch.zeros_like(weights[name]) for name in fast} for _ in range(2))
    cache, logits = MemoryCache(static.config), []
    size = min(config.level_periods)
    for low in range(0, ids.shape[1], size):
        chunk = ids[:, low : low + size]
        own = {name: x.view_as(x) for name, x in own.items()}
        out = functional_call(static, {**weights, **own}, (chunk,), {"cache": cache})
        logits.append(out.logits)
        high = low + size
        if high >= ids.shape[1]:
            break
        error = F.cross_entropy(out.logits[0], ids[0, low + 1 : high + 1], reduction="sum")
        slopes = torch.autograd.grad(error, list(own.values()), create_graph=second_order, retain_graph=True)
        for name, slope in zip(fast, slopes, strict=True):
            gathered[name] = gathered[name] + slope
            gathered_start[name] = gathered_start[name] + slope
            if high % period[name] == 0:
                own[name] = own[name] - config.chain_step_size * gathered[name]
                gathered[name] = torch.zeros_like(slope)
            if outer[name] is not None and high % outer[name] == 0:
                start[name] = start[name] - config.chain_step_size * gathered_start[name]
                own[name], gathered_start[name] = start[name], torch.zeros_like(slope)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("options", CHAINS)
@pytest.mark.parametrize("second_order", [False, True])
def test_learning_in_context_is_the_equation(options: dict[str, object], second_order: bool) -> None:
    """Logits, and the gradient of a loss on them with respect to every parameter, in first and second order."""
    model = in_context(**options, chain_second_order=second_order)
    ids = zoo.tokens(2, 6 * C + 3)
    with sdpa_kernel(SDPBackend.MATH):  # the one that can be differentiated twice
        got = model(ids).logits
        want = torch.cat([by_equation(model, row, second_order) for row in ids.split(1)])
        close(got, want, MODEL[torch.float64])
        target = torch.randn_like(got)
        found = torch.autograd.grad((got * target).sum(), list(model.parameters()))
        expected = torch.autograd.grad((want * target).sum(), list(model.parameters()))
    for (name, _), x, y in zip(model.named_parameters(), found, expected, strict=True):
        assert error(x, y) < MODEL[torch.float64], name


def test_second_order_differs_from_first() -> None:
    """And both from a model that does not learn."""
    ids, gradients = zoo.tokens(1, 4 * C), []
    for second_order in (False, True):
        model = in_context(chain_second_order=second_order)
        weight = model.model.layers[0].chain.levels[0].mlp.up_proj.weight
        with sdpa_kernel(SDPBackend.MATH):
            gradients.append(torch.autograd.grad(model(ids).logits.square().sum(), weight)[0])
    assert error(gradients[0], gradients[1]) > 1e-3


def test_without_a_step_size_nothing_is_learned() -> None:
    ids, model = zoo.tokens(2, 6 * C + 3), in_context(chain_step_size=0.0)
    static = in_context(chain_learning="stream")
    with torch.no_grad():
        close(model(ids).logits, static(ids).logits, MODEL[torch.float64])
        assert error(in_context()(ids).logits, static(ids).logits) > 1e-2


@pytest.mark.parametrize("options", CHAINS[:2])
def test_no_token_changes_what_was_read_before_it(options: dict[str, object]) -> None:
    """Nor does it as a label: later tokens are exchanged, and every earlier logit keeps its bits."""
    model, ids, other = in_context(**options), zoo.tokens(1, 4 * C + 2), zoo.tokens(1, 4 * C + 2, seed=1)
    with torch.no_grad():
        want = model(ids).logits
        for t in range(1, ids.shape[1]):
            changed = torch.where(torch.arange(ids.shape[1]) < t, ids, other % (zoo.VOCAB - 1) + 1)
            got = model(changed).logits
            assert torch.equal(got[:, :t], want[:, :t])
            assert not torch.equal(got[:, t:], want[:, t:])


def test_updates_come_at_multiples_of_the_periods() -> None:
    """A level's own weights change when the token after its period is read, and stay the same in between."""
    model, ids = in_context(), zoo.tokens(1, 5 * C)
    cache, before, moves = MemoryCache(model.config), None, []
    with torch.no_grad():
        for token in ids.split(1, dim=1):
            model(token, cache=cache)
            changes = [level.change[1] for level in cache.states[0].levels]
            if before is not None:
                moves.append([not torch.equal(x, y) for x, y in zip(changes, before, strict=True)])
            before = changes
    slow, fast = zip(*moves, strict=True)
    assert [at + 1 for at, moved in enumerate(fast) if moved] == [C, 2 * C, 3 * C, 4 * C]
    assert [at + 1 for at, moved in enumerate(slow) if moved] == [2 * C, 4 * C]


def test_learning_in_context_helps_on_a_text_that_repeats() -> None:
    """A window too short to see the repetition, so that only the levels' own weights can remember it."""
    ids = zoo.tokens(4, 9).repeat(1, 12)
    losses = []
    for step_size in (0.0, 0.02):
        model = in_context(chain_step_size=step_size, layer_types=["sliding_attention"] * 2, sliding_window=2)
        with torch.no_grad():
            logits = model(ids).logits[:, -10:-1]
        losses.append(F.cross_entropy(logits.flatten(0, 1), ids[:, -9:].flatten()).item())
    assert losses[1] < 0.5 * losses[0]


def test_the_head_teaches() -> None:
    """The head of the language model, wherever it comes from: made anew, copied, loaded; alone, the embedding."""
    model, ids = in_context(), zoo.tokens(1, 3 * C)
    with torch.no_grad():
        want = model.model(ids).last_hidden_state
        twin = copy.deepcopy(model)
        model.lm_head.weight.neg_()
        assert error(model.model(ids).last_hidden_state, want) > 1e-3
        close(twin.model(ids).last_hidden_state, want, MODEL[torch.float64])
        model.lm_head = twin.lm_head
        close(model.model(ids).last_hidden_state, want, MODEL[torch.float64])
        alone = type(model.model)(model.config).double().eval()
        alone.load_state_dict(model.model.state_dict())
        tied = in_context(tie_word_embeddings=True)
        tied.model.load_state_dict(model.model.state_dict())
        close(alone(ids).last_hidden_state, tied.model(ids).last_hidden_state, MODEL[torch.float64])


def test_a_backbone_that_teaches_itself_says_so(caplog: pytest.LogCaptureFixture) -> None:
    transformers_logging.enable_propagation()
    try:
        for tied in (True, False):
            logging_once.cache_clear()
            caplog.clear()
            model = in_context(tie_word_embeddings=tied)
            model(zoo.tokens(1, 3))
            type(model.model)(model.config).double()(zoo.tokens(1, 3))
            assert ("learns in context from the logits of its input embedding" in caplog.text) is not tied
    finally:
        transformers_logging.disable_propagation()


def test_blocks_on_the_disk_are_refused(tmp_path: Path) -> None:
    """They are read past the hooks that fetch them; a chain that does not learn in context may lie there."""
    ids = zoo.tokens(1, 3 * C)
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    for learning in ("stream", "in_context"):
        model = in_context(chain_learning=learning)
        want = model(ids).logits
        model = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path / learning)
        if learning == "stream":
            close(model(ids).logits, want, MODEL[torch.float64])
        else:
            with pytest.raises(ValueError, match=r"a device_map that moves blocks .* expected the whole model on one"):
                model(ids)


def test_training_in_shards_is_refused(tmp_path: Path) -> None:
    """Reading is not."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model, ids = in_context(), zoo.tokens(1, 3 * C)
        with torch.no_grad():
            want = model(ids).logits
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            close(model(ids).logits, want, MODEL[torch.float64])
        with pytest.raises(ValueError, match=r"training under FSDP2: .* Use DDP, or chain_learning='stream'"):
            model(ids)
    finally:
        torch.distributed.destroy_process_group()


def test_hope_without_learning_is_its_static_model() -> None:
    """Its chain with a step size of 0 is the chain that an optimizer alone moves."""
    ids, models = zoo.tokens(2, 5 * C + 1), []
    for options in ({"chain_step_size": 0.0}, {"chain_learning": "stream"}):
        models.append(zoo.build("hope-e1", torch.float64, **options).eval())
    with torch.no_grad():
        close(models[0](ids).logits, models[1](ids).logits, MODEL[torch.float64])


# Configs --------------------------------------------------------------------------------------------------------------


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
        ({"chain": "nested"}, "chain='nested': expected 'nested' in context alone"),
        ({"chain_learning": "context"}, "chain_learning='context': expected one of"),
        ({"chain_learning": "in_context", "chain_periods": [6, 4]}, r"chain_periods=\[6, 4\]: expected multiples"),
        ({"chain_step_size": -1.0}, "chain_step_size=-1.0: expected at least 0"),
        ({"chain": "parallel"}, "chain='parallel': expected one of"),
        ({"capacity_blocks": 2}, "capacity_blocks=2"),
    ],
)
def test_bad_values_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HopeAttentionConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"self_chunk_size": 24}, "self_chunk_size=24: expected a multiple of chunk_size=16"),
        ({"memory_activation": "step"}, "memory_activation='step': expected one of"),
        ({"max_step_size": 2.0}, "max_step_size=2.0: expected above 0 to 1"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm=0.0: expected above 0"),
        ({"capacity_blocks": 2}, "capacity_blocks=2: expected 1"),
        ({"chunk_size": 0}, "chunk_size=0: expected at least 1"),
    ],
)
def test_bad_values_of_hope_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HopeConfig(**options)
