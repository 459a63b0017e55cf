"""Numbers so small that a CPU takes many times as long for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.bmm.default: 0, aten.baddbmm.default: 1, aten.baddbmm_.default: 1}
"""Batched matrix products, and where their factors begin among the arguments."""


class Subnormal(TorchDispatchMode):
    """Counts batched matrix products and the subnormal numbers that they are given."""

    products = factors = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS:
            self.products += 1
            factors = args[PRODUCTS[function] :]
            self.factors += sum(int(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum()) for x in factors)
        return function(*args, **(kwargs or {}))
