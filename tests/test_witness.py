"""A second witness for whole models: Titans and ATLAS written once more from their equations, token by token.

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
from transformers import AutoModelForCausalLM, PreTrainedModel

import memzoo

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
        self.gated, self.muon = config.memory == "gated_mlp", config.use_muon
        self.weights = [w.clone() for w in layer.initial_weights()]
        self.slots = [torch.zeros_like(w) for w in self.weights]
        self.tail = torch.zeros(config.conv_width - 1, layer.qkv_proj.weight.shape[0], dtype=self.weights[0].dtype)
        self.pairs: list[tuple[Tensor, Tensor]] = []
        interval = max(1, config.capacity_context // config.capacity_blocks)
        self.unlock = [block * interval for block in range(config.capacity_blocks)]

    def units(self, before: int, unlock: list[int]) -> int:
        """Hidden units that a token with so many before it sees."""
        hidden, blocks = self.weights[1].shape[2], len(unlock)
        seen = sum(before >= after for after in unlock)
        return hidden if seen == blocks else hidden // blocks * seen

    def parts(self, units: int) -> list[tuple[slice, slice]]:
        """The weights `[out, in]` that so many units own."""
        return [(slice(units * (2 if self.gated else 1)), slice(None)), (slice(None), slice(units))]

    def network(self, w: list[Tensor], x: Tensor, units: int) -> Tensor:
        rows, columns = self.parts(units)
        h = w[0][rows] @ x
        z = F.gelu(h[::2]) * h[1::2] if self.gated else F.gelu(h)
        return w[1][columns] @ z + x[: w[1].shape[0]]

    def features(self, x: Tensor, head: int) -> Tensor:
        """Monomials of degree 1 and 2 of a unit vector (ATLAS Eq 5), or the vector."""
        if self.config.feature_map == "identity":
            return x
        b = [b[head] for b in self.layer.features.coefficients]
        z = unit(x @ self.layer.features.projection[head])
        products = [z[r] * z[s] * (1 if r == s else 2**0.5) for r in range(len(z)) for s in range(r, len(z))]
        return torch.cat([b[0] * x, b[1] * torch.stack(products)]) / (b[0] ** 2 + b[1] ** 2) ** 0.5

    def project(self, x: Tensor) -> tuple[list[list[Tensor]], list[list[Tensor]], Tensor]:
        """Queries, keys and values by token and head."""
        layer, width = self.layer, self.config.conv_width
        stream = torch.cat([self.tail, layer.qkv_proj(x)])
        mixed = torch.stack([(layer.conv.weight.T * stream[t : t + width]).sum(0) for t in range(len(x))])
        self.tail = stream[len(x) :]
        q, k, v = F.silu(mixed).view(len(x), 3, self.config.num_attention_heads, -1).unbind(1)
        q, k = ([[self.features(one, h) for h, one in enumerate(unit(token))] for token in y] for y in (q, k))
        return q, k, v

    def read(self, x: Tensor, first: int, chunk: int, unlock: list[int]) -> Tensor:
        """Write the tokens `[T, D]` one by one, each read after it was written (Titans Eq 13-15; ATLAS Eq 9, 32)."""
        layer, config, heads = self.layer, self.config, self.config.num_attention_heads
        q, k, v = self.project(x)
        gates = torch.sigmoid(x @ layer.gates.weight.T + layer.gates.bias).view(len(x), -1, heads)
        step, gates = config.max_step_size * gates[:, 0], gates[:, 1:]
        momentum = torch.zeros_like(step)
        if config.use_momentum:
            momentum, gates = gates[:, 0], gates[:, 1:]
        keep, lags = 1 - gates[:, 0], gates[:, 1:] / config.window
        if config.window == 1:
            lags = torch.ones_like(step)[:, None]
        outputs = []
        for t in range(len(x)):
            units = self.units(first + t, unlock)
            if t % chunk == 0:
                start, begin = len(self.pairs), units
                anchor, inside, decayed = ([w.clone() for w in self.weights] for _ in range(3))
                steps = [torch.zeros_like(w) for w in self.weights]
            self.pairs.append((k[t], v[t], units))  # type: ignore[arg-type]
            last = len(self.pairs) - 1
            oldest = max(last - config.window + 1, 0 if config.window_halo else start)
            for h in range(heads):
                total = [torch.zeros_like(w[h]) for w in anchor]
                for i in range(oldest, last + 1):
                    key, value, seen = self.pairs[i]  # type: ignore[misc]
                    found = self.gradient([w[h] for w in anchor], key[h], value[h], seen if i >= start else begin)
                    total = [a + lags[t, last - i, h] * g for a, g in zip(total, found, strict=True)]
                a, m, rate = keep[t, h], momentum[t, h], step[t, h]
                for layer_at, part in enumerate(self.parts(units)):
                    s, g = self.slots[layer_at][h][part], total[layer_at][part]
                    s.mul_(m).sub_(g if self.muon else rate * g)
                    update = s if not self.muon else rate * self.orthogonal(s, layer_at)
                    for w in (self.weights, decayed, steps, inside):
                        w[layer_at][h][part] *= a
                    self.weights[layer_at][h][part] += update
                    inside[layer_at][h][part] += rate * s if self.muon else update
                    steps[layer_at][h][part] += rate
            by_chunk = self.muon and config.muon_every == "chunk"
            read = inside if by_chunk else self.weights
            outputs.append(torch.cat([self.network([w[h] for w in read], q[t][h], units) for h in range(heads)]))
            if by_chunk and (t + 1) % chunk == 0:
                for layer_at, part in enumerate(self.parts(units)):
                    self.weights[layer_at] = decayed[layer_at]
                    for h in range(heads):
                        made = self.orthogonal(self.slots[layer_at][h][part], layer_at)
                        self.weights[layer_at][h][part] += steps[layer_at][h][part] * made
        return torch.stack(outputs)

    def orthogonal(self, s: Tensor, layer: int) -> Tensor:
        """Newton-Schulz by singular values, of the open part alone; of activations and gates each by itself."""
        made = torch.zeros_like(s)
        for part in (slice(0, None, 2), slice(1, None, 2)) if self.gated and layer == 0 else (slice(None),):
            u, sigma, vh = torch.linalg.svd(s[part], full_matrices=False)
            sigma = sigma / sigma.norm()
            for _ in range(self.config.newton_schulz_steps):
                sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
            made[part] = u @ torch.diag(sigma) @ vh
        return made

    def gradient(self, weights: list[Tensor], k: Tensor, v: Tensor, units: int) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [w.detach().requires_grad_() for w in weights]
            y = self.network(leaves, k, units)
            loss = -y @ v if self.config.objective == "dot" else 0.5 * (y - v).square().sum()
            found = torch.autograd.grad(loss, leaves)
        norm = float(sum(g.square().sum() for g in found) ** 0.5)
        bound = self.config.max_gradient_norm
        return tuple(g * min(1.0, bound / norm) for g in found)

    def recall(self, q: Tensor, before: int) -> Tensor:
        """The current weights' answer to each head's query, `[H, K]` to `[D]`."""
        units, answers = self.units(before, self.unlock), []
        for h in range(len(q)):
            answers.append(self.network([w[h] for w in self.weights], self.features(q[h], h), units))
        return torch.cat(answers)


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


def joined(output: Any, y: Tensor, m: Tensor, skip: bool = False) -> Tensor:
    gate = torch.sigmoid(rms_norm(m, output.memory_norm))
    return output.o_proj(y * gate * 2 if skip else rms_norm(y, output.attention_norm) * gate)


def mix(mixer: Any, x: Tensor, config: Any, index: int) -> Tensor:
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
    written = memory.read(persistent, 0, count, [0] + [NEVER] * (config.capacity_blocks - 1))
    m = memory.read(x, 0, chunk, memory.unlock)
    if config.variant == "lmm":
        return alone(mixer.output, m, x, heads)
    i = torch.arange(count + len(x))
    full = config.layer_types is not None and config.layer_types[index] == "full_attention"
    window = (i[None] <= i[:, None]) & (i[None] > i[:, None] - (NEVER if full else config.sliding_window))
    if config.variant == "mag":  # Eq 26-28
        y = attend(mixer.attention, torch.cat([persistent, x]), i, window | (i[None] < count))[count:]
        return joined(mixer.output, y, m, config.memory_skip)
    stream = torch.cat([alone(mixer.output, written, persistent, heads), alone(mixer.output, m, x, heads)])
    if config.memory_skip:
        stream = stream + torch.cat([persistent, x])
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
    for index, layer in enumerate(model.model.layers):
        hidden = hidden + mix(layer.mixer, rms_norm(hidden, layer.mixer_norm), model.config, index)
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
    model = zoo.build(f"titans-{variant}-e1", torch.float64, num_hidden_layers=1, **options).eval()
    ids = zoo.tokens(1, TOKENS)
    with torch.no_grad():
        close(model(ids).logits[0], logits(model, ids[0]), WITNESS)


@pytest.mark.parametrize("name", ["titans-mag-skip-e16", "titans-mal-skip-e16"])
def test_the_wirings_around_a_pretrained_attention_are_their_equations(name: str) -> None:
    """A skip round the memory, heads of their own width, one layer of full attention and one of a window."""
    ids, model = zoo.tokens(1, TOKENS), zoo.causal_lm(name)
    with torch.no_grad():
        close(model(ids).logits[0], logits(model, ids[0]), WITNESS)


@pytest.mark.parametrize("variant", ["lmm", *zoo.slow("mac", "mag")])
@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (memzoo.OmegaNetConfig, {"window": 3, "feature_dim": 3}),
        (memzoo.OmegaNetConfig, {"window": 6, "feature_map": "identity", "capacity_blocks": 4}),
        (memzoo.OmegaNetConfig, {"window": 3, "window_halo": False, "memory": "gated_mlp", "feature_dim": 3}),
        (memzoo.AtlasConfig, {"window": 3, "feature_dim": 3}),
        (memzoo.AtlasConfig, {"window": 2, "feature_map": "identity", "memory": "gated_mlp", "capacity_blocks": 4}),
        (memzoo.AtlasConfig, {"window": 3, "feature_map": "identity", "muon_every": "token", "capacity_blocks": 4}),
        (memzoo.AtlasConfig, {"window": 3, "feature_dim": 3, "muon_every": "token", "memory": "gated_mlp"}),
        (memzoo.DLAConfig, {}),
        (memzoo.DLAConfig, {"use_momentum": True, "capacity_blocks": 4}),
    ],
    ids=str,
)
def test_the_atlas_family_is_its_equations(variant: str, config_class: type, options: dict[str, Any]) -> None:
    """Windows over chunk edges, features, gated memories, Muon on the open part, blocks that open inside chunks."""
    shape = zoo.config_of(f"titans-{variant}-e1").to_diff_dict()
    shape = {key: value for key, value in shape.items() if key != "model_type"}
    config = config_class(**{**shape, "num_hidden_layers": 1, "capacity_context": 21, **options})
    model = zoo.enliven(AutoModelForCausalLM.from_config(config, dtype=torch.float64)).eval()
    ids = zoo.tokens(1, TOKENS)
    with torch.no_grad():
        close(model(ids).logits[0], logits(model, ids[0]), WITNESS)
