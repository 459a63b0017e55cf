"""Self-modifying memories, token by token and an equation per line."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memzoo.kernels.deep_memory.activations import ACTIVATION
from memzoo.kernels.registry import as_given
from memzoo.kernels.self_modifying import FORGET, KEY, MEMORY, QUERY, STEP, VALUE, Weights
from memzoo.kernels.unit_length import SHORTEST


def self_modifying(
    u: Tensor,
    query: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor,
    now: Weights,
    anchor: Weights,
    position: Tensor,
    *,
    chunk_size: int,
    self_chunk_size: int,
    step_limit: float,
    activation: str,
    max_gradient_norm: float,
    lengths: Tensor | None,
    backend: str,
) -> tuple[Tensor, Weights, Weights]:
    """See `memzoo.kernels.self_modifying.self_modifying`."""
    dtype, tokens, heads = now.first.dtype, u.shape[1], u.shape[2]
    act, eps = ACTIVATION[activation], torch.finfo(dtype).eps
    (r_eta, r_alpha), (b_eta, b_alpha) = gate_weight.to(dtype), gate_bias.to(dtype)
    w2, w1 = _matrices(now, heads)
    anchor2, anchor1 = _matrices(anchor, heads)
    sizes = torch.full((w2.shape[2],), self_chunk_size, device=u.device)
    sizes[MEMORY] = chunk_size
    none, outputs = torch.zeros_like(position), []

    def read(x: Tensor, m: int | slice) -> Tensor:
        """`M_m(x)`."""
        hidden = (anchor2[:, :, m] @ x[..., None])[..., 0]
        return x + (anchor1[:, :, m] @ act.value(hidden)[..., None])[..., 0]

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp(min=SHORTEST)

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    with as_given(u.device):
        for t in range(tokens):
            is_real = (none < tokens if lengths is None else t < lengths)[:, None, None, None, None]
            begins = is_real & ((position + t)[:, None] % sizes == 0)[:, None, :, None, None]
            anchor2, anchor1 = torch.where(begins, w2, anchor2), torch.where(begins, w1, anchor1)  # Eq 90
            u_t = u[:, t].to(dtype)
            k, v = unit(read(u_t, KEY)), read(u_t, VALUE)  # Eq 86
            eta = step_limit * torch.sigmoid((r_eta * norm(read(u_t, STEP))).sum(-1) + b_eta)
            alpha = torch.sigmoid(-(r_alpha * norm(read(u_t, FORGET))).sum(-1) - b_alpha)
            q = unit(read(u_t, QUERY) if query is None else query[:, t].to(dtype))
            outputs.append(read(q, MEMORY))

            k, v = k[:, :, None], v[:, :, None]  # of every memory
            every, eta, alpha = slice(None), eta[..., None, None, None], alpha[..., None, None, None]
            error = read(k, every) - read(v, every)
            x, slope = act.derivatives((anchor2 @ k[..., None])[..., 0], 1)
            back = (anchor1.mT @ error[..., None])[..., 0] * slope
            g1, g2 = error[..., :, None] * x[..., None, :], back[..., :, None] * k[..., None, :]
            if max_gradient_norm < math.inf:
                size = (g1.square().sum((-2, -1), keepdim=True) + g2.square().sum((-2, -1), keepdim=True)).sqrt()
                g1, g2 = (g * (max_gradient_norm / size.clamp(min=max_gradient_norm)) for g in (g1, g2))
            erased = (w2 @ k[..., None]) * k[..., None, :]
            w2 = torch.where(is_real, alpha * w2 - eta * erased - eta * g2, w2)  # Eq 88
            w1 = torch.where(is_real, alpha * w1 - eta * g1, w1)
    y = torch.stack(outputs, dim=1).to(u.dtype)
    return y, _weights(w2, w1), _weights(anchor2, anchor1)


def _matrices(weights: Weights, heads: int) -> tuple[Tensor, Tensor]:
    """`W_2` `[B, H, N, F, d]` and `W_1` `[B, H, N, d, F]`."""
    second = weights.second.unflatten(1, (heads, -1)).mT
    return weights.first.mT.unflatten(2, (second.shape[2], -1)), second


def _weights(w2: Tensor, w1: Tensor) -> Weights:
    return Weights(w2.flatten(2, 3).mT, w1.mT.flatten(1, 2))
