"""What the converter knows of one architecture of another library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.activations import ACT2FN

from memzoo.conversion.options import Option, Options, Unfit, Values, same
from memzoo.conversion.tables import Row, Table


@dataclass(frozen=True)
class Format:
    """An architecture of another library and its counterpart here.

    Args:
        name: what `--to` calls it.
        model_type, architecture: what its config.json says of itself.
        options: its config.
        table: its weights.
        native: whether transformers knows the model type: its config class then fills in defaults and old spellings.
    """

    name: str
    model_type: str
    architecture: str
    options: Options
    table: Table
    native: bool

    def to_ours(self, theirs: Mapping[str, Any]) -> PreTrainedConfig:
        """Our config from a config.json."""
        if self.native:
            theirs = CONFIG_MAPPING[self.model_type].from_dict(dict(theirs)).to_dict()
        return self.options.to_ours(theirs, f"{self.model_type} config")

    def to_theirs(self, config: PreTrainedConfig) -> Values:
        """A config.json from our config."""
        values = self.options.to_theirs(config, f"{type(config).__name__} for {self.model_type}")
        if self.native:
            values = CONFIG_MAPPING[self.model_type](**values).to_diff_dict()
        return {**values, "model_type": self.model_type, "architectures": [self.architecture]}


def untied(config: PreTrainedConfig) -> bool:
    return not config.tie_word_embeddings


def _known_activation(name: str) -> str:
    if name not in ACT2FN:
        raise Unfit("hidden_act", name, f"one of {sorted(ACT2FN)}", "Others have no counterpart here.")
    return name


ACTIVATION: Option = same("hidden_act", cast=_known_activation)

# The feed-forward has the same names everywhere.
MLP = tuple(
    Row(name, name, when=None if kind == "weight" else lambda config: config.mlp_bias)
    for part in ("gate_proj", "up_proj", "down_proj")
    for kind in ("weight", "bias")
    for name in (f"mlp.{part}.{kind}",)
)


def attention(prefix: str) -> dict[str, tuple[Row, ...]]:
    """Rows of the attention whose projections lie under `prefix`, for both kinds of attention layers."""
    rows = [
        Row(
            f"mixer.attention.{part}_proj.{kind}",
            f"{prefix}.{part}_proj.{kind}",
            when=None if kind == "weight" else lambda config: config.attention_bias,
        )
        for part in "qkv"
        for kind in ("weight", "bias")
    ]
    rows += [
        Row(f"mixer.attention.{part}_norm.weight", f"{prefix}.{part}_norm.weight", when=lambda config: config.qk_norm)
        for part in "qk"
    ]
    rows += [
        Row("mixer.o_proj.weight", f"{prefix}.o_proj.weight"),
        Row("mixer.o_proj.bias", f"{prefix}.o_proj.bias", when=lambda config: config.attention_out_bias),
    ]
    return {"full_attention": tuple(rows), "sliding_attention": tuple(rows)}
