"""Tiny checkpoints of transformers' own models, with every option that ours represent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import zoo
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SMALL: dict[str, Any] = {
    "vocab_size": zoo.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
NATIVE: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama-biased": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5),
    "llama3": LlamaConfig(**SMALL, head_dim=12, rope_parameters=LLAMA3, max_position_embeddings=256),
    "llama-tied": LlamaConfig(**{**SMALL, "num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama-yarn": LlamaConfig(**SMALL, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
    "mistral": MistralConfig(**SMALL, sliding_window=None, head_dim=12),
    "mistral-sliding": MistralConfig(**SMALL, sliding_window=16),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2-sliding": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": Qwen3Config(**SMALL, head_dim=12, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3-biased": Qwen3Config(**SMALL, head_dim=16, attention_bias=True, tie_word_embeddings=True),
}


def checkpoint(name: str, folder: Path, max_shard_size: str = "5GB") -> Path:
    """A lively model, saved."""
    torch.manual_seed(0)
    model = zoo.enliven(AutoModelForCausalLM.from_config(NATIVE[name]))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()
