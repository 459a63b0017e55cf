"""The deep memory, token by token, an equation per line, with the weights written out and the masks put on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.deep_memory import DeepMemoryState, block_of_weight, materialize
from memzoo.kernels.deep_memory.activations import ACTIVATION, Activation


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
    activation: str,
    residual: bool,
    unlock: tuple[int, ...],
    max_gradient_norm: float,
    lengths: Tensor | None,
) -> tuple[Tensor, DeepMemoryState]:
    """See `memzoo.kernels.deep_memory.deep_memory`."""
    act = ACTIVATION[activation]
    depth, tokens = len(state.weights), query.shape[1]
    blocks = [block_of_weight(layer, state) for layer in range(depth)]
    opens = torch.tensor(unlock, device=query.device)
    ones = torch.ones_like(step_size[:, 0])
    retention = ones[:, None].expand_as(step_size) if log_retention is None else log_retention.exp()
    momentum = torch.zeros_like(step_size) if log_momentum is None else log_momentum.exp()

    state = _with_rows(state, chunk_size)
    weights, slots = materialize(state)  # M_t and S_t
    outputs = []
    for t in range(tokens):
        real = torch.ones_like(state.position, dtype=torch.bool) if lengths is None else t < lengths
        row = state.position % chunk_size
        state = _select(real & (row == 0), _anchored(state, weights, slots), state)

        open_block = state.position[:, None] >= opens  # [B, E]; token t + 1 sees block e once t >= unlock[e]
        open_weight = [open_block[:, block][:, None] for block in blocks]  # g_t, [B, 1, out, in]
        k, v, q = key[:, t], value[:, t], query[:, t]
        a, m, step = retention[:, t], momentum[:, t], step_size[:, t]

        # u_t = d x^T, the gradient of 1/2 |M(k) - v|^2 at the masked anchor (Proteus Eq 9; Titans Eq 12 and 17).
        anchor = [w * g for w, g in zip(state.weights, open_weight, strict=True)]
        inputs, deltas = _gradient(anchor, k, v, act, residual)
        if depth == 1:
            inputs[0] = inputs[0] * open_weight[0][:, :, 0]
        for layer in range(depth - 1):
            deltas[layer] = deltas[layer] * open_weight[layer][:, :, :, 0]
            inputs[layer + 1] = inputs[layer + 1] * open_weight[layer][:, :, :, 0]

        squares = [x.square().sum(-1) * d.square().sum(-1) for x, d in zip(inputs, deltas, strict=True)]
        shorten = (torch.stack(squares).sum(0) / max_gradient_norm**2).clamp(min=1).rsqrt()
        deltas = [shorten[..., None] * d for d in deltas]

        new_weights, new_slots = [], []
        for layer in range(depth):
            u = deltas[layer][..., :, None] * inputs[layer][..., None, :]
            slot = slots[layer] if slots else torch.zeros_like(u)
            slot_next = m[..., None, None] * slot - step[..., None, None] * u  # S_t = m S_{t-1} - l u_t
            weight_next = a[..., None, None] * weights[layer] + slot_next  # M_t = a M_{t-1} + S_t
            changed = open_weight[layer] & real[:, None, None, None]
            new_slots.append(torch.where(changed, slot_next, slot))
            new_weights.append(torch.where(changed, weight_next, weights[layer]))
        weights, slots = tuple(new_weights), tuple(new_slots) if slots else ()

        outputs.append(_read([w * g for w, g in zip(weights, open_weight, strict=True)], q, act, residual))
        state = _select(real, _appended(state, row, inputs, deltas, a, m, step, open_block), state)

    at_anchor = state.position % chunk_size == 0
    return torch.stack(outputs, dim=1), _select(at_anchor, _anchored(state, weights, slots), state)


def _gradient(
    weights: list[Tensor], k: Tensor, v: Tensor, act: Activation, residual: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Layer inputs `x_{l-1}` and deltas `d_l`: the gradient of layer l is `d_l x_{l-1}^T`."""
    inputs, hidden = [k], []
    for layer, weight in enumerate(weights):
        hidden.append(_apply(weight, inputs[layer]))
        if layer < len(weights) - 1:
            inputs.append(act.value(hidden[layer]))
    deltas = [hidden[-1] + (k if residual else 0) - v]
    for layer in range(len(weights) - 1, 0, -1):
        slope = act.derivatives(hidden[layer - 1], 1)[1]
        deltas.insert(0, _apply(weights[layer].mT, deltas[0]) * slope)
    return inputs, deltas


def _read(weights: list[Tensor], q: Tensor, act: Activation, residual: bool) -> Tensor:
    x = q
    for layer, weight in enumerate(weights):
        x = _apply(weight, x)
        if layer < len(weights) - 1:
            x = act.value(x)
    return x + q if residual else x


def _apply(weight: Tensor, x: Tensor) -> Tensor:
    return (weight @ x[..., None])[..., 0]


def _with_rows(state: DeepMemoryState, chunk_size: int) -> DeepMemoryState:
    if state.inputs:
        return state
    return state._replace(
        inputs=tuple(w.new_zeros(*w.shape[:2], chunk_size, w.shape[3]) for w in state.weights),
        deltas=tuple(w.new_zeros(*w.shape[:2], chunk_size, w.shape[2]) for w in state.weights),
    )


def _anchored(state: DeepMemoryState, weights: tuple[Tensor, ...], slots: tuple[Tensor, ...]) -> DeepMemoryState:
    """A new chunk starts: the anchor is the current memory, and nothing is written on top of it."""
    return state._replace(
        weights=weights,
        momentum=slots,
        write=torch.zeros_like(state.write),
        momentum_write=torch.zeros_like(state.momentum_write),
        weight_keep=torch.ones_like(state.weight_keep),
        momentum_read=torch.zeros_like(state.momentum_read),
        momentum_keep=torch.ones_like(state.momentum_keep),
    )


def _appended(
    state: DeepMemoryState,
    row: Tensor,
    inputs: list[Tensor],
    deltas: list[Tensor],
    a: Tensor,
    m: Tensor,
    step: Tensor,
    open_block: Tensor,
) -> DeepMemoryState:
    """One more token in the factored form: the recurrences of `S_t` and `M_t`, coefficient by coefficient."""
    here = torch.arange(state.write.shape[-1], device=row.device) == row[:, None, None]  # [B, 1, C]

    def put(rows: tuple[Tensor, ...], new: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.where(here[..., None], x[:, :, None], old) for old, x in zip(rows, new, strict=True))

    momentum_write = torch.where(here, step[..., None], m[..., None] * state.momentum_write)
    opened = open_block[:, None]
    momentum_keep = torch.where(opened, m[..., None] * state.momentum_keep, state.momentum_keep)
    momentum_read = torch.where(opened, a[..., None] * state.momentum_read + momentum_keep, state.momentum_read)
    return state._replace(
        inputs=put(state.inputs, inputs),
        deltas=put(state.deltas, deltas),
        write=a[..., None] * state.write + momentum_write,
        momentum_write=momentum_write,
        weight_keep=torch.where(opened, a[..., None] * state.weight_keep, state.weight_keep),
        momentum_read=momentum_read,
        momentum_keep=momentum_keep,
        position=state.position + 1,
    )


def _select(condition: Tensor, yes: DeepMemoryState, no: DeepMemoryState) -> DeepMemoryState:
    """Per row, `yes` where `condition` `[B]` holds."""

    def pick(a: Any, b: Any) -> Any:
        if isinstance(a, tuple):
            return tuple(pick(x, y) for x, y in zip(a, b, strict=True))
        return torch.where(condition.view(-1, *[1] * (a.ndim - 1)), a, b)

    return DeepMemoryState(*(pick(a, b) for a, b in zip(yes, no, strict=True)))
