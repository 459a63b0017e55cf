"""Triton kernels on the CPU, in triton's interpreter, against the reference in float64.

Not collected by name: `test_triton.py` starts it in processes with TRITON_INTERPRET=1, which must be there before
triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import scripts
import torch
import torch.utils._pytree as pytree
import zoo
from tolerances import MODEL, OP, close
from torch import Tensor

from memzoo import MemoryCache
from memzoo.kernels import deep_exponential_memory as deep_exponential
from memzoo.kernels import deep_memory as deep
from memzoo.kernels import delta_rule as delta
from memzoo.kernels import exponential_memory as exponential
from memzoo.kernels import kv_write as kv
from memzoo.kernels import linear_attention as linear
from memzoo.kernels import monomials as mono
from memzoo.kernels import retrieval
from memzoo.kernels import short_conv as conv
from memzoo.kernels.addresses import addresses
from memzoo.kernels.addresses import make_inputs as addresses_inputs
from memzoo.kernels.addresses import triton as addresses_triton
from memzoo.kernels.deep_exponential_memory import deep_exponential_memory
from memzoo.kernels.deep_exponential_memory import triton as deep_exponential_triton
from memzoo.kernels.deep_memory import deep_memory
from memzoo.kernels.deep_memory import triton as deep_triton
from memzoo.kernels.deep_memory import triton_step as deep_step
from memzoo.kernels.delta_rule import delta_rule
from memzoo.kernels.exponential_memory import exponential_memory
from memzoo.kernels.exponential_memory import triton as exponential_triton
from memzoo.kernels.gates import Decay, Gate, gates
from memzoo.kernels.gates import make_inputs as gate_inputs
from memzoo.kernels.gates import triton as gates_triton
from memzoo.kernels.kv_write import kv_write
from memzoo.kernels.kv_write import triton as kv_triton
from memzoo.kernels.linear_attention import linear_attention
from memzoo.kernels.linear_attention import triton as linear_triton
from memzoo.kernels.monomials import monomials
from memzoo.kernels.monomials import triton as mono_triton
from memzoo.kernels.newton_schulz import newton_schulz
from memzoo.kernels.newton_schulz import triton as newton_triton
from memzoo.kernels.norm_gate import make_inputs as norm_inputs
from memzoo.kernels.norm_gate import norm_gate
from memzoo.kernels.norm_gate import triton as norm_triton
from memzoo.kernels.opened import make_inputs as opened_inputs
from memzoo.kernels.opened import opened
from memzoo.kernels.opened import triton as opened_triton
from memzoo.kernels.retrieval import retrieve
from memzoo.kernels.retrieval import triton as retrieval_triton
from memzoo.kernels.rotary import make_inputs as rotary_inputs
from memzoo.kernels.rotary import rotary
from memzoo.kernels.rotary import triton as rotary_triton
from memzoo.kernels.self_modifying import Weights, self_modifying
from memzoo.kernels.self_modifying import make_inputs as memory_inputs
from memzoo.kernels.self_modifying import triton as memory_triton
from memzoo.kernels.short_conv import short_conv
from memzoo.kernels.short_conv import triton as conv_triton


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks within a few tokens, since an interpreted operation takes a tenth of a millisecond."""
    chunks(monkeypatch, 16)


def chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(linear_triton, "CHUNK", {torch.float32: size, torch.bfloat16: size})


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def results(rule: Callable, args: dict[str, Any], backend: str, **options: Any) -> list[Tensor]:
    """Outputs, final state and the gradient of every tensor among the arguments."""
    leaves = {n: x.clone().requires_grad_() for n, x in args.items() if isinstance(x, Tensor)}
    y, state = rule(**{**args, **leaves}, **options, backend=backend)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    loss = (y * weights).sum() + state.square().sum()
    return [y, state, *torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)]


def agree(rule: Callable, args: dict[str, Any], dtype: torch.dtype, **options: Any) -> None:
    """The kernels, on inputs rounded to `dtype` (but for a state), beside the reference on the same numbers."""
    narrow = {
        n: x.to(torch.float32 if n == "state" else dtype) if isinstance(x, Tensor) else x for n, x in args.items()
    }
    exact = {n: x.double() if isinstance(x, Tensor) else x for n, x in narrow.items()}
    wants = results(rule, exact, "reference", **options)
    for got, want in zip(results(rule, narrow, "triton", **options), wants, strict=True):
        if want.numel():
            close(got.double(), want, OP[dtype])
    with torch.no_grad():  # where a single token has a kernel of its own
        for got, want in zip(rule(**narrow, **options, backend="triton"), wants, strict=False):
            if want.numel():
                close(got.double(), want, OP[dtype])


@dtypes
@pytest.mark.parametrize(
    ("tokens", "width", "activation"), [(1, 4, "silu"), (1, 1, None), (2, 4, None), (37, 4, "silu"), (5, 2, "silu")]
)
def test_short_conv(tokens: int, width: int, activation: str | None, dtype: torch.dtype) -> None:
    args = conv.make_inputs(batch=3, tokens=tokens, channels=20, width=width)
    agree(short_conv, args, dtype, activation=activation)


@dtypes
@pytest.mark.parametrize("vectors", [conv.Vectors(3, 5), conv.Vectors(2, 20, 1, 1e-3)], ids=str)
@pytest.mark.parametrize(("tokens", "activation"), [(1, "silu"), (37, "silu"), (5, None)])
def test_short_conv_with_vectors(
    tokens: int, activation: str | None, vectors: conv.Vectors, dtype: torch.dtype
) -> None:
    args = conv.make_inputs(batch=2, tokens=tokens, channels=47)
    args["x"][0], args["tail"][0, 1:] = 0, 0  # some vectors are 0

    def rule(**given: Any) -> tuple[Tensor, Tensor]:
        (unit, y), tail = short_conv(**given, vectors=vectors)
        return torch.cat([unit.flatten(2), y], dim=-1), tail

    agree(rule, args, dtype, activation=activation)


def test_short_conv_as_torch_sees_it() -> None:
    args = conv.make_inputs(channels=13, dtype=torch.float32)
    form = True, 2, 3, 2, 0.0
    given = *args.values(), *form
    unit, y = conv_triton._convolution(*given)
    one = args["x"][:, :1], args["weight"], args["tail"], *form
    for operator, inputs in (
        (conv_triton._convolution, given),
        (conv_triton._gradient, (unit, y, *given)),
        (conv_triton._step, one),
    ):
        found = torch.library.opcheck(operator, inputs, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}
    with pytest.raises(ValueError, match="holds vectors of up to 2048 on chip, got 2049"):
        short_conv(torch.ones(1, 1, 2049), torch.ones(2049, 4), vectors=conv.Vectors(1, 2049, 1), backend="triton")


def test_short_conv_of_strided_and_ragged_rows() -> None:
    args = conv.make_inputs(tokens=7, dtype=torch.float32)
    x = torch.stack([args["x"], -args["x"]], dim=2)[:, :, 0]
    lengths = torch.tensor([2, 7])
    got, want = (
        short_conv(x, args["weight"], args["tail"], lengths=lengths, backend=backend)
        for backend in ("triton", "reference")
    )
    close(got[0][0, :2], want[0][0, :2], OP[torch.float32])
    close(got[0][1], want[0][1], OP[torch.float32])
    assert torch.equal(got[1], want[1])


LINEAR: dict[str, dict[str, Any]] = {
    "one": {"tokens": 1, "heads": 1},
    "chunk": {"batch": 1, "tokens": 16, "heads": 1, "log_retention": None},
    "tiles": {"batch": 1, "tokens": 17, "heads": 1, "key_dim": 40, "value_dim": 70},
    "streams": {"batch": 1, "tokens": 37, "heads": 3, "key_dim": 20, "value_dim": 24, "streams": 2},
}


def split_case(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes for `make_inputs`, and arguments that replace what it makes."""
    replaced = {n: x for n, x in case.items() if n in ("log_retention", "erase_key", "erase_after_decay")}
    return {n: x for n, x in case.items() if n not in replaced}, replaced


@dtypes
@pytest.mark.parametrize("case", LINEAR)
def test_linear_attention(case: str, dtype: torch.dtype) -> None:
    sizes, replaced = split_case(LINEAR[case])
    agree(linear_attention, {**linear.make_inputs(**sizes), **replaced}, dtype)


DELTA: dict[str, dict[str, Any]] = {
    "one": {"tokens": 1, "heads": 1},
    "one-after": {"tokens": 1, "heads": 1, "erase_key": None, "erase_after_decay": True},
    "deltanet": {"batch": 1, "tokens": 15, "heads": 1, "log_retention": None, "erase_key": None},
    "gated": {"tokens": 17, "heads": 1, "erase_key": None, "erase_after_decay": True},
    "comba": {"batch": 1, "tokens": 37, "heads": 3, "key_dim": 20, "value_dim": 40},
}


@dtypes
@pytest.mark.parametrize("case", DELTA)
def test_delta_rule(case: str, dtype: torch.dtype) -> None:
    sizes, replaced = split_case(DELTA[case])
    agree(delta_rule, {**delta.make_inputs(**sizes), **replaced}, dtype)


@pytest.mark.parametrize("size", [32, 64])
def test_delta_rule_joins_the_inverses_of_its_blocks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks(monkeypatch, size)
    agree(delta_rule, delta.make_inputs(batch=1, tokens=size + 3, heads=1), torch.float32)


def test_delta_rule_of_one_key_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where powers of the system grow like binomials, and only their alternating sum is small."""
    chunks(monkeypatch, 64)
    args = delta.make_inputs(batch=1, tokens=64, heads=1)
    key = args["key"][:, :1].expand_as(args["key"])
    args = {**args, "key": key, "erase_key": None, "log_retention": None, "strength": torch.ones(1, 64, 1).double()}
    agree(delta_rule, args, torch.float32)


@pytest.mark.parametrize("rule", [linear_attention, delta_rule], ids=lambda rule: rule.__name__)
def test_gates_at_their_limits_and_ragged_rows(rule: Callable) -> None:
    module = {"linear_attention": linear, "delta_rule": delta}[rule.__name__]
    args = module.make_inputs(tokens=19, heads=1, dtype=torch.float32)
    limits = torch.zeros_like(args["log_retention"])
    limits[:, ::3] = -torch.inf
    args = {**args, "log_retention": limits}
    lengths, found = torch.tensor([0, 18]), {}
    for backend in ("triton", "reference"):
        found[backend] = results(rule, args, backend, lengths=lengths)
        found[backend][0] = found[backend][0][1:, :18]
    assert torch.equal(found["triton"][1][0], args["state"][0])
    names = [n for n, x in args.items() if isinstance(x, Tensor)]
    for name, got, want in zip(["y", "end", *names], found["triton"], found["reference"], strict=True):
        # Outputs beyond a row's length are unspecified, and the loss has read them: their queries differ.
        if name != "query":
            close(got, want, OP[torch.float32])


DEEP: dict[str, dict[str, Any]] = {
    "one": {"tokens": 1, "hidden": (16,)},
    "matrix": {"tokens": 5, "hidden": (), "value_dim": 5, "residual": False, "max_gradient_norm": 0.7},
    "chunk": {"tokens": 8, "hidden": (16,), "max_gradient_norm": 0.7},
    "plain": {"tokens": 6, "hidden": (16,), "momentum": False, "objective": "dot", "activation": "silu"},
    "tiles": {"tokens": 5, "hidden": (70,), "activation": "gelu_tanh"},
    "window": {"tokens": 13, "read": 6, "hidden": (20,), "window": 3, "value_dim": 5, "max_gradient_norm": 0.7},
    "blocks": {"tokens": 11, "read": 5, "hidden": (17,), "blocks": 4, "gated": True, "activation": "tanh"},
    "matrix-blocks": {"tokens": 9, "read": 5, "hidden": (), "blocks": 4, "window": 2, "activation": "relu"},
}
MUON = {"hidden": (17,), "blocks": 4, "gated": True, "window": 2, "muon": deep.Muon(2, every="chunk")}
"""Of one token at a time alone, and in two steps: five multiply an error of rounding by hundreds."""
SEQUENCES = ("query", "key", "value", "log_retention", "log_momentum", "step_size", "window_gate")


def deep_results(
    args: dict[str, Any], options: dict[str, Any], dtype: torch.dtype, backend: str, lengths: Tensor | None
) -> list[Tensor]:
    """Real outputs, the memory after them, and the gradient of every input and of what the state held before."""
    wide = torch.float64 if backend != "triton" else torch.float32
    state = args["state"]

    def leaf(x: Tensor) -> Tensor:
        return x.float().to(wide).requires_grad_()

    leaves = {n: args[n].to(dtype).to(wide if wide == torch.float64 else dtype) for n in SEQUENCES if n in args}
    leaves = {n: x.requires_grad_() for n, x in leaves.items()}
    held: dict[str, Any] = {}
    for name in state._fields:
        x = getattr(state, name)
        if isinstance(x, tuple):
            held[name] = tuple(leaf(y.detach()) for y in x)
        else:
            held[name] = leaf(x.detach()) if x.is_floating_point() else x
    call = {**dict.fromkeys(("log_retention", "log_momentum")), **leaves, "state": state._replace(**held)}
    y, state = deep_memory(**call, **options, lengths=lengths, backend=backend)
    if lengths is not None:
        y = torch.where((torch.arange(y.shape[1]) < lengths[:, None])[..., None, None], y, 0)
    weights, momentum = deep.materialize(state)
    found = [y, *weights, *momentum]
    loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in found)
    of = [*leaves.values(), *held["weights"], *held["momentum"]]
    gradients = torch.autograd.grad(loss, of, materialize_grads=True)
    return [x.detach().double() for x in (*found, *gradients)]


@dtypes
@pytest.mark.parametrize("case", DEEP)
def test_deep_memory(case: str, dtype: torch.dtype) -> None:
    """From a state in the middle of a chunk, rows of several lengths, where the case says how much has been read."""
    sizes = dict(DEEP[case])
    read = sizes.pop("read", 0)
    options = {n: sizes.pop(n) for n in ("residual", "objective", "activation", "max_gradient_norm") if n in sizes}
    options |= {"chunk_size": 4, "unlock": [3 * block for block in range(sizes.get("blocks", 1))]}
    made: dict[str, Any] = deep.make_inputs(heads=1, batch=2 if read else 1, chunk_size=4, **sizes)
    args = {n: x for n, x in made.items() if x is not None}
    lengths = None
    if read:
        gates = dict.fromkeys(("log_retention", "log_momentum"))
        before = {n: args[n][:, :read] for n in SEQUENCES if n in args}
        ragged = torch.tensor([read - 1, read])
        _, state = deep_memory(
            **{**gates, **before}, state=args["state"], **options, lengths=ragged, backend="reference"
        )
        args = {**{n: args[n][:, read:] for n in SEQUENCES if n in args}, "state": state}
        lengths = torch.tensor([sizes["tokens"] - read, 1])
    wants = deep_results(args, options, dtype, "reference", lengths)
    for got, want in zip(deep_results(args, options, dtype, "triton", lengths), wants, strict=True):
        if want.any():
            close(got, want, OP[dtype])


@dtypes
@pytest.mark.parametrize("case", ["matrix", "chunk", "plain", "window", "blocks"])
def test_deep_memory_token_by_token(case: str, dtype: torch.dtype) -> None:
    agree_token_by_token(DEEP[case], dtype)


def test_deep_memory_under_muon_token_by_token() -> None:
    agree_token_by_token(MUON, torch.float32, tokens=7)


def agree_token_by_token(case: dict[str, Any], dtype: torch.dtype, tokens: int = 11) -> None:
    """Rows at different places of their chunks, over their ends, with the kernel of a single token."""
    sizes = {**case, "tokens": tokens}
    sizes.pop("read", None)
    known = ("residual", "objective", "activation", "max_gradient_norm", "muon")
    options = {n: sizes.pop(n) for n in known if n in sizes}
    options |= {"chunk_size": 4, "unlock": [3 * block for block in range(sizes.get("blocks", 1))]}
    found = []
    for backend, narrow, wide in (("reference", torch.float64, torch.float64), ("triton", dtype, torch.float32)):
        made: dict[str, Any] = deep.make_inputs(heads=1, chunk_size=4, **sizes, dtype=wide)
        args = {n: None if made.get(n) is None else made[n].to(dtype).to(narrow) for n in SEQUENCES}
        outputs, state = [], made["state"]
        with torch.no_grad():
            for start, end in ((0, 2), *((t, t + 1) for t in range(2, tokens))):
                cut = {n: None if x is None else x[:, start:end] for n, x in args.items()}
                lengths = torch.tensor([1, 2]) if start == 0 else None
                first = "chunked" if start == 0 and "muon" in options else backend  # the kernels have no such walk
                y, state = deep_memory(**cut, state=state, **options, lengths=lengths, backend=first)
                outputs.append(y)
        weights, momentum = deep.materialize(state)
        found.append([torch.cat(outputs[1:], dim=1), *weights, *momentum])
    for want, got in zip(*found, strict=True):
        close(got.double(), want, OP[dtype])


@pytest.mark.parametrize("every", [None, "chunk", "token"])
def test_deep_memory_writes_over_nothing_that_a_graph_holds(every: str | None) -> None:
    """A token without gradients after others with them completes a chunk."""
    made: dict[str, Any] = deep.make_inputs(tokens=4, heads=1, hidden=(16,), chunk_size=4, dtype=torch.float32)
    options = {"chunk_size": 4, "muon": None if every is None else deep.Muon(2, every)}
    args = {n: made.get(n) for n in SEQUENCES}
    first, last = ({n: None if x is None else x[:, cut] for n, x in args.items()} for cut in (slice(3), slice(3, 4)))
    leaf = first["step_size"].requires_grad_()
    state = pytree.tree_map_only(Tensor, lambda x: x.clone(), made["state"])
    y, state = deep_memory(**first, state=state, **options, backend="chunked")
    held = [x for x in pytree.tree_leaves(state) if x.requires_grad]
    total = y.sum() + sum(x.square().sum() for x in held)
    (want,) = torch.autograd.grad(total, leaf, retain_graph=True)
    before = state.weights[0].detach().clone()
    with torch.no_grad():
        _, ended = deep_memory(**last, state=state, **options, backend="triton")
    assert not torch.equal(ended.weights[0], before)
    (got,) = torch.autograd.grad(total, leaf)
    assert torch.equal(got, want)


PER_TOKEN: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": (16,), "objective": "dot", "max_gradient_norm": 0.7},
    "blocks": {"heads": 2, "hidden": (17,), "blocks": 4, "gated": True, "window": 3, "max_gradient_norm": 0.7},
    "matrix": {"hidden": (), "value_dim": 5, "residual": False, "muon": deep.Muon(0)},
    "matrix-blocks": {"heads": 2, "hidden": (), "blocks": 3, "window": 2},
    "window": {"hidden": (20,), "window": 5, "has_halo": False, "log_retention": None, "activation": "silu"},
    "gated": {"hidden": (16,), "gated": True, "value_dim": 5, "activation": "tanh"},
    "relu": {"hidden": (18,), "blocks": 2, "activation": "relu", "muon": deep.Muon(1)},
    "momentum": {"hidden": (16,), "log_retention": None, "activation": "gelu_tanh", "muon": deep.Muon(0)},
    "wide": {"hidden": (66,), "key_dim": 66, "window": 2, "muon": deep.Muon(1)},
}


@dtypes
@pytest.mark.parametrize("case", PER_TOKEN)
def test_deep_memory_under_muon_at_every_token(case: str, dtype: torch.dtype) -> None:
    """Rows at different places of their chunks, over their ends: read-outs and memory as the reference says, the state
    as torch leaves it, which in bfloat16 takes turns with the kernels."""
    sizes = {"heads": 1, **PER_TOKEN[case]}
    known = ("residual", "objective", "activation", "max_gradient_norm", "muon")
    options = {"muon": deep.Muon(2), **{n: sizes.pop(n) for n in known if n in sizes}}
    options |= {"chunk_size": 3, "unlock": [2 * block for block in range(sizes.get("blocks", 1))]}
    given = {n: sizes.pop(n) for n in SEQUENCES if n in sizes}
    made: dict[str, Any] = {**deep.make_inputs(chunk_size=3, tokens=9, **sizes), **given}
    narrow = {n: None if made.get(n) is None else made[n].to(dtype) for n in SEQUENCES}
    wide = {n: None if x is None else x.double() for n, x in narrow.items()}
    state = pytree.tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, made["state"])

    def after(args: dict[str, Any], state: Any, backend: str, start: int, end: int) -> tuple[Tensor, Any]:
        lengths = torch.tensor([1, 2]) if start == 0 else None
        cut = {n: None if x is None else x[:, start:end] for n, x in args.items()}
        return deep_memory(**cut, state=state, **options, lengths=lengths, backend=backend)

    with torch.no_grad():
        _, exact = after(wide, made["state"], "reference", 0, 2)
        _, torchs = after(wide, made["state"], "chunked", 0, 2)
        _, state = after(narrow, state, "chunked", 0, 2)
        for t in range(2, 9):
            want, exact = after(wide, exact, "reference", t, t + 1)
            _, torchs = after(wide, torchs, "chunked", t, t + 1)
            y, state = after(narrow, state, "chunked" if dtype == torch.bfloat16 and t % 3 == 1 else "triton", t, t + 1)
            close(y.double(), want, OP[dtype])
            expected = *pytree.tree_leaves(torchs), *pytree.tree_leaves(deep.materialize(exact))
            found = *pytree.tree_leaves(state), *pytree.tree_leaves(deep.materialize(state))
            for got, want in zip(found, expected, strict=True):
                assert got.shape == want.shape
                if want.any():
                    close(got.double(), want.double(), OP[torch.float32])
                else:
                    assert not got.any()


@pytest.mark.parametrize(("tokens", "backend"), [(1, "triton"), (3, "chunked")])
def test_deep_memory_under_muon_begins(tokens: int, backend: str) -> None:
    """With one token, which torch reads, of bfloat16 inputs, too; and after a whole chunk, where what is written into
    `M_t` is not written into the anchor."""
    made: dict[str, Any] = deep.make_inputs(batch=1, tokens=6, heads=1, hidden=(16,), chunk_size=3, dtype=torch.float32)
    args = {n: made.pop(n).bfloat16() for n in SEQUENCES if n in made}
    found = []
    with torch.no_grad():
        for backends in ((backend, "triton"), ("chunked", "chunked")):
            state, outputs = pytree.tree_map_only(Tensor, torch.clone, made["state"]), []
            for start, end in ((0, tokens), *((t, t + 1) for t in range(tokens, 6))):
                cut = {n: x[:, start:end] for n, x in args.items()}
                each = backends[start > 0]
                y, state = deep_memory(**cut, state=state, chunk_size=3, muon=deep.Muon(2), backend=each)
                outputs.append(y)
            found.append([torch.cat(outputs, dim=1).float(), *pytree.tree_leaves(state)])
    for at, (got, want) in enumerate(zip(*found, strict=True)):
        if want.any():
            close(got.double(), want.double(), OP[torch.float32 if at else torch.bfloat16])
    with pytest.raises(ValueError, match="of Muon's those of one token at a time, got 6"):
        deep_memory(**args, **made, chunk_size=3, muon=deep.Muon(2), backend="triton")


def test_a_step_writes_over_nothing_that_a_graph_holds() -> None:
    """A token read without gradients after some with them, whose backward comes last; over all of a chunk's places."""
    memories = memory_arguments(torch.float32, torch.float32, tokens=2)
    made: dict[str, Any] = deep.make_inputs(batch=1, tokens=3, heads=1, hidden=(16,), chunk_size=2, dtype=torch.float32)
    made["state"] = made["state"]._replace(weights=tuple(x.requires_grad_() for x in made["state"].weights))
    for tokens in (2, 3):
        args = {n: x[:, :tokens] if n in SEQUENCES else x for n, x in made.items()}
        y, state = deep_memory(**args, chunk_size=2, backend="triton")
        with torch.no_grad():
            one = {n: x[:, :1] for n, x in args.items() if n in SEQUENCES}
            for _ in range(3 - tokens, 2):
                deep_memory(**one, state=state, chunk_size=2, backend="triton")
        (y.sum() + sum(x.square().sum() for x in (*state.weights, *state.deltas))).backward()
    now = Weights(*(x.requires_grad_() for x in memories["now"]))
    y, *state = self_modifying(**{**memories, "now": now, "anchor": now}, **MEMORY_RULE, backend="triton")
    one = {n: memories[n][:, :1] for n in ("u", "query")} | {"position": torch.tensor([2, 4])}
    with torch.no_grad():
        self_modifying(**{**memories, **one, "now": state[0], "anchor": state[1]}, **MEMORY_RULE, backend="triton")
    (y.sum() + sum(x.square().sum() for x in state[0])).backward()


@pytest.mark.parametrize("hidden", [(16,), ()], ids=str)
def test_deep_memory_as_torch_sees_it(hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators return what their fake implementations say, and write to nothing else than they say."""
    calls = []

    def noted(operator: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append((operator, pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), given)))
            return operator(*given)

        return call

    of_modules = (deep_triton, ("_walked", "_gradient")), (deep_step, ("_one", "_momentum", "_recalled"))
    for module, name in ((module, name) for module, names in of_modules for name in names):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    args: dict[str, Any] = deep.make_inputs(batch=1, tokens=6, heads=1, hidden=hidden, dtype=torch.float32)
    value = args["value"].clone().requires_grad_()
    deep_memory(**{**args, "value": value}, chunk_size=4, backend="triton")[0].sum().backward()
    with torch.no_grad():
        _, state = deep_memory(**args, chunk_size=4, backend="triton")
        one = {n: x[:, :1] for n, x in args.items() if n in SEQUENCES}
        deep_memory(**one, state=state, chunk_size=4, backend="triton")
        muon, first = deep.Muon(1), {n: x[:, :3] for n, x in args.items() if n in SEQUENCES}
        _, state = deep_memory(**{**args, **first}, chunk_size=4, muon=muon, backend="chunked")
        deep_memory(**one, state=state, chunk_size=4, muon=muon, backend="triton")
    assert len(calls) == 6
    for operator, given in calls:
        found = torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}


def test_deep_memory_reads_many_chunks_with_few_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a backward anchors are kept for some chunks at a time; a row may have ended in some before."""
    made: dict[str, Any] = deep.make_inputs(batch=2, tokens=14, heads=1, hidden=(16,), dtype=torch.float32)
    options: dict[str, Any] = {"chunk_size": 4, "lengths": torch.tensor([6, 14])}
    with torch.no_grad():
        want, at_end = deep_memory(**made, **options, backend="chunked")
        for size in (1, 2 * 8 * 4 * 8 * 16):
            monkeypatch.setattr(deep_triton, "ANCHOR_BYTES", size)
            got, state = deep_memory(**made, **options, backend="triton")
            for row, length in enumerate((6, 14)):
                close(got[row, :length], want[row, :length], OP[torch.float32])
            for a, b in zip(deep.materialize(state)[0], deep.materialize(at_end)[0], strict=True):
                close(a, b, OP[torch.float32])


EXPONENTIAL: dict[str, dict[str, Any]] = {
    "softmax": {"normalizer": True, "retention": False},
    "decayed": {"normalizer": True, "room": True},
    "window": {"window": 3, "value_dim": 70, "room": True},
    "dot": {"objective": "l2", "retention": False, "room": True, "read": 40},
    "dot-window": {"objective": "l2", "window": 3, "read": 40},
}
DEEP_EXPONENTIAL: dict[str, dict[str, Any]] = {
    "plain": {"retention": False, "activation": "tanh", "hidden": 300},
    "bound": {"max_gradient_norm": 0.3, "room": True, "read": 40},
    "window": {"window": 3, "hidden": 70, "max_gradient_norm": 0.3},
    "dot": {"objective": "l2", "room": True, "activation": "silu"},
    "dot-window": {"objective": "l2", "window": 3, "max_gradient_norm": 0.3, "room": True, "read": 40},
}


def tokens_one_by_one(rule: Callable, case: dict[str, Any], dtype: torch.dtype) -> None:
    """After `read` tokens of rows of several lengths, which no window reaches; every one of the five tokens but the
    third, which a row lacks, is for all of them. Then the state too, row by row what there is of it."""
    sizes = dict(case)
    read, room, retention = sizes.pop("read", 2), sizes.pop("room", False), sizes.pop("retention", True)
    options = {n: sizes.pop(n) for n in ("objective", "activation", "max_gradient_norm") if n in sizes}
    module, tokens = {exponential_memory: exponential, deep_exponential_memory: deep_exponential}[rule], read + 5
    made = module.make_inputs(batch=3, tokens=tokens, heads=2, **sizes, dtype=torch.float32)
    sequences = [n for n, x in made.items() if isinstance(x, Tensor) and (retention or n != "log_retention")]
    found = []
    for backend, narrow, wide in (("reference", torch.float64, torch.float64), ("triton", dtype, torch.float32)):
        state = pytree.tree_map(lambda x, wide=wide: x.to(wide) if x.is_floating_point() else x, made["state"])
        given = {**made, **options, "log_retention": None}
        cuts = [(0, read), *((t, t + 1) for t in range(read, tokens))]
        outputs = []
        with torch.no_grad():
            for start, end in cuts:
                cut = {n: made[n][:, start:end].to(dtype).to(narrow) for n in sequences}
                lengths = {0: torch.tensor([read - 1, read, 0]), read + 2: torch.tensor([1, 0, 1])}.get(start)
                by = "reference" if start == 0 else backend
                grows = start == 0 or not room
                y, state = rule(**{**given, **cut, "state": state}, lengths=lengths, grows=grows, backend=by)
                outputs.append(y[:, :0] if start == 0 else y[[0, 2]] if lengths is not None else y)
                if start == 0:
                    state = state._replace(position=torch.zeros_like(state.position))
                if start == 0 and room:
                    more = {n: torch.nn.functional.pad(getattr(state, n), (0, 0, 0, 20)) for n in ("keys", "written")}
                    state = state._replace(**more)
        found.append([*outputs[1:], *state])
    for want, got in zip(*found, strict=True):
        if want.is_floating_point():
            for one, other in zip(got.double(), want, strict=True):
                close(one, other, OP[dtype]) if other.numel() else None
        else:
            assert torch.equal(got, want)


@dtypes
@pytest.mark.parametrize(
    ("rule", "case"),
    [(exponential_memory, EXPONENTIAL[name]) for name in EXPONENTIAL]
    + [(deep_exponential_memory, DEEP_EXPONENTIAL[name]) for name in DEEP_EXPONENTIAL],
    ids=[*EXPONENTIAL, *(f"deep-{name}" for name in DEEP_EXPONENTIAL)],
)
def test_exponential_memories(
    rule: Callable, case: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exponential_triton, "BLOCK", 16)
    monkeypatch.setattr(exponential_triton, "PARTS", 2)  # of two blocks each where 40 tokens have been read
    tokens_one_by_one(rule, case, dtype)


@pytest.mark.parametrize("window", [1, 3])
def test_exponential_memories_as_torch_sees_them(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their operators write to nothing else than they say; a state with room is written in place, and no other."""
    calls = []

    def noted(operator: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append((operator, tuple(x.clone() if isinstance(x, Tensor) else x for x in given)))
            return operator(*given)

        return call

    for module in (exponential_triton, deep_exponential_triton):
        monkeypatch.setattr(module, "_step", noted(module._step))
    for module, rule in ((exponential, exponential_memory), (deep_exponential, deep_exponential_memory)):
        args = module.make_inputs(tokens=1, window=window, dtype=torch.float32)
        with torch.no_grad():
            _, state = rule(**args, backend="reference")
            fixed = {n: x for n, x in zip(state._fields, state, strict=True) if n not in ("first", "second")}
            before = {n: x.clone() for n, x in fixed.items()}
            y, grown = rule(**{**args, "state": state}, lengths=torch.tensor([0, 1]), backend="triton")
            assert all(torch.equal(x, before[n]) for n, x in fixed.items())
            assert not y.requires_grad
            again, last = rule(**{**args, "state": grown._replace(length=state.length)}, grows=False, backend="triton")
        assert last.keys is grown.keys
        assert last.written is grown.written
        assert again.shape == y.shape
        for change, reason in (
            ({n: args[n].repeat(1, 2, *[1] * (args[n].ndim - 2)) for n in SEQUENTIAL}, "computes one token, got 2"),
            ({}, "computes no gradients, which are enabled"),
        ):
            with pytest.raises(ValueError, match=f"'triton' was asked for but cannot compute .*{reason}"):
                rule(**{**args, **change}, backend="triton")
    assert len(calls) == 4
    for operator, given in calls:
        found = torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}


def test_initial_weights_of_a_single_row_are_not_written_to() -> None:
    args = deep_exponential.make_inputs(batch=1, tokens=1, dtype=torch.float32)
    weights = [torch.randn(3, 7, 6), torch.randn(3, 5, 7)]
    before = [w.clone() for w in weights]
    with torch.no_grad():
        state = deep_exponential.initial_state(weights, 1, window=1)
        deep_exponential_memory(**{**args, "state": state}, backend="triton")
    assert all(map(torch.equal, weights, before))


@pytest.mark.parametrize("window", [1, 3])
def test_a_row_without_room_leaves_others_alone(window: int) -> None:
    for module, rule in ((exponential, exponential_memory), (deep_exponential, deep_exponential_memory)):
        args = module.make_inputs(tokens=1, heads=1, window=window, dtype=torch.float32)
        found = []
        for length in (6, 3):
            state = args["state"]._replace(length=torch.tensor([length, 2]), position=torch.tensor([length, 2]))
            for name in ("keys", "written"):
                x = torch.linspace(-1, 1, 2 * 4 * getattr(state, name).shape[3])
                state = state._replace(**{name: x.view(2, 1, 4, -1)})
            with torch.no_grad():
                y, state = rule(**{**args, "state": state}, grows=False, backend="triton")
            found.append([y[1], *(x[1] for x in state)])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


SEQUENTIAL = ("query", "key", "value", "log_retention", "step_size")


def test_what_exponential_memories_refuse() -> None:
    wide = exponential.make_inputs(tokens=1, key_dim=257, dtype=torch.float32)
    long = exponential.make_inputs(tokens=1, window=17, dtype=torch.float32)
    with torch.no_grad():
        for args, got in ((wide, "257, 5 and 1"), (long, "6, 5 and 17")):
            with pytest.raises(ValueError, match=f"values of up to 256 and windows of up to 16, got {got}"):
                exponential_memory(**args, backend="triton")
        with pytest.raises(ValueError, match="computes float32 and bfloat16 inputs on a float32 state"):
            exponential_memory(**exponential.make_inputs(tokens=1), backend="triton")
        hidden = deep_exponential.make_inputs(tokens=1, hidden=1025, dtype=torch.float32)
        with pytest.raises(ValueError, match="computes up to 1024 hidden units, got 1025"):
            deep_exponential_memory(**hidden, backend="triton")


@pytest.mark.parametrize("name", ["deep_transformer-e1", "swdt-e1", "dot-e4", "deep_transformer-mlp-e1", "dot-mlp-e1"])
@pytest.mark.parametrize("room", [None, 20])
def test_model_decodes_on_exponential_features(name: str, room: int | None) -> None:
    """Of one block, prefilled by torch, in rows that stand at different places."""
    model, ids = zoo.build(name, num_hidden_layers=1, kernel_backend="auto").eval(), zoo.tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        want = zoo.build(name, num_hidden_layers=1, kernel_backend="reference").eval()(ids, attention_mask=mask).logits
        cache = MemoryCache(model.config, max_cache_len=room)
        parts = [model(ids[:, :16], attention_mask=mask[:, :16], cache=cache).logits]
        for t in range(16, 20):
            parts.append(model(ids[:, t : t + 1], cache=cache).logits)
    close(torch.cat(parts, dim=1)[:, 3:], want[:, 3:], MODEL[torch.float32])


def test_model_benchmark_checks_what_it_would_time() -> None:
    """Both passes of an op, of each the last work, in bfloat16 beside torch in float32."""
    kernels = scripts.load("benchmarks/kernel_speed.py")
    works = kernels.works(kernels.Shape(batch=1, tokens=5, heads=1, key_dim=8, value_dim=8), "cpu")
    for work in {work.rule: work for work in works}.values():
        errors = kernels.prepared(work, "triton").errors
        assert 0 < max(errors.values()) <= kernels.BOUND


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "triton") for name in ("titans-lmm-e1", "titans-mag-e16", "titans-mac-e16", "retnet-e1", "swla-e1")),
        *((name, "triton") for name in ("deltanet-e1", "gated_deltanet-e1", "comba-e1")),
        *(("hope-stream", "triton"), ("atlas-gated-token-e16", "auto")),
    ],
)
def test_model(name: str, backend: str) -> None:
    """Of one block: prefill in two pieces and decoding with Triton (where it can, if it cannot all) are one pass with
    torch; so are the gradients."""
    wanted = zoo.build(name, num_hidden_layers=1, kernel_backend="chunked").eval()
    model = zoo.build(name, num_hidden_layers=1, kernel_backend=backend).eval()
    ids = zoo.tokens(2, 20)
    with torch.no_grad():
        want = wanted(ids).logits
        first = model(ids[:, :18])
        rest, cache = [first.logits], first.cache
        for t in (18, 19):
            step = model(ids[:, t : t + 1], cache=cache)
            rest.append(step.logits)
            cache = step.cache
    close(torch.cat(rest, dim=1), want, MODEL[torch.float32])
    if name in ("comba-e1", "titans-lmm-e1"):
        gradients = []
        for each in (model, wanted):
            loss = each(ids[:1, :9], labels=ids[:1, :9]).loss
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(each.parameters()))]))
        close(*gradients, MODEL[torch.float32])


@pytest.mark.parametrize(("shape", "steps"), [((8, 20), 0), ((37, 19), 1), ((1, 7), 2), ((20, 70), 5), ((70, 3), 5)])
def test_newton_schulz(shape: tuple[int, int], steps: int) -> None:
    """Matrices of all sizes, upright and lying, each by itself: of its size nothing is left, or nothing at all."""
    scales = torch.tensor([1.0, 0.0, 1e15, 1e-9])[:, None, None]
    x = (torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)) * scales).mT.contiguous().mT
    weights = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x)
    found = []
    for leaf, backend in ((x.clone(), "triton"), (x.double(), "reference")):
        y = newton_schulz(leaf.requires_grad_(), steps=steps, backend=backend)
        (d_x,) = torch.autograd.grad((y * weights).sum(), leaf)
        found.append((y.double(), d_x.double() * scales.clamp(min=1.0) if steps else d_x.double()))
    for got, want in zip(*found, strict=True):
        for one, other in zip(got, want, strict=True):
            close(one, other, OP[torch.float32])
    assert steps == 0 or not any(x[[1, 3]].any() for x in found[0])


def test_newton_schulz_of_what_is_not_finite_stays_by_itself() -> None:
    x = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(0))
    want = newton_schulz(x, steps=2, backend="triton")
    for broken in (torch.nan, torch.inf):
        x[1, 2, 3] = broken
        leaf = x.clone().requires_grad_()
        got = newton_schulz(leaf, steps=2, backend="triton")
        (gradient,) = torch.autograd.grad(got.sum(), leaf)
        for tensor in (got, gradient):
            assert torch.isnan(tensor[1]).any()
            assert torch.isfinite(tensor[[0, 2]]).all()
        assert torch.equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("of", ["matrix", "row", "column"])
@pytest.mark.parametrize(("shape", "steps"), [((3, 5, 70), 2), ((3, 70, 5), 1), ((3, 2, 9, 20), 3), ((3, 4, 6), 0)])
def test_newton_schulz_advances_what_has_a_rate(shape: tuple[int, ...], steps: int, of: str) -> None:
    """Parts of a matrix lie between one another; the second matrix keeps all and has no rate, the third has none."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        x = torch.randn(*sizes, generator=generator)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if len(sizes) == 4 else x

    weight, x = drawn(*shape), drawn(*shape)
    ones = [1] * (len(shape) - 1)
    sizes = {"matrix": ones, "row": [*shape[1:-1], 1], "column": [*ones[:-1], shape[-1]]}[of]
    numbers = torch.randn(2, 3, *sizes, generator=generator)
    numbers[:, 1], numbers[1, 2] = torch.tensor([1.0, 0.0]).view(2, *ones), 0
    keep, rate = (x.expand(shape) for x in numbers)
    want = keep.double() * weight.double() + rate.double() * newton_schulz(x.double(), steps=steps, backend="reference")
    before = weight.clone()
    newton_triton.advance(weight, x, keep, rate, steps)
    close(weight[[0, 2]].double(), want[[0, 2]], OP[torch.float32])
    assert torch.equal(weight[1], before[1])


def test_newton_schulz_as_torch_sees_it() -> None:
    x = torch.randn(2, 3, 9, 5)
    operators = (newton_triton._iterated, (x, 2)), (newton_triton._gradient, (x, x, 2))
    for operator, given in (*operators, (newton_triton._advanced, (x.clone(), x, x, x, 2))):
        found = torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}
    with pytest.raises(ValueError, match="Gram matrix of a narrower side of up to 64 on chip, got 65"):
        newton_schulz(torch.ones(65, 70), backend="triton")


GATES: dict[str, tuple[tuple[Gate, ...], dict[str, Any]]] = {
    "one": ((Gate("share"),), {"tokens": 1, "heads": 1}),
    "titans": ((Gate("share", 0.1), Gate("log_share"), Gate("log_rest")), {"tokens": 37, "heads": 5}),
    "window": ((Gate("share", 0.5), Gate("log_rest"), Gate("share", 0.25, lags=4)), {"tokens": 3, "heads": 20}),
    "decay": ((Gate("share", 2.0),), {"tokens": 19, "heads": 3, "decay": True}),
    "heads": ((Gate("log_rest"), Gate("share", lags=1)), {"batch": 1, "tokens": 4, "heads": 300, "decay": True}),
}


def gate_results(args: dict[str, Any], backend: str) -> list[Tensor]:
    """Every gate, and the gradient of every tensor among the arguments."""
    tensors = [args["logits"], *(args["decay"] or ())]
    leaves = [x.clone().requires_grad_() for x in tensors]
    found = gates(leaves[0], args["kinds"], Decay(*leaves[1:]) if args["decay"] else None, backend=backend)
    weights = [torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y) for y in found]
    loss = sum((y * w).sum() for y, w in zip(found, weights, strict=True))
    assert all(y.is_contiguous() for y in found) or backend != "triton"
    return [*found, *torch.autograd.grad(loss, leaves)]


@dtypes
@pytest.mark.parametrize("case", GATES)
def test_gates(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of logits so large that only the difference from 1 or 0 tells them apart."""
    monkeypatch.setattr(gates_triton, "TILE", 256)
    kinds, sizes = GATES[case]
    args = gate_inputs(*kinds, **sizes)
    args["logits"][:, ::2] *= 4
    narrow = {
        "logits": args["logits"].to(dtype),
        "kinds": kinds,
        "decay": args["decay"] and Decay(*(x.to(dtype) for x in args["decay"])),
    }
    exact = {**narrow, "logits": narrow["logits"].double()}
    exact["decay"] = narrow["decay"] and Decay(*(x.double() for x in narrow["decay"]))
    count = len(kinds) + sizes.get("decay", False)
    pairs = zip(gate_results(narrow, "triton"), gate_results(exact, "reference"), strict=True)
    for n, (got, want) in enumerate(pairs):
        close(got.double(), want, OP[torch.float32 if n < count else dtype])
        if n < count:  # each number by itself, though some are a millionth of others
            close(got.double() / want, torch.ones_like(want), OP[torch.float32])


def test_gates_as_torch_sees_them() -> None:
    args = gate_inputs(Gate("share", 0.5), Gate("log_rest", lags=2), decay=True, dtype=torch.float32)
    each = [0, 2], [0.5, 1.0], [1, 2]
    for decay in (args["decay"], (None, None, None)):
        given = args["logits"], *decay, *each
        for operator, inputs in (
            (gates_triton._gates, given),
            (gates_triton._gradient, (gates_triton._gates(*given), *given)),
        ):
            found = torch.library.opcheck(operator, inputs, test_utils=("test_schema", "test_faketensor"))
            assert set(found.values()) == {"SUCCESS"}


@dtypes
@pytest.mark.parametrize(
    ("width", "rank", "batch"), [(20, 4, (2, 3)), (5, None, (1,)), (48, 17, (2, 1, 2)), (1, 1, (3, 1))], ids=str
)
def test_monomials(width: int, rank: int | None, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of vectors in float32, some of them 0, by parameters in the model's dtype."""
    args = mono.make_inputs(*batch, width=width, rank=rank)
    args["x"][0] = 0
    x, parameters = args["x"].float(), [b.to(dtype) for b in args["coefficients"]]
    projection = None if rank is None else args["projection"].to(dtype)
    exact = None if projection is None else projection.double()
    want = monomials(x.double(), [b.double() for b in parameters], exact, backend="reference")
    with torch.no_grad():
        got = monomials(x, parameters, projection, backend="triton")
    close(got.double(), want, OP[torch.float32])
    leaf = x.clone().requires_grad_()
    learned = monomials(leaf, parameters, projection, backend="triton")
    close(learned.double(), want, OP[torch.float32])
    assert torch.autograd.grad(learned.sum(), leaf)[0].isfinite().all()


def test_monomials_as_torch_sees_them() -> None:
    x, coefficients, projection = mono.make_inputs(2, dtype=torch.float32).values()
    for given in ((x, *coefficients, projection), (x, *coefficients, None)):
        found = torch.library.opcheck(mono_triton._monomials, given, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}
    with torch.no_grad():  # queries and keys, each of them whole
        y = monomials(torch.randn(3, 1, 2, 3, 6), coefficients, projection, backend="triton")
    assert y.shape == (3, 1, 2, 3, 16)
    assert all(each.is_contiguous() for each in y.unbind(2))
    with pytest.raises(ValueError, match="computes degree 2, got 3"):
        monomials(x, [*coefficients, coefficients[0]], projection, backend="triton")
    with pytest.raises(ValueError, match="vectors of up to 1024 and squares of up to 64 on chip, got 65 and 65"):
        monomials(torch.randn(2, 3, 65), coefficients, None, backend="triton")


KV_WRITE: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one": {"batch": 1, "heads": 1, "groups": 1, "width": 2, "places": 1, "prefix": 0, "lengths": (7,)},
    "pairs": {"each": 2, "places": 8, "lengths": (0, 6, 8), "restarts": True},
    "several": {"each": 3, "places": 4, "prefix": 0, "lengths": (0, 3, 9)},
    "odd": {"heads": 5, "groups": 5, "width": 22, "places": 9, "prefix": 0, "lengths": (8, 9)},
    "long": {"batch": 2, "width": 130, "places": 1500, "prefix": 3, "lengths": (1023, 4000)},
}


@dtypes
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("case", KV_WRITE)
def test_kv_write(case: str, shared: bool, dtype: torch.dtype) -> None:
    """Also with one angle for all rows, and into a cache in another dtype than the token's."""
    args = kv.make_inputs(**KV_WRITE[case], dtype=dtype)
    if shared:
        args["rotary"] = tuple(x[:1] for x in args["rotary"])
        args["keys"], args["values"] = args["keys"].float(), args["values"].float()
    found = []
    for backend, wide in (("triton", False), ("reference", True)):
        given = pytree.tree_map_only(Tensor, lambda x: x.clone(), args)
        if wide:
            given = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, given)
        found.append((*kv_write(**given, backend=backend), given["keys"], given["values"]))
    for got, want in zip(*found, strict=True):
        if want.is_floating_point():
            close(got.double(), want, OP[dtype])
        else:
            assert torch.equal(got, want)


def test_kv_write_as_torch_sees_it() -> None:
    args = kv.make_inputs(dtype=torch.float32)
    query, key, value, rotary, *others = args.values()
    given = (query, key, value, *rotary, *others)
    found = torch.library.opcheck(kv_triton._written, given, test_utils=("test_schema", "test_faketensor"))
    assert set(found.values()) == {"SUCCESS"}


RETRIEVAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mlp": ({}, {"unit": True}),
    "blocks": ({"heads": 3, "key_dim": 20, "value_dim": 17, "hidden": (70,), "blocks": 4, "position": (0, 2, 8)}, {}),
    "gated": ({"gated": True, "hidden": (33,), "blocks": 2}, {"activation": "silu", "residual": False, "unit": True}),
    "matrix": ({"hidden": (), "key_dim": 130, "value_dim": 100, "blocks": 3}, {"unit": True}),
    "tanh": ({"batch": 1, "hidden": (300,), "position": (3,)}, {"activation": "tanh", "unit": True}),
    "relu": ({"hidden": (8,), "position": (4, 4, 5)}, {"activation": "relu"}),
    "approximate": ({"hidden": (8,), "position": (1, 2, 3)}, {"activation": "gelu_tanh"}),
}


@dtypes
@pytest.mark.parametrize("first", [False, True], ids=["", "first"])
@pytest.mark.parametrize("case", RETRIEVAL)
def test_retrieval(case: str, first: bool, dtype: torch.dtype) -> None:
    """Of rows in which a segment starts and others; `first` has no past yet."""
    sizes, options = RETRIEVAL[case]
    args = retrieval.make_inputs(**sizes, dtype=dtype)
    if first:
        args["past"] = ()
    found = []
    with torch.no_grad():
        for backend, wide in (("triton", False), ("reference", True)):
            given = pytree.tree_map_only(Tensor, lambda x: x.clone(), args)
            if wide:
                given = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, given)
            y, past = retrieve(**given, **options, backend=backend)
            found.append((y, *past))
            for got, want in zip(given["weights"], args["weights"], strict=True):
                assert torch.equal(got, want.to(got))
            shared = {x.untyped_storage().data_ptr() for x in given["weights"]}
            assert not {x.untyped_storage().data_ptr() for x in past} & shared
    for got, want in zip(*found, strict=True):
        close(got.double(), want, OP[dtype])


def test_retrieval_writes_over_nothing_that_a_graph_holds() -> None:
    """Also several queries, which are torch's."""
    args = retrieval.make_inputs(dtype=torch.float32)
    leaves = [x.requires_grad_() for x in args["past"]]
    total = sum((x * x).sum() for x in leaves)
    kept = [x.detach().clone() for x in leaves]
    with torch.no_grad():
        _, past = retrieve(**args, backend="triton")
    assert not torch.equal(past[0], leaves[0])
    for got, want in zip(torch.autograd.grad(total, leaves), kept, strict=True):
        assert torch.equal(got, 2 * want)
    args["query"] = args["query"].expand(-1, 3, -1, -1)
    assert retrieve(**args, backend="triton")[0].requires_grad
    with torch.no_grad(), pytest.raises(ValueError, match="reads memories of one or two layers, got 3"):
        retrieve(**retrieval.make_inputs(hidden=(5, 8), dtype=torch.float32), backend="triton")


def test_retrieval_as_torch_sees_it() -> None:
    args = retrieval.make_inputs(dtype=torch.float32)
    given = args["query"], *args["weights"], args["position"], *args["past"], 4, False, "gelu", True, [0], True
    found = torch.library.opcheck(retrieval_triton._retrieved, given, test_utils=("test_schema", "test_faketensor"))
    assert set(found.values()) == {"SUCCESS"}


ELEMENTWISE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "rotary": (rotary, rotary_inputs, {"batch": 3, "tokens": 11}),
    "rotary-shared": (rotary, rotary_inputs, {"shared": True, "inner": (5,), "width": 130}),
    "rotary-plain": (rotary, rotary_inputs, {"batch": 1, "tokens": 1, "inner": (), "width": 2}),
    "addresses": (addresses, addresses_inputs, {"key_dim": 20}),
    "addresses-shared": (addresses, addresses_inputs, {"shared": True, "tokens": 1, "key_dim": 130}),
    "addresses-units": (partial(addresses, unit_eps=0.0), addresses_inputs, {"shared": True, "key_dim": 7}),
    "addresses-eps": (partial(addresses, unit_eps=0.1), addresses_inputs, {"heads": 5}),
    "opened": (opened, opened_inputs, {}),
    "opened-heads": (opened, opened_inputs, {"shape": (5, 30), "axis": 2, "blocks": 4, "tokens": 20}),
    "opened-last": (opened, opened_inputs, {"shape": (5, 3, 7), "blocks": 7, "interval": 9, "position": (1, 60)}),
}


@dtypes
@pytest.mark.parametrize("case", ELEMENTWISE)
def test_elementwise(case: str, dtype: torch.dtype) -> None:
    """Also of strided vectors, and the gradients."""
    rule, made, sizes = ELEMENTWISE[case]
    args = made(**sizes, dtype=dtype)
    strided = [n for n in ("x", "query", "key") if n in args]
    learned = [*strided, *(n for n in ("erase", "correction") if n in args)]
    found = []
    for backend, wide in (("triton", False), ("reference", True)):
        given = {n: x.double() if wide and isinstance(x, Tensor) and n != "position" else x for n, x in args.items()}
        given |= {n: torch.cat([given[n], given[n]], dim=1) for n in strided}
        leaves = [given[n].requires_grad_() for n in learned]
        outputs = rule(**{**given, **{n: given[n].chunk(2, dim=1)[0] for n in strided}}, backend=backend)
        ys = [y for y in outputs if y is not None] if isinstance(outputs, tuple) else [outputs]
        slopes = [torch.linspace(-1, 2, y.numel()).view_as(y).to(dtype).to(y.dtype) for y in ys]
        found.append((*ys, *torch.autograd.grad(ys, leaves, slopes)))
    assert len(found[0]) == len(found[1])
    for got, want in zip(*found, strict=True):
        close(got.double(), want, OP[dtype])


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
def test_turning_of_nothing(shape: tuple[int, int]) -> None:
    assert rotary(torch.zeros(*shape, 2, 6), *torch.zeros(2, *shape, 6), backend="triton").shape == (*shape, 2, 6)


def test_addresses_are_as_wide_as_their_widest_input() -> None:
    args = addresses_inputs(dtype=torch.bfloat16)
    for name, x in args.items():
        assert addresses(**{**args, name: x.float()}, backend="triton")[0].dtype == torch.float32


def test_elementwise_as_torch_sees_it() -> None:
    given: dict[Any, tuple[Any, ...]] = {
        rotary_triton._turned: (*rotary_inputs(dtype=torch.float32).values(), False),
        addresses_triton._addressed: (*addresses_inputs(dtype=torch.float32).values(), 0.1, True),
        opened_triton._opened: (*list(opened_inputs(dtype=torch.float32).values())[:-1], 3),
    }
    for rule, args in given.items():
        for x in args[: 4 if rule is addresses_triton._addressed else 1]:
            x.requires_grad_()
        found = torch.library.opcheck(rule, args)
        assert set(found.values()) == {"SUCCESS"}


NORM_GATE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads": ({"tokens": 37, "heads": 3, "width": 20}, {"activation": "silu"}),
    "one": ({"tokens": 1, "width": 1, "norm": False}, {"activation": "sigmoid"}),
    "branches": ({"tokens": 3, "width": 70, "gate_norm": True}, {"activation": "sigmoid"}),
    "skip": ({"tokens": 5, "width": 16, "norm": False, "gate_norm": True}, {"activation": "sigmoid", "scale": 2.0}),
    "wide": ({"tokens": 2, "width": 2049, "gate_norm": True}, {"activation": "silu", "scale": 0.5}),
}


def gated(args: dict[str, Any], backend: str, **options: Any) -> list[Tensor]:
    """The output, and the gradient of every tensor among the arguments."""
    leaves = {n: x.clone().requires_grad_() for n, x in args.items() if x is not None}
    y = norm_gate(**{**args, **leaves}, **options, eps=1e-6, backend=backend)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), list(leaves.values()))]


def gates_agree(args: dict[str, Any], dtype: torch.dtype, **options: Any) -> None:
    """Row by row, in the models' dtype with their weights in it, or in float32 as autocast has them."""
    for weights in {dtype, torch.float32}:
        narrow = {n: x if x is None else x.to(weights if "weight" in n else dtype) for n, x in args.items()}
        exact = {n: x if x is None else x.double() for n, x in narrow.items()}
        found = zip(gated(narrow, "triton", **options), gated(exact, "reference", **options), strict=True)
        for got, want in found:
            width = want.shape[-1]
            for one, other in zip(got.double().view(-1, width), want.view(-1, width), strict=True):
                close(one, other, OP[dtype])


@dtypes
@pytest.mark.parametrize("case", NORM_GATE)
def test_norm_gate(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_triton, "PARTS", 2)  # programs with several tiles
    sizes, options = NORM_GATE[case]
    gates_agree(norm_inputs(2, **sizes), dtype, **options)


@dtypes
@pytest.mark.parametrize("gate_norm", [False, True])
def test_norm_gate_of_zero_and_huge_rows(gate_norm: bool, dtype: torch.dtype) -> None:
    args = norm_inputs(4, tokens=2, width=20, gate_norm=gate_norm)
    sizes = torch.tensor([0, 1e15, 1, 1e-15])[:, None, None]
    gates_agree({**args, "x": args["x"] * sizes, "gate": args["gate"] * sizes.flip(0)}, dtype, activation="silu")


def test_norm_gate_of_strided_rows_as_torch_sees_it() -> None:
    args = norm_inputs(2, tokens=3, width=5, gate_norm=True, dtype=torch.float32)
    strided = {n: x.repeat_interleave(2, dim=-1)[..., ::2] for n, x in args.items() if x is not None}
    options: dict[str, Any] = {"activation": "silu", "eps": 1e-6}
    close(norm_gate(**strided, **options, backend="triton"), norm_gate(**args, **options), OP[torch.float32])
    given = *strided.values(), True, 2.0, 1e-6
    for operator, inputs in ((norm_triton._gated, given), (norm_triton._gradient, (args["x"], *given))):
        found = torch.library.opcheck(operator, inputs, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}
    with pytest.raises(ValueError, match="holds rows of up to 8192 on chip, got 8193"):
        norm_gate(torch.ones(8193), None, torch.ones(8193), **options, backend="triton")


MEMORIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "given": ({"heads": 3}, {"max_gradient_norm": 0.5}),
    "adaptive": ({"adaptive_query": True, "width": 16}, {"activation": "silu", "max_gradient_norm": 0.5}),
    "unbounded": ({"units": 16}, {"activation": "gelu_tanh"}),
    "tiles": (
        {"heads": 1, "units": 37, "width": 20, "adaptive_query": True},
        {"activation": "tanh", "max_gradient_norm": 0.5},
    ),
    "relu": ({"heads": 1, "units": 12}, {"activation": "relu", "max_gradient_norm": 0.5}),
    "one": ({"heads": 1, "width": 2, "units": 1}, {}),  # of one number nothing but eps moves the norm
}
MEMORY_RULE: dict[str, Any] = {"chunk_size": 2, "self_chunk_size": 4, "step_limit": 0.25}


def memory_arguments(dtype: torch.dtype, wide: torch.dtype, **sizes: Any) -> dict[str, Any]:
    """Numbers of `dtype`, those of the states of float32, as numbers of `wide`."""
    args = memory_inputs(**sizes)
    for name, x in args.items():
        if isinstance(x, Weights):
            args[name] = Weights(*(w.float().to(wide) for w in x))
        elif x is not None and x.is_floating_point():
            args[name] = x.to(dtype).to(dtype if wide == torch.float32 else wide)
    return args


@dtypes
@pytest.mark.parametrize("case", MEMORIES)
def test_self_modifying_token_by_token(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several chunks of both kinds, rows at different places of theirs; the states after every token."""
    monkeypatch.setattr(memory_triton, "TILE", 256)
    sizes, options = MEMORIES[case]
    args, exact = (
        memory_arguments(dtype, wide, **sizes, tokens=9, positions=(0, 3)) for wide in (torch.float32, torch.float64)
    )
    states = {"triton": (args["now"], args["now"]), "reference": (exact["now"], exact["now"])}
    if case != "given":  # whose state is fresh, with one tensor for both, though a row has read some tokens
        states = {"triton": (args["now"], args["anchor"]), "reference": (exact["now"], exact["anchor"])}
    with torch.no_grad():
        for t in range(9):
            outputs = []
            for (backend, (now, anchor)), given in zip(list(states.items()), (args, exact), strict=True):
                one = {n: None if given[n] is None else given[n][:, t : t + 1] for n in ("u", "query")}
                one |= {"now": now, "anchor": anchor, "position": given["position"] + t}
                y, *states[backend] = self_modifying(**{**given, **one}, **MEMORY_RULE, **options, backend=backend)
                outputs.append(y)
            close(outputs[0].double(), outputs[1], OP[dtype])
            for got, want in zip(*(pytree.tree_leaves(state) for state in states.values()), strict=True):
                close(got.double(), want, OP[torch.float32])


def test_self_modifying_writes_what_it_may() -> None:
    """The weights in place, but not those that others share; no row without a token; nothing with gradients."""
    args = memory_arguments(torch.float32, torch.float32, batch=3, tokens=1, positions=(4, 4, 3))
    before = pytree.tree_map_only(Tensor, torch.clone, args)
    lengths = torch.tensor([1, 0, 0])
    _, *want = self_modifying(**before, **MEMORY_RULE, lengths=lengths, backend="reference")
    _, *trained = self_modifying(**args, **MEMORY_RULE, lengths=lengths, backend="triton")
    for got, expected in zip(pytree.tree_leaves(args), pytree.tree_leaves(before), strict=True):
        assert torch.equal(got, expected)
    with torch.no_grad():
        shared = Weights(*(x[:1].expand(3, -1, -1, -1) for x in args["now"]))
        once = {**args, "now": shared, "anchor": shared, "position": torch.tensor([0, 4, 8])}
        _, *fresh = self_modifying(**once, **MEMORY_RULE, backend="triton")
        _, *wanted = self_modifying(**once, **MEMORY_RULE, backend="reference")
        for got, expected in zip(args["now"], before["now"], strict=True):
            assert torch.equal(got, expected)
        strided = {**args, "u": args["u"].mT.contiguous().mT, "query": args["query"].mT.contiguous().mT}
        y, *stepped = self_modifying(**strided, **MEMORY_RULE, lengths=lengths, backend="triton")
    assert y.isfinite().all()
    for found, expected in ((trained, want), (fresh, wanted), (stepped, want)):
        for got, x in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            close(got, x, OP[torch.float32])
    for got, given, old in zip(
        *(pytree.tree_leaves(x) for x in (stepped, (args["now"], args["anchor"]))),
        (*before["now"], *before["anchor"]),
        strict=True,
    ):
        assert got is given
        assert torch.equal(got[1:], old[1:])
        assert not torch.equal(got[0], old[0])


def test_self_modifying_reads_many_tokens() -> None:
    """By the kernels of the delta rule and of linear attention, with gradients."""
    found = []
    for backend, wide in (("triton", torch.float32), ("reference", torch.float64)):
        args = memory_arguments(torch.float32, wide, batch=2, tokens=4, positions=(4, 0))
        given = pytree.tree_map_only(Tensor, lambda x: x.requires_grad_() if x.is_floating_point() else x, args)
        y, now, _ = self_modifying(
            **given, **{**MEMORY_RULE, "chunk_size": 4}, lengths=torch.tensor([4, 3]), backend=backend
        )
        leaves = [x for x in pytree.tree_leaves(given) if x.is_floating_point()]
        gradients = torch.autograd.grad(
            y[0].sum() + y[1, :3].sum() + now.first.sum() + now.second.square().sum(), leaves
        )
        found.append([y[0], y[1, :3], *now, *gradients])
    for got, want in zip(*found, strict=True):
        close(got.double(), want, OP[torch.float32])


@pytest.mark.parametrize("adaptive", [False, True])
def test_self_modifying_as_torch_sees_it(adaptive: bool) -> None:
    args = memory_inputs(tokens=1, adaptive_query=adaptive, dtype=torch.float32)
    u, query, *gates, now, anchor, position = args.values()
    for lengths in (None, torch.tensor([1, 0])):
        given = u, query, *gates, *now, *anchor, position, lengths, 2, 4, 0.25, "gelu", 0.5
        found = torch.library.opcheck(memory_triton._step, given, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}
    wide = memory_inputs(tokens=1, heads=1, width=257, units=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="holds heads up to 256 wide, got 257"):
        self_modifying(**wide, **MEMORY_RULE, backend="triton")
