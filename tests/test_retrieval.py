"""Reading a memory without writing: torch's form against the equations, what becomes the past, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import OP, close

from memzoo.kernels.retrieval import make_inputs, retrieve

# Triton has no float64: tests/triton_parity.py.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mlp": ({}, {}),
    "raw": ({"tokens": 3}, {"unit": True}),
    "matrix": ({"hidden": (), "blocks": 3}, {"unit": True}),
    "gated": ({"gated": True, "blocks": 4, "tokens": 2}, {"activation": "silu", "residual": False}),
    "deep": ({"hidden": (5, 8), "key_dim": 4, "blocks": 2}, {"activation": "tanh"}),
}


@pytest.mark.parametrize("case", CASES)
def test_torchs_form_is_that_of_the_equations(case: str) -> None:
    """With gradients, and of every row's own segment."""
    sizes, options = CASES[case]
    args = make_inputs(**sizes)
    leaves = [args["query"], *args["weights"], *args["past"]]
    found = []
    for backend in ("chunked", "reference"):
        for x in leaves:
            x.requires_grad_()
        y, past = retrieve(**args, **options, backend=backend)
        total = (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum() + sum(x.square().sum() for x in past)
        found.append((y, *past, *torch.autograd.grad(total, leaves)))
    for got, want in zip(*found, strict=True):
        close(got, want, OP[torch.float64])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_a_segment_starts_with_what_the_memory_holds(backend: str, gradients: bool) -> None:
    args = make_inputs()  # rows with 0, 5 and 8 tokens, in segments of 4
    with torch.set_grad_enabled(gradients):
        y, past = retrieve(**args, backend=backend)
        for got, new, old in zip(past, args["weights"], args["past"], strict=True):
            assert torch.equal(got, torch.stack([new[0], old[1], new[2]]))
        want, kept = retrieve(**{**args, "weights": args["past"], "past": ()}, backend=backend)
        assert torch.equal(y[1], want[1])
        assert not torch.equal(y[0], want[0])
    memories = [x.untyped_storage().data_ptr() for x in args["past"]]
    assert not {x.untyped_storage().data_ptr() for x in kept} & set(memories)  # a memory may be written later on


def test_a_closed_block_does_not_answer() -> None:
    args = make_inputs(blocks=4, position=(0, 3, 9), segment=1)  # blocks open after 0, 3, 6 and 9 tokens
    for row, units in enumerate((2, 4, 8)):
        changed = [x.clone() for x in args["weights"]]
        changed[0][row, :, units:] = 9
        y, other = (retrieve(**{**args, "weights": tuple(w)})[0] for w in (args["weights"], changed))
        assert torch.equal(y, other)
        changed[0][row, :, :units] = 9
        assert not torch.equal(y[row], retrieve(**{**args, "weights": tuple(changed)})[0][row])


def _with(**changes: Any) -> dict[str, Any]:
    return {**make_inputs(), **changes}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (_with(query=torch.zeros(3, 1, 12)), r"query: expected \[B, T, H, K\] with T >= 1, got \(3, 1, 12\)"),
        (_with(query=torch.zeros(3, 1, 2, 5)), r"weights of layer 1: expected \(3, 2, 8, 5\), got \(3, 2, 8, 6\)"),
        (_with(position=torch.zeros(2)), r"position: expected \(3,\), got \(2,\)"),
        (_with(past=(torch.zeros(3, 2, 8, 6),)), "past: expected"),
        (_with(segment=0), "segment: expected at least 1, got 0"),
        (_with(activation="sin"), "activation: expected one of"),
        (_with(unlock=(1, 2)), "unlock: expected ascending from 0"),
    ],
)
def test_refusals(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieve(**args)
