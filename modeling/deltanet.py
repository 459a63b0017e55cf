"""DeltaNet (arXiv 2406.06484), each layer of which may also be attention."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.matrix_memory import DeltaNetConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.matrix_memory import Delta, mixer_of


class DeltaNetPreTrainedModel(MemoryPreTrainedModel):
    config_class = DeltaNetConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return mixer_of(Delta, config, layer_idx)


class DeltaNetModel(DeltaNetPreTrainedModel, MemoryModel):
    """The backbone; see `DeltaNetConfig`."""


class DeltaNetForCausalLM(DeltaNetPreTrainedModel, MemoryForCausalLM):
    """The backbone with a next-token head.

    Example:
        >>> model = DeltaNetForCausalLM(DeltaNetConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4))
    """

    model_class = DeltaNetModel


class DeltaNetForSequenceClassification(DeltaNetPreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token."""

    model_class = DeltaNetModel
