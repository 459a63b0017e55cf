"""Memory-Managed Long-Context Attention (arXiv 2606.28876): editable slots beside the fast state of any backbone."""

from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from memzoo.configuration.atlas import AtlasConfig, DLAConfig, OmegaNetConfig
from memzoo.configuration.base import MemoryConfig, require
from memzoo.configuration.exponential_memory import DeepTransformerConfig, DotConfig, SWDTConfig
from memzoo.configuration.hope import ChainConfig, HopeConfig
from memzoo.configuration.matrix_memory import (
    CombaConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    RetNetConfig,
    SWLAConfig,
    TransformerPlusPlusConfig,
)
from memzoo.configuration.titans import TitansConfig

BACKBONES: dict[str, type[MemoryConfig]] = {
    config.model_type.removeprefix("memzoo_"): config
    for config in (
        TitansConfig,
        OmegaNetConfig,
        AtlasConfig,
        DLAConfig,
        DeepTransformerConfig,
        SWDTConfig,
        DotConfig,
        RetNetConfig,
        DeltaNetConfig,
        GatedDeltaNetConfig,
        CombaConfig,
        SWLAConfig,
        TransformerPlusPlusConfig,
        HopeConfig,
    )
}
"""The configs of the mixers that may stand below the slots."""
WRITE_TRIGGERS = ("token", "stride", "external")
VERSION_MODES = ("latest", "history")
DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {"swla": {"window": 1}}
"""Of the backbones; SWLA with a window of 1 is gated linear attention, `S_t = a_t S_{t-1} + b_t k_t v_t^T`."""


@strict
class MemoryManagedConfig(MemoryConfig):
    """A fast backbone, a table of editable slots with a life cycle, and a sparse look-up over stored chunks.

    Source: Memory-Managed Long-Context Attention (arXiv 2606.28876), whose abstract and summaries were at hand, not its
    formulas. From the paper: the fast state beside slots of one request; query-blind hard writes, overwriting,
    versions, protection, eviction, at most 32 slots; a query-time sparse look-up with a calibrated switch for what no
    write signalled; few write labels. Ours: every formula, size and threshold (see `memzoo.kernels.slot_table` and
    `memzoo.modeling.mixers.managed`), and training all of it inside a language model: the paper's second version
    ("Bounded Editable Memory with a Hard Lifecycle and Calibrated Sparse Fallback") is a system around a frozen model
    and names that as a next step.

    Args:
        backbone: the mixer of each block, by the name of its architecture: `"swla"`, `"gated_deltanet"`, `"titans"`...
            (of Hope its memories; the feed-forward is this model's own, without a chain of levels).
        backbone_options: fields of that architecture's config; `None` for its defaults, of SWLA `{"window": 1}`, which
            is gated linear attention.
        memory_layers: blocks with a slot table; `None` for one, two thirds up. (The paper has one table per request.)
        num_slots: slots M of a table.
        memory_dim: width of the slots' and the stored chunks' keys and values.
        memory_conv_width: tokens, the current one included, that a token's query, key and value are taken from.
        read_top_k: slots that a token reads.
        write_trigger: what makes a token a candidate for a write: `"token"`, its id is one of `event_token_ids`;
            `"stride"`, every `write_stride`-th token; `"external"`, the caller's `event_mask`.
        event_token_ids: ids that end an event.
        write_stride: tokens between candidates.
        write_threshold: probability from which a candidate is written.
        same_threshold: cosine of two keys from which they are one.
        protect_margin: how much less convincing than a protected slot an event of its key may be.
        version_mode: `"latest"`: a slot per key; `"history"`: a slot per key and version.
        versions_per_key: versions of a key in `"history"`; the oldest makes room.
        keep_confidence, keep_usage, keep_importance, keep_age: weights of what a slot is worth when one must go.
        age_scale: age at which half of `keep_age` is lost, in tokens.
        usage_decay: of the count of reads, at each candidate.
        write_loss_weight: weight of the cross-entropy of labelled writes in the loss.
        fallback_chunks: stored chunks that a token looks into; 0 for the slots alone.
        chunk_size: tokens of a stored chunk.
        salient_keys: keys of a chunk, the longest, that stand for it in the look-up.
        sketch_bits: width of the presence sketch: a bit per token id (modulo this width) and chunk.
        sketch_window: last tokens, the current one included, that are looked up in the sketches; 0 for no sketches.
        read_threshold: reader's confidence from which the slots answer alone; 1.0: the chunks are always asked, as they
            should be in training (`MemoryManagedForCausalLM.calibrate_fallback` finds a lower one).
        calibrated_lengths: shortest and longest context that `read_threshold` was calibrated on; a longer one warns
            once, since such thresholds do not carry over (a finding of the paper's second version).

    Example:
        >>> config = MemoryManagedConfig(hidden_size=256, num_hidden_layers=6, num_attention_heads=4)
        >>> config = MemoryManagedConfig.preset("170m", backbone="gated_deltanet", write_trigger="external")
    """

    model_type = "memzoo_memory_managed"

    backbone: str = "swla"
    backbone_options: dict | None = None
    attention_dropout: float | int = 0.0
    memory_layers: list[int] | None = None
    num_slots: int = 32
    memory_dim: int = 64
    memory_conv_width: int = 4
    read_top_k: int = 4
    write_trigger: str = "stride"
    event_token_ids: list[int] | None = None
    write_stride: int = 16
    write_threshold: float | int = 0.5
    same_threshold: float | int = 0.7
    protect_margin: float | int = 0.1
    version_mode: str = "latest"
    versions_per_key: int = 4
    keep_confidence: float | int = 1.0
    keep_usage: float | int = 0.1
    keep_importance: float | int = 0.5
    keep_age: float | int = 0.5
    age_scale: float | int = 1024.0
    usage_decay: float | int = 0.9
    write_loss_weight: float | int = 0.1
    fallback_chunks: int = 4
    chunk_size: int = 64
    salient_keys: int = 8
    sketch_bits: int = 4096
    sketch_window: int = 4
    read_threshold: float | int = 1.0
    calibrated_lengths: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.validate_memory_managed()

    @property
    def backbone_config(self) -> MemoryConfig:
        """The config of the mixers: this one's fields and the backbone's own."""
        kind = BACKBONES[self.backbone]
        options = self.backbone_options if self.backbone_options is not None else DEFAULT_OPTIONS.get(self.backbone, {})
        shared = {name: getattr(self, name) for name in self._shared(kind)}
        return kind(**shared, **options)

    @property
    def table_layers(self) -> list[int]:
        """Blocks with a slot table."""
        return [2 * self.num_hidden_layers // 3] if self.memory_layers is None else self.memory_layers

    @staticmethod
    def _shared(kind: type[MemoryConfig]) -> set[str]:
        """Fields that a backbone takes from here: what every model of the zoo has, and the dropout of attention."""
        ours, general, theirs = ({field.name for field in fields(of)} for of in (MemoryConfig, PreTrainedConfig, kind))
        return (ours - general | {"attention_dropout"}) & theirs

    def validate_memory_managed(self) -> None:
        """Part of the `@strict` validation."""
        require(self.backbone in BACKBONES, self, "backbone", f"one of {sorted(BACKBONES)}")
        kind = BACKBONES[self.backbone]
        theirs, chain = ({field.name for field in fields(of)} for of in (kind, ChainConfig))
        own = theirs - self._shared(kind) - chain
        require(
            set(self.backbone_options or {}) <= own,
            self,
            "backbone_options",
            f"None, or fields of {kind.__name__} that this config does not have itself",
        )
        _ = self.backbone_config  # validates itself
        for field in ("num_slots", "memory_dim", "memory_conv_width", "read_top_k", "write_stride"):
            require(getattr(self, field) >= 1, self, field, "at least 1")
        for field in ("versions_per_key", "chunk_size", "salient_keys", "sketch_bits"):
            require(getattr(self, field) >= 1, self, field, "at least 1")
        for field in ("fallback_chunks", "sketch_window", "write_loss_weight", "protect_margin"):
            require(getattr(self, field) >= 0, self, field, "at least 0")
        for field in ("keep_confidence", "keep_usage", "keep_importance", "keep_age"):
            require(getattr(self, field) >= 0, self, field, "at least 0")
        for field in ("write_threshold", "same_threshold", "usage_decay", "read_threshold"):
            require(0 <= getattr(self, field) <= 1, self, field, "0 to 1")
        require(self.sketch_bits % 8 == 0, self, "sketch_bits", "a multiple of 8")
        require(self.age_scale > 0, self, "age_scale", "above 0")
        require(self.read_top_k <= self.num_slots, self, "read_top_k", f"at most num_slots={self.num_slots}")
        require(self.salient_keys <= self.chunk_size, self, "salient_keys", f"at most chunk_size={self.chunk_size}")
        require(self.write_trigger in WRITE_TRIGGERS, self, "write_trigger", f"one of {WRITE_TRIGGERS}")
        require(self.version_mode in VERSION_MODES, self, "version_mode", f"one of {VERSION_MODES}")
        ids = self.event_token_ids or []
        require(
            self.write_trigger != "token" or bool(ids),
            self,
            "event_token_ids",
            "ids that end an event, for write_trigger='token'",
        )
        require(
            all(0 <= token < self.vocab_size for token in ids),
            self,
            "event_token_ids",
            f"ids below vocab_size={self.vocab_size}",
        )
        layers = self.table_layers
        require(
            bool(layers) and sorted(set(layers)) == layers and layers[0] >= 0 and layers[-1] < self.num_hidden_layers,
            self,
            "memory_layers",
            f"None, or ascending blocks from 0 to {self.num_hidden_layers - 1}",
        )
        lengths = self.calibrated_lengths
        require(
            lengths is None or (len(lengths) == 2 and 1 <= lengths[0] <= lengths[1]),
            self,
            "calibrated_lengths",
            "None, or the shortest and the longest context, ascending",
        )
