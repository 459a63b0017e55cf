"""A token's keys and values into their places: torch's form against the equations, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from tolerances import OP, close
from torch import Tensor

from memzoo.kernels.kv_write import kv_write, make_inputs

# Triton has no float64: tests/triton_parity.py.


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"heads": 1, "groups": 1, "width": 2, "places": 1, "prefix": 0},
        {"batch": 1, "places": 7, "lengths": (6,)},
        {"each": 3, "lengths": (0, 3, 9)},
        {"each": 2, "places": 6, "lengths": (0, 4, 6), "restarts": True},
    ],
    ids=str,
)
def test_torchs_form_is_that_of_the_equations(sizes: dict[str, Any], shared: bool) -> None:
    args = make_inputs(**sizes)
    if shared:
        args["rotary"] = tuple(x[:1] for x in args["rotary"])
    found = []
    for backend in ("chunked", "reference"):
        given = pytree.tree_map_only(Tensor, torch.clone, args)
        found.append((*kv_write(**given, backend=backend), given["keys"], given["values"]))
        assert torch.equal(given["length"], args["length"])
    for got, want in zip(*found, strict=True):
        if want.is_floating_point():
            close(got, want, OP[torch.float64])
        else:
            assert torch.equal(got, want)
    assert not torch.equal(found[0][3], args["keys"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix": 7}, r"keys: expected \[B, G, 7 \+ S, D\], got \(3, 2, 7, 6\)"),
        ({"key": torch.zeros(3, 1, 11)}, r"key: expected \(3, 1, 12\), got \(3, 1, 11\)"),
        ({"key": torch.zeros(3, 2, 12)}, r"value: expected \(3, 2, 12\), got \(3, 1, 12\)"),
        (
            {"key": torch.zeros(3, 6, 12), "value": torch.zeros(3, 6, 12)},
            "keys of a token: expected from 1 to 5, got 6",
        ),
        (
            {"key": torch.zeros(3, 2, 12), "value": torch.zeros(3, 2, 12), "restarts": True},
            "keys of a segment: expected a multiple of 2, got 5",
        ),
        ({"value": torch.zeros(3, 1, 6)}, r"value: expected \(3, 1, 12\)"),
        ({"query": torch.zeros(3, 1, 20)}, r"query: expected \[3, 1, H \* 6\], got \(3, 1, 20\)"),
        ({"rotary": (torch.zeros(3, 1, 6), torch.zeros(3, 1, 3))}, r"sines: expected \[3 or 1, 1, 6\], got"),
        ({"rotary": (torch.zeros(3, 1, 6), torch.zeros(1, 1, 6))}, r"sines: expected \(3, 1, 6\), got \(1, 1, 6\)"),
        ({"length": torch.zeros(2, dtype=torch.int64)}, r"length: expected \(3,\), got \(2,\)"),
        ({"values": torch.zeros(3, 2, 8, 6)}, r"values: expected \(3, 2, 7, 6\), got \(3, 2, 8, 6\)"),
        ({"keys": torch.zeros(3, 2, 6, 7).mT}, "keys and values: expected contiguous ones, got views"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_write(**{**make_inputs(), **changes})
