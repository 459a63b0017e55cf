"""What every Triton kernel asks of a chip, compiled ahead of time: no GPU is needed and none is used.

    python benchmarks/triton_resources.py --json benchmarks/results/triton_resources.json

For each kernel at the zoo's default shapes, as its own host code would start it: registers per thread, bytes of
registers spilled to memory, shared memory, and the matrix instructions of the machine code. No time is measured here.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from memzoo.kernels import triton_support
from memzoo.kernels.deep_memory import triton as deep_memory
from memzoo.kernels.delta_rule import triton as delta_rule
from memzoo.kernels.linear_attention import triton as linear_attention
from memzoo.kernels.short_conv import triton as short_conv
from memzoo.kernels.triton_support import Launch, recorded

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def conv(dtype: torch.dtype, batch: int = 2, tokens: int = 2048, channels: int = 2304) -> None:
    x, weight = meta(batch, tokens, channels, dtype=dtype), meta(channels, 4, dtype=dtype)
    tail = meta(batch, 3, channels, dtype=dtype)
    short_conv.forward(x, weight, tail, True)
    short_conv.backward(x, x, weight, tail, True)
    short_conv.one_token(x[:, :1], weight, tail, True)


def _heads(dtype: torch.dtype, batch: int, tokens: int, heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, ...]:
    """Query, value, gate and state."""
    return (
        meta(batch, tokens, heads, key_dim, dtype=dtype),
        meta(batch, tokens, heads, value_dim, dtype=dtype),
        meta(batch, tokens, heads),
        meta(batch, heads, key_dim, value_dim),
    )


def linear(
    dtype: torch.dtype, batch: int = 2, tokens: int = 2048, heads: int = 16, key_dim: int = 48, value_dim: int = 96
) -> None:
    q, v, gate, state = _heads(dtype, batch, tokens, heads, key_dim, value_dim)
    inputs = q, q[:, :, None], v[:, :, None], gate, state
    linear_attention.forward(*inputs)
    linear_attention.backward(*inputs, v, state)
    linear_attention.one_token(*(x[:, :1] for x in inputs[:4]), state)


def delta(
    dtype: torch.dtype, batch: int = 2, tokens: int = 2048, heads: int = 16, key_dim: int = 48, value_dim: int = 96
) -> None:
    q, v, gate, state = _heads(dtype, batch, tokens, heads, key_dim, value_dim)
    inputs = q, q, v, gate, gate, state, q, False
    delta_rule.forward(*inputs)
    delta_rule.backward(*inputs, v, state)
    q, v, gate = (x[:, :1] for x in (q, v, gate))
    delta_rule.one_token(q, q, v, gate, gate, state, q, False)


def deep(
    dtype: torch.dtype,
    batch: int = 2,
    tokens: int = 2048,
    heads: int = 16,
    key_dim: int = 48,
    value_dim: int = 48,
    hidden: int | None = None,
    chunk_size: int = 64,
    window: int = 1,
) -> None:
    """A memory of two layers, with rows that stop inside a chunk."""
    chunks, rows, held = -(-tokens // chunk_size), batch * heads, chunk_size + window - 1
    hidden = 4 * key_dim if hidden is None else hidden
    per_token, per_end = meta(chunks, rows, chunk_size, 1), meta(chunks, rows, 1)
    up, down = meta(rows, hidden, key_dim), meta(rows, value_dim, hidden)
    inputs = deep_memory.Inputs(
        query=meta(chunks, rows, chunk_size, key_dim, dtype=dtype),
        key=meta(chunks, rows, held, key_dim, dtype=dtype),
        value=meta(chunks, rows, held, value_dim, dtype=dtype),
        units=None,
        keep=per_token,
        momentum_read=per_token,
        write=meta(chunks, rows, chunk_size, held),
        keep_end=per_end,
        momentum_read_end=per_end,
        momentum_keep_end=per_end,
        momentum_write_end=meta(chunks, rows, held),
        up=up,
        down=down,
        up_slot=up,
        down_slot=down,
        held_x=None,
        held_d0=None,
        held_d1=None,
        is_open=None,
        held=None,
        done=meta(rows, dtype=torch.int64),
    )
    rule = deep_memory.Rule("gelu", residual=True, l2=True, max_norm=10.0)
    outputs, kept = deep_memory.forward(inputs, rule, with_backward=True)
    deep_memory.backward(inputs, rule, kept, outputs)
    q, v, gate = inputs.query[0, :, :1], inputs.value[0, :, :1], meta(rows)
    x0, x1, d1, row = (meta(rows, held, d) for d in (key_dim, hidden, value_dim, 1))
    recent, block = (meta(rows, window - 1, d) for d in (key_dim, value_dim)), meta(rows, 1)
    deep_memory.one_token(
        *(q, q, v, gate, gate, gate, None if window == 1 else meta(rows, window), meta(batch, dtype=torch.int64)),
        *(up, down, up, down, x0, x1, x1, d1, row[..., 0], row[..., 0], block, block, block, *recent, [0], *rule),
    )


OPS: dict[str, Callable[..., None]] = {
    "short_conv": conv,
    "linear_attention": linear,
    "delta_rule": delta,
    "deep_memory": deep,
}
"""For each op, what starts all its kernels, at the shapes of a 170M model unless told otherwise."""
MODULES = {
    "short_conv": short_conv,
    "linear_attention": linear_attention,
    "delta_rule": delta_rule,
    "deep_memory": deep_memory,
}
WIDE = {"key_dim": 256, "value_dim": 256}
"""Heads as wide as those of a 1.3B model; the convolution has none, and a deep memory's kernels refuse them."""


def launches(op: str, dtype: torch.dtype, **sizes: int) -> list[Launch]:
    """What the op's host code would start, forward, backward and decoding; each program once."""
    with recorded() as record:
        OPS[op](dtype, **sizes)
    return list({repr(program(launch)): launch for launch in record}.values())


def program(launch: Launch) -> dict[str, Any]:
    """What tells the program of a launch from others of its op: the kernel, its constants, its options."""
    constants = {n: x for n, x in launch.signature()[1].items() if x is not None}
    return {"kernel": launch.kernel.__name__.strip("_"), **constants, **launch.options}


def fingerprint(op: str) -> str:
    """Of the text of all functions that the op's kernels can be made of."""
    functions = {}
    for module in (triton_support, linear_attention, MODULES[op]):
        functions |= {f"{module.__name__}.{n}": x.src for n, x in vars(module).items() if isinstance(x, JITFunction)}
    return hashlib.sha256(repr(sorted(functions.items())).encode()).hexdigest()


def compiled(launch: Launch, target: str) -> Any:
    types, constants, attributes = launch.signature()
    source = ASTSource(launch.kernel, types, constants, attributes)
    return triton.compile(source, target=TARGETS[target], options=launch.options)


def resources(kernel: Any) -> dict[str, int]:
    """Registers a thread, bytes spilled, shared memory and matrix instructions of a compiled kernel."""
    found = {"shared": kernel.metadata.shared}
    if "cubin" in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = _tool("cuobjdump", "-res-usage", file.name)
            code = _tool("nvdisasm", "-c", file.name)
        found["registers"], found["spilled"] = (
            max(map(int, re.findall(rf"{name}:(\d+)", usage))) for name in ("REG", "STACK")
        )
        matrix = r"\b(HGMMA|UTC\w*MMA|HMMA)\b"
    else:
        code = kernel.asm["amdgcn"]
        found["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", code)[1])  # type: ignore[index]
        found["spilled"] = 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", code)[1])  # type: ignore[index]
        matrix = r"\b(v_mfma)_"
    for name in re.findall(matrix, code):
        found[name] = found.get(name, 0) + 1
    return found


def _tool(name: str, *arguments: str) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def rows(targets: Sequence[str], dtypes: Sequence[str], wide: bool) -> Iterator[dict[str, Any]]:
    """One for each kernel, dtype and target, the narrow heads first."""
    for sizes, name, op in itertools.product(({}, WIDE) if wide else ({},), dtypes, OPS):
        if sizes and op in ("short_conv", "deep_memory"):
            continue
        for target, launch in itertools.product(targets, launches(op, DTYPES[name], **sizes)):
            yield {"op": op, "inputs": name, "target": target, **program(launch), **resources(compiled(launch, target))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--wide", action="store_true", help="also heads as wide as those of a 1.3B model")
    args = parser.parse_args()
    found = []
    for row in rows(args.targets, args.dtypes, args.wide):
        print(row, flush=True)
        found.append(row)
    if args.json:
        beside = args.json.with_suffix(".part")
        head = json.dumps({"triton": triton.__version__, "sources": {op: fingerprint(op) for op in OPS}})
        text = ",\n  ".join(json.dumps(row) for row in found)
        beside.write_text(f'{head[:-1]}, "kernels": [\n  {text}\n]}}\n')
        beside.replace(args.json)


if __name__ == "__main__":
    main()
