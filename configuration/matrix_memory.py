"""What the models with one matrix per head have in common: RetNet, DeltaNet, Gated DeltaNet, Comba, SWLA."""

from math import isclose, isfinite
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from memzoo.configuration.base import SIZES, MemoryConfig, refuse_fixed, require

LAYER_TYPES = ("linear_attention", "sliding_attention", "full_attention")
OUTPUT_GATES = ("silu", "sigmoid")
CAPACITY_AXES = ("key", "value", "head")


def require_output_gate(config: MemoryConfig) -> None:
    """Raise a ValueError unless the config's `output_gate` is one that the models have."""
    gate = getattr(config, "output_gate", None)
    require(gate is None or gate in OUTPUT_GATES, config, "output_gate", f"None or one of {OUTPUT_GATES}")


@strict
class MatrixMemoryConfig(MemoryConfig):
    """A language model whose memory is a matrix per head, alone or among layers of attention.

    Args:
        num_memory_heads: heads of the memories; `None` for `num_attention_heads`.
        expand_k: width of all heads' keys over `hidden_size`.
        expand_v: width of all heads' values over `hidden_size`.
        conv_width: width of the short causal convolution, with SiLU, on queries, keys and values; 1 leaves a factor
            per channel.
        output_gate: activation of the gate on the normalised read-outs, `"silu"` or `"sigmoid"`; `None` for no gate.
        capacity_axis: what the capacity blocks of Proteus are: `"key"` coordinates or `"value"` coordinates of each
            head, or whole `"head"`s.
        layer_types: for each block `"linear_attention"` (the memory), `"sliding_attention"` or `"full_attention"`;
            `None` for the memory everywhere (in Transformer++: full attention).
        sliding_window: window of the sliding attention, in tokens, the current one included.
        rope_parameters: rotary embedding of the attention (in RetNet: of the retention, too), as transformers takes it,
            one for all layers; `None` for base 10000.
    """

    num_memory_heads: int | None = None
    expand_k: float | int = 1.0
    expand_v: float | int = 1.0
    conv_width: int = 4
    output_gate: str | None = "silu"
    capacity_axis: str = "key"
    layer_types: list[str] | None = None
    sliding_window: int = 512
    rope_parameters: dict | None = None
    attention_dropout: float | int = 0.0
    max_position_embeddings: int = 1 << 20

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.validate_matrix_memory()

    _default_layer_type = "linear_attention"

    @property
    def mixer_types(self) -> list[str]:
        """The mixer of each block, by name."""
        return self.layer_types or [self._default_layer_type] * self.num_hidden_layers

    @property
    def memory_heads(self) -> int:
        """Heads of the memories."""
        return self.num_attention_heads if self.num_memory_heads is None else self.num_memory_heads

    @property
    def key_head_dim(self) -> int:
        """Width K of one head's keys."""
        return round(self.hidden_size * self.expand_k) // self.memory_heads

    @property
    def value_head_dim(self) -> int:
        """Width V of one head's values."""
        return round(self.hidden_size * self.expand_v) // self.memory_heads

    def validate_heads(self) -> None:
        """Part of the `@strict` validation: memories divide their own widths, attention may have a width of its own."""
        kinds = set(self.mixer_types)
        if kinds != {"linear_attention"}:
            super().validate_heads()
            width = self.head_dim or 0
            require(width >= 2 and width % 2 == 0, self, "head_dim", "an even head width, for rotary embeddings")
        heads = self.memory_heads
        require(heads >= 1, self, "num_memory_heads", "None, or at least 1")
        if "linear_attention" in kinds:
            for field in ("expand_k", "expand_v"):
                width = self.hidden_size * getattr(self, field)
                require(
                    isfinite(width) and width >= 1 and isclose(width, round(width)) and round(width) % heads == 0,
                    self,
                    field,
                    f"a factor that makes hidden_size={self.hidden_size} a multiple of {heads} heads",
                )

    def validate_matrix_memory(self) -> None:
        """Part of the `@strict` validation."""
        for field in ("conv_width", "sliding_window"):
            require(getattr(self, field) >= 1, self, field, "at least 1")
        require_output_gate(self)
        require(getattr(self, "unit_eps", 0.0) >= 0, self, "unit_eps", "at least 0")
        require(self.capacity_axis in CAPACITY_AXES, self, "capacity_axis", f"one of {CAPACITY_AXES}")
        units = {"key": self.key_head_dim, "value": self.value_head_dim, "head": self.memory_heads}
        limit = max(1, units[self.capacity_axis])
        has_memory = "linear_attention" in self.mixer_types
        require(self.capacity_blocks == 1 or has_memory, self, "capacity_blocks", "1: attention has no memory to open")
        require(self.capacity_blocks <= limit, self, "capacity_blocks", f"at most the {limit} units of its axis")
        require(
            len(self.mixer_types) == self.num_hidden_layers and all(kind in LAYER_TYPES for kind in self.mixer_types),
            self,
            "layer_types",
            f"None, or num_hidden_layers={self.num_hidden_layers} of {LAYER_TYPES}",
        )


@strict
class RetNetConfig(MatrixMemoryConfig):
    """RetNet (arXiv 2307.08621): linear attention with a fixed retention per head and rotary queries and keys.

    Source: section 2. Deviations: plain rotary embedding instead of xPos, whose decay the retention has already; an RMS
    norm per head as in later code; the feed-forward is the zoo's SwiGLU.
    """

    model_type = "memzoo_retnet"

    expand_v: float | int = 2.0
    conv_width: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        require(self.conv_width == 1, self, "conv_width", "1: RetNet has no convolution")
        require(self.key_head_dim % 2 == 0, self, "expand_k", "an even key width, for rotary embeddings")


@strict
class DeltaNetConfig(MatrixMemoryConfig):
    """DeltaNet (arXiv 2406.06484): the delta rule without decay.

    Args:
        allow_negative_eigenvalues: strengths up to 2 instead of 1 (arXiv 2411.12537).
        unit_eps: epsilon of the unit queries and keys, `x / sqrt(|x|^2 + unit_eps)`: 1e-6 in flash-linear-attention;
            0 for `x / max(|x|, 1e-6)`.
    """

    model_type = "memzoo_deltanet"

    output_gate: str | None = None
    allow_negative_eigenvalues: bool = False
    unit_eps: float | int = 0.0


@strict
class GatedDeltaNetConfig(MatrixMemoryConfig):
    """Gated DeltaNet (arXiv 2412.06464): the delta rule on a decayed memory.

    Args:
        allow_negative_eigenvalues: strengths up to 2 instead of 1.
        unit_eps: see `DeltaNetConfig`.
    """

    model_type = "memzoo_gated_deltanet"

    expand_k: float | int = 0.75
    expand_v: float | int = 1.5
    allow_negative_eigenvalues: bool = False
    unit_eps: float | int = 0.0


@strict
class CombaConfig(MatrixMemoryConfig):
    """Comba (arXiv 2506.02475): the delta rule with a weaker erase on the undecayed memory, and a corrected query.

    Args:
        variant: `"paper"`: unit queries and keys, erase key `p = b k`, read at `q - d k` (Eq 5). `"fla"`: as in
            flash-linear-attention, which normalises afterwards: unit vectors along `k`, `b k` (the erase key) and
            `q - d b k` of the unnormalised q and k.
        correction: initial d of every head: 0.02 in the authors' small models, 1 in their 1.3B model.
        unit_eps: see `DeltaNetConfig`.
    """

    model_type = "memzoo_comba"

    expand_k: float | int = 0.75
    expand_v: float | int = 1.5
    variant: str = "paper"
    correction: float | int = 0.02
    unit_eps: float | int = 0.0

    allow_negative_eigenvalues: ClassVar[bool] = False

    _sizes = {**SIZES, "1.3b": {**SIZES["1.3b"], "correction": 1.0}}

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_fixed(self, kwargs, ("allow_negative_eigenvalues",))
        super().__post_init__(**kwargs)
        require(self.variant in ("paper", "fla"), self, "variant", "'paper' or 'fla'")


@strict
class SWLAConfig(MatrixMemoryConfig):
    """Sliding-window linear attention (arXiv 2505.23735, Eq 20): each token writes the last c tokens anew.

    Args:
        window: c, the tokens that each step writes; 2 in the published models.
    """

    model_type = "memzoo_swla"

    window: int = 2

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        require(self.window >= 1, self, "window", "at least 1")


@strict
class TransformerPlusPlusConfig(MatrixMemoryConfig):
    """Transformer++: the same blocks with softmax attention (Llama's), for comparisons on one skeleton."""

    model_type = "memzoo_transformer_pp"
    _default_layer_type = "full_attention"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        require("linear_attention" not in self.mixer_types, self, "layer_types", "attention only")
