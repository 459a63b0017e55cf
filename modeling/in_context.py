"""Levels that learn in context: each sequence moves its own copy of the chain's weights as it is read.

    at every C_l-th token:  d_l <- d_l - eta sum_{t in the last C_l tokens} grad_{d_l} CE(logits_t, x_{t+1})   (Eq 71)

The weights of level l in a row are the model's plus `d_l`, which starts at 0. Tokens are read in chunks of the smallest
period, with weights that do not change inside a chunk. A chunk's errors are known when the first token after it comes;
then, before that token is read, the chunk is read again from the state before it, this time for gradients through all
layers above. So a token changes the reading of no earlier one, nor does its role as a label, and every way of cutting
a sequence makes the same updates. Whether a chunk has ended, and in which rows, is looked at: the price of not asking
would be a pass with gradients at every token. So decoding is not static; no CUDA graph holds it.

Source: Nested Learning (arXiv 2512.24695), section 7, Eq 70-74. Deviations: the sum's C + 1 printed terms are the C
tokens of the period; gradients stop at the chunk's start, whose carried keys and states are constants; SwiGLU matrices
learn, norms and biases do not. Training differentiates through the reading and not through the updates (first order),
unless the config says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig
from transformers.utils import logging

from memzoo.modeling.decoder import MemoryForCausalLM, MemoryModel, MemoryPreTrainedModel, Step
from memzoo.modeling.mixers.chain import ChainBlock, Change, InContextBlock
from memzoo.modeling.parts import Part, joined, parts_of, placed
from memzoo.modeling.sequences import Rows

logger = logging.get_logger(__name__)


class LevelState(NamedTuple):
    """A level's own weights in each row; each field is three tensors, of gate, up and down projection."""

    change: Change
    """d, from the model's weights to the row's."""
    gradient: Change | tuple[()]
    """Summed since the last update; nothing for the fastest level, which is updated at once."""
    start: Change | tuple[()]
    """Where d starts anew, in a nested chain below the slowest level."""
    start_gradient: Change | tuple[()]
    """Summed since the start was updated."""


class Chunk(NamedTuple):
    """The tokens of each row's running chunk, or of the last one until the token after it comes."""

    inputs: Tensor
    """What the first block reads, `[R, C, D]`."""
    ids: Tensor
    """`[R, C]`, int64."""


class ChainState(NamedTuple):
    """A block between two tokens."""

    mixer: Any
    anchor: Any
    """The mixer's state before the running chunk."""
    levels: tuple[LevelState, ...]
    chunk: Chunk | None
    """In the first block."""


class ChainPreTrainedModel(MemoryPreTrainedModel):
    """Base of the models whose blocks end in chains."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._no_split_modules = [self.block_class(config).__name__]  # accelerate asks for the blocks there are

    @staticmethod
    def block_class(config: PreTrainedConfig) -> type[ChainBlock]:
        """The blocks of the config's way of learning."""
        return InContextBlock if config.chain_learning == "in_context" else ChainBlock

    @classmethod
    def make_block(cls, config: PreTrainedConfig, layer_idx: int) -> nn.Module:
        return cls.block_class(config)(config, cls.make_mixer(config, layer_idx))


class ChainModel(MemoryModel):
    """A backbone whose blocks end in chains; see `ChainConfig`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        # The head whose errors teach the levels, in a tuple, since it belongs to another module; none: the embedding.
        self.teacher: tuple[nn.Module, ...] = ()

    @torch.compiler.disable(recursive=False)
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
        if self.config.chain_learning == "stream":
            return super()._read(rows, input_ids, inputs_embeds, states, every, keep)
        if torch.is_grad_enabled() and any(isinstance(layer, FSDPModule) for layer in self.layers):
            raise ValueError(
                f"{type(self).__name__}: training under FSDP2: a chain that learns in context reads each block several "
                "times a pass, for which FSDP2 returns wrong gradients; expected whole blocks on every process. Use "
                "DDP, or chain_learning='stream'."
            )
        if inputs_embeds is None:
            ids = rows.gather(input_ids)  # type: ignore[arg-type]
            hidden = self._embed(ids)
        else:
            hidden = rows.gather(inputs_embeds)
            ids = self._nearest(hidden)
        whole = Step(rows.position, rows.lengths, rows.added, self._rotary(rows, hidden), rows.room)
        if states[0] is None:
            self._expect_readable()
            with _unsharded(self.layers):
                states = self._begin(hidden, whole)
        parts, seen = list(parts_of(whole, hidden.shape[1], self.chunk_size)), []
        for part in parts:
            states = self._learned(states, part, part.of(ids))
            outputs, states = self._read_part(states, part, part.of(hidden), part.of(ids))
            seen.append(outputs if every else outputs[-1:])
        together = [rows.scatter(joined(parts, list(same), hidden)) for same in zip(*seen, strict=True)]
        return [*together[:-1], self.norm(together[-1])], states if keep else [None] * len(states)

    def _expect_readable(self) -> None:
        """What reads the blocks outside of their hooks needs them as they are; what teaches should be meant to."""
        if any(hasattr(module, "_hf_hook") for module in self.layers.modules()):
            raise ValueError(
                f"{type(self).__name__}: a device_map that moves blocks between devices or from the disk: a chain that "
                "learns in context reads each block several times a pass, past the hooks that move it; expected the "
                "whole model on one device. Load it with device_map={'': device}, or with chain_learning='stream'."
            )
        if not self.teacher and not self.config.tie_word_embeddings and self.config.chain_step_size > 0:
            logger.warning_once(
                f"{type(self).__name__} without a head learns in context from the logits of its input embedding, so "
                "that its hidden states are not those of a language model whose head is another matrix."
            )

    @property
    def chunk_size(self) -> int:
        """Tokens between two updates of the fastest level."""
        return min(self.config.level_periods)

    def _read_part(
        self, states: list[ChainState], part: Part, hidden: Tensor, ids: Tensor
    ) -> tuple[list[Tensor], list[ChainState]]:
        """Hidden states before each block and after the last, and the states after the part's tokens."""
        chunk = states[0].chunk
        assert chunk is not None
        chunk = Chunk(_written(chunk.inputs, self._constant(hidden), part), _written(chunk.ids, ids, part))
        seen, new_states = [hidden], list[ChainState]()
        for layer, state in zip(self.layers, states, strict=True):
            changes = tuple(level.change for level in state.levels)
            hidden, mixer = layer.read(hidden, part.step, state.mixer, changes)  # type: ignore[operator]
            seen.append(hidden)
            new_states.append(state._replace(mixer=mixer, chunk=None if new_states else chunk))
        return seen, new_states

    def _begin(self, hidden: Tensor, whole: Step) -> list[ChainState]:
        """The states before the first token."""
        rows, size = hidden.shape[0], self.chunk_size
        none = torch.zeros_like(whole.position)
        rotary = {width: (cos[:, :1], sin[:, :1]) for width, (cos, sin) in whole.rotary.items()}
        nothing = Step(none, none, none, rotary, whole.room)
        chunk = Chunk(hidden.new_zeros(rows, size, hidden.shape[2]), none.new_zeros(rows, size))
        states = list[ChainState]()
        for layer in self.layers:
            mixer = layer.begin(hidden[:, :1], nothing)  # type: ignore[operator]
            levels = []
            for level, period in zip(layer.chain.levels, self.config.level_periods, strict=True):  # type: ignore[union-attr, arg-type]
                zero, nested = level.no_change(rows), self._outer(period) is not None
                gradient = zero if period > size else ()
                levels.append(LevelState(zero, gradient, *((zero, zero) if nested else ((), ()))))
            states.append(ChainState(mixer, self._anchor(mixer), tuple(levels), None if states else chunk))
        return states

    def _outer(self, period: int) -> int | None:
        """The next slower period, at which a level of this one starts anew in a nested chain."""
        slower = [other for other in self.config.level_periods if other > period]
        return min(slower) if slower and self.config.chain == "nested" else None

    def _constant(self, state: Any) -> Any:
        """What the updates start from; no gradient goes there but in second order."""
        return state if self.config.chain_second_order else pytree.tree_map_only(Tensor, torch.Tensor.detach, state)

    def _anchor(self, state: Any) -> Any:
        """The same of a mixer's state, for which the chunk's tokens may be written into its tensors."""
        return pytree.tree_map_only(Tensor, torch.Tensor.clone, self._constant(state))

    # Learning ---------------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _learned(self, states: list[ChainState], part: Part, ids: Tensor) -> list[ChainState]:
        """The states with the last chunk learned, in the rows where this part begins another."""
        position = part.step.position
        due = (part.begun == 0) & (position > 0) & (part.step.added > 0)
        if self.config.chain_step_size == 0 or not bool(due.any()):
            return states
        chosen = None if bool(due.all()) else due.nonzero()[:, 0]
        taken = [state._replace(mixer=None) for state in states]
        first = ids[:, 0]
        if chosen is not None:
            taken = pytree.tree_map_only(Tensor, lambda x: x[chosen], taken)
            first, position = first[chosen], position[chosen]
        gradients = self._gradients(taken, first, position - self.chunk_size, part.step.room)
        learned = []
        for state, own, slopes in zip(states, taken, gradients, strict=True):
            levels = tuple(
                self._updated(level, slope, period, position)
                for level, slope, period in zip(own.levels, slopes, self.config.level_periods, strict=True)
            )
            if chosen is not None:
                levels = pytree.tree_map(lambda old, new: old.index_copy(0, chosen, new), state.levels, levels)
            anchor = self._anchor(state.mixer)
            if chosen is not None:
                anchor = pytree.tree_map(lambda new, old: _where(due, new, old), anchor, state.anchor)
            learned.append(state._replace(anchor=anchor, levels=levels))
        return learned

    def _gradients(
        self, states: list[ChainState], first: Tensor, position: Tensor, room: int | None
    ) -> list[tuple[Change, ...]]:
        """Of the summed next-token errors of each row's last chunk, with respect to its changes.

        Args:
            states: of the rows that have read a whole chunk.
            first: the token after it, `[R]`.
            position: tokens before it, `[R]`.
            room: of the states.
        """
        second = self.config.chain_second_order and torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            if not second:
                states = pytree.tree_map_only(Tensor, _constant, states)
            chunk = states[0].chunk
            assert chunk is not None
            changes = pytree.tree_map(_leaf, [tuple(level.change for level in state.levels) for state in states])
            hidden, added = chunk.inputs, torch.full_like(position, chunk.ids.shape[1])
            rotary = self._rotary(Rows((len(position), chunk.ids.shape[1]), position), hidden)
            step = Step(position, None, added, rotary, room)
            labels = torch.cat([chunk.ids[:, 1:], first[:, None]], dim=1)
            with _unsharded(self.layers):
                for layer, state, own in zip(self.layers, states, changes, strict=True):
                    hidden = layer.read_again(hidden, step, state.anchor, own)  # type: ignore[operator]
                logits = self._taught(self.norm(hidden))
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                error = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")
                slopes = torch.autograd.grad(error, pytree.tree_leaves(changes), create_graph=second)
        return pytree.tree_unflatten(slopes, pytree.tree_structure(changes))

    def _updated(self, level: LevelState, slope: Change, period: int, position: Tensor) -> LevelState:
        """A level after the gradient of one more chunk, in rows that have read `position` tokens."""
        change, gradient, start, start_gradient = level
        total = _plus(gradient, slope) if gradient else slope
        ends = position % period == 0
        change = _choose(ends, _plus(change, total, -self.config.chain_step_size), change)
        if gradient:
            gradient = _choose(ends, _zero(total), total)
        outer = self._outer(period)
        if outer is not None:
            ends, total = position % outer == 0, _plus(start_gradient, slope)
            start = _choose(ends, _plus(start, total, -self.config.chain_step_size), start)
            start_gradient = _choose(ends, _zero(total), total)
            change = _choose(ends, start, change)
        return LevelState(change, gradient, start, start_gradient)

    def _taught(self, hidden: Tensor) -> Tensor:
        """Logits of the language model's head, or of the embedding where the backbone stands alone."""
        return self.teacher[0](hidden) if self.teacher else F.linear(hidden, self.embed_tokens.weight)


class ChainForCausalLM(MemoryForCausalLM):
    """A language model whose head teaches its levels."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "lm_head" and isinstance(getattr(self, "model", None), ChainModel):
            self.model.teacher = (value,)


@contextmanager
def _unsharded(layers: nn.ModuleList) -> Iterator[None]:
    """Whole weights for what is computed outside of FSDP2's hooks."""
    sharded = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for layer in sharded:
        layer.unshard()
    try:
        yield
    finally:
        for layer in sharded:
            layer.reshard()


def _written(chunk: Tensor, new: Tensor, part: Part) -> Tensor:
    """The running chunk `[R, C, ...]` with the part's tokens `[R, L', ...]` behind those that it held."""
    return placed(
        torch.arange(chunk.shape[1], device=chunk.device), part.begun, part.step.added, new.to(chunk.dtype), chunk
    )


def _where(due: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of `new` where due, of `old` elsewhere; where one has grown along an axis, the other is padded in front, as
    states that carry keys are."""
    for axis in range(1, new.ndim):
        wide = max(new.shape[axis], old.shape[axis])
        new, old = (F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (wide - x.shape[axis], 0)) for x in (new, old))
    return torch.where(due.view(-1, *[1] * (new.ndim - 1)), new, old)


def _constant(x: Tensor) -> Tensor:
    """`x` without its graph, as a tensor that a graph may hold."""
    return x.clone() if x.is_inference() else x.detach()


def _leaf(x: Tensor) -> Tensor:
    """`x` as something to take gradients of."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _plus(a: Change | tuple[()], b: Change | tuple[()], scale: float = 1.0) -> Change:
    gate, up, down = (torch.add(x, y, alpha=scale) for x, y in zip(a, b, strict=True))
    return gate, up, down


def _zero(a: Change) -> Change:
    gate, up, down = (torch.zeros_like(x) for x in a)
    return gate, up, down


def _choose(rows: Tensor, a: Change | tuple[()], b: Change | tuple[()]) -> Change:
    gate, up, down = (torch.where(rows[:, None, None], x, y) for x, y in zip(a, b, strict=True))
    return gate, up, down
