"""The deep memory on exponential features, token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.deep_exponential_memory import DeepExponentialState, answer
from memzoo.kernels.deep_memory.activations import ACTIVATION
from memzoo.kernels.exponential_memory import kernel
from memzoo.kernels.exponential_memory.places import Memory, advanced, tokens_of


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
    window, act, outputs = step_size.shape[-1], ACTIVATION[activation], []
    first, second = state.first, state.second
    carried = tokens.keys[:, :, : window - 1]
    none = first.new_zeros(*carried.shape[:3], first.shape[2])
    memory = Memory(state.keys, state.written, None, carried, none)
    for t in range(query.shape[1]):
        pairs, q = tokens.keys[:, :, t : t + window], tokens.query[:, :, t, None]  # the oldest of c tokens first
        # All that is asked is asked of M_{t-1}, the query too: what the token writes is known at the pairs.
        asked = torch.cat([pairs, q], dim=2)
        hidden = asked @ first.mT + memory.read(asked, scale)
        # u_i: error units^T for W_1, delta phi(k)^T for W_2.
        units, slope = act.derivatives(hidden[:, :, :-1], 1)
        error = -tokens.values[:, :, t : t + window]
        if objective == "l2":
            error = error + pairs[..., : error.shape[-1]] + units @ second.mT  # M_{t-1}(k) - v
        delta = slope * (error @ second)
        square = error.square().sum(-1) * units.square().sum(-1) + delta.square().sum(-1)  # |phi(k)| = 1
        shorten = (square / max_gradient_norm**2).clamp(min=1).rsqrt()
        gate = (tokens.step_size[:, :, t].flip(-1) * shorten)[..., None]
        change = gate * delta
        keep = tokens.log_retention[:, :, t, None, None].exp()
        first, second = keep * first, keep * second - (gate * error).mT @ units
        memory = memory._replace(
            passed=keep if memory.passed is None else keep * memory.passed,
            new_keys=tokens.keys[:, :, : t + window],
            added=keep * F.pad(memory.added, (0, 0, 0, 1)) - F.pad(change, (0, 0, t, 0)),
        )
        read = keep * hidden[:, :, -1:] - kernel(q, pairs, scale) @ change
        outputs.append(answer(q, read, second, act))
    state = advanced(state, tokens, memory.added, lengths, grows)
    return torch.cat(outputs, dim=2).movedim(1, 2), state._replace(first=first, second=second)
