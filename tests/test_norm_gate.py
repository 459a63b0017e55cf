"""The gated norm and the norm: what their equations say, bit by bit what torch computes, their refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tolerances import GRADCHECK, OP, close
from torch import Tensor

from memzoo.kernels.norm_gate import OP as NORM_GATE
from memzoo.kernels.norm_gate import make_inputs, norm_gate
from memzoo.kernels.rms_norm import rms_norm

BACKENDS = [name for name in NORM_GATE.names() if name != "triton"]  # which has no float64: tests/triton_parity.py
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads": ({"heads": 3}, {"activation": "silu"}),
    "branches": ({"gate_norm": True}, {"activation": "sigmoid"}),
    "skip": ({"norm": False, "gate_norm": True}, {"activation": "sigmoid", "scale": 2}),
}


def by_hand(args: dict[str, Any], activation: str, scale: float = 1) -> Tensor:
    """Each number of a row by its equation."""
    (*_, width), norms = args["x"].shape, []
    for x, weight in ((args["x"], args["weight"]), (args["gate"].view_as(args["x"]), args["gate_weight"])):
        rows = []
        for row in x.reshape(-1, width):
            length = (sum(v * v for v in row) / width + 1e-6) ** 0.5
            rows.append(
                row if weight is None else torch.stack([w * v / length for w, v in zip(weight, row, strict=True)])
            )
        norms.append(torch.stack(rows).view(args["gate"].shape))
    x, gate = norms
    return x * scale / (1 + torch.exp(-gate)) * (gate if activation == "silu" else 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_is_its_equation(form: str, backend: str) -> None:
    sizes, options = FORMS[form]
    args: dict[str, Any] = make_inputs(2, **sizes)
    close(norm_gate(**args, **options, eps=1e-6, backend=backend), by_hand(args, **options), OP[torch.float64])
    leaves = {n: x.requires_grad_() for n, x in args.items() if x is not None}

    def of(*tensors: Tensor) -> Tensor:
        given = {**args, **dict(zip(leaves, tensors, strict=True))}
        return norm_gate(**given, **options, eps=1e-6, backend=backend)

    assert torch.autograd.gradcheck(of, tuple(leaves.values()), **GRADCHECK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_on_a_cpu_is_torchs_functions_bit_by_bit(form: str, dtype: torch.dtype) -> None:
    """What the models computed before there was an op, and its gradients."""
    sizes, options = FORMS[form]
    args: dict[str, Any] = make_inputs(2, **sizes, dtype=dtype)
    leaves = [x.requires_grad_() for x in args.values() if x is not None]
    x, weight, gate, gate_weight = args.values()
    if form == "heads":
        want = F.rms_norm(x, weight.shape, weight, 1e-6).flatten(-2) * F.silu(gate)
    else:
        gate = torch.sigmoid(F.rms_norm(gate, gate_weight.shape, gate_weight, 1e-6))
        want = F.rms_norm(x, weight.shape, weight, 1e-6) * gate if form == "branches" else x * (2 * gate)
    got = norm_gate(**args, **options, eps=1e-6)
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad(y.float().square().sum(), leaves) for y in (got, want)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_takes_the_wider_dtype(backend: str) -> None:
    args = make_inputs(2, heads=2, dtype=torch.bfloat16)
    for name, wide in (("x", torch.float32), ("gate", torch.float32), ("weight", torch.bfloat16)):
        given = {**args, name: args[name].float()}
        assert norm_gate(**given, activation="silu", eps=1e-6, backend=backend).dtype == wide


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": torch.ones(2, 5, 7)}, r"gate: expected the shape of x, .* got \(2, 5, 7\) for \(2, 5, 6\)"),
        ({"x": torch.ones(2, 1, 5, 6)}, r"gate: expected the shape of x, .* got \(2, 5, 6\) for \(2, 1, 5, 6\)"),
        ({"x": torch.ones(2, 5, 2, 3), "gate_weight": torch.ones(3)}, "gate: expected the shape of x"),
        ({"weight": torch.ones(5)}, r"weight: expected \(6,\) = \[W\], got \(5,\)"),
        ({"gate_weight": torch.ones(1)}, r"gate_weight: expected \(6,\) = \[W\], got \(1,\)"),
        ({"activation": "relu"}, r"activation: expected one of \['silu', 'sigmoid'\], got 'relu'"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        norm_gate(**{**make_inputs(2, dtype=torch.float32), "activation": "silu", "eps": 1e-6, **changes})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 6), (2, 1, 3, 6), (1, 1, 6), (1, 1, 1, 6)], ids=str)
@torch.no_grad()
def test_the_norm_of_one_token_is_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of lively rows, and of rows as small as the epsilon and zero, where it counts."""
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(6, dtype=dtype)
    for scale, eps in ((1.0, 1e-6), (1e-3, 1e-6), (1e-3, 1e-5), (0.0, 1e-6)):
        close(rms_norm(scale * x, weight, eps), torch.rms_norm(scale * x, (6,), weight, eps), OP[dtype])


def test_the_norm_of_one_vector_has_forward_derivatives() -> None:
    x, tangent, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((1, 1, 8), (1, 1, 8), (8,)))
    _, got = torch.func.jvp(lambda x: rms_norm(x, weight, 1e-6), (x,), (tangent,))
    _, want = torch.func.jvp(lambda x: F.rms_norm(x, (8,), weight, 1e-6), (x,), (tangent,))
    close(got, want, OP[torch.float64])
    close(torch.vmap(lambda x: rms_norm(x, weight, 1e-6))(x[None])[0], rms_norm(x, weight, 1e-6), OP[torch.float64])


def test_elsewhere_the_norm_is_torchs_own() -> None:
    """Of several tokens, in low precision, where gradients are wanted: bit by bit."""
    several, one, weight = torch.randn(2, 3, 6), torch.randn(2, 1, 6), torch.randn(6, requires_grad=True)
    assert torch.equal(rms_norm(several, weight.detach(), 1e-6), torch.rms_norm(several, (6,), weight, 1e-6))
    assert torch.equal(rms_norm(one, weight, 1e-6), torch.rms_norm(one, (6,), weight, 1e-6))
    low, low_weight = one.bfloat16(), weight.detach().bfloat16()
    assert torch.equal(rms_norm(low, low_weight, 1e-6), torch.rms_norm(low, (6,), low_weight, 1e-6))
    (gradient,) = torch.autograd.grad(rms_norm(one, weight, 1e-6).sum(), weight)
    assert gradient.abs().max() > 0
