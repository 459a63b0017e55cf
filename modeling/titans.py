"""Titans (arXiv 2501.00663): a deep memory alone, or as context, gate or layer beside attention."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.titans import TitansConfig
from memzoo.modeling.decoder import (
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
)
from memzoo.modeling.mixers.wirings import WIRINGS


class TitansPreTrainedModel(MemoryPreTrainedModel):
    config_class = TitansConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return WIRINGS[config.variant](config, layer_idx)


class TitansModel(TitansPreTrainedModel, MemoryModel):
    """The Titans backbone; see `TitansConfig` for the variants."""


class TitansForCausalLM(TitansPreTrainedModel, MemoryForCausalLM):
    """Titans with a next-token head.

    Example:
        >>> model = TitansForCausalLM(TitansConfig.preset("170m", variant="mag", capacity_blocks=16))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    """

    model_class = TitansModel


class TitansForSequenceClassification(TitansPreTrainedModel, MemoryForSequenceClassification):
    """Titans with a classification head on the last real token."""

    model_class = TitansModel
