"""What the benchmarks share: records that say what ran where, and tables."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = {"memzoo", "torch", "transformers", "titans-pytorch"}
Column = tuple[str, Callable[[dict[str, Any]], str]]


def about(script: str, argv: Sequence[str], settings: dict[str, Any]) -> dict[str, Any]:
    """What a reader needs to judge or repeat a run of `benchmarks/<script>`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    versions = {x.name: x.version for x in metadata.distributions() if x.name in PACKAGES}
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{script}", *argv]),
        "machine": {"architecture": platform.machine(), "processor": named[0] if named else platform.processor()},
        "versions": {"python": platform.python_version(), **dict(sorted(versions.items()))},
        "settings": settings,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Written beside and renamed: the file is never half there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, path)


def table(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    """Aligned text, the first column to the left."""
    cells = [[head, *(show(row) for row in rows)] for head, show in columns]
    widths = [max(map(len, column)) for column in cells]
    first = [cell.ljust(widths[0]) for cell in cells[0]]
    rest = [[cell.rjust(width) for cell in column] for column, width in zip(cells[1:], widths[1:], strict=True)]
    return "\n".join("  ".join(line) for line in zip(first, *rest, strict=True))
