"""The deep memory of Titans and ATLAS: a small network per head, trained on the tokens as they are read.

The memory `M` is a network without biases, `x_0 = k`, `h_l = W_l x_{l-1}`, `x_l = act(h_l)` for `l < L`, `M(k) = h_L
(+ the first V coordinates of k)`. Token t (counted from 1 in each sequence) writes with the gradient at its anchor, the
weights at the start of its chunk:

    u_i = d/dM loss(M; k_i, v_i)   at M = M_anchor(t),   anchor(t) = C floor((t-1)/C),   loss = 1/2 |M(k) - v|^2
    S_t = momentum_t S_{t-1} - step_size_t sum_{j<c} window_gate_{t,j} u_{t-j}
    M_t = retention_t M_{t-1} + S_t
    y_t = M_t(q_t)

Source: Titans (arXiv 2501.00663), Eq 8-18; ATLAS (arXiv 2505.23735) for the rest. The window of the last c tokens is
its Omega rule (Eq 9, 10, 16); c = 1 without a gate is Titans. The loss may be `-<M(k), v>` (Eq 19). A gated memory has
two layers, the first with two rows per hidden unit: `x_1 = act(h_1) * h_1'` (Eq 43). With Muon (Eq 32) the step size is
outside of the momentum, which Newton-Schulz iterations make nearly orthogonal, each layer's matrix by itself:

    S_t = momentum_t S_{t-1} - sum_{j<c} window_gate_{t,j} u_{t-j},    M_t = retention_t M_{t-1} + step_size_t NS(S_t)

Capacity blocks: Proteus (arXiv 2608.16844), Eq 7-13; block e opens at a fixed position of the sequence, and until then
its coordinates neither read nor write nor decay.
Deviations: the inner loss carries 1/2 (Titans' App. C, not its body); gates are one scalar per head, token and lag;
blocks are groups of hidden units (of key coordinates when `L = 1`), since a prefix of the flattened weights would lock
whole layers; `u_t` can be bounded in norm, without which a memory of two layers or more can diverge. A window reaches
back across its chunk's start (the printed mask ends there) where the state has room for it; the gradient of a token is
taken with the blocks that were open at the token, or, before the chunk, at the chunk's first. `Muon.every` says more.

Without per-token Muon `M_t` is never written out inside a chunk. The state holds it in factored form: the anchor, and
for each token of the running chunk (and the c - 1 before it) the layer inputs `x_{l-1}` and deltas `d_l` of its
rank-one gradients `u_t = d_l x_{l-1}^T`, with

    M_t = weight_keep M_anchor + momentum_read S_anchor - sum_i write_i          d_i x_i^T
    S_t =                        momentum_keep S_anchor - sum_i momentum_write_i d_i x_i^T

The chunk size is part of the model, not a tile size: every backend and every cut of a sequence gives the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memzoo.kernels import registry
from memzoo.kernels.registry import Backend, Op, Problem, as_given, cast, caster, chosen, select, triton_refuses


def _triton_refuses(problem: Problem) -> str | None:
    sizes, options = problem.sizes, problem.options
    muon = options["muon"]
    if muon is not None and sizes["T"] > 1:
        return f"takes plain gradient steps, of Muon's those of one token at a time, got {sizes['T']}"
    if sizes["L"] > 2:
        return f"computes memories of one or two layers, got {sizes['L']}"
    if sizes["C"] > 64 or sizes["R"] > 128:
        return f"holds chunks of up to 64 tokens on chip, and 128 with a window's, got {sizes['C']} and {sizes['R']}"
    width = sizes["V"] if sizes["L"] == 1 else max(sizes["K"], sizes["V"])
    if width > 128 or sizes["E"] > 64:
        return f"holds heads up to 128 wide and 64 capacity blocks, got {width} and {sizes['E']}"
    return triton_refuses(problem)


OP = Op(
    name="deep_memory",
    backends=(
        Backend("triton", "memzoo.kernels.deep_memory.triton:deep_memory", _triton_refuses),
        Backend("chunked", "memzoo.kernels.deep_memory.chunked:deep_memory"),
        Backend("reference", "memzoo.kernels.deep_memory.reference:deep_memory"),
    ),
)
MAX_DEPTH = 4
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "tanh")
OBJECTIVES = ("l2", "dot")
MUON_EVERY = ("token", "chunk")


class Muon(NamedTuple):
    """The inner optimizer of ATLAS."""

    steps: int = 5
    """Newton-Schulz iterations; 0 takes the momentum as it is."""
    every: str = "token"
    """`"token"`: each token's momentum is made orthogonal, and `M_t` is written out for each token. `"chunk"`, not in
    the paper: only the momentum at the chunk's end is, and the next anchor is what the tokens would have made with it,
    `M_C = (prod a) M_0 + (sum_n (prod_{i>n} a_i) step_size_n) NS(S_C)`; inside the chunk tokens read `M_t = a_t
    M_{t-1} + step_size_t S_t`."""


class DeepMemoryState(NamedTuple):
    """A memory between two tokens, one per row and head. Every tensor has the batch first; float32 or wider.

    `inputs`, `deltas` and `current` are empty in a state that has read no token yet. R = c - 1 + C rows, or C where a
    window ends at its chunk's start; the first of R - C belong to the tokens before the running chunk.
    """

    weights: tuple[Tensor, ...]
    """`W_l` at the anchor, `[B, H, out_l, in_l]`."""
    momentum: tuple[Tensor, ...]
    """`S_l` at the anchor, shaped like the weights; empty when momentum is off."""
    inputs: tuple[Tensor, ...]
    """`x_{l-1}` of the running chunk's tokens, `[B, H, R, in_l]`."""
    deltas: tuple[Tensor, ...]
    """`d_l` of the running chunk's tokens, `[B, H, R, out_l]`."""
    write: Tensor
    """Coefficient of each token's gradient in `M_t`, `[B, H, R]`; 0 for tokens to come."""
    momentum_write: Tensor
    """Coefficient of each token's gradient in `S_t`, `[B, H, R]`; 0 when momentum is off."""
    weight_keep: Tensor
    """Coefficient of the anchor's weights in `M_t`, `[B, H, E]`, per capacity block."""
    momentum_read: Tensor
    """Coefficient of the anchor's momentum in `M_t`, `[B, H, E]`."""
    momentum_keep: Tensor
    """Coefficient of the anchor's momentum in `S_t`, `[B, H, E]`; 0 when momentum is off."""
    orthogonal_step: Tensor
    """Coefficient of `NS(S_C)` in the next anchor, were it now, `[B, H, E]`; 0 but for Muon once a chunk."""
    current: tuple[Tensor, ...]
    """`M_t` under per-token Muon, shaped like the weights; `write`, `weight_keep`, `momentum_read` are 0 then."""
    recent_keys: Tensor
    """Keys of the last R - C tokens read, `[B, H, R - C, K]`; 0 before the first token, which then writes nothing."""
    recent_values: Tensor
    """Their values, `[B, H, R - C, V]`."""
    position: Tensor
    """Tokens read, `[B]`, int64. The running chunk holds `position % C` of them."""

    @property
    def halo(self) -> int:
        """Rows of tokens before the running chunk."""
        return self.recent_keys.shape[2]


def initial_state(
    weights: Sequence[Tensor], batch: int, *, chunk_size: int, blocks: int = 1, momentum: bool = True, halo: int = 0
) -> DeepMemoryState:
    """The state before the first token.

    Args:
        weights: initial weights `[H, out_l, in_l]` (shared by the rows) or `[B, H, out_l, in_l]`, float32 or float64.
        batch: rows B.
        chunk_size: C.
        blocks: capacity blocks E.
        momentum: whether the memory has momentum; it starts at zero.
        halo: tokens before a chunk that its tokens may write again: c - 1, or 0 for a window that ends at the chunk's
            start.
    """
    rows = tuple(w if w.ndim == 4 else w.expand(batch, *w.shape) for w in weights)
    like, heads = rows[0], rows[0].shape[1]
    return DeepMemoryState(
        weights=rows,
        momentum=tuple(torch.zeros_like(w) for w in rows) if momentum else (),
        inputs=(),
        deltas=(),
        write=like.new_zeros(batch, heads, halo + chunk_size),
        momentum_write=like.new_zeros(batch, heads, halo + chunk_size),
        weight_keep=like.new_ones(batch, heads, blocks),
        momentum_read=like.new_zeros(batch, heads, blocks),
        momentum_keep=like.new_full((batch, heads, blocks), float(momentum)),
        orthogonal_step=like.new_zeros(batch, heads, blocks),
        current=(),
        recent_keys=like.new_zeros(batch, heads, halo, like.shape[3]),
        recent_values=like.new_zeros(batch, heads, halo, rows[-1].shape[2]),
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
    window_gate: Tensor | None = None,
    activation: str = "gelu",
    residual: bool = True,
    objective: str = "l2",
    muon: Muon | None = None,
    unlock: Sequence[int] = (0,),
    max_gradient_norm: float = math.inf,
    lengths: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, DeepMemoryState]:
    """Read T more tokens into the memory and answer a query after each.

    Args:
        query, key: `[B, T, H, K]`.
        value: `[B, T, H, V]`; `V <= K` when `residual`.
        log_retention: log of the keep factor, `[B, T, H]`, in `[-inf, 0]`; `None` keeps everything.
        log_momentum: log of the momentum decay, `[B, T, H]`, in `[-inf, 0]`; `None` for plain gradient descent.
        step_size: inner step size, `[B, T, H]`, at least 0.
        state: from `initial_state` or from an earlier call. Without gradients a call with one token may write into the
            state's buffers its row and, by Triton, `current` and where it completes a chunk the next anchor: go on from
            the state that is returned, and copy one from which two texts shall go on.
        chunk_size: C, at least 1.
        window_gate: weight of the gradient of the token j before, `[B, T, H, c]`, at least 0; `None` for c = 1 and a
            weight of 1. A state with `halo` 0 lets a window end at the chunk's start.
        activation: one of `ACTIVATIONS` (all map 0 to 0).
        residual: whether `M(x)` adds the first V coordinates of its input.
        objective: `"l2"`: `1/2 |M(k) - v|^2`; `"dot"`: `-<M(k), v>`.
        muon: Newton-Schulz on the momentum; `None` for plain gradient descent. Needs momentum.
        unlock: for each of the E capacity blocks, the number of tokens before it opens; ascending, the first is 0.
        max_gradient_norm: bound of |u_t|, over all layers; a longer u_t is shortened to it.
        lengths: real tokens per row `[B]`, int64, for right-padded input; all `T` when `None`. Outputs beyond a row's
            length are unspecified.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        `y` `[B, T, H, V]` in the dtype of `query`, and the new state. Inputs are computed in the state's dtype (by
        Triton, matrix products in that of the values).

    Raises:
        ValueError: shapes, options or a state that do not fit.

    Cost, per token and head, P weights in the memory, F hidden units: about 11 P + 6 C F multiply-adds; the state
    holds 2 P floats and C rows of factors. A single token costs about 3 P + 3 C F and writes one row. A window costs
    c - 1 more gradients per chunk. Muon adds an orthogonalised matrix per layer, once per chunk or once per token;
    per token, and only then, the work also writes out P weights per token, a bounded number of tokens at a time.

    Example:
        >>> state = initial_state([torch.randn(4, 32, 8), torch.randn(4, 8, 32)], batch=2, chunk_size=16)
        >>> q, k, v = torch.randn(3, 2, 50, 4, 8)
        >>> rate = torch.rand(2, 50, 4)
        >>> y, state = deep_memory(q, k, v, -rate, -rate, rate / 16, state, chunk_size=16)
    """
    unlock, dtype = tuple(unlock), state.weights[0].dtype
    kind = (
        "deep_memory",
        query.shape,
        key.shape,
        value.shape,
        None if log_retention is None else log_retention.shape,
        None if log_momentum is None else log_momentum.shape,
        step_size.shape,
        None if window_gate is None else window_gate.shape,
        tuple([weight.shape for weight in state.weights]),
        len(state.momentum),
        state.write.shape,
        state.weight_keep.shape,
        state.recent_keys.shape,
        query.dtype,
        dtype,
        query.device.type,
        chunk_size,
        activation,
        residual,
        objective,
        muon,
        unlock,
        max_gradient_norm,
        backend,
    )
    tensors = query, key, value, log_retention, log_momentum, step_size, window_gate, state
    options = chunk_size, activation, residual, objective, muon, unlock, max_gradient_norm, backend
    compute = chosen(kind, _choose, *tensors, *options)
    given = caster(compute, dtype)
    # Gates and states must not be rounded by autocast: the products of a chunk's gates live in float32 or wider.
    with as_given(query.device):
        output, state = compute(
            given(query),
            given(key),
            given(value),
            None if log_retention is None else cast(log_retention, dtype),
            None if log_momentum is None else cast(log_momentum, dtype),
            cast(step_size, dtype),
            state,
            chunk_size=chunk_size,
            window_gate=None if window_gate is None else cast(window_gate, dtype),
            activation=activation,
            residual=residual,
            objective=objective,
            muon=muon,
            unlock=unlock,
            max_gradient_norm=max_gradient_norm,
            lengths=lengths,
        )
    return cast(output, query.dtype), state


def block_of_unit(units: int, blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """The capacity block of each unit, `[units]`, int64: equal contiguous blocks, the last takes the remainder."""
    return torch.div(torch.arange(units, device=device), units // blocks, rounding_mode="floor").clamp(max=blocks - 1)


def is_gated(weights: Sequence[Tensor]) -> bool:
    """Whether the first layer has two rows per hidden unit, of which the odd ones gate the even ones."""
    return len(weights) == 2 and weights[0].shape[-2] == 2 * weights[1].shape[-1]


def block_of_weight(layer: int, state: DeepMemoryState) -> Tensor:
    """The capacity block of each weight of a layer, `[out, in]` or broadcastable to it.

    A weight between two hidden units is open once both are. The key coordinates of a one-layer memory count as hidden.
    """
    depth, blocks = len(state.weights), state.weight_keep.shape[-1]
    weight = state.weights[layer]
    out, inner = weight.shape[-2:]
    block = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    if layer < depth - 1:
        units = state.weights[layer + 1].shape[-1]
        of_row = block_of_unit(units, blocks, weight.device).repeat_interleave(out // units)
        block = torch.maximum(block, of_row[:, None])
    if layer > 0 or depth == 1:
        block = torch.maximum(block, block_of_unit(inner, blocks, weight.device)[None, :])
    return block


def materialize(state: DeepMemoryState) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The weights `M_t` and momentum `S_t` after the last token, each `[B, H, out_l, in_l]`.

    Under Muon once a chunk `M_t` is what tokens inside the chunk read.
    """
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
    return state.current or tuple(weights), tuple(momentum)


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
    window: int = 1,
    has_halo: bool = True,
    gated: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, object]:
    """Random arguments of `deep_memory` for tests and benchmarks: unit keys, lively gates and initial weights."""
    generator = torch.Generator().manual_seed(seed)
    value_dim = key_dim if value_dim is None else value_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    widths = [key_dim, *hidden, value_dim]
    rows = [(2 if gated and i == 0 else 1) * width for i, width in enumerate(widths[1:])]
    weights = [draw(heads, rows[i], widths[i]) / widths[i] ** 0.5 for i in range(len(rows))]
    gates = (batch, tokens, heads)
    halo = window - 1 if has_halo else 0
    return {
        "query": torch.nn.functional.normalize(draw(batch, tokens, heads, key_dim), dim=-1),
        "key": torch.nn.functional.normalize(draw(batch, tokens, heads, key_dim), dim=-1),
        "value": draw(batch, tokens, heads, value_dim),
        "log_retention": torch.nn.functional.logsigmoid(draw(*gates) + 2),
        "log_momentum": torch.nn.functional.logsigmoid(draw(*gates)) if momentum else None,
        "step_size": torch.sigmoid(draw(*gates)) / (4 + chunk_size),
        "state": initial_state(weights, batch, chunk_size=chunk_size, blocks=blocks, momentum=momentum, halo=halo),
        **({} if window == 1 else {"window_gate": torch.sigmoid(draw(*gates, window))}),
    }


def _choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    log_momentum: Tensor | None,
    step_size: Tensor,
    window_gate: Tensor | None,
    state: DeepMemoryState,
    chunk_size: int,
    activation: str,
    residual: bool,
    objective: str,
    muon: Muon | None,
    unlock: tuple[int, ...],
    max_gradient_norm: float,
    backend: str,
) -> Callable[..., Any]:
    """The backend, after a check of shapes, options and state."""
    expect = partial(registry.expect, OP)
    expect(query.ndim == 4 and query.shape[1] > 0, "query", "[B, T, H, K] with T >= 1", query.shape)
    expect(key.shape == query.shape, "key", query.shape, key.shape)
    batch, tokens, heads, key_dim = query.shape
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
    found = state.write.shape[-1] - state.halo
    expect(found == chunk_size, "chunk size of the state", chunk_size, found)
    for layer, (weight, after) in enumerate(pairwise(state.weights)):
        fits = weight.shape[-2] == after.shape[-1] or is_gated(state.weights)
        expect(fits, f"width of layer {layer + 2}", weight.shape[-2], after.shape[-1])
    expect(activation in ACTIVATIONS, "activation", f"one of {ACTIVATIONS}", activation)
    expect(not residual or value_dim <= key_dim, "value width of a residual memory", f"at most {key_dim}", value_dim)
    count, is_given = len(state.momentum), log_momentum is not None
    expect((count > 0) == is_given, "momentum in the state", depth if is_given else "none", count)
    blocks = state.weight_keep.shape[-1]
    fits = len(unlock) == blocks and unlock[0] == 0 and all(a <= b for a, b in pairwise(unlock))
    expect(fits, "unlock", f"{blocks} ascending positions from 0", unlock)
    units = min([key_dim] if depth == 1 else [w.shape[-1] for w in state.weights[1:]])
    expect(blocks <= units, "capacity blocks", f"at most {units}, the units of the narrowest layer", blocks)
    expect(max_gradient_norm > 0, "max_gradient_norm", "above 0", max_gradient_norm)
    window = _check_rule(state, step_size, window_gate, objective, muon)
    problem = Problem(
        device=query.device.type,
        dtype=str(query.dtype),
        sizes={
            "B": batch,
            "T": tokens,
            "H": heads,
            "K": key_dim,
            "V": value_dim,
            "C": chunk_size,
            "L": depth,
            "E": blocks,
            "R": state.write.shape[2],
            "W": window,
        },
        options={
            "activation": activation,
            "residual": residual,
            "momentum": is_given,
            "objective": objective,
            "muon": muon,
            "gated": is_gated(state.weights),
            "state": str(first.dtype),
        },
    )
    return select(OP, problem, backend)


def _check_rule(
    state: DeepMemoryState, step_size: Tensor, window_gate: Tensor | None, objective: str, muon: Muon | None
) -> int:
    """The window of the rule."""
    expect = partial(registry.expect, OP)
    window = 1
    if window_gate is not None:
        window = window_gate.shape[-1]
        fits = window_gate.shape[:-1] == step_size.shape and window >= 1
        expect(fits, "window_gate", (*step_size.shape, "c >= 1"), window_gate.shape)
    expect(state.halo in (0, window - 1), "halo of the state", f"0 or {window - 1}", state.halo)
    expect(objective in OBJECTIVES, "objective", f"one of {OBJECTIVES}", objective)
    if muon is not None:
        expect(muon.steps >= 0, "Newton-Schulz steps", "at least 0", muon.steps)
        expect(muon.every in MUON_EVERY, "Muon.every", f"one of {MUON_EVERY}", muon.every)
        expect(bool(state.momentum), "momentum of Muon", "log_momentum", None)
    return window
