"""The deep memory on exponential features: its equations by autograd, cuts, gradients, refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tolerances import GRADCHECK, OP, close
from torch import Tensor

from memzoo.kernels.deep_exponential_memory import OP as DEEP
from memzoo.kernels.deep_exponential_memory import deep_exponential_memory, initial_state, make_inputs, retrieve

CASES = list(itertools.product(["dot", "l2"], [1, 3]))
SEQUENCES = ("query", "key", "value", "log_retention", "step_size")


@pytest.mark.parametrize(("objective", "window"), CASES)
@pytest.mark.parametrize("bound", [math.inf, 0.3])
def test_is_gradient_descent_on_features(objective: str, window: int, bound: float) -> None:
    """Second witness: autograd of the inner loss in `W_2`, written out on the Taylor series of the exponential of
    one-dimensional keys, and `W_1`."""
    args = make_inputs(batch=1, heads=1, key_dim=1, value_dim=1, hidden=4, window=window)
    scale, state = float(args["scale"]), args["state"]
    degrees = torch.arange(40, dtype=torch.float64)
    roots = (degrees * math.log(scale) - torch.lgamma(degrees + 1) - scale).mul(0.5).exp()

    def memory(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        return x + second @ torch.nn.functional.gelu(first @ (roots * x**degrees))

    q, k, v, log_a, step = (args[name][0, :, 0] for name in SEQUENCES)
    first = torch.zeros(4, 40, dtype=torch.float64)
    first[:, 1] = state.first[0, 0, :, 0] / roots[1]
    second, want = state.second[0, 0], []
    for t in range(len(q)):
        new = [log_a[t].exp() * first, log_a[t].exp() * second]
        for j in range(min(window, t + 1)):
            weights = [first.clone().requires_grad_(), second.clone().requires_grad_()]
            said = memory(*weights, k[t - j])
            loss = -(said * v[t - j]).sum() if objective == "dot" else 0.5 * (said - v[t - j]).square().sum()
            u = torch.autograd.grad(loss, weights)
            shorten = min(1.0, bound / math.sqrt(sum(float(g.square().sum()) for g in u)))
            new = [w - step[t, j] * shorten * g for w, g in zip(new, u, strict=True)]
        first, second = new
        want.append(memory(first, second, q[t]))
    got, final = deep_exponential_memory(**args, objective=objective, max_gradient_norm=bound)
    close(got[0, :, 0], torch.stack(want), OP[torch.float64])
    answers = retrieve(args["query"], *final[:4], scale=scale)
    close(answers[0, :, 0], torch.stack([memory(first, second, x) for x in q]), OP[torch.float64])


@pytest.mark.parametrize(("objective", "window"), CASES)
def test_pieces_and_ragged_rows_equal_one_pass(objective: str, window: int) -> None:
    args = make_inputs(batch=2, tokens=9, window=window)
    want, _ = deep_exponential_memory(**args, objective=objective)

    def piece(low: list[int], count: int, state: Any, lengths: list[int] | None) -> tuple[Tensor, Any]:
        index = (torch.tensor(low)[:, None] + torch.arange(count)).clamp(max=8)
        rows = torch.arange(2)[:, None]
        part = {name: args[name][rows, index] for name in SEQUENCES}
        given = None if lengths is None else torch.tensor(lengths)
        return deep_exponential_memory(**{**args, **part, "state": state}, objective=objective, lengths=given)

    y, state = piece([0, 0], 4, args["state"], None)
    close(y, want[:, :4], OP[torch.float64])
    y, state = piece([4, 4], 5, state, [1, 5])
    close(y[0, :1], want[0, 4:5], OP[torch.float64])
    close(y[1], want[1, 4:], OP[torch.float64])
    y, state = piece([5, 8], 4, state, [4, 0])
    close(y[0], want[0, 5:], OP[torch.float64])


@pytest.mark.parametrize("objective", ["dot", "l2"])
def test_gradcheck(objective: str) -> None:
    args = make_inputs(batch=1, tokens=4, heads=1, key_dim=2, value_dim=2, hidden=3, window=2)
    state = args["state"]
    leaves = [args[name].requires_grad_() for name in SEQUENCES]
    weights = [w[0].clone().requires_grad_() for w in (state.first, state.second)]

    def call(first: Tensor, second: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(SEQUENCES, values, strict=True))
        begun = initial_state([first, second], 1, window=2)
        y, last = deep_exponential_memory(**{**args, **named, "state": begun}, objective=objective)
        return y, last.written

    assert torch.autograd.gradcheck(call, [*weights, *leaves], **GRADCHECK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 13, 3, 7)}, "key: expected"),
        ({"value": torch.zeros(2, 13, 3, 4)}, "value: expected"),
        ({"step_size": torch.zeros(2, 13, 3, 2)}, "step_size: expected"),
        ({"log_retention": torch.zeros(2, 13)}, "log_retention: expected"),
        ({"objective": "l1"}, "objective: expected one of"),
        ({"activation": "step"}, "activation: expected one of"),
        ({"scale": 0.0}, "scale: expected above 0, got 0.0"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm: expected above 0, got 0.0"),
        ({"state": make_inputs(heads=2)["state"]}, "first layer of the state: expected"),
        (make_inputs(key_dim=4), "value width of a residual memory: expected at most 4, got 5"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{DEEP.name}: {message}"):
        deep_exponential_memory(**{**make_inputs(), **change})
