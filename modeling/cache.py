"""The recurrent cache: what a model remembers of each sequence, in constant space.

Every tensor of a layer's state has the batch first, so that beams, repeats and selections act on all of it alike, and
rows may stand at different positions. A model's forward returns new states and the cache takes them at its end: an
error on the way leaves the cache as it was (but for a decoding step by Triton, which may have written to it).
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel

if TYPE_CHECKING:
    from memzoo.modeling.sequences import Rows


FORMAT = "memzoo.memory.4"
"""Of a saved memory: another one where a state's tensors, or what they mean, have changed."""


class StateLayer:
    """The state of one layer: a tree of tensors, batch first; `None` before the first token.

    Carries the attributes that transformers' `Cache` and `generate` ask of a layer.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        self.state: Any = None
        self.columns = 0

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of the state by `function` of it."""
        if self.state is not None:
            self.state = pytree.tree_map_only(Tensor, function, self.state)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in pytree.tree_leaves(self.state) if isinstance(x, Tensor)]

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1


class MemoryCache(Cache):
    """The cache of any model of the zoo.

    Args:
        config: the model's config. A cache belongs to one model configuration.
        max_cache_len: the columns that it can ever hold. A state that holds every token (of attention without a window,
            of exponential features) then has room for so many from its first token on, zero or masked until they come,
            so that a decoding step takes and gives the same shapes, as a CUDA graph wants them. `None`: such a state
            grows, and there is no limit; the others are of constant size either way.

    Decoding may write into the tensors of a state: where two texts go on from one cache, each needs a `copy.deepcopy`.

    Attributes:
        position: real tokens read per row, `[B]`, int64; `None` before the first token.
        columns: columns of the batch read so far, padding included: what `get_seq_length` answers.

    Example:
        >>> cache = MemoryCache(model.config)
        >>> model(first_part, cache=cache)
        >>> model(second_part, cache=cache)  # the same numbers as one pass over both
    """

    def __init__(self, config: PreTrainedConfig, max_cache_len: int | None = None) -> None:
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"MemoryCache: max_cache_len: expected at least 1, or None, got {max_cache_len}.")
        self.max_cache_len = max_cache_len
        self.layers: list[StateLayer]  # type: ignore[assignment]
        super().__init__(layers=[StateLayer() for _ in range(config.num_hidden_layers)])  # type: ignore[misc]
        self.identity = identity(config)
        self.model: weakref.ref[PreTrainedModel] | None = None
        self.weights_version: Any = None
        self.position: Tensor | None = None
        self._fits: PreTrainedConfig | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process knows no model until it is used with one."""
        return {**self.__dict__, "model": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryCache:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        kept = {"model": self.model, "_fits": self._fits}  # references, which a copy shares
        for layer in self.layers:  # what has a graph cannot be copied but in it
            memo.update({id(x): x.clone() for x in layer.tensors if x.grad_fn is not None})
        copied.__dict__.update({k: kept[k] if k in kept else copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return copied

    @property
    def columns(self) -> int:
        return self.layers[0].columns

    @property
    def states(self) -> list[Any]:
        """Each layer's state."""
        return [layer.state for layer in self.layers]

    def commit(self, states: list[Any], rows: Rows, model: PreTrainedModel) -> None:
        """Take the layers' new states after `model` has read `rows`."""
        if self.position is None or self.model is None:
            self.weights_version = _version(model)
        self.model = weakref.ref(model)
        for layer, state in zip(self.layers, states, strict=True):
            layer.state = state
            layer.columns += rows.batch[1]
        self.position = rows.position + (rows.batch[1] if rows.lengths is None else rows.lengths)

    def check(self, model: PreTrainedModel, batch: tuple[int, int]) -> None:
        """Raise a ValueError unless this cache fits the model and the batch `(B, T)` of new tokens.

        Outside of `torch.inference_mode` it then has no tensor that was made in it.
        """
        if self.max_cache_len is not None and self.columns + batch[1] > self.max_cache_len:
            raise ValueError(
                f"cache: it has room for max_cache_len={self.max_cache_len} columns; expected at most "
                f"{self.max_cache_len - self.columns} new ones after the {self.columns} read, got {batch[1]}. Make a "
                "MemoryCache with a larger max_cache_len, or one without, which grows."
            )
        if self._fits is not model.config:
            ours = identity(model.config)
            if self.identity != ours:
                raise ValueError(
                    f"cache: it belongs to another model: {_differences(ours, self.identity)}. Use "
                    "MemoryCache(model.config)."
                )
            self._fits = model.config
        if self.position is None:
            return
        filler = self.model() if self.model is not None else None
        if filler is not None and filler is not model:
            raise ValueError(
                "cache: it belongs to another model: expected this model or none, got a cache that another model of "
                "the same configuration has filled. Use a new MemoryCache(model.config)."
            )
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        if trains and any(x.is_inference() for layer in self.layers for x in layer.tensors):
            raise ValueError(
                "cache: it was filled under torch.inference_mode, which a graph cannot begin with; expected one filled "
                "outside of it. Call cache.detach() first, or read on under torch.no_grad()."
            )
        if self.position.shape[0] != batch[0]:
            raise ValueError(
                f"cache: expected a batch of {self.position.shape[0]} rows as in the cache, got {batch[0]}. Use a new "
                "cache, or batch_repeat_interleave / batch_select_indices on this one."
            )
        if self.position.is_inference() and not torch.is_inference_mode_enabled():
            # May a tensor be written to? A compiled graph cannot ask.
            self._map(lambda x: x.clone() if x.is_inference() else x)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            layer.map(function)
        if self.position is not None:
            self.position = function(self.position)

    def reset(self) -> None:
        """Forget every token: the next one is read from the learned initial state."""
        for layer in self.layers:
            layer.state, layer.columns = None, 0
        self.position = None

    def detach(self) -> MemoryCache:
        """Cut the graph behind the states, between two segments of truncated back-propagation. Returns the cache.

        A cache filled under `torch.inference_mode` can be trained on after this.
        """
        self._map(lambda x: x.clone() if x.is_inference() else x.detach())
        return self

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` `[B']`, in that order; a row may be taken more than once."""
        self._map(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, in place of the row."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            f"MemoryCache.crop({tokens_to_remove}): a recurrent memory cannot forget its last tokens, so assisted "
            f"decoding and "
            "prompt lookup cannot run on it. Keep a copy.deepcopy of the cache from before them."
        )

    def activate_past_recording(self) -> None:
        self.crop(0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read so far, padding included; the same for every layer."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """`max_cache_len`; -1 where there is no limit."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    @property
    def batch_size(self) -> int:
        return -1 if self.position is None else self.position.shape[0]

    @property
    def is_initialized(self) -> bool:
        return self.position is not None

    @property
    def memory_bytes(self) -> int:
        """Bytes of all states."""
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer.tensors)


def identity(config: PreTrainedConfig) -> dict[str, Any]:
    """What a cache must share with a model: everything in its config that shapes or moves the state."""
    unrelated = {
        "kernel_backend",
        "use_cache",
        "tie_word_embeddings",
        "initializer_range",
        "attention_dropout",
        "auto_map",
    }
    unrelated |= {"pad_token_id", "bos_token_id", "eos_token_id", *(f.name for f in fields(PreTrainedConfig))}
    names = {f.name for f in fields(config)} - unrelated  # not what a user has noted on it
    return {"model_type": config.model_type, **{k: v for k, v in sorted(config.to_dict().items()) if k in names}}


def _differences(expected: dict[str, Any], got: dict[str, Any]) -> str:
    keys = [key for key in {**expected, **got} if expected.get(key) != got.get(key)]
    return "; ".join(f"{key}: expected {expected.get(key)!r}, got {got.get(key)!r}" for key in keys)


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of the weights that a memory was made with: a sample of each, so that it costs little for large
    models.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        sample = weight.detach().flatten()[:: max(1, weight.numel() // 64)]
        digest.update(name.encode())
        digest.update(sample.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


def save_memory(cache: MemoryCache, path: str | os.PathLike[str]) -> None:
    """Write a cache to one safetensors file, from which `load_memory` continues in any process.

    The file carries the model's configuration and a digest of its weights.

    Args:
        cache: a filled cache, while the model that filled it is alive.
        path: the file; written beside and renamed, so that it is never half there.

    Raises:
        ValueError: an empty cache, or one whose model is gone.
    """
    model = cache.model() if cache.model is not None else None
    if cache.position is None or model is None:
        raise ValueError(
            "save_memory: expected a cache that a forward pass of a living model has filled, got "
            f"{'an empty one' if cache.position is None else 'one whose model is gone'}."
        )
    if cache.weights_version != _version(model):
        raise ValueError(
            "save_memory: the model's weights have changed since it read the text; expected the weights that did. Let "
            "the model read the text again."
        )
    tensors: dict[str, Tensor] = {"position": cache.position.detach().clone()}
    structure = [_describe(state, f"layers.{index}", tensors) for index, state in enumerate(cache.states)]
    metadata = {
        "format": FORMAT,
        "identity": json.dumps(cache.identity),
        "weights": fingerprint(model),
        "columns": str(cache.columns),
        "max_cache_len": json.dumps(cache.max_cache_len),
        "structure": json.dumps(structure),
    }
    target = Path(path)
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, beside, metadata=metadata)
        os.chmod(beside, 0o666 & ~_umask())  # `mkstemp` lets nobody else read
        os.replace(beside, target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def load_memory(path: str | os.PathLike[str], model: PreTrainedModel) -> MemoryCache:
    """Read a cache that `save_memory` wrote, onto the model's device.

    Args:
        path: the file.
        model: the model that filled the memory, or the same checkpoint in another process; with or without a head.

    Raises:
        ValueError: the file holds no memory, or one of another model, configuration or weights.
    """
    base = _backbone(model)
    no_memory = ValueError(f"load_memory: {path} holds no memory: expected a file written by save_memory.")
    try:
        opened = safe_open(os.fspath(path), framework="pt", device=str(base.device))
    except SafetensorError as error:
        raise no_memory from error
    with opened as file:
        metadata = file.metadata() or {}
        found = metadata.get("format", "")
        if found != FORMAT and found.startswith(FORMAT.rstrip("0123456789")):
            raise ValueError(
                f"load_memory: {path} was written by another version of memzoo: expected the format {FORMAT}, got "
                f"{found}. Let the model read the text again."
            )
        if found != FORMAT:
            raise no_memory
        cache = MemoryCache(base.config, json.loads(metadata.get("max_cache_len", "null")))
        theirs = json.loads(metadata["identity"])
        if theirs != cache.identity:
            raise ValueError(f"load_memory: {path} belongs to another model: {_differences(cache.identity, theirs)}.")
        if metadata["weights"] != fingerprint(base):
            raise ValueError(
                f"load_memory: {path} was made with other weights of the same configuration; expected the model that "
                f"read "
                "the text. Load that checkpoint, or let this model read the text again."
            )
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for layer, description in zip(cache.layers, json.loads(metadata["structure"]), strict=True):
        layer.state, layer.columns = _rebuild(description, tensors), int(metadata["columns"])
    cache.position = tensors["position"]
    cache.model, cache.weights_version = weakref.ref(base), _version(base)
    return cache


def _backbone(model: torch.nn.Module) -> PreTrainedModel:
    """The module that reads tokens and fills caches, also inside a wrapper such as PEFT's."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.base_model is module:
            return module
    raise ValueError(f"load_memory: expected a model of the zoo, got {type(model).__name__}.")


def _version(model: torch.nn.Module) -> tuple[int, set[torch.dtype]]:
    """What changes whenever a weight is changed in place, or cast; weights made under `torch.inference_mode` do not
    count their changes."""
    weights = list(model.parameters())
    return sum(0 if weight.is_inference() else weight._version for weight in weights), {w.dtype for w in weights}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _describe(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree of a state as JSON, its tensors added to `tensors` under the names of their path."""
    if isinstance(state, Tensor):
        tensors[name] = state.detach().contiguous().clone()
        return name
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        fields = {field: _describe(getattr(state, field), f"{name}.{field}", tensors) for field in state._fields}
        return {"type": f"{type(state).__module__}:{type(state).__qualname__}", "fields": fields}
    if isinstance(state, tuple):
        return [_describe(item, f"{name}.{index}", tensors) for index, item in enumerate(state)]
    if state is None:
        return None
    raise TypeError(f"state {name}: expected tensors, tuples, named tuples and None, got {type(state).__name__}.")


def _rebuild(description: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(description, str):
        return tensors[description]
    if isinstance(description, list):
        return tuple(_rebuild(item, tensors) for item in description)
    if isinstance(description, dict):
        module, _, name = description["type"].partition(":")
        if not module.startswith("memzoo."):
            raise ValueError(f"load_memory: the file names a state of {module!r}; expected one of memzoo.")
        fields = {field: _rebuild(item, tensors) for field, item in description["fields"].items()}
        return getattr(importlib.import_module(module), name)(**fields)
    return None
