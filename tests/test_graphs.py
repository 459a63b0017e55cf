"""Every op in one graph of torch.compile, on a CPU with torch's form, with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
import zoo
from tolerances import OP, close
from torch import Tensor

from memzoo.kernels import addresses as addressing
from memzoo.kernels import deep_exponential_memory as deep_exponential
from memzoo.kernels import deep_memory as deep
from memzoo.kernels import delta_rule as delta
from memzoo.kernels import exponential_memory as exponential
from memzoo.kernels import gates as gating
from memzoo.kernels import kv_write as kv
from memzoo.kernels import linear_attention as linear
from memzoo.kernels import monomials as mono
from memzoo.kernels import newton_schulz as newton
from memzoo.kernels import norm_gate as normed
from memzoo.kernels import opened as opening
from memzoo.kernels import retrieval, rotary, self_modifying, short_conv
from memzoo.kernels.deep_memory import Muon, chunked, deep_memory, operator
from memzoo.kernels.gates import Gate

DEEP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deep_memory": ({}, {}),
    "deep_memory-matrix": ({"hidden": ()}, {}),
    "deep_memory-window": ({"window": 3}, {}),
    "deep_memory-blocks": ({"blocks": 4, "gated": True}, {"unlock": (0, 3, 6, 9)}),
    "deep_memory-bound": ({}, {"max_gradient_norm": 0.1}),
    "deep_memory-muon": ({}, {"muon": Muon(2, "chunk")}),
}
HOPE: dict[str, Any] = {"chunk_size": 8, "self_chunk_size": 16, "step_limit": 0.5}
WITHOUT_GRADIENTS = ("kv_write",)


def cases() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Each op and its arguments."""
    kinds = Gate("share"), Gate("log_rest")
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        name: (partial(deep_memory, chunk_size=4, **options), deep.make_inputs(tokens=9, chunk_size=4, **sizes))
        for name, (sizes, options) in DEEP.items()
    }
    return {
        **found,
        "addresses": (addressing.addresses, addressing.make_inputs()),
        "deep_exponential_memory": (deep_exponential.deep_exponential_memory, deep_exponential.make_inputs()),
        "delta_rule": (delta.delta_rule, delta.make_inputs(tokens=5)),
        "exponential_memory": (exponential.exponential_memory, exponential.make_inputs()),
        "gates": (gating.gates, gating.make_inputs(*kinds)),
        "kv_write": (kv.kv_write, kv.make_inputs()),
        "linear_attention": (linear.linear_attention, linear.make_inputs(tokens=5)),
        "monomials": (mono.monomials, mono.make_inputs(2)),
        "newton_schulz": (newton.newton_schulz, newton.make_inputs()),
        "norm_gate": (partial(normed.norm_gate, activation="silu", eps=1e-6), normed.make_inputs()),
        "opened": (opening.opened, opening.make_inputs()),
        "retrieval": (retrieval.retrieve, retrieval.make_inputs(tokens=2, blocks=2)),
        "rotary": (rotary.rotary, rotary.make_inputs()),
        "self_modifying": (partial(self_modifying.self_modifying, **HOPE), self_modifying.make_inputs()),
        "short_conv": (partial(short_conv.short_conv, activation="silu"), short_conv.make_inputs()),
    }


CASES = cases()


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        if a.numel():
            close(a, b, OP[torch.float64])


SLOW = "deep_exponential_memory", "self_modifying"


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in SLOW), *zoo.slow(*SLOW)])
def test_an_op_is_one_graph(name: str) -> None:
    torch.compiler.reset()
    rule, given = CASES[name]
    args = pytree.tree_map_only(Tensor, torch.clone, given)
    with torch.set_grad_enabled(name not in WITHOUT_GRADIENTS):
        leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor) and x.is_floating_point()]
        if torch.is_grad_enabled():
            leaves = [x.requires_grad_() for x in leaves]
        found = []
        for compute in (rule, torch.compile(lambda x: rule(**x), fullgraph=True, backend="aot_eager")):
            own = args if torch.is_grad_enabled() else pytree.tree_map_only(Tensor, torch.clone, args)
            outputs = pytree.tree_leaves(compute(own) if compute is not rule else rule(**own))
            ys = [y for y in outputs if isinstance(y, Tensor) and y.is_floating_point()]
            gradients: tuple[Tensor, ...] = ()
            if torch.is_grad_enabled():
                total = sum((y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum() for y in ys if y.requires_grad)
                gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
            found.append((*ys, *gradients))
    assert any(bool(x.any()) for x in found[0])
    same(found[1], found[0])


@pytest.mark.parametrize("name", DEEP)
def test_a_token_of_the_deep_memory_is_one_graph(name: str) -> None:
    """Over two chunks, and nothing of it is compiled again."""
    rule, args = CASES[name]
    counter = torch._dynamo.testing.CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: rule(**x), fullgraph=True, backend=counter)
    with torch.no_grad():
        state, other = (rule(**args)[1] for _ in range(2))
        for t in range(9):
            one = {n: x[:, t : t + 1] if isinstance(x, Tensor) else x for n, x in args.items()}
            want, state = rule(**{**one, "state": state})
            got, other = compiled({**one, "state": other})
            same(pytree.tree_leaves((got, other)), pytree.tree_leaves((want, state)))
    assert counter.frame_count <= 2  # the first state's tensors lie otherwise


@pytest.mark.parametrize("name", ["deep_memory", "deep_memory-blocks", "deep_memory-matrix"])
def test_the_walk_as_torch_sees_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of so few tokens that the memory comes out as it went in, which an operator must not return."""
    rule, args = CASES[name]
    seen, walk = [], operator._walk
    monkeypatch.setattr(chunked, "_walk", lambda network, ends, tensors, _: operator.walk(network, ends, tensors))
    monkeypatch.setattr(operator, "_walk", lambda *given: seen.append(given) or walk(*given))
    for tokens in (9, 2):
        rule(**{n: x[:, :tokens].requires_grad_() if isinstance(x, Tensor) else x for n, x in args.items()})
    for flat, *options in seen:
        found = torch.library.opcheck(walk, ([x.detach().requires_grad_() for x in flat], *options))
        assert set(found.values()) == {"SUCCESS"}
    assert len(seen) == 2
