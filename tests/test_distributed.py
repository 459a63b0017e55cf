"""Two processes that share a batch, with whole models or with shards of one, train as one process does.

The processes run on CPUs and talk through gloo. `accelerate launch --cpu` starts one process only; `--multi_gpu` is
its name for several on this machine, and `ACCELERATE_USE_CPU` says on what.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import distributed_worker
import pytest
import torch
import zoo
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tolerances import GRADIENT, MODEL, close
from torch import Tensor
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow
WORKER = Path(distributed_worker.__file__)
LAUNCH = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """One process."""
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def loaded(folder: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_two_processes_train_as_one(accelerator: Accelerator, tmp_path: Path) -> None:
    """The same losses; a checkpoint that loads, holds the weights of one process and continues where training ended."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(WORKER.parent)}
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH.split(), str(WORKER), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stderr
    for case, options in distributed_worker.cases().items():
        losses = distributed_worker.train(case, tmp_path / "alone" / case, accelerator)
        weights, start = loaded(tmp_path / "alone" / case), zoo.build(case, **options).state_dict()
        for mode in (mode for mode in distributed_worker.MODES if distributed_worker.fits(case, mode)):
            folder = tmp_path / mode / case
            got = json.loads((folder / "losses.json").read_text())
            close(torch.tensor(got), torch.tensor(losses), GRADIENT)
            again = loaded(folder)
            assert again.keys() == weights.keys()
            for key, weight in weights.items():
                update = weight - start[key]
                # Each step rounds the weight itself, which a small update of a large weight shows.
                rounding = distributed_worker.STEPS * torch.finfo(weight.dtype).eps * weight.abs().max()
                bound = MODEL[torch.float32] + float(rounding / update.abs().max().clamp(min=1e-30))
                assert bound < 0.05, f"{key} has hardly moved"
                close(again[key] - start[key], update, bound)
            model = AutoModelForCausalLM.from_pretrained(folder)
            ids = zoo.tokens(distributed_worker.ROWS, distributed_worker.LENGTH, seed=distributed_worker.STEPS)
            close(model(ids, labels=ids).loss, torch.tensor(got[-1]), GRADIENT)
