"""A decoding step asks the device for nothing, so that it can be part of a CUDA graph: checked without a GPU.

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
import torch.utils._pytree as pytree
import zoo
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
STATIC = [
    *("titans-lmm-e1", "titans-lmm-e16", "omeganet-lmm-e1", "dla-lmm-e1", "retnet-e1", "retnet-e4"),
    *("deltanet-e1", "gated_deltanet-e1", "comba-e1", "comba-fla-e4", "swla-e1", "swla-e4"),
    *("deep_transformer-e1", "swdt-e1", "dot-e1", "dot-e4"),
]
"""The models whose decoding is static. Not: attention (it asks whether a row has keys missing), Muon (its step is the
chunked one, which asks whether a chunk is complete), chains of memories with periods of their own (Hope), the
memory-managed model."""


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


@contextmanager
def static() -> Iterator[None]:
    with NoLists(), NoCopies():
        yield


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
    ],
    ids=str,
)
def test_a_step_of_the_deep_memory(sizes: dict[str, Any]) -> None:
    """Over more tokens than a chunk has."""
    unlock = [3 * block for block in range(sizes.get("blocks", 1))]
    made: dict[str, Any] = deep.make_inputs(tokens=2, chunk_size=4, dtype=torch.float32, **sizes)
    options: dict[str, Any] = {"chunk_size": 4, "unlock": unlock}
    with torch.no_grad():
        _, state = deep_memory(**made, **options, backend="chunked")
        state = on_device(state)
        one = {name: on_device(x[:, :1]) for name, x in made.items() if isinstance(x, Tensor)}
        for _ in range(5):
            with static():
                y, state = deep_memory(**{**made, **one, "state": state}, **options, backend="triton")
    assert y.device.type == "meta"


def decoded(name: str) -> None:
    """Five tokens after seven of a prompt, over two ends of chunks."""
    reader = zoo.build(name, kernel_backend="auto").eval()
    cache = MemoryCache(reader.config, max_cache_len=7 + 1 + 5)
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
        with static():
            for _ in range(5):
                logits = model(token, cache=cache).logits
    assert logits.shape == (2, 1, zoo.VOCAB)
    assert [x.shape for layer in cache.layers for x in layer.tensors] == shapes


@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize("name", [*STATIC[:3], *zoo.slow(*STATIC[3:])])
def test_decoding(name: str) -> None:
    decoded(name)


@pytest.mark.usefixtures("_meta_is_a_gpu")
@pytest.mark.parametrize(("name", "reason"), [("titans-mal-e1", "item"), ("atlas-lmm-e1", "item")])
def test_what_asks_the_device_is_found(name: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{reason}\(\) cannot be called on meta tensors"):
        decoded(name)


def test_copies_are_found() -> None:
    with static():
        with pytest.raises(AssertionError, match="_to_copy.* between devices"):
            torch.zeros(2).to("meta")
        with pytest.raises(AssertionError, match="index.* between devices"):
            torch.empty(5, device="meta")[torch.tensor([0, 3])]
        with pytest.raises(AssertionError, match="__getitem__ of a list"):
            torch.empty(2, 5, device="meta")[:, [0, 3]]
        with pytest.raises(AssertionError, match="tensor of a list"):
            torch.tensor([0, 3], device="meta")
        with pytest.raises(AssertionError, match="new_tensor of a list"):
            torch.empty(5, device="meta").new_tensor([0, 3])
