"""Dot (arXiv 2505.23735), its linear memory, alone or beside attention; any layer may also be attention."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.exponential_memory import DotConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.exponential_memory import exponential_mixer


class DotPreTrainedModel(MemoryPreTrainedModel):
    config_class = DotConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return exponential_mixer(config, layer_idx)


class DotModel(DotPreTrainedModel, MemoryModel):
    """The backbone; see `DotConfig`."""


class DotForCausalLM(DotPreTrainedModel, MemoryForCausalLM):
    """The backbone with a next-token head.

    Example:
        >>> model = DotForCausalLM(DotConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4))
    """

    model_class = DotModel


class DotForSequenceClassification(DotPreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token."""

    model_class = DotModel
