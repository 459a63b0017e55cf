"""What `test_distributed.py` runs in each process: a few steps of training, then a checkpoint, for several models.

    accelerate launch ... distributed_worker.py FOLDER

They train in each of `MODES`, and share each global batch. The main one writes each model to `FOLDER/MODE/CASE`, and
beside it the loss of every step and one after the last.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import torch
import zoo
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

MODES = ("ddp", "fsdp2")
STEPS = 3
ROWS = 4
LENGTH = 4 * zoo.CHUNK + 3


@cache
def cases() -> dict[str, dict[str, bool]]:
    """Configs with options: every kind of module is in some of them, and one head shares the embedding's weight."""
    chosen, seen = {zoo.PLAIN[0]: {"tie_word_embeddings": True}}, set[type]()
    for name in (name for name in zoo.NAMES if name not in zoo.PLAIN):
        kinds = {type(module) for module in zoo.build(name).modules() if not isinstance(module, PreTrainedModel)}
        if not kinds <= seen:
            chosen[name] = {}
        seen |= kinds
    return chosen


def fits(case: str, mode: str) -> bool:
    """Whether it can train in a mode: FSDP2 cannot shard blocks that are read several times a pass."""
    return mode != "fsdp2" or getattr(zoo.TINY[case], "chain_learning", "stream") == "stream"


def train(case: str, folder: Path, accelerator: Accelerator) -> list[float]:
    """The global losses of some steps; the trained model is saved to `folder`."""
    model = zoo.build(case, **cases()[case])
    # Plain SGD, whose updates differ as little as the gradients do; Adam's turn over where a gradient is nearly 0.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if accelerator.is_fsdp2:  # the blocks to shard are this model's, not the last one's
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None
    model, optimizer = accelerator.prepare(model, optimizer)
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    losses = []
    for at in range(STEPS + 1):
        ids = zoo.tokens(ROWS, LENGTH, seed=at)[mine]
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if at < STEPS:
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    plain = accelerator.unwrap_model(model)
    plain.save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
        save_function=accelerator.save,
    )
    check(model, plain, accelerator)
    accelerator.free_memory()
    return losses


def check(model: torch.nn.Module, plain: torch.nn.Module, accelerator: Accelerator) -> None:
    """Raise unless the model was really distributed, and sharded block by block, as the mode says."""
    if accelerator.is_fsdp2:
        blocks = [
            m for m in plain.modules() if any(base.__name__ in plain._no_split_modules for base in type(m).__mro__)
        ]
        if len(blocks) != plain.config.num_hidden_layers or not all(isinstance(m, FSDPModule) for m in blocks):
            raise RuntimeError(f"expected every block of {type(plain).__name__} to be a shard of its own")
    elif accelerator.num_processes > 1 and not isinstance(model, DistributedDataParallel):
        raise RuntimeError(f"expected a DistributedDataParallel, got {type(model).__name__}")


def launched(mode: str) -> Accelerator:
    """The accelerator of one of several processes on CPUs."""
    if mode == "ddp":
        return Accelerator()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(fsdp_plugin=plugin)
    # accelerate chooses FSDP on GPUs only (AcceleratorState.__init__), though all of it runs on CPUs; this is the
    # choice that it makes there.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def main(folder: Path) -> None:
    for mode in MODES:
        AcceleratorState._reset_state()
        accelerator = launched(mode)
        for case in (case for case in cases() if fits(case, mode)):
            losses = train(case, folder / mode / case, accelerator)
            if accelerator.is_main_process:
                (folder / mode / case / "losses.json").write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
