"""The memory on exponential features: its equations, every backend against them, what it reduces to."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tolerances import GRADCHECK, OP, close
from torch import Tensor

from memzoo.configuration.exponential_memory import DeepTransformerConfig
from memzoo.kernels.exponential_memory import OP as EXPONENTIAL
from memzoo.kernels.exponential_memory import chunked, exponential_memory, kernel, make_inputs, retrieve
from memzoo.modeling.mixers.exponential_memory import exponential_mixer

BACKENDS = [name for name in EXPONENTIAL.names() if name != "triton"]  # of which see triton_parity.py
FAST = [name for name in BACKENDS if name != "reference"]
CASES = list(itertools.product(["dot", "l2"], [1, 2, 4]))
SEQUENCES = ("query", "key", "value", "log_retention", "step_size")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "SEGMENT", 5)


def piece(args: dict[str, Any], low: int, high: int, state: Any) -> dict[str, Any]:
    return {**args, **{name: args[name][:, low:high] for name in SEQUENCES}, "state": state}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("objective", "window"), CASES)
def test_is_the_recurrence_on_features(backend: str, objective: str, window: int) -> None:
    """Second witness: the matrix itself, on features by the Taylor series of the exponential, one-dimensional keys."""
    args = make_inputs(batch=1, heads=1, key_dim=1, window=window)
    scale = float(args["scale"])
    degrees = torch.arange(40, dtype=torch.float64)
    roots = (degrees * math.log(scale) - torch.lgamma(degrees + 1) - scale).mul(0.5).exp()

    def phi(x: Tensor) -> Tensor:
        return roots * x**degrees

    q, k, v, log_a, step = (args[name][0, :, 0] for name in SEQUENCES)
    memory, want = torch.zeros(v.shape[1], 40, dtype=torch.float64), []
    for t in range(len(q)):
        new = log_a[t].exp() * memory
        for j in range(min(window, t + 1)):
            error = (memory @ phi(k[t - j]) if objective == "l2" else 0) - v[t - j]
            new = new - step[t, j] * torch.outer(error, phi(k[t - j]))
        memory = new
        want.append(memory @ phi(q[t]))
    got, _ = exponential_memory(**args, objective=objective, backend=backend)
    close(got[0, :, 0], torch.stack(want), OP[torch.float64])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(("objective", "window"), CASES)
def test_matches_reference_with_its_gradients(backend: str, objective: str, window: int) -> None:
    for tokens in (1, 4, 5, 6, 13):
        results = []
        for name in ("reference", backend):
            args = make_inputs(tokens=tokens, window=window)
            leaves = [args[key].requires_grad_() for key in SEQUENCES]
            y, state = exponential_memory(**args, objective=objective, backend=name)
            loss = y.square().sum() + state.written.sin().sum()
            found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            results.append([y, *state[:3], *found])
        for a, b in zip(*results, strict=True):
            if b.numel() and b.any():
                close(a, b, OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("objective", "window"), CASES)
def test_pieces_and_ragged_rows_equal_one_pass(backend: str, objective: str, window: int) -> None:
    args = make_inputs(batch=3, tokens=20, window=window)
    want, _ = exponential_memory(**args, objective=objective, backend="reference")
    state, outputs = args["state"], []
    for low, high in itertools.pairwise([0, 5, 6, 7, 20]):
        y, state = exponential_memory(**piece(args, low, high, state), objective=objective, backend=backend)
        outputs.append(y)
    close(torch.cat(outputs, dim=1), want, OP[torch.float64])
    state, starts = args["state"], torch.zeros(3, dtype=torch.long)
    rows: list[list[Tensor]] = [[], [], []]
    for length in (torch.tensor([5, 0, 8]), torch.tensor([6, 4, 0]), torch.tensor([1, 1, 1])):
        index = (starts[:, None] + torch.arange(int(length.max()))).clamp(max=19)
        part = {
            name: args[name].gather(1, index.view(*index.shape, *[1] * (args[name].ndim - 2)).expand(
                -1, -1, *args[name].shape[2:]
            ))
            for name in SEQUENCES
        }  # fmt: skip
        y, state = exponential_memory(
            **{**args, **part, "state": state}, objective=objective, lengths=length, backend=backend
        )
        for row in range(3):
            rows[row].append(y[row, : int(length[row])])
        starts = starts + length
    for row in range(3):
        close(torch.cat(rows[row]), want[row, : int(starts[row])], OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_its_normaliser_it_is_softmax_attention(backend: str) -> None:
    """Linear DeepTransformer with its normaliser, without retention, all steps alike."""
    args = make_inputs(normalizer=True)
    args["log_retention"] = None
    args["step_size"] = torch.full_like(args["step_size"], 0.3)
    y, state = exponential_memory(**args, backend=backend)
    q, k, v = (args[name].transpose(1, 2) for name in ("query", "key", "value"))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=args["scale"])
    close(y.transpose(1, 2), want, OP[torch.float64])
    again = retrieve(args["query"], state.keys, state.written, scale=args["scale"], normalizer=True)
    close(again[:, -1], y[:, -1], OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_dot_is_unnormalised_attention_with_the_delta_rule(backend: str) -> None:
    """c = 1 (ATLAS Eq 30-31): the written value is what the memory does not say yet."""
    args = make_inputs(tokens=6)
    args["log_retention"] = None
    y, _ = exponential_memory(**args, objective="l2", backend=backend)
    q, k, v, step = (x[0, :, 0] for x in (args["query"], args["key"], args["value"], args["step_size"]))
    scale, written = float(args["scale"]), []
    for t in range(6):
        said = sum(w * kernel(k[i : i + 1], k[t : t + 1], scale)[0, 0] for i, w in enumerate(written))
        written.append(step[t] * (v[t] - said))
        want = sum(w * kernel(k[i : i + 1], q[t : t + 1], scale)[0, 0] for i, w in enumerate(written))
        close(y[0, t, 0], want, OP[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("objective", "window"), CASES)
def test_a_memory_with_room_is_written_in_place(backend: str, objective: str, window: int) -> None:
    """By single tokens without gradients; else, and where it has no room, a state that is gone on from stays as it
    was. Rows stand at different places, behind tokens that no window reaches."""
    args = make_inputs(batch=3, tokens=9, window=window, normalizer=objective == "dot")
    options: dict[str, Any] = {"objective": objective, "backend": backend}
    _, state = exponential_memory(**piece(args, 0, 4, args["state"]), **options, lengths=torch.tensor([2, 4, 1]))
    state = state._replace(position=torch.zeros_like(state.position))
    roomy = state._replace(**{n: F.pad(getattr(state, n), (0, 0, 0, 5)) for n in ("keys", "written")})
    leaf = args["value"].clone().requires_grad_()
    with torch.no_grad():
        before = [x.clone() for x in roomy]
        wants = []
        for t in range(4, 9):
            want, state = exponential_memory(**piece(args, t, t + 1, state), **options)
            wants.append(want)
        for call in (torch.enable_grad, torch.no_grad):
            with call():
                first, grown = exponential_memory(**piece({**args, "value": leaf}, 4, 6, roomy), **options, grows=False)
            close(first.detach(), torch.cat(wants[:2], dim=1), OP[torch.float64])
            assert all(torch.equal(x, y) for x, y in zip(roomy, before, strict=True))
        for t in range(6, 9):
            held = grown.keys, grown.written
            y, grown = exponential_memory(**piece(args, t, t + 1, grown), **options, grows=False)
            close(y, wants[t - 4], OP[torch.float64])
            assert all(x is y for x, y in zip(held, (grown.keys, grown.written), strict=True))
    for name in ("keys", "written"):
        got, want = getattr(grown, name), getattr(state, name)
        close(got, want[:, :, : got.shape[2]], OP[torch.float64])
    assert torch.equal(grown.length, state.length)
    assert grown.position.tolist() == [5, 5, 5]


@pytest.mark.parametrize("options", [{}, {"normalizer": False}, {"normalizer": False, "memory": "mlp"}])
def test_asking_a_memory_says_what_its_last_token_read(options: dict[str, Any]) -> None:
    shape = {"hidden_size": 8, "num_attention_heads": 2, "conv_width": 1}
    config = DeepTransformerConfig(**shape, **options)
    mixer = exponential_mixer(config, 0).double()
    torch.manual_seed(0)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    memory = mixer.memory
    torch.nn.init.ones_(memory.conv.weight)
    query = torch.nn.Linear(8, 8, bias=False, dtype=torch.float64)
    query.weight = torch.nn.Parameter(memory.qkv_proj.weight[:8])
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    y, state = memory(x, memory.begin(2, x)[1], None)
    answers, past = memory.recall(x, state, (), state.memory.position, 4, query)
    close(answers[:, -1], y[:, -1], OP[torch.float64])
    _, now = memory(x, state, None)
    again, same = memory.recall(x, now, past, torch.tensor([7, 4]), 4, query)  # the second row starts a segment
    close(again[0], answers[0], OP[torch.float64])
    assert all(torch.equal(a[0, :, : b.shape[2]], b[0]) for a, b in zip(same, past, strict=True))
    close(again[1], memory.recall(x, now, (), state.memory.position, 4, query)[0][1], OP[torch.float64])
    nothing, _ = memory.recall(x, memory.begin(2, x)[1], (), state.memory.position, 4, query)
    assert nothing.isfinite().all()
    assert bool(nothing.any()) == (config.memory == "mlp")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("objective", ["dot", "l2"])
def test_gradcheck(backend: str, objective: str) -> None:
    args = make_inputs(batch=1, tokens=7, heads=1, key_dim=2, value_dim=2, window=2)
    leaves = [args[name].requires_grad_() for name in SEQUENCES]

    def call(*values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(SEQUENCES, values, strict=True))
        y, state = exponential_memory(**{**args, **named}, objective=objective, backend=backend)
        return y, state.written

    assert torch.autograd.gradcheck(call, leaves, **GRADCHECK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 13, 3, 7)}, "key: expected"),
        ({"value": torch.zeros(2, 13, 2, 5)}, "value: expected"),
        ({"value": torch.zeros(2, 13, 3, 4)}, "value width of the state: expected 4, got 5"),
        ({"step_size": torch.zeros(2, 13, 3, 2)}, "step_size: expected"),
        ({"log_retention": torch.zeros(2, 13)}, "log_retention: expected"),
        ({"objective": "l1"}, "objective: expected one of"),
        ({"scale": 0.0}, "scale: expected above 0, got 0.0"),
        ({"state": make_inputs(heads=2)["state"]}, "keys of the state: expected"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exponential_memory(**{**make_inputs(), **change})
