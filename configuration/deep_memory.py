"""What the models with a deep memory per head have in common: Titans, OmegaNet, ATLAS, DLA."""

from typing import Any

from huggingface_hub.dataclasses import strict

from memzoo.configuration.base import MemoryConfig, refuse_fixed, require
from memzoo.configuration.matrix_memory import require_output_gate

ATTENTION_TYPES = ("sliding_attention", "full_attention")
VARIANTS = ("lmm", "mac", "mag", "mal")
MEMORIES = ("mlp", "gated_mlp")
MEMORY_ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "tanh")
FEATURE_MAPS = ("identity", "monomials", "powers")
MUON_EVERY = ("token", "chunk")
# What tells the rules apart: a field of an architecture that lets one choose, a fixed value of any other.
RULE = ("memory", "objective", "window", "window_halo", "use_muon", "feature_map", "feature_degree", "feature_dim")


@strict
class DeepMemoryConfig(MemoryConfig):
    """A language model with a deep memory that learns while it reads.

    Args:
        variant: `"lmm"` the memory alone; `"mac"` memory as context of segment attention; `"mag"` memory beside
            sliding-window attention, joined by a gate; `"mal"` memory as a layer before sliding-window attention.
        memory_depth: layers of the memory network, 1 to 4; 1 is a matrix.
        memory_expansion: hidden width of the memory over the head width.
        memory_activation: activation between the memory's layers.
        memory_residual: whether the memory adds its input; `None`: from depth 2 on.
        use_momentum: momentum of the inner optimizer.
        use_retention: whether the memory decays.
        max_step_size: upper end of the inner step size; `None` for `min(1, 4 / chunk_size)`, since a chunk applies up
            to `chunk_size` steps taken at one point; smaller with Muon, see `AtlasConfig`.
        max_gradient_norm: bound of one token's inner gradient, `None` for none. Not in the papers: far above the norms
            of a healthy memory, it keeps one that a bad step has thrown off from growing without limit.
        chunk_size: tokens whose gradients share an anchor. Part of the model: weights trained with one size are not
            meant for another.
        num_persistent_tokens: learned tokens in front of every sequence, per layer.
        memory_skip: whether `mag` and `mal` are the attention alone where the memory adds nothing: in `mag` the gate
            is twice a sigmoid and the attention is not normalised, in `mal` the memory adds to what the attention
            reads. Not in the papers: with it a pretrained transformer is a model of ours (`memzoo.conversion.upcycle`).
        layer_types: for each block's attention in `mag` and `mal` `"sliding_attention"` or `"full_attention"`, which
            keeps every key; `None` for the papers' sliding window everywhere.
        sliding_window: window of the sliding attention, in tokens, the current one included.
        segment_size: segment of `mac`; a multiple of `chunk_size`.
        output_gate: activation of the gate on the normalised read-outs of `lmm` and `mal`, `"silu"` or `"sigmoid"`;
            `None` for no gate. The papers name none. A sigmoid starts half open, SiLU near zero.
        conv_width: width of the short causal convolution after the projections; 1 for none.
        rope_parameters: rotary embedding of the attention branches, as transformers takes it; `None` for base 10000.
    """

    variant: str = "lmm"
    memory_depth: int = 2
    memory_expansion: int = 4
    memory_activation: str = "gelu"
    memory_residual: bool | None = None
    use_momentum: bool = True
    use_retention: bool = True
    max_step_size: float | int | None = None
    max_gradient_norm: float | int | None = 10.0
    chunk_size: int = 64
    num_persistent_tokens: int = 4
    memory_skip: bool = False
    layer_types: list[str] | None = None
    sliding_window: int = 512
    segment_size: int = 256
    output_gate: str | None = "silu"
    conv_width: int = 4
    rope_parameters: dict | None = None
    attention_dropout: float | int = 0.0
    max_position_embeddings: int = 1 << 20

    # The rule of Titans, without annotations: no fields here, but an architecture may open them.
    memory = "mlp"
    objective = "l2"
    window = 1
    window_halo = True
    use_muon = False
    feature_map = "identity"
    feature_degree = 1
    feature_dim = None  # type: int | None

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_fixed(self, kwargs, RULE)
        if self.memory_residual is None:
            self.memory_residual = self.memory_depth > 1
        super().__post_init__(**kwargs)
        self.validate_deep_memory()

    @property
    def attention_types(self) -> list[str]:
        """The attention of each block, by name."""
        return self.layer_types or ["sliding_attention"] * self.num_hidden_layers

    @property
    def step_limit(self) -> float:
        """Upper end of the inner step size; not stored, so that it follows a `chunk_size` changed at loading."""
        if self.max_step_size is not None:
            return self.max_step_size
        return min(1.0, 4.0 / self.chunk_size)

    def validate_deep_memory(self) -> None:
        """Part of the `@strict` validation."""
        head_dim = self.head_dim or 0
        require(self.variant in VARIANTS, self, "variant", f"one of {VARIANTS}")
        require(1 <= self.memory_depth <= 4, self, "memory_depth", "1 to 4")
        require(self.memory_activation in MEMORY_ACTIVATIONS, self, "memory_activation", f"one of {MEMORY_ACTIVATIONS}")
        require(self.memory in MEMORIES, self, "memory", f"one of {MEMORIES}")
        require(self.memory == "mlp" or self.memory_depth == 2, self, "memory_depth", "2, the layers of a gated memory")
        for field in ("memory_expansion", "chunk_size", "sliding_window", "segment_size", "conv_width", "window"):
            require(getattr(self, field) >= 1, self, field, "at least 1")
        require_output_gate(self)
        require(self.num_persistent_tokens >= 0, self, "num_persistent_tokens", "at least 0")
        require(self.max_step_size is None or self.max_step_size > 0, self, "max_step_size", "above 0, or None")
        require(
            self.max_gradient_norm is None or self.max_gradient_norm > 0, self, "max_gradient_norm", "above 0, or None"
        )
        require(self.feature_map in FEATURE_MAPS, self, "feature_map", f"one of {FEATURE_MAPS}")
        require(self.feature_degree >= 1, self, "feature_degree", "at least 1")
        require(
            self.feature_map != "monomials" or self.feature_dim is None or 1 <= self.feature_dim <= head_dim,
            self,
            "feature_dim",
            f"None, or 1 to the head width {head_dim}",
        )
        require(not self.use_muon or self.use_momentum, self, "use_momentum", "True, which Muon makes orthogonal")
        branched = self.variant in ("mag", "mal")
        require(branched or not self.memory_skip, self, "memory_skip", "False but in 'mag' and 'mal'")
        require(branched or self.layer_types is None, self, "layer_types", "None but in 'mag' and 'mal'")
        require(
            len(self.attention_types) == self.num_hidden_layers and set(self.attention_types) <= set(ATTENTION_TYPES),
            self,
            "layer_types",
            f"None, or num_hidden_layers={self.num_hidden_layers} of {ATTENTION_TYPES}",
        )
        if self.variant == "mac":  # whose memory reads what its attention made
            expected = self.hidden_size / self.num_attention_heads
            require(
                head_dim == expected, self, "head_dim", f"hidden_size / num_attention_heads = {expected:g} in 'mac'"
            )
            require(
                self.segment_size % self.chunk_size == 0,
                self,
                "segment_size",
                f"a multiple of chunk_size={self.chunk_size}",
            )
        if self.variant != "lmm":
            require(head_dim % 2 == 0, self, "head_dim", "an even head width, for rotary embeddings")
        units = head_dim if self.memory_depth == 1 else head_dim * self.memory_expansion
        require(self.capacity_blocks <= units, self, "capacity_blocks", f"at most the memory's {units} units")
