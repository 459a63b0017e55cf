"""The Triton kernels of the ops on a GPU, beside the chip's roofline and flash-linear-attention: a part of `run.py`.

Forward and backward are each checked before they are timed: outputs, and the gradient of every tensor that is given,
against the chunked backend in float32, the peer's as well as ours. A time is the median of several, each between two
events, with the second-level cache overwritten before it. The roofline is the longer of two times: of the bytes that
the op's docstring counts at the chip's bandwidth, and of its operations at the rate of dense bfloat16 products, or of
float32's where the op has no others. No GPU run has been made yet.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from memzoo.kernels import deep_memory as deep
from memzoo.kernels import delta_rule as delta
from memzoo.kernels import linear_attention as linear
from memzoo.kernels import short_conv as conv
from memzoo.kernels.addresses import addresses
from memzoo.kernels.addresses import make_inputs as make_numbers
from memzoo.kernels.deep_memory import deep_memory
from memzoo.kernels.delta_rule import delta_rule
from memzoo.kernels.gates import Gate, gates
from memzoo.kernels.gates import make_inputs as make_logits
from memzoo.kernels.linear_attention import linear_attention
from memzoo.kernels.newton_schulz import make_inputs as make_matrices
from memzoo.kernels.newton_schulz import newton_schulz
from memzoo.kernels.norm_gate import make_inputs as make_branches
from memzoo.kernels.norm_gate import norm_gate
from memzoo.kernels.rotary import make_inputs as make_angles
from memzoo.kernels.rotary import rotary
from memzoo.kernels.short_conv import short_conv


class Peak(NamedTuple):
    """Of the data sheet of an SXM part."""

    bytes: float
    """Per second."""
    bfloat16: float
    """Operations per second of dense products."""
    float32: float | None
    """The same on the plain arithmetic units; `None` where no sheet at hand says so."""


PEAKS = {
    "H100": Peak(3.35e12, 989e12, 67e12),
    "H200": Peak(4.8e12, 989e12, 67e12),
    "A100": Peak(2.04e12, 312e12, 19.5e12),
    "B200": Peak(8.0e12, 2250e12, None),
}
"""By a part of a device's name."""
BOUND = 16 * 2**-8
"""Of an error relative to the largest value: sixteen roundings to bfloat16, one after another."""
ROUNDS = 20
Timer = Callable[[Callable[[], object]], float]
"""Seconds of a work."""


class Shape(NamedTuple):
    """Heads as those of a 170M model."""

    batch: int = 8
    tokens: int = 2048
    heads: int = 16
    key_dim: int = 48
    value_dim: int = 96

    @property
    def total(self) -> int:
        """Tokens of all rows and heads."""
        return self.batch * self.tokens * self.heads


DEFAULT = Shape()


class Cost(NamedTuple):
    """What a pass costs at least."""

    bytes: float
    operations: float
    is_float32: bool = False
    """Whether no tensor core takes part."""


class Work(NamedTuple):
    """An op: how to run it, and what both passes cost."""

    name: str
    rule: Callable[..., Any]
    """Gives an output, or an output and a state; the output is a tensor, or several."""
    arguments: dict[str, Any]
    forward: Cost
    backward: Cost
    rival: Callable[[dict[str, Any]], Tensor] | None = None
    """The output of the same computation by flash-linear-attention."""

    def outputs(self, arguments: dict[str, Any], backend: str) -> list[Tensor]:
        found = self.rule(**arguments, backend=backend)
        return pytree.tree_leaves(found if isinstance(found, Tensor) else found[0])


def works(shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Work]:
    """The recurrences of the zoo at a shape."""
    key, value, total, size = shape.key_dim, shape.value_dim, shape.total, torch.finfo(dtype).bits // 8
    sizes = {"batch": shape.batch, "tokens": shape.tokens, "heads": shape.heads}
    chunk, hidden = 64, 4 * key

    def placed(made: dict[str, Any]) -> dict[str, Any]:
        """Sequences in `dtype`; gates and states in float32."""
        wide = ("log_retention", "log_momentum", "strength", "step_size", "state")
        return {
            n: x.to(device, torch.float32 if n in wide else dtype) if isinstance(x, Tensor) else x
            for n, x in made.items()
        }

    matrix = {**sizes, "key_dim": key, "value_dim": value, "dtype": torch.float32}
    attention, rule = placed(linear.make_inputs(**matrix)), placed(delta.make_inputs(**matrix))
    memory: dict[str, Any] = dict(
        deep.make_inputs(**sizes, key_dim=key, hidden=(hidden,), chunk_size=chunk, dtype=torch.float32)
    )
    state = memory.pop("state")
    state = type(state)(*(tuple(y.to(device) for y in x) if isinstance(x, tuple) else x.to(device) for x in state))
    channels = shape.heads * (2 * key + value)
    convolution = placed(conv.make_inputs(shape.batch, shape.tokens, channels, 4, dtype=torch.float32))
    branches = placed(make_branches(shape.batch, tokens=shape.tokens, heads=shape.heads, width=value))
    kinds = Gate("share", 0.1), Gate("log_share"), Gate("log_rest")
    logits = placed(make_logits(*kinds, **sizes, dtype=torch.float32))
    angles = placed(make_angles(shape.batch, shape.tokens, (2, shape.heads), key, dtype=torch.float32))
    numbers = placed(make_numbers(**sizes, key_dim=key, dtype=torch.float32))
    matrices = {"x": make_matrices(shape.batch * shape.heads, rows=key, columns=hidden, dtype=torch.float32)["x"]}
    attention_cost = Cost(
        total * size * (3 * key + 3 * value + 2 * key * value / chunk),
        total * (4 * key * value + 2 * chunk * (key + value)),
    )
    attention_back = total * (12 * key * value + chunk * (6 * key + 4 * value))
    delta_cost = Cost(
        total * size * (8 * key + 6 * value + 2 * key * value / chunk),
        total * (6 * key * value + 2 * chunk * (3 * key + 2 * value) + 3 * chunk**2),
    )
    weights = 2 * key * hidden
    deep_cost = Cost(
        total * (16 * weights / chunk + 2 * size * (2 * key + 2 * hidden)),
        total * (22 * weights + 12 * chunk * hidden),
    )
    tokens, elements, count = shape.batch * shape.tokens * channels, total * value, shape.batch * shape.heads
    vectors, count_of_logits = 2 * total * key, 3 * total
    entries = count * key * hidden
    gated = {**rule, "erase_key": None, "erase_after_decay": True}
    plain = {**rule, "erase_key": None, "log_retention": None}
    comba = {**rule, "erase_key": 0.5 * rule["key"]}
    return [
        Work(
            "short convolution",
            partial(short_conv, activation="silu", vectors=conv.Vectors(shape.heads, key)),
            convolution,
            Cost(2 * size * tokens + (4 - size) * vectors, 8 * tokens + 4 * vectors),
            Cost(3 * size * tokens + (4 - size) * vectors, 48 * tokens + 12 * vectors),
        ),
        Work(
            "gates",
            lambda **x: (gates(**x),),
            logits,
            Cost((size + 4) * count_of_logits, 20 * count_of_logits, True),
            Cost((2 * size + 4) * count_of_logits, 20 * count_of_logits, True),
        ),
        Work(
            "rotary embedding",
            lambda **x: (rotary(**x, **angles),),
            {"x": angles.pop("x")},
            Cost(2 * size * vectors, 3 * vectors, True),
            Cost(2 * size * vectors, 3 * vectors, True),
        ),
        Work(
            "Comba's addresses",
            lambda **x: (addresses(**x),),
            numbers,
            Cost(2 * size * vectors, 5 * vectors, True),
            Cost(4 * size * vectors, 15 * vectors, True),
        ),
        Work(
            "norm and gate",
            partial(norm_gate, activation="silu", eps=1e-6),
            branches,
            Cost(3 * size * elements, 10 * elements),
            Cost(5 * size * elements, 25 * elements),
        ),
        Work(
            "Newton-Schulz",
            newton_schulz,
            {"x": matrices["x"].to(device)},
            Cost(12 * entries, 4 * key * entries + 34 * count * key**3, True),
            Cost(24 * entries + 120 * count * key**2, 8 * key * entries + 84 * count * key**3, True),
        ),
        Work(
            "RetNet",
            linear_attention,
            attention,
            attention_cost,
            Cost(3 * attention_cost.bytes, attention_back),
            retention_of_fla,
        ),
        Work("DeltaNet", delta_rule, plain, delta_cost, _thrice(delta_cost), delta_rule_of_fla),
        Work("Gated DeltaNet", delta_rule, gated, delta_cost, _thrice(delta_cost), gated_delta_rule_of_fla),
        Work("Comba", delta_rule, comba, delta_cost, _thrice(delta_cost), comba_of_fla),
        Work(
            "deep memory",
            deep_memory,
            {**placed(memory), "state": state, "chunk_size": chunk},
            deep_cost,
            _thrice(deep_cost),
        ),
    ]


def _thrice(cost: Cost) -> Cost:
    """What the docstrings say of most backwards."""
    return Cost(3 * cost.bytes, 3 * cost.operations)


def retention_of_fla(x: dict[str, Any]) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla  # noqa: PLC0415  # may not be installed

    key, value = x["key"][:, :, 0], x["value"][:, :, 0]
    gate, state = x["log_retention"], x["state"]
    return chunk_simple_gla(x["query"], key, value, g=gate, scale=1.0, initial_state=state, output_final_state=True)[0]


def delta_rule_of_fla(x: dict[str, Any]) -> Tensor:
    from fla.ops.delta_rule import chunk_delta_rule  # noqa: PLC0415

    given = x["query"], x["key"], x["value"], x["strength"]
    return chunk_delta_rule(*given, scale=1.0, initial_state=x["state"], output_final_state=True)[0]


def gated_delta_rule_of_fla(x: dict[str, Any]) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: PLC0415

    given = x["query"], x["key"], x["value"], x["log_retention"], x["strength"]
    return chunk_gated_delta_rule(*given, scale=1.0, initial_state=x["state"], output_final_state=True)[0]


def comba_of_fla(x: dict[str, Any]) -> Tensor:
    from fla.ops.comba import chunk_comba  # noqa: PLC0415

    given = {"q": x["query"], "k": x["key"], "p": x["erase_key"], "v": x["value"]}
    gates = {"g": x["log_retention"], "beta": x["strength"], "initial_state": x["state"]}
    return chunk_comba(**given, **gates, scale=1.0, output_final_state=True)[0]


def device_timer(device: str) -> Timer:
    """Between two events on a GPU, after its second-level cache was overwritten.

    Raises:
        ValueError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            f"kernels: expected a GPU that torch {torch.__version__} can use, got none. Install a torch built for the "
            "GPU, or run with --device cpu, which times models and no kernels."
        )
    scratch = torch.empty(1 << 28, dtype=torch.int8, device=device)

    def seconds(work: Callable[[], object]) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1000

    return seconds


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value."""
    actual, expected = actual.detach().float(), expected.detach().float()
    return float((actual - expected).abs().max() / expected.abs().max())


def checked(name: str, actual: Tensor, expected: Tensor) -> float:
    found = error(actual, expected)
    if not found <= BOUND:
        raise ValueError(f"{name}: expected an error of at most {BOUND:.1e} before it is timed, got {found:.1e}.")
    return found


class Passes:
    """Both passes of an op on the same numbers.

    Args:
        compute: the op's outputs from its arguments.
        arguments: tensors, of which the gradients are taken, and others.
    """

    def __init__(self, compute: Callable[[dict[str, Any]], list[Tensor]], arguments: dict[str, Any]) -> None:
        self.compute, self.arguments = compute, arguments
        leaves = {n: x.clone().requires_grad_() for n, x in arguments.items() if isinstance(x, Tensor)}
        self.names, self.leaves = list(leaves), list(leaves.values())
        with torch.enable_grad():
            self.outputs = compute({**arguments, **leaves})
        generator = torch.Generator().manual_seed(0)
        self.d_outputs = [torch.randn(y.shape, generator=generator).to(y) for y in self.outputs]

    @torch.no_grad()
    def forward(self) -> list[Tensor]:
        return self.compute(self.arguments)

    def backward(self) -> Sequence[Tensor]:
        """The gradients, again and again from the one graph."""
        return torch.autograd.grad(self.outputs, self.leaves, self.d_outputs, retain_graph=True, materialize_grads=True)

    def check(self, name: str, want: Passes) -> dict[str, float]:
        """The errors of both passes.

        Raises:
            ValueError: one is too large.
        """
        gradients = zip(self.names, self.backward(), want.backward(), strict=True)
        both = (zip(y, want.outputs, strict=True) for y in (self.forward(), self.outputs))
        found = {"forward": max(checked(name, got, w) for pairs in both for got, w in pairs)}
        return {**found, "backward": max(checked(f"{name}: gradient of {n}", got, w) for n, got, w in gradients)}


class Checked(NamedTuple):
    """A work that may be timed."""

    errors: dict[str, float]
    """Of each pass."""
    passes: Passes
    rival_errors: dict[str, float]
    rival: Passes | None


def prepared(work: Work, backend: str) -> Checked:
    """Both passes, checked, and the peer's where it is installed.

    Raises:
        ValueError: the kernels, or the peer's, compute something else.
    """
    wide = {n: x.float() if isinstance(x, Tensor) else x for n, x in work.arguments.items()}
    want = Passes(lambda x: work.outputs(x, "chunked"), wide)
    ours = Passes(lambda x: work.outputs(x, backend), work.arguments)
    errors = ours.check(work.name, want)
    if work.rival is None or not importlib.util.find_spec("fla"):
        return Checked(errors, ours, {}, None)
    by_fla = work.rival
    rival = Passes(lambda x: [by_fla(x)], work.arguments)
    return Checked(errors, ours, rival.check(f"{work.name} by flash-linear-attention", want), rival)


def measured(work: Work, backend: str, timer: Timer, rounds: int) -> list[dict[str, Any]]:
    """A row of each pass: checked, then timed."""

    def median(run: Callable[[], object]) -> float:
        run()
        return statistics.median(timer(run) for _ in range(rounds))

    errors, ours, rival_errors, rival = prepared(work, backend)
    rows = []
    for name, cost in (("forward", work.forward), ("backward", work.backward)):
        row = {"work": work.name, "pass": name, "error": errors[name], "seconds": median(getattr(ours, name))}
        if rival is not None:
            row |= {"rival_error": rival_errors[name], "rival_seconds": median(getattr(rival, name))}
        rows.append({**row, **cost._asdict()})
    return rows


def with_roofline(row: dict[str, Any], chip: str) -> dict[str, Any]:
    """The fraction of the roofline that a row's time is; none where `PEAKS` does not know the chip's."""
    peak = next((peak for name, peak in PEAKS.items() if name in chip), None)
    rate = None if peak is None else peak.float32 if row["is_float32"] else peak.bfloat16
    if peak is None or rate is None:
        return row
    return {**row, "roofline_fraction": max(row["bytes"] / peak.bytes, row["operations"] / rate) / row["seconds"]}


def measure(
    timer: Timer, chip: str, device: str = "cuda", backend: str = "triton", shape: Shape = DEFAULT, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """A row per work and pass, at one shape."""
    rows = (row for work in works(shape, device) for row in measured(work, backend, timer, rounds))
    return [with_roofline(row, chip) for row in rows]


def on_gpu(device: str) -> list[dict[str, Any]]:
    """All of them on the GPU that there is."""
    timer = device_timer(device)
    return measure(timer, torch.cuda.get_device_name(), device)


def lines(rows: Sequence[dict[str, Any]]) -> str:
    """As text."""
    found = []
    for row in rows:
        text = f"{row['work']:18} {row['pass']:9} {1e6 * row['seconds']:9.1f} us"
        if "roofline_fraction" in row:
            text += f"  {row['roofline_fraction']:4.0%} of the roofline"
        if "rival_seconds" in row:
            text += f"  {row['rival_seconds'] / row['seconds']:.2f} times flash-linear-attention's speed"
        found.append(text)
    return "\n".join(found)
