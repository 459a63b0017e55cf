"""flash-linear-attention's RetNet, DeltaNet, Gated DeltaNet, Comba and Transformer, and their hybrids with attention.

Names and defaults are those of version 0.6.0, as `tests/record_fla.py` records them from the library. What it calls
`num_heads` are our memory heads; its attention, in hybrids, has heads of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter
from typing import Any

from transformers import PreTrainedConfig

from memzoo.configuration.matrix_memory import (
    CombaConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    MatrixMemoryConfig,
    RetNetConfig,
    TransformerPlusPlusConfig,
)
from memzoo.conversion.formats import MLP, Format, attention, untied
from memzoo.conversion.options import Option, Options, Unfit, Values, free, only, ours_only, same
from memzoo.conversion.tables import Row, Table

EMBEDDING, HEAD = "model.embeddings.weight", "lm_head.weight"
UNIT_EPS = 1e-6
"""Of its kernels' unit queries and keys, under the root."""
ATTENTION_NORM_EPS = 1e-5
"""Of its attention's norms of queries and keys, whatever `norm_eps` says."""
RETENTION_THETA = 10000.0
"""Of its RetNet's rotary embedding."""


# Weights


def _widths(config: PreTrainedConfig) -> list[int]:
    key, value = (config.memory_heads * width for width in (config.key_head_dim, config.value_head_dim))
    return [key, key, value]


def _gated(config: PreTrainedConfig) -> bool:
    return config.output_gate is not None


QKV = Row("mixer.qkv_proj.weight", tuple(f"attn.{part}_proj.weight" for part in "qkv"), sizes=_widths)
CONV = Row("mixer.conv.weight", tuple(f"attn.{part}_conv1d.weight" for part in "qkv"), sizes=_widths, channel=True)
GATE = Row("mixer.gate_proj.weight", "attn.g_proj.weight", when=_gated)
NORM = Row("mixer.norm.weight", "attn.o_norm.weight")
OUTPUT = Row("mixer.o_proj.weight", "attn.o_proj.weight")
STRENGTH = Row("mixer.strength_proj.weight", "attn.b_proj.weight")
DECAY = (
    Row("mixer.decay.proj.weight", "attn.a_proj.weight"),
    Row("mixer.decay.log_rate", "attn.A_log"),
    Row("mixer.decay.time_bias", "attn.dt_bias"),
)


def _table(*memory: Row) -> Table:
    return Table(
        model=(
            Row("model.embed_tokens.weight", EMBEDDING),
            Row("model.norm.weight", "model.norm.weight"),
            Row(HEAD, HEAD, when=untied),
        ),
        block=(
            Row("mixer_norm.weight", "attn_norm.weight"),
            Row("mlp_norm.weight", "mlp_norm.weight"),
            *MLP,
        ),
        mixers={"linear_attention": memory, **attention("attn")},
        copies={HEAD: EMBEDDING},
    )


# Configs


def _read_feed_forward(values: Values) -> Values:
    width = values["intermediate_size"]
    if width is None:  # 2/3 of `hidden_ratio` times the model's width, rounded up to a multiple of 256
        width = -(-int(values["hidden_size"] * (values["hidden_ratio"] or 4) * 2 / 3) // 256) * 256
    return {"intermediate_size": width}


def _rope(theta: Any) -> dict[str, Any]:
    if not isinstance(theta, (int, float)):
        raise Unfit("rope_theta", theta, "a number", "Ours always rotates.")
    theta = float(theta)
    return {"rope_type": "default", "rope_theta": theta}


def _theta(config: PreTrainedConfig) -> float:
    rope = config.rope_parameters
    if rope != _rope(rope["rope_theta"]):
        raise Unfit("rope_parameters", rope, "rope_type 'default'", "fla rotates without scaling.")
    return rope["rope_theta"]


def _check_attention_width(config: PreTrainedConfig) -> None:
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        expected = f"hidden_size / num_attention_heads = {config.hidden_size / config.num_attention_heads}"
        raise Unfit("head_dim", config.head_dim, expected, "fla's attention is as wide as the model.")


def _read_hybrid(values: Values) -> Values:
    """The layers of attention: `attn` is one description of some layers' attention, or a list of them."""
    layers, heads, given = values["num_hidden_layers"], values["num_heads"], values["attn"]
    if not given:
        return {"num_attention_heads": heads, "layer_types": None}
    specs = [
        {"qkv_bias": False, "rope_theta": 10000.0, "window_size": None, **spec}
        for spec in (given if isinstance(given, list) else [given])
    ]
    if any({"layers", "num_heads"} - set(spec) for spec in specs):
        raise Unfit("attn", given, "layers and num_heads in every description", "Add them.")
    unknown = {name for spec in specs for name in spec} - {"layers", "num_heads", "num_kv_heads"} - set(specs[0])
    kinds = {(s["num_heads"], s.get("num_kv_heads") or s["num_heads"], s["qkv_bias"], s["rope_theta"]) for s in specs}
    windows = {spec["window_size"] for spec in specs} - {None}
    if len(kinds) > 1 or len(windows) > 1 or unknown:
        raise Unfit(
            "attn", given, "layers that differ in nothing but having one window or none", "Ours share the rest."
        )
    ((attention_heads, shared, bias, theta),) = kinds
    types = ["linear_attention"] * layers
    for spec in specs:
        for layer in spec["layers"]:
            if layer not in range(layers):
                raise Unfit("attn", given, f"layers from 0 to {layers - 1}", "Does the number of layers belong to it?")
            if types[layer] != "linear_attention":
                raise Unfit("attn", given, f"layer {layer} in one description", "Leave it in one of them.")
            types[layer] = "full_attention" if spec["window_size"] is None else "sliding_attention"
    sliding = {"sliding_window": windows.pop()} if windows else {}
    return {
        "num_memory_heads": heads,
        "layer_types": types,
        "num_attention_heads": attention_heads,
        "num_key_value_heads": shared,
        "attention_bias": bias,
        "rope_parameters": _rope(theta),
        **sliding,
    }


def _write_hybrid(config: PreTrainedConfig) -> Values:
    theta, specs = _theta(config), []
    for kind, window in (("full_attention", None), ("sliding_attention", config.sliding_window)):
        layers = [layer for layer, other in enumerate(config.mixer_types) if other == kind]
        if layers:
            _check_attention_width(config)
            settings = {"qkv_bias": config.attention_bias, "window_size": window, "rope_theta": theta}
            heads = {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
            specs.append({"layers": layers, **heads, **settings})
    return {"num_heads": config.memory_heads, "attn": specs[0] if len(specs) == 1 else specs or None}


def _read_retention(values: Values) -> Values:
    ours = _read_hybrid(values)
    rope = ours.get("rope_parameters", _rope(RETENTION_THETA))
    if rope["rope_theta"] != RETENTION_THETA:
        expected = f"rope_theta {RETENTION_THETA}"
        raise Unfit("attn", values["attn"], expected, "Ours has one rotary embedding for retention and attention.")
    return {**ours, "rope_parameters": rope}


def _write_retention(config: PreTrainedConfig) -> Values:
    if _theta(config) != RETENTION_THETA:
        raise Unfit(
            "rope_parameters", config.rope_parameters, f"rope_theta {RETENTION_THETA}", "fla's RetNet fixes it."
        )
    return _write_hybrid(config)


def _read_head_widths(values: Values) -> Values:
    heads, key, width = values["num_heads"], values["head_dim"], values["hidden_size"]
    value = int(key * values["expand_v"])
    return {"expand_k": heads * key / width, "expand_v": heads * value / width}


def _write_head_widths(config: PreTrainedConfig) -> Values:
    key, value = config.key_head_dim, config.value_head_dim
    factor = value / key
    while int(key * factor) < value:  # the quotient may be rounded down
        factor = nextafter(factor, inf)
    return {"head_dim": key, "expand_v": factor}


def _gate(switch: str, default: bool, activation: str) -> Option:
    """An output gate with one activation, switched on or off."""

    def write(config: PreTrainedConfig) -> Values:
        if config.output_gate not in (None, activation):
            raise Unfit("output_gate", config.output_gate, f"None or {activation!r}", "fla has no other gate here.")
        return {switch: config.output_gate is not None}

    def read(values: Values) -> Values:
        return {"output_gate": activation if values[switch] else None}

    return Option({switch: default}, ("output_gate",), read, write)


def _read_gate(values: Values) -> Values:
    activations = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
    activation = values["output_gate_activation"]
    if values["use_gate"] and activation not in activations:
        raise Unfit("output_gate_activation", activation, f"one of {sorted(activations)}", "Ours has no other.")
    return {"output_gate": activations[activation] if values["use_gate"] else None}


def _write_gate(config: PreTrainedConfig) -> Values:
    gate = config.output_gate
    return {"use_gate": gate is not None, "output_gate_activation": "sigmoid" if gate == "sigmoid" else "swish"}


def _check_norms(has_norms: bool, eps: float) -> None:
    if has_norms and eps != ATTENTION_NORM_EPS:
        raise Unfit("norm_eps", eps, f"{ATTENTION_NORM_EPS} with qk_norm", "fla's norms of queries and keys have it.")


def _read_attention(values: Values) -> Values:
    _check_norms(values["qk_norm"], values["norm_eps"])
    heads, window, layers = values["num_heads"], values["window_size"], values["num_hidden_layers"]
    sliding = {} if window is None else {"sliding_window": window, "layer_types": ["sliding_attention"] * layers}
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": values["num_kv_heads"] or heads,
        "attention_bias": values["qkv_bias"],
        "qk_norm": values["qk_norm"],
        "rope_parameters": _rope(values["rope_theta"]),
        **sliding,
    }


def _write_attention(config: PreTrainedConfig) -> Values:
    _check_attention_width(config)
    _check_norms(config.qk_norm, config.rms_norm_eps)
    kinds = set(config.mixer_types)
    if len(kinds) > 1:
        raise Unfit("layer_types", config.layer_types, "one kind of layer", "fla's Transformer has one window for all.")
    return {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "qkv_bias": config.attention_bias,
        "qk_norm": config.qk_norm,
        "rope_theta": _theta(config),
        "window_size": config.sliding_window if kinds == {"sliding_attention"} else None,
    }


SHARED = (
    same("vocab_size"),
    same("hidden_size"),
    same("num_hidden_layers"),
    same("norm_eps", "rms_norm_eps", default=1e-6, cast=float),
    same("initializer_range", default=0.02, cast=float),
    same("max_position_embeddings", default=2048),
    same("use_cache", default=True),
    same("tie_word_embeddings", default=False),
    same("pad_token_id", default=None),
    same("bos_token_id", default=1),
    same("eos_token_id", default=2),
    Option(
        {"hidden_ratio": 4, "intermediate_size": None, "hidden_size": ...},
        ("intermediate_size",),
        _read_feed_forward,
        lambda config: {"hidden_ratio": None, "intermediate_size": config.intermediate_size},
    ),
    only("hidden_act", "swish", "We have SwiGLU only."),
    only("attnres_block_size", None, "We have no residual attention."),
    only("use_l2warp", False, "Our loss has no such term."),
    ours_only("hidden_act", "silu"),
    ours_only("mlp_bias", False),
    ours_only("attention_out_bias", False),
    ours_only("attention_dropout", 0.0, "Set it to 0: fla's attention has no dropout."),
    free(fuse_swiglu=True, fuse_cross_entropy=True, fuse_linear_cross_entropy=False),
    free("kernel_backend", "capacity_context", "capacity_axis"),
)
MEMORY = (
    ours_only("capacity_blocks", 1, "fla has no capacity schedule."),
    ours_only("qk_norm", False),
    free(attn_mode="chunk"),
)
EXPAND = (same("expand_k", default=1.0, cast=float), same("expand_v", cast=float))
HEADS = Option(
    {"head_dim": 256, "expand_v": 2.0, "num_heads": 6, "hidden_size": ...},
    ("expand_k", "expand_v"),
    _read_head_widths,
    _write_head_widths,
)
DELTA = (
    same("conv_size", "conv_width", default=4),
    only("use_short_conv", True, "Our convolution cannot be left out."),
    ours_only(
        "unit_eps", UNIT_EPS, "Set it in config.json: unit queries and keys then change by less than 1e-6 / |x|^2."
    ),
)


def _as_many(theirs: str, heads: int, others: str) -> Option:
    """An option for heads of one kind, of which we have as many as of the others."""

    def read(values: Values) -> Values:
        if values[theirs] not in (None, values["num_heads"]):
            expected = f"None or num_heads={values['num_heads']}"
            raise Unfit(theirs, values[theirs], expected, f"Our memories have as many heads of values as of {others}.")
        return {}

    return Option({theirs: None, "num_heads": heads}, (), read, lambda config: {theirs: None})


def _hybrid(
    heads: int,
    read: Callable[[Values], Values] = _read_hybrid,
    write: Callable[[PreTrainedConfig], Values] = _write_hybrid,
) -> Option:
    ours = ("num_memory_heads", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias")
    theirs = {"num_heads": heads, "attn": None, "num_hidden_layers": ...}
    return Option(theirs, (*ours, "layer_types", "sliding_window", "rope_parameters"), read, write)


def _format(
    model_type: str, architecture: str, config: type[MatrixMemoryConfig], table: Table, *options: Option
) -> Format:
    return Format("fla", model_type, architecture, Options(config, (*SHARED, *options)), table, native=False)


FORMATS = (
    _format(
        "retnet",
        "RetNetForCausalLM",
        RetNetConfig,
        _table(
            QKV,
            GATE,
            OUTPUT,
            Row("mixer.norm.weight", "attn.g_norm_swish_gate.weight", when=_gated),
            Row("mixer.norm.weight", "attn.g_norm.weight", when=lambda config: not _gated(config)),
        ),
        *MEMORY,
        _hybrid(8, _read_retention, _write_retention),
        *EXPAND,
        _gate("use_output_gate", True, "silu"),
        ours_only("conv_width", 1),
        only("use_short_conv", False, "Our RetNet has no convolution."),
        _as_many("num_kv_heads", 8, "queries"),
        only("feature_map", None, "Our retention has no feature map."),
        only("elementwise_affine", True, "Our norms have weights."),
        only("fuse_norm", True, "Set it, and rename g_norm to g_norm_swish_gate where there is a gate."),
        free(conv_size=4),
    ),
    _format(
        "delta_net",
        "DeltaNetForCausalLM",
        DeltaNetConfig,
        _table(QKV, CONV, STRENGTH, GATE, NORM, OUTPUT),
        *MEMORY,
        _hybrid(16),
        *EXPAND,
        *DELTA,
        _gate("use_gate", False, "silu"),
        same("allow_neg_eigval", "allow_negative_eigenvalues", default=False),
        only("use_beta", True, "Our writes have a learned strength."),
        only("use_output_norm", True, "Our read-outs are normalised."),
        only("qk_norm", "l2", "Our queries and keys have unit length."),
        only("qk_activation", "silu", "Our convolution ends in SiLU."),
        free(fuse_norm=True),
    ),
    _format(
        "gated_deltanet",
        "GatedDeltaNetForCausalLM",
        GatedDeltaNetConfig,
        _table(QKV, CONV, STRENGTH, *DECAY, GATE, NORM, OUTPUT),
        *MEMORY,
        _hybrid(6),
        HEADS,
        *DELTA,
        _as_many("num_v_heads", 6, "keys"),
        Option({"use_gate": True, "output_gate_activation": "swish"}, ("output_gate",), _read_gate, _write_gate),
        same("allow_neg_eigval", "allow_negative_eigenvalues", default=False),
        free(fuse_norm=True),
    ),
    _format(
        "comba",
        "CombaForCausalLM",
        CombaConfig,
        _table(
            QKV,
            CONV,
            STRENGTH,
            *DECAY,
            Row("mixer.erase_logit", "attn.decay"),
            Row("mixer.correction", "attn.D"),
            GATE,
            NORM,
            OUTPUT,
        ),
        *MEMORY,
        _hybrid(6),
        HEADS,
        *DELTA,
        _as_many("num_v_heads", 6, "keys"),
        _gate("use_output_gate", True, "sigmoid"),
        same("correction_factor", "correction", default=1.0, cast=float),
        only("use_output_correction", True, "Our queries are corrected; a D of zeros does nothing."),
        only("use_inner_decay", True, "Our erase strength is learned."),
        ours_only("variant", "fla", "fla normalises after the correction."),
        free(fuse_norm=True),
    ),
    _format(
        "transformer",
        "TransformerForCausalLM",
        TransformerPlusPlusConfig,
        _table(),
        Option(
            {
                "num_heads": 32,
                "num_kv_heads": None,
                "qkv_bias": False,
                "qk_norm": False,
                "window_size": None,
                "rope_theta": 10000.0,
                "norm_eps": 1e-6,
                "num_hidden_layers": ...,
            },
            (
                "num_attention_heads",
                "num_key_value_heads",
                "attention_bias",
                "qk_norm",
                "rope_parameters",
                "layer_types",
                "sliding_window",
                "head_dim",
            ),
            _read_attention,
            _write_attention,
        ),
        free(elementwise_affine=True, fuse_norm=True),
        free("num_memory_heads", "expand_k", "expand_v", "conv_width", "output_gate", "capacity_blocks"),
    ),
)
