"""M3: Muon with momentum at two time scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from memzoo.kernels.newton_schulz import newton_schulz


def matrix_groups(model: nn.Module, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """The trainable parameters of a model in two groups for `M3`: the hidden layers' matrices, and all that is none.

    Embeddings, the weights of an output head and vectors take AdamW's steps; so does a weight that two modules share,
    if one of them is an embedding.
    """
    others = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if head is not None:
        others.add(id(head.weight))
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parts[parameter.ndim >= 2 and id(parameter) not in others].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return [{"params": part, "matrices": key, "weight_decay": decays[key]} for key, part in parts.items() if part]


class M3(Optimizer):
    """Multi-scale momentum Muon.

        every f steps, before step i:  M2 <- M2 + b3 (g_{i-f} + ... + g_{i-1}),   O2 = NS(M2)
        each step:                     M1 <- M1 + b1 g_i,   V <- V + b2 g_i^2,    O1 = NS(M1)
        W <- W - lr (O1 + a O2) / (sqrt(V) + eps)

    NS is `memzoo.kernels.newton_schulz`. Source: Nested Learning (arXiv 2512.24695), Algorithm 1; its Eq 75 has another
    sign and another factor for M2, and the algorithm is followed. Deviations: gradients before the first step count as
    zero; decoupled weight decay, 0 by default. As printed, M1, M2 and V are sums that never decay; with `ema=True` they
    are means, `M1 <- b1 M1 + (1 - b1) g`, likewise V with b2, and M2 with b3 over the mean gradient of a window.

    Args:
        params: groups as `matrix_groups` makes them; where `matrices` is false AdamW's steps are taken.
        lr, eps, weight_decay: as in `torch.optim.AdamW`.
        betas: b1, b2, b3; AdamW takes the first two.
        alpha: a, the weight of the slow momentum.
        window: f, steps between two updates of the slow momentum.
        newton_schulz_steps: iterations of NS.
        ema: whether means take the place of sums.

    Raises:
        ValueError: settings out of range; a vector among matrices.

    Cost: five tensors of the size of each weight (AdamW: two), one Newton-Schulz iteration per matrix and step, and one
    more per window. A sharded matrix is gathered for it on every process.

    Example:
        >>> optimizer = M3(matrix_groups(model), lr=1e-3, window=16)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.95, 0.9),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        alpha: float = 1.0,
        window: int = 16,
        newton_schulz_steps: int = 5,
        ema: bool = False,
    ) -> None:
        _expect(lr >= 0, "lr", "at least 0", lr)
        _expect(len(betas) == 3 and all(0 <= b < 1 for b in betas), "betas", "three numbers from 0 to below 1", betas)
        _expect(eps >= 0 and weight_decay >= 0, "eps, weight_decay", "at least 0", (eps, weight_decay))
        _expect(window >= 1, "window", "at least 1", window)
        _expect(newton_schulz_steps >= 1, "newton_schulz_steps", "at least 1", newton_schulz_steps)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "alpha": alpha,
            "window": window,
            "newton_schulz_steps": newton_schulz_steps,
            "ema": ema,
            "matrices": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            shape = tuple(parameter.shape)
            _expect(
                not group["matrices"] or len(shape) >= 2, "params", "matrices [..., M, N]; see matrix_groups", shape
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            ready = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["matrices"]:
                for parameter in ready:
                    self._matrix_step(parameter, group)
            elif ready:
                self._adamw_step(ready, group)
        return loss

    def _matrix_step(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, gradient, steps = self.state[weight], weight.grad, group["newton_schulz_steps"]
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros(())
            for name in ("momentum", "square_sum", "slow_momentum", "slow_update", "window_sum"):
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        if int(state["step"]) % group["window"] == 0:
            share = state["window_sum"] / (group["window"] if group["ema"] else 1)
            _gather(state["slow_momentum"], share, group["betas"][2], group["ema"])
            state["slow_update"].copy_(_orthogonal(state["slow_momentum"], steps))
            state["window_sum"].zero_()
        state["step"] += 1
        state["window_sum"].add_(gradient)
        _gather(state["momentum"], gradient, group["betas"][0], group["ema"])
        _gather(state["square_sum"], gradient.square(), group["betas"][1], group["ema"])
        update = _orthogonal(state["momentum"], steps).add_(state["slow_update"], alpha=group["alpha"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(update, state["square_sum"].sqrt().add_(group["eps"]), value=-group["lr"])

    def _adamw_step(self, ready: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in ready:
            if not self.state[parameter]:
                moments = {
                    name: torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    for name in ("exp_avg", "exp_avg_sq")
                }
                self.state[parameter] = {"step": torch.zeros(()), **moments}
        states = [self.state[parameter] for parameter in ready]
        adamw(
            ready,
            [parameter.grad for parameter in ready],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _gather(total: Tensor, new: Tensor, beta: float, ema: bool) -> None:
    """Add to a sum, `total + beta new`, or to a mean."""
    if ema:
        total.lerp_(new, 1 - beta)
    else:
        total.add_(new, alpha=beta)


def _orthogonal(x: Tensor, steps: int) -> Tensor:
    """`NS(x)` in the dtype and, if sharded, in the shards of `x`."""
    if isinstance(x, DTensor):
        whole = _orthogonal(x.full_tensor(), steps)
        return distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None)
    return newton_schulz(x.to(torch.promote_types(x.dtype, torch.float32)), steps=steps).to(x.dtype)


def _expect(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"M3: {name}: expected {expected}, got {got!r}.")
