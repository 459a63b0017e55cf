"""The deep memory under Muon at every token (ATLAS, arXiv 2505.23735, Eq 32-41): `M_t` is written out.

    S_t = momentum_keep(t) S_anchor - sum_i momentum_write(t, i) d_i x_i^T
    M_t = retention_t M_{t-1} + step_size_t NS(S_t)

All momenta of a chunk follow from its gradients, which are taken at the anchor; what is sequential is the last line. A
chunk is computed layer by layer and a few tokens at a time, so that no more than `BLOCK_ELEMENTS` weights (or one
token's) are written out at once, and once more in the backward, which keeps the memory at the chunk starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memzoo.kernels.decay import without_dust
from memzoo.kernels.deep_memory.chunk import FADED, Network, inner_gradients
from memzoo.kernels.deep_memory.walk import Ends
from memzoo.kernels.newton_schulz.chunked import newton_schulz

BLOCK_ELEMENTS = 1 << 21
"""Weights of `M_t` that are written out at once: 8 MiB in float32."""


class Gates(NamedTuple):
    """Per token of every chunk, `[N, M, C, ...]`, or of one, without the N. A slot without a new token has retention 1
    and step size 0."""

    retention: Tensor
    step_size: Tensor
    momentum_keep: Tensor
    """`[N, M, C, E]`."""
    momentum_write: Tensor
    """`[N, M, C, R]`."""
    is_open: Tensor | None
    """`[N, M, C, E]`; `None` for one block."""


class Rows(NamedTuple):
    """The pairs of every chunk's rows, `[N, M, R, ...]`, or of one, without the N."""

    key: Tensor
    value: Tensor
    is_open: Tensor | None
    """`[N, M, R, E]`."""


@torch.compiler.disable  # else dynamo would trace every chunk
def walk(
    network: Network,
    ends: Ends,
    query: Tensor,
    rows: Rows,
    gates: Gates,
    memory: tuple[Tensor, ...],
    held: tuple[Tensor, ...],
    current: tuple[Tensor, ...],
    bounds: Sequence[tuple[int, int]],
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs `[N, M, C, V]`, the last anchor, the running chunk's factors, and `M_t` at the end.

    Args:
        memory: weights, then momentum, at the first anchor.
        held: inputs, then deltas, that the first chunk already holds, and `current`, its `M_t`; or empty.
        bounds: for each chunk the first slot with a new token in any row, and the one after the last.
    """
    depth, outputs = network.depth, []
    factors = tuple(query.new_zeros(*rows.key.shape[1:3], width) for width in network.row_widths)
    last = memory[:depth]
    for at, bound in enumerate(bounds):
        is_held, begin = ends.is_held(at, rows.key.shape[2]), memory[:depth]
        if is_held is not None:
            begin = _where(is_held[:, :1], current, begin)
        one = _chosen(rows, at), _chosen(gates, at)
        output, ended, slots, new_factors = _recomputed(
            partial(_chunk, network, bound, is_held), query[at], *one, memory, held, begin
        )
        outputs.append(output)
        is_done, is_running = ends.is_done(at), ends.is_running(at)
        if isinstance(is_running, Tensor):
            factors, last = _where(is_running, new_factors, factors), _where(is_running, ended, last)
        if is_done is not False:
            new = (*ended, *slots)
            memory = _where(is_done, new, memory) if isinstance(is_done, Tensor) else new
    whole = True if ends.done is None else (ends.done >= len(bounds))[:, None, None]
    if isinstance(whole, Tensor):
        last = _where(whole, memory[:depth], last)
    else:
        last = tuple(x.clone() for x in memory[:depth])  # a step may write into one and not the other
    return torch.stack(outputs), memory, factors, last


def _recomputed(f: Callable[..., Any], *inputs: Any) -> Any:
    """`f(*inputs)`, of which the backward keeps the inputs only."""
    return (
        checkpoint(f, *inputs, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled() else f(*inputs)
    )


def _where(condition: Tensor, yes: Sequence[Tensor], no: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.where(condition, a, b) for a, b in zip(yes, no, strict=True))


def _chosen(tensors: Any, index: Any) -> Any:
    """The named tuple with `[index]` of each of its tensors."""
    return type(tensors)(*(None if x is None else x[index] for x in tensors))


def _chunk(
    network: Network,
    bound: tuple[int, int],
    is_held: Tensor | None,
    query: Tensor,
    rows: Rows,
    gates: Gates,
    memory: tuple[Tensor, ...],
    held: tuple[Tensor, ...],
    begin: tuple[Tensor, ...],
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs `[M, C, V]`, weights and momentum after the last token, and the factors of the rows."""
    (low, high), depth = bound, network.depth
    inner = inner_gradients(network, memory[:depth], rows.key, rows.value, rows.is_open)
    factors = (*inner.inputs, *inner.deltas)
    if is_held is not None:
        factors = _where(is_held, held, factors)
    gates = _chosen(gates, (slice(None), slice(low, high)))
    y, weights, slots = through(network, query[:, low:high], factors, memory[depth:], begin, gates)
    return F.pad(y, (0, 0, low, query.shape[1] - high)), weights, slots, tuple(factors)


def through(
    network: Network,
    query: Tensor,
    factors: Sequence[Tensor],
    anchor: Sequence[Tensor],
    weights: Sequence[Tensor],
    gates: Gates,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What tokens `[M, t, K]` of a chunk read, and weights and momentum after the last of them.

    Args:
        factors: inputs, then deltas, of the chunk's rows.
        anchor: the momentum at the chunk's start.
        weights: before the first token.
    """
    z, moved, slots = query, [], []
    for layer in range(network.depth):
        if gates.is_open is not None and network.masks(layer):
            z = network.scale(z, gates.is_open, layer)
        x, delta, slot = factors[layer], factors[network.depth + layer], anchor[layer]
        y, weight = _layer(network, layer, z, x, delta, slot, weights[layer], gates)
        moved.append(weight)
        slots.append(_momentum(network, layer, x, delta, slot, _chosen(gates, (slice(None), slice(-1, None))))[:, 0])
        z = network.units.value(y) if layer < network.depth - 1 else y
    return (z + query[..., : z.shape[-1]] if network.residual else z), tuple(moved), tuple(slots)


def _layer(
    network: Network, layer: int, z: Tensor, x: Tensor, delta: Tensor, slot: Tensor, weight: Tensor, gates: Gates
) -> tuple[Tensor, Tensor]:
    """`M_t z_t` of one layer for tokens `z` `[M, t, in]`, and its weights after them."""
    size, outputs = max(1, BLOCK_ELEMENTS // weight.numel()), []
    for start in range(0, z.shape[1], size):
        some = _chosen(gates, (slice(None), slice(start, start + size)))
        y, weight = _recomputed(
            partial(_tokens, network, layer), z[:, start : start + size], x, delta, slot, weight, some
        )
        outputs.append(y)
    return torch.cat(outputs, dim=1), weight


def _tokens(
    network: Network, layer: int, z: Tensor, x: Tensor, delta: Tensor, slot: Tensor, weight: Tensor, gates: Gates
) -> tuple[Tensor, Tensor]:
    """`_layer` for tokens whose weights are written out together."""
    assert network.newton_schulz_steps is not None
    momentum = _momentum(network, layer, x, delta, slot, gates)
    update = newton_schulz(network.matrices(momentum.flatten(0, 1), layer), network.newton_schulz_steps)
    updates = network.layer_of(update).unflatten(0, momentum.shape[:2])
    retention, step_size = gates.retention[..., None, None], gates.step_size[..., None, None]
    if gates.is_open is not None:
        is_open = network.per_weight(gates.is_open.flatten(0, 1), layer).unflatten(0, momentum.shape[:2])
        retention, step_size = torch.where(is_open > 0, retention, 1), step_size * is_open
    weights = _Decayed.apply(weight, retention, step_size * updates)
    return (weights @ z[..., None])[..., 0], weights[:, -1].clone()  # of many


class _Decayed(torch.autograd.Function):
    """`M_t = retention_t M_{t-1} + U_t`, `[M, t, out, in]`, without dust, which the gradient does not see."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, retention: Tensor, updates: Tensor) -> Tensor:
        weights = torch.empty_like(updates)
        before = weight
        for t in range(weights.shape[1]):
            weights[:, t] = before = without_dust(torch.addcmul(updates[:, t], retention[:, t], before), FADED)
        ctx.save_for_backward(weight, retention, weights)
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, retention, weights = ctx.saved_tensors
        d_updates = d_weights.clone()
        for t in reversed(range(1, weights.shape[1])):
            d_updates[:, t - 1].addcmul_(retention[:, t], d_updates[:, t])
        before = torch.cat([weight[:, None], weights[:, :-1]], dim=1)
        d_retention = (d_updates * before).sum_to_size(retention.shape)
        return retention[:, 0] * d_updates[:, 0], d_retention, d_updates


def _momentum(network: Network, layer: int, x: Tensor, delta: Tensor, slot: Tensor, gates: Gates) -> Tensor:
    """`S_t` of one layer, `[M, t, out, in]`."""
    shape = gates.momentum_keep.shape[:2]
    keep = network.per_weight(gates.momentum_keep.flatten(0, 1), layer).unflatten(0, shape)
    written = (delta[:, None] * gates.momentum_write[..., None]).mT @ x[:, None]
    return _WithoutDust.apply(keep * slot[:, None] - written)


class _WithoutDust(torch.autograd.Function):
    """`without_dust`, which the gradient does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return without_dust(x, FADED)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> Tensor:
        return d_x
