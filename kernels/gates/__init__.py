"""What a memory keeps, carries on and writes, from the logits that a layer makes of each token.

    share:      c sigmoid(x)                    a step size, a strength
    log_share:  log sigmoid(x)                  the log of a momentum's decay
    log_rest:   log (1 - sigmoid(x))            the log of what is kept where sigmoid(x) is forgotten
    decay:      -exp(A) softplus(z + b)         the log of a retention

Source: gates as functions of the token in Titans (arXiv 2501.00663, section 3.1) and ATLAS (arXiv 2505.23735, section
3), which leave the function open; the decay is that of Mamba-2 (arXiv 2405.21060). Deviations: none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memzoo.kernels.registry import Backend, Op, Problem, chosen, select, triton_refuses

OP = Op(
    name="gates",
    backends=(
        Backend("triton", "memzoo.kernels.gates.triton:gates", triton_refuses),
        Backend("chunked", "memzoo.kernels.gates.chunked:gates"),
        Backend("reference", "memzoo.kernels.gates.reference:gates"),
    ),
)
KINDS = ("share", "log_share", "log_rest")


class Gate(NamedTuple):
    """One of the gates of a head; of each of a window's c tokens, where `lags` is c."""

    kind: str
    """One of `KINDS`."""
    scale: float = 1.0
    """c of a share."""
    lags: int = 0

    @property
    def rows(self) -> int:
        """Logits of a head."""
        return max(1, self.lags)


class Decay(NamedTuple):
    """The logits of a retention and its parameters."""

    logit: Tensor
    """z, `[B, T, H]`."""
    log_rate: Tensor
    """A, `[H]`."""
    bias: Tensor
    """b, `[H]`."""


def gates(
    logits: Tensor, kinds: tuple[Gate, ...], decay: Decay | None = None, *, backend: str = "auto"
) -> tuple[Tensor, ...]:
    """The gates of all heads.

    Args:
        logits: `[B, T, G H]`, the H heads of each of G logits side by side, of any floating dtype; a gate with `lags`
            takes as many of them, another one.
        kinds: what they stand for, in their order.
        decay: a retention's; `None` for none.
        backend: `"auto"`, `"triton"`, `"chunked"` or `"reference"`.

    Returns:
        For each gate `[B, T, H]`, or `[B, T, H, c]` with `lags`, and then the decay `[B, T, H]`, in float32 or wider: a
        retention near 1 has no bfloat16 neighbours worth having.

    Raises:
        ValueError: shapes that do not fit, an unknown kind.

    Cost: about 20 operations a logit; it is their launches that count.

    Example:
        >>> kinds = Gate("share", 0.1), Gate("log_rest")
        >>> step_size, log_retention = gates(torch.randn(2, 5, 8), kinds)  # of four heads
    """
    kind = (
        *("gates", logits.shape, None if decay is None else tuple(x.shape for x in decay)),
        *(logits.dtype, logits.device.type, kinds, backend),
    )
    return chosen(kind, _choose, logits, kinds, decay, backend)(logits, kinds, decay)


def _choose(logits: Tensor, kinds: tuple[Gate, ...], decay: Decay | None, backend: str) -> Callable[..., Any]:
    """The backend, after a check of shapes and kinds."""
    rows = sum(gate.rows for gate in kinds)
    for gate in kinds:
        if gate.kind not in KINDS:
            raise ValueError(f"gates: kind: expected one of {[*KINDS]}, got {gate.kind!r}.")
    if logits.ndim != 3 or rows == 0 or logits.shape[-1] % rows != 0 or logits.numel() == 0:
        raise ValueError(f"gates: logits: expected [B, T, {rows} H] for {kinds}, got {tuple(logits.shape)}.")
    heads = logits.shape[-1] // rows
    if decay is not None:
        expected = (*logits.shape[:2], heads), (heads,), (heads,)
        if (got := tuple(tuple(x.shape) for x in decay)) != expected:
            raise ValueError(f"gates: decay: expected {expected}, got {got}.")
    return select(OP, Problem(logits.device.type, str(logits.dtype), {"H": heads}), backend)


def make_inputs(
    *kinds: Gate,
    batch: int = 2,
    tokens: int = 5,
    heads: int = 3,
    decay: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Random inputs for tests and benchmarks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    return {
        "logits": draw(batch, tokens, sum(gate.rows for gate in kinds) * heads),
        "kinds": kinds,
        "decay": Decay(draw(batch, tokens, heads), draw(heads) / 3, draw(heads)) if decay else None,
    }
