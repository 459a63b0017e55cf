"""Chains of feed-forward blocks that learn at different speeds (Nested Learning, arXiv 2512.24695): Hope-Attention."""

from itertools import pairwise
from typing import Any

from huggingface_hub.dataclasses import strict

from memzoo.configuration.base import MemoryConfig, require
from memzoo.configuration.deep_memory import MEMORY_ACTIVATIONS
from memzoo.configuration.matrix_memory import TransformerPlusPlusConfig

CHAINS = ("sequential", "nested", "independent")
LEARNING = ("stream", "in_context")


@strict
class ChainConfig(MemoryConfig):
    """A language model whose feed-forward is a chain of blocks, one per level, each with its own update period.

    Source: Nested Learning (arXiv 2512.24695), section 7, Eq 70-74. Deviations: each level is a pre-norm residual
    SwiGLU, where the paper writes bare MLPs; the levels share `intermediate_size`, so that a chain has the parameters
    of one feed-forward. The order of the chain is that of the lists (the text and the figures of the paper disagree);
    by default the slowest level comes first.

    Args:
        chain_learning: `"stream"`: the levels are ordinary weights that an optimizer updates every C steps (see
            `ProteusAdamW`), and nothing changes at inference. `"in_context"`: each sequence has levels of its own. They
            start at the model's weights and learn from the sequence's next-token errors every C tokens (Eq 71), in
            training and inference alike.
        chain_periods: C of each level in the order of the chain, in optimizer steps or in tokens; `None` for
            `[4, 2, 1]` steps or `[2048, 512]` tokens. In context each is a multiple of the smallest.
        chain_sizes: hidden width of each level; `None` to share `intermediate_size` evenly, in multiples of 64 where it
            is one.
        chain: `"sequential"`: each level reads the one before it (Eq 70, 73); `"nested"`: the same, and in context a
            level starts anew whenever the next slower one is updated, from a start that is updated then (Eq 72);
            `"independent"`: all read the same input and their outputs are added up with learned weights (Eq 74).
        chain_step_size: step size on the sum of a period's gradients, in context; 0 for the static model.
        chain_second_order: whether training in context differentiates through the updates, too; costs a graph of the
            whole sequence, and attention that can be differentiated twice: `"eager"`, or `"sdpa"` under
            `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.
    """

    chain_learning: str = "stream"
    chain_periods: list[int] | None = None
    chain_sizes: list[int] | None = None
    chain: str = "sequential"
    chain_step_size: float | int = 1e-3
    chain_second_order: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.validate_chain()

    @property
    def level_periods(self) -> list[int]:
        """C of each level."""
        if self.chain_periods is not None:
            return self.chain_periods
        return [4, 2, 1] if self.chain_learning == "stream" else [2048, 512]

    @property
    def level_sizes(self) -> list[int]:
        """Hidden width of each level."""
        if self.chain_sizes is not None:
            return self.chain_sizes
        assert self.intermediate_size is not None
        levels = len(self.level_periods)
        unit = 64 if self.intermediate_size % 64 == 0 and self.intermediate_size >= 64 * levels else 1
        bounds = [self.intermediate_size // unit * at // levels for at in range(levels + 1)]
        return [(high - low) * unit for low, high in pairwise(bounds)]

    def validate_chain(self) -> None:
        """Part of the `@strict` validation."""
        require(self.chain_learning in LEARNING, self, "chain_learning", f"one of {LEARNING}")
        require(self.chain in CHAINS, self, "chain", f"one of {CHAINS}")
        periods, in_context = self.level_periods, self.chain_learning == "in_context"
        require(len(periods) >= 1 and min(periods) >= 1, self, "chain_periods", "None, or periods of at least 1")
        sizes = self.level_sizes
        require(
            len(sizes) == len(periods) and min(sizes) >= 1,
            self,
            "chain_sizes",
            f"None, or {len(periods)} widths of at least 1, one for each of chain_periods",
        )
        require(
            not in_context or all(period % min(periods) == 0 for period in periods),
            self,
            "chain_periods",
            "multiples of the smallest, in context",
        )
        require(
            self.chain != "nested" or in_context,
            self,
            "chain",
            "'nested' in context alone: no level starts anew elsewhere",
        )
        require(self.chain_step_size >= 0, self, "chain_step_size", "at least 0")


@strict
class HopeAttentionConfig(ChainConfig, TransformerPlusPlusConfig):
    """Hope-Attention (arXiv 2512.24695, section 8.3): softmax attention followed by a chain of levels.

    With `chain_periods=[1]` it is Transformer++. Attention's options are those of `TransformerPlusPlusConfig`.

    Example:
        >>> config = HopeAttentionConfig.preset("170m", chain_periods=[8, 1])
    """

    model_type = "memzoo_hope_attention"


@strict
class HopeConfig(ChainConfig):
    """Hope (arXiv 2512.24695, section 8): self-modifying memories followed by a chain of levels that learn in context.

    Source: Eq 83-97. Deviations: see `memzoo.modeling.mixers.self_modifying`; where the paper is silent (chunk sizes,
    widths, step sizes) the defaults are ours. Hope with attention in the place of the memories is Hope-Attention.

    Args:
        adaptive_query: whether queries come from a memory, too (Eq 83 lists it; Eq 86 and the ablation leave it out).
        memory_expansion: hidden width of each memory over the head width.
        memory_activation: activation between a memory's layers.
        chunk_size: tokens between two boundaries of the memory that is read; part of the model.
        self_chunk_size: the same for the memories that make keys, values and gates; a multiple of `chunk_size`.
        conv_width: width of the short causal convolution on what the memories read; 1 for none.
        max_step_size: upper end of the step size; `None` for `min(1, 4 / self_chunk_size)`, since up to so many steps
            are taken at one point.
        max_gradient_norm: bound of one token's gradient of one memory, `None` for none. Not in the paper: memories that
            make their own targets could grow without limit.
    """

    model_type = "memzoo_hope"

    chain_learning: str = "in_context"
    adaptive_query: bool = False
    memory_expansion: int = 4
    memory_activation: str = "gelu"
    chunk_size: int = 16
    self_chunk_size: int = 64
    conv_width: int = 4
    max_step_size: float | int | None = None
    max_gradient_norm: float | int | None = 10.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.validate_hope()

    @property
    def step_limit(self) -> float:
        """Upper end of the step size."""
        return min(1.0, 4.0 / self.self_chunk_size) if self.max_step_size is None else self.max_step_size

    def validate_hope(self) -> None:
        """Part of the `@strict` validation."""
        for field in ("memory_expansion", "chunk_size", "self_chunk_size", "conv_width"):
            require(getattr(self, field) >= 1, self, field, "at least 1")
        require(self.memory_activation in MEMORY_ACTIVATIONS, self, "memory_activation", f"one of {MEMORY_ACTIVATIONS}")
        require(
            self.self_chunk_size % self.chunk_size == 0,
            self,
            "self_chunk_size",
            f"a multiple of chunk_size={self.chunk_size}",
        )
        require(
            self.max_step_size is None or 0 < self.max_step_size <= 1, self, "max_step_size", "above 0 to 1, or None"
        )
        require(
            self.max_gradient_norm is None or self.max_gradient_norm > 0, self, "max_gradient_norm", "above 0, or None"
        )
        require(self.capacity_blocks == 1, self, "capacity_blocks", "1: these memories have no capacity schedule")
