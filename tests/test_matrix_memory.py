"""Linear attention and the delta rule: equations, backends, reductions to one another, and the capacity schedule."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
import zoo
from subnormal import Subnormal
from tolerances import GRADCHECK, OP, close
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import memzoo
from memzoo.kernels import delta_rule as delta
from memzoo.kernels import linear_attention as linear
from memzoo.kernels.deep_memory import deep_memory, initial_state
from memzoo.kernels.delta_rule import delta_rule
from memzoo.kernels.linear_attention import linear_attention
from memzoo.kernels.scan import scan, split
from memzoo.modeling.decoder import Step
from memzoo.modeling.mixers import matrix_memory

BOUND = OP[torch.float64]
BACKENDS = [name for name in delta.OP.names() if name != "triton"]  # which has no float64: tests/triton_parity.py
OPTIONS: list[dict[str, Any]] = [
    {},
    {"erase_after_decay": True},
    {"erase_key": None},
    {"erase_key": None, "erase_after_decay": True},
    {"log_retention": None},
]


def case(op: str, tokens: int, **options: Any) -> tuple[Callable, dict[str, Any]]:
    if op == "delta_rule":
        return delta_rule, {**delta.make_inputs(tokens=tokens), **options}
    return linear_attention, {**linear.make_inputs(tokens=tokens, streams=2), **options}


CASES = [("delta_rule", o) for o in OPTIONS] + [("linear_attention", {}), ("linear_attention", {"log_retention": None})]
cases = pytest.mark.parametrize(("op", "options"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "-")
backends = pytest.mark.parametrize("backend", BACKENDS)


def dense_delta(args: dict[str, Any]) -> Tensor:
    """Read-outs of the first row and head from the transition matrices `S_t = A_t S_{t-1} + B_t`, unrolled."""
    q, k, v, strength = (args[name][0, :, 0] for name in ("query", "key", "value", "strength"))
    p = k if args["erase_key"] is None else args["erase_key"][0, :, 0]
    a = torch.ones(len(q)) if args["log_retention"] is None else args["log_retention"][0, :, 0].exp()
    eye = torch.eye(q.shape[1], dtype=q.dtype)
    steps = []
    for t in range(len(q)):
        inner = a[t] if args.get("erase_after_decay") else 1.0
        steps.append(
            (a[t] * eye - strength[t] * inner * torch.outer(k[t], p[t]), strength[t] * torch.outer(k[t], v[t]))
        )
    outputs = []
    for t in range(len(q)):
        total = args["state"][0, 0]
        for transition, write in steps[: t + 1]:
            total = transition @ total + write
        outputs.append(q[t] @ total)
    return torch.stack(outputs)


@backends
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "-")
def test_delta_rule_is_a_product_of_transitions(options: dict[str, Any], backend: str) -> None:
    _, args = case("delta_rule", 9, **options)
    close(delta_rule(**args, backend=backend)[0][0, :, 0], dense_delta(args), BOUND)


@backends
def test_linear_attention_is_attention_without_softmax(backend: str) -> None:
    args = linear.make_inputs(tokens=70, streams=2)
    total = args["log_retention"].cumsum(1)
    decay = (total[:, :, None] - total[:, None]).exp().permute(0, 3, 1, 2).tril()
    want = torch.einsum("bthk,bhkv->bthv", args["query"] * total.exp()[..., None], args["state"])
    for j in range(2):
        scores = torch.einsum("bthk,bihk->bhti", args["query"], args["key"][:, :, j]) * decay
        want = want + torch.einsum("bhti,bihv->bthv", scores, args["value"][:, :, j])
    close(linear_attention(**args, backend=backend)[0], want, BOUND)


@cases
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130, 577])
def test_chunked_is_the_reference_with_its_gradients(op: str, options: dict[str, Any], tokens: int) -> None:
    rule, args = case(op, tokens, **options)
    found = {}
    for backend in BACKENDS:
        leaves = {n: x.clone().requires_grad_() for n, x in args.items() if isinstance(x, Tensor)}
        y, state = rule(**{**args, **leaves}, backend=backend)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        gradients = torch.autograd.grad((y * weights).sum() + state.square().sum(), list(leaves.values()))
        found[backend] = [y, state, *gradients]
    for got, want in zip(*found.values(), strict=True):
        close(got, want, BOUND)


@cases
@backends
def test_pieces_equal_one_pass(op: str, options: dict[str, Any], backend: str) -> None:
    rule, args = case(op, 140, **options)
    want, want_state = rule(**args, backend=backend)
    outputs, state = [], args["state"]
    for part in torch.arange(140).split([1, 63, 1, 70, 5]):
        inputs = {
            n: x[:, part] if isinstance(x, Tensor) and n != "state" else x for n, x in {**args, "state": state}.items()
        }
        y, state = rule(**inputs, backend=backend)
        outputs.append(y)
    close(torch.cat(outputs, dim=1), want, BOUND)
    close(state, want_state, BOUND)


@cases
@backends
def test_state_ends_at_each_rows_last_real_token(op: str, options: dict[str, Any], backend: str) -> None:
    rule, args = case(op, 70, **options)
    lengths = torch.tensor([0, 66])
    y, state = rule(**args, lengths=lengths, backend=backend)
    assert torch.equal(state[0], args["state"][0])
    row = {n: x[1:, :66] if isinstance(x, Tensor) and n != "state" else x for n, x in args.items()}
    want, want_state = rule(**{**row, "state": args["state"][1:]}, backend=backend)
    close(y[1:, :66], want, BOUND)
    close(state[1:], want_state, BOUND)


@cases
def test_retention_at_its_limits(op: str, options: dict[str, Any]) -> None:
    if "log_retention" in options:
        return
    rule, args = case(op, 70, **options)
    limits = torch.zeros_like(args["log_retention"])
    limits[:, ::3] = -torch.inf
    found = {}
    for backend in BACKENDS:
        gate = limits.clone().requires_grad_()
        y, state = rule(**{**args, "log_retention": gate}, backend=backend)
        (gradient,) = torch.autograd.grad(y.square().sum(), gate)
        assert gradient.isfinite().all()
        found[backend] = (y, state, gradient)
    for got, want in zip(*found.values(), strict=True):
        close(got, want, BOUND)


@cases
def test_no_matrix_product_meets_subnormal_numbers(op: str, options: dict[str, Any]) -> None:
    """They would make it many times as slow on a CPU, where gates forget fast."""
    rule, args = case(op, 256, **options)
    leaves = {n: x.float().requires_grad_() for n, x in args.items() if isinstance(x, Tensor)}
    if "log_retention" in leaves:
        leaves["log_retention"] = torch.full_like(leaves["log_retention"], -1.5).requires_grad_()
    with Subnormal() as subnormal:
        rule(**{**args, **leaves})[0].square().mean().backward()
    assert subnormal.products > 0
    assert subnormal.factors == 0


@pytest.mark.slow
@cases
@backends
def test_gradcheck(op: str, options: dict[str, Any], backend: str) -> None:
    rule, args = case(op, 3, **options)
    names = [n for n, x in args.items() if isinstance(x, Tensor)]
    leaves = [
        (args[n][:1, :, :, :2] if n in ("key", "value") and op == "linear_attention" else args[n][:1]).clone()
        for n in names
    ]
    if op == "linear_attention":
        leaves = [x if n in ("key", "value", "state") else x[:, :, :2] for n, x in zip(names, leaves, strict=True)]
        leaves[names.index("state")] = args["state"][:1, :2].clone()
    leaves = [x.detach().requires_grad_() for x in leaves]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return rule(**{**args, **dict(zip(names, tensors, strict=True))}, backend=backend)

    assert torch.autograd.gradcheck(call, leaves, **GRADCHECK)


@cases
def test_float32_follows_float64(op: str, options: dict[str, Any]) -> None:
    rule, args = case(op, 300, **options)
    narrow = {n: x.float() if isinstance(x, Tensor) else x for n, x in args.items()}
    for got, want in zip(rule(**narrow), rule(**args), strict=True):
        close(got.double(), want, OP[torch.float32])


@cases
def test_backward_keeps_inputs_and_few_states(op: str, options: dict[str, Any]) -> None:
    """Nothing of size T x C is kept: besides the results only a state per 512 tokens is alive."""
    rule, args = case(op, 1024, **options)
    leaves = {n: x.clone().requires_grad_() for n, x in args.items() if isinstance(x, Tensor)}
    with Storages() as storages:
        kept = rule(**{**args, **leaves})
    assert kept[0].grad_fn is not None
    results = sum(x.nbytes for x in kept)
    assert storages.alive() <= results + 2 * args["state"].nbytes


def test_a_piece_is_computed_again_under_its_autocast() -> None:
    seen = []

    def f(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return x * state, state

    x, state = torch.randn(1, 6, 2, requires_grad=True), torch.ones(2)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = scan(f, state, split((x,), 2))
    y.sum().backward()
    assert seen == [True] * 6


class Storages(TorchDispatchMode):
    """Counts the bytes that operations under it have allocated and that are still held, by whomever."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        gc.collect()
        return sum(size for storage, size in self.made.values() if not storage.expired())


def test_refuses_shapes_that_do_not_fit() -> None:
    args = delta.make_inputs()
    for name in ("key", "value", "strength", "log_retention", "state", "erase_key"):
        with pytest.raises(ValueError, match=f"delta_rule: {name}.*expected .* got"):
            delta_rule(**{**args, name: args[name][:, :2]})
    args = linear.make_inputs()
    for name in ("key", "value", "log_retention", "state"):
        with pytest.raises(ValueError, match=f"linear_attention: {name}.*expected .* got"):
            linear_attention(**{**args, name: args[name][:, :2]})
    with pytest.raises(ValueError, match="dtype of the state"):
        delta_rule(**{**delta.make_inputs(), "state": delta.make_inputs()["state"].half()})


# One rule as a case of another ------------------------------------------------------------------------------------


def test_comba_without_its_additions_is_deltanet() -> None:
    args = delta.make_inputs(tokens=70)
    comba = {**args, "erase_key": args["key"], "log_retention": torch.zeros_like(args["log_retention"])}
    want = delta_rule(**{**args, "erase_key": None, "log_retention": None})
    for a, b in zip(delta_rule(**comba), want, strict=True):
        close(a, b, BOUND)


def test_gated_deltanet_is_comba_with_a_decayed_erase_key() -> None:
    args = delta.make_inputs(tokens=70)
    gated = delta_rule(**{**args, "erase_key": None}, erase_after_decay=True)
    decayed = args["log_retention"].exp()[..., None] * args["key"]
    for a, b in zip(delta_rule(**{**args, "erase_key": decayed}), gated, strict=True):
        close(a, b, BOUND)
    comba = delta_rule(**{**args, "erase_key": None})[0]
    assert (comba - gated[0]).abs().max() > 0.01


def test_deltanet_is_a_deep_memory_of_one_matrix() -> None:
    """Titans with a matrix memory, no momentum, no forgetting and an anchor per token."""
    args = delta.make_inputs(tokens=20, value_dim=8)
    want, _ = delta_rule(**{**args, "erase_key": None, "log_retention": None})
    state = initial_state([args["state"].mT], 2, chunk_size=1, momentum=False)
    got, _ = deep_memory(
        args["query"], args["key"], args["value"], None, None, args["strength"], state, chunk_size=1, residual=False
    )
    close(got, want, BOUND)


def test_streams_add_up() -> None:
    """SWLA is gated linear attentions with one decay; without its second stream it is one."""
    args = linear.make_inputs(tokens=70, streams=2)
    start = torch.zeros_like(args["state"])
    both, _ = linear_attention(**{**args, "state": start})
    one, two = (
        linear_attention(
            **{**args, "key": args["key"][:, :, j : j + 1], "value": args["value"][:, :, j : j + 1], "state": start}
        )[0]
        for j in range(2)
    )
    close(both, one + two, BOUND)
    silent = args["value"] * torch.tensor([1.0, 0.0], dtype=torch.float64)[:, None, None]
    close(linear_attention(**{**args, "value": silent, "state": start})[0], one, BOUND)


# The models -------------------------------------------------------------------------------------------------------


def mixer(name: str, **options: Any) -> matrix_memory.MatrixMemory:
    return next(
        layer.mixer
        for layer in zoo.build(name, torch.float64, **options).model.layers
        if isinstance(layer.mixer, matrix_memory.MatrixMemory)
    ).eval()


def watch(layer: matrix_memory.MatrixMemory, seen: dict[str, Any]) -> None:
    """Keep the read-outs of the layer's next pass as `seen["y"]`."""
    memorize = layer.memorize

    def watched(*args: Any) -> Any:
        y, state = memorize(*args)
        seen["y"] = y
        return y, state

    layer.memorize = watched  # type: ignore[method-assign]


def step(layer: matrix_memory.MatrixMemory, tokens: int) -> Step:
    rotary = {}
    if (embedding := layer.rotary_embedding()) is not None:
        rotary[embedding.key] = embedding(torch.ones(1, dtype=torch.float64), torch.arange(tokens)[None])
    return Step(torch.zeros(1, dtype=torch.int64), None, torch.full((1,), tokens), rotary)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("axis", [None, "key", "value", "head"])
def test_swla_is_its_equation(window: int, axis: str | None) -> None:
    """Token by token, from the layer's own projections; under Proteus what is closed has no part in it."""
    schedule = {} if axis is None else {"capacity_blocks": 2, "capacity_context": 6, "capacity_axis": axis}
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    layer = mixer("swla-e1", window=window, **schedule)
    seen: dict[str, Any] = {}
    watch(layer, seen)
    with torch.no_grad():
        layer(x, step(layer, 9), None)
        stream = torch.nn.functional.pad(layer.qkv_proj(x)[0], (0, 0, 3, 0))
        mixed = torch.stack([(layer.conv.weight.T * stream[t : t + 4]).sum(0) for t in range(9)])
        q, k, v = (p.view(9, 2, -1) for p in torch.nn.functional.silu(mixed).split(layer.widths, dim=-1))
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        gates = torch.sigmoid(x[0] @ layer.gates.weight.T + layer.gates.bias).view(9, 1 + window, 2)
        for h in range(2):
            memory = torch.zeros(layer.key_dim, layer.value_dim, dtype=torch.float64)
            for t in range(9):
                is_open = torch.ones_like(memory)
                if t < 3:  # the first of two blocks
                    if axis == "key":
                        is_open[layer.key_dim // 2 :] = 0
                    elif axis == "value":
                        is_open[:, layer.value_dim // 2 :] = 0
                    elif axis == "head" and h == 1:
                        is_open[:] = 0
                new = (1 - gates[t, 0, h]) * memory
                for lag in range(min(window, t + 1)):
                    new = new + gates[t, 1 + lag, h] * torch.outer(k[t - lag, h], v[t - lag, h])
                memory = torch.where(is_open > 0, new, memory)
                close(seen["y"][0, t, h], q[t, h] @ (memory * is_open), 1e-10)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("on", ["keys", "values", "heads"])
@pytest.mark.parametrize("tokens", [2, 7])
def test_the_gradients_of_a_window(window: int, on: str, tokens: int) -> None:
    """Of queries, pairs and strengths, those of the tokens before included, also where there are more of these."""
    units = {"keys": 4, "values": 3, "heads": 1}[on]

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)

    inputs = draw(tokens, 2, 2, 4), draw(tokens, 2, 3), draw(window - 1, 2, 4), draw(window - 1, 2, 3)
    strengths = [draw(tokens, 2, units) for _ in range(window)]

    def outputs(*given: Tensor) -> tuple[Tensor, ...]:
        found = matrix_memory._Window.apply(*given[:4], on == "keys", *given[4:])
        return tuple(x for x in found if x is not None and x.numel() > 0)

    assert torch.autograd.gradcheck(outputs, (*inputs, *strengths))


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_swlas_state_does_not_see_autocast(tokens: int) -> None:
    layer = mixer("swla-e1").float()
    qk, v = torch.randn(1, tokens, 2, layer.heads, layer.key_dim), torch.randn(1, tokens, layer.heads, layer.value_dim)
    controls = torch.randn(1, tokens, layer.heads), torch.randn(1, tokens, layer.window, layer.heads)
    begun = layer._begin(torch.zeros(1, tokens, sum(layer.widths)))
    found = []
    for enabled in (True, False):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(layer.memorize(qk, v, controls, step(layer, tokens), begun))
    for got, want in zip(pytree.tree_leaves(found[0]), pytree.tree_leaves(found[1]), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("name", ["retnet-e1", "deltanet-e1", "gated_deltanet-e1", "comba-e1", "swla-e1"])
def test_the_norm_scales_the_read_outs(name: str, gate: str | None) -> None:
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    layer = mixer(name, rms_norm_eps=0.1, output_gate=gate)
    seen: dict[str, Any] = {}
    watch(layer, seen)
    with torch.no_grad():
        got, _ = layer(x, step(layer, 9), None)
        y = seen["y"] * (1 if name == "swla-e1" else layer.key_dim**-0.5)
        y = (y / (y.square().mean(-1, keepdim=True) + 0.1).sqrt() * layer.norm.weight).flatten(2)
        if gate is not None:
            y = y * torch.nn.functional.silu(layer.gate_proj(x))
        close(got, layer.o_proj(y), 1e-10)


def test_retnet_is_its_equation() -> None:
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    layer = mixer("retnet-e1")
    seen: dict[str, Any] = {}
    watch(layer, seen)
    with torch.no_grad():
        layer(x, step(layer, 9), None)
        q, k, v = (p.view(9, 2, -1) for p in layer.qkv_proj(x)[0].split(layer.widths, dim=-1))
        half = layer.key_dim // 2
        angle = torch.arange(9)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        turn = torch.polar(torch.ones(9, half, dtype=torch.float64), angle.double())[:, None]
        q, k = (torch.complex(z[..., :half], z[..., half:]) * turn for z in (q, k))
        for h, gamma in enumerate((1 - 2**-5, 1 - 2**-6)):
            for t in range(9):
                scores = (q[t, h] * k[: t + 1, h].conj()).real.sum(-1) * gamma ** (t - torch.arange(t + 1))
                close(seen["y"][0, t, h], scores @ v[: t + 1, h], 1e-5)  # transformers' angles


@pytest.mark.parametrize("variant", ["paper", "fla"])
def test_comba_and_gated_deltanet_are_their_equations(variant: str) -> None:
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    for name, options in (("comba-e1", {"variant": variant}), ("gated_deltanet-e1", {}), ("deltanet-e1", {})):
        layer = mixer(name, **options)
        seen: dict[str, Any] = {}
        watch(layer, seen)
        with torch.no_grad():
            layer(x, step(layer, 9), None)
            stream = torch.nn.functional.pad(layer.qkv_proj(x)[0], (0, 0, 3, 0))
            mixed = torch.stack([(layer.conv.weight.T * stream[t : t + 4]).sum(0) for t in range(9)])
            q, k, v = (p.view(9, 2, -1) for p in torch.nn.functional.silu(mixed).split(layer.widths, dim=-1))
            unit_q, unit_k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
            strength = torch.sigmoid(x[0] @ layer.strength_proj.weight.T) * (2 if name == "deltanet-e1" else 1)
            if name == "deltanet-e1":
                keep = torch.ones(9, 2)
            else:
                decay = layer.decay
                keep = torch.exp(
                    -decay.log_rate.exp() * (1 + (x[0] @ decay.proj.weight.T + decay.time_bias).exp()).log()
                )
            for h in range(2):
                erase, correction = 1.0, 0.0
                if name == "comba-e1":
                    erase, correction = torch.sigmoid(layer.erase_logit[h]), layer.correction[h]
                memory = torch.zeros(layer.key_dim, layer.value_dim, dtype=torch.float64)
                for t in range(9):
                    read, p = unit_q[t, h] - correction * unit_k[t, h], erase * unit_k[t, h]
                    if variant == "fla" and name == "comba-e1":
                        read, p = q[t, h] - correction * erase * k[t, h], unit_k[t, h]
                        read = read / read.norm()
                    held = p @ memory * (keep[t, h] if name == "gated_deltanet-e1" else 1)
                    memory = keep[t, h] * memory + strength[t, h] * torch.outer(unit_k[t, h], v[t, h] - held)
                    close(seen["y"][0, t, h], read @ memory, 1e-10)


@pytest.mark.parametrize("axis", ["key", "value", "head"])
@pytest.mark.parametrize("name", ["comba-e1", "retnet-e1", "gated_deltanet-e1"])
def test_masked_writes_are_the_gated_recurrence(name: str, axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proteus literally: a closed part of the memory neither reads nor writes nor decays, and keeps its values."""
    blocks, interval = 2, 3
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    layer = mixer(name, capacity_blocks=blocks, capacity_context=blocks * interval, capacity_axis=axis)
    seen: dict[str, Any] = {}
    watch(layer, seen)
    with torch.no_grad():
        layer(x, step(layer, 9), None)
    got = seen["y"]

    def literal(rule: Callable) -> Callable:
        def gated(query: Tensor, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
            *inputs, state = (*tensors,)
            outputs = []
            for t in range(query.shape[1]):
                share = (min(blocks, 1 + t // interval)) / blocks
                sizes = {"head": state.shape[1], "key": state.shape[2], "value": state.shape[3]}
                cut = int(share * sizes[axis])
                mask = torch.zeros_like(state)
                mask[
                    {
                        "head": (slice(None), slice(cut)),
                        "key": (..., slice(cut), slice(None)),
                        "value": (..., slice(cut)),
                    }[axis]
                ] = 1
                at = slice(t, t + 1)
                now = {n: o[:, at] if isinstance(o, Tensor) else o for n, o in options.items()}
                one = [None if i is None else i[:, at] for i in inputs]
                _, new = rule(query[:, at], *one, state * mask, **now)
                state = torch.where(mask > 0, new, state)
                outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state * mask)[:, None])
            return torch.cat(outputs, dim=1), state

        return gated

    monkeypatch.setattr(matrix_memory, "delta_rule", literal(delta_rule))
    monkeypatch.setattr(matrix_memory, "linear_attention", literal(linear_attention))
    monkeypatch.setattr(type(layer), "opened", lambda self, step, keys, values: (list(keys), values))
    with torch.no_grad():
        layer(x, step(layer, 9), None)
    close(got, seen["y"], 1e-10)


def test_hybrid_layers_are_what_layer_types_say() -> None:
    kinds = ["linear_attention", "sliding_attention", "full_attention"]
    model = memzoo.CombaForCausalLM(
        memzoo.CombaConfig(
            vocab_size=61, hidden_size=24, num_hidden_layers=3, num_attention_heads=2, expand_k=1.0, layer_types=kinds
        )
    )
    mixers = [layer.mixer for layer in model.model.layers]
    assert isinstance(mixers[0], matrix_memory.CombaMemory)
    assert [m.attention.window for m in mixers[1:]] == [512, None]


@pytest.mark.parametrize(
    ("config_class", "options", "match"),
    [
        ("RetNetConfig", {"conv_width": 4}, "conv_width=4"),
        ("DeltaNetConfig", {"expand_k": 0.7}, "expand_k=0.7"),
        ("DeltaNetConfig", {"output_gate": "relu"}, "output_gate='relu'"),
        ("DeltaNetConfig", {"capacity_axis": "row"}, "capacity_axis='row'"),
        ("DeltaNetConfig", {"capacity_axis": "head", "capacity_blocks": 3}, "capacity_blocks=3"),
        ("DeltaNetConfig", {"layer_types": ["linear_attention"]}, "layer_types"),
        ("DeltaNetConfig", {"unit_eps": -1.0}, "unit_eps=-1.0: expected at least 0"),
        ("DeltaNetConfig", {"expand_k": math.inf}, "expand_k=inf: expected a factor"),
        ("DeltaNetConfig", {"layer_types": ["full_attention"] * 2, "capacity_blocks": 2}, "no memory to open"),
        ("RetNetConfig", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "expected a rope_type of"),
        ("RetNetConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "expected a rope_type of"),
        (
            "TransformerPlusPlusConfig",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "expected partial_rotary_factor 1",
        ),
        (
            "TransformerPlusPlusConfig",
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            "expected one rotary embedding for all layers",
        ),
        ("CombaConfig", {"variant": "other"}, "variant='other'"),
        ("CombaConfig", {"allow_negative_eigenvalues": True}, "allow_negative_eigenvalues=True: expected False"),
        ("SWLAConfig", {"window": 0}, "window=0"),
        ("TransformerPlusPlusConfig", {"capacity_blocks": 2}, "capacity_blocks=2"),
        (
            "TransformerPlusPlusConfig",
            {"num_key_value_heads": 3},
            "num_key_value_heads=3: expected a divisor of num_att",
        ),
        ("TransformerPlusPlusConfig", {"num_attention_heads": 5}, "num_attention_heads=5: .* or a head_dim"),
        ("TransformerPlusPlusConfig", {"head_dim": 5}, "head_dim=5: expected an even head width"),
        ("GatedDeltaNetConfig", {"num_memory_heads": 5}, "expand_k=1.0: .* a multiple of 5 heads"),
        ("GatedDeltaNetConfig", {"num_memory_heads": 0}, "num_memory_heads=0: expected None, or at least 1"),
    ],
)
def test_configs_refuse_what_cannot_be(config_class: str, options: dict[str, Any], match: str) -> None:
    shape = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "expand_k": 1.0, "expand_v": 1.0}
    with pytest.raises(ValueError, match=match):
        getattr(memzoo, config_class)(**{**shape, **options})


def test_attention_and_memory_have_their_own_heads() -> None:
    config = memzoo.GatedDeltaNetConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_memory_heads=3,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        rope_theta=500.0,
        vocab_size=61,
    )
    memory, attention = (layer.mixer for layer in memzoo.GatedDeltaNetForCausalLM(config).model.layers)
    assert (memory.heads, memory.key_dim) == (3, 6)
    assert attention.o_proj.weight.shape == (24, 32)
    assert attention.attention.rotary.inv_freq[1] == pytest.approx(500.0**-0.25)


@pytest.mark.parametrize("name", ["gated_deltanet-e1", "comba-e1", "swla-e1", "retnet-e1"])
def test_pieces_take_the_weights_of_the_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights given by `functional_call` are those of the recomputation; a weight changed in between is an error."""
    model, ids = zoo.build(name, torch.float64), zoo.tokens(1, 40)
    given = {n: (p.detach() * 1.1).requires_grad_() for n, p in model.named_parameters()}
    found = []
    for size in (512, 16):
        monkeypatch.setattr(matrix_memory, "SEGMENT", size)
        loss = torch.func.functional_call(model, given, (ids,), {"labels": ids}).loss
        found.append(torch.autograd.grad(loss, list(given.values())))
    for a, b in zip(*found, strict=True):
        close(b, a, 1e-10)
    loss = model(ids, labels=ids).loss
    with torch.no_grad():
        model.model.layers[0].mixer.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("op", ["delta_rule", "linear_attention"])
def test_several_chunks_are_one_graph(op: str) -> None:
    f, inputs = case(op, 130)
    inputs["query"].requires_grad_()
    wanted = f(**inputs)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(**inputs), wanted, strict=True):
        close(got, want, BOUND)
    compiled(**inputs)[0].sum().backward()
    assert bool(inputs["query"].grad.any())


@pytest.mark.parametrize("name", ["retnet-e1", "deltanet-e1", "gated_deltanet-e1", "comba-e1", "swla-e1"])
def test_a_layer_with_its_gradients_is_one_graph(name: str) -> None:
    layer = mixer(name)
    x, at = torch.randn(2, 70, 24, dtype=torch.float64, requires_grad=True), step(layer, 70)

    def f(x: Tensor) -> Tensor:
        y, state = layer(x, at, None)
        return y.square().sum() + sum(part.square().sum() for part in state)

    leaves = [x, *layer.parameters()]
    wanted = torch.autograd.grad(f(x), leaves)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for got, want in zip(torch.autograd.grad(compiled(x), leaves), wanted, strict=True):
        close(got, want, BOUND)
