"""How a memory stands among attention: alone, or as its context, gate or layer (Titans, arXiv 2501.00663).

The memory is any module that

- counts its `heads`, `key_dim` and `value_dim`;
- begins: `begin(batch, like, persistent=None, room=None)` gives the persistent tokens' read-outs `[P, H V]` and the
  state after them, of `batch` rows in the dtype of `like`, with room for so many tokens if it holds them all;
- reads: `memory(x, state, lengths, room)` gives read-outs `[R, L, H V]` and the new state, which has grown only where
  `room` is `None`;
- for `mac`, answers without reading: `contents(state)`, a tuple of tensors `[R, H, ...]`, is what it holds, and
  `retrieve(x, contents, position, query)` what that says at the queries `x query`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from memzoo.kernels.norm_gate import norm_gate
from memzoo.kernels.rms_norm import rms_norm
from memzoo.modeling.decoder import Mixer, Step
from memzoo.modeling.mixers.attention import CausalAttention, HeadRotaryEmbedding, KeyValueState
from memzoo.modeling.mixers.deep_memory import DeepMemory, MemoryState
from memzoo.modeling.mixers.matrix_memory import FusedRMSNorm, gating

MakeMemory = Callable[[PreTrainedConfig], Any]
"""Makes a memory: a module with what `DeepMemory` shows, `heads`, `key_dim`, `value_dim`, `begin`, `contents`,
`retrieve` and `forward`."""


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
        rotary = step.rotary[self.attention.head_dim]
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
        rotary, room = step.rotary[self.attention.head_dim], self._room(step.room, persistent)
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
        self.attention = CausalAttention(
            config, window=None, prefix=config.num_persistent_tokens, most=2 * config.segment_size
        )
        self.output = BranchGate(config)

    def forward(self, x: Tensor, step: Step, state: ContextState | None) -> tuple[Tensor, ContextState]:
        persistent = self.persistent()
        window: KeyValueState | None = None
        past: tuple[Tensor, ...] = ()
        if state is None:
            _, memory = self.memory.begin(x.shape[0], x, room=step.room)
        else:
            memory, window, past = state
        outputs = []
        for part in self._parts(x, step, fresh=state is None):
            if part.whole or window is None:
                window, past = None, self._contents(memory)
            else:
                starts = (part.begun == 0) & (part.added > 0)
                window = window._replace(length=torch.where(starts, 0, window.length))
                past = tuple(
                    _of_rows(starts, new, old) for new, old in zip(self.memory.contents(memory), past, strict=True)
                )
            read = self.memory.retrieve(part.x, past, step.position + part.first, self.query_proj)
            pairs = torch.stack([read, part.x], dim=2).flatten(1, 2)
            place = part.begun[:, None] + torch.arange(part.x.shape[1], device=x.device)
            rotary = self.attention.rotary(pairs, place.repeat_interleave(2, dim=1))
            added = None if part.lengths is None else 2 * part.lengths
            y, window = self.attention(pairs, rotary, added, window, persistent)
            y = y[:, 1::2]
            m, memory = self.memory(y, memory, part.lengths, step.room)
            outputs.append(self.output(y, m))
        assert window is not None
        return self._joined(x, step, outputs, fresh=state is None), ContextState(memory, window, past)

    def _contents(self, memory: Any) -> tuple[Tensor, ...]:
        """What the memory holds, and goes on holding: without gradients a token may be written over it."""
        contents = self.memory.contents(memory)
        return contents if torch.is_grad_enabled() else tuple(each.clone() for each in contents)

    def _bounds(self, step: Step) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Tokens of the running segment per row, and the bounds of the new tokens that fall into each segment."""
        begun = step.position % self.segment_size
        count = -(-int((begun + step.added).max()) // self.segment_size)
        bounds = []
        for index in range(max(1, count)):
            first = (index * self.segment_size - begun).clamp(min=0)
            last = torch.minimum(step.added, (index + 1) * self.segment_size - begun)
            bounds.append((first, torch.maximum(first, last)))
        return begun, bounds

    def _parts(self, x: Tensor, step: Step, fresh: bool) -> Iterator[SegmentPart]:
        """The new tokens, cut where segments end; each row has its own cuts."""
        tokens, size = x.shape[1], self.segment_size
        zero = torch.zeros_like(step.position)
        if fresh and step.lengths is None:
            for first in range(0, tokens, size):
                part = x[:, first : first + size]
                yield SegmentPart(part, zero + first, zero, zero + part.shape[1], None, whole=True)
        elif tokens == 1:
            yield SegmentPart(x, zero, step.position % size, step.added, step.lengths, whole=False)
        else:
            begun, bounds = self._bounds(step)
            for index, (start, stop) in enumerate(bounds):
                added = stop - start
                place = start[:, None] + torch.arange(max(1, int(added.max())), device=x.device)
                part = x.gather(1, place.clamp(max=tokens - 1)[..., None].expand(-1, -1, x.shape[2]))
                yield SegmentPart(part, start, begun if index == 0 else zero, added, added, whole=False)

    def _joined(self, x: Tensor, step: Step, outputs: list[Tensor], fresh: bool) -> Tensor:
        """The parts' outputs in the order of `x`."""
        if (fresh and step.lengths is None) or x.shape[1] == 1:
            return torch.cat(outputs, dim=1)
        joined = torch.zeros_like(outputs[0][:, :1]).expand(-1, x.shape[1], -1)
        place = torch.arange(x.shape[1], device=x.device)
        for (start, stop), part in zip(self._bounds(step)[1], outputs, strict=True):
            inside = (place >= start[:, None]) & (place < stop[:, None])
            index = (place - start[:, None]).clamp(0, part.shape[1] - 1)
            joined = torch.where(
                inside[..., None], part.gather(1, index[..., None].expand(-1, -1, part.shape[2])), joined
            )
        return joined


def _of_rows(at: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in the rows `at` `[R]`, `old` in the others, both `[R, H, N, ...]`; zeros behind that of fewer N."""
    count = max(new.shape[2], old.shape[2])
    new, old = (x if x.shape[2] == count else F.pad(x, (0, 0, 0, count - x.shape[2])) for x in (new, old))
    return torch.where(at[:, None, None, None], new, old)


class SegmentPart(NamedTuple):
    """New tokens that fall into one segment of each row."""

    x: Tensor
    """`[R, L', D]`, right-padded."""
    first: Tensor
    """Index of each row's first one among its new tokens, `[R]`."""
    begun: Tensor
    """Tokens that the segment held before, `[R]`."""
    added: Tensor
    """How many they are, `[R]`."""
    lengths: Tensor | None
    """The same, or `None` when all L' are real."""
    whole: bool
    """Whether every row starts the segment here."""


WIRINGS: dict[str, type[Wiring]] = {"lmm": LMM, "mac": MAC, "mag": MAG, "mal": MAL}
