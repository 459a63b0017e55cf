"""The fields that every model of the zoo has."""

from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typing_extensions import Self

# ATLAS (arXiv 2505.23735), Table 7: the sizes of the comparisons in its and later papers of this family.
SIZES: dict[str, dict[str, Any]] = {
    size: {"num_hidden_layers": blocks, "hidden_size": width, "num_attention_heads": heads}
    for size, (blocks, width, heads) in {
        "170m": (12, 768, 16),
        "340m": (24, 1024, 16),
        "760m": (24, 1536, 16),
        "1.3b": (18, 2048, 8),
    }.items()
}

SHIM = "modeling_memzoo"
"""The module of a repository on the Hub that leads to this package; see `memzoo.conversion.hub`."""


def require(ok: bool, config: Any, field: str, expected: str) -> None:
    """Raise a ValueError that names the field, its value and what it should be, unless `ok`."""
    if not ok:
        raise ValueError(f"{type(config).__name__}: {field}={getattr(config, field)!r}: expected {expected}.")


def refuse_fixed(config: Any, given: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise a ValueError where `given`, which no field took, sets what the architecture fixes."""
    for name in given.keys() & set(names):
        value = given.pop(name)
        if value != getattr(config, name):
            raise ValueError(
                f"{type(config).__name__}: {name}={value!r}: expected {getattr(config, name)!r}, which makes the "
                "architecture what it is."
            )


@strict
class MemoryConfig(PreTrainedConfig):
    """What every test-time-memory language model is made of.

    Args:
        vocab_size: number of tokens.
        hidden_size: model width D.
        intermediate_size: width of the SwiGLU feed-forward; `None` for 8/3 D rounded up to a multiple of 64.
        num_hidden_layers: number of blocks.
        num_attention_heads: heads H of memories and attention; divides D.
        num_key_value_heads: heads of the attention's keys and values, each shared by as many of its queries; `None` for
            as many as there are.
        attention_bias: whether the attention's queries, keys and values have biases.
        qk_norm: whether an RMS norm per head scales the attention's queries and keys before they are rotated.
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
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    mlp_bias: bool = False
    rms_norm_eps: float | int = 1e-6
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    kernel_backend: str = "auto"
    capacity_blocks: int = 1
    capacity_context: int = 8192

    _sizes: ClassVar[dict[str, dict[str, Any]]] = SIZES

    @classmethod
    def preset(cls, size: str, **overrides: Any) -> Self:
        """A published size, `"170m"`, `"340m"`, `"760m"` or `"1.3b"`, with any field overridden."""
        if size not in cls._sizes:
            raise ValueError(f"{cls.__name__}.preset: unknown size {size!r}; expected one of {sorted(cls._sizes)}.")
        return cls(**{**cls._sizes[size], **overrides})

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // (3 * 64)) * 64
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % self.num_attention_heads == 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if getattr(self, "rope_parameters", None):
            self.rope_parameters = dict(self.rope_parameters)  # transformers completes it in place
        super().__post_init__(**kwargs)
        self.validate_sizes()  # here for a plain ValueError: `@strict` wraps what its own validation raises

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers; a config whose `auto_map` leads to this package takes the module that does so with it."""
        auto_map = (getattr(self, "auto_map", None) or {}).values()
        # A tokenizer's entry is a pair, of which either may be missing.
        references = [x for entry in auto_map for x in (entry if isinstance(entry, (list, tuple)) else [entry]) if x]
        split = [reference.rpartition(".") for reference in references]
        names = sorted({name for module, _, name in split if module == SHIM})
        if names:
            shim = Path(save_directory) / f"{SHIM}.py"
            shim.parent.mkdir(parents=True, exist_ok=True)
            beside = shim.with_suffix(".tmp")
            beside.write_text(f"from memzoo import {', '.join(names)}\n")
            beside.replace(shim)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing. Loading with `trust_remote_code` calls it, after which transformers would save a copy of one
        module of this package, and an `auto_map` that names it, with every config of this class."""

    def validate_sizes(self) -> None:
        """Part of the `@strict` validation: sizes are positive and heads divide the width."""
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
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
        self.validate_heads()
        self.validate_rope()
        require(
            self.num_key_value_heads is not None and self.num_attention_heads % self.num_key_value_heads == 0,
            self,
            "num_key_value_heads",
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )

    def validate_rope(self) -> None:
        """Part of the `@strict` validation: one rotary embedding for all layers, of whole heads."""
        rope = getattr(self, "rope_parameters", None) or {}
        one = not any(isinstance(value, dict) for value in rope.values())
        require(one, self, "rope_parameters", "one rotary embedding for all layers")
        # The angles of `dynamic` and `longrope` depend on the longest text of the batch, not on the position alone.
        known = sorted({"default", *ROPE_INIT_FUNCTIONS} - {"dynamic", "longrope"})
        require(rope.get("rope_type", "default") in known, self, "rope_parameters", f"a rope_type of {known}")
        whole = rope.get("partial_rotary_factor", 1.0) == 1.0
        require(whole, self, "rope_parameters", "partial_rotary_factor 1: whole heads are rotated")

    def validate_heads(self) -> None:
        """Part of the `@strict` validation: heads have a width."""
        require(
            self.head_dim is not None,
            self,
            "num_attention_heads",
            f"a divisor of hidden_size={self.hidden_size}, or a head_dim",
        )
        require((self.head_dim or 0) >= 1, self, "head_dim", "at least 1")
