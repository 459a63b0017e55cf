"""What Titans alone promises: its options, its variants, its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from huggingface_hub.errors import StrictDataclassFieldValidationError
from tolerances import MODEL, close, error
from transformers import AutoModelForCausalLM, PreTrainedModel

from memzoo import TitansConfig, TitansForCausalLM

BOUND = MODEL[torch.float64]
OPTIONS: list[dict[str, Any]] = [
    {"memory_depth": 1},
    {"memory_depth": 1, "memory_residual": True},
    {"memory_depth": 3},
    {"memory_depth": 4, "memory_expansion": 2},
    {"memory_residual": False},
    {"memory_activation": "silu"},
    {"memory_activation": "relu"},
    {"memory_activation": "tanh"},
    {"memory_activation": "gelu_tanh"},
    {"use_momentum": False},
    {"use_retention": False},
    {"use_momentum": False, "use_retention": False},
    {"num_persistent_tokens": 0},
    {"num_persistent_tokens": 9},
    {"conv_width": 1},
    {"conv_width": 2},
    {"chunk_size": 1, "segment_size": 3},
    {"chunk_size": 8},
    {"sliding_window": 1},
    {"sliding_window": 100},
    {"segment_size": zoo.CHUNK},
    {"output_gate": "sigmoid"},
    {"output_gate": None},
    {"max_gradient_norm": 0.5},
    {"max_gradient_norm": None},
    {"max_step_size": 0.01},
    {"hidden_act": "gelu", "mlp_bias": True},
    {"capacity_blocks": 5, "capacity_context": 7},
    {"tie_word_embeddings": True},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
]


def build(**options: Any) -> PreTrainedModel:
    return zoo.build("titans-" + options.pop("variant", "lmm") + "-e1", torch.float64, **options).eval()


@pytest.mark.parametrize("variant", ["lmm", *zoo.slow("mac", "mag", "mal")])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_in_every_variant(variant: str, options: dict[str, Any]) -> None:
    """Cached decoding, the reference backend and one pass agree."""
    if options.get("chunk_size") == 8:
        options = {**options, "segment_size": 16}
    options = {"num_hidden_layers": 1, **options}
    model, ids = build(variant=variant, **options), zoo.tokens(2, 19)
    with torch.no_grad():
        want = model(ids).logits
        close(build(variant=variant, **options, kernel_backend="reference")(ids).logits, want, BOUND)
        cache = model(ids[:, :6], use_cache=True).cache
        parts = [model(token, cache=cache).logits for token in ids[:, 6:].split(1, dim=1)]
        close(torch.cat(parts, dim=1), want[:, 6:], BOUND)


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("lmm", {"memory_depth": 1}),
        ("lmm", {"memory_residual": False}),
        ("lmm", {"memory_activation": "silu"}),
        ("lmm", {"use_momentum": False}),
        ("lmm", {"use_retention": False}),
        ("lmm", {"chunk_size": 1}),
        ("lmm", {"num_persistent_tokens": 0}),
        ("lmm", {"max_gradient_norm": 0.5}),
        ("lmm", {"capacity_blocks": 4, "capacity_context": 8}),
        ("lmm", {"output_gate": "sigmoid"}),
        ("mal", {"output_gate": None}),
        ("mac", {"segment_size": 4}),
        ("mag", {"sliding_window": 2}),
        ("mal", {"sliding_window": 2}),
    ],
    ids=str,
)
def test_options_do_something(variant: str, options: dict[str, Any]) -> None:
    """An option that is read and then forgotten would pass every equality test."""
    ids = zoo.tokens(1, 19)
    with torch.no_grad():
        assert error(build(variant=variant, **options)(ids).logits, build(variant=variant)(ids).logits) > 1e-3


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
def test_one_capacity_block_is_no_schedule(variant: str) -> None:
    """E = 1 is bit-equal whatever the schedule's context; a schedule of a few tokens is not."""
    ids = zoo.tokens(1, 30)
    plain = build(variant=variant)
    short = build(variant=variant, capacity_context=3)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, short(ids).logits)
        scheduled = build(variant=variant, capacity_blocks=4, capacity_context=4)
        assert not torch.equal(scheduled(ids).logits, plain(ids).logits)


def test_persistent_tokens_are_written_before_the_first_block_opens_more() -> None:
    """They count neither in the capacity schedule nor on the chunk grid, whatever their number."""
    ids = zoo.tokens(1, 13)
    for count in (1, 3, 9):
        model = build(num_persistent_tokens=count, capacity_blocks=4, capacity_context=16)
        cache = model(ids, use_cache=True).cache
        memory = cache.states[0].memory
        assert int(memory.position) == 13
        # Block 4 opens after 12 tokens: one token of the running chunk has seen it.
        assert float(memory.weight_keep[0, 0, 3]) < 1
        cache = model(ids[:, :12], use_cache=True).cache
        assert float(cache.states[0].memory.weight_keep[0, 0, 3]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "mam"}, r"variant='mam': expected one of \('lmm', 'mac', 'mag', 'mal'\)"),
        ({"num_attention_heads": 5, "head_dim": None}, "num_attention_heads=5: expected a divisor of hidden_size=24"),
        ({"capacity_blocks": 49}, "capacity_blocks=49: expected at most the memory's 48 units"),
        ({"capacity_blocks": 13, "memory_depth": 1}, "at most the memory's 12 units"),
        ({"capacity_blocks": 0}, "capacity_blocks=0: expected at least 1"),
        ({"capacity_context": 0}, "capacity_context=0: expected at least 1"),
        ({"chunk_size": 0}, "chunk_size=0: expected at least 1"),
        ({"variant": "mac", "segment_size": 6}, "segment_size=6: expected a multiple of chunk_size=4"),
        ({"memory_depth": 5}, "memory_depth=5: expected 1 to 4"),
        ({"memory_activation": "sin"}, "memory_activation='sin': expected one of"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm=0.0: expected above 0, or None"),
        ({"max_step_size": 0.0}, "max_step_size=0.0: expected above 0"),
        ({"output_gate": "relu"}, r"output_gate='relu': expected None or one of \('silu', 'sigmoid'\)"),
        ({"sliding_window": 0}, "sliding_window=0: expected at least 1"),
        ({"num_persistent_tokens": -1}, "num_persistent_tokens=-1: expected at least 0"),
        ({"variant": "mag", "head_dim": 3}, "an even head width"),
        ({"variant": "mac", "head_dim": 8}, "head_dim=8: expected hidden_size / num_attention_heads"),
        ({"memory_skip": True}, "memory_skip=True: expected False but in 'mag' and 'mal'"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types=.*: expected None but in 'mag' and 'mal'"),
        ({"variant": "mag", "layer_types": ["linear_attention"] * 2}, "num_hidden_layers=2 of .'sliding_attention'"),
        ({"vocab_size": 0}, "vocab_size=0: expected at least 1"),
    ],
    ids=str,
)
def test_refuses_configurations_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.config_of("titans-lmm-e1", **options)


def test_a_model_checks_fields_set_after_the_config_was_made() -> None:
    config = zoo.config_of("titans-lmm-e1")
    config.variant = "mam"
    with pytest.raises(ValueError, match="variant='mam': expected one of"):
        TitansForCausalLM(config)


def test_the_step_size_follows_a_chunk_size_changed_at_loading(tmp_path: Path) -> None:
    """Its default depends on the chunk; a value of the user's stays."""
    for given, expected in ((None, 4 / 32), (0.3, 0.3)):
        zoo.build("titans-lmm-e1", max_step_size=given, chunk_size=64).save_pretrained(tmp_path)
        model = TitansForCausalLM.from_pretrained(tmp_path, chunk_size=32)
        assert model.model.layers[0].mixer.memory.gates.kinds[0].scale == expected


def test_refuses_values_of_another_type() -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match="Field 'hidden_size' expected int, got str"):
        zoo.config_of("titans-lmm-e1", hidden_size="wide")


def test_unknown_backend_is_refused_with_the_names() -> None:
    model = build(kernel_backend="fortran")
    with pytest.raises(ValueError, match=r"unknown kernel_backend 'fortran'; expected 'auto' or one of"):
        model(zoo.tokens(1, 5))


def test_defaults_stay_finite_on_a_long_repetitive_text() -> None:
    """Default step sizes at a default initialisation, 3,000 tokens of a three-token loop."""
    torch.manual_seed(0)
    config = TitansConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([1, 2, 3]).repeat(1000)[None]
    with torch.no_grad():
        out = model(ids, use_cache=True)
    assert torch.isfinite(out.logits).all()
    assert max(float(w.abs().max()) for w in out.cache.states[0].memory.weights) < 10
