"""Products of a chunk's decays over every interval."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def interval_products(log_gate: Tensor) -> Tensor:
    """`P(t, j) = prod_{n=j+1..t} gate_n` for `0 <= j <= t <= C`, else 0; `[..., C]` to `[..., 1 + C, 1 + C]`.

    Sums of logs over each interval, never differences of running sums: exact for gates of 0 and 1, and 0 where
    `without_dust` says so.
    """
    return _Products.apply(log_gate)


def without_dust(x: Tensor, power: float = 0.5) -> Tensor:
    """`x`, on a CPU with 0 for what is below a power of its dtype's smallest normal number (1e-19 in float32, by the
    root): a product of two such numbers is subnormal, and a CPU takes many times as long for matrix products with
    subnormal numbers in them."""
    return F.hardshrink(x, _dust(x, power)) if x.is_cpu else x


def without_dust_(x: Tensor, power: float = 0.5) -> Tensor:
    """The same in place."""
    return torch.ops.aten.hardshrink.out(x, _dust(x, power), out=x) if x.is_cpu else x


def _dust(x: Tensor, power: float) -> float:
    return torch.finfo(x.dtype).tiny ** power


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_gate: Tensor) -> Tensor:
        from_first = F.pad(log_gate, (1, 0))[..., None]
        sums = from_first.expand(*from_first.shape[:-1], from_first.shape[-2]).contiguous()
        sums.tril_(-1)  # row n: 0 for n <= j; in place, which costs a CPU a fifth
        products = without_dust_(sums.cumsum_(-2).exp_()).tril_()
        ctx.save_for_backward(products)
        return products

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_products: Tensor) -> Tensor:
        (products,) = ctx.saved_tensors
        return gradient_of_logs(d_products * products)


def gradient_of_logs(d_sums: Tensor) -> Tensor:
    """Gradient `[..., C]` of the logs, of that of their sums over the intervals, 0 where `j > t`: `P` times its own."""
    size = d_sums.shape[-1]
    earlier = torch.ones(size, size - 1, dtype=d_sums.dtype, device=d_sums.device).triu()  # j < n
    return (d_sums @ earlier).tril_(-1).sum(-2)  # t >= n


class Decays(NamedTuple):
    """What a rule takes of `P`, for tokens `t` and `j` from 1 to C."""

    inside: Tensor
    """`P(t, j)`, `[..., C, C]`."""
    from_start: Tensor
    """`P(t, 0)`, `[..., C, 1]`."""
    to_end: Tensor
    """`P(C, j)`, `[..., C, 1]`."""
    whole: Tensor
    """`P(C, 0)`, `[..., 1, 1]`."""
    inside_before: Tensor
    """`P(t - 1, j)`, `[..., C, C]`."""
    from_start_before: Tensor
    """`P(t - 1, 0)`, `[..., C, 1]`."""


def decays(products: Tensor) -> Decays:
    """The parts of `P` `[..., 1 + C, 1 + C]`."""
    return Decays(*_Parts.apply(products))


def _parts(products: Tensor) -> tuple[Tensor, ...]:
    return (
        products[..., 1:, 1:],
        products[..., 1:, :1],
        products[..., -1, 1:, None],
        products[..., -1:, :1],
        products[..., :-1, 1:],
        products[..., :-1, :1],
    )


class _Parts(torch.autograd.Function):
    """Slices whose backward adds them up in one tensor, where autograd's makes one for each."""

    @staticmethod
    def forward(ctx: Any, products: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape = products.shape
        return _parts(products)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *d_parts: Tensor | None) -> Tensor | None:
        given = [d for d in d_parts if d is not None]
        if not given:
            return None
        d_products = given[0].new_zeros(ctx.shape)
        for part, d in zip(_parts(d_products), d_parts, strict=True):
            if d is not None:
                part += d
        return d_products
