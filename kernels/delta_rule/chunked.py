"""The delta rule in chunks of C tokens, in the WY form with one triangular system.

With `P(t, j)` the product of the retentions after j up to t and `e = i - 1` (`e = i` for an erase after the decay), the
deltas `x_i = strength_i (v_i - p_i^T S')` of a chunk solve

    (I + L) X = diag(strength) V - diag(strength_i P(e, 0)) p S_0,    L_ij = strength_i (p_i . k_j) P(e, j),  j < i

so that `X = U - W S_0` with U and W free of the state, and then (Comba, arXiv 2506.02475, Eq 9-12)

    Y = diag(P(., 0)) Q S_0 + (Q K^T * P) X,    S_C = P(C, 0) S_0 + (diag(P(C, .)) K)^T X
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from memzoo.kernels.linear_attention.chunked import CHUNK, SEGMENT, chunks, decays, unchunked
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
    rows = query.shape[0] * query.shape[2]
    q, k, v = (x.reshape(rows, 1, -1) for x in (query, key, value))
    p = k if erase_key is None else erase_key.reshape(rows, 1, -1)
    memory = decayed = state.reshape(rows, *state.shape[2:])
    if log_retention is not None:
        decayed = log_retention.exp().reshape(rows, 1, 1) * memory
    delta = strength.reshape(rows, 1, 1) * (v - torch.bmm(p, decayed if erase_after_decay else memory))
    memory = torch.baddbmm(decayed, k.mT, delta)
    return torch.bmm(q, memory).reshape(value.shape), memory.view_as(state)


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
    products = decays(log_retention, query, size)
    inside, to_end = products[..., 1:, 1:], products[..., -1, 1:, None]
    until = products[..., 1:, :] if erase_after_decay else products[..., :-1, :]  # P(e, .)
    written = beta * p
    system = (written @ k.mT * until[..., 1:]).tril(-1)
    right = torch.cat([beta * v, written * until[..., :1]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    ends, kept = (k * to_end).mT, products[..., -1, 0].expand(q.shape[:3])
    starts, deltas = [], []
    for n in range(q.shape[2]):
        starts.append(state)
        deltas.append(u[:, :, n] - w[:, :, n] @ state)
        state = kept[:, :, n, None, None] * state + ends[:, :, n] @ deltas[n]
    y = (q * products[..., 1:, :1]) @ torch.stack(starts, dim=2) + (q @ k.mT * inside) @ torch.stack(deltas, dim=2)
    return unchunked(y, tokens), state
