"""Settings for every test: one thread per process, since the suite runs in parallel, no network, slow tests first."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every worker begins with its share of the slow tests, so that none waits for another's last one.

    `--dist worksteal` gives each an equal run of neighbours at first, and lets an idle one take from another's end.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow, others = [], []
    for item in items:
        (slow if item.get_closest_marker("slow") else others).append(item)
    items.clear()
    for worker in range(workers):
        for part in (slow, others):
            items += part[len(part) * worker // workers : len(part) * (worker + 1) // workers]
