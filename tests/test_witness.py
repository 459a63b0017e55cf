"""A second witness for whole models: Titans written once more from its equations, one sequence, token by token.

It shares nothing with the library but the weights and the feed-forward: the inner gradient is autograd's, the memory's
weights are written out, attention is one softmax over a full mask, and the rotary embedding is its own. What every path
of the library gets wrong alike (a rotary offset, a lost convolution tail, the wrong stream in memory) shows here only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from tolerances import WITNESS, close
from torch import Tensor, nn
from transformers import PreTrainedModel

TOKENS = 27
NEVER = 10**9


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)


class Memory:
    """A two-layer residual memory of one sequence, its weights written out."""

    def __init__(self, layer: Any, config: Any) -> None:
        self.layer, self.config = layer, config
        self.weights = [w.clone() for w in layer.initial_weights()]
        self.slots = [torch.zeros_like(w) for w in self.weights]
        self.tail = torch.zeros(config.conv_width - 1, 3 * config.hidden_size, dtype=self.weights[0].dtype)
        interval = max(1, config.capacity_context // config.capacity_blocks)
        self.unlock = [block * interval for block in range(config.capacity_blocks)]

    def units(self, before: int, unlock: list[int]) -> int:
        """Hidden units that a token with so many before it sees."""
        hidden, blocks = self.weights[0].shape[1], len(unlock)
        seen = sum(before >= after for after in unlock)
        return hidden if seen == blocks else hidden // blocks * seen

    def network(self, w: list[Tensor], x: Tensor, units: int) -> Tensor:
        return w[1][:, :units] @ F.gelu(w[0][:units] @ x) + x

    def read(self, x: Tensor, first: int, chunk: int, unlock: list[int]) -> Tensor:
        """Write the tokens `[T, D]` one by one, each read after it was written (Titans Eq 13-15)."""
        layer, config, heads = self.layer, self.config, self.config.num_attention_heads
        stream = torch.cat([self.tail, layer.qkv_proj(x)])
        width = config.conv_width
        mixed = torch.stack([(layer.conv.weight.T * stream[t : t + width]).sum(0) for t in range(len(x))])
        self.tail = stream[len(x) :]
        q, k, v = F.silu(mixed).view(len(x), 3, heads, -1).unbind(1)
        q, k = unit(q), unit(k)
        gates = torch.sigmoid(x @ layer.gates.weight.T + layer.gates.bias)
        step, momentum, forget = gates.view(len(x), 3, heads).unbind(1)
        keep, step = 1 - forget, config.max_step_size * step
        outputs = []
        for t in range(len(x)):
            if t % chunk == 0:
                anchor = [w.clone() for w in self.weights]
            units = self.units(first + t, unlock)
            for h in range(heads):
                gradient = self.gradient([w[h] for w in anchor], k[t, h], v[t, h], units)
                for w, s, g in zip(self.weights, self.slots, gradient, strict=True):
                    part = (slice(units), slice(None)) if w is self.weights[0] else (slice(None), slice(units))
                    s[h][part] = momentum[t, h] * s[h][part] - step[t, h] * g[part]
                    w[h][part] = keep[t, h] * w[h][part] + s[h][part]
            now = [self.network([w[h] for w in self.weights], q[t, h], units) for h in range(heads)]
            outputs.append(torch.cat(now))
        return torch.stack(outputs)

    def gradient(self, weights: list[Tensor], k: Tensor, v: Tensor, units: int) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [w.detach().requires_grad_() for w in weights]
            found = torch.autograd.grad(0.5 * (self.network(leaves, k, units) - v).square().sum(), leaves)
        norm = float(sum(g.square().sum() for g in found) ** 0.5)
        bound = self.config.max_gradient_norm
        return tuple(g * min(1.0, bound / norm) for g in found)

    def recall(self, q: Tensor, before: int) -> Tensor:
        """The current weights' answer to each head's query, `[H, K]` to `[D]`."""
        units = self.units(before, self.unlock)
        return torch.cat([self.network([w[h] for w in self.weights], q[h], units) for h in range(len(q))])


def attend(attention: Any, stream: Tensor, place: Tensor, sees: Tensor) -> Tensor:
    """Softmax attention of `stream` `[L, D]` at rotary positions `place`, with mask `sees` `[L, L]`."""
    half = attention.head_dim // 2
    frequency = 10000 ** -(torch.arange(half, dtype=stream.dtype) / half)
    angle = place[:, None, None].to(stream.dtype) * frequency

    def turn(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    q, k, v = (
        p(stream).unflatten(-1, (-1, attention.head_dim))
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if attention.q_norm is not None:
        q, k = rms_norm(q, attention.q_norm), rms_norm(k, attention.k_norm)
    k, v = (x[:, [h * x.shape[1] // q.shape[1] for h in range(q.shape[1])]] for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", turn(q), turn(k)) * attention.head_dim**-0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def alone(output: Any, y: Tensor, x: Tensor, heads: int) -> Tensor:
    normed = rms_norm(y.view(len(y), heads, -1), output.norm).flatten(1)
    return output.o_proj(normed * F.silu(output.gate_proj(x)))


def joined(output: Any, y: Tensor, m: Tensor) -> Tensor:
    return output.o_proj(rms_norm(y, output.attention_norm) * torch.sigmoid(rms_norm(m, output.memory_norm)))


def mix(mixer: Any, x: Tensor, config: Any) -> Tensor:
    """One layer's mixer on one sequence `[T, D]`."""
    memory, heads = Memory(mixer.memory, config), config.num_attention_heads
    persistent = mixer.persistent.tokens
    count, chunk = len(persistent), config.chunk_size
    if config.variant == "mac":
        parts = [
            mac_segment(mixer, memory, persistent, x[first : first + config.segment_size], first)
            for first in range(0, len(x), config.segment_size)
        ]
        return torch.cat(parts)
    # The persistent tokens are one chunk, before the first token and while one block is open (Eq 19).
    written = memory.read(persistent, 0, NEVER, [0] + [NEVER] * (config.capacity_blocks - 1))
    m = memory.read(x, 0, chunk, memory.unlock)
    if config.variant == "lmm":
        return alone(mixer.output, m, x, heads)
    i = torch.arange(count + len(x))
    window = (i[None] <= i[:, None]) & (i[None] > i[:, None] - config.sliding_window)
    if config.variant == "mag":  # Eq 26-28
        y = attend(mixer.attention, torch.cat([persistent, x]), i, window | (i[None] < count))[count:]
        return joined(mixer.output, y, m)
    stream = torch.cat([alone(mixer.output, written, persistent, heads), alone(mixer.output, m, x, heads)])
    return mixer.o_proj(attend(mixer.attention, stream, i, window)[count:])  # Eq 29-31


def mac_segment(mixer: Any, memory: Memory, persistent: Tensor, x: Tensor, first: int) -> Tensor:
    """Eq 21-25, causal: h_t, then x_t, then h_{t+1}; the memory reads what attention made of the segment."""
    config, count = memory.config, len(persistent)
    q = unit(F.silu(mixer.query_proj(x)).view(len(x), config.num_attention_heads, -1))
    recalled = [memory.recall(q[t], first + t) for t in range(len(x))]
    pairs = [row for t in range(len(x)) for row in (recalled[t], x[t])]
    stream = torch.cat([persistent, torch.stack(pairs)])
    place = torch.cat([torch.arange(count), count + torch.arange(len(x)).repeat_interleave(2)])
    i = torch.arange(len(stream))
    y = attend(mixer.attention, stream, place, i[None] <= i[:, None])[count + 1 :: 2]
    return joined(mixer.output, y, memory.read(y, first, config.chunk_size, memory.unlock))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    hidden = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        hidden = hidden + mix(layer.mixer, rms_norm(hidden, layer.mixer_norm), model.config)
        hidden = hidden + layer.mlp(rms_norm(hidden, layer.mlp_norm))
    return model.lm_head(rms_norm(hidden, model.model.norm))


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capacity_blocks": 4, "capacity_context": 21},
        {"capacity_blocks": 5, "capacity_context": 17, "max_gradient_norm": 0.5},
    ],
    ids=str,
)
def test_the_model_is_its_equations(variant: str, options: dict[str, Any]) -> None:
    """Plain, with blocks that open inside chunks, and with blocks of unequal size and shortened gradients."""
    model = zoo.build(f"titans-{variant}-e1", torch.float64, **options).eval()
    ids = zoo.tokens(1, TOKENS)
    with torch.no_grad():
        close(model(ids).logits[0], logits(model, ids[0]), WITNESS)
