"""The deep memory chunk by chunk: no per-token weight is ever written out.

Inside a chunk of C tokens with anchor `W, S`, let `A(t, j) = prod_{n=j+1..t} retention_n` and `E(t, j)` likewise for
the momentum, for `0 <= j <= t <= C`, and `H = A E`. Unrolling the recurrences of `M_t` and `S_t` from token j gives

    M_t = A(t, j) M_j + (H - A)(t, j) S_j - sum_{j<i<=t} H(t, i) step_i u_i
    S_t = E(t, j) S_j                     - sum_{j<i<=t} E(t, i) step_i u_i

A window writes `sum_j g(i, j) u_{i-j}` for `u_i`, so that the coefficient of row `r` is `(H diag(step) B)(t, r)` with
the band `B(i, r) = g(i, i - r)` over the chunk's rows and those before it (ATLAS section 3.3). With the step size
outside of the momentum, `M_t = a M_{t-1} + step S_t`, replace H by `A diag(step) E` and the step inside by 1.

With `u_i = d_i x_i^T` at the anchor, a read `M_t z_t` is two products with the anchor and one with the masked scores
`(z_t . x_i) H(t, i) step_i` (Titans Eq 16-18 with every index restored). The anchor of a capacity block is its value
when the block opens: for a block that opens after `o` of the chunk's tokens, j = o above, which is C while it stays
closed. In the same way a running chunk that already holds r tokens is taken up with j = r from its coefficients.

The gates do not depend on the memory, so all chunks' coefficients are formed at once, under autograd; only the walk
over the chunks is sequential (`walk.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.decay import interval_products
from memzoo.kernels.deep_memory import DeepMemoryState, Muon, is_gated, operator, per_token
from memzoo.kernels.deep_memory.chunk import (
    Coefficients,
    Network,
    advance,
    inner_gradients,
    inner_row,
    network_of,
    read,
)
from memzoo.kernels.deep_memory.walk import Ends, Tensors, Walk, walk
from memzoo.kernels.registry import constant, known, may_hold, may_write

Walks = Callable[[Network, Ends, Tensors, bool], tuple[Tensor, ...]]
"""`walk`; told, too, whether there will be a backward."""
Step = Callable[..., tuple[Tensor, DeepMemoryState]]
"""`step`."""


def deep_memory(*inputs: Any, **options: Any) -> tuple[Tensor, DeepMemoryState]:
    """See `memzoo.kernels.deep_memory.deep_memory`."""
    return computed(_walk, step, *inputs, **options)


def _walk(network: Network, ends: Ends, tensors: Tensors, differentiable: bool) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        return operator.walk(network, ends, tensors)
    return Walk.apply(network, ends, *tensors.flat()) if differentiable else walk(network, ends, tensors)


def computed(
    walks: Walks,
    one_token: Step,
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
    """The op by a walk over chunks and a step for a single token without autograd."""
    every_token = muon is not None and muon.every == "token"
    network = network_of(
        (*[w.shape[-1] for w in state.weights], state.weights[-1].shape[-2]),
        is_gated(state.weights),
        activation,
        residual,
        objective,
        bool(state.momentum),
        len(unlock),
        max_gradient_norm,
        None if muon is None else muon.steps,
    )
    memory = (*state.weights, *state.momentum)
    differentiable = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad
        for x in (query, key, value, log_retention, log_momentum, step_size, window_gate, *memory)
    )
    if query.shape[1] == 1 and lengths is None and state.inputs and not differentiable:
        return one_token(network, query, key, value, log_retention, log_momentum, step_size, window_gate, state, unlock)

    grid = Grid.of(state, query.shape[1], chunk_size, lengths, unlock)
    if differentiable and grid.held is not None and grid.ends.full_from == 0:
        # A given state has a coefficient, and so a gradient, per block.
        grid = replace(grid, ends=grid.ends._replace(full_from=1))
    coefficients, momenta, is_open, final = _coefficients(
        None if log_retention is None else grid.chunks(log_retention),
        None if log_momentum is None else grid.chunks(log_momentum),
        grid.chunks(step_size if muon is None else torch.ones_like(step_size)),
        None if muon is None else grid.chunks(step_size),
        None if window_gate is None else grid.chunks(window_gate),
        state,
        grid,
        unlock,
    )
    tensors = Tensors(
        query=grid.chunks(query),
        key=grid.rows(key, state.recent_keys),
        value=grid.rows(value, state.recent_values),
        coefficients=coefficients,
        is_open=is_open,
        memory=tuple(x.flatten(0, 1) for x in memory),
        held=() if grid.held is None else tuple(x.flatten(0, 1) for x in (*state.inputs, *state.deltas)),
    )
    if every_token:
        outputs, current = _per_token(network, grid, tensors.wide(), momenta, log_retention, step_size, state)
        final = final._replace(
            write=torch.zeros_like(final.write),
            weight_keep=torch.zeros_like(final.weight_keep),
            momentum_read=torch.zeros_like(final.momentum_read),
            orthogonal_step=torch.zeros_like(final.orthogonal_step),
            current=current,
        )
    else:
        outputs = walks(network, grid.ends, tensors, differentiable)
    output, *rest = outputs
    rest = [x.unflatten(0, (grid.batch, grid.heads)) for x in rest]
    depth, slots = network.depth, len(state.momentum)
    new_state = final._replace(
        weights=tuple(rest[:depth]),
        momentum=tuple(rest[depth : depth + slots]),
        inputs=tuple(rest[depth + slots : 2 * depth + slots]),
        deltas=tuple(rest[2 * depth + slots :]),
        recent_keys=grid.recent(key, state.recent_keys),
        recent_values=grid.recent(value, state.recent_values),
    )
    return grid.tokens(output), new_state


def _per_token(
    network: Network,
    grid: Grid,
    tensors: Tensors,
    momenta: tuple[Tensor, Tensor],
    log_retention: Tensor | None,
    step_size: Tensor,
    state: DeepMemoryState,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What a walk gives, and `M_t` `[B, H, out, in]`."""
    retention = torch.zeros_like(step_size) if log_retention is None else log_retention
    is_open = tensors.is_open
    gates = per_token.Gates(
        grid.chunks(retention).exp(),
        grid.chunks(step_size),
        *momenta,
        None if is_open is None else is_open[:, :, state.halo :],
    )
    first, last = 0, grid.new
    if grid.held is not None or grid.lengths is not None:
        held = torch.zeros_like(state.position) if grid.held is None else grid.held
        first = int(held.min())
        last = int((held + (grid.new if grid.lengths is None else grid.lengths)).max())
    starts = [first, *(at * grid.size for at in range(1, grid.count))]
    bounds = [
        (start - at * grid.size, max(start + 1, min(last, (at + 1) * grid.size)) - at * grid.size)
        for at, start in enumerate(starts)
    ]
    rows = per_token.Rows(tensors.key, tensors.value, is_open)
    before = tuple(x.flatten(0, 1) for x in state.current)
    output, memory, factors, current = per_token.walk(
        network, grid.ends, tensors.query, rows, gates, tensors.memory, tensors.held, before, bounds
    )
    return (output, *memory, *factors), tuple(x.unflatten(0, (grid.batch, grid.heads)) for x in current)


@dataclass(frozen=True)
class Grid:
    """Where the new tokens of each row fall on the chunk grid of its sequence.

    Args:
        batch, heads, new: B, H and the columns T of new tokens.
        count: chunks N that they touch.
        size: C.
        held: tokens already in the running chunk, `[B]`; `None` when there can be none.
        lengths: real new tokens, `[B]`; `None` when all are.
        filled: tokens in the chunk that runs at the end, `[B]`; `None` when every chunk is whole.
        ends: the same facts per row and head.
    """

    batch: int
    heads: int
    new: int
    count: int
    size: int
    held: Tensor | None
    lengths: Tensor | None
    filled: Tensor | None
    ends: Ends

    @staticmethod
    def of(state: DeepMemoryState, new: int, size: int, lengths: Tensor | None, unlock: tuple[int, ...]) -> Grid:
        batch, heads = state.write.shape[:2]
        if not state.inputs and lengths is None:  # no token read yet: all is known without looking at a tensor
            whole, rest = divmod(new, size)
            count = -(-new // size)
            ends = Ends(
                open_blocks=_open_blocks(0, count, size, unlock), full_from=-(-unlock[-1] // size), halo=state.halo
            )
            if rest == 0:
                return Grid(batch, heads, new, count, size, None, None, None, ends)
            done = torch.full_like(state.position, whole).repeat_interleave(heads)
            filled = torch.full_like(state.position, rest)
            ends = ends._replace(done=done, fewest=whole, most=whole)
            return Grid(batch, heads, new, count, size, None, None, filled, ends)
        held = state.position % size if state.inputs else None
        total = torch.full_like(state.position, new) if lengths is None else lengths
        if held is not None:
            total = total + held
        fewest, most = (int(x) for x in torch.aminmax(total))
        count = max(1, -(-most // size))
        earliest = latest = 0
        if held is not None and len(unlock) > 1:
            earliest, latest = (int(x) for x in torch.aminmax(state.position - held))
        ends = Ends(
            held=None if held is None else held.repeat_interleave(heads),
            done=(total // size).repeat_interleave(heads),
            fewest=fewest // size,
            most=most // size,
            open_blocks=_open_blocks(latest, count, size, unlock),
            full_from=max(0, -(-(unlock[-1] - earliest) // size)),
            halo=state.halo,
        )
        return Grid(batch, heads, new, count, size, held, lengths, total % size, ends)

    def chunks(self, x: Tensor) -> Tensor:
        """Tokens `[B, T, H, ...]` to chunks `[N, M, C, ...]`; zero where the grid has no new token."""
        x = self._placed(x, 0)
        x = x.unflatten(1, (self.count, self.size)).movedim(0, 1).movedim(3, 2)  # [N, B, H, C, ...]
        return x.flatten(1, 2)

    def rows(self, x: Tensor, recent: Tensor) -> Tensor:
        """Tokens `[B, T, H, D]` and those before them `[B, H, R - C, D]` to the rows of chunks, `[N, M, R, D]`."""
        halo = recent.shape[2]
        if halo == 0:
            return self.chunks(x)
        x = self._placed(torch.cat([recent.movedim(1, 2), x], dim=1), halo)
        rows = x.unfold(1, halo + self.size, self.size)  # [B, N, H, D, R]
        return rows.movedim(1, 0).movedim(4, 3).flatten(1, 2)

    def recent(self, x: Tensor, recent: Tensor) -> Tensor:
        """The last tokens of each row, `[B, H, R - C, D]`."""
        halo = recent.shape[2]
        if halo == 0:
            return recent
        x = torch.cat([recent, x.movedim(1, 2)], dim=2)
        if self.lengths is None:
            return x[:, :, self.new :].clone()
        index = self.lengths[:, None] + torch.arange(halo, device=x.device)
        return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    def _placed(self, x: Tensor, halo: int) -> Tensor:
        """Tokens `[B, halo + T, H, ...]`, of which `halo` are older, where they stand on the grid, `[B, halo + N C, H,
        ...]`; zero where it has none."""
        slots, tokens = halo + self.count * self.size, halo + self.new
        if self.held is not None:
            index = torch.arange(slots, device=x.device) - self.held[:, None]
            real = (index >= 0) & (index < (tokens if self.lengths is None else halo + self.lengths[:, None]))
            index = index.clamp(0, tokens - 1)
            return torch.where(_like(real, x), x.gather(1, _like(index, x).expand(-1, -1, *x.shape[2:])), 0)
        if slots != tokens:
            missing = x.new_zeros(x.shape[0], max(0, slots - tokens), *x.shape[2:])
            x = torch.cat([x[:, :slots], missing], dim=1)
        if self.lengths is not None:
            real = torch.arange(slots, device=x.device) < halo + self.lengths[:, None]
            x = torch.where(_like(real, x), x, 0)
        return x

    def tokens(self, y: Tensor) -> Tensor:
        """Chunks `[N, M, C, V]` to tokens `[B, T, H, V]`."""
        y = y.unflatten(1, (self.batch, self.heads)).movedim(2, 3).movedim(0, 1).flatten(1, 2)
        if self.held is not None:
            index = self.held[:, None] + torch.arange(self.new, device=y.device)
            index = index.clamp(max=y.shape[1] - 1)
            return y.gather(1, _like(index, y).expand(-1, -1, *y.shape[2:]))
        if y.shape[1] < self.new:  # no row is as long as the padding
            return torch.cat([y, y.new_zeros(y.shape[0], self.new - y.shape[1], *y.shape[2:])], dim=1)
        return y[:, : self.new]


def _open_blocks(start: int, count: int, size: int, unlock: tuple[int, ...]) -> tuple[int, ...]:
    """For each chunk the blocks that open before its last token, when the first chunk starts after `start` tokens."""
    ends = (start + (chunk + 1) * size for chunk in range(count))
    return () if len(unlock) == 1 else tuple(sum(opens < end for opens in unlock) for end in ends)


def _like(x: Tensor, other: Tensor) -> Tensor:
    return x.view(*x.shape, *[1] * (other.ndim - x.ndim))


def _coefficients(
    log_retention: Tensor | None,
    log_momentum: Tensor | None,
    inner_step: Tensor,
    outer_step: Tensor | None,
    window_gate: Tensor | None,
    state: DeepMemoryState,
    grid: Grid,
    unlock: tuple[int, ...],
) -> tuple[Coefficients, tuple[Tensor, Tensor], Tensor | None, DeepMemoryState]:
    """All chunks' coefficients, those of `S_t` at every token (of the anchor's momentum, of each row), which row's
    gradient sees which block, and the final state but for its weights, momentum and rows.

    `t` counts the tokens read since the chunk's start, 0 to C; gates are `[N, M, C]`, those of a window `[N, M, C, c]`.
    """
    size, heads, halo = grid.size, grid.heads, state.halo
    keep = interval_products(
        torch.zeros_like(inner_step) if log_retention is None else log_retention
    )  # A(t, j), [N, M, 1+C, 1+C]
    weighted = keep if outer_step is None else keep * F.pad(outer_step, (1, 0))[..., None, :]
    if log_momentum is None:
        slot = torch.eye(1 + size, dtype=inner_step.dtype, device=inner_step.device).expand_as(keep)
        both = weighted
    else:
        slot = interval_products(log_momentum)  # E
        both = weighted @ slot  # H
    if window_gate is not None and window_gate.shape[-1] == 1:
        inner_step, window_gate = inner_step * window_gate[..., 0], None
    write = both[..., 1:] * inner_step[..., None, :]
    momentum_write = slot[..., 1:] * inner_step[..., None, :]
    if window_gate is not None:
        band = _band(window_gate, halo)
        write, momentum_write = write @ band, momentum_write @ band

    # o: the tokens of a chunk before each block opens; r: the tokens that the first chunk already holds.
    start = state.position if grid.held is None else state.position - grid.held
    starts = start + size * torch.arange(grid.count, device=start.device)[:, None]  # [N, B]
    opens = (constant(unlock, start) - starts[..., None]).clamp(0, size)  # [N, B, E]
    opens = opens.repeat_interleave(heads, dim=1)
    token = torch.arange(1 + size, device=start.device)[:, None]
    origin = opens
    if grid.ends.held is not None:
        first = (torch.arange(grid.count, device=start.device) == 0)[:, None]
        held = torch.where(first, grid.ends.held, 0)  # [N, M]
        origin = torch.maximum(opens, held[..., None])
    if len(unlock) == 1 and grid.held is None:
        from_keep, from_both, from_slot = keep[..., :1], both[..., :1] - weighted[..., :1], slot[..., :1]
    else:
        index = origin[:, :, None, :].expand(-1, -1, 1 + size, -1)
        closed = token < index
        from_keep, from_both, from_slot = (x.gather(-1, index) for x in (keep, both - weighted, slot))
        from_keep, from_slot = torch.where(closed, 1, from_keep), torch.where(closed, 1, from_slot)
    anchor_keep, anchor_read, anchor_slot = from_keep, from_both, from_slot
    if grid.ends.held is not None:
        begun = [x.flatten(0, 1)[:, None] for x in (state.weight_keep, state.momentum_read, state.momentum_keep)]
        begun_keep, begun_read, begun_slot = (
            torch.where(first[..., None, None], x, fresh) for x, fresh in zip(begun, (1.0, 0.0, 1.0), strict=True)
        )
        anchor_keep = from_keep * begun_keep
        anchor_read = from_keep * begun_read + from_both * begun_slot
        anchor_slot = from_slot * begun_slot
        index = held[:, :, None, None].expand(-1, -1, 1 + size, 1)
        held_keep, held_both, held_slot = (x.gather(-1, index) for x in (keep, both - weighted, slot))
        begun_write, begun_momentum = (
            torch.where(first[..., None, None], x.flatten(0, 1)[:, None], 0.0)
            for x in (state.write, state.momentum_write)
        )
        write = write + held_keep * begun_write + held_both * begun_momentum
        momentum_write = momentum_write + held_slot * begun_momentum

    orthogonal = None
    if outer_step is not None:  # sum over n = j+1..t of A(t, n) step_n
        sums = F.pad(weighted, (0, 1)).flip(-1).cumsum(-1).flip(-1)[..., 1:]
        orthogonal = sums.gather(-1, origin[:, :, None, :].expand(-1, -1, 1 + size, -1))
        if grid.ends.held is not None:
            begun_step = torch.where(first[..., None, None], state.orthogonal_step.flatten(0, 1)[:, None], 0.0)
            orthogonal = orthogonal + from_keep * begun_step

    final = state._replace(
        position=state.position + (grid.new if grid.lengths is None else grid.lengths),
        write=_at_end(write, grid, 0.0),
        momentum_write=torch.zeros_like(state.momentum_write),
        weight_keep=_at_end(anchor_keep, grid, 1.0),
        momentum_read=_at_end(anchor_read, grid, 0.0),
        momentum_keep=torch.zeros_like(state.momentum_keep),
    )
    if log_momentum is not None:
        final = final._replace(
            momentum_write=_at_end(momentum_write, grid, 0.0), momentum_keep=_at_end(anchor_slot, grid, 1.0)
        )
    if orthogonal is not None:
        final = final._replace(orthogonal_step=_at_end(orthogonal, grid, 0.0))
    reads_keep, reads_momentum, is_open = anchor_keep[:, :, 1:], anchor_read[:, :, 1:], None
    if len(unlock) > 1:
        is_open = (token[1:] > opens[:, :, None]).to(inner_step.dtype)  # [N, M, C, E]
        reads_keep, reads_momentum = reads_keep * is_open, reads_momentum * is_open
        is_open = torch.cat([is_open[:, :, :1].expand(-1, -1, halo, -1), is_open], dim=2)
    coefficients = Coefficients(
        keep=reads_keep,
        momentum_read=reads_momentum,
        write=write[:, :, 1:],
        keep_end=anchor_keep[:, :, -1],
        momentum_read_end=anchor_read[:, :, -1],
        momentum_keep_end=anchor_slot[:, :, -1],
        momentum_write_end=momentum_write[:, :, -1],
        orthogonal_end=None if orthogonal is None else orthogonal[:, :, -1],
    )
    return coefficients, (anchor_slot[:, :, 1:], momentum_write[:, :, 1:]), is_open, final


def _band(window_gate: Tensor, halo: int) -> Tensor:
    """`B(i, r)`, the weight of row r's gradient in token i's write, `[N, M, C, c]` to `[N, M, C, R]`."""
    size, window = window_gate.shape[-2:]
    # Each token's gates, oldest first, one column further than those of the token before.
    rows = F.pad(window_gate.flip(-1), (0, size)).flatten(-2)[..., : size * (window - 1 + size)]
    return rows.unflatten(-1, (size, -1))[..., window - 1 - halo :]


def _at_end(x: Tensor, grid: Grid, fresh: float) -> Tensor:
    """The row of `x` `[N, M, 1 + C, X]` after each row's last token, `[B, H, X]`; `fresh` where that token ended a
    chunk.
    """
    if grid.filled is None or grid.ends.done is None:
        end = torch.full_like(x[0, :, 0], fresh)
    else:
        filled = grid.filled.repeat_interleave(grid.heads)
        rows = torch.arange(x.shape[1], device=x.device)
        end = torch.where((filled > 0)[:, None], x[grid.ends.done.clamp(max=grid.count - 1), rows, filled], fresh)
    return end.unflatten(0, (grid.batch, grid.heads))


def step(
    network: Network,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    log_momentum: Tensor | None,
    step_size: Tensor,
    window_gate: Tensor | None,
    state: DeepMemoryState,
    unlock: tuple[int, ...],
) -> tuple[Tensor, DeepMemoryState]:
    """One token, without autograd: one more row of factors, and new weights only when it completes a chunk, but under
    Muon at every token.

    The row is written in place, where the old state has none: it stays valid, though two states must not go on from it.
    A step is bound by the number of torch calls, so it makes few.
    """
    batch, heads, room = state.write.shape
    halo, has_muon = state.halo, network.newton_schulz_steps is not None
    size, flat = room - halo, batch * heads
    q, k, v = query.reshape(flat, 1, -1), key.reshape(flat, 1, -1), value.reshape(flat, 1, -1)  # [M, 1, D]
    step = step_size.mT  # [B, H, 1]
    retention = None if log_retention is None else log_retention.exp().mT
    momentum = None if log_momentum is None else log_momentum.exp().mT
    weights, slots = [x.flatten(0, 1) for x in state.weights], [x.flatten(0, 1) for x in state.momentum]
    is_open = opened = None
    if network.blocks > 1:
        is_open = state.position[:, None] >= constant(unlock, state.position)  # [B, E]
        opened = is_open.repeat_interleave(heads, dim=0)[:, None].to(q.dtype)  # [M, 1, E]

    known_k = known_q = None
    if network.depth > 1 and not state.current:  # key and query meet the same weights, which are read once
        products = torch.bmm(torch.cat([k, q], dim=1), weights[0].mT)
        known_k, known_q = products[:, :1], products[:, 1:]
    held = known_rows(state.position, size)
    filled = room if held is None else halo + 1 + max(held)
    at: int | Tensor
    if held is not None and window_gate is None and min(held) == max(held):
        at = halo + held[0]
    else:
        at = (halo + state.position % size).view(-1, 1, 1).expand(-1, heads, 1)  # [B, H, 1]
    buffer, inputs, deltas = side_by_side(network, state)
    _put(buffer, at, inner_row(network, weights, k, v, opened, known_k).view(batch, heads, 1, -1))
    rows = buffer.flatten(0, 1)[:, :filled].split_with_sizes(network.row_widths, dim=-1)
    recent = [state.recent_keys, state.recent_values]
    if halo > 0:
        starts = state.position % size == 0
        if may_hold(starts):  # the tokens before the chunk, at its anchor
            pairs = inner_gradients(network, weights, recent[0].flatten(0, 1), recent[1].flatten(0, 1), opened)
            begins = starts.repeat_interleave(heads)[:, None, None]
            for x, new in zip(rows, (*pairs.inputs, *pairs.deltas), strict=True):
                x[:, :halo] = torch.where(begins, new, x[:, :halo])
        recent = [
            torch.cat([x[:, :, 1:], new.movedim(1, 2)], dim=2) for x, new in zip(recent, (key, value), strict=True)
        ]

    # S_t = m S_{t-1} - l u_t and M_t = a M_{t-1} + S_t, coefficient by coefficient, `[B, H, R]` and `[B, H, E]`. Under
    # Muon l multiplies S_t instead.
    before = state.weight_keep, state.momentum_read, state.momentum_keep, state.orthogonal_step
    keep, momentum_read, momentum_keep, orthogonal = before
    momentum_write = torch.zeros_like(state.write) if momentum is None else momentum * state.momentum_write
    momentum_write = _add_window(momentum_write, at, torch.ones_like(step) if has_muon else step, window_gate)
    written = step * momentum_write if has_muon else momentum_write
    if momentum is None:
        momentum_write = state.momentum_write
    else:
        momentum_keep = momentum * momentum_keep
        added = step * momentum_keep if has_muon else momentum_keep
        momentum_read = added + momentum_read if retention is None else torch.addcmul(added, retention, momentum_read)
    if has_muon:
        orthogonal = step + (orthogonal if retention is None else retention * orthogonal)
    if retention is None:
        write = state.write + written
    else:
        write, keep = torch.addcmul(written, retention, state.write), retention * keep
    reads = keep, momentum_read
    if is_open is not None:
        mask = is_open[:, None]
        reads = keep * mask, momentum_read * mask
        keep, momentum_read, momentum_keep, orthogonal = (
            torch.where(mask, new, old)
            for new, old in zip((keep, momentum_read, momentum_keep, orthogonal), before, strict=True)
        )

    if state.current:
        gates = per_token.Gates(
            retention=(torch.ones_like(step) if retention is None else retention).reshape(-1, 1),
            step_size=step.reshape(-1, 1),
            momentum_keep=momentum_keep.reshape(flat, 1, -1),
            momentum_write=momentum_write.reshape(flat, 1, -1),
            is_open=opened,
        )
        output, state = _stepped_per_token(network, q, state, (*inputs, *deltas), gates)
    else:
        of_anchor = reads[0].reshape(flat, 1, -1), reads[1].reshape(flat, 1, -1)
        of_rows = write[:, :, :filled].reshape(flat, 1, -1)
        depth = network.depth
        output, _ = read(network, q, weights, slots, rows[:depth], rows[depth:], *of_anchor, of_rows, known_q)
        coefficients = (write, momentum_write, keep, momentum_read, momentum_keep, orthogonal)
        may_end, all_end = filled == room, held is not None and min(held) == size - 1
        state = _stepped(network, state, may_end, all_end, inputs, deltas, coefficients)
    if halo > 0:
        state = state._replace(recent_keys=recent[0], recent_values=recent[1])
    return output.reshape(batch, 1, heads, -1), state


def _stepped_per_token(
    network: Network,
    query: Tensor,
    state: DeepMemoryState,
    factors: tuple[Tensor, ...],
    gates: per_token.Gates,
) -> tuple[Tensor, DeepMemoryState]:
    """What the query reads, and `_stepped`, under Muon at every token: with `M_t`, the next anchor where the token
    completes a chunk."""
    rows, depth = state.write.shape[:2], network.depth
    slots, current = ([x.flatten(0, 1) for x in tensors] for tensors in (state.momentum, state.current))
    y, *moved = per_token.through(network, query, [x.flatten(0, 1) for x in factors], slots, current, gates)
    new, new_slots = (tuple(x.unflatten(0, rows) for x in tensors) for tensors in moved)
    done = _is_done(state)

    def ended(now: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.where(done[..., None], a, b) for a, b in zip(now, before, strict=True))

    return y, state._replace(
        weights=ended(new, state.weights),
        momentum=ended(new_slots, state.momentum),
        inputs=factors[:depth],
        deltas=factors[depth:],
        momentum_write=torch.where(done, 0.0, gates.momentum_write.view_as(state.momentum_write)),
        momentum_keep=torch.where(done, 1.0, gates.momentum_keep.view_as(state.momentum_keep)),
        current=new,
        position=state.position + 1,
    )


def _stepped(
    network: Network,
    state: DeepMemoryState,
    may_end: bool,
    all_end: bool,
    inputs: tuple[Tensor, ...],
    deltas: tuple[Tensor, ...],
    coefficients: tuple[Tensor, ...],
) -> DeepMemoryState:
    """The state one token on, of which the factors `[B, H, R, ...]` and the coefficients are given: the next anchor
    where the token completes the running chunk, which none does unless it `may_end`, and each where `all_end`."""
    weights, momentum = state.weights, state.momentum
    if may_end:
        write, momentum_write, keep, momentum_read, momentum_keep, orthogonal = (x.flatten(0, 1) for x in coefficients)
        anchor = [x.flatten(0, 1) for x in weights], [x.flatten(0, 1) for x in momentum]
        rows = [x.flatten(0, 1) for x in inputs], [x.flatten(0, 1) for x in deltas]
        c = (keep, momentum_read, momentum_keep, write, momentum_write, orthogonal)
        advanced, done = advance(network, *anchor, *rows, *c), None if all_end else _is_done(state)
        weights, momentum = (
            tuple(_where(done, new.view_as(old), old) for new, old in zip(*pair, strict=True))
            for pair in zip(advanced, (weights, momentum), strict=True)
        )
        fresh = (0.0, 0.0, 1.0, 0.0, float(network.momentum), 0.0)
        coefficients = tuple(
            _where(done, torch.full_like(x, new), x) for new, x in zip(fresh, coefficients, strict=True)
        )
    write, momentum_write, keep, momentum_read, momentum_keep, orthogonal = coefficients
    return DeepMemoryState(
        weights,
        momentum,
        inputs,
        deltas,
        write,
        momentum_write,
        keep,
        momentum_read,
        momentum_keep,
        orthogonal,
        state.current,
        state.recent_keys,
        state.recent_values,
        state.position + 1,
    )


def _where(done: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """`new` `[B, H, ...]` of rows that are `done` `[B, 1, 1]`, of all where it is `None`."""
    return new if done is None else torch.where(done.view(-1, *[1] * (new.ndim - 1)), new, old)


def _is_done(state: DeepMemoryState) -> Tensor:
    """Whether the next token completes the running chunk, `[B, 1, 1]`."""
    size = state.write.shape[2] - state.halo
    return (state.position % size == size - 1)[:, None, None]


def known_rows(position: Tensor, size: int) -> list[int] | None:
    """Where in its running chunk the next token of each row stands, as far as the host knows without waiting: on a CPU.
    Then rows of tokens to come are not read, no chunk is ended where none ends, and no index is made where all stand
    alike."""
    found = known(position)
    return None if found is None else [at % size for at in found]


def side_by_side(network: Network, state: DeepMemoryState) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A buffer `[B, H, R, sum of widths]` that can be written, and its parts, the state's inputs and deltas: those of
    the state where they lie so already, as a step leaves them, else copies. A token's are written to it at once."""
    factors, first = (*state.inputs, *state.deltas), state.inputs[0]
    if not torch.compiler.is_compiling():  # a graph knows no addresses
        batch, heads, room, _ = first.shape
        *starts, width = network.row_starts
        strides, begin, size = (heads * room * width, room * width, width, 1), first.data_ptr(), first.element_size()
        places = [begin + size * start for start in starts]
        if first.stride() == strides and [x.data_ptr() for x in factors] == places and may_write(first):
            return first.as_strided((batch, heads, room, width), strides), state.inputs, state.deltas
    buffer = torch.cat(factors, dim=-1)
    parts = buffer.split(network.row_widths, dim=-1)
    return buffer, parts[: network.depth], parts[network.depth :]


def _put(x: Tensor, at: int | Tensor, new: Tensor) -> Tensor:
    """`new` `[B, H, 1, ...]` in row `at` of `x` `[B, H, R, ...]`, of all alike or `[B, H, 1]`."""
    if isinstance(at, int):
        x.narrow(2, at, 1).copy_(new)
        return x
    return x.scatter_(2, at.view(*at.shape, *[1] * (x.ndim - 3)).expand(new.shape), new)


def _add_window(write: Tensor, at: int | Tensor, step: Tensor, window_gate: Tensor | None) -> Tensor:
    """`write` `[B, H, R]` with `step` `[B, H, 1]` times a token's gates added to its row `at` and those before it."""
    if window_gate is None:
        return _put(write, at, step)
    gates = step * window_gate[:, 0]  # [B, H, c]
    rows = at - torch.arange(gates.shape[2], device=gates.device)
    return write.scatter_add_(2, rows.clamp(min=0), torch.where(rows >= 0, gates, 0))
