"""Causal attention over rows, through transformers' attention interface, with a bounded window of carried keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward
from transformers.utils.generic import is_flash_attention_requested

from memzoo.kernels.kv_write import kv_write
from memzoo.kernels.kv_write.chunked import put, turned_heads
from memzoo.kernels.registry import cast, known, may_be, may_write
from memzoo.kernels.rotary import rotary
from memzoo.modeling.norms import RMSNorm

RotaryKey = tuple[int, int | None]
"""Width of the heads, and tokens of a segment or `None`."""


class HeadRotaryEmbedding(LlamaRotaryEmbedding):
    """Cosines and sines `[B, L, D]` of positions `[B, L]` for heads of width D, by the config's `rope_parameters`; the
    sines of the first half with the sign that `rotated` gives them.

    Depends on the positions' differences only: tokens of a sequence, or of a segment of it, stand at 0, 1, ..., what
    precedes all of them at negative positions.
    """

    def __init__(self, config: PreTrainedConfig, head_dim: int, segment: int | None = None) -> None:
        rope, longest = config.rope_parameters, config.max_position_embeddings
        super().__init__(LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=longest))
        self.head_dim, self.segment = head_dim, segment

    @property
    def key(self) -> RotaryKey:
        """What tells it from the others of a model."""
        return self.head_dim, self.segment

    def of_tokens(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Those of a sequence's tokens `[B, L]`, counted from 0."""
        return self(x, position if self.segment is None else position % self.segment)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rate = self.inv_freq.to(x.device, torch.float32)
        angle = position_ids[..., None] * torch.cat([-rate, rate])
        both = angle.cos(), angle.sin()
        if self.attention_scaling != 1:
            both = both[0] * self.attention_scaling, both[1] * self.attention_scaling
        return cast(both[0], x.dtype), cast(both[1], x.dtype)


class KeyValueState(NamedTuple):
    """Keys and values that later tokens may see: first the prefix's, then in S places the rows' own.

    Where S is fixed, key j of a row, counted from 0, is in place P + j mod S, so that a token is written over one that
    has left the window. Where the state grows, a row's keys are its last `length`.
    """

    keys: Tensor
    """`[B, G, P + S, D]`, after the rotary embedding; G heads of keys and values."""
    values: Tensor
    """`[B, G, P + S, D]`."""
    length: Tensor
    """Own keys of each row so far, `[B]`, int64."""


class CausalAttention(nn.Module):
    """Softmax attention with rotary embeddings; no output projection, since the wirings differ in what they project.

        y_t = sum_j softmax_j(q_t . k_j / sqrt(D)) v_j   over prefix keys j, and own keys j <= t (the last `window` of
        them)

    Each head of keys and values serves H / G heads of queries (arXiv 2305.13245, section 2.2).

    Source: Titans (arXiv 2501.00663), Eq 23, 27, 30. Deviations: none.

    Args:
        config: gives widths, rotary embedding, dropout and the attention implementation.
        window: own keys that a token sees, itself included; `None` for all since the state was empty.
        prefix: tokens that every token sees.
        segment: where there is no window, tokens after which the attention starts anew; `None` for never.
        each: own keys that a token brings, at one position; the last of them asks. 1 where there is a window.
    """

    is_causal = True

    def __init__(
        self,
        config: PreTrainedConfig,
        window: int | None,
        *,
        prefix: int = 0,
        segment: int | None = None,
        each: int = 1,
    ) -> None:
        super().__init__()
        self.config, self.backend = config, config.kernel_backend
        self.window, self.prefix, self.segment, self.each = window, prefix, segment, each
        self.places = window if segment is None else each * segment
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
        self.rotary = HeadRotaryEmbedding(config, self.head_dim, segment)

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

        Without gradients, tokens are written into the tensors of a state of fixed size where none is lost that one of
        them sees. The old state stays valid, but two texts must not go on from it.

        Args:
            x: what L new tokens bring, `[B, each L, D_model]`, right-padded; all of one segment where there are any.
            rotary: cosines and sines of their positions, each `[B, L, D]`, as `self.rotary` gives them.
            added: real tokens per row, `[B]`; `None` when all are.
            state: carried keys, or `None` at the start.
            prefix: the P tokens that every token sees, `[P, D_model]`, at positions `-P` to -1; looked at where there
                is no state, which keeps them.
            room: places for own keys where neither a window nor a segment says how many; `None` for as many as there
                are, with which the state grows.

        Returns:
            `[B, L, H D]` and the new state.
        """
        k, v, places = self._projected(x, self.k_proj, self.k_norm), self.v_proj(x), self.places or room
        implementation = self.config._attn_implementation
        if state is not None and places is not None and added is None and self._may_write(state, k):
            alone = x.shape[1] == self.each > 1
            q = self._projected(x[:, -1] if alone else x, self.q_proj, self.q_norm)
            q = q[:, None] if alone else q
            return self._in_place(q, k, v, rotary, state, places, implementation)
        q, k, v = self._heads_of(self._projected(x, self.q_proj, self.q_norm), k, v, *rotary)
        fresh = state is None
        state = self._begin(k, prefix) if state is None else state._replace(length=self._begun(state.length))
        carried = state if fresh or places is None else self._in_order(state, places)
        keys, values = torch.cat([carried.keys, k], dim=2), torch.cat([carried.values, v], dim=2)
        y = self._asked(self._attend(q, keys, values, carried.length, implementation))
        added = added if added is None else self.each * added
        return y, self._carry(keys, values, x.shape[1], added, state.length, places, fresh)

    def _asked(self, y: Tensor) -> Tensor:
        """Of all read-outs `[B, each L, H D]` those that are asked for."""
        return y[:, self.each - 1 :: self.each] if self.each > 1 else y

    def _begun(self, length: Tensor) -> Tensor:
        """Own keys before the next one: none where a segment is full."""
        return length if self.segment is None else length % (self.each * self.segment)

    def _heads_of(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with the rotary embedding and values, from `[B, each L, H D]` to `[B, H, each L, D]` each;
        of a single query, which is bound by the number of torch calls, with few."""
        if q.shape[1] == 1:
            return *turned_heads(q, k, cos, sin), v.view(*v.shape[:2], -1, self.head_dim).transpose(1, 2)
        if self.each > 1:
            cos, sin = (x.repeat_interleave(self.each, dim=1) for x in (cos, sin))
        return self._turned(q, cos, sin), self._turned(k, cos, sin), self._heads(v)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads `[B, H, L, D]` of `[B, L, H D]`, with the rotary embedding."""
        return rotary(x.unflatten(-1, (-1, self.head_dim)), cos, sin, backend=self.backend).transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _projected(self, x: Tensor, projection: nn.Linear, norm: nn.Module | None) -> Tensor:
        y = projection(x)
        return y if norm is None else norm(y.unflatten(-1, (-1, self.head_dim))).flatten(-2)

    def _begin(self, k: Tensor, prefix: Tensor | None) -> KeyValueState:
        """No own keys yet, for rows with new keys `k`."""
        length = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device)
        if self.prefix == 0:
            none = k.new_zeros(*k.shape[:2], 0, k.shape[3])
            return KeyValueState(none, none, length)
        assert prefix is not None
        places = torch.arange(-self.prefix, 0, device=k.device)[None]
        prefix_k = self._projected(prefix[None], self.k_proj, self.k_norm)
        prefix_k = self._turned(prefix_k, *self.rotary(prefix, places))
        prefix_v = self._heads(self.v_proj(prefix[None]))
        prefix_k, prefix_v = (x.to(k.dtype).expand(k.shape[0], -1, -1, -1) for x in (prefix_k, prefix_v))
        return KeyValueState(prefix_k, prefix_v, length)

    def _may_write(self, state: KeyValueState, k: Tensor) -> bool:
        """Whether new keys `k` `[B, each L, G D]` and their values may be written into the state: not into what a graph
        or another row needs, nor over a key that an earlier one of the new tokens sees."""
        (keys, values, _), none_lost = state, k.shape[1] == 1 or self.window is None
        in_graph = torch.is_grad_enabled() or keys.requires_grad or values.requires_grad
        return none_lost and not in_graph and keys.dtype == k.dtype and keys.is_contiguous() and may_write(keys)

    def _in_place(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: tuple[Tensor, Tensor],
        state: KeyValueState,
        places: int,
        implementation: str,
    ) -> tuple[Tensor, KeyValueState]:
        """Attend from new tokens, every one real, that take their places in the state first."""
        (keys, values, length), queries, tokens, exists = state, q.shape[1], k.shape[1], None
        lengths = known(length) if self.backend in ("auto", "chunked") else None
        if tokens == self.each and lengths is None:
            given, restarts = (q, k, v, rotary, keys, values, length), self.segment is not None
            q, now, exists = kv_write(*given, prefix=self.prefix, restarts=restarts, backend=self.backend)
            missing, filled = self._may_miss(now, places, implementation), places
        else:
            if self.segment is not None:
                length = self._begun(length)
                lengths = None if lengths is None else [n % places for n in lengths]
            q, k, v = self._heads_of(q, k, v, *rotary)
            self._write(keys, values, k, v, length, lengths, places)
            now, filled = length + tokens, places
            if lengths is not None and max(lengths) + tokens < places:
                filled = max(lengths) + tokens
                keys, values = (x.narrow(2, 0, self.prefix + filled) for x in (keys, values))
            missing = queries > 1 or lengths is None or min(lengths) + tokens < filled
            if missing:
                exists = torch.arange(-self.prefix, filled, device=k.device) < now[:, None]
        sees = partial(_up_to, now, self.prefix, queries) if missing else None
        y = self._interface(q, keys, values, implementation, sees, exists).flatten(2)
        return (y if queries == 1 else self._asked(y)), state._replace(length=now)

    def _write(
        self,
        keys: Tensor,
        values: Tensor,
        k: Tensor,
        v: Tensor,
        length: Tensor,
        lengths: list[int] | None,
        places: int,
    ) -> None:
        """New keys and values `[B, G, L, D]` to their places."""
        tokens = k.shape[2]
        if lengths is not None and min(lengths) == max(lengths):
            start = self.prefix + lengths[0] % places
            keys.narrow(2, start, tokens).copy_(k)
            values.narrow(2, start, tokens).copy_(v)
        else:
            put(keys, values, k, v, length, self.prefix)

    def _in_order(self, state: KeyValueState, places: int) -> KeyValueState:
        """The prefix and the carried keys, each row's oldest first and all last ones side by side, of a state of fixed
        size: the window's without its oldest, which no new token sees."""
        carried = places if self.window is None else places - 1
        place = (state.length[:, None] - carried + torch.arange(carried, device=state.length.device)) % places
        keys, values = self._gathered(state.keys, state.values, place)
        return KeyValueState(keys, values, state.length.clamp(max=carried))

    def _gathered(self, keys: Tensor, values: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """The prefix and the own keys in `place` `[B, N]`, and their values."""
        first = torch.arange(self.prefix, device=place.device).expand(place.shape[0], -1)
        index = torch.cat([first, place + self.prefix], dim=1)[:, None, :, None]
        index = index.expand(-1, keys.shape[1], -1, keys.shape[3])
        return keys.gather(2, index), values.gather(2, index)

    @staticmethod
    def _may_miss(valid: Tensor, held: int, implementation: str) -> bool:
        """Whether rows may carry fewer than `held` keys. Flash attention drops missing keys, and so asks the device for
        their number."""
        if held > 0 and is_flash_attention_requested(None, implementation):
            return bool((valid < held).any())
        return held > 0 and may_be(valid, lambda n: n < held)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, valid: Tensor, implementation: str) -> Tensor:
        """Queries `[B, H, L, D]` on keys `[B, G, P + R + L, D]`: the prefix's, R carried ones of which a row's last
        `valid` exist, and the new ones.

        Where the new tokens are more than a window they are blocks of queries as separate batch rows, each with the
        prefix, the block before it and its own keys, so that a long row costs 2 L W, not L^2.
        """
        batch, _, tokens, _ = q.shape
        held = keys.shape[2] - self.prefix - tokens
        missing, size = self._may_miss(valid, held, implementation), self.window
        if size is None or tokens <= size:
            return self._ordered(q, keys, values, valid, held, implementation, missing).flatten(2)
        blocks = -(-tokens // size)
        end = blocks * size - tokens
        keys, values = (self._in_blocks(x, size - held, end) for x in (keys, values))
        q = nn.functional.pad(q, (0, 0, 0, end)).unflatten(2, (blocks, size)).transpose(1, 2).flatten(0, 1)
        # A block reaches a window back, but no further than `valid` before the row's first new token.
        valid = (valid[:, None] + size * torch.arange(blocks, device=q.device)).clamp(max=size)
        y = self._ordered(q, keys, values, valid.flatten(), size, implementation, missing=True)
        return y.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :tokens].flatten(2)

    def _in_blocks(self, x: Tensor, start: int, end: int) -> Tensor:
        """Keys `[B, G, P + L, D]`, padded at both ends, in blocks of the window's size, each behind the prefix and the
        block before it."""
        blocks = nn.functional.pad(x[:, :, self.prefix :], (0, 0, start, end)).unflatten(2, (-1, self.window))
        fixed = x[:, :, None, : self.prefix].expand(-1, -1, blocks.shape[2] - 1, -1, -1)
        return torch.cat([fixed, blocks[:, :, :-1], blocks[:, :, 1:]], dim=3).transpose(1, 2).flatten(0, 1)

    def _ordered(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, held: int, implementation: str, missing: bool
    ) -> Tensor:
        """`[N, H, Q, D]` queries on keys `[N, G, P + R + Q, D]`, of which the R = `held` after the prefix's may be
        `missing` but for the last `valid` `[N]`."""
        queries, keys, first = q.shape[2], k.shape[2], held - valid
        if queries == 1 and self.window is not None and held >= self.window:
            first = first.clamp(min=held + 1 - self.window)
        # One query for which all keys are there needs no mask, whose building would cost more than its attention; nor
        # does a plain causal square under sdpa, which knows it by itself.
        square = implementation == "sdpa" and self.window is None and queries == keys
        if not missing and (queries == 1 or square):
            return self._interface(q, k, v, implementation, None, None)
        place = torch.arange(keys, device=q.device) - self.prefix
        exists = (place < 0) | (place >= first[:, None]) if missing else None
        sees = partial(_within, first, self.prefix, held, self.window)
        return self._interface(q, k, v, implementation, sees, exists)

    def _interface(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        implementation: str,
        sees: Callable[..., Tensor] | None,
        exists: Tensor | None,
    ) -> Tensor:
        """`[N, H, Q, D]` queries on keys `[N, G, K, D]`: those that `sees` says, as transformers' mask functions do,
        all where it is `None`. Which keys there are, `exists` `[N, K]` or `None` for all, is what flash attention asks:
        a key that exists is seen from its token on."""
        flash = is_flash_attention_requested(None, implementation)
        if flash and self.prefix > 0 and self.window is not None:
            raise ValueError(
                f"attn_implementation={implementation!r} cannot show {self.prefix} persistent tokens beyond a sliding "
                "window; expected 'sdpa', 'eager' or 'flex_attention', or a config with num_persistent_tokens=0."
            )
        mask = None
        if implementation == "sdpa" and q.shape[2] == 1 and sees is not None:
            assert exists is not None
            mask = exists[:, None, None]
        elif sees is not None:
            mask = ALL_MASK_ATTENTION_FUNCTIONS[implementation](
                batch_size=q.shape[0],
                q_length=q.shape[2],
                kv_length=k.shape[2],
                mask_function=sees,
                attention_mask=exists if flash else None,
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

    def _carry(
        self,
        keys: Tensor,
        values: Tensor,
        tokens: int,
        added: Tensor | None,
        length: Tensor,
        places: int | None,
        fresh: bool,
    ) -> KeyValueState:
        """The state after all `tokens`, or each row's first `added`, where `keys` end with the new ones: behind the
        prefix and what was carried of the rows' `length` own ones, nothing if `fresh`."""
        own, now = keys.shape[2] - self.prefix, length + (tokens if added is None else added)
        carried = own - tokens
        if places is None:
            if added is not None:  # what is missing at the end stands in front, where nobody looks
                place = torch.arange(own, device=keys.device) - (tokens - added)[:, None]
                keys, values = self._gathered(keys, values, place.clamp(min=0))
        elif fresh and added is None:
            keys, values = self._placed(keys, own, places), self._placed(values, own, places)
        else:
            last = now[:, None] - 1
            latest = last - (last - torch.arange(places, device=keys.device)) % places  # key that a place is for
            place = (latest - length[:, None] + carried).clamp(min=0)
            keys, values = self._gathered(keys, values, place)
        return KeyValueState(keys, values, now)

    def _placed(self, x: Tensor, own: int, places: int) -> Tensor:
        """The prefix and the last of the `own` first keys of all rows, key j in place j mod S."""
        if own <= places:
            return nn.functional.pad(x, (0, 0, 0, places - own))
        return torch.cat([x[:, :, : self.prefix], x[:, :, -places:].roll(own % places, dims=2)], dim=2)


def _up_to(
    length: Tensor, prefix: int, queries: int, batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    """Whether a query sees a key, as transformers' mask functions ask it: the prefix's and up to its own, of a row's
    `length` `[N]` keys the last query's being the last."""
    return kv_idx - prefix < length[batch_idx] + (q_idx + 1 - queries)


def _within(
    first: Tensor,
    prefix: int,
    held: int,
    window: int | None,
    batch_idx: Tensor,
    head_idx: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:
    """The same of keys in order, the prefix's in front: of a row's own ones those before `first` `[N]` do not exist,
    and the first query's own is behind the `held` carried ones."""
    own = kv_idx - prefix
    visible = (own <= q_idx + held) & (own >= first[batch_idx])
    if window is not None:
        visible = visible & (own > q_idx + held - window)
    return (kv_idx < prefix) | visible
