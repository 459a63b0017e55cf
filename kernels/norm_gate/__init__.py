"""What a memory gives out, normalised and gated.

    y = N(x; w) * c act(N(gate; u)),    N(x; w) = w x / sqrt(mean(x^2) + eps),    N(x; nothing) = x

N is the root-mean-square norm (arXiv 1910.07467, Eq 4) over the last dimension: of each head of a memory alone, under
the gate of RetNet (arXiv 2307.08621, Eq 8) or Titans (arXiv 2501.00663, section 4.4); of whole branches, of which the
second is the gate of the first, in Titans' Eq 25 and 28. Deviations: none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memzoo.kernels.registry import Backend, Op, Problem, chosen, select, triton_refuses

MAX_WIDTH = 8192
"""Widest row that the Triton backend holds in registers; above 4096 its backward spills a few."""
ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def _triton_refuses(problem: Problem) -> str | None:
    if problem.sizes["W"] > MAX_WIDTH:
        return f"holds rows of up to {MAX_WIDTH} on chip, got {problem.sizes['W']}"
    return triton_refuses(problem)


OP = Op(
    name="norm_gate",
    backends=(
        Backend("triton", "memzoo.kernels.norm_gate.triton:norm_gate", _triton_refuses),
        Backend("chunked", "memzoo.kernels.norm_gate.chunked:norm_gate"),
        Backend("reference", "memzoo.kernels.norm_gate.reference:norm_gate"),
    ),
)


def norm_gate(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor,
    gate_weight: Tensor | None = None,
    *,
    activation: str,
    scale: float = 1.0,
    eps: float,
    backend: str = "auto",
) -> Tensor:
    """Normalise and gate.

    Args:
        x: `[..., W]`, of any floating dtype, as are the others.
        weight: of its norm, `[W]`; `None` to take it as it is.
        gate: before its activation, `[..., W]`, or without `gate_weight` also `[..., H W]` for `x` `[..., H, W]`.
        gate_weight: of its norm, `[W]`; `None` to take it as it is.
        activation: `"silu"` or `"sigmoid"`.
        scale: what the gate is multiplied by after its activation, c.
        eps: of the norms.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        In the shape of `gate` and the wider dtype of `x` and `gate`.

    Raises:
        ValueError: shapes that do not fit, an unknown activation.

    Cost: about 10 operations an element forward and 25 backward. It is the passes over memory that count: 3 forward and
    5 backward where all is one kernel.

    Example:
        >>> y = torch.randn(2, 5, 4, 8)  # read-outs of four heads
        >>> norm_gate(y, torch.ones(8), torch.randn(2, 5, 32), activation="silu", eps=1e-6).shape  # [2, 5, 32]
    """
    kind = (
        "norm_gate",
        x.shape,
        None if weight is None else weight.shape,
        gate.shape,
        None if gate_weight is None else gate_weight.shape,
        x.dtype,
        gate.dtype,
        x.device.type,
        activation,
        backend,
    )
    compute = chosen(kind, _choose, x, weight, gate, gate_weight, activation, backend)
    return compute(x, weight, gate, gate_weight, activation, scale, eps)


def _choose(
    x: Tensor, weight: Tensor | None, gate: Tensor, gate_weight: Tensor | None, activation: str, backend: str
) -> Callable[..., Any]:
    """The backend, after a check of shapes and activation."""
    shape, given, width = x.shape, gate.shape, x.shape[-1]
    if given != shape and (gate_weight is not None or given != (*shape[:-2], shape[-2:].numel())):
        raise ValueError(
            f"norm_gate: gate: expected the shape of x, or without gate_weight that with heads joined, got "
            f"{tuple(given)} for {tuple(shape)}."
        )
    for name, w in (("weight", weight), ("gate_weight", gate_weight)):
        if w is not None and w.shape != (width,):
            raise ValueError(f"norm_gate: {name}: expected {(width,)} = [W], got {tuple(w.shape)}.")
    if activation not in ACTIVATION:
        raise ValueError(f"norm_gate: activation: expected one of {[*ACTIVATION]}, got {activation!r}.")
    dtype = x.dtype if x.dtype == gate.dtype else torch.promote_types(x.dtype, gate.dtype)
    return select(OP, Problem(x.device.type, str(dtype), {"W": width}), backend)


def make_inputs(
    *batch: int,
    tokens: int = 5,
    heads: int = 1,
    width: int = 6,
    norm: bool = True,
    gate_norm: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor | None]:
    """Random inputs for tests and benchmarks; the gate's heads are joined."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "x": draw(*batch, tokens, *([heads] if heads > 1 else []), width),
        "weight": 1 + draw(width) / 2 if norm else None,
        "gate": draw(*batch, tokens, heads * width),
        "gate_weight": 1 + draw(width) / 2 if gate_norm else None,
    }
