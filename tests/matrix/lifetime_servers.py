"""Lifetimes on parameter servers: real processes, two workers and two servers, each of which is measured.

A use is a pair of functions of which each worker runs one. All cells that are asked for together run in one program,
with one job; those of strategies make their own.
"""

from __future__ import annotations

import functools
import gc
import itertools
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.multiprocessing.reductions import shared_cache
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import torchstrat as ts
from tests.matrix import on_servers
from tests.matrix.lifetime_measures import (
    SETTLE_SECONDS,
    Held,
    Tracked,
    collect,
    held_by,
    held_here,
    objects,
    only_what_is_new,
    require_flat,
)
from tests.matrix.lifetime_rows import COLUMNS as WIDTH
from tests.matrix.lifetime_rows import ROWS as HEIGHT
from tests.matrix.lifetime_rows import FailedError, anew
from tests.matrix.table import RIGHT, Cell, Expected, refused
from torchstrat.core import context
from torchstrat.errors import CommunicationError
from torchstrat.parameter_server.serialization import closure_walk
from torchstrat.parameter_server.transport import requests
from torchstrat.parameter_server.worker.executor import current_worker_index

PLACE = "parameter servers"
ROWS = (
    *("models", "optimizers", "tables", "data sets", "iterators", "loader processes"),
    *("functions", "results", "strategies", "threads"),
)
DROPPED, REPLACED, FAILED, MANY, TRIALS = "dropped", "replaced", "failed", "20,000 functions", "500 trials"
SECONDS = 60
ROUNDS = 8
"""Of which one has to be flat: by luck three pass alone until a server's pool of four has all of its threads."""


def expected(row: str, column: str) -> Expected:
    if row == "strategies" and column == DROPPED:
        return refused(
            CommunicationError, r"strategy\.close\(\)", "a job goes on until its strategy or the program is closed"
        )
    return RIGHT


def cells() -> Iterator[Cell]:
    for row in ROWS:
        for column in (DROPPED, REPLACED, FAILED, MANY, TRIALS):
            yield Cell(row, column, PLACE, partial(_in_processes, row, column), expected(row, column))


# -- a job ------------------------------------------------------------------------------------------------------------


class Job:
    """A strategy of a cluster, and how many of everything its processes hold."""

    def __init__(self, cluster: Any, *, is_sampled: bool) -> None:
        self.cluster, self.is_sampled = cluster, is_sampled
        self.strategy = ts.ParameterServerStrategy(cluster.resolver)
        with self.strategy.scope():
            begun = ts.Variable(torch.tensor(0), name="begun")
        self.coordinator = ts.ClusterCoordinator(self.strategy)
        self.tracked = Tracked()
        self.height = HEIGHT
        """Of models and tables that are made."""
        self._calls = 0

        def in_pair(wanted: int, function: Callable[..., Any], *args: Any) -> Any:
            begun.assign_add(1)
            while int(begun.read_value()) < wanted:  # so that each worker has one
                time.sleep(0.001)
            return function(*args)

        self._in_pair = in_pair

    def use(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each worker returns."""
        self._calls += 2
        call = (self._calls, function, *args)
        values = [self.coordinator.schedule(self._in_pair, args=call) for _ in range(2)]
        self.coordinator.join(timeout=SECONDS)
        return [value.get(timeout=SECONDS) for value in values]

    def look(self) -> Mapping[str, Held]:
        by_worker = dict(self.use(objects_here))
        found = {"the coordinator": held_here(self.tracked)}
        for job in ("worker", "ps"):
            for index in range(2):
                held = held_by(self.cluster.process(job, index).pid)
                found[f"{job} {index}"] = held._replace(objects=by_worker.get(index, 0) if job == "worker" else 0)
        return found


def objects_here() -> tuple[int, int]:
    """The worker that runs this, and how many of Python's objects it has."""
    collect()
    shared_cache.free_dead_references()  # as in `held_here`
    return current_worker_index(), objects()


def fails(function: Callable[..., Any]) -> Callable[..., Any]:
    def failing(*args: Any) -> None:
        function(*args)
        raise FailedError("on purpose")

    return failing


# -- rows: what a turn makes, and what uses it ------------------------------------------------------------------------


def _model(job: Job, home: Any) -> Any:
    with job.strategy.scope():
        return nn.Linear(WIDTH, job.height)


def _forward(job: Job, home: Any, kept: Any) -> Callable[[], Any]:
    thing = kept.thing

    def step() -> float:
        return float(thing(torch.ones(1, WIDTH)).sum().detach())

    return step


def _optimizer(job: Job, home: Any) -> Any:
    with job.strategy.scope():
        return torch.optim.Adagrad(home.parameters())


def _step(job: Job, home: Any, kept: Any) -> Callable[[], Any]:
    optimizer = kept.thing

    def step() -> None:
        home(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _table(job: Job, home: Any) -> Any:
    with job.strategy.scope():
        return nn.Embedding(job.height, WIDTH)


def _look_up(job: Job, home: Any, kept: Any) -> Callable[[], Any]:
    thing = kept.thing

    def step() -> float:
        return float(thing(torch.tensor([1, 5, 5])).sum().detach())

    return step


def _loader(workers: int) -> DataLoader[Any]:
    # As many as all functions of a cell read. With processes: in the memory of one.
    data = TensorDataset(torch.ones(HEIGHT, WIDTH) if workers == 0 else torch.ones(1, WIDTH).expand(16_384, WIDTH))
    sampler = RandomSampler(data, replacement=True, num_samples=16_384)
    return DataLoader(data, batch_size=4, num_workers=workers, sampler=sampler)


def _data_set(job: Job, home: Any) -> Any:
    return job.coordinator.create_per_worker_dataset(partial(_loader, 0))


def _read_new(job: Job, home: Any, kept: Any) -> Callable[..., Any]:
    kept.iterator = iter(kept.thing)
    return partial(_read, kept.iterator)


class _Passes:
    """A data set of which a pass takes memory."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        data = torch.ones(HEIGHT, WIDTH)
        while True:
            yield data[0]


def _pass(job: Job, home: Any) -> Any:
    return iter(home)


def _read_on(job: Job, home: Any, kept: Any) -> Callable[..., Any]:
    return partial(_read, kept.thing)


def _read(iterator: Any) -> float:
    return float(torch.as_tensor(next(iterator)[0]).sum())


_numbers = itertools.count()
SMALL = 1 << 14
"""Elements of what a function captures: workers keep the last 256 functions."""


def _function(job: Job, home: Any) -> Any:
    # Another one each time: functions that are equal are sent, and kept, once.
    captured = job.tracked(torch.full((SMALL,), float(next(_numbers))))

    def function() -> float:
        return float(captured[0])

    return function


def _result(job: Job, home: Any) -> Any:
    return job.use(_large)[0]


def _large() -> torch.Tensor:
    return torch.ones(HEIGHT, WIDTH)


def _nothing() -> None: ...


def _make_scope_model(job: Job) -> Any:
    with job.strategy.scope():
        return nn.Linear(WIDTH, job.height)


def _per_worker(make: Callable[[], Any]) -> Callable[[Job], Any]:
    return lambda job: job.coordinator.create_per_worker_dataset(make)


_PARTS: Mapping[str, tuple[Callable[[Job], Any], Callable[[Job, Any], Any], Callable[[Job, Any, Any], Any], int]] = {
    # row: what lives longer, what is made, the function that uses it, and how often in a turn's place
    "models": (lambda job: None, _model, _forward, 6),
    "optimizers": (_make_scope_model, _optimizer, _step, 6),
    "tables": (lambda job: None, _table, _look_up, 6),
    "data sets": (lambda job: None, _data_set, _read_new, 6),
    "iterators": (_per_worker(_Passes), _pass, _read_on, 6),
    "loader processes": (_per_worker(partial(_loader, 1)), _pass, _read_on, 2),
    "functions": (lambda job: None, _function, lambda job, home, kept: kept.thing, 700),
    "results": (lambda job: None, _result, lambda job, home, kept: _large, 6),
    "threads": (lambda job: None, lambda job, home: None, lambda job, home, kept: _nothing, 6),
}


def _turns(job: Job, row: str, column: str) -> tuple[Callable[[int], None], int]:
    make_home, make, user_of, turns = _PARTS[row]
    job.height = 16 if column == MANY else HEIGHT  # it is made once
    home, shared = make_home(job), SimpleNamespace(thing=None)
    if row in ("models", "tables") and column == REPLACED:
        with job.strategy.scope():
            shared = nn.Module()

    def use(kept: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function) -> None:
        function = around(user_of(job, home, kept))
        if row == "functions":  # by itself: as an argument of another it is not one that workers keep
            job.coordinator.schedule(function)
            job.coordinator.join(timeout=SECONDS)
        elif row == "threads":
            with ThreadPoolExecutor(1) as thread:
                thread.submit(job.use, function).result()
        else:
            job.use(function)

    def once(_: int) -> None:
        kept = shared if column == REPLACED else SimpleNamespace(thing=None)
        if isinstance(kept, nn.Module):
            with job.strategy.scope():
                kept.thing = make(job, home)
        else:
            kept.thing = make(job, home)
        with suppress(FailedError):
            use(kept, fails if column == FAILED else lambda function: function)

    if column != MANY:
        return once, turns
    shared.thing = make(job, home)
    function = user_of(job, home, shared)
    count = 100 if job.is_sampled else 10_000 if row == "functions" else 500

    def many(number: int) -> None:
        job.coordinator.schedule(_new(function))
        if number % 50 == 49:
            job.coordinator.join(timeout=SECONDS)

    return many, count


def _new(function: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(function, partial):
        return partial(anew(function.func), *function.args)
    return anew(function) if isinstance(function, types.FunctionType) else function


# -- strategies -------------------------------------------------------------------------------------------------------


def _check_strategies(column: str, options: Mapping[str, Any], *, is_sampled: bool) -> None:
    """Each with a cluster of its own, with these options."""
    tracked = Tracked()

    def turn(_: int) -> None:
        with ts.testing.LocalCluster(**options) as cluster:
            try:
                job = Job(cluster, is_sampled=is_sampled)
                tracked(job.strategy)
                with suppress(FailedError):
                    job.use(fails(_nothing) if column == FAILED else _nothing)
                for number in range(150 if column == MANY else 0):
                    job.coordinator.schedule(anew(_large if number == 0 else _nothing))
                    job.coordinator.join(timeout=SECONDS)
                if column == DROPPED:
                    del job
                    gc.collect()
                    Job(cluster, is_sampled=is_sampled)
            finally:
                for strategy in list(context.strategies):
                    strategy.close()

    def look() -> Mapping[str, Held]:
        requests._peer_in.cache_clear()  # the last 1,024 tasks that were heard of
        return {"the coordinator": held_here(tracked)}

    turns = 2 if is_sampled or column != TRIALS else 8
    require_flat(turn, turns, look, 10, rounds=ROUNDS)


# -- the program ------------------------------------------------------------------------------------------------------


def run_cells(wanted: Mapping[str, Any]) -> Iterator[on_servers.Answer]:
    """The outcome of each of the wanted cells."""
    fault, is_sampled = ("lifetimes", wanted["fault"]), wanted["is_sampled"]
    options = on_servers.cluster_with(*fault)

    def outcome(row: str, column: str, check: Callable[[], None]) -> on_servers.Answer:
        with only_what_is_new():
            return on_servers.outcome(Cell(row, column, PLACE, check))

    others = [(row, column) for row, column in wanted["cells"] if row != "strategies"]
    # What is known to stay makes the others slower.
    others.sort(key=lambda cell: expected(*cell).verdict == "open")
    # The coordinator keeps what it found of so many functions, each of other code: fewer, so that turns go beyond it.
    few = mock.patch.object(closure_walk, "_MAX_KNOWN", 16)
    with on_servers.planted(*fault), few, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row, column in wanted["cells"]:
            if row == "strategies":
                yield outcome(row, column, partial(_check_strategies, column, options, is_sampled=is_sampled))
        if not others:
            return
        with ts.testing.LocalCluster(**options) as cluster:
            job = Job(cluster, is_sampled=is_sampled)
            try:
                for row, column in others:
                    yield outcome(row, column, partial(_check, job, row, column))
            finally:
                job.strategy.close()


def _check(job: Job, row: str, column: str) -> None:
    turn, turns = _turns(job, row, column)
    # Each worker keeps the last 256 functions that it ran.
    first = max(turns, 700) if column == MANY else turns
    is_open = expected(row, column).verdict == "open"
    require_flat(turn, turns, job.look, 10, first, 0.0 if is_open else SETTLE_SECONDS, 1 if is_open else ROUNDS)


def _in_processes(row: str, column: str) -> None:
    """Raise what the cell came to. All of the sample run in one program, and the others of a row in one."""
    from tests.matrix.lifetimes import TABLE

    is_sampled = f"{row} | {column} | {PLACE}" in TABLE.sample
    outcomes = _outcomes(on_servers.fault_now(), "" if is_sampled else row)
    on_servers.raise_outcome(outcomes[f"{row} | {column}"])


@functools.cache
def _outcomes(fault: str | None, row: str) -> Any:
    """``row``: empty for the sample."""
    from tests.matrix.lifetimes import TABLE

    cells = on_servers.cells_of(TABLE, PLACE, fault)
    if fault is None:
        sampled = [cell for cell in cells if f"{cell[0]} | {cell[1]} | {PLACE}" in TABLE.sample]
        cells = sampled if not row else [cell for cell in cells if cell[0] == row and cell not in sampled]
    return on_servers.run_program("tests.matrix.lifetime_servers", cells, fault, is_sampled=not row)


def main() -> None:
    from tests.matrix.lifetime_servers import run_cells as run

    on_servers.answer(run, are_measured=True)


if __name__ == "__main__":
    main()
