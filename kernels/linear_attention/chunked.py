"""Gated linear attention in chunks of C tokens.

With `P(t, j)` the product of the retentions after j up to t, `S_0` the state at the chunk's start,

    Y = diag(P(., 0)) Q S_0 + sum_j (Q K_j^T * P) V_j,    S_C = P(C, 0) S_0 + sum_j (diag(P(C, .)) K_j)^T V_j

The states at all chunks' starts are one product, too: of what the chunks write with the products over whole chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memzoo.kernels.decay import decays, interval_products
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


def products(log_gate: Tensor | None, like: Tensor, size: int) -> Tensor:
    """`P` over `size` intervals, `[..., 1 + size, 1 + size]`, of gates `[..., size]`; for none a single one that
    broadcasts."""
    if log_gate is None:
        return torch.ones(1 + size, 1 + size, dtype=like.dtype, device=like.device).tril()
    return interval_products(log_gate)


def _states(state: Tensor, written: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Those at the chunks' starts, `[B, H, N, K, V]`, and the last; `kept` is `P` over chunks."""
    parts = torch.cat([state[:, :, None], written], dim=2).flatten(-2)
    starts, last = kept[..., :-1, :] @ parts, kept[..., -1:, :] @ parts
    return starts.view_as(written), last.view_as(state)


def _segment(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens = query.shape[1]
    size = min(CHUNK, tokens)
    q, gate = chunks(query, size), None if log_retention is None else chunks(log_retention, size)
    streams = [(chunks(k, size), chunks(v, size)) for k, v in zip(key.unbind(2), value.unbind(2), strict=True)]
    decay = decays(products(gate, q, size))
    written: Tensor = sum((k * decay.to_end).mT @ v for k, v in streams)  # type: ignore[assignment]  # [B, H, N, K, V]
    starts, state = _states(state, written, products(None if gate is None else gate.sum(-1), q, q.shape[2]))
    y = (q * decay.from_start) @ starts
    for k, v in streams:
        y = plus_product(y, q @ k.mT * decay.inside, v)
    return unchunked(y, tokens), state


def plus_product(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`y + a @ b` of chunks, in one pass over y."""
    return torch.baddbmm(y.flatten(0, 2), a.flatten(0, 2), b.flatten(0, 2)).view_as(y)
