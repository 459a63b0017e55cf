"""What the host may ask of a tensor."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def may_be(x: Tensor, holds: Callable[[int], bool]) -> bool:
    """`registry.may_hold` of `holds` of each of a row's numbers `x` `[B]`, of which a CPU's are in Python's hands at
    once: comparing them as tensors would cost more than what is decided."""
    return x.device.type != "cpu" or any(map(holds, x.tolist()))
