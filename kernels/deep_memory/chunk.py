"""A chunk of the deep memory as matrix products, forward and backward.

Here rows and heads are one leading dimension `M = B H`: sequences are `[M, C, D]`, weights `[M, out, in]`. Each
backward is written out below its forward; what Muon at every token takes of this runs under autograd as well.
Products are `torch.bmm`, since at a single token what `@` does around it costs as much as the product.

For layer l with inputs `x`, deltas `d` (R rows: the chunk's tokens, and those before it that a window reaches) and the
coefficients of `Coefficients`, a read and the next anchor are

    y = keep (z W^T) + momentum_read (z S^T) - (z x^T * write) d
    W' = keep_end W + momentum_read_end S - (d * write_end)^T x        (under Muon: keep_end W + orthogonal_end NS(S'))
    S' = momentum_keep_end S - (d * momentum_write_end)^T x
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from memzoo.kernels.decay import without_dust_
from memzoo.kernels.deep_memory import block_of_unit
from memzoo.kernels.deep_memory.activations import GatedUnits, Units
from memzoo.kernels.newton_schulz.chunked import newton_schulz, value_and_pullback
from memzoo.kernels.registry import may_hold

Value = TypeVar("Value")
FADED = 0.35
"""The power by which `without_dust_` clears weights and momentum (6e-14 in float32, 2e-108 in float64): what a memory
that has decayed returns is multiplied with it twice more."""


class Coefficients(NamedTuple):
    """Of every chunk; `[N, ...]`, or of one, without the N."""

    keep: Tensor
    """Of the anchor's weights in `M_t`, `[M, C, E]`; 0 where the block is closed."""
    momentum_read: Tensor
    """Of the anchor's momentum in `M_t`, `[M, C, E]`."""
    write: Tensor
    """Of row i's gradient in `M_t`, `[M, C, R]`."""
    keep_end: Tensor
    """Of the anchor's weights in the next anchor's, `[M, E]`; 1 where the block stays closed."""
    momentum_read_end: Tensor
    """Of the anchor's momentum in the next anchor's weights, `[M, E]`."""
    momentum_keep_end: Tensor
    """Of the anchor's momentum in the next anchor's, `[M, E]`."""
    momentum_write_end: Tensor
    """Of row i's gradient in the next anchor's momentum, `[M, R]`."""
    orthogonal_end: Tensor | None = None
    """Of the next anchor's orthogonalised momentum in its weights, `[M, E]`; `None` but for Muon once a chunk."""

    def of_chunks(self) -> list[Coefficients]:
        """Those of each chunk."""
        chunks = zip(*(x.unbind(0) for x in self if x is not None), strict=True)
        return [Coefficients(*one) for one in chunks]

    def of_blocks(self, blocks: int) -> Coefficients:
        """Those of the first blocks."""
        if blocks == self.keep.shape[-1]:
            return self
        per_block = ("keep", "momentum_read", "keep_end", "momentum_read_end", "momentum_keep_end", "orthogonal_end")
        given = {name: getattr(self, name) for name in per_block}
        return self._replace(**{name: x[..., :blocks] for name, x in given.items() if x is not None})

    def map(self, f: Callable[[Tensor], Tensor]) -> Coefficients:
        """`f` of each that there is."""
        return Coefficients(*(None if x is None else f(x) for x in self))  # type: ignore[arg-type]

    @property
    def write_end(self) -> Tensor:
        return self.write[..., -1, :]


class _Found(Generic[Value]):
    """A property that is found once; `functools.cached_property` takes a lock, which torch.compile does not trace."""

    def __init__(self, find: Callable[[Any], Value]) -> None:
        self.find, self.name = find, find.__name__

    def __get__(self, owner: Any, kind: Any = None) -> Value:
        found = self.find(owner)
        if not torch.compiler.is_compiling():
            owner.__dict__[self.name] = found
        return found


@dataclass(frozen=True)
class Network:
    """The memory's network and how its weights fall into capacity blocks.

    Args:
        widths: key, hidden..., value widths.
        gated: whether the first of two layers has two rows per hidden unit.
        activation: name of the activation.
        residual: whether the input's first coordinates are added to the output.
        objective: `"l2"` or `"dot"`.
        momentum: whether there is momentum.
        blocks: E.
        max_gradient_norm: bound of a token's inner gradient; infinity for none.
        newton_schulz_steps: for Muon once a chunk; `None` for plain steps.
    """

    widths: tuple[int, ...]
    gated: bool
    activation: str
    residual: bool
    objective: str
    momentum: bool
    blocks: int
    max_gradient_norm: float
    newton_schulz_steps: int | None = None

    @_Found
    def depth(self) -> int:
        return len(self.widths) - 1

    @_Found
    def outs(self) -> tuple[int, ...]:
        """What each layer gives, before its activation."""
        return tuple(2 * width if self.gated and at == 0 else width for at, width in enumerate(self.widths[1:]))

    @_Found
    def units(self) -> Units:
        return (GatedUnits if self.gated else Units)(self.activation)

    def narrowed(self, open_blocks: int) -> Network:
        """The network of the first blocks alone: closed ones neither read nor write nor change.

        A lone layer's blocks are key coordinates, which its residual needs whole; it stays as it is.
        """
        if self.depth == 1 or open_blocks >= self.blocks:
            return self
        hidden = (width // self.blocks * open_blocks for width in self.widths[1:-1])
        return replace(self, widths=(self.widths[0], *hidden, self.widths[-1]), blocks=open_blocks)

    def plain(self) -> Network:
        """The network with all blocks joined into one: what it is once every block has been open since its anchor."""
        return self if self.blocks == 1 else replace(self, blocks=1)

    def of_memory(self, memory: Sequence[Tensor]) -> list[Tensor]:
        """This network's part of weights and momentum `[M, out, in]` of a wider one."""
        shapes = [*zip(self.outs, self.widths, strict=False)] * (len(memory) // self.depth)
        return [x if x.shape[1:] == (o, i) else x[:, :o, :i] for x, (o, i) in zip(memory, shapes, strict=True)]

    def of_rows(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """This network's part of inputs and deltas `[M, C, units]` of a wider one."""
        widths = self.row_widths
        return [x if x.shape[-1] == width else x[..., :width] for x, width in zip(rows, widths, strict=True)]

    @_Found
    def row_widths(self) -> tuple[int, ...]:
        """Widths of a token's inputs, then deltas."""
        return (*self.widths[:-1], *self.outs)

    @_Found
    def row_starts(self) -> tuple[int, ...]:
        """Where each of them begins, side by side, and where the last ends."""
        return tuple(accumulate(self.row_widths, initial=0))

    def scales_inputs(self, layer: int) -> bool:
        """Whether a coefficient of a layer's weights multiplies its inputs (else its outputs).

        It does where the capacity blocks are: the last layer's outputs are the read-out, which no block owns; a lone
        layer's blocks are key coordinates. A single block's coefficient takes the narrower side, which is cheaper.
        """
        return layer == self.depth - 1 if self.blocks > 1 else self.widths[layer] <= self.outs[layer]

    def is_between(self, layer: int) -> bool:
        """Whether a layer joins two hidden layers, so that both ends of a weight must be open."""
        return 0 < layer < self.depth - 1 and self.blocks > 1

    def masks(self, position: int) -> bool:
        """Whether the units at a position (0: keys, depth: outputs) form capacity blocks."""
        return self.blocks > 1 and (0 < position < self.depth or (self.depth == 1 and position == 0))

    def scale(self, x: Tensor, c: Tensor, position: int) -> Tensor:
        """Units `x` `[..., units]` (or their rows) times their block's `c` `[..., E]`."""
        if self.blocks == 1:
            return x * c
        if self.widths[position] % self.blocks == 0:
            return (x.unflatten(-1, (self.blocks, -1)) * c[..., None]).flatten(-2)
        return x * c[..., self._block_of(position, x.shape[-1], x.device)]

    def _block_of(self, position: int, rows: int, device: torch.device) -> Tensor:
        """The block of each unit at a position, or of each of its rows."""
        width = self.widths[position]
        return block_of_unit(width, self.blocks, device).repeat_interleave(rows // width)

    def per_block(self, x: Tensor, position: int) -> Tensor:
        """Sum over the units of each block, `[..., units]` to `[..., E]`."""
        if self.blocks == 1:
            return x.sum(-1, keepdim=True)
        if self.widths[position] % self.blocks == 0:
            return x.unflatten(-1, (self.blocks, -1)).sum(-1)
        block = self._block_of(position, x.shape[-1], x.device)
        return x.new_zeros(*x.shape[:-1], self.blocks).index_add_(-1, block, x)

    def _block_between(self, layer: int, device: torch.device) -> Tensor:
        into = block_of_unit(self.widths[layer], self.blocks, device)
        out = block_of_unit(self.widths[layer + 1], self.blocks, device)
        return torch.maximum(out[:, None], into)

    def per_weight(self, x: Tensor, layer: int) -> Tensor:
        """`[M, E]` to a factor of the weights `[M, out, in]`."""
        if self.is_between(layer):
            return x[:, self._block_between(layer, x.device)]
        inputs = self.scales_inputs(layer)
        if self.blocks > 1:
            position, rows = (layer, self.widths[layer]) if inputs else (layer + 1, self.outs[layer])
            x = x[:, self._block_of(position, rows, x.device)]
        return x[:, None, :] if inputs else x[:, :, None]

    def per_weight_block(self, a: Tensor, b: Tensor, layer: int) -> Tensor:
        """Sum of `a * b` over the weights of each block, `[M, out, in]` to `[M, E]`."""
        x = a * b
        if self.blocks == 1:
            return x.flatten(1).sum(1, keepdim=True)
        if self.is_between(layer):
            block = self._block_between(layer, x.device).flatten()
            return x.new_zeros(x.shape[0], self.blocks).index_add_(1, block, x.flatten(1))
        if self.scales_inputs(layer):
            return self.per_block(x.sum(1), layer)
        return self.per_block(x.sum(2), layer + 1)

    def matrices(self, x: Tensor, layer: int) -> Tensor:
        """The matrices of a layer `[M, out, in]`: two where it gates, `[M, 2, units, in]`."""
        return x.unflatten(1, (-1, 2)).transpose(1, 2) if self.gated and layer == 0 else x

    def layer_of(self, matrices: Tensor) -> Tensor:
        """The inverse of `matrices`."""
        return matrices.transpose(1, 2).flatten(1, 2) if matrices.ndim == 4 else matrices


def network_of(*arguments: Any) -> Network:
    """The network, the same one for the same arguments: a step would else find its properties anew at every token."""
    return Network(*arguments) if torch.compiler.is_compiling() else _network_of(*arguments)


_network_of = lru_cache(maxsize=256)(Network)


# A product with an anchor ----------------------------------------------------------------------------------------


def _anchor_product(
    network: Network, layer: int, z: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], known: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """`sum (c * W) z` over pairs `W, c` for tokens `z` `[M, t, in]`: each weight takes its block's `c` `[M, t, E]`.

    Also returns the products `W z` where it is they that are scaled: their backward needs them. The first may be known.
    """
    if network.is_between(layer):
        y = z.new_zeros(*z.shape[:-1], pairs[0][0].shape[1])
        for weight, c in pairs:
            for block in range(network.blocks):
                for out, into in _shells(network, layer, block):
                    y[..., out] += (z[..., into] @ weight[:, out, into].mT) * c[..., block, None]
        return y, []
    if known is None and network.scales_inputs(layer):
        (weight, c), *others = pairs
        y = torch.bmm(network.scale(z, c, layer), weight.mT)
        for weight, c in others:
            y.baddbmm_(network.scale(z, c, layer), weight.mT)
        return y, []
    plain = [torch.bmm(z, weight.mT) for weight, _ in (pairs if known is None else pairs[1:])]
    if known is not None:
        plain.insert(0, known)
    y = network.scale(plain[0], pairs[0][1], layer + 1)
    for x, (_, c) in zip(plain[1:], pairs[1:], strict=True):
        y = y.addcmul_(x, c) if network.blocks == 1 else y.add_(network.scale(x, c, layer + 1))
    return y, plain


def _shells(network: Network, layer: int, block: int) -> list[tuple[slice, slice]]:
    """The weights of a block between two hidden layers, an L of two rectangles `(out, in)`."""

    def bounds(width: int) -> tuple[int, int]:
        size = width // network.blocks
        return block * size, width if block == network.blocks - 1 else (block + 1) * size

    (in_low, in_high), (out_low, out_high) = bounds(network.widths[layer]), bounds(network.widths[layer + 1])
    return [(slice(out_low, out_high), slice(0, in_high)), (slice(0, out_low), slice(in_low, in_high))]


def _anchor_product_backward(
    network: Network,
    layer: int,
    g: Tensor,
    z: Tensor,
    plain: Sequence[Tensor],
    pairs: Sequence[tuple[Tensor, Tensor]],
    d_pairs: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """Gradient of `z`; those of weights and coefficients are added to `d_pairs`."""
    dz = torch.zeros_like(z) if network.is_between(layer) else None
    for at, ((weight, c), (d_weight, d_c)) in enumerate(zip(pairs, d_pairs, strict=True)):
        if network.is_between(layer):
            assert dz is not None
            for block in range(network.blocks):
                for out, into in _shells(network, layer, block):
                    g_out, z_in = g[..., out], z[..., into]
                    g_w = g_out @ weight[:, out, into]
                    dz[..., into] += g_w * c[..., block, None]
                    d_c[..., block] += (z_in * g_w).sum(-1)
                    d_weight[:, out, into] += (g_out * c[..., block, None]).mT @ z_in
        elif network.scales_inputs(layer):
            g_w = torch.bmm(g, weight)
            d_weight.baddbmm_(g.mT, network.scale(z, c, layer))
            d_c.add_(network.per_block(g_w * z, layer))
            g_z = network.scale(g_w, c, layer)
            dz = g_z if dz is None else dz.add_(g_z)
        else:
            g_c = network.scale(g, c, layer + 1)
            d_weight.baddbmm_(g_c.mT, z)
            dz = _plus_product(dz, g_c, weight)
            d_c.add_(network.per_block(plain[at] * g, layer + 1))
    assert dz is not None
    return dz


# A chunk ---------------------------------------------------------------------------------------------------------


class Inner(NamedTuple):
    """The tokens' inner gradients at an anchor, and what their backward needs."""

    inputs: list[Tensor]
    deltas: list[Tensor]
    unclipped: list[Tensor]
    """The deltas before the bound on the gradient's norm."""
    clip: Tensor | None
    """The factor that keeps the gradient's norm within its bound, `[M, t, 1]`; `None` where no token exceeds it."""
    back: list[Tensor]
    """What came back to each activation."""
    parts: list[list[Tensor]]
    """`Units.parts` of what each activation was given; empty but from `inner_again`."""


def inner_gradients(
    network: Network, weights: Sequence[Tensor], key: Tensor, value: Tensor, is_open: Tensor | None
) -> Inner:
    """Layer inputs and deltas of the inner loss at `weights` (Titans Eq 12), for `key` `[M, t, K]`."""
    inputs, deltas, back = _there_and_back(network, weights, key, value, is_open, network.units.value_and_pullback)
    clip = _clip(network, inputs, deltas)
    return Inner(inputs, _clipped(deltas, clip), deltas, clip, back, [])


def inner_row(
    network: Network,
    weights: Sequence[Tensor],
    key: Tensor,
    value: Tensor,
    is_open: Tensor | None,
    known: Tensor | None,
) -> Tensor:
    """Inputs, then deltas, of `inner_gradients` of a single token side by side, `[M, 1, sum of their widths]`; `known`
    as in `_there_and_back`."""
    activate, bound = network.units.value_and_pullback, network.max_gradient_norm
    inputs, deltas, _ = _there_and_back(network, weights, key, value, is_open, activate, known)
    row = torch.cat([*inputs, *deltas], dim=-1)
    # |u|^2 = sum |x|^2 |d|^2 <= (sum |x|^2) (sum |d|^2) <= (sum (|x|^2 + |d|^2) / 2)^2: one norm of all rows is mostly
    # enough.
    if bound == math.inf or not may_hold(~(torch.linalg.vector_norm(row).square() / 2 <= bound)):
        return row
    clip = _clip(network, inputs, deltas)
    return row if clip is None else torch.cat([*inputs, *_clipped(deltas, clip)], dim=-1)


def inner_again(
    network: Network,
    weights: Sequence[Tensor],
    key: Tensor,
    value: Tensor,
    is_open: Tensor | None,
    clip: Tensor | None,
) -> Inner:
    """`inner_gradients`, of which `clip` is known, with what the backward takes of the activations: it gives their
    values and slopes, too."""
    units, parts = network.units, list[list[Tensor]]()

    def activate(h: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        parts.append(units.parts(h))
        return parts[-1][0], partial(units.pullback_by, parts=parts[-1])

    inputs, deltas, back = _there_and_back(network, weights, key, value, is_open, activate)
    return Inner(inputs, _clipped(deltas, clip), deltas, clip, back, parts)


def _there_and_back(
    network: Network,
    weights: Sequence[Tensor],
    key: Tensor,
    value: Tensor,
    is_open: Tensor | None,
    activate: Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]],
    known: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Each layer's inputs and deltas, and what comes back to each activation; `activate` gives an activation's value
    and its pullback, `known` is the first layer's product."""
    inputs, pullbacks = [_masked(network, key, is_open, 0)], []
    for layer in range(network.depth - 1):
        h = torch.bmm(inputs[layer], weights[layer].mT) if layer > 0 or known is None else known
        x, pullback = activate(h)
        inputs.append(_masked(network, x, is_open, layer + 1))
        pullbacks.append(pullback)
    if network.objective == "dot":
        deltas = [-value]
    else:
        given = _first(key, value) - value if network.residual else -value
        deltas = [torch.baddbmm(given, inputs[-1], weights[-1].mT)]
    back: list[Tensor] = []
    for layer in range(network.depth - 1, 0, -1):
        back.insert(0, torch.bmm(deltas[0], weights[layer]))
        deltas.insert(0, _masked(network, pullbacks[layer - 1](back[0]), is_open, layer))
    return inputs, deltas, back


def _clip(network: Network, inputs: Sequence[Tensor], deltas: Sequence[Tensor]) -> Tensor | None:
    """See `Inner.clip`."""
    if network.max_gradient_norm == math.inf:
        return None
    norms = [_norm(x) * _norm(d) for x, d in zip(inputs, deltas, strict=True)]
    norm = norms[0] if len(norms) == 1 else _norm(torch.cat(norms, dim=-1))  # whose gradient at 0 is 0
    if not may_hold(norm > network.max_gradient_norm):
        return None
    return (norm / network.max_gradient_norm).clamp(min=1).reciprocal()


def _clipped(deltas: list[Tensor], clip: Tensor | None) -> list[Tensor]:
    return deltas if clip is None else [d * clip for d in deltas]


def _first(x: Tensor, like: Tensor) -> Tensor:
    """As many of the last dimension of `x` as `like` has."""
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]]


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _clip_backward(network: Network, inner: Inner, d_inputs: list[Tensor], d_deltas: list[Tensor]) -> None:
    """From gradients of the clipped deltas to those of the unclipped ones; adds to the inputs'."""
    if inner.clip is None:
        return
    clip = inner.clip
    d_clip = sum((d * delta).sum(-1, keepdim=True) for d, delta in zip(d_deltas, inner.unclipped, strict=True))
    common = torch.where(clip < 1, -d_clip * clip**3 / network.max_gradient_norm**2, 0)
    for layer, (x, delta) in enumerate(zip(inner.inputs, inner.unclipped, strict=True)):
        d_inputs[layer] = torch.addcmul(d_inputs[layer], x, common * _norm(delta).square())
        d_deltas[layer] = torch.addcmul(d_deltas[layer] * clip, delta, common * _norm(x).square())


def inner_backward(
    network: Network,
    weights: Sequence[Tensor],
    inner: Inner,
    is_open: Tensor | None,
    d_inputs: list[Tensor],
    d_deltas: list[Tensor],
    d_weights: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradients of key and value; those of the weights are added to `d_weights`. Changes what it is given of rows."""
    depth, units = network.depth, network.units
    _clip_backward(network, inner, d_inputs, d_deltas)
    d_hidden = []
    for layer in range(depth - 1):
        d_delta = _masked(network, d_deltas[layer], is_open, layer + 1)
        d_back, d_h = units.pullback_backward(d_delta, inner.back[layer], inner.parts[layer])
        d_hidden.append(d_h)
        d_deltas[layer + 1] = d_deltas[layer + 1].baddbmm_(d_back, weights[layer + 1].mT)
        d_weights[layer + 1].baddbmm_(inner.unclipped[layer + 1].mT, d_back)
    d_error = d_deltas[-1]
    d_hidden.append(d_error)
    for layer in range(depth - 1, -1, -1):
        d_x = d_inputs[layer]
        if layer < depth - 1 or network.objective == "l2":  # the dot product's error does not see what the network says
            d_weights[layer].baddbmm_(d_hidden[layer].mT, inner.inputs[layer])
            d_x = d_x.baddbmm_(d_hidden[layer], weights[layer])
        d_x = _masked(network, d_x, is_open, layer)
        if layer > 0:
            units.add_pullback(d_hidden[layer - 1], d_x, inner.parts[layer - 1])
    if network.residual and network.objective == "l2":
        d_x[..., : d_error.shape[-1]] += d_error
    return d_x, -d_error


def _masked(network: Network, x: Tensor, is_open: Tensor | None, position: int) -> Tensor:
    if is_open is None or not network.masks(position):
        return x
    return network.scale(x, is_open, position)


class Read(NamedTuple):
    """What the backward of a read needs, per layer."""

    scores: list[Tensor]
    plain: list[list[Tensor]]
    hidden: list[Tensor]


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
    known: Tensor | None = None,
) -> tuple[Tensor, Read]:
    """`M_t(q_t)` for queries `[M, t, K]`, of which the product with the first anchor may be known."""
    units = network.units
    z = query
    kept = Read([], [], [])
    for layer in range(network.depth):
        scores = torch.bmm(z, inputs[layer].mT)
        pairs = _pairs(layer, weights, slots, keep, momentum_read)
        y, plain = _anchor_product(network, layer, z, pairs, known if layer == 0 else None)
        y = y.baddbmm_(scores * write, deltas[layer], alpha=-1)
        kept.scores.append(scores)
        kept.plain.append(plain)
        if layer < network.depth - 1:
            kept.hidden.append(y)
            z = units.value(y)
    return (y.add_(_first(query, y)) if network.residual else y), kept


def _pairs(
    layer: int, weights: Sequence[Tensor], slots: Sequence[Tensor], keep: Tensor, momentum_read: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """What a read at `M_t` takes of a layer's anchor."""
    return [(weights[layer], keep), *([(slots[layer], momentum_read)] if slots else [])]


def read_backward(
    network: Network,
    query: Tensor,
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
        z = query if layer == 0 else network.units.value(kept.hidden[layer - 1])
        pairs = _pairs(layer, weights, slots, c.keep, c.momentum_read)
        d_pairs = _pairs(layer, d_weights, d_slots, d_c.keep, d_c.momentum_read)
        dz = _anchor_product_backward(network, layer, g, z, kept.plain[layer], pairs, d_pairs)
        scores, d_weighted = kept.scores[layer], torch.bmm(g, inner.deltas[layer].mT)
        d_c.write.addcmul_(d_weighted, scores, value=-1)
        d_scores = d_weighted.mul_(c.write)
        d_deltas[layer].baddbmm_((scores * c.write).mT, g, alpha=-1)
        d_inputs[layer].baddbmm_(d_scores.mT, z, alpha=-1)
        dz.baddbmm_(d_scores, inner.inputs[layer], alpha=-1)
        g = network.units.pullback(dz, kept.hidden[layer - 1]) if layer > 0 else dz
    if network.residual:
        g[..., : d_output.shape[-1]] += d_output
    return g


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
    orthogonal: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The next anchor's weights and momentum, from the coefficients `[M, E]` and `[M, R]` at the chunk's end."""
    new_weights, new_slots = [], []
    for layer in range(network.depth):
        weight = network.per_weight(keep, layer) * weights[layer]
        if network.momentum:
            slot = network.per_weight(momentum_keep, layer) * slots[layer]
            new_slots.append(without_dust_(_write(slot, inputs[layer], deltas[layer], momentum_write), FADED))
        if network.newton_schulz_steps is not None:
            assert orthogonal is not None
            update = newton_schulz(network.matrices(new_slots[layer], layer), network.newton_schulz_steps)
            weight = weight.addcmul_(network.per_weight(orthogonal, layer), network.layer_of(update))
        else:
            if network.momentum:
                weight = weight.addcmul_(network.per_weight(momentum_read, layer), slots[layer])
            weight = _write(weight, inputs[layer], deltas[layer], write)
        new_weights.append(without_dust_(weight, FADED))
    return new_weights, new_slots


def _write(weight: Tensor, x: Tensor, delta: Tensor, write: Tensor) -> Tensor:
    """`weight - (delta * write)^T x`, in place; the coefficient on the narrower side."""
    if x.shape[-1] < delta.shape[-1]:
        x = x * write[..., None]
    else:
        delta = delta * write[..., None]
    return weight.baddbmm_(delta.mT, x, alpha=-1)


def advance_backward(
    network: Network,
    d_new_weights: Sequence[Tensor],
    d_new_slots: Sequence[Tensor],
    weights: Sequence[Tensor],
    slots: Sequence[Tensor],
    inner: Inner,
    c: Coefficients,
    d_c: Coefficients,
    d_rows: Sequence[Tensor] | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of weights, then momentum, in the tensors of the given ones, and of inputs, then deltas, added to
    `d_rows`. Those of coefficients are added to `d_c`."""
    depth = network.depth
    d_inputs, d_deltas = [], []
    for layer in range(depth):
        x, delta, dw = inner.inputs[layer], inner.deltas[layer], d_new_weights[layer]
        keep_end = network.per_weight(c.keep_end, layer)
        d_c.keep_end.add_(network.per_weight_block(dw, weights[layer], layer))
        rows = None if d_rows is None else (d_rows[layer], d_rows[depth + layer])
        if c.orthogonal_end is None:
            rows = _write_backward(dw, x, delta, c.write_end, d_c.write_end, rows)
        else:
            _orthogonal_backward(network, layer, dw, d_new_slots[layer], slots[layer], inner, c, d_c)
        if network.momentum:
            ds = d_new_slots[layer]
            d_c.momentum_keep_end.add_(network.per_weight_block(ds, slots[layer], layer))
            rows = _write_backward(ds, x, delta, c.momentum_write_end, d_c.momentum_write_end, rows)
            ds.mul_(network.per_weight(c.momentum_keep_end, layer))
            if c.orthogonal_end is None:
                d_c.momentum_read_end.add_(network.per_weight_block(dw, slots[layer], layer))
                ds.addcmul_(network.per_weight(c.momentum_read_end, layer), dw)
        assert rows is not None  # Muon has momentum
        d_inputs.append(rows[0])
        d_deltas.append(rows[1])
        dw.mul_(keep_end)
    return [*d_new_weights, *d_new_slots], [*d_inputs, *d_deltas]


def _orthogonal_backward(
    network: Network,
    layer: int,
    dw: Tensor,
    ds: Tensor,
    slot: Tensor,
    inner: Inner,
    c: Coefficients,
    d_c: Coefficients,
) -> None:
    """Backward of `orthogonal_end NS(S')`, `dw` being the gradient of the weights; adds to `ds`, that of `S'`."""
    assert c.orthogonal_end is not None
    assert d_c.orthogonal_end is not None
    assert network.newton_schulz_steps is not None
    slot = network.per_weight(c.momentum_keep_end, layer) * slot
    slot = _write(slot, inner.inputs[layer], inner.deltas[layer], c.momentum_write_end)
    d_update = network.per_weight(c.orthogonal_end, layer) * dw
    update, d_slot = value_and_pullback(
        network.matrices(slot, layer), network.newton_schulz_steps, network.matrices(d_update, layer)
    )
    d_c.orthogonal_end.add_(network.per_weight_block(dw, network.layer_of(update), layer))
    ds.add_(network.layer_of(d_slot))


def _write_backward(
    g: Tensor, x: Tensor, delta: Tensor, write: Tensor, d_write: Tensor, d_rows: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and `delta`, added to `d_rows`, from that of what `_write` gives; adds to `d_write`."""
    minus = -write[..., None]
    d_x, d_delta = (None, None) if d_rows is None else d_rows
    if x.shape[-1] < delta.shape[-1]:
        back = torch.bmm(delta, g)
        d_write.sub_((back * x).sum(-1))
        return _plus(d_x, back, minus), _plus_product(d_delta, x * minus, g.mT)
    back = torch.bmm(x, g.mT)
    d_write.sub_((back * delta).sum(-1))
    return _plus_product(d_x, delta * minus, g), _plus(d_delta, back, minus)


def _plus(given: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return a * b if given is None else given.addcmul_(a, b)


def _plus_product(given: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b) if given is None else given.baddbmm_(a, b)
