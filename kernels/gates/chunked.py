"""The gates by torch's own functions: few of them, since those of one token are small and each costs a call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.gates import Decay, Gate
from memzoo.kernels.registry import cast, constant
from memzoo.kernels.unit_length import widened


def gates(logits: Tensor, kinds: tuple[Gate, ...], decay: Decay | None) -> tuple[Tensor, ...]:
    """See `memzoo.kernels.gates.gates`."""
    found, first = [], 0
    rows = widened(logits).chunk(sum([gate.lags or 1 for gate in kinds]), dim=-1)
    for gate in kinds:
        kind, scale, lags = gate
        x = torch.stack(rows[first : first + lags], dim=-1) if lags else rows[first]
        first += lags or 1
        if kind == "share":
            share = torch.sigmoid(x)
            found.append(share if scale == 1 else share * constant((scale,), x, x.dtype))
        else:
            found.append(F.logsigmoid(x if kind == "log_share" else -x))
    if decay is not None:
        z = widened(decay.logit)
        # softplus(x) = -log sigmoid(-x): torch's softplus tells a compiler strides that its gradient does not have.
        found.append(cast(decay.log_rate, z.dtype).exp() * F.logsigmoid(-(z + decay.bias)))
    return tuple(found)
