"""The managed memory of a block: a slot table that the block writes and reads, and stored chunks to fall back on.

    q, k, v = conv(x W_qkv)                                                 of the last few tokens
    p_e = sigmoid(MLP([x_e; what the table says about the event]))          at candidates e, query-blind
    e = (unit(k_e), p_e v_e, p_e)                                           to be written to the slots
    y_t = W_o (sigmoid(x_t W_g) * (rho_t slots_t + [rho_t < theta_read] (1 - rho_t) chunks_t))

A value is as loud as it was convincing, so that the controller has a gradient even where a single slot is read. At the
start `W_q = W_k`, the rows of `W_k` and of `W_v` are orthonormal, and the convolution is a mean: a question resembles
the events that share a token with it. From smaller, separate weights of the events' last tokens alone, which hardly
differ, the memory did not learn its keys in our trials: one overwrote all.
`slots_t` and the reader's confidence `rho_t` are those of `memzoo.kernels.slot_table`, read before the token's own
event is applied: a token sees the writes of earlier tokens alone. `chunks_t` attends to the tokens of the K best stored
chunks before the token's own.

A single token with slots alone asks a GPU for nothing: its event is written, and refused where there is none. With
stored chunks, of which there are ever more, it looks whether one is complete and whether any has to be looked into.

Source: Memory-Managed Long-Context Attention (arXiv 2606.28876). From the paper: a query-blind write probability from
event type, salience, recency and conflict features; hard decisions; a reader whose low confidence opens a sparse
look-up. Ours: the forms above, all widths, and the look-up: a chunk is summarised by the ids in it (a presence sketch)
and by its longest keys, since the mean of its tokens does not find a single one among many.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from memzoo.kernels.registry import as_given, cast, may_hold
from memzoo.kernels.short_conv import Vectors, short_conv
from memzoo.kernels.slot_table import (
    Event,
    Found,
    Outcome,
    Reading,
    ReadWeights,
    Rules,
    SlotTable,
    alikeness,
    empty_table,
    keep,
    noted,
    read,
    weigh,
    write,
)
from memzoo.kernels.unit_length import unit_length, widened
from memzoo.modeling.decoder import MemoryBlock, Mixer, Step
from memzoo.modeling.norms import RMSNorm
from memzoo.modeling.parts import placed

QUERY_BLOCK = 1024
"""Tokens that look for chunks at once."""


class Events(NamedTuple):
    """What is said about each token of the rows."""

    candidate: Tensor
    """Whether an event ends there, `[R, L]`, bool."""
    key_id: Tensor | None
    """1 + the event's key id, `[R, L]`, int64."""
    version: Tensor | None
    """`[R, L]`, int64, 0 for none."""
    protect: Tensor | None
    """`[R, L]`, bool."""
    query_key_id: Tensor | None
    """1 + the id of the key that is read, 0 for a read by similarity, `[R, L]`, int64."""
    query_version: Tensor | None
    """The newest version that may be read, 0 for any, `[R, L]`, int64."""
    ids: Tensor | None
    """The tokens, `[R, L]`, int64, where chunks are sketched."""


class Report(NamedTuple):
    """What a block did with each token."""

    accepted: Tensor
    """Whether the token's event was written, `[R, L]`, bool."""
    read_confidence: Tensor
    """rho, `[R, L]`."""
    active_chunks: Tensor
    """The token's own chunk, those that the slots it read were written in, and those it looked into, `[R, L]`."""
    counts: Tensor
    """The table's, `[R, 9]`."""


class ChunkIndex(NamedTuple):
    """The complete chunks of each row, and its running one. All zeros before the first token."""

    chunks: Tensor
    """Keys and values `[R, N, C, 2 D]`, a chunk's tokens by falling length of their keys; row r has `position // C`."""
    sketches: Tensor
    """Which ids are in each chunk, `[R, N, bits / 8]`, uint8."""
    running: Tensor
    """Keys and values of the running chunk, `[R, C, 2 D]`."""
    running_ids: Tensor
    """1 + its ids, `[R, C]`, int64."""
    recent_ids: Tensor
    """1 + the last ids, for the next token's window, `[R, window - 1]`, int64."""


class Stored(NamedTuple):
    """A managed memory between two tokens."""

    table: SlotTable
    chunks: ChunkIndex | None
    """`None` without a fallback."""
    conv_tail: Tensor
    """The last inputs of the convolution, `[R, W - 1, 3 D]`."""


class ManagedState(NamedTuple):
    """A block with a managed memory between two tokens."""

    mixer: Any
    memory: Stored


class QKV(NamedTuple):
    """What each token asks for and would store, `[R, L, D]` each, in float32 or wider."""

    query: Tensor
    """Of unit length."""
    key: Tensor
    value: Tensor


class WideLinear(nn.Linear):
    """A linear layer in the dtype of its input, for what a hard decision hangs on."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, cast(self.weight, x.dtype), None if self.bias is None else cast(self.bias, x.dtype))


class Projections(nn.Module):
    """`q, k, v = conv(x W_qkv)`, a causal depthwise convolution without an activation, and q of unit length.

    Args:
        config: a `MemoryManagedConfig`.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.width, self.backend = config.memory_dim, config.kernel_backend
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * self.width, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(3 * self.width, config.memory_conv_width))

    def init_weights(self) -> None:
        init.constant_(self.conv_weight, 1 / self.conv_weight.shape[1])
        shape = self.width, self.qkv_proj.in_features
        k, v = (init.orthogonal_(self.conv_weight.new_empty(shape, dtype=torch.float32)) for _ in range(2))
        init.copy_(self.qkv_proj.weight, torch.cat([k, k, v]).to(self.qkv_proj.weight))

    def begin(self, rows: int, like: Tensor) -> Tensor:
        """Nothing before the first token."""
        return like.new_zeros(rows, self.conv_weight.shape[1] - 1, 3 * self.width)

    def forward(self, x: Tensor, step: Step, tail: Tensor) -> tuple[QKV, Tensor]:
        projected = widened(self.qkv_proj(x))  # sums that decisions hang on, in whatever cut
        weight, tail = cast(self.conv_weight, projected.dtype), cast(tail, projected.dtype)
        unit = Vectors(heads=1, dim=self.width, per_head=1)
        (q, kv), tail = short_conv(projected, weight, tail, vectors=unit, lengths=step.lengths, backend=self.backend)
        k, v = kv.chunk(2, dim=-1)
        return QKV(q[:, :, 0, 0], k, v), tail


class WriteController(nn.Module):
    """Whether an event is worth a slot: `logit p = W_2 silu(W_1 x + W_f f + b_1) + b_2`.

    The features f: the best match's similarity, how far the values differ, its confidence and age; how contested the
    table is (the mean of the last rejected probabilities), how full, and what its weakest slot is worth; the event's
    importance `sigmoid(x w_i)`. What comes from the table carries no gradient.

    Args:
        width: of x.
        hidden: of the hidden layer.
    """

    FEATURES = 8

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.event_proj = WideLinear(width, hidden)
        self.importance_proj = WideLinear(width, 1)
        self.feature_weight = nn.Parameter(torch.empty(hidden, self.FEATURES))
        self.logit_proj = WideLinear(hidden, 1, bias=False)
        self.logit_bias = nn.Parameter(torch.empty(1))

    def init_weights(self) -> None:
        init.normal_(self.feature_weight, 0.0, self.FEATURES**-0.5)
        init.constant_(self.logit_bias, 0.5)  # writes at first: what is never read has no gradient

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What of all events `[R, E, D]` does not depend on the table: hidden part `[R, E, F]`, importance `[R, E]`."""
        x = widened(x)
        with as_given(x.device):
            return self.event_proj(x), torch.sigmoid(self.importance_proj(x))[..., 0]

    def forward(self, hidden: Tensor, seen: Tensor, importance: Tensor) -> Tensor:
        """The logits `[...]` of events with these hidden parts, features from the table and importance."""
        with as_given(hidden.device):
            features = torch.cat([seen, importance[..., None]], dim=-1)
            hidden = F.silu(hidden + F.linear(features, cast(self.feature_weight, features.dtype)))
            return self.logit_proj(hidden)[..., 0] + cast(self.logit_bias, hidden.dtype)

    @staticmethod
    @torch.no_grad()
    def seen(table: SlotTable, event: Event, rules: Rules) -> Tensor:
        """The features that come from the table, `[R, 7]`; the event's confidence is not looked at."""
        occupied = table.written > 0
        best, match = alikeness(table, event).masked_fill(~occupied, -torch.inf).max(1, keepdim=True)
        value = table.values.gather(1, match[..., None].expand(-1, -1, table.values.shape[2]))[:, 0]
        lengths = value.norm(dim=1, keepdim=True) + event.value.norm(dim=1, keepdim=True)
        age = (event.position[:, None] + 1 - table.written.gather(1, match)).to(value.dtype)
        worth = keep(table, event.position, rules).masked_fill(~occupied | table.protected, torch.inf)
        weakest = worth.amin(1, keepdim=True)
        of_slots = torch.cat(
            [
                best,
                (value - event.value).norm(dim=1, keepdim=True) / lengths.clamp(min=1e-6),
                table.confidence.gather(1, match),
                age / (age + rules.age_scale),
                table.rejected.mean(1, keepdim=True),
                occupied.to(value.dtype).mean(1, keepdim=True),
                weakest.masked_fill(weakest.isinf(), 0.0),
            ],
            dim=1,
        )
        # An event that is not finite is refused whatever its probability, which must not spoil the row's state.
        return torch.where(occupied.any(1, keepdim=True), of_slots, 0.0).nan_to_num(0.0, 0.0, 0.0)


class SlotsRead(NamedTuple):
    """What the slots gave and what became of the events, of all tokens `[R, L]`."""

    output: Tensor
    """`[R, L, D]`."""
    confidence: Tensor
    sources: Tensor
    """1 + the position that each of the K slots read was written at, 0 for none, `[R, L, K]`."""
    logit: Tensor
    """Of the candidates' probabilities, 0 elsewhere."""
    accepted: Tensor


class Facts(NamedTuple):
    """The events of the rows, in order."""

    hidden: Tensor
    """The controller's part of each that does not depend on the table, `[R, E, F]`."""
    event: Event
    """`[R, E, ...]`, of which the confidence is yet to be found, and the value not yet multiplied by it."""


class Trace(NamedTuple):
    """What was decided. A bank of contents holds those that the table began with, then those of the events."""

    output: Tensor
    """`[R, L, D]`."""
    confidence: Tensor
    """`[R, L]`."""
    written: Tensor
    """1 + the position that each of the K slots read was written at, 0 for none, `[R, L, K]`."""
    usage: Tensor
    """`[R, L, K]`."""
    origin: Tensor
    """Where in the bank their contents are, `[R, L, K]`."""
    nearest: Tensor
    """Where the most alike key is, `[R, L]`."""
    last: Tensor
    """Where the contents of the slots are at the end, `[R, M]`."""
    logit: Tensor
    """Of the events, `[R, E]`."""
    accepted: Tensor
    """`[R, E]`."""
    seen: Tensor
    """The controller's features, `[R, E, 7]`."""


class Slots(nn.Module):
    """A slot table with its write controller and read head.

    Args:
        config: a `MemoryManagedConfig`.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.slots, self.width, self.count = config.num_slots, config.memory_dim, config.read_top_k
        self.rules = Rules(
            write_threshold=config.write_threshold,
            same_threshold=config.same_threshold,
            protect_margin=config.protect_margin,
            versions_per_key=config.versions_per_key if config.version_mode == "history" else 1,
            keep_confidence=config.keep_confidence,
            keep_usage=config.keep_usage,
            keep_importance=config.keep_importance,
            keep_age=config.keep_age,
            age_scale=config.age_scale,
            usage_decay=config.usage_decay,
        )
        self.controller = WriteController(config.hidden_size, 2 * self.width)
        # beta = 32 sigmoid(.); w_c, w_u, w_t, alpha = softplus(.); theta.
        self.score_weights = nn.Parameter(torch.empty(6))

    def init_weights(self) -> None:
        softplus = [math.log(math.expm1(x)) for x in (0.5, 0.1, 0.1, 8.0)]
        init.copy_(self.score_weights, self.score_weights.new_tensor([0.0, *softplus, 0.25]))

    def begin(self, rows: int, like: Tensor) -> SlotTable:
        """Tables without a fact."""
        return empty_table(rows, self.slots, self.width, self.width, like)

    def forward(self, x: Tensor, qkv: QKV, step: Step, table: SlotTable, events: Events) -> tuple[SlotsRead, SlotTable]:
        """Read every token and apply every event, in the order of the tokens, a token's read before its event.

        Args:
            x: `[R, L, D]`, right-padded.
            qkv: of each token.

        Cost: one step of a loop without gradients per event of the row with the most, whatever the number of rows.
        """
        cuts = Cuts(events.candidate, step.added)
        position = step.position[:, None] + torch.arange(x.shape[1], device=x.device)
        weights, facts = self._read_weights(qkv.query.dtype), self._facts(x, qkv, position, events, cuts)
        # Detached, too: without gradients a view still says that it requires one, and hooks on modules believe it.
        query, known = qkv.query.detach(), Facts(facts.hidden.detach(), Event(*(x.detach() for x in facts.event)))
        with torch.no_grad():
            trace, new = self._decided(query, position, table, events, known, cuts, weights)
        logit, output, rho = trace.logit, trace.output, trace.confidence
        if torch.is_grad_enabled():
            # What was decided is kept; what it is made of is computed once more, for all tokens at once.
            logit = self.controller(facts.hidden, trace.seen, facts.event.importance)
            p = torch.sigmoid(logit)
            bank = [
                torch.cat([old, more], dim=1)
                for old, more in zip(
                    (table.keys, table.values, table.confidence),
                    (facts.event.key, p[..., None] * facts.event.value, p),
                    strict=True,
                )
            ]
            keys, values, confidence = (_picked(each, trace.origin) for each in bank)
            age = position[..., None] - trace.written + 1
            nearest = _picked(bank[0], trace.nearest)
            found = Found(keys, values, confidence, trace.usage, age, trace.written > 0, nearest)
            output, rho = weigh(found, qkv.query, self.rules, weights, events.query_key_id)
            contents = (_picked(each, trace.last) for each in bank)
            new = new._replace(**dict(zip(("keys", "values", "confidence"), contents, strict=True)))
        return SlotsRead(output, rho, trace.written, *self._of_tokens(cuts, logit, trace.accepted)), new

    def _facts(self, x: Tensor, qkv: QKV, position: Tensor, events: Events, cuts: Cuts) -> Facts:
        """The rows' events, in order."""
        keys, values = unit_length(cuts.of_events(qkv.key)), cuts.of_events(qkv.value)
        hidden, importance = self.controller.prepare(cuts.of_events(x))
        said = [None if each is None else cuts.of_events(each) for each in (events.key_id, events.version)]
        numbers = [torch.zeros_like(cuts.ends) if each is None else each for each in said]
        protect = torch.zeros_like(cuts.present) if events.protect is None else cuts.of_events(events.protect)
        place = cuts.of_events(position)
        key_id, version = numbers
        given = (cuts.present, place, keys, values, importance, importance, key_id, version, protect)
        return Facts(hidden, Event(*given))

    def _decided(
        self,
        query: Tensor,
        position: Tensor,
        table: SlotTable,
        events: Events,
        facts: Facts,
        cuts: Cuts,
        weights: ReadWeights,
    ) -> tuple[Trace, SlotTable]:
        """Read and write in order, without gradients."""
        asked = (None if ids is None else cuts.gather(ids) for ids in (events.query_key_id, events.query_version))
        pieces = [cuts.split(each) for each in (cuts.gather(query), cuts.gather(position), cuts.real, *asked)]
        said = zip(*(each.unbind(1) for each in facts.event), strict=True)
        logits, seen, outcomes = list[Tensor](), list[Tensor](), list[Outcome]()
        readings, before = list[Reading](), list[tuple[Tensor, Tensor]]()
        for at, (q, place, real, key_id, version) in enumerate(zip(*pieces, strict=True)):
            if q.shape[1]:
                readings.append(read(table, q, place, self.rules, weights, self.count, key_id, version))
                before.append((table.written, table.usage))
                table = noted(table, readings[-1], real)
            if at < cuts.count:
                event = Event._make(next(said))
                seen.append(self.controller.seen(table, event, self.rules))
                logits.append(self.controller(facts.hidden[:, at], seen[-1], event.importance))
                p = torch.sigmoid(logits[-1])
                table, outcome = write(table, event._replace(confidence=p, value=p[:, None] * event.value), self.rules)
                outcomes.append(outcome)
        output, rho, chosen, nearest = (
            cuts.joined([getattr(reading, name) for reading in readings])
            for name in ("output", "confidence", "slots", "nearest")
        )
        segment = cuts.joined([torch.full_like(reading.nearest, at) for at, reading in enumerate(readings)])
        written, usage = (
            _columns(torch.stack(each, dim=1), segment) for each in zip(*before, strict=True)
        )  # [R, L, M]
        number = events.candidate.cumsum(1)

        def origin(written: Tensor, slot: Tensor) -> Tensor:
            """Where in the bank the contents of a slot are that was written then."""
            column = written - 1 - position[:, 0].view(-1, *[1] * (written.ndim - 1))
            return torch.where(column < 0, slot, self.slots - 1 + _picked(number, column.clamp(min=0)))

        place, likest = chosen.clamp(min=0), nearest.clamp(min=0)[..., None]
        read_at = written.gather(2, place)
        became = (torch.stack(each, dim=1) for each in zip(*outcomes, strict=True))
        nothing = facts.hidden.new_zeros(len(query), 0, WriteController.FEATURES - 1)
        return Trace(
            output=output,
            confidence=rho,
            written=read_at.masked_fill(chosen < 0, 0),
            usage=usage.gather(2, place),
            origin=origin(read_at, place),
            nearest=origin(written.gather(2, likest), likest)[..., 0],
            last=origin(table.written, torch.arange(self.slots, device=query.device).expand_as(table.written)),
            logit=torch.stack(logits, dim=1) if logits else nothing[..., 0],
            accepted=Outcome(*became).accepted if outcomes else nothing[..., 0] > 0,
            seen=torch.stack(seen, dim=1) if seen else nothing,
        ), table

    def _read_weights(self, dtype: torch.dtype) -> ReadWeights:
        sharpness, *positive, threshold = cast(self.score_weights, dtype).unbind()
        confidence, usage, age, match_scale = (F.softplus(w) for w in positive)
        return ReadWeights(32 * torch.sigmoid(sharpness), confidence, usage, age, match_scale, threshold)

    @staticmethod
    def _of_tokens(cuts: Cuts, logit: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and acceptance of the candidates, at their tokens `[R, L]`."""
        at_tokens = (x.new_zeros(cuts.candidate.shape).scatter(1, cuts.ends, x) for x in (logit, accepted))
        logit, accepted = at_tokens
        return torch.where(cuts.candidate, logit, 0.0), accepted & cuts.candidate


def _picked(bank: Tensor, at: Tensor) -> Tensor:
    """`bank[r, at[r, ...]]` of `[R, N, ...]`."""
    return _columns(bank, at.flatten(1)).view(*at.shape, *bank.shape[2:])


class Cuts:
    """Tokens `[R, L]` cut after each candidate, in segments that lie behind one another, padded to their longest row.

    Where all rows are cut alike nothing is padded, and nothing moves.
    """

    def __init__(self, candidate: Tensor, added: Tensor) -> None:
        rows, tokens = candidate.shape
        self.candidate = candidate
        per_row = candidate.sum(1)
        self.count = int(may_hold(candidate)) if tokens == 1 else int(per_row.max())
        place = torch.arange(tokens, device=candidate.device)
        # The candidates' columns, those of the rows with fewer followed by others.
        self.ends = torch.argsort(~candidate, dim=1, stable=True)[:, : self.count]
        self.present = torch.arange(self.count, device=candidate.device) < per_row[:, None]
        self.aligned, self.widths = True, [1, 0][: 1 + self.count]
        if tokens == 1:  # its segment is it, and the one behind it nothing, whether or not it is a candidate or real
            self.columns = place.expand(rows, -1)
            self.real: Tensor | None = added[:, None] > 0  # which are no padding; `None` for all
            return
        self.aligned = bool((candidate == candidate[:1]).all()) and bool((added == tokens).all())
        last = torch.where(self.present, self.ends + 1, added[:, None])
        stops = torch.cat([last, added[:, None]], dim=1)
        starts = torch.cat([torch.zeros_like(stops[:, :1]), stops[:, :-1]], dim=1)
        self.widths = (stops - starts).amax(0).tolist()
        if not any(self.widths):  # padding alone, of which one column is read
            self.widths[-1] = 1
        if self.aligned:
            self.columns, self.real = place.expand(rows, -1), None
            return
        columns, limits = [], []
        for start, stop, width in zip(starts.T, stops.T, self.widths, strict=True):
            columns.append(start[:, None] + torch.arange(width, device=start.device))
            limits.append(stop[:, None].expand(-1, width))
        moved = torch.cat(columns, dim=1)
        self.real = moved < torch.cat(limits, dim=1)
        self.columns = moved.clamp(max=tokens - 1)
        # Where each token has gone: to its segment's first column, and on from there.
        segment = F.pad(candidate, (1, 0))[:, :-1].long().cumsum(1)
        first = F.pad(torch.tensor(self.widths, device=candidate.device).cumsum(0), (1, 0))[:-1]
        self.back = (first[segment] + place - starts.gather(1, segment)).clamp(0, moved.shape[1] - 1)

    def gather(self, x: Tensor) -> Tensor:
        """`[R, L, ...]` in segments, `[R, L', ...]`."""
        return x if self.aligned else _columns(x, self.columns)

    def split(self, x: Tensor | None) -> list[Any]:
        """The segments of `[R, L', ...]`."""
        return [None] * len(self.widths) if x is None else list(x.split(self.widths, dim=1))

    def of_events(self, x: Tensor) -> Tensor:
        """The candidates of `[R, L, ...]`, `[R, E, ...]`."""
        return _columns(x, self.ends)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Segments back in the order of the tokens, `[R, L, ...]`."""
        x = torch.cat(parts, dim=1)
        return x if self.aligned else _columns(x, self.back)


def _columns(x: Tensor, at: Tensor) -> Tensor:
    """`x[r, at[r, i]]` of `[R, L, ...]`."""
    return x.gather(1, at.view(*at.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


def _appended(old: Tensor, new: Tensor, held: Tensor, more: Tensor) -> Tensor:
    """`more` `[R]` of each row's `new` `[R, L, ...]` behind its first `held` `[R]` of `old` `[R, N, ...]`."""
    if bool((held == old.shape[1]).all()) and bool((more == new.shape[1]).all()):
        return torch.cat([old.to(new.dtype), new], dim=1)
    longest = max(old.shape[1], int((held + more).max()))
    padded = F.pad(old, (0, 0) * (old.ndim - 2) + (0, longest - old.shape[1]))
    return placed(torch.arange(longest, device=old.device), held, more, new, padded)


class Chunks(nn.Module):
    """The fallback: attention to the tokens of the stored chunks that a token's look-up finds.

        score_n = max_{k salient in n} unit(q) . k / sqrt(D) + sum_{i of the last ids} [i in n] log((N + 1) / (N_i + 1))
        output = softmax(beta unit(q) . k / sqrt(D)) v,    beta = 32 sigmoid(.)

    over the N complete chunks before the token's own, N_i of which hold id i; the best K are attended to. The look-up
    carries no gradient, the attention does.

    Args:
        config: a `MemoryManagedConfig`.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.width, self.size, self.count = config.memory_dim, config.chunk_size, config.fallback_chunks
        self.salient, self.bits, self.window = config.salient_keys, config.sketch_bits, config.sketch_window
        self.sharpness = nn.Parameter(torch.empty(1))

    def init_weights(self) -> None:
        init.zeros_(self.sharpness)

    def begin(self, rows: int, like: Tensor) -> ChunkIndex:
        """No chunk."""
        return ChunkIndex(
            chunks=like.new_zeros(rows, 0, self.size, 2 * self.width),
            sketches=torch.zeros(rows, 0, self.bits // 8, dtype=torch.uint8, device=like.device),
            running=like.new_zeros(rows, self.size, 2 * self.width),
            running_ids=torch.zeros(rows, self.size, dtype=torch.int64, device=like.device),
            recent_ids=torch.zeros(rows, max(self.window - 1, 0), dtype=torch.int64, device=like.device),
        )

    def forward(
        self, qkv: QKV, step: Step, index: ChunkIndex, ids: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor, ChunkIndex]:
        """Store the tokens, and look into the chunks before them.

        Args:
            qkv: of each token.
            ids: `[R, L]`.
            wanted: tokens whose look-up is wanted, `[R, L]`, bool.

        Returns:
            Outputs `[R, L, D]`, 0 where nothing was looked up; how many chunks were, `[R, L]`; the new index.
        """
        q = qkv.query
        kv = torch.cat([qkv.key, qkv.value], dim=-1)
        recent = torch.cat([index.recent_ids, ids + 1], dim=1)
        index = self._stored(kv, ids + 1, step, index)
        if self.window > 1:
            last = step.added[:, None] + torch.arange(self.window - 1, device=ids.device)
            index = index._replace(recent_ids=recent.gather(1, last))
        outputs, counts = [], []
        chunk = (step.position[:, None] + torch.arange(ids.shape[1], device=ids.device)) // self.size
        anything = index.chunks.shape[1] > 0 and bool((wanted & (chunk > 0)).any())
        if not anything:
            return q.new_zeros(q.shape), torch.zeros_like(ids), index
        sketch_bits = index.sketches.transpose(1, 2)
        for low in range(0, ids.shape[1], QUERY_BLOCK):
            part = slice(low, low + QUERY_BLOCK)
            reach = min(max(1, int(chunk[:, part].max())), index.chunks.shape[1])  # later chunks are for later tokens
            before = torch.arange(reach, device=ids.device) < chunk[:, part, None]
            before = before & wanted[:, part, None]
            chunks, last = index.chunks[:, :reach], recent[:, low : low + before.shape[1] + max(self.window - 1, 0)]
            chosen, held = self._found(q[:, part], chunks, sketch_bits[:, :, :reach], last, before)
            outputs.append(self._attend(q[:, part], chunks, chosen, held))
            counts.append(held.sum(-1))
        return torch.cat(outputs, dim=1), torch.cat(counts, dim=1), index

    def _stored(self, kv: Tensor, ids: Tensor, step: Step, index: ChunkIndex) -> ChunkIndex:
        """The index with more tokens, `ids` being 1 + theirs."""
        begun, stored = step.position % self.size, step.position // self.size
        done = (begun + step.added) // self.size
        most = int(done.max())
        place = torch.arange((most + 1) * self.size, device=ids.device)
        kv = placed(place, begun, step.added, kv, F.pad(index.running, (0, 0, 0, most * self.size)))
        ids = placed(place, begun, step.added, ids, F.pad(index.running_ids, (0, most * self.size)))
        kv, ids = kv.unflatten(1, (most + 1, self.size)), ids.unflatten(1, (most + 1, self.size))
        row = torch.arange(len(done), device=done.device)
        index = index._replace(running=kv[row, done], running_ids=ids[row, done])
        if not most:
            return index
        with torch.no_grad():
            length = widened(kv[:, :most, :, : self.width]).square().sum(-1)
            order = length.argsort(dim=-1, descending=True, stable=True)[..., None].expand(-1, -1, -1, kv.shape[-1])
            sketches = self._sketched(ids[:, :most])
        chunks = kv[:, :most].gather(2, order)
        return index._replace(
            chunks=_appended(index.chunks, chunks, stored, done),
            sketches=_appended(index.sketches, sketches, stored, done),
        )

    def _sketched(self, ids: Tensor) -> Tensor:
        """Presence bits of `[R, N, C]` ids, 1 + each, `[R, N, bits / 8]`."""
        bits = torch.zeros(*ids.shape[:2], self.bits, dtype=torch.uint8, device=ids.device)
        bits = bits.scatter(2, (ids - 1).clamp(min=0) % self.bits, 1)
        powers = 2 ** torch.arange(8, dtype=torch.uint8, device=ids.device)
        return (bits.unflatten(2, (-1, 8)) * powers).sum(-1, dtype=torch.uint8)

    @torch.no_grad()
    def _found(
        self, q: Tensor, chunks: Tensor, sketches: Tensor, recent: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The best chunks of each token `[R, L, K]` and which of those there are.

        Args:
            q: `[R, L, D]`.
            chunks: `[R, N, C, 2 D]`.
            sketches: `[R, bits / 8, N]`.
            recent: 1 + the ids of the tokens and of those before them that are in their windows, `[R, L + window - 1]`;
                0 for none.
            before: which chunks a token may look into, `[R, L, N]`, bool.
        """
        with as_given(q.device):
            salient = widened(chunks[:, :, : self.salient, : self.width])
            score = (widened(q) @ salient.flatten(1, 2).mT).unflatten(2, (-1, self.salient)).amax(-1)
            score = score * self.width**-0.5
            row, total = torch.arange(len(q), device=q.device)[:, None], before.sum(-1, keepdim=True)
            bit = (recent - 1).clamp(min=0) % self.bits
            there = (sketches[row, bit // 8] >> (bit % 8).to(torch.uint8)[..., None]) & (recent > 0)[..., None]
            for lag in range(self.window):
                shared = (there[:, lag : lag + q.shape[1]] > 0) & before
                rarity = torch.log((total + 1) / (shared.sum(-1, keepdim=True) + 1).to(score.dtype))
                score = score + torch.where(shared, rarity, 0.0)
            score = score.masked_fill(~before, -torch.inf)
            best = score.sort(dim=-1, descending=True, stable=True)
            return best.indices[..., : self.count], best.values[..., : self.count] > -torch.inf

    def _attend(self, q: Tensor, chunks: Tensor, chosen: Tensor, held: Tensor) -> Tensor:
        """The attention to the tokens of each token's chunks."""
        q = q * (32 * self.width**-0.5 * torch.sigmoid(cast(self.sharpness, q.dtype)))
        few = chosen[0].numel() <= chunks.shape[1]
        return (self._gathered if few else self._sorted)(q, chunks, chosen, held)

    def _gathered(self, q: Tensor, chunks: Tensor, chosen: Tensor, held: Tensor) -> Tensor:
        """For few tokens: each gathers its chunks."""
        row = torch.arange(len(q), device=q.device)[:, None, None]
        keys, values = chunks[row, chosen].flatten(2, 3).split(self.width, dim=-1)
        score, seen = widened((keys @ q[..., None])[..., 0]), held.repeat_interleave(self.size, dim=-1)
        weights = score.masked_fill(~seen, torch.finfo(torch.float32).min).softmax(-1) * seen
        return (cast(weights, values.dtype)[:, :, None] @ values)[:, :, 0]

    def _sorted(self, q: Tensor, chunks: Tensor, chosen: Tensor, held: Tensor) -> Tensor:
        """For many: the tokens that look into a chunk meet it together, and no token meets one that is not its own."""
        count, per_row = chosen.shape[2], chunks.shape[1]
        keys, values = (x.unbind() for x in chunks.flatten(0, 1).split(self.width, dim=-1))
        # Pairs of a token and a chunk `[R L K]`, in the order of the chunks; those that are not held go last, and out.
        chunk = chosen + per_row * torch.arange(len(q), device=q.device)[:, None, None]
        chunk = chunk.masked_fill(~held, len(keys)).flatten()
        sizes = chunk.bincount(minlength=len(keys))[: len(keys)].tolist()
        pair = chunk.argsort(stable=True)[: sum(sizes)]
        token = pair // count
        asked = q.flatten(0, 1).index_select(0, token).split(sizes)
        score = widened(torch.cat([a @ k.mT for a, k in zip(asked, keys, strict=True)]))
        nothing = score.new_full((len(chunk), self.size), torch.finfo(torch.float32).min)
        weights = nothing.index_copy(0, pair, score).view(-1, count * self.size).softmax(-1)
        weights = cast(weights, q.dtype).view(-1, self.size).index_select(0, pair).split(sizes)
        found = cast(torch.cat([w @ v for w, v in zip(weights, values, strict=True)]), q.dtype)
        return q.new_zeros(q.shape).flatten(0, 1).index_add(0, token, found).view_as(q)


class ManagedMemory(nn.Module):
    """Slots, the chunks behind them, and the gate into the hidden states.

    Args:
        config: a `MemoryManagedConfig`.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config  # whose `read_threshold` may be calibrated
        self.projections = Projections(config)
        self.slots = Slots(config)
        self.chunks = Chunks(config) if config.fallback_chunks else None
        self.gate_proj = nn.Linear(config.hidden_size, config.memory_dim)
        self.o_proj = nn.Linear(config.memory_dim, config.hidden_size, bias=False)

    def begin(self, rows: int, like: Tensor) -> Stored:
        """The state before the first token."""
        chunks = None if self.chunks is None else self.chunks.begin(rows, like)
        return Stored(self.slots.begin(rows, like), chunks, self.projections.begin(rows, like))

    @torch.compiler.disable  # a loop over events, of which every batch has another number
    def forward(self, x: Tensor, step: Step, stored: Stored, events: Events) -> tuple[Tensor, Stored, Tensor, Report]:
        """Read and write.

        Args:
            x: `[R, L, D]`, right-padded.

        Returns:
            What the block adds to its hidden states `[R, L, D]`; the new state; the candidates' logits of p `[R, L]`, 0
            elsewhere; a report.
        """
        table, index, tail = stored
        qkv, tail = self.projections(x, step, tail)
        found, table = self.slots(x, qkv, step, table, events)
        y, rho = found.confidence[..., None] * found.output, found.confidence
        looked = torch.zeros_like(found.sources[..., 0])
        if self.chunks is not None and index is not None:
            assert events.ids is not None
            wanted = rho.detach() < self.config.read_threshold
            narrow = QKV(*(cast(each, x.dtype) for each in qkv))
            more, looked, index = self.chunks(narrow, step, index, events.ids, wanted)
            y = y + torch.where(wanted, 1 - rho, 0.0)[..., None] * more
        y = self.o_proj(torch.sigmoid(self.gate_proj(x)) * cast(y, x.dtype))
        chunks = 1 + self._distinct(found.sources) + looked
        report = Report(found.accepted, rho.detach(), chunks, table.counts)
        return y, Stored(table, index, tail), found.logit, report

    def _distinct(self, sources: Tensor) -> Tensor:
        """How many chunks the slots `[R, L, K]` come from, by 1 + the position of their writing."""
        chunk = torch.where(sources > 0, (sources - 1) // self.config.chunk_size + 1, 0).sort(dim=-1).values
        return ((chunk > 0) & (F.pad(chunk, (1, 0))[..., :-1] != chunk)).sum(-1)


class ManagedBlock(MemoryBlock):
    """A block with a managed memory between its mixer and its feed-forward:

    h = h + mixer(norm(h));  h = h + memory(norm(h));  h = h + SwiGLU(norm(h))
    """

    def __init__(self, config: PreTrainedConfig, mixer: Mixer) -> None:
        super().__init__(config, mixer)
        self.memory_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.memory = ManagedMemory(config)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, step: Step, state: ManagedState | None, keep_state: bool, events: Events
    ) -> tuple[Tensor, ManagedState | None, Tensor, Report]:
        mixed, mixer = self.mixer(self.mixer_norm(hidden), step, None if state is None else state.mixer)
        hidden = hidden + mixed
        x = self.memory_norm(hidden)
        stored = self.memory.begin(len(x), x) if state is None else state.memory
        remembered, stored, logit, report = self.memory(x, step, stored, events)
        hidden = hidden + remembered
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return hidden, ManagedState(mixer, stored) if keep_state else None, logit, report
