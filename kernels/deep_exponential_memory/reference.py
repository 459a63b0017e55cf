"""The deep memory on exponential features, token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.deep_exponential_memory import DeepExponentialState, answer, before
from memzoo.kernels.deep_memory.activations import ACTIVATION
from memzoo.kernels.exponential_memory.places import advanced, tokens_of


def deep_exponential_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    step_size: Tensor,
    state: DeepExponentialState,
    lengths: Tensor | None,
    grows: bool,
    scale: float,
    objective: str,
    activation: str,
    max_gradient_norm: float,
) -> tuple[Tensor, DeepExponentialState]:
    """See `memzoo.kernels.deep_exponential_memory.deep_exponential_memory`."""
    tokens = tokens_of(query, key, value, log_retention, step_size, state, lengths)
    window, outputs = step_size.shape[-1], []
    held, first, second = state.keys.shape[2], state.first, state.second
    known = torch.cat([state.keys, tokens.keys[:, :, : window - 1]], dim=2)  # the last c - 1, where pairs write, again
    written = F.pad(state.written, (0, 0, 0, window - 1))
    for t in range(query.shape[1]):
        pairs = tokens.keys[:, :, t : t + window]  # of the last c tokens, the oldest first
        # u_i at M_{t-1}: error act^T for W_1, delta phi(k)^T for W_2.
        act, slope = ACTIVATION[activation].derivatives(before(pairs, known, written, first, scale), 1)
        error = -tokens.values[:, :, t : t + window]
        if objective == "l2":
            error = error + pairs[..., : error.shape[-1]] + act @ second.mT  # M_{t-1}(k) - v
        delta = slope * (error @ second)
        square = error.square().sum(-1) * act.square().sum(-1) + delta.square().sum(-1)  # |phi(k)| = 1
        shorten = (square / max_gradient_norm**2).clamp(min=1).rsqrt()
        gate = (tokens.step_size[:, :, t].flip(-1) * shorten)[..., None]
        keep = tokens.log_retention[:, :, t, None, None].exp()
        first, second = keep * first, keep * second - (gate * error).mT @ act
        known = torch.cat([known, pairs[:, :, -1:]], dim=2)
        written = keep * F.pad(written, (0, 0, 0, 1)) - F.pad(gate * delta, (0, 0, known.shape[2] - window, 0))
        outputs.append(answer(tokens.query[:, :, t, None], known, written, first, second, scale, activation))
    state = advanced(state, tokens, written[:, :, held:], lengths, grows)
    return torch.cat(outputs, dim=2).movedim(1, 2), state._replace(first=first, second=second)
