"""The walk over the chunks as one operator of a graph, which torch.compile would else trace chunk by chunk.

What the backward of `Walk` keeps is no operator's output, so that this one's walks once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.deep_memory import walk as walks
from memzoo.kernels.deep_memory.chunk import Network, network_of
from memzoo.kernels.deep_memory.walk import Ends, Tensors

_OPTIONS = (
    "Tensor? held, Tensor? done, int fewest, int most, int[] open_blocks, int full_from, int halo, "
    "int[] widths, bool gated, str activation, bool residual, str objective, bool momentum, int blocks, "
    "float max_gradient_norm, int? newton_schulz_steps"
)
_ENDS = len(Ends._fields)


def walk(network: Network, ends: Ends, tensors: Tensors) -> tuple[Tensor, ...]:
    """`walk.walk`, with and without gradients."""
    none = tensors.query.new_empty(0)  # an operator takes no list with a `None`
    flat = [none if x is None else x for x in tensors.flat()]
    return tuple(_walk(flat, *_options(network, ends)))


def _given(flat: list[Tensor]) -> list[Tensor | None]:
    return [x if x.numel() else None for x in flat]


def _options(network: Network, ends: Ends) -> list[Any]:
    return [
        *ends._replace(open_blocks=list(ends.open_blocks)),  # type: ignore[arg-type]
        *(list(network.widths), network.gated, network.activation, network.residual, network.objective),
        *(network.momentum, network.blocks, network.max_gradient_norm, network.newton_schulz_steps),
    ]


def _of(options: Sequence[Any]) -> tuple[Network, Ends]:
    """What the options are of."""
    ends, (widths, *rest) = Ends(*options[:_ENDS]), options[_ENDS:]
    return network_of(tuple(widths), *rest), ends._replace(open_blocks=tuple(ends.open_blocks))


def _forward(flat: list[Tensor], *options: Any) -> list[Tensor]:
    network, ends = _of(options)
    own = {x.untyped_storage().data_ptr() for x in flat}
    outputs = walks.walk(network, ends, Tensors.of(network, _given(flat)))
    return [x.clone() if x.untyped_storage().data_ptr() in own else x for x in outputs]  # of which none is an input


def _backward(flat: list[Tensor], d_outputs: list[Tensor], *options: Any) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in _given(flat)]
        wanted = [x for x in leaves if x is not None]
        outputs = walks.Walk.apply(*_of(options), *leaves)
        found = iter(torch.autograd.grad(outputs, wanted, d_outputs, allow_unused=True, materialize_grads=True))
    return [torch.zeros_like(x) if leaf is None else next(found) for x, leaf in zip(flat, leaves, strict=True)]


def _like_outputs(flat: list[Tensor], *options: Any) -> list[Tensor]:
    network, _ = _of(options)
    tensors = Tensors.of(network, _given(flat))
    output = tensors.value.new_empty(*tensors.query.shape[:3], network.widths[-1])
    factors = [output.new_empty(output.shape[1], tensors.key.shape[2], width) for width in network.row_widths]
    return [output, *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors.memory), *factors]


_walk: Any = torch.library.custom_op(
    "memzoo::deep_memory_walk", _forward, mutates_args=(), schema=f"(Tensor[] flat, {_OPTIONS}) -> Tensor[]"
)
_walk.register_fake(_like_outputs)
_gradient: Any = torch.library.custom_op(
    "memzoo::deep_memory_walk_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor[] flat, Tensor[] d_outputs, {_OPTIONS}) -> Tensor[]",
)
_gradient.register_fake(lambda flat, *_: [torch.empty_like(x) for x in flat])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    flat, ctx.held, ctx.done, *ctx.options = inputs
    ctx.save_for_backward(*flat)


def _pull_back(ctx: Any, d_outputs: list[Tensor]) -> tuple[Any, ...]:
    flat = list(ctx.saved_tensors)
    options = ctx.held, ctx.done, *ctx.options
    gradients = _gradient(flat, list(d_outputs), *options)
    return gradients, *([] if isinstance(x, list) and not x else None for x in options)  # [] may be one of tensors


_walk.register_autograd(_pull_back, setup_context=_keep)
