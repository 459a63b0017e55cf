"""The attention branches through every implementation of transformers, and on sequences longer than their window."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import zoo
from tolerances import MODEL, OP, close
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import masking_utils
from transformers.integrations import flex_attention as flex_integration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from memzoo import MemoryCache, TitansConfig
from memzoo.modeling.mixers.attention import CausalAttention, KeyValueState

TOKENS = 23
CANDIDATES = [n for n in zoo.NAMES if n in zoo.PLAIN or n.endswith("-mixed")]
WITH_ATTENTION = [n for n in CANDIDATES if any(isinstance(m, CausalAttention) for m in zoo.causal_lm(n).modules())]


GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "qk_norm": True}


def attention(
    window: int | None, prefix: int, implementation: str = "sdpa", options: dict[str, Any] | None = None
) -> CausalAttention:
    shape = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 8, "num_hidden_layers": 1}
    config = TitansConfig(**{**shape, **(options or {})})
    config._attn_implementation = implementation
    torch.manual_seed(0)
    module = CausalAttention(config, window, prefix=prefix).double().eval()
    for norm in (module.q_norm, module.k_norm):
        if norm is not None:
            torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    return module


def plain(module: CausalAttention, x: Tensor, prefix: Tensor, window: int | None) -> Tensor:
    """Second witness: one softmax over a full mask, token against token."""
    count = prefix.shape[0]
    stream = torch.cat([prefix.expand(x.shape[0], -1, -1), x], dim=1)
    q, k, v = (
        projection(stream).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if module.q_norm is not None:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
            for x, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    k, v = (torch.stack([x[:, h * x.shape[1] // q.shape[1]] for h in range(q.shape[1])], 1) for x in (k, v))
    rotary = LlamaRotaryEmbedding(module.config)
    q, k = apply_rotary_pos_emb(q, k, *rotary(stream, torch.arange(-count, x.shape[1])[None]))
    scores = q @ k.mT * module.head_dim**-0.5
    for i in range(count, stream.shape[1]):
        for j in range(stream.shape[1]):
            seen = j < count or (j <= i and (window is None or j > i - window))
            if not seen:
                scores[:, :, i, j] = -torch.inf
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)[:, count:]


@pytest.mark.parametrize("options", [{}, GROUPED], ids=["", "grouped"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("window", [1, 2, 5, 23, 40, None])
def test_blocks_equal_a_full_mask(
    implementation: str, prefix: int, window: int | None, options: dict[str, Any]
) -> None:
    """In one pass, and in pieces on the carried keys: with and without gradients, in states that grow or have room."""
    module = attention(window, prefix, implementation, options)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS, 16, generator=generator, dtype=torch.float64)
    sinks = torch.randn(prefix, 16, generator=generator, dtype=torch.float64)
    want = plain(module, x, sinks, window)
    # transformers' eager attention takes its softmax in float32
    bound = OP[torch.float64] if implementation == "sdpa" else OP[torch.float32]
    rooms = (None, TOKENS, TOKENS + 4) if window is None else (None,)
    for cuts in ([TOKENS], [1] * TOKENS, [9, *[1] * 5, 9], [2, 21]):
        for counted, room, grad in itertools.product((True, False), rooms, (True, False)):
            state, parts, position = None, [], 0
            with torch.set_grad_enabled(grad):
                for part in x.split(cuts, dim=1):
                    added = torch.full((2,), part.shape[1]) if counted else None
                    rotary = module.rotary(part, (position + torch.arange(part.shape[1]))[None])
                    y, state = module(part, rotary, added, state, sinks, room)
                    parts.append(y)
                    position += part.shape[1]
            close(torch.cat(parts, dim=1), want, bound)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize(("window", "room"), [(5, None), (9, None), (None, TOKENS), (None, None)])
@torch.no_grad()
def test_rows_of_unequal_length_go_on_together(
    implementation: str, prefix: int, window: int | None, room: int | None
) -> None:
    """Token by token, each row from where it stands; a step taken again from the state before it gives the same."""
    module = attention(window, prefix, implementation)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, TOKENS, 16, generator=generator, dtype=torch.float64)
    sinks = torch.randn(prefix, 16, generator=generator, dtype=torch.float64)
    want = plain(module, x, sinks, window)
    lengths = torch.tensor([4, 1, 7])
    first = x[:, :7]
    _, state = module(first, module.rotary(first, torch.arange(7)[None]), lengths, None, sinks, room)
    rows = torch.arange(3)
    for step in range(12):
        at = lengths + step
        token, rotary = x[rows, at][:, None], module.rotary(first, at[:, None])
        y, after = module(token, rotary, None, state, sinks, room)
        again, after = module(token, rotary, None, state, sinks, room)
        close(y[:, 0], want[rows, at], OP[torch.float64] if implementation == "sdpa" else OP[torch.float32])
        assert torch.equal(again, y)
        state = after


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize(("window", "room", "cuts"), [(5, None, [8, *[1] * 5]), (None, 15, [5, 3, 3, 2])])
def test_nothing_is_written_into_what_a_graph_needs(
    trained: str, window: int | None, room: int | None, cuts: list[int]
) -> None:
    """Where adapters train one projection alone, the gradients of pieces are those of one pass; and a token without
    gradients leaves alone what the next ones flow through."""
    module = attention(window, 0).requires_grad_(False)
    weight = getattr(module, trained).weight.requires_grad_()
    x = torch.randn(2, 13, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def read(cuts: list[int]) -> tuple[Tensor, KeyValueState]:
        state, parts, position = None, [], 0
        for part in x.split(cuts, dim=1):
            rotary = module.rotary(part, (position + torch.arange(part.shape[1]))[None])
            y, state = module(part, rotary, None, state, room=room)
            parts.append(y)
            position += part.shape[1]
        assert state is not None
        return torch.cat(parts, dim=1), state

    (y, state), (want, _) = read(cuts), read([13])
    close(*(torch.autograd.grad(each.square().sum(), weight)[0] for each in (y, want)), OP[torch.float64])
    before = [each.clone() for each in state]
    with torch.no_grad():
        module(x[:, :1], module.rotary(x, torch.full((1, 1), 13)), None, state, room=room)
    if trained != "q_proj":
        assert all(map(torch.equal, state, before))


@pytest.mark.parametrize("name", WITH_ATTENTION)
@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_implementations_agree(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prefill, in decoding and on padded rows. Flex attention runs without its compiler."""
    if implementation == "flex_attention" and getattr(zoo.TINY[name], "chain_learning", None) == "in_context":
        pytest.skip("flex attention has no backward on a CPU, which learning in context takes")
    monkeypatch.setattr(flex_integration, "compile_friendly_flex_attention", _uncompiled_flex)
    monkeypatch.setattr(masking_utils, "create_block_mask", _uncompiled_block_mask)
    ids, mask = zoo.tokens(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :4] = 0
    want = zoo.causal_lm(name, torch.float32)
    model = zoo.build(name).eval()
    model.set_attn_implementation(implementation)
    caches = [MemoryCache(m.config) for m in (model, want)]
    with torch.no_grad():
        for low, high in ((0, 19), (19, 20), (20, TOKENS)):
            part = {"input_ids": ids[:, low:high], "attention_mask": mask[:, :high]}
            got, expected = (m(**part, cache=c).logits for m, c in zip((model, want), caches, strict=True))
            close(got, expected, MODEL[torch.float32])


def _uncompiled_flex(*args: Any, training: bool = False, **kwargs: Any) -> Any:
    return flex_attention(*args, **kwargs)


def _uncompiled_block_mask(*args: Any, **kwargs: Any) -> Any:
    return create_block_mask(*args, **{**kwargs, "_compile": False})


def flash_contract(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What flash attention computes from what it is told: no mask but real keys, causal from the lower right corner.

    Keys that are padding are dropped before the corner is found, as in transformers' unpadding.
    """
    outputs = []
    for row in range(query.shape[0]):
        real = torch.ones(key.shape[2], dtype=torch.bool) if attention_mask is None else attention_mask[row].bool()
        k, v, q = key[row][:, real], value[row][:, real], query[row]
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))  # it shares keys and values by itself
        gap = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        seen = (gap >= 0) if sliding_window is None else (gap >= 0) & (gap < sliding_window)
        scores = (q @ k.mT * scaling).masked_fill(~seen, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.stack(outputs), None


@pytest.mark.parametrize("name", WITH_ATTENTION)
@pytest.mark.parametrize("persistent", [0, 3])
def test_what_flash_attention_is_told_is_enough(name: str, persistent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No flash kernel runs without a GPU: a stand-in that knows only what flash attention knows takes its place."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash_contract)
    model = zoo.build(name, torch.float64, num_persistent_tokens=persistent).eval()
    ids, mask = zoo.tokens(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
    for module in model.modules():
        if isinstance(module, CausalAttention):
            module.config._attn_implementation_internal = "flash_attention_2"
    cache = MemoryCache(model.config)
    sees_prefix_beyond_window = persistent > 0 and getattr(model.config, "variant", "") == "mag"
    if sees_prefix_beyond_window:
        with pytest.raises(ValueError, match="cannot show 3 persistent tokens beyond a sliding window"):
            model(ids)
        return
    with torch.no_grad():
        parts = [
            model(ids[:, low:high], attention_mask=mask[:, :high], cache=cache).logits
            for low, high in ((0, 19), (19, 20), (20, TOKENS))
        ]
    close(torch.cat(parts, dim=1), want, MODEL[torch.float64])
