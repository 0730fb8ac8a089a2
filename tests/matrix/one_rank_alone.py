"""Each call that involves other processes, made by one rank while the other does something else, or nothing more."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torchstrat as ts
from tests.matrix.forked_cells import leave, others_have_ended
from tests.matrix.lone_call_faults import FAULTS
from tests.matrix.lone_call_job import Job
from tests.matrix.lone_calls import CUT_ROWS, LOCAL_ROWS, ROWS, Row
from tests.matrix.places import LOGICAL_DEVICES, LOGICAL_ON_SOCKETS
from tests.matrix.table import RIGHT, Cell, Expected, Table, refused
from torchstrat.errors import CommunicationError, CommunicationTimeoutError, ReplicaDivergenceError, TorchstratError

PATIENT_SECONDS, SHORT_SECONDS = 60.0, 3.0
"""The strategy's timeout, and that where it has to run out."""

SOON_SECONDS = 25.0
"""By then a rank is told that need not wait for the timeout; within a second or a few, where nothing else runs."""


class PlayedItsPartError(TorchstratError):
    """The other rank has done what the column says, and nothing more is to be seen of it."""


class GivesUpError(Exception):
    """What the other rank raises; a class that no library knows."""


@dataclass(frozen=True)
class Column:
    """``other``: what the other rank does, given the row. ``error``, ``says``: what the one that is alone is told."""

    name: str
    other: Callable[[Job, Row], Any]
    says: str
    error: type[TorchstratError] | tuple[type[TorchstratError], ...] = (CommunicationError, ReplicaDivergenceError)
    before: Sequence[Callable[[Job], Any]] = ()
    is_call: bool = True
    """Whether the other rank makes a call, of which it is told likewise."""
    names_call: bool = True
    """Whether the error has the name of the row's call."""
    seconds: float = PATIENT_SECONDS
    """The strategy's timeout."""
    alone: int = 0
    """Which rank makes the row's call."""
    everywhere: bool = True
    """Whether it has cells on all places, else on one: where a call is compared is the same place for all of them."""


def _ends(job: Job, row: Row) -> None:
    job.close()


def _raises(job: Job, row: Row) -> None:
    try:
        raise GivesUpError("no more")
    finally:
        job.close()


def _fails(job: Job) -> None:
    def fail() -> None:
        raise GivesUpError("no more")

    with contextlib.suppress(GivesUpError):
        job.run(fail)


def _fails_and_stays(job: Job, row: Row) -> None:
    _fails(job)
    while not others_have_ended():
        time.sleep(0.1)


def _fails_and_makes_it(job: Job, row: Row) -> None:
    _fails(job)
    row.call(job)


def _stops(job: Job, row: Row) -> None:
    leave(signal.SIGSTOP)


def _dies(job: Job, row: Row) -> None:
    leave(signal.SIGKILL)


def _runs_a_step(job: Job, row: Row) -> None:
    job.run(job.step)


def _save(job: Job, row: Row) -> None:
    next(one for one in ROWS if one.name == "save").call(job)


_IS_OVER = "replica 1.*closed its strategy|nothing was heard from replica 1"
_BOTH = r"make the same calls: replica 0 called .*, replica 1 called |waited .* s in .*: replica \d called |" + _IS_OVER

COLUMNS = (
    Column("runs nothing", lambda job, _: job.run(lambda: None), _BOTH),
    Column("runs a step", _runs_a_step, _BOTH, everywhere=False),
    Column("reduces", lambda job, _: job.strategy.reduce("sum", job.value()), _BOTH, everywhere=False),
    Column("asks for its next batch", lambda job, _: next(job.stream[1]), _BOTH, before=(lambda job: job.stream,)),
    Column("saves", _save, _BOTH, everywhere=False),
    Column("makes its twin", lambda job, row: _twin(row).call(job), _BOTH),
    Column("makes it, and the first runs a step", _runs_a_step, _BOTH, alone=1),
    Column("ends", _ends, _IS_OVER, is_call=False),
    Column("raises", _raises, "replica 1 raised GivesUpError: no more", is_call=False),
    Column("fails in a run, and stays", _fails_and_stays, "replica 1 raised GivesUpError: no more", is_call=False),
    Column("fails in a run, and makes it", _fails_and_makes_it, r"replica 1 called .* after 1 run that raised"),
    Column("dies", _dies, "nothing was heard from replica 1", is_call=False),
    Column(
        "is stopped",
        _stops,
        "waited .* s in .*replica 1.* did not come",
        CommunicationTimeoutError,
        is_call=False,
        seconds=SHORT_SECONDS,
    ),
)
"""What rank 1 does while rank 0 makes the call alone."""


def _twin(row: Row) -> Row:
    return next(one for one in (*ROWS, *CUT_ROWS) if one.name == row.twin)


def _play(place: str, row: Row, column: Column) -> None:
    _make_calls(place, row, column)
    raise PlayedItsPartError


def _make_calls(place: str, row: Row, column: Column) -> None:
    """Returns on the other rank alone."""
    with contextlib.closing(ts.MirroredStrategy(timeout=timedelta(seconds=PATIENT_SECONDS))):  # to meet
        job = Job(place, column.seconds)
    is_alone = job.rank == column.alone
    try:
        twins = _twin(row).before if column.name == "makes its twin" else ()
        for prepare in (*row.before, *column.before, *twins):
            prepare(job)
        began = time.monotonic()
        try:
            if is_alone:
                row.call(job)
            else:
                column.other(job, row)
        except TorchstratError as error:
            if is_alone or column.is_call:
                _check(error, row, column, time.monotonic() - began, is_alone)
            raise
        except GivesUpError:
            return
        assert not is_alone, "the call came to an end although the other rank never made it"
        is_local = place in CUT_PLACES  # of one replica: runs, and what combines replicas, may need nobody
        assert is_local or not column.is_call, "the other rank's call came to an end, which this one never made"
    finally:
        job.close()


def _check(error: TorchstratError, row: Row, column: Column, seconds: float, is_alone: bool) -> None:
    text = str(error)
    # Who makes the call may find out first, raise and be gone before the other rank hears what it has called.
    is_told_of_the_end = not is_alone and f"replica {column.alone} closed its strategy" in text
    assert isinstance(error, column.error), f"{type(error).__name__}: {text}"
    assert re.search(column.says, text, re.DOTALL), text
    names_call = column.names_call and not is_told_of_the_end
    assert not names_call or re.search(row.says, text), f"{text}\n\ndoes not say {row.says!r}"
    if column.error is CommunicationTimeoutError:
        assert seconds >= column.seconds - 0.5, f"after {seconds:.1f} s: {text}"
    assert seconds < SOON_SECONDS, f"after {seconds:.1f} s: {text}"


def _alone_and_right(place: str, call: Callable[[Job], Any]) -> None:
    job = Job(place, PATIENT_SECONDS)
    try:
        _ = job.saved
        if job.rank == 0:
            call(job)
        assert job.strategy.reduce("sum", job.value()).tolist() == [2.0, 2.0]
    finally:
        job.close()


def _expected(row: Row, column: Column) -> Expected:
    error = column.error if isinstance(column.error, type) else TorchstratError
    return refused(error, column.says, f"who is missing is named, and the call: {row.says!r}")


CENTRAL = ("torchrun central_storage", "torchrun central_storage on sockets")
CUT_PLACES = (LOGICAL_DEVICES, LOGICAL_ON_SOCKETS)
MIRRORED = ("torchrun mirrored", "torchrun multi_worker_mirrored")


def _rows() -> Iterator[tuple[str, Row]]:
    for place in MIRRORED:
        yield from ((place, row) for row in ROWS if not row.only_central)
    for place in CENTRAL:
        yield from ((place, row) for row in ROWS if row.central or row.only_central)
    for place in CUT_PLACES:
        yield from ((place, row) for row in CUT_ROWS)


def cells() -> Iterator[Cell]:
    for place, row in _rows():
        for column in COLUMNS:
            is_elsewhere = not column.everywhere and place not in (MIRRORED[0], *CUT_PLACES)
            is_same = column.name == row.like or (column.alone and row.like == "runs a step")
            if (
                is_same
                or is_elsewhere
                or column.name in row.without
                or (column.name == "makes its twin" and not row.twin)
            ):
                continue
            yield Cell(row.name, column.name, place, partial(_play, place, row, column), _expected(row, column))
    for place in (*MIRRORED, *CENTRAL):
        for name, call in LOCAL_ROWS:
            yield Cell(name, "alone", place, partial(_alone_and_right, place, call), RIGHT)


TABLE = Table(
    name="one_rank_alone",
    question="Is a rank that makes a call alone told who is missing, and in which call?",
    make_cells=cells,
    faults=FAULTS,
    bundle=8,
    alike=lambda _: "all",
    in_forks=True,
)
