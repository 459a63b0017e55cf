"""The deep memory as a layer: projections, short convolution and gates around `memzoo.kernels.deep_memory`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from memzoo.kernels.blocked import blocked
from memzoo.kernels.deep_memory import DeepMemoryState, deep_memory, initial_state
from memzoo.kernels.deep_memory.retrieval import retrieve
from memzoo.kernels.registry import cast
from memzoo.kernels.short_conv import short_conv
from memzoo.modeling.capacity import CapacitySchedule


class MemoryState(NamedTuple):
    """A memory layer between two tokens."""

    conv_tail: Tensor
    """The last inputs of the short convolution, `[B, conv_width - 1, 3 D]`."""
    memory: DeepMemoryState


class ShortConv(nn.Module):
    """A causal depthwise convolution with SiLU; see `memzoo.kernels.short_conv`."""

    def __init__(self, channels: int, width: int, backend: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.backend = backend

    def init_weights(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, tail: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        return short_conv(x, cast(self.weight, x.dtype), tail, activation="silu", lengths=lengths, backend=self.backend)


class InnerGates(nn.Linear):
    """Logits of one number per head and token for each of several gates: a retention, a momentum, a step size.

    Args:
        width: model width.
        heads: heads.
        ranges: for each gate the range of its initial `sigmoid(bias)`, log-uniform over the heads.
    """

    def __init__(self, width: int, heads: int, ranges: Sequence[tuple[float, float]]) -> None:
        self.heads, self.ranges = heads, ranges
        super().__init__(width, heads * len(ranges), bias=True)

    def init_weights(self) -> None:
        shares = [torch.linspace(math.log(low), math.log(high), self.heads).exp() for low, high in self.ranges]
        init.copy_(self.bias, torch.logit(torch.cat(shares)).to(self.bias))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """`[B, T, D]` to a `[B, T, H]` per gate, in float32 or wider: a retention near 1 has no bfloat16 neighbours
        worth having."""
        return widened(super().forward(x)).unflatten(-1, (-1, self.heads)).unbind(-2)


def unit_length(x: Tensor, eps: float = 0.0) -> Tensor:
    """`x / max(|x|, 1e-6)`, or `x / sqrt(|x|^2 + eps)`, over the last dimension, in float32 or wider (float16 has no
    1e-6)."""
    return blocked(partial(_unit_length, eps=eps), x)


def _unit_length(x: Tensor, eps: float) -> Tensor:
    x = widened(x)
    if eps:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return _Unit.apply(x)


class _Unit(torch.autograd.Function):
    """`y = x / max(|x|, 1e-6)`; `dx = (dy - y (y . dy)) / |x|`, a third of the passes of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-6)
        y = x / norm
        ctx.save_for_backward(y, norm)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        y, norm = ctx.saved_tensors
        along = (y * d_y).sum(-1, keepdim=True)
        return torch.addcmul(d_y, y, torch.where(norm > 1e-6, along, 0), value=-1).div_(norm)


def widened(x: Tensor) -> Tensor:
    """`x` in float32 or wider."""
    return cast(x, torch.promote_types(x.dtype, torch.float32))


class InitialWeights(nn.Module):
    """`W_0`, learned by the outer loop: the memory before the first token.

    Source: TNT (arXiv 2511.07343), Eq 6, for a learned initial memory; Titans is silent. The last layer of a deep
    memory starts small and a matrix memory at zero, never all layers at zero, where no inner gradient could flow.
    """

    def __init__(self, heads: int, widths: list[int]) -> None:
        super().__init__()
        self.depth = len(widths) - 1
        for layer in range(self.depth):
            self.register_parameter(
                f"layer_{layer}", nn.Parameter(torch.empty(heads, widths[layer + 1], widths[layer]))
            )

    def init_weights(self) -> None:
        for layer, weight in enumerate(self()):
            scale = 1.0 if layer < self.depth - 1 else (0.0 if self.depth == 1 else 0.1)
            init.normal_(weight, 0.0, scale * weight.shape[-1] ** -0.5)

    def forward(self) -> list[Tensor]:
        return [getattr(self, f"layer_{layer}") for layer in range(self.depth)]


class DeepMemory(nn.Module):
    """A deep memory per head, from hidden states to read-outs.

        q, k, v = SiLU(conv(x W_Q, x W_K, x W_V)),  q and k scaled to unit length
        y_t = M_t(q_t),  M_t as in `memzoo.kernels.deep_memory`

    Source: Titans (arXiv 2501.00663), section 3.1 and 4.4. Deviations: gates are one scalar per head and token, each a
    sigmoid of a linear map (the paper leaves the map open); the initial memory is learned.

    Args:
        config: a `TitansConfig` or another with its memory fields.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        width, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        hidden = [head_dim * config.memory_expansion] * (config.memory_depth - 1)
        self.heads = heads
        self.chunk_size = config.chunk_size
        self.activation = config.memory_activation
        self.residual = config.memory_residual
        self.max_step_size = config.max_step_size
        self.max_gradient_norm = math.inf if config.max_gradient_norm is None else config.max_gradient_norm
        self.backend = config.kernel_backend
        self.schedule = CapacitySchedule(config.capacity_blocks, config.capacity_context)
        self.use_retention, self.use_momentum = config.use_retention, config.use_momentum
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.conv = ShortConv(3 * width, config.conv_width, config.kernel_backend)
        ranges = [(0.12, 0.12)]  # the step size
        if self.use_momentum:
            ranges.append((0.5, 0.5))
        if self.use_retention:
            ranges.append((1e-3, 1e-1))
        self.gates = InnerGates(width, heads, ranges)
        self.initial_weights = InitialWeights(heads, [head_dim, *hidden, head_dim])

    def forward(self, x: Tensor, state: MemoryState, lengths: Tensor | None) -> tuple[Tensor, MemoryState]:
        """Read new tokens into the memory.

        Args:
            x: `[B, L, D]`, right-padded when `lengths` `[B]` is given.
            state: from `begin` or from an earlier call.

        Returns:
            Read-outs `[B, L, D]` and the new state.
        """
        return self._read(x, state, lengths, self.chunk_size, self.schedule.unlock)

    def begin(self, batch: int, like: Tensor, persistent: Tensor | None = None) -> tuple[Tensor | None, MemoryState]:
        """The memory before the first token: `W_0`, with the persistent tokens `[P, D]` written to it.

        They are one chunk of their own, before token 1 and while one capacity block is open, so that the chunk grid
        and the capacity schedule count real tokens only. Returns their read-outs `[P, D]` and the state of `batch`
        rows.
        """
        blocks, has_momentum = self.schedule.blocks, self.use_momentum
        dtype = torch.promote_types(like.dtype, torch.float32)
        # Copies: a cached state must not change when the optimizer moves the parameters.
        weights = [w.to(dtype, copy=True) for w in self.initial_weights()]
        if persistent is None or persistent.shape[0] == 0:
            tail = like.new_zeros(batch, self.conv.weight.shape[1] - 1, self.conv.weight.shape[0])
            memory = initial_state(weights, batch, chunk_size=self.chunk_size, blocks=blocks, momentum=has_momentum)
            return None, MemoryState(tail, memory)
        count = persistent.shape[0]
        _, fresh = self.begin(1, like)
        fresh = fresh._replace(memory=initial_state(weights, 1, chunk_size=count, blocks=blocks, momentum=has_momentum))
        unlock = (0, *[count] * (blocks - 1))
        output, written = self._read(persistent[None], fresh, None, count, unlock)
        memory = initial_state(
            [w[0] for w in written.memory.weights],
            batch,
            chunk_size=self.chunk_size,
            blocks=blocks,
            momentum=has_momentum,
        )._replace(momentum=tuple(s.expand(batch, -1, -1, -1) for s in written.memory.momentum))
        return output[0], MemoryState(written.conv_tail.expand(batch, -1, -1), memory)

    def retrieve(self, x: Tensor, weights: tuple[Tensor, ...], position: Tensor, query: nn.Linear) -> Tensor:
        """`M(q)` for `q = x query`, read at fixed `weights` without writing, `[B, L, D]` to `[B, L, D]`."""
        q = F.silu(query(x)).unflatten(-1, (self.heads, -1))
        y = retrieve(
            unit_length(q),
            weights,
            position,
            activation=self.activation,
            residual=self.residual,
            unlock=self.schedule.unlock,
        )
        return y.flatten(2).to(q.dtype)

    def _read(
        self, x: Tensor, state: MemoryState, lengths: Tensor | None, chunk_size: int, unlock: tuple[int, ...]
    ) -> tuple[Tensor, MemoryState]:
        projected = self.qkv_proj(x)
        streams, tail = self.conv(projected, cast(state.conv_tail, projected.dtype), lengths)
        streams = streams.unflatten(-1, (3, self.heads, -1))
        (q, k), v = unit_length(streams[:, :, :2]).unbind(2), streams[:, :, 2]
        step_size, *decays = self.gates(x)
        output, memory = deep_memory(
            q,
            k,
            v,
            F.logsigmoid(-decays[-1]) if self.use_retention else None,
            F.logsigmoid(decays[0]) if self.use_momentum else None,
            self.max_step_size * torch.sigmoid(step_size),
            state.memory,
            chunk_size=chunk_size,
            activation=self.activation,
            residual=self.residual,
            unlock=unlock,
            max_gradient_norm=self.max_gradient_norm,
            lengths=lengths,
            backend=self.backend,
        )
        return cast(output.flatten(2), streams.dtype), MemoryState(tail, memory)
