"""Scripts of the repository as modules, which belong to no package, and a text for them."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
SENTENCE = "the king said to his men that we shall go down by the river and see what this day will bring"


def load(script: str) -> ModuleType:
    """A script, by its path from the root, as a module, for its functions; it finds its neighbours as when it runs."""
    folder = str((ROOT / script).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = script.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write_text(path: Path, lines: int, seed: int) -> str:
    """Lines cut from one sentence, in random order."""
    words = SENTENCE.split()
    starts = random.Random(seed).choices(range(0, len(words) - 6, 2), k=lines)
    path.write_text("".join(" ".join(words[start : start + 7]) + "\n" for start in starts), encoding="utf-8")
    return str(path)
