"""The activations of a deep memory, with the derivatives that its inner gradient and the gradient of that need.

Every one maps 0 to 0, so that a closed hidden unit, whose pre-activation is 0, contributes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    value: Callable[[Tensor], Tensor]
    """`h -> act(h)`."""
    pullback: Callable[[Tensor, Tensor], Tensor]
    """`r, h -> r act'(h)`."""
    derivatives: Callable[[Tensor, int], list[Tensor]]
    """`h, order -> [act(h), act'(h), ...]` up to that order, 1 or 2."""


def _gelu(h: Tensor, order: int) -> list[Tensor]:
    half, erf = h * 0.5, torch.erf(h * math.sqrt(0.5))
    below = (erf * 0.5).add_(0.5)
    square = h.square()
    density = (square * -0.5).sub_(math.log(2 * math.pi) / 2).exp_()
    found = [torch.addcmul(half, half, erf), torch.addcmul(below, h, density)]
    if order > 1:
        found.append(square.sub_(2).mul_(density).neg_())
    return found


def _gelu_tanh(h: Tensor, order: int) -> list[Tensor]:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(scale * (h + cubic * h**3))
    slope = scale * (1 + 3 * cubic * h.square())
    t1 = (1 - t.square()) * slope
    found = [0.5 * h * (1 + t), 0.5 * (1 + t) + 0.5 * h * t1]
    if order > 1:
        t2 = (1 - t.square()) * (6 * cubic * scale * h) - 2 * t * t1 * slope
        found.append(t1 + 0.5 * h * t2)
    return found


def _silu(h: Tensor, order: int) -> list[Tensor]:
    s = torch.sigmoid(h)
    s1 = s * (1 - s)
    found = [h * s, s + h * s1]
    if order > 1:
        found.append(s1 * (2 + h * (1 - 2 * s)))
    return found


def _relu(h: Tensor, order: int) -> list[Tensor]:
    return [F.relu(h), (h > 0).to(h.dtype), torch.zeros_like(h)][: order + 1]


def _tanh(h: Tensor, order: int) -> list[Tensor]:
    t = torch.tanh(h)
    slope = 1 - t.square()
    return [t, slope, -2 * t * slope][: order + 1]


FEW = 1 << 12
"""Below so many elements setting up oneDNN's kernels, which torch takes for the GELU of what is contiguous, costs more
than they do."""


def _few(h: Tensor) -> bool:
    return h.numel() <= FEW and h.is_contiguous()


def _gelu_value(h: Tensor) -> Tensor:
    return F.gelu(h.transpose(0, -1)).transpose(0, -1) if _few(h) else F.gelu(h)


def _gelu_pullback(r: Tensor, h: Tensor) -> Tensor:
    if _few(h):
        return _gelu_backward(r.transpose(0, -1), h.transpose(0, -1)).transpose(0, -1)
    return _gelu_backward(r, h)


_gelu_backward, _silu_backward, _tanh_backward = (
    op.default for op in (torch.ops.aten.gelu_backward, torch.ops.aten.silu_backward, torch.ops.aten.tanh_backward)
)


def _silu_pullback(r: Tensor, h: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (r.requires_grad or h.requires_grad):  # torch's has no derivative
        return r * _silu(h, 1)[1]
    return _silu_backward(r, h)


ACTIVATION: dict[str, Activation] = {
    "gelu": Activation(_gelu_value, _gelu_pullback, _gelu),
    "gelu_tanh": Activation(
        lambda h: F.gelu(h, approximate="tanh"),
        lambda r, h: _gelu_backward(r, h, approximate="tanh"),
        _gelu_tanh,
    ),
    "silu": Activation(F.silu, _silu_pullback, _silu),
    "relu": Activation(F.relu, lambda r, h: r * (h > 0), _relu),
    "tanh": Activation(torch.tanh, lambda r, h: _tanh_backward(r, torch.tanh(h)), _tanh),
}


class Units:
    """The hidden units of a layer, `x = act(h)`, and what the backward of their inner gradient needs."""

    def __init__(self, activation: str) -> None:
        self.act = ACTIVATION[activation]

    def value(self, h: Tensor) -> Tensor:
        """`x`."""
        return self.act.value(h)

    def pullback(self, r: Tensor, h: Tensor) -> Tensor:
        """From what comes back to `x` to what comes back to `h`."""
        return self.act.pullback(r, h)

    def value_and_pullback(self, h: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """`x`, and `pullback` at `h`."""
        return self.value(h), partial(self.pullback, h=h)

    def parts(self, h: Tensor) -> list[Tensor]:
        """`x` first, then what the next three take of `h`."""
        return self.act.derivatives(h, 2)

    def pullback_by(self, r: Tensor, parts: list[Tensor]) -> Tensor:
        """`pullback(r, h)`."""
        return r * parts[1]

    def pullback_backward(self, g: Tensor, r: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Gradients of `r` and `h` from that of `pullback(r, h)`."""
        _, slope, curvature = parts
        return g * slope, (g * r).mul_(curvature)

    def add_pullback(self, d_h: Tensor, r: Tensor, parts: list[Tensor]) -> None:
        """Add `pullback(r, h)` to `d_h`."""
        d_h.addcmul_(r, parts[1])


class GatedUnits(Units):
    """`x_i = act(h_{2i}) h_{2i+1}`: two rows per unit, side by side, so that a block of units is a block of rows."""

    def value(self, h: Tensor) -> Tensor:
        return self.act.value(h[..., 0::2]) * h[..., 1::2]

    def pullback(self, r: Tensor, h: Tensor) -> Tensor:
        a, b = h[..., 0::2], h[..., 1::2]
        return _pairs(self.act.pullback(r * b, a), r * self.act.value(a))

    def parts(self, h: Tensor) -> list[Tensor]:
        b, (value, *slopes) = h[..., 1::2], self.act.derivatives(h[..., 0::2], 2)
        return [value * b, b, value, *slopes]

    def pullback_by(self, r: Tensor, parts: list[Tensor]) -> Tensor:
        _, b, value, slope, *_ = parts
        return _pairs(r * b * slope, r * value)

    def pullback_backward(self, g: Tensor, r: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        _, b, value, slope, curvature = parts
        g_a, g_b = g[..., 0::2], g[..., 1::2]
        return g_a * b * slope + g_b * value, _pairs(r * (g_a * b * curvature + g_b * slope), r * g_a * slope)

    def add_pullback(self, d_h: Tensor, r: Tensor, parts: list[Tensor]) -> None:
        d_h.add_(self.pullback_by(r, parts))


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b], dim=-1).flatten(-2)
