"""Triton kernels on the CPU, in triton's interpreter, against the reference in float64.

Not collected by name: `test_triton.py` starts it in processes with TRITON_INTERPRET=1, which must be there before triton
is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tolerances import OP, close
from torch import Tensor

from memzoo.kernels import short_conv as conv
from memzoo.kernels.short_conv import short_conv

CHUNK = 16


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks within a few tokens, since an interpreted token costs milliseconds."""
    for op in ("linear_attention", "delta_rule"):
        monkeypatch.setattr(importlib.import_module(f"memzoo.kernels.{op}.triton"), "CHUNK", CHUNK)


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def results(rule: Callable, args: dict[str, Any], backend: str, **options: Any) -> list[Tensor]:
    """Outputs, final state and the gradient of every tensor among the arguments."""
    leaves = {n: x.clone().requires_grad_() for n, x in args.items() if isinstance(x, Tensor)}
    y, state = rule(**{**args, **leaves}, **options, backend=backend)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    loss = (y * weights).sum() + state.square().sum()
    return [y, state, *torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)]


def agree(rule: Callable, args: dict[str, Any], dtype: torch.dtype, **options: Any) -> None:
    """The kernels, on inputs rounded to `dtype` (but for a state), beside the reference on the same numbers."""
    narrow = {
        n: x.to(torch.float32 if n == "state" else dtype) if isinstance(x, Tensor) else x for n, x in args.items()
    }
    exact = {n: x.double() if isinstance(x, Tensor) else x for n, x in narrow.items()}
    wants = results(rule, exact, "reference", **options)
    for got, want in zip(results(rule, narrow, "triton", **options), wants, strict=True):
        if want.numel():
            close(got.double(), want, OP[dtype])
    with torch.no_grad():  # where a single token has a kernel of its own
        for got, want in zip(rule(**narrow, **options, backend="triton"), wants, strict=False):
            if want.numel():
                close(got.double(), want, OP[dtype])


@dtypes
@pytest.mark.parametrize(
    ("tokens", "width", "activation"), [(1, 4, "silu"), (1, 1, None), (2, 4, None), (37, 4, "silu"), (5, 2, "silu")]
)
def test_short_conv(tokens: int, width: int, activation: str | None, dtype: torch.dtype) -> None:
    args = conv.make_inputs(batch=3, tokens=tokens, channels=20, width=width)
    agree(short_conv, args, dtype, activation=activation)


def test_short_conv_of_strided_and_ragged_rows() -> None:
    args = conv.make_inputs(tokens=7, dtype=torch.float32)
    x = torch.stack([args["x"], -args["x"]], dim=2)[:, :, 0]
    lengths = torch.tensor([2, 7])
    got, want = (
        short_conv(x, args["weight"], args["tail"], lengths=lengths, backend=backend)
        for backend in ("triton", "reference")
    )
    close(got[0][0, :2], want[0][0, :2], OP[torch.float32])
    close(got[0][1], want[0][1], OP[torch.float32])
    assert torch.equal(got[1], want[1])
