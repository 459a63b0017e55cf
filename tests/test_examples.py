"""The examples, run as a user runs them: at a toy scale, on text so repetitive that a few steps learn it."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import memzoo

EXAMPLES = Path(__file__).parent.parent / "examples"
WORDS = [
    "the",
    "king",
    "said",
    "to",
    "his",
    "men",
    "that",
    "we",
    "shall",
    "go",
    "down",
    "by",
    "the",
    "river",
    "and",
    "see",
    "what",
    "this",
    "day",
    "will",
    "bring",
]


def write_text(path: Path, lines: int, seed: int) -> str:
    """Lines cut from one sentence, in random order."""
    starts = random.Random(seed).choices(range(0, len(WORDS) - 6, 2), k=lines)
    path.write_text("".join(" ".join(WORDS[start : start + 7]) + "\n" for start in starts), encoding="utf-8")
    return str(path)


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_text(tmp_path / "train.txt", 400, seed=0)


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    return write_text(tmp_path / "held_out.txt", 40, seed=1)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, with one thread, as the tests run in parallel."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)


def perplexity(process: subprocess.CompletedProcess[str]) -> float:
    assert process.returncode == 0, process.stderr
    found = re.search(r"Held-out perplexity: ([\d.]+)", process.stdout)
    assert found, process.stdout
    return float(found[1])


TOY = ("--steps", "40", "--context", "64", "--hidden-size", "32", "--chunk", "8", "--vocab-size", "320")


@pytest.mark.slow
def test_quickstart(tmp_path: Path, text: str, held_out: str) -> None:
    output = tmp_path / "out"
    process = run(
        "quickstart.py", "--text", text, held_out, "--output", str(output), *TOY, "--longest", "512",
        "--learning-rate", "0.01",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    results = json.loads((output / "results.json").read_text())
    assert results["runs"]["Proteus"]["perplexity"] < 0.5 * results["unigram_perplexity"]
    assert results["decoding"]["contexts"] == [256, 512]
    memory, llama = (results["decoding"][name]["bytes"] for name in ("Titans-Proteus", "Llama"))
    assert memory[0] == memory[1]
    assert llama[1] == 2 * llama[0]
    assert (output / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens read and" in process.stdout  # by the fresh process
    assert isinstance(AutoModelForCausalLM.from_pretrained(output), memzoo.TitansForCausalLM)


@pytest.mark.slow
def test_quickstart_says_how_much_text_it_needs(tmp_path: Path, held_out: str) -> None:
    process = run(
        "quickstart.py", "--text", held_out, held_out, "--output", str(tmp_path / "out"), "--vocab-size", "320"
    )
    assert process.returncode != 0
    assert re.search(r"ValueError: training text: \d+ tokens are \d+ windows of 512; expected at least", process.stderr)


@pytest.mark.slow
def test_finetune_from_nothing_then_from_its_checkpoint(tmp_path: Path, text: str, held_out: str) -> None:
    common = (
        "--text",
        text,
        "--eval-text",
        held_out,
        "--context",
        "64",
        "--learning-rate",
        "0.01",
        "--max-steps",
        "16",
    )
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    shape = ("--hidden-size", "32", "--num-hidden-layers", "2", "--num-attention-heads", "2", "--vocab-size", "320")
    fresh = run("finetune.py", *common, *shape, "--variant", "mal", "--capacity-blocks", "4", "--output-dir", first)
    again = run("finetune.py", *common, "--model", first, "--output-dir", second)
    assert perplexity(again) < perplexity(fresh) < 150
    config = AutoModelForCausalLM.from_pretrained(second).config
    assert (config.variant, config.capacity_blocks, config.capacity_context) == ("mal", 4, 64)


@pytest.mark.slow
def test_finetune_refuses_a_shape_for_a_checkpoint(tmp_path: Path, text: str) -> None:
    process = run("finetune.py", "--text", text, "--model", str(tmp_path), "--hidden-size", "32")
    assert process.returncode != 0
    assert "has its own shape: leave out ['hidden_size']" in process.stderr
