"""What is computed in blocks of tokens, with a backward written out: as torch computes it at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tolerances import OP, close
from torch import Tensor

from memzoo.kernels.blocked import BLOCK_ELEMENTS, gated_product, piece
from memzoo.kernels.rms_norm import rms_norm

SHAPE = 2, 150, 1024  # more than two blocks, the last a shorter one
assert 2 * BLOCK_ELEMENTS < 2 * 1024 * 150


def compare(got: Tensor, want: Tensor, leaves: list[Tensor]) -> None:
    """The same to the bit, and the gradients."""
    assert torch.equal(got, want)
    weights = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
    for a, b in zip(*(torch.autograd.grad(y, leaves, weights) for y in (got, want)), strict=True):
        close(a, b, OP[a.dtype])


@pytest.mark.parametrize("act", [F.silu, torch.tanh, torch.nn.SiLU().forward])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gated_product(act: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    leaves = [torch.randn(SHAPE).to(dtype).requires_grad_() for _ in range(2)]
    y = gated_product(act, *leaves)
    compare(y, act(leaves[0]) * leaves[1], leaves)
    with torch.no_grad():
        assert torch.equal(gated_product(act, *leaves), y)
    (d,) = torch.autograd.grad(gated_product(act, *leaves).sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(d.sum(), leaves)


@pytest.mark.parametrize("in_piece", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rms_norm(dtype: torch.dtype, in_piece: bool) -> None:
    leaves = [torch.randn(size).to(dtype).requires_grad_() for size in (SHAPE, SHAPE[-1:])]
    with piece() if in_piece else nullcontext():
        y = rms_norm(*leaves, 1e-6)
    compare(y, F.rms_norm(leaves[0], SHAPE[-1:], leaves[1], 1e-6), leaves)
