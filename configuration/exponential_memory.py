"""The attention-like memories of ATLAS (arXiv 2505.23735): DeepTransformer, SWDT and Dot."""

from typing import Any

from huggingface_hub.dataclasses import strict

from memzoo.configuration.base import refuse_fixed, require
from memzoo.configuration.deep_memory import VARIANTS
from memzoo.configuration.matrix_memory import MatrixMemoryConfig

# What tells the members apart: a field of one that lets one choose, a fixed value of any other.
RULE = ("objective", "window", "normalizer")


@strict
class ExponentialMemoryConfig(MatrixMemoryConfig):
    """A language model with a linear memory on exponential features, kept by all keys and what is written at them.

    The kernel `exp(s (q . k - 1))` of unit vectors takes the place of the infinite features. Deviations: how the paper
    evaluates a deep memory on them is not published, so that `memory="mlp"` is experimental: it works token by token,
    without a normaliser or capacity blocks. The capacity of a linear memory has no key coordinates, so the blocks of
    Proteus are value coordinates or heads.

    Args:
        variant: how the memory stands among attention, as in `DeepMemoryConfig`. All but `"lmm"` need the memory's
            values and the attention to be as wide as the model; `"mac"` keeps the memory of the segment's start too.
        num_persistent_tokens: learned tokens in front of every sequence, per layer.
        segment_size: segment of `mac`.
        memory: `"linear"`, or `"mlp"`: `M(x) = x + W_1 gelu(W_2 phi(x))`; see `memzoo.kernels.deep_exponential_memory`.
        memory_expansion: hidden width of a deep memory over the key width.
        max_step_size: upper end of the step size of a deep memory; that of a linear one is 1.
        max_gradient_norm: bound of one token's inner gradient in a deep memory. Its layers feed each other, and what a
            dot product writes has no minimum.
        feature_scale: s; `None` for the root of the key width, as softmax attention has it for keys of that length.
        use_retention: whether what is written decays.
    """

    variant: str = "lmm"
    num_persistent_tokens: int = 0
    segment_size: int = 256
    capacity_axis: str = "value"
    memory: str = "linear"
    memory_expansion: int = 4
    max_step_size: float | int = 0.1
    max_gradient_norm: float | int = 1.0
    feature_scale: float | int | None = None
    use_retention: bool = True

    # The rule of the simplest member, without annotations: no fields here, but another may open them.
    objective = "dot"
    window = 1
    normalizer = False
    memory_skip = False

    @property
    def attention_types(self) -> list[str]:
        """The attention beside the memory in each block of a wiring."""
        return ["sliding_attention"] * self.num_hidden_layers

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_fixed(self, kwargs, RULE)
        super().__post_init__(**kwargs)
        self.validate_exponential_memory()

    def validate_exponential_memory(self) -> None:
        """Part of the `@strict` validation."""
        require(self.variant in VARIANTS, self, "variant", f"one of {VARIANTS}")
        require(self.num_persistent_tokens >= 0, self, "num_persistent_tokens", "at least 0")
        for field in ("segment_size", "window"):
            require(getattr(self, field) >= 1, self, field, "at least 1")
        require(self.capacity_axis != "key", self, "capacity_axis", "'value' or 'head': these keys have no coordinates")
        fits = self.feature_scale is None or 0 < self.feature_scale <= 40  # exp(-2 * 40) is a float32
        require(fits, self, "feature_scale", "above 0 and at most 40, or None")
        require(self.memory in ("linear", "mlp"), self, "memory", "'linear' or 'mlp'")
        if self.memory == "mlp":
            require(not self.normalizer, self, "normalizer", "False: a deep memory has none")
            require(self.capacity_blocks == 1, self, "capacity_blocks", "1 with a deep memory")
            narrow = self.value_head_dim <= self.key_head_dim
            require(narrow, self, "expand_v", "values no wider than the keys, which a deep memory adds")
            for field in ("memory_expansion", "max_step_size", "max_gradient_norm"):
                require(getattr(self, field) > 0, self, field, "above 0")
        if self.variant != "lmm":
            wide = self.value_head_dim * self.memory_heads == self.hidden_size
            require(wide, self, "expand_v", f"what makes the values as wide as hidden_size={self.hidden_size}")
            head_dim = self.head_dim or 0
            fits = head_dim * self.num_attention_heads == self.hidden_size and head_dim % 2 == 0
            heads = f"{self.num_attention_heads} heads"
            require(fits, self, "head_dim", f"None, or an even width of which {heads} are as wide as the model")


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
