"""The walk over the chunks: a chunk's forward and backward as matrix products, and the walk as one autograd function.

Here rows and heads are one leading dimension `M = B H`, chunks the first one, so that each chunk is a contiguous slice:
sequences are `[N, M, C, D]`, weights `[M, out, in]`. Everything runs without autograd; the backward is written out
below each forward. It keeps the memory at the chunk starts and recomputes the rest of a chunk.

For layer l with inputs `x`, deltas `d` (C tokens) and the coefficients of `Coefficients`, a read and the next anchor
are

    y = keep (z W^T) + momentum_read (z S^T) - (z x^T * write) d
    W' = keep_end W + momentum_read_end S - (d * write_end)^T x,    S' = momentum_keep_end S - (d *
    momentum_write_end)^T x
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memzoo.kernels.deep_memory import block_of_unit
from memzoo.kernels.deep_memory.activations import ACTIVATION


class Coefficients(NamedTuple):
    """Of every chunk; `[N, ...]`, or of one, without the N."""

    keep: Tensor
    """Of the anchor's weights in `M_t`, `[M, C, E]`; 0 where the block is closed."""
    momentum_read: Tensor
    """Of the anchor's momentum in `M_t`, `[M, C, E]`."""
    write: Tensor
    """Of token i's gradient in `M_t`, `[M, C, C]`."""
    keep_end: Tensor
    """Of the anchor's weights in the next anchor's, `[M, E]`; 1 where the block stays closed."""
    momentum_read_end: Tensor
    """Of the anchor's momentum in the next anchor's weights, `[M, E]`."""
    momentum_keep_end: Tensor
    """Of the anchor's momentum in the next anchor's, `[M, E]`."""
    momentum_write_end: Tensor
    """Of token i's gradient in the next anchor's momentum, `[M, C]`."""

    def at(self, chunk: int) -> Coefficients:
        return Coefficients(*(x[chunk] for x in self))

    @property
    def write_end(self) -> Tensor:
        return self.write[..., -1, :]


@dataclass(frozen=True)
class Network:
    """The memory's network and how its weights fall into capacity blocks.

    Args:
        widths: key, hidden..., value widths.
        activation: name of the activation.
        residual: whether the input is added to the output.
        momentum: whether there is momentum.
        blocks: E.
        max_gradient_norm: bound of a token's inner gradient; infinity for none.
    """

    widths: tuple[int, ...]
    activation: str
    residual: bool
    momentum: bool
    blocks: int
    max_gradient_norm: float

    @property
    def depth(self) -> int:
        return len(self.widths) - 1

    def gates_inputs(self, layer: int) -> bool:
        """Whether the blocks of a layer's weights are those of its inputs (else of its outputs).

        The last layer's outputs are the read-out, which no block owns; a lone layer's blocks are key coordinates.
        """
        return layer == self.depth - 1

    def is_between(self, layer: int) -> bool:
        """Whether a layer joins two hidden layers, so that both ends of a weight must be open."""
        return 0 < layer < self.depth - 1 and self.blocks > 1

    def masks(self, position: int) -> bool:
        """Whether the units at a position (0: keys, depth: outputs) form capacity blocks."""
        return self.blocks > 1 and (0 < position < self.depth or (self.depth == 1 and position == 0))

    def scale(self, x: Tensor, c: Tensor, position: int) -> Tensor:
        """Units `x` `[..., units]` times their block's `c` `[..., E]`."""
        width = self.widths[position]
        if self.blocks == 1:
            return x * c
        if width % self.blocks == 0:
            return (x.unflatten(-1, (self.blocks, -1)) * c[..., None]).flatten(-2)
        return x * c[..., block_of_unit(width, self.blocks, x.device)]

    def per_block(self, x: Tensor, position: int) -> Tensor:
        """Sum over the units of each block, `[..., units]` to `[..., E]`."""
        width = self.widths[position]
        if self.blocks == 1:
            return x.sum(-1, keepdim=True)
        if width % self.blocks == 0:
            return x.unflatten(-1, (self.blocks, -1)).sum(-1)
        block = block_of_unit(width, self.blocks, x.device)
        return x.new_zeros(*x.shape[:-1], self.blocks).index_add_(-1, block, x)

    def _block_between(self, layer: int, device: torch.device) -> Tensor:
        into = block_of_unit(self.widths[layer], self.blocks, device)
        out = block_of_unit(self.widths[layer + 1], self.blocks, device)
        return torch.maximum(out[:, None], into)

    def per_weight(self, x: Tensor, layer: int) -> Tensor:
        """`[M, E]` to a factor of the weights `[M, out, in]`."""
        if self.is_between(layer):
            return x[:, self._block_between(layer, x.device)]
        inputs = self.gates_inputs(layer)
        if self.blocks > 1:
            x = x[:, block_of_unit(self.widths[layer if inputs else layer + 1], self.blocks, x.device)]
        return x[:, None, :] if inputs else x[:, :, None]

    def per_weight_block(self, x: Tensor, layer: int) -> Tensor:
        """Sum over the weights of each block, `[M, out, in]` to `[M, E]`."""
        if self.is_between(layer):
            block = self._block_between(layer, x.device).flatten()
            return x.new_zeros(x.shape[0], self.blocks).index_add_(1, block, x.flatten(1))
        if self.gates_inputs(layer):
            return self.per_block(x.sum(1), layer)
        return self.per_block(x.sum(2), layer + 1)


# A product with an anchor
# ------------------------------------------------------------------------------------------------


def _product(network: Network, layer: int, z: Tensor, weight: Tensor, c: Tensor) -> Tensor:
    """`(c * W) z` for tokens `z` `[M, t, in]`, where each weight takes the coefficient `c` `[M, t, E]` of its block."""
    if network.is_between(layer):
        return sum(
            (_shell_product(network, layer, z, weight, c, block) for block in range(network.blocks)),
            z.new_zeros(*z.shape[:-1], weight.shape[1]),
        )
    if network.gates_inputs(layer):
        return network.scale(z, c, layer) @ weight.mT
    return network.scale(z @ weight.mT, c, layer + 1)


def _shells(network: Network, layer: int, block: int) -> list[tuple[slice, slice]]:
    """The weights of a block between two hidden layers, an L of two rectangles `(out, in)`."""

    def bounds(width: int) -> tuple[int, int]:
        size = width // network.blocks
        return block * size, width if block == network.blocks - 1 else (block + 1) * size

    (in_low, in_high), (out_low, out_high) = bounds(network.widths[layer]), bounds(network.widths[layer + 1])
    return [(slice(out_low, out_high), slice(0, in_high)), (slice(0, out_low), slice(in_low, in_high))]


def _shell_product(network: Network, layer: int, z: Tensor, weight: Tensor, c: Tensor, block: int) -> Tensor:
    y = z.new_zeros(*z.shape[:-1], weight.shape[1])
    for out, into in _shells(network, layer, block):
        y[..., out] += (z[..., into] @ weight[:, out, into].mT) * c[..., block, None]
    return y


def _product_backward(
    network: Network, layer: int, g: Tensor, z: Tensor, weight: Tensor, c: Tensor, d_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `z` and `c`; that of the weight is added to `d_weight`."""
    if network.is_between(layer):
        dz, dc = torch.zeros_like(z), torch.zeros_like(c)
        for block in range(network.blocks):
            for out, into in _shells(network, layer, block):
                g_out, z_in, w = g[..., out], z[..., into], weight[:, out, into]
                g_w = g_out @ w
                dz[..., into] += g_w * c[..., block, None]
                dc[..., block] += (z_in * g_w).sum(-1)
                d_weight[:, out, into] += (g_out * c[..., block, None]).mT @ z_in
        return dz, dc
    if network.gates_inputs(layer):
        g_w = g @ weight
        d_weight.baddbmm_(g.mT, network.scale(z, c, layer))
        dz = network.scale(g_w, c, layer)
        return dz, network.per_block(g_w.mul_(z), layer)
    g_c = network.scale(g, c, layer + 1)
    d_weight.baddbmm_(g_c.mT, z)
    return g_c @ weight, network.per_block((z @ weight.mT).mul_(g), layer + 1)


# A chunk
# -----------------------------------------------------------------------------------------------------------------


class Inner(NamedTuple):
    """The tokens' inner gradients at an anchor, and what their backward needs."""

    inputs: list[Tensor]
    deltas: list[Tensor]
    unclipped: list[Tensor]
    """The deltas before the bound on the gradient's norm."""
    clip: Tensor | None
    """The factor that keeps the gradient's norm within its bound, `[M, t, 1]`; `None` without a bound."""
    back: list[Tensor]
    """What came back to each hidden layer, before its slope."""
    slopes: list[Tensor]
    curvatures: list[Tensor]


def inner_gradients(
    network: Network, weights: Sequence[Tensor], key: Tensor, value: Tensor, is_open: Tensor | None, order: int = 1
) -> Inner:
    """Layer inputs and deltas of `1/2 |M(k) - v|^2` at `weights` (Titans Eq 12), for `key` `[M, t, K]`."""
    act = ACTIVATION[network.activation]
    inputs, slopes, curvatures = [_masked(network, key, is_open, 0)], [], []
    for layer, weight in enumerate(weights):
        hidden = inputs[layer] @ weight.mT
        if layer < network.depth - 1:
            x, *more = act.derivatives(hidden, order)
            inputs.append(_masked(network, x, is_open, layer + 1))
            slopes.append(more[0])
            curvatures.extend(more[1:])
    delta = hidden.sub_(value)
    deltas = [delta.add_(key) if network.residual else delta]
    back: list[Tensor] = []
    for layer in range(network.depth - 1, 0, -1):
        back.insert(0, deltas[0] @ weights[layer])
        deltas.insert(0, _masked(network, back[0] * slopes[layer - 1], is_open, layer))
    unclipped, clip = deltas, None
    if network.max_gradient_norm < math.inf:
        squares = [_squares(x) * _squares(d) for x, d in zip(inputs, deltas, strict=True)]
        clip = (torch.stack(squares).sum(0) / network.max_gradient_norm**2).clamp(min=1).rsqrt()
        deltas = [d * clip for d in deltas]
    return Inner(inputs, deltas, unclipped, clip, back, slopes, curvatures)


def _squares(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()


def _clip_backward(network: Network, inner: Inner, d_inputs: list[Tensor], d_deltas: list[Tensor]) -> None:
    """From gradients of the clipped deltas to those of the unclipped ones; adds to the inputs'."""
    if inner.clip is None:
        return
    clip = inner.clip
    d_clip = sum((d * delta).sum(-1, keepdim=True) for d, delta in zip(d_deltas, inner.unclipped, strict=True))
    common = torch.where(clip < 1, -d_clip * clip**3 / network.max_gradient_norm**2, 0)
    for layer, (x, delta) in enumerate(zip(inner.inputs, inner.unclipped, strict=True)):
        d_inputs[layer] = torch.addcmul(d_inputs[layer], x, common * _squares(delta))
        d_deltas[layer] = torch.addcmul(d_deltas[layer] * clip, delta, common * _squares(x))


def _inner_backward(
    network: Network,
    weights: Sequence[Tensor],
    inner: Inner,
    is_open: Tensor | None,
    d_inputs: list[Tensor],
    d_deltas: list[Tensor],
    d_weights: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradients of key and value; those of the weights are added to `d_weights`."""
    depth = network.depth
    _clip_backward(network, inner, d_inputs, d_deltas)
    d_hidden = []
    for layer in range(depth - 1):
        d_delta = _masked(network, d_deltas[layer], is_open, layer + 1)
        d_back = d_delta * inner.slopes[layer]
        d_hidden.append((d_delta * inner.back[layer]).mul_(inner.curvatures[layer]))
        d_deltas[layer + 1] = torch.baddbmm(d_deltas[layer + 1], d_back, weights[layer + 1].mT)
        d_weights[layer + 1].baddbmm_(inner.unclipped[layer + 1].mT, d_back)
    d_error = d_deltas[-1]
    d_hidden.append(d_error)
    for layer in range(depth - 1, -1, -1):
        d_weights[layer].baddbmm_(d_hidden[layer].mT, inner.inputs[layer])
        d_x = torch.baddbmm(d_inputs[layer], d_hidden[layer], weights[layer])
        d_x = _masked(network, d_x, is_open, layer)
        if layer > 0:
            d_hidden[layer - 1].addcmul_(d_x, inner.slopes[layer - 1])
    return (d_x + d_error if network.residual else d_x), -d_error


def _masked(network: Network, x: Tensor, is_open: Tensor | None, position: int) -> Tensor:
    if is_open is None or not network.masks(position):
        return x
    return network.scale(x, is_open, position)


class Read(NamedTuple):
    """What the backward of a read needs, per layer."""

    z: list[Tensor]
    scores: list[Tensor]
    slopes: list[Tensor]


def read(
    network: Network,
    query: Tensor,
    weights: Sequence[Tensor],
    slots: Sequence[Tensor],
    inputs: Sequence[Tensor],
    deltas: Sequence[Tensor],
    keep: Tensor,
    momentum_read: Tensor,
    write: Tensor,
    order: int = 0,
) -> tuple[Tensor, Read]:
    """`M_t(q_t)` for queries `[M, t, K]`."""
    act = ACTIVATION[network.activation]
    z = query
    kept = Read([], [], [])
    for layer, weight in enumerate(weights):
        scores = z @ inputs[layer].mT
        y = _product(network, layer, z, weight, keep)
        if network.momentum:
            y += _product(network, layer, z, slots[layer], momentum_read)
        y = y.baddbmm_(scores * write, deltas[layer], alpha=-1)
        kept.z.append(z)
        kept.scores.append(scores)
        if layer < network.depth - 1:
            z, *slope = act.derivatives(y, order) if order else [act.value(y)]
            kept.slopes.extend(slope)
    return (y.add_(query) if network.residual else y), kept


def _read_backward(
    network: Network,
    d_output: Tensor,
    kept: Read,
    weights: Sequence[Tensor],
    slots: Sequence[Tensor],
    inner: Inner,
    c: Coefficients,
    d_c: Coefficients,
    d_weights: Sequence[Tensor],
    d_slots: Sequence[Tensor],
    d_inputs: Sequence[Tensor],
    d_deltas: Sequence[Tensor],
) -> Tensor:
    """Gradient of the query; all others are added to what is given."""
    g = d_output
    for layer in range(network.depth - 1, -1, -1):
        z = kept.z[layer]
        dz, d_keep = _product_backward(network, layer, g, z, weights[layer], c.keep, d_weights[layer])
        d_c.keep.add_(d_keep)
        if network.momentum:
            more, d_read = _product_backward(network, layer, g, z, slots[layer], c.momentum_read, d_slots[layer])
            dz += more
            d_c.momentum_read.add_(d_read)
        d_weighted = g @ inner.deltas[layer].mT
        d_c.write.addcmul_(d_weighted, kept.scores[layer], value=-1)
        d_scores = d_weighted.mul_(c.write)
        d_deltas[layer].baddbmm_((kept.scores[layer] * c.write).mT, g, alpha=-1)
        d_inputs[layer].baddbmm_(d_scores.mT, z, alpha=-1)
        dz.baddbmm_(d_scores, inner.inputs[layer], alpha=-1)
        g = dz.mul_(kept.slopes[layer - 1]) if layer > 0 else dz
    return g + d_output if network.residual else g


def advance(
    network: Network,
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
    """The next anchor's weights and momentum, from the coefficients `[M, E]` and `[M, C]` at the chunk's end."""
    new_weights, new_slots = [], []
    for layer in range(network.depth):
        weight = network.per_weight(keep, layer) * weights[layer]
        if network.momentum:
            weight = weight.addcmul_(network.per_weight(momentum_read, layer), slots[layer])
            slot = network.per_weight(momentum_keep, layer) * slots[layer]
            new_slots.append(slot.baddbmm_((deltas[layer] * momentum_write[..., None]).mT, inputs[layer], alpha=-1))
        new_weights.append(weight.baddbmm_((deltas[layer] * write[..., None]).mT, inputs[layer], alpha=-1))
    return new_weights, new_slots


def _advance_backward(
    network: Network,
    d_new_weights: Sequence[Tensor],
    d_new_slots: Sequence[Tensor],
    weights: Sequence[Tensor],
    slots: Sequence[Tensor],
    inner: Inner,
    c: Coefficients,
    d_c: Coefficients,
    d_inputs: Sequence[Tensor],
    d_deltas: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of weights, then momentum; all others are added to what is given."""
    d_weights, d_slots = [], []
    for layer in range(network.depth):
        x, delta, dw = inner.inputs[layer], inner.deltas[layer], d_new_weights[layer]
        d_weights.append(network.per_weight(c.keep_end, layer) * dw)
        d_c.keep_end.add_(network.per_weight_block(dw * weights[layer], layer))
        _row_backward(dw, x, delta, c.write_end, d_c.write_end, d_inputs[layer], d_deltas[layer])
        if network.momentum:
            ds = d_new_slots[layer]
            d_slot = network.per_weight(c.momentum_read_end, layer) * dw
            d_slots.append(d_slot.addcmul_(network.per_weight(c.momentum_keep_end, layer), ds))
            d_c.momentum_read_end.add_(network.per_weight_block(dw * slots[layer], layer))
            d_c.momentum_keep_end.add_(network.per_weight_block(ds * slots[layer], layer))
            _row_backward(ds, x, delta, c.momentum_write_end, d_c.momentum_write_end, d_inputs[layer], d_deltas[layer])
    return [*d_weights, *d_slots]


def _row_backward(
    g: Tensor, x: Tensor, delta: Tensor, write: Tensor, d_write: Tensor, d_input: Tensor, d_delta: Tensor
) -> None:
    """Backward of `-(delta * write)^T x`, `g` being the gradient of that sum; adds to the last three."""
    xg = x @ g.mT
    d_write.sub_((delta * xg).sum(-1))
    d_delta.addcmul_(xg, write[..., None], value=-1)
    d_input.baddbmm_(delta * write[..., None], g, alpha=-1)


# The walk
# ----------------------------------------------------------------------------------------------------------------


class Ends(NamedTuple):
    """Where each row's tokens begin and end on the chunk grid, repeated per head, `[M]`."""

    held: Tensor | None = None
    """Tokens that the first chunk already holds; `None` for none."""
    done: Tensor | None = None
    """Chunks that are complete; `None` for all."""
    fewest: int = 0
    most: int = 0
    """Least and greatest of `done`."""

    def is_held(self, chunk: int, size: int) -> Tensor | None:
        """`[M, C, 1]`, or `None` for nowhere."""
        if self.held is None or chunk > 0:
            return None
        return (torch.arange(size, device=self.held.device) < self.held[:, None])[..., None]

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


def _factors(network: Network, ends: Ends, chunk: int, memory: Sequence[Tensor], tensors: Tensors, order: int) -> Inner:
    """The inner gradients of a chunk's tokens, those that it already holds included."""
    inner = inner_gradients(
        network, memory[: network.depth], tensors.key[chunk], tensors.value[chunk], tensors.open_at(chunk), order
    )
    is_held = ends.is_held(chunk, tensors.key.shape[2])
    if is_held is None:
        return inner
    depth = network.depth
    return inner._replace(
        inputs=[torch.where(is_held, x, new) for x, new in zip(tensors.held[:depth], inner.inputs, strict=True)],
        deltas=[torch.where(is_held, x, new) for x, new in zip(tensors.held[depth:], inner.deltas, strict=True)],
    )


class Tensors(NamedTuple):
    """The inputs of a walk."""

    query: Tensor
    key: Tensor
    value: Tensor
    coefficients: Coefficients
    is_open: Tensor | None
    """Whether each token sees each block, `[N, M, C, E]`, 0 or 1; `None` for one block."""
    memory: tuple[Tensor, ...]
    """Weights, then momentum, at the first anchor."""
    held: tuple[Tensor, ...]
    """Inputs, then deltas, of the tokens that the first chunk already holds; or empty."""

    def open_at(self, chunk: int) -> Tensor | None:
        return None if self.is_open is None else self.is_open[chunk]

    def flat(self) -> list[Tensor | None]:
        return [self.query, self.key, self.value, *self.coefficients, self.is_open, *self.memory, *self.held]

    @staticmethod
    def of(network: Network, flat: Sequence[Any]) -> Tensors:
        query, key, value, *rest = flat
        states = network.depth * (2 if network.momentum else 1)
        memory = tuple(rest[8 : 8 + states])
        return Tensors(query, key, value, Coefficients(*rest[:7]), rest[7], memory, tuple(rest[8 + states :]))


def walk(
    network: Network, ends: Ends, tensors: Tensors, starts: list[Sequence[Tensor]] | None = None
) -> tuple[Tensor, ...]:
    """Outputs `[N, M, C, V]`, the last anchor, and the factors of the chunk that is running at the end.

    Appends the memory at each chunk's start to `starts` when given.
    """
    depth, memory = network.depth, tensors.memory
    count, rows, size = tensors.key.shape[:3]
    output = tensors.value.new_empty(count, rows, size, network.widths[-1])
    factors = [output.new_zeros(rows, size, width) for width in (*network.widths[:-1], *network.widths[1:])]
    for chunk in range(count):
        if starts is not None:
            starts.append(memory)
        weights, slots, c = memory[:depth], memory[depth:], tensors.coefficients.at(chunk)
        inner = _factors(network, ends, chunk, memory, tensors, order=1)
        output[chunk] = read(
            network, tensors.query[chunk], weights, slots, inner.inputs, inner.deltas, c.keep, c.momentum_read, c.write
        )[0]
        is_done, is_running = ends.is_done(chunk), ends.is_running(chunk)
        if is_done is not False:
            c_end = (c.keep_end, c.momentum_read_end, c.momentum_keep_end, c.write_end, c.momentum_write_end)
            new_weights, new_slots = advance(network, weights, slots, inner.inputs, inner.deltas, *c_end)
            new = (*new_weights, *new_slots)
            if isinstance(is_done, Tensor):
                new = tuple(torch.where(is_done, x, old) for x, old in zip(new, memory, strict=True))
            memory = new
        if isinstance(is_running, Tensor):
            factors = [
                torch.where(is_running, x, old) for x, old in zip((*inner.inputs, *inner.deltas), factors, strict=True)
            ]
    return (output, *memory, *factors)


class Walk(torch.autograd.Function):
    """`walk` under autograd."""

    @staticmethod
    def forward(ctx: Any, network: Network, ends: Ends, *flat: Any) -> tuple[Tensor, ...]:
        starts: list[Sequence[Tensor]] = []
        outputs = walk(network, ends, Tensors.of(network, flat), starts)
        ctx.network, ctx.ends, ctx.count = network, ends, len(flat)
        ctx.save_for_backward(*flat, *(x for start in starts for x in start))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        network, ends = ctx.network, ctx.ends
        tensors = Tensors.of(network, ctx.saved_tensors[: ctx.count])
        starts, states = ctx.saved_tensors[ctx.count :], len(tensors.memory)
        d_output, d_memory, d_factors = gradients[0], list(gradients[1 : 1 + states]), gradients[1 + states :]
        d_query, d_key, d_value = (torch.empty_like(x) for x in (tensors.query, tensors.key, tensors.value))
        d_coefficients = Coefficients(*(torch.zeros_like(x) for x in tensors.coefficients))
        d_held: list[Tensor] = []
        with torch.autocast(d_output.device.type, enabled=False):
            for chunk in reversed(range(tensors.key.shape[0])):
                memory = starts[chunk * states : (chunk + 1) * states]
                result = _chunk_backward(
                    network,
                    ends,
                    chunk,
                    memory,
                    tensors,
                    d_output[chunk],
                    d_memory,
                    d_factors,
                    d_coefficients.at(chunk),
                )
                d_query[chunk], d_key[chunk], d_value[chunk], d_memory, d_held = result
        d_flat = [d_query, d_key, d_value, *d_coefficients, None, *d_memory]
        return (None, None, *d_flat, *(d_held if tensors.held else ()))


def _chunk_backward(
    network: Network,
    ends: Ends,
    chunk: int,
    memory: Sequence[Tensor],
    tensors: Tensors,
    d_output: Tensor,
    d_memory: Sequence[Tensor],
    d_factors: Sequence[Tensor],
    d_c: Coefficients,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Gradients of query, key, value, memory and held factors of one chunk; the coefficients' are written to `d_c`."""
    depth, c, is_open = network.depth, tensors.coefficients.at(chunk), tensors.open_at(chunk)
    weights, slots = memory[:depth], memory[depth:]
    inner = _factors(network, ends, chunk, memory, tensors, order=2)
    _, kept = read(
        network, tensors.query[chunk], weights, slots, inner.inputs, inner.deltas, c.keep, c.momentum_read, c.write, 1
    )

    is_done, is_running = ends.is_done(chunk), ends.is_running(chunk)
    d_rows = [torch.zeros_like(x) for x in (*inner.inputs, *inner.deltas)]
    if isinstance(is_running, Tensor):
        d_rows = [torch.where(is_running, d, 0) for d in d_factors]
    d_inputs, d_deltas = d_rows[:depth], d_rows[depth:]
    if is_done is False:
        d_start = [d.clone() for d in d_memory]
    else:
        d_next = [torch.where(is_done, d, 0) for d in d_memory] if isinstance(is_done, Tensor) else d_memory
        d_start = _advance_backward(
            network, d_next[:depth], d_next[depth:], weights, slots, inner, c, d_c, d_inputs, d_deltas
        )
        if isinstance(is_done, Tensor):
            d_start = [d + torch.where(is_done, 0, passed) for d, passed in zip(d_start, d_memory, strict=True)]
    d_weights, d_slots = d_start[:depth], d_start[depth:]
    d_query = _read_backward(
        network, d_output, kept, weights, slots, inner, c, d_c, d_weights, d_slots, d_inputs, d_deltas
    )
    d_held = []
    is_held = ends.is_held(chunk, inner.inputs[0].shape[1])
    if is_held is not None:
        d_held = [torch.where(is_held, d, 0) for d in (*d_inputs, *d_deltas)]
        d_inputs = [torch.where(is_held, 0, d) for d in d_inputs]
        d_deltas = [torch.where(is_held, 0, d) for d in d_deltas]
    d_key, d_value = _inner_backward(network, weights, inner, is_open, d_inputs, d_deltas, d_weights)
    return d_query, d_key, d_value, d_start, d_held
