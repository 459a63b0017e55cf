"""What the deep memories of ATLAS promise: their options, what they reduce to, what must differ, their refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from tolerances import MODEL, close, error
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from memzoo import AtlasConfig, DeepTransformerConfig, DLAConfig, DotConfig, OmegaNetConfig, SWDTConfig, TitansConfig
from memzoo.kernels.monomials.chunked import _made
from memzoo.kernels.newton_schulz import newton_schulz

BOUND = MODEL[torch.float64]
SHAPE: dict[str, Any] = {
    "vocab_size": zoo.VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "chunk_size": zoo.CHUNK,
    "segment_size": 2 * zoo.CHUNK,
    "sliding_window": 5,
    "max_step_size": 0.25,
}
VARIANTS = ["lmm", "mac", "mag", "mal"]
OPTIONS: list[tuple[type, dict[str, Any]]] = [
    (OmegaNetConfig, {"window": 1}),
    (OmegaNetConfig, {"window": 2, "feature_map": "identity"}),
    (OmegaNetConfig, {"window": 9, "window_halo": False}),
    (OmegaNetConfig, {"chunk_size": 1, "segment_size": 4}),
    (OmegaNetConfig, {"feature_map": "powers", "feature_degree": 3}),
    (OmegaNetConfig, {"feature_degree": 3, "feature_dim": 3}),
    (OmegaNetConfig, {"feature_dim": None}),
    (OmegaNetConfig, {"memory_depth": 1, "feature_map": "identity"}),
    (OmegaNetConfig, {"memory_depth": 3}),
    (OmegaNetConfig, {"memory": "gated_mlp", "memory_activation": "silu"}),
    (OmegaNetConfig, {"num_persistent_tokens": 0, "use_retention": False}),
    (OmegaNetConfig, {"num_persistent_tokens": 2, "window": 6}),
    (AtlasConfig, {"use_muon": False}),
    (AtlasConfig, {"newton_schulz_steps": 0}),
    (AtlasConfig, {"newton_schulz_steps": 2, "muon_every": "token"}),
    (AtlasConfig, {"memory_depth": 1, "muon_every": "token"}),
    (AtlasConfig, {"capacity_blocks": 4, "capacity_context": 8, "muon_every": "token"}),
    (AtlasConfig, {"capacity_blocks": 5, "capacity_context": 17, "memory": "gated_mlp"}),
    (DLAConfig, {"memory_depth": 1}),
    (DLAConfig, {"use_momentum": True, "max_gradient_norm": None}),
]


def shape(config_class: type) -> dict[str, Any]:
    """What of `SHAPE` the config has."""
    return {key: value for key, value in SHAPE.items() if hasattr(config_class, key)}


def build(config_class: type, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config_class(**{**shape(config_class), **options})
    return zoo.enliven(AutoModelForCausalLM.from_config(config, dtype=torch.float64)).eval()


def copied(model: PreTrainedModel, source: PreTrainedModel) -> PreTrainedModel:
    """`model` with the weights of `source` where they have the same names and shapes."""
    mine, theirs = model.state_dict(), source.state_dict()
    model.load_state_dict({name: theirs.get(name, x) for name, x in mine.items()})
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor | None = None) -> Tensor:
    return model(zoo.tokens(2, 19) if ids is None else ids).logits


@pytest.mark.parametrize("variant", ["lmm", *zoo.slow("mac")])
@pytest.mark.parametrize(("config_class", "options"), OPTIONS, ids=str)
def test_every_option(config_class: type, options: dict[str, Any], variant: str) -> None:
    """Cached decoding, the reference backend and one pass agree."""
    options = {"variant": variant, "num_hidden_layers": 1, **options}
    model, ids = build(config_class, **options), zoo.tokens(2, 19)
    want = logits(model, ids)
    close(logits(build(config_class, **options, kernel_backend="reference"), ids), want, BOUND)
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).cache
        parts = [model(token, cache=cache).logits for token in ids[:, 6:].split(1, dim=1)]
    close(torch.cat(parts, dim=1), want[:, 6:], BOUND)


# Reductions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_omeganet_with_a_window_of_one_is_titans_without_momentum(variant: str) -> None:
    """Bit for bit, since it is the same computation."""
    titans = build(TitansConfig, variant=variant, use_momentum=False)
    omega = build(OmegaNetConfig, variant=variant, window=1, feature_map="identity")
    assert torch.equal(logits(copied(omega, titans)), logits(titans))
    assert error(logits(build(TitansConfig, variant=variant)), logits(titans)) > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("muon", [{"use_muon": False}, {"newton_schulz_steps": 0, "muon_every": "token"}], ids=str)
def test_atlas_without_steps_window_and_features_is_titans(variant: str, muon: dict[str, Any]) -> None:
    """Without Muon bit for bit; with zero steps where the step size is the same for all tokens, since it then stands
    outside of the momentum."""
    titans = build(TitansConfig, variant=variant)
    with torch.no_grad():
        for layer in titans.model.layers:
            gates = layer.mixer.memory.gates
            if "newton_schulz_steps" in muon:
                gates.weight[: gates.heads] = 0
    atlas = copied(build(AtlasConfig, variant=variant, window=1, feature_map="identity", **muon), titans)
    if muon.get("use_muon", True):
        close(logits(atlas), logits(titans), BOUND)
    else:
        assert torch.equal(logits(atlas), logits(titans))


def test_first_degree_features_are_the_identity() -> None:
    """b_1 = 1 and the rest 0, the memory's other inputs being silent."""
    plain = build(OmegaNetConfig, feature_map="identity")
    model = build(OmegaNetConfig, feature_dim=3)
    state = plain.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "features.coefficient_" in name:
                parameter.fill_(float(name.endswith("_1")))
            elif name.endswith("initial_weights.layer_0"):
                parameter[..., : state[name].shape[-1]] = state[name]
            elif name in state:
                parameter.copy_(state[name])
    close(logits(model), logits(plain), BOUND)


@pytest.mark.parametrize("options", [{}, {"muon_every": "token"}, {"memory": "gated_mlp"}], ids=str)
def test_one_capacity_block_is_no_schedule(options: dict[str, Any]) -> None:
    plain = logits(build(AtlasConfig, **options))
    assert torch.equal(logits(build(AtlasConfig, capacity_context=3, **options)), plain)
    assert error(logits(build(AtlasConfig, capacity_blocks=4, capacity_context=8, **options)), plain) > 1e-3


# What must differ -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (OmegaNetConfig, {"window": 1}),
        (OmegaNetConfig, {"window": 3}),
        (OmegaNetConfig, {"window_halo": False}),
        (OmegaNetConfig, {"feature_map": "identity"}),
        (OmegaNetConfig, {"feature_map": "powers"}),
        (OmegaNetConfig, {"feature_degree": 3}),
        (OmegaNetConfig, {"feature_dim": 5}),
        (OmegaNetConfig, {"memory": "gated_mlp"}),
        (OmegaNetConfig, {"use_momentum": True}),
        (OmegaNetConfig, {"chunk_size": 1}),
        (OmegaNetConfig, {"chunk_size": 8}),
        (AtlasConfig, {"use_muon": False}),
        (AtlasConfig, {"newton_schulz_steps": 1}),
        (AtlasConfig, {"muon_every": "token"}),
        (AtlasConfig, {"chunk_size": 8}),
        (AtlasConfig, {"chunk_size": 8, "muon_every": "token"}),
        (AtlasConfig, {"memory": "gated_mlp"}),
        (DLAConfig, {"use_momentum": True}),
        (DLAConfig, {"max_gradient_norm": None}),
        (DLAConfig, {"chunk_size": 8}),
        (DeepTransformerConfig, {"feature_scale": 1.0}),
        (DeepTransformerConfig, {"use_retention": False}),
        (SWDTConfig, {"window": 1}),
        (DotConfig, {"window": 1}),
        (DotConfig, {"capacity_blocks": 4, "capacity_context": 8}),
        (DotConfig, {"num_persistent_tokens": 3}),
        (DotConfig, {"memory": "mlp"}),
        (DotConfig, {"memory": "mlp", "max_step_size": 0.1}),
        (DotConfig, {"memory": "mlp", "max_gradient_norm": 0.1}),
        (DotConfig, {"memory": "mlp", "memory_expansion": 2}),
    ],
    ids=str,
)
def test_options_do_something(config_class: type, options: dict[str, Any]) -> None:
    """An option that is read and then forgotten would pass every equality test."""
    base = {key: options[key] for key in ("muon_every", "memory") if key in options and len(options) > 1}
    assert error(logits(build(config_class, **options)), logits(build(config_class, **base))) > 1e-3


def test_only_a_linear_dla_does_not_know_its_chunks() -> None:
    linear = {"memory_depth": 1, "max_gradient_norm": None}
    close(logits(build(DLAConfig, chunk_size=8, **linear)), logits(build(DLAConfig, **linear)), BOUND)


# Refusals and defaults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config_class", "options", "message"),
    [
        (TitansConfig, {"window": 3}, "TitansConfig: window=3: expected 1, which makes the architecture"),
        (DLAConfig, {"objective": "l2"}, "DLAConfig: objective='l2': expected 'dot'"),
        (OmegaNetConfig, {"use_muon": True}, "OmegaNetConfig: use_muon=True: expected False"),
        (OmegaNetConfig, {"window": 0}, "window=0: expected at least 1"),
        (OmegaNetConfig, {"memory": "tree"}, "memory='tree': expected one of"),
        (OmegaNetConfig, {"memory": "gated_mlp", "memory_depth": 3}, "memory_depth=3: expected 2"),
        (OmegaNetConfig, {"feature_map": "fourier"}, "feature_map='fourier': expected one of"),
        (OmegaNetConfig, {"feature_degree": 0}, "feature_degree=0: expected at least 1"),
        (OmegaNetConfig, {"feature_dim": 13}, "feature_dim=13: expected None, or 1 to the head width 12"),
        (AtlasConfig, {"use_momentum": False}, "use_momentum=False: expected True, which Muon makes orthogonal"),
        (AtlasConfig, {"newton_schulz_steps": -1}, "newton_schulz_steps=-1: expected at least 0"),
        (AtlasConfig, {"muon_every": "day"}, "muon_every='day': expected one of"),
        (DeepTransformerConfig, {"window": 2}, "DeepTransformerConfig: window=2: expected 1, which makes"),
        (DotConfig, {"normalizer": True}, "DotConfig: normalizer=True: expected False"),
        (DotConfig, {"window": 0}, "window=0: expected at least 1"),
        (SWDTConfig, {"capacity_axis": "key"}, "capacity_axis='key': expected 'value' or 'head'"),
        (SWDTConfig, {"feature_scale": 0.0}, "feature_scale=0.0: expected above 0 and at most 40, or None"),
        (SWDTConfig, {"variant": "mad"}, "variant='mad': expected one of"),
        (SWDTConfig, {"num_persistent_tokens": -1}, "num_persistent_tokens=-1: expected at least 0"),
        (SWDTConfig, {"segment_size": 0}, "segment_size=0: expected at least 1"),
        (DotConfig, {"memory": "gated_mlp"}, "memory='gated_mlp': expected 'linear' or 'mlp'"),
        (SWDTConfig, {"memory": "mlp"}, "normalizer=True: expected False: a deep memory has none"),
        (DotConfig, {"memory": "mlp", "capacity_blocks": 2}, "capacity_blocks=2: expected 1 with a deep memory"),
        (DotConfig, {"memory": "mlp", "expand_v": 1.5}, "expand_v=1.5: expected values no wider than the keys"),
        (DotConfig, {"memory": "mlp", "max_step_size": 0.0}, "max_step_size=0.0: expected above 0"),
        (DotConfig, {"variant": "mag", "expand_v": 1.5}, "expand_v=1.5: expected what makes the values as wide as"),
        (DotConfig, {"variant": "mal", "head_dim": 6}, "head_dim=6: expected None, or an even width"),
    ],
)
def test_refuses_configurations_that_do_not_fit(config_class: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_class(**{**shape(config_class), **options})


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (OmegaNetConfig, {}),
        (DLAConfig, {}),
        (AtlasConfig, {}),
        (AtlasConfig, {"muon_every": "token", "chunk_size": 16}),
        (AtlasConfig, {"memory": "gated_mlp"}),
    ],
    ids=str,
)
def test_defaults_stay_finite_on_a_repetitive_text(config_class: type, options: dict[str, Any]) -> None:
    """Default step sizes at a default initialisation, a three-token loop."""
    torch.manual_seed(0)
    config = config_class(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([1, 2, 3]).repeat(100 if "chunk_size" in options else 1000)[None]
    with torch.no_grad():
        out = model(ids, use_cache=True)
    assert torch.isfinite(out.logits).all()
    assert max(float(w.abs().max()) for w in out.cache.states[0].memory.weights) < 10


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_default_muon_does_not_amplify_errors_on_a_repetitive_text(chunk_size: int) -> None:
    """Outer gradients stay near those without Muon, and cutting the text moves float32 logits by rounding only."""
    norms, ids = {}, torch.tensor([1, 2, 3]).repeat(342)[None, :1024]
    for use_muon in (False, True):
        torch.manual_seed(0)
        config = AtlasConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=16,
            chunk_size=chunk_size,
            use_muon=use_muon,
        )
        model = AutoModelForCausalLM.from_config(config)
        model(ids, labels=ids).loss.backward()
        norms[use_muon] = float(
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        )
        model.eval()
        with torch.no_grad():
            whole = model(ids).logits
            rest = model(ids[:, 501:], cache=model(ids[:, :501]).cache).logits
        assert float((whole[:, 501:] - rest).abs().max() / whole.abs().max()) < 1e-4
    assert norms[True] < 10 * norms[False]


def test_inference_first_does_not_spoil_training() -> None:
    _made.clear()
    model = zoo.build("omeganet-lmm-e1")
    ids = zoo.tokens(1, 9)
    with torch.inference_mode():
        model.eval()(ids)
    model.train()(ids, labels=ids).loss.backward()


def test_newton_schulz_in_the_backward_ignores_autocast() -> None:
    """A backward inside autocast is as exact as one outside."""
    gradients = []
    for inside in (False, True):
        torch.manual_seed(0)
        x = torch.randn(3, 6, 9, requires_grad=True)
        y = newton_schulz(x, steps=5).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y.backward()
        gradients.append(x.grad)
    close(*gradients, 1e-6)
