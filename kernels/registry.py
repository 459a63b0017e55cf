"""Which implementation of a recurrence runs, and why.

An `Op` is a recurrence with one signature and several `Backend`s. `select` obeys an explicit wish or raises with the
reason; `"auto"` takes the first backend of the op's table (fastest first) that supports the tensors at hand. The choice
looks at the tensors' device, dtype and shape, never at what can be imported.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs its kernels on CPU tensors, one operation after another; triton reads it when it is imported."""


class Problem(NamedTuple):
    """What a backend is asked to compute.

    Args:
        device: device type of the tensors (`"cpu"`, `"cuda"`, ...).
        dtype: dtype of the inputs, as `str(tensor.dtype)`.
        sizes: the op's sizes by name, such as `{"T": 128, "K": 64}`.
        options: the op's options by name, such as `{"activation": "gelu"}`.
    """

    device: str
    dtype: str
    sizes: Mapping[str, int] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})


def _supports_anything(problem: Problem) -> str | None:
    return None


def triton_refuses(problem: Problem) -> str | None:
    """Why no Triton kernel computes the problem, of what holds for all of them. It does not import triton: whether it
    is there is no matter of choice, and a GPU without it is told so by `select`."""
    if problem.device != "cuda" and not (INTERPRETED and problem.device == "cpu"):
        return f"needs a GPU (or TRITON_INTERPRET=1 from the start of the process), the tensors are on {problem.device}"
    if not {problem.dtype, problem.options.get("state", "torch.float32")} <= {"torch.float32", "torch.bfloat16"}:
        return "computes float32 and bfloat16 inputs on a float32 state"
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation.

    Args:
        name: `"reference"`, `"chunked"`, `"triton"`, ...
        entry: `"package.module:function"`, imported when the backend is first chosen.
        supports: returns `None` when the backend can compute the problem, else the reason why it cannot.
    """

    name: str
    entry: str
    supports: Callable[[Problem], str | None] = _supports_anything


@dataclass(frozen=True)
class Op:
    """A recurrence and its implementations, fastest first."""

    name: str
    backends: tuple[Backend, ...]

    def names(self) -> list[str]:
        return [backend.name for backend in self.backends]


def explain(op: Op, problem: Problem) -> dict[str, str | None]:
    """The backends of `op`, fastest first, each with the reason why it refuses `problem` (`None`: it accepts)."""
    return {backend.name: backend.supports(problem) for backend in op.backends}


def select(op: Op, problem: Problem, wanted: str = "auto") -> Callable[..., Any]:
    """The function that computes `problem`.

    Raises:
        ValueError: `wanted` names no backend of `op`, or one that cannot compute `problem`.
    """
    if wanted == "auto":
        for backend in op.backends:
            reason = backend.supports(problem)
            if reason is None:
                return _load(backend.entry)
            if not torch.compiler.is_compiling():
                _log_once(f"{op.name}: backend '{backend.name}' is not used: {reason}")
        raise ValueError(f"{op.name}: no backend can compute {problem}; reasons: {explain(op, problem)}.")
    for backend in op.backends:
        if backend.name == wanted:
            reason = backend.supports(problem)
            if reason is None:
                return _load(backend.entry)
            raise ValueError(
                f"{op.name}: backend {wanted!r} was asked for but cannot compute {problem}: {reason}. "
                "Use kernel_backend='auto' to take the fastest one that can."
            )
    raise ValueError(f"{op.name}: unknown kernel_backend {wanted!r}; expected 'auto' or one of {op.names()}.")


_chosen: dict[tuple[Any, ...], Callable[..., Any]] = {}
KINDS = 1 << 10


def chosen(kind: tuple[Any, ...], choose: Callable[..., Callable[..., Any]], *args: Any) -> Callable[..., Any]:
    """`choose(*args)`, which checks a call and selects its backend, once for each kind of call: on a CPU that costs a
    single token as much as its arithmetic.

    Args:
        kind: all that `choose` looks at: the op's name, shapes, dtypes, the device's type, options.
    """
    if torch.compiler.is_compiling():
        return choose(*args)
    try:
        compute = _chosen.get(kind)
    except TypeError:  # a tracer's symbolic sizes, or an option of no known kind
        return choose(*args)
    if compute is None:
        compute = choose(*args)
        if len(_chosen) >= KINDS:
            _chosen.clear()
        _chosen[kind] = compute
    return compute


_loaded: dict[str, Callable[..., Any]] = {}  # a dict, since torch.compile does not see through `functools.cache`


def _load(entry: str) -> Callable[..., Any]:
    if entry not in _loaded:
        module, _, function = entry.partition(":")
        try:
            _loaded[entry] = getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ImportError(
                f"{entry}: expected the package triton, which is not installed. Install it (`pip install triton`), or "
                "choose kernel_backend='chunked'."
            ) from error
    return _loaded[entry]


@cache
def _log_once(message: str) -> None:
    logger.info(message)


def expect(op: Op, ok: bool, what: str, expected: object, got: object) -> None:
    """Raise a ValueError that names the op, what is wrong, what it should be and what it is, unless `ok`."""
    if not ok:
        expected, got = (tuple(x) if isinstance(x, torch.Size) else x for x in (expected, got))
        raise ValueError(f"{op.name}: {what}: expected {expected}, got {got}.")


def as_given(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which operations on the device keep their inputs' dtypes, whatever autocast says around it."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`; nothing where nothing is to do, which at a single token costs less than asking torch."""
    return x if x.dtype == dtype else x.to(dtype)


def may_hold(condition: Tensor) -> bool:
    """Whether any of `condition` holds: of a CPU's tensor the answer, of another device's yes, since the host would
    wait for the answer, and so in a graph that is being made. So what it guards may save a CPU work, and must be right
    where the condition does not hold."""
    return condition.device.type != "cpu" or torch.compiler.is_compiling() or bool(condition.any())


def known(x: Tensor) -> list[int] | None:
    """The numbers `[B]` where the host has them without waiting: on a CPU, but for a graph that is being made."""
    return x.tolist() if x.device.type == "cpu" and not torch.compiler.is_compiling() else None


def may_be(x: Tensor, holds: Callable[[int], bool]) -> bool:
    """`may_hold` of `holds` of each of a row's numbers `x` `[B]`, of which a CPU's are in Python's hands at once:
    comparing them as tensors would cost more than what is decided."""
    found = known(x)
    return found is None or any(map(holds, found))


def may_write(x: Tensor) -> bool:
    """Whether in-place operations may change it: what was made under `torch.inference_mode` is changed there only. A
    graph of torch.compile cannot ask, and raises where it may not."""
    if torch.compiler.is_compiling():
        return True
    return not x.is_inference() or torch.is_inference_mode_enabled()


def writable(x: Tensor) -> Tensor:
    """The tensor or a copy, of what a graph needs, rows share, or only `torch.inference_mode` may write to."""
    may = x.is_contiguous() and not x.requires_grad and may_write(x)
    return x if may else x.clone(memory_format=torch.contiguous_format)


_constants: dict[Any, Tensor] = {}


def constant(values: tuple[float, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers as a tensor where `like` is, made once and not to be written to: a copy to a device at every token
    would stall it, and no CUDA graph may hold one."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=like.device)
    key = values, dtype, like.device
    if type(like) is Tensor and key in _constants:
        return _constants[key]
    with torch.inference_mode(False):  # whatever the mode of the first caller
        made = torch.tensor(values, dtype=dtype, device=like.device)
    if type(made) is Tensor:  # not a tracer's
        _constants[key] = made
    return made


def mixed_precision(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a backend that takes inputs in their own dtypes and sums in that of the state; others get them cast."""
    compute.is_mixed_precision = True  # type: ignore[attr-defined]
    return compute


def caster(compute: Callable[..., Any], dtype: torch.dtype) -> Callable[[Tensor | None], Any]:
    """What the inputs of a backend go through: `cast` to the dtype of the state, or nothing."""
    if getattr(compute, "is_mixed_precision", False):
        return lambda x: x
    return lambda x: None if x is None else cast(x, dtype)
