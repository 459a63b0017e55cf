"""The deep memories of ATLAS (arXiv 2505.23735): DLA, OmegaNet, ATLAS and ATLAS++."""

from typing import Any

from huggingface_hub.dataclasses import strict

from memzoo.configuration.base import require
from memzoo.configuration.deep_memory import MUON_EVERY, DeepMemoryConfig


@strict
class DLAConfig(DeepMemoryConfig):
    """Deep linear attention (arXiv 2505.23735, Eq 19 and 48-51): a deep memory that learns `-<M(k), v>`.

        M_t = a_t M_{t-1} + l_t d/dM <M(k_t), v_t>

    Deviations: the paper prints the loss without its minus; `memory_depth=1` is gated linear attention. The loss has no
    minimum, so a bound on the gradient and the retention are what keeps the memory finite.
    """

    model_type = "memzoo_dla"
    objective = "dot"

    use_momentum: bool = False
    max_gradient_norm: float | int | None = 1.0


@strict
class OmegaNetConfig(DeepMemoryConfig):
    """OmegaNet (arXiv 2505.23735, Eq 9, 10, 56): each step learns the last c tokens, not the last one.

        M_t = a_t M_{t-1} - l_t d/dM sum_{j<c} g_{t,j} 1/2 |M(phi(k_{t-j})) - v_{t-j}|^2

    Deviations: the window's gates are sigmoids of the current token, one per head and lag, over c, so that the step
    does not grow with the window; c = 1 has none. The size of the window, the feature map inside a deep memory and its
    degree are not published.

    Args:
        window: c, the tokens that each step learns.
        window_halo: whether a window reaches back across the start of its chunk, as Eq 16 needs it. Without, the first
            tokens of a chunk have shorter windows and nothing is computed twice.
        memory: `"mlp"`, or `"gated_mlp"`: `M(x) = x + W_1 (act(W_2 x) * W_3 x)` (Eq 43).
        feature_map: phi of queries and keys: `"identity"`; `"monomials"` up to `feature_degree` (Eq 5 and 22), each
            degree with a learned coefficient; `"powers"`, elementwise, which is not the paper's map but cheap.
        feature_degree: highest degree p.
        feature_dim: width of a learned projection that the monomials of degree 2 and more are formed on, since `D` is
            about `width^p / p!`, and Muon costs the cube of it; `None` for none.
    """

    model_type = "memzoo_omeganet"

    use_momentum: bool = False
    window: int = 4
    window_halo: bool = True
    memory: str = "mlp"
    feature_map: str = "monomials"
    feature_degree: int = 2
    feature_dim: int | None = 4


@strict
class AtlasConfig(OmegaNetConfig):
    """ATLAS (arXiv 2505.23735, Eq 32-33, 57-58): OmegaNet with momentum, made orthogonal by Newton-Schulz (Muon).

        S_t = m_t S_{t-1} - d/dM sum_{j<c} g_{t,j} 1/2 |M(phi(k_{t-j})) - v_{t-j}|^2
        M_t = a_t M_{t-1} + l_t NS(S_t)

    `memory="gated_mlp"` is ATLAS++. Deviations: those of OmegaNet; the step size stands outside of the iteration, which
    would lose it (the paper prints both); `muon_every="chunk"`, the default, is not the paper's: at every token the
    iteration costs about a hundred times as much as the rest of the memory.

    Args:
        use_muon: whether the momentum is made orthogonal; without, `S_t` takes the step size in and is added as it is.
        newton_schulz_steps: iterations; 0 leaves the momentum as it is.
        muon_every: `"token"`: `NS(S_t)` for each token; `"chunk"`: only at each chunk's end, see
            `memzoo.kernels.deep_memory.Muon`.
    """

    model_type = "memzoo_atlas"

    use_momentum: bool = True
    use_muon: bool = True
    newton_schulz_steps: int = 5
    muon_every: str = "chunk"

    @property
    def step_limit(self) -> float:
        """Upper end of the inner step size.

        Muon's steps have one size whatever the error. Where they overshoot, as on a text that the memory knows,
        errors grow from chunk to chunk, and the outer gradients with them: exponentially. The default with Muon once a
        chunk is the largest of the measured sizes (0.002, 0.004, 0.008 at chunks of 8 to 64) that never did.
        """
        if self.max_step_size is None and self.use_muon:
            return 0.002 if self.muon_every == "chunk" else min(0.1, 4.0 / self.chunk_size)
        return super().step_limit

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        require(self.newton_schulz_steps >= 0, self, "newton_schulz_steps", "at least 0")
        require(self.muon_every in MUON_EVERY, self, "muon_every", f"one of {MUON_EVERY}")
