"""The recorded probe of a frozen model, on a tiny random one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import load
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def test_the_script_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe = load("benchmarks/managed_adapter.py")
    words = ["[UNK]", ".", "?", "The", "Which", "code", "belongs", "to", *probe.NAMES]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "source")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)).save_pretrained(tmp_path / "source")
    results = tmp_path / "probe.json"
    sizes = ["--layer", "1", "--streams", "12", "--samples", "9", "--steps", "150"]
    probe.main(["--source", str(tmp_path / "source"), *sizes, "--json", str(results)])
    content = json.loads(results.read_text())
    assert content["families"] == 1
    assert content["losses"][-1] < content["losses"][0]
    for split, samples in (("train", 12), ("held_out", 9)):
        scores = content["scores"][split]
        assert scores["samples"] == samples
        assert 0 < scores["sparse"] < samples
        assert scores["right"] <= min(scores["right_pointers"], scores["right_routes"]) <= samples
    assert content["scores"]["train"]["right_pointers"] >= 9
    assert "held_out: of 9 streams" in capsys.readouterr().out
