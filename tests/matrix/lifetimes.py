"""Lifetimes: what a program has dropped goes, everywhere.

Rows: the things. Columns: what becomes of them. A cell does it some times, measures, does it as often again, and
requires that no process holds more: descriptors, threads, child processes, those of the things that are still there,
Python's objects and memory. A thing is 4 MB where it can be, so that one that stayed each time would show.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import torchstrat as ts
from tests.matrix import lifetime_faults, lifetime_servers, places
from tests.matrix.lifetime_measures import Tracked, held_here, only_what_is_new, require_flat
from tests.matrix.lifetime_rows import (
    DataSets,
    FailedError,
    Functions,
    Iterators,
    LoaderProcesses,
    Models,
    Optimizers,
    Results,
    Row,
    Strategies,
    Tables,
    Threads,
    anew,
    as_it_is,
    failing,
)
from tests.matrix.table import RIGHT, Cell, Table

ROWS = (Models, Optimizers, Tables, DataSets, Iterators, LoaderProcesses, Functions, Results, Strategies, Threads)
DROPPED, REPLACED, FAILED, MANY, TRIALS = "dropped", "replaced", "failed", "20,000 functions", "500 trials"
COLUMNS = (DROPPED, REPLACED, FAILED, MANY, TRIALS)

PLACES = (
    "one_device",
    "mirrored x2",
    "central_storage x2",
    "torchrun mirrored",
    "torchrun multi_worker_mirrored",
    "torchrun central_storage",
    places.LOGICAL_DEVICES,
)
SERVERS = lifetime_servers.PLACE

FEW_FUNCTIONS, SOME_FUNCTIONS, MANY_FUNCTIONS = 100, 500, 10_000
FEW_TRIALS, SOME_TRIALS, MANY_TRIALS = 4, 6, 250
"""Before it is measured, and as many after that: in the sample; in soak; and there in the row that is about them."""

MEETINGS = 50
"""The same of strategies for which processes have to meet: ten a second."""

ROUNDS = 3
"""Of which one has to be flat: what a process opens when another one is late for the first time makes one grow."""

REMEMBERED = 300
"""More functions than anything remembers, but for caches that are emptied to measure."""


def _open(place: str, row: type[Row]) -> Any:
    if place == places.LOGICAL_DEVICES:
        return ts.MirroredStrategy(
            logical_devices_per_replica=2,
            sharding_rules={"*0.weight": (None, "d0")} if row is Models else None,
            timeout=timedelta(seconds=100),
        )
    return places.REPLICAS[place].make()


def make_cells() -> Iterator[Cell]:
    for place in PLACES:
        for row in ROWS:
            for column in COLUMNS:
                yield Cell(row.name, column, place, partial(_check, row, column, place), RIGHT)
    yield from lifetime_servers.cells()


def _check(kind: type[Row], column: str, place: str) -> None:
    opener = partial(_open, place, kind)
    row = Strategies(opener) if kind is Strategies else kind()
    if column == MANY:
        row.height = 16  # it is made once
    strategy = None if kind is Strategies else opener()
    wrong = ""
    try:
        with warnings.catch_warnings(), only_what_is_new():
            warnings.simplefilter("ignore")  # they are collected, and would be what grows
            is_sampled = f"{row.name} | {column} | {place}" in TABLE.sample
            tracked = Tracked()
            turn, turns = _TURNS[column](row, strategy, opener, tracked, is_sampled)
            first = max(turns, REMEMBERED) if column == MANY else turns
            rounds = 1 if kind is Strategies else ROUNDS  # in which there is a group to ask the others
            anywhere = bool if strategy is None or places.processes_of(place) == 1 else _is_so_on_any_rank
            try:
                require_flat(
                    turn,
                    turns,
                    lambda: {"this process": held_here(tracked)},
                    MEGABYTES_LEFT,
                    first,
                    rounds=rounds,
                    is_so_anywhere=anywhere,
                )
            except AssertionError as error:  # whose traceback has what ought to go
                wrong = str(error)
            del turn
    finally:
        ts.experimental_set_strategy(None)
        gc.collect()  # the one that was set
        if strategy is not None:
            strategy.close()
        if places.processes_of(place) > 1 and dist.is_initialized():  # of a strategy that was dropped
            dist.destroy_process_group()
    assert not wrong, wrong


def _is_so_on_any_rank(is_so: bool) -> bool:
    number = torch.tensor(int(is_so))
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)


def _come_together(strategy: Any) -> None:
    """After a failure of its data a rank is not waited for until it says that it comes: no matter of luck here."""
    if strategy is not None and strategy._engine.everyone is not None:
        strategy._engine.everyone.forget_failure()
        dist.barrier()


MEGABYTES_LEFT = 10
"""What an allocator may keep. Six turns of 4 MB are more."""

Turn = Callable[[int], None]


def _dropped(row: Row, strategy: Any, opener: Any, tracked: Tracked, is_sampled: bool) -> tuple[Turn, int]:
    home = row.home(strategy)

    def turn(_: int) -> None:
        kept = row.kept(strategy)
        kept.thing = row.make(strategy, home, tracked)
        row.use(strategy, home, kept, as_it_is)

    return turn, row.turns


def _replaced(row: Row, strategy: Any, opener: Any, tracked: Tracked, is_sampled: bool) -> tuple[Turn, int]:
    home, kept = row.home(strategy), row.kept(strategy)

    def turn(_: int) -> None:
        kept.thing = row.make(strategy, home, tracked)
        if strategy is None:
            ts.experimental_set_strategy(kept.thing)
        row.use(strategy, home, kept, as_it_is)

    return turn, row.turns


def _failed(row: Row, strategy: Any, opener: Any, tracked: Tracked, is_sampled: bool) -> tuple[Turn, int]:
    home = row.home(strategy, fails=True)
    around = as_it_is if row.fails_by_data else failing

    def turn(_: int) -> None:
        kept = row.kept(strategy)
        kept.thing = row.make(strategy, home, tracked)
        with suppress(FailedError):
            row.use(strategy, home, kept, around)
            raise AssertionError("it has not failed")
        _come_together(strategy)

    return turn, row.turns_failed or row.turns


def _many(row: Row, strategy: Any, opener: Any, tracked: Tracked, is_sampled: bool) -> tuple[Turn, int]:
    home, kept = row.home(strategy), row.kept(strategy)
    kept.thing = row.make(strategy, home, tracked)

    def turn(_: int) -> None:
        row.use_again(strategy, home, kept, anew)

    return turn, FEW_FUNCTIONS if is_sampled else MANY_FUNCTIONS if type(row) is Functions else SOME_FUNCTIONS


def _trials(row: Row, strategy: Any, opener: Any, tracked: Tracked, is_sampled: bool) -> tuple[Turn, int]:
    """Every second one forgets to close its strategy."""
    lasting = row.home(strategy) if strategy is None else None

    def turn(number: int) -> None:
        own = tracked(opener()) if strategy is not None else None
        home = row.home(own) if own is not None else lasting
        kept = row.kept(own)
        kept.thing = row.make(own, home, tracked)
        row.use(own, home, kept, as_it_is)
        if number % 2:
            (own or kept.thing).close()

    if is_sampled:
        return turn, FEW_TRIALS
    return turn, SOME_TRIALS if strategy is not None else MEETINGS if "RANK" in os.environ else MANY_TRIALS


_TURNS = {DROPPED: _dropped, REPLACED: _replaced, FAILED: _failed, MANY: _many, TRIALS: _trials}

TABLE = Table(
    "lifetimes",
    "Does what a program has dropped go, in every process?",
    make_cells,
    always=(
        "loader processes | dropped | torchrun central_storage",
        "optimizers | failed | two logical devices",
        "results | dropped | torchrun mirrored",
        "results | failed | one_device",
        "strategies | replaced | torchrun mirrored",
    ),
    faults=lifetime_faults.FAULTS,
    alike=lambda place: "torchrun" if places.processes_of(place) > 1 else SERVERS if place == SERVERS else "in process",
)
