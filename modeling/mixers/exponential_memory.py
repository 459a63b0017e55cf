"""The memory on exponential features as a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from memzoo.kernels.exponential_memory import exponential_memory, initial_state
from memzoo.modeling.decoder import Step
from memzoo.modeling.mixers.deep_memory import InnerGates
from memzoo.modeling.mixers.features import unit_length
from memzoo.modeling.mixers.matrix_memory import MatrixMemory, MatrixState


class ExponentialMemory(MatrixMemory):
    """DeepTransformer, SWDT and Dot with a linear memory (ATLAS, arXiv 2505.23735, Eq 25-31).

    Deviations: gates of the current token, one scalar per head and lag, over c, since the paper leaves their form open;
    a token's closed value coordinates stay closed when a later token writes it again.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.lags, self.objective, self.normalizer = config.window, config.objective, config.normalizer
        self.scale = float(self.key_dim**0.5 if config.feature_scale is None else config.feature_scale)
        ranges = [(0.5, 0.5)] * self.lags
        if config.use_retention:
            ranges.append((1e-3, 1e-1))
        self.gates = InnerGates(config.hidden_size, self.heads, ranges)

    def controls(self, x: Tensor) -> tuple[Tensor, ...]:
        """Logits of the step at each lag, and of forgetting."""
        return self.gates.each(x)

    def memorize(
        self, qk: Tensor, v: Tensor, controls: Sequence[Tensor], step: Step, state: MatrixState
    ) -> tuple[Tensor, MatrixState]:
        steps, forget = controls[: self.lags], controls[self.lags :]
        _, v = self.opened(step, [], v)
        if self.normalizer:
            v = F.pad(v, (0, 1), value=1.0)
        q, k = unit_length(qk).unbind(2)
        y, memory = exponential_memory(
            q,
            k,
            v,
            F.logsigmoid(-forget[0]) if forget else None,
            torch.sigmoid(torch.stack(list(steps), dim=-1)) / self.lags,
            state.memory,  # type: ignore[arg-type]
            scale=self.scale,
            objective=self.objective,
            lengths=step.lengths,
            backend=self.backend,
        )
        if self.normalizer:
            y = y[..., :-1] / y[..., -1:].clamp(min=torch.finfo(y.dtype).tiny)
        return y, state._replace(memory=memory)  # type: ignore[arg-type]

    def _begin(self, like: Tensor) -> MatrixState:
        state = super()._begin(like)
        width = self.value_dim + (1 if self.normalizer else 0)
        memory = initial_state(like.shape[0], self.heads, self.key_dim, width, window=self.lags, like=state.memory)
        return state._replace(memory=memory)  # type: ignore[arg-type]
