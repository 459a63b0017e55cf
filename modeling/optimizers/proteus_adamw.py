"""AdamW for chains of levels: weights with update periods of their own, hidden units opened block by block.

    G_i = sum of the masked gradients since the last update         (arXiv 2512.24695, Eq 71)
    m <- b1 m + (1 - b1) G_i,   v <- b2 v + (1 - b2) G_i^2          (arXiv 2608.16844, Eq 15)
    theta <- (1 - lr wd) theta - lr m^ / (sqrt(v^) + eps)           at every C-th step

A block of hidden units is a slice of each weight that makes or reads them; what is closed is handed to no kernel, so
that it stays as it is to the bit. The rest is torch's AdamW on the open slices.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from transformers import TrainerCallback

from memzoo.modeling.capacity import CapacitySchedule

UNIT_AXES: dict[str, int] = {r"\bmlp\.(gate|up)_proj\.(weight|bias)$": 0, r"\bmlp\.down_proj\.weight$": 1}
"""Where the hidden units lie in the feed-forwards of this zoo and of transformers' Llama-like models, by a pattern on
the parameter's name: rows of what makes them, columns of what reads them. Norms and output biases have none."""


def parameter_groups(
    model: nn.Module,
    weight_decay: float = 1e-2,
    *,
    unit_axes: Mapping[str, int] = UNIT_AXES,
    periods: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """The trainable parameters of a model in groups for `ProteusAdamW`.

    Args:
        model: any model.
        weight_decay: of matrices; vectors (norms, biases, gates) have none.
        unit_axes: for a regular expression found in a parameter's name, the axis of its hidden units, which open block
            by block. The first that fits counts; a parameter that none fits is open from the start.
        periods: the same for update periods; 1 where none fits. `None` for the `level_periods` of the model's config,
            where it has a chain that does not learn in context, and 1 elsewhere.

    Raises:
        ValueError: a pattern that fits no parameter.
    """
    if periods is None:
        config: Any = getattr(model, "config", None)
        levels = config.level_periods if getattr(config, "chain_learning", None) == "stream" else []
        periods = {rf"\bchain\.levels\.{level}\.": period for level, period in enumerate(levels)}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for kind, patterns in (("unit_axes", unit_axes), ("periods", periods)):
        for pattern in patterns:
            if patterns is not UNIT_AXES and not any(re.search(pattern, name) for name in named):
                raise ValueError(f"parameter_groups: {kind}: {pattern!r} fits no trainable parameter; expected one.")
    groups: dict[tuple[float, int | None, int], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        decay = weight_decay if parameter.ndim > 1 else 0.0
        key = decay, _first(unit_axes, name, None), _first(periods, name, 1)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "unit_axis": axis, "period": period}
        for (decay, axis, period), parameters in groups.items()
    ]


def _first(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    return next((value for pattern, value in patterns.items() if re.search(pattern, name)), default)


class ProteusAdamW(Optimizer):
    """AdamW with update periods and hidden units that open over training.

    Source: Proteus (arXiv 2608.16844), Eq 14-15 and the schedule of Eq 12, in optimizer steps; Nested Learning (arXiv
    2512.24695), Eq 71, for the periods. With `blocks=1` and periods of 1 it is `torch.optim.AdamW` to the bit.
    Deviations, each with a flag for the literal form: closed weights do not decay (Eq 15 decays them, though only
    selected ones are to be updated); each block counts its own updates for the bias correction (Eq 15 counts all steps,
    which makes a late block's first update 0.45 times as long as any other's at betas of 0.9 and 0.95, 3.2 times at 0.9
    and 0.999); blocks open over the first half of training (over all of it, the last of 16 would have 0.04 % of a
    cosine's learning rates left).
    The masks gate updates alone (Eq 14): a closed unit computes with its initial weights. Blocks open at multiples of
    every period, so that a block never enters in the middle of a sum.

    Args:
        params: parameters, or groups of them as `parameter_groups` makes them, with `unit_axis` (axis of the hidden
            units, `None` for parameters that are always open) and `period` (C, optimizer steps between two updates).
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`. At every C-th step a parameter decays once, by the
            learning rate of that step.
        blocks: E; 1 for no schedule.
        total_steps: optimizer steps of the training; needed where blocks > 1.
        horizon: the part of `total_steps` over which the blocks open; 1 in the paper's literal form.
        gate_weight_decay: whether a closed block is spared from weight decay.
        count_per_block: whether a block's bias correction counts its own updates or those of its parameter.
        foreach, fused: as in `torch.optim.AdamW`; `fused` needs blocks = 1.

    All settings are options of the groups, so that `load_state_dict` brings back those of the checkpoint, as it does in
    torch. Gradients of closed units are set to zero as they arrive, before any clipping. Where parameters are replaced
    after this optimizer was made (FSDP2 shards them), call `arm()` before the first backward, or give `Trainer` a
    `ProteusCallback`.

    Raises:
        ValueError: settings out of range, a parameter with fewer units than blocks, blocks that no group has an axis
            for, a schedule that would not end within the horizon, an unarmed parameter.

    Cost: two moments per weight as AdamW, one sum more where C > 1; time of AdamW on the open weights, in one slice per
    block.

    Example:
        >>> options = {"params": parameter_groups(model), "lr": 4e-4, "blocks": 16, "total_steps": 10_000}
        >>> Trainer(model, args, optimizer_cls_and_kwargs=(ProteusAdamW, options), callbacks=[ProteusCallback()])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        blocks: int = 1,
        total_steps: int | None = None,
        horizon: float = 0.5,
        gate_weight_decay: bool = True,
        count_per_block: bool = True,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        _expect(blocks >= 1, "blocks", "at least 1", blocks)
        _expect(blocks == 1 or (total_steps or 0) >= 1, "total_steps", "the steps of the training", total_steps)
        _expect(0 < horizon <= 1, "horizon", "above 0 and at most 1", horizon)
        _expect(float(lr) >= 0, "lr", "at least 0", lr)
        _expect(all(0 <= beta < 1 for beta in betas), "betas", "two numbers from 0 to below 1", betas)
        _expect(eps >= 0 and weight_decay >= 0, "eps, weight_decay", "at least 0", (eps, weight_decay))
        _expect(not fused or blocks == 1, "fused", "None or False: the fused kernels cannot read blocks", fused)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "unit_axis": None,
            "period": 1,
            "blocks": blocks,
            "horizon_steps": 0 if total_steps is None else max(1, round(horizon * total_steps)),
            "gate_weight_decay": gate_weight_decay,
            "count_per_block": count_per_block,
            "steps_done": 0,
            "foreach": foreach,
            "fused": fused,
        }
        self._armed = WeakIdKeyDictionary()
        super().__init__(params, defaults)
        fits = blocks == 1 or any(_is_masked(group) for group in self.param_groups)
        _expect(fits, "unit_axis", "the axis of the hidden units in some group, as parameter_groups gives it", None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; blocks and periods of the group are those of a training that has come as far as the others'."""
        given = param_group["params"]
        param_group = {
            "steps_done": self.param_groups[0]["steps_done"] if self.param_groups else 0,
            **param_group,
            "params": [given] if isinstance(given, Tensor) else given if isinstance(given, set) else list(given),
        }
        group = {**self.defaults, **param_group}
        _expect(group["period"] >= 1, "period", "at least 1", group["period"])
        axis, blocks = group["unit_axis"], group["blocks"]
        for given in group["params"]:
            parameter = given[1] if isinstance(given, tuple) else given
            if axis is not None:
                units = parameter.shape[axis] if -parameter.ndim <= axis < parameter.ndim else 0
                _expect(units >= blocks, "unit_axis", f"an axis of at least {blocks} units", tuple(parameter.shape))
        together = [*self.param_groups, group]
        for other in filter(_is_masked, together):
            last, horizon_steps = _schedule(other, together).unlock[-1], other["horizon_steps"]
            expected = f"all {other['blocks']} blocks open after {horizon_steps} steps (horizon x total_steps)"
            cure = f"{last} for the last. Take fewer blocks, more steps, or periods that divide one another"
            _expect(last <= horizon_steps, "blocks", expected, cure)
        super().add_param_group(param_group)
        self.arm()

    @property
    def open_blocks(self) -> int:
        """`k(i)` of the coming step."""
        return max(self._open(group) for group in self.param_groups)

    def _open(self, group: dict[str, Any]) -> int:
        if group["blocks"] == 1:
            return 1
        return sum(before <= group["steps_done"] for before in _schedule(group, self.param_groups).unlock)

    def arm(self) -> None:
        """See to it that the gradients of closed units are zero as they arrive; needed again for new parameters."""
        optimizer = weakref.ref(self)
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if _is_masked(group) and parameter not in self._armed:
                    parameter.register_post_accumulate_grad_hook(partial(_mask_gradient, optimizer, index))
                    self._armed[parameter] = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_armed", WeakIdKeyDictionary())

    def _slices(self, parameter: Tensor, group: dict[str, Any]) -> Callable[[Tensor | None], list[Tensor]]:
        """What cuts a tensor of the form of `parameter` into its blocks, on this process's part of it."""
        axis, blocks = group["unit_axis"], group["blocks"]
        if axis is None:
            return lambda x: [_local(x)]
        first, last = 0, parameter.shape[axis]
        size = parameter.shape[axis] // blocks
        bounds = [*(size * block for block in range(blocks)), last]
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
            first, last = offset[axis], offset[axis] + shape[axis]
        bounds = [min(max(bound, first), last) - first for bound in bounds]

        def cut(x: Tensor | None) -> list[Tensor]:
            whole = _local(x)
            return [whole.narrow(axis, low, high - low) for low, high in pairwise(bounds)]

        return cut

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step: every parameter takes up its gradient, those whose period ends here are updated."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        opened = [self._open(group) for group in self.param_groups]
        for group, count in zip(self.param_groups, opened, strict=True):
            group["steps_done"] += 1
            self._step(group, count)
        return loss

    def _step(self, group: dict[str, Any], count: int) -> None:
        due, sums = group["steps_done"] % group["period"] == 0, group["period"] > 1
        # The open slices of weights, sums and what they grow by, gradients to apply, moments; their counters.
        weights, grown, new, gradients, first, second, counters = ([] for _ in range(7))
        for parameter in group["params"]:
            if parameter.grad is None and not (due and self._is_pending(parameter)):
                continue
            cut, state = self._slices(parameter, group), self._state(parameter, group, count)
            slices = cut(state["gradient_sum"] if sums else parameter.grad)[:count]
            gradients += slices
            if sums and parameter.grad is not None:
                grown += slices
                new += cut(parameter.grad)[:count]
            first += cut(state["exp_avg"])[:count]
            second += cut(state["exp_avg_sq"])[:count]
            counted = [state["step"]] if state["step"].ndim == 0 else list(state["step"])
            if not group["count_per_block"]:
                for counter in counted[1:]:
                    counter.copy_(counted[0])
            counters += counted[:count]
            pieces = cut(parameter)
            weights += pieces[:count]
            if due and not group["gate_weight_decay"]:
                for piece in pieces[count:]:
                    piece.mul_(1 - group["lr"] * group["weight_decay"])
        if new:
            torch._foreach_add_(grown, new)
        if not due or not gradients:
            return
        adamw(
            weights,
            gradients,
            first,
            second,
            [],
            counters,
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if sums:
            torch._foreach_zero_(gradients)

    def _is_pending(self, parameter: Tensor) -> bool:
        """Whether a parameter without a gradient at this step had one since its last update."""
        gradient_sum = self.state.get(parameter, {}).get("gradient_sum")
        return gradient_sum is not None and bool(_local(gradient_sum).any())

    def _state(self, parameter: Tensor, group: dict[str, Any], count: int) -> dict[str, Tensor]:
        if _is_masked(group) and parameter not in self._armed:
            if any(bool(piece.any()) for piece in self._slices(parameter, group)(parameter.grad)[count:]):
                raise ValueError(
                    "ProteusAdamW: a parameter was replaced after the optimizer was made (as sharding does), so that "
                    "its gradient was not masked before clipping; expected the same one. Call optimizer.arm() before "
                    "the first backward, or give Trainer a ProteusCallback."
                )
            self.arm()
        state = self.state[parameter]
        if not state:
            counters = (group["blocks"],) if _is_masked(group) else ()
            # As in torch, counters lie on the CPU but where the fused kernels need them.
            state["step"] = torch.zeros(counters, device=parameter.device if group["fused"] else "cpu")
            names = ["exp_avg", "exp_avg_sq", *(["gradient_sum"] if group["period"] > 1 else [])]
            state.update({name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names})
        return state


def _schedule(group: dict[str, Any], groups: Sequence[dict[str, Any]]) -> CapacitySchedule:
    """When the blocks of a group open, among groups with periods of their own."""
    align = math.lcm(*(other["period"] for other in groups))
    interval = -(-max(1, group["horizon_steps"] // group["blocks"]) // align) * align
    return CapacitySchedule(group["blocks"], interval * group["blocks"])


def _is_masked(group: dict[str, Any]) -> bool:
    return group["unit_axis"] is not None and group["blocks"] > 1


@torch.no_grad()
def _mask_gradient(optimizer: weakref.ref[ProteusAdamW], index: int, parameter: Tensor) -> None:
    """Zero in the gradient that has just arrived what is closed."""
    living = optimizer()
    if living is not None and parameter.grad is not None:
        group = living.param_groups[index]
        for piece in living._slices(parameter, group)(parameter.grad)[living._open(group) :]:
            piece.zero_()


class ProteusCallback(TrainerCallback):
    """Arms a `ProteusAdamW` at the start of `Trainer.train`, when its parameters have been sharded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        getattr(optimizer, "optimizer", optimizer).arm()


def _local(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.to_local() if isinstance(x, DTensor) else x


def _expect(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"ProteusAdamW: {name}: expected {expected}, got {got!r}.")
