"""The deep memory of Titans: a small network per head, trained on the tokens as they are read.

The memory `M` is a network without biases, `x_0 = k`, `h_l = W_l x_{l-1}`, `x_l = act(h_l)` for `l < L`, `M(k) = h_L
(+ k)`. Token t (counted from 1 in each sequence) writes with the gradient at its anchor, the weights at the start of
its chunk:

    u_t = d/dM 1/2 |M(k_t) - v_t|^2   at M = M_anchor(t),   anchor(t) = C floor((t-1)/C)
    S_t = momentum_t S_{t-1} - step_size_t u_t
    M_t = retention_t M_{t-1} + S_t
    y_t = M_t(q_t)

Source: Titans (arXiv 2501.00663), Eq 8-18. Capacity blocks: Proteus (arXiv 2608.16844), Eq 7-13; block e opens at a
fixed position of the sequence, and until then its coordinates neither read nor write nor decay.
Deviations: the inner loss carries 1/2 (Titans' App. C, not its body); gates are one scalar per head and token; blocks
are groups of hidden units (of key coordinates when `L = 1`), since a prefix of the flattened weights would lock whole
layers; `u_t` can be bounded in norm, without which a memory of two layers or more can diverge.

`M_t` is never written out inside a chunk. The state holds it in factored form: the anchor, and for each token of the
running chunk the layer inputs `x_{l-1}` and deltas `d_l` of its rank-one gradients `u_t = d_l x_{l-1}^T`, with

    M_t = weight_keep M_anchor + momentum_read S_anchor - sum_i write_i          d_i x_i^T
    S_t =                        momentum_keep S_anchor - sum_i momentum_write_i d_i x_i^T

The chunk size is part of the model, not a tile size: every backend and every cut of a sequence gives the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from memzoo.kernels import registry
from memzoo.kernels.registry import Backend, Op, Problem, cast, select

OP = Op(
    name="deep_memory",
    backends=(
        Backend("chunked", "memzoo.kernels.deep_memory.chunked:deep_memory"),
        Backend("reference", "memzoo.kernels.deep_memory.reference:deep_memory"),
    ),
)
MAX_DEPTH = 4
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "tanh")


class DeepMemoryState(NamedTuple):
    """A memory between two tokens, one per row and head. Every tensor has the batch first; float32 or wider.

    `inputs` and `deltas` are empty in a state that has read no token yet.
    """

    weights: tuple[Tensor, ...]
    """`W_l` at the anchor, `[B, H, out_l, in_l]`."""
    momentum: tuple[Tensor, ...]
    """`S_l` at the anchor, shaped like the weights; empty when momentum is off."""
    inputs: tuple[Tensor, ...]
    """`x_{l-1}` of the running chunk's tokens, `[B, H, C, in_l]`."""
    deltas: tuple[Tensor, ...]
    """`d_l` of the running chunk's tokens, `[B, H, C, out_l]`."""
    write: Tensor
    """Coefficient of each token's gradient in `M_t`, `[B, H, C]`; 0 for tokens to come."""
    momentum_write: Tensor
    """Coefficient of each token's gradient in `S_t`, `[B, H, C]`."""
    weight_keep: Tensor
    """Coefficient of the anchor's weights in `M_t`, `[B, H, E]`, per capacity block."""
    momentum_read: Tensor
    """Coefficient of the anchor's momentum in `M_t`, `[B, H, E]`."""
    momentum_keep: Tensor
    """Coefficient of the anchor's momentum in `S_t`, `[B, H, E]`."""
    position: Tensor
    """Tokens read, `[B]`, int64. The running chunk holds `position % C` of them."""


def initial_state(
    weights: Sequence[Tensor], batch: int, *, chunk_size: int, blocks: int = 1, momentum: bool = True
) -> DeepMemoryState:
    """The state before the first token.

    Args:
        weights: initial weights `[H, out_l, in_l]` (shared by the rows) or `[B, H, out_l, in_l]`, float32 or float64.
        batch: rows B.
        chunk_size: C.
        blocks: capacity blocks E.
        momentum: whether the memory has momentum; it starts at zero.
    """
    rows = tuple(w if w.ndim == 4 else w.expand(batch, *w.shape) for w in weights)
    like, heads = rows[0], rows[0].shape[1]
    return DeepMemoryState(
        weights=rows,
        momentum=tuple(torch.zeros_like(w) for w in rows) if momentum else (),
        inputs=(),
        deltas=(),
        write=like.new_zeros(batch, heads, chunk_size),
        momentum_write=like.new_zeros(batch, heads, chunk_size),
        weight_keep=like.new_ones(batch, heads, blocks),
        momentum_read=like.new_zeros(batch, heads, blocks),
        momentum_keep=like.new_ones(batch, heads, blocks),
        position=torch.zeros(batch, dtype=torch.int64, device=like.device),
    )


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
    activation: str = "gelu",
    residual: bool = True,
    unlock: Sequence[int] = (0,),
    max_gradient_norm: float = math.inf,
    lengths: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, DeepMemoryState]:
    """Read T more tokens into the memory and answer a query after each.

    Args:
        query, key: `[B, T, H, K]`.
        value: `[B, T, H, V]`; `V = K` when `residual`.
        log_retention: log of the keep factor, `[B, T, H]`, in `[-inf, 0]`; `None` keeps everything.
        log_momentum: log of the momentum decay, `[B, T, H]`, in `[-inf, 0]`; `None` for plain gradient descent.
        step_size: inner step size, `[B, T, H]`, at least 0.
        state: from `initial_state` or from an earlier call. Without gradients a call with one token may write its row
            into the state's buffers: copy a state from which two texts shall go on.
        chunk_size: C, at least 1.
        activation: one of `ACTIVATIONS` (all map 0 to 0).
        residual: whether `M(x)` adds its input.
        unlock: for each of the E capacity blocks, the number of tokens before it opens; ascending, the first is 0.
        max_gradient_norm: bound of |u_t|, over all layers; a longer u_t is shortened to it.
        lengths: real tokens per row `[B]`, int64, for right-padded input; all `T` when `None`. Outputs beyond a row's
            length are unspecified.
        backend: `"auto"`, `"chunked"` or `"reference"`.

    Returns:
        `y` `[B, T, H, V]` in the dtype of `query`, and the new state. Inputs are computed in the state's dtype.

    Raises:
        ValueError: shapes, options or a state that do not fit.

    Cost, per token and head, P weights in the memory, F hidden units: about 11 P + 6 C F multiply-adds; the state
    holds 2 P floats and C rows of factors. A single token costs about 3 P + 3 C F and writes one row.

    Example:
        >>> state = initial_state([torch.randn(4, 32, 8), torch.randn(4, 8, 32)], batch=2, chunk_size=16)
        >>> q, k, v = torch.randn(3, 2, 50, 4, 8)
        >>> rate = torch.rand(2, 50, 4)
        >>> y, state = deep_memory(q, k, v, -rate, -rate, rate / 16, state, chunk_size=16)
    """
    _check(query, key, value, log_retention, log_momentum, step_size, state, chunk_size, activation, residual, unlock)
    if not max_gradient_norm > 0:
        raise ValueError(f"deep_memory: max_gradient_norm: expected above 0, got {max_gradient_norm}.")
    problem = Problem(
        device=query.device.type,
        dtype=str(query.dtype),
        sizes={
            "B": query.shape[0],
            "T": query.shape[1],
            "H": query.shape[2],
            "K": query.shape[3],
            "V": value.shape[3],
            "C": chunk_size,
            "L": len(state.weights),
            "E": len(unlock),
        },
        options={"activation": activation, "residual": residual, "momentum": log_momentum is not None},
    )
    compute = select(OP, problem, backend)
    dtype = state.weights[0].dtype
    # Gates and states must not be rounded by autocast: the products of a chunk's gates live in float32 or wider.
    with torch.autocast(query.device.type, enabled=False):
        output, state = compute(
            cast(query, dtype),
            cast(key, dtype),
            cast(value, dtype),
            None if log_retention is None else cast(log_retention, dtype),
            None if log_momentum is None else cast(log_momentum, dtype),
            cast(step_size, dtype),
            state,
            chunk_size=chunk_size,
            activation=activation,
            residual=residual,
            unlock=tuple(unlock),
            max_gradient_norm=max_gradient_norm,
            lengths=lengths,
        )
    return cast(output, query.dtype), state


def block_of_unit(units: int, blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """The capacity block of each unit, `[units]`, int64: equal contiguous blocks, the last takes the remainder."""
    return torch.div(torch.arange(units, device=device), units // blocks, rounding_mode="floor").clamp(max=blocks - 1)


def block_of_weight(layer: int, state: DeepMemoryState) -> Tensor:
    """The capacity block of each weight of a layer, `[out, in]` or broadcastable to it.

    A weight between two hidden units is open once both are. The key coordinates of a one-layer memory count as hidden.
    """
    depth, blocks = len(state.weights), state.weight_keep.shape[-1]
    weight = state.weights[layer]
    out, inner = weight.shape[-2:]
    block = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    if layer < depth - 1:
        block = torch.maximum(block, block_of_unit(out, blocks, weight.device)[:, None])
    if layer > 0 or depth == 1:
        block = torch.maximum(block, block_of_unit(inner, blocks, weight.device)[None, :])
    return block


def materialize(state: DeepMemoryState) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The weights `M_t` and momentum `S_t` after the last token, each `[B, H, out_l, in_l]`."""
    weights, momentum = [], []
    for layer, anchor in enumerate(state.weights):
        block = block_of_weight(layer, state)
        weight = state.weight_keep[..., block] * anchor
        if state.momentum:
            weight = weight + state.momentum_read[..., block] * state.momentum[layer]
            momentum.append(state.momentum_keep[..., block] * state.momentum[layer])
        if state.inputs:
            rows, deltas = state.inputs[layer], state.deltas[layer]
            weight = weight - (deltas * state.write[..., None]).mT @ rows
            if state.momentum:
                momentum[layer] = momentum[layer] - (deltas * state.momentum_write[..., None]).mT @ rows
        weights.append(weight)
    return tuple(weights), tuple(momentum)


def make_inputs(
    batch: int = 2,
    tokens: int = 13,
    heads: int = 3,
    key_dim: int = 8,
    value_dim: int | None = None,
    hidden: Sequence[int] = (16,),
    chunk_size: int = 4,
    blocks: int = 1,
    momentum: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, object]:
    """Random arguments of `deep_memory` for tests and benchmarks: unit keys, lively gates and initial weights."""
    generator = torch.Generator().manual_seed(seed)
    value_dim = key_dim if value_dim is None else value_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    widths = [key_dim, *hidden, value_dim]
    weights = [draw(heads, widths[i + 1], widths[i]) / widths[i] ** 0.5 for i in range(len(widths) - 1)]
    gates = (batch, tokens, heads)
    return {
        "query": torch.nn.functional.normalize(draw(batch, tokens, heads, key_dim), dim=-1),
        "key": torch.nn.functional.normalize(draw(batch, tokens, heads, key_dim), dim=-1),
        "value": draw(batch, tokens, heads, value_dim),
        "log_retention": torch.nn.functional.logsigmoid(draw(*gates) + 2),
        "log_momentum": torch.nn.functional.logsigmoid(draw(*gates)) if momentum else None,
        "step_size": torch.sigmoid(draw(*gates)) / (4 + chunk_size),
        "state": initial_state(weights, batch, chunk_size=chunk_size, blocks=blocks, momentum=momentum),
    }


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    log_momentum: Tensor | None,
    step_size: Tensor,
    state: DeepMemoryState,
    chunk_size: int,
    activation: str,
    residual: bool,
    unlock: Sequence[int],
) -> None:
    expect = partial(registry.expect, OP)
    expect(query.ndim == 4 and query.shape[1] > 0, "query", "[B, T, H, K] with T >= 1", query.shape)
    expect(key.shape == query.shape, "key", query.shape, key.shape)
    batch, _, heads, key_dim = query.shape
    depth = len(state.weights)
    expect(1 <= depth <= MAX_DEPTH, "layers of the memory", f"1 to {MAX_DEPTH}", depth)
    value_dim = state.weights[-1].shape[-2]
    expect(value.shape == (*query.shape[:3], value_dim), "value", (*query.shape[:3], value_dim), value.shape)
    for name, gate in (("log_retention", log_retention), ("log_momentum", log_momentum), ("step_size", step_size)):
        if gate is not None:
            expect(gate.shape == query.shape[:3], name, query.shape[:3], gate.shape)
    first = state.weights[0]
    fits = first.shape[:2] == (batch, heads) and first.shape[-1] == key_dim
    expect(fits, "state of the first layer", (batch, heads, "out", key_dim), first.shape)
    expect(first.dtype in (torch.float32, torch.float64), "dtype of the state", "float32 or float64", first.dtype)
    expect(chunk_size >= 1, "chunk_size", "at least 1", chunk_size)
    expect(state.write.shape[-1] == chunk_size, "chunk size of the state", chunk_size, state.write.shape[-1])
    expect(activation in ACTIVATIONS, "activation", f"one of {ACTIVATIONS}", activation)
    expect(not residual or value_dim == key_dim, "value width of a residual memory", key_dim, value_dim)
    count, is_given = len(state.momentum), log_momentum is not None
    expect((count > 0) == is_given, "momentum in the state", depth if is_given else "none", count)
    blocks = state.weight_keep.shape[-1]
    fits = len(unlock) == blocks and unlock[0] == 0 and all(a <= b for a, b in pairwise(unlock))
    expect(fits, "unlock", f"{blocks} ascending positions from 0", unlock)
    units = min([key_dim] if depth == 1 else [w.shape[-2] for w in state.weights[:-1]])
    expect(blocks <= units, "capacity blocks", f"at most {units}, the units of the narrowest layer", blocks)
