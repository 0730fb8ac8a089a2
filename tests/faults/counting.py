"""A training whose result says how often each function was applied, for processes that are killed meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import torchstrat as ts
from torchstrat.cluster_resolver import ClusterResolver
from torchstrat.parameter_server.meeting.task_host import TaskHost
from torchstrat.testing.fault_plan import FaultPlan, Line

PATIENCE_SECONDS = 120.0
"""For what takes seconds, on a machine that may be busy with anything."""

PAUSE_SECONDS = 0.2
"""Between a few functions and the next: a worker that is alone shall not use up all places while another starts."""

SIZE = 8000


class Counters(nn.Module):
    """Three vectors on two servers."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(SIZE)) for _ in range(3))


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
    """Function n adds 1 at place n of each vector, every tenth one in two pushes.

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
        self.refused: Path | None = None
        """Written when a push does not get through. A process that is given up waits for that, then starts again."""

        def add_one(place, iterator, gate, refused):
            row = int(next(iterator))
            worker = coordinator.get_current_worker_index()
            if refused is not None:
                give_in_after(refused)
            if gate is not None:
                gate.pass_through(worker)
            try:
                for _ in range(2 if place % 10 == 9 else 1):
                    model.zero_grad()
                    sum(-vector[place] for vector in model.vectors).backward()
                    optimizer.step()
            except ts.errors.CommunicationError as error:
                # Fenced; or cut off, where the servers have let go of this process already.
                if refused is not None:
                    refused.write_text(str(error))
                raise
            return place, worker, row

        self._add_one = add_one

    def schedule(self, count: int = 1, gate: Gate | None = None) -> list[ts.RemoteValue]:
        """The next functions. ``gate``: they wait there first."""
        results = []
        for place in range(self.functions, self.functions + count):
            results.append(self.coordinator.schedule(self._add_one, args=(place, self.data, gate, self.refused)))
            self.wanted[place] += 2 if place % 10 == 9 else 1
        self.functions += count
        return results

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

    def run_on(self, worker: int) -> tuple[int, int, int]:
        """Functions until one has run on this worker; that one."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            for ended in self.run():
                if ended[1] == worker:
                    return ended
            time.sleep(PAUSE_SECONDS)
        raise AssertionError(f"no function ran on worker {worker} within {PATIENCE_SECONDS:g} s")

    def check_values(self) -> None:
        """Every place holds exactly the number of its pushes."""
        for name, vector in self.model.state_dict().items():
            wrong = (vector != self.wanted).nonzero().flatten().tolist()
            assert not wrong, f"vector {name}: {[(at, float(vector[at]), float(self.wanted[at])) for at in wrong[:10]]}"


def give_in_after(file: Path) -> None:
    """In a function: this process, once its cluster has given it up, starts again when there is ``file``, not at once.

    Otherwise the function's thread and the one that ends the process race.
    """
    if not hasattr(TaskHost._give_in, "waits"):
        give_in = TaskHost._give_in

        def wait_first(host: TaskHost, reason: str) -> None:
            wait_until(file.exists, str(file))
            give_in(host, reason)

        wait_first.waits = True  # type: ignore[attr-defined]
        TaskHost._give_in = wait_first  # type: ignore[method-assign]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come true within {seconds:g} s")
        time.sleep(0.01)


def is_back(plan: FaultPlan, job: str, index: int) -> bool:
    """Whether a worker's last process has run a function."""
    log = plan.log(job, index)
    return bool(log) and log[-1].event == "first function"


def start_up_seconds(log: list[Line]) -> list[float]:
    """From the start of each process that came to a function to that function."""
    started = {line.pid: line.time for line in log if line.event == "start"}
    return [line.time - started[line.pid] for line in log if line.event == "first function"]
