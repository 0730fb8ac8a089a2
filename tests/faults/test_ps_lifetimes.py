"""New models in one job, each dropped while its functions run and workers are killed: values exact, tasks flat."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.child_processes import children_of
from tests.faults.counting import PATIENCE_SECONDS
from torchstrat.launch import LocalCluster, RestartPolicy

pytestmark = [pytest.mark.deadline(420), pytest.mark.usefixtures("clusters_share_a_fork_server")]

STEPS = 12
MEGABYTES = {"worker": 48, "ps": 24}
"""By how much a process may grow, in pages that an allocator keeps: about half of what would be left."""


class Model(nn.Module):
    """In a cycle, as modules are that know their parents."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        object.__setattr__(self, "itself", self)


def begin_trial(
    strategy: ts.ParameterServerStrategy, coordinator: ts.ClusterCoordinator, width: int
) -> list[ts.RemoteValue[tuple[float, float]]]:
    """Nothing of the trial outlives this but its functions."""
    with strategy.scope():
        model = Model(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        (-model.weight.sum() - model.bias.sum()).backward()
        optimizer.step()
        model.steps += 1
        return float(model.weight.detach()[0, 0]), float(model.bias.detach()[-1])

    return [coordinator.schedule(step) for _ in range(STEPS)]


def check(values: list[ts.RemoteValue[tuple[float, float]]]) -> None:
    seen = [value.get(timeout=PATIENCE_SECONDS) for value in values]
    for of_one in zip(*seen, strict=True):
        assert max(of_one) == STEPS, f"{STEPS} steps of 1 have come to {max(of_one)}: {of_one}"
        assert min(of_one) >= 1


def both_have_run(coordinator: ts.ClusterCoordinator) -> None:
    """Each worker is there, has run functions, and has given back the pages that its allocator kept."""

    def worker_index() -> int:
        time.sleep(0.01)
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
            trim(0)
        return coordinator.get_current_worker_index()

    until = time.monotonic() + PATIENCE_SECONDS
    seen: set[int] = set()
    while seen != {0, 1} and time.monotonic() < until:
        values = [coordinator.schedule(worker_index) for _ in range(4)]
        seen |= {value.get(timeout=PATIENCE_SECONDS) for value in values}


class Held(NamedTuple):
    descriptors: int
    threads: int
    children: int
    megabytes: int


def held_on(cluster: LocalCluster) -> Mapping[str, Held]:
    found = {}
    for job, index in itertools.product(("worker", "ps"), range(2)):
        pid = cluster.process(job, index).pid
        folder = Path(f"/proc/{pid}")
        pages = int((folder / "statm").read_text().split()[1])
        found[f"{job} {index}"] = Held(
            len(list((folder / "fd").iterdir())),
            len(list((folder / "task").iterdir())),
            len(children_of(pid)),
            pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        )
    return found


def grown(early: Mapping[str, Held], late: Mapping[str, Held]) -> list[str]:
    """Which processes hold more than a trial or two."""
    return [
        f"{name}: {before} → {now}"
        for name, now in late.items()
        for before in [early[name]]
        if now.descriptors > before.descriptors + 12
        or now.threads > before.threads + 2
        or now.megabytes > before.megabytes + MEGABYTES[name.split()[0]]
        or now.children != before.children
    ]


@pytest.mark.parametrize(
    ("trials", "kills", "width"),
    [(20, 3, 1500), pytest.param(500, 40, 400, marks=[pytest.mark.soak, pytest.mark.deadline(1800)])],
)
def test_trials_whose_models_are_dropped_while_their_functions_run(
    trials: int, kills: int, width: int, request: pytest.FixtureRequest
) -> None:
    """The kills are among the first half: then processes are measured, which have changed for the last time; as at the
    end with nothing under way, since a model more or less is 37 MB on a server. What the second half would leave is
    80 MB or more on each worker, and half of that on each server."""
    with LocalCluster(workers=2, ps=2, restart=RestartPolicy(quick_seconds=0.0)) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        request.addfinalizer(strategy.close)
        with strategy.scope():
            kept = ts.Variable(torch.tensor(0), name="kept")
        coordinator = ts.ClusterCoordinator(strategy)
        killed_at = {1 + number * trials // (2 * kills): number % 2 for number in range(kills)}
        before: list[ts.RemoteValue[tuple[float, float]]] = []
        early: Mapping[str, Held] | None = None
        for number in range(trials):
            values = begin_trial(strategy, coordinator, width)
            coordinator.schedule(lambda: kept.assign_add(1))
            if number in killed_at:
                before[0].get(timeout=PATIENCE_SECONDS)
                cluster.kill("worker", killed_at[number])
            check(before)
            gc.collect()
            before = values
            if number == trials // 2 + 2:
                check(values)
                coordinator.join(timeout=PATIENCE_SECONDS)
                both_have_run(coordinator)
                early = held_on(cluster)
        check(before)
        coordinator.join(timeout=PATIENCE_SECONDS)
        assert int(kept.read_value()) == trials
        both_have_run(coordinator)
        assert early is not None
        until = time.monotonic() + PATIENCE_SECONDS
        # What has died goes with the next batches, and its memory when it is asked for again.
        while (more := grown(early, held_on(cluster))) and time.monotonic() < until:
            both_have_run(coordinator)
        assert not more, more
        strategy.close()
