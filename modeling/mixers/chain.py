"""Chains of feed-forward levels, the slow and fast parts of a block's knowledge (arXiv 2512.24695, section 7)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from memzoo.modeling.decoder import FeedForward, Mixer, Step


class Level(nn.Module):
    """`MLP(norm(x))`, one level of a chain."""

    def __init__(self, config: PreTrainedConfig, size: int) -> None:
        super().__init__()
        sized = copy.copy(config)
        sized.intermediate_size = size
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(sized)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


class Chain(nn.Module):
    """Levels 1..k in the place of a feed-forward, its residual connections included.

        sequential:   x <- x + MLP_l(norm_l(x))  for l = 1..k        (Eq 70, 73)
        independent:  x <- x + sum_l w_l MLP_l(norm_l(x))            (Eq 74)

    Deviations: norms and residual connections, which the paper's equations leave out; `w` is learned and starts at 1.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.levels = nn.ModuleList(Level(config, size) for size in config.level_sizes)
        self.weights = nn.Parameter(torch.empty(len(self.levels))) if config.chain == "independent" else None

    def init_weights(self) -> None:
        if self.weights is not None:
            init.ones_(self.weights)

    def forward(self, x: Tensor) -> Tensor:
        if self.weights is not None:
            outputs = [weight * level(x) for weight, level in zip(self.weights, self.levels, strict=True)]
            return x + torch.stack(outputs).sum(0)
        for level in self.levels:
            x = x + level(x)
        return x


class ChainBlock(GradientCheckpointingLayer):
    """Pre-norm residual block: a mixer, then a chain of levels."""

    def __init__(self, config: PreTrainedConfig, mixer: Mixer) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = mixer
        self.chain = Chain(config)

    def forward(self, hidden: Tensor, step: Step, state: Any, keep_state: bool) -> tuple[Tensor, Any]:
        mixed, state = self.mixer(self.mixer_norm(hidden), step, state)
        return self.chain(hidden + mixed), state if keep_state else None
