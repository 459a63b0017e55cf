"""Deep linear attention (arXiv 2505.23735): a deep memory that learns dot products."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.atlas import DLAConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.wirings import WIRINGS


class DLAPreTrainedModel(MemoryPreTrainedModel):
    config_class = DLAConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return WIRINGS[config.variant](config, layer_idx)


class DLAModel(DLAPreTrainedModel, MemoryModel):
    """The backbone; see `DLAConfig`."""


class DLAForCausalLM(DLAPreTrainedModel, MemoryForCausalLM):
    """DLA with a next-token head.

    Example:
        >>> model = DLAForCausalLM(DLAConfig.preset("170m"))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    """

    model_class = DLAModel


class DLAForSequenceClassification(DLAPreTrainedModel, MemoryForSequenceClassification):
    """DLA with a classification head on the last real token."""

    model_class = DLAModel
