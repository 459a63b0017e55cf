"""A managed memory over the hidden states of a frozen language model: which event answers a query, and by which route.

    k_e = unit(W_k h_e),  q = unit(W_q [h_q; h_key])
    pointer_e = beta q . k_e + w [event e is live],    route = MLP([W_r h_q; max q . k over live events, over all])

h are the frozen model's hidden states at the events' ends, at the query's end, and of the key's canonical text, encoded
by itself. Which events are live (held by a slot) follows from metadata: key ids, versions, protection.

Source: Memory-Managed Long-Context Attention (arXiv 2606.28876), whose first version probes frozen models this way:
event pointers and routes, with oracle key ids and separately encoded key strings. Ours: every formula here. It is a
probe of what hidden states hold, not a reader of text: metadata is given to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from memzoo.kernels.slot_table import Event, Rules, empty_table, write
from memzoo.kernels.unit_length import unit_length, widened

ROUTES = ("memory", "sparse")
"""The answer is in a slot; it must be looked for in what was stored."""


@dataclass
class AdapterOutput(ModelOutput):
    """What the adapter says about B queries of E events each."""

    loss: Tensor | None = None
    """Cross-entropy of the pointers and of the routes that were given."""
    pointer_logits: Tensor | None = None
    """`[B, E]`, -inf where there is no event."""
    route_logits: Tensor | None = None
    """Of `ROUTES`, `[B, 2]`."""
    live: Tensor | None = None
    """Which events a slot holds, `[B, E]`, bool."""

    @property
    def routes(self) -> Tensor:
        """The better route, `[B]`."""
        assert self.route_logits is not None
        return self.route_logits.argmax(1)

    @property
    def pointers(self) -> Tensor:
        """The best event of the better route: of the live ones by memory, of those that no slot holds by look-up."""
        assert self.pointer_logits is not None
        assert self.live is not None
        allowed = torch.where(self.routes[:, None] == 0, self.live, ~self.live)
        allowed = allowed & (self.pointer_logits > -torch.inf)
        allowed = allowed | ~allowed.any(1, keepdim=True)
        return self.pointer_logits.masked_fill(~allowed, -torch.inf).argmax(1)


class MemoryManagedAdapter(nn.Module):
    """Points at events in a frozen causal language model's hidden states; its own parameters alone are trained.

    Args:
        language_model: any causal language model of transformers; it is frozen and no part of the adapter's state.
        width: of keys and queries.
        num_slots: slots of each row's table.
        rules: of the table; `None` for the defaults.
        layer: whose hidden states are read, -1 for the last.

    Example:
        >>> adapter = MemoryManagedAdapter(language_model)
        >>> hidden = adapter.encode(input_ids)
        >>> out = adapter(hidden, event_ends, key_ids, query_ends, key_hidden, pointers=pointers, routes=routes)
    """

    def __init__(
        self,
        language_model: PreTrainedModel,
        width: int = 64,
        num_slots: int = 32,
        rules: Rules | None = None,
        layer: int = -1,
    ) -> None:
        super().__init__()
        language_model.requires_grad_(False).eval()
        self._language_model = (language_model,)  # in a tuple: no submodule
        self.num_slots, self.layer = num_slots, layer
        self.rules = Rules() if rules is None else rules
        size: int = language_model.config.get_text_config().hidden_size
        self.k_proj = nn.Linear(size, width, bias=False)
        self.q_proj = nn.Linear(2 * size, width, bias=False)
        self.pointer_weights = nn.Parameter(torch.tensor([10.0, 1.0]))  # beta and w
        self.route_proj = nn.Linear(size, width)
        self.route_head = nn.Linear(width + 2, len(ROUTES))

    @torch.no_grad()
    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The frozen hidden states `[B, T, D]` of ids `[B, T]`, in float32 or wider."""
        (model,) = self._language_model
        out = model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False)
        return widened(out.hidden_states[self.layer])

    def forward(
        self,
        hidden: Tensor,
        event_ends: Tensor,
        key_ids: Tensor,
        query_ends: Tensor,
        key_hidden: Tensor,
        versions: Tensor | None = None,
        protect: Tensor | None = None,
        pointers: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> AdapterOutput:
        """Point.

        Args:
            hidden: `[B, T, D]`, from `encode`.
            event_ends: the events' last tokens in their order, `[B, E]`, int64; -1 for none.
            key_ids: the events' keys, at least 0, `[B, E]`, int64.
            query_ends: the queries' last tokens, `[B]`, int64; events behind them do not count.
            key_hidden: hidden state of the asked key's own text, `[B, D]`.
            versions: of the events, at least 0, `[B, E]`, int64.
            protect: whether an event protects its slot, `[B, E]`, bool.
            pointers: the events that answer, `[B]`, int64, for the loss.
            routes: indices of `ROUTES`, `[B]`, int64, for the loss.

        Raises:
            ValueError: shapes or places that do not fit.
        """
        self._check(hidden, event_ends, key_ids, query_ends, key_hidden, versions, protect)
        there = (event_ends >= 0) & (event_ends <= query_ends[:, None])
        row = torch.arange(len(hidden), device=hidden.device)
        keys = unit_length(self.k_proj(hidden[row[:, None], event_ends.clamp(min=0)]))
        asked = hidden[row, query_ends]
        query = unit_length(self.q_proj(torch.cat([asked, key_hidden.to(asked.dtype)], dim=1)))
        live = self._live(keys, there, event_ends, key_ids, versions, protect)
        similarity = (keys @ query[..., None])[..., 0]
        best = [torch.where(some.any(1), similarity.masked_fill(~some, -2).amax(1), 0.0) for some in (live, there)]
        route = self.route_head(torch.cat([torch.tanh(self.route_proj(asked)), torch.stack(best, dim=1)], dim=1))
        sharpness, liveness = self.pointer_weights
        pointer = (sharpness * similarity + liveness * live).masked_fill(~there, -torch.inf)
        losses = [
            F.cross_entropy(logits, target)
            for logits, target in ((pointer, pointers), (route, routes))
            if target is not None
        ]
        return AdapterOutput(torch.stack(losses).sum() if losses else None, pointer, route, live)

    @torch.no_grad()
    def _live(
        self,
        keys: Tensor,
        there: Tensor,
        ends: Tensor,
        key_ids: Tensor,
        versions: Tensor | None,
        protect: Tensor | None,
    ) -> Tensor:
        """Which events are in a slot when all have been written, in their order, with certainty."""
        rows, events = there.shape
        table = empty_table(rows, self.num_slots, keys.shape[2], 0, keys)
        sure, nothing = keys.new_ones(rows), keys.new_zeros(rows, 0)
        version = torch.zeros_like(ends) if versions is None else versions
        protected = torch.zeros_like(there) if protect is None else protect
        for at in range(events):
            event = Event(
                present=there[:, at],
                position=ends[:, at],
                key=keys[:, at],
                value=nothing,
                confidence=sure,
                importance=sure,
                key_id=key_ids[:, at] + 1,
                version=version[:, at],
                protect=protected[:, at],
            )
            table, _ = write(table, event, self.rules)
        return ((ends + 1)[..., None] == table.written[:, None]).any(-1) & there

    @staticmethod
    def _check(
        hidden: Tensor,
        event_ends: Tensor,
        key_ids: Tensor,
        query_ends: Tensor,
        key_hidden: Tensor,
        versions: Tensor | None,
        protect: Tensor | None,
    ) -> None:
        if hidden.ndim != 3 or event_ends.ndim != 2:
            raise ValueError(
                f"MemoryManagedAdapter: expected hidden [B, T, D] and event_ends [B, E], got {tuple(hidden.shape)} and "
                f"{tuple(event_ends.shape)}."
            )
        rows, tokens, width = hidden.shape
        shapes = {
            "key_ids": (key_ids, event_ends.shape),
            "versions": (versions, event_ends.shape),
            "protect": (protect, event_ends.shape),
            "query_ends": (query_ends, (rows,)),
            "key_hidden": (key_hidden, (rows, width)),
        }
        for name, (x, shape) in shapes.items():
            if x is not None and tuple(x.shape) != tuple(shape):
                raise ValueError(f"MemoryManagedAdapter: {name}: expected {tuple(shape)}, got {tuple(x.shape)}.")
        for name, x, low in (("event_ends", event_ends, -1), ("query_ends", query_ends, 0)):
            if bool(((x < low) | (x >= tokens)).any()):
                raise ValueError(f"MemoryManagedAdapter: {name}: expected places from {low} to {tokens - 1}.")
        for name, x in (("key_ids", key_ids), ("versions", versions)):
            if x is not None and bool((x < 0).any()):
                raise ValueError(f"MemoryManagedAdapter: {name}: expected at least 0, got {int(x.min())}.")
