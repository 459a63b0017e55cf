"""The attention-like memories of ATLAS (arXiv 2505.23735): DeepTransformer, SWDT and Dot."""

from typing import Any

from huggingface_hub.dataclasses import strict

from memzoo.configuration.base import refuse_fixed, require
from memzoo.configuration.matrix_memory import MatrixMemoryConfig

# What tells the members apart: a field of one that lets one choose, a fixed value of any other.
RULE = ("objective", "window", "normalizer")


@strict
class ExponentialMemoryConfig(MatrixMemoryConfig):
    """A language model with a linear memory on exponential features, kept by all keys and what is written at them.

    Deviations: only the linear memory, for which the kernel `exp(s (q . k - 1))` of unit vectors takes the place of the
    infinite features; how the paper evaluates a deep memory on them is not published. The capacity of such a memory has
    no key coordinates, so the blocks of Proteus are value coordinates or heads.

    Args:
        feature_scale: s; `None` for the root of the key width, as softmax attention has it for keys of that length.
        use_retention: whether what is written decays.
    """

    capacity_axis: str = "value"
    feature_scale: float | int | None = None
    use_retention: bool = True

    # The rule of the simplest member, without annotations: no fields here, but another may open them.
    objective = "dot"
    window = 1
    normalizer = False

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_fixed(self, kwargs, RULE)
        super().__post_init__(**kwargs)
        require(self.window >= 1, self, "window", "at least 1")
        require(self.capacity_axis != "key", self, "capacity_axis", "'value' or 'head': these keys have no coordinates")
        fits = self.feature_scale is None or 0 < self.feature_scale <= 40  # exp(-2 * 40) is a float32
        require(fits, self, "feature_scale", "above 0 and at most 40, or None")


@strict
class DeepTransformerConfig(ExponentialMemoryConfig):
    """DeepTransformer (arXiv 2505.23735, Eq 25-26) with its linear memory: attention that decays.

        y_t = sum_{i<=t} (prod_{i<n<=t} a_n) l_i exp(s q_t . k_i) v_i

    Args:
        normalizer: whether the same sum without the values divides it, which makes it softmax attention.
    """

    model_type = "memzoo_deep_transformer"

    normalizer: bool = True


@strict
class SWDTConfig(ExponentialMemoryConfig):
    """Sliding-window DeepTransformer (arXiv 2505.23735, Table 1), its linear memory: a step writes the last c tokens.

    Args:
        window: c; not published.
        normalizer: whether the same sum without the values divides the read-out.
    """

    model_type = "memzoo_swdt"

    window: int = 4
    normalizer: bool = True


@strict
class DotConfig(ExponentialMemoryConfig):
    """Dot (arXiv 2505.23735, Eq 27-31) with its linear memory: unnormalised attention with the delta rule.

        M_t = a_t M_{t-1} - l_t sum_{j<c} g_{t,j} (M_{t-1} phi(k_{t-j}) - v_{t-j}) phi(k_{t-j})^T

    Args:
        window: c, the tokens that each step learns; c = 1 is the delta rule.
    """

    model_type = "memzoo_dot"
    objective = "l2"

    window: int = 4
