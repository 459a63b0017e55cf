"""The Proteus schedule: k(t) against both closed forms of the paper, for sizes that divide and that do not."""

from __future__ import annotations

import pytest
import torch

from memzoo.kernels.deep_memory import block_of_unit
from memzoo.modeling.capacity import CapacitySchedule

SIZES = [(16, 8192), (1, 8192), (16, 100), (7, 50), (8, 5), (1, 1)]


@pytest.mark.parametrize(("blocks", "context"), SIZES)
def test_open_blocks_follow_the_papers_formulas(blocks: int, context: int) -> None:
    schedule = CapacitySchedule(blocks, context)
    delta = max(1, context // blocks)
    tokens = range(1, context + 20)
    got = schedule.open_blocks(torch.tensor(tokens)).tolist()
    assert got == [min(blocks, 1 + (t - 1) // delta) for t in tokens]
    assert got == [min(blocks, -(-t // delta)) for t in tokens]
    assert got[0] == 1
    assert got == sorted(got)
    # The positions that the kernels take say the same: block e is open at token t once t > unlock[e].
    assert got == [sum(t > after for after in schedule.unlock) for t in tokens]
    full = (blocks - 1) * delta + 1
    assert schedule.full_from == full
    assert int(schedule.open_blocks(torch.tensor(full))) == blocks
    if blocks > 1:
        assert int(schedule.open_blocks(torch.tensor(full - 1))) == blocks - 1


@pytest.mark.parametrize(("units", "blocks"), [(64, 16), (17, 4), (5, 5), (9, 1)])
def test_blocks_are_contiguous_and_the_last_takes_the_remainder(units: int, blocks: int) -> None:
    block = block_of_unit(units, blocks).tolist()
    sizes = [block.count(e) for e in range(blocks)]
    assert block == sorted(block)
    assert sum(sizes) == units
    assert sizes[:-1] == [units // blocks] * (blocks - 1)
    assert sizes[-1] == units // blocks + units % blocks


@pytest.mark.parametrize(("blocks", "context"), [(0, 8), (2, 0)])
def test_refuses_empty_schedules(blocks: int, context: int) -> None:
    with pytest.raises(ValueError, match="expected both to be at least 1"):
        CapacitySchedule(blocks, context)
