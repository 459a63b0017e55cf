"""The monomials of degree 1 and 2 in one kernel, in Triton, without gradients; with them they are torch's.

A program holds a vector, its projection and the square of that in registers. Bytes of a vector of K float32 with D
features: `4 (K + D)`, and its head's projection, which the second-level cache has. At one token it is one launch in
place of twenty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memzoo.kernels.monomials import chunked
from memzoo.kernels.triton_support import contiguous, launch


def monomials(x: Tensor, coefficients: Sequence[Tensor], projection: Tensor | None) -> Tensor:
    """See `memzoo.kernels.monomials.monomials`."""
    if torch.is_grad_enabled():
        return chunked.monomials(x, coefficients, projection)
    if x.ndim == 5:  # queries and keys `[B, T, N, H, K]`, each of them whole
        return _monomials(x.movedim(2, 0), *coefficients, projection).movedim(0, 2)
    return _monomials(x, *coefficients, projection)


@triton.jit
def _forward_kernel(
    p_x,
    p_first,
    p_second,
    p_projection,
    p_y,
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    i_row, i_h = tl.program_id(0).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    D: tl.constexpr = K + R * (R + 1) // 2
    p_x, p_y = p_x + i_row * K, p_y + i_row * D
    b_1, b_2 = tl.load(p_first + i_h).to(tl.float32), tl.load(p_second + i_h).to(tl.float32)
    shrink = 1 / tl.sqrt(b_1 * b_1 + b_2 * b_2)
    k, r = tl.arange(0, BK).to(tl.int64), tl.arange(0, BR).to(tl.int64)
    x = tl.load(p_x + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(p_y + k, (b_1 * shrink * x).to(p_y.dtype.element_ty), mask=k < K)
    if p_projection is None:
        z = tl.load(p_x + r, mask=r < K, other=0.0).to(tl.float32)
    else:
        p_projection += i_h * (K * R) + k[:, None] * R + r[None, :]
        matrix = tl.load(p_projection, mask=(k < K)[:, None] & (r < R)[None, :], other=0.0).to(tl.float32)
        z = tl.sum(x[:, None] * matrix, axis=0)
        z /= tl.maximum(tl.sqrt(tl.sum(z * z, axis=0)), 1e-6)
    i, j = r[:, None], r[None, :]
    square = z[:, None] * z[None, :] * tl.where(i == j, 1.0, 1.4142135623730951) * (b_2 * shrink)
    place = K + i * R - i * (i - 1) // 2 + j - i
    tl.store(p_y + place, square.to(p_y.dtype.element_ty), mask=(i <= j) & (j < R))


def forward(x: Tensor, first: Tensor, second: Tensor, projection: Tensor | None) -> Tensor:
    y = _like_output(x, first, second, projection)
    x, first, second, projection = contiguous(x, first, second, projection)
    heads, width = x.shape[-2:]
    rank = width if projection is None else projection.shape[2]
    launch(
        _forward_kernel,
        (x.shape[:-1].numel(),),
        num_warps=1 if rank <= 16 else 4,
        p_x=x,
        p_first=first,
        p_second=second,
        p_projection=projection,
        p_y=y,
        H=heads,
        K=width,
        R=rank,
        BK=triton.next_power_of_2(width),
        BR=triton.next_power_of_2(rank),
    )
    return y


# What torch.compile sees.


def _like_output(x: Tensor, first: Tensor, second: Tensor, projection: Tensor | None) -> Tensor:
    rank = x.shape[-1] if projection is None else projection.shape[2]
    return x.new_empty(*x.shape[:-1], x.shape[-1] + rank * (rank + 1) // 2)


_monomials: Any = torch.library.custom_op(
    "memzoo::monomials",
    forward,
    mutates_args=(),
    schema="(Tensor x, Tensor first, Tensor second, Tensor? projection) -> Tensor",
)
_monomials.register_fake(_like_output)
