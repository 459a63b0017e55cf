"""A pretrained transformer becomes a model of ours that at first computes exactly what the transformer does.

python -m memzoo.conversion.upcycle SRC DST --to titans_mag                          # a folder or a Hub name
python -m memzoo.conversion.upcycle SRC DST --to titans_mal --set memory_depth=1 chunk_size=32
python -m memzoo.conversion.upcycle SRC DST --to hope_attention --set chain_periods=[4,1]

What is added is closed by a tensor of each block that is zero. That tensor has a gradient from the first step of
training on; once it has moved, all that is added has one.

    titans_mag       a memory gates the attention         closed: the weights of the norm before its gate
    titans_mal       a memory adds to what it reads       closed: the memory's output projection
    hope_attention   levels behind the feed-forward       closed: their last projections

The wirings of Titans' paper would change the numbers; those here are its config's `memory_skip`. Hope-Attention's first
level is the source's feed-forward, by default a slow one (arXiv 2512.24695, section 7.3, starts every level from a
pretrained feed-forward, which is the pretrained model with one level only); levels that learn in context start with a
step size of zero.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from memzoo.configuration.hope import HopeAttentionConfig
from memzoo.configuration.matrix_memory import TransformerPlusPlusConfig
from memzoo.configuration.titans import TitansConfig
from memzoo.conversion.checkpoint import Checkpoint, copy_files, expect_new, new_folder, write
from memzoo.conversion.convert import add_arguments, expect_shapes, inward, meta_model, plan, read_source
from memzoo.conversion.options import refuse
from memzoo.conversion.tables import Piece, Recipe

FREEZE = ("source", "attention", "none")


@dataclass(frozen=True)
class Target:
    """A model of ours that a Transformer++ can become.

    Args:
        config_class: its config.
        fixed: options that make it equal to the source.
        renamed: where a part of a Transformer++'s parameter names is called otherwise.
        added: pattern of the parameters that the source does not have.
        closed: ending of those among them that are zero at the start.
        complete: the options with those that follow from the source.
    """

    config_class: type[PreTrainedConfig]
    fixed: Mapping[str, Any]
    renamed: Mapping[str, str]
    added: str
    closed: str
    complete: Callable[[Mapping[str, Any], PreTrainedConfig], Mapping[str, Any]] = lambda options, source: options

    def config(self, source: PreTrainedConfig, options: Mapping[str, Any], subject: str) -> PreTrainedConfig:
        """Our config: what both have is the source's, the rest is of what is added."""
        ours, theirs = ({f.name for f in dataclasses.fields(kind)} for kind in (self.config_class, type(source)))
        free = sorted((ours - theirs - set(self.fixed)) | MEMORY_OPTIONS)
        for name, value in options.items():
            if name not in free:
                raise refuse(subject, name, value, f"one of the options {free}", "The rest is the source's.")
        shared = {name: getattr(source, name) for name in ours & theirs - MEMORY_OPTIONS}
        shared["layer_types"] = list(source.mixer_types)
        try:
            return self.config_class(**{**shared, **self.fixed, **self.complete(options, source)})
        except StrictDataclassError as error:
            raise ValueError(f"{subject}: {error}") from error

    def name(self, name: str) -> str:
        """Ours of a Transformer++'s parameter."""
        for part, ours in self.renamed.items():
            name = name.replace(part, ours)
        return name

    def is_added(self, name: str) -> bool:
        return re.search(self.added, name) is not None

    def fits(self, config: PreTrainedConfig) -> bool:
        return isinstance(config, self.config_class) and all(
            getattr(config, name) == value for name, value in self.fixed.items()
        )


def _chain(options: Mapping[str, Any], source: PreTrainedConfig) -> dict[str, Any]:
    """The source's feed-forward first, then levels a quarter as wide; what learns in context stands still."""
    made, width = {**options}, source.intermediate_size
    in_context = made.get("chain_learning") == "in_context"
    if in_context and made.setdefault("chain_step_size", 0.0) != 0:
        cure = "Load the upcycled model with another one: from_pretrained(DST, chain_step_size=...)."
        raise refuse("hope_attention", "chain_step_size", made["chain_step_size"], "0, the static model", cure)
    for name in ("chain_periods", "chain_sizes"):
        if not isinstance(made.get(name, []), list):
            raise refuse("hope_attention", name, made[name], "a list, a number for each level")
    slow, fast = (2048, 512) if in_context else (4, 1)
    periods = made.setdefault("chain_periods", [slow, *[fast] * (len(made.get("chain_sizes", [1, 1])) - 1)])
    sizes = made.setdefault("chain_sizes", [width, *[max(1, width // 4)] * (len(periods) - 1)])
    if sizes[:1] != [width]:
        raise refuse("hope_attention", "chain_sizes", sizes, f"the source's {width} first", "It is the first level.")
    return made


MEMORY_OPTIONS = {"capacity_blocks", "capacity_context", "kernel_backend"}
"""Options of a memory that a Transformer++ has without using them."""
TARGETS = {
    "titans_mag": Target(
        TitansConfig,
        {"variant": "mag", "memory_skip": True, "num_persistent_tokens": 0},
        {".mixer.o_proj.": ".mixer.output.o_proj."},
        r"\.mixer\.(memory|output\.memory_norm)\.",
        ".output.memory_norm.weight",
    ),
    "titans_mal": Target(
        TitansConfig,
        {"variant": "mal", "memory_skip": True, "num_persistent_tokens": 0},
        {},
        r"\.mixer\.(memory|output)\.",
        ".output.o_proj.weight",
    ),
    "hope_attention": Target(
        HopeAttentionConfig,
        {"chain": "sequential"},
        {".mlp_norm.": ".chain.levels.0.norm.", ".mlp.": ".chain.levels.0.mlp."},
        r"\.chain\.levels\.[1-9]",
        ".down_proj.weight",
        _chain,
    ),
}


class Extended:
    """A checkpoint and further tensors, as one source."""

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
        self.checkpoint, self.tensors = checkpoint, tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name in self.tensors:
            return self.tensors[name][start:stop]
        return self.checkpoint.read(name, start, stop)

    def shape(self, name: str) -> Sequence[int]:
        return self.tensors[name].shape if name in self.tensors else self.checkpoint.shape(name)


def upcycle(
    source: str | Path,
    destination: str | Path,
    to: str,
    *,
    seed: int = 0,
    revision: str | None = None,
    ignore: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> Path:
    """Make a model of ours of a pretrained transformer; every tensor of the transformer keeps its bits.

    In float32 the logits are equal to the bit where one attention mask and one window hold the text, as for conversion
    to Transformer++.

    Args:
        source: a folder, or the name of a repository on the Hub: a Llama, Mistral, Qwen2 or Qwen3 of transformers, or
            what else converts to Transformer++.
        destination: a folder that does not exist yet; written beside and renamed.
        to: one of `TARGETS`.
        seed: of the new parameters, which have the source's dtype.
        revision: of the repository.
        ignore: options of the source's config.json that are left out.
        max_shard_size: of a file of weights.
        options: of the config made that the source does not decide: `memory_depth`, `chunk_size`, `capacity_blocks`,
            ... of `TitansConfig`; `chain_learning`, `chain_periods` and `chain_sizes` of `HopeAttentionConfig`, by
            default `[4, 1]` steps or `[2048, 512]` tokens and the source's width and a quarter of it.

    Returns:
        The destination.

    Raises:
        ValueError: an existing destination, a source that Transformer++ cannot represent, options that the source
            decides or that do not fit.
    """
    destination = Path(destination)
    expect_new(destination)
    if to not in TARGETS:
        raise ValueError(f"to={to!r}: expected one of {tuple(TARGETS)}.")
    target = TARGETS[to]
    folder, raw = read_source(source, revision, ignore)
    format, plain = plan(raw, None, str(source))
    if type(plain) is not TransformerPlusPlusConfig:
        raise ValueError(
            f"{source}: expected a transformer, got model_type={raw['model_type']!r}, which has a memory of its own. "
            "Convert it (python -m memzoo.conversion.convert)."
        )
    config = target.config(plain, options, str(source))
    with Checkpoint(folder) as checkpoint:
        recipes = {target.name(name): recipe for name, recipe in inward(format, plain, checkpoint).items()}
        first = next(iter(recipes.values()))
        model = meta_model(config, checkpoint.read(first.pieces[0].name, 0, 0).dtype)
        tensors = _new_parameters(model, target, seed)
        extended = Extended(checkpoint, tensors)
        recipes |= {name: Recipe((Piece(name, 0, len(tensor)),), 0) for name, tensor in tensors.items()}
        expect_shapes({name: recipe.shape(extended) for name, recipe in recipes.items()}, model, str(source))
        config.architectures, config.dtype = [type(model).__name__], plain.dtype
        with new_folder(destination) as fresh:
            write(recipes, extended, fresh, max_shard_size)
            config.save_pretrained(fresh)
            copy_files(folder, fresh)
    return destination


def freeze(model: PreTrainedModel, what: str) -> int:
    """Choose which parameters of an upcycled model train.

    Args:
        model: from `upcycle`, loaded.
        what: `"source"` freezes all that the source had, so that only what was added trains; `"attention"` the
            source's attention; `"none"` nothing.

    Returns:
        How many numbers train.

    Raises:
        ValueError: another word, or a model that is not one of `upcycle`.
    """
    if what not in FREEZE:
        raise ValueError(f"freeze={what!r}: expected one of {FREEZE}.")
    target = next((target for target in TARGETS.values() if target.fits(model.config)), None)
    if target is None:
        raise ValueError(
            f"freeze: expected an upcycled model, one of {tuple(TARGETS)}, got {type(model).__name__} with other "
            "options. Make it with memzoo.conversion.upcycle."
        )
    for name, parameter in model.named_parameters():
        frozen = what == "source" or (what == "attention" and ".mixer." in name)
        parameter.requires_grad_(target.is_added(name) or not frozen)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _new_parameters(model: PreTrainedModel, target: Target, seed: int) -> dict[str, Tensor]:
    """What a new model of `model`'s config, which is on the meta device, has besides the source; closed."""
    tensors: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for prefix, module in model.named_modules():
            own = [name for name, _ in module.named_parameters(prefix, recurse=False) if target.is_added(name)]
            if own:
                module.to_empty(device="cpu", recurse=False)
                model._init_weights(module)
                tensors |= {name: model.get_parameter(name).detach() for name in own}
    for name, tensor in tensors.items():
        if name.endswith(target.closed):
            nn.init.zeros_(tensor)
    return tensors


def _option(text: str) -> tuple[str, Any]:
    """`name=value`, the value as in JSON or a word."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m memzoo.conversion.upcycle",
        description="Give a pretrained transformer a memory or levels, closed at first: its logits stay as they are.",
    )
    add_arguments(parser)
    parser.add_argument("--to", choices=tuple(TARGETS), required=True, help="the model to make")
    parser.add_argument(
        "--set", nargs="*", type=_option, default=[], metavar="NAME=VALUE", help="options of the config that is made"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the new parameters")
    given = parser.parse_args(arguments)
    try:
        path = upcycle(
            given.source,
            given.destination,
            given.to,
            seed=given.seed,
            revision=given.revision,
            ignore=given.ignore,
            max_shard_size=given.max_shard_size,
            **dict(given.set),
        )
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(path)


if __name__ == "__main__":
    main()
