"""Triton kernels without a GPU: their numbers in the interpreter, their code from the ahead-of-time compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from memzoo.kernels import registry
from memzoo.kernels.registry import Problem, explain
from memzoo.kernels.short_conv import OP as SHORT_CONV
from memzoo.kernels.short_conv import make_inputs, short_conv

triton = pytest.importorskip("triton")
import scripts  # noqa: E402

TESTS = Path(__file__).resolve().parent
OPS = ["short_conv"]
pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="an interpreted kernel is not compiled; unset TRITON_INTERPRET"
)


@pytest.fixture(scope="module")
def resources() -> ModuleType:
    return scripts.load("benchmarks/triton_resources.py")


@pytest.mark.slow
@pytest.mark.parametrize("op", [*OPS, "model"])
def test_parity_in_the_interpreter(op: str) -> None:
    """`triton_parity.py` in a process with TRITON_INTERPRET=1."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "triton_parity.py", "-k", op]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_within_the_chip(op: str, target: str, resources: ModuleType) -> None:
    """Without spills, within the shared memory of the smallest chip of the class, and with int64 offsets."""
    for launch in resources.launches(op, torch.bfloat16):
        kernel = resources.compiled(launch, target)
        name = launch.kernel.__name__
        used = resources.resources(kernel)
        assert used["spilled"] == 0, (name, used)
        assert used["shared"] <= (64 if target == "gfx942" else 99) * 1024, (name, used)
        assert not narrow_offsets(kernel.asm["ttir"]), name


def narrow_offsets(ir: str) -> list[str]:
    """Steps from a pointer by 32-bit offsets that are no constants of the source."""
    steps = re.findall(r"(tt\.addptr %\S+, (%\S+) : .*i32)", ir)
    constants = set(re.findall(r"(%\S+) = arith\.constant", ir))
    return [step for step, offset in steps if offset not in constants]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("sizes", [{"batch": 1, "tokens": 1 << 20}, {"batch": 70_000, "tokens": 1}], ids=str)
def test_grids_fit_long_and_many_sequences(op: str, sizes: dict[str, int], resources: ModuleType) -> None:
    for launch in resources.launches(op, torch.bfloat16, **sizes):
        assert 0 < launch.programs < 2**31


def test_a_grid_too_long_is_refused(resources: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected at most 2147483647 programs"):
        resources.launches("short_conv", torch.bfloat16, batch=1 << 16, tokens=1 << 20, channels=1 << 10)


def test_tensors_on_a_cpu_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="'triton' was asked for but cannot compute .* needs a GPU"):
        short_conv(**make_inputs(dtype=torch.float32), backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # too late: triton has been imported
    with pytest.raises(ValueError, match="expected tensors on a GPU, got cpu. Set TRITON_INTERPRET=1 before"):
        short_conv(**make_inputs(dtype=torch.float32), backend="triton")
    with pytest.raises(ValueError, match="computes float32 and bfloat16"):
        short_conv(**make_inputs(dtype=torch.float64), backend="triton")


def test_a_gpu_takes_triton_by_itself() -> None:
    """Whether or not triton is installed: a choice that depended on it would change results in silence."""
    assert explain(SHORT_CONV, Problem("cuda", "torch.bfloat16"))["triton"] is None
    assert SHORT_CONV.names()[0] == "triton"


def test_without_triton_asking_for_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SHORT_CONV.backends[0].entry
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [n for n in sys.modules if n.startswith("memzoo.kernels") and "triton" in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(registry, "_loaded", dict[str, Any]())
    with pytest.raises(ImportError, match="expected the package triton, which is not installed. Install it"):
        registry.select(SHORT_CONV, Problem("cuda", "torch.bfloat16"), "triton")
    assert entry not in registry._loaded
