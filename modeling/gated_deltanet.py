"""Gated DeltaNet (arXiv 2412.06464), each layer of which may also be attention."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.matrix_memory import GatedDeltaNetConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.matrix_memory import GatedDelta, mixer_of


class GatedDeltaNetPreTrainedModel(MemoryPreTrainedModel):
    config_class = GatedDeltaNetConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return mixer_of(GatedDelta, config, layer_idx)


class GatedDeltaNetModel(GatedDeltaNetPreTrainedModel, MemoryModel):
    """The backbone; see `GatedDeltaNetConfig`."""


class GatedDeltaNetForCausalLM(GatedDeltaNetPreTrainedModel, MemoryForCausalLM):
    """The backbone with a next-token head.

    Example:
        >>> config = GatedDeltaNetConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
        >>> model = GatedDeltaNetForCausalLM(config)
    """

    model_class = GatedDeltaNetModel


class GatedDeltaNetForSequenceClassification(GatedDeltaNetPreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token."""

    model_class = GatedDeltaNetModel
