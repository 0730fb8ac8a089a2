"""`ts.estimate` against what processes hold and send: proportional set sizes, and bytes given to communicators."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.central_storage import needs_common_memory
from tests.support.replicas import cpus
from torchstrat.distributed.collectives.process_group import ProcessGroupCommunicator
from torchstrat.strategies.estimates import ON_SEVERAL_HOSTS
from torchstrat.testing.spawn import spawn

WIDTH = 4_000  # one Linear of 16 million float32 parameters: 64 MB
TIMEOUT = timedelta(seconds=100)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
}
needs_rollup = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")


def train(strategy: ts.Strategy, build: Callable[[], nn.Module], optimizer: str, width: int) -> Any:
    """A step, after one that has been made: with model and optimizer, still alive."""
    with strategy.scope():
        model = build()
        made = OPTIMIZERS[optimizer](model.parameters())

    def step(x: torch.Tensor) -> None:
        made.zero_grad()
        model(x).square().mean().backward()
        made.step()

    for _ in range(2):  # the first one finds out the order of gradients
        strategy.run(step, args=(torch.ones(2, width),))
    return model, made, step


# -- memory ------------------------------------------------------------------------------------------------------------


def pss_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    [size] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")]
    return size


def measure(name: str, optimizer: str, replicas: int, options: dict[str, Any]) -> tuple[int, int, bool]:
    """Bytes that training holds, bytes estimated before, and whether the optimizer shows its state, in this process."""
    strategy = ts.registry.get(name)(cpus(replicas) if replicas > 1 else None, timeout=TIMEOUT, **options)
    linear = partial(nn.Linear, bias=False)
    try:
        small = train(strategy, partial(linear, 8, 8), optimizer, 8)  # what a first step loads is not the model's
        with torch.device("meta"):
            meta = linear(WIDTH, WIDTH)
        estimate = strategy.extended.estimate(meta, OPTIMIZERS[optimizer](meta.parameters()))
        gc.collect()
        before = pss_bytes()
        large = train(strategy, partial(linear, WIDTH, WIDTH), optimizer, WIDTH)
        gc.collect()
        strategy.run(gc.isenabled)  # a rank that has not come as far, or has gone on, would not bear its share
        held = pss_bytes() - before
        strategy.run(gc.isenabled)
        has_state = bool(large[1].state)
        del small, large
        return held, estimate.host_bytes, has_state
    finally:
        strategy.close()


@needs_rollup
@pytest.mark.parametrize(
    ("name", "replicas", "options"),
    [
        # Either strategy and either launch once; the others of these two tables, and over sockets: in soak.
        ("mirrored", 1, {}),
        ("central_storage", 2, {}),
        pytest.param("central_storage", 1, {}, marks=pytest.mark.soak),
        pytest.param("mirrored", 2, {}, marks=pytest.mark.soak),
        pytest.param("mirrored", 1, {"collectives": "process_group"}, marks=pytest.mark.soak),
    ],
)
def test_processes_hold_what_was_estimated(name: str, replicas: int, options: dict[str, Any]) -> None:
    """Two with a replica each, or one with two."""
    results = spawn(measure, 3 - replicas, (name, "sgd", replicas, options), timeout_seconds=300)
    held, (estimated,) = sum(result[0] for result in results), {result[1] for result in results}
    assert abs(held - estimated) <= 0.05 * estimated, f"held {held:,} bytes, estimated {estimated:,}"
    assert all(result[2] for result in results), "central storage, too, shows the state to all"


@needs_rollup
@needs_common_memory
def test_central_storage_keeps_everything_but_gradients_once() -> None:
    results = spawn(measure, 2, ("central_storage", "adam", 1, {}), timeout_seconds=300)
    held = sum(result[0] for result in results)
    weights = 4 * WIDTH * WIDTH
    needed = weights + 2 * weights + 2 * weights  # weights, two gradients, and two numbers of Adam's for each weight
    assert results[0][1] == pytest.approx(needed, rel=1e-3)
    assert 0.95 * needed <= held <= 1.1 * needed, f"held {held:,} bytes of {needed:,}"


# -- traffic -----------------------------------------------------------------------------------------------------------

PROCESSES = 3
NOTES_BYTES = 1024  # calls below that are agreements, of a few numbers


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def bytes_of_a_step(name: str) -> tuple[int, int]:
    """(in sums, as the source of broadcasts), in this process."""
    sent = {"all_reduce": 0, "broadcast": 0}

    def counting(kind: str) -> Any:
        real = getattr(ProcessGroupCommunicator, kind)

        def count(self: Any, tensor: torch.Tensor, *args: Any) -> Any:
            if tensor.nbytes > NOTES_BYTES and (kind == "all_reduce" or args[0] == self.rank):
                sent[kind] += tensor.nbytes
            return real(self, tensor, *args)

        return mock.patch.object(ProcessGroupCommunicator, kind, count)

    strategy = ts.registry.create(name, timeout=TIMEOUT, collectives="process_group")
    _model, _optimizer, step = train(strategy, build, "adam", 64)
    with counting("all_reduce"), counting("broadcast"):
        strategy.run(step, args=(torch.ones(4, 64),))
    strategy.close()
    return sent["all_reduce"], sent["broadcast"]


@pytest.mark.parametrize("name", ["multi_worker_mirrored", "central_storage"])
def test_processes_without_common_memory_send_what_is_estimated(name: str) -> None:
    measured = spawn(bytes_of_a_step, PROCESSES, (name,))
    sent = [2 * summed * (PROCESSES - 1) // PROCESSES + handed_out * (PROCESSES - 1) for summed, handed_out in measured]
    rows = ts.estimate(build, "adam", replicas=PROCESSES).of(name, ON_SEVERAL_HOSTS)
    assert [row.sent_bytes for row in rows for _ in range(row.count)] == sent
