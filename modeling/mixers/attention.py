"""Causal attention over rows, through transformers' attention interface, with a bounded window of carried keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.generic import is_flash_attention_requested


class KeyValueState(NamedTuple):
    """The last keys and values of each row, right-aligned: row b's valid ones are its last `valid[b]`."""

    keys: Tensor
    """`[B, H, R, D]`, after the rotary embedding."""
    values: Tensor
    """`[B, H, R, D]`."""
    valid: Tensor
    """`[B]`, int64."""


class CausalAttention(nn.Module):
    """Softmax attention with rotary embeddings; no output projection, since the wirings differ in what they project.

        y_t = sum_j softmax_j(q_t . k_j / sqrt(D)) v_j   over prefix keys j, and own keys j <= t (the last `window` of
        them)

    Source: Titans (arXiv 2501.00663), Eq 23, 27, 30. Deviations: none.

    Args:
        config: gives widths, rotary embedding, dropout and the attention implementation.
        window: own keys that a token sees, itself included; `None` for all since the state was empty.
        carried: keys kept for later tokens.
    """

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config: PreTrainedConfig, window: int | None, carried: int) -> None:
        super().__init__()
        self.config = config
        self.window = window
        self.carried = carried
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]  # reads rope_parameters only

    def forward(
        self,
        x: Tensor,
        position: Tensor,
        added: Tensor | None,
        state: KeyValueState | None,
        prefix: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueState]:
        """Attend from new tokens to the prefix, the carried keys and the new keys.

        Args:
            x: new tokens `[B, L, D_model]`, right-padded.
            position: rotary position of each, `[B, L]`; the prefix stands at 0, 1, ...
            added: real tokens per row, `[B]`; `None` when all are.
            state: carried keys, or `None` at the start.
            prefix: tokens that every token sees, `[P, D_model]`.

        Returns:
            `[B, L, D_model]` and the new state.
        """
        q, k, v = self._project(x, position, queries=True)
        if prefix is not None and prefix.shape[0] > 0:
            places = torch.arange(prefix.shape[0], device=x.device)[None]
            _, prefix_k, prefix_v = self._project(prefix[None], places, queries=False)
        else:
            prefix_k = prefix_v = k[:1, :, :0]
        y = self._attend(q, k, v, state, prefix_k, prefix_v)
        return y, self._carry(k, v, added, state)

    def _project(self, x: Tensor, position: Tensor, queries: bool) -> tuple[Tensor, Tensor, Tensor]:
        def heads(projection: nn.Linear) -> Tensor:
            return projection(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

        cos, sin = self.rotary(x, position)
        k, v = heads(self.k_proj), heads(self.v_proj)
        q = heads(self.q_proj) if queries else k
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k, v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState | None, prefix_k: Tensor, prefix_v: Tensor
    ) -> Tensor:
        """Blocks of queries as separate batch rows, each with the keys that its window reaches.

        A block of Q queries sees at most the R keys before it and its own Q, so that a long row costs L (R + Q), not
        L^2.
        """
        batch, _, tokens, _ = q.shape
        held, valid = 0, torch.zeros(batch, dtype=torch.int64, device=q.device)
        if state is not None:
            held, valid = state.keys.shape[2], state.valid
            k, v = torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2)
        if self.window is None or tokens <= self.window:
            y = self._interface(q, k, v, held - valid, held, prefix_k, prefix_v)
            return y.flatten(2)
        size, reach = self.window, self.window - 1  # every block sees `reach` keys before it
        blocks = -(-tokens // size)
        end = blocks * size - tokens
        k, v = (nn.functional.pad(x, (0, 0, reach - held, end)) for x in (k, v))
        k, v = (x.unfold(2, reach + size, size).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v))
        q = nn.functional.pad(q, (0, 0, 0, end)).unflatten(2, (blocks, size)).transpose(1, 2).flatten(0, 1)
        # Keys of a block that do not exist: more than `valid` before the row's first new token.
        first = (reach - valid[:, None] - size * torch.arange(blocks, device=q.device)).clamp(min=0)
        y = self._interface(q, k, v, first.flatten(), reach, prefix_k, prefix_v)
        return y.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :tokens].flatten(2)

    def _interface(
        self, q: Tensor, k: Tensor, v: Tensor, first: Tensor, held: int, prefix_k: Tensor, prefix_v: Tensor
    ) -> Tensor:
        """`[N, H, Q, D]` queries on `[N, H, R + Q, D]` keys, of which those before `first` `[N]` do not exist."""
        prefix = prefix_k.shape[2]
        implementation = self.config._attn_implementation
        flash = is_flash_attention_requested(self.config)
        if flash and prefix > 0 and self.window is not None:
            raise ValueError(
                f"attn_implementation={implementation!r} cannot show {prefix} persistent tokens beyond a sliding "
                f"window; "
                "expected 'sdpa', 'eager' or 'flex_attention', or a config with num_persistent_tokens=0."
            )
        rows = q.shape[0]
        if prefix > 0:
            k, v = (
                torch.cat([p.expand(rows, -1, -1, -1), x], dim=2)
                for p, x in ((prefix_k.to(k.dtype), k), (prefix_v.to(v.dtype), v))
            )
        keys, queries = k.shape[2], q.shape[2]
        mask = None
        # One query that all keys are there for, as in steady decoding, needs no mask, and building one would cost more
        # than its attention.
        if flash or queries > 1 or held + 1 > (self.window or keys) or bool((first > 0).any()):
            valid = None
            if flash and bool((first > 0).any()):
                place = torch.arange(keys, device=q.device)
                valid = (place < prefix) | (place >= prefix + first[:, None])
            mask = ALL_MASK_ATTENTION_FUNCTIONS[implementation](
                batch_size=rows,
                q_length=queries,
                kv_length=keys,
                mask_function=self._mask(first, prefix, held),
                attention_mask=valid,
                allow_is_causal_skip=False,
                dtype=q.dtype,
                device=q.device,
                config=self.config,
            )
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        y, _ = attend(
            self,
            q,
            k,
            v,
            mask,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            sliding_window=self.window,
        )
        return y

    def _mask(self, first: Tensor, prefix: int, held: int) -> Callable:
        """Whether query `q_idx` of a block sees key `kv_idx`, as transformers' mask functions ask it."""
        window = self.window

        def sees(batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            own = kv_idx - prefix
            visible = (own <= q_idx + held) & (own >= first[batch_idx])
            if window is not None:
                visible = visible & (own > q_idx + held - window)
            return (kv_idx < prefix) | visible

        return sees

    def _carry(self, k: Tensor, v: Tensor, added: Tensor | None, state: KeyValueState | None) -> KeyValueState:
        """The last `carried` keys and values up to each row's last real token."""
        batch, heads, tokens, width = k.shape
        if state is None:
            empty = k.new_zeros(batch, heads, self.carried, width)
            state = KeyValueState(empty, empty, torch.zeros(batch, dtype=torch.int64, device=k.device))
        if added is None:
            keys, values = (
                torch.cat([old[:, :, min(tokens, self.carried) :], new[:, :, max(0, tokens - self.carried) :]], dim=2)
                for old, new in ((state.keys, k), (state.values, v))
            )
            return KeyValueState(keys, values, (state.valid + tokens).clamp(max=self.carried))
        index = (added[:, None] + torch.arange(self.carried, device=k.device))[:, None, :, None]
        keys, values = (
            torch.cat([old, new], dim=2).gather(2, index.expand(-1, heads, -1, width))
            for old, new in ((state.keys, k), (state.values, v))
        )
        return KeyValueState(keys, values, (state.valid + added).clamp(max=self.carried))
