"""The memory on exponential features as a layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from transformers import PreTrainedConfig

from memzoo.kernels import deep_exponential_memory, exponential_memory
from memzoo.kernels.gates import Gate
from memzoo.kernels.registry import cast
from memzoo.kernels.retrieval.chunked import past_of
from memzoo.kernels.scan import scan, split
from memzoo.kernels.short_conv import Vectors
from memzoo.kernels.unit_length import unit_length
from memzoo.modeling.capacity import CapacitySchedule
from memzoo.modeling.decoder import Mixer
from memzoo.modeling.mixers.deep_memory import InitialWeights, InnerGates, MemoryState, ShortConv
from memzoo.modeling.mixers.matrix_memory import mixer_of
from memzoo.modeling.mixers.wirings import WIRINGS


class ExponentialMemory(nn.Module):
    """DeepTransformer, SWDT and Dot with a linear memory (ATLAS, arXiv 2505.23735, Eq 25-31).

        q, k, v = SiLU(conv(x W_Q, x W_K, x W_V)),  q and k scaled to unit length
        y_t = M_t phi(q_t),  M_t as in `memzoo.kernels.exponential_memory`, over its own normaliser if there is one

    Deviations: gates of the current token, one scalar per head and lag, over c, since the paper leaves their form open;
    a token's closed value coordinates stay closed when a later token writes it again.
    """

    segment = 512
    """Tokens of a piece between the projections, which the backward computes again."""

    def __init__(self, config: PreTrainedConfig, max_step_size: float = 1.0) -> None:
        super().__init__()
        self.heads, self.key_dim, self.value_dim = config.memory_heads, config.key_head_dim, config.value_head_dim
        self.lags, self.objective, self.normalizer = config.window, config.objective, config.normalizer
        self.scale = float(self.key_dim**0.5 if config.feature_scale is None else config.feature_scale)
        self.backend, self.axis = config.kernel_backend, config.capacity_axis
        self.schedule = CapacitySchedule(config.capacity_blocks, config.capacity_context)
        self.widths = [self.heads * width for width in (self.key_dim, self.key_dim, self.value_dim)]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        unit = Vectors(self.heads, self.key_dim)
        self.conv = ShortConv(sum(self.widths), config.conv_width, config.kernel_backend, unit)
        kinds, ranges = [Gate("share", max_step_size / self.lags, self.lags)], [(0.5, 0.5)] * self.lags
        if config.use_retention:
            kinds.append(Gate("log_rest"))
            ranges.append((1e-3, 1e-1))
        self.gates = InnerGates(config.hidden_size, self.heads, kinds, ranges, config.kernel_backend)

    def forward(
        self, x: Tensor, state: MemoryState, lengths: Tensor | None, room: int | None = None
    ) -> tuple[Tensor, MemoryState]:
        """Read new tokens `[B, L, D]` into the memory: read-outs `[B, L, H V]` and the new state, which has grown by
        their keys, or not where it has been given room for them."""
        return self._read(x, state, lengths, self.schedule, grows=room is None)

    def begin(
        self, batch: int, like: Tensor, persistent: Tensor | None = None, room: int | None = None
    ) -> tuple[Tensor | None, MemoryState]:
        """The memory before the first token, with the persistent tokens `[P, D]` written to it, and their read-outs; it
        may have `room` for keys to come, at which nothing is written yet.

        Positions, windows and the capacity schedule count real tokens only.
        """
        if room is not None:
            y, state = self.begin(batch, like, persistent)
            held = {name: F.pad(getattr(state.memory, name), (0, 0, 0, room)) for name in ("keys", "written")}
            return y, state._replace(memory=state.memory._replace(**held))
        tail = like.new_zeros(batch, self.conv.weight.shape[1] - 1, self.conv.weight.shape[0])
        memory = self._initial(batch, like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32)))
        if persistent is None or persistent.shape[0] == 0:
            return None, MemoryState(tail, memory)
        blocks, count = self.schedule.blocks, persistent.shape[0]
        _, fresh = self.begin(1, like)
        y, state = self._read(persistent[None], fresh, None, CapacitySchedule(blocks, blocks * count), grows=True)
        state = pytree.tree_map(lambda s: s.expand(batch, *s.shape[1:]), state)
        return y[0], state._replace(memory=state.memory._replace(position=memory.position))

    def recall(
        self,
        x: Tensor,
        state: MemoryState,
        past: tuple[Tensor, ...],
        position: Tensor,
        segment: int,
        query: nn.Linear,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`M phi(q)` for `q = x query`, without writing, with what the memory held where the segment started: all keys,
        what is written at them, and the weights if there are any."""
        contents = tuple(state.memory)[: len(state.memory._fields) - 3]
        past = past_of(contents, position, past, segment)
        q = F.silu(query(x)).unflatten(-1, (self.heads, -1))
        return cast(self._answer(unit_length(q), past).flatten(2), q.dtype), past

    def _initial(self, batch: int, like: Tensor) -> Any:
        """The empty memory of `batch` rows, in the dtype and on the device of `like`."""
        sizes = (batch, self.heads, self.key_dim, self.value_dim)
        return exponential_memory.initial_state(*sizes, window=self.lags, like=like, normalizer=self.normalizer)

    def _answer(self, q: Tensor, contents: tuple[Tensor, ...]) -> Tensor:
        return exponential_memory.retrieve(q, *contents, scale=self.scale, normalizer=self.normalizer)

    def _memorize(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_retention: Tensor | None,
        step_size: Tensor,
        state: Any,
        lengths: Tensor | None,
        grows: bool,
    ) -> tuple[Tensor, Any]:
        """The rule, from `[B, L, H, ...]`: read-outs and the new memory."""
        return exponential_memory.exponential_memory(
            q,
            k,
            v,
            log_retention,
            step_size,
            state,
            scale=self.scale,
            objective=self.objective,
            normalizer=self.normalizer,
            lengths=lengths,
            grows=grows,
            backend=self.backend,
        )

    def _read(
        self, x: Tensor, state: MemoryState, lengths: Tensor | None, schedule: CapacitySchedule, grows: bool
    ) -> tuple[Tensor, MemoryState]:
        projected, pieces = self.qkv_proj(x), []
        weight = self.conv(projected)
        for at, piece in enumerate(split((projected, *self.gates.each(x)), self.segment)):
            added = None if lengths is None else (lengths - at * self.segment).clamp(0, piece[0].shape[1])  # type: ignore[union-attr]
            pieces.append((schedule, grows, weight, added, *piece))
        return scan(self._piece, state, pieces)

    def _piece(
        self,
        state: MemoryState,
        schedule: CapacitySchedule,
        grows: bool,
        conv_weight: Tensor,
        lengths: Tensor | None,
        projected: Tensor,
        step_size: Tensor,
        log_retention: Tensor | None = None,
    ) -> tuple[Tensor, MemoryState]:
        dtype = projected.dtype
        (qk, v), tail = self.conv.convolve(projected, conv_weight, state.conv_tail, lengths)
        q, k = qk.unbind(2)
        y, memory = self._memorize(
            q,
            k,
            self._opened(v.unflatten(-1, (self.heads, -1)), state.memory.position, schedule),
            log_retention,
            step_size,
            state.memory,
            lengths,
            grows,
        )
        return cast(y.flatten(2), dtype), MemoryState(tail, memory)

    def _opened(self, v: Tensor, position: Tensor, schedule: CapacitySchedule) -> Tensor:
        """Values `[B, L, H, V]` with 0 where a token sees no open block."""
        return schedule.opened(v, position, axis=2 if self.axis == "head" else 3, backend=self.backend)


class DeepExponentialMemory(ExponentialMemory):
    """The same with a network of two layers on the features; see `memzoo.kernels.deep_exponential_memory`."""

    segment = 32  # a token's graph holds what is written at every key

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.max_step_size)
        self.max_gradient_norm = config.max_gradient_norm
        widths = [self.key_dim, config.memory_expansion * self.key_dim, self.value_dim]
        self.initial_weights = InitialWeights(self.heads, widths, gated=False)

    def _initial(self, batch: int, like: Tensor) -> Any:
        # Copies: a cached state must not change when the optimizer moves the parameters.
        weights = [w.to(like.dtype, copy=True) for w in self.initial_weights()]
        return deep_exponential_memory.initial_state(weights, batch, window=self.lags)

    def _answer(self, q: Tensor, contents: tuple[Tensor, ...]) -> Tensor:
        return deep_exponential_memory.retrieve(q, *contents, scale=self.scale)

    def _memorize(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_retention: Tensor | None,
        step_size: Tensor,
        state: Any,
        lengths: Tensor | None,
        grows: bool,
    ) -> tuple[Tensor, Any]:
        return deep_exponential_memory.deep_exponential_memory(
            q,
            k,
            v,
            log_retention,
            step_size,
            state,
            scale=self.scale,
            objective=self.objective,
            max_gradient_norm=self.max_gradient_norm,
            lengths=lengths,
            grows=grows,
            backend=self.backend,
        )


def exponential_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
    """The mixer of a block by the config's `layer_types`, `variant` and `memory`."""
    memory = {"linear": ExponentialMemory, "mlp": DeepExponentialMemory}[config.memory]
    return mixer_of(partial(WIRINGS[config.variant], memory=memory), config, layer_idx)
