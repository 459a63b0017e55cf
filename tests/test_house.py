"""The house rules that a reader of the tree relies on: where things lie, which way imports go, what may be imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memzoo

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("configuration", "modeling", "kernels", "conversion")
# What each room may import of the others.
ALLOWED = {
    "configuration": {"configuration"},
    "kernels": {"kernels"},
    "modeling": {"configuration", "kernels", "modeling"},
    "conversion": set(ROOMS),
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room: str) -> None:
    for path in modules(room):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "memzoo" and len(parts) > 1:
                assert parts[1] in ALLOWED[room], f"{path}: imports {name}"
            assert parts[0] not in {"tests", "benchmarks", "examples"}, f"{path}: imports {name}"
            if room == "configuration":
                assert parts[0] != "torch", f"{path}: a configuration needs no torch"
            if parts[0] == "triton":
                assert path.name.startswith("triton"), f"{path}: triton is for kernels/*/triton*.py"


def test_layout() -> None:
    for room in ROOMS:
        link = ROOT / "src" / "memzoo" / room
        assert link.is_symlink()
        assert link.readlink() == Path("..") / ".." / room
    # transformers imports whatever is called `kernels`; a namespace folder is not taken for it.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert (ROOT / "src" / "memzoo" / "py.typed").exists()


def test_every_folder_is_packaged() -> None:
    listed = set(re.findall(r'"(memzoo(?:\.[\w.]+)?)",', (ROOT / "pyproject.toml").read_text()))
    folders = {".".join(("memzoo", *path.parent.relative_to(ROOT).parts)) for room in ROOMS for path in modules(room)}
    assert folders <= listed, f"missing in pyproject.toml: {folders - listed}"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_import_registers_without_a_gpu_or_triton(where: str, tmp_path: Path) -> None:
    """From the root, where a folder called `kernels` lies on the path, and from elsewhere; triton is never imported."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import memzoo, transformers\n"
        "config = memzoo.TitansConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=5)\n"
        "model = transformers.AutoModelForCausalLM.from_config(config)\n"
        "print(type(model).__name__)"
    )
    cwd = ROOT if where == "root" else tmp_path
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=400)
    assert done.stdout.strip() == "TitansForCausalLM", done.stderr


def test_public_names() -> None:
    assert set(memzoo.__all__) <= set(dir(memzoo))
    for name in memzoo.__all__:
        thing = getattr(memzoo, name)
        assert thing.__doc__, f"{name} has no docstring"


def test_the_readme_names_every_architecture() -> None:
    text = (ROOT / "README.md").read_text()
    for config, *_ in memzoo.ARCHITECTURES:
        assert config.__name__ in text
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / document).read_text()):
            assert (ROOT / link).exists(), f"{document} links to {link}"


@pytest.mark.slow
def test_the_readmes_code_runs(tmp_path: Path) -> None:
    """Block by block, none of which sees another's names."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    code = f"for block in {blocks!r}:\n    exec(block, {{}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert blocks
    assert done.returncode == 0, done.stderr
