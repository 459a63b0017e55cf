"""The optimizers are what their equations say, weight by weight, and torch's own where they reduce to them."""

from __future__ import annotations

import copy
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from datasets import Dataset
from tolerances import NEWTON_SCHULZ, OP, close
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from memzoo import DGD, M3, ProteusAdamW, ProteusCallback, matrix_groups, parameter_groups
from memzoo.kernels.newton_schulz import newton_schulz

EXACT = OP[torch.float64]
OPTIONS = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6}


class Net(nn.Module):
    """A feed-forward under the names of the zoo, whose 7 hidden units no number of blocks divides."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(5, 7, dtype=dtype),
                "up_proj": nn.Linear(5, 7, dtype=dtype),
                "down_proj": nn.Linear(7, 5, dtype=dtype),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)
        return self.mlp["down_proj"](hidden)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[dict[str, Tensor]]:
    """The weights after each step, on inputs that differ from step to step."""
    seen = []
    for at in range(first, first + steps):
        dtype = next(model.parameters()).dtype
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(at)).to(dtype)
        (model(x) - x.flip(1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_one_block_is_adamw(dtype: torch.dtype, kernels: dict[str, bool]) -> None:
    """To the bit: weights, moments, counters, with a learning rate that changes."""
    ours, theirs = (Net(dtype) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    groups = parameter_groups(theirs, weight_decay=0.1)
    plain = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
    pair = [
        (ours, ProteusAdamW(parameter_groups(ours, weight_decay=0.1), **OPTIONS, **kernels)),
        (theirs, torch.optim.AdamW(plain, **OPTIONS, **kernels)),
    ]
    ends = []
    for model, optimizer in pair:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        for at in range(4):
            train(model, optimizer, 1, at)
            schedule.step()
        ends.append([(p.detach(), optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]])
    for (p, state), (q, other) in zip(*ends, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(state[key], x) and state[key].dtype == x.dtype for key, x in other.items())


def unit_of(name: str, shape: torch.Size) -> Tensor:
    """The hidden unit that each weight belongs to, -1 for none."""
    if name == "mlp.down_proj.bias":
        return torch.full(shape, -1)
    if name == "mlp.down_proj.weight":
        return torch.arange(7).expand(shape)
    return torch.arange(7).view(7, *[1] * (len(shape) - 1)).expand(shape)


def by_equation(steps: int, delta: int, period: int, literal: bool) -> list[dict[str, Tensor]]:
    """Eq 14-15 of arXiv 2608.16844 for 3 blocks, weight by weight, with every tensor dense."""
    torch.manual_seed(0)
    model, seen, blocks, decay = Net(), [], 3, 0.1
    (beta1, beta2), eps, lr = OPTIONS["betas"], OPTIONS["eps"], OPTIONS["lr"]
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    gathered, m, v, count = (copy.deepcopy(zero) for _ in range(4))
    for at in range(steps):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(at)).double()
        (model(x) - x.flip(1)).square().sum().backward()
        opened = min(blocks, 1 + at // delta)
        for name, p in model.named_parameters():
            block = torch.div(unit_of(name, p.shape), 7 // blocks, rounding_mode="floor").clamp(max=blocks - 1)
            mask = (block < opened).double()
            gathered[name] += mask * p.grad
            if (at + 1) % period:
                continue
            g, weight_decay = gathered[name], decay if p.ndim > 1 else 0.0
            m[name] = torch.where(mask == 1, beta1 * m[name] + (1 - beta1) * g, m[name])
            v[name] = torch.where(mask == 1, beta2 * v[name] + (1 - beta2) * g * g, v[name])
            count[name] += 1.0 if literal else mask
            corrected = m[name] / (1 - beta1 ** count[name].clamp(min=1))
            scale = (v[name] / (1 - beta2 ** count[name].clamp(min=1))).sqrt() + eps
            keep = 1 - lr * weight_decay * (1.0 if literal else mask)
            p.data = keep * p.data - lr * mask * corrected / scale
            gathered[name] = torch.zeros_like(p)
        model.zero_grad()
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return seen


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("foreach", [False, True])
def test_masked_steps_are_the_equation(literal: bool, period: int, foreach: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    groups = parameter_groups(model, weight_decay=0.1, periods={"mlp": period})
    flags = {"gate_weight_decay": not literal, "count_per_block": not literal, "foreach": foreach}
    optimizer = ProteusAdamW(groups, **OPTIONS, blocks=3, total_steps=20, horizon=0.3, **flags)
    got = train(model, optimizer, 14)
    # 6 steps of horizon over 3 blocks: one every 2 steps, moved to every 3 by a period of 3.
    want = by_equation(14, 2 if period == 1 else 3, period, literal)
    for after, expected in zip(got, want, strict=True):
        for name, value in expected.items():
            close(after[name], value, EXACT)


def test_what_is_closed_stays_to_the_bit() -> None:
    """Weights, moments and gradients, under weight decay; and what opens moves by the learning rate at once."""
    model = Net()
    optimizer = ProteusAdamW(parameter_groups(model, 0.1), **OPTIONS, blocks=3, total_steps=12)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = start
    for at in range(6):
        opened = 1 + at // 2
        assert optimizer.open_blocks == opened
        (model(torch.ones(2, 5, dtype=torch.float64)).sum() * (at + 1)).backward()
        for name, p in model.named_parameters():
            closed = unit_of(name, p.shape) >= (2 * opened if opened < 3 else 7)
            assert p.grad[closed].eq(0).all()
            assert p.grad[~closed].ne(0).all()
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            unit = unit_of(name, p.shape)
            closed = unit >= (2 * opened if opened < 3 else 7)
            assert torch.equal(p[closed], start[name][closed])
            assert all(optimizer.state[p][key][closed].eq(0).all() for key in ("exp_avg", "exp_avg_sq"))
            if at % 2 == 0:
                new = (unit >= 2 * (opened - 1)) & ~closed
                decay = 0.1 if p.ndim > 1 else 0.0
                moved = (p.detach() - (1 - OPTIONS["lr"] * decay) * before[name])[new]
                assert ((moved.abs() - OPTIONS["lr"]).abs() < 1e-3 * OPTIONS["lr"]).all()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}


def test_clipping_sees_the_masked_gradient() -> None:
    """The norm of accumulated gradients is that of the open units; an optimizer that is gone masks nothing."""
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = ProteusAdamW(parameter_groups(model), blocks=7, total_steps=100)
    for each in (model, plain):
        for seed in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).double()
            each(x).square().sum().backward()
    masked = [torch.where(unit_of(name, p.shape) < 1, p.grad, 0) for name, p in plain.named_parameters()]
    assert torch.equal(nn.utils.clip_grad_norm_(model.parameters(), 0.1), nn.utils.get_total_norm(masked))
    del optimizer
    model.zero_grad()
    model(x).square().sum().backward()
    assert all(p.grad.ne(0).all() for p in model.parameters())


def test_groups_of_a_chain_and_of_a_library_model() -> None:
    model = zoo.build("hope_attention-e1")
    groups = {id(p): group for group in parameter_groups(model, 0.1) for p in group["params"]}
    assert len(groups) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        group = groups[id(p)]
        period = {"levels.0": 3, "levels.1": 1}.get(name.partition("chain.")[2][:8], 1)
        axis = None if "mlp" not in name else 1 if "down_proj" in name else 0
        assert (group["period"], group["unit_axis"]) == (period, axis), name
        assert group["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
    )
    axes = [group["unit_axis"] for group in parameter_groups(llama, periods={r"\bmlp\.": 4}) if group["period"] == 4]
    assert sorted(axes) == [0, 1]
    with pytest.raises(ValueError, match="periods: 'chain' fits no trainable parameter"):
        parameter_groups(llama, periods={"chain": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 0}, "blocks: expected at least 1, got 0"),
        ({"blocks": 2}, "total_steps: expected the steps of the training, got None"),
        ({"blocks": 8, "total_steps": 10}, "unit_axis: expected an axis of at least 8 units"),
        ({"horizon": 0.0}, "horizon: expected above 0"),
        ({"lr": -1.0}, "lr: expected at least 0"),
        ({"betas": (0.9, 1.0)}, "betas: expected"),
        ({"blocks": 2, "total_steps": 10, "fused": True}, "fused: expected None or False"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProteusAdamW(parameter_groups(Net()), **options)


def test_a_schedule_that_gates_nothing_or_does_not_end_is_refused() -> None:
    with pytest.raises(ValueError, match="unit_axis: expected the axis of the hidden units in some group"):
        ProteusAdamW(Net().parameters(), blocks=2, total_steps=10)
    groups = parameter_groups(Net(), periods={r".": 8})
    with pytest.raises(ValueError, match=r"all 3 blocks open after 6 steps .* got '16 for the last"):
        ProteusAdamW(groups, blocks=3, total_steps=12)


def test_a_group_that_comes_later() -> None:
    """Masked before any clipping as the others are; one that does not fit leaves the optimizer as it was."""
    model, other = Net(), Net()
    optimizer = ProteusAdamW(parameter_groups(model), blocks=3, total_steps=12)
    count = len(optimizer.param_groups)
    for options, message in (
        ({"unit_axis": 1}, "unit_axis: expected an axis of at least 3 units"),
        ({"period": 8}, "all 3 blocks open after 6 steps"),
        ({"period": 0}, "period: expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(9, 2))], "unit_axis": 0, **options})
        assert len(optimizer.param_groups) == count
    for group in parameter_groups(other):
        optimizer.add_param_group(group)
    other(torch.randn(4, 5).double()).square().sum().backward()
    for name, p in other.named_parameters():
        assert torch.equal(p.grad.ne(0), unit_of(name, p.shape) < 2), name


def test_a_sum_is_applied_where_its_last_gradient_is_missing() -> None:
    """Two steps to an update, a gradient in the first alone: the update of that gradient, at the second."""
    ends = []
    for period in (1, 2):
        p = nn.Parameter(torch.ones(3))
        optimizer = ProteusAdamW([{"params": [p], "period": period}], **OPTIONS)
        for gradient in [torch.arange(3.0), *[None] * (period - 1)]:
            p.grad = gradient
            optimizer.step()
        ends.append(p.detach().clone())
        p.grad = None
        for _ in range(2 * period):  # nothing is left
            optimizer.step()
        assert torch.equal(p, ends[-1])
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], torch.ones(3))


def test_replaced_parameters_are_noticed() -> None:
    model = Net()
    optimizer = ProteusAdamW(parameter_groups(model), blocks=3, total_steps=9)
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"Call optimizer.arm\(\) before the first backward"):
        optimizer.step()


# In a Trainer, and in shards ------------------------------------------------------------------------------------------


def trainer(folder: Path, seed: int = 0) -> Trainer:
    model = zoo.enliven(zoo.build("hope_attention-e1"), seed=seed)
    rows = zoo.tokens(24, 19).tolist()
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=12,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        save_strategy="steps",
        save_steps=5,
        lr_scheduler_type="cosine",
        max_grad_norm=0.5,
    )
    options = {"params": parameter_groups(model, 0.1), "lr": 1e-2, "blocks": 4, "total_steps": 12, "horizon": 1.0}
    return Trainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        optimizer_cls_and_kwargs=(ProteusAdamW, options),
        callbacks=[ProteusCallback()],
    )


@pytest.mark.slow
def test_trainer_resumes_in_the_middle(tmp_path: Path) -> None:
    """Accumulation, clipping, a schedule; stopped at step 5, inside a block and a period: the same bits at the end."""
    run = trainer(tmp_path)
    run.train()
    want = run.model.state_dict()
    resumed = trainer(tmp_path / "again", seed=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert all(torch.equal(got, want[key]) for key, got in resumed.model.state_dict().items())
    start = zoo.enliven(zoo.build("hope_attention-e1")).state_dict()
    assert all(not torch.equal(x, start[key]) for key, x in want.items())


def sharded(rank: int, port: int, folder: str) -> None:
    """Train in shards, reload the optimizer's state in the middle, write down the weights of every step."""
    torch.distributed.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = Net()
    fully_shard(model)
    seen: list[dict[str, Tensor]] = []
    kept: dict[str, Any] = {}
    for part in range(2):
        groups = parameter_groups(model, 0.1, periods={"down_proj": 2})
        optimizer = ProteusAdamW(groups, **OPTIONS, blocks=3, total_steps=12)
        if part:
            set_optimizer_state_dict(model, optimizer, kept, options=whole)
        after = train(model, optimizer, 5, 5 * part)
        seen += [{name: x.full_tensor() for name, x in weights.items()} for weights in after]
        kept = get_optimizer_state_dict(model, optimizer, options=whole)
        payload = [kept]
        torch.distributed.broadcast_object_list(payload, src=0)
        kept = payload[0]
    if rank == 0:
        torch.save(seen, folder)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_in_shards_as_whole(tmp_path: Path) -> None:
    """Two processes hold 4 and 3 of the 7 hidden units: the same weights at every step, also after reloading."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(sharded, (port, str(tmp_path / "seen.pt")), nprocs=2)
    torch.manual_seed(0)
    model = Net()
    groups = parameter_groups(model, 0.1, periods={"down_proj": 2})
    want = train(model, ProteusAdamW(groups, **OPTIONS, blocks=3, total_steps=12), 10)
    for got, expected in zip(torch.load(tmp_path / "seen.pt"), want, strict=True):
        for name, value in expected.items():
            close(got[name], value, EXACT)


# M3 and DGD -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [False, True])
def test_m3_is_its_algorithm(ema: bool) -> None:
    """Algorithm 1 of arXiv 2512.24695 from the list of all gradients so far; vectors take AdamW's steps."""
    model, (b1, b2, b3), window, alpha, lr, eps = Net(), (0.9, 0.8, 0.7), 3, 0.5, 0.02, 1e-3
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(
        [p for p in twin.parameters() if p.ndim < 2], lr=lr, betas=(b1, b2), eps=eps, weight_decay=0
    )
    options = {"lr": lr, "betas": (b1, b2, b3), "eps": eps, "alpha": alpha, "window": window, "ema": ema}
    optimizer = M3(matrix_groups(model, weight_decay=0.1), **options)
    history: dict[str, list[Tensor]] = {name: [] for name, p in twin.named_parameters() if p.ndim > 1}

    def total(gradients: list[Tensor], beta: float) -> Tensor:
        if not ema:
            return beta * torch.stack(gradients).sum(0)
        shares = [(1 - beta) * beta ** (len(gradients) - 1 - at) for at in range(len(gradients))]
        return sum(share * g for share, g in zip(shares, gradients, strict=True))  # type: ignore[return-value]

    for at in range(8):
        train(model, optimizer, 1, at)
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(at)).double()
        (twin(x) - x.flip(1)).square().sum().backward()
        plain.step()
        for name, p in twin.named_parameters():
            if p.ndim < 2:
                continue
            seen = history[name]
            seen.append(p.grad.clone())
            # Whole windows before this one; the first, before any gradient, counts as zero.
            windows = [torch.zeros_like(p)]
            windows += [torch.stack(seen[low : low + window]).sum(0) for low in range(0, at - at % window, window)]
            slow = newton_schulz(total([w / (window if ema else 1) for w in windows], b3), backend="reference")
            fast = newton_schulz(total(seen, b1), backend="reference")
            scale = total([g.square() for g in seen], b2).sqrt() + eps
            p.data = (1 - lr * 0.1) * p.data - lr * (fast + alpha * slow) / scale
        twin.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            close(p, q.detach(), NEWTON_SCHULZ[torch.float64])


def test_matrix_groups() -> None:
    """Embeddings and the head are no matrices of a layer, tied or not."""
    for tied in (False, True):
        model = zoo.build("titans-lmm-e1", tie_word_embeddings=tied)
        matrices, others = (group["params"] for group in matrix_groups(model, 0.1))
        assert all(p.ndim >= 2 for p in matrices)
        names = {id(p): name for name, p in model.named_parameters()}
        heads = {"model.embed_tokens.weight", "lm_head.weight"} & set(names.values())
        assert heads == {names[id(p)] for p in others if p.ndim >= 2}
        assert len(matrices) + len(others) == len(names)
    with pytest.raises(ValueError, match=r"params: expected matrices .* got \(7,\)"):
        M3(Net().parameters())


@pytest.mark.slow
def test_m3_learns_and_resumes() -> None:
    """Less loss on one batch, and the same bits when its state is loaded in the middle of a window."""
    ids, states, losses = zoo.tokens(2, 19), [], []
    for stop in (8, 3):
        model = zoo.build("hope_attention-e1")
        optimizer = M3(matrix_groups(model), lr=2e-3, window=2, ema=True)
        for at in range(8):
            if at == stop:
                kept = copy.deepcopy(optimizer.state_dict())
                optimizer = M3(matrix_groups(model), lr=1.0)
                optimizer.load_state_dict(kept)
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        states.append(model.state_dict())
    assert losses[7] < losses[0]
    assert all(torch.equal(x, states[1][key]) for key, x in states[0].items())


def test_dgd_is_its_closed_form() -> None:
    """Eq 56 and 57 of arXiv 2512.24695 for rows of any length: the minimum found by autograd's own gradient is zero."""
    for rows, reduction in ((1, "sum"), (4, "sum"), (4, "mean")):
        layer = nn.Linear(5, 3, dtype=torch.float64)
        before, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
        x, target = torch.randn(rows, 5, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)
        optimizer = DGD(layer, lr=0.3, reduction=reduction)
        y = layer(x)
        loss = (y - target).pow(4)
        (loss.sum() if reduction == "sum" else loss.sum() / rows).backward()
        gradient = 4 * (y.detach() - target).pow(3)
        optimizer.step()
        after = layer.weight.detach().clone().requires_grad_()
        errors = 0.5 * (x @ after.T + gradient).square().sum() / (1 if reduction == "sum" else rows)
        objective = errors + (after - before).square().sum() / (2 * 0.3)
        (slope,) = torch.autograd.grad(objective, after)
        assert slope.abs().max() < EXACT * objective
        close(layer.bias, bias - 0.3 * gradient.sum(0) / (1 if reduction == "sum" else rows), EXACT)
        if rows == 1:
            rate = 0.3 / (1 + 0.3 * x.square().sum())
            close(layer.weight, before - rate * (before @ x.T @ x + gradient.T @ x), EXACT)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dgd_reads_each_row_once(reentrant: bool) -> None:
    """Over accumulated batches, and where checkpointing replays the layers; forgotten with the gradients."""
    ids, ends = zoo.tokens(2, 19), []
    for checkpointing in (False, True):
        model = zoo.build("hope_attention-e1", torch.float64)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        optimizer = DGD(model, lr=0.1)
        model(ids, labels=ids).loss.backward()
        optimizer.zero_grad()
        for row in ids.split(1):
            (model(row, labels=row).loss / 2).backward()
        optimizer.step()
        ends.append(model.state_dict())
    model = zoo.build("hope_attention-e1", torch.float64)
    whole = DGD(model, lr=0.1)
    model(ids, labels=ids).loss.backward()
    whole.step()
    ends.append(model.state_dict())
    for key, value in ends[0].items():
        close(ends[1][key], value, EXACT)
        close(ends[2][key], value, EXACT)
    with pytest.raises(ValueError, match="reduction: expected one of"):
        DGD(model, reduction="none")


def test_dgd_reads_no_row_of_a_memorys_own_gradients() -> None:
    """A chain that learns in context reads each chunk again for its own sake."""
    ids = zoo.tokens(2, 19)
    model = zoo.build("hope_attention-context-e1")
    optimizer = DGD(model)
    model(ids, labels=ids).loss.backward()
    counts = {float(count) for _, count in optimizer._inputs.values()}
    assert len(optimizer._inputs) == sum(isinstance(module, nn.Linear) for module in model.modules())
    assert counts == {float(ids.numel())}
