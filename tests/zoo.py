"""What the model-level tests run over: every architecture of the zoo, in every wiring, tiny and lively.

A new architecture adds its tiny configs to `TINY`; no test names an architecture.
"""

from __future__ import annotations

import itertools
import os
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

import memzoo

CHUNK = 4
VOCAB = 61
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


def _titans(variant: str, blocks: int) -> PreTrainedConfig:
    # Blocks of 3 tokens and chunks of 4: capacity opens inside chunks. The window ends inside a chunk, too.
    return memzoo.TitansConfig(
        variant=variant,
        chunk_size=CHUNK,
        segment_size=2 * CHUNK,
        sliding_window=5,
        num_persistent_tokens=3,
        max_step_size=0.25,
        capacity_blocks=blocks,
        capacity_context=3 * blocks,
        # Attention with all its options, beside a capacity schedule.
        **({"num_key_value_heads": 1, "attention_bias": True, "qk_norm": True} if blocks > 1 else {}),
        **_SHARED,
    )


TINY: dict[str, PreTrainedConfig] = {
    f"titans-{variant}-e{blocks}": _titans(variant, blocks)
    for variant, blocks in itertools.product(("lmm", "mac", "mag", "mal"), (1, 16))
}

# The wirings that `memzoo.conversion.upcycle` makes of a pretrained transformer.
TINY |= {
    f"titans-{variant}-skip-e16": type(config)(
        **{
            **config.to_diff_dict(),
            "memory_skip": True,
            "head_dim": 8,
            "attention_out_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
        }
    )
    for variant in ("mag", "mal")
    for config in (TINY[f"titans-{variant}-e16"],)
}


def _deep(config_class: type, variant: str = "lmm", blocks: int = 1, **options: object) -> PreTrainedConfig:
    shared = {"chunk_size": CHUNK, "segment_size": 2 * CHUNK, "sliding_window": 5, "num_persistent_tokens": 3}
    schedule = {"capacity_blocks": blocks, "capacity_context": 3 * blocks, "max_step_size": 0.25}
    return config_class(variant=variant, **{**_SHARED, **shared, **schedule, **options})


# Windows that reach back over a chunk's edge, one longer than a chunk; features of every kind; Muon both ways.
TINY |= {
    "omeganet-lmm-e1": _deep(memzoo.OmegaNetConfig, window=3, feature_dim=3),
    "omeganet-mac-e16": _deep(memzoo.OmegaNetConfig, "mac", 16, window=6, feature_map="identity"),
    "omeganet-mag-e1": _deep(memzoo.OmegaNetConfig, "mag", window_halo=False, feature_map="powers", feature_degree=3),
    "omeganet-mal-e16": _deep(memzoo.OmegaNetConfig, "mal", 16, memory="gated_mlp", use_momentum=True, feature_dim=3),
    "atlas-lmm-e1": _deep(memzoo.AtlasConfig, window=3, feature_dim=3),
    "atlas-mag-e16": _deep(memzoo.AtlasConfig, "mag", 16, window=3, feature_dim=None),
    "atlas-mac-token-e1": _deep(memzoo.AtlasConfig, "mac", window=3, muon_every="token", feature_map="identity"),
    "atlas-gated-token-e16": _deep(
        memzoo.AtlasConfig, "lmm", 16, memory="gated_mlp", muon_every="token", window=3, feature_dim=3
    ),
    "atlas-gated-e1": _deep(memzoo.AtlasConfig, "mal", memory="gated_mlp", window=3, feature_dim=3),
    "dla-lmm-e1": _deep(memzoo.DLAConfig),
    "dla-mag-e16": _deep(memzoo.DLAConfig, "mag", 16, use_momentum=True),
}


def _matrix(config_class: type, blocks: int = 1, **options: object) -> PreTrainedConfig:
    shared = {"sliding_window": 5, "capacity_blocks": blocks, "capacity_context": 3 * blocks, "expand_k": 1.0}
    return config_class(**{**_SHARED, **shared, "expand_v": 1.5, **options})


def _wired(variant: str) -> dict[str, object]:
    return {"variant": variant, "segment_size": 2 * CHUNK, "num_persistent_tokens": 3, "expand_v": 1.0}


_HYBRID = ["linear_attention", "sliding_attention"]
TINY |= {
    "retnet-e1": _matrix(memzoo.RetNetConfig),
    "retnet-e4": _matrix(memzoo.RetNetConfig, 4),
    "deltanet-e1": _matrix(memzoo.DeltaNetConfig, allow_negative_eigenvalues=True),
    "deltanet-e4": _matrix(memzoo.DeltaNetConfig, 4, layer_types=["full_attention", "linear_attention"]),
    "gated_deltanet-e1": _matrix(memzoo.GatedDeltaNetConfig),
    "gated_deltanet-e4": _matrix(memzoo.GatedDeltaNetConfig, 4, capacity_axis="value", layer_types=_HYBRID),
    "comba-e1": _matrix(memzoo.CombaConfig),
    "comba-fla-e4": _matrix(memzoo.CombaConfig, 4, variant="fla"),
    "swla-e1": _matrix(memzoo.SWLAConfig, window=3),
    "swla-e4": _matrix(memzoo.SWLAConfig, 4),
    "deep_transformer-e1": _matrix(memzoo.DeepTransformerConfig),
    "deep_transformer-e4": _matrix(
        memzoo.DeepTransformerConfig, 4, normalizer=False, capacity_axis="value", layer_types=_HYBRID
    ),
    "swdt-e1": _matrix(memzoo.SWDTConfig, window=3),
    "dot-e1": _matrix(memzoo.DotConfig, window=3),
    "dot-e4": _matrix(memzoo.DotConfig, 4, window=1, feature_scale=1.0, num_persistent_tokens=3),
    # No normaliser: under one, what a memory answers does not change with its scale, which a test halves.
    "deep_transformer-mac-e4": _matrix(
        memzoo.DeepTransformerConfig, 4, **_wired("mac"), expand_k=0.5, normalizer=False
    ),
    "deep_transformer-mag-e1": _matrix(memzoo.DeepTransformerConfig, **_wired("mag")),
    "swdt-mal-e4": _matrix(memzoo.SWDTConfig, 4, **_wired("mal"), window=3, layer_types=_HYBRID),
    "dot-mac-e1": _matrix(memzoo.DotConfig, **_wired("mac"), window=2),
    "deep_transformer-mlp-e1": _matrix(
        memzoo.DeepTransformerConfig, **_wired("mag"), memory="mlp", normalizer=False, max_step_size=0.5
    ),
    "dot-mlp-e1": _matrix(memzoo.DotConfig, **_wired("mac"), memory="mlp", window=2, max_step_size=0.5),
    "transformer_pp-e1": _matrix(memzoo.TransformerPlusPlusConfig),
    "transformer_pp-mixed": _matrix(
        memzoo.TransformerPlusPlusConfig,
        layer_types=["full_attention", "sliding_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        attention_out_bias=True,
        qk_norm=True,
        mlp_bias=True,
    ),
    "hope_attention-e1": _matrix(memzoo.HopeAttentionConfig, chain_periods=[3, 1]),
    "hope_attention-context-e1": _matrix(
        memzoo.HopeAttentionConfig,
        chain_learning="in_context",
        chain_periods=[2 * CHUNK, CHUNK],
        chain_step_size=0.01,
    ),
    "hope_attention-nested": _matrix(
        memzoo.HopeAttentionConfig,
        layer_types=["sliding_attention", "full_attention"],
        num_key_value_heads=1,
        chain_learning="in_context",
        chain="nested",
        chain_periods=[CHUNK, 4 * CHUNK, 2 * CHUNK],
        chain_step_size=0.01,
    ),
    "hope_attention-independent": _matrix(
        memzoo.HopeAttentionConfig,
        layer_types=["sliding_attention", "full_attention"],
        chain_periods=[4, 2, 1],
        chain_sizes=[5, 7, 9],
        chain="independent",
    ),
}
_MANAGED = {
    "capacity_context": 3,
    "num_slots": 3,
    "memory_dim": 6,
    "read_top_k": 2,
    "chunk_size": CHUNK,
    "salient_keys": 2,
}
TINY |= {
    # A constant state: slots alone, whose keys meet often enough to be overwritten and contested.
    "memory_managed-e1": memzoo.MemoryManagedConfig(
        **_SHARED,
        **_MANAGED,
        write_stride=2,
        same_threshold=0.5,
        write_threshold=0.6,
        keep_importance=4.0,
        fallback_chunks=0,
    ),
    "memory_managed-fallback": memzoo.MemoryManagedConfig(
        **_SHARED,
        **_MANAGED,
        backbone="gated_deltanet",
        backbone_options={"expand_k": 1.0},
        memory_layers=[0],
        write_trigger="token",
        event_token_ids=list(range(1, VOCAB, 2)),
        same_threshold=0.0,
        version_mode="history",
        versions_per_key=2,
        fallback_chunks=2,
        sketch_bits=16,
        sketch_window=2,
        read_threshold=0.7,
    ),
}
# The memories' boundaries and the chain's chunks lie apart.
_HOPE = {"capacity_context": 3, "max_step_size": 0.25, "chunk_size": 3, "self_chunk_size": 6}
TINY |= {
    "hope-e1": memzoo.HopeConfig(**_SHARED, **_HOPE, chain_periods=[2 * CHUNK, CHUNK], chain_step_size=0.01),
    "hope-stream": memzoo.HopeConfig(
        **_SHARED, **_HOPE, adaptive_query=True, chain_learning="stream", chain_periods=[2, 1]
    ),
}
# `make check` runs over a few that differ most: every wiring's parts, both rules, a hybrid.
QUICK = ["titans-mag-e1", "omeganet-lmm-e1", "deltanet-e4", "swla-e1"]
_CHOSEN = QUICK if os.environ.get("MEMZOO_QUICK") else list(TINY)
# Others have every part of these, and a capacity schedule besides: these run in the PLAIN checks alone.
_COVERED = {f"titans-{variant}-e1" for variant in ("lmm", "mac", "mal")} | {"dla-lmm-e1"}
NAMES = [name for name in _CHOSEN if name not in _COVERED]
# One name per wiring, for checks that a capacity schedule cannot change.
PLAIN = [name for name in _CHOSEN if name.endswith("-e1")]
# One per kind of memory, with the mixers that hold them, for dear checks of what happens block by block.
_DIFFERENT = {
    *("titans-mac-e1", "atlas-lmm-e1", "comba-e1", "dot-mac-e1", "deep_transformer-mlp-e1", "transformer_pp-e1"),
    *("hope-e1", "memory_managed-e1"),
}
BLOCKS = [name for name in PLAIN if name in _DIFFERENT]

# Published sizes: config class, size, options, parameters (counted once, then held).
COUNTS: list[tuple[type, dict[str, object], tuple[int, ...]]] = [
    (memzoo.TitansConfig, {"variant": "lmm"}, (145313664, 408473216, 865153920, 1194310576)),
    (memzoo.TitansConfig, {"variant": "mac"}, (166565184, 484018304, 1035094656, 1420872112)),
    (memzoo.TitansConfig, {"variant": "mag"}, (159487296, 458852480, 978471552, 1345374640)),
    (memzoo.TitansConfig, {"variant": "mal"}, (173625216, 509136512, 1091646336, 1496300464)),
    (memzoo.OmegaNetConfig, {}, (146162496, 410736128, 868547328, 1196818048)),
    (memzoo.AtlasConfig, {}, (146310144, 411129728, 869137536, 1197113104)),
    (memzoo.AtlasConfig, {"memory": "gated_mlp"}, (148448256, 418404224, 884767872, 1236336400)),
    (memzoo.DLAConfig, {}, (145166016, 408079616, 864563712, 1194015520)),
    (memzoo.RetNetConfig, {}, (162418560, 469815296, 1004353536, 1343835136)),
    (memzoo.DeltaNetConfig, {}, (134364480, 369838592, 778891008, 1042577920)),
    (memzoo.GatedDeltaNetConfig, {}, (148668384, 420564992, 892728960, 1193870368)),
    (memzoo.CombaConfig, {}, (148668768, 420565760, 892729728, 1193870656)),
    (memzoo.SWLAConfig, {}, (141737856, 395792000, 836694912, 1118665648)),
    (memzoo.DeepTransformerConfig, {}, (141590208, 395398400, 836104704, 1118370592)),
    (memzoo.SWDTConfig, {}, (142033152, 396579200, 837875328, 1119255760)),
    (memzoo.DotConfig, {}, (142033152, 396579200, 837875328, 1119255760)),
    (memzoo.TransformerPlusPlusConfig, {}, (134105856, 369148928, 777856512, 1041836032)),
    (memzoo.HopeAttentionConfig, {}, (134124288, 369198080, 777930240, 1041909760)),
    (memzoo.HopeConfig, {}, (151902912, 432336128, 919822848, 1419733792)),
    (memzoo.MemoryManagedConfig, {}, (141937929, 395861321, 836798025, 1119294313)),
]
_NO_SCHEDULE = (memzoo.TransformerPlusPlusConfig, memzoo.HopeConfig)
PRESETS = [
    (kind, size, {**options, **({} if issubclass(kind, _NO_SCHEDULE) else {"capacity_blocks": 16})}, count)
    for kind, options, counts in COUNTS
    for size, count in zip(("170m", "340m", "760m", "1.3b"), counts, strict=True)
]


def slow(*values: object) -> list[Any]:
    """Values of a parametrised test that `make check` leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def config_of(name: str, **overrides: object) -> PreTrainedConfig:
    """A fresh tiny config."""
    config = TINY[name]
    return type(config)(**{**config.to_diff_dict(), **overrides})


def enliven(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Weights under which logits depend strongly on history.

    With the usual small initial weights a model whose cached state is halved passes equality tests.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim < 2:
                parameter.add_(0.3 * noise)
            else:
                is_input = "embed" in name or "persistent" in name
                parameter.copy_(noise * (1.0 if is_input else 1.5 * parameter.shape[-1] ** -0.5))
    return model


@cache
def causal_lm(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A shared lively model in evaluation mode. Do not change it."""
    return build(name, dtype).eval()


@cache
def shallow(name: str) -> PreTrainedModel:
    """The same with one block of each kind, for dear checks of what a block does by itself. Do not change it."""
    if getattr(TINY[name], "layer_types", None) is not None:
        return causal_lm(name)
    return build(name, torch.float64, num_hidden_layers=1).eval()


def build(name: str, dtype: torch.dtype = torch.float32, **overrides: object) -> PreTrainedModel:
    """A lively model of one's own, in training mode."""
    torch.manual_seed(0)
    # Built in its dtype and not moved to it, which would round the rotary frequencies as well.
    return enliven(AutoModelForCausalLM.from_config(config_of(name, **overrides), dtype=dtype)).train()


def rounded(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The float32 model with its weights rounded to `dtype`."""
    model = build(name).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


def classifier(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config_of(name, num_labels=3)
    return enliven(AutoModelForSequenceClassification.from_config(config)).to(dtype).eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Random ids without the padding id 0."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
