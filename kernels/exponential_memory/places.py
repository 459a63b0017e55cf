"""Where a memory on exponential features keeps its tokens, for all that torch computes of it.

Token n of a row, counted from its first, stands in place n. A rule of torch's reads the memory as it was before the new
tokens, and the keys of the last c - 1 once more in front of the new ones; what it writes at those is then added in
their places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.exponential_memory import ExponentialState, kernel, normalized
from memzoo.kernels.registry import cast, writable

State = TypeVar("State", bound=Any)


class Tokens(NamedTuple):
    """New tokens as a rule takes them, in the dtype of the state; the pairs are the last c - 1 tokens before and the
    new ones."""

    query: Tensor
    """`[B, H, T, K]`."""
    keys: Tensor
    """Of the pairs, `[B, H, c - 1 + T, K]`."""
    values: Tensor
    """Of the pairs, `[B, H, c - 1 + T, V]`."""
    log_retention: Tensor
    """`[B, H, T]`; 0 for padding."""
    step_size: Tensor
    """`[B, H, T, c]`; 0 for padding and for pairs that do not exist."""


class Memory(NamedTuple):
    """What was written before a call, all of which has passed the same retention in it, and what has been in the call,
    at the keys of some first pairs."""

    keys: Tensor
    written: Tensor
    passed: Tensor | None
    """That retention, `[B, H, 1, 1]`; `None` for 1."""
    new_keys: Tensor
    added: Tensor

    def read(self, x: Tensor, scale: float) -> Tensor:
        """`M phi(x)`, `[B, H, X, K]` to `[B, H, X, V]`."""
        y = kernel(x, self.keys, scale) @ self.written
        if self.passed is not None:
            y = self.passed * y
        return y if self.added.shape[2] == 0 else y + kernel(x, self.new_keys, scale) @ self.added


def by_torch(rule: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ExponentialState]]:
    """A backend of `exponential_memory` from a rule of the tokens and the memory before them."""

    @wraps(rule)
    def exponential_memory(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_retention: Tensor | None,
        step_size: Tensor,
        state: ExponentialState,
        lengths: Tensor | None,
        grows: bool,
        scale: float,
        objective: str,
        normalizer: bool,
    ) -> tuple[Tensor, ExponentialState]:
        tokens = tokens_of(query, key, value, log_retention, step_size, state, lengths)
        values = F.pad(tokens.values, (0, 1), value=1.0) if normalizer else tokens.values
        y, added = rule(tokens._replace(values=values), state, scale, objective)
        return normalized(y.movedim(1, 2), normalizer), advanced(state, tokens, added, lengths, grows)

    return exponential_memory


def tokens_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_retention: Tensor | None,
    step_size: Tensor,
    state: Any,
    lengths: Tensor | None,
) -> Tokens:
    """From an op's inputs, `[B, T, H, ...]`."""
    log_retention, step_size = written_steps(log_retention, step_size, state.position, lengths)
    if lengths is not None:  # a place that no token has yet stays 0
        real = torch.arange(key.shape[1], device=key.device) < lengths[:, None]
        key = torch.where(real[..., None, None], key, 0)
    given = (query, key, value, log_retention, step_size)
    q, k, v, gate, step = (cast(x, state.keys.dtype).movedim(2, 1) for x in given)
    before = state.recent_values.shape[2]
    if before == 0:
        return Tokens(q, k, v, gate, step)
    if state.keys.shape[2] == 0:
        recent = k.new_zeros(*k.shape[:2], before, k.shape[3])
    else:
        place = _places(state.length - before, before, state.keys.shape[2])
        recent = state.keys.gather(2, _of_rows(place, state.keys))
    return Tokens(q, torch.cat([recent, k], dim=2), torch.cat([state.recent_values, v], dim=2), gate, step)


def written_steps(
    log_retention: Tensor | None, step_size: Tensor, position: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gates, `[B, T, H]` and `[B, T, H, c]`, with which padding changes nothing and a token before the first has no
    pair."""
    tokens, window = step_size.shape[1], step_size.shape[3]
    place = torch.arange(tokens, device=step_size.device)
    if log_retention is None:
        log_retention = torch.zeros_like(step_size[..., 0])
    if lengths is not None:
        real = place < lengths[:, None]  # [B, T]
        log_retention = torch.where(real[..., None], log_retention, 0)
        step_size = torch.where(real[..., None, None], step_size, 0)
    exists = torch.arange(window, device=place.device) <= (position[:, None] + place)[..., None]  # [B, T, c]
    return log_retention, torch.where(exists[:, :, None], step_size, 0)


def advanced(state: State, tokens: Tokens, added: Tensor, lengths: Tensor | None, grows: bool) -> State:
    """The state after the tokens, with what they write at the keys of the pairs, `[B, H, c - 1 + T, V]`.

    Without gradients a single token is written into the tensors of a state that does not grow.
    """
    count, before = tokens.query.shape[2], state.recent_values.shape[2]
    keep = tokens.log_retention.sum(2).exp()[..., None, None]
    if grows:
        keys, written = F.pad(state.keys, (0, 0, 0, count)), F.pad(keep * state.written, (0, 0, 0, count))
    elif count > 1 or torch.is_grad_enabled():
        keys, written = state.keys.clone(), keep * state.written
    else:
        keys, written = writable(state.keys), writable(state.written).mul_(keep)
    # What has no place of its own is 0: of tokens before the first, and padding.
    place = _places(state.length - before, before + count, keys.shape[2])
    keys.scatter_add_(2, _of_rows(place[:, before:], keys), tokens.keys[:, :, before:])
    written.scatter_add_(2, _of_rows(place, written), added)
    values = tokens.values
    if lengths is None:
        recent = values[:, :, count:].clone()
    else:
        recent = values.gather(2, _of_rows(_places(lengths, before, values.shape[2]), values))
    new = count if lengths is None else lengths
    return state._replace(
        keys=keys, written=written, recent_values=recent, position=state.position + new, length=state.length + new
    )


def _places(first: Tensor, count: int, of: int) -> Tensor:
    """The places from `first` `[B]` on, `[B, count]`; for one that is not among 0 to `of` - 1 the nearest that is."""
    return (first[:, None] + torch.arange(count, device=first.device)).clamp(0, of - 1)


def _of_rows(place: Tensor, x: Tensor) -> Tensor:
    """The index of places `[B, N]` of `x` `[B, H, R, D]`, `[B, H, N, D]`."""
    return place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
