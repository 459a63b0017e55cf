"""ATLAS and ATLAS++ (arXiv 2505.23735): a deep memory that learns a window of tokens with Muon."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.atlas import AtlasConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.wirings import WIRINGS


class AtlasPreTrainedModel(MemoryPreTrainedModel):
    config_class = AtlasConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return WIRINGS[config.variant](config, layer_idx)


class AtlasModel(AtlasPreTrainedModel, MemoryModel):
    """The backbone; see `AtlasConfig`."""


class AtlasForCausalLM(AtlasPreTrainedModel, MemoryForCausalLM):
    """ATLAS with a next-token head.

    Example:
        >>> model = AtlasForCausalLM(AtlasConfig.preset("170m", memory="gated_mlp"))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    """

    model_class = AtlasModel


class AtlasForSequenceClassification(AtlasPreTrainedModel, MemoryForSequenceClassification):
    """ATLAS with a classification head on the last real token."""

    model_class = AtlasModel
