"""Runs a program of the table plainly and in every place of the generated ones, and says what differs."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from tests.matrix import places
from tests.matrix.generated import PLACES, quiet, run_in
from tests.matrix.table import assert_close
from tests.programs import table
from tests.programs.table import Program
from torchstrat.testing import LocalCluster, Workers
from torchstrat.testing.training import dtype_and_seed

Numbers = dict[str, torch.Tensor]
MAY_REFUSE = ("servers in memory", "servers in processes", places.LOGICAL_DEVICES, places.TPU)
_SECONDS = 120.0


def missing(program: Program) -> str:
    """The first of its libraries that is not installed; "" if all are."""
    return next((name for name in program.needs if find_spec(name) is None), "")


def _numbers(parts: dict[str, Any]) -> Numbers:
    found: Numbers = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            found |= {f"{name}.{key}": value.detach().clone() for key, value in part.state_dict().items()}
        else:
            rates = [torch.tensor(float(group["lr"])) for group in part.param_groups]
            found |= {f"{name}.{place}.lr": rate for place, rate in enumerate(rates)}
    return found


def train(program: Program, strategy: Any = None, moved_by: int | None = None) -> Numbers:
    """What it comes to, plainly or under a strategy; ``moved_by``: a seed, to move weights by an ulp of float32."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        torch.manual_seed(3)
        parts, step, *afterwards = program.build()
    if moved_by is not None:
        _move(parts, moved_by)
    on_servers = isinstance(strategy, ts.ParameterServerStrategy)
    coordinator = ts.ClusterCoordinator(strategy) if on_servers else None
    made = strategy.distribute_dataset(program.batches()) if strategy and not on_servers else program.batches()
    for batch in made:
        if not strategy:
            step(batch)
        elif coordinator is None:
            strategy.run(lambda batch: _nothing(step(batch)), args=(batch,))
        else:
            one = lambda batch: strategy.run(lambda batch: _nothing(step(batch)), args=(batch,))  # noqa: E731
            coordinator.schedule(one, args=(batch,)).get(_SECONDS)
            strategy.extended.pull()
        for after in afterwards:
            after()
    if on_servers:
        strategy.extended.pull()
    return _numbers(parts)


def _move(parts: dict[str, Any], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in (p for part in parts.values() if isinstance(part, nn.Module) for p in part.parameters()):
            p.mul_(1 + (torch.randint(0, 2, p.shape, generator=draw) * 2 - 1) * 2.0**-23)


def _nothing(_: object) -> None:
    """A step's value is not looked at."""


def plain(program: Program, moved_by: int | None = None) -> Numbers:
    with dtype_and_seed(torch.float64, 0), quiet():
        return train(program, moved_by=moved_by)


def here(name: str, place: str, cluster: Any = None) -> Numbers | str:
    """What the program of that name comes to in that place, in this process of it; the text of an error if it fails."""
    program = table.load()[name]
    names = {"ts": ts, "REDUCE_OP": "mean", "RULES": program.rules}
    return run_in(place, lambda strategy: train(program, strategy), names, cluster)


class Runner:
    """Keeps the processes, and the cluster of servers, between programs. A context manager."""

    def __init__(self) -> None:
        self._workers = Workers(2, timeout_seconds=300)
        self._stack = contextlib.ExitStack()
        self._cluster: Any = None

    def __enter__(self) -> Runner:
        self._workers.start()
        self._stack.callback(self._workers.close)
        self._cluster = self._stack.enter_context(LocalCluster(workers=2, ps=2))
        # Its processes start when there is something to do, and no test is to have left them.
        strategy = ts.ParameterServerStrategy(self._cluster.resolver)
        ts.ClusterCoordinator(strategy).schedule(_nothing, args=(None,)).get(_SECONDS)
        strategy.close()
        return self

    def start(self) -> None:
        """Start the processes again, if a run has failed."""
        self._workers.start()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, name: str, place: str) -> list[Numbers | str]:
        if PLACES[place].processes > 1:
            return self._workers.run(here, name, place)
        return [here(name, place, self._cluster if place == "servers in processes" else None)]


def complaint(program: Program, place: str, runner: Runner, wanted: Numbers) -> str:
    """What is wrong with the program in that place; "" if nothing is."""
    tolerance = 1e-10 if not program.by_ulp else moves_by(program, wanted)
    for rank, seen in enumerate(runner.run(program.name, place)):
        if isinstance(seen, str):
            return "" if seen.startswith("refused") and place in MAY_REFUSE else seen
        try:
            assert_close(seen, wanted, tolerance)
        except AssertionError as error:
            return f"differs, process {rank}: {error}"
    return ""


def moves_by(program: Program, wanted: Numbers) -> float:
    """Three times what the numbers move by where every weight moves by one ulp."""
    moved = [plain(program, seed) for seed in range(5)]
    largest = max(float((one[name] - wanted[name]).abs().max()) for one in moved for name in wanted)
    assert largest < 1e-3, f"{program.name}: one ulp of its weights moves it by {largest:.1g}"
    return 3 * largest
