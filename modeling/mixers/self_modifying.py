"""Self-modifying memories as a layer: keys, values, gates and read-outs all come from memories that learn in context.

One memory reads or writes as fast as a matrix: at the weights of the last boundary the gradient of a token has rank one
in each layer, so that the first layer of every memory is a delta rule and the second one linear attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from memzoo.kernels.deep_memory.activations import ACTIVATION
from memzoo.kernels.delta_rule import delta_rule
from memzoo.kernels.linear_attention import linear_attention
from memzoo.kernels.registry import cast
from memzoo.kernels.unit_length import unit_length, widened
from memzoo.modeling.decoder import Mixer, Step
from memzoo.modeling.mixers.deep_memory import ShortConv
from memzoo.modeling.mixers.wirings import MemoryOutput
from memzoo.modeling.parts import joined, parts_of

KEY, VALUE, STEP, FORGET, MEMORY, QUERY = range(6)


class Weights(NamedTuple):
    """All memories' layers."""

    first: Tensor
    """`W_2^T` of every memory side by side, `[B, H, d, N F]`."""
    second: Tensor
    """`W_1^T` of every memory, `[B, H N, F, d]`."""


class SelfModifyingState(NamedTuple):
    """The memories between two tokens."""

    conv_tail: Tensor
    """The last inputs of the short convolution, `[B, conv_width - 1, 2 D]`, or `D` where queries are adapted."""
    now: Weights
    """With every token written."""
    anchor: Weights
    """At each memory's last boundary, where it is read and its gradients are taken."""


class SelfModifying(Mixer):
    """Self-referential Titans: per head, memories `M(x) = x + W_1 act(W_2 x)` that make their own training data.

        k_t = M_k(u_t),  v_t = M_v(u_t),  eta_t = M_eta(u_t),  alpha_t = M_alpha(u_t),  vhat_m,t = M_m(v_t)   (Eq 86-87)
        g_m,t = gradient of 1/2 |M_m(k_t) - vhat_m,t|^2, vhat constant
        W_2 <- W_2 (alpha_t I - eta_t k_t k_t^T) - eta_t g,    W_1 <- alpha_t W_1 - eta_t g                  (Eq 88)
        y_t = M_memory(q_t)

    for each memory m of k, v, eta, alpha and memory, and of q where it adapts as well. Right-hand sides and reads take
    the weights of the memory's last boundary (Eq 90): every `chunk_size` tokens for M_memory, every `self_chunk_size`
    for the others.

    Source: Nested Learning (arXiv 2512.24695), Eq 83-93. Deviations: a boundary is the end of the last chunk, where the
    printed index would be the end of the current one; memories are per head, on `u = SiLU(conv(x W_U))`, and keys and
    queries are scaled to unit length; Eq 88 as printed fits the first layer alone, the second has no `k k^T`; gates are
    one number per head and token, `eta = limit sigmoid(r . n(M_eta(u)) + b)` and
    `alpha = sigmoid(-r . n(M_alpha(u)) - b)` with learned r and b of each and n an RMS norm; one token's gradient is
    bounded by `max_gradient_norm`. There is no momentum, of which the paper's ablation speaks and no equation.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, self.heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.units = config.head_dim * config.memory_expansion
        self.act, self.backend = ACTIVATION[config.memory_activation], config.kernel_backend
        self.chunk_size, self.self_chunk_size = config.chunk_size, config.self_chunk_size
        self.step_limit, self.max_gradient_norm = config.step_limit, config.max_gradient_norm
        self.count = 6 if config.adaptive_query else 5
        self.streams = 1 if config.adaptive_query else 2
        self.in_proj = nn.Linear(width, self.streams * width, bias=False)
        self.conv = ShortConv(self.streams * width, config.conv_width, config.kernel_backend)
        self.initial_weights = InitialMemories(self.heads, self.count, self.head_dim, self.units)
        self.gates = GateReadout(self.heads, self.head_dim)
        self.output = MemoryOutput(config, self.heads, self.head_dim, "silu")

    def forward(self, x: Tensor, step: Step, state: SelfModifyingState | None) -> tuple[Tensor, SelfModifyingState]:
        if state is None:
            state = self._begin(x)
        projected = self.in_proj(x)
        streams, tail = self.conv.convolve(projected, self.conv(projected), state.conv_tail, step.lengths)
        u, *q = widened(streams).unflatten(-1, (self.streams, self.heads, -1)).unbind(2)
        parts, outputs = list(parts_of(step, x.shape[1], self.chunk_size)), []
        now, anchor = state.now, state.anchor
        for part in parts:
            anchor = self._anchored(now, anchor, part.step.position)
            y, now = self._part(part.of(u), [part.of(x) for x in q], part.step.lengths, now, anchor)
            outputs.append(y)
        y = cast(joined(parts, outputs, u).flatten(2), streams.dtype)
        return self.output(y, x), SelfModifyingState(tail, now, anchor)

    def _begin(self, like: Tensor) -> SelfModifyingState:
        rows = like.shape[0]
        dtype = torch.promote_types(like.dtype, torch.float32)
        # Copies: a cached state must not change when the optimizer moves the parameters.
        weights = Weights(*(w.to(dtype).repeat(rows, 1, 1, 1) for w in self.initial_weights()))
        tail = like.new_zeros(rows, self.conv.weight.shape[1] - 1, self.conv.weight.shape[0])
        return SelfModifyingState(tail, weights, weights)

    def _anchored(self, now: Weights, anchor: Weights, position: Tensor) -> Weights:
        """The weights to read at in rows that have read `position` tokens: of now, where a chunk begins."""
        ends = torch.where(
            torch.arange(self.count, device=position.device) == MEMORY,
            (position % self.chunk_size == 0)[:, None],
            (position % self.self_chunk_size == 0)[:, None],
        )  # [B, N]
        first = torch.where(ends.repeat_interleave(self.units, 1)[:, None, None], now.first, anchor.first)
        second = torch.where(ends.repeat(1, self.heads)[:, :, None, None], now.second, anchor.second)
        return Weights(first, second)

    def _read(self, x: Tensor, weights: Weights, memories: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """`M(x)` `[B, L, H, n, d]` for `x` `[B, L, H, d]` or `[B, L, H, n, d]`, and the pre-activations
        `[B, L, H, n, F]`."""
        first = _chosen(weights.first.unflatten(-1, (self.count, -1)), 3, memories)
        second = _chosen(weights.second.unflatten(1, (self.heads, -1)), 2, memories)
        if x.ndim == 4:
            x = x.unsqueeze(3)
        hidden = torch.einsum("blhnd,bhdnf->blhnf", x.expand(-1, -1, -1, first.shape[3], -1), first)
        return x + torch.einsum("blhnf,bhnfd->blhnd", self.act.value(hidden), second), hidden

    def _part(
        self, u: Tensor, q: list[Tensor], lengths: Tensor | None, now: Weights, anchor: Weights
    ) -> tuple[Tensor, Weights]:
        """Tokens of one chunk: read-outs `[B, L, H, d]` and the weights after them; `q`: none if a memory makes it."""
        every = [slice(0, self.count)]
        asked = [slice(KEY, FORGET + 1), *([slice(QUERY, QUERY + 1)] if self.count > QUERY else [])]
        made = self._read(u, anchor, asked)[0].unbind(3)
        k, v = unit_length(made[0]), made[1]
        step_size, log_retention = self.gates(made[2], made[3], self.step_limit)
        query = unit_length(made[-1] if self.count > QUERY else q[0])
        y = self._read(query, anchor, [slice(MEMORY, MEMORY + 1)])[0][:, :, :, 0]

        wanted, _ = self._read(v, anchor, every)
        got, hidden = self._read(k, anchor, every)
        error, units = got - wanted, self.act.value(hidden)
        second = anchor.second.unflatten(1, (self.heads, -1))
        slope = self.act.pullback(torch.einsum("blhnd,bhnfd->blhnf", error, second), hidden)
        scale = self._bounded(error, units, slope)
        write = -step_size[..., None, None] * scale
        _, first = delta_rule(
            torch.zeros_like(k),
            k,
            (-scale * slope).flatten(3),
            step_size,
            log_retention,
            now.first,
            lengths=lengths,
            backend=self.backend,
        )
        _, second = linear_attention(
            torch.zeros_like(units).flatten(2, 3),
            units.flatten(2, 3)[:, :, None],
            (write * error).flatten(2, 3)[:, :, None],
            log_retention.repeat_interleave(self.count, 2),
            now.second,
            lengths=lengths,
            backend=self.backend,
        )
        return y, Weights(first, second)

    def _bounded(self, error: Tensor, units: Tensor, slope: Tensor) -> Tensor:
        """What shortens each memory's gradient of a token, `[B, L, H, n, 1]`, to the bound; keys are of unit length."""
        if self.max_gradient_norm is None:
            return torch.ones_like(error[..., :1])
        squares = error.square().sum(-1) * units.square().sum(-1) + slope.square().sum(-1)
        limit = self.max_gradient_norm
        return (limit * squares.clamp(min=limit**2).rsqrt())[..., None]


def _chosen(x: Tensor, axis: int, memories: Sequence[slice]) -> Tensor:
    """Some of the memories along an axis, as views where they can be: a list of indices would be copied to the device
    first."""
    parts = [x.narrow(axis, some.start, some.stop - some.start) for some in memories]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


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
    """Step size and log retention from what two memories say."""

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

    def forward(self, step: Tensor, forget: Tensor, limit: float) -> tuple[Tensor, Tensor]:
        """`[B, L, H, d]` twice to `[B, L, H]` twice."""
        normed = (F.rms_norm(x, x.shape[-1:]) for x in (step, forget))
        logits = [(x * w).sum(-1) + b for x, w, b in zip(normed, self.weight, self.bias, strict=True)]
        return limit * torch.sigmoid(logits[0]), F.logsigmoid(-logits[1])
