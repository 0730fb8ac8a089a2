"""A training whose result says how often each function was applied, for processes that are killed meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from tests.patience import Patience
from torchstrat.cluster_resolver import ClusterResolver
from torchstrat.launch import LocalCluster, RestartPolicy
from torchstrat.testing.fault_plan import FaultPlan

PATIENCE_SECONDS = 120.0
"""For what takes seconds, on a machine that may be busy with anything."""

PAUSE_SECONDS = 0.2
"""Between a few functions and the next: a worker that is alone shall not use up all places while another starts."""

SIZE = 8000
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
AT_ONCE = RestartPolicy(first_delay_seconds=0.0)


@contextmanager
def cluster_with(
    plan: FaultPlan, *, workers: int = 2, ps: int = 2, restart: Any = AT_ONCE, **env: str
) -> Iterator[LocalCluster]:
    """Its processes follow the plan."""
    with LocalCluster(workers, ps, env={**QUIET, **plan.environment, **env}, restart=restart) as cluster:
        yield cluster


class Counters(nn.Module):
    """Three vectors on two servers."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(3))


class Gate:
    """Functions that come to it wait until it is opened, on any worker."""

    def __init__(self, folder: Path, name: str) -> None:
        self._reached, self._open = folder / f"{name} reached", folder / f"{name} open"

    def pass_through(self, worker: int) -> None:
        """In a function."""
        self._reached.write_text(str(worker))
        wait_until(self._open.exists, f"{self._open}")

    def wait_until_reached(self) -> int:
        """The worker that waits there."""
        wait_until(lambda: self._reached.exists() and self._reached.read_text() != "", f"{self._reached}")
        return int(self._reached.read_text())

    def open(self) -> None:
        self._open.touch()


class Training:
    """Function n adds 1 at place n of each vector, every tenth one in two pushes. A context manager that closes it.

    Args:
        first: the first n: another coordinator went before.
    """

    def __init__(self, resolver: ClusterResolver, *, first: int = 0) -> None:
        self.strategy = strategy = ts.ParameterServerStrategy(resolver)
        with strategy.scope():
            self.model = model = Counters()
            self.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.coordinator = coordinator = ts.ClusterCoordinator(strategy)
        self.data = iter(coordinator.create_per_worker_dataset(lambda: torch.utils.data.DataLoader(range(100_000))))
        self.functions = first
        self.wanted = torch.zeros(SIZE)

        def add_one(place, iterator, gate):
            row = int(next(iterator))
            worker = coordinator.get_current_worker_index()
            if gate is not None:
                gate.pass_through(worker)
            for _ in range(2 if place % 10 == 9 else 1):
                model.zero_grad()
                sum(-vector[place] for vector in model.vectors).backward()
                optimizer.step()
            return place, worker, row

        self._add_one = add_one

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.strategy.close()

    def schedule(self, count: int = 1, gate: Gate | None = None) -> list[ts.RemoteValue]:
        """The next functions. ``gate``: they wait there first."""
        places = range(self.functions, self.functions + count)
        for place in places:
            self.wanted[place] += 2 if place % 10 == 9 else 1
        self.functions += count
        return [self.coordinator.schedule(self._add_one, args=(place, self.data, gate)) for place in places]

    def run(self, count: int = 6) -> list[tuple[int, int, int]]:
        """The next functions, to their ends: place, worker, row of the worker's data of each."""
        first = self.functions
        results = self.schedule(count)
        self.coordinator.join(PATIENCE_SECONDS)
        ended = [tuple(int(part) for part in result.get()) for result in results]
        assert [place for place, _, _ in ended] == list(range(first, first + count))
        return ended

    def run_until(
        self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS
    ) -> list[tuple[int, int, int]]:
        """Functions, a few at a time, until something that they bring about is true."""
        until, ended = time.monotonic() + seconds, []
        while not condition():
            assert time.monotonic() < until, f"{what} did not come true within {seconds:g} s"
            ended += self.run()
            time.sleep(PAUSE_SECONDS)
        return ended

    def run_on(self, worker: int) -> int:
        """Functions until one has run on this worker; the row of its data."""
        rows: list[int] = []

        def has_run() -> bool:
            rows.extend(row for _, by, row in self.run() if by == worker)
            return bool(rows)

        self.run_until(has_run, f"a function on worker {worker}")
        return rows[0]

    def check_values(self) -> None:
        """Every place holds exactly the number of its pushes."""
        for name, vector in self.model.state_dict().items():
            wrong = (vector != self.wanted).nonzero().flatten().tolist()
            assert not wrong, f"vector {name}: {[(at, float(vector[at]), float(self.wanted[at])) for at in wrong[:10]]}"


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], seconds: float = PATIENCE_SECONDS) -> None:
    """For what cannot be waited for, such as numbers in /proc. ``what``: for the error, perhaps as it is by then."""
    patience = Patience(seconds)
    while not condition():
        if patience.is_over:
            said = what if isinstance(what, str) else what()
            raise TimeoutError(f"{said} did not come true within {seconds:g} s")
        time.sleep(0.01)


def is_back(plan: FaultPlan, job: str, index: int) -> bool:
    """Whether a worker's last process has run a function."""
    log = plan.log(job, index)
    return bool(log) and log[-1].event == "first function"
