"""What processes hold, and whether that stays the same while something is done again and again."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import shared_cache

from tests.child_processes import children_of
from torchstrat.core import reachable
from torchstrat.distributed.collectives import process_group
from torchstrat.parameter_server.serialization.closure_walk import names_in

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SETTLE_SECONDS = 10.0
"""For threads and processes that are on their way out."""


class Held(NamedTuple):
    """By one process."""

    descriptors: int
    threads: int
    children: int
    megabytes: int
    tracked: int = 0
    """Of the objects that are watched, those that are still there."""
    objects: int = 0
    """Of Python's, since `only_what_is_new`."""


class Tracked:
    """Objects that ought to go."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []

    def __call__(self, value: Any) -> Any:
        """The same value, watched from now on."""
        self._references.append(weakref.ref(value))
        return value

    @property
    def alive(self) -> list[Any]:
        return [value for reference in self._references if (value := reference()) is not None]

    def count(self) -> int:
        # Those that have gone are forgotten, or their references would be what grows.
        self._references = [reference for reference in self._references if reference() is not None]
        return len(self._references)


def held_by(pid: int | str) -> Held:
    """As the system counts."""
    folder = f"/proc/{pid}"
    with open(f"{folder}/statm") as file:
        pages = int(file.read().split()[1])
    return Held(
        len(os.listdir(f"{folder}/fd")),
        len(os.listdir(f"{folder}/task")),
        len(children_of(os.getpid() if pid == "self" else int(pid))),
        pages * PAGE_BYTES >> 20,
    )


def held_here(tracked: Tracked) -> Held:
    """By this process."""
    for cache in (reachable._names, names_in):  # by code, and of bounded size
        cache.cache_clear()
    collect()
    process_group._destroy_abandoned()  # as whoever makes the next one does
    shared_cache.free_dead_references()  # torch's own, of what came from loader processes: at every 128th
    found = held_by("self")
    return found._replace(megabytes=allocated(), tracked=tracked.count(), objects=objects())


def objects() -> int:
    """How many of Python's this process has: 0 while coverage is measured, which keeps more for each line that runs."""
    coverage = sys.modules.get("coverage")
    if coverage is not None and coverage.Coverage.current() is not None:
        return 0
    # Until the default group ends, torch has an empty list for each group that there was.
    of_torch = len(distributed_c10d._world.tags_to_pg) if dist.is_initialized() else 0
    return len(gc.get_objects()) - of_torch


def collect() -> None:
    """What finalizers of a first collection leave goes in a second."""
    gc.collect()
    gc.collect()


class _Mallinfo(ctypes.Structure):
    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


def allocated() -> int:
    """Megabytes that are in use, and those of shared memory. An allocator keeps what was freed, now more and now less:
    of that a process's size tells."""
    look = ctypes.CDLL(None).mallinfo2
    look.restype = _Mallinfo
    found = look()
    with open("/proc/self/status") as file:
        shared = next(int(line.split()[1]) for line in file if line.startswith("RssShmem"))
    return (found.uordblks + found.hblkhd >> 20) + (shared >> 10)


@contextmanager
def only_what_is_new() -> Iterator[None]:
    """Of Python's objects, garbage collections and counts see only those that are made in this block: it collects
    hundreds of times, and what torch alone has takes a tenth of a second each time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def require_flat(
    turn: Callable[[int], None],
    turns: int,
    look: Callable[[], Mapping[str, Held]],
    megabytes: int,
    first: int | None = None,
    patience_seconds: float = SETTLE_SECONDS,
    rounds: int = 1,
    is_so_anywhere: Callable[[bool], bool] = bool,
) -> None:
    """Raise AssertionError if processes hold more after ``turns`` turns than before them: descriptors, threads,
    children or objects that are watched; or more of Python's objects, one for each turn.

    Args:
        turn: does it once; called with numbers from 0 on.
        look: what each process holds now, by its name.
        first: how often it is done before, if not ``turns`` times.
        patience_seconds: for what is on its way out.
        rounds: of so many turns, of which one has to be flat: what is opened once, when threads first meet in some way,
            or a pool finds none of its own idle, makes one grow, and what leaks all of them. Before the last, what is
            on its way out is given less time.
        is_so_anywhere: of several processes that do this together, whether what this one says is so in any of them.
        megabytes: by how much one of them may grow; a turn that left its item would make it grow by twice that.
    """
    first = turns if first is None else first
    for number in range(first):
        turn(number)
    before = look()
    before = look()  # as at the end, when there is what it has found now
    for start in range(first, first + rounds * turns, turns):
        for number in range(start, start + turns):
            turn(number)
        is_last = start + turns == first + rounds * turns
        until, pause = time.monotonic() + (patience_seconds if is_last else patience_seconds / 20), 0.02
        while (wrong := _grown(before, look(), megabytes, turns - 1)) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, 1.0)  # a look collects garbage in each process
        if not is_so_anywhere(bool(wrong)):
            return
        before = look()
    assert not wrong, f"after {turns} turns more: {'; '.join(wrong)}"


def _grown(before: Mapping[str, Held], after: Mapping[str, Held], megabytes: int, objects: int) -> list[str]:
    allowed = Held(0, 0, 0, megabytes, 0, objects)
    return [
        f"{process} has {now} {kind} instead of {then}"
        for process, held in after.items()
        for kind, then, now, more in zip(Held._fields, before[process], held, allowed, strict=True)
        if now > then + more
    ]
