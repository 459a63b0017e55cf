"""Hope-Attention (arXiv 2512.24695, 2608.16844): softmax attention, then a chain of levels that learn apart."""

from __future__ import annotations

from transformers import PreTrainedConfig

from memzoo.configuration.hope import HopeAttentionConfig
from memzoo.modeling.decoder import MemoryForSequenceClassification, Mixer
from memzoo.modeling.in_context import ChainForCausalLM, ChainModel, ChainPreTrainedModel
from memzoo.modeling.mixers.matrix_memory import mixer_of


class HopeAttentionPreTrainedModel(ChainPreTrainedModel):
    config_class = HopeAttentionConfig

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        return mixer_of(None, config, layer_idx)


class HopeAttentionModel(HopeAttentionPreTrainedModel, ChainModel):
    """The backbone; see `HopeAttentionConfig`."""


class HopeAttentionForCausalLM(HopeAttentionPreTrainedModel, ChainForCausalLM):
    """The backbone with a next-token head.

    Example:
        >>> model = HopeAttentionForCausalLM(HopeAttentionConfig.preset("170m", chain_periods=[8, 1]))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    """

    model_class = HopeAttentionModel


class HopeAttentionForSequenceClassification(HopeAttentionPreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token."""

    model_class = HopeAttentionModel
