"""DeepTransformer (arXiv 2505.23735), its linear memory, alone or beside attention; any layer may also be attention."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.exponential_memory import DeepTransformerConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.exponential_memory import exponential_mixer


class DeepTransformerPreTrainedModel(MemoryPreTrainedModel):
    config_class = DeepTransformerConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return exponential_mixer(config, layer_idx)


class DeepTransformerModel(DeepTransformerPreTrainedModel, MemoryModel):
    """The backbone; see `DeepTransformerConfig`."""


class DeepTransformerForCausalLM(DeepTransformerPreTrainedModel, MemoryForCausalLM):
    """The backbone with a next-token head.

    Example:
        >>> config = DeepTransformerConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
        >>> model = DeepTransformerForCausalLM(config)
    """

    model_class = DeepTransformerModel


class DeepTransformerForSequenceClassification(DeepTransformerPreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token."""

    model_class = DeepTransformerModel
