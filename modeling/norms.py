"""The norms of the models' blocks."""

from __future__ import annotations

from torch import Tensor, nn

from memzoo.kernels.rms_norm import rms_norm


class RMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * weight`; see `memzoo.kernels.rms_norm`."""

    weight: nn.Parameter
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
