"""Records what flash-linear-attention's models are made of and what they compute: names and shapes of their parameters
by config, and logits on given weights.

    pip install --no-deps flash-linear-attention fla-core einops
    TRITON_INTERPRET=1 python tests/record_fla.py

writes `tests/data/fla.json`. On a CPU its kernels run in Triton's interpreter, in float32; its attention, which calls
flash-attn, can be built there and not run.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RECORD = Path(__file__).parent / "data" / "fla.json"
TINY = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_heads": 2}
HYBRID = {"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 5}}
# Class, and the options in which a model differs from its default. "default" models keep the library's sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{name}-default": (name, {"num_hidden_layers": 1})
        for name in ("RetNet", "DeltaNet", "GatedDeltaNet", "Comba", "Transformer")
    },
    "RetNet": ("RetNet", {**TINY, "expand_v": 1.5}),
    "RetNet-hybrid": ("RetNet", {**TINY, **HYBRID, "use_output_gate": False, "tie_word_embeddings": True}),
    "DeltaNet": ("DeltaNet", {**TINY, "expand_k": 0.5, "expand_v": 1.5, "allow_neg_eigval": True}),
    "DeltaNet-gated": ("DeltaNet", {**TINY, "use_gate": True, "conv_size": 3, "norm_eps": 1e-5}),
    "GatedDeltaNet": ("GatedDeltaNet", {**TINY, "head_dim": 10}),
    "GatedDeltaNet-hybrid": (
        "GatedDeltaNet",
        {**TINY, **HYBRID, "num_heads": 5, "head_dim": 6, "expand_v": 1.5, "output_gate_activation": "sigmoid"},
    ),
    "Comba": ("Comba", {**TINY, "head_dim": 10}),
    "Comba-plain": ("Comba", {**TINY, "head_dim": 8, "expand_v": 1.0, "use_output_gate": False}),
    "Transformer": ("Transformer", {**TINY, "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 5}),
    "Transformer-norms": ("Transformer", {**TINY, "qk_norm": True, "norm_eps": 1e-5, "rope_theta": 500.0}),
}


def library() -> Any:
    """The library's models, such that those with attention can be built on a CPU."""
    attention = importlib.import_module("fla.layers.attn")
    if attention.flash_attn_func is None:  # it asks for flash-attn when it is built, not when it runs
        attention.flash_attn_func = library
    return importlib.import_module("fla.models")


def weights(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Lively weights of these shapes, in float64."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[key] = noise * (1.5 * shape[-1] ** -0.5 if len(shape) == 2 else 0.7)
    return tensors


IDS = [7 * place % 59 + 1 for place in range(13)]
"""The text that is read."""


def logits(model: Any, shapes: dict[str, list[int]]) -> list[float]:
    """After the last token, on `weights`."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for key, tensor in weights(shapes).items():
            parameters[key].copy_(tensor)
        last = model.eval()(torch.tensor([IDS]), use_cache=False).logits[0, -1]
    return [round(float(x), 6) for x in last]


def interpret() -> None:
    """Let Triton's interpreter run kernels that want to be tuned on a GPU first: it takes the first of their forms."""
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    tuner.do_bench = property(lambda self: lambda function, quantiles=None: [1.0, 1.0, 1.0])


def record() -> dict[str, Any]:
    """The config and the parameters' shapes of every model, by the installed library."""
    fla, models = importlib.import_module("fla"), library()
    found = {}
    for name, (architecture, options) in MODELS.items():
        config = getattr(models, f"{architecture}Config")(**options)
        with torch.device("meta"):
            model = getattr(models, f"{architecture}ForCausalLM")(config)
        shapes = {key: list(parameter.shape) for key, parameter in model.named_parameters()}
        if config.tie_word_embeddings:
            shapes.pop("lm_head.weight", None)
        values = {key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"}
        found[name] = {"config": values, "shapes": shapes}
    return {"version": fla.__version__, "models": found}


def record_logits() -> dict[str, list[float]]:
    """What the models without attention compute."""
    models, found = library(), {}
    for name, (architecture, options) in MODELS.items():
        if name.endswith("-default") or architecture == "Transformer" or "attn" in options:
            continue
        model = getattr(models, f"{architecture}ForCausalLM")(getattr(models, f"{architecture}Config")(**options))
        found[name] = logits(model, {key: list(parameter.shape) for key, parameter in model.named_parameters()})
    return found


if __name__ == "__main__":
    interpret()
    found = record()
    for name, values in record_logits().items():
        found["models"][name]["logits"] = values
    models = [f'"{name}": {json.dumps(model, sort_keys=True)}' for name, model in sorted(found["models"].items())]
    RECORD.write_text(f'{{"version": "{found["version"]}", "models": {{\n' + ",\n".join(models) + "\n}}\n")
