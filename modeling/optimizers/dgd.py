"""DGD: gradient descent on linear layers that forgets what it replaces."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

REDUCTIONS = ("mean", "sum")


class DGD(Optimizer):
    """Delta gradient descent: a linear layer `y = W x` as a memory that the L2 objective writes.

        W' = argmin_V 1/2 sum_i |V x_i - u_i|^2 + 1/(2 lr) |V - W|^2,    u_i = -dL/dy_i
           = (W - lr dL/dW) (I + lr X^T X)^-1

    over the rows `x_i` of X that the layer has read since the last step. For one row this is
    `W (I - r x x^T) - r dL/dy x^T` with `r = lr / (1 + lr |x|^2)`. With the inner product in place of the squares it
    would be gradient descent.

    Source: Nested Learning (arXiv 2512.24695), Eq 54-57 and appendix C. Deviations: rows of any length, where Eq 57
    takes unit ones (`r = lr / (1 + lr)`); a batch is solved for at once, not row by row; where the loss is a mean, the
    objective is a mean over rows as well. What is no weight of an `nn.Linear` takes plain gradient descent.

    Args:
        model: the model; its linear layers are watched.
        lr: step size.
        reduction: `"mean"` where the loss is a mean over the rows of a batch, `"sum"` where it is a sum.

    Raises:
        ValueError: a negative step size, another reduction.

    Cost: per linear layer one product `X^T X` in the backward, whose X is kept until then, and one D x D Cholesky
    factor per step. In a distributed run the sums of all processes are added up.

    Example:
        >>> optimizer = DGD(model, lr=0.1)
    """

    def __init__(self, model: nn.Module, lr: float = 1e-2, *, reduction: str = "mean") -> None:
        if lr < 0:
            raise ValueError(f"DGD: lr: expected at least 0, got {lr}.")
        if reduction not in REDUCTIONS:
            raise ValueError(f"DGD: reduction: expected one of {REDUCTIONS}, got {reduction!r}.")
        self._inputs = WeakIdKeyDictionary()
        named = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__(named, {"lr": lr, "reduction": reduction})
        optimizer = weakref.ref(self)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(partial(_watch, optimizer))

    @torch.no_grad()
    def read(self, module: nn.Linear, x: Tensor) -> None:
        """Note rows `[..., D]` that a layer has read; a row of zeros stands for no token."""
        rows = x.detach().flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))
        count = rows.any(1).sum().to(rows.dtype)
        gram, before = self._inputs.get(module, (0.0, 0.0))
        self._inputs[module] = gram + rows.mT @ rows, before + count

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and the rows that belong to them."""
        super().zero_grad(set_to_none)
        self._inputs.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the rows and gradients gathered since the last."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])
        self._forget()
        self._inputs.clear()
        return loss

    def _forget(self) -> None:
        """`W <- W (I + lr X^T X)^-1`; X are the rows of every layer that has the weight W."""
        read: dict[int, list[Any]] = {}
        for module, (gram, count) in self._inputs.items():
            _, other, others = read.get(id(module.weight), (None, 0.0, 0.0))
            read[id(module.weight)] = [module.weight, gram + other, count + others]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or id(parameter) not in read:
                    continue
                weight, gram, count = read[id(parameter)]
                if dist.is_available() and dist.is_initialized():
                    dist.all_reduce(gram)
                    dist.all_reduce(count)
                scale = group["lr"] / (count if group["reduction"] == "mean" else 1)
                system = scale * gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                solved = torch.cholesky_solve(local.mT.to(gram.dtype), torch.linalg.cholesky(system))
                local.copy_(solved.mT)


def _watch(optimizer: weakref.ref[DGD], module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Note the input of a linear layer once its weight gets a gradient: neither where checkpointing replays the layer
    nor where a memory takes gradients of its own through it."""
    living = optimizer()
    if living is not None and output.requires_grad and module.weight.requires_grad:
        accumulation = get_gradient_edge(module.weight).node
        output.register_hook(partial(_read, optimizer, module, inputs[0], accumulation))


def _read(optimizer: weakref.ref[DGD], module: nn.Linear, x: Tensor, accumulation: Node, gradient: Tensor) -> None:
    living = optimizer()
    if living is not None and torch._C._will_engine_execute_node(accumulation):
        living.read(module, x)
