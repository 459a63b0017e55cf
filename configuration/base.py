"""The fields that every model of the zoo has."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


def require(ok: bool, config: Any, field: str, expected: str) -> None:
    """Raise a ValueError that names the field, its value and what it should be, unless `ok`."""
    if not ok:
        raise ValueError(f"{type(config).__name__}: {field}={getattr(config, field)!r}: expected {expected}.")


@strict
class MemoryConfig(PreTrainedConfig):
    """What every test-time-memory language model is made of.

    Args:
        vocab_size: number of tokens.
        hidden_size: model width D.
        intermediate_size: width of the SwiGLU feed-forward; `None` for 8/3 D rounded up to a multiple of 64.
        num_hidden_layers: number of blocks.
        num_attention_heads: heads H of memories and attention; divides D.
        hidden_act: activation of the feed-forward.
        mlp_bias: whether its linear layers have biases.
        rms_norm_eps: epsilon of the RMS norms.
        initializer_range: standard deviation of the linear and embedding weights at initialisation.
        tie_word_embeddings: whether the output head shares the embedding's weight.
        use_cache: whether the forward returns its recurrent cache outside training.
        kernel_backend: `"auto"`, or the name of the implementation that must run (`"chunked"`, `"reference"`, ...).
        capacity_blocks: blocks E of the Proteus schedule; 1 means no schedule.
        capacity_context: context length N of the schedule: block e opens after `(e - 1) max(1, N // E)` tokens.
    """

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    hidden_act: str = "silu"
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    kernel_backend: str = "auto"
    capacity_blocks: int = 1
    capacity_context: int = 8192

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // (3 * 64)) * 64
        super().__post_init__(**kwargs)
        self.validate_sizes()  # here for a plain ValueError: `@strict` wraps what its own validation raises

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    def validate_sizes(self) -> None:
        """Part of the `@strict` validation: sizes are positive and heads divide the width."""
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "capacity_blocks",
            "capacity_context",
        ):
            require(getattr(self, field) >= 1, self, field, "at least 1")
        require(
            self.pad_token_id is None or 0 <= self.pad_token_id < self.vocab_size,
            self,
            "pad_token_id",
            f"None, or an id below vocab_size={self.vocab_size}",
        )
        require(
            self.hidden_size % self.num_attention_heads == 0,
            self,
            "num_attention_heads",
            f"a divisor of hidden_size={self.hidden_size}",
        )
