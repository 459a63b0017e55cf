"""What the Triton backends share: launches, grids, and a record of them for compilation without a GPU.

A kernel has one way to be started, `launch`. Under `recorded` nothing runs: host code that is called with tensors on
the meta device leaves what it would have launched, which is what the ahead-of-time compiler and the tests of the grids
read. So what is compiled and measured is what runs, tile sizes and all, with no second table.

Conventions of every kernel: a grid of one dimension, which may be 2^31 - 1 programs long where the others end at
65535; offsets into tensors in int64; sums in float32; matrix products by `product`, of float32 factors exactly (never
tf32), of bfloat16 ones on tensor cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PROGRAMS = 2**31 - 1
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
SIGNATURE = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int8: "*i8"}


class Launch(NamedTuple):
    """A kernel, as it is about to be started."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    """Tensors, sizes and compile-time constants, by the kernel's names."""
    options: dict[str, int]
    """`num_warps`, `num_stages`, and what else the chip's compiler takes."""

    def signature(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list]]:
        """Types, constants and attributes for `triton.compiler.ASTSource`; torch's tensors start at 16-byte lines."""
        types: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list] = {}
        for index, parameter in enumerate(self.kernel.params):
            given = self.arguments[parameter.name]
            if parameter.is_constexpr or given is None:
                types[parameter.name], constants[parameter.name] = "constexpr", given
            elif isinstance(given, Tensor):
                types[parameter.name] = SIGNATURE[given.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                types[parameter.name] = "i32"
        return types, constants, attributes


_record: list[Launch] | None = None
_chip: str | None = None


@contextmanager
def recorded(chip: str = "sm_90") -> Iterator[list[Launch]]:
    """Keep launches in a list instead of starting them, as host code would choose them on a chip."""
    global _record, _chip
    before, (_record, _chip) = (_record, _chip), ([], chip)
    try:
        yield _record
    finally:
        _record, _chip = before


def chip_of(device: torch.device) -> str:
    """The chip that tiles are chosen for: `"sm_90"`, `"gfx942"`, ...; the interpreter takes those of `"sm_90"`."""
    if _chip is not None:
        return _chip
    if device.type != "cuda":
        return "sm_90"
    return _chip_at(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _chip_at(index: int) -> str:
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))


def launch(
    kernel: Any,
    counts: Sequence[int],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    sched4reg: int = 0,
    **arguments: Any,
) -> None:
    """Start a kernel in as many programs as the product of `counts`; with `sched4reg` instructions are ordered for few
    registers, by a compiler for NVIDIA's chips.

    Raises:
        ValueError: tensors that lie on no GPU outside of the interpreter, on several devices, more programs than a
            grid can have.
    """
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    device, programs = tensors[0].device, prod(counts)
    name = kernel.__name__
    if any(x.device != device for x in tensors):
        raise ValueError(f"{name}: expected tensors on one device, got {sorted({str(x.device) for x in tensors})}.")
    if programs > MAX_PROGRAMS:
        raise ValueError(f"{name}: expected at most {MAX_PROGRAMS} programs, got {programs}; cut the batch.")
    options = {**({"sched4reg": True} if sched4reg else {}), "num_warps": num_warps, "num_stages": num_stages}
    if _record is not None:
        _record.append(Launch(kernel, programs, arguments, options))
    elif device.type != "cuda" and not INTERPRETED.value:
        raise ValueError(
            f"{name}: expected tensors on a GPU, got {device}. Set TRITON_INTERPRET=1 before triton is imported to run "
            "kernels on the CPU, or choose kernel_backend='chunked'."
        )
    elif programs > 0:
        if INTERPRETED.value or tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):  # which do not know it
            options.pop("sched4reg", None)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # else on the current one
            kernel[(programs,)](**arguments, **options)


def tile(size: int, most: int, least: int = 16) -> int:
    """The side of a tile over `size` elements: a power of two from `least` (matrix products need 16) to `most`."""
    return min(most, max(least, triton.next_power_of_2(size)))


def contiguous(*tensors: Tensor | None) -> list[Any]:
    return [x if x is None else x.contiguous() for x in tensors]


def fresh(x: Tensor) -> Tensor:
    """Room for a contiguous tensor like `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gradients_like(inputs: Sequence[Tensor | None], state: Tensor) -> tuple[Tensor, ...]:
    """What an operator's backward returns: a gradient per input; an operator cannot return `None`, so that of what is
    absent is empty, of the state's dtype."""
    return tuple(state.new_empty(0) if x is None else fresh(x) for x in inputs)


def wanted(inputs: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs that there are."""
    return tuple(None if x is None else d for x, d in zip(inputs, gradients, strict=True))


@triton.jit
def product(a, b):  # type: ignore[no-untyped-def]  # of Triton's types
    """`a @ b` summed in float32; float32 factors are not rounded to tf32."""
    if INTERPRETED:  # which multiplies the bits of bfloat16 numbers as integers; their products are exact in float32
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
