"""The gates: what their equations say, in every backend; their refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tolerances import GRADCHECK, OP, close
from torch import Tensor

from memzoo.kernels.gates import OP as GATES
from memzoo.kernels.gates import Decay, Gate, gates, make_inputs

BACKENDS = [name for name in GATES.names() if name != "triton"]  # which has no float64: tests/triton_parity.py
KINDS = Gate("share", 0.5), Gate("log_share"), Gate("log_rest"), Gate("share", 2.0, lags=2)


def by_hand(gate: Gate, x: float) -> float:
    share = 1 / (1 + math.exp(-x))
    return {"share": gate.scale * share, "log_share": math.log(share), "log_rest": math.log(1 - share)}[gate.kind]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1], (Gate("log_rest", lags=3), KINDS[1])], ids=len)
def test_is_its_equations(kinds: tuple[Gate, ...], backend: str) -> None:
    """Each number, with the heads of a logit side by side, and a gate's lags last."""
    args = make_inputs(*kinds, decay=True)
    *found, decay = gates(**args, backend=backend)
    first = 0
    for gate, got in zip(kinds, found, strict=True):
        want = torch.empty(2, 5, 3, gate.rows, dtype=torch.float64)
        for b, t, h, lag in torch.cartesian_prod(*map(torch.arange, want.shape)).tolist():
            want[b, t, h, lag] = by_hand(gate, float(args["logits"][b, t, (first + lag) * 3 + h]))
        close(got, want if gate.lags else want[..., 0], OP[torch.float64])
        first += gate.rows
    z, rate, bias = args["decay"]
    close(decay, -(rate.exp() * (1 + (z + bias).exp()).log()), OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str) -> None:
    args = make_inputs(*KINDS, tokens=2, heads=2, decay=True)
    leaves = [x.requires_grad_() for x in (args["logits"], *args["decay"])]

    def of(x: Tensor, *decay: Tensor) -> tuple[Tensor, ...]:
        return gates(x, KINDS, Decay(*decay), backend=backend)

    assert torch.autograd.gradcheck(of, tuple(leaves), **GRADCHECK)


@pytest.mark.parametrize("backend", BACKENDS)
def test_are_float32_or_wider_and_hold_what_is_near_one(backend: str) -> None:
    """Of logits in bfloat16, also under autocast: a retention that forgets one part in a million."""
    args = make_inputs(Gate("log_rest"), Gate("log_share"), decay=True, dtype=torch.bfloat16)
    x = args["logits"].fill_(-14.0).view(2, 5, 2, 3)
    x[:, :, 1] = 14.0
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found = gates(**args, backend=backend)
        assert {y.dtype for y in found} == {torch.float32}
        for y in found[:2]:
            close(y.double() / -math.log1p(math.exp(-14)), torch.ones(2, 5, 3).double(), OP[torch.float32])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.ones(2, 5, 14)}, r"logits: expected \[B, T, 5 H\] .* got \(2, 5, 14\)"),
        ({"logits": torch.ones(5, 15)}, r"logits: expected \[B, T, 5 H\] .* got \(5, 15\)"),
        ({"kinds": ()}, r"logits: expected \[B, T, 0 H\]"),
        ({"kinds": (Gate("rest"),)}, r"kind: expected one of \['share', 'log_share', 'log_rest'\], got 'rest'"),
        ({"decay": Decay(torch.ones(2, 4, 3), torch.ones(3), torch.ones(3))}, r"decay: expected .* got \(\(2, 4, 3\),"),
        ({"decay": Decay(torch.ones(2, 5, 3), torch.ones(3), torch.ones(1))}, r"got .*, \(1,\)\)"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gates(**{**make_inputs(*KINDS, decay=True), **changes})
