"""Hope (arXiv 2512.24695): self-modifying memories, then a chain of levels that learn in context."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig

from memzoo.configuration.hope import HopeConfig
from memzoo.modeling.decoder import MemoryForSequenceClassification, MemoryPreTrainedModel, Mixer
from memzoo.modeling.in_context import ChainForCausalLM, ChainModel
from memzoo.modeling.mixers.chain import chain_block
from memzoo.modeling.mixers.self_modifying import SelfModifying


class HopePreTrainedModel(MemoryPreTrainedModel):
    config_class = HopeConfig
    _no_split_modules = ["ChainBlock", "InContextBlock"]

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return SelfModifying(config, layer_idx)

    @classmethod
    def make_block(cls, config: PreTrainedConfig, layer_idx: int) -> nn.Module:
        return chain_block(config, cls.make_mixer(config, layer_idx))


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
