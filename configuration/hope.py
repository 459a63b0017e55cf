"""Chains of feed-forward blocks that learn at different speeds (Nested Learning, arXiv 2512.24695): Hope-Attention."""

from itertools import pairwise
from typing import Any

from huggingface_hub.dataclasses import strict

from memzoo.configuration.base import MemoryConfig, require
from memzoo.configuration.matrix_memory import TransformerPlusPlusConfig

CHAINS = ("sequential", "independent")


@strict
class ChainConfig(MemoryConfig):
    """A language model whose feed-forward is a chain of blocks, one per level, each with its own update period.

    Source: Nested Learning (arXiv 2512.24695), section 7, Eq 70-74. Deviations: each level is a pre-norm residual
    SwiGLU, where the paper writes bare MLPs; the levels share `intermediate_size`, so that a chain has the parameters
    of one feed-forward. The order of the chain is that of the lists (the text and the figures of the paper disagree);
    by default the slowest level comes first.

    Args:
        chain_periods: C of each level in the order of the chain: optimizer steps between two updates of its weights;
            `None` for `[4, 2, 1]`.
        chain_sizes: hidden width of each level; `None` to share `intermediate_size` evenly, in multiples of 64 where it
            is one.
        chain: `"sequential"`: each level reads the one before it (Eq 70, 73); `"independent"`: all read the same
            input and their outputs are added up with learned weights (Eq 74).
    """

    chain_periods: list[int] | None = None
    chain_sizes: list[int] | None = None
    chain: str = "sequential"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.validate_chain()

    @property
    def level_periods(self) -> list[int]:
        """C of each level."""
        return [4, 2, 1] if self.chain_periods is None else self.chain_periods

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
        periods = self.level_periods
        require(len(periods) >= 1 and min(periods) >= 1, self, "chain_periods", "None, or periods of at least 1")
        sizes = self.level_sizes
        require(
            len(sizes) == len(periods) and min(sizes) >= 1,
            self,
            "chain_sizes",
            f"None, or {len(periods)} widths of at least 1, one for each of chain_periods",
        )
        require(self.chain in CHAINS, self, "chain", f"one of {CHAINS}")


@strict
class HopeAttentionConfig(ChainConfig, TransformerPlusPlusConfig):
    """Hope-Attention (arXiv 2512.24695, section 8.3): softmax attention followed by a chain of levels.

    With `chain_periods=[1]` it is Transformer++. Attention's options are those of `TransformerPlusPlusConfig`.

    Example:
        >>> config = HopeAttentionConfig.preset("170m", chain_periods=[8, 1])
    """

    model_type = "memzoo_hope_attention"
