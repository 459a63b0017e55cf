"""How a memory stands among attention: alone, or as its context, gate or layer (Titans, arXiv 2501.00663).

The memory is any module that

- counts its `heads`, `key_dim` and `value_dim`;
- begins: `begin(batch, like, persistent=None, room=None)` gives the persistent tokens' read-outs `[P, H V]` and the
  state after them, of `batch` rows in the dtype of `like`, with room for so many tokens if it holds them all;
- reads: `memory(x, state, lengths, room)` gives read-outs `[R, L, H V]` and the new state, which has grown only where
  `room` is `None`;
- for `mac`, answers without reading: `recall(x, state, past, position, segment, query)` gives what the memory held at
  the start of the running segment says at the queries `x query`, `[R, L, H V]`, and that past, a tuple of tensors
  `[R, H, ...]`, for the next call; an empty one starts a segment, and so does, in its row, a `position` `[R]` that is a
  multiple of `segment`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from memzoo.kernels.norm_gate import norm_gate
from memzoo.kernels.rms_norm import rms_norm
from memzoo.modeling.decoder import Mixer, Step
from memzoo.modeling.mixers.attention import CausalAttention, HeadRotaryEmbedding, KeyValueState
from memzoo.modeling.mixers.deep_memory import DeepMemory, MemoryState
from memzoo.modeling.mixers.matrix_memory import FusedRMSNorm, gating
from memzoo.modeling.parts import joined, parts_of

MakeMemory = Callable[[PreTrainedConfig], Any]
"""Makes a memory: a module with what `DeepMemory` shows, `heads`, `key_dim`, `value_dim`, `begin`, `recall` and
`forward`."""


class PersistentTokens(nn.Module):
    """Learned tokens `[P, D]` in front of every sequence (Titans Eq 19)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(count, width)) if count else None

    def init_weights(self) -> None:
        if self.tokens is not None:
            init.normal_(self.tokens, 0.0, 1.0)  # the scale of the normalised hidden states they stand among

    def forward(self) -> Tensor | None:
        return self.tokens


class MemoryOutput(nn.Module):
    """Output of a memory alone: `W_O (RMSNorm_head(y) * gate(x W_gate))` (Titans section 4.4; form ours)."""

    def __init__(self, config: PreTrainedConfig, heads: int, value_dim: int, gate: str | None) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm, self.eps = FusedRMSNorm(value_dim, eps=config.rms_norm_eps), config.rms_norm_eps
        self.gating = None if gate is None else gating(config, gate)
        if gate is not None:
            self.gate_proj = nn.Linear(width, heads * value_dim, bias=False)
        self.o_proj = nn.Linear(heads * value_dim, width, bias=False)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        weight = self.norm(y)
        y = y.unflatten(-1, (-1, *weight.shape))
        if self.gating is None:
            return self.o_proj(rms_norm(y, weight, self.eps).flatten(-2))
        return self.o_proj(norm_gate(y, weight, self.gate_proj(x), **self.gating))


class BranchGate(nn.Module):
    """Two branches joined: `W_O (RMSNorm(y) * sigmoid(RMSNorm(m)))` (Titans Eq 25 and 28, both branches normalised with
    learned weights, then a non-linearity).

    With `memory_skip` it is `W_O (y * 2 sigmoid(RMSNorm(m)))`: exactly `W_O y` where the norm's weights are zero.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        width = config.num_attention_heads * config.head_dim
        self.attention_norm = None if config.memory_skip else FusedRMSNorm(width, eps=config.rms_norm_eps)
        self.memory_norm = FusedRMSNorm(width, eps=config.rms_norm_eps)
        self.gating = {**gating(config, "sigmoid"), "scale": 2 if config.memory_skip else 1}
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_out_bias)

    def forward(self, y: Tensor, m: Tensor) -> Tensor:
        weight = None if self.attention_norm is None else self.attention_norm(y)
        return self.o_proj(norm_gate(y, weight, m, self.memory_norm(m), **self.gating))


def branch_attention(config: PreTrainedConfig, layer_idx: int, prefix: int = 0) -> CausalAttention:
    """The attention of a block by the config's `layer_types`."""
    window = config.sliding_window if config.attention_types[layer_idx] == "sliding_attention" else None
    return CausalAttention(config, window=window, prefix=prefix)


class Wiring(Mixer):
    """What the four wirings share: a memory and persistent tokens."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int, memory: MakeMemory = DeepMemory) -> None:
        super().__init__(config, layer_idx)
        self.memory: Any = memory(config)
        self.persistent = PersistentTokens(config.num_persistent_tokens, config.hidden_size)


class LMM(Wiring):
    """The memory alone, on the persistent tokens and the sequence (Titans section 3, with Eq 19)."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int, memory: MakeMemory = DeepMemory) -> None:
        super().__init__(config, layer_idx, memory)
        self.output = MemoryOutput(config, self.memory.heads, self.memory.value_dim, config.output_gate)

    def forward(self, x: Tensor, step: Step, state: MemoryState | None) -> tuple[Tensor, MemoryState]:
        if state is None:
            _, state = self.memory.begin(x.shape[0], x, self.persistent(), step.room)
        y, state = self.memory(x, state, step.lengths, step.room)
        return self.output(y, x), state


class BranchState(NamedTuple):
    """A memory and the attention's window."""

    memory: MemoryState
    attention: KeyValueState


class MAG(Wiring):
    """Sliding-window attention that always sees the persistent tokens, gated by the memory (Titans Eq 26-28)."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int, memory: MakeMemory = DeepMemory) -> None:
        super().__init__(config, layer_idx, memory)
        self.attention = branch_attention(config, layer_idx, config.num_persistent_tokens)
        self.output = BranchGate(config)

    def rotary_embedding(self) -> HeadRotaryEmbedding:
        return self.attention.rotary

    def forward(self, x: Tensor, step: Step, state: BranchState | None) -> tuple[Tensor, BranchState]:
        window = persistent = None
        if state is None:
            persistent = self.persistent()
            _, memory_state = self.memory.begin(x.shape[0], x, persistent, step.room)
        else:
            memory_state, window = state
        rotary = step.rotary[self.attention.rotary.key]
        y, window = self.attention(x, rotary, step.lengths, window, persistent, step.room)
        m, memory_state = self.memory(x, memory_state, step.lengths, step.room)
        return self.output(y, m), BranchState(memory_state, window)


class MAL(Wiring):
    """Sliding-window attention over the memory's outputs, those of the persistent tokens first (Titans Eq 29-31).

    With `memory_skip` it is over `x` plus those outputs.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int, memory: MakeMemory = DeepMemory) -> None:
        super().__init__(config, layer_idx, memory)
        self.output = MemoryOutput(config, self.memory.heads, self.memory.value_dim, config.output_gate)
        self.memory_skip = config.memory_skip
        self.attention = branch_attention(config, layer_idx)
        width = config.num_attention_heads * config.head_dim
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_out_bias)

    def rotary_embedding(self) -> HeadRotaryEmbedding:
        return self.attention.rotary

    def forward(self, x: Tensor, step: Step, state: BranchState | None) -> tuple[Tensor, BranchState]:
        persistent = self.persistent()
        memory_state, window = self._begin(x, persistent, step.room) if state is None else state
        m, memory_state = self.memory(x, memory_state, step.lengths, step.room)
        rotary, room = step.rotary[self.attention.rotary.key], self._room(step.room, persistent)
        y, window = self.attention(self._remembered(m, x), rotary, step.lengths, window, room=room)
        return self.o_proj(y), BranchState(memory_state, window)

    def _remembered(self, m: Tensor, x: Tensor) -> Tensor:
        """What the attention reads of the memory's read-outs `m` for `x`."""
        return x + self.output(m, x) if self.memory_skip else self.output(m, x)

    @staticmethod
    def _room(room: int | None, persistent: Tensor | None) -> int | None:
        """Keys for which the attention has room: the persistent tokens' are among them."""
        return room if room is None or persistent is None else room + persistent.shape[0]

    def _begin(
        self, x: Tensor, persistent: Tensor | None, room: int | None
    ) -> tuple[MemoryState, KeyValueState | None]:
        rows = x.shape[0]
        read, memory_state = self.memory.begin(rows, x, persistent, room)
        if persistent is None or read is None:
            return memory_state, None
        place = torch.arange(-persistent.shape[0], 0, device=x.device)[None]
        tokens = self._remembered(read, persistent)[None]
        rotary, room = self.attention.rotary(x, place), self._room(room, persistent)
        _, window = self.attention(tokens, rotary, None, None, room=room)
        return memory_state, KeyValueState(*(x.expand(rows, *x.shape[1:]) for x in window))


class ContextState(NamedTuple):
    """A memory, the running segment's attention, and what the memory held at the segment's start."""

    memory: MemoryState
    attention: KeyValueState
    past: tuple[Tensor, ...]


class MAC(Wiring):
    """Segment attention with the memory of the past as context (Titans Eq 21-25).

        h_t = M_{s-1}(q_t),  y = attention over [P, h_1, x_1, h_2, x_2, ...] of the segment,  o = y gated by M_t(y_t)

    Deviations: the paper shows all of a segment's `h` to each of its rows and reads the last memory update in it; both
    tell a token about later ones. Row t here sees `h` up to t (in the order above plain causal attention says so) and
    reads `M_t`.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int, memory: MakeMemory = DeepMemory) -> None:
        super().__init__(config, layer_idx, memory)
        self.segment_size = config.segment_size
        self.query_proj = nn.Linear(config.hidden_size, self.memory.heads * self.memory.key_dim, bias=False)
        prefix, segment = config.num_persistent_tokens, config.segment_size
        self.attention = CausalAttention(config, window=None, prefix=prefix, segment=segment, each=2)
        self.output = BranchGate(config)

    def rotary_embedding(self) -> HeadRotaryEmbedding:
        return self.attention.rotary

    def forward(self, x: Tensor, step: Step, state: ContextState | None) -> tuple[Tensor, ContextState]:
        persistent = self.persistent()
        window: KeyValueState | None = None
        past: tuple[Tensor, ...] = ()
        if state is None:
            _, memory = self.memory.begin(x.shape[0], x, room=step.room)
        else:
            memory, window, past = state
        parts, outputs = list(parts_of(step, x.shape[1], self.segment_size, fresh=state is None)), []
        for part in parts:
            own, now = part.of(x), part.step
            if part.whole:
                window, past = None, ()
            read, past = self.memory.recall(own, memory, past, now.position, self.segment_size, self.query_proj)
            pairs = torch.stack([read, own], dim=2).flatten(1, 2)
            rotary = now.rotary[self.attention.rotary.key]
            y, window = self.attention(pairs, rotary, now.lengths, window, persistent)
            m, memory = self.memory(y, memory, now.lengths, step.room)
            outputs.append(self.output(y, m))
        assert window is not None
        return joined(parts, outputs, x), ContextState(memory, window, past)


WIRINGS: dict[str, type[Wiring]] = {"lmm": LMM, "mac": MAC, "mag": MAG, "mal": MAL}
