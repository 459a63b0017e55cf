"""transformers' Llama, Mistral, Qwen2 and Qwen3 as Transformer++."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.matrix_memory import TransformerPlusPlusConfig
from memzoo.conversion.formats import ACTIVATION, MLP, Format, attention, untied
from memzoo.conversion.options import Option, Options, Unfit, Values, free, ours_only, same
from memzoo.conversion.tables import LAYER, Row, Table

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

TABLE = Table(
    model=(
        Row(EMBEDDING, EMBEDDING),
        Row("model.norm.weight", "model.norm.weight"),
        Row(HEAD, HEAD, when=untied),
    ),
    block=(
        Row("mixer_norm.weight", "input_layernorm.weight"),
        Row("mlp_norm.weight", "post_attention_layernorm.weight"),
        *MLP,
    ),
    mixers=attention("self_attn"),
    dropped=(LAYER.replace(".", r"\.").format(r"\d+") + r"self_attn\.rotary_emb\.inv_freq",),
    copies={HEAD: EMBEDDING},
)


def _read_rope(values: Values) -> Values:
    rope = values["rope_parameters"].items()
    return {"rope_parameters": dict(x for x in rope if x != ("partial_rotary_factor", 1.0))}


def _read_head_dim(values: Values) -> Values:
    return {"head_dim": values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]}


def _write_full(config: PreTrainedConfig) -> Values:
    if set(config.mixer_types) != {"full_attention"}:
        raise Unfit("layer_types", config.layer_types, "full attention in every layer", "Qwen3 has sliding layers.")
    return {}


def _read_window(values: Values) -> Values:
    """Mistral: one window for every layer, or none."""
    window = values["sliding_window"]
    if window is None:
        return {"layer_types": None}
    return {"layer_types": ["sliding_attention"] * values["num_hidden_layers"], "sliding_window": window}


def _write_window(config: PreTrainedConfig) -> Values:
    kinds = set(config.mixer_types)
    if len(kinds) > 1:
        raise Unfit("layer_types", config.layer_types, "one kind of attention in every layer", "Qwen3 mixes them.")
    return {"sliding_window": config.sliding_window if kinds == {"sliding_attention"} else None}


def _read_layers(values: Values) -> Values:
    kinds, window = values["layer_types"], values["sliding_window"]
    if "sliding_attention" not in kinds:
        return {"layer_types": kinds}
    if window is None:
        raise Unfit("sliding_window", window, "a window for the sliding layers", "Set use_sliding_window as well.")
    return {"layer_types": kinds, "sliding_window": window}


def _write_layers(config: PreTrainedConfig) -> Values:
    kinds = config.mixer_types
    sliding = "sliding_attention" in kinds
    return {
        "layer_types": kinds,
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "max_window_layers": len(kinds),
    }


def _write_biases(config: PreTrainedConfig) -> Values:
    if config.attention_bias != config.attention_out_bias:
        raise Unfit(
            "attention_out_bias",
            config.attention_out_bias,
            f"attention_bias={config.attention_bias}",
            "There the attention's four projections have biases together; Qwen2 has them on queries, keys and values.",
        )
    return {"attention_bias": config.attention_bias}


SHARED = (
    same("vocab_size"),
    same("hidden_size"),
    same("intermediate_size"),
    same("num_hidden_layers"),
    same("num_attention_heads"),
    same("num_key_value_heads"),
    ACTIVATION,
    same("max_position_embeddings"),
    same("initializer_range", cast=float),
    same("rms_norm_eps", cast=float),
    same("use_cache"),
    same("pad_token_id"),
    same("bos_token_id"),
    same("eos_token_id"),
    same("tie_word_embeddings"),
    same("attention_dropout", cast=float),
    Option(
        {"rope_parameters": ...},
        ("rope_parameters",),
        _read_rope,
        lambda config: {"rope_parameters": config.rope_parameters},
    ),
    free("num_memory_heads", "expand_k", "expand_v", "conv_width", "output_gate"),
    free("capacity_blocks", "capacity_context", "capacity_axis", "kernel_backend"),
)
HEAD_DIM = Option(
    {"head_dim": None, "hidden_size": ..., "num_attention_heads": ...},
    ("head_dim",),
    _read_head_dim,
    lambda config: {"head_dim": config.head_dim},
)
BIASES = Option(
    {"attention_bias": ...},
    ("attention_bias", "attention_out_bias"),
    lambda values: dict.fromkeys(("attention_bias", "attention_out_bias"), values["attention_bias"]),
    _write_biases,
)
WINDOW = Option(
    {"sliding_window": ..., "num_hidden_layers": ...}, ("layer_types", "sliding_window"), _read_window, _write_window
)
LAYERS = Option(
    {"layer_types": ..., "sliding_window": ..., "use_sliding_window": ..., "max_window_layers": ...},
    ("layer_types", "sliding_window"),
    _read_layers,
    _write_layers,
)


def _native(name: str, architecture: str, *options: Option) -> Format:
    table = Options(TransformerPlusPlusConfig, (*SHARED, HEAD_DIM, *options))
    return Format(name, name, architecture, table, TABLE, native=True)


FORMATS = (
    _native(
        "llama",
        "LlamaForCausalLM",
        BIASES,
        same("mlp_bias"),
        ours_only("qk_norm", False, "Qwen3 has norms of queries and keys."),
        Option({}, ("layer_types",), lambda values: {"layer_types": None}, _write_full),
        free("sliding_window", pretraining_tp=1),
    ),
    _native(
        "mistral",
        "MistralForCausalLM",
        WINDOW,
        ours_only("attention_bias", False, "Llama and Qwen2 have these biases."),
        ours_only("attention_out_bias", False),
        ours_only("mlp_bias", False),
        ours_only("qk_norm", False, "Qwen3 has norms of queries and keys."),
    ),
    _native(
        "qwen2",
        "Qwen2ForCausalLM",
        LAYERS,
        ours_only("attention_bias", True, "Qwen2 has these biases always; Llama has none."),
        ours_only("attention_out_bias", False),
        ours_only("mlp_bias", False),
        ours_only("qk_norm", False, "Qwen3 has norms of queries and keys."),
    ),
    _native(
        "qwen3",
        "Qwen3ForCausalLM",
        LAYERS,
        BIASES,
        ours_only("mlp_bias", False),
        ours_only("qk_norm", True, "Qwen3 has norms of queries and keys always; Llama has none."),
    ),
)
