"""What the kernels of a deep memory share: how they are started, activations, capacity blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.deep_memory.chunk import Network
from memzoo.kernels.triton_support import chip_of, launch, tile

LIGHT = dict.fromkeys(("ends_back", "step", "momentum", "recall"), 32)
"""Kernels of few registers and warps, with their tiles."""
UNITS = {
    "sm_80": {"walk": 16, "read": 16, "read_back": 16, "query_back": 16, "walk_back": 16, **LIGHT},
    "sm_90": {"walk": 32, "read": 64, "read_back": 32, "query_back": 64, "walk_back": 16, **LIGHT},
    "gfx942": {"walk": 32, "read": 64, "read_back": 32, "query_back": 64, "walk_back": 32, **LIGHT},
}
UNITS["gfx942 float32"] = {**UNITS["gfx942"], "walk": 16, "read_back": 16}
"""Widest tile of units of each kernel, so that a chunk of 64 tokens and heads 64 wide leave their registers room. The
products of sm_80 take both factors from registers, and so do those of float32; in bfloat16 those of sm_90 one or both
from shared memory. gfx942 has twice the registers where its four waves share them with no others: so few warps."""
WARPS = {"sm_80": 8, "sm_90": 8, "gfx942": 4, "gfx942 float32": 4}


def launch_tiled(kernel: Any, counts: Sequence[int], **arguments: Any) -> None:
    """`launch` with the tile and the options of the chip. One that is not listed is like its elder: sm_12x, whose
    products are those of sm_80, like that, and sm_100 like sm_90."""
    name = kernel.__name__.removesuffix("_kernel")
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    chip = chip_of(tensors[0].device)
    is_narrow = any(x.dtype == torch.bfloat16 for x in tensors)
    like = "sm_90" if is_narrow and not chip.startswith(("sm_8", "sm_12")) else "sm_80"
    if chip.startswith("gfx"):
        like = "gfx942" if is_narrow else "gfx942 float32"
    most = UNITS[like][name]
    if name in LIGHT and max(arguments["BK"], arguments["BV"]) > 64:
        most //= 2  # a tile of a layer as large as for heads of 64
    launch(
        kernel,
        counts,
        num_warps=4 if name in LIGHT else WARPS[like],
        num_stages=1,  # a second copy of the tiles in flight would take what registers there are
        # Its two accumulators leave little: instructions are ordered for few registers. In float32 that takes more.
        sched4reg=name == "query_back" and like == "sm_80" and is_narrow,
        BU=tile(arguments["U"], most),
        **arguments,
    )


class Rule(NamedTuple):
    """What a walk computes."""

    activation: str
    residual: bool
    l2: bool
    max_norm: float
    """0 for no bound."""


RULE = "str activation, bool residual, bool l2, float max_norm"
"""The same in the schema of an operator."""


def rule_of(network: Network) -> Rule:
    """What a network asks of the kernels."""
    bound = network.max_gradient_norm
    return Rule(network.activation, network.residual, network.objective == "l2", 0.0 if bound == math.inf else bound)


# The activations, see `activations.py` -------------------------------------------------------------------------------


@triton.jit
def _tanh(h):
    return 2 * tl.sigmoid(2 * h) - 1


@triton.jit
def _below(h):
    """The normal distribution function, within 1.5e-7. Source: Abramowitz and Stegun, Handbook of Mathematical
    Functions, 7.1.26. Unlike a library's `erf` it does not branch for each number, which costs registers and time."""
    size = tl.abs(h)
    t = 1 / (1 + 0.2316418882 * size)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail *= 0.5 * tl.exp(-0.5 * size * size)
    return tl.where(h < 0, tail, 1 - tail)


@triton.jit
def _density(h):
    return tl.exp(-0.5 * h * h) * 0.3989422804014327


@triton.jit
def _cubic(h):
    """What gelu's approximation takes the tanh of."""
    return 0.7978845608028654 * (h + 0.044715 * h * h * h)


@triton.jit
def value_of(h, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        return h * _below(h)
    if ACTIVATION == "gelu_tanh":
        return 0.5 * h * (1 + _tanh(_cubic(h)))
    if ACTIVATION == "silu":
        return h * tl.sigmoid(h)
    if ACTIVATION == "relu":
        return tl.maximum(h, 0.0)
    return _tanh(h)


@triton.jit
def slope_of(h, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        return _below(h) + h * _density(h)
    if ACTIVATION == "gelu_tanh":
        t = _tanh(_cubic(h))
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * h * h)
        return 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * slope
    if ACTIVATION == "silu":
        s = tl.sigmoid(h)
        return s + h * s * (1 - s)
    if ACTIVATION == "relu":
        return tl.where(h > 0, 1.0, 0.0)
    t = _tanh(h)
    return 1 - t * t


@triton.jit
def curvature_of(h, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        return _density(h) * (2 - h * h)
    if ACTIVATION == "gelu_tanh":
        t = _tanh(_cubic(h))
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * h * h)
        t1 = (1 - t * t) * slope
        t2 = (1 - t * t) * (6 * 0.044715 * 0.7978845608028654 * h) - 2 * t * t1 * slope
        return t1 + 0.5 * h * t2
    if ACTIVATION == "silu":
        s = tl.sigmoid(h)
        return s * (1 - s) * (2 + h * (1 - 2 * s))
    if ACTIVATION == "relu":
        return tl.zeros_like(h)
    t = _tanh(h)
    return -2 * t * (1 - t * t)


# Capacity blocks -----------------------------------------------------------------------------------------------------


@triton.jit
def block_of(unit, U: tl.constexpr, E: tl.constexpr):
    """The capacity block of each unit."""
    return tl.minimum(unit // (U // E), E - 1)


@triton.jit
def of_blocks(p, unit, U: tl.constexpr, E: tl.constexpr):
    """Of coefficients per block those of the units, `[BU]`; one number where E = 1, which takes one register."""
    if E == 1:
        found = tl.zeros_like(unit).to(tl.float32) + tl.load(p)
    else:
        found = tl.load(p + block_of(unit, U, E), mask=unit < U, other=0.0)
    return found


@triton.jit
def is_open_at(position, block, E: tl.constexpr, UNLOCK: tl.constexpr):
    """Whether each block is open to the token that `position` others precede, 1 or 0."""
    found = tl.zeros_like(block).to(tl.float32) + 1
    for e in tl.static_range(1, E):
        found = tl.where((block == e) & (position < UNLOCK[e]), 0.0, found)
    return found
