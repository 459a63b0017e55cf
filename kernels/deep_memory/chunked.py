"""The deep memory chunk by chunk: no per-token weight is ever written out.

Inside a chunk of C tokens with anchor `W, S`, let `A(t, j) = prod_{n=j+1..t} retention_n` and `E(t, j)` likewise for the
momentum, for `0 <= j <= t <= C`, and `H = A E`. Unrolling the recurrences of `M_t` and `S_t` from token j gives

    M_t = A(t, j) M_j + (H - A)(t, j) S_j - sum_{j<i<=t} H(t, i) step_i u_i
    S_t = E(t, j) S_j                     - sum_{j<i<=t} E(t, i) step_i u_i

With `u_i = d_i x_i^T` at the anchor, a read `M_t z_t` is two products with the anchor and one with the masked scores
`(z_t . x_i) H(t, i) step_i` (Titans Eq 16-18 with every index restored). The anchor of a capacity block is its value when
the block opens: for a block that opens after `o` of the chunk's tokens, j = o above, which is C while it stays closed.
In the same way a running chunk that already holds r tokens is taken up with j = r from its coefficients.

The gates do not depend on the memory, so all chunks' coefficients are formed at once; only the walk over the chunks is
sequential. Its backward keeps the memory at the chunk starts and recomputes each chunk, so that memory grows by the
weights per chunk and not by C rows of activations per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memzoo.kernels.deep_memory import DeepMemoryState, block_of_unit, block_of_weight
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
    lengths: Tensor | None,
) -> tuple[Tensor, DeepMemoryState]:
    """See `memzoo.kernels.deep_memory.deep_memory`."""
    network = Network(state, ACTIVATION[activation], residual)
    if query.shape[1] == 1 and lengths is None and state.inputs:
        return _step(network, query, key, value, log_retention, log_momentum, step_size, state, chunk_size, unlock)

    grid = Grid.of(state, query.shape[1], chunk_size, lengths)
    gates = [None if gate is None else grid.chunks(gate) for gate in (log_retention, log_momentum, step_size)]
    coefficients, final = _coefficients(*gates, state, grid, unlock)
    carried = () if grid.carried is None else (*state.inputs, *state.deltas)
    tensors = (
        *state.weights,
        *state.momentum,
        *(grid.chunks(x) for x in (query, key, value)),
        *coefficients,
        *carried,
    )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        outputs = _Walk.apply(network, grid, *tensors)
    else:
        outputs = _walk(network, grid, tensors)
    output, *memory = outputs
    depth = network.depth
    slots = len(state.momentum)
    new_state = final._replace(
        weights=tuple(memory[:depth]),
        momentum=tuple(memory[depth : depth + slots]),
        inputs=tuple(memory[depth + slots : 2 * depth + slots]),
        deltas=tuple(memory[2 * depth + slots :]),
    )
    return grid.tokens(output), new_state


@dataclass(frozen=True)
class Grid:
    """Where the new tokens of each row fall on the chunk grid of its sequence.

    `carried` `[B]` counts the tokens already in the running chunk (`None`: known to be none), `chunks_done` `[B]` the
    chunks that this call completes (`None`: all `count` of them), `filled` `[B]` the tokens in the chunk after those
    (`None`: none).
    """

    batch: int
    new: int
    count: int
    size: int
    carried: Tensor | None
    lengths: Tensor | None
    chunks_done: Tensor | None
    filled: Tensor | None

    @staticmethod
    def of(state: DeepMemoryState, new: int, size: int, lengths: Tensor | None) -> Grid:
        batch = state.position.shape[0]
        carried = state.position % size if state.inputs else None
        if carried is None and lengths is None and new % size == 0:
            return Grid(batch, new, new // size, size, None, None, None, None)
        added = torch.full_like(state.position, new) if lengths is None else lengths
        total = added if carried is None else added + carried
        longest = new if carried is None else new + int(carried.max())
        return Grid(batch, new, -(-longest // size), size, carried, lengths, total // size, total % size)

    def chunks(self, x: Tensor) -> Tensor:
        """Tokens `[B, T, H, ...]` to chunks `[B, H, N, C, ...]`; zero where the grid has no new token."""
        slots = self.count * self.size
        if self.carried is not None:
            index = torch.arange(slots, device=x.device) - self.carried[:, None]
            real = (index >= 0) & (index < (self.new if self.lengths is None else self.lengths[:, None]))
            x = torch.where(_like(real, x), x.gather(1, _like(index.clamp(0, self.new - 1), x).expand(-1, -1, *x.shape[2:])), 0)
        elif self.lengths is not None or slots != self.new:
            pad = x.new_zeros(x.shape[0], slots - self.new, *x.shape[2:])
            x = torch.cat([x, pad], dim=1)
            if self.lengths is not None:
                real = torch.arange(slots, device=x.device) < self.lengths[:, None]
                x = torch.where(_like(real, x), x, 0)
        return x.movedim(2, 1).unflatten(2, (self.count, self.size))

    def tokens(self, y: Tensor) -> Tensor:
        """Chunks `[B, H, N, C, V]` to tokens `[B, T, H, V]`."""
        y = y.flatten(2, 3).movedim(1, 2)
        if self.carried is not None:
            index = self.carried[:, None] + torch.arange(self.new, device=y.device)
            return y.gather(1, _like(index, y).expand(-1, -1, *y.shape[2:]))
        return y[:, : self.new]


def _like(x: Tensor, other: Tensor) -> Tensor:
    return x.view(*x.shape, *[1] * (other.ndim - x.ndim))


class Coefficients(NamedTuple):
    """The coefficients of every chunk, `t` counting the tokens read since the chunk's start."""

    keep: Tensor
    """Of the anchor's weights in `M_t`, `[B, H, N, 1 + C, E]`."""
    momentum_read: Tensor
    """Of the anchor's momentum in `M_t`, `[B, H, N, 1 + C, E]`."""
    momentum_keep: Tensor
    """Of the anchor's momentum in `S_t`, `[B, H, N, 1 + C, E]`."""
    write: Tensor
    """Of token i's gradient in `M_t`, `[B, H, N, 1 + C, C]`."""
    momentum_write: Tensor
    """Of token i's gradient in `S_t`, `[B, H, N, 1 + C, C]`."""
    open: Tensor
    """Whether token i sees the block, `[B, 1, N, C, E]`, 0 or 1."""


def _coefficients(
    log_retention: Tensor | None,
    log_momentum: Tensor | None,
    step_size: Tensor,
    state: DeepMemoryState,
    grid: Grid,
    unlock: tuple[int, ...],
) -> tuple[Coefficients, DeepMemoryState]:
    """All chunks' coefficients, and the final state but for its weights, momentum and rows."""
    batch, size = grid.batch, grid.size
    ones = torch.zeros_like(step_size)
    keep = _products(ones if log_retention is None else log_retention)  # A, [B, H, N, 1 + C, 1 + C]
    if log_momentum is None:
        slot = torch.eye(1 + size, dtype=step_size.dtype, device=step_size.device).expand_as(keep)
        both = keep
    else:
        slot = _products(log_momentum)  # E
        both = keep @ slot  # H
    write = both[..., 1:] * step_size[..., None, :]
    momentum_write = slot[..., 1:] * step_size[..., None, :]

    # o: the tokens of the chunk before each block opens; r: the tokens that the chunk already holds.
    start = state.position if grid.carried is None else state.position - grid.carried
    starts = start[:, None] + size * torch.arange(grid.count, device=start.device)  # [B, N]
    opens = torch.tensor(unlock, device=start.device)
    opened = (opens - starts[..., None]).clamp(0, size)  # [B, N, E]
    token = torch.arange(1, 1 + size, device=start.device)
    is_open = (token[:, None] > opened[:, :, None]).to(step_size.dtype)[:, None]  # [B, 1, N, C, E]
    origin = opened
    if grid.carried is not None:
        held = torch.zeros_like(opened)
        held[:, 0] = grid.carried[:, None]
        origin = torch.maximum(opened, held)
    if len(unlock) == 1 and grid.carried is None:
        from_keep, from_both, from_slot = keep[..., :1], (both - keep)[..., :1], slot[..., :1]
    else:
        index = origin[:, None, :, None].expand(-1, keep.shape[1], -1, 1 + size, -1)
        closed = torch.arange(1 + size, device=start.device)[:, None] < index
        from_keep, from_both, from_slot = (x.gather(-1, index) for x in (keep, both - keep, slot))
        from_keep, from_slot = torch.where(closed, 1, from_keep), torch.where(closed, 1, from_slot)
    if grid.carried is None:
        anchor_keep, anchor_read, anchor_slot = from_keep, from_both, from_slot
    else:
        first = torch.zeros(grid.count, 1, 1, dtype=torch.bool, device=start.device)
        first[0] = True

        def held_or(x: Tensor, fresh: float) -> Tensor:  # [B, H, E] in the first chunk, `fresh` in the others
            return torch.where(first, x[:, :, None, None], fresh)

        weight_keep, read, slot_keep = (
            held_or(state.weight_keep, 1.0),
            held_or(state.momentum_read, 0.0),
            held_or(state.momentum_keep, 1.0),
        )
        anchor_keep = from_keep * weight_keep
        anchor_read = from_keep * read + from_both * slot_keep
        anchor_slot = from_slot * slot_keep
        at_held = grid.carried[:, None, None, None].expand(-1, keep.shape[1], 1 + size, 1)
        held_keep, held_both, held_slot = (x[:, :, 0].gather(-1, at_held) for x in (keep, both - keep, slot))
        held_write, held_momentum = state.write[:, :, None], state.momentum_write[:, :, None]
        write = _add_first(write, held_keep * held_write + held_both * held_momentum)
        momentum_write = _add_first(momentum_write, held_slot * held_momentum)

    final = state._replace(
        position=state.position + (grid.new if grid.lengths is None else grid.lengths),
        write=_at_end(write, grid, 0.0),
        momentum_write=_at_end(momentum_write, grid, 0.0),
        weight_keep=_at_end(anchor_keep, grid, 1.0),
        momentum_read=_at_end(anchor_read, grid, 0.0),
        momentum_keep=_at_end(anchor_slot, grid, 1.0),
    )
    return Coefficients(anchor_keep, anchor_read, anchor_slot, write, momentum_write, is_open), final


def _products(log_gate: Tensor) -> Tensor:
    """`P(t, j) = prod_{n=j+1..t} gate_n` for `0 <= j <= t <= C`, else 0; `[..., C]` to `[..., 1 + C, 1 + C]`.

    Sums of logs over each interval, never differences of running sums: exact for gates of 0 and 1.
    """
    size = log_gate.shape[-1]
    ones = torch.ones(1 + size, 1 + size, dtype=torch.bool, device=log_gate.device)
    inside = ones[1:].tril()  # n > j, rows n = 1..C
    sums = torch.where(inside, log_gate[..., None], 0).cumsum(-2)
    sums = torch.cat([torch.zeros_like(sums[..., :1, :]), sums], dim=-2)
    return torch.where(ones.tril(), sums.exp(), 0)


def _add_first(x: Tensor, first: Tensor) -> Tensor:
    """`x` `[B, H, N, ...]` with `first` added to its first chunk."""
    return torch.cat([x[:, :, :1] + first[:, :, None], x[:, :, 1:]], dim=2)


def _at_end(x: Tensor, grid: Grid, fresh: float) -> Tensor:
    """The row of `x` `[B, H, N, 1 + C, X]` after each row's last token; `fresh` where that token ended a chunk."""
    if grid.chunks_done is None or grid.filled is None:
        return torch.full_like(x[:, :, 0, 0], fresh)
    chunk = grid.chunks_done.clamp(max=grid.count - 1)
    rows = torch.arange(grid.batch, device=x.device)
    return torch.where((grid.filled > 0)[:, None, None], x[rows, :, chunk, grid.filled], fresh)


class Network:
    """The memory's network: how a chunk of tokens passes through it, and which weights belong to which block."""

    def __init__(self, state: DeepMemoryState, act: Activation, residual: bool) -> None:
        self.depth = len(state.weights)
        self.has_momentum = bool(state.momentum)
        self.act = act
        self.residual = residual
        self.blocks = state.weight_keep.shape[-1]
        device = state.weights[0].device
        self.widths = [state.weights[0].shape[-1], *(w.shape[-2] for w in state.weights)]
        if self.blocks > 1:
            self.unit_block = [block_of_unit(width, self.blocks, device) for width in self.widths]
            self.weight_block = [block_of_weight(layer, state) for layer in range(self.depth)]

    def is_gated(self, width_index: int) -> bool:
        """Whether the units of this width (0: keys, depth: outputs) form the capacity blocks."""
        return 0 < width_index < self.depth or (self.depth == 1 and width_index == 0)

    def per_unit(self, x: Tensor, width_index: int) -> Tensor:
        """A value per block `[..., E]` to a value per unit; untouched for one block."""
        return x if self.blocks == 1 else x[..., self.unit_block[width_index]]

    def per_weight(self, x: Tensor, layer: int) -> Tensor:
        """A value per block `[B, H, E]` to one per weight, broadcastable to `[B, H, out, in]`."""
        return x[..., None] if self.blocks == 1 else x[..., self.weight_block[layer]]

    def mask(self, x: Tensor, is_open: Tensor, width_index: int) -> Tensor:
        """Zero the units of closed blocks."""
        if self.blocks == 1 or not self.is_gated(width_index):
            return x
        return x * self.per_unit(is_open, width_index)

    def gradients(
        self, weights: Sequence[Tensor], key: Tensor, value: Tensor, is_open: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Layer inputs and deltas of the tokens' inner gradients at `weights` (Titans Eq 12)."""
        inputs, hidden = [self.mask(key, is_open, 0)], []
        for layer, weight in enumerate(weights):
            hidden.append(inputs[layer] @ weight.mT)
            if layer < self.depth - 1:
                inputs.append(self.mask(self.act.value(hidden[layer]), is_open, layer + 1))
        error = hidden[-1] - value
        deltas = [error + key if self.residual else error]
        for layer in range(self.depth - 1, 0, -1):
            back = self.act.pullback(deltas[0] @ weights[layer], hidden[layer - 1])
            deltas.insert(0, self.mask(back, is_open, layer))
        return inputs, deltas

    def read(
        self,
        query: Tensor,
        weights: Sequence[Tensor],
        slots: Sequence[Tensor],
        inputs: Sequence[Tensor],
        deltas: Sequence[Tensor],
        keep: Tensor,
        momentum_read: Tensor,
        write: Tensor,
        is_open: Tensor,
    ) -> Tensor:
        """`M_t(q_t)` for tokens with coefficients `keep`, `momentum_read` `[B, H, t, E]` and `write` `[B, H, t, C]`."""
        if self.blocks > 1:
            keep, momentum_read = keep * is_open, momentum_read * is_open
        z = query
        for layer in range(self.depth):
            y = self._product(z, weights[layer], keep, layer)
            if self.has_momentum:
                y = y + self._product(z, slots[layer], momentum_read, layer)
            y = y - ((z @ inputs[layer].mT) * write) @ deltas[layer]
            z = self.act.value(y) if layer < self.depth - 1 else y
        return z + query if self.residual else z

    def _product(self, z: Tensor, weight: Tensor, coefficient: Tensor, layer: int) -> Tensor:
        """`(coefficient * weight) z` where the coefficient belongs to the capacity block of each weight."""
        gated_in, gated_out = self.is_gated(layer), self.is_gated(layer + 1)
        if gated_in and gated_out and self.blocks > 1:
            return self._product_between(z, weight, coefficient, layer)
        if gated_in:
            return (z * self.per_unit(coefficient, layer)) @ weight.mT
        return (z @ weight.mT) * self.per_unit(coefficient, layer + 1)

    def _product_between(self, z: Tensor, weight: Tensor, coefficient: Tensor, layer: int) -> Tensor:
        """Between two hidden layers a weight belongs to the later block of its ends: one L-shaped shell per block."""
        into, out = self.unit_block[layer], self.unit_block[layer + 1]
        total = z.new_zeros(*z.shape[:-1], weight.shape[-2])
        for block in range(self.blocks):
            c = coefficient[..., block, None]
            here, upto = out == block, into <= block
            rows = c * (z[..., upto] @ weight[..., here, :][..., upto].mT)
            before, column = out < block, into == block
            columns = c * (z[..., column] @ weight[..., before, :][..., column].mT)
            total = total.index_add(-1, here.nonzero()[:, 0], rows).index_add(-1, before.nonzero()[:, 0], columns)
        return total

    def advance(
        self,
        weights: Sequence[Tensor],
        slots: Sequence[Tensor],
        inputs: Sequence[Tensor],
        deltas: Sequence[Tensor],
        keep: Tensor,
        momentum_read: Tensor,
        momentum_keep: Tensor,
        write: Tensor,
        momentum_write: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The next anchor, from coefficients at the chunk's end: `[B, H, E]` and `[B, H, C]`."""
        new_weights, new_slots = [], []
        for layer in range(self.depth):
            weight = self.per_weight(keep, layer) * weights[layer]
            if self.has_momentum:
                weight = weight + self.per_weight(momentum_read, layer) * slots[layer]
                slot = self.per_weight(momentum_keep, layer) * slots[layer]
                new_slots.append(slot - (deltas[layer] * momentum_write[..., None]).mT @ inputs[layer])
            new_weights.append(weight - (deltas[layer] * write[..., None]).mT @ inputs[layer])
        return new_weights, new_slots


def _chunk(network: Network, grid: Grid, index: int, memory: Sequence[Tensor], chunk: Sequence[Tensor], held: Sequence[Tensor]) -> list[Tensor]:
    """One chunk: its outputs, the next anchor, and the factors of its tokens.

    Args:
        memory: weights, then momentum, at the anchor.
        chunk: query, key, value, then the six `Coefficients`, of this chunk.
        held: the factors of the tokens that the first chunk already holds, or empty.
    """
    depth = network.depth
    weights, slots = memory[:depth], memory[depth:]
    query, key, value, keep, momentum_read, momentum_keep, write, momentum_write, is_open = chunk
    inputs, deltas = network.gradients(weights, key, value, is_open)
    if held and grid.carried is not None:
        is_held = (torch.arange(grid.size, device=key.device) < grid.carried[:, None])[:, None, :, None]
        inputs = [torch.where(is_held, old, new) for old, new in zip(held[:depth], inputs, strict=True)]
        deltas = [torch.where(is_held, old, new) for old, new in zip(held[depth:], deltas, strict=True)]
    output = network.read(
        query, weights, slots, inputs, deltas, keep[..., 1:, :], momentum_read[..., 1:, :], write[..., 1:, :], is_open
    )
    if grid.chunks_done is None or bool((index < grid.chunks_done).any()):
        ends = (x[..., -1, :] for x in (keep, momentum_read, momentum_keep, write, momentum_write))
        new_weights, new_slots = network.advance(weights, slots, inputs, deltas, *ends)
        memory_next = [*new_weights, *new_slots]
        if grid.chunks_done is not None:
            done = (index < grid.chunks_done)[:, None, None, None]
            memory_next = [torch.where(done, new, old) for new, old in zip(memory_next, memory, strict=True)]
    else:
        memory_next = list(memory)
    return [output, *memory_next, *inputs, *deltas]


def _split(network: Network, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """The tensors of a walk: memory at the first anchor, chunked sequences and coefficients, held factors."""
    states = network.depth * (2 if network.has_momentum else 1)
    return tensors[:states], tensors[states : states + 9], tensors[states + 9 :]


def _walk(
    network: Network, grid: Grid, tensors: Sequence[Tensor], starts: list[Sequence[Tensor]] | None = None
) -> tuple[Tensor, ...]:
    """Outputs `[B, H, N, C, V]`, final weights and momentum, and the factors of the chunk that is running at the end.

    Appends the memory at each chunk's start to `starts` when given.
    """
    memory, sequences, held = _split(network, tensors)
    states = len(memory)
    outputs = []
    rows = [x.new_zeros(*x.shape[:2], grid.size, width) for x, width in _row_widths(network, sequences[0])]
    for index in range(grid.count):
        if starts is not None:
            starts.append(memory)
        output, *rest = _chunk(network, grid, index, memory, [x[:, :, index] for x in sequences], held if index == 0 else ())
        outputs.append(output)
        memory = rest[:states]
        if grid.chunks_done is not None:
            running = _running(grid, index)
            rows = [torch.where(running, new, old) for new, old in zip(rest[states:], rows, strict=True)]
    return (torch.stack(outputs, dim=2), *memory, *rows)


def _row_widths(network: Network, like: Tensor) -> list[tuple[Tensor, int]]:
    return [(like, width) for width in (*network.widths[:-1], *network.widths[1:])]


def _running(grid: Grid, index: int) -> Tensor:
    assert grid.chunks_done is not None
    return (grid.chunks_done == index)[:, None, None, None]


class _Walk(torch.autograd.Function):
    """`_walk` with a backward that keeps the memory at the chunk starts and recomputes each chunk."""

    @staticmethod
    def forward(ctx: Any, network: Network, grid: Grid, *tensors: Tensor) -> tuple[Tensor, ...]:
        starts: list[Sequence[Tensor]] = []
        outputs = _walk(network, grid, tensors, starts)
        ctx.network, ctx.grid = network, grid
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors, *(x for start in starts for x in start))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        network, grid = ctx.network, ctx.grid
        tensors, starts = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        memory, sequences, held = _split(network, tensors)
        states = len(memory)
        d_output, d_memory, d_rows = gradients[0], list(gradients[1 : 1 + states]), gradients[1 + states :]
        d_sequences = [torch.zeros_like(x) for x in sequences]
        d_held: Sequence[Tensor] = ()
        with torch.autocast(d_output.device.type, enabled=False):
            for index in reversed(range(grid.count)):
                held_here = held if index == 0 else ()
                leaves = [
                    x.detach().requires_grad_(x.is_floating_point())
                    for x in (*starts[index * states : (index + 1) * states], *(x[:, :, index] for x in sequences), *held_here)
                ]
                with torch.enable_grad():
                    results = _chunk(
                        network, grid, index, leaves[:states], leaves[states : states + 9], leaves[states + 9 :]
                    )
                d_results = [d_output[:, :, index], *d_memory]
                if grid.chunks_done is None:
                    results = results[: 1 + states]
                else:
                    d_results += [torch.where(_running(grid, index), d, 0) for d in d_rows]
                d_leaves = torch.autograd.grad(results, leaves, d_results, allow_unused=True, materialize_grads=True)
                d_memory = list(d_leaves[:states])
                for total, part in zip(d_sequences, d_leaves[states : states + 9], strict=True):
                    total[:, :, index] = part
                d_held = d_leaves[states + 9 :]
        return (None, None, *d_memory, *d_sequences, *d_held)


def _step(
    network: Network,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    log_momentum: Tensor | None,
    step_size: Tensor,
    state: DeepMemoryState,
    chunk_size: int,
    unlock: tuple[int, ...],
) -> tuple[Tensor, DeepMemoryState]:
    """One token: one more row of factors; new weights only when it completes a chunk.

    Without gradients the row and the coefficients are written in place.
    """
    row = state.position % chunk_size
    q, k, v = (x.movedim(1, 2) for x in (query, key, value))  # [B, H, 1, D]
    a = 1.0 if log_retention is None else log_retention.exp().mT  # [B, H, 1]
    m = None if log_momentum is None else log_momentum.exp().mT
    is_open = (state.position[:, None] >= torch.tensor(unlock, device=q.device)).to(q.dtype)[:, None, None]  # [B,1,1,E]

    inputs, deltas = network.gradients(state.weights, k, v, is_open)
    rows = tuple(_put(old, new, row) for old, new in zip(state.inputs, inputs, strict=True))
    row_deltas = tuple(_put(old, new, row) for old, new in zip(state.deltas, deltas, strict=True))

    # The recurrences S_t = m S_{t-1} - l u_t and M_t = a M_{t-1} + S_t, coefficient by coefficient.
    momentum_write = torch.zeros_like(state.momentum_write) if m is None else m * state.momentum_write
    momentum_write = _put(momentum_write[..., None], step_size.mT[..., None], row)[..., 0]
    write = a * state.write + momentum_write
    keep, momentum_read, momentum_keep = a * state.weight_keep, state.momentum_read, state.momentum_keep
    if m is not None:
        momentum_keep = m * momentum_keep
        momentum_read = a * momentum_read + momentum_keep
    if network.blocks > 1:
        opened = is_open[:, :, 0] > 0
        keep = torch.where(opened, keep, state.weight_keep)
        momentum_read = torch.where(opened, momentum_read, state.momentum_read)
        momentum_keep = torch.where(opened, momentum_keep, state.momentum_keep)

    output = network.read(
        q, state.weights, state.momentum, rows, row_deltas, keep[:, :, None], momentum_read[:, :, None],
        write[:, :, None], is_open,
    )  # fmt: skip
    new = DeepMemoryState(
        state.weights, state.momentum, rows, row_deltas, write, momentum_write, keep, momentum_read, momentum_keep,
        state.position + 1,
    )  # fmt: skip
    done = row == chunk_size - 1
    if bool(done.any()):
        weights, slots = network.advance(
            state.weights, state.momentum, rows, row_deltas, keep, momentum_read, momentum_keep, write, momentum_write
        )
        at = done[:, None, None]
        new = new._replace(
            weights=tuple(torch.where(at[..., None], x, old) for x, old in zip(weights, state.weights, strict=True)),
            momentum=tuple(torch.where(at[..., None], x, old) for x, old in zip(slots, state.momentum, strict=True)),
            write=torch.where(at, 0, write),
            momentum_write=torch.where(at, 0, momentum_write),
            weight_keep=torch.where(at, 1, keep),
            momentum_read=torch.where(at, 0, momentum_read),
            momentum_keep=torch.where(at, 1, momentum_keep),
        )
    return output.movedim(1, 2), new


def _put(rows: Tensor, new: Tensor, index: Tensor) -> Tensor:
    """`rows` `[B, H, C, D]` with `new` `[B, H, 1, D]` at row `index` `[B]`."""
    where = index[:, None, None, None].expand_as(new)
    if torch.is_grad_enabled():
        return rows.scatter(2, where, new)
    return rows.scatter_(2, where, new)
