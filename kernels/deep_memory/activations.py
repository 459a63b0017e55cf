"""The activations of a deep memory: each with its value and its pullback `r, h -> r * act'(h)`.

Every one maps 0 to 0, so that a locked hidden unit, whose pre-activation is 0, contributes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    value: Callable[[Tensor], Tensor]
    pullback: Callable[[Tensor, Tensor], Tensor]


def _silu_pullback(r: Tensor, h: Tensor) -> Tensor:
    s = torch.sigmoid(h)
    return r * (s * (1 + h * (1 - s)))


ACTIVATION: dict[str, Activation] = {
    "gelu": Activation(F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda h: F.gelu(h, approximate="tanh"),
        lambda r, h: torch.ops.aten.gelu_backward(r, h, approximate="tanh"),
    ),
    "silu": Activation(F.silu, _silu_pullback),
    "relu": Activation(F.relu, lambda r, h: r * (h > 0)),
    "tanh": Activation(torch.tanh, lambda r, h: r * (1 - torch.tanh(h) ** 2)),
}
