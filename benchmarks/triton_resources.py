"""What every Triton kernel asks of a chip, compiled ahead of time: no GPU is needed and none is used.

    python benchmarks/triton_resources.py --json benchmarks/results/triton_resources.json

For each kernel at the zoo's default shapes, as its own host code would start it: registers per thread, bytes of
registers spilled to memory, shared memory, and the matrix instructions of the machine code. No time is measured here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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


def conv_launches(dtype: torch.dtype, batch: int = 2, tokens: int = 2048, channels: int = 2304) -> None:
    x, weight, tail = (meta(*shape, dtype=dtype) for shape in ((batch, tokens, channels), (channels, 4), (batch, 3, channels)))
    short_conv.forward(x, weight, tail, True)
    short_conv.backward(x, x, weight, tail, True)
    short_conv.one_token(x[:, :1], weight, tail, True)


OPS: dict[str, Callable[..., None]] = {"short_conv": conv_launches}
"""For each op, what starts all its kernels, at the shapes of a 170M model unless told otherwise."""


def launches(op: str, dtype: torch.dtype, **sizes: int) -> list[Launch]:
    """What the op's host code would start, forward, backward and decoding, each kernel once."""
    with recorded() as record:
        OPS[op](dtype, **sizes)
    return record


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


def rows(targets: list[str]) -> Iterator[dict[str, Any]]:
    for op in OPS:
        for name, dtype in DTYPES.items():
            for launch in launches(op, dtype):
                for target in targets:
                    kernel = launch.kernel.__name__.strip("_")
                    yield {
                        "op": op,
                        "kernel": kernel,
                        "inputs": name,
                        "target": target,
                        **launch.options,
                        **resources(compiled(launch, target)),
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    args = parser.parse_args()
    found = []
    for row in rows(args.targets):
        print(row, flush=True)
        found.append(row)
    if args.json:
        beside = args.json.with_suffix(".part")
        text = ",\n  ".join(json.dumps(row) for row in found)
        beside.write_text(f'{{"triton": "{importlib.metadata.version("triton")}", "kernels": [\n  {text}\n]}}\n')
        beside.replace(args.json)


if __name__ == "__main__":
    main()
