"""The Triton kernels of the ops on a GPU, beside the chip's roofline and flash-linear-attention: a part of `run.py`.

Each work is checked before it is timed: its outputs against the chunked backend in float32, and the peer's against its
own. A time is the median of several, each between two events, with the second-level cache overwritten before it. The
roofline is the longer of two times: of the bytes that the op's docstring counts at the chip's bandwidth, and of its
operations at the rate of dense bfloat16 products. No GPU run has been made yet.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memzoo.kernels import deep_memory as deep
from memzoo.kernels import delta_rule as delta
from memzoo.kernels import linear_attention as linear
from memzoo.kernels import short_conv as conv
from memzoo.kernels.deep_memory import deep_memory
from memzoo.kernels.delta_rule import delta_rule
from memzoo.kernels.linear_attention import linear_attention
from memzoo.kernels.short_conv import short_conv

PEAKS = {"H100": (3.35e12, 989e12), "H200": (4.8e12, 989e12), "A100": (2.04e12, 312e12), "B200": (8.0e12, 2250e12)}
"""Bytes and dense bfloat16 operations per second, of the data sheets of the SXM parts, by a part of a device's name."""
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


class Work(NamedTuple):
    """An op forward: how to run it, and what it costs at least."""

    name: str
    rule: Callable[..., tuple[Tensor, Any]]
    arguments: dict[str, Any]
    bytes: float
    operations: float
    rival: Callable[[dict[str, Any]], Tensor] | None = None
    """The output of the same computation by flash-linear-attention."""


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
    attention_bytes = total * size * (3 * key + 3 * value + 2 * key * value / chunk)
    attention_work = total * (4 * key * value + 2 * chunk * (key + value))
    delta_bytes = total * size * (8 * key + 6 * value + 2 * key * value / chunk)
    delta_work = total * (6 * key * value + 2 * chunk * (3 * key + 2 * value) + 3 * chunk**2)
    weights = 2 * key * hidden
    deep_bytes = total * (16 * weights / chunk + 2 * size * (2 * key + 2 * hidden))
    deep_work = total * (22 * weights + 12 * chunk * hidden)
    tokens = shape.batch * shape.tokens * channels
    gated = {**rule, "erase_key": None, "erase_after_decay": True}
    plain = {**rule, "erase_key": None, "log_retention": None}
    comba = {**rule, "erase_key": 0.5 * rule["key"]}
    return [
        Work("short convolution", short_conv, convolution, 2 * size * tokens, 8 * tokens),
        Work("RetNet", linear_attention, attention, attention_bytes, attention_work, retention_of_fla),
        Work("DeltaNet", delta_rule, plain, delta_bytes, delta_work, delta_rule_of_fla),
        Work("Gated DeltaNet", delta_rule, gated, delta_bytes, delta_work, gated_delta_rule_of_fla),
        Work("Comba", delta_rule, comba, delta_bytes, delta_work, comba_of_fla),
        Work(
            "deep memory", deep_memory, {**placed(memory), "state": state, "chunk_size": chunk}, deep_bytes, deep_work
        ),
    ]


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
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


def checked(name: str, actual: Tensor, expected: Tensor) -> float:
    found = error(actual, expected)
    if not found <= BOUND:
        raise ValueError(f"{name}: expected an error of at most {BOUND:.1e} before it is timed, got {found:.1e}.")
    return found


def measured(work: Work, backend: str, timer: Timer, rounds: int) -> dict[str, Any]:
    """Checked, then timed, and so its peer where it is installed.

    Raises:
        ValueError: the kernels, or the peer's, compute something else.
    """

    def ours() -> Tensor:
        return work.rule(**work.arguments, backend=backend)[0]

    def median(run: Callable[[], object]) -> float:
        run()
        return statistics.median(timer(run) for _ in range(rounds))

    with torch.no_grad():
        wide = {n: x.float() if isinstance(x, Tensor) else x for n, x in work.arguments.items()}
        want = work.rule(**wide, backend="chunked")[0]
        row = {"work": work.name, "error": checked(work.name, ours(), want), "seconds": median(ours)}
        if work.rival is not None and importlib.util.find_spec("fla"):
            rival = work.rival
            row["rival_error"] = checked(f"{work.name} by flash-linear-attention", rival(work.arguments), want)
            row["rival_seconds"] = median(lambda: rival(work.arguments))
    return {**row, "bytes": work.bytes, "operations": work.operations}


def with_roofline(row: dict[str, Any], chip: str) -> dict[str, Any]:
    """The fraction of the roofline that a row's time is; of a chip that is not in `PEAKS`, none."""
    peak = next((peak for name, peak in PEAKS.items() if name in chip), None)
    if peak is None:
        return row
    return {**row, "roofline_fraction": max(row["bytes"] / peak[0], row["operations"] / peak[1]) / row["seconds"]}


def measure(
    timer: Timer, chip: str, device: str = "cuda", backend: str = "triton", shape: Shape = DEFAULT, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """A row per work, at one shape."""
    return [with_roofline(measured(work, backend, timer, rounds), chip) for work in works(shape, device)]


def on_gpu(device: str) -> list[dict[str, Any]]:
    """All of them on the GPU that there is."""
    timer = device_timer(device)
    return measure(timer, torch.cuda.get_device_name(), device)


def lines(rows: Sequence[dict[str, Any]]) -> str:
    """As text."""
    found = []
    for row in rows:
        text = f"{row['work']:18} {1e6 * row['seconds']:9.1f} us"
        if "roofline_fraction" in row:
            text += f"  {row['roofline_fraction']:4.0%} of the roofline"
        if "rival_seconds" in row:
            text += f"  {row['rival_seconds'] / row['seconds']:.2f} times flash-linear-attention's speed"
        found.append(text)
    return "\n".join(found)
