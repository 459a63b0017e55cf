"""Transformer++: Llama's attention on the zoo's blocks, each layer of which may also be attention."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.matrix_memory import TransformerPlusPlusConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.matrix_memory import mixer_of


class TransformerPlusPlusPreTrainedModel(MemoryPreTrainedModel):
    config_class = TransformerPlusPlusConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return mixer_of(None, config, layer_idx)


class TransformerPlusPlusModel(TransformerPlusPlusPreTrainedModel, MemoryModel):
    """The backbone; see `TransformerPlusPlusConfig`."""


class TransformerPlusPlusForCausalLM(TransformerPlusPlusPreTrainedModel, MemoryForCausalLM):
    """The backbone with a next-token head.

    Example:
        >>> config = TransformerPlusPlusConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
        >>> model = TransformerPlusPlusForCausalLM(config)
    """

    model_class = TransformerPlusPlusModel


class TransformerPlusPlusForSequenceClassification(TransformerPlusPlusPreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token."""

    model_class = TransformerPlusPlusModel
