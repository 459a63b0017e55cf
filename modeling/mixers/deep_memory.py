"""The deep memory as a layer: projections, short convolution and gates around `memzoo.kernels.deep_memory`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from memzoo.kernels.deep_memory import DeepMemoryState, Muon, deep_memory, initial_state
from memzoo.kernels.gates import Gate, gates
from memzoo.kernels.registry import cast
from memzoo.kernels.retrieval import retrieve
from memzoo.kernels.short_conv import Vectors, short_conv
from memzoo.kernels.unit_length import unit_length
from memzoo.modeling.capacity import CapacitySchedule
from memzoo.modeling.mixers.features import FeatureMap, feature_map


class MemoryState(NamedTuple):
    """A memory layer between two tokens."""

    conv_tail: Tensor
    """The last inputs of the short convolution, `[B, conv_width - 1, H (2 K + V)]`."""
    memory: Any
    """A `DeepMemoryState`, or what else the memory is."""


class ShortConv(nn.Module):
    """A causal depthwise convolution with SiLU; see `memzoo.kernels.short_conv`, also for its first channels as
    `vectors`.

    A call with its input gives its weight, which `convolve` takes: what a backward recomputes calls no module, and
    accelerate, where it keeps weights elsewhere, brings in those of the module that is called.
    """

    def __init__(self, channels: int, width: int, backend: str, vectors: Vectors | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.backend, self.vectors = backend, vectors

    def init_weights(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight

    def convolve(self, x: Tensor, weight: Tensor, tail: Tensor | None, lengths: Tensor | None) -> tuple[Any, Tensor]:
        """What the op gives for `x` `[B, L, D]`."""
        return short_conv(
            *(x, cast(weight, x.dtype), None if tail is None else cast(tail, x.dtype)),
            activation="silu",
            vectors=self.vectors,
            lengths=lengths,
            backend=self.backend,
        )


class InnerGates(nn.Linear):
    """One number per head and token for each of several gates: a retention, a momentum, a step size.

    Args:
        width: model width.
        heads: heads.
        kinds: what each gate is of its logits; see `memzoo.kernels.gates`.
        ranges: for each logit the range of its initial `sigmoid(bias)`, log-uniform over the heads.
        backend: of the kernel.
    """

    def __init__(
        self, width: int, heads: int, kinds: Sequence[Gate], ranges: Sequence[tuple[float, float]], backend: str
    ) -> None:
        self.heads, self.kinds, self.ranges, self.backend = heads, tuple(kinds), ranges, backend
        super().__init__(width, heads * len(ranges), bias=True)

    def init_weights(self) -> None:
        shares = [torch.linspace(math.log(low), math.log(high), self.heads).exp() for low, high in self.ranges]
        init.copy_(self.bias, torch.logit(torch.cat(shares)).to(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 1 or not x.is_cpu or torch.is_grad_enabled():
            return super().forward(x)
        # The product of a token that adds a bias would be the only one of its kind: its code is in no cache of a CPU.
        return F.linear(x, self.weight).add_(self.bias)

    def each(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[B, T, D]` to each gate, `[B, T, H]` or with lags `[B, T, H, c]`. (`forward` is the linear layer's, as
        adapters expect of one.)"""
        return gates(self(x), self.kinds, backend=self.backend)


class InitialWeights(nn.Module):
    """`W_0`, learned by the outer loop: the memory before the first token.

    Source: TNT (arXiv 2511.07343), Eq 6, for a learned initial memory; Titans is silent. The last layer of a deep
    memory starts small and a matrix memory at zero, never all layers at zero, where no inner gradient could flow.

    Args:
        heads: heads.
        widths: of keys, hidden layers and values.
        gated: whether the first layer has two rows per hidden unit.
    """

    def __init__(self, heads: int, widths: list[int], gated: bool) -> None:
        super().__init__()
        self.depth = len(widths) - 1
        for layer in range(self.depth):
            rows = widths[layer + 1] * (2 if gated and layer == 0 else 1)
            self.register_parameter(f"layer_{layer}", nn.Parameter(torch.empty(heads, rows, widths[layer])))

    def init_weights(self) -> None:
        for layer, weight in enumerate(self()):
            scale = 1.0 if layer < self.depth - 1 else (0.0 if self.depth == 1 else 0.1)
            init.normal_(weight, 0.0, scale * weight.shape[-1] ** -0.5)

    def forward(self) -> list[Tensor]:
        return [getattr(self, f"layer_{layer}") for layer in range(self.depth)]


class DeepMemory(nn.Module):
    """A deep memory per head, from hidden states to read-outs.

        q, k, v = SiLU(conv(x W_Q, x W_K, x W_V)),  q and k scaled to unit length, then mapped to their features
        y_t = M_t(q_t),  M_t as in `memzoo.kernels.deep_memory`

    Source: Titans (arXiv 2501.00663), section 3.1 and 4.4; ATLAS (arXiv 2505.23735), section 3, for window, features
    and Muon. Deviations: gates are one scalar per head and token (and lag, of which the mean over the window is taken),
    each a sigmoid of a linear map (the papers leave the map open); the initial memory is learned.

    Args:
        config: a `DeepMemoryConfig`.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        width, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        inner = heads * head_dim
        hidden = [head_dim * config.memory_expansion] * (config.memory_depth - 1)
        self.heads, self.key_dim, self.value_dim = heads, head_dim, head_dim
        self.chunk_size = config.chunk_size
        self.window, self.halo = config.window, config.window - 1 if config.window_halo else 0
        self.objective = config.objective
        self.muon = Muon(config.newton_schulz_steps, config.muon_every) if config.use_muon else None
        self.activation = config.memory_activation
        self.residual = config.memory_residual
        self.max_gradient_norm = math.inf if config.max_gradient_norm is None else config.max_gradient_norm
        self.backend = config.kernel_backend
        self.schedule = CapacitySchedule(config.capacity_blocks, config.capacity_context)
        self.use_retention, self.use_momentum = config.use_retention, config.use_momentum
        self.qkv_proj = nn.Linear(width, 3 * inner, bias=False)
        self.conv = ShortConv(3 * inner, config.conv_width, config.kernel_backend, Vectors(heads, head_dim))
        kinds, ranges = [Gate("share", config.step_limit)], [(0.12, 0.12)]
        if self.use_momentum:
            kinds.append(Gate("log_share"))
            ranges.append((0.5, 0.5))
        if self.use_retention:
            kinds.append(Gate("log_rest"))
            ranges.append((1e-3, 1e-1))
        if self.window > 1:  # a step is a mean over the window and no longer than that of one token
            kinds.append(Gate("share", 1 / self.window, self.window))
            ranges += [(0.88, 0.88), *[(0.5, 0.5)] * (self.window - 1)]
        self.gates = InnerGates(width, heads, kinds, ranges, config.kernel_backend)
        self.features = feature_map(config)
        self.initial_weights = InitialWeights(
            heads, [self.features.width, *hidden, head_dim], gated=config.memory == "gated_mlp"
        )

    def forward(
        self, x: Tensor, state: MemoryState, lengths: Tensor | None, room: int | None = None
    ) -> tuple[Tensor, MemoryState]:
        """Read new tokens into the memory.

        Args:
            x: `[B, L, D]`, right-padded when `lengths` `[B]` is given.
            state: from `begin` or from an earlier call.
            room: of memories that hold every token; this one's state is of constant size.

        Returns:
            Read-outs `[B, L, H V]` of H heads of width V, and the new state.
        """
        return self._read(x, state, lengths, self.chunk_size, self.schedule.unlock)

    def begin(
        self, batch: int, like: Tensor, persistent: Tensor | None = None, room: int | None = None
    ) -> tuple[Tensor | None, MemoryState]:
        """The memory before the first token: `W_0`, with the persistent tokens `[P, D]` written to it.

        They are one chunk of their own, before token 1 and while one capacity block is open, so that the chunk grid
        and the capacity schedule count real tokens only. Returns their read-outs `[P, D]` and the state of `batch`
        rows.
        """
        blocks = self.schedule.blocks
        dtype = torch.promote_types(like.dtype, torch.float32)
        # Copies: a cached state must not change when the optimizer moves the parameters.
        weights = [w.to(dtype, copy=True) for w in self.initial_weights()]
        if persistent is None or persistent.shape[0] == 0:
            tail = like.new_zeros(batch, self.conv.weight.shape[1] - 1, self.conv.weight.shape[0])
            return None, MemoryState(tail, self._initial(weights, batch, self.chunk_size))
        count = persistent.shape[0]
        _, fresh = self.begin(1, like)
        fresh = fresh._replace(memory=self._initial(weights, 1, count))
        unlock = (0, *[count] * (blocks - 1))
        output, written = self._read(persistent[None], fresh, None, count, unlock)
        memory = self._initial([w[0] for w in written.memory.weights], batch, self.chunk_size)._replace(
            momentum=tuple(s.expand(batch, -1, -1, -1) for s in written.memory.momentum),
            recent_keys=written.memory.recent_keys.expand(batch, -1, -1, -1),
            recent_values=written.memory.recent_values.expand(batch, -1, -1, -1),
        )
        return output[0], MemoryState(written.conv_tail.expand(batch, -1, -1), memory)

    def _initial(self, weights: list[Tensor], batch: int, chunk_size: int) -> DeepMemoryState:
        return initial_state(
            weights,
            batch,
            chunk_size=chunk_size,
            blocks=self.schedule.blocks,
            momentum=self.use_momentum,
            halo=self.halo,
        )

    def recall(
        self,
        x: Tensor,
        state: MemoryState,
        past: tuple[Tensor, ...],
        position: Tensor,
        segment: int,
        query: nn.Linear,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`M(q)` for `q = x query`, read without writing, at the weights of the chunk in which the segment started."""
        q = query(x).unflatten(-1, (self.heads, -1))
        dtype, unit = q.dtype, type(self.features) is FeatureMap
        y, past = retrieve(
            q if unit else self.features(unit_length(F.silu(q))),
            state.memory.weights,
            position,
            past=past,
            segment=segment,
            activation=self.activation,
            residual=self.residual,
            unlock=self.schedule.unlock,
            unit=unit,
            backend=self.backend,
        )
        return cast(y.flatten(2), dtype), past

    def _read(
        self, x: Tensor, state: MemoryState, lengths: Tensor | None, chunk_size: int, unlock: tuple[int, ...]
    ) -> tuple[Tensor, MemoryState]:
        projected = self.qkv_proj(x)
        (qk, v), tail = self.conv.convolve(projected, self.conv(projected), state.conv_tail, lengths)
        q, k = self.features(qk).unbind(2)
        step_size, *others = self.gates.each(x)
        log_momentum = others.pop(0) if self.use_momentum else None
        log_retention = others.pop(0) if self.use_retention else None
        output, memory = deep_memory(
            q,
            k,
            v.unflatten(-1, (self.heads, -1)),
            log_retention,
            log_momentum,
            step_size,
            state.memory,
            chunk_size=chunk_size,
            window_gate=others[0] if others else None,
            activation=self.activation,
            residual=self.residual,
            objective=self.objective,
            muon=self.muon,
            unlock=unlock,
            max_gradient_norm=self.max_gradient_norm,
            lengths=lengths,
            backend=self.backend,
        )
        return cast(output.flatten(2), v.dtype), MemoryState(tail, memory)
