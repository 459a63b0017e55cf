"""The deep memory: the equations, every backend against them, every gate and option, and what must never happen."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import zoo
from subnormal import Subnormal
from tolerances import GRADCHECK, OP, close
from torch import Tensor

from memzoo.kernels.deep_memory import (
    ACTIVATIONS,
    DeepMemoryState,
    Muon,
    block_of_unit,
    deep_memory,
    initial_state,
    make_inputs,
    materialize,
    per_token,
)
from memzoo.kernels.deep_memory import (
    OP as DEEP_MEMORY,
)
from memzoo.kernels.deep_memory.activations import ACTIVATION
from memzoo.kernels.linear_attention import linear_attention
from memzoo.kernels.newton_schulz import newton_schulz
from memzoo.kernels.retrieval import retrieve

# Triton has no float64: tests/triton_parity.py.
BACKENDS = [name for name in DEEP_MEMORY.names() if name != "triton"]
FAST = [name for name in BACKENDS if name != "reference"]
FIELDS = (
    "write", "momentum_write", "weight_keep", "momentum_read", "momentum_keep", "orthogonal_step",
    "recent_keys", "recent_values", "position",
)  # fmt: skip
TOKENS = 14
HIDDEN = [(), (16,), (16, 12), (12, 17, 8)]  # 17 units do not divide into 4 blocks
SHAPES = [  # T, C: one token, around a chunk, a prime, chunks of one
    (1, 4),
    (3, 4),
    (4, 4),
    (5, 4),
    (13, 4),
    (7, 1),
    (6, 16),
]


def arguments(**options: Any) -> dict[str, Any]:
    """Inputs and options of one call, capacity opening every three tokens."""
    chunk = options.setdefault("chunk_size", 4)
    blocks = options.setdefault("blocks", 1)
    keys = ("residual", "activation", "max_gradient_norm", "objective", "muon")
    call = {key: options.pop(key) for key in keys if key in options}
    return {**make_inputs(**options), **call, "chunk_size": chunk, "unlock": [3 * e for e in range(blocks)]}


def piece(args: dict[str, Any], low: int, high: int, state: DeepMemoryState) -> dict[str, Any]:
    """The same call for tokens `low` to `high` only."""
    sequences = ("query", "key", "value", "log_retention", "log_momentum", "step_size", "window_gate")
    cut = {name: args[name][:, low:high] for name in sequences if args.get(name) is not None}
    return {**args, **cut, "state": state}


def memory_of(state: DeepMemoryState) -> list[Tensor]:
    weights, momentum = materialize(state)
    return [*weights, *momentum]


def same_state(state: DeepMemoryState, want: DeepMemoryState) -> None:
    for a, b in zip(memory_of(state), memory_of(want), strict=True):
        close(a, b, OP[torch.float64])
    for field in FIELDS:
        a, b = getattr(state, field), getattr(want, field)
        assert a.shape == b.shape, field
        if a.numel():
            close(a.double(), b.double(), OP[torch.float64])


# The equations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_takes_the_gradient_of_the_inner_loss(activation: str) -> None:
    """Second witness: one plain step from the initial memory is autograd's gradient of 1/2 |M(k) - v|^2."""
    args = arguments(batch=1, tokens=1, heads=1, hidden=(16, 12), momentum=False, activation=activation, chunk_size=1)
    args["log_retention"] = None
    weights = [w.clone().requires_grad_() for w in args["state"].weights]
    x = args["key"][:, 0, :, :, None]
    for layer, weight in enumerate(weights):
        x = weight @ x
        if layer < len(weights) - 1:
            x = ACTIVATION[activation].value(x)
    loss = 0.5 * (x[..., 0] + args["key"][:, 0] - args["value"][:, 0]).square().sum()
    gradients = torch.autograd.grad(loss, weights)
    _, state = deep_memory(**args, backend="reference")
    for weight, gradient, after in zip(weights, gradients, materialize(state)[0], strict=True):
        close(after, weight.detach() - args["step_size"].item() * gradient, OP[torch.float64])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_are_autograds(activation: str) -> None:
    h = torch.linspace(-6, 6, 102, dtype=torch.float64).view(3, 34).requires_grad_()
    value, first, second = ACTIVATION[activation].derivatives(h, 2)
    close(value, ACTIVATION[activation].value(h), OP[torch.float64])
    (want,) = torch.autograd.grad(ACTIVATION[activation].value(h).sum(), h, create_graph=True)
    close(first, want, OP[torch.float64])
    if activation != "relu":
        close(second, torch.autograd.grad(want.sum(), h)[0], OP[torch.float64])
    assert float(ACTIVATION[activation].value(torch.zeros(1))) == 0
    r = torch.randn_like(h)
    for part in (slice(None), (slice(None), slice(None, None, 2))):  # contiguous and not: torch may take other kernels
        close(ACTIVATION[activation].value(h[part]), value[part], OP[torch.float64])
        close(ACTIVATION[activation].pullback(r[part], h[part]), (r * first)[part], OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_matrix_memory_without_momentum_is_the_delta_rule(backend: str) -> None:
    """W_t = W_{t-1} (a I - l k k^T) + l v k^T at C = 1 (and with a = 1: DeltaNet)."""
    args = arguments(hidden=(), momentum=False, chunk_size=1, residual=False, value_dim=5)
    w = args["state"].weights[0]
    outputs = []
    for t in range(args["query"].shape[1]):
        k, v, q = args["key"][:, t], args["value"][:, t], args["query"][:, t]
        a, step = args["log_retention"][:, t].exp()[..., None, None], args["step_size"][:, t][..., None, None]
        erase = a * torch.eye(k.shape[-1], dtype=k.dtype) - step * k[..., :, None] * k[..., None, :]
        w = w @ erase + step * v[..., :, None] * k[..., None, :]
        outputs.append((w @ q[..., None])[..., 0])
    y, _ = deep_memory(**args, backend=backend)
    close(y, torch.stack(outputs, dim=1), OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunk_size_is_part_of_the_model(backend: str) -> None:
    """Anchored memories of different chunk sizes must differ: guards against chunk code that quietly uses C = 1."""
    args = arguments(hidden=(16,))
    y, _ = deep_memory(**args, backend=backend)
    other = {**args, "chunk_size": 2, "state": initial_state(args["state"].weights, 2, chunk_size=2)}
    assert (deep_memory(**other, backend=backend)[0] - y).abs().max() > 1e-3


# Every backend against the reference ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(
    ("momentum", "residual", "blocks"), list(itertools.product([True, False], [True, False], [1, 4]))
)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_matches_reference(backend: str, hidden: tuple[int, ...], momentum: bool, residual: bool, blocks: int) -> None:
    for tokens, chunk in SHAPES:
        args = arguments(
            tokens=tokens, chunk_size=chunk, hidden=hidden, momentum=momentum, blocks=blocks, residual=residual,
            value_dim=8 if residual else 5,
        )  # fmt: skip
        want, want_state = deep_memory(**args, backend="reference")
        got, state = deep_memory(**args, backend=backend)
        close(got, want, OP[torch.float64])
        same_state(state, want_state)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_any_cut_gives_the_same(backend: str, hidden: tuple[int, ...], blocks: int) -> None:
    """Pieces of any size, single steps among them, with and without gradients, equal one pass."""
    args = arguments(tokens=TOKENS, hidden=hidden, blocks=blocks)
    want, want_state = deep_memory(**args, backend="reference")
    for bounds in ([0, 5, 14], [0, 4, 5, 6, 7, 8, 9, 14], [0, 1, 2, 3, 13, 14], [0, 11, 12, 14]):
        for enabled in (False, True):
            state, outputs = args["state"], []
            with torch.set_grad_enabled(enabled):
                for low, high in itertools.pairwise(bounds):
                    y, state = deep_memory(**piece(args, low, high, state), backend=backend)
                    outputs.append(y)
            close(torch.cat(outputs, dim=1), want, OP[torch.float64])
            for a, b in zip(memory_of(state), memory_of(want_state), strict=True):
                close(a, b, OP[torch.float64])


def test_a_step_writes_a_token_where_the_others_lie() -> None:
    """In the buffer that the last step left, but in none of another's, nor in one of inference mode outside of it."""
    args = arguments(tokens=TOKENS, hidden=(16,), chunk_size=16)
    want, _ = deep_memory(**args, backend="reference")

    def step(at: int, state: DeepMemoryState) -> DeepMemoryState:
        y, state = deep_memory(**piece(args, at, at + 1, state), backend="chunked")
        close(y, want[:, at : at + 1], OP[torch.float64])
        return state

    def alone(factors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As they lie, each in a storage of its own."""
        return tuple(copy.deepcopy(x) for x in factors)

    with torch.no_grad():
        _, state = deep_memory(**piece(args, 0, 3, args["state"]), backend="chunked")
        state = step(3, state)
        after = step(4, state)
        assert all(a is b for a, b in zip((*after.inputs, *after.deltas), (*state.inputs, *state.deltas), strict=True))
        after = step(5, after._replace(inputs=alone(after.inputs), deltas=alone(after.deltas)))
        with torch.inference_mode():
            after = step(7, step(6, after._replace(inputs=alone(after.inputs))))
        step(8, after)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("blocks", [1, 4])
def test_ragged_rows_equal_single_rows(backend: str, blocks: int) -> None:
    """Rows of different lengths, standing at different positions, one of them empty."""
    args = arguments(batch=3, tokens=TOKENS, hidden=(16,), blocks=blocks)
    lengths = [torch.tensor([5, 0, 9]), torch.tensor([9, 4, 0])]
    state, starts, outputs = args["state"], torch.zeros(3, dtype=torch.long), []
    for length in lengths:
        index = (starts[:, None] + torch.arange(int(length.max()))).clamp(max=TOKENS - 1)
        part = {
            name: x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))
            for name, x in args.items()
            if isinstance(x, Tensor)
        }
        y, state = deep_memory(**{**args, **part, "state": state}, lengths=length, backend=backend)
        outputs.append(y)
        starts = starts + length
    want, _ = deep_memory(**args, backend="reference")
    for row in range(3):
        got = torch.cat([y[row, : int(n[row])] for y, n in zip(outputs, lengths, strict=True)])
        close(got, want[row, : int(starts[row])], OP[torch.float64])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(("momentum", "blocks", "cut"), list(itertools.product([True, False], [1, 4], [None, 6])))
@pytest.mark.parametrize("hidden", HIDDEN)
def test_gradients_match_reference(
    backend: str, hidden: tuple[int, ...], momentum: bool, blocks: int, cut: int | None
) -> None:
    """Of every input, the initial memory and momentum, through outputs, final memory and a cut inside a chunk."""

    def gradients(name: str) -> dict[str, Tensor]:
        args = arguments(tokens=TOKENS, hidden=hidden, momentum=momentum, blocks=blocks)
        leaves = {key: x.requires_grad_() for key, x in args.items() if isinstance(x, Tensor)}
        state = args["state"]
        for field in ("weights", "momentum"):
            moved = tuple(x.detach().clone().add_(0.1).requires_grad_() for x in getattr(state, field))
            state = state._replace(**{field: moved})
            leaves.update({f"{field}.{layer}": x for layer, x in enumerate(moved)})
        outputs = []
        for low, high in [(0, TOKENS)] if cut is None else [(0, cut), (cut, TOKENS)]:
            y, state = deep_memory(**piece(args, low, high, state), backend=name)
            outputs.append(y)
        generator = torch.Generator().manual_seed(1)
        results = [torch.cat(outputs, dim=1), *memory_of(state)]
        loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in results)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    want, got = gradients("reference"), gradients(backend)
    for name in want:
        close(got[name], want[name], OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["gelu", *zoo.slow("silu", "tanh", "gelu_tanh")])
def test_gradcheck(backend: str, activation: str) -> None:
    args = arguments(batch=1, tokens=5, heads=1, key_dim=3, hidden=(4,), chunk_size=2, activation=activation, blocks=2)
    names = [key for key, x in args.items() if isinstance(x, Tensor)]

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        state = args["state"]._replace(weights=leaves[len(names) :])
        y, state = deep_memory(**{**args, **dict(zip(names, leaves, strict=False)), "state": state}, backend=backend)
        return (y, *memory_of(state))

    leaves = [args[name].requires_grad_() for name in names]
    leaves += [w.detach().clone().requires_grad_() for w in args["state"].weights]
    assert torch.autograd.gradcheck(call, leaves, **GRADCHECK)


@pytest.mark.parametrize("backend", FAST)
def test_non_contiguous_inputs(backend: str) -> None:
    args = arguments(hidden=(16,))
    want, _ = deep_memory(**args, backend=backend)
    strided = {
        name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in args.items() if isinstance(x, Tensor)
    }
    close(deep_memory(**{**args, **strided}, backend=backend)[0], want, OP[torch.float64])


@pytest.mark.parametrize("backend", FAST)
def test_float32_follows_float64(backend: str) -> None:
    args = arguments(tokens=50, hidden=(16,), chunk_size=8)
    want, _ = deep_memory(**args, backend="reference")
    low = {name: x.float() for name, x in args.items() if isinstance(x, Tensor)}
    state = initial_state([w.float() for w in args["state"].weights], 2, chunk_size=8)
    got, _ = deep_memory(**{**args, **low, "state": state}, backend=backend)
    close(got.double(), want, OP[torch.float32])


# The rules of ATLAS --------------------------------------------------------------------------------------------------

# What a call of Titans does not use, alone and together.
RULES: dict[str, dict[str, Any]] = {
    "window": {"window": 3},
    "window, no momentum": {"window": 3, "momentum": False},
    "window of one": {"has_gate": True},
    "window longer than a chunk": {"window": 7},
    "window without halo": {"window": 3, "has_halo": False},
    "dot product": {"objective": "dot", "momentum": False},
    "dot product, window, matrix": {"objective": "dot", "window": 2, "hidden": ()},
    "gated": {"gated": True},
    "gated, window, bounded": {"gated": True, "window": 2, "max_gradient_norm": 0.5},
    "wide keys": {"key_dim": 11, "value_dim": 8},
    "three layers, window": {"hidden": (16, 12), "window": 3},
    "muon once a chunk": {"muon": Muon(3, "chunk")},
    "muon once a chunk, window, gated": {"muon": Muon(2, "chunk"), "window": 3, "gated": True},
    "muon at every token": {"muon": Muon(3, "token")},
    "muon at every token, window, gated": {"muon": Muon(2, "token"), "window": 3, "gated": True, "hidden": (17,)},
    "muon without steps": {"muon": Muon(0, "token"), "hidden": (16, 12)},
    "muon, dot product, matrix": {"muon": Muon(1, "token"), "objective": "dot", "hidden": ()},
}


def rule(name: str, **options: Any) -> dict[str, Any]:
    """Arguments of a call under a rule."""
    chosen = {"hidden": (16,), **RULES[name], **options}
    has_gate = chosen.pop("has_gate", False)
    args = arguments(**chosen)
    if has_gate:
        args["window_gate"] = torch.sigmoid(args["step_size"])[..., None]
    return args


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("name", RULES)
def test_rules_match_reference(backend: str, name: str, blocks: int) -> None:
    for tokens, chunk in SHAPES:
        args = rule(name, tokens=tokens, chunk_size=chunk, blocks=blocks)
        want, want_state = deep_memory(**args, backend="reference")
        got, state = deep_memory(**args, backend=backend)
        close(got, want, OP[torch.float64])
        same_state(state, want_state)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("name", RULES)
def test_rules_at_any_cut(backend: str, name: str, blocks: int) -> None:
    args = rule(name, tokens=TOKENS, blocks=blocks)
    want, want_state = deep_memory(**args, backend="reference")
    for bounds in ([0, 5, 14], [0, 4, 5, 6, 7, 8, 9, 14], [0, 1, 2, 3, 13, 14], [0, 11, 12, 14]):
        for enabled in (False, True):
            state, outputs = args["state"], []
            with torch.set_grad_enabled(enabled):
                for low, high in itertools.pairwise(bounds):
                    y, state = deep_memory(**piece(args, low, high, state), backend=backend)
                    outputs.append(y)
            close(torch.cat(outputs, dim=1), want, OP[torch.float64])
            for a, b in zip(memory_of(state), memory_of(want_state), strict=True):
                close(a, b, OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("name", RULES)
def test_rules_on_ragged_rows(backend: str, name: str, blocks: int) -> None:
    """Rows of different lengths at different positions, some of them empty, then single tokens for all."""
    args = rule(name, batch=3, tokens=TOKENS, blocks=blocks)
    lengths = [torch.tensor([5, 0, 8]), torch.tensor([6, 4, 0]), *[torch.tensor([1, 1, 1])] * 2]
    state, starts, outputs = args["state"], torch.zeros(3, dtype=torch.long), []
    for length in lengths:
        index = (starts[:, None] + torch.arange(int(length.max()))).clamp(max=TOKENS - 1)
        part = {
            name: x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))
            for name, x in args.items()
            if isinstance(x, Tensor)
        }
        given = None if bool((length == index.shape[1]).all()) else length
        y, state = deep_memory(**{**args, **part, "state": state}, lengths=given, backend=backend)
        outputs.append(y)
        starts = starts + length
    want, _ = deep_memory(**args, backend="reference")
    for row in range(3):
        got = torch.cat([y[row, : int(n[row])] for y, n in zip(outputs, lengths, strict=True)])
        close(got, want[row, : int(starts[row])], OP[torch.float64])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(("blocks", "cut"), [(1, None), (1, 6), (4, 6)])
@pytest.mark.parametrize("name", RULES)
def test_gradients_of_rules_match_reference(backend: str, name: str, blocks: int, cut: int | None) -> None:
    def gradients(backend: str) -> dict[str, Tensor]:
        args = rule(name, tokens=TOKENS, blocks=blocks)
        leaves = {key: x.requires_grad_() for key, x in args.items() if isinstance(x, Tensor)}
        state = args["state"]
        moved = tuple(x.detach().clone().requires_grad_() for x in state.weights)
        state = state._replace(weights=moved)
        leaves.update({f"weights.{layer}": x for layer, x in enumerate(moved)})
        outputs = []
        for low, high in [(0, TOKENS)] if cut is None else [(0, cut), (cut, TOKENS)]:
            y, state = deep_memory(**piece(args, low, high, state), backend=backend)
            outputs.append(y)
        generator = torch.Generator().manual_seed(1)
        results = [torch.cat(outputs, dim=1), *memory_of(state), state.recent_keys, state.recent_values]
        loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in results)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    want, got = gradients("reference"), gradients(backend)
    for key in want:
        close(got[key], want[key], OP[torch.float64])


def network(weights: list[Tensor], x: Tensor, args: dict[str, Any], gated: bool) -> Tensor:
    """The memory of one row and head, written apart from the library."""
    y = x
    for layer, weight in enumerate(weights):
        y = weight @ y
        if layer < len(weights) - 1:
            y = torch.nn.functional.gelu(y[::2]) * y[1::2] if gated else torch.nn.functional.gelu(y)
    return y + x[: len(y)] if args.get("residual", True) else y


def witness(args: dict[str, Any], gated: bool) -> tuple[Tensor, list[Tensor]]:
    """Outputs `[T, V]` and final weights of the first row and head at C = 1, by autograd of the windowed loss."""
    q, k, v = (args[key][0, :, 0] for key in ("query", "key", "value"))
    gates, steps = args.get("window_gate"), args["step_size"][0, :, 0]
    weights = [w[0, 0].detach() for w in args["state"].weights]
    slots, outputs = [torch.zeros_like(w) for w in weights], []
    muon, bound = args.get("muon"), args.get("max_gradient_norm", float("inf"))
    for t in range(len(q)):
        a = args["log_retention"][0, t, 0].exp()
        m = 0.0 if args.get("log_momentum") is None else args["log_momentum"][0, t, 0].exp()
        total = [torch.zeros_like(w) for w in weights]
        for j in range(min(t + 1, 1 if gates is None else gates.shape[-1])):
            leaves = [w.clone().requires_grad_() for w in weights]
            y = network(leaves, k[t - j], args, gated)
            loss = -y @ v[t - j] if args.get("objective") == "dot" else 0.5 * (y - v[t - j]).square().sum()
            found = torch.autograd.grad(loss, leaves)
            shorten = min(1.0, bound / float(sum(g.square().sum() for g in found).sqrt()))
            gate = 1.0 if gates is None else gates[0, t, 0, j]
            total = [x + gate * shorten * g for x, g in zip(total, found, strict=True)]
        if muon is None:
            slots = [m * s - steps[t] * g for s, g in zip(slots, total, strict=True)]
            weights = [a * w + s for w, s in zip(weights, slots, strict=True)]
            read = weights
        else:
            slots = [m * s - g for s, g in zip(slots, total, strict=True)]
            updates = []
            for layer, slot in enumerate(slots):
                update = slot.clone()
                for part in (slice(0, None, 2), slice(1, None, 2)) if gated and layer == 0 else (slice(None),):
                    update[part] = newton_schulz(slot[part], steps=muon.steps, backend="reference")
                updates.append(update)
            plain = [a * w + steps[t] * s for w, s in zip(weights, slots, strict=True)]
            weights = [a * w + steps[t] * s for w, s in zip(weights, updates, strict=True)]
            read = weights if muon.every == "token" else plain
        outputs.append(network(read, q[t], args, gated))
    return torch.stack(outputs), weights


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in RULES if "halo" not in name])
def test_rules_in_chunks_of_one_are_the_exact_recurrence(backend: str, name: str) -> None:
    """Second witness: autograd of the windowed loss at M_{t-1} (ATLAS Eq 9, 10), momentum, Muon and decay by hand."""
    args = rule(name, chunk_size=1, tokens=9)
    want, weights = witness(args, gated="gated" in name)
    got, state = deep_memory(**args, backend=backend)
    close(got[0, :, 0], want, OP[torch.float64])
    for a, b in zip(state.weights, weights, strict=True):
        close(a[0, 0], b, OP[torch.float64])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("momentum", [True, False])
def test_a_window_of_one_is_titans(backend: str, hidden: tuple[int, ...], momentum: bool) -> None:
    """A gate of 1 on the current token alone: outputs, memory and gradients bit for bit, in one pass and in steps."""
    results: list[list[Tensor]] = []
    for gate in (None, torch.ones(2, TOKENS, 3, 1, dtype=torch.float64)):
        args = arguments(tokens=TOKENS, hidden=hidden, momentum=momentum)
        args["window_gate"] = gate
        leaves = [args[key].requires_grad_() for key in ("query", "key", "value", "step_size", "log_retention")]
        y, state = deep_memory(**args, backend=backend)
        found = torch.autograd.grad(y.square().sum() + sum(x.sum() for x in memory_of(state)), leaves)
        state, steps = args["state"], []
        with torch.no_grad():
            for t in range(TOKENS):
                one, state = deep_memory(**piece(args, t, t + 1, state), backend=backend)
                steps.append(one)
        results.append([y, *memory_of(state), *found, *steps])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_halo_chunks_of_one_have_a_window_of_one(backend: str) -> None:
    args = rule("window without halo", chunk_size=1)
    narrow = {**args, "window_gate": args["window_gate"][..., :1]}
    assert torch.equal(deep_memory(**args, backend=backend)[0], deep_memory(**narrow, backend=backend)[0])
    halo = rule("window", chunk_size=1)
    assert (deep_memory(**halo, backend=backend)[0] - deep_memory(**args, backend=backend)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("every", ["token", "chunk"])
def test_muon_without_steps_is_titans(backend: str, every: str) -> None:
    """With one step size for all tokens, which may then stand inside of the momentum or outside."""
    args = arguments(tokens=TOKENS, hidden=(16,))
    args["step_size"] = torch.full_like(args["step_size"], 0.1)
    want, want_state = deep_memory(**args, backend=backend)
    got, state = deep_memory(**args, muon=Muon(0, every), backend=backend)
    close(got[:, :4], want[:, :4], OP[torch.float64])
    if every == "token":  # once a chunk: the anchor takes the last momentum for all of its tokens
        close(got, want, OP[torch.float64])
        for a, b in zip(materialize(state)[0], materialize(want_state)[0], strict=True):
            close(a, b, OP[torch.float64])
    else:
        assert (got - want).abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_a_linear_memory_with_the_dot_product_is_gated_linear_attention(backend: str, chunk: int) -> None:
    """At any chunk size: its gradient does not depend on the memory."""
    args = arguments(hidden=(), momentum=False, residual=False, chunk_size=chunk, objective="dot", value_dim=5)
    state = torch.zeros_like(args["state"].weights[0]).mT
    args["state"] = initial_state([w[0] for w in [torch.zeros_like(args["state"].weights[0])]], 2, chunk_size=chunk)
    args["state"] = args["state"]._replace(momentum=(), momentum_keep=torch.zeros_like(args["state"].momentum_keep))
    values = args["value"] * args["step_size"][..., None]
    want, _ = linear_attention(
        args["query"], args["key"][:, :, None], values[:, :, None], args["log_retention"], state, backend="reference"
    )
    close(deep_memory(**args, backend=backend)[0], want, OP[torch.float64])


@pytest.mark.parametrize("name", ["window", "muon at every token", "muon once a chunk", "dot product", "gated"])
def test_chunk_size_is_part_of_every_deep_rule(name: str) -> None:
    y, _ = deep_memory(**rule(name))
    assert (deep_memory(**rule(name, chunk_size=2))[0] - y).abs().max() > 1e-3


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_another(name: str) -> None:
    """A rule that is read and then forgotten would pass every test of one form against another."""
    same = {"window": 1, "has_gate": False, "objective": "l2", "gated": False, "muon": None}
    changed = {key: value for key, value in RULES[name].items() if key in same}
    for key in changed:
        y, _ = deep_memory(**rule(name))
        other, _ = deep_memory(**rule(name, **{key: same[key]}))
        assert (other - y).abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RULES)
def test_closed_blocks_are_bit_constant_under_every_rule(backend: str, name: str) -> None:
    args = rule(name, tokens=TOKENS, blocks=4)
    before = args["state"].weights
    units = before[-1].shape[-1]
    for tokens in (1, 3, 4, 7, 9, 12):  # blocks open after 0, 3, 6, 9 tokens
        _, state = deep_memory(**piece(args, 0, tokens, args["state"]), backend=backend)
        closed = block_of_unit(units, 4) >= min(4, 1 + (tokens - 1) // 3)
        start, end = before[-1], materialize(state)[0][-1]
        assert torch.equal(start[..., closed], end[..., closed])
        assert not torch.equal(start[..., ~closed], end[..., ~closed])
        if len(before) > 1:
            start, end = before[-2], materialize(state)[0][-2]
            rows = closed.repeat_interleave(start.shape[-2] // units)
            assert torch.equal(start[..., rows, :], end[..., rows, :])


@pytest.mark.parametrize("name", ["muon at every token", "muon at every token, window, gated"])
@pytest.mark.parametrize("blocks", [1, 4])
def test_per_token_muon_writes_out_a_bounded_number_of_weights(
    name: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number written out at once, the values and gradients are the same."""
    sizes: list[int] = []

    def counted(x: Tensor, steps: int) -> Tensor:
        sizes.append(x.numel())
        return newton_schulz(x, steps=steps)

    monkeypatch.setattr(per_token, "newton_schulz", counted)
    results = []
    for bound in (1 << 21, 3 * 6 * 8 * 34):
        monkeypatch.setattr(per_token, "BLOCK_ELEMENTS", bound)
        args = rule(name, tokens=TOKENS, blocks=blocks)
        leaves = [args[key].requires_grad_() for key in ("query", "key", "step_size")]
        sizes.clear()
        y, _ = deep_memory(**args, backend="chunked")
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        assert max(sizes) <= bound
    for a, b in zip(*results, strict=True):
        close(a, b, OP[torch.float64])


# Capacity blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_closed_blocks_are_bit_constant(backend: str, hidden: tuple[int, ...]) -> None:
    """Until a block opens its weights keep every bit, whatever retention, momentum and learned initial weights do."""
    args = arguments(tokens=TOKENS, hidden=hidden, blocks=4)
    before = args["state"].weights
    args["state"] = args["state"]._replace(momentum=tuple(torch.ones_like(w) for w in before))
    for tokens in (1, 3, 4, 7, 9, 12):  # blocks open after 0, 3, 6, 9 tokens
        _, state = deep_memory(**piece(args, 0, tokens, args["state"]), backend=backend)
        unlocked = min(4, 1 + (tokens - 1) // 3)
        for layer, (start, end) in enumerate(zip(before, materialize(state)[0], strict=True)):
            closed = _closed(layer, len(before), start.shape[-2:], unlocked)
            assert torch.equal(start[..., closed], end[..., closed])
            assert unlocked == 1 or not torch.equal(start[..., ~closed], end[..., ~closed])


def _closed(layer: int, depth: int, shape: torch.Size, unlocked: int) -> Tensor:
    """Weights `[out, in]` with an end in a closed block; written apart from the library's own map."""
    closed = torch.zeros(shape, dtype=torch.bool)
    if layer < depth - 1:
        closed |= (block_of_unit(shape[0], 4) >= unlocked)[:, None]
    if layer > 0 or depth == 1:
        closed |= block_of_unit(shape[1], 4) >= unlocked
    return closed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hidden", [(16,), (16, 12)])
def test_garbage_in_closed_blocks_changes_nothing(backend: str, hidden: tuple[int, ...]) -> None:
    """Neither reads nor writes see a closed block; its initial weights get no gradient before it opens."""
    args = arguments(tokens=3, hidden=hidden, blocks=4)
    want, _ = deep_memory(**args, backend=backend)
    weights = []
    for layer, weight in enumerate(args["state"].weights):
        closed = _closed(layer, len(args["state"].weights), weight.shape[-2:], 1)
        weights.append(torch.where(closed, 1e3, weight).requires_grad_())
    args["state"] = args["state"]._replace(weights=tuple(weights))
    got, _ = deep_memory(**args, backend=backend)
    assert torch.equal(got, want)
    for layer, gradient in enumerate(torch.autograd.grad(got.square().sum(), weights)):
        assert gradient[..., _closed(layer, len(weights), gradient.shape[-2:], 1)].abs().max() == 0
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("hidden", [(), (16,)])
def test_full_capacity_is_the_plain_memory(backend: str, hidden: tuple[int, ...]) -> None:
    """With every block open a step with blocks equals one without, bit for bit."""
    plain = arguments(tokens=8, hidden=hidden)
    blocks = {**arguments(tokens=8, hidden=hidden, blocks=4), "unlock": [0, 0, 0, 0]}
    want, want_state = deep_memory(**plain, backend=backend)
    got, state = deep_memory(**blocks, backend=backend)
    assert torch.equal(got, want)
    for a, b in zip(memory_of(state), memory_of(want_state), strict=True):
        assert torch.equal(a, b)


# The bound on the inner gradient ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_bounded_gradients_match_reference(backend: str, hidden: tuple[int, ...], blocks: int) -> None:
    """With a bound that shortens some tokens' gradients and not others'."""
    plain = arguments(tokens=TOKENS, hidden=hidden, blocks=blocks)
    _, state = deep_memory(**piece(plain, 0, 3, plain["state"]), backend="reference")
    norms = sum(
        x[:, :, :3].square().sum(-1) * d[:, :, :3].square().sum(-1)
        for x, d in zip(state.inputs, state.deltas, strict=True)
    ).sqrt()
    bound = 1.01 * float(norms.median())  # not at any token, where the derivative jumps

    def results(name: str) -> list[Tensor]:
        args = {**plain, "max_gradient_norm": bound}
        leaves = [args[key].detach().clone().requires_grad_() for key in ("query", "key", "value", "step_size")]
        args.update(zip(("query", "key", "value", "step_size"), leaves, strict=True))
        weights = tuple(w.detach().clone().requires_grad_() for w in args["state"].weights)
        args["state"] = args["state"]._replace(weights=weights)
        y, state = deep_memory(**args, backend=name)
        loss = y.square().sum() + sum(x.square().sum() for x in memory_of(state))
        return [y, *memory_of(state), *torch.autograd.grad(loss, [*leaves, *weights])]

    unbounded, _ = deep_memory(**plain, backend=backend)
    want, got = results("reference"), results(backend)
    assert (want[0] - unbounded).abs().max() > 1e-3
    for a, b in zip(got, want, strict=True):
        close(a, b, OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_row_without_numbers_is_no_other_rows_matter(backend: str) -> None:
    """A single token, whose rows are looked at together for a gradient that is too long."""
    args = arguments(tokens=5, hidden=(16,), batch=2, max_gradient_norm=0.01)
    _, state = deep_memory(**piece(args, 0, 4, args["state"]), backend=backend)
    found = []
    for other in (0.5, math.nan):
        last = piece(args, 4, 5, copy.deepcopy(state))
        last["value"] = last["value"].clone()
        last["value"][1] = other
        _, after = deep_memory(**last, backend=backend)
        found.append([x[0] for x in memory_of(after)])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bounded_memory_cannot_diverge(backend: str) -> None:
    """Steps far too long for stability: without the bound the weights overflow, with it they stay finite."""
    args = arguments(tokens=200, hidden=(16,), chunk_size=8)
    args["step_size"] = torch.ones_like(args["step_size"])
    args["value"] = 100 * args["value"]
    y, _ = deep_memory(**args, backend=backend)
    assert not torch.isfinite(y).all()
    leaves = [args[key].detach().clone().requires_grad_() for key in ("key", "value")]
    args.update(zip(("key", "value"), leaves, strict=True))
    y, state = deep_memory(**args, max_gradient_norm=10.0, backend=backend)
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(x).all() for x in memory_of(state))
    for gradient in torch.autograd.grad(y.sum(), leaves):
        assert torch.isfinite(gradient).all()


# Extremes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_at_their_limits(backend: str) -> None:
    args = arguments(tokens=9, hidden=(16,))
    zero, one = torch.full_like(args["step_size"], -torch.inf), torch.zeros_like(args["step_size"])
    # Retention 0: nothing but the last momentum is left. Momentum 0 is plain gradient descent.
    forgetful = {**args, "log_retention": zero, "log_momentum": zero}
    _, state = deep_memory(**forgetful, backend=backend)
    step, rows = args["step_size"][:, -1], 0  # token 9 starts a chunk: its row is the first
    assert state.inputs
    for weight, x, d in zip(materialize(state)[0], state.inputs, state.deltas, strict=True):
        close(weight, -step[..., None, None] * d[:, :, rows, :, None] * x[:, :, rows, None, :], OP[torch.float64])
    # Step size 0 and retention 1: nothing ever changes.
    frozen = {**args, "log_retention": one, "step_size": one}
    y, state = deep_memory(**frozen, backend=backend)
    for a, b in zip(materialize(state)[0], args["state"].weights, strict=True):
        assert torch.equal(a, b)
    q = args["query"]
    close(y, retrieve(q, args["state"].weights, args["state"].position)[0], OP[torch.float64])
    # Gradients stay finite where a gate is exactly 0 or 1.
    for limit in (zero, one):
        gates = [limit.clone().requires_grad_() for _ in range(2)]
        y, _ = deep_memory(**{**args, "log_retention": gates[0], "log_momentum": gates[1]}, backend=backend)
        for gradient in torch.autograd.grad(y.square().sum(), gates):
            assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("backend", FAST)
def test_strong_decay_and_repeated_keys_stay_finite(backend: str) -> None:
    args = arguments(tokens=64, hidden=(16,), chunk_size=32)
    args["log_retention"] = torch.full_like(args["log_retention"], -60.0)
    args["key"] = args["key"][:, :1].expand_as(args["key"])
    leaves = [args[name].detach().clone().requires_grad_() for name in ("key", "value", "log_retention")]
    args.update(zip(("key", "value", "log_retention"), leaves, strict=True))
    want, _ = deep_memory(**args, backend="reference")
    got, _ = deep_memory(**args, backend=backend)
    close(got, want, OP[torch.float64])
    for gradient in torch.autograd.grad(got.square().sum(), leaves):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("backend", FAST)
def test_state_stays_in_float32_and_does_not_drift(backend: str) -> None:
    """bfloat16 inputs, 2,000 tokens: the state is float32 and follows float64 on the same inputs."""
    args = arguments(tokens=2000, heads=2, hidden=(16,), chunk_size=16)
    low = {name: x.bfloat16() for name, x in args.items() if isinstance(x, Tensor)}
    state = initial_state([w.float() for w in args["state"].weights], 2, chunk_size=16)
    y, state = deep_memory(**{**args, **low, "state": state}, backend=backend)
    assert y.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in (*state.weights, *state.momentum, *state.inputs, state.write))
    same = {name: x.double() for name, x in low.items()}
    weights = [w.float().double() for w in args["state"].weights]
    _, want = deep_memory(**{**args, **same, "state": initial_state(weights, 2, chunk_size=16)}, backend=backend)
    for a, b in zip(memory_of(state), memory_of(want), strict=True):
        close(a.double(), b, OP[torch.float32])


@pytest.mark.parametrize("backend", FAST)
def test_backward_memory_grows_by_the_weights_per_chunk(backend: str) -> None:
    """What autograd keeps: inputs, coefficients and the memory at the chunk starts, no activations of the network."""
    sizes: dict[int, int] = {}
    for tokens in (64, 128):
        args = arguments(batch=1, tokens=tokens, heads=1, key_dim=8, hidden=(64,), chunk_size=16)
        args["value"].requires_grad_()
        kept: dict[int, int] = {}

        def pack(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            deep_memory(**args, backend=backend)
        sizes[tokens] = sum(kept.values())
    per_chunk = (sizes[128] - sizes[64]) / 4
    memory = 2 * 2 * 8 * 64  # weights and momentum of two layers
    sequences = 16 * 3 * 8 + 10 * 17 * 17  # queries, keys, values; coefficient matrices
    hidden = 16 * 64  # one activation of the hidden layer, of which a plain autograd graph would keep about ten
    assert per_chunk < memory + sequences + hidden


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 13, 3, 7)}, r"key: expected \(2, 13, 3, 8\), got \(2, 13, 3, 7\)"),
        ({"value": torch.zeros(2, 13, 3, 9)}, "value: expected"),
        ({"step_size": torch.zeros(2, 13)}, "step_size: expected"),
        ({"chunk_size": 5}, "chunk size of the state: expected 5, got 4"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1, got 0"),
        ({"activation": "sin"}, "activation: expected one of"),
        ({"log_momentum": None}, "momentum in the state: expected none, got 2"),
        ({"unlock": [0, 3]}, r"unlock: expected 1 ascending positions from 0, got \(0, 3\)"),
        ({"unlock": [2]}, "unlock: expected 1 ascending positions from 0"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm: expected above 0"),
        ({"window_gate": torch.zeros(2, 13, 3)}, r"window_gate: expected \(2, 13, 3, 'c >= 1'\), got \(2, 13, 3\)"),
        ({"window_gate": torch.zeros(2, 13, 3, 0)}, r"window_gate: expected .*, got \(2, 13, 3, 0\)"),
        ({"state": rule("window")["state"]}, "halo of the state: expected 0 or 0, got 2"),
        ({"objective": "l1"}, "objective: expected one of"),
        ({"muon": Muon(-1)}, "Newton-Schulz steps: expected at least 0, got -1"),
        ({"muon": Muon(5, "year")}, "Muon.every: expected one of"),
        (
            {"log_momentum": None, "state": arguments(hidden=(16,), momentum=False)["state"], "muon": Muon()},
            "momentum of Muon: expected log_momentum",
        ),
        (
            {"state": initial_state([torch.zeros(3, 16, 8), torch.zeros(3, 8, 15)], 2, chunk_size=4)},
            "width of layer 2: expected 16",
        ),
        ({"backend": "fortran"}, "unknown kernel_backend 'fortran'"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deep_memory(**{**arguments(hidden=(16,)), **change})


def test_refuses_more_blocks_than_units() -> None:
    with pytest.raises(ValueError, match="capacity blocks: expected at most 3, the units of the narrowest layer"):
        deep_memory(**arguments(hidden=(3,), blocks=4))


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": False}, {"muon": Muon(5, every="chunk")}, {"muon": Muon(5, every="token")}],
    ids=["momentum", "none", "muon-chunk", "muon-token"],
)
def test_no_matrix_product_meets_subnormal_numbers(options: dict[str, Any]) -> None:
    """They would make it many times as slow on a CPU, where a memory has forgotten what it held: under Muon, whose
    steps have one size, what units held that have died."""
    made: dict[str, Any] = make_inputs(tokens=200, momentum=options.get("momentum", True), dtype=torch.float32)
    made["log_retention"] = torch.full_like(made["log_retention"], -1.5)
    if "muon" in options:
        made |= {"muon": options["muon"], "activation": "relu", "key": made["key"].abs()}
        made["log_momentum"] = torch.full_like(made["log_momentum"], -6.0)
    leaves = {n: x.requires_grad_() for n, x in made.items() if isinstance(x, Tensor)}
    with Subnormal() as subnormal:
        y, state = deep_memory(**{**made, **leaves}, chunk_size=4, backend="chunked")
        y.square().sum().backward()
        with torch.no_grad():
            for t in range(20):
                one = {n: x[:, t : t + 1] for n, x in leaves.items()}
                _, state = deep_memory(**{**made, **one, "state": state}, chunk_size=4, backend="chunked")
    assert subnormal.products > 0
    assert subnormal.factors == 0
