"""The deep memory, token by token, an equation per line, with the weights written out and the masks put on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.deep_memory import DeepMemoryState, Muon, block_of_weight, is_gated, materialize
from memzoo.kernels.deep_memory.activations import ACTIVATION
from memzoo.kernels.newton_schulz.reference import newton_schulz


def deep_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    log_momentum: Tensor | None,
    step_size: Tensor,
    state: DeepMemoryState,
    *,
    chunk_size: int,
    window_gate: Tensor | None,
    activation: str,
    residual: bool,
    objective: str,
    muon: Muon | None,
    unlock: tuple[int, ...],
    max_gradient_norm: float,
    lengths: Tensor | None,
) -> tuple[Tensor, DeepMemoryState]:
    """See `memzoo.kernels.deep_memory.deep_memory`."""
    loss = Loss(activation, residual, objective, max_gradient_norm)
    depth, tokens, halo = len(state.weights), query.shape[1], state.halo
    blocks = [block_of_weight(layer, state) for layer in range(depth)]
    opens = torch.tensor(unlock, device=query.device)
    ones = torch.ones_like(step_size)
    retention = ones if log_retention is None else log_retention.exp()
    momentum = torch.zeros_like(step_size) if log_momentum is None else log_momentum.exp()
    gates = ones[..., None] if window_gate is None else window_gate

    weights, slots = materialize(state)  # M_t and S_t
    state = _with_rows(state, weights, per_token=muon is not None and muon.every == "token")
    outputs = []
    for t in range(tokens):
        real = torch.ones_like(state.position, dtype=torch.bool) if lengths is None else t < lengths
        row = state.position % chunk_size
        starts = real & (row == 0)
        state = _select(starts, _anchored(state, weights, slots), state)

        open_block = state.position[:, None] >= opens  # [B, E]; token t + 1 sees block e once t >= unlock[e]
        open_weight = [open_block[:, block][:, None] for block in blocks]  # g_t, [B, 1, out, in]
        k, v, q = key[:, t], value[:, t], query[:, t]
        a, m, step = (gate[:, t, :, None] for gate in (retention, momentum, step_size))  # [B, H, 1]

        # u_i = d x^T at the masked anchor (Proteus Eq 9; Titans Eq 12 and 17), of the tokens before a new chunk anew.
        anchor = [w * g for w, g in zip(state.weights, open_weight, strict=True)]
        for place in range(halo):
            pair = state.recent_keys[:, :, place], state.recent_values[:, :, place]
            here = starts[:, None] & (torch.arange(halo + chunk_size, device=q.device) == place)
            state = _with_row(state, here, *loss.gradient(anchor, *pair, open_weight))
        here = real[:, None] & (torch.arange(halo + chunk_size, device=q.device) == halo + row[:, None])
        state = _with_row(state, here, *loss.gradient(anchor, k, v, open_weight))

        # The window's gradients, by row: sum_{j<c} g_{t,j} u_{t-j} (ATLAS Eq 9).
        lag = halo + row[:, None] - torch.arange(halo + chunk_size, device=q.device)  # [B, R]
        inside = ((lag >= 0) & (lag < gates.shape[3]))[:, None].expand(-1, q.shape[1], -1)
        index = lag.clamp(0, gates.shape[3] - 1)[:, None].expand_as(inside)
        strength = torch.where(inside, gates[:, t].gather(2, index), 0)  # [B, H, R]
        if muon is None:
            strength = step * strength

        new_weights, new_slots = [], []
        for layer in range(depth):
            gradient = (state.deltas[layer] * strength[..., None]).mT @ state.inputs[layer]
            slot = slots[layer] if slots else torch.zeros_like(gradient)
            slot_next = m[..., None] * slot - gradient  # S_t = m S_{t-1} - l sum g u
            if muon is None:
                weight_next = a[..., None] * weights[layer] + slot_next  # M_t = a M_{t-1} + S_t
            elif muon.every == "chunk":
                weight_next = a[..., None] * weights[layer] + step[..., None] * slot_next
            else:  # ATLAS Eq 32
                update = loss.orthogonal(slot_next * open_weight[layer], layer, state, muon)
                weight_next = a[..., None] * weights[layer] + step[..., None] * update
            changed = open_weight[layer] & real[:, None, None, None]
            new_slots.append(torch.where(changed, slot_next, slot))
            new_weights.append(torch.where(changed, weight_next, weights[layer]))
        weights, slots = tuple(new_weights), tuple(new_slots) if slots else ()

        outputs.append(loss.network([w * g for w, g in zip(weights, open_weight, strict=True)], q)[0])
        outer = None if muon is None else step
        state = _select(real, _counted(state, a, m, strength, outer, open_block, weights, k, v), state)
        if muon is not None and muon.every == "chunk":
            ends = (real & (state.position % chunk_size == 0)).view(-1, 1, 1, 1)
            done = [
                state.weight_keep[..., blocks[layer]] * state.weights[layer]
                + state.orthogonal_step[..., blocks[layer]] * loss.orthogonal(slots[layer], layer, state, muon)
                for layer in range(depth)
            ]
            weights = tuple(torch.where(ends, new, old) for new, old in zip(done, weights, strict=True))

    at_anchor = state.position % chunk_size == 0
    return torch.stack(outputs, dim=1), _select(at_anchor, _anchored(state, weights, slots), state)


class Loss:
    """The network and the inner loss of one pair."""

    def __init__(self, activation: str, residual: bool, objective: str, max_gradient_norm: float) -> None:
        self.act, self.residual, self.objective = ACTIVATION[activation], residual, objective
        self.max_gradient_norm = max_gradient_norm

    def network(self, weights: list[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """`M(x)`, the layers' inputs and what they give, for `x` `[B, H, K]`."""
        inputs, hidden = [x], []
        for layer, weight in enumerate(weights):
            hidden.append(_apply(weight, inputs[layer]))
            if layer < len(weights) - 1:
                h = hidden[layer]
                gated = is_gated(weights)
                inputs.append(self.act.value(h[..., 0::2]) * h[..., 1::2] if gated else self.act.value(h))
        y = hidden[-1]
        return (y + x[..., : y.shape[-1]] if self.residual else y), inputs, hidden

    def gradient(
        self, weights: list[Tensor], k: Tensor, v: Tensor, is_open: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Layer inputs `x_{l-1}` and deltas `d_l`: the gradient of layer l is `d_l x_{l-1}^T`."""
        y, inputs, hidden = self.network(weights, k)
        depth = len(weights)
        deltas = [y - v if self.objective == "l2" else -v]
        for layer in range(depth - 1, 0, -1):
            back, h = _apply(weights[layer].mT, deltas[0]), hidden[layer - 1]
            if is_gated(weights):
                a, b = h[..., 0::2], h[..., 1::2]
                value, slope = self.act.derivatives(a, 1)
                deltas.insert(0, torch.stack([back * b * slope, back * value], dim=-1).flatten(-2))
            else:
                deltas.insert(0, back * self.act.derivatives(h, 1)[1])
        if depth == 1:
            inputs[0] = inputs[0] * is_open[0][:, :, 0]
        for layer in range(depth - 1):
            deltas[layer] = deltas[layer] * is_open[layer][:, :, :, 0]
            inputs[layer + 1] = inputs[layer + 1] * is_open[layer + 1][:, :, 0]
        squares = [x.square().sum(-1) * d.square().sum(-1) for x, d in zip(inputs, deltas, strict=True)]
        shorten = (torch.stack(squares).sum(0) / self.max_gradient_norm**2).clamp(min=1).rsqrt()
        return inputs, [shorten[..., None] * d for d in deltas]

    def orthogonal(self, slot: Tensor, layer: int, state: DeepMemoryState, muon: Muon) -> Tensor:
        """`NS(S)` of a layer, of each of its two matrices where it gates."""
        if layer == 0 and is_gated(state.weights):
            parts = [newton_schulz(slot[..., part::2, :], muon.steps) for part in (0, 1)]
            return torch.stack(parts, dim=-2).flatten(-3, -2)
        return newton_schulz(slot, muon.steps)


def _apply(weight: Tensor, x: Tensor) -> Tensor:
    return (weight @ x[..., None])[..., 0]


def _with_rows(state: DeepMemoryState, weights: tuple[Tensor, ...], per_token: bool) -> DeepMemoryState:
    """The state with room for rows; under per-token Muon `M_t` is held as it is."""
    if per_token:
        zero = torch.zeros_like(state.weight_keep)
        state = state._replace(current=weights, weight_keep=zero, momentum_read=zero)
    if state.inputs:
        return state
    rows = state.write.shape[-1]
    return state._replace(
        inputs=tuple(w.new_zeros(*w.shape[:2], rows, w.shape[3]) for w in state.weights),
        deltas=tuple(w.new_zeros(*w.shape[:2], rows, w.shape[2]) for w in state.weights),
    )


def _anchored(state: DeepMemoryState, weights: tuple[Tensor, ...], slots: tuple[Tensor, ...]) -> DeepMemoryState:
    """A new chunk starts: the anchor is the current memory, and nothing is written on top of it."""
    return state._replace(
        weights=weights,
        momentum=slots,
        write=torch.zeros_like(state.write),
        momentum_write=torch.zeros_like(state.momentum_write),
        weight_keep=torch.full_like(state.weight_keep, 0.0 if state.current else 1.0),
        momentum_read=torch.zeros_like(state.momentum_read),
        momentum_keep=torch.full_like(state.momentum_keep, 1.0 if slots else 0.0),
        orthogonal_step=torch.zeros_like(state.orthogonal_step),
        current=weights if state.current else (),
    )


def _with_row(state: DeepMemoryState, here: Tensor, inputs: list[Tensor], deltas: list[Tensor]) -> DeepMemoryState:
    """One more token's factors, where `here` `[B, R]`."""

    def put(rows: tuple[Tensor, ...], new: list[Tensor]) -> tuple[Tensor, ...]:
        at = here[:, None, :, None]
        return tuple(torch.where(at, x[:, :, None], old) for old, x in zip(rows, new, strict=True))

    return state._replace(inputs=put(state.inputs, inputs), deltas=put(state.deltas, deltas))


def _counted(
    state: DeepMemoryState,
    a: Tensor,
    m: Tensor,
    strength: Tensor,
    outer: Tensor | None,
    open_block: Tensor,
    weights: tuple[Tensor, ...],
    k: Tensor,
    v: Tensor,
) -> DeepMemoryState:
    """One more token in the factored form: the recurrences of `S_t` and `M_t`, coefficient by coefficient."""
    opened = open_block[:, None]

    def per_block(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(opened, new, old)

    momentum_write = m * state.momentum_write + strength
    momentum_keep = per_block(m * state.momentum_keep, state.momentum_keep)
    state = state._replace(
        recent_keys=torch.cat([state.recent_keys, k[:, :, None]], dim=2)[:, :, 1:],
        recent_values=torch.cat([state.recent_values, v[:, :, None]], dim=2)[:, :, 1:],
        momentum_write=momentum_write if state.momentum else state.momentum_write,
        momentum_keep=momentum_keep,
        position=state.position + 1,
    )
    if state.current:
        return state._replace(current=weights)
    factor = 1.0 if outer is None else outer  # of S_t in M_t
    state = state._replace(
        write=a * state.write + factor * momentum_write,
        weight_keep=per_block(a * state.weight_keep, state.weight_keep),
        momentum_read=per_block(a * state.momentum_read + factor * momentum_keep, state.momentum_read),
    )
    if outer is None:
        return state
    return state._replace(orthogonal_step=per_block(a * state.orthogonal_step + outer, state.orthogonal_step))


def _select(condition: Tensor, yes: DeepMemoryState, no: DeepMemoryState) -> DeepMemoryState:
    """Per row, `yes` where `condition` `[B]` holds."""

    def pick(a: Any, b: Any) -> Any:
        if isinstance(a, tuple):
            return tuple(pick(x, y) for x, y in zip(a, b, strict=True))
        return torch.where(condition.view(-1, *[1] * (a.ndim - 1)), a, b)

    return DeepMemoryState(*(pick(a, b) for a, b in zip(yes, no, strict=True)))
