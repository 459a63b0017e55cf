"""The deep memory of one or two layers in Triton: the walk over the chunks of `walk.py` as kernels.

Layout, coefficients (with them windows, capacity blocks, ragged rows and chunks taken up in the middle) and the final
state are those of the chunked backend, made by torch before and after. What depends on the memory is left:

- `walk`, a program per row and head, chunk after chunk: the inner gradients at the anchor, and the next anchor. It
  leaves the anchors and factors (layer inputs `x`, deltas `d`) of all chunks in device memory.
- `read`, a program per chunk, all at once: what the queries read.
- `read_back`, `query_back`, a program per chunk: the backward of `read`, down to what the units were given and from
  there; they leave each chunk's share of its anchor's gradient.
- `walk_back`, a program per row and head, from the last chunk to the first: the backward of `walk`, from the stored
  anchors and factors.
- `ends_back`, a program per chunk, all at once: what the walk's coefficients at the ends of chunks get.
- `step`, a program per row and head: a single token without autograd. It writes a row of factors and, where the token
  completes a chunk, the next anchor over the old one. Which rows do, it asks their positions on the device: the host
  asks for nothing, shapes and addresses stay, and a step can be part of a CUDA graph. Under Muon once a chunk, of which
  the walk is torch's, it makes the anchor's momentum alone, and for each layer a kernel of Newton-Schulz follows, which
  makes the anchor's weights where the chunk has ended and else returns.

So half of the products do not wait for the walk, and one long row fills more of the chip than one multiprocessor. The
hidden units meet only in sums, so every kernel goes through them in tiles of `UNITS`, several times where such a sum
comes first: the error before the deltas, the gradient's norm before what its bound leaves. With one layer the units are
the key's coordinates. The bound multiplies coefficients, never rows.

On the chip: float32 weights and momentum of 64 x 256 units are 256 KiB, as much as the registers of a multiprocessor,
and are not held there: tiles of them come from the second-level cache, where the program itself has just written them
(33 MiB for 132 programs, of 50). Registers hold keys, errors and scores of a chunk, 16 KiB each at C = K = V = 64. The
tiles are chosen for each kind of chip (`UNITS`) so that in bfloat16 no kernel spills at heads of 48 with 192 units.
What helps: loops from which the compiler lifts nothing (`disable_licm`), factors that are loaded again after a loop, an
`erf` that does not branch, and outside of the loop over the chunks what a single one of them needs: pointers that no
chunk changes stay in registers through the loop. float32, without tensor cores, spills up to 552 bytes, which neither
more threads nor another order of instructions makes fewer: every thread holds its share of both factors of a product.
`benchmarks/results/triton_resources.json` has the numbers.

Bytes per token and head, P weights, F hidden units, inputs of s bytes: forward `16 P / C` for anchors written and read,
`2 s (K + V + 2 F)` for factors and inputs; the backward about three times that. Without autograd a few chunks' anchors
are kept at a time (`ANCHOR_BYTES`). Operations: forward about `22 P + 12 C F`, backward three times that.
At K = V = C = 64, F = 256 and bfloat16: 10.8 KB and 0.9 MFLOP forward: on an H100 (3.35 TB/s, about 800 TFLOP/s) 3.2 ns
for the bytes, 1.1 ns for the products. Memory is the floor while B H fills the chip; below that the walk is, in which
one multiprocessor has 30 MFLOP a chunk, about 5 us on its tensor cores.
One token: weights and momentum (the weights three times, from the cache) and the rows, `8 P + 8 C F` bytes: 120 ns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.deep_memory import DeepMemoryState, chunked
from memzoo.kernels.deep_memory.chunk import Network
from memzoo.kernels.deep_memory.walk import Ends, Tensors
from memzoo.kernels.linear_attention.triton import columns, load_rows, store_rows
from memzoo.kernels.newton_schulz import triton as newton_schulz
from memzoo.kernels.registry import mixed_precision
from memzoo.kernels.triton_support import chip_of, contiguous, fresh, gradients_like, launch, product, tile, wanted

ANCHOR_BYTES = 1 << 28
"""Of anchors that an inference keeps at a time."""
UNITS = {
    "sm_80": {"walk": 16, "read": 16, "read_back": 16, "query_back": 16, "walk_back": 16, "ends_back": 32, "step": 32},
    "sm_90": {"walk": 32, "read": 64, "read_back": 32, "query_back": 64, "walk_back": 16, "ends_back": 32, "step": 32},
    "gfx942": {"walk": 32, "read": 64, "read_back": 32, "query_back": 64, "walk_back": 32, "ends_back": 32, "step": 32},
}
UNITS["gfx942 float32"] = {**UNITS["gfx942"], "walk": 16, "read_back": 16}
"""Widest tile of units of each kernel, so that a chunk of 64 tokens and heads 64 wide leave their registers room. The
products of sm_80 take both factors from registers, and so do those of float32; in bfloat16 those of sm_90 one or both
from shared memory. gfx942 has twice the registers where its four waves share them with no others: so few warps."""
WARPS = {"sm_80": 8, "sm_90": 8, "gfx942": 4, "gfx942 float32": 4}


def _launch(kernel: Any, counts: Sequence[int], **arguments: Any) -> None:
    """`launch` with the tile and the options of the chip. One that is not listed is like its elder: sm_12x, whose
    products are those of sm_80, like that, and sm_100 like sm_90."""
    name = kernel.__name__.removesuffix("_kernel")
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    chip = chip_of(tensors[0].device)
    is_narrow = any(x.dtype == torch.bfloat16 for x in tensors)
    like = "sm_90" if is_narrow and not chip.startswith(("sm_8", "sm_12")) else "sm_80"
    if chip.startswith("gfx"):
        like = "gfx942" if is_narrow else "gfx942 float32"
    launch(
        kernel,
        counts,
        num_warps=4 if name in ("ends_back", "step") else WARPS[like],
        num_stages=1,  # a second copy of the tiles in flight would take what registers there are
        # Its two accumulators leave little: instructions are ordered for few registers. In float32 that takes more.
        sched4reg=name == "query_back" and like == "sm_80" and is_narrow,
        BU=tile(arguments["U"], UNITS[like][name]),
        **arguments,
    )


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
def _value(h, ACTIVATION: tl.constexpr):
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
def _slope(h, ACTIVATION: tl.constexpr):
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
def _curvature(h, ACTIVATION: tl.constexpr):
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


# Tiles ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _block(unit, U: tl.constexpr, E: tl.constexpr):
    """The capacity block of each unit."""
    return tl.minimum(unit // (U // E), E - 1)


@triton.jit
def _of_units(p, row, unit, has_row, U: tl.constexpr, E: tl.constexpr):
    """Of coefficients per row and block `[rows, E]` those of the units: `[R, BU]`, or `[R, 1]` where E = 1."""
    if E == 1:
        found = tl.load(p + row, mask=has_row, other=0.0)[:, None]
    else:
        mask = has_row[:, None] & (unit < U)[None, :]
        found = tl.load(p + row[:, None] * E + _block(unit, U, E)[None, :], mask=mask, other=0.0)
    return found


@triton.jit
def _spread(n, like):
    """The number `n` in every place of an int64 tensor."""
    return tl.zeros_like(like) + n


@triton.jit
def _of_blocks(p, unit, U: tl.constexpr, E: tl.constexpr):
    """Of coefficients per block those of the units, `[BU]`; one number where E = 1, which takes one register."""
    if E == 1:
        found = tl.zeros_like(unit).to(tl.float32) + tl.load(p)
    else:
        found = tl.load(p + _block(unit, U, E), mask=unit < U, other=0.0)
    return found


@triton.jit
def _at_end(p, unit, n, done, otherwise, U: tl.constexpr, E: tl.constexpr):
    """The units' coefficients `[BU]` at the end of chunk n, from one per block; `otherwise` if the row stops in it."""
    return tl.where(_spread(n, unit) < done, _of_blocks(p, unit, U, E), otherwise)


@triton.jit
def _per_block(x, unit, U: tl.constexpr, E: tl.constexpr, BE: tl.constexpr):
    """Sum over the units of each block, `[R, BU]` to `[R, BE]`."""
    if E == 1:
        found = tl.sum(x, axis=1)[:, None]
    else:
        own = (_block(unit, U, E)[:, None] == tl.arange(0, BE)[None, :]) & (unit < U)[:, None]
        if x.shape[0] == 1:
            found = tl.sum(tl.where(own, tl.trans(x), 0.0), axis=0)[None, :]
        else:
            found = product(x, tl.where(own, 1.0, 0.0))
    return found


@triton.jit
def _hidden(k, p_up, unit, part, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr):
    """What the units of a tile are given by `k` `[R, BK]`, of the part-th of their rows."""
    w = load_rows(p_up, unit * PARTS + part, columns(0, BK), K, unit < U, K).to(k.dtype)
    return product(k, tl.trans(w))


# The walk ------------------------------------------------------------------------------------------------------------


@triton.jit
def _bound(p_norms, row, R: tl.constexpr, MAX_NORM: tl.constexpr):
    """The factor that keeps each row's gradient within its bound, `[BR]`."""
    clip = tl.zeros_like(row).to(tl.float32) + 1
    if MAX_NORM > 0:
        clip = tl.load(p_norms + row, mask=row < R, other=1.0)
    return clip


@triton.jit
def _running(
    p_x,
    p_d0,
    p_d1,
    p_norms,
    p_run_x,
    p_run_d0,
    p_run_d1,
    n,
    i_m,
    row,
    v_column,
    count,
    M,
    R: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BU: tl.constexpr,
):
    """The factors, their deltas bounded, of the chunk n that a row does not complete, if it is one of these."""
    if (n >= 0) & (n < count):
        i = n * M + i_m
        clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)[:, None]
        d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V).to(tl.float32)
        store_rows(p_run_d1 + i_m * R * V, d1 * clip, row, v_column, V, row < R, V)
        if DEPTH == 2:
            o_d0, o_run = i * R * PARTS * U, i_m * R * PARTS * U
            for i_u in range(tl.cdiv(U, BU)):
                unit = columns(i_u, BU)
                x = load_rows(p_x + i * R * U, row, unit, U, row < R, U)
                store_rows(p_run_x + i_m * R * U, x, row, unit, U, row < R, U)
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    d0 = load_rows(p_d0 + o_d0, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    store_rows(p_run_d0 + o_run, d0 * clip, row, at, PARTS * U, row < R, PARTS * U)


@triton.jit(do_not_specialize=["count", "M"])
def walk_kernel(
    p_key,
    p_value,
    p_open,
    p_write,
    p_slot_write,
    p_keep,
    p_read,
    p_slot,
    p_held,
    p_held_x,
    p_held_d0,
    p_held_d1,
    p_done,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x,
    p_d0,
    p_d1,
    p_norms,
    p_run_x,
    p_run_d0,
    p_run_d1,
    count,
    M,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    HELD: tl.constexpr,
    ENDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """`count` chunks of a row: their factors, and the anchors after them; the anchor n is followed by n + 1.

    With one layer the units are the key's coordinates, and `p_x` is given. `p_norms` takes, per row, the bound's factor
    and the squares of |x| and |d| of the hidden units. `p_done` counts the chunks that the row completes; `p_run_*`
    take the factors of the one it does not.
    """
    i_m = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BR).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(0, BV)
    like: tl.constexpr = p_d1.dtype.element_ty
    done = tl.cast(count, tl.int64)
    if ENDS:
        done = tl.load(p_done + i_m)
    held = tl.cast(0, tl.int64)
    if HELD:
        held = tl.load(p_held + i_m)
    for step in range(count):
        n = tl.cast(step, tl.int64)
        i = n * M + i_m
        here = _spread(n, row)
        m_end, is_held = (row < R) & (here < done), (row < held) & (here == 0)
        o_up, o_down = i * PARTS * U * K, i * V * U
        o_up_next, o_down_next = (i + M) * PARTS * U * K, (i + M) * V * U
        k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        v = load_rows(p_value + i * R * V, row, v_column, V, row < R, V).to(tl.float32)

        # The units, and the error.
        error = -v
        if L2 and RESIDUAL:
            error += load_rows(p_key + i * R * K, row, v_column, K, row < R, V).to(tl.float32)
        square_x = tl.zeros([BR], tl.float32)
        for i_u in range(tl.cdiv(U, BU)):
            unit = columns(i_u, BU)
            if DEPTH == 1:
                x = load_rows(p_x + i * R * U, row, unit, U, row < R, U)
            else:
                h = _hidden(k, p_up + o_up, unit, 0, K, U, PARTS, BK)
                x = _value(h, ACTIVATION)
                if PARTS == 2:
                    x *= _hidden(k, p_up + o_up, unit, 1, K, U, PARTS, BK)
                if E > 1:
                    x *= _of_units(p_open + i * R * E, row, unit, row < R, U, E)
                keep = x
                if HELD:
                    keep = tl.where(is_held[:, None], load_rows(p_held_x + i_m * R * U, row, unit, U, row < R, U), x)
                store_rows(p_x + i * R * U, keep, row, unit, U, row < R, U)
            if MAX_NORM > 0:
                square_x += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
            if L2:
                w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
                error += product(x.to(like), tl.trans(w))

        # The deltas, and the bound on the gradient.
        square_d = tl.zeros([BR], tl.float32)
        d1 = error
        if HELD:
            d1 = tl.where(is_held[:, None], load_rows(p_held_d1 + i_m * R * V, row, v_column, V, row < R, V), error)
        d1 = d1.to(like)
        store_rows(p_d1 + i * R * V, d1, row, v_column, V, row < R, V)
        if DEPTH == 2:
            for i_u in range(tl.cdiv(U, BU)):
                unit = columns(i_u, BU)
                w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
                back = product(error.to(like), w)
                if E > 1:
                    back *= _of_units(p_open + i * R * E, row, unit, row < R, U, E)
                h = _hidden(k, p_up + o_up, unit, 0, K, U, PARTS, BK)
                d0 = back * _slope(h, ACTIVATION)
                if PARTS == 2:
                    d_gate = back * _value(h, ACTIVATION)
                    square_d += tl.sum(d_gate * d_gate, axis=1)
                    if HELD:
                        old = load_rows(p_held_d0 + i_m * R * 2 * U, row, unit * 2 + 1, 2 * U, row < R, 2 * U)
                        d_gate = tl.where(is_held[:, None], old, d_gate)
                    store_rows(p_d0 + i * R * 2 * U, d_gate, row, unit * 2 + 1, 2 * U, row < R, 2 * U)
                    d0 *= _hidden(k, p_up + o_up, unit, 1, K, U, PARTS, BK)
                square_d += tl.sum(d0 * d0, axis=1)
                if HELD:
                    old = load_rows(p_held_d0 + i_m * R * PARTS * U, row, unit * PARTS, PARTS * U, row < R, PARTS * U)
                    d0 = tl.where(is_held[:, None], old, d0)
                store_rows(p_d0 + i * R * PARTS * U, d0, row, unit * PARTS, PARTS * U, row < R, PARTS * U)
        clip = tl.zeros([BR], tl.float32) + 1
        if MAX_NORM > 0:
            square = square_x * tl.sum(error * error, axis=1)
            if DEPTH == 2:
                square += square_d * tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
            clip = tl.rsqrt(tl.maximum(square / (MAX_NORM * MAX_NORM), 1.0))
            clip = tl.where(is_held, 1.0, clip)
            p_norm = p_norms + i * 3 * R + row
            tl.store(p_norm, clip, mask=row < R)
            tl.store(p_norm + R, square_x, mask=row < R)
            tl.store(p_norm + 2 * R, square_d, mask=row < R)
        tl.debug_barrier()  # the factors are there for all threads

        # The next anchor.
        write = tl.load(p_write + (i * C + (C - 1)) * R + row, mask=m_end, other=0.0) * clip
        d1_write = tl.trans((d1.to(tl.float32) * write[:, None]).to(like))
        if MOMENTUM:
            slot_write = tl.load(p_slot_write + i * R + row, mask=m_end, other=0.0) * clip
            d1_slot = tl.trans((d1.to(tl.float32) * slot_write[:, None]).to(like))
        for i_u in range(tl.cdiv(U, BU)):
            unit = columns(i_u, BU)
            x = load_rows(p_x + i * R * U, row, unit, U, row < R, U)
            keep = _at_end(p_keep + i * E, unit, n, done, 1.0, U, E)
            w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U) * keep[None, :] - product(d1_write, x)
            if MOMENTUM:
                read = _at_end(p_read + i * E, unit, n, done, 0.0, U, E)
                slot = _at_end(p_slot + i * E, unit, n, done, 1.0, U, E)
                s = load_rows(p_down_slot + o_down, v_column, unit, U, v_column < V, U)
                w += s * read[None, :]
                s = s * slot[None, :] - product(d1_slot, x)
                store_rows(p_down_slot + o_down_next, s, v_column, unit, U, v_column < V, U)
            store_rows(p_down + o_down_next, w, v_column, unit, U, v_column < V, U)
            if DEPTH == 2:
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    d0 = load_rows(p_d0 + i * R * PARTS * U, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    w = load_rows(p_up + o_up, at, k_column, K, unit < U, K) * keep[:, None]
                    w -= product(tl.trans((d0 * write[:, None]).to(like)), k)
                    if MOMENTUM:
                        s = load_rows(p_up_slot + o_up, at, k_column, K, unit < U, K)
                        w += s * read[:, None]
                        s = s * slot[:, None] - product(tl.trans((d0 * slot_write[:, None]).to(like)), k)
                        store_rows(p_up_slot + o_up_next, s, at, k_column, K, unit < U, K)
                    store_rows(p_up + o_up_next, w, at, k_column, K, unit < U, K)
        tl.debug_barrier()  # and so is the anchor
    if ENDS:  # outside of the loop, see above
        _running(
            *(p_x, p_d0, p_d1, p_norms, p_run_x, p_run_d0, p_run_d1, done, i_m, row, v_column, count, M),
            *(R, V, U, DEPTH, PARTS, MAX_NORM, BU),
        )


# Reads ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _read_hidden(
    q,
    scores,
    p_up,
    p_up_slot,
    p_d0,
    row,
    unit,
    part,
    keep,
    read,
    R: tl.constexpr,
    K: tl.constexpr,
    U: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    BK: tl.constexpr,
):
    """What the queries give a tile of units by the first layer, `[BC, BU]`, and by its anchor's weights, momentum."""
    plain = _hidden(q, p_up, unit, part, K, U, PARTS, BK)
    plain_slot = plain
    y = plain * keep
    if MOMENTUM:
        plain_slot = _hidden(q, p_up_slot, unit, part, K, U, PARTS, BK)
        y += plain_slot * read
    d0 = load_rows(p_d0, row, unit * PARTS + part, PARTS * U, row < R, PARTS * U)
    return y - product(scores, d0), plain, plain_slot


@triton.jit(do_not_specialize=["M"])
def read_kernel(
    p_query,
    p_key,
    p_write,
    p_keep,
    p_read,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x,
    p_d0,
    p_d1,
    p_norms,
    p_y,
    M,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """What the queries of a chunk read."""
    i = tl.program_id(0).to(tl.int64)
    token, row = tl.arange(0, BC).to(tl.int64), tl.arange(0, BR).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(0, BV)
    like: tl.constexpr = p_d1.dtype.element_ty
    p_query, p_x, o_d0 = p_query + i * C * K, p_x + i * R * U, i * R * PARTS * U
    o_up, o_down = i * PARTS * U * K, i * V * U
    clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
    write = load_rows(p_write + i * C * R, token, row, R, token < C, R) * clip[None, :]
    if DEPTH == 2:
        q = load_rows(p_query, token, k_column, K, token < C, K)
        k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        scores = (product(q, tl.trans(k)) * write).to(like)
    y = tl.zeros([BC, BV], tl.float32)
    inner = tl.zeros([BC, BR], tl.float32)
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        keep = _of_units(p_keep + i * C * E, token, unit, token < C, U, E)
        read = keep
        if MOMENTUM:
            read = _of_units(p_read + i * C * E, token, unit, token < C, U, E)
        if DEPTH == 1:
            z = load_rows(p_query, token, unit, U, token < C, U).to(tl.float32)
        else:
            p_slot_n = p_up
            if MOMENTUM:
                p_slot_n = p_up_slot + o_up
            p_up_n, p_d0_n = p_up + o_up, p_d0 + o_d0
            h = _read_hidden(
                q, scores, p_up_n, p_slot_n, p_d0_n, row, unit, 0, keep, read, R, K, U, PARTS, MOMENTUM, BK
            )[0]
            z = _value(h, ACTIVATION)
            if PARTS == 2:
                z *= _read_hidden(
                    q, scores, p_up_n, p_slot_n, p_d0_n, row, unit, 1, keep, read, R, K, U, PARTS, MOMENTUM, BK
                )[0]
        x = load_rows(p_x, row, unit, U, row < R, U)
        inner += product(z.to(like), tl.trans(x))
        w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
        y += product((z * keep).to(like), tl.trans(w))
        if MOMENTUM:
            s = load_rows(p_down_slot + o_down, v_column, unit, U, v_column < V, U).to(like)
            y += product((z * read).to(like), tl.trans(s))
    d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V)
    y -= product((inner * write).to(like), d1)
    if RESIDUAL:
        y += load_rows(p_query, token, v_column, K, token < C, V).to(tl.float32)
    store_rows(p_y + i * C * V, y, token, v_column, V, token < C, V)


@triton.jit(do_not_specialize=["M"])
def read_back_kernel(
    p_dy,
    p_query,
    p_key,
    p_write,
    p_keep,
    p_read,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x,
    p_d0,
    p_d1,
    p_norms,
    p_inner,
    p_dh,
    p_dquery,
    p_dkeep,
    p_dread,
    p_ddown,
    p_ddown_slot,
    p_dx,
    M,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
    BE: tl.constexpr,
):
    """The backward of `read_kernel` from the outputs to what its units were given, `p_dh`: the gradients of the last
    layer's anchor and inputs, and of `keep` and `momentum_read`. With one layer the units are the queries. `p_inner`
    takes the last layer's scores."""
    i = tl.program_id(0).to(tl.int64)
    token, row = tl.arange(0, BC).to(tl.int64), tl.arange(0, BR).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(0, BV)
    like: tl.constexpr = p_d1.dtype.element_ty
    p_query, p_x, o_d0 = p_query + i * C * K, p_x + i * R * U, i * R * PARTS * U
    p_dquery, p_dx = p_dquery + i * C * K, p_dx + i * R * U
    o_up, o_down = i * PARTS * U * K, i * V * U
    clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
    write = load_rows(p_write + i * C * R, token, row, R, token < C, R) * clip[None, :]
    g = load_rows(p_dy + i * C * V, token, v_column, V, token < C, V).to(like)
    d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V)
    d_scores = (product(g, tl.trans(d1)) * write).to(like)
    if DEPTH == 2:
        q = load_rows(p_query, token, k_column, K, token < C, K)
        k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        scores = (product(q, tl.trans(k)) * write).to(like)
    inner = tl.zeros([BC, BR], tl.float32)
    d_keep = tl.zeros([BC, BE], tl.float32)
    d_read = tl.zeros([BC, BE], tl.float32)
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        keep = _of_units(p_keep + i * C * E, token, unit, token < C, U, E)
        read = keep
        if MOMENTUM:
            read = _of_units(p_read + i * C * E, token, unit, token < C, U, E)
        if DEPTH == 1:
            z = load_rows(p_query, token, unit, U, token < C, U).to(tl.float32)
        else:
            p_slot_n = p_up
            if MOMENTUM:
                p_slot_n = p_up_slot + o_up
            p_up_n, p_d0_n = p_up + o_up, p_d0 + o_d0
            a, plain, plain_slot = _read_hidden(
                q, scores, p_up_n, p_slot_n, p_d0_n, row, unit, 0, keep, read, R, K, U, PARTS, MOMENTUM, BK
            )
            z = _value(a, ACTIVATION)
            if PARTS == 2:
                b, plain_gate, plain_gate_slot = _read_hidden(
                    q, scores, p_up_n, p_slot_n, p_d0_n, row, unit, 1, keep, read, R, K, U, PARTS, MOMENTUM, BK
                )
                z *= b
        # The second layer.
        x = load_rows(p_x, row, unit, U, row < R, U)
        w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
        inner += product(z.to(like), tl.trans(x))
        store_rows(p_dx, -product(tl.trans(d_scores), z.to(like)), row, unit, U, row < R, U)
        g_w = product(g, w)
        d_keep += _per_block(g_w * z, unit, U, E, BE)
        d_z = g_w * keep - product(d_scores, x)
        d_w = product(tl.trans(g), (z * keep).to(like))
        store_rows(p_ddown + o_down, d_w, v_column, unit, U, v_column < V, U)
        if MOMENTUM:
            s = load_rows(p_down_slot + o_down, v_column, unit, U, v_column < V, U).to(like)
            g_s = product(g, s)
            d_read += _per_block(g_s * z, unit, U, E, BE)
            d_z += g_s * read
            d_s = product(tl.trans(g), (z * read).to(like))
            store_rows(p_ddown_slot + o_down, d_s, v_column, unit, U, v_column < V, U)
        # The first.
        if DEPTH == 1:
            store_rows(p_dquery, d_z, token, unit, U, token < C, U)
        else:
            for part in tl.static_range(PARTS):
                if part == 0:
                    d_h = d_z * _slope(a, ACTIVATION)
                    if PARTS == 2:
                        d_h *= b
                else:
                    d_h = d_z * _value(a, ACTIVATION)
                    plain, plain_slot = plain_gate, plain_gate_slot
                at = unit * PARTS + part
                d_keep += _per_block(plain * d_h, unit, U, E, BE)
                if MOMENTUM:
                    d_read += _per_block(plain_slot * d_h, unit, U, E, BE)
                store_rows(p_dh + i * C * PARTS * U, d_h, token, at, PARTS * U, token < C, PARTS * U)
    block = columns(0, BE)
    store_rows(p_dkeep + i * C * E, d_keep, token, block, E, token < C, E)
    store_rows(p_dread + i * C * E, d_read, token, block, E, token < C, E)

    store_rows(p_inner + i * C * R, inner, token, row, R, token < C, R)


@triton.jit(do_not_specialize=["M"])
def query_back_kernel(
    p_dy,
    p_query,
    p_key,
    p_write,
    p_keep,
    p_read,
    p_up,
    p_up_slot,
    p_d0,
    p_d1,
    p_norms,
    p_inner,
    p_dh,
    p_dquery,
    p_dkey,
    p_dwrite,
    p_dup,
    p_dup_slot,
    p_dd0,
    p_dd1,
    p_dclip,
    M,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """The rest of it, but for what the residual gives the queries: from the outputs and `p_dh` the gradients of `write`
    (with `p_dclip` for the bound's factor), of the last layer's deltas, and of the first of two layers all."""
    i = tl.program_id(0).to(tl.int64)
    token, row = tl.arange(0, BC).to(tl.int64), tl.arange(0, BR).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(0, BV)
    like: tl.constexpr = p_d1.dtype.element_ty
    clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
    write = load_rows(p_write + i * C * R, token, row, R, token < C, R) * clip[None, :]
    if DEPTH == 2:
        o_up, o_d0 = i * PARTS * U * K, i * R * PARTS * U
        q = load_rows(p_query + i * C * K, token, k_column, K, token < C, K)
        k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        d_q = tl.zeros([BC, BK], tl.float32)
        weighted = tl.trans((product(q, tl.trans(k)) * write).to(like))
        d_weighted = tl.zeros([BC, BR], tl.float32)
        for i_u in range(tl.cdiv(U, BU)):
            unit = columns(i_u, BU)
            for part in tl.static_range(PARTS):
                at = unit * PARTS + part
                d_h = load_rows(p_dh + i * C * PARTS * U, token, at, PARTS * U, token < C, PARTS * U)
                d0 = load_rows(p_d0 + o_d0, row, at, PARTS * U, row < R, PARTS * U)
                d_weighted += product(d_h, tl.trans(d0))
                store_rows(p_dd0 + o_d0, -product(weighted, d_h), row, at, PARTS * U, row < R, PARTS * U)
                d_kept = d_h.to(tl.float32) * _of_units(p_keep + i * C * E, token, unit, token < C, U, E)
                d_kept = d_kept.to(like)
                w = load_rows(p_up + o_up, at, k_column, K, unit < U, K).to(like)
                d_q += product(d_kept, w)
                store_rows(p_dup + o_up, product(tl.trans(d_kept), q), at, k_column, K, unit < U, K)
                if MOMENTUM:
                    d_kept = d_h.to(tl.float32) * _of_units(p_read + i * C * E, token, unit, token < C, U, E)
                    d_kept = d_kept.to(like)
                    s = load_rows(p_up_slot + o_up, at, k_column, K, unit < U, K).to(like)
                    d_q += product(d_kept, s)
                    store_rows(p_dup_slot + o_up, product(tl.trans(d_kept), q), at, k_column, K, unit < U, K)
        tl.debug_barrier()  # what follows is made and loaded again, so that it takes no registers in the loop
        q = load_rows(p_query + i * C * K, token, k_column, K, token < C, K)
        k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        write = load_rows(p_write + i * C * R, token, row, R, token < C, R) * clip[None, :]
        d_write = -d_weighted * product(q, tl.trans(k))
        d_scores = (d_weighted * write).to(like)
        d_q -= product(d_scores, k)
        store_rows(p_dquery + i * C * K, d_q, token, k_column, K, token < C, K)
        store_rows(p_dkey + i * R * K, -product(tl.trans(d_scores), q), row, k_column, K, row < R, K)
    else:
        d_write = tl.zeros([BC, BR], tl.float32)
    tl.debug_barrier()
    g = load_rows(p_dy + i * C * V, token, v_column, V, token < C, V).to(like)
    d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V)
    inner = load_rows(p_inner + i * C * R, token, row, R, token < C, R)
    store_rows(p_dd1 + i * R * V, -product(tl.trans((inner * write).to(like)), g), row, v_column, V, row < R, V)
    d_write -= product(g, tl.trans(d1)) * inner
    store_rows(p_dwrite + i * C * R, d_write * clip[None, :], token, row, R, token < C, R)
    if MAX_NORM > 0:
        write = load_rows(p_write + i * C * R, token, row, R, token < C, R)
        tl.store(p_dclip + i * R + row, tl.sum(d_write * write, axis=0), mask=row < R)


@triton.jit
def _add_rows(p, x, row, column, stride, has_row, width):
    """To what is there."""
    x += load_rows(p, row, column, stride, has_row, width).to(tl.float32)
    store_rows(p, x, row, column, stride, has_row, width)


@triton.jit
def _running_back(
    p_done,
    p_d0,
    p_d1,
    p_norms,
    p_drun_x,
    p_drun_d0,
    p_drun_d1,
    p_dx,
    p_dd0,
    p_dd1,
    p_dclip,
    i_m,
    row,
    v_column,
    count,
    M,
    R: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BU: tl.constexpr,
):
    """What the factors of the chunk that a row does not complete, which are outputs, give those that the walk made."""
    n = tl.load(p_done + i_m)
    if n < count:
        i = n * M + i_m
        clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
        d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V).to(tl.float32)
        d_d1 = load_rows(p_drun_d1 + i_m * R * V, row, v_column, V, row < R, V)
        d_clip = tl.sum(d_d1 * d1, axis=1)
        _add_rows(p_dd1 + i * R * V, d_d1 * clip[:, None], row, v_column, V, row < R, V)
        if DEPTH == 2:
            o_d0, o_run = i * R * PARTS * U, i_m * R * PARTS * U
            for i_u in range(tl.cdiv(U, BU)):
                unit = columns(i_u, BU)
                d_x = load_rows(p_drun_x + i_m * R * U, row, unit, U, row < R, U)
                _add_rows(p_dx + i * R * U, d_x, row, unit, U, row < R, U)
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    d0 = load_rows(p_d0 + o_d0, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    d_d0 = load_rows(p_drun_d0 + o_run, row, at, PARTS * U, row < R, PARTS * U)
                    d_clip += tl.sum(d_d0 * d0, axis=1)
                    _add_rows(p_dd0 + o_d0, d_d0 * clip[:, None], row, at, PARTS * U, row < R, PARTS * U)
        if MAX_NORM > 0:
            p_dclip_n = p_dclip + i * R + row
            tl.store(p_dclip_n, tl.load(p_dclip_n, mask=row < R, other=0.0) + d_clip, mask=row < R)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["count", "M"])
def walk_back_kernel(
    p_key,
    p_open,
    p_write,
    p_slot_write,
    p_keep,
    p_read,
    p_slot,
    p_held,
    p_done,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x,
    p_d0,
    p_d1,
    p_norms,
    p_drun_x,
    p_drun_d0,
    p_drun_d1,
    p_dkey,
    p_dvalue,
    p_dwrite,
    p_dslot_write,
    p_dheld_x,
    p_dheld_d0,
    p_dheld_d1,
    p_dup,
    p_ddown,
    p_dup_slot,
    p_ddown_slot,
    p_dx,
    p_dd0,
    p_dd1,
    p_dclip,
    count,
    M,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    HELD: tl.constexpr,
    ENDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    L2: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """The backward of `walk_kernel`, but for what the residual gives the keys and the next anchor its coefficients.

    What `read_back_kernel` has left in the gradients of factors, keys and anchors is added to; the gradient of the
    anchor after the last chunk is given. `p_dvalue` takes that of the values; with one layer `p_dx` that of the inputs.
    """
    i_m = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BR).to(tl.int64)
    k_column, v_column = columns(0, BK), columns(0, BV)
    like: tl.constexpr = p_d1.dtype.element_ty
    if ENDS:  # outside of the loop, see above
        _running_back(
            *(p_done, p_d0, p_d1, p_norms, p_drun_x, p_drun_d0, p_drun_d1, p_dx, p_dd0, p_dd1, p_dclip),
            *(i_m, row, v_column, count, M, R, V, U, DEPTH, PARTS, MAX_NORM, BU),
        )
    for step in tl.range(count, disable_licm=True):
        done = tl.cast(count, tl.int64)
        if ENDS:
            done = tl.load(p_done + i_m)
        held = tl.cast(0, tl.int64)
        if HELD:
            held = tl.load(p_held + i_m)
        n = count - 1 - tl.cast(step, tl.int64)
        i = n * M + i_m
        here = _spread(n, row)
        m_end, is_held = (row < R) & (here < done), (row < held) & (here == 0)
        o_up, o_down = i * PARTS * U * K, i * V * U
        o_up_next, o_down_next = (i + M) * PARTS * U * K, (i + M) * V * U
        # The step from this anchor to the next: the anchor itself,
        for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
            unit, m_v = columns(i_u, BU), v_column < V
            keep = _at_end(p_keep + i * E, unit, n, done, 1.0, U, E)
            d_w = load_rows(p_ddown + o_down_next, v_column, unit, U, m_v, U)
            kept = d_w * keep[None, :] + load_rows(p_ddown + o_down, v_column, unit, U, m_v, U)
            store_rows(p_ddown + o_down, kept, v_column, unit, U, m_v, U)
            if MOMENTUM:
                read = _at_end(p_read + i * E, unit, n, done, 0.0, U, E)
                slot = _at_end(p_slot + i * E, unit, n, done, 1.0, U, E)
                d_s = load_rows(p_ddown_slot + o_down_next, v_column, unit, U, m_v, U)
                kept = d_s * slot[None, :] + d_w * read[None, :]
                kept += load_rows(p_ddown_slot + o_down, v_column, unit, U, m_v, U)
                store_rows(p_ddown_slot + o_down, kept, v_column, unit, U, m_v, U)
        if DEPTH == 2:
            for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
                unit = columns(i_u, BU)
                keep = _at_end(p_keep + i * E, unit, n, done, 1.0, U, E)
                if MOMENTUM:
                    read = _at_end(p_read + i * E, unit, n, done, 0.0, U, E)
                    slot = _at_end(p_slot + i * E, unit, n, done, 1.0, U, E)
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    d_w = load_rows(p_dup + o_up_next, at, k_column, K, unit < U, K)
                    kept = d_w * keep[:, None] + load_rows(p_dup + o_up, at, k_column, K, unit < U, K)
                    store_rows(p_dup + o_up, kept, at, k_column, K, unit < U, K)
                    if MOMENTUM:
                        d_s = load_rows(p_dup_slot + o_up_next, at, k_column, K, unit < U, K)
                        kept = d_s * slot[:, None] + d_w * read[:, None]
                        kept += load_rows(p_dup_slot + o_up, at, k_column, K, unit < U, K)
                        store_rows(p_dup_slot + o_up, kept, at, k_column, K, unit < U, K)
        tl.debug_barrier()

        # what was written to its last layer,
        d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V)
        clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
        p_write_n = p_write + (i * C + (C - 1)) * R + row
        write = tl.load(p_write_n, mask=m_end, other=0.0) * clip
        d_write = tl.zeros([BR], tl.float32)
        d_clip = tl.zeros([BR], tl.float32)
        d_d1 = load_rows(p_dd1 + i * R * V, row, v_column, V, row < R, V).to(tl.float32)
        if MOMENTUM:
            slot_write = tl.load(p_slot_write + i * R + row, mask=m_end, other=0.0) * clip
            d_slot_write = tl.zeros([BR], tl.float32)
        for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
            unit, m_v = columns(i_u, BU), v_column < V
            x = load_rows(p_x + i * R * U, row, unit, U, row < R, U).to(tl.float32)
            d_w = load_rows(p_ddown + o_down_next, v_column, unit, U, m_v, U).to(like)
            g = product(d1, d_w)
            d_write -= tl.sum(g * x, axis=1)
            d_x = load_rows(p_dx + i * R * U, row, unit, U, row < R, U).to(tl.float32) - g * write[:, None]
            d_d1 -= product((x * write[:, None]).to(like), tl.trans(d_w))
            if MOMENTUM:
                d_s = load_rows(p_ddown_slot + o_down_next, v_column, unit, U, m_v, U).to(like)
                g = product(d1, d_s)
                d_slot_write -= tl.sum(g * x, axis=1)
                d_x -= g * slot_write[:, None]
                d_d1 -= product((x * slot_write[:, None]).to(like), tl.trans(d_s))
            if DEPTH == 2 and HELD:
                store_rows(p_dheld_x + i_m * R * U, d_x, row, unit, U, is_held, U)
            store_rows(p_dx + i * R * U, d_x, row, unit, U, row < R, U)
        if HELD:
            store_rows(p_dheld_d1 + i_m * R * V, d_d1, row, v_column, V, is_held, V)
        store_rows(p_dd1 + i * R * V, d_d1, row, v_column, V, row < R, V)
        tl.debug_barrier()

        # and to its first.
        if DEPTH == 2:
            k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
            d_k = load_rows(p_dkey + i * R * K, row, k_column, K, row < R, K).to(tl.float32)
            for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
                unit = columns(i_u, BU)
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    d0 = load_rows(p_d0 + i * R * PARTS * U, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    d_d0 = load_rows(p_dd0 + i * R * PARTS * U, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    d_w = load_rows(p_dup + o_up_next, at, k_column, K, unit < U, K).to(like)
                    g = product(k, tl.trans(d_w))
                    d_write -= tl.sum(g * d0, axis=1)
                    d_d0 -= g * write[:, None]
                    d_k -= product((d0 * write[:, None]).to(like), d_w)
                    if MOMENTUM:
                        d_s = load_rows(p_dup_slot + o_up_next, at, k_column, K, unit < U, K).to(like)
                        g = product(k, tl.trans(d_s))
                        d_slot_write -= tl.sum(g * d0, axis=1)
                        d_d0 -= g * slot_write[:, None]
                        d_k -= product((d0 * slot_write[:, None]).to(like), d_s)
                    store_rows(p_dd0 + i * R * PARTS * U, d_d0, row, at, PARTS * U, row < R, PARTS * U)
                    if HELD:
                        store_rows(p_dheld_d0 + i_m * R * PARTS * U, d_d0, row, at, PARTS * U, is_held, PARTS * U)
            store_rows(p_dkey + i * R * K, d_k, row, k_column, K, row < R, K)
        p_dwrite_n = p_dwrite + (i * C + (C - 1)) * R + row
        tl.store(p_dwrite_n, tl.load(p_dwrite_n, mask=m_end, other=0.0) + d_write * clip, mask=m_end)
        if MOMENTUM:
            tl.store(p_dslot_write + i * R + row, d_slot_write * clip, mask=m_end)
        tl.debug_barrier()

        # The inner gradients. Of a row that was held nothing goes further back. What is loaded again takes no registers
        # in between.
        d1 = load_rows(p_d1 + i * R * V, row, v_column, V, row < R, V)
        clip = _bound(p_norms + i * 3 * R, row, R, MAX_NORM)
        if DEPTH == 2:
            k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
        is_new = (row < R) & ((row >= held) | (here > 0))
        d_norm = tl.zeros([BR], tl.float32)  # of the square of the gradient's norm, times 2
        square_k = tl.zeros([BR], tl.float32)
        square_x = tl.zeros([BR], tl.float32)
        square_d0 = tl.zeros([BR], tl.float32)
        square_d1 = tl.zeros([BR], tl.float32)
        if MAX_NORM > 0:
            d_clip += tl.load(p_dclip + i * R + row, mask=row < R, other=0.0)
            d_clip += d_write * tl.load(p_write_n, mask=m_end, other=0.0)
            if MOMENTUM:
                d_clip += d_slot_write * tl.load(p_slot_write + i * R + row, mask=m_end, other=0.0)
            d_norm = tl.where(is_new & (clip < 1), -d_clip * clip * clip * clip / (MAX_NORM * MAX_NORM), 0.0)
            square_x = tl.load(p_norms + i * 3 * R + R + row, mask=row < R, other=0.0)
            square_d0 = tl.load(p_norms + i * 3 * R + 2 * R + row, mask=row < R, other=0.0)
            square_d1 = tl.sum(d1.to(tl.float32) * d1.to(tl.float32), axis=1)
            if DEPTH == 2:
                square_k = tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
        d_error = load_rows(p_dd1 + i * R * V, row, v_column, V, is_new, V).to(tl.float32)
        d_error += d1.to(tl.float32) * (d_norm * square_x)[:, None]
        if DEPTH == 2:
            for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
                unit = columns(i_u, BU)
                w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
                back = product(d1, w)
                a = _hidden(k, p_up + o_up, unit, 0, K, U, PARTS, BK)
                is_open = tl.where(is_new, 1.0, 0.0)[:, None]
                if E > 1:
                    is_open *= _of_units(p_open + i * R * E, row, unit, row < R, U, E)
                p_at, p_dat = p_d0 + i * R * PARTS * U, p_dd0 + i * R * PARTS * U
                d0 = load_rows(p_at, row, unit * PARTS, PARTS * U, row < R, PARTS * U).to(tl.float32)
                d_d0 = load_rows(p_dat, row, unit * PARTS, PARTS * U, row < R, PARTS * U).to(tl.float32)
                d_d0 = (d_d0 + d0 * (d_norm * square_k)[:, None]) * is_open
                d_back = d_d0 * _slope(a, ACTIVATION)
                d_h = d_d0 * back * _curvature(a, ACTIVATION)
                if PARTS == 2:
                    b = _hidden(k, p_up + o_up, unit, 1, K, U, PARTS, BK)
                    d0 = load_rows(p_at, row, unit * 2 + 1, 2 * U, row < R, 2 * U).to(tl.float32)
                    d_gate = load_rows(p_dat, row, unit * 2 + 1, 2 * U, row < R, 2 * U).to(tl.float32)
                    d_gate = (d_gate + d0 * (d_norm * square_k)[:, None]) * is_open
                    slope = _slope(a, ACTIVATION)
                    d_back = d_back * b + d_gate * _value(a, ACTIVATION)
                    d_h = d_h * b + d_gate * back * slope
                    store_rows(p_dat, d_d0 * back * slope, row, unit * 2 + 1, 2 * U, row < R, 2 * U)
                store_rows(p_dat, d_h, row, unit * PARTS, PARTS * U, row < R, PARTS * U)
                d_back = d_back.to(like)
                d_error += product(d_back, tl.trans(w))
                p_dw = p_ddown + o_down
                d_w = load_rows(p_dw, v_column, unit, U, v_column < V, U) + product(tl.trans(d1), d_back)
                store_rows(p_dw, d_w, v_column, unit, U, v_column < V, U)
        store_rows(p_dvalue + i * R * V, -d_error, row, v_column, V, row < R, V)
        tl.debug_barrier()
        d_v = load_rows(p_dvalue + i * R * V, row, v_column, V, row < R, V)  # of the error but for the sign
        for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
            unit = columns(i_u, BU)
            x = load_rows(p_x + i * R * U, row, unit, U, row < R, U)
            d_x = load_rows(p_dx + i * R * U, row, unit, U, row < R, U).to(tl.float32)
            d_x += x.to(tl.float32) * (d_norm * square_d1)[:, None]
            if L2:
                w = load_rows(p_down + o_down, v_column, unit, U, v_column < V, U).to(like)
                d_x -= product(d_v, w)
                p_dw = p_ddown + o_down
                d_w = load_rows(p_dw, v_column, unit, U, v_column < V, U) - product(tl.trans(d_v), x)
                store_rows(p_dw, d_w, v_column, unit, U, v_column < V, U)
            store_rows(p_dx + i * R * U, d_x, row, unit, U, row < R, U)
        tl.debug_barrier()

        if DEPTH == 2:
            k = load_rows(p_key + i * R * K, row, k_column, K, row < R, K)
            d_k = load_rows(p_dkey + i * R * K, row, k_column, K, row < R, K).to(tl.float32)
            d_k += k.to(tl.float32) * (d_norm * square_d0)[:, None]
            for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
                unit = columns(i_u, BU)
                d_x = load_rows(p_dx + i * R * U, row, unit, U, is_new, U).to(tl.float32)
                if E > 1:
                    d_x *= _of_units(p_open + i * R * E, row, unit, row < R, U, E)
                a = _hidden(k, p_up + o_up, unit, 0, K, U, PARTS, BK)
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    if part == 0:
                        d_h = d_x * _slope(a, ACTIVATION)
                        if PARTS == 2:
                            d_h *= _hidden(k, p_up + o_up, unit, 1, K, U, PARTS, BK)
                    else:
                        d_h = d_x * _value(a, ACTIVATION)
                    d_h += load_rows(p_dd0 + i * R * PARTS * U, row, at, PARTS * U, row < R, PARTS * U).to(tl.float32)
                    d_h = d_h.to(like)
                    w = load_rows(p_up + o_up, at, k_column, K, unit < U, K).to(like)
                    d_k += product(d_h, w)
                    p_dw = p_dup + o_up
                    d_w = tl.trans(load_rows(p_dw, at, k_column, K, unit < U, K)) + product(tl.trans(k), d_h)
                    store_rows(p_dw, tl.trans(d_w), at, k_column, K, unit < U, K)
            store_rows(p_dkey + i * R * K, d_k, row, k_column, K, row < R, K)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["M"])
def ends_back_kernel(
    p_done,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_dup,
    p_ddown,
    p_dup_slot,
    p_ddown_slot,
    p_dkeep,
    p_dread,
    p_dslot,
    M,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ENDS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
    BE: tl.constexpr,
):
    """The gradients of the coefficients of a chunk's anchor in the next one, from both and the next one's gradient."""
    i = tl.program_id(0).to(tl.int64)
    k_column, v_column, block = columns(0, BK), columns(0, BV), columns(0, BE)
    o_up, o_down = i * PARTS * U * K, i * V * U
    o_up_next, o_down_next = (i + M) * PARTS * U * K, (i + M) * V * U
    d_keep = tl.zeros([1, BE], tl.float32)
    d_read = tl.zeros([1, BE], tl.float32)
    d_slot = tl.zeros([1, BE], tl.float32)
    for i_u in tl.range(tl.cdiv(U, BU), disable_licm=True):
        unit, m_v = columns(i_u, BU), v_column < V
        w = load_rows(p_down + o_down, v_column, unit, U, m_v, U)
        d_w = load_rows(p_ddown + o_down_next, v_column, unit, U, m_v, U)
        of_keep = tl.sum(w * d_w, axis=0)
        if MOMENTUM:
            s = load_rows(p_down_slot + o_down, v_column, unit, U, m_v, U)
            of_read = tl.sum(s * d_w, axis=0)
            of_slot = tl.sum(s * load_rows(p_ddown_slot + o_down_next, v_column, unit, U, m_v, U), axis=0)
        if DEPTH == 2:
            for part in tl.static_range(PARTS):
                at = unit * PARTS + part
                w = load_rows(p_up + o_up, at, k_column, K, unit < U, K)
                d_w = load_rows(p_dup + o_up_next, at, k_column, K, unit < U, K)
                of_keep += tl.sum(w * d_w, axis=1)
                if MOMENTUM:
                    s = load_rows(p_up_slot + o_up, at, k_column, K, unit < U, K)
                    of_read += tl.sum(s * d_w, axis=1)
                    of_slot += tl.sum(s * load_rows(p_dup_slot + o_up_next, at, k_column, K, unit < U, K), axis=1)
        d_keep += _per_block(of_keep[None, :], unit, U, E, BE)
        if MOMENTUM:
            d_read += _per_block(of_read[None, :], unit, U, E, BE)
            d_slot += _per_block(of_slot[None, :], unit, U, E, BE)
    m_block = block < E
    if ENDS:
        m_block = m_block & (_spread(i // M, block) < tl.load(p_done + i % M))
    tl.store(p_dkeep + i * E + block, tl.sum(d_keep, axis=0), mask=m_block)
    if MOMENTUM:
        tl.store(p_dread + i * E + block, tl.sum(d_read, axis=0), mask=m_block)
        tl.store(p_dslot + i * E + block, tl.sum(d_slot, axis=0), mask=m_block)


# One token -----------------------------------------------------------------------------------------------------------


@triton.jit
def _seen(k, p_up, unit, part, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr):
    """`_hidden` of one token."""
    w = load_rows(p_up, unit * PARTS + part, columns(0, BK), K, unit < U, K)
    return tl.sum(w * k[None, :], axis=1)


@triton.jit
def _is_open(position, block, E: tl.constexpr, UNLOCK: tl.constexpr):
    """Whether each block is open to the token that `position` others precede, 1 or 0."""
    found = tl.zeros_like(block).to(tl.float32) + 1
    for e in tl.static_range(1, E):
        found = tl.where((block == e) & (position < UNLOCK[e]), 0.0, found)
    return found


@triton.jit
def _learn(
    p_key,
    p_value,
    position,
    p_up,
    p_down,
    p_x0,
    p_x1,
    p_d0,
    p_d1,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    UNLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
):
    """The factors of one token's gradient, each written to the row that is pointed to."""
    k_column, v_column = columns(0, BK), columns(0, BV)
    error = -tl.load(p_value + v_column, mask=v_column < V, other=0.0).to(tl.float32)
    if L2 and RESIDUAL:
        error += tl.load(p_key + v_column, mask=v_column < V, other=0.0).to(tl.float32)
    if DEPTH == 2:
        k = tl.load(p_key + k_column, mask=k_column < K, other=0.0).to(tl.float32)
        tl.store(p_x0 + k_column, k, mask=k_column < K)
    square_x = 0.0
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        is_open = _is_open(position, _block(unit, U, E), E, UNLOCK)
        if DEPTH == 1:
            x = tl.load(p_key + unit, mask=unit < U, other=0.0).to(tl.float32) * is_open
        else:
            x = _value(_seen(k, p_up, unit, 0, K, U, PARTS, BK), ACTIVATION) * is_open
            if PARTS == 2:
                x *= _seen(k, p_up, unit, 1, K, U, PARTS, BK)
        tl.store(p_x1 + unit, x, mask=unit < U)
        square_x += tl.sum(x * x, axis=0)
        if L2:
            w = load_rows(p_down, v_column, unit, U, v_column < V, U)
            error += tl.sum(w * x[None, :], axis=1)
    square = square_x * tl.sum(error * error, axis=0)
    if DEPTH == 2:
        square_d = 0.0
        for i_u in range(tl.cdiv(U, BU)):
            unit = columns(i_u, BU)
            w = load_rows(p_down, v_column, unit, U, v_column < V, U)
            back = tl.sum(w * error[:, None], axis=0) * _is_open(position, _block(unit, U, E), E, UNLOCK)
            a = _seen(k, p_up, unit, 0, K, U, PARTS, BK)
            d0 = back * _slope(a, ACTIVATION)
            p_unit = p_d0 + unit * PARTS
            if PARTS == 2:
                d_gate = back * _value(a, ACTIVATION)
                square_d += tl.sum(d_gate * d_gate, axis=0)
                tl.store(p_unit + 1, d_gate, mask=unit < U)
                d0 *= _seen(k, p_up, unit, 1, K, U, PARTS, BK)
            square_d += tl.sum(d0 * d0, axis=0)
            tl.store(p_unit, d0, mask=unit < U)
        square += square_d * tl.sum(k * k, axis=0)
    if MAX_NORM > 0:
        clip = tl.rsqrt(tl.maximum(square / (MAX_NORM * MAX_NORM), 1.0))
        error *= clip
        if DEPTH == 2:
            tl.debug_barrier()
            for i_u in range(tl.cdiv(PARTS * U, BU)):
                at = columns(i_u, BU)
                d0 = tl.load(p_d0 + at, mask=at < PARTS * U, other=0.0)
                tl.store(p_d0 + at, d0 * clip, mask=at < PARTS * U)
    tl.store(p_d1 + v_column, error, mask=v_column < V)


@triton.jit
def _shifted(p_old, p_new, p_last, width, HALO: tl.constexpr, BH: tl.constexpr, B: tl.constexpr):
    """Of the last `HALO` tokens one more and the first no longer."""
    row = tl.arange(0, BH).to(tl.int64)
    for i_c in range(tl.cdiv(width, B)):
        column = columns(i_c, B)
        old = load_rows(p_old + width, row, column, width, row < HALO - 1, width)
        last = tl.load(p_last + column, mask=column < width, other=0.0).to(tl.float32)
        store_rows(
            p_new, tl.where((row == HALO - 1)[:, None], last[None, :], old), row, column, width, row < HALO, width
        )


@triton.jit
def _outer(p_c, p_d, p_x, of_d, of_x, d_stride, x_stride, ROWS: tl.constexpr, D: tl.constexpr, X: tl.constexpr):
    """`sum_r c_r d_r x_r^T` over all rows, `[of_d, of_x]`; in slices of 16, which take few registers."""
    found = tl.zeros([of_d.shape[0], of_x.shape[0]], tl.float32)
    for i_r in range(tl.cdiv(ROWS, 16)):
        row = columns(i_r, 16)
        c = tl.load(p_c + row, mask=row < ROWS, other=0.0)
        d = load_rows(p_d, row, of_d, d_stride, row < ROWS, D) * c[:, None]
        found += product(tl.trans(d), load_rows(p_x, row, of_x, x_stride, row < ROWS, X))
    return found


@triton.jit
def step_kernel(
    p_query,
    p_key,
    p_value,
    p_retention,
    p_decay,
    p_step,
    p_gate,
    p_position,
    p_up,
    p_down,
    p_up_slot,
    p_down_slot,
    p_x0,
    p_x1,
    p_d0,
    p_d1,
    p_write,
    p_slot_write,
    p_keep,
    p_read,
    p_slot,
    p_recent_key,
    p_recent_value,
    p_orthogonal,
    p_new_write,
    p_new_slot_write,
    p_new_keep,
    p_new_read,
    p_new_slot,
    p_new_recent_key,
    p_new_recent_value,
    p_new_position,
    p_new_orthogonal,
    p_end_keep,
    p_end_orthogonal,
    p_y,
    H: tl.constexpr,
    C: tl.constexpr,
    HALO: tl.constexpr,
    WINDOW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    UNLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    MUON: tl.constexpr,
    RETENTION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
    BE: tl.constexpr,
):
    """One token of a row, in float32: its factors, written to its row of the state's, the coefficients after it, and
    what its query reads. With one layer the units are the key's coordinates, and `p_x1` are the inputs.

    Before the first token of a chunk the `HALO` rows are made anew, at the chunk's anchor; after the last one the next
    anchor takes the place of the old. Whether a token is one of them the program asks its row's position: the host
    need not know. `UNLOCK` says after how many tokens each of `E > 1` blocks opens.

    Under `MUON` (once a chunk) the anchor's momentum is made here and not its weights, of which `p_end_*` take the
    coefficients: those of weights and orthogonal momentum after a token that completes a chunk, 1 and 0 after others.
    """
    R: tl.constexpr = HALO + C
    i = tl.program_id(0).to(tl.int64)
    row, block = tl.arange(0, BR).to(tl.int64), columns(0, BE)
    k_column, v_column = columns(0, BK), columns(0, BV)
    position = tl.load(p_position + i // H)
    place = position % C
    here = HALO + place
    p_query, p_key, p_value = p_query + i * K, p_key + i * K, p_value + i * V
    p_x1, p_d1 = p_x1 + i * R * U, p_d1 + i * R * V
    p_down = p_down + i * V * U
    p_x0_here, p_d0_here = p_x0, p_d0
    if DEPTH == 2:
        p_up, p_x0, p_d0 = p_up + i * PARTS * U * K, p_x0 + i * R * K, p_d0 + i * R * PARTS * U
        p_x0_here, p_d0_here = p_x0 + here * K, p_d0 + here * PARTS * U
    if MOMENTUM:
        p_down_slot = p_down_slot + i * V * U
        if DEPTH == 2:
            p_up_slot = p_up_slot + i * PARTS * U * K

    # Its gradient, and those before the chunk.
    _learn(
        *(p_key, p_value, position, p_up, p_down, p_x0_here, p_x1 + here * U, p_d0_here, p_d1 + here * V),
        *(K, V, U, E, UNLOCK, DEPTH, PARTS, ACTIVATION, RESIDUAL, L2, MAX_NORM, BK, BV, BU),
    )
    if HALO > 0:
        p_recent_key, p_recent_value = p_recent_key + i * HALO * K, p_recent_value + i * HALO * V
        for index in range(tl.where(place == 0, HALO, 0)):
            before = tl.cast(index, tl.int64)
            if DEPTH == 2:
                p_x0_here, p_d0_here = p_x0 + before * K, p_d0 + before * PARTS * U
            _learn(
                *(p_recent_key + before * K, p_recent_value + before * V, position, p_up, p_down),
                *(p_x0_here, p_x1 + before * U, p_d0_here, p_d1 + before * V),
                *(K, V, U, E, UNLOCK, DEPTH, PARTS, ACTIVATION, RESIDUAL, L2, MAX_NORM, BK, BV, BU),
            )
        _shifted(p_recent_key, p_new_recent_key + i * HALO * K, p_key, K, HALO, BH, BK)
        _shifted(p_recent_value, p_new_recent_value + i * HALO * V, p_value, V, HALO, BH, BV)

    # The coefficients after it.
    rate = tl.load(p_step + i)
    if WINDOW > 0:
        lag = here - row
        m_window = (lag >= 0) & (lag < WINDOW)
        step = tl.load(p_gate + i * WINDOW + lag, mask=m_window, other=0.0)
    else:
        step = tl.where(row == here, 1.0, 0.0)
    if not MUON:
        step *= rate
    retention = 1.0
    if RETENTION:
        retention = tl.exp(tl.load(p_retention + i))
    write = tl.load(p_write + i * R + row, mask=row < R, other=0.0) * retention
    keep = tl.load(p_keep + i * E + block, mask=block < E, other=0.0)
    read = tl.load(p_read + i * E + block, mask=block < E, other=0.0)
    slot = tl.load(p_slot + i * E + block, mask=block < E, other=0.0)
    is_open = _is_open(position, block, E, UNLOCK) > 0
    if MOMENTUM:
        decay = tl.exp(tl.load(p_decay + i))
        step += tl.load(p_slot_write + i * R + row, mask=row < R, other=0.0) * decay
        tl.store(p_new_slot_write + i * R + row, step, mask=row < R)
        slot = tl.where(is_open, slot * decay, slot)
        added = slot
        if MUON:  # whose step size is outside of the momentum
            added *= rate
            step *= rate
        read = tl.where(is_open, read * retention + added, read)
    write += step
    keep = tl.where(is_open, keep * retention, keep)
    tl.store(p_new_write + i * R + row, write, mask=row < R)
    tl.store(p_new_keep + i * E + block, keep, mask=block < E)
    tl.store(p_new_read + i * E + block, read, mask=block < E)
    tl.store(p_new_slot + i * E + block, slot, mask=block < E)
    if MUON:
        is_done, p_block = place == C - 1, i * E + block
        orthogonal = tl.load(p_orthogonal + p_block, mask=block < E, other=0.0)
        orthogonal = tl.where(is_open, orthogonal * retention + rate, orthogonal)
        tl.store(p_new_orthogonal + p_block, tl.where(is_done, 0.0, orthogonal), mask=block < E)
        tl.store(p_end_keep + p_block, tl.where(is_done, keep, 1.0), mask=block < E)
        tl.store(p_end_orthogonal + p_block, tl.where(is_done, orthogonal, 0.0), mask=block < E)
    if i % H == 0:
        tl.store(p_new_position + i // H, position + 1)
    tl.debug_barrier()

    # What its query reads.
    if DEPTH == 2:
        q = tl.load(p_query + k_column, mask=k_column < K, other=0.0).to(tl.float32)
        x0 = load_rows(p_x0, row, k_column, K, row < R, K)
        scores = tl.sum(x0 * q[None, :], axis=1) * write
    y = tl.zeros([BV], tl.float32)
    inner = tl.zeros([BR], tl.float32)
    for i_u in range(tl.cdiv(U, BU)):
        unit = columns(i_u, BU)
        unit_open = _is_open(position, _block(unit, U, E), E, UNLOCK)
        w_keep = _of_blocks(p_new_keep + i * E, unit, U, E) * unit_open
        s_keep = _of_blocks(p_new_read + i * E, unit, U, E) * unit_open
        if DEPTH == 1:
            z = tl.load(p_query + unit, mask=unit < U, other=0.0).to(tl.float32)
        else:
            z = _seen(q, p_up, unit, 0, K, U, PARTS, BK) * w_keep
            if MOMENTUM:
                z += _seen(q, p_up_slot, unit, 0, K, U, PARTS, BK) * s_keep
            d0 = load_rows(p_d0, row, unit * PARTS, PARTS * U, row < R, PARTS * U)
            z = _value(z - tl.sum(d0 * scores[:, None], axis=0), ACTIVATION)
            if PARTS == 2:
                b = _seen(q, p_up, unit, 1, K, U, PARTS, BK) * w_keep
                if MOMENTUM:
                    b += _seen(q, p_up_slot, unit, 1, K, U, PARTS, BK) * s_keep
                d0 = load_rows(p_d0, row, unit * PARTS + 1, PARTS * U, row < R, PARTS * U)
                z *= b - tl.sum(d0 * scores[:, None], axis=0)
        x = load_rows(p_x1, row, unit, U, row < R, U)
        inner += tl.sum(x * z[None, :], axis=1)
        w = load_rows(p_down, v_column, unit, U, v_column < V, U)
        y += tl.sum(w * (z * w_keep)[None, :], axis=1)
        if MOMENTUM:
            s = load_rows(p_down_slot, v_column, unit, U, v_column < V, U)
            y += tl.sum(s * (z * s_keep)[None, :], axis=1)
    d1 = load_rows(p_d1, row, v_column, V, row < R, V)
    y -= tl.sum(d1 * (inner * write)[:, None], axis=0)
    if RESIDUAL:
        y += tl.load(p_query + v_column, mask=v_column < V, other=0.0).to(tl.float32)
    tl.store(p_y + i * V + v_column, y.to(p_y.dtype.element_ty), mask=v_column < V)

    # The next anchor.
    if place == C - 1:
        tl.debug_barrier()
        p_c, p_c_slot = p_new_write + i * R, p_new_slot_write + i * R
        for i_u in range(tl.cdiv(U, BU)):
            unit = columns(i_u, BU)
            w_keep = _of_blocks(p_new_keep + i * E, unit, U, E)
            s_read = _of_blocks(p_new_read + i * E, unit, U, E)
            s_keep = _of_blocks(p_new_slot + i * E, unit, U, E)
            if not MUON:
                w = load_rows(p_down, v_column, unit, U, v_column < V, U) * w_keep[None, :]
            if MOMENTUM:
                s = load_rows(p_down_slot, v_column, unit, U, v_column < V, U)
                if not MUON:
                    w += s * s_read[None, :]
                s = s * s_keep[None, :] - _outer(p_c_slot, p_d1, p_x1, v_column, unit, V, U, R, V, U)
                store_rows(p_down_slot, s, v_column, unit, U, v_column < V, U)
            if not MUON:
                w -= _outer(p_c, p_d1, p_x1, v_column, unit, V, U, R, V, U)
                store_rows(p_down, w, v_column, unit, U, v_column < V, U)
            if DEPTH == 2:
                for part in tl.static_range(PARTS):
                    at = unit * PARTS + part
                    if not MUON:
                        w = load_rows(p_up, at, k_column, K, unit < U, K) * w_keep[:, None]
                    if MOMENTUM:
                        s = load_rows(p_up_slot, at, k_column, K, unit < U, K)
                        if not MUON:
                            w += s * s_read[:, None]
                        s = s * s_keep[:, None]
                        s -= _outer(p_c_slot, p_d0, p_x0, at, k_column, PARTS * U, K, R, PARTS * U, K)
                        store_rows(p_up_slot, s, at, k_column, K, unit < U, K)
                    if not MUON:
                        w -= _outer(p_c, p_d0, p_x0, at, k_column, PARTS * U, K, R, PARTS * U, K)
                        store_rows(p_up, w, at, k_column, K, unit < U, K)
        tl.debug_barrier()
        tl.store(p_new_write + i * R + row, tl.zeros([BR], tl.float32), mask=row < R)
        fresh = tl.zeros([BE], tl.float32)
        tl.store(p_new_keep + i * E + block, fresh + 1, mask=block < E)
        tl.store(p_new_read + i * E + block, fresh, mask=block < E)
        if MOMENTUM:
            tl.store(p_new_slot_write + i * R + row, tl.zeros([BR], tl.float32), mask=row < R)
            fresh += 1
        tl.store(p_new_slot + i * E + block, fresh, mask=block < E)


# Host code -----------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What a walk takes, contiguous; see `walk.Tensors` and `chunk.Coefficients`. `units` are the inputs of a lone
    layer; `held` counts the rows that the first chunk holds, `done` the chunks that are completed, `[M]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    units: Tensor | None
    keep: Tensor
    momentum_read: Tensor
    write: Tensor
    keep_end: Tensor
    momentum_read_end: Tensor
    momentum_keep_end: Tensor
    momentum_write_end: Tensor
    up: Tensor | None
    down: Tensor
    up_slot: Tensor | None
    down_slot: Tensor | None
    held_x: Tensor | None
    held_d0: Tensor | None
    held_d1: Tensor | None
    is_open: Tensor | None
    held: Tensor | None
    done: Tensor | None

    def part(self, low: int, high: int) -> Inputs:
        """Of some chunks."""
        found: dict[str, Any] = {n: x[low:high] for n, x in self._asdict().items() if n in _SEQUENCES and x is not None}
        if low > 0:
            found |= dict.fromkeys(("held", "held_x", "held_d0", "held_d1"))
        return self._replace(**found, done=None if self.done is None else self.done - low)


_SEQUENCES = (*Inputs._fields[:11], "is_open")
_DIFFERENTIABLE = 18
"""The first of the inputs, that have gradients."""


class Rule(NamedTuple):
    """What a walk computes."""

    activation: str
    residual: bool
    l2: bool
    max_norm: float
    """0 for no bound."""


class Kept(NamedTuple):
    """What a backward needs, per chunk; the anchors with the one after the last."""

    up: Tensor | None
    down: Tensor
    up_slot: Tensor | None
    down_slot: Tensor | None
    x: Tensor
    d0: Tensor | None
    d1: Tensor
    norms: Tensor


def _sizes(inputs: Inputs, rule: Rule) -> dict[str, Any]:
    query, value = inputs.query, inputs.value
    width, value_dim, units = query.shape[3], value.shape[3], inputs.down.shape[2]
    parts = 1 if inputs.up is None else inputs.up.shape[1] // units
    return {
        "C": query.shape[2],
        "R": value.shape[2],
        "K": width,
        "V": value_dim,
        "U": units,
        "E": inputs.keep.shape[3],
        "DEPTH": 1 if inputs.up is None else 2,
        "PARTS": parts,
        "MOMENTUM": inputs.down_slot is not None,
        "ACTIVATION": rule.activation,
        "MAX_NORM": rule.max_norm,
        "BC": tile(query.shape[2], 64),
        "BR": tile(value.shape[2], 128),
        "BK": tile(width, 128),
        "BV": tile(value_dim, 128),
    }


def _memory(x: Inputs | Kept) -> dict[str, Any]:
    return {"p_up": x.up, "p_down": x.down, "p_up_slot": x.up_slot, "p_down_slot": x.down_slot}


def _room(x: Tensor | None, *shape: int) -> Tensor | None:
    return None if x is None else x.new_empty(*shape, *x.shape[-2:])


def forward(inputs: Inputs, rule: Rule, with_backward: bool) -> tuple[list[Tensor | None], Kept]:
    """Outputs, the last anchor, the running chunk's factors but for the first layer's inputs; and, `with_backward`,
    what it needs."""
    sizes = _sizes(inputs, rule)
    like, (count, rows, size, _) = inputs.value, inputs.query.shape
    held_rows, width = like.shape[2:]
    memory = [inputs.up, inputs.down, inputs.up_slot, inputs.down_slot]
    bytes_of_one = sum(4 * x.numel() for x in memory if x is not None)
    span = count if with_backward else min(count, max(1, ANCHOR_BYTES // bytes_of_one))
    anchors = [_room(x, span + 1, rows) for x in memory]
    for anchor, x in zip(anchors, memory, strict=True):
        if anchor is not None and x is not None:
            anchor[0].copy_(x)
    up, down, up_slot, down_slot = anchors
    assert down is not None
    outs = 0 if inputs.up is None else inputs.up.shape[1]
    factors: dict[str, Any] = {
        "x": like.new_empty(span, rows, held_rows, sizes["U"]) if outs else None,
        "d0": like.new_empty(span, rows, held_rows, outs) if outs else None,
        "d1": torch.empty_like(like[:span]),
        "norms": inputs.down.new_empty(span, rows, 3, held_rows),
    }
    run = [inputs.down.new_zeros(rows, held_rows, d) for d in (sizes["U"] if outs else 0, outs, width)]
    y = like.new_empty(count, rows, size, width)
    for low in range(0, count, span):
        high = min(count, low + span)
        some = inputs.part(low, high)
        kept = Kept(up, down, up_slot, down_slot, **{**factors, "x": factors["x"] if outs else some.units})
        _walk(some, kept, run, rule, sizes)
        _launch(
            read_kernel,
            (high - low, rows),
            p_query=some.query,
            p_key=some.key,
            p_write=some.write,
            p_keep=some.keep,
            p_read=some.momentum_read,
            **_memory(kept),
            p_x=kept.x,
            p_d0=kept.d0,
            p_d1=kept.d1,
            p_norms=kept.norms,
            p_y=y[low:high],
            M=rows,
            RESIDUAL=rule.residual,
            **sizes,
        )
        if high < count:
            for anchor in anchors:
                if anchor is not None:
                    anchor[0].copy_(anchor[high - low])
    ends = [None if anchor is None else anchor[high - low].clone() for anchor in anchors]
    return [y, *ends, *run], kept


def _walk(inputs: Inputs, kept: Kept, run: list[Tensor], rule: Rule, sizes: dict[str, Any]) -> None:
    count, rows = inputs.query.shape[:2]
    _launch(
        walk_kernel,
        (rows,),
        p_key=inputs.key,
        p_value=inputs.value,
        p_open=inputs.is_open,
        p_write=inputs.write,
        p_slot_write=inputs.momentum_write_end,
        p_keep=inputs.keep_end,
        p_read=inputs.momentum_read_end,
        p_slot=inputs.momentum_keep_end,
        p_held=inputs.held,
        p_held_x=inputs.held_x,
        p_held_d0=inputs.held_d0,
        p_held_d1=inputs.held_d1,
        p_done=inputs.done,
        **_memory(kept),
        p_x=kept.x,
        p_d0=kept.d0,
        p_d1=kept.d1,
        p_norms=kept.norms,
        p_run_x=run[0],
        p_run_d0=run[1],
        p_run_d1=run[2],
        count=count,
        M=rows,
        HELD=inputs.held is not None,
        ENDS=inputs.done is not None,
        RESIDUAL=rule.residual,
        L2=rule.l2,
        **sizes,
    )


def backward(inputs: Inputs, rule: Rule, kept: Kept, d_outputs: list[Tensor | None]) -> Inputs:
    """Gradients of the inputs, from those of outputs, last anchor and running factors."""
    sizes = _sizes(inputs, rule)
    count, rows = inputs.query.shape[:2]
    d_y, *d_ends, d_run_x, d_run_d0, d_run_d1 = d_outputs
    anchors = [kept.up, kept.down, kept.up_slot, kept.down_slot]
    d_anchors = [None if x is None else torch.empty_like(x) for x in anchors]
    for d_anchor, d_end in zip(d_anchors, d_ends, strict=True):
        if d_anchor is not None and d_end is not None:
            d_anchor[-1].copy_(d_end)
    d_up, d_down, d_up_slot, d_down_slot = d_anchors
    d_x, d_d1 = torch.empty_like(kept.x), torch.empty_like(kept.d1)
    d_d0 = None if kept.d0 is None else torch.empty_like(kept.d0)
    d_clip = kept.norms.new_empty(count, rows, sizes["R"])
    d_inputs = inputs._replace(
        **{n: torch.zeros_like(x) for n, x in inputs._asdict().items() if n in _ZEROED and x is not None},
        **{
            n: fresh(x)
            for n, x in inputs._asdict().items()
            if n in ("query", "value", "keep", "momentum_read", "write")
        },
        units=None if inputs.units is None else d_x,
    )
    shared: dict[str, Any] = {
        "p_key": inputs.key,
        "p_write": inputs.write,
        "p_d1": kept.d1,
        "p_norms": kept.norms,
        "M": rows,
    }
    layers: dict[str, Any] = {
        "p_up": kept.up,
        "p_up_slot": kept.up_slot,
        "p_d0": kept.d0,
        "p_dup": d_up,
        "p_dup_slot": d_up_slot,
    }
    last: dict[str, Any] = {
        "p_down": kept.down,
        "p_down_slot": kept.down_slot,
        "p_ddown": d_down,
        "p_ddown_slot": d_down_slot,
    }
    queries: dict[str, Any] = {
        "p_dy": d_y,
        "p_query": inputs.query,
        "p_keep": inputs.keep,
        "p_read": inputs.momentum_read,
        "p_inner": torch.empty_like(inputs.write),
        "p_dh": None if kept.up is None else kept.d1.new_empty(*inputs.query.shape[:3], kept.up.shape[2]),
        "p_dquery": d_inputs.query,
    }
    BE = 1 if sizes["E"] == 1 else tile(sizes["E"], 64)
    _launch(
        read_back_kernel,
        (count, rows),
        p_up=kept.up,
        p_up_slot=kept.up_slot,
        p_x=kept.x,
        p_d0=kept.d0,
        p_dkeep=d_inputs.keep,
        p_dread=d_inputs.momentum_read,
        p_dx=d_x,
        BE=BE,
        **last,
        **queries,
        **shared,
        **sizes,
    )
    _launch(
        query_back_kernel,
        (count, rows),
        p_dkey=d_inputs.key,
        p_dwrite=d_inputs.write,
        p_dd0=d_d0,
        p_dd1=d_d1,
        p_dclip=d_clip,
        **layers,
        **queries,
        **shared,
        **{name: size for name, size in sizes.items() if name != "ACTIVATION"},
    )
    _launch(
        walk_back_kernel,
        (rows,),
        p_open=inputs.is_open,
        p_slot_write=inputs.momentum_write_end,
        p_keep=inputs.keep_end,
        p_read=inputs.momentum_read_end,
        p_slot=inputs.momentum_keep_end,
        p_held=inputs.held,
        p_done=inputs.done,
        p_drun_x=d_run_x,
        p_drun_d0=d_run_d0,
        p_drun_d1=d_run_d1,
        p_dkey=d_inputs.key,
        p_dvalue=d_inputs.value,
        p_dwrite=d_inputs.write,
        p_dslot_write=d_inputs.momentum_write_end,
        p_dheld_x=d_inputs.held_x,
        p_dheld_d0=d_inputs.held_d0,
        p_dheld_d1=d_inputs.held_d1,
        p_x=kept.x,
        p_dx=d_x,
        p_dd0=d_d0,
        p_dd1=d_d1,
        p_dclip=d_clip,
        count=count,
        HELD=inputs.held is not None,
        ENDS=inputs.done is not None,
        L2=rule.l2,
        **layers,
        **last,
        **shared,
        **{name: size for name, size in sizes.items() if name != "BC"},
    )
    _launch(
        ends_back_kernel,
        (count, rows),
        p_done=inputs.done,
        **_memory(kept),
        p_dup=d_up,
        p_ddown=d_down,
        p_dup_slot=d_up_slot,
        p_ddown_slot=d_down_slot,
        p_dkeep=d_inputs.keep_end,
        p_dread=d_inputs.momentum_read_end,
        p_dslot=d_inputs.momentum_keep_end,
        M=rows,
        ENDS=inputs.done is not None,
        BE=BE,
        **{name: sizes[name] for name in ("K", "V", "U", "E", "DEPTH", "PARTS", "MOMENTUM", "BK", "BV")},
    )
    width = sizes["V"]
    if rule.residual:
        assert d_y is not None
        d_inputs.query[..., :width] += d_y
        if rule.l2:
            d_inputs.key[..., :width] -= d_inputs.value
    up, down, up_slot, down_slot = (None if x is None else x[0].clone() for x in d_anchors)
    assert down is not None
    return d_inputs._replace(up=up, down=down, up_slot=up_slot, down_slot=down_slot)


def one_token(*given: Any) -> tuple[Tensor, ...]:
    """Output `[M, 1, V]`, the new coefficients, the last tokens' keys and values, the new position, and under Muon the
    new `orthogonal_step` and what `step_kernel` says of the chunk's end. The factors are written to their rows, and
    over the anchor the next one, if the token completes a chunk: under Muon its momentum alone."""
    *tensors, unlock, activation, residual, l2, max_norm = given
    query, key, value, retention, decay, step, gate, position = contiguous(*tensors[:8])
    up, down, up_slot, down_slot, x0, x1, d0, d1 = tensors[8:16]
    *old, orthogonal = contiguous(*tensors[16:])
    write, keep, recent_key = old[0], old[2], old[5]
    new = [torch.empty_like(x) for x in (*old, position)]
    ends = [write.new_empty(0) if orthogonal is None else torch.empty_like(orthogonal) for _ in range(3)]
    recent, new_recent = (old[5:], new[5:7]) if recent_key.shape[1] else ([None] * 2, [None] * 2)
    y = torch.empty_like(value)
    (rows, held), units, blocks, halo = write.shape, down.shape[2], keep.shape[1], recent_key.shape[1]
    _launch(
        step_kernel,
        (rows,),
        p_query=query,
        p_key=key,
        p_value=value,
        p_retention=retention,
        p_decay=decay,
        p_step=step,
        p_gate=gate,
        p_position=position,
        p_up=up,
        p_down=down,
        p_up_slot=up_slot,
        p_down_slot=down_slot,
        p_x0=x0,
        p_x1=x1,
        p_d0=d0,
        p_d1=d1,
        p_write=write,
        p_slot_write=old[1],
        p_keep=keep,
        p_read=old[3],
        p_slot=old[4],
        p_recent_key=recent[0],
        p_recent_value=recent[1],
        p_orthogonal=orthogonal,
        p_new_write=new[0],
        p_new_slot_write=new[1],
        p_new_keep=new[2],
        p_new_read=new[3],
        p_new_slot=new[4],
        p_new_recent_key=new_recent[0],
        p_new_recent_value=new_recent[1],
        p_new_position=new[7],
        **dict(zip(("p_new_orthogonal", "p_end_keep", "p_end_orthogonal"), ends, strict=True)),
        p_y=y,
        H=rows // position.shape[0],
        C=held - halo,
        HALO=halo,
        WINDOW=0 if gate is None else gate.shape[1],
        K=key.shape[2],
        V=value.shape[2],
        U=units,
        E=blocks,
        UNLOCK=tuple(unlock) if blocks > 1 else None,
        DEPTH=1 if up is None else 2,
        PARTS=1 if up is None else up.shape[1] // units,
        MOMENTUM=down_slot is not None,
        MUON=orthogonal is not None,
        RETENTION=retention is not None,
        ACTIVATION=activation,
        RESIDUAL=residual,
        L2=l2,
        MAX_NORM=max_norm,
        BR=tile(held, 128),
        BH=tile(halo, 64),
        BK=tile(key.shape[2], 128),
        BV=tile(value.shape[2], 128),
        BE=triton.next_power_of_2(blocks),
    )
    return y, *new, *ends


_ZEROED = (
    "key", "keep_end", "momentum_read_end", "momentum_keep_end", "momentum_write_end", "held_x", "held_d0", "held_d1",
)  # fmt: skip
"""Gradients that a kernel writes in part."""


# What autograd and torch.compile see ---------------------------------------------------------------------------------

_GIVEN = ", ".join(f"Tensor{'?' if 'None' in str(t) else ''} {n}" for n, t in Inputs.__annotations__.items())
_RULE = "str activation, bool residual, bool l2, float max_norm"


def _tensors(found: Any, like: Tensor) -> tuple[Tensor, ...]:
    """An operator returns no `None`."""
    return tuple(like.new_empty(0) if x is None else x for x in found)


def _or_none(found: Any) -> list[Any]:
    return [None if x is None or x.numel() == 0 else x for x in found]


def _forward(*given: Any) -> tuple[Tensor, ...]:
    *tensors, activation, residual, l2, max_norm, with_backward = given
    inputs = Inputs(*contiguous(*tensors))
    outputs, kept = forward(inputs, Rule(activation, residual, l2, max_norm), with_backward)
    kept = kept._replace(x=None if inputs.up is None else kept.x)  # type: ignore[arg-type]
    return _tensors([*outputs, *(kept if with_backward else [None] * len(kept))], inputs.down)


def _fake(*given: Any) -> tuple[Tensor, ...]:
    inputs, with_backward = Inputs(*given[: len(Inputs._fields)]), given[-1]
    query, value, down, up = inputs.query, inputs.value, inputs.down, inputs.up
    (count, rows), held = query.shape[:2], value.shape[2]
    memory = (up, down, inputs.up_slot, inputs.down_slot)
    units, outs = (0, 0) if up is None else (down.shape[2], up.shape[1])
    found = [value.new_empty(*query.shape[:3], value.shape[3])]
    found += [down.new_empty(0) if x is None else fresh(x) for x in memory]
    found += [down.new_empty(rows, held, d) for d in (units, outs, value.shape[3])]
    if not with_backward:
        return *found, *(down.new_empty(0) for _ in Kept._fields)
    found += [down.new_empty(0) if x is None else x.new_empty(count + 1, *x.shape) for x in memory]
    found += [value.new_empty(count, rows, held, d) if d else down.new_empty(0) for d in (units, outs, value.shape[3])]
    return *found, down.new_empty(count, rows, 3, held)


def _backward(*given: Any) -> tuple[Tensor, ...]:
    tensors, rest = given[: len(Inputs._fields)], given[len(Inputs._fields) :]
    (*rule, kept, d_outputs) = rest
    inputs = Inputs(*contiguous(*tensors))
    kept = Kept(*_or_none(kept))
    if inputs.units is not None:
        kept = kept._replace(x=inputs.units)
    d_inputs = backward(inputs, Rule(*rule), kept, contiguous(*d_outputs))
    return _tensors(d_inputs[:_DIFFERENTIABLE], inputs.down)


_walked = torch.library.custom_op(
    "memzoo::deep_memory",
    _forward,
    mutates_args=(),
    schema=f"({_GIVEN}, {_RULE}, bool with_backward) -> ({', '.join(['Tensor'] * 16)})",
)
_walked.register_fake(_fake)
_gradient = torch.library.custom_op(
    "memzoo::deep_memory_backward",
    _backward,
    mutates_args=(),
    schema=f"({_GIVEN}, {_RULE}, Tensor[] kept, Tensor[] d_outputs) -> ({', '.join(['Tensor'] * _DIFFERENTIABLE)})",
)
_gradient.register_fake(lambda *given: gradients_like(given[:_DIFFERENTIABLE], given[Inputs._fields.index("down")]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, activation, residual, l2, max_norm, _ = inputs
    ctx.rule = activation, residual, l2, max_norm
    ctx.save_for_backward(*tensors, *output[8:])
    ctx.shapes = [x.shape for x in output[:8]]
    ctx.set_materialize_grads(False)


def _pull_back(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    tensors, kept = saved[: len(Inputs._fields)], saved[len(Inputs._fields) :]
    down = tensors[Inputs._fields.index("down")]
    given = [down.new_zeros(shape) if d is None else d for d, shape in zip(d_outputs[:8], ctx.shapes, strict=True)]
    gradients = _gradient(*tensors, *ctx.rule, list(kept), given)
    found = wanted(tensors[:_DIFFERENTIABLE], gradients)
    return *found, *[None] * (len(tensors) - _DIFFERENTIABLE), *[None] * 5


_walked.register_autograd(_pull_back, setup_context=_save)


def _rule(network: Network) -> Rule:
    bound = network.max_gradient_norm
    return Rule(network.activation, network.residual, network.objective == "l2", 0.0 if bound == math.inf else bound)


def _walk_of(network: Network, ends: Ends, tensors: Tensors, differentiable: bool) -> tuple[Tensor, ...]:
    """`walk.walk` by the operator; under Muon by torch, what of a single token its kernel does not compute."""
    if network.newton_schulz_steps is not None:
        wide = tensors.memory[0].dtype
        sequences = {name: getattr(tensors, name).to(wide) for name in ("query", "key", "value")}
        return chunked._walk(network, ends, tensors._replace(**sequences), differentiable)
    depth, like, c = network.depth, tensors.value.dtype, tensors.coefficients
    weights, slots = tensors.memory[:depth], tensors.memory[depth:]
    key, units, held = tensors.key, None, ends.held
    rows = key.shape[2]
    if depth == 1 and tensors.is_open is not None:
        units = network.scale(key, tensors.is_open, 0)
    elif depth == 1:
        units = key
    held_factors: tuple[Tensor, ...] = ()
    if held is not None:
        held_factors = tensors.held
        if ends.halo > 0:
            held = torch.where(held > 0, ends.halo + held, 0)
        is_held = (torch.arange(rows, device=key.device) < held[:, None])[..., None]
        # Its first inputs are the keys of the chunk's first slots, which hold no new token.
        if depth == 2:
            key = torch.cat([torch.where(is_held, held_factors[0], key[0])[None], key[1:]])
        else:
            assert units is not None
            units = torch.cat([torch.where(is_held, held_factors[0], units[0])[None], units[1:]])
    outputs = _walked(
        tensors.query.to(like),
        key.to(like),
        tensors.value,
        None if units is None else units.to(like),
        c.keep,
        c.momentum_read,
        c.write,
        c.keep_end,
        c.momentum_read_end,
        c.momentum_keep_end,
        c.momentum_write_end,
        weights[0] if depth == 2 else None,
        weights[-1],
        slots[0] if depth == 2 and slots else None,
        slots[-1] if slots else None,
        held_factors[1] if held_factors and depth == 2 else None,
        held_factors[2] if held_factors and depth == 2 else None,
        held_factors[-1] if held_factors else None,
        tensors.is_open if depth == 2 else None,
        held,
        ends.done,
        *_rule(network),
        differentiable,
    )
    y, up, down, up_slot, down_slot, run_x, run_d0, run_d1, *_ = outputs
    inputs = key if units is None else units
    first = torch.zeros_like(inputs[0])
    if ends.done is not None:  # the inputs of the first layer in the running chunk
        running = ends.done.clamp(max=inputs.shape[0] - 1)
        first = inputs[running, torch.arange(inputs.shape[1], device=key.device)]
        first = torch.where((ends.done < inputs.shape[0])[:, None, None], first, 0)
    first = first.to(run_d1.dtype)
    if depth == 1:
        return (y, down, *([down_slot] if slots else []), first, run_d1)
    return (y, up, down, *([up_slot, down_slot] if slots else []), first, run_x, run_d0, run_d1)


_one = torch.library.custom_op(
    "memzoo::deep_memory_step",
    one_token,
    mutates_args=("up", "down", "up_slot", "down_slot", "x0", "x1", "d0", "d1"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? log_retention, Tensor? log_momentum, Tensor step_size, "
    "Tensor? window_gate, Tensor position, Tensor(a!)? up, Tensor(b!) down, Tensor(c!)? up_slot, "
    "Tensor(d!)? down_slot, Tensor(e!)? x0, Tensor(f!) x1, Tensor(g!)? d0, Tensor(h!) d1, Tensor write, "
    "Tensor momentum_write, Tensor weight_keep, Tensor momentum_read, Tensor momentum_keep, Tensor recent_keys, "
    f"Tensor recent_values, Tensor? orthogonal_step, int[] unlock, {_RULE}) -> ({', '.join(['Tensor'] * 12)})",
)


@_one.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    orthogonal = others[20]
    ends = (others[13].new_empty(0) if orthogonal is None else fresh(orthogonal) for _ in range(3))
    return *(fresh(x) for x in (value, *others[13:20], others[4])), *ends


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
    """`chunked.step` by one kernel, which asks the device for nothing: a step can be part of a CUDA graph.

    It writes into more than `chunked.step` does: where the token completes a chunk, over the anchor. Under Muon once a
    chunk a kernel for each layer follows, which looks whether the token does.
    """
    batch, heads, _ = state.write.shape
    depth = network.depth

    def own(tensors: tuple[Tensor, ...]) -> list[Tensor]:
        return [chunked.writable(x).flatten(0, 1).contiguous() for x in tensors]

    weights, slots, inputs, deltas = (own(x) for x in (state.weights, state.momentum, state.inputs, state.deltas))
    old = (
        *(state.write, state.momentum_write, state.weight_keep, state.momentum_read, state.momentum_keep),
        *(state.recent_keys, state.recent_values),
    )
    muon = network.newton_schulz_steps
    y, *new, position, orthogonal, end_keep, end_orthogonal = _one(
        *(x.reshape(batch * heads, 1, -1) for x in (query, key, value)),
        *(None if x is None else x.flatten() for x in (log_retention, log_momentum, step_size)),
        None if window_gate is None else window_gate.reshape(batch * heads, -1),
        state.position,
        weights[0] if depth == 2 else None,
        weights[-1],
        slots[0] if depth == 2 and slots else None,
        slots[-1] if slots else None,
        inputs[0] if depth == 2 else None,
        inputs[-1],
        deltas[0] if depth == 2 else None,
        deltas[-1],
        *(x.flatten(0, 1) for x in old),
        None if muon is None else state.orthogonal_step.flatten(0, 1),
        list(unlock),
        *_rule(network),
    )
    if muon is not None:
        for layer, (weight, slot) in enumerate(zip(weights, slots, strict=True)):
            ends = (network.per_weight(x, layer).expand_as(weight) for x in (end_keep, end_orthogonal))
            w, x, keep, rate = (network.matrices(each, layer) for each in (weight, slot, *ends))
            newton_schulz.advance(w, x, keep, rate, muon)
    write, momentum_write, *rest = (x.view_as(before) for x, before in zip(new, old, strict=True))
    of_rows = (tuple(x.unflatten(0, (batch, heads)) for x in tensors) for tensors in (weights, slots, inputs, deltas))
    names = ("weight_keep", "momentum_read", "momentum_keep", "recent_keys", "recent_values")
    changed: dict[str, Any] = dict(zip(("weights", "momentum", "inputs", "deltas"), of_rows, strict=True))
    changed |= dict(zip(names, rest, strict=True))
    if not slots:
        momentum_write = state.momentum_write
    if muon is not None:
        changed["orthogonal_step"] = orthogonal.view_as(state.orthogonal_step)
    state = state._replace(write=write, momentum_write=momentum_write, **changed, position=position)
    return y.reshape(batch, 1, heads, -1), state


@mixed_precision
def deep_memory(*inputs: Any, **options: Any) -> tuple[Tensor, DeepMemoryState]:
    """See `memzoo.kernels.deep_memory.deep_memory`; matrix products take factors in the dtype of the values."""
    return chunked.computed(_walk_of, step, *inputs, **options)
