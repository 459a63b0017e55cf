"""Causal attention over rows, through transformers' attention interface, with a bounded window of carried keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward
from transformers.utils.generic import is_flash_attention_requested

from memzoo.kernels.registry import cast, may_be
from memzoo.modeling.norms import RMSNorm


class HeadRotaryEmbedding(LlamaRotaryEmbedding):
    """Cosines and sines `[B, L, D]` of positions `[B, L]` for heads of width D, by the config's `rope_parameters`; the
    sines of the first half with the sign that `rotated` gives them.

    Depends on the positions' differences only: tokens of a sequence stand at 0, 1, ..., what precedes all of them at
    negative positions.
    """

    def __init__(self, config: PreTrainedConfig, head_dim: int) -> None:
        rope, longest = config.rope_parameters, config.max_position_embeddings
        super().__init__(LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=longest))
        self.head_dim = head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None] * self.inv_freq.to(x.device, torch.float32)
        cos, sin = angle.cos(), angle.sin()
        both = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        if self.attention_scaling != 1:
            both = both[0] * self.attention_scaling, both[1] * self.attention_scaling
        return cast(both[0], x.dtype), cast(both[1], x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[..., D]` turned by the angles of a `HeadRotaryEmbedding`: coordinates j and j + D / 2 are a plane's."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


class KeyValueState(NamedTuple):
    """The last keys and values of each row, right-aligned: row b's valid ones are its last `valid[b]`."""

    keys: Tensor
    """`[B, G, R, D]`, after the rotary embedding; G heads of keys and values."""
    values: Tensor
    """`[B, G, R, D]`."""
    valid: Tensor
    """`[B]`, int64."""
    prefix_keys: Tensor
    """Of the tokens that every token sees, `[B, G, P, D]`."""
    prefix_values: Tensor
    """`[B, G, P, D]`."""


class CausalAttention(nn.Module):
    """Softmax attention with rotary embeddings; no output projection, since the wirings differ in what they project.

        y_t = sum_j softmax_j(q_t . k_j / sqrt(D)) v_j   over prefix keys j, and own keys j <= t (the last `window` of
        them)

    Each head of keys and values serves H / G heads of queries (arXiv 2305.13245, section 2.2).

    Source: Titans (arXiv 2501.00663), Eq 23, 27, 30. Deviations: none.

    Args:
        config: gives widths, rotary embedding, dropout and the attention implementation.
        window: own keys that a token sees, itself included; `None` for all since the state was empty.
        carried: keys kept for later tokens; `None` for all.
    """

    is_causal = True

    def __init__(self, config: PreTrainedConfig, window: int | None, carried: int | None) -> None:
        super().__init__()
        self.config = config
        self.window = window
        self.carried = carried
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.scaling = self.head_dim**-0.5
        self.num_key_value_groups = self.heads // config.num_key_value_heads
        width, shared = self.heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=config.attention_bias)
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None for _ in range(2)
        )
        self.rotary = HeadRotaryEmbedding(config, self.head_dim)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        added: Tensor | None,
        state: KeyValueState | None,
        prefix: Tensor | None = None,
        room: int | None = None,
    ) -> tuple[Tensor, KeyValueState]:
        """Attend from new tokens to the prefix, the carried keys and the new keys.

        Args:
            x: new tokens `[B, L, D_model]`, right-padded.
            rotary: cosines and sines of their positions, each `[B, L, D]`, as `self.rotary` gives them.
            added: real tokens per row, `[B]`; `None` when all are.
            state: carried keys, or `None` at the start.
            prefix: tokens that every token sees, `[P, D_model]`, at positions `-P` to -1; looked at where there is no
                state, which keeps them.
            room: keys that a state holds where `carried` says all, masked until they come; `None` for as many as there
                are, with which it grows.

        Returns:
            `[B, L, H D]` and the new state.
        """
        q, k, v = self._heads_of(x, *rotary)
        if state is None:
            state = self._begin(k, prefix)
        keys = torch.cat([state.prefix_keys, state.keys, k], dim=2)
        values = torch.cat([state.prefix_values, state.values, v], dim=2)
        implementation = self.config._attn_implementation
        missing = self._may_miss(state, implementation)
        y = self._attend(q, keys, values, state, implementation, missing)
        return y, self._carry(keys, values, x.shape[1], added, state, room, missing)

    def _heads_of(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with the rotary embedding and values, `[B, H, L, D]` each; of a single token, which is bound
        by the number of torch calls, with few."""
        if x.shape[1] > 1:
            q, k = self._heads(x, self.q_proj, self.q_norm), self._heads(x, self.k_proj, self.k_norm)
            cos, sin = cos[:, None], sin[:, None]
            return rotated(q, cos, sin), rotated(k, cos, sin), self._heads(x, self.v_proj)
        batch, width = x.shape[0], self.head_dim
        q, k = self._projected(x, self.q_proj, self.q_norm), self._projected(x, self.k_proj, self.k_norm)
        both = torch.cat([q, k], dim=-1).view(batch, -1, width)
        both = rotated(both, cos, sin)
        v = self.v_proj(x).reshape(batch, -1, 1, width)
        return both[:, : self.heads, None], both[:, self.heads :, None], v

    def _heads(self, x: Tensor, projection: nn.Linear, norm: nn.Module | None = None) -> Tensor:
        return self._projected(x, projection, norm).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _projected(self, x: Tensor, projection: nn.Linear, norm: nn.Module | None) -> Tensor:
        y = projection(x)
        return y if norm is None else norm(y.unflatten(-1, (-1, self.head_dim))).flatten(-2)

    def _begin(self, k: Tensor, prefix: Tensor | None) -> KeyValueState:
        """No carried keys yet, for rows with new keys `k`."""
        none = k.new_zeros(*k.shape[:2], 0, k.shape[3])
        valid = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device)
        if prefix is None or prefix.shape[0] == 0:
            return KeyValueState(none, none, valid, none, none)
        places = torch.arange(-prefix.shape[0], 0, device=k.device)[None]
        prefix_k = self._heads(prefix[None], self.k_proj, self.k_norm)
        cos, sin = self.rotary(prefix, places)
        prefix_k = rotated(prefix_k, cos[:, None], sin[:, None])
        prefix_v = self._heads(prefix[None], self.v_proj)
        prefix_k, prefix_v = (x.to(k.dtype).expand(k.shape[0], -1, -1, -1) for x in (prefix_k, prefix_v))
        return KeyValueState(none, none, valid, prefix_k, prefix_v)

    def _may_miss(self, state: KeyValueState, implementation: str) -> bool:
        """Whether rows may carry fewer keys than there is room for. Flash attention drops missing keys, and so asks the
        device for their number."""
        held = state.keys.shape[2]
        if held > 0 and is_flash_attention_requested(None, implementation):
            return bool((state.valid < held).any())
        return held > 0 and may_be(state.valid, lambda valid: valid < held)

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, state: KeyValueState, implementation: str, missing: bool
    ) -> Tensor:
        """Blocks of queries as separate batch rows, each with the prefix and the keys that its window reaches.

        A block sees the keys of the one before it and its own, so that a long row costs 2 L W, not L^2.
        """
        (batch, _, tokens, _), held, count = q.shape, state.keys.shape[2], state.prefix_keys.shape[2]
        if self.window is None or tokens <= self.window:
            return self._interface(q, keys, values, count, state.valid, held, implementation, missing).flatten(2)
        size = self.window
        blocks = -(-tokens // size)
        end = blocks * size - tokens
        keys, values = (self._in_blocks(x, count, size - held, end) for x in (keys, values))
        q = nn.functional.pad(q, (0, 0, 0, end)).unflatten(2, (blocks, size)).transpose(1, 2).flatten(0, 1)
        # A block reaches a window back, but no further than `valid` before the row's first new token.
        valid = (state.valid[:, None] + size * torch.arange(blocks, device=q.device)).clamp(max=size)
        y = self._interface(q, keys, values, count, valid.flatten(), size, implementation, missing=True)
        return y.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :tokens].flatten(2)

    def _in_blocks(self, x: Tensor, prefix: int, start: int, end: int) -> Tensor:
        """Keys `[B, G, P + L, D]`, padded at both ends, in blocks of the window's size, each behind the prefix and the
        block before it."""
        blocks = nn.functional.pad(x[:, :, prefix:], (0, 0, start, end)).unflatten(2, (-1, self.window))
        fixed = x[:, :, None, :prefix].expand(-1, -1, blocks.shape[2] - 1, -1, -1)
        return torch.cat([fixed, blocks[:, :, :-1], blocks[:, :, 1:]], dim=3).transpose(1, 2).flatten(0, 1)

    def _interface(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        count: int,
        valid: Tensor,
        held: int,
        implementation: str,
        missing: bool,
    ) -> Tensor:
        """`[N, H, Q, D]` queries on keys `[N, G, P + R + Q, D]`, the first P = `count` of which all see; of the R =
        `held` next ones the last `valid` `[N]` exist, which can be fewer only where some may be `missing`."""
        flash = is_flash_attention_requested(None, implementation)
        if flash and count > 0 and self.window is not None:
            raise ValueError(
                f"attn_implementation={implementation!r} cannot show {count} persistent tokens beyond a sliding "
                "window; expected 'sdpa', 'eager' or 'flex_attention', or a config with num_persistent_tokens=0."
            )
        queries, keys = q.shape[2], k.shape[2]
        mask = exists = None
        if flash and missing:
            place = torch.arange(keys, device=q.device)
            exists = (place < count) | (place >= count + held - valid[:, None])
        # One query for which all keys are there, as in steady decoding, needs no mask; building one would cost more
        # than its attention.
        # Nor does a plain causal square under sdpa, which knows it by itself.
        square = implementation == "sdpa" and self.window is None and queries == keys and not missing
        too_far = self.window is not None and held >= self.window
        if implementation == "sdpa" and queries == 1 and missing and not too_far:
            own = torch.arange(-count, keys - count, device=q.device)
            mask = own >= held - valid[:, None]
            mask = (mask if count == 0 else mask | (own < 0))[:, None, None]
        elif not square and (flash or missing or queries > 1 or too_far):
            mask = ALL_MASK_ATTENTION_FUNCTIONS[implementation](
                batch_size=q.shape[0],
                q_length=queries,
                kv_length=keys,
                mask_function=self._mask(held - valid, count, held),
                attention_mask=exists,
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
        """Whether query `q_idx` of a block sees key `kv_idx`, as transformers' mask functions ask it; of a row's own
        keys, those before `first` `[N]` do not exist."""
        window = self.window

        def sees(batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            own = kv_idx - prefix
            visible = (own <= q_idx + held) & (own >= first[batch_idx])
            if window is not None:
                visible = visible & (own > q_idx + held - window)
            return (kv_idx < prefix) | visible

        return sees

    def _carry(
        self,
        keys: Tensor,
        values: Tensor,
        tokens: int,
        added: Tensor | None,
        state: KeyValueState,
        room: int | None,
        missing: bool,
    ) -> KeyValueState:
        """The last `carried` keys and values, or all, to each row's last real token; `keys` end with the new ones."""
        held, carried = state.keys.shape[2], room if self.carried is None else self.carried
        own = held + tokens
        carried = own if carried is None else carried
        # A state that has just begun carries none: padding stands in front.
        wanted = carried if added is None else carried + tokens
        if own < wanted:
            keys, values = (nn.functional.pad(x[:, :, -own:], (0, 0, wanted - own, 0)) for x in (keys, values))
        else:
            first = keys.shape[2] - wanted
            keys, values = keys[:, :, first:], values[:, :, first:]
            if tokens > wanted:  # a view would hold on to more than is carried
                keys, values = keys.clone(), values.clone()
        if added is not None:
            index = (added[:, None] + torch.arange(carried, device=keys.device))[:, None, :, None]
            keys, values = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (keys, values))
        valid = state.valid
        if missing or held < carried:  # else each row carries as many as it can, and goes on to
            valid = (valid + (tokens if added is None else added)).clamp(max=carried)
        return state._replace(keys=keys, values=values, valid=valid)
