"""Sliding-window linear attention (arXiv 2505.23735, section 3.2), each layer of which may also be attention."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.matrix_memory import SWLAConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.matrix_memory import SlidingWindowLinear, mixer_of


class SWLAPreTrainedModel(MemoryPreTrainedModel):
    config_class = SWLAConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return mixer_of(SlidingWindowLinear, config, layer_idx)


class SWLAModel(SWLAPreTrainedModel, MemoryModel):
    """The backbone; see `SWLAConfig`."""


class SWLAForCausalLM(SWLAPreTrainedModel, MemoryForCausalLM):
    """The backbone with a next-token head.

    Example:
        >>> model = SWLAForCausalLM(SWLAConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4))
    """

    model_class = SWLAModel


class SWLAForSequenceClassification(SWLAPreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token."""

    model_class = SWLAModel
