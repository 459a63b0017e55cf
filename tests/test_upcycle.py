"""Pretrained transformers with a memory added: the same numbers at first, and a memory that learns at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import record_fla
import torch
import zoo
from natives import NATIVE, checkpoint, load
from safetensors.torch import load_file, save_file
from tolerances import OP, close, error
from transformers import AutoModelForCausalLM, PreTrainedModel

import memzoo
from memzoo.conversion import upcycle as command
from memzoo.conversion.convert import convert
from memzoo.conversion.upcycle import TARGETS, freeze, upcycle

MEMORY: dict[str, Any] = {"chunk_size": 4, "memory_expansion": 2}
OPTIONS = {"titans_mag": MEMORY, "titans_mal": MEMORY, "hope_attention": {"chain_periods": [4, 1, 2]}}
TOKENS = 13  # within the windows of the sliding sources, across chunks of the memory


@pytest.fixture(scope="module")
def natives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A lively checkpoint of every model of transformers; the first one in shards."""
    return {
        name: checkpoint(name, tmp_path_factory.mktemp(name), "20KB" if name == "llama" else "5GB") for name in NATIVE
    }


# The numbers


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", NATIVE)
def test_it_computes_what_its_source_computes(name: str, to: str, natives: dict[str, Path], tmp_path: Path) -> None:
    """Logits to the bit, of one pass and of decoding; generated tokens; and all of it after saving again."""
    theirs, ours = load(natives[name]), load(upcycle(natives[name], tmp_path / "ours", to, **OPTIONS[to]))
    assert TARGETS[to].fits(ours.config)
    ids = zoo.tokens(2, TOKENS)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    ours.save_pretrained(tmp_path / "again")
    for model in (ours, load(tmp_path / "again")):
        with torch.no_grad():
            assert torch.equal(model(ids).logits, theirs(ids).logits)
            assert torch.equal(model.generate(ids, **options), theirs.generate(ids, **options))
            cache, past = model(ids[:, :6]).cache, theirs(ids[:, :6]).cache
            got, wanted = model(ids[:, 6:], cache=cache).logits, theirs(ids[:, 6:], cache=past).logits
            close(got, wanted, OP[torch.float32])


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", ["llama3", "mistral-sliding", "qwen2-sliding", "qwen3"])
def test_padding_and_long_texts(name: str, to: str, natives: dict[str, Path], tmp_path: Path) -> None:
    """Real tokens of padded rows, and texts beyond the window; sums may have another order there."""
    theirs, ours = load(natives[name]), load(upcycle(natives[name], tmp_path / "ours", to, **OPTIONS[to]))
    ids, mask = zoo.tokens(3, 40), torch.ones(3, 40, dtype=torch.int64)
    mask[0, :11] = 0
    mask[1, 29:] = 0
    with torch.no_grad():
        got, wanted = (model(ids, attention_mask=mask).logits for model in (ours, theirs))
        close(got[mask == 1], wanted[mask == 1], OP[torch.float32])
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask[::2]}
        assert torch.equal(ours.generate(ids[::2], **options), theirs.generate(ids[::2], **options))


def test_every_tensor_of_the_source_keeps_its_bits(natives: dict[str, Path], tmp_path: Path) -> None:
    """In its dtype, which the new ones share; in shards as well."""
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(natives["qwen3"], dtype=torch.bfloat16).save_pretrained(source)
    plain = load_file(convert(source, tmp_path / "plain") / "model.safetensors")
    (source / "tokenizer.json").write_text("a tokenizer")
    for to, target in TARGETS.items():
        folder = upcycle(source, tmp_path / to, to, max_shard_size="20KB", **OPTIONS[to])
        assert (folder / "tokenizer.json").read_text() == "a tokenizer"
        assert len(list(folder.glob("model-*.safetensors"))) > 1
        got = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        assert {name for name in got if not target.is_added(name)} == {target.name(name) for name in plain}
        assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}
        for name, tensor in plain.items():
            assert torch.equal(got[target.name(name)], tensor), name
        assert load(folder).dtype == torch.bfloat16


def test_the_new_parameters_follow_the_seed_and_the_options(natives: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    folders = [upcycle(natives["llama"], tmp_path / str(i), "titans_mag", seed=i // 2, **MEMORY) for i in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    one, same, other = (load_file(folder / "model.safetensors") for folder in folders)
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert changed
    assert all(".mixer.memory." in name for name in changed)
    # As a new model of the zoo would have them.
    fresh = AutoModelForCausalLM.from_config(load(folders[0]).config).state_dict()
    for name in changed:
        assert float(one[name].std()) == pytest.approx(float(fresh[name].std()), rel=0.25, abs=0.02), name
    options = {"memory_depth": 1, "capacity_blocks": 4, "capacity_context": 16, "use_momentum": False}
    config = load(upcycle(natives["qwen3"], tmp_path / "proteus", "titans_mal", **options)).config
    assert options.items() <= config.to_dict().items()
    assert (config.head_dim, config.layer_types, config.num_persistent_tokens) == (12, ["full_attention"] * 3, 0)


def test_the_first_level_of_a_chain_is_the_sources(natives: dict[str, Path], tmp_path: Path) -> None:
    """By default a slow one, with a narrower fast one behind it; other lists say otherwise, and one level adds none."""
    for number, (options, periods, sizes) in enumerate(
        (
            ({}, [4, 1], [48, 12]),
            ({"chain_periods": [1]}, [1], [48]),
            ({"chain_periods": [1, 8]}, [1, 8], [48, 12]),
            ({"chain_sizes": [48, 5, 7]}, [4, 1, 1], [48, 5, 7]),
            ({"chain_periods": [2, 1], "chain_sizes": [48, 3]}, [2, 1], [48, 3]),
        )
    ):
        model = load(upcycle(natives["llama"], tmp_path / str(number), "hope_attention", **options))
        assert (model.config.level_periods, model.config.level_sizes) == (periods, sizes)
        levels = model.model.layers[2].chain.levels
        assert [level.mlp.gate_proj.weight.shape[0] for level in levels] == sizes
        assert torch.equal(levels[0].mlp.up_proj.weight, load(natives["llama"]).model.layers[2].mlp.up_proj.weight)


def test_levels_that_learn_in_context_start_still(natives: dict[str, Path], tmp_path: Path) -> None:
    """With a step size of zero; with another one, which loading sets, they learn from the first period on."""
    options = {"chain_learning": "in_context", "chain_periods": [8, 4]}
    folder = upcycle(natives["llama"], tmp_path / "ours", "hope_attention", **options)
    theirs, ours = load(natives["llama"]), load(folder)
    learning = AutoModelForCausalLM.from_pretrained(folder, chain_step_size=0.1).eval()
    ids = zoo.tokens(2, TOKENS)
    with torch.no_grad():
        wanted = theirs(ids).logits
        close(ours(ids).logits, wanted, OP[torch.float32])  # in pieces of a period
        close(learning(ids).logits[:, :4], wanted[:, :4], OP[torch.float32])
        assert error(learning(ids).logits[:, 9:], wanted[:, 9:]) > 1e-3
    with pytest.raises(ValueError, match=r"chain_step_size=0.1: expected 0, the static model. Load the upcycled"):
        upcycle(natives["llama"], tmp_path / "other", "hope_attention", **options, chain_step_size=0.1)


# Training


@pytest.mark.parametrize("what", ["source", "attention", "none"])
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", ["llama-tied", "qwen3-biased"])
def test_fine_tuning_moves_the_memory(name: str, to: str, what: str, natives: dict[str, Path], tmp_path: Path) -> None:
    """The closed tensors have a gradient at once, all of the memory one step later; what is frozen stays."""
    model = load(upcycle(natives[name], tmp_path / "ours", to, **OPTIONS[to])).train()
    target = TARGETS[to]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained = freeze(model, what)
    assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    added = {name for name in before if target.is_added(name)}
    wanted = {
        "source": added,
        "attention": {name for name in before if ".mixer." not in name} | added,
        "none": set(before),
    }[what]
    assert {name for name, p in model.named_parameters() if p.requires_grad} == wanted
    ids = zoo.tokens(2, 24)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)

    def step() -> tuple[float, set[str]]:
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        moved = {name for name, p in model.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}
        optimizer.step()
        return loss.item(), moved

    first, moved = step()
    assert moved & added == {name for name in added if name.endswith(target.closed)}
    second, moved = step()
    assert moved & added == added
    third, _ = step()
    assert third < second < first
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in wanted), name


def test_freezing_refuses_what_it_does_not_know(natives: dict[str, Path], tmp_path: Path) -> None:
    model = load(upcycle(natives["llama"], tmp_path / "ours", "titans_mag", **MEMORY))
    with pytest.raises(ValueError, match="freeze='memory': expected one of"):
        freeze(model, "memory")
    with pytest.raises(ValueError, match=r"expected an upcycled model, one of .* got TitansForCausalLM with other opt"):
        freeze(zoo.build("titans-mag-e1"), "source")
    with pytest.raises(ValueError, match="got LlamaForCausalLM"):
        freeze(load(natives["llama"]), "source")
    assert all(parameter.requires_grad for parameter in model.parameters())


# What is refused


def edited(folder: Path, copy: Path, **options: Any) -> Path:
    """A copy of a checkpoint with other options."""
    copy.mkdir()
    tensors = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **options}))
    return copy


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3", {"model_type": "qwen3_moe"}, r"model_type='qwen3_moe': expected one of \['comba'.*'mistral'"),
        ("llama", {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'spiral'.*: expected a rope_type of"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*: expected a rope_type of"),
        ("llama", {"hidden_act": "sin"}, "llama config: hidden_act='sin': expected one of .* no counterpart here"),
        ("llama", {"quantization_config": {"bits": 4}}, r"llama config: unknown options {'quantization_config'"),
        ("llama", {"hidden_size": 16}, "Do the weights belong to this config.json|expected the shape"),
        ("llama", {"num_hidden_layers": 4}, "is missing"),
    ],
    ids=str,
)
def test_sources_that_ours_cannot_be_are_refused(
    name: str, options: dict[str, Any], message: str, natives: dict[str, Path], tmp_path: Path
) -> None:
    source = edited(natives[name], tmp_path / "edited", **options)
    with pytest.raises(ValueError, match=message):
        upcycle(source, tmp_path / "new" / "ours", "titans_mag")
    assert [path.name for path in tmp_path.iterdir()] == ["edited"]


def test_other_requests_are_refused(natives: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, source: Path = natives["llama"], to: str = "titans_mag", **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            upcycle(source, tmp_path / "ours", to, **options)
        assert not list(tmp_path.glob("*ours*"))

    refused(r"to='titans_mac': expected one of \('titans_mag', 'titans_mal'", to="titans_mac")
    refused("hidden_size=64: expected one of the options .*The rest is the source's", hidden_size=64)
    refused("sliding_window=8: expected one of the options", sliding_window=8)
    refused("num_persistent_tokens=4: expected one of the options", num_persistent_tokens=4)
    refused("memory_depht=1: expected one of the options .*'memory_depth'", memory_depht=1)
    refused("memory_depth=7: expected 1 to 4", memory_depth=7)
    refused("'memory_depth' expected int, got str", memory_depth="deep")
    refused("memory_depth=1: expected one of the options .*'chain_periods'", to="hope_attention", memory_depth=1)
    refused(r"chain_sizes=\[8, 48\]: expected the source's 48 first", to="hope_attention", chain_sizes=[8, 48])
    refused("chain_periods=4: expected a list", to="hope_attention", chain_periods=4)
    refused("capacity_blocks=2: expected 1: attention has no", to="hope_attention", capacity_blocks=2)
    refused("chain_periods=.*: expected None, or periods of at least 1", to="hope_attention", chain_periods=[0, 1])
    zoo.build("transformer_pp-e1").save_pretrained(tmp_path / "zoo")
    refused("a checkpoint of memzoo already", tmp_path / "zoo")
    name = next(name for name in record_fla.MODELS if name.startswith("RetNet"))
    record = json.loads(record_fla.RECORD.read_text())["models"][name]
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "config.json").write_text(json.dumps(record["config"]))
    refused("expected a transformer, got model_type='retnet', which has a memory of its own", tmp_path / "fla")
    monkeypatch.setattr(command, "write", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        upcycle(natives["llama"], tmp_path / "ours", "titans_mag")
    assert not list(tmp_path.glob("*ours*"))
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there: expected a new folder"):
        upcycle(natives["llama"], tmp_path / "there", "titans_mag")


# The command line


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(checkpoint("qwen2", tmp_path / "source"))
    options = ("chunk_size=4", "memory_activation=silu", "use_momentum=false")
    line = [sys.executable, "-m", "memzoo.conversion.upcycle", source, "ours", "--to", "titans_mal", "--set", *options]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ours"
    model: PreTrainedModel = load(tmp_path / "ours")
    assert isinstance(model, memzoo.TitansForCausalLM)
    config = model.config
    assert (config.variant, config.chunk_size, config.memory_activation, config.use_momentum) == (
        "mal",
        4,
        "silu",
        False,
    )
    for option, message in (
        ("hidden_size=4", "hidden_size=4: expected one of the options"),
        ("chunk_size", "expected NAME=VALUE"),
    ):
        with pytest.raises(SystemExit) as exit_:
            command.main([source, str(tmp_path / "other"), "--to", "titans_mag", "--set", option])
        assert exit_.value.code == 2
        shown = capsys.readouterr().err
        assert "error: " in shown
        assert message in shown
        assert not (tmp_path / "other").exists()
