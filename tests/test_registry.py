"""Which backend runs, and what the registry says when none can."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from memzoo.kernels import (
    deep_exponential_memory,
    deep_memory,
    delta_rule,
    exponential_memory,
    gates,
    kv_write,
    monomials,
    newton_schulz,
    norm_gate,
    registry,
    self_modifying,
    short_conv,
)
from memzoo.kernels.registry import Backend, Op, Problem, explain, select

CPU = Problem("cpu", "torch.float32")


def _only_cuda(problem: Problem) -> str | None:
    return None if problem.device == "cuda" else "needs a CUDA device"


def entry(name: str) -> str:
    return f"memzoo.kernels.short_conv.{name}:short_conv"


TWO = Op("toy", (Backend("fast", entry("chunked"), _only_cuda), Backend("slow", entry("reference"))))


@pytest.mark.parametrize(
    "op",
    [
        op.OP
        for op in (
            deep_exponential_memory,
            deep_memory,
            exponential_memory,
            gates,
            kv_write,
            monomials,
            newton_schulz,
            norm_gate,
            self_modifying,
            short_conv,
        )
    ],
    ids=lambda op: op.name,
)
def test_every_entry_can_be_loaded(op: Op) -> None:
    for backend in op.backends:
        assert callable(registry._load(backend.entry))
    assert "reference" in op.names()


def test_auto_takes_the_first_that_supports_the_problem(caplog: pytest.LogCaptureFixture) -> None:
    registry._log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert select(TWO, CPU).__module__.endswith("reference")
        select(TWO, CPU)
    assert [record.message for record in caplog.records] == ["toy: backend 'fast' is not used: needs a CUDA device"]
    assert select(TWO, Problem("cuda", "torch.float32")).__module__.endswith("chunked")


def test_a_wish_is_obeyed_or_refused_with_the_reason() -> None:
    assert select(TWO, CPU, "slow").__module__.endswith("reference")
    with pytest.raises(ValueError, match=r"'fast' was asked for but cannot compute .*: needs a CUDA device"):
        select(TWO, CPU, "fast")
    with pytest.raises(
        ValueError, match=r"unknown kernel_backend 'triton'; expected 'auto' or one of \['fast', 'slow'\]"
    ):
        select(TWO, CPU, "triton")
    with pytest.raises(ValueError, match="no backend can compute"):
        select(Op("toy", TWO.backends[:1]), CPU)


def test_explain_names_every_backend() -> None:
    assert explain(TWO, CPU) == {"fast": "needs a CUDA device", "slow": None}


def test_tracers_with_symbolic_sizes_choose_each_time() -> None:
    """Their sizes have no hash."""
    args = delta_rule.make_inputs()

    def output(*tensors: Tensor) -> Tensor:
        return delta_rule.delta_rule(**dict(zip(args, tensors, strict=True)))[0]

    traced = make_fx(output, tracing_mode="symbolic")(*args.values())
    assert torch.allclose(traced(*args.values()), output(*args.values()))


def test_nothing_of_a_tracer_is_kept() -> None:
    """What is made once, for later calls with tensors that have values."""

    def made() -> Tensor:
        ones = torch.ones(2, dtype=torch.float64)
        return monomials.monomials(torch.ones(1, 1, 2, 7, dtype=torch.float64), [ones, ones])

    with FakeTensorMode():
        assert made().shape == (1, 1, 2, 7 + 28)
    assert type(made()) is Tensor
