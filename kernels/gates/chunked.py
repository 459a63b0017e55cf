"""The gates by torch's own functions: few of them, since those of one token are small and each costs a call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.gates import Decay, Gate
from memzoo.kernels.registry import cast
from memzoo.kernels.unit_length import widened


def gates(logits: Tensor, kinds: tuple[Gate, ...], decay: Decay | None) -> tuple[Tensor, ...]:
    """See `memzoo.kernels.gates.gates`."""
    x, found = widened(logits), []
    if len(kinds) == 1 and not kinds[0].lags:
        found.append(_gate(x, kinds[0]))
    else:
        rows = iter(x.unflatten(-1, (sum([gate.rows for gate in kinds]), -1)).unbind(2))
        for gate in kinds:
            part = torch.stack([next(rows) for _ in range(gate.lags)], dim=-1) if gate.lags else next(rows)
            found.append(_gate(part, gate))
    if decay is not None:
        z = widened(decay.logit)
        found.append(-cast(decay.log_rate, z.dtype).exp() * F.softplus(z + decay.bias))
    return tuple(found)


def _gate(x: Tensor, gate: Gate) -> Tensor:
    if gate.kind == "share":
        share = torch.sigmoid(x)
        return share if gate.scale == 1 else gate.scale * share
    return F.logsigmoid(x if gate.kind == "log_share" else -x)
