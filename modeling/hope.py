"""Hope (arXiv 2512.24695): self-modifying memories, then a chain of levels that learn in context."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.hope import HopeConfig
from memzoo.modeling.decoder import MemoryForSequenceClassification, Mixer
from memzoo.modeling.in_context import ChainForCausalLM, ChainModel, ChainPreTrainedModel
from memzoo.modeling.mixers.self_modifying import SelfModifying


class HopePreTrainedModel(ChainPreTrainedModel):
    config_class = HopeConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return SelfModifying(config, layer_idx)


class HopeModel(HopePreTrainedModel, ChainModel):
    """The backbone; see `HopeConfig`."""


class HopeForCausalLM(HopePreTrainedModel, ChainForCausalLM):
    """The backbone with a next-token head.

    Example:
        >>> model = HopeForCausalLM(HopeConfig.preset("170m"))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    """

    model_class = HopeModel


class HopeForSequenceClassification(HopePreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token."""

    model_class = HopeModel
