"""All tokens at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from memzoo.kernels.addresses import Addresses
from memzoo.kernels.unit_length import unit_length


def addresses(query: Tensor, key: Tensor, erase: Tensor, correction: Tensor, unit_eps: float | None) -> Addresses:
    """See `memzoo.kernels.addresses.addresses`."""
    erased, correction = torch.sigmoid(erase)[..., None] * key, correction[..., None]
    if unit_eps is None:
        return torch.addcmul(query, correction, key, value=-1), key, erased
    unit = partial(unit_length, eps=unit_eps)
    read = torch.addcmul(query, correction, erased, value=-1)
    # Without an epsilon a unit vector does not see the factor.
    return unit(read), unit(key), unit(erased) if unit_eps else None
