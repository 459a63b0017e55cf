"""The recurrent cache: rows, resets, copies, refusals, and memories kept in files."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import zoo
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tolerances import MODEL, close, error
from torch import Tensor
from transformers import PreTrainedModel

from memzoo import MemoryCache, load_memory, save_memory
from memzoo.configuration.exponential_memory import ExponentialMemoryConfig

BOUND = MODEL[torch.float64]
FIRST, REST = 2 * zoo.CHUNK + 3, 7


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor, cache: MemoryCache) -> Tensor:
    return model(ids, cache=cache).logits


def filled(name: str, rows: int = 3) -> tuple[PreTrainedModel, Tensor, MemoryCache, Tensor]:
    """A model, ids, a cache that has read the first of them, and the logits of the rest in one pass."""
    model, ids = zoo.causal_lm(name), zoo.tokens(rows, FIRST + REST)
    cache = MemoryCache(model.config)
    read(model, ids[:, :FIRST], cache)
    with torch.no_grad():
        want = model(ids).logits[:, FIRST:]
    return model, ids[:, FIRST:], cache, want


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_tensor_has_the_rows_first_and_all_move_together(name: str) -> None:
    model, rest, cache, want = filled(name)
    assert cache.batch_size == 3
    for layer in cache.layers:
        assert all(x.shape[0] == 3 for x in layer.tensors)
    order = torch.tensor([2, 0, 0, 1])
    moved = copy.deepcopy(cache)
    moved.batch_select_indices(order)
    close(read(model, rest[order], moved), want[order], BOUND)
    reordered = copy.deepcopy(cache)
    reordered.reorder_cache(torch.tensor([1, 2, 0]))
    close(read(model, rest[[1, 2, 0]], reordered), want[[1, 2, 0]], BOUND)
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    close(read(model, rest.repeat_interleave(2, dim=0), repeated), want.repeat_interleave(2, dim=0), BOUND)
    # Rows of a repeated cache share no storage: writing to one leaves its twin alone.
    again = copy.deepcopy(cache)
    again.batch_select_indices(torch.tensor([0, 0]))
    tokens = torch.stack([rest[0], rest[1]])
    step_by_step = torch.cat([read(model, token, again) for token in tokens.split(1, dim=1)], dim=1)
    close(step_by_step[0], want[0], BOUND)
    close(read(model, rest, cache), want, BOUND)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_halving_any_part_of_the_state_is_seen(name: str) -> None:
    """Every tensor of the state matters to what follows: a lost or stale one cannot hide behind a tolerance."""
    model, rest, cache, want = filled(name, rows=1)
    longer = torch.cat([rest, zoo.tokens(1, 2 * zoo.CHUNK, seed=5)], dim=1)
    whole = read(model, longer, copy.deepcopy(cache))
    for index, layer in enumerate(cache.layers):
        for number, tensor in enumerate(layer.tensors):
            if not tensor.is_floating_point() or not tensor.any():
                continue
            broken = copy.deepcopy(cache)
            broken.layers[index].tensors[number].mul_(0.5)
            assert error(read(model, longer, broken), whole) > 1e-6, f"layer {index}, tensor {number}"
    close(read(model, rest, cache), want, BOUND)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_reset_means_the_learned_initial_state(name: str) -> None:
    model, _, cache, _ = filled(name)
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = zoo.tokens(2, 9, seed=4)  # another batch size, too
    close(read(model, ids, cache), model(ids).logits, BOUND)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_requests_do_not_leak_into_one_another(name: str) -> None:
    model = zoo.causal_lm(name)
    a, b = zoo.tokens(1, 11, seed=1), zoo.tokens(1, 9, seed=2)
    alone = model.generate(b, max_new_tokens=6, do_sample=False)
    model.generate(a, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(b, max_new_tokens=6, do_sample=False), alone)
    held = {name for name, value in vars(model.model).items() if isinstance(value, Tensor)}
    assert not held, f"tensors kept on the model: {held}"


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_size_and_cost_do_not_grow_with_the_context(name: str) -> None:
    model = zoo.causal_lm(name)
    sizes = []
    for length in (20, 200):
        cache = MemoryCache(model.config)
        read(model, zoo.tokens(1, length), cache)
        read(model, zoo.tokens(1, 1), cache)
        sizes.append((cache.memory_bytes, [tuple(x.shape) for layer in cache.layers for x in layer.tensors]))
    keeps_keys = isinstance(model.config, ExponentialMemoryConfig)
    grows = keeps_keys or "full_attention" in getattr(model.config, "mixer_types", ())
    assert (sizes[0] == sizes[1]) is not grows


# A full attention, one beside persistent tokens and one over them, exponential features of each kind.
_GROWING = ["transformer_pp-mixed", "titans-mag-skip-e16", "titans-mal-skip-e16", "dot-e4", "deep_transformer-mlp-e1"]
GROWING = [name for name in [*_GROWING, "dot-mac-e1", "hope_attention-nested"] if name in zoo.NAMES]


@pytest.mark.parametrize("name", GROWING)
def test_a_cache_with_room_keeps_its_shapes(name: str, tmp_path: Path) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(2, 13)
    cache, parts, shapes = MemoryCache(model.config, max_cache_len=13), [], []
    for part in ids.split([5, 1, 6, 1], dim=1):
        parts.append(read(model, part, cache))
        shapes.append([x.shape for layer in cache.layers for x in layer.tensors])
    close(torch.cat(parts, dim=1), read(model, ids, MemoryCache(model.config)), BOUND)
    assert all(shape == shapes[0] for shape in shapes)
    save_memory(cache, tmp_path / "memory")
    for full in (cache, load_memory(tmp_path / "memory", model)):
        with pytest.raises(ValueError, match="room for max_cache_len=13 columns; expected at most 0 new ones after"):
            read(model, ids[:, :1], full)
        assert (full.columns, full.get_max_length()) == (13, 13)
    with pytest.raises(ValueError, match="max_cache_len: expected at least 1, or None, got 0"):
        MemoryCache(model.config, max_cache_len=0)


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_refusals(name: str) -> None:
    model, rest, cache, _ = filled(name)
    with pytest.raises(ValueError, match=r"cannot forget its last tokens.*assisted decoding"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="cannot forget"):
        cache.activate_past_recording()
    with pytest.raises(ValueError, match="expected a batch of 3 rows as in the cache, got 2"):
        model(rest[:2], cache=cache)
    other = zoo.causal_lm(next(n for n in zoo.NAMES if n != name))
    with pytest.raises(ValueError, match=r"belongs to another model: .*expected .*, got "):
        other(rest, cache=cache)
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="another model of the same configuration has filled"):
        twin(rest, cache=cache)
    for implementation in ("offloaded", "quantized"):
        with pytest.raises(ValueError, match="a recurrent memory has a cache of its own; expected None, or 'static'"):
            model.generate(rest, max_new_tokens=2, cache_implementation=implementation)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(rest[:1], max_new_tokens=2, prompt_lookup_num_tokens=2)
    assert cache.get_max_length() == -1


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_a_cache_owns_what_it_holds(name: str) -> None:
    """No view of the prompt, which would keep it alive, nor of a parameter, which an optimizer moves; no cycle."""
    model = zoo.build(name, torch.float64, num_persistent_tokens=0).eval()
    cache = MemoryCache(model.config)
    read(model, zoo.tokens(1, 3 * zoo.CHUNK + 100), cache)
    tensors = list(itertools.chain(*(layer.tensors for layer in cache.layers)))
    kept = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
    assert kept <= cache.memory_bytes
    cache = MemoryCache(model.config)
    read(model, zoo.tokens(1, 2), cache)  # the anchor is still the learned initial memory
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert own.isdisjoint(x.untyped_storage().data_ptr() for layer in cache.layers for x in layer.tensors)
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_pickled_caches_continue(name: str) -> None:
    model, rest, cache, want = filled(name)
    close(read(model, rest, pickle.loads(pickle.dumps(cache))), want, BOUND)


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_gradient_modes_may_change_on_one_cache(name: str) -> None:
    """Read under inference mode, continued without gradients, with them, and under inference mode again."""
    model, rest, _, want = filled(name)
    cache = MemoryCache(model.config)
    with torch.inference_mode():
        model(zoo.tokens(3, FIRST + REST)[:, :FIRST], cache=cache)
    parts = [read(model, rest[:, :1], cache)]
    with torch.inference_mode():
        parts.append(model(rest[:, 1:2], cache=cache).logits)
    parts.append(model(rest[:, 2:3], cache=cache.detach()).logits)
    parts.append(read(model, rest[:, 3:], cache))
    close(torch.cat(parts, dim=1), want, BOUND)


@pytest.mark.parametrize("name", [name for name in ("titans-mac-e16", "dot-e4") if name in zoo.NAMES])
@torch.no_grad()
def test_a_compiled_model_goes_on_from_inference_mode(name: str) -> None:
    """In whose graph nobody asks what may be written to."""
    model, ids = zoo.build(name, torch.float64, num_hidden_layers=1).eval(), zoo.tokens(2, 8)
    want, cache = model(ids).logits[:, 6:], MemoryCache(model.config, max_cache_len=8)
    with torch.inference_mode():
        model(ids[:, :6], cache=cache)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    close(torch.cat([read(model, token, cache) for token in ids[:, 6:].split(1, dim=1)], dim=1), want, BOUND)
    assert not any(x.is_inference() for layer in cache.layers for x in layer.tensors)


# Memories in files ---------------------------------------------------------------------------------------------------

_CONTINUE = """
import sys, torch
import memzoo
from pathlib import Path
from transformers import AutoModelForCausalLM
for folder in map(Path, sys.argv[1:]):
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    cache = memzoo.load_memory(folder / "memory.safetensors", model)
    with torch.no_grad():
        logits = model(torch.load(folder / "rest.pt"), cache=cache).logits
    torch.save((logits, cache.get_seq_length()), folder / "out.pt")
"""


@pytest.mark.slow
def test_another_process_continues_saved_memories(tmp_path: Path) -> None:
    """One for all of them, since most of its time is spent on imports."""
    wanted = {}
    for name in zoo.BLOCKS:
        folder = tmp_path / name
        model, rest, cache, wanted[folder] = filled(name)
        model.save_pretrained(folder / "model")
        save_memory(cache, folder / "memory.safetensors")
        torch.save(rest, folder / "rest.pt")
    subprocess.run([sys.executable, "-c", _CONTINUE, *map(str, wanted)], check=True, timeout=400)
    for folder, want in wanted.items():
        logits, length = torch.load(folder / "out.pt")
        close(logits, want, BOUND)
        assert length == FIRST + REST
        assert {path.name for path in folder.iterdir()} == {"model", "memory.safetensors", "rest.pt", "out.pt"}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_saved_memory_is_the_cache(name: str, tmp_path: Path) -> None:
    model, rest, cache, want = filled(name)
    path = tmp_path / "memory.safetensors"
    save_memory(cache, path)
    loaded = load_memory(path, model)
    ours, theirs = (list(itertools.chain(*(layer.tensors for layer in c.layers))) for c in (cache, loaded))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    close(read(model, rest, loaded), want, BOUND)
    with torch.no_grad():  # the backbone without its head takes it, too
        hidden = model.model(rest, cache=load_memory(path, model.model)).last_hidden_state
        close(model.lm_head(hidden), want, BOUND)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["identity"])["model_type"] == model.config.model_type


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_a_memory_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    model, _, cache, _ = filled(name)
    path = tmp_path / "memory.safetensors"
    save_memory(cache, path)
    with pytest.raises(ValueError, match=r"belongs to another model: num_hidden_layers: expected 3, got 2"):
        load_memory(path, zoo.build(name, torch.float64, num_hidden_layers=3))
    changed = copy.deepcopy(model)
    with torch.no_grad():
        next(changed.model.layers[1].parameters()).add_(0.01)
    with pytest.raises(ValueError, match="other weights of the same configuration"):
        load_memory(path, changed)
    save_file(load_file(path), tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="holds no memory"):
        load_memory(tmp_path / "plain.safetensors", model)
    save_file(load_file(path), tmp_path / "old.safetensors", metadata={"format": "memzoo.memory.3"})
    with pytest.raises(ValueError, match=r"another version of memzoo: expected the format memzoo\.memory\.4, got"):
        load_memory(tmp_path / "old.safetensors", model)
    (tmp_path / "text.safetensors").write_text("no tensors here")
    with pytest.raises(ValueError, match="holds no memory"):
        load_memory(tmp_path / "text.safetensors", model)
    with torch.no_grad():
        cache = MemoryCache(changed.config)
        changed(zoo.tokens(1, 5), cache=cache)
        next(changed.parameters()).add_(0.01)
    with pytest.raises(ValueError, match="weights have changed since it read the text"):
        save_memory(cache, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="a forward pass of a living model has filled, got an empty"):
        save_memory(MemoryCache(model.config), tmp_path / "none.safetensors")
    assert not (tmp_path / "none.safetensors").exists()


@pytest.mark.parametrize("name", zoo.PLAIN[:1])
def test_a_failed_save_leaves_the_old_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, cache, _ = filled(name)
    path = tmp_path / "memory.safetensors"
    save_memory(cache, path)
    before = path.read_bytes()

    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("memzoo.modeling.cache.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_memory(cache, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
