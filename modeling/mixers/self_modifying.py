"""Self-modifying memories as a layer: projection, short convolution, learned memories around
`memzoo.kernels.self_modifying`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from memzoo.kernels.self_modifying import Weights, self_modifying
from memzoo.modeling.decoder import Mixer, Step
from memzoo.modeling.mixers.deep_memory import ShortConv
from memzoo.modeling.mixers.wirings import MemoryOutput
from memzoo.modeling.parts import joined, parts_of


class SelfModifyingState(NamedTuple):
    """The memories between two tokens."""

    conv_tail: Tensor
    """The last inputs of the short convolution, `[B, conv_width - 1, 2 D]`, or `D` where queries are adapted."""
    now: Weights
    """With every token written."""
    anchor: Weights
    """At each memory's last boundary, where it is read and its gradients are taken."""


class SelfModifying(Mixer):
    """Self-referential Titans: per head, memories that make their own training data.

        u, q = SiLU(conv(x W)),    y_t = M_memory,t(q_t),    M_t as in `memzoo.kernels.self_modifying`

    where a memory makes the queries as well, it takes u and there is no q.

    Source: Nested Learning (arXiv 2512.24695), Eq 83-93. Deviations: those of the recurrence; memories are per head and
    read what comes of a projection and a short convolution; the initial memories are learned. There is no momentum, of
    which the paper's ablation speaks and no equation.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, self.heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.chunk_size, self.backend = config.chunk_size, config.kernel_backend
        self.rule: dict[str, Any] = {
            "chunk_size": config.chunk_size,
            "self_chunk_size": config.self_chunk_size,
            "step_limit": config.step_limit,
            "activation": config.memory_activation,
            "max_gradient_norm": math.inf if config.max_gradient_norm is None else config.max_gradient_norm,
        }
        count, units = 6 if config.adaptive_query else 5, config.head_dim * config.memory_expansion
        self.streams = 1 if config.adaptive_query else 2
        self.in_proj = nn.Linear(width, self.streams * width, bias=False)
        self.conv = ShortConv(self.streams * width, config.conv_width, config.kernel_backend)
        self.initial_weights = InitialMemories(self.heads, count, self.head_dim, units)
        self.gates = GateReadout(self.heads, self.head_dim)
        self.output = MemoryOutput(config, self.heads, self.head_dim, "silu")

    def forward(self, x: Tensor, step: Step, state: SelfModifyingState | None) -> tuple[Tensor, SelfModifyingState]:
        if state is None:
            state = self._begin(x)
        projected = self.in_proj(x)
        streams, tail = self.conv.convolve(projected, self.conv(projected), state.conv_tail, step.lengths)
        u, *q = streams.unflatten(-1, (self.streams, self.heads, -1)).unbind(2)
        parts, outputs = list(parts_of(step, x.shape[1], self.chunk_size)), []
        gate_weight, gate_bias = self.gates()
        now, anchor = state.now, state.anchor
        for part in parts:
            y, now, anchor = self_modifying(
                part.of(u),
                part.of(q[0]) if q else None,  # none if a memory makes it
                gate_weight,
                gate_bias,
                now,
                anchor,
                part.step.position,
                **self.rule,
                lengths=part.step.lengths,
                backend=self.backend,
            )
            outputs.append(y)
        return self.output(joined(parts, outputs, u).flatten(2), x), SelfModifyingState(tail, now, anchor)

    def _begin(self, like: Tensor) -> SelfModifyingState:
        rows = like.shape[0]
        dtype = torch.promote_types(like.dtype, torch.float32)
        # Copies: a cached state must not change when the optimizer moves the parameters.
        weights = Weights(*(w.to(dtype).repeat(rows, 1, 1, 1) for w in self.initial_weights()))
        tail = like.new_zeros(rows, self.conv.weight.shape[1] - 1, self.conv.weight.shape[0])
        return SelfModifyingState(tail, weights, weights)


class InitialMemories(nn.Module):
    """The memories before the first token, learned; the second layer starts small."""

    def __init__(self, heads: int, count: int, width: int, units: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(heads, width, count * units))
        self.second = nn.Parameter(torch.empty(heads * count, units, width))

    def init_weights(self) -> None:
        init.normal_(self.first, 0.0, self.first.shape[1] ** -0.5)
        init.normal_(self.second, 0.0, 0.1 * self.second.shape[1] ** -0.5)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.first, self.second


class GateReadout(nn.Module):
    """What makes a step size and a retention of what two memories say: r and b of each."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(2, heads, width))
        self.bias = nn.Parameter(torch.empty(2, heads))

    def init_weights(self) -> None:
        init.normal_(self.weight, 0.0, self.weight.shape[-1] ** -0.5)
        step = torch.full((self.heads,), 0.12)
        forget = torch.linspace(math.log(1e-3), math.log(1e-1), self.heads).exp()
        init.copy_(self.bias, torch.logit(torch.stack([step, forget])).to(self.bias))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias
