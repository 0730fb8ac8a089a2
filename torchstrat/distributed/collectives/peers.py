"""Which of a job's processes have ended, as far as this host can tell.

The start of a group waits in the store for the addresses of all of its members, and nobody looks there whether these
still live. Once a group stands, its connections tell.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torchstrat.distributed.collectives.shared_memory.lockstep import PeersMissingError

T = TypeVar("T")

_LOOK_SECONDS = 0.1
_START_TIME = 19  # of the fields after the name, in /proc/PID/stat
_OVER = ("Z", "X")  # a zombie is a process that nobody has asked about yet


class Identity(NamedTuple):
    """A process, as those see it that count processes as it does. ``started``: its number may have been given again."""

    machine: str
    numbering: int
    pid: int
    started: int

    @staticmethod
    def own() -> Identity | None:
        """None where a system does not tell."""
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                machine = file.read().strip()
            stat = _stat(os.getpid())
            return Identity(machine, os.stat("/proc/self/ns/pid").st_ino, os.getpid(), int(stat[_START_TIME]))
        except (OSError, ValueError, IndexError):
            return None

    def has_ended(self) -> bool:
        try:
            stat = _stat(self.pid)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return stat[0] in _OVER or int(stat[_START_TIME]) != self.started


def _stat(pid: int) -> list[str]:
    """The fields after the name, which may have spaces in it."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


class StartLostError(PeersMissingError):
    """Some ranks have ended while a group was to start. The thread that starts it still has the store's connection."""


class Peers:
    """``everyone``: of each rank what it said of itself."""

    def __init__(self, everyone: Sequence[Identity | None]) -> None:
        own = Identity.own()
        self._watched = {
            rank: one
            for rank, one in enumerate(everyone)
            if own is not None and one is not None and one[:2] == own[:2] and one.pid != own.pid
        }

    def ended(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank in self._watched and self._watched[rank].has_ended()]

    def started(self, ranks: Sequence[int], start: Callable[[], T], look: Callable[..., object]) -> T:
        """``start()``, which waits for ``ranks``. Raises `StartLostError` once one of them has ended, and what ``look``
        raises: it is called now and then, and with ``at_once=True`` before a rank that has ended is given up."""
        outcome: list[T] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                outcome.append(start())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=call, name="torchstrat-group-start", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            ended = self.ended(ranks) if thread.is_alive() else []
            if thread.is_alive():
                look(at_once=bool(ended))
            if ended:
                raise StartLostError(ended=[list(ranks).index(rank) for rank in ended])
        if errors:
            raise errors[0]
        return outcome[0]
