"""RetNet (arXiv 2307.08621), each layer of which may also be attention."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.matrix_memory import RetNetConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.matrix_memory import Retention, mixer_of


class RetNetPreTrainedModel(MemoryPreTrainedModel):
    config_class = RetNetConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return mixer_of(Retention, config, layer_idx)


class RetNetModel(RetNetPreTrainedModel, MemoryModel):
    """The backbone; see `RetNetConfig`."""


class RetNetForCausalLM(RetNetPreTrainedModel, MemoryForCausalLM):
    """The backbone with a next-token head.

    Example:
        >>> model = RetNetForCausalLM(RetNetConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4))
    """

    model_class = RetNetModel


class RetNetForSequenceClassification(RetNetPreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token."""

    model_class = RetNetModel
