"""Self-modifying memories: the reference against autograd of the inner loss, torch's form against the reference, the
layer around them, bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
import zoo
from tolerances import GRADCHECK, MODEL, OP, close
from torch import Tensor

from memzoo.kernels.deep_memory import ACTIVATIONS
from memzoo.kernels.deep_memory.activations import ACTIVATION
from memzoo.kernels.self_modifying import MEMORY, Weights, make_inputs, self_modifying
from memzoo.modeling.decoder import Step

# Triton has no float64: tests/triton_parity.py.
NAMES = ("k", "v", "eta", "alpha", "memory", "q")
RULE: dict[str, Any] = {"chunk_size": 3, "self_chunk_size": 6, "step_limit": 0.25}
KINDS = pytest.mark.parametrize("adaptive", [False, True], ids=["given", "adaptive"])


def read(args: dict[str, Any], sizes: list[int], **options: Any) -> tuple[Tensor, Weights, Weights]:
    """Pieces of these sizes, one after another."""
    now, anchor, position, outputs, start = args["now"], args["anchor"], args["position"], [], 0
    for size in sizes:
        part = {n: None if args[n] is None else args[n][:, start : start + size] for n in ("u", "query")}
        given = {**args, **part, "now": now, "anchor": anchor, "position": position + start}
        y, now, anchor = self_modifying(**given, **{**RULE, **options})
        outputs.append(y)
        start += size
    return torch.cat(outputs, dim=1), now, anchor


def by_equation(
    args: dict[str, Any], row: int, head: int, activation: str = "gelu", bound: float = math.inf, **rule: Any
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]], dict[str, tuple[Tensor, Tensor]]]:
    """Eq 86-90 of arXiv 2512.24695 for one head of one sequence, token by token; gradients by autograd."""
    rule = {**RULE, **rule}
    act, heads = ACTIVATION[activation].value, args["u"].shape[2]
    now, anchor = (matrices(args[name], heads, row, head) for name in ("now", "anchor"))  # W_2, W_1
    (r_eta, r_alpha), (b_eta, b_alpha) = args["gate_weight"][:, head], args["gate_bias"][:, head]

    def apply(weights: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        return x + weights[1] @ act(weights[0] @ x)

    outputs = []
    for t in range(args["u"].shape[1]):
        u, read_before = args["u"][row, t, head], int(args["position"][row]) + t
        for name in now:
            if read_before % rule["chunk_size" if name == "memory" else "self_chunk_size"] == 0:
                anchor[name] = now[name]
        k, v = F.normalize(apply(anchor["k"], u), dim=0), apply(anchor["v"], u)
        eta, alpha = (apply(anchor[name], u) for name in ("eta", "alpha"))
        eta, alpha = (x / x.square().mean().sqrt() for x in (eta, alpha))
        eta = rule["step_limit"] * torch.sigmoid(r_eta @ eta + b_eta)
        alpha = torch.sigmoid(-(r_alpha @ alpha) - b_alpha)
        q = F.normalize(apply(anchor["q"], u) if "q" in now else args["query"][row, t, head], dim=0)
        outputs.append(apply(anchor["memory"], q))
        for name, (w2, w1) in now.items():
            leaves = tuple(w.detach().requires_grad_() for w in anchor[name])
            with torch.enable_grad():
                loss = 0.5 * (apply(leaves, k.detach()) - apply(anchor[name], v).detach()).square().sum()
                g2, g1 = torch.autograd.grad(loss, leaves)
            shorter = (bound / (g1.square().sum() + g2.square().sum()).sqrt()).clamp(max=1)
            w2 = w2 @ (alpha * torch.eye(len(u), dtype=u.dtype) - eta * torch.outer(k, k)) - eta * shorter * g2
            now[name] = w2, alpha * w1 - eta * shorter * g1
    return torch.stack(outputs), now, anchor


def matrices(weights: Weights, heads: int, row: int, head: int) -> dict[str, tuple[Tensor, Tensor]]:
    """`W_2` and `W_1` of each memory."""
    second = weights.second[row].unflatten(0, (heads, -1))[head]
    first = weights.first[row, head].unflatten(1, (len(second), -1))
    return {NAMES[m]: (first[:, m].T, second[m].T) for m in range(len(second))}


@KINDS
@pytest.mark.parametrize("bound", [math.inf, 0.5])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_is_the_equation(activation: str, bound: float, adaptive: bool) -> None:
    """Over several chunks of both kinds, in rows at different places of theirs."""
    args = make_inputs(tokens=14, adaptive_query=adaptive, positions=(0, 4))
    one = [1] * 14
    with torch.no_grad():
        y, *found = read(args, one, activation=activation, max_gradient_norm=bound, backend="reference")
        for row in range(2):
            for head in range(2):
                want, *wanted = by_equation(args, row, head, activation, bound)
                close(y[row, :, head], want, OP[torch.float64])
                for weights, expected in zip(found, wanted, strict=True):
                    for name, got in matrices(weights, 2, row, head).items():
                        for a, b in zip(got, expected[name], strict=True):
                            close(a, b, OP[torch.float64])


def leaves_of(args: dict[str, Any]) -> dict[str, Any]:
    """The same, every floating-point tensor a leaf."""
    return pytree.tree_map_only(Tensor, lambda x: x.clone().requires_grad_(x.is_floating_point()), args)


def results(args: dict[str, Any], sizes: list[int], **options: Any) -> list[Tensor]:
    """Real outputs, both states, and the gradient of every floating-point tensor among the arguments."""
    given = leaves_of(args)
    y, now, anchor = read(given, sizes, **options)
    lengths = options.get("lengths")
    if lengths is not None:
        y = torch.where((torch.arange(y.shape[1]) < lengths[:, None])[..., None, None], y, 0)
    found = [y, *now, *anchor]
    loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in found)
    leaves = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
    return [*found, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


@KINDS
@pytest.mark.parametrize("bound", [math.inf, 0.5])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_chunked_form_is_the_reference(activation: str, bound: float, adaptive: bool) -> None:
    """Outputs, states and every gradient: of chunks one after another, and of rows of several lengths and places."""
    cases: list[tuple[dict[str, Any], list[int], Tensor | None]] = [
        ({"batch": 1, "tokens": 14}, [3, 3, 3, 3, 2], None),
        ({"batch": 4, "tokens": 3, "positions": (6, 4, 3, 0)}, [3], torch.tensor([3, 2, 3, 0])),
    ]
    for sizes, cuts, lengths in cases:
        args = make_inputs(**sizes, adaptive_query=adaptive)
        options = {"activation": activation, "max_gradient_norm": bound, "lengths": lengths}
        got, want = (results(args, cuts, **options, backend=backend) for backend in ("chunked", "reference"))
        for a, b in zip(got, want, strict=True):
            close(a, b, OP[torch.float64])


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_every_cut_gives_the_same(backend: str) -> None:
    args = make_inputs(tokens=9)
    wanted = pytree.tree_leaves(read(args, [3, 3, 3], backend=backend))
    for sizes in ([1] * 9, [2, 1, 1, 2, 3], [1, 2, 3, 1, 1, 1]):
        for got, want in zip(pytree.tree_leaves(read(args, sizes, backend=backend)), wanted, strict=True):
            close(got, want, OP[torch.float64])


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_a_row_without_a_token_stays_as_it_is(backend: str, tokens: int) -> None:
    """Also where its next token will begin a chunk; and nothing that was given changes."""
    args = make_inputs(batch=3, tokens=tokens, positions=(6, 5, 6))
    before = pytree.tree_map_only(Tensor, torch.clone, args)
    lengths = torch.tensor([0, 0, tokens])
    with torch.no_grad():
        _, now, anchor = self_modifying(**args, **RULE, lengths=lengths, backend=backend)
    for got, old in zip((*now, *anchor), (*before["now"], *before["anchor"]), strict=True):
        assert torch.equal(got[:2], old[:2])
        assert not torch.equal(got[2], old[2])
    for x, old in zip(pytree.tree_leaves(args), pytree.tree_leaves(before), strict=True):
        assert torch.equal(x, old)


def test_boundaries_are_where_they_should_be() -> None:
    """M_memory's every three tokens, the others' every six; an anchor is the memory as it was then."""
    args = make_inputs(batch=1, tokens=1, heads=1)
    now, anchor = args["now"], args["anchor"]
    for t in range(13):
        before = now, anchor
        _, now, anchor = self_modifying(**{**args, "now": now, "anchor": anchor, "position": torch.tensor([t])}, **RULE)
        for m in range(5):
            begins = t % (3 if m == MEMORY else 6) == 0
            want = before[0 if begins else 1].second[:, m]
            assert torch.equal(anchor.second[:, m], want)
            assert not torch.equal(now.second[:, m], want)


@KINDS
def test_gradients_are_those_of_finite_differences(adaptive: bool) -> None:
    args = make_inputs(batch=1, tokens=2, heads=1, width=3, units=4, adaptive_query=adaptive)
    given = leaves_of(args)
    flat, spec = pytree.tree_flatten(given)

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        y, now, _ = self_modifying(**pytree.tree_unflatten(list(tensors), spec), **RULE, max_gradient_norm=0.5)
        return y, *now

    assert torch.autograd.gradcheck(outputs, tuple(flat), **GRADCHECK)


def test_narrow_inputs_are_widened() -> None:
    """Computed in the dtype of the weights, answered in that of u."""
    args = make_inputs(dtype=torch.float32)
    narrow = {**args, "u": args["u"].bfloat16(), "query": args["query"].bfloat16()}
    wide = {**args, "u": narrow["u"].float(), "query": narrow["query"].float()}
    for backend in ("chunked", "reference"):
        got, want = (self_modifying(**given, **RULE, backend=backend) for given in (narrow, wide))
        assert got[0].dtype == torch.bfloat16
        assert torch.equal(got[0], want[0].bfloat16())
        assert torch.equal(got[1].first, want[1].first)


def test_a_token_is_one_graph() -> None:
    """More with their gradients: tests/test_graphs.py."""
    args = make_inputs(tokens=1, positions=(3, 2))
    with torch.no_grad():
        want = self_modifying(**args, **RULE)
        got = torch.compile(self_modifying, fullgraph=True, backend="eager")(**args, **RULE)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        close(a, b, OP[torch.float64])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"u": torch.zeros(2, 3, 12)}, r"u: expected \[B, T, H, d\] with T >= 1, got \(2, 3, 12\)"),
        ({"query": torch.zeros(2, 3, 2, 5)}, r"query: expected \(2, 3, 2, 6\), got \(2, 3, 2, 5\)"),
        ({"query": None}, r"now.first: expected \(2, 2, 6, 60\), got \(2, 2, 6, 50\)"),
        ({"gate_weight": torch.zeros(2, 6)}, r"gate_weight: expected \(2, 2, 6\), got \(2, 6\)"),
        ({"gate_bias": torch.zeros(2, 3)}, r"gate_bias: expected \(2, 2\), got \(2, 3\)"),
        ({"position": torch.zeros(3, dtype=torch.int64)}, r"position: expected \(2,\), got \(3,\)"),
        ({"anchor": Weights(torch.zeros(2, 2, 6, 50), torch.zeros(2, 9, 10, 6))}, r"anchor.second: expected \(2, 10,"),
        ({"now": Weights(*(x.half() for x in make_inputs()["now"]))}, "dtype of the weights: expected float32 or"),
        ({"self_chunk_size": 7}, "self_chunk_size: expected a multiple of chunk_size=3, got 7"),
        ({"chunk_size": 2}, "tokens of a chunk: expected at most chunk_size=2, got 3"),
        ({"activation": "step"}, r"activation: expected one of \('gelu'"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm: expected above 0, got 0.0"),
        ({"backend": "triton"}, "needs a GPU"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        self_modifying(**{**make_inputs(), **RULE, **changes})


# The layer ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hope-e1", "hope-stream"])
@pytest.mark.parametrize("bound", [None, 0.5])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_the_layer_is_the_equation(name: str, bound: float | None, activation: str) -> None:
    """Without the bound not for long: memories that make their own targets grow until they overflow."""
    options: dict[str, Any] = {"max_gradient_norm": bound, "memory_activation": activation}
    mixer = zoo.build(name, torch.float64, **options).model.layers[0].mixer
    x = torch.randn(2, 4 * zoo.CHUNK + 3 if bound else 2 * zoo.CHUNK + 1, 24, dtype=torch.float64)
    outputs = []
    mixer.output.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    none = torch.zeros(2, dtype=torch.long)
    with torch.no_grad():
        mixer(x, Step(none, None, none + x.shape[1], {}), None)
        tail = x.new_zeros(2, 3, mixer.in_proj.out_features)
        streams, _ = mixer.conv.convolve(mixer.in_proj(x), mixer.conv.weight, tail, None)
        u, *q = streams.unflatten(-1, (-1, 2, 12)).unbind(2)
        weights = Weights(*(w[None].repeat(2, 1, 1, 1) for w in mixer.initial_weights()))
        gates = {"gate_weight": mixer.gates.weight, "gate_bias": mixer.gates.bias}
        args = {"u": u, "query": q[0] if q else None, **gates, "now": weights, "anchor": weights, "position": none}
        for row in range(2):
            for head in range(2):
                want, *_ = by_equation(args, row, head, activation, bound or math.inf, **RULE)
                close(outputs[0][row].unflatten(-1, (2, -1))[:, head], want, MODEL[torch.float64])
