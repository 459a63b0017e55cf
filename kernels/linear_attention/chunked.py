"""Gated linear attention in chunks of C tokens.

With `P(t, j)` the product of the retentions after j up to t, `S_0` the state at the chunk's start,

    Y = diag(P(., 0)) Q S_0 + sum_j (Q K_j^T * P) V_j,    S_C = P(C, 0) S_0 + sum_j (diag(P(C, .)) K_j)^T V_j

The states at all chunks' starts are one product, too: of what the chunks write with the products over whole chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memzoo.kernels.decay import decays, gradient_of_logs, interval_products
from memzoo.kernels.registry import as_given
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


def _segment(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _Segment.apply(state, query, key, value, log_retention)


class _Segment(torch.autograd.Function):
    """All chunks of a segment at once, `[B H N, C, ...]`. The backward is written out: it works in place, in few
    tensors, and takes what the logs of the decays get from the scores themselves."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_retention: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        tokens = query.shape[1]
        size = min(CHUNK, tokens)
        q, gate = chunks(query, size), None if log_retention is None else chunks(log_retention, size)
        within = products(gate, q, size)
        across = products(None if gate is None else gate.sum(-1), q, q.shape[2])
        within = within.view(-1, 1 + size, 1 + size)
        decay, lead, q = decays(within), q.shape[:3], q.flatten(0, 2)
        streams = [
            (chunks(k, size).flatten(0, 2), chunks(v, size).flatten(0, 2))
            for k, v in zip(key.unbind(2), value.unbind(2), strict=True)
        ]
        written = torch.bmm((streams[0][0] * decay.to_end).mT, streams[0][1])
        for k, v in streams[1:]:
            written.baddbmm_((k * decay.to_end).mT, v)
        # The states at the chunks' starts, and the last: all that was written before, each part with its decay.
        parts = torch.cat([state[:, :, None], written.view(*lead, *state.shape[2:])], dim=2).flatten(-2)
        starts = (across[..., :-1, :] @ parts).view_as(written)
        last = (across[..., -1:, :] @ parts).view_as(state)
        y = torch.bmm(q, starts).mul_(decay.from_start)
        kept: list[Tensor] = []
        for k, v in streams:
            scores = torch.bmm(q, k.mT).mul_(decay.inside)
            y.baddbmm_(scores, v)
            kept += (k, v, scores)
        ctx.save_for_backward(within, across, parts, starts, q, *kept)
        return unchunked(y.view(*lead, *y.shape[1:]), tokens), last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        within, across, parts, starts, q, *kept = ctx.saved_tensors
        size, lead = q.shape[1], (*d_last.shape[:2], parts.shape[2] - 1)
        decay, tokens = decays(within), d_y.shape[1]
        d_y = chunks(d_y, size).flatten(0, 2)
        d_logs = torch.zeros_like(within) if ctx.needs_input_grad[4] else None
        d_keys: list[Tensor] = []
        d_values: list[Tensor] = []
        with as_given(d_y.device):
            d_starts = torch.bmm((q * decay.from_start).mT, d_y).view(*lead, -1)
            d_states = torch.cat([d_starts, d_last.flatten(-2)[:, :, None]], dim=2)
            d_written = (across[..., 1:].mT @ d_states).view_as(starts)
            d_state = (across[..., :1].mT @ d_states).view_as(d_last)
            d_q = torch.bmm(d_y, starts.mT).mul_(decay.from_start)
            if d_logs is not None:
                d_logs[:, 1:, 0] = (d_q * q).sum(-1)
            for k, v, scores in zip(kept[::3], kept[1::3], kept[2::3], strict=True):
                d_scores = torch.bmm(d_y, v.mT)
                d_k = torch.bmm(v, d_written.mT).mul_(decay.to_end)
                if d_logs is not None:
                    d_logs[:, 1:, 1:].addcmul_(d_scores, scores)
                    d_logs[:, -1, 1:] += (d_k * k).sum(-1)
                d_scores.mul_(decay.inside)
                d_q.baddbmm_(d_scores, k)
                d_keys.append(d_k.baddbmm_(d_scores.mT, q))
                d_values.append(torch.bmm(k, d_written).mul_(decay.to_end).baddbmm_(scores.mT, d_y))
            d_gate = None
            if d_logs is not None:
                d_whole = gradient_of_logs(across * (d_states @ parts.mT))
                d_gate = unchunked(gradient_of_logs(d_logs).view(*lead, size) + d_whole[..., None], tokens)
        d_q, *d_streams = (unchunked(d.view(*lead, size, -1), tokens) for d in (d_q, *d_keys, *d_values))
        d_key, d_value = (_side_by_side(x) for x in (d_streams[: len(d_keys)], d_streams[len(d_keys) :]))
        return d_state, d_q, d_key, d_value, d_gate


def _side_by_side(streams: list[Tensor]) -> Tensor:
    """`[B, T, H, ...]` each to `[B, T, J, H, ...]`, without a copy of a single one."""
    return streams[0][:, :, None] if len(streams) == 1 else torch.stack(streams, dim=2)
