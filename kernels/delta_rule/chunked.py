"""The delta rule in chunks of C tokens, in the WY form with one triangular system.

With `P(t, j)` the product of the retentions after j up to t and `e = i - 1` (`e = i` for an erase after the decay), the
deltas `x_i = strength_i (v_i - p_i^T S')` of a chunk solve

    (I + L) X = diag(strength) V - diag(strength_i P(e, 0)) p S_0,    L_ij = strength_i (p_i . k_j) P(e, j),  j < i

so that `X = U - W S_0` with U and W free of the state, and then (Comba, arXiv 2506.02475, Eq 9-12)

    Y = diag(P(., 0)) Q S_0 + (Q K^T * P) X,    S_C = P(C, 0) S_0 + (diag(P(C, .)) K)^T X
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.decay import decays, without_dust
from memzoo.kernels.linear_attention.chunked import CHUNK, SEGMENT, chunks, products, unchunked
from memzoo.kernels.registry import as_given
from memzoo.kernels.scan import scan, split


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    erase_key: Tensor | None,
    erase_after_decay: bool,
) -> tuple[Tensor, Tensor]:
    """See `memzoo.kernels.delta_rule.delta_rule`."""
    if query.shape[1] == 1:
        return _step(query, key, value, strength, log_retention, state, erase_key, erase_after_decay)
    inputs = (query, key, value, strength, log_retention, erase_key)
    return scan(partial(_segment, erase_after_decay=erase_after_decay), state, split(inputs, SEGMENT))


def _step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    log_retention: Tensor | None,
    state: Tensor,
    erase_key: Tensor | None,
    erase_after_decay: bool,
) -> tuple[Tensor, Tensor]:
    """One token, with rows and heads as one dimension and few torch calls, which bound it."""
    batch, _, heads, width = value.shape
    rows, memory = batch * heads, state.flatten(0, 1)
    p = key if erase_key is None else erase_key
    decayed = memory if log_retention is None else log_retention.exp().reshape(rows, 1, 1) * memory
    held = decayed if erase_after_decay else memory
    missing = torch.baddbmm(value.reshape(rows, 1, -1), p.reshape(rows, 1, -1), held, alpha=-1)
    memory = torch.addcmul(decayed, key.reshape(rows, -1, 1), strength.reshape(rows, 1, 1) * missing)
    y = torch.bmm(query.reshape(rows, 1, -1), memory)
    return y.view(batch, 1, heads, width), memory.view_as(state)


def _segment(
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
    log_retention: Tensor | None,
    erase_key: Tensor | None,
    erase_after_decay: bool,
) -> tuple[Tensor, Tensor]:
    tokens = query.shape[1]
    size = min(CHUNK, tokens)
    q, k, v = (chunks(x, size) for x in (query, key, value))
    p = k if erase_key is None else chunks(erase_key, size)
    beta = chunks(strength, size)[..., None]  # [B, H, N, C, 1]
    decay = decays(products(None if log_retention is None else chunks(log_retention, size), q, size))
    until, from_start = decay.inside, decay.from_start  # P(e, .)
    if not erase_after_decay:
        until, from_start = decay.inside_before, decay.from_start_before
    written = beta * p
    u, w = _Solve.apply(written @ k.mT * until, beta * v, written * from_start)
    kept = decay.whole.expand(*q.shape[:3], 1, 1)
    starts, deltas, state = _States.apply(state, u, w, (k * decay.to_end).mT, kept)
    y = _plus_product((q * decay.from_start) @ starts, q @ k.mT * decay.inside, deltas)
    return unchunked(y, tokens), state


def _plus_product(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`y + a @ b` of chunks, in one pass over y."""
    return torch.baddbmm(y.flatten(0, 2), a.flatten(0, 2), b.flatten(0, 2)).view_as(y)


SOLVED = 16
"""Tokens whose system is solved row by row; larger ones are put together from such by matrix products."""


def _inverse(system: Tensor) -> Tensor:
    """`(I + L)^-1` for the part L of `system` `[..., C, C]` below the diagonal."""
    size = system.shape[-1]
    if size <= SOLVED:
        unit = torch.eye(size, dtype=system.dtype, device=system.device).expand(system.shape)
        return torch.linalg.solve_triangular(system, unit, upper=False, unitriangular=True)
    half = size // 2
    first, last = slice(0, half), slice(half, size)
    inverse = torch.zeros_like(system)
    inverse[..., first, first] = upper = _inverse(system[..., first, first])
    inverse[..., last, last] = lower = _inverse(system[..., last, last])
    inverse[..., last, first] = without_dust(without_dust(lower @ system[..., last, first]) @ upper).neg_()
    return inverse


class _Solve(torch.autograd.Function):
    """`(I + L)^-1 a` and `(I + L)^-1 b` for the part L of a system below the diagonal."""

    @staticmethod
    def forward(ctx: Any, system: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        inverse = _inverse(system)
        u, w = inverse @ a, without_dust(inverse @ b)
        ctx.save_for_backward(inverse, u, w)
        return u, w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_u: Tensor, d_w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inverse, u, w = ctx.saved_tensors
        with as_given(d_u.device):
            d_a, d_b = inverse.mT @ d_u, inverse.mT @ d_w
            d_system = (d_a @ u.mT).add_(d_b @ w.mT).tril_(-1).neg_()
        return d_system, d_a, d_b


class _States(torch.autograd.Function):
    """The states at the chunks' starts, `[B, H, N, K, V]`, the deltas, `[B, H, N, C, V]`, and the last state:

        X = U - W S,    S' = kept S + ends X

    The backward is written out, since all but its recurrence is done for all chunks at once.
    """

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, u: Tensor, w: Tensor, ends: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        starts, deltas = state.new_empty(*u.shape[:3], *state.shape[2:]), torch.empty_like(u)
        for n in range(u.shape[2]):
            starts[:, :, n] = state
            deltas[:, :, n] = u[:, :, n] - w[:, :, n] @ state
            state = torch.addcmul(ends[:, :, n] @ deltas[:, :, n], kept[:, :, n], state)
        ctx.save_for_backward(w, ends, kept, starts, deltas)
        return starts, deltas, state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_starts: Tensor, d_deltas: Tensor, d_state: Tensor) -> tuple[Tensor, ...]:
        w, ends, kept, starts, deltas = ctx.saved_tensors
        d_after, d_deltas = torch.empty_like(starts), d_deltas.clone()
        with as_given(d_state.device):
            for n in reversed(range(w.shape[2])):
                d_after[:, :, n] = d_state
                d_deltas[:, :, n] += ends[:, :, n].mT @ d_state
                d_state = torch.addcmul(d_starts[:, :, n], kept[:, :, n], d_state)
                d_state -= w[:, :, n].mT @ d_deltas[:, :, n]
            d_w, d_ends = (d_deltas @ starts.mT).neg_(), d_after @ deltas.mT
            d_kept = (d_after * starts).sum((-2, -1), keepdim=True)
        return d_state, d_deltas, d_w, d_ends, d_kept
