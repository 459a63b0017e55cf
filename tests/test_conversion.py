"""Checkpoints of other libraries in and out: the same bits, the same numbers, and a clear word where that cannot be."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import record_fla
import torch
import torch.nn.functional as F
import zoo
from natives import LLAMA3, NATIVE, checkpoint, load
from safetensors.torch import load_file, save_file
from tolerances import MODEL, OP, WITNESS, close
from torch import Tensor
from transformers import AutoModelForCausalLM

import memzoo
from memzoo.conversion import convert as command
from memzoo.conversion.convert import FORMATS, convert
from memzoo.conversion.tables import Row, Table

RECORD = json.loads(record_fla.RECORD.read_text())
FLA = [name for name in RECORD["models"] if not name.endswith("-default")]
INSTALLED = importlib.util.find_spec("fla") is not None
TOKENS = 13


@pytest.fixture(scope="module")
def natives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A lively checkpoint of every model of transformers; the first one in shards."""
    return {
        name: checkpoint(name, tmp_path_factory.mktemp(name), "20KB" if name == "llama" else "5GB") for name in NATIVE
    }


def fla_checkpoint(name: str, folder: Path) -> dict[str, Tensor]:
    """Random weights under the recorded names, saved with the recorded config; in float64."""
    tensors = record_fla.weights(RECORD["models"][name]["shapes"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    extra = {"architectures": [f"{name.split('-')[0]}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**RECORD["models"][name]["config"], "dtype": "float64", **extra}))
    return tensors


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bits(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


# transformers' models


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_model_keeps_its_bits(name: str, natives: dict[str, Path], tmp_path: Path) -> None:
    """Logits, generated tokens, and on the way back every tensor and every option."""
    theirs, ours = load(natives[name]), load(convert(natives[name], tmp_path / "ours"))
    assert isinstance(ours, memzoo.TransformerPlusPlusForCausalLM)
    ids = zoo.tokens(2, TOKENS)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
    back = convert(tmp_path / "ours", tmp_path / "back", NATIVE[name].model_type)
    same_bits(tensors_of(back), tensors_of(natives[name]))
    again = load(back)
    assert type(again) is type(theirs)
    no_effect = {"_name_or_path", "max_window_layers", "use_sliding_window", "head_dim"}
    wanted = {key: value for key, value in theirs.config.to_dict().items() if key not in no_effect}
    assert wanted.items() <= again.config.to_dict().items()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("name", ["qwen2-sliding", "mistral-sliding"])
def test_a_long_text_in_a_sliding_window(name: str, natives: dict[str, Path], tmp_path: Path) -> None:
    """Past its window ours sums in blocks, so that bits may differ; numbers do not."""
    theirs, ours = load(natives[name]), load(convert(natives[name], tmp_path / "ours"))
    ids = zoo.tokens(2, 50)
    with torch.no_grad():
        close(ours(ids).logits, theirs(ids).logits, MODEL[torch.float32])


def test_shards_in_and_out(natives: dict[str, Path], tmp_path: Path) -> None:
    assert (natives["llama"] / "model.safetensors.index.json").exists()
    convert(natives["llama"], tmp_path / "whole")
    convert(natives["llama"], tmp_path / "shards", max_shard_size="15KB")
    assert (tmp_path / "whole" / "model.safetensors").exists()
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    same_bits(tensors_of(tmp_path / "shards"), tensors_of(tmp_path / "whole"))
    same_bits(dict(load(tmp_path / "shards").state_dict()), dict(load(tmp_path / "whole").state_dict()))


def test_what_a_native_checkpoint_may_have_besides(natives: dict[str, Path], tmp_path: Path) -> None:
    """A tied head that is stored all the same, and old checkpoints' rotary frequencies; but no other head."""
    tensors = tensors_of(natives["llama-tied"])
    besides = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    source = edited(natives["llama-tied"], tmp_path / "source", tensors={**tensors, **besides})
    convert(source, tmp_path / "ours")
    besides["lm_head.weight"][3, 3] += 1
    source = edited(natives["llama-tied"], tmp_path / "other", tensors={**tensors, **besides})
    with pytest.raises(ValueError, match=r"unknown lm_head\.weight"):
        convert(source, tmp_path / "theirs")


def test_a_repository_of_the_hub(natives: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("someone/model", "v1")
        fetched = tmp_path / "fetched"
        shutil.copytree(natives["llama"], fetched)
        for path in fetched.iterdir():
            if not any(path.match(pattern) for pattern in allow_patterns):
                path.unlink()
        return str(fetched)

    monkeypatch.setattr(command, "snapshot_download", download)
    convert("someone/model", tmp_path / "got", revision="v1")
    same_bits(tensors_of(tmp_path / "got"), tensors_of(convert(natives["llama"], tmp_path / "wanted")))


# flash-linear-attention's models


def test_the_record_is_what_the_library_says() -> None:
    """Where flash-linear-attention is installed; the record holds it to its word elsewhere."""
    if not INSTALLED:
        assert RECORD["version"] == "0.6.0"
        assert set(RECORD["models"]) == set(record_fla.MODELS)
        return
    live = record_fla.record()
    for name, model in RECORD["models"].items():
        assert live["models"][name]["shapes"] == model["shapes"], name
        assert model["config"].items() <= live["models"][name]["config"].items(), name


class Shapes:
    """Tensors of which only the shapes are known."""

    def __init__(self, shapes: dict[str, Any]) -> None:
        self.shapes = shapes

    def shape(self, name: str) -> Any:
        return self.shapes[name]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("name", RECORD["models"])
def test_names_and_shapes_are_flas(name: str) -> None:
    """Each recorded config, the defaults among them, becomes a model of ours whose table gives fla's parameters."""
    record = RECORD["models"][name]
    format = next(format for format in FORMATS if format.model_type == record["config"]["model_type"])
    config = format.to_ours(record["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    source = Shapes({key: parameter.shape for key, parameter in model.named_parameters()})
    recipes = format.table.to_theirs(config, source)
    assert {key: list(recipe.shape(source)) for key, recipe in recipes.items()} == record["shapes"]
    theirs = Shapes(record["shapes"])
    back = {key: recipe.shape(theirs) for key, recipe in format.table.to_ours(config, theirs).items()}
    assert back == {key: tuple(shape) for key, shape in source.shapes.items()}


@pytest.mark.parametrize("name", FLA)
def test_an_fla_model_keeps_its_bits_and_numbers(name: str, tmp_path: Path) -> None:
    """Logits of the published recurrence, token by token on fla's parameters; round trips both ways."""
    (tmp_path / "theirs").mkdir()
    tensors = fla_checkpoint(name, tmp_path / "theirs")
    ours = load(convert(tmp_path / "theirs", tmp_path / "ours"))
    assert ours.dtype == torch.float64
    ids = zoo.tokens(1, TOKENS)
    rotates = RECORD["models"][name]["config"]["model_type"] in ("retnet", "transformer") or "hybrid" in name
    with torch.no_grad():
        want = FlaModel(tensors, RECORD["models"][name]["config"])(ids[0])
        # rotary angles are taken in float32
        close(ours(ids).logits[0], want, WITNESS if rotates else MODEL[torch.float64])
    back = convert(tmp_path / "ours", tmp_path / "back", "fla")
    same_bits(tensors_of(back), tensors)
    got, wanted = (json.loads((folder / "config.json").read_text()) for folder in (back, tmp_path / "theirs"))
    how = {"hidden_ratio", "num_kv_heads"}  # said by intermediate_size; None for num_heads
    assert {k: v for k, v in wanted.items() if k not in how} == {k: got.get(k, "missing") for k in wanted.keys() - how}
    again = convert(back, tmp_path / "again")
    same_bits(tensors_of(again), tensors_of(tmp_path / "ours"))
    if INSTALLED:
        model = getattr(record_fla.library(), wanted["architectures"][0]).from_pretrained(back)
        parameters = {key: parameter.data for key, parameter in model.named_parameters()}
        # it makes some of them in float32 whatever the model's dtype
        same_bits(parameters, {key: tensor.to(parameters[key].dtype) for key, tensor in tensors.items()})
    assert settings(again) == settings(tmp_path / "ours")


@pytest.mark.parametrize("name", [name for name in FLA if "logits" in RECORD["models"][name]])
def test_logits_are_those_that_fla_computes(name: str, tmp_path: Path) -> None:
    """Recorded from the library itself, in float32."""
    (tmp_path / "theirs").mkdir()
    fla_checkpoint(name, tmp_path / "theirs")
    ours = load(convert(tmp_path / "theirs", tmp_path / "ours"))
    with torch.no_grad():
        got = ours(torch.tensor([record_fla.IDS])).logits[0, -1]
    close(got, torch.tensor(RECORD["models"][name]["logits"]), OP[torch.float32])


def settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


class FlaModel:
    """What flash-linear-attention publishes that its models compute, one token after the other, in float64.

    Args:
        tensors: parameters under its names.
        config: its options.
    """

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        self.tensors, self.config = tensors, config

    def __call__(self, ids: Tensor) -> Tensor:
        t = self.tensors
        x = t["model.embeddings.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            p = {k.split(".", 3)[3]: v for k, v in t.items() if k.startswith(f"model.layers.{layer}.")}
            attn = {k.removeprefix("attn."): v for k, v in p.items() if k.startswith("attn.")}
            x = x + self.mix(layer, attn, self.rms(x, p["attn_norm.weight"]))
            h = self.rms(x, p["mlp_norm.weight"])
            gate, up = h @ p["mlp.gate_proj.weight"].T, h @ p["mlp.up_proj.weight"].T
            x = x + (F.silu(gate) * up) @ p["mlp.down_proj.weight"].T
        x = self.rms(x, t["model.norm.weight"])
        return x @ t.get("lm_head.weight", t["model.embeddings.weight"]).T

    def rms(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        eps = self.config["norm_eps"] if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def mix(self, layer: int, p: dict[str, Tensor], x: Tensor) -> Tensor:
        spec = self.config.get("attn")
        if self.config["model_type"] == "transformer":
            return self.attend(p, x, self.config)
        if spec and layer in spec["layers"]:
            return self.attend(p, x, {"rope_theta": 10000.0, "qk_norm": False, **spec})
        q, k, v = (self.project(p, x, part) for part in "qkv")
        read = self.memory(p, x, q, k, v)
        norm = next(p[name] for name in ("o_norm.weight", "g_norm.weight", "g_norm_swish_gate.weight") if name in p)
        read = self.rms(read, norm).flatten(1)
        if "g_proj.weight" in p:
            gate = x @ p["g_proj.weight"].T
            sigmoid = self.config["model_type"] == "comba" or self.config.get("output_gate_activation") == "sigmoid"
            read = read * (gate.sigmoid() if sigmoid else gate * gate.sigmoid())
        return read @ p["o_proj.weight"].T

    def project(self, p: dict[str, Tensor], x: Tensor, part: str) -> Tensor:
        """`[T, H, width]`, through the causal convolution and SiLU where there is one."""
        y = x @ p[f"{part}_proj.weight"].T
        if f"{part}_conv1d.weight" in p:
            weight = p[f"{part}_conv1d.weight"][:, 0]
            size = weight.shape[1]
            rows = []
            for t in range(len(y)):
                taps = [y[t - size + 1 + i] * weight[:, i] for i in range(size) if t - size + 1 + i >= 0]
                rows.append(F.silu(sum(taps, torch.zeros(())).double()))
            y = torch.stack(rows)
        return y.unflatten(-1, (self.config["num_heads"], -1))

    def memory(self, p: dict[str, Tensor], x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`S' = a S`, `S = S' - b k (k^T S_read) + b k v^T`, `o = S^T q / sqrt(K)`; Comba reads the undecayed S."""
        kind, (tokens, heads, width) = self.config["model_type"], q.shape
        state = torch.zeros(heads, width, v.shape[2], dtype=torch.float64)
        if kind == "retnet":
            q, k = rotate(q, 10000.0), rotate(k, 10000.0)
            keep = (1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))).expand(tokens, -1)
        elif kind == "delta_net":
            keep = torch.ones(tokens, heads, dtype=torch.float64)
        else:
            keep = (-p["A_log"].exp() * F.softplus(x @ p["a_proj.weight"].T + p["dt_bias"])).exp()
        if kind != "retnet":
            strength = (x @ p["b_proj.weight"].T).sigmoid() * (2 if self.config.get("allow_neg_eigval") else 1)
        if kind == "comba":
            erased = k * p["decay"][:, None].sigmoid()
            q = q - p["D"][:, None] * erased
        outputs = []
        for t in range(tokens):
            read = torch.zeros(heads, v.shape[2], dtype=torch.float64)
            for h in range(heads):
                query, key, value = q[t, h], k[t, h], v[t, h]
                if kind == "retnet":
                    state[h] = keep[t, h] * state[h] + torch.outer(key, value)
                else:
                    query, key = unit(query), unit(key)
                    decayed = keep[t, h] * state[h]
                    held = unit(erased[t, h]) @ state[h] if kind == "comba" else key @ decayed
                    state[h] = decayed + strength[t, h] * torch.outer(key, value - held)
                read[h] = query @ state[h] / width**0.5
            outputs.append(read)
        return torch.stack(outputs)

    def attend(self, p: dict[str, Tensor], x: Tensor, spec: dict[str, Any]) -> Tensor:
        heads, shared = spec["num_heads"], spec.get("num_kv_heads") or spec["num_heads"]
        q, k, v = (
            (x @ p[f"{part}_proj.weight"].T + p.get(f"{part}_proj.bias", 0)).unflatten(-1, (count, -1))
            for part, count in (("q", heads), ("k", shared), ("v", shared))
        )
        if spec["qk_norm"]:
            q, k = self.rms(q, p["q_norm.weight"], 1e-5), self.rms(k, p["k_norm.weight"], 1e-5)
        q, k = rotate(q, spec["rope_theta"]), rotate(k, spec["rope_theta"])
        window = spec["window_size"] or len(x)
        rows = []
        for t in range(len(x)):
            first = max(0, t - window + 1)
            parts = []
            for h in range(heads):
                g = h // (heads // shared)
                weights = (k[first : t + 1, g] @ q[t, h] / q.shape[2] ** 0.5).softmax(0)
                parts.append(weights @ v[first : t + 1, g])
            rows.append(torch.cat(parts))
        return torch.stack(rows) @ p["o_proj.weight"].T


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum() + 1e-6).sqrt()


def rotate(x: Tensor, theta: float) -> Tensor:
    """`[T, H, K]`, its halves turned against each other by the angle of place and pair."""
    half = x.shape[2] // 2
    frequency = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x))[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


# What is refused


def edited(folder: Path, copy: Path, tensors: dict[str, Tensor] | None = None, drop: str = "", **options: Any) -> Path:
    """A copy of a checkpoint with other tensors, or without one, or with other options."""
    copy.mkdir()
    tensors = tensors_of(folder) if tensors is None else tensors
    save_file({name: t for name, t in tensors.items() if name != drop}, copy / "model.safetensors")
    config = {**json.loads((folder / "config.json").read_text()), **options}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"quantization_config": {"bits": 4}}, r"llama config: unknown options {'quantization_config'"),
        ("llama", {"model_type": "mixtral"}, r"model_type='mixtral': expected one of \['comba'"),
        ("llama", {"partial_rotary_factor": 0.5}, "rope_parameters=.*: expected partial_rotary_factor 1"),
        ("llama", {"hidden_act": "sin"}, r"llama config: hidden_act='sin': expected one of \['gelu'"),
        ("llama", {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'spiral'.*: expected a rope_type of"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, r"mistral config: unknown options {'layer_types'"),
        ("llama", {"pad_token_id": -1}, "pad_token_id=-1: expected None, or an id below"),
        ("llama", {"hidden_size": 16}, "Do the weights belong to this config.json|expected the shape"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_window=None: expected a window"),
        (
            "RetNet",
            {"num_kv_heads": 1},
            r"retnet config: num_kv_heads=1: expected None or num_heads=2. Our memories have as many",
        ),
        ("RetNet", {"feature_map": "relu"}, "feature_map='relu': expected None"),
        ("RetNet", {"use_short_conv": True}, "use_short_conv=True: expected False"),
        ("RetNet", {"brand_new": 1}, r"unknown options {'brand_new': 1}.*--ignore"),
        ("DeltaNet", {"qk_norm": "sum"}, "qk_norm='sum': expected 'l2'"),
        ("DeltaNet", {"use_short_conv": False}, "use_short_conv=False: expected True"),
        ("DeltaNet", {"attnres_block_size": 1}, "attnres_block_size=1: expected None"),
        ("GatedDeltaNet", {"num_v_heads": 4}, "num_v_heads=4: expected None or num_heads=2"),
        ("GatedDeltaNet", {"num_heads": 4}, r"q_proj.weight: expected 40 rows by the config, got the shape \(20, 24\)"),
        ("Comba", {"use_inner_decay": False}, "use_inner_decay=False: expected True"),
        (
            "GatedDeltaNet-hybrid",
            {"attn": [{"layers": [0], "num_heads": 4}, {"layers": [1], "num_heads": 2}]},
            "attn=.*: expected layers that differ in nothing",
        ),
        (
            "GatedDeltaNet-hybrid",
            {"attn": [{"layers": [1], "num_heads": 2}, {"layers": [1], "num_heads": 2, "window_size": 4}]},
            "attn=.*: expected layer 1 in one description",
        ),
        ("Transformer-norms", {"norm_eps": 1e-6}, "norm_eps=1e-06: expected 1e-05 with qk_norm"),
    ],
    ids=str,
)
def test_what_ours_cannot_say_is_refused(
    name: str, options: dict[str, Any], message: str, natives: dict[str, Path], tmp_path: Path
) -> None:
    if name in NATIVE:
        source = natives[name]
    else:
        source = tmp_path / "theirs"
        source.mkdir()
        fla_checkpoint(name, source)
    with pytest.raises(ValueError, match=message):
        convert(edited(source, tmp_path / "edited", **options), tmp_path / "ours")
    assert not list(tmp_path.glob("*ours*"))


def test_heads_of_values_may_be_counted(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    fla_checkpoint("GatedDeltaNet", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(edited(tmp_path / "theirs", tmp_path / "edited", num_v_heads=2), tmp_path / "same")
    configs = [memzoo.GatedDeltaNetConfig.from_pretrained(tmp_path / name) for name in ("ours", "same")]
    assert configs[0].to_dict() == configs[1].to_dict()


@pytest.mark.parametrize(
    ("config", "to", "message"),
    [
        (memzoo.TitansConfig, "fla", "TitansConfig converts to nothing else"),
        (memzoo.DeltaNetConfig, "llama", r"DeltaNetConfig converts to \['fla'\]"),
        (memzoo.DeltaNetConfig, None, "a checkpoint of memzoo already; expected a target"),
        (memzoo.DeltaNetConfig, "fla", "unit_eps=0.0: expected 1e-06. Set it in config.json"),
        ((memzoo.DeltaNetConfig, {"unit_eps": 1e-6, "capacity_blocks": 2}), "fla", "capacity_blocks=2: expected 1"),
        ((memzoo.DeltaNetConfig, {"unit_eps": 1e-6, "output_gate": "sigmoid"}), "fla", "output_gate='sigmoid'"),
        ((memzoo.CombaConfig, {"unit_eps": 1e-6, "output_gate": None}), "fla", "variant='paper': expected 'fla'"),
        ((memzoo.RetNetConfig, {"rope_theta": 5.0}), "fla", "expected rope_theta 10000.0"),
        ((memzoo.TransformerPlusPlusConfig, {"qk_norm": True}), "llama", "qk_norm=True: expected False. Qwen3 has"),
        ((memzoo.TransformerPlusPlusConfig, {"attention_bias": True}), "llama", "attention_out_bias=False: expected"),
        ((memzoo.TransformerPlusPlusConfig, {"mlp_bias": True}), "mistral", "mlp_bias=True: expected False"),
        (
            (
                memzoo.TransformerPlusPlusConfig,
                {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
            ),
            "mistral",
            "expected one kind of attention in every layer. Qwen3",
        ),
        (memzoo.TransformerPlusPlusConfig, "qwen2", "attention_bias=False: expected True"),
        (memzoo.TransformerPlusPlusConfig, "qwen3", "qk_norm=False: expected True"),
        (
            (memzoo.TransformerPlusPlusConfig, {"layer_types": ["sliding_attention"]}),
            "llama",
            "expected full attention",
        ),
        ((memzoo.TransformerPlusPlusConfig, {"head_dim": 6}), "fla", "head_dim=6: expected hidden_size"),
        ((memzoo.TransformerPlusPlusConfig, {"rope_parameters": LLAMA3}), "fla", "expected rope_type 'default'"),
    ],
    ids=str,
)
def test_what_theirs_cannot_say_is_refused(config: Any, to: str | None, message: str, tmp_path: Path) -> None:
    kind, options = config if isinstance(config, tuple) else (config, {})
    shape = {"vocab_size": 7, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind is memzoo.CombaConfig:
        shape |= {"expand_k": 1.0, "expand_v": 1.0}
    AutoModelForCausalLM.from_config(kind(**{**shape, **options})).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "ours", tmp_path / "theirs", to)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_wrong_weights_and_places_are_refused(natives: dict[str, Path], tmp_path: Path) -> None:
    source, key = natives["llama-biased"], "model.layers.2.self_attn.k_proj.bias"
    tensors = tensors_of(source)
    missing = edited(source, tmp_path / "missing", drop=key)
    with pytest.raises(ValueError, match=f"is missing {key}. Expected"):
        convert(missing, tmp_path / "ours")
    unknown = edited(source, tmp_path / "unknown", tensors={**tensors, "model.extra": torch.ones(2)})
    with pytest.raises(ValueError, match=r"has the unknown model\.extra"):
        convert(unknown, tmp_path / "ours")
    with pytest.raises(ValueError, match=r"expected the ignored options in config\.json, got none called"):
        convert(source, tmp_path / "ours", ignore=["quantization_config"])
    with pytest.raises(ValueError, match=r"expects a checkpoint of memzoo, got 'llama'"):
        convert(source, tmp_path / "ours", "qwen3")
    with pytest.raises(ValueError, match="to='gpt': expected one of"):
        convert(source, tmp_path / "ours", "gpt")
    assert not list(tmp_path.glob("*ours*"))
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there: expected a new folder"):
        convert(source, tmp_path / "there")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ValueError, match=r"expected model.safetensors or .*, got config.json"):
        convert(empty, tmp_path / "ours")


def test_parts_of_unlike_dtypes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    tensors = fla_checkpoint("DeltaNet", tmp_path / "theirs")
    key = "model.layers.0.attn.k_proj.weight"
    source = edited(tmp_path / "theirs", tmp_path / "mixed", tensors={**tensors, key: tensors[key].float()})
    with pytest.raises(ValueError, match="Tensors that become one: expected a single dtype"):
        convert(source, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed", "theirs"]


def test_a_shard_that_is_not_there(natives: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in natives["llama"].iterdir():
        if not path.name.startswith("model-00002"):
            (source / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="expects the shard model-00002"):
        convert(source, tmp_path / "ours")


def test_a_failing_write_leaves_nothing(
    natives: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(command, "write", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(natives["qwen3"], tmp_path / "ours")
    assert list(tmp_path.iterdir()) == []


# The tables


def test_a_table_uses_every_name_once() -> None:
    table = Table(model=(Row("a", "x"), Row("b", "x")), block=(), mixers={"full_attention": ()})
    config = memzoo.TransformerPlusPlusConfig(num_hidden_layers=1)
    with pytest.raises(ValueError, match="expected every name once, got twice: x"):
        table.rows(config)


def test_an_option_forgotten_is_found_at_once() -> None:
    options = FORMATS[0].options
    with pytest.raises(ValueError, match=r"expected each field once, missing \['vocab_size'\]"):
        replace(options, table=options.table[1:])


# The command line


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint("qwen3", tmp_path / "source")
    for name in ("tokenizer.json", "special_tokens_map.json", "merges.txt", "LICENSE"):
        (source / name).write_text(f"{name} of the source")
    (source / "README.md").write_text("not ours to keep")
    line = [sys.executable, "-m", "memzoo.conversion.convert", str(source), "ours"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ours"
    assert "Converting" in done.stderr
    monkeypatch.chdir(tmp_path)
    command.main(["ours", "back", "--to", "qwen3"])
    assert capsys.readouterr().out.strip() == "back"
    same_bits(tensors_of(tmp_path / "back"), tensors_of(source))
    for folder in ("ours", "back"):
        for name in ("tokenizer.json", "special_tokens_map.json", "merges.txt", "LICENSE", "generation_config.json"):
            assert (tmp_path / folder / name).read_text() == (source / name).read_text()
        assert not (tmp_path / folder / "README.md").exists()
    with pytest.raises(SystemExit) as exit_:
        command.main(["ours", "back", "--to", "qwen3"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("error: back: expected a new folder")
