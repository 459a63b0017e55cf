"""Memories of one matrix per head as layers: projections, convolution, gates and output around the recurrences.

Proteus on a matrix memory (arXiv 2608.16844): the memory starts at zero, so that masking what is written (the keys for
blocks of key coordinates, the values for blocks of value coordinates or heads) with the current token's open blocks is
the whole schedule, exactly and at any chunk size: what is closed has never been written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from memzoo.kernels.addresses import addresses
from memzoo.kernels.delta_rule import delta_rule
from memzoo.kernels.gates import Decay, Gate, gates
from memzoo.kernels.linear_attention import linear_attention
from memzoo.kernels.norm_gate import norm_gate
from memzoo.kernels.registry import as_given, cast, constant
from memzoo.kernels.rms_norm import rms_norm
from memzoo.kernels.rotary import rotary
from memzoo.kernels.scan import scan, split
from memzoo.kernels.short_conv import Vectors, new_tail
from memzoo.modeling.capacity import CapacitySchedule
from memzoo.modeling.decoder import Mixer, Step
from memzoo.modeling.mixers.attention import CausalAttention, HeadRotaryEmbedding, KeyValueState
from memzoo.modeling.mixers.deep_memory import InnerGates, ShortConv

SEGMENT = 512
"""Tokens of a piece between the projections; a multiple of the rules' chunk."""


class MatrixState(NamedTuple):
    """A matrix memory between two tokens."""

    memory: Tensor
    """`[B, H, K, V]`, float32 or wider."""
    conv_tail: Tensor
    """The last inputs of the short convolution, `[B, conv_width - 1, H (2 K + V)]`."""
    keys: Tensor
    """Keys of the last `c - 1` tokens, the newest first, `[B, c - 1, H, K]`; c = 1 but for SWLA."""
    values: Tensor
    """Their values, `[B, c - 1, H, V]`."""


class MatrixMemory(Mixer):
    """What the matrix memories share; `memorize` is the rule of each.

    q, k, v = SiLU(conv(x W_QKV));  y = rule(q, k, v);  o = W_O (RMSNorm_head(s y) * gate(x W_G))

    The scale of the queries is `s = K^-1/2`, or 1. It is left to the norm, of which the epsilon alone sees it:
    `s y / sqrt(mean (s y)^2 + eps) = y / sqrt(mean y^2 + eps / s^2)`.
    """

    has_conv = True
    is_scaled = True
    window = 1
    kept = 0
    """Last pieces of a sequence that the backward does not compute again."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.heads, self.key_dim, self.value_dim = (
            config.memory_heads,
            config.key_head_dim,
            config.value_head_dim,
        )
        self.widths = [self.heads * self.key_dim, self.heads * self.key_dim, self.heads * self.value_dim]
        self.backend, self.axis = config.kernel_backend, config.capacity_axis
        self.schedule = CapacitySchedule(config.capacity_blocks, config.capacity_context)
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.conv = None
        if self.has_conv:
            self.conv = ShortConv(sum(self.widths), config.conv_width, config.kernel_backend, self.unit_vectors(config))
        self.norm = FusedRMSNorm(self.value_dim, eps=config.rms_norm_eps)
        self.eps = config.rms_norm_eps * (self.key_dim if self.is_scaled else 1)
        self.gating = None if config.output_gate is None else {**gating(config, config.output_gate), "eps": self.eps}
        if self.gating is not None:
            self.gate_proj = nn.Linear(config.hidden_size, self.widths[2], bias=False)
        self.o_proj = nn.Linear(self.widths[2], config.hidden_size, bias=False)

    def unit_vectors(self, config: PreTrainedConfig) -> Vectors | None:
        """Queries and keys, if the convolution is to scale them to unit length."""
        return Vectors(self.heads, self.key_dim, eps=getattr(config, "unit_eps", 0.0))

    def controls(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """What the rule takes from `x` `[B, L, D]` besides queries, keys and values, each `[B, L, ...]`."""
        return ()

    def memorize(
        self, qk: Tensor, v: Tensor, controls: Sequence[Any], step: Step, state: MatrixState
    ) -> tuple[Tensor, MatrixState]:
        """Read-outs `[B, L, H, V]`, not scaled, and the state with its new memory (and `keys` and `values`).

        Args:
            qk: queries and keys, not scaled but to unit length where they are `unit_vectors`, `[B, L, 2, H, K]`: what
                both undergo, they do at once.
            v: values, `[B, L, H, V]`.
            controls: what `controls` gave.
        """
        raise NotImplementedError

    def forward(self, x: Tensor, step: Step, state: MatrixState | None) -> tuple[Tensor, MatrixState]:
        projected = self.qkv_proj(x)
        gate = None if self.gating is None else self.gate_proj(x)
        pieces = split((projected, gate, *self.controls(x)), SEGMENT)
        steps = step.split(x.shape[1], SEGMENT)
        weights = None if self.conv is None else self.conv(projected), self.norm(projected)
        begun = self._begin(projected) if state is None else state
        y, new_state = scan(
            self._piece, begun, [(at, weights, *piece) for at, piece in zip(steps, pieces, strict=True)], self.kept
        )
        return self.o_proj(y), new_state

    def _piece(
        self,
        state: MatrixState,
        step: Step,
        weights: tuple[Tensor | None, Tensor],
        projected: Tensor,
        gate: Tensor | None,
        *controls: Tensor | None,
    ) -> tuple[Tensor, MatrixState]:
        """All between the projections, `[B, L, H V]`, with the `weights` of the convolution and the norm."""
        dtype = projected.dtype
        qkv: Any = projected
        if self.conv is not None and weights[0] is not None:
            qkv, tail = self.conv.convolve(projected, weights[0], state.conv_tail, step.lengths)
            state = state._replace(conv_tail=tail)
        rows, tokens, _ = projected.shape
        if self.conv is None or self.conv.vectors is None:
            qkv = qkv.split_with_sizes((2 * self.widths[0], self.widths[2]), dim=-1)
            qkv = qkv[0].view(rows, tokens, 2, self.heads, -1), qkv[1]
        qk, v = qkv
        y, state = self.memorize(qk, v.view(rows, tokens, self.heads, -1), controls, step, state)
        y = cast(y, weights[1].dtype)
        if gate is None or self.gating is None:
            y = rms_norm(y, weights[1], self.eps).flatten(2)
        else:
            y = norm_gate(y, weights[1], gate, **self.gating)
        return cast(y, dtype), state

    def _begin(self, like: Tensor) -> MatrixState:
        rows, before = like.shape[0], self.window - 1
        wide = torch.promote_types(like.dtype, torch.float32)
        return MatrixState(
            memory=like.new_zeros(rows, self.heads, self.key_dim, self.value_dim, dtype=wide),
            conv_tail=like.new_zeros(rows, 0 if self.conv is None else self.conv.weight.shape[1] - 1, like.shape[2]),
            keys=like.new_zeros(rows, before, self.heads, self.key_dim, dtype=wide),
            values=like.new_zeros(rows, before, self.heads, self.value_dim),
        )

    @property
    def gated_units(self) -> int:
        """Coordinates of a head's keys or values that open at times of their own."""
        return 1 if self.schedule.blocks == 1 else {"key": self.key_dim, "value": self.value_dim, "head": 1}[self.axis]

    def is_open(self, step: Step, tokens: int) -> Tensor | None:
        """What of a key or value each token sees, `[B, L, H or 1, K or V or 1]`; `None` for all."""
        if self.schedule.blocks == 1:
            return None
        by_head = self.axis == "head"
        mask = self.schedule.is_open(self.heads if by_head else self.gated_units, step.position, tokens)
        return mask[..., None] if by_head else mask[:, :, None]

    def opened(self, step: Step, keys: Sequence[Tensor], values: Tensor) -> tuple[list[Tensor], Tensor]:
        """Keys `[B, L, H, K]` and values `[B, L, H, V]` with 0 where a token sees no open block."""

        def opened(x: Tensor, axis: int) -> Tensor:
            return self.schedule.opened(x, step.position, axis=axis, backend=self.backend)

        if self.axis == "key":
            return [opened(k, 3) for k in keys], values
        return list(keys), opened(values, 2 if self.axis == "head" else 3)


class FusedRMSNorm(nn.RMSNorm):
    """A norm that is computed together with what follows; a call with its input gives its weight.

    It is a call because accelerate, where it keeps weights on a disk, brings in those of the module that is called, and
    PEFT puts others in its place.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def gating(config: PreTrainedConfig, activation: str) -> dict[str, Any]:
    """Options of `norm_gate`, in which a mixer's output ends."""
    return {"activation": activation, "eps": config.rms_norm_eps, "backend": config.kernel_backend}


class DecayGate(nn.Module):
    """`log a = -exp(A) softplus(x W + b)`, a retention per head (Mamba-2, arXiv 2405.21060), from what a call gives."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.time_bias = nn.Parameter(torch.empty(heads))

    def init_weights(self) -> None:
        heads = len(self.log_rate)
        init.copy_(self.log_rate, torch.linspace(1, 16, heads).log().to(self.log_rate))
        time = torch.linspace(math.log(1e-3), math.log(1e-1), heads).exp()
        init.copy_(self.time_bias, torch.log(torch.expm1(time)).to(self.time_bias))  # softplus of it is `time`

    def forward(self, x: Tensor) -> Decay:
        return Decay(self.proj(x), self.log_rate, self.time_bias)


class Retention(MatrixMemory):
    """RetNet (arXiv 2307.08621): `S_t = gamma_h S_{t-1} + k_t v_t^T`, `gamma_h = 1 - 2^(-5-h)`; rotary q and k."""

    has_conv = False

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.rotary = HeadRotaryEmbedding(config, self.key_dim)
        self.log_retention = tuple(math.log1p(-(2.0 ** (-5 - head))) for head in range(self.heads))

    def rotary_embedding(self) -> HeadRotaryEmbedding:
        return self.rotary

    def memorize(
        self, qk: Tensor, v: Tensor, controls: Sequence[Any], step: Step, state: MatrixState
    ) -> tuple[Tensor, MatrixState]:
        q, k = rotary(qk, *step.rotary[self.rotary.key], backend=self.backend).unbind(2)
        (k,), v = self.opened(step, [k], v)
        log_retention = constant(self.log_retention, state.memory, state.memory.dtype)
        y, memory = linear_attention(
            q,
            k[:, :, None],
            v[:, :, None],
            log_retention.expand(*q.shape[:2], -1),
            state.memory,
            lengths=step.lengths,
            backend=self.backend,
        )
        return y, state._replace(memory=memory)


class SlidingWindowLinear(MatrixMemory):
    """SWLA: `S_t = a_t S_{t-1} + sum_{i<c} b^i_t k_{t-i} v_{t-i}^T` (arXiv 2505.23735, Eq 20).

    One token writes its c pairs at once. Of more, since S was last complete, a pair of lag i has been written up to
    1 + i times, with together the strength

        w_{t,0} = b^0_t,    w_{t,i} = a_t w_{t-1,i-1} + b^i_t

    which the lag c - 1 completes. So this is linear attention that is c - 1 tokens late, with a read of the pairs that
    it has not got yet:

        R_t = a_t R_{t-1} + w_{t,c-1} k_{t-c+1} v_{t-c+1}^T,    S_t = R_t + sum_{i<c-1} w_{t,i} k_{t-i} v_{t-i}^T

    where R is S and w is 0 at the start, and at the end the last token's pairs complete S.

    Deviations: gates of the current token, one scalar per head, since the paper leaves their form open; unit keys.
    """

    is_scaled = False
    kept = 2

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        self.window = config.window
        super().__init__(config, layer_idx)
        ranges = [(1e-3, 1e-1), (0.5, 0.5), *[(0.12, 0.12)] * (self.window - 1)]
        kinds = Gate("log_rest"), Gate("share", lags=self.window)
        self.gates = InnerGates(config.hidden_size, self.heads, kinds, ranges, config.kernel_backend)

    def controls(self, x: Tensor) -> tuple[Tensor, ...]:
        """The log of the retention, `[B, L, H]`, and the strength at each lag, `[B, L, c, H]`."""
        log_retention, strengths = self.gates.each(x)
        return log_retention, strengths.mT

    def memorize(
        self, qk: Tensor, v: Tensor, controls: Sequence[Any], step: Step, state: MatrixState
    ) -> tuple[Tensor, MatrixState]:
        q, k = qk.unbind(2)
        gates = controls[1][..., None]
        if (is_open := self.is_open(step, v.shape[1])) is not None:
            # The current token's open blocks hold for every key that it writes, earlier ones included.
            gates = gates * is_open[:, :, None].to(gates.dtype)
        log_retention = controls[0]
        options: dict[str, Any] = {"lengths": step.lengths, "backend": self.backend}
        if v.shape[1] == 1 and step.lengths is None:
            keys, values = torch.cat([k, state.keys], dim=1), torch.cat([v, cast(state.values, v.dtype)], dim=1)
            key, value = _weighted(keys[:, None], values[:, None], gates, self.axis == "key")
            y, memory = linear_attention(q, key, value, log_retention, state.memory, **options)
            return y, state._replace(memory=memory, keys=keys[:, :-1], values=values[:, :-1])
        retention, strengths = log_retention.exp()[..., None], [gates[:, :, 0]]
        for lag in range(1, self.window):
            earlier = F.pad(strengths[-1][:, :-1], (0, 0, 0, 0, 1, 0))
            strengths.append(torch.addcmul(gates[:, :, lag], retention, earlier))
        before = _turned(cast(state.keys, k.dtype)), _turned(cast(state.values, v.dtype))
        on_keys = self.gated_units > 1 and self.axis == "key"
        q, key, value, beside, *newest = _Window.apply(qk, v, *before, on_keys, *strengths)
        y, memory = linear_attention(q, key[:, :, None], value[:, :, None], log_retention, state.memory, **options)
        if self.window > 1:
            y = beside.add_(y)
            if step.lengths is not None:
                newest = [_newest(x, old, step.lengths) for x, old in zip((k, v), before, strict=True)]
            last = torch.cat([_newest(w, torch.zeros_like(w[:, :1]), step.lengths) for w in strengths[:-1]], dim=1)
            keys, values = map(_turned, newest)
            key, value = (x.transpose(1, 2) for x in _weighted(keys, values, last, self.axis == "key"))
            with as_given(v.device):
                memory = memory + key.mT @ cast(value, key.dtype)
            state = state._replace(keys=keys, values=values)
        return y, state._replace(memory=memory)


def _weighted(key: Tensor, value: Tensor, w: Tensor, on_keys: bool) -> tuple[Tensor, Tensor]:
    """Pairs with their strengths `w` `[B, L, H, U]` on what opens at times of its own."""
    return (key * w, value) if on_keys else (key, value * cast(w, value.dtype))


class _Window(torch.autograd.Function):
    """What `SlidingWindowLinear` reads beside its recurrence and writes into it, of queries and keys `qk`
    `[B, L, 2, H, K]`, values `v` `[B, L, H, V]`, the c - 1 pairs before them, the oldest first, and the c strengths `w`
    `[B, L, H, U]`, on the keys or on the values:

        q_t,    k_{t-c+1},    w_{t,c-1} v_{t-c+1},    sum_{i<c-1} w_{t,i} (q_t . k_{t-i}) v_{t-i}

    and the last c - 1 pairs. The backward is written out: autograd's makes a tensor for each lag and adds them up.
    """

    @staticmethod
    def forward(
        ctx: Any, qk: Tensor, v: Tensor, old_keys: Tensor, old_values: Tensor, on_keys: bool, *strengths: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k = qk.unbind(2)
        tokens, most = v.shape[1], len(strengths) - 1
        keys, values = torch.cat([old_keys, k], dim=1), torch.cat([old_values, v], dim=1)
        beside, scores = None, []
        for lag, w in enumerate(strengths[:-1]):
            key, value = (x[:, most - lag :][:, :tokens] for x in (keys, values))
            scores.append((q * (key * w if on_keys else key)).sum(-1, keepdim=True))
            score, value = scores[-1] if on_keys else scores[-1] * w, cast(value, q.dtype)
            beside = score * value if beside is None else beside.addcmul_(score, value)
        key, value = _weighted(keys[:, :tokens], values[:, :tokens], strengths[-1], on_keys)
        ctx.save_for_backward(qk, keys, values, *strengths, *scores)
        ctx.on_keys = on_keys
        return q, key, value, beside, keys[:, tokens:].clone(), values[:, tokens:].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, d_q: Tensor, d_key: Tensor, d_value: Tensor, d_beside: Tensor, *d_newest: Tensor
    ) -> tuple[Tensor | None, ...]:
        qk, keys, values, *others = ctx.saved_tensors
        most = len(others) // 2
        strengths, scores = others[: most + 1], others[most + 1 :]
        q, tokens, on_keys = qk[:, :, 0], qk.shape[1], ctx.on_keys
        late = [[x[:, most - lag :][:, :tokens] for x in (keys, values)] for lag in range(most + 1)]
        key, value, w = *late[most], strengths[-1]
        d_w = [_summed(d_key * key if on_keys else d_value * value, w)]
        d_keys = torch.cat([d_key * w if on_keys else d_key, d_newest[0]], dim=1)
        d_values = torch.cat([d_value if on_keys else d_value * cast(w, d_value.dtype), d_newest[1]], dim=1)
        for lag in reversed(range(most)):
            (key, value), w, score = late[lag], strengths[lag], scores[lag]
            d_scaled = d_beside * value
            if on_keys:
                d_score = d_scaled.sum(-1, keepdim=True)
                d_w.append(d_score * q * key)
                d_score, scaled = d_score * w, score
            else:
                d_scaled = _summed(d_scaled, w)
                d_w.append(d_scaled * score)
                d_score, scaled = (d_scaled * w).sum(-1, keepdim=True), score * w
            d_q = torch.addcmul(d_q, d_score, key)
            d_keys[:, most - lag :][:, :tokens].addcmul_(d_score, q)
            d_values[:, most - lag :][:, :tokens].addcmul_(scaled, d_beside)
        d_qk = torch.stack([d_q, d_keys[:, most:]], dim=2)
        return d_qk, d_values[:, most:], d_keys[:, :most], d_values[:, :most], None, *reversed(d_w)


def _summed(d: Tensor, like: Tensor) -> Tensor:
    """Gradient of what multiplies every element of `d`, or each."""
    d = d if like.shape[-1] == d.shape[-1] else d.sum(-1, keepdim=True)
    return cast(d, like.dtype)


def _newest(x: Tensor, before: Tensor, lengths: Tensor | None) -> Tensor:
    """The tail of `[B, L, ...]` that is as long as `before`."""
    return new_tail(x.flatten(2), before.flatten(2), lengths).view(before.shape)


def _turned(x: Tensor) -> Tensor:
    """`[B, R, ...]` from its last token to its first."""
    return x if x.shape[1] < 2 else x.flip(1)


class Delta(MatrixMemory):
    """DeltaNet (arXiv 2406.06484): `S_t = S_{t-1} - b_t k_t (k_t^T S_{t-1}) + b_t k_t v_t^T`, unit q and k."""

    erase_after_decay = False

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.strength_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.kinds = (Gate("share", 2.0 if getattr(config, "allow_negative_eigenvalues", False) else 1.0),)

    def addresses(self, qk: Tensor, *controls: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where to read, write and erase (`None`: where it writes)."""
        q, k = qk.unbind(2)
        return q, k, None

    def log_retention(self, x: Tensor) -> Decay | None:
        """The log of the retention, before it is computed."""
        return None

    def controls(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """The strength, the log of the retention, and what `addresses` takes."""
        strength, *log_retention = gates(self.strength_proj(x), self.kinds, self.log_retention(x), backend=self.backend)
        return strength, log_retention[0] if log_retention else None

    def memorize(
        self, qk: Tensor, v: Tensor, controls: Sequence[Any], step: Step, state: MatrixState
    ) -> tuple[Tensor, MatrixState]:
        strength, log_retention, *others = controls
        q, k, p = self.addresses(qk, *others)
        (k, *rest), v = self.opened(step, [k] if p is None else [k, p], v)
        y, memory = delta_rule(
            q,
            k,
            v,
            strength,
            log_retention,
            state.memory,
            erase_key=rest[0] if rest else None,
            erase_after_decay=self.erase_after_decay,
            lengths=step.lengths,
            backend=self.backend,
        )
        return y, state._replace(memory=memory)


class GatedDelta(Delta):
    """Gated DeltaNet (arXiv 2412.06464): the memory decays first, `S' = a_t S_{t-1}`, then the delta rule on `S'`."""

    erase_after_decay = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.decay = DecayGate(config.hidden_size, self.heads)

    def log_retention(self, x: Tensor) -> Decay:
        return self.decay(x)


class CombaMemory(Delta):
    """Comba (arXiv 2506.02475, Eq 5): `S_t = a_t S_{t-1} - b_t k_t (p_t^T S_{t-1}) + b_t k_t v_t^T`, read at a
    corrected query; see `CombaConfig` for the two variants of `p` and the query."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        self.is_paper, self.initial_correction = config.variant == "paper", config.correction
        super().__init__(config, layer_idx)
        self.decay = DecayGate(config.hidden_size, self.heads)
        self.unit_eps = config.unit_eps
        self.erase_logit = nn.Parameter(torch.empty(self.heads))
        self.correction = nn.Parameter(torch.empty(self.heads))

    def unit_vectors(self, config: PreTrainedConfig) -> Vectors | None:
        return super().unit_vectors(config) if self.is_paper else None

    def init_weights(self) -> None:
        init.ones_(self.erase_logit)
        init.constant_(self.correction, self.initial_correction)

    def controls(self, x: Tensor) -> tuple[Tensor | None, ...]:
        return (*super().controls(x), *(a.expand(*x.shape[:2], -1) for a in (self.erase_logit, self.correction)))

    def addresses(self, qk: Tensor, *controls: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        unit_eps = None if self.is_paper else self.unit_eps
        return addresses(*qk.unbind(2), *controls, unit_eps=unit_eps, backend=self.backend)

    def log_retention(self, x: Tensor) -> Decay:
        return self.decay(x)


class AttentionMixer(Mixer):
    """Softmax attention with rotary embeddings as a layer of its own; its cache grows without a window."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int, window: int | None) -> None:
        super().__init__(config, layer_idx)
        self.attention = CausalAttention(config, window=window)
        width = config.num_attention_heads * config.head_dim
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_out_bias)

    def rotary_embedding(self) -> HeadRotaryEmbedding:
        return self.attention.rotary

    def forward(self, x: Tensor, step: Step, state: KeyValueState | None) -> tuple[Tensor, KeyValueState]:
        y, state = self.attention(x, step.rotary[self.attention.rotary.key], step.lengths, state, room=step.room)
        return self.o_proj(y), state


def mixer_of(memory: Callable[..., Mixer] | None, config: PreTrainedConfig, layer_idx: int) -> Mixer:
    """The mixer of a block by the config's `layer_types`."""
    kind = config.mixer_types[layer_idx]
    if kind == "linear_attention":
        assert memory is not None
        return memory(config, layer_idx)
    return AttentionMixer(config, layer_idx, config.sliding_window if kind == "sliding_attention" else None)
