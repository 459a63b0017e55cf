"""Comba (arXiv 2506.02475), each layer of which may also be attention."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.matrix_memory import CombaConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.matrix_memory import CombaMemory, mixer_of


class CombaPreTrainedModel(MemoryPreTrainedModel):
    config_class = CombaConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return mixer_of(CombaMemory, config, layer_idx)


class CombaModel(CombaPreTrainedModel, MemoryModel):
    """The backbone; see `CombaConfig`."""


class CombaForCausalLM(CombaPreTrainedModel, MemoryForCausalLM):
    """The backbone with a next-token head.

    Example:
        >>> model = CombaForCausalLM(CombaConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4))
    """

    model_class = CombaModel


class CombaForSequenceClassification(CombaPreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token."""

    model_class = CombaModel
