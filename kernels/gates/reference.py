"""The gates as they are printed."""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.gates import Decay, Gate
from memzoo.kernels.unit_length import widened


def gates(logits: Tensor, kinds: tuple[Gate, ...], decay: Decay | None) -> tuple[Tensor, ...]:
    """See `memzoo.kernels.gates.gates`."""
    x = widened(logits).unflatten(-1, (sum(gate.rows for gate in kinds), -1))
    found, first = [], 0
    for gate in kinds:
        part = x[:, :, first : first + gate.rows].mT
        found.append(_gate(part if gate.lags else part[..., 0], gate))
        first += gate.rows
    if decay is not None:
        z, log_rate, bias = (widened(each) for each in decay)
        found.append(-log_rate.exp() * _softplus(z + bias))
    return tuple(found)


def _gate(x: Tensor, gate: Gate) -> Tensor:
    if gate.kind == "share":
        return gate.scale / (1 + torch.exp(-x))
    return -_softplus(-x if gate.kind == "log_share" else x)


def _softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|))`."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
