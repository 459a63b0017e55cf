"""Chains of feed-forward levels, the slow and fast parts of a block's knowledge (arXiv 2512.24695, section 7)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from memzoo.kernels.registry import cast
from memzoo.modeling.decoder import FeedForward, Mixer, Step
from memzoo.modeling.norms import RMSNorm

Change = tuple[Tensor, Tensor, Tensor]
"""What a row's own level adds to the weights of gate, up and down projection: `[R, F, D]` twice and `[R, D, F]`."""


class Level(nn.Module):
    """`MLP(norm(x))`, one level of a chain."""

    def __init__(self, config: PreTrainedConfig, size: int) -> None:
        super().__init__()
        sized = copy.copy(config)
        sized.intermediate_size = size
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(sized)

    def forward(self, x: Tensor, change: Change | None = None) -> Tensor:
        x = self.norm(x)
        if change is None:
            return self.mlp(x)
        gate, up = (
            _changed(layer, d, x) for layer, d in zip((self.mlp.gate_proj, self.mlp.up_proj), change, strict=False)
        )
        return _changed(self.mlp.down_proj, change[2], self.mlp.gated(gate, up))

    def no_change(self, rows: int) -> Change:
        """The change of rows that have learned nothing."""
        layers = self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj
        dtype = torch.promote_types(layers[0].weight.dtype, torch.float32)
        gate, up, down = (layer.weight.new_zeros(rows, *layer.weight.shape, dtype=dtype) for layer in layers)
        return gate, up, down


def _changed(layer: nn.Linear, change: Tensor, x: Tensor) -> Tensor:
    """`x (W + change)^T`, for rows `[R, L, D]` with a change each."""
    return layer(x) + torch.bmm(x, cast(change, x.dtype).mT)


class Chain(nn.Module):
    """Levels 1..k in the place of a feed-forward, its residual connections included.

        sequential:   x <- x + MLP_l(norm_l(x))  for l = 1..k        (Eq 70, 72, 73)
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

    def forward(self, x: Tensor, changes: tuple[Change, ...] | None = None) -> Tensor:
        levels = list(zip(self.levels, changes or [None] * len(self.levels), strict=True))
        if self.weights is not None:
            outputs = [w * level(x, change) for w, (level, change) in zip(self.weights, levels, strict=True)]
            return x + torch.stack(outputs).sum(0)
        for level, change in levels:
            x = x + level(x, change)
        return x


class ChainBlock(GradientCheckpointingLayer):
    """Pre-norm residual block: a mixer, then a chain of levels."""

    def __init__(self, config: PreTrainedConfig, mixer: Mixer) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = mixer
        self.chain = Chain(config)

    def forward(self, hidden: Tensor, step: Step, state: Any, keep_state: bool) -> tuple[Tensor, Any]:
        mixed, state = self.mixer(self.mixer_norm(hidden), step, state)
        return self.chain(hidden + mixed), state if keep_state else None


class InContextBlock(ChainBlock):
    """The same with changes of the levels' weights in each row.

    It takes and returns states as their tensors, with the form that they make up: a checkpoint in the old style follows
    no gradient into a tree.
    """

    def forward(self, hidden: Tensor, step: Step, form: TreeSpec, *tensors: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        state, changes = tree_unflatten(tensors, form)
        mixed, state = self.mixer(self.mixer_norm(hidden), step, state)
        new, form = tree_flatten(state)
        return self.chain(hidden + mixed, changes), form, *new

    def read(self, hidden: Tensor, step: Step, state: Any, changes: tuple[Change, ...]) -> tuple[Tensor, Any]:
        """Outputs and the new state, both trees."""
        tensors, form = tree_flatten((state, changes))
        hidden, form, *new = self(hidden, step, form, *tensors)
        return hidden, tree_unflatten(new, form)

    def read_again(self, hidden: Tensor, step: Step, state: Any, changes: tuple[Change, ...]) -> Tensor:
        """The same outputs once more, outside of hooks and checkpoints."""
        mixed, _ = self.mixer.forward(self.mixer_norm(hidden), step, state)
        return self.chain(hidden + mixed, changes)

    def begin(self, like: Tensor, step: Step) -> Any:
        """The mixer's state before the first token, which rows without a token leave as it is."""
        return self.mixer.forward(torch.zeros_like(like), step, None)[1]
