"""Memory-Managed Long-Context Attention (arXiv 2606.28876): any backbone of the zoo with a managed memory.

See `memzoo.configuration.memory_managed` for what is the paper's and what is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from memzoo.configuration.memory_managed import MemoryManagedConfig
from memzoo.kernels.registry import constant
from memzoo.kernels.slot_table import SlotTable
from memzoo.modeling.cache import MemoryCache
from memzoo.modeling.decoder import (
    MemoryBlock,
    MemoryForCausalLM,
    MemoryForSequenceClassification,
    MemoryModel,
    MemoryPreTrainedModel,
    Mixer,
    Step,
)
from memzoo.modeling.managed_calibration import Calibration, calibrate_fallback
from memzoo.modeling.mixers.attention import CausalAttention
from memzoo.modeling.mixers.managed import Events, ManagedBlock, ManagedState, Report
from memzoo.modeling.sequences import Rows

logger = logging.get_logger(__name__)
METADATA = ("event_mask", "key_ids", "versions", "protect", "query_key_ids", "query_versions")
"""What a caller may say about tokens, each `[B, T]`."""


class Answers(NamedTuple):
    """What one block with a table did with the tokens of a batch."""

    candidate: Tensor
    """`[B, T]`, bool."""
    logit: Tensor
    """Of the write probability at candidates, `[B, T]`."""
    accepted: Tensor
    """`[B, T]`, bool."""
    read_confidence: Tensor
    """`[B, T]`."""
    active_chunks: Tensor
    """`[B, T]`, int64."""
    counts: Tensor | None
    """Events by outcome since the first token, `[B, 9]`; `None` where a row holds several sequences."""


@dataclass
class Request:
    """What a caller says about a batch, and, after it was read, what its tables did."""

    said: dict[str, Tensor]
    """Some of `METADATA`."""
    answers: list[Answers] = field(default_factory=list)
    """One per block with a table."""

    def add(self, answers: list[Answers]) -> None:
        """The answers of some of a packed batch's rows; those of the others are zero there."""
        if not self.answers:
            self.answers = answers
            return
        for at, (ours, theirs) in enumerate(zip(self.answers, answers, strict=True)):
            pairs = zip(ours[:-1], theirs[:-1], strict=True)
            summed = [a | b if a.dtype == torch.bool else a + b for a, b in pairs]
            self.answers[at] = Answers(*summed, None)  # type: ignore[call-arg]


@dataclass
class ManagedCausalLMOutput(CausalLMOutputWithPast):
    """A language model's output; the last five, on request, hold a tensor for each block with a table."""

    write_prob: tuple[Tensor, ...] | None = None
    """`[B, T]`, 0 where no event ends."""
    write_accept: tuple[Tensor, ...] | None = None
    """`[B, T]`, bool."""
    read_confidence: tuple[Tensor, ...] | None = None
    """`[B, T]`."""
    active_chunks: tuple[Tensor, ...] | None = None
    """`[B, T]`, int64."""
    memory_stats: tuple[Tensor, ...] | None = None
    """Events since the first token by `memzoo.kernels.slot_table.OUTCOMES`, `[B, 9]`; `None` for a packed batch."""


class SlotRow(NamedTuple):
    """One occupied slot."""

    slot: int
    key: int | Tensor
    """The id that the caller gave it, or the key itself."""
    value: Tensor
    confidence: float
    usage: float
    version: int
    protected: bool
    written: int
    """Position of the token that wrote it."""
    text: str
    """What the caller's `text` says about that position."""


class MemoryTable(list[SlotRow]):
    """The occupied slots of a row, printed as a table."""

    def __str__(self) -> str:
        heads = ("slot", "key", "value", "confidence", "usage", "version", "protected", "written at")
        lines = [heads, *(self._cells(row) for row in self)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)

    @staticmethod
    def _cells(row: SlotRow) -> tuple[str, ...]:
        def vector(x: Tensor) -> str:
            return "[" + " ".join(f"{v:+.2f}" for v in x[:3].tolist()) + (" ...]" if len(x) > 3 else "]")

        return (
            str(row.slot),
            vector(row.key) if isinstance(row.key, Tensor) else f"#{row.key}",
            row.text or vector(row.value),
            f"{row.confidence:.2f}",
            f"{row.usage:.2f}",
            str(row.version) if row.version else "-",
            "yes" if row.protected else "no",
            str(row.written),
        )


class MemoryManagedPreTrainedModel(MemoryPreTrainedModel):
    config_class = MemoryManagedConfig

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        plain = len(config.table_layers) < config.num_hidden_layers
        self._no_split_modules = ["ManagedBlock", *(["MemoryBlock"] if plain else [])]  # the blocks that there are

    @staticmethod
    def make_mixer(config: PreTrainedConfig, layer_idx: int) -> Mixer:
        backbone = config.backbone_config
        backbone._attn_implementation = config._attn_implementation
        return MODEL_MAPPING[type(backbone)].make_mixer(backbone, layer_idx)  # type: ignore[attr-defined]

    @classmethod
    def make_block(cls, config: PreTrainedConfig, layer_idx: int) -> nn.Module:
        block = ManagedBlock if layer_idx in config.table_layers else MemoryBlock
        return block(config, cls.make_mixer(config, layer_idx))

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; the mixers' attention has the backbone's config."""
        super().set_attn_implementation(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, CausalAttention):
                module.config._attn_implementation = self.config._attn_implementation

    def _request(self, inputs: dict[str, Any], kwargs: dict[str, Any]) -> Request:
        """What of `METADATA` is in `kwargs`, which it is taken from, checked against the batch."""
        said = {name: kwargs.pop(name) for name in METADATA if name in kwargs}
        said = {name: x for name, x in said.items() if x is not None}
        tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        if tokens is None or tokens.ndim < 2:
            return Request({})  # which the backbone refuses
        batch = tuple(tokens.shape[:2])
        for name, x in said.items():
            if tuple(x.shape) != batch or x.is_floating_point():
                raise ValueError(f"{name}: expected integers or bools {batch}, got {tuple(x.shape)} of {x.dtype}.")
            lowest = -1 if name == "query_key_ids" else 0
            if x.dtype != torch.bool and bool((x < lowest).any()):
                raise ValueError(f"{name}: expected at least {lowest}, got {int(x.min())}.")
        events, mask = said.get("event_mask"), inputs.get("attention_mask")
        external = self.config.write_trigger == "external"
        if events is not None and not external:
            raise ValueError(
                f"event_mask: expected None, since write_trigger={self.config.write_trigger!r} finds the events. Make "
                "the model with write_trigger='external'."
            )
        if events is not None and mask is not None and mask.ndim == 2 and mask.shape[1] >= batch[1]:
            pads = mask[:, mask.shape[1] - batch[1] :] == 0
            if bool((pads & (events != 0)).any()):
                row = int((pads & (events != 0)).any(1).nonzero()[0, 0])
                raise ValueError(f"event_mask: row {row} has an event on padding; expected events on real tokens.")
        return Request(said)


class MemoryManagedModel(MemoryManagedPreTrainedModel, MemoryModel):
    """The backbone; see `MemoryManagedConfig`.

    Its forward takes, beside what every backbone takes, what a caller knows about tokens, all `[B, T]`:

    - `event_mask`: where an event ends (with `write_trigger="external"`);
    - `key_ids`: the key of the event that ends there, at least 0, in place of a match by similarity;
    - `versions`: its version, at least 1, or 0 for none; `protect`: whether its slot shall be protected;
    - `query_key_ids`: the key that a token asks for, or -1; `query_versions`: the newest version it asks for, or 0.
    """

    @torch.compiler.disable(recursive=False)
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: MemoryCache | None = None,
        inputs_embeds: Tensor | None = None,
        request: Request | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        if request is None:
            request = self._request(inputs, kwargs)
        if cache is not None:  # which may have come under an old name
            kwargs["cache"] = cache
        return super().forward(**inputs, position_ids=position_ids, request=request, return_dict=True, **kwargs)

    def _read(
        self,
        rows: Rows,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        states: list[Any],
        every: bool,
        keep: bool,
        request: Request | None = None,
    ) -> tuple[list[Tensor], list[Any]]:
        assert request is not None
        if inputs_embeds is None:
            ids: Tensor | None = rows.gather(input_ids)  # type: ignore[arg-type]
            hidden = self._embed(ids)  # type: ignore[arg-type]
        else:
            hidden = rows.gather(inputs_embeds)
            ids = self._nearest(hidden) if self._needs_ids else None
        step = Step(rows.position, rows.lengths, rows.added, self._rotary(rows, hidden), rows.room)
        events = self._events(rows, ids, hidden.shape[1], step, request)
        self._warn_of_length(step)
        seen, new_states, answers = [], [], []
        for layer, state in zip(self.layers, states, strict=True):
            if every:
                seen.append(rows.scatter(hidden))
            if isinstance(layer, ManagedBlock):
                hidden, state, logit, report = layer(hidden, step, state, keep, events)
                answers.append(self._answers(rows, events.candidate, logit, report))
            else:
                hidden, state = layer(hidden, step, state, keep)
            new_states.append(state)
        request.add(answers)
        return [*seen, rows.scatter(self.norm(hidden))], new_states

    @property
    def _needs_ids(self) -> bool:
        return self.config.write_trigger == "token" or self.config.fallback_chunks > 0

    def _events(self, rows: Rows, ids: Tensor | None, tokens: int, step: Step, request: Request) -> Events:
        """Where events end in the rows, and what is said about them."""
        said = {name: rows.gather(x) for name, x in request.said.items()}
        place = torch.arange(tokens, device=step.position.device)
        if self.config.write_trigger == "token":
            assert ids is not None
            ends = torch.isin(ids, constant(tuple(self.config.event_token_ids), ids))
        elif self.config.write_trigger == "stride":
            ends = (step.position[:, None] + place + 1) % self.config.write_stride == 0
        elif "event_mask" in said:
            ends = said["event_mask"] != 0
        else:
            ends = torch.zeros_like(step.position[:, None] + place, dtype=torch.bool)
        if step.lengths is not None:
            ends = ends & (place < step.lengths[:, None])
        key_ids, asked = said.get("key_ids"), said.get("query_key_ids")
        protect = said.get("protect")
        return Events(
            candidate=ends,
            key_id=None if key_ids is None else key_ids.long() + 1,
            version=said["versions"].long() if "versions" in said else None,
            protect=None if protect is None else protect != 0,
            query_key_id=None if asked is None else asked.long() + 1,
            query_version=said["query_versions"].long() if "query_versions" in said else None,
            ids=ids if self.config.fallback_chunks else None,
        )

    @staticmethod
    def _answers(rows: Rows, candidate: Tensor, logit: Tensor, report: Report) -> Answers:
        of_tokens = (candidate, logit, report.accepted, report.read_confidence, report.active_chunks)
        counts = None if rows.packed else report.counts
        return Answers(*(rows.scatter(x).to(x.dtype) for x in of_tokens), counts)  # type: ignore[call-arg]

    def _warn_of_length(self, step: Step) -> None:
        lengths, threshold = self.config.calibrated_lengths, self.config.read_threshold
        if lengths is not None and threshold < 1.0 and bool((step.position + step.added > lengths[1]).any()):
            logger.warning_once(
                f"{type(self).__name__}: read_threshold={threshold} was calibrated on contexts of {lengths[0]} to "
                f"{lengths[1]} tokens and this one is longer, where the fallback may not be asked when it should be. "
                "Calibrate it on such contexts (calibrate_fallback), or always ask it (config.read_threshold=1.0)."
            )

    def memory_table(
        self, cache: MemoryCache, row: int = 0, layer: int | None = None, text: Callable[[int], str] | None = None
    ) -> MemoryTable:
        """The facts that a cache holds, one per occupied slot, in the order of the slots.

        Args:
            cache: filled by this model.
            row: of the batch.
            layer: which block's table; `None` for the first that has one.
            text: says what stands at a position of the text; shown in the place of the value written there.
        """
        layer = self.config.table_layers[0] if layer is None else layer
        if layer not in self.config.table_layers:
            raise ValueError(f"memory_table: layer={layer}: expected one of {self.config.table_layers}.")
        if not isinstance(cache, MemoryCache) or (cache.is_initialized and not 0 <= row < cache.batch_size):
            raise ValueError(f"memory_table: expected a MemoryCache with a row {row}, got {type(cache).__name__}.")
        state = cache.states[layer]
        if not isinstance(state, ManagedState):
            return MemoryTable()  # nothing has been read
        table = SlotTable(*(x[row].detach().cpu() for x in state.memory.table))
        found = MemoryTable()
        for slot in (table.written > 0).nonzero()[:, 0].tolist():
            key_id, written = int(table.key_id[slot]), int(table.written[slot]) - 1
            found.append(
                SlotRow(
                    slot=slot,
                    key=key_id - 1 if key_id else table.keys[slot],
                    value=table.values[slot],
                    confidence=float(table.confidence[slot]),
                    usage=float(table.usage[slot] + table.recent_usage[slot]),
                    version=int(table.version[slot]),
                    protected=bool(table.protected[slot]),
                    written=written,
                    text="" if text is None else text(written),
                )
            )
        return found


class MemoryManagedForCausalLM(MemoryManagedPreTrainedModel, MemoryForCausalLM):
    """The backbone with a next-token head.

    Its forward takes what `MemoryManagedModel` takes about tokens, and

    - `write_labels`: `[B, T]`, 1 where the event that ends there shall be written, 0 where not, -100 for no label; adds
      `write_loss_weight` times the mean cross-entropy of the labelled candidates to the loss (Trainer passes them on
      with `remove_unused_columns=False`);
    - `output_memory`: whether the output says what the tables did; see `ManagedCausalLMOutput`.

    Example:
        >>> config = MemoryManagedConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
        >>> model = MemoryManagedForCausalLM(config)
        >>> cache = model(torch.randint(0, 32000, (1, 99))).cache
        >>> print(model.memory_table(cache))
    """

    model_class = MemoryManagedModel

    @torch.compiler.disable(recursive=False)
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        event_mask: Tensor | None = None,
        key_ids: Tensor | None = None,
        versions: Tensor | None = None,
        protect: Tensor | None = None,
        query_key_ids: Tensor | None = None,
        query_versions: Tensor | None = None,
        output_memory: bool | None = None,
        **kwargs: Any,
    ) -> ManagedCausalLMOutput:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        said = (event_mask, key_ids, versions, protect, query_key_ids, query_versions)
        request = self._request(inputs, dict(zip(METADATA, said, strict=True)))
        # Not a parameter: Trainer evaluates nothing where a parameter with "label" in its name has no value.
        write_labels = kwargs.pop("write_labels", None)
        if write_labels is not None:
            self._check_labels(write_labels, inputs)
        out = super().forward(
            **inputs,
            position_ids=position_ids,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            request=request,
            return_dict=True,
            **kwargs,
        )
        loss = out.loss
        if write_labels is not None:
            extra = self.config.write_loss_weight * self._write_loss(request.answers, write_labels)
            extra = extra * _share(labels, **kwargs)
            loss = extra if loss is None else loss + extra.to(loss.dtype)
        found = ManagedCausalLMOutput(loss=loss, logits=out.logits, cache=out.cache, hidden_states=out.hidden_states)
        if output_memory:
            of = request.answers
            probabilities = (torch.where(x.candidate, torch.sigmoid(x.logit), 0.0) for x in of)
            found.write_prob = tuple(probabilities)
            found.write_accept = tuple(x.accepted for x in of)
            found.read_confidence = tuple(x.read_confidence for x in of)
            found.active_chunks = tuple(x.active_chunks for x in of)
            counts = tuple(x.counts for x in of if x.counts is not None)
            found.memory_stats = counts or None
        return found

    @staticmethod
    def _check_labels(labels: Tensor, inputs: dict[str, Any]) -> None:
        tokens = inputs["input_ids"] if inputs["input_ids"] is not None else inputs["inputs_embeds"]
        if tokens is not None and labels.shape != tokens.shape[:2]:
            raise ValueError(f"write_labels: expected {tuple(tokens.shape[:2])}, got {tuple(labels.shape)}.")
        if not bool(((labels == 0) | (labels == 1) | (labels == -100)).all()):
            raise ValueError("write_labels: expected 0, 1, or -100 for no label.")

    @staticmethod
    def _write_loss(answers: list[Answers], labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labelled candidates' write probabilities; 0 where there is none."""
        losses = []
        for each in answers:
            labelled = each.candidate & (labels != -100)
            target = torch.where(labelled, labels, 0).to(each.logit.dtype)
            error = F.binary_cross_entropy_with_logits(each.logit, target, reduction="none")
            losses.append((error * labelled).sum() / labelled.sum().clamp(min=1))
        return torch.stack(losses).mean()

    def memory_table(self, cache: MemoryCache, **kwargs: Any) -> MemoryTable:
        """See `MemoryManagedModel.memory_table`."""
        return self.model.memory_table(cache, **kwargs)

    def calibrate_fallback(
        self, batches: Iterable[Mapping[str, Tensor]], recall: float = 0.99, candidates: int = 16
    ) -> Calibration:
        """Find the reader's confidence from which the slots may answer alone, and set `config.read_threshold` to it.

        The chunks are asked where the confidence is below the threshold. Beginning with 1.0, where they always are,
        lower thresholds are tried (quantiles of the confidences with which the sequences' answers were made) while, of
        the answers that were right at 1.0, at least the share `recall` stays right. The last of them is set, and with
        it `config.calibrated_lengths`, the shortest and the longest of the sequences: on a longer context the model
        warns, since a threshold does not carry over. `save_pretrained` keeps both.

        Every threshold is tried by reading all sequences with it: a look-up left out changes what later tokens see.

        Args:
            batches: each a mapping with `labels` as in `forward` (-100 for no answer), `input_ids` or `inputs_embeds`,
                and what else is known of it: `attention_mask`, what `MemoryManagedModel` takes about tokens. A row is
                a sequence. They must be as long as what the model will read, and not those it was trained on.
            recall: share of the right answers that must stay right, up to 1; what is lacking is the error allowed.
            candidates: thresholds tried at most, beside 1.0.

        Returns:
            The threshold, the lengths, and what each threshold tried has kept and asked.

        Raises:
            ValueError: a model without chunks or in training mode; batches without answers, or of which not one is
                right with the chunks; packed sequences. The config is then as it was.

        Cost: up to `candidates + 1` forward passes over the sequences.

        Example:
            >>> model.eval().calibrate_fallback(held_out, recall=0.99)
            >>> model.save_pretrained("calibrated")
        """
        return calibrate_fallback(self, batches, METADATA, recall, candidates)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What is said about the prompt goes with its tokens; nothing is said about new ones."""
        said = {name: kwargs.pop(name) for name in METADATA if kwargs.get(name) is not None}
        prepared = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        tokens = prepared["inputs_embeds"] if prepared.get("inputs_embeds") is not None else prepared["input_ids"]
        read = cache.columns if isinstance(cache, MemoryCache) else 0  # else the forward says what is wrong
        for name, x in said.items():
            longer = F.pad(x, (0, max(0, read + tokens.shape[1] - x.shape[1])), value=_nothing(name))
            prepared[name] = longer[:, read : read + tokens.shape[1]]
        return prepared

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:  # type: ignore[override]
        """What is said about the new tokens alone is moved to their columns, behind those that the cache has read."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache = model_kwargs.get("cache")
        read = cache.columns if isinstance(cache, MemoryCache) else 0
        # The whole sequence: `generate` leaves out a mask of ones.
        spans = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
        columns = next((x.shape[-1] for x in spans if isinstance(x, Tensor)), None)
        for name in METADATA:
            x = model_kwargs.get(name)
            if x is None or columns is None:
                continue
            missing = columns - x.shape[1]
            if missing not in (0, read):
                new = f", or {columns - read}, one per new token" if read else ""
                raise ValueError(f"generate: {name}: expected {columns} columns, one per token{new}; got {x.shape[1]}.")
            model_kwargs[name] = F.pad(x, (missing, 0), value=_nothing(name))


def _nothing(name: str) -> int:
    """What stands in one of `METADATA` where nothing is said."""
    return -1 if name == "query_key_ids" else 0


def _share(
    labels: Tensor | None, num_items_in_batch: Tensor | int | None = None, shift_labels: Tensor | None = None, **_: Any
) -> Tensor | float:
    """The share that a micro-batch has in the loss: that of its targets in those of all the batches."""
    if num_items_in_batch is None or labels is None:
        return 1.0
    targets = labels[:, 1:] if shift_labels is None else shift_labels
    return (targets != -100).sum() / num_items_in_batch


class MemoryManagedForSequenceClassification(MemoryManagedPreTrainedModel, MemoryForSequenceClassification):
    """The backbone with a classification head on the last real token; takes what `MemoryManagedModel` takes."""

    model_class = MemoryManagedModel

    @torch.compiler.disable(recursive=False)
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        request = self._request(inputs, kwargs)
        return super().forward(**inputs, labels=labels, request=request, return_dict=True, **kwargs)
