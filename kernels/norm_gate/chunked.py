"""The norm and the gate by torch's own functions, each a pass over memory."""

from __future__ import annotations

from torch import Tensor

from memzoo.kernels.norm_gate import ACTIVATION
from memzoo.kernels.rms_norm import rms_norm


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
    if weight is not None:
        x = rms_norm(x, weight, eps)
    if x.ndim != gate.ndim:
        x = x.flatten(-2)
    if gate_weight is not None:
        gate = rms_norm(gate, gate_weight, eps)
    gate = ACTIVATION[activation](gate)
    return x * (gate if scale == 1 else scale * gate)
