"""The norm and the gate as they are printed."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_gate(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor,
    gate_weight: Tensor | None,
    activation: str,
    scale: float,
    eps: float,
) -> Tensor:
    """See `memzoo.kernels.norm_gate.norm_gate`."""
    gate = _normalized(gate, gate_weight, eps)
    opening = torch.sigmoid(gate)
    if activation == "silu":
        opening = gate * opening
    return _normalized(x, weight, eps).reshape(gate.shape) * (scale * opening)


def _normalized(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`w x / sqrt(mean(x^2) + eps)`."""
    if weight is None:
        return x
    return (weight * (x / (x.square().mean(-1, keepdim=True) + eps).sqrt())).to(x.dtype)
