"""What every Triton kernel asks of a chip, compiled ahead of time: no GPU is needed and none is used.

    python benchmarks/triton_resources.py --json benchmarks/results/triton_resources.json

For each kernel at the zoo's default shapes, as its own host code would start it: registers per thread, bytes of
registers spilled to memory, shared memory, and the matrix instructions of the machine code. No time is measured here.
What the record has of exactly the same kernels, by the same compiler, is not compiled again.
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
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from memzoo.kernels.addresses import triton as addresses
from memzoo.kernels.deep_exponential_memory import triton as deep_exponential_memory
from memzoo.kernels.deep_memory import triton as deep_memory
from memzoo.kernels.deep_memory import triton_step as deep_step
from memzoo.kernels.delta_rule import triton as delta_rule
from memzoo.kernels.exponential_memory import triton as exponential_memory
from memzoo.kernels.gates import triton as gates
from memzoo.kernels.kv_write import triton as kv_write
from memzoo.kernels.linear_attention import triton as linear_attention
from memzoo.kernels.monomials import triton as monomials
from memzoo.kernels.newton_schulz import triton as newton_schulz
from memzoo.kernels.norm_gate import triton as norm_gate
from memzoo.kernels.opened import triton as opened
from memzoo.kernels.retrieval import triton as retrieval
from memzoo.kernels.rotary import triton as rotary
from memzoo.kernels.self_modifying import triton as self_modifying
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
    """By itself, and with queries and keys of 48 coordinates as vectors."""
    x, weight = meta(batch, tokens, channels, dtype=dtype), meta(channels, 4, dtype=dtype)
    tail = meta(batch, 3, channels, dtype=dtype)
    for form in ((True, 1, 1, 0, 0.0), (True, channels // 144, 48, 2, 0.0)):
        unit, y = short_conv.forward(x, weight, tail, *form)
        short_conv.backward(unit, y, x, weight, tail, *form)
        short_conv.one_token(x[:, :1], weight, tail, *form)


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
    blocks: int = 1,
    layers: int = 2,
    gated: bool = False,
    muon: bool = False,
    taken_up: bool = False,
) -> None:
    """Rows that stop inside a chunk and, if `taken_up`, begin inside one."""
    chunks, rows, held = -(-tokens // chunk_size), batch * heads, chunk_size + window - 1
    units = key_dim if layers == 1 else 4 * key_dim if hidden is None else hidden
    outs = units * (2 if gated else 1)
    per_token, per_end = meta(chunks, rows, chunk_size, blocks), meta(chunks, rows, blocks)
    up, down = None if layers == 1 else meta(rows, outs, key_dim), meta(rows, value_dim, units)
    x0, x1, d0, d1, row = (meta(rows, held, d) for d in (key_dim, units, outs, value_dim, 1))
    count = meta(rows, dtype=torch.int64)
    query, key, value = (
        meta(chunks, rows, length, width, dtype=dtype)
        for length, width in ((chunk_size, key_dim), (held, key_dim), (held, value_dim))
    )
    inputs = deep_memory.Inputs(
        query=query,
        key=key,
        value=value,
        units=key if layers == 1 else None,
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
        held_x=x1 if taken_up and layers == 2 else None,
        held_d0=d0 if taken_up and layers == 2 else None,
        held_d1=d1 if taken_up else None,
        is_open=meta(chunks, rows, held, blocks) if blocks > 1 and layers == 2 else None,
        held=count if taken_up else None,
        done=count,
    )
    rule = deep_memory.Rule("gelu", residual=value_dim <= key_dim, l2=True, max_norm=10.0)
    outputs, kept = deep_memory.forward(inputs, rule, with_backward=True)
    deep_memory.backward(inputs, rule, kept, outputs)
    q, k, v, gate = query[0, :, :1], key[0, :, :1], value[0, :, :1], meta(rows)
    recent, block = [meta(rows, window - 1, d) for d in (key_dim, value_dim)], meta(rows, blocks)
    position, unlock = meta(batch, dtype=torch.int64), [64 * i for i in range(blocks)]
    gates = gate, gate, gate, None if window == 1 else meta(rows, window), position
    memory = up, down, up, down, *((x0, x1, d0, d1) if layers == 2 else (None, x0, None, d1)), row[..., 0]
    deep_step.one_token(
        *(q, k, v, *gates, *memory, row[..., 0], block, block, block, *recent, block if muon else None, unlock, *rule)
    )
    deep_step.token_momentum(k, v, *gates, *memory, block, *recent, unlock, *rule)
    weights = [x for x in (up, down, up, down) if x is not None]
    deep_step.recalled(q, position, weights, weights, chunk_size, unlock, rule.activation, rule.residual)


def newton(dtype: torch.dtype, batch: int = 2, tokens: int = 64, heads: int = 16, hidden: int = 192) -> None:
    """Of the momentum of a layer of a memory at the end of each chunk, in float32 whatever the model's dtype."""
    x = meta(batch * heads, -(-tokens // 64), hidden, 48)
    newton_schulz.forward(x, 5)
    newton_schulz.backward(x, x, 5)
    weight, rate = meta(batch * heads, 1, hidden, 48), meta(batch * heads, 1, 1, 1).expand(-1, -1, hidden, 48)
    newton_schulz.advance_matrices(weight, weight, rate, rate, 5)


def gate(dtype: torch.dtype, batch: int = 2, tokens: int = 2048, heads: int = 16, value_dim: int = 96) -> None:
    """Of the heads of a memory alone, and of two branches."""
    for shape, both in (((batch, tokens, heads, value_dim), False), ((batch, tokens, heads * value_dim), True)):
        x, weight = meta(*shape, dtype=dtype), meta(shape[-1], dtype=dtype)
        inputs = x, weight, x, weight if both else None, not both, 1.0, 1e-6
        norm_gate.forward(*inputs)
        norm_gate.backward(x, *inputs)


def inner_gates(dtype: torch.dtype, batch: int = 2, tokens: int = 2048, heads: int = 16) -> None:
    """Of a memory that learns at test time from a window of 4 tokens, and of one with a decay."""
    weight = meta(heads, dtype=dtype)
    decayed = meta(batch, tokens, heads, dtype=dtype), weight, weight
    step = [0, 1, 2, 0], [0.1, 1.0, 1.0, 0.25], [1, 1, 1, 4]
    for decay, each in (((None, None, None), step), (decayed, ([0], [1.0], [1]))):
        logits = meta(batch, tokens, sum(each[2]) * heads, dtype=dtype)
        gates.backward(gates.forward(logits, *decay, *each), logits, *decay, *each)


def features(dtype: torch.dtype, batch: int = 2, tokens: int = 2048, heads: int = 16, key_dim: int = 48) -> None:
    """Of queries and keys in float32, on a projection and without."""
    x, coefficient = meta(2, batch, tokens, heads, key_dim), meta(heads, dtype=dtype)
    for projection in (meta(heads, key_dim, 4, dtype=dtype), None):
        monomials.forward(x, coefficient, coefficient, projection)


def written(
    dtype: torch.dtype, batch: int = 2, tokens: int = 1, heads: int = 12, head_dim: int = 64, window: int = 512
) -> None:
    """Of one token in a window behind 16 persistent tokens, and of one that brings two keys into a segment; there are
    no others."""
    x, angle = meta(batch, 1, heads * head_dim, dtype=dtype), meta(batch, 1, head_dim, dtype=dtype)
    keys, length = meta(batch, heads, 16 + window, head_dim, dtype=dtype), meta(batch, dtype=torch.int64)
    for each in (1, 2):
        given = meta(batch, each, heads * head_dim, dtype=dtype)
        kv_write.forward(x, given, given, angle, angle, keys, keys, length, 16, each > 1)


def recalled(dtype: torch.dtype, batch: int = 2, tokens: int = 1, heads: int = 16, head_dim: int = 48) -> None:
    """Of a network, a gated one that opens block by block, and a matrix; one query each, there are no others."""
    query, position = meta(batch, 1, heads, head_dim, dtype=dtype), meta(batch, dtype=torch.int64)
    units = 4 * head_dim
    for up, down, blocks in ((units, units, 1), (2 * units, units, 16), (0, head_dim, 1)):
        first, second = meta(batch, heads, up, head_dim) if up else None, meta(batch, heads, head_dim, down)
        options = 128, up > down, "gelu", True, [64 * block for block in range(blocks)], True
        retrieval.forward(query, first, second, position, first, second, *options)


def turned(dtype: torch.dtype, batch: int = 2, tokens: int = 2048, heads: int = 12, head_dim: int = 64) -> None:
    """By angles of each row and of all rows, there and back."""
    x = meta(batch, tokens, heads, head_dim, dtype=dtype)
    for rows, back in ((batch, False), (1, False), (batch, True), (1, True)):
        angle = meta(rows, tokens, head_dim, dtype=dtype)
        rotary.turned(x, angle, angle, back)


def open_to(dtype: torch.dtype, batch: int = 2, tokens: int = 2048, heads: int = 16, key_dim: int = 48) -> None:
    """Keys by their coordinates, and values by heads."""
    x, position = meta(batch, tokens, heads, key_dim, dtype=dtype), meta(batch, dtype=torch.int64)
    for axis in (2, 3):
        opened.forward(x, position, 16, 128, axis)


def addressed(dtype: torch.dtype, batch: int = 2, tokens: int = 2048, heads: int = 16, key_dim: int = 48) -> None:
    """Of unit vectors, in float32, and of others."""
    numbers = [meta(heads, dtype=dtype).expand(batch, tokens, -1) for _ in range(2)]
    for unit_eps, unit in ((0.0, False), (0.0, True), (1e-6, True)):
        qk = [meta(batch, tokens, heads, key_dim, dtype=dtype if unit else torch.float32) for _ in range(2)]
        outputs = addresses.forward(*qk, *numbers, unit_eps, unit)
        addresses.backward(*outputs, *qk, *numbers, unit_eps, unit)


def _token(
    dtype: torch.dtype, batch: int, heads: int, head_dim: int, window: int, places: int, width: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Any, ...]]:
    """One token's inputs, the keys with what is written at them, and the rest of the state."""
    x, count = meta(batch, 1, heads, head_dim, dtype=dtype), meta(batch, dtype=torch.int64)
    inputs = x, x, x, meta(batch, 1, heads), meta(batch, 1, heads, window)
    held = meta(batch, heads, places, head_dim), meta(batch, heads, places, width)
    return inputs, held, (meta(batch, heads, window - 1, head_dim), count, count, None)


def exponential(dtype: torch.dtype, batch: int = 2, tokens: int = 2048, heads: int = 16, head_dim: int = 48) -> None:
    """Of one token after the others: the members' rules, each with the window that it has by default."""
    for window, l2, normalizer in ((1, False, True), (4, False, True), (4, True, False)):
        inputs, held, rest = _token(dtype, batch, heads, head_dim, window, tokens, head_dim + normalizer)
        exponential_memory.one_token(*inputs, *held, *rest, 7.0, l2, normalizer)


def deep_exponential(
    dtype: torch.dtype, batch: int = 2, tokens: int = 2048, heads: int = 16, head_dim: int = 48
) -> None:
    """Of one token after the others, likewise."""
    hidden = 4 * head_dim
    layers = meta(batch, heads, hidden, head_dim), meta(batch, heads, head_dim, hidden)
    for window, l2 in ((1, False), (4, False), (4, True)):
        inputs, held, rest = _token(dtype, batch, heads, head_dim, window, tokens, hidden)
        deep_exponential_memory.one_token(*inputs, *held, *layers, *rest, 7.0, l2, "gelu", 1.0)


def memories(
    dtype: torch.dtype, batch: int = 2, tokens: int = 1, heads: int = 16, width: int = 48, units: int | None = None
) -> None:
    """Of one token, where queries are given and where a memory makes them; there are no others."""
    units = 4 * width if units is None else units
    u, position = meta(batch, 1, heads, width, dtype=dtype), meta(batch, dtype=torch.int64)
    gate = meta(2, heads, width, dtype=dtype), meta(2, heads, dtype=dtype)
    for query, count in ((u, 5), (None, 6)):
        first, second = meta(batch, heads, width, count * units), meta(batch, heads * count, units, width)
        weights, rule = (first, second, first, second), (16, 64, 0.0625, "gelu", 10.0)
        self_modifying.one_token(u, query, *gate, *weights, position, None, *rule)


OPS: dict[str, Callable[..., None]] = {
    "short_conv": conv,
    "linear_attention": linear,
    "delta_rule": delta,
    "deep_memory": deep,
    "newton_schulz": newton,
    "norm_gate": gate,
    "gates": inner_gates,
    "monomials": features,
    "kv_write": written,
    "retrieval": recalled,
    "rotary": turned,
    "opened": open_to,
    "addresses": addressed,
    "exponential_memory": exponential,
    "deep_exponential_memory": deep_exponential,
    "self_modifying": memories,
}
"""For each op, what starts all its kernels, at the shapes of a 170M model unless told otherwise."""
WIDE = {"key_dim": 256, "value_dim": 256}
"""Heads as wide as those of a 1.3B model; some ops have none, and the kernels of deep memories and of Newton-Schulz
refuse them."""


def launches(op: str, dtype: torch.dtype, target: str = "sm_90", **sizes: int) -> list[Launch]:
    """What the op's host code would start on a chip, forward, backward and decoding; each program once."""
    with recorded(target) as record:
        OPS[op](dtype, **sizes)
    return list({repr(program(launch)): launch for launch in record}.values())


def program(launch: Launch) -> dict[str, Any]:
    """What tells the program of a launch from others of its op: the kernel, its constants, its options."""
    constants = {n: x for n, x in launch.signature()[1].items() if x is not None}
    return {"kernel": launch.kernel.__name__.strip("_"), **constants, **launch.options}


def fingerprint(kernel: Any) -> str:
    """Of the text of all functions that a kernel is made of."""
    functions: dict[str, str] = {}
    found = [kernel]
    while found:
        function = found.pop()
        functions[f"{function.module}.{function.__name__}"] = function.src
        called = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
        found += [x for x in called if isinstance(x, JITFunction) and f"{x.module}.{x.__name__}" not in functions]
    return hashlib.sha256(repr(sorted(functions.items())).encode()).hexdigest()[:16]


def source(launch: Launch) -> ASTSource:
    types, constants, attributes = launch.signature()
    return ASTSource(launch.kernel, types, constants, attributes)


def compiled(launch: Launch, target: str) -> Any:
    return triton.compile(source(launch), target=TARGETS[target], options=launch.options)


def first_form(launch: Launch, target: str) -> str:
    """What Triton makes of the source, before any of its passes: the part of a compilation that costs little."""
    backend = make_backend(TARGETS[target])
    options = backend.parse_options({**launch.options})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    makers = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source(launch).make_ir(TARGETS[target], options, *makers, context))


def resources(kernel: Any) -> dict[str, Any]:
    """Registers a thread, bytes spilled, shared memory and matrix instructions of a compiled kernel, and a digest of
    its machine code."""
    found: dict[str, Any] = {"shared": kernel.metadata.shared}
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
    instructions = re.findall(r"^ +/\*[0-9a-f]+\*/ +(.*?);", code, re.M) or re.findall(
        r"^\t([a-z]\w+[^;\n]*)", code, re.M
    )
    return {**found, "code": hashlib.sha256("\n".join(instructions).encode()).hexdigest()[:16]}


def _tool(name: str, *arguments: str) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def identity(op: str, inputs: str, target: str, launch: Launch) -> dict[str, Any]:
    """What a row of the record is about, as JSON has it."""
    made_of = fingerprint(launch.kernel)
    return json.loads(json.dumps({"op": op, "source": made_of, "inputs": inputs, "target": target, **program(launch)}))


def recorded_of(about: dict[str, Any], record: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The row about this, if there is one."""
    return next((row for row in record if about.items() <= row.items()), None)


def rows(
    op: str, targets: Sequence[str], dtypes: Sequence[str], wide: bool, record: Sequence[dict[str, Any]] = ()
) -> Iterator[dict[str, Any]]:
    """One for each kernel, dtype and target, the narrow heads first; those of `record` as they are."""
    classes = ({}, WIDE) if wide and op in ("linear_attention", "delta_rule") else ({},)
    for name, sizes, target in itertools.product(dtypes, classes, targets):
        for launch in launches(op, DTYPES[name], target, **sizes):
            about = identity(op, name, target, launch)
            yield recorded_of(about, record) or {**about, **resources(compiled(launch, target))}


def compilers() -> dict[str, Any]:
    """What made the code."""
    tools = {name: getattr(triton.knobs.nvidia, name).version for name in ("ptxas", "ptxas_blackwell")}
    return {"triton": triton.__version__, "tools": tools}


def read(path: Path) -> list[dict[str, Any]]:
    """What is recorded of these compilers."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return found["kernels"] if compilers().items() <= found.items() else []


def write(path: Path, found: list[dict[str, Any]]) -> None:
    """Beside and renamed."""
    beside = path.with_suffix(".part")
    head = json.dumps(compilers())
    text = ",\n  ".join(json.dumps(row) for row in found)
    beside.write_text(f'{head[:-1]}, "kernels": [\n  {text}\n]}}\n')
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the record; what it says of other ops, dtypes and targets stays")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--wide", action="store_true", help="also heads as wide as those of a 1.3B model")
    args = parser.parse_args()
    for op, name in itertools.product(args.ops, args.dtypes):
        found = []
        before = read(args.json) if args.json else []
        for row in rows(op, args.targets, [name], args.wide, before):
            print(row, flush=True)
            found.append(row)
        if args.json:
            others = [x for x in before if (x["op"], x["inputs"]) != (op, name) or x["target"] not in args.targets]
            write(args.json, others + found)


if __name__ == "__main__":
    main()
