"""Titans (arXiv 2501.00663), and Titans-Proteus (arXiv 2608.16844) by its capacity schedule."""

from typing import Any

from huggingface_hub.dataclasses import strict

from memzoo.configuration.base import MemoryConfig, require

VARIANTS = ("lmm", "mac", "mag", "mal")
MEMORY_ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "tanh")


@strict
class TitansConfig(MemoryConfig):
    """A language model with a deep memory that learns while it reads.

    Source: Titans (arXiv 2501.00663), sections 3 and 4. Deviations: where the paper is silent (chunk size, segment,
    window, number of persistent tokens, gates, initial memory) the defaults are ours; see the arguments.

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
            to `chunk_size` steps taken at one point.
        max_gradient_norm: bound of one token's inner gradient, `None` for none. Not in the paper: far above the norms
            of a healthy memory, it keeps one that a bad step has thrown off from growing without limit.
        chunk_size: tokens whose gradients share an anchor. Part of the model: weights trained with one size are not
            meant for another.
        num_persistent_tokens: learned tokens in front of every sequence, per layer.
        sliding_window: window of the attention in `mag` and `mal`, in tokens, the current one included.
        segment_size: segment of `mac`; a multiple of `chunk_size`.
        conv_width: width of the short causal convolution after the projections; 1 for none.
        rope_parameters: rotary embedding of the attention branches, of any type that transformers has; `None` for
            base 10000.

    Example:
        >>> config = TitansConfig(variant="mag", hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
        >>> proteus = TitansConfig.preset("170m", capacity_blocks=16)
    """

    model_type = "memzoo_titans"

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
    sliding_window: int = 512
    segment_size: int = 256
    conv_width: int = 4
    rope_parameters: dict | None = None
    attention_dropout: float = 0.0
    max_position_embeddings: int = 1 << 20

    def __post_init__(self, **kwargs: Any) -> None:
        if self.memory_residual is None:
            self.memory_residual = self.memory_depth > 1
        if self.max_step_size is None:
            self.max_step_size = min(1.0, 4.0 / max(1, self.chunk_size))
        super().__post_init__(**kwargs)
        self.validate_titans()

    def validate_titans(self) -> None:
        """Part of the `@strict` validation."""
        require(self.variant in VARIANTS, self, "variant", f"one of {VARIANTS}")
        require(1 <= self.memory_depth <= 4, self, "memory_depth", "1 to 4")
        require(self.memory_activation in MEMORY_ACTIVATIONS, self, "memory_activation", f"one of {MEMORY_ACTIVATIONS}")
        for field in ("memory_expansion", "chunk_size", "sliding_window", "segment_size", "conv_width"):
            require(getattr(self, field) >= 1, self, field, "at least 1")
        require(self.num_persistent_tokens >= 0, self, "num_persistent_tokens", "at least 0")
        require(self.max_step_size is not None and self.max_step_size > 0, self, "max_step_size", "above 0")
        require(
            self.max_gradient_norm is None or self.max_gradient_norm > 0, self, "max_gradient_norm", "above 0, or None"
        )
        if self.variant == "mac":
            require(
                self.segment_size % self.chunk_size == 0,
                self,
                "segment_size",
                f"a multiple of chunk_size={self.chunk_size}",
            )
        if self.variant != "lmm":
            require(self.head_dim % 2 == 0, self, "num_attention_heads", "an even head width, for rotary embeddings")
        units = self.head_dim if self.memory_depth == 1 else self.head_dim * self.memory_expansion
        require(self.capacity_blocks <= units, self, "capacity_blocks", f"at most the memory's {units} units")
