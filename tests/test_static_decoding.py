"""A decoding step asks the device for nothing and keeps every shape, so that it can be part of a CUDA graph: checked
without a GPU.

On the meta device a tensor has a shape and no values: `item`, `bool`, `nonzero` and a copy to the host raise.
`NoCopies` and `NoLists` refuse what is left, copies between devices. The choice of a backend takes the meta device for
a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
import zoo
from tolerances import MODEL, close
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memzoo import MemoryCache
from memzoo.kernels import deep_memory as deep
from memzoo.kernels import delta_rule as delta
from memzoo.kernels import linear_attention as linear
from memzoo.kernels import short_conv as conv
from memzoo.kernels.deep_memory import deep_memory
from memzoo.kernels.delta_rule import delta_rule
from memzoo.kernels.linear_attention import linear_attention
from memzoo.kernels.registry import Op
from memzoo.kernels.short_conv import short_conv

pytest.importorskip("triton")
LAUNCHES = {
    "titans-lmm-e1": 8,
    "titans-mag-e1": 12,
    "atlas-lmm-e1": 11,
    "titans-lmm-e16": 8,
    "titans-mac-e16": 17,
    "titans-mal-skip-e16": 17,
    "omeganet-lmm-e1": 9,
    "dla-lmm-e1": 8,
    "atlas-gated-e1": 17,
    "atlas-gated-token-e16": 12,
    "retnet-e1": 6,
    "retnet-e4": 7,
    "deltanet-e1": 7,
    "deltanet-e4": 8,
    "gated_deltanet-e1": 9,
    "comba-e1": 10,
    "swla-e1": 11,
    "swdt-e1": 9,
    "dot-e4": 10,
    "deep_transformer-mlp-e1": 13,
    "transformer_pp-mixed": 8,
    "hope_attention-e1": 6,
    "hope-stream": 7,
    "memory_managed-e1": 11,
}
"""The models whose decoding is static, and how many kernels one token starts in a mixer, of two rows. The memory's own
step, read, gates and write, is one of them. Muon starts one more for each layer of the memory, and at every token one
besides; Hope's memories, of which some make what all of them then learn, and a memory on exponential features, whose
errors need the sums over all keys, are two in all. The convolution with queries and keys of unit length is one, so are
all gates from their logits, monomials of degree 2, Proteus' opening of keys or values, the rotary embedding, Comba's
addresses, what a segment's past says, and a token's queries and keys turned and put in their places. The rest is
projections, the attention, and the norm with the gate. What a block adds to its mixer are nine: two norms, two sums,
five of the feed-forward (and a chain or a managed memory its own, which are not counted)."""
ASKING = {
    "hope-e1": "at the end of a chunk a level learns from the gradients of a pass over it, which no other token takes",
    "hope_attention-nested": "the same",
    "memory_managed-fallback": "it stores chunks, of which there are more and more, and looks for them where it must",
}
"""Models whose decoding asks the device, with what for. Flash attention does, too, whatever the model, where rows of
unequal length have keys missing: it drops them. And a model that is given an attention mask looks whether it is needed:
a graph takes tokens alone. With none of these the cache needs `max_cache_len`, without which some states grow."""


class NoCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)]
        # What mixes devices moves an index or a factor to the other one; only a CPU's number goes along as an argument.
        assert len({x.device.type for x in tensors if x.ndim or "copy" in str(func)}) <= 1, f"{func} between devices"
        return found


class NoLists(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        makes = func in (torch.tensor, torch.as_tensor, Tensor.new_tensor)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            makes = args[0].device.type != "cpu" and any(isinstance(place, list) for place in places)
        assert not makes or found.device.type == "cpu", f"{func.__name__} of a list"
        return found


class Counted(TorchDispatchMode):
    """Kernels that a GPU starts: one for each operator that is neither a view nor mere room for a tensor, whether
    aten's or Triton's. A decoding step of ours is one, but for those in `SEVERAL`."""

    NONE = ("empty", "new_empty", "empty_like", "_unsafe_view", "scalar_tensor", "promote_types")
    SEVERAL = dict.fromkeys(("self_modifying_step", "exponential_memory_step", "deep_exponential_memory_step"), 2)

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.launches += 0 if func.is_view or name in self.NONE else self.SEVERAL.get(name, 1)
        return func(*args, **(kwargs or {}))


class Fused(TorchFunctionMode):
    """What is one kernel on a GPU, and several operators on the meta device."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.counted.launches
        found = func(*args, **(kwargs or {}))
        if func in (F.rms_norm, F.scaled_dot_product_attention):
            self.counted.launches = before + 1
        return found


@contextmanager
def static() -> Iterator[Counted]:
    with Counted() as counted, Fused(counted), NoLists(), NoCopies():
        yield counted


def on_device(x: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), x)


@pytest.fixture
def _meta_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    given = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cuda": device != "meta" and given(device))
    modules = [module for name, module in sys.modules.items() if name.startswith("memzoo.kernels.")]
    ops = {id(x): x for module in modules for x in vars(module).values() if isinstance(x, Op)}.values()
    backends = [backend for op in ops for backend in op.backends if backend.name == "triton"]
    before = [backend.supports for backend in backends]
    for backend, supports in zip(backends, before, strict=True):

        def asked(problem: Any, supports: Any = supports) -> str | None:
            return supports(problem._replace(device="cuda") if problem.device == "meta" else problem)

        object.__setattr__(backend, "supports", asked)  # it is frozen
    yield
    for backend, supports in zip(backends, before, strict=True):
        object.__setattr__(backend, "supports", supports)


@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize(
    ("rule", "made"),
    [(short_conv, conv.make_inputs), (linear_attention, linear.make_inputs), (delta_rule, delta.make_inputs)],
    ids=["short_conv", "linear_attention", "delta_rule"],
)
def test_a_step(rule: Any, made: Any) -> None:
    args = on_device(made(tokens=1, dtype=torch.float32))
    with torch.no_grad(), static():
        y, _ = rule(**args, backend="triton")
    assert y.device.type == "meta"


@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden": (16,)},
        {"hidden": (16,), "window": 3},
        {"hidden": (16,), "blocks": 4, "gated": True},
        {"hidden": (), "blocks": 4, "window": 2},
        {"hidden": (16,), "blocks": 4, "gated": True, "window": 3, "muon": deep.Muon()},
        {"hidden": (), "muon": deep.Muon(0)},
        {"hidden": (16,), "muon": deep.Muon(every="chunk")},
    ],
    ids=str,
)
def test_a_step_of_the_deep_memory(sizes: dict[str, Any]) -> None:
    """Over more tokens than a chunk has."""
    unlock = [3 * block for block in range(sizes.get("blocks", 1))]
    options: dict[str, Any] = {"chunk_size": 4, "unlock": unlock, "muon": sizes.get("muon")}
    shapes = {name: size for name, size in sizes.items() if name != "muon"}
    made: dict[str, Any] = deep.make_inputs(tokens=2, chunk_size=4, dtype=torch.float32, **shapes)
    with torch.no_grad():
        _, state = deep_memory(**made, **options, backend="chunked")
        state = on_device(state)
        one = {name: on_device(x[:, :1]) for name, x in made.items() if isinstance(x, Tensor)}
        for _ in range(5):
            with static():
                y, state = deep_memory(**{**made, **one, "state": state}, **options, backend="triton")
    assert y.device.type == "meta"


@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize(
    ("sizes", "options", "operators"),
    [
        ({"hidden": (16,), "window": 3}, {}, ["deep_memory", "deep_memory_step"]),
        ({"hidden": (), "blocks": 4}, {"unlock": (0, 3, 6, 9)}, ["deep_memory", "deep_memory_step"]),
        ({"hidden": ()}, {"muon": deep.Muon(2, "chunk")}, ["deep_memory_step", "newton_schulz_advance"]),
        (
            {"hidden": ()},
            {"muon": deep.Muon(2, "token")},
            ["deep_memory_momentum", "newton_schulz_advance", "deep_memory_recall"],
        ),
    ],
    ids=str,
)
def test_the_deep_memory_is_one_graph(sizes: dict[str, Any], options: dict[str, Any], operators: list[str]) -> None:
    """By Triton, more tokens (but for Muon) and one; with what is imported when it is first wanted."""
    made: dict[str, Any] = deep.make_inputs(tokens=9, chunk_size=4, dtype=torch.float32, **sizes)
    options = {"chunk_size": 4, **options}
    found: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes if "memzoo" in str(node.target)]
        found.extend(target._opname for target in targets)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x: deep_memory(**x, **options), fullgraph=True, backend=backend)
    with torch.no_grad():
        _, state = deep_memory(**made, **options, backend="chunked")
        one = {name: on_device(x[:, :1]) for name, x in made.items() if isinstance(x, Tensor)}
        for given in [*([] if "muon" in options else [on_device(made)]), {**made, **one, "state": on_device(state)}]:
            y, _ = compiled(given)
            assert y.shape == given["query"].shape[:3] + made["value"].shape[3:]
            assert y.device.type == "meta"
    assert found == operators


def decoded(name: str) -> list[int]:
    """Two tokens after seven of a prompt; others are like them, since nothing has a value. Launches of each mixer."""
    reader = zoo.build(name, kernel_backend="auto").eval()
    cache = MemoryCache(reader.config, max_cache_len=7 + 1 + 2)
    with torch.no_grad():
        reader(zoo.tokens(2, 7), cache=cache)
        model = zoo.build(name, kernel_backend="auto").eval()
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = nn.Parameter(on_device(parameter), requires_grad=False)
            for key, buffer in module._buffers.items():
                module._buffers[key] = on_device(buffer)
        cache._map(on_device)
        cache.model = None
        token = torch.empty(2, 1, dtype=torch.int64, device="meta")
        model(token, cache=cache)  # what is made once, such as the places of a feature map, is made now
        shapes = [x.shape for layer in cache.layers for x in layer.tensors]
        with static() as counted:
            per_mixer = [launches_of(layer.mixer, counted) for layer in model.model.layers]
            for _ in range(2):
                logits = model(token, cache=cache).logits
    assert logits.shape == (2, 1, zoo.VOCAB)
    assert [x.shape for layer in cache.layers for x in layer.tensors] == shapes
    return [after - before for before, after in per_mixer]


def launches_of(module: nn.Module, counted: Counted) -> list[int]:
    """Launches before and after the module's last call."""
    found = [0, 0]
    module.register_forward_pre_hook(lambda *_: found.__setitem__(0, counted.launches))
    module.register_forward_hook(lambda *_: found.__setitem__(1, counted.launches))
    return found


@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize("name", [*list(LAUNCHES)[:3], *zoo.slow(*list(LAUNCHES)[3:])])
def test_decoding(name: str) -> None:
    assert 0 < max(decoded(name)) <= LAUNCHES[name]


@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize("name", ASKING)
def test_what_asks_the_device_is_found(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        decoded(name)


@pytest.mark.parametrize("name", ["titans-mag-e1", "atlas-lmm-e1", "memory_managed-e1"])
def test_what_is_not_asked_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys may be missing, a gradient too long, a chunk complete, a row filled, a token an event, and is not."""
    model, ids, found = zoo.causal_lm(name), zoo.tokens(2, 9), []
    for asked in (True, False):
        if not asked:
            for module in list(sys.modules.values()):
                if module.__name__.startswith("memzoo."):
                    if "may_hold" in vars(module):
                        monkeypatch.setattr(module, "may_hold", lambda _: True)
                    if "known" in vars(module):
                        monkeypatch.setattr(module, "known", lambda _: None)
        cache = MemoryCache(model.config)
        with torch.no_grad():
            found.append(torch.cat([model(part, cache=cache).logits for part in ids.split([2, *[1] * 7], 1)], dim=1))
    close(*found, MODEL[torch.float64])


def test_copies_are_found() -> None:
    with static():
        with pytest.raises(AssertionError, match=r"_to_copy.* between devices"):
            torch.zeros(2).to("meta")
        with pytest.raises(AssertionError, match=r"index.* between devices"):
            torch.empty(5, device="meta")[torch.tensor([0, 3])]
        with pytest.raises(AssertionError, match="__getitem__ of a list"):
            torch.empty(2, 5, device="meta")[:, [0, 3]]
        with pytest.raises(AssertionError, match="tensor of a list"):
            torch.tensor([0, 3], device="meta")
        with pytest.raises(AssertionError, match="new_tensor of a list"):
            torch.empty(5, device="meta").new_tensor([0, 3])
