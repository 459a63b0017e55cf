"""Triton kernels without a GPU: their numbers in the interpreter, their code from the ahead-of-time compiler."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses import FakeTensorMode

from memzoo.kernels import deep_exponential_memory as deep_exponential
from memzoo.kernels import delta_rule as delta
from memzoo.kernels import exponential_memory as exponential
from memzoo.kernels import linear_attention as linear
from memzoo.kernels import registry
from memzoo.kernels.deep_exponential_memory import deep_exponential_memory
from memzoo.kernels.delta_rule import delta_rule
from memzoo.kernels.exponential_memory import exponential_memory
from memzoo.kernels.linear_attention import linear_attention
from memzoo.kernels.newton_schulz import newton_schulz
from memzoo.kernels.norm_gate import norm_gate
from memzoo.kernels.registry import Problem, explain
from memzoo.kernels.short_conv import OP as SHORT_CONV
from memzoo.kernels.short_conv import make_inputs, short_conv

triton = pytest.importorskip("triton")
import scripts  # noqa: E402

TESTS = Path(__file__).resolve().parent
OPS = [
    "short_conv",
    "linear_attention",
    "delta_rule",
    "deep_memory",
    "newton_schulz",
    "norm_gate",
    "gates",
    "monomials",
    "kv_write",
    "retrieval",
    "rotary",
    "opened",
    "addresses",
    "exponential_memory",
    "deep_exponential_memory",
    "self_modifying",
]
# No products, or products of float32 numbers.
WITHOUT_TENSOR_CORES = tuple(op for op in OPS if op not in ("linear_attention", "delta_rule", "deep_memory"))
IN_FLOAT32 = ("step_kernel", "ends_back_kernel", "momentum_kernel", "recall_kernel")  # of the other ops
pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="an interpreted kernel is not compiled; unset TRITON_INTERPRET"
)


@pytest.fixture(scope="module")
def resources() -> ModuleType:
    return scripts.load("benchmarks/triton_resources.py")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "deep_memory", "not model and not deep_memory"])
def test_parity_in_the_interpreter(part: str) -> None:
    """`triton_parity.py` in processes with TRITON_INTERPRET=1."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "triton_parity.py", "-k", part]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


COMPILED = {
    "short_conv": ("forward_kernel", "gfx942"),
    "linear_attention": ("query_key_gradient_kernel", "sm_80"),
    "delta_rule": ("step_kernel", "sm_100"),
    "deep_memory": ("read_kernel", "sm_90"),
    "gates": ("forward_kernel", "gfx942"),
}
"""Of each op a kernel that the tests compile themselves, each for another target; all of them are in the record."""
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "deep_memory": [
        {"window": 4},
        {"window": 2, "blocks": 4, "taken_up": True},
        {"gated": True, "blocks": 4, "taken_up": True},
        {"gated": True, "blocks": 4, "muon": True},
        {"layers": 1, "blocks": 4, "window": 3, "taken_up": True},
        {"layers": 1},
    ]
}


@pytest.fixture(scope="module")
def record() -> list[dict[str, Any]]:
    return json.loads((scripts.ROOT / "benchmarks/results/triton_resources.json").read_text())["kernels"]


def rows_of(
    record: list[dict[str, Any]], op: str, target: str, resources: ModuleType, dtype: str = "bfloat16"
) -> list[tuple[Any, dict]]:
    """What is started, with its row of the record."""
    found = []
    for launch in resources.launches(op, resources.DTYPES[dtype], target):
        about = resources.identity(op, dtype, target, launch)
        row = resources.recorded_of(about, record)
        assert row is not None, f"not in the record, run benchmarks/triton_resources.py again: {about}"
        found.append((launch, row))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("op", COMPILED)
def test_kernels_compile_to_what_is_recorded(op: str, resources: ModuleType, record: list[dict[str, Any]]) -> None:
    name, target = COMPILED[op]
    *_, (launch, row) = [(x, row) for x, row in rows_of(record, op, target, resources) if row["kernel"] == name]
    found = resources.resources(resources.compiled(launch, target))
    assert found["code"]
    assert found.items() <= row.items()


@pytest.mark.parametrize("op", OPS)
def test_offsets_are_wide(op: str, resources: ModuleType) -> None:
    """Of every kernel, in every variant, in what Triton makes of it before its passes."""
    for sizes in ({}, *VARIANTS.get(op, [])):
        for launch in resources.launches(op, torch.bfloat16, **sizes):
            assert not narrow_offsets(resources.first_form(launch, "sm_90")), launch.kernel.__name__


def test_a_second_compilation_is_read_from_the_cache(
    resources: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *_, cache_hit, **__: hits.append(cache_hit))
    launch = resources.launches("short_conv", torch.bfloat16)[-1]
    first, second = (resources.compiled(launch, "sm_80") for _ in range(2))
    assert hits == [False, True]
    assert first.asm["cubin"] == second.asm["cubin"]


@pytest.mark.parametrize("op", OPS)
def test_kernels_fit_the_chips(op: str, resources: ModuleType, record: list[dict[str, Any]]) -> None:
    """By the record that `benchmarks/triton_resources.py` made of exactly these programs: at the default shapes, heads
    of a 170M model in bfloat16, nothing is spilled, shared memory is what the smallest chip of a class has, matrix
    products are on tensor cores. float32 has no tensor cores, and its spills a bound."""
    units = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "MMA", "gfx942": "v_mfma"}
    for target, dtype in itertools.product(resources.TARGETS, resources.DTYPES):
        for _, row in rows_of(record, op, target, resources, dtype):
            assert row["spilled"] <= SPILLED.get((op, row["kernel"], dtype), {}).get(target, 0), row
            assert row["shared"] <= (64 if target == "gfx942" else 99) * 1024, row
            if dtype == "bfloat16" and op not in WITHOUT_TENSOR_CORES and row["kernel"] not in IN_FLOAT32:
                assert any(units[target] in name and row[name] > 0 for name in row), row


SPILLED: dict[tuple[str, str, str], dict[str, int]] = {
    ("deep_memory", "walk_kernel", "float32"): {"sm_90": 24, "sm_100": 24},
    ("deep_memory", "read_kernel", "float32"): {"sm_80": 368, "sm_90": 264, "sm_100": 400},
    ("deep_memory", "read_back_kernel", "float32"): {"sm_80": 408, "sm_90": 520, "sm_100": 504},
    ("deep_memory", "query_back_kernel", "float32"): {"sm_80": 552, "sm_90": 528, "sm_100": 544},
    ("deep_memory", "walk_back_kernel", "float32"): {"sm_80": 376, "sm_90": 512, "sm_100": 520},
}
"""Bytes a thread; of all other kernels, in both dtypes, none."""


def narrow_offsets(ir: str) -> list[str]:
    """Steps from a pointer by 32-bit offsets that are no constants of the source, or made of such."""
    steps = re.findall(r"(tt\.addptr %\S+, (%\S+) : .*i32)", ir)
    constants = set(re.findall(r"(%\S+) = arith\.constant", ir))
    for made, parts in re.findall(r"(%\S+) = arith\.(?:addi|subi|muli) (%.+?) :", ir):
        if constants.issuperset(re.findall(r"%[^\s,]+", parts)):
            constants.add(made)
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
    with pytest.raises(ValueError, match=r"'triton' was asked for but cannot compute .* needs a GPU"):
        short_conv(**make_inputs(dtype=torch.float32), backend="triton")
    monkeypatch.setattr(registry, "INTERPRETED", True)  # as if set after triton was imported
    with pytest.raises(ValueError, match=r"expected tensors on a GPU, got cpu. Set TRITON_INTERPRET=1 before"):
        short_conv(**make_inputs(dtype=torch.float32), backend="triton")
    with pytest.raises(ValueError, match="computes float32 and bfloat16"):
        short_conv(**make_inputs(dtype=torch.float64), backend="triton")


def test_a_gpu_takes_triton_by_itself() -> None:
    """Whether or not triton is installed: a choice that depended on it would change results in silence."""
    assert explain(SHORT_CONV, Problem("cuda", "torch.bfloat16"))["triton"] is None
    assert SHORT_CONV.names()[0] == "triton"


@pytest.mark.parametrize("rule", [linear_attention, delta_rule], ids=lambda rule: rule.__name__)
def test_compiles_into_one_graph(rule: Callable) -> None:
    """On a CPU with the chunked path; on (fake) GPU tensors, forward: a torch without CUDA has no autograd for them."""
    module = {"linear_attention": linear, "delta_rule": delta}[rule.__name__]
    args = module.make_inputs(tokens=5, dtype=torch.float32)
    wanted = rule(**args)  # first, since a backend that is not loaded yet is an import, which no graph holds
    for got, want in zip(torch.compile(rule, fullgraph=True, backend="eager")(**args), wanted, strict=True):
        assert torch.equal(got, want)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        y, state = rule(**{name: torch.empty(x.shape, device="cuda") for name, x in args.items()})
        # One token, where reading a tensor's values would raise, as it would in a CUDA graph.
        one = module.make_inputs(tokens=1)
        rule(**{name: torch.empty(x.shape, device="cuda") for name, x in one.items()})
    assert (y.shape, state.shape) == (args["query"].shape[:3] + args["state"].shape[3:], args["state"].shape)


@pytest.mark.parametrize("rule", [exponential_memory, deep_exponential_memory], ids=lambda rule: rule.__name__)
def test_exponential_memories_compile_into_one_graph(rule: Callable) -> None:
    """On a CPU as they are, a token with room for it in place; a token on (fake) GPU tensors by Triton."""
    module = {"exponential_memory": exponential, "deep_exponential_memory": deep_exponential}[rule.__name__]
    args = module.make_inputs(tokens=3, window=3, dtype=torch.float32)
    want, state = rule(**args)
    compiled = torch.compile(rule, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**args)[0], want)
    one = {**module.make_inputs(tokens=1, window=3, dtype=torch.float32), "grows": False}
    held = {n: torch.nn.functional.pad(getattr(state, n), (0, 0, 0, 1)) for n in ("keys", "written")}
    with torch.no_grad():
        found = []
        for call in (rule, compiled):
            given = {n: x.clone() for n, x in held.items()}
            y, last = call(**{**one, "state": state._replace(**given)})
            assert all(getattr(last, n).data_ptr() == x.data_ptr() for n, x in given.items())
            found.append((y, *last))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.no_grad(), FakeTensorMode():

        def on_gpu(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device="cuda")

        for grows in (True, False):
            given = pytree.tree_map_only(Tensor, on_gpu, {**one, "state": state._replace(**held), "grows": grows})
            y, last = rule(**given)
            assert y.device.type == "cuda"
            assert (last.keys is given["state"].keys) is not grows


def test_without_triton_asking_for_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SHORT_CONV.backends[0].entry
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [n for n in sys.modules if n.startswith("memzoo.kernels") and "triton" in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(registry._loaded, entry, [])
    with pytest.raises(ImportError, match=r"expected the package triton, which is not installed. Install it"):
        registry.select(SHORT_CONV, Problem("cuda", "torch.bfloat16"), "triton")
    assert not registry._loaded[entry]


def normalized_and_gated(x: Tensor, gate: Tensor, weight: Tensor, backend: str) -> Tensor:
    y = norm_gate(newton_schulz(x, backend=backend), weight, gate, activation="silu", eps=1e-6, backend=backend)
    return norm_gate(y, None, gate, weight, activation="sigmoid", scale=2.0, eps=1e-6, backend=backend)


def test_newton_schulz_and_norm_gate_compile_into_one_graph() -> None:
    """On a CPU as they are; on (fake) GPU tensors by Triton, and nothing of them can be read on the way."""
    args = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.ones(8)
    want = normalized_and_gated(*args, "auto")
    assert torch.equal(torch.compile(normalized_and_gated, fullgraph=True, backend="eager")(*args, "auto"), want)
    with torch.no_grad(), FakeTensorMode():
        y = normalized_and_gated(*(torch.empty(x.shape, device="cuda") for x in args), "triton")
    assert (y.shape, y.device.type) == (want.shape, "cuda")
