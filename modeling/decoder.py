"""What every language model of the zoo shares: the block, the backbone and its heads.

The only file that knows transformers' plumbing. It names no architecture: a model gives its mixer and its config.

    h = h + mixer(norm(h));  h = h + SwiGLU(norm(h))
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from memzoo.kernels.blocked import gated_product
from memzoo.modeling.cache import MemoryCache
from memzoo.modeling.mixers.attention import HeadRotaryEmbedding, RotaryKey
from memzoo.modeling.norms import RMSNorm
from memzoo.modeling.sequences import Rows, layout

logger = logging.get_logger(__name__)
_SILU = nn.SiLU, SiLUActivation


class Step(NamedTuple):
    """What a mixer needs to know of the rows it is given."""

    position: Tensor
    """Tokens that each row's sequence has read before, `[R]`."""
    lengths: Tensor | None
    """Real tokens per row, `[R]`; `None` when all are real."""
    added: Tensor
    """The same, never `None`."""
    rotary: dict[RotaryKey, tuple[Tensor, Tensor]]
    """Cosines and sines of the tokens' positions, each `[R, L, D]`, by the key of the embedding that gives them."""
    room: int | None = None
    """Tokens that a state holds, where it holds them all, from its first on; `None` for one that grows with them."""

    def split(self, tokens: int, size: int) -> list[Step]:
        """The same for pieces of `size` of the `tokens` columns."""
        if tokens <= size:
            return [self]
        pieces = []
        for start in range(0, tokens, size):
            part = slice(start, start + size)
            added = (self.added - start).clamp(0, min(size, tokens - start))
            rotary = {key: (cos[:, part], sin[:, part]) for key, (cos, sin) in self.rotary.items()}
            position = self.position + self.added.clamp(max=start)
            lengths = None if self.lengths is None else added
            pieces.append(self._replace(position=position, lengths=lengths, added=added, rotary=rotary))
        return pieces


class Mixer(nn.Module):
    """A layer that mixes tokens: what a block expects.

    `forward(x, step, state)` takes and returns `[R, L, D]` on rows and a state: a tree of tensors with the rows first,
    `None` before the first token. What a mixer rotates by the tokens' positions it takes from `step.rotary`.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__()

    def rotary_embedding(self) -> HeadRotaryEmbedding | None:
        """The rotary embedding that the model shall evaluate, once for all layers of whose it has the key."""
        return None


class FeedForward(LlamaMLP):
    """`W_down (act(W_gate x) * (W_up x))`; on a CPU the product is made in blocks of tokens, which keeps less for the
    backward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The product, without a module call, which trackers of modules do not expect in a backward."""
        return gated_product(F.silu if isinstance(self.act_fn, _SILU) else self.act_fn.forward, gate, up)


class MemoryBlock(GradientCheckpointingLayer):
    """Pre-norm residual block: a mixer, then a SwiGLU feed-forward."""

    def __init__(self, config: PreTrainedConfig, mixer: Mixer) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, hidden: Tensor, step: Step, state: Any, keep_state: bool) -> tuple[Tensor, Any]:
        mixed, state = self.mixer(self.mixer_norm(hidden), step, state)
        hidden = hidden + mixed
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return hidden, state if keep_state else None


class MemoryPreTrainedModel(PreTrainedModel):
    """Base of all models: initialisation, loading and saving."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MemoryBlock"]
    _is_stateful = True
    # Where there is attention, it goes through transformers' interface.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        try:
            config.validate()  # a field may have been set since the config was made
        except StrictDataclassClassValidationError as error:
            raise ValueError(str(error.__cause__)) from error
        super().__init__(config, *args, **kwargs)

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        """The mixer of one block: what an architecture adds to the shared decoder."""
        raise TypeError("an architecture's PreTrainedModel defines make_mixer")

    @classmethod
    def make_block(cls, config: PreTrainedConfig, layer_idx: int) -> nn.Module:
        """One block; an architecture whose blocks are of another kind makes them here."""
        return MemoryBlock(config, cls.make_mixer(config, layer_idx))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_weights = getattr(module, "init_weights", None)
        if callable(init_weights) and not isinstance(module, PreTrainedModel):
            init_weights()


class MemoryModel(MemoryPreTrainedModel):
    """The backbone: embedding, blocks, final norm."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(self.make_block(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @torch.compiler.disable(recursive=False)  # the plumbing stays Python, the blocks compile
    @deprecate_kwarg("cache_params", "5.40.0", new_name="cache", raise_if_both_names=True)
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache", raise_if_both_names=True)
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: MemoryCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        packing: bool = True,
        request: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read tokens.

        Args:
            input_ids: `[B, T]`, int64; or give `inputs_embeds`.
            attention_mask: `[B, T]`, nonzero at real tokens, padding on the left or the right; with a cache it may also
                cover the cached tokens, its last T columns are the new ones.
            position_ids: `[B, T]`; only their returns to 0 matter, which start another sequence.
            cache: continues the sequences it holds. The old names `past_key_values` and `cache_params` are accepted.
            inputs_embeds: `[B, T, D]`.
            use_cache: return a cache; `None` for the config's wish outside training.
            output_hidden_states: return the hidden states before each block and after the last; `None` for the config's
                wish.
            output_attentions: refused: no attention map is kept.
            seq_idx: `[B, T]`, which sequence each token of a packed row belongs to.
            cu_seq_lens_q, cu_seqlens: `[S + 1]`, bounds of the sequences packed into a batch of one row.
            packing: whether a row may hold several sequences.
            request: what an architecture's own `_read` takes besides the tokens.

        Raises:
            ValueError: inputs that do not fit one another, the vocabulary or the cache.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        batch = self._check_inputs(input_ids, inputs_embeds, output_attentions)
        device = input_ids.device if input_ids is not None else inputs_embeds.device  # type: ignore[union-attr]
        given = cache is not None
        cache = self._cache(cache, use_cache, batch)
        if cu_seqlens is not None and cu_seq_lens_q is not None and not torch.equal(cu_seqlens, cu_seq_lens_q):
            raise ValueError("cu_seqlens and cu_seq_lens_q differ; pass one of them.")
        rows = layout(
            batch,
            device,
            attention_mask,
            position_ids,
            seq_idx,
            cu_seqlens if cu_seqlens is not None else cu_seq_lens_q,
            cache.position if cache is not None else None,
            cache.columns if cache is not None else 0,
        )
        if rows.packed and not packing:
            raise ValueError("A row holds several sequences; expected one per row. Unpack the batch and pad it.")
        if rows.packed and cache is not None:
            if use_cache or given:
                raise ValueError(
                    "Packed sequences have no cache: its rows are single sequences. Pass use_cache=False, or one "
                    "sequence per row."
                )
            cache = None

        rows.room = cache.max_cache_len if cache is not None else None
        states = cache.states if cache is not None else [None] * len(self.layers)
        every, keep = bool(output_hidden_states), cache is not None
        parts = [self._read(part, input_ids, inputs_embeds, states, every, keep, request) for part in rows.groups()]
        hidden = [
            torch.stack(same).sum(0) if len(same) > 1 else same[0] for same in zip(*(h for h, _ in parts), strict=True)
        ]
        if cache is not None:
            cache.commit(parts[0][1], rows, self)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden[-1],
            cache=cache,
            hidden_states=tuple(hidden) if output_hidden_states else None,
        )

    def _read(
        self,
        rows: Rows,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        states: list[Any],
        every: bool,
        keep: bool,
        request: Any = None,
    ) -> tuple[list[Tensor], list[Any]]:
        """The last hidden states (and, if `every`, those before each block), `[B, T, D]`; if `keep`, the new states."""
        if inputs_embeds is not None:
            hidden = rows.gather(inputs_embeds)
        else:
            hidden = self._embed(rows.gather(input_ids))  # type: ignore[arg-type]
        step = Step(rows.position, rows.lengths, rows.added, self._rotary(rows, hidden), rows.room)
        seen, new_states = [], []
        for layer, state in zip(self.layers, states, strict=True):
            if every:
                seen.append(rows.scatter(hidden))
            hidden, state = layer(hidden, step, state, keep)
            new_states.append(state)
        return [*seen, rows.scatter(self.norm(hidden))], new_states

    def _rotary(self, rows: Rows, hidden: Tensor) -> dict[RotaryKey, tuple[Tensor, Tensor]]:
        found = (layer.mixer.rotary_embedding() for layer in self.layers)  # type: ignore[union-attr, operator]
        modules = {module.key: module for module in found if module is not None}
        if not modules:
            return {}
        position = rows.position[:, None]
        if hidden.shape[1] > 1:
            position = position + torch.arange(hidden.shape[1], device=hidden.device)
        return {key: module.of_tokens(hidden, position) for key, module in modules.items()}

    def _check_inputs(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, output_attentions: bool | None
    ) -> tuple[int, int]:
        """The batch `(B, T)`."""
        name = type(self).__name__
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"{name}: expected exactly one of input_ids and inputs_embeds.")
        if output_attentions:
            raise ValueError(f"{name}: output_attentions=True: no attention map is kept; expected False.")
        if input_ids is None:
            assert inputs_embeds is not None
            if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != self.config.hidden_size or 0 in inputs_embeds.shape:
                expected = f"[B, T, {self.config.hidden_size}] with B >= 1 and T >= 1"
                raise ValueError(f"inputs_embeds: expected {expected}, got {tuple(inputs_embeds.shape)}.")
            return inputs_embeds.shape[0], inputs_embeds.shape[1]
        if input_ids.ndim != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
            got = f"{tuple(input_ids.shape)} of {input_ids.dtype}"
            raise ValueError(f"input_ids: expected integers [B, T] with B >= 1 and T >= 1, got {got}.")
        return input_ids.shape[0], input_ids.shape[1]

    def _embed(self, ids: Tensor) -> Tensor:
        # A single token's check would stall every decoding step of a GPU, and cost one of a CPU where torch checks.
        if ids.shape[1] > 1 and not torch.compiler.is_compiling():
            self._check_ids(ids)
        try:
            return self.embed_tokens(ids)
        except IndexError:
            self._check_ids(ids)
            raise

    def _check_ids(self, ids: Tensor) -> None:
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"input_ids: expected ids from 0 to {self.config.vocab_size - 1}, got {low if low < 0 else high}. Does "
                "the tokenizer belong to this model? After adding tokens, call model.resize_token_embeddings."
            )

    @torch.no_grad()
    def _nearest(self, embeds: Tensor) -> Tensor:
        """The ids whose embeddings are nearest, `[R, L]`: those of tokens that are given as embeddings."""
        weight = self.embed_tokens.weight.float() if embeds.dtype != torch.float64 else self.embed_tokens.weight
        similarity = torch.nn.functional.linear(embeds.to(weight.dtype), weight, -0.5 * weight.square().sum(1))
        return similarity.argmax(-1)

    def _cache(self, cache: Any, use_cache: bool | None, batch: tuple[int, int]) -> MemoryCache | None:
        """The cache to continue, a new one, or none."""
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if cache is None:
            wanted = use_cache if use_cache is not None else self.config.use_cache and not self.training
            if wanted and checkpointing:
                logger.warning_once(
                    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`."
                )
                wanted = False
            return MemoryCache(self.config) if wanted else None
        if not isinstance(cache, MemoryCache):
            raise ValueError(
                f"cache: expected a MemoryCache, got {type(cache).__name__}. Use memzoo.MemoryCache(model.config), or "
                f"leave it out."
            )
        if checkpointing:
            raise ValueError(
                "cache: gradient checkpointing replays the blocks and cannot continue a cache; expected one or the "
                "other. "
                "Call model.gradient_checkpointing_disable(), or leave the cache out."
            )
        cache.check(self, batch)
        return cache


class MemoryForCausalLM(MemoryPreTrainedModel, GenerationMixin):
    """The backbone with a next-token head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    model_class: type[MemoryModel]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.compiler.disable(recursive=False)  # the plumbing stays Python, the blocks compile
    @deprecate_kwarg("cache_params", "5.40.0", new_name="cache", raise_if_both_names=True)
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache", raise_if_both_names=True)
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: MemoryCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token.

        Args:
            labels: `[B, T]`, -100 where there is no target; shifted inside.
            logits_to_keep: the last so many positions, or the positions, for which logits are wanted; 0 for all.
            kwargs: passed to the loss (`num_items_in_batch`, `shift_labels`).

        The other arguments are those of the backbone.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
            cu_seqlens=cu_seqlens,
            return_dict=True,
            request=kwargs.pop("request", None),
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,  # named, since `generate` looks for it in the signature
        **kwargs: Any,
    ) -> dict[str, Any]:
        if next_sequence_length is not None and next_sequence_length <= 0:
            given = input_ids.shape[1]
            if given == 0:
                raise ValueError("generate: expected at least one token to go on from, got none. Begin with a token.")
            raise ValueError(
                f"generate: {given} input tokens with a mask of the same length, but the cache has already read "
                f"{given - next_sequence_length} columns. Pass the whole sequence, or only the new tokens with an "
                "attention_mask that covers the whole sequence."
            )
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give `generate` a `MemoryCache` where it would build one of its own."""
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation={wanted!r}: a recurrent memory has a cache of its own; expected None, or "
                "'static' for one whose states keep their shapes."
            )
        if model_kwargs.get("cache") is not None:
            model_kwargs["cache"]._is_user_defined = True
        elif generation_config.use_cache:
            longest = max(max_cache_length, generation_config.max_cache_len or 0) if wanted == "static" else None
            model_kwargs["cache"] = MemoryCache(self.config, max_cache_len=longest)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: what `generate_batch` and its kin share between requests is pages of keys and values."""
        raise ValueError(
            f"{type(self).__name__}: continuous batching keeps keys and values in pages; expected a model whose cache "
            "is such pages, got one with a MemoryCache. Call generate with a padded batch and its attention_mask."
        )


class MemoryForSequenceClassification(MemoryPreTrainedModel):
    """The backbone with a linear head on each sequence's last real token."""

    model_class: type[MemoryModel]
    accepts_loss_kwargs = False  # the loss is a mean over rows, which Trainer divides by its accumulation steps

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_labels: int = config.num_labels  # type: ignore[assignment]  # a property, derived from id2label
        self.model = self.model_class(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    @torch.compiler.disable(recursive=False)  # the plumbing stays Python, the blocks compile
    @deprecate_kwarg("cache_params", "5.40.0", new_name="cache", raise_if_both_names=True)
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache", raise_if_both_names=True)
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: MemoryCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Classify each row of the batch.

        Args:
            attention_mask: `[B, T]`; the last real token of each row is classified. Without it, the rows' ends are
                found by the config's `pad_token_id`, as elsewhere in transformers.
            labels: `[B]` classes, `[B]` or `[B, num_labels]` targets by the config's `problem_type`.

        The other arguments are those of the backbone.

        Raises:
            ValueError: packed input; a row is one sequence here. Several rows without a mask or a `pad_token_id`.
        """
        if attention_mask is None and input_ids is not None and input_ids.ndim == 2:
            if self.config.pad_token_id is not None:
                attention_mask = _without_trailing_pads(input_ids, self.config.pad_token_id)
            elif len(input_ids) > 1:
                raise ValueError(
                    f"{type(self).__name__}: a batch of {len(input_ids)} rows without an attention_mask: expected a "
                    "config.pad_token_id, by which each row's last token is found. Set it, or pass the mask."
                )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
            cu_seqlens=cu_seqlens,
            packing=False,
            return_dict=True,
            request=kwargs.pop("request", None),
        )
        hidden = outputs.last_hidden_state
        count, tokens = hidden.shape[:2]
        if attention_mask is None:
            last = torch.full((count,), tokens - 1, device=hidden.device)
        else:
            real = attention_mask[:, -tokens:] != 0
            last = (real * torch.arange(tokens, device=hidden.device)).argmax(1)
        logits = self.score(hidden[torch.arange(count, device=hidden.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )


def _without_trailing_pads(input_ids: Tensor, pad_token_id: int) -> Tensor:
    """A mask of the tokens from each row's first to its last that is not `pad_token_id` (a row of pads keeps its
    first).
    """
    real = input_ids != pad_token_id
    after = real.flip(1).cummax(1).values.flip(1)  # a real token here or later
    before = real.cummax(1).values  # a real token here or earlier
    mask = after & before
    mask[:, 0] |= ~real.any(1)
    return mask
