"""Newton-Schulz: what it promises of singular values, scale and zeros, the fast form against the printed one."""

from __future__ import annotations

import pytest
import torch
from tolerances import GRADCHECK, NEWTON_SCHULZ, OP, close
from torch import Tensor

from memzoo.kernels.newton_schulz import OP as NEWTON_SCHULZ_OP
from memzoo.kernels.newton_schulz import make_inputs, newton_schulz

BACKENDS = [name for name in NEWTON_SCHULZ_OP.names() if name != "triton"]  # no float64: tests/triton_parity.py
SHAPES = [(1, 1), (1, 7), (7, 1), (8, 8), (8, 20), (20, 8), (3, 64)]


def scalar_map(sigma: Tensor, steps: int) -> Tensor:
    """What the iteration does to one singular value."""
    for _ in range(steps):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    return sigma


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_is_a_map_of_singular_values(backend: str, shape: tuple[int, int], steps: int) -> None:
    """Second witness: the singular value decomposition, its values mapped one by one."""
    x = make_inputs(2, 3, rows=shape[0], columns=shape[1])["x"]
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    mapped = scalar_map(sigma / sigma.norm(dim=-1, keepdim=True), steps)
    got = newton_schulz(x, steps=steps, backend=backend)
    close(got, u @ torch.diag_embed(mapped) @ vh, NEWTON_SCHULZ[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_brings_singular_values_near_one(backend: str) -> None:
    """Gaussian matrices, and matrices that are orthogonal already; not exactly 1, as the coefficients have it."""
    for x in (make_inputs(4, rows=32, columns=128)["x"], torch.linalg.qr(make_inputs(4, rows=32, columns=32)["x"])[0]):
        sigma = torch.linalg.svdvals(newton_schulz(x, backend=backend))
        assert float(sigma.min()) > 0.65
        assert float(sigma.max()) < 1.2
    # A rank-one matrix stays one; its norm is the same whatever its size.
    rank_one = torch.outer(torch.arange(1.0, 6), torch.arange(1.0, 9)).double()
    sigma = torch.linalg.svdvals(newton_schulz(rank_one, backend=backend))
    assert 0.65 < float(sigma[0]) < 1.2
    assert float(sigma[1:].max()) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_forgets_scale_and_keeps_zero(backend: str) -> None:
    x = make_inputs(2)["x"]
    want = newton_schulz(x, backend=backend)
    for scale in (37.0, 1e-4, 1e10):
        close(newton_schulz(scale * x, backend=backend), want, OP[torch.float64])
    zero = torch.zeros(2, 5, 3, dtype=torch.float64, requires_grad=True)
    y = newton_schulz(zero, backend=backend)
    (gradient,) = torch.autograd.grad(y.sum(), zero)
    assert not y.any()
    assert not gradient.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_turns_with_its_matrix_and_with_zero_padding(backend: str) -> None:
    """Of the transpose the transpose; zero rows and columns stay zero and change nothing (Proteus relies on it)."""
    x = make_inputs(3)["x"]
    want = newton_schulz(x, backend=backend)
    close(newton_schulz(x.mT, backend=backend).mT, want, OP[torch.float64])
    padded = newton_schulz(torch.nn.functional.pad(x, (0, 5, 0, 40)), backend=backend)
    close(padded[..., :8, :20], want, NEWTON_SCHULZ[torch.float64])
    assert not padded[..., 8:, :].any()
    assert not padded[..., 20:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_matrix_by_itself(backend: str) -> None:
    x = make_inputs(2, 3)["x"] * torch.tensor([1.0, 10.0, 0.0], dtype=torch.float64)[:, None, None]
    whole = newton_schulz(x, backend=backend)
    for row in range(2):
        for head in range(3):
            close(whole[row, head], newton_schulz(x[row, head], backend=backend), OP[torch.float64])


def test_fast_form_is_the_printed_one() -> None:
    for rows, columns in SHAPES:
        for steps in (1, 5):
            x = make_inputs(2, rows=rows, columns=columns)["x"].requires_grad_()
            fast, slow = (newton_schulz(x, steps=steps, backend=name) for name in ("chunked", "reference"))
            close(fast, slow, NEWTON_SCHULZ[torch.float64])
            weight = torch.randn_like(x)
            (d_fast,), (d_slow,) = (torch.autograd.grad((weight * y).sum(), x) for y in (fast, slow))
            if x.shape[-2:] != (1, 1):  # of a number nothing is left but its sign, and no derivative
                close(d_fast, d_slow, NEWTON_SCHULZ[torch.float64])
            low = newton_schulz(x.detach().float(), steps=steps, backend="chunked")
            close(low.double(), slow, NEWTON_SCHULZ[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_gradcheck(backend: str, shape: tuple[int, int]) -> None:
    x = make_inputs(2, rows=shape[0], columns=shape[1])["x"].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: newton_schulz(x, steps=3, backend=backend), x, **GRADCHECK)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_where_singular_values_meet(backend: str) -> None:
    """Of an orthogonal matrix, and of one with pairs of singular values that nearly meet."""
    q = torch.linalg.qr(make_inputs(rows=6, columns=6)["x"])[0]
    apart = torch.tensor([1, 1 + 1e-15, 0.5, 0.5 + 1e-9, 1e-4, 0], dtype=torch.float64)
    for x in (q, q * apart):
        assert torch.autograd.gradcheck(
            lambda x: newton_schulz(x, steps=3, backend=backend), x.clone().requires_grad_(), **GRADCHECK
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_by_itself(backend: str) -> None:
    """As an overflow of half precision must, for its scaler to see it."""
    x = make_inputs(3)["x"]
    want = newton_schulz(x, backend=backend)
    for broken in (torch.nan, torch.inf):
        x[1, 2, 3] = broken
        leaf = x.clone().requires_grad_()
        got = newton_schulz(leaf, backend=backend)
        (gradient,) = torch.autograd.grad(got.sum(), leaf)
        for tensor in (got, gradient):
            assert torch.isnan(tensor[1]).any()
            assert torch.isfinite(tensor[[0, 2]]).all()
        close(got[[0, 2]], want[[0, 2]], OP[torch.float64])


def test_no_steps_is_the_identity() -> None:
    x = make_inputs()["x"]
    assert torch.equal(newton_schulz(x, steps=0), x)


@pytest.mark.parametrize(
    ("x", "steps", "message"),
    [
        (torch.zeros(3), 5, r"x: expected \[..., M, N\], got \(3,\)"),
        (torch.zeros(3, 3).bfloat16(), 5, "dtype of x: expected float32 or float64"),
        (torch.zeros(3, 3), -1, "steps: expected at least 0, got -1"),
    ],
)
def test_refusals(x: Tensor, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        newton_schulz(x, steps=steps)
