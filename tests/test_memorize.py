"""The learnability benchmark: its mappings are what they say, its errors those of a memory that learns online."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scripts import load


@pytest.fixture(scope="module")
def memorize() -> ModuleType:
    return load("benchmarks/memorize.py")


def test_errors_are_those_before_each_write(memorize: ModuleType) -> None:
    """A matrix under plain gradient descent, written out; a step size of 0 leaves the error of a memory of zeros."""
    key, value = (torch.stack(x) for x in zip(*(memorize.sequence("mlp", 12, seed) for seed in (3, 4)), strict=True))
    steps = [0.0, 2.0**-6, 2.0**-4]
    found = memorize.errors(key, value, memorize.MEMORIES["linear"], memorize.OPTIMIZERS["gd"], steps)
    assert found.shape == (2, 3, 11)
    for n in range(2):
        power = value[n].square().sum(-1).mean()
        for s, step in enumerate(steps):
            weight, wanted = torch.zeros(memorize.WIDTH, memorize.WIDTH), []
            for k, v in zip(key[n], value[n], strict=True):
                miss = weight @ k - v
                wanted.append(miss.square().sum() / power)
                weight = weight - step * torch.outer(miss, k)
            torch.testing.assert_close(found[n, s], torch.stack(wanted[1:]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("memory", ["mlp", "gated_mlp"])
@pytest.mark.parametrize("optimizer", ["gd", "momentum", "muon"])
def test_every_memory_and_optimizer_learns_a_matrix(memorize: ModuleType, memory: str, optimizer: str) -> None:
    key, value = (x[None] for x in memorize.sequence("low_rank", 192, 0))
    rule = memorize.OPTIMIZERS[optimizer]
    error = memorize.errors(key, value, memorize.MEMORIES[memory], rule, [0.0, *rule.step_sizes])[0]
    late = error[:, -48:].mean(1).nan_to_num(math.inf)
    assert late[1:].min() < 0.75 * late[0], late


def test_mappings(memorize: ModuleType) -> None:
    pairs = {name: memorize.sequence(name, 96, 5) for name in memorize.MAPPINGS}
    for name, (key, value) in pairs.items():
        assert value.square().mean().item() == pytest.approx(1, rel=1e-4), name
        again, other = (memorize.sequence(name, 96, seed)[1] for seed in (5, 6))
        assert torch.equal(value, again)
        assert not torch.equal(value, other)
        assert torch.equal(key, pairs["mlp"][0]) == (name != "attention_inputs")
    assert torch.linalg.matrix_rank(pairs["low_rank"][1], rtol=1e-4) == memorize.RANK


@pytest.mark.parametrize("window", [None, 3])
def test_attention_sees_its_window(memorize: ModuleType, monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(memorize, "scaled", lambda x: x)  # which depends on the whole sequence
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, memorize.WIDTH, generator=generator)
    drawn = torch.randn(3, memorize.WIDTH, memorize.WIDTH, generator=generator) / memorize.WIDTH**0.5
    matrices = iter([*drawn] * 10)
    y = memorize.attention(x, lambda n, m: next(matrices), window)
    for s in range(9):
        other = x.clone()
        other[s] += 1
        changed = (memorize.attention(other, lambda n, m: next(matrices), window) - y).abs().amax(1) > 1e-6
        for t in range(9):
            assert bool(changed[t]) == (s <= t < s + (window or 9)), (s, t)


def test_divergence_is_no_number(memorize: ModuleType) -> None:
    assert memorize.finite(torch.tensor(0.5)) == 0.5
    assert memorize.finite(torch.tensor(math.inf)) is memorize.finite(torch.tensor(math.nan)) is None
    row = {"mapping": "mlp", "memory": "linear", "optimizer": "gd", "step_size": 0.5, "last_quarter": None}
    rows = [{**row, "mapping": f, "memory": m, "optimizer": o, "last_quarter_deviation": None}
            for f in memorize.MAPPINGS for m in memorize.MEMORIES for o in memorize.OPTIMIZERS]  # fmt: skip
    assert memorize.report(rows).count("diverged at 2^-1") == len(rows)


def test_the_script_writes_what_it_says(
    memorize: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [2.0**-14, 2.0**-13, 2.0**-12]
    few = {name: optimizer._replace(step_sizes=steps) for name, optimizer in memorize.OPTIMIZERS.items()}
    monkeypatch.setattr(memorize, "OPTIMIZERS", few)
    results, plot = tmp_path / "new" / "memorize.json", tmp_path / "memorize.png"
    memorize.main(["--tokens", "40", "--sequences", "1", "--json", str(results), "--plot", str(plot)])
    content = json.loads(results.read_text())
    assert {"date", "command", "machine", "versions", "settings", "cpu_seconds", "rows"} <= content.keys()
    assert len(content["rows"]) == 5 * 3 * 3
    for row in content["rows"]:
        assert row["step_size"] in steps
        assert row["error"] > 0
        assert len(row["curve"]) == math.ceil(39 / memorize.BUCKET)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [x.name for x in results.parent.iterdir()] == ["memorize.json"]
    assert "window_mlp, gated_mlp" in capsys.readouterr().out
