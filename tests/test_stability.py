"""The stability benchmark: it trains what it names, and sees a model that has failed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scripts import load, write_text

import memzoo


@pytest.fixture(scope="module")
def stability() -> ModuleType:
    return load("benchmarks/stability.py")


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    texts = [write_text(tmp_path / f"{seed}.txt", 200, seed) for seed in (0, 1)]
    return ["--text", *texts, "--context", "64", "--models", "dot", "--json", str(tmp_path / "results.json")]


def test_every_deep_or_exponential_memory_is_a_member(stability: ModuleType) -> None:
    kinds = {kind for kind, _ in stability.MEMBERS.values()}
    family = (memzoo.OmegaNetConfig, memzoo.DLAConfig, memzoo.DeepTransformerConfig, memzoo.SWDTConfig)
    assert {*family, memzoo.TitansConfig, memzoo.AtlasConfig, memzoo.DotConfig} == kinds


@pytest.mark.slow
def test_a_member_trains(stability: ModuleType, command: list[str], tmp_path: Path) -> None:
    assert stability.main([*command, "--steps", "20", "--learning-rate", "0.01"]) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    (row,) = content["rows"]
    assert row["finite"]
    assert row["held_out_loss"] < content["unigram_loss"]
    assert row["training_losses"][-1] < row["training_losses"][0]


@pytest.mark.parametrize("fault", ["nan", "untrained"])
def test_a_failed_model_is_seen(
    stability: ModuleType, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def train(config: memzoo.DotConfig, *_: object) -> tuple[memzoo.DotForCausalLM, list[float]]:
        model = memzoo.DotForCausalLM(config).eval()
        if fault == "nan":
            torch.nn.init.constant_(model.model.layers[0].mlp_norm.weight, torch.nan)
        return model, [7.0, 7.0]

    monkeypatch.setattr(stability.quickstart, "train", train)
    assert stability.main(command) == 1
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (row["finite"], row["holds"]) == (fault == "untrained", False)
