"""Turned vectors, closed blocks, Comba's addresses: torch's forms against the equations, gradients, bad input."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tolerances import OP, close
from torch import Tensor

from memzoo.kernels.addresses import addresses
from memzoo.kernels.addresses import make_inputs as addresses_inputs
from memzoo.kernels.opened import make_inputs as opened_inputs
from memzoo.kernels.opened import opened
from memzoo.kernels.rotary import make_inputs as rotary_inputs
from memzoo.kernels.rotary import rotary

# Triton has no float64: tests/triton_parity.py.
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "rotary": (rotary, rotary_inputs, {}),
    "rotary-shared": (rotary, rotary_inputs, {"shared": True, "inner": (), "width": 2}),
    "addresses": (addresses, addresses_inputs, {}),
    "addresses-units": (partial(addresses, unit_eps=0.0), addresses_inputs, {"shared": True}),
    "addresses-eps": (partial(addresses, unit_eps=0.1), addresses_inputs, {}),
    "opened": (opened, opened_inputs, {}),
    "opened-heads": (opened, opened_inputs, {"shape": (5, 3), "axis": 2, "blocks": 4}),
    "opened-full": (opened, opened_inputs, {"position": (4, 9, 4)}),
    "opened-slowly": (opened, opened_inputs, {"interval": 30, "blocks": 6}),
}


@pytest.mark.parametrize("case", CASES)
def test_torchs_form_is_that_of_the_equations(case: str) -> None:
    rule, made, sizes = CASES[case]
    args = made(**sizes)
    leaves = [x.requires_grad_() for x in args.values() if isinstance(x, Tensor) and x.is_floating_point()]
    if len(leaves) == 3:  # cosines and sines get no gradient
        leaves = leaves[:1]
    found = []
    for backend in ("chunked", "reference"):
        outputs = rule(**args, backend=backend)
        ys = [y for y in outputs if y is not None] if isinstance(outputs, tuple) else [outputs]
        total = sum((y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum() for y in ys)
        found.append((*ys, *torch.autograd.grad(total, leaves)))
    assert len(found[0]) == len(found[1])
    for got, want in zip(*found, strict=True):
        close(got, want, OP[torch.float64])


def test_blocks_open_after_so_many_tokens() -> None:
    """Two of seven units, two and three, of a row that has read three tokens, one more at each second one."""
    x = torch.ones(1, 4, 7, 1)
    seen = opened(x, torch.tensor([3]), blocks=3, interval=2, axis=2)[0, :, :, 0].sum(1)
    assert seen.tolist() == [4, 7, 7, 7]
    assert opened(x, torch.tensor([0]), blocks=3, interval=2, axis=2)[0, :, :, 0].sum(1).tolist() == [2, 2, 4, 4]


def test_turning_keeps_lengths_and_depends_on_differences() -> None:
    args = rotary_inputs(tokens=3)
    y = rotary(**args)
    close(y.norm(dim=-1), args["x"].norm(dim=-1), OP[torch.float64])
    angle = torch.arange(3.0, dtype=torch.float64)[None, :, None].expand(1, 3, 1)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([-angle, angle], -1).sin()
    a, b = (rotary(x.expand(1, 3, 2), cos, sin) for x in torch.randn(2, 1, 1, 2, dtype=torch.float64))
    products = a[0] @ b[0].T
    close(products[0, 1], products[1, 2], OP[torch.float64])


@pytest.mark.parametrize("shared", [False, True])
def test_turning_of_any_shape_is_one_graph(shared: bool) -> None:
    args = rotary_inputs(shared=shared)
    want = rotary(**args)  # which also loads the backend
    turned = torch.compile(lambda x, cos, sin: rotary(x, cos, sin), fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(turned(**args), want)


def _rotary(**changes: Tensor) -> tuple[Any, dict[str, Any]]:
    return rotary, {**rotary_inputs(), **changes}


def _addresses(**changes: Any) -> tuple[Any, dict[str, Any]]:
    return addresses, {**addresses_inputs(), **changes}


def _opened(**changes: Any) -> tuple[Any, dict[str, Any]]:
    return opened, {**opened_inputs(), **changes}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_rotary(x=torch.zeros(2, 5, 7)), r"rotary: x: expected \[B, T, ..., D\] with an even D, got \(2, 5, 7\)"),
        (_rotary(cos=torch.zeros(2, 4, 6)), r"cosines: expected \[2 or 1, 5, 6\], got \(2, 4, 6\)"),
        (_rotary(sin=torch.zeros(1, 5, 6)), r"sines: expected \(2, 5, 6\), got \(1, 5, 6\)"),
        (_addresses(key=torch.zeros(2, 5, 3, 7)), r"addresses: key: expected \(2, 5, 3, 6\), got \(2, 5, 3, 7\)"),
        (_addresses(correction=torch.zeros(3)), r"correction: expected \(2, 5, 3\), got \(3,\)"),
        (_addresses(unit_eps=-1.0), "unit_eps: expected at least 0, got -1.0"),
        (_opened(axis=1), "opened: axis: expected from 2 to 3, got 1"),
        (_opened(position=torch.zeros(2)), r"position: expected \(3,\), got \(2,\)"),
        (_opened(blocks=7), "blocks: expected from 1 to the units, 6, got 7"),
        (_opened(interval=0), "interval: expected at least 1, got 0"),
    ],
)
def test_refusals(call: tuple[Any, dict[str, Any]], message: str) -> None:
    rule, args = call
    with pytest.raises(ValueError, match=message):
        rule(**args)
