"""Titans (arXiv 2501.00663), and Titans-Proteus (arXiv 2608.16844) by its capacity schedule."""

from huggingface_hub.dataclasses import strict

from memzoo.configuration.deep_memory import DeepMemoryConfig


@strict
class TitansConfig(DeepMemoryConfig):
    """Titans: a deep memory trained by gradient descent with momentum and retention.

    Source: Titans (arXiv 2501.00663), sections 3 and 4. Deviations: where the paper is silent (chunk size, segment,
    window, number of persistent tokens, gates, initial memory) the defaults are ours; see `DeepMemoryConfig`.

    Example:
        >>> config = TitansConfig(variant="mag", hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
        >>> proteus = TitansConfig.preset("170m", capacity_blocks=16)
    """

    model_type = "memzoo_titans"
