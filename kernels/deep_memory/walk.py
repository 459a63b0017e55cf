"""The walk over the chunks, and the walk as one autograd function.

Its backward keeps the memory at the chunk starts and the products that the reads made, and recomputes the rest of a
chunk. Chunks are the first dimension, so
that each is a contiguous slice. While capacity blocks are closed a chunk is computed on the open part of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from memzoo.kernels.deep_memory.chunk import (
    Coefficients,
    Inner,
    Network,
    Read,
    advance,
    advance_backward,
    inner_again,
    inner_backward,
    inner_gradients,
    read,
    read_backward,
)
from memzoo.kernels.registry import as_given, cast


class Ends(NamedTuple):
    """Where each row's tokens begin and end on the chunk grid, repeated per head, `[M]`."""

    held: Tensor | None = None
    """Tokens that the first chunk already holds; `None` for none."""
    done: Tensor | None = None
    """Chunks that are complete; `None` for all."""
    fewest: int = 0
    most: int = 0
    """Least and greatest of `done`."""
    open_blocks: tuple[int, ...] = ()
    """For each chunk the blocks that any row sees in it; empty: all."""
    full_from: int = 0
    """First chunk before whose start all blocks were open, for every row."""
    halo: int = 0
    """Rows of tokens before a chunk; a chunk that holds tokens holds these, too."""

    def is_held(self, chunk: int, rows: int) -> Tensor | None:
        """`[M, R, 1]`, or `None` for nowhere."""
        if self.held is None or chunk > 0:
            return None
        held = self.held if self.halo == 0 else torch.where(self.held > 0, self.halo + self.held, 0)
        return (torch.arange(rows, device=self.held.device) < held[:, None])[..., None]

    def is_done(self, chunk: int) -> Tensor | bool:
        """Whether the rows complete the chunk: `[M, 1, 1]`, or one answer for all."""
        if self.done is None or chunk < self.fewest:
            return True
        return chunk < self.most and (self.done > chunk)[:, None, None]

    def is_running(self, chunk: int) -> Tensor | bool:
        """Whether the rows stop inside the chunk or before it begins: `[M, 1, 1]`, or `False` for none."""
        if self.done is None or not self.fewest <= chunk <= self.most:
            return False
        return (self.done == chunk)[:, None, None]


class Tensors(NamedTuple):
    """The inputs of a walk."""

    query: Tensor
    """`[N, M, C, K]`."""
    key: Tensor
    """Of each row of a chunk's factors, `[N, M, R, K]`."""
    value: Tensor
    """`[N, M, R, V]`."""
    coefficients: Coefficients
    is_open: Tensor | None
    """Whether each row's gradient sees each block, `[N, M, R, E]`, 0 or 1; `None` for one block."""
    memory: tuple[Tensor, ...]
    """Weights, then momentum, at the first anchor."""
    held: tuple[Tensor, ...]
    """Inputs, then deltas, of the tokens that the first chunk already holds; or empty."""

    def flat(self) -> list[Tensor | None]:
        return [self.query, self.key, self.value, *self.coefficients, self.is_open, *self.memory, *self.held]

    def wide(self) -> Tensors:
        """With sequences in the dtype of the memory."""
        query, key, value = (cast(x, self.memory[0].dtype) for x in (self.query, self.key, self.value))
        return self._replace(query=query, key=key, value=value)

    @staticmethod
    def of(network: Network, flat: Sequence[Any]) -> Tensors:
        query, key, value, *rest = flat
        states = network.depth * (2 if network.momentum else 1)
        memory = tuple(rest[9 : 9 + states])
        return Tensors(query, key, value, Coefficients(*rest[:8]), rest[8], memory, tuple(rest[9 + states :]))


class Chunk(NamedTuple):
    """One chunk, on the part of the network that is open in it."""

    network: Network
    query: Tensor
    key: Tensor
    value: Tensor
    c: Coefficients
    is_open: Tensor | None
    held: list[Tensor]
    is_held: Tensor | None
    """Which rows the chunk already holds, `[M, R, 1]`; `None` for none."""

    @staticmethod
    def all_of(network: Network, ends: Ends, tensors: Tensors) -> list[Chunk]:
        queries, keys, values = (x.unbind(0) for x in (tensors.query, tensors.key, tensors.value))
        coefficients, plain = tensors.coefficients.of_chunks(), network.plain()
        chunks = []
        for at, (query, key, value, c) in enumerate(zip(queries, keys, values, coefficients, strict=True)):
            part = network
            if at >= ends.full_from:
                part = plain
            elif ends.open_blocks:
                part = network.narrowed(ends.open_blocks[at])
            is_open = None
            if tensors.is_open is not None and part.blocks > 1:
                is_open = tensors.is_open[at][..., : part.blocks]
            is_held = ends.is_held(at, key.shape[1])
            held = part.of_rows(tensors.held) if is_held is not None else []
            chunks.append(Chunk(part, query, key, value, c.of_blocks(part.blocks), is_open, held, is_held))
        return chunks

    def inner(self, anchor: Sequence[Tensor]) -> Inner:
        """The inner gradients of its tokens, those that it already holds included."""
        weights = anchor[: self.network.depth]
        return self._with_held(inner_gradients(self.network, weights, self.key, self.value, self.is_open))

    def inner_again(self, anchor: Sequence[Tensor], clip: Tensor | None) -> Inner:
        """The same for the backward, from what the forward has found out."""
        weights = anchor[: self.network.depth]
        return self._with_held(inner_again(self.network, weights, self.key, self.value, self.is_open, clip))

    def _with_held(self, inner: Inner) -> Inner:
        if self.is_held is None:
            return inner
        depth, new = self.network.depth, (*inner.inputs, *inner.deltas)
        rows = [torch.where(self.is_held, old, x) for old, x in zip(self.held, new, strict=True)]
        return inner._replace(inputs=rows[:depth], deltas=rows[depth:])


class Kept(NamedTuple):
    """What the backward of a chunk takes from its forward."""

    memory: tuple[Tensor, ...]
    """Its anchor, on the whole network."""
    clip: Tensor | None
    """See `Inner.clip`."""
    read: Read


def walk(
    network: Network, ends: Ends, tensors: Tensors, keep: Callable[[Kept], None] | None = None
) -> tuple[Tensor, ...]:
    """Outputs `[N, M, C, V]`, the last anchor, and the factors of the chunk that is running at the end.

    `keep` is told what each chunk leaves for the backward.
    """
    depth, memory = network.depth, tensors.memory
    count, rows, size = tensors.query.shape[:3]
    output = tensors.value.new_empty(count, rows, size, network.widths[-1])
    factors = [output.new_zeros(rows, tensors.key.shape[2], width) for width in network.row_widths]
    for at, chunk in enumerate(Chunk.all_of(network, ends, tensors)):
        part, c, anchor = chunk.network, chunk.c, chunk.network.of_memory(memory)
        weights, slots = anchor[:depth], anchor[depth:]
        inner = chunk.inner(anchor)
        output[at], left = read(
            part, chunk.query, weights, slots, inner.inputs, inner.deltas, c.keep, c.momentum_read, c.write
        )
        if keep is not None:
            keep(Kept(memory, inner.clip, left))
        is_done, is_running = ends.is_done(at), ends.is_running(at)
        if is_done is not False:
            c_end = (c.keep_end, c.momentum_read_end, c.momentum_keep_end, c.write_end, c.momentum_write_end)
            new_weights, new_slots = advance(part, weights, slots, inner.inputs, inner.deltas, *c_end, c.orthogonal_end)
            new = [*new_weights, *new_slots]
            if isinstance(is_done, Tensor):
                new = [torch.where(is_done, x, old) for x, old in zip(new, anchor, strict=True)]
            memory = _widened(part, new, network, memory)
        if isinstance(is_running, Tensor):
            running = _padded((*inner.inputs, *inner.deltas), network)
            factors = [torch.where(is_running, x, old) for x, old in zip(running, factors, strict=True)]
    return (output, *memory, *factors)


def _widened(part: Network, new: list[Tensor], network: Network, old: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The whole memory with its open part replaced."""
    if part.widths == network.widths:
        return tuple(new)
    whole = tuple(x.clone() for x in old)
    for x, value in zip(part.of_memory(whole), new, strict=True):
        x.copy_(value)
    return whole


def _padded(rows: Sequence[Tensor], network: Network) -> list[Tensor]:
    """Rows of the open part with zeros for the closed units."""
    return [F.pad(x, (0, width - x.shape[-1])) for x, width in zip(rows, network.row_widths, strict=True)]


class Walk(torch.autograd.Function):
    """`walk` under autograd."""

    @staticmethod
    def forward(ctx: Any, network: Network, ends: Ends, *flat: Any) -> tuple[Tensor, ...]:
        kept: list[Kept] = []
        outputs = walk(network, ends, Tensors.of(network, flat), kept.append)
        leaves, spec = pytree.tree_flatten((flat, kept))
        ctx.network, ctx.ends, ctx.spec = network, ends, spec
        ctx.save_for_backward(*leaves)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        network, ends = ctx.network, ctx.ends
        # Asked for once: checkpointing hands each of them out a single time.
        flat, kept = pytree.tree_unflatten(ctx.saved_tensors, ctx.spec)
        tensors = Tensors.of(network, flat)
        states = len(tensors.memory)
        d_output, d_factors = gradients[0], gradients[1 + states :]
        d_memory = tuple(x.clone() for x in gradients[1 : 1 + states])  # the walk changes them
        d_query, d_key, d_value = (torch.empty_like(x) for x in (tensors.query, tensors.key, tensors.value))
        d_coefficients = tensors.coefficients.map(torch.zeros_like)
        d_cs = d_coefficients.of_chunks()
        chunks = Chunk.all_of(network, ends, tensors)
        d_held: list[Tensor] = []
        with as_given(d_output.device):
            for at in reversed(range(len(chunks))):
                part, d_c = chunks[at].network, d_cs[at].of_blocks(chunks[at].network.blocks)
                d_next, d_rows = part.of_memory(d_memory), part.of_rows(d_factors)
                d_query[at], d_key[at], d_value[at], d_start, d_held = _chunk_backward(
                    chunks[at], kept[at], d_output[at], d_next, d_rows, ends.is_done(at), ends.is_running(at), d_c
                )
                d_memory = _widened(part, d_start, network, d_memory)
        d_flat = [d_query, d_key, d_value, *d_coefficients, None, *d_memory]
        return (None, None, *d_flat, *(_padded(d_held, network) if tensors.held else ()))


def _chunk_backward(
    chunk: Chunk,
    kept: Kept,
    d_output: Tensor,
    d_memory: Sequence[Tensor],
    d_factors: Sequence[Tensor],
    is_done: Tensor | bool,
    is_running: Tensor | bool,
    d_c: Coefficients,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Gradients of query, key, value, anchor and held factors; the coefficients' are added to `d_c`.

    May change `d_memory`.
    """
    network, c = chunk.network, chunk.c
    depth = network.depth
    anchor = network.of_memory(kept.memory)
    weights, slots = anchor[:depth], anchor[depth:]
    inner = chunk.inner_again(anchor, kept.clip)
    d_rows = [torch.where(is_running, d, 0) for d in d_factors] if isinstance(is_running, Tensor) else None
    if is_done is False:
        assert d_rows is not None  # a chunk that no row completes is running
        d_start = [d.clone() for d in d_memory]
    else:
        d_next = [torch.where(is_done, d, 0) for d in d_memory] if isinstance(is_done, Tensor) else d_memory
        d_start, d_rows = advance_backward(
            network, d_next[:depth], d_next[depth:], weights, slots, inner, c, d_c, d_rows
        )
        if isinstance(is_done, Tensor):
            d_start = [d + torch.where(is_done, 0, passed) for d, passed in zip(d_start, d_memory, strict=True)]
    d_weights, d_slots, d_inputs, d_deltas = d_start[:depth], d_start[depth:], d_rows[:depth], d_rows[depth:]
    d_query = read_backward(
        network, chunk.query, d_output, kept.read, weights, slots, inner, c, d_c, d_weights, d_slots, d_inputs, d_deltas
    )
    d_held = []
    if chunk.is_held is not None:
        d_held = [torch.where(chunk.is_held, d, 0) for d in (*d_inputs, *d_deltas)]
        d_inputs = [torch.where(chunk.is_held, 0, d) for d in d_inputs]
        d_deltas = [torch.where(chunk.is_held, 0, d) for d in d_deltas]
    d_key, d_value = inner_backward(network, weights, inner, chunk.is_open, d_inputs, d_deltas, d_weights)
    return d_query, d_key, d_value, d_start, d_held
