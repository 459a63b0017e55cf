"""Gated linear attention in chunks of C tokens.

With `P(t, j)` the product of the retentions after j up to t, `S_0` the state at the chunk's start,

    Y = diag(P(., 0)) Q S_0 + sum_j (Q K_j^T * P) V_j,    S_C = P(C, 0) S_0 + sum_j (diag(P(C, .)) K_j)^T V_j
"""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.decay import Decays, decays, interval_products
from memzoo.kernels.scan import scan, split

CHUNK = 64
SEGMENT = 8 * CHUNK


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `memzoo.kernels.linear_attention.linear_attention`."""
    if query.shape[1] == 1:
        return _step(query, key, value, log_retention, state)
    return scan(_segment, state, split((query, key, value, log_retention), SEGMENT))


def _step(
    query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token, with rows and heads as one dimension and few torch calls, which bound it."""
    batch, _, _, heads, width = value.shape
    rows, memory = batch * heads, state.flatten(0, 1)
    if log_retention is not None:
        memory = log_retention.exp().reshape(rows, 1, 1) * memory
    for k, v in zip(key.unbind(2), value.unbind(2), strict=True):
        memory = torch.addcmul(memory, k.reshape(rows, -1, 1), v.reshape(rows, 1, -1))
    y = torch.bmm(query.reshape(rows, 1, -1), memory)
    return y.view(batch, 1, heads, width), memory.view_as(state)


def chunks(x: Tensor, size: int) -> Tensor:
    """`[B, T, H, ...]` to chunks `[B, H, N, C, ...]`, zero beyond T."""
    missing = -x.shape[1] % size
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
    return x.unflatten(1, (-1, size)).movedim(3, 1).contiguous()  # once, not for each product


def unchunked(y: Tensor, tokens: int) -> Tensor:
    """`[B, H, N, C, V]` to `[B, T, H, V]`."""
    return y.movedim(1, 3).flatten(1, 2)[:, :tokens]


def chunk_decays(log_retention: Tensor | None, like: Tensor, size: int) -> Decays:
    """Of every chunk, `[B, H, N, ...]`; for no retention those of a single one that broadcasts."""
    if log_retention is None:
        return decays(torch.ones(1 + size, 1 + size, dtype=like.dtype, device=like.device).tril())
    return decays(interval_products(chunks(log_retention, size)))


def _segment(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens = query.shape[1]
    size = min(CHUNK, tokens)
    q, decay = chunks(query, size), chunk_decays(log_retention, query, size)
    streams = [(chunks(k, size), chunks(v, size)) for k, v in zip(key.unbind(2), value.unbind(2), strict=True)]
    y = sum((q @ k.mT * decay.inside) @ v for k, v in streams)
    written: Tensor = sum((k * decay.to_end).mT @ v for k, v in streams)  # type: ignore[assignment]  # [B, H, N, K, V]
    kept = decay.whole.expand(*q.shape[:3], 1, 1)
    starts = []
    for keep, new in zip(kept.unbind(2), written.unbind(2), strict=True):
        starts.append(state)
        state = keep * state + new
    y = y + (q * decay.from_start) @ torch.stack(starts, dim=2)
    return unchunked(y, tokens), state
