"""The short convolution: against PyTorch's own, in pieces, on ragged rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tolerances import GRADCHECK, OP, close
from torch import Tensor

from memzoo.kernels.blocked import BLOCK_ELEMENTS
from memzoo.kernels.short_conv import OP as SHORT_CONV
from memzoo.kernels.short_conv import Vectors, make_inputs, short_conv

BACKENDS = [name for name in SHORT_CONV.names() if name != "triton"]  # which has no float64: tests/triton_parity.py
BOUND = OP[torch.float64]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 13])
def test_is_pytorchs_causal_depthwise_convolution(backend: str, width: int, tokens: int) -> None:
    args = make_inputs(tokens=tokens, width=width)
    padded = torch.cat([args["tail"], args["x"]], dim=1)
    want = F.conv1d(padded.mT, args["weight"][:, None], groups=padded.shape[-1]).mT
    y, tail = short_conv(**args, backend=backend)
    close(y, want, BOUND)
    assert torch.equal(tail, padded[:, tokens:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pieces_equal_one_pass(backend: str) -> None:
    args = make_inputs(tokens=9)
    want, want_tail = short_conv(**args, backend=backend)
    tail, parts = args["tail"], []
    for part in args["x"].split([1, 2, 5, 1], dim=1):
        y, tail = short_conv(part, args["weight"], tail, backend=backend)
        parts.append(y)
    close(torch.cat(parts, dim=1), want, BOUND)
    assert torch.equal(tail, want_tail)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tail_ends_at_each_rows_last_real_token(backend: str) -> None:
    args = make_inputs(batch=4, tokens=5)
    lengths = torch.tensor([0, 1, 4, 5])
    _, tail = short_conv(**args, lengths=lengths, backend=backend)
    for row, length in enumerate(lengths.tolist()):
        want = torch.cat([args["tail"][row], args["x"][row, :length]])[-3:]
        assert torch.equal(tail[row], want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str) -> None:
    args = make_inputs(batch=2, tokens=3, channels=2)
    leaves = [args[name].requires_grad_() for name in ("x", "weight", "tail")]
    assert torch.autograd.gradcheck(lambda *t: short_conv(*t, backend=backend), leaves, **GRADCHECK)


VECTORS = [Vectors(heads=2, dim=3), Vectors(heads=1, dim=5, per_head=1), Vectors(3, 2, eps=1e-3)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("vectors", VECTORS, ids=str)
def test_first_channels_as_unit_vectors(vectors: Vectors, tokens: int, backend: str) -> None:
    args = make_inputs(tokens=tokens, channels=13)
    args["x"][0] = args["tail"][0] = 0
    args["x"][1, -1, 0] = 1e-4  # some are short
    args["weight"] *= torch.logspace(-7, 0, 13, dtype=torch.float64)[:, None]
    plain, tail = short_conv(**args, activation="silu", backend="reference")
    for mode in (torch.no_grad, torch.enable_grad):  # a single token without gradients has a path of its own
        with mode():
            (unit, rest), new = short_conv(**args, activation="silu", vectors=vectors, backend=backend)
        assert torch.equal(new, tail)
        close(rest, plain[..., vectors.channels :], BOUND)
        assert unit.shape == (2, tokens, vectors.per_head, vectors.heads, vectors.dim)
        for n in range(vectors.per_head):
            for head in range(vectors.heads):
                first = (n * vectors.heads + head) * vectors.dim
                vector = plain[..., first : first + vectors.dim]
                square = (vector**2).sum(-1, keepdim=True)
                size = (square + vectors.eps).sqrt() if vectors.eps else square.sqrt().clamp(min=1e-6)
                close(unit[:, :, n, head], vector / size, BOUND)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vectors", VECTORS, ids=str)
def test_gradcheck_of_vectors(vectors: Vectors, backend: str) -> None:
    args = make_inputs(batch=1, tokens=3, channels=13)
    leaves = [args[name].requires_grad_() for name in ("x", "weight", "tail")]

    def of(*tensors: Tensor) -> tuple[Tensor, ...]:
        y, tail = short_conv(*tensors, activation="silu", vectors=vectors, backend=backend)
        return *y, tail

    assert torch.autograd.gradcheck(of, leaves, **GRADCHECK)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_are_float32_or_wider(backend: str) -> None:
    args = make_inputs(channels=13, tokens=1, dtype=torch.bfloat16)
    with torch.no_grad():
        (unit, rest), tail = short_conv(**args, vectors=VECTORS[0], backend=backend)
    assert (unit.dtype, rest.dtype, tail.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    close(unit.norm(dim=-1), torch.ones(2, 1, 2, 2), OP[torch.float32])


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_the_gradient_of_a_vector_too_short_for_unit_length(eps: float) -> None:
    """Below the bound it is that of a division by the bound; an epsilon has none."""
    args, found = make_inputs(channels=13), {}
    for backend in BACKENDS:
        x = (1e-9 * args["x"]).requires_grad_()
        (unit, _), _ = short_conv(x, args["weight"], vectors=Vectors(heads=2, dim=3, eps=eps), backend=backend)
        weights = torch.linspace(-1, 1, unit.numel(), dtype=unit.dtype).view_as(unit)
        (found[backend],) = torch.autograd.grad((unit * weights).sum(), x)
    close(found["chunked"], found["reference"], BOUND)


def test_refuses_more_vectors_than_channels() -> None:
    for vectors in (Vectors(heads=3, dim=3), Vectors(heads=0, dim=3)):
        with pytest.raises(ValueError, match=r"vectors: expected 1 to 13 = D channels, got Vectors\(heads="):
            short_conv(**make_inputs(channels=13), vectors=vectors)


def test_without_a_tail_starts_from_zeros() -> None:
    args = make_inputs()
    want, _ = short_conv(args["x"], args["weight"], torch.zeros_like(args["tail"]))
    assert torch.equal(short_conv(args["x"], args["weight"])[0], want)


def test_refuses_shapes_that_do_not_fit() -> None:
    args = make_inputs()
    with pytest.raises(ValueError, match=r"expected x \[B, T, D\] and weight \[D, W\]"):
        short_conv(args["x"][..., :5], args["weight"])
    with pytest.raises(ValueError, match="expected tail"):
        short_conv(args["x"], args["weight"], args["tail"][:, :2])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [2, 4])
def test_blocks_of_a_long_sequence_fit_together(width: int, activation: str | None) -> None:
    args = make_inputs(tokens=150, channels=1024, width=width)
    assert 2 * BLOCK_ELEMENTS < 2 * 1024 * 150
    found = {}
    for backend in BACKENDS:
        leaves = [args[name].clone().requires_grad_() for name in ("x", "weight", "tail")]
        y, tail = short_conv(*leaves, activation=activation, backend=backend)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        found[backend] = [y, tail, *torch.autograd.grad((y * weights).sum() + tail.sum(), leaves)]
    for got, want in zip(*found.values(), strict=True):
        close(got, want, BOUND)
    with torch.no_grad():
        close(short_conv(**args, activation=activation, backend="chunked")[0], found["reference"][0], BOUND)


def test_refuses_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"activation: expected one of .* got 'gelu'"):
        short_conv(**make_inputs(), activation="gelu")


def test_its_gradient_is_one_graph() -> None:
    """Of several rows, whose slices are not contiguous."""
    args = make_inputs(tokens=9, dtype=torch.float32)

    def of(*leaves: Tensor) -> Tensor:
        y, tail = short_conv(*leaves, activation="silu", backend="chunked")
        return y.square().sum() + tail.sum()

    leaves = [args[name].requires_grad_() for name in ("x", "weight", "tail")]
    want, got = of(*leaves), torch.compile(of, fullgraph=True, backend="aot_eager")(*leaves)
    for a, b in zip(*(torch.autograd.grad(y, leaves) for y in (got, want)), strict=True):
        close(a, b, OP[torch.float32])
