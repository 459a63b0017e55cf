"""OmegaNet (arXiv 2505.23735): a deep memory that learns a window of tokens at each step."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.atlas import OmegaNetConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.wirings import WIRINGS


class OmegaNetPreTrainedModel(MemoryPreTrainedModel):
    config_class = OmegaNetConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return WIRINGS[config.variant](config, layer_idx)


class OmegaNetModel(OmegaNetPreTrainedModel, MemoryModel):
    """The backbone; see `OmegaNetConfig`."""


class OmegaNetForCausalLM(OmegaNetPreTrainedModel, MemoryForCausalLM):
    """OmegaNet with a next-token head.

    Example:
        >>> model = OmegaNetForCausalLM(OmegaNetConfig.preset("170m", variant="mag"))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    """

    model_class = OmegaNetModel


class OmegaNetForSequenceClassification(OmegaNetPreTrainedModel, MemoryForSequenceClassification):
    """OmegaNet with a classification head on the last real token."""

    model_class = OmegaNetModel
