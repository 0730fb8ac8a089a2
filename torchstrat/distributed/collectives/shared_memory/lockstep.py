"""Processes that go on together: each counts its steps where the others see it, and waits until they have come as far.

A rank's count is a 32-bit number on a cache line of its own, which wraps around. Waiting first looks about a thousand
times, which is quicker than sleeping where every rank has a core, then sleeps for a tenth of a second at a time; in
between it looks whether those it waits for still live. It sleeps by Linux's futex(2), which Python has no name for.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import sys
import time
from collections.abc import Callable, Sequence

from torchstrat.distributed.collectives.shared_memory.common_memory import Segment

_SYSCALL_NUMBER = 202  # of futex on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def why_not() -> str | None:
    """What this machine lacks for waiting in shared memory; None if nothing.

    Python cannot order memory accesses. x86-64 keeps stores in order for whoever reads them, which is all that is
    needed; other processors do not.
    """
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if platform.machine() != "x86_64":
        return f"it needs a processor that keeps the order of stores (x86-64), and this is {platform.machine()}"
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if missing:
        return f"this Python was built without os.{' and os.'.join(missing)}"
    return None


if why_not() is None:
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long
    _syscall.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.POINTER(_Timespec),
        ctypes.c_void_p,
        ctypes.c_uint32,
    )


def _sleep(address: int, expected: int, milliseconds: int) -> bool:
    """Sleep while the uint32 at ``address`` is ``expected``, until somebody calls `wake`; False once the time is over.

    May return early without a reason, as futex(2) may.
    """
    timeout = _Timespec(milliseconds // 1000, milliseconds % 1000 * 1_000_000)
    if _syscall(_SYSCALL_NUMBER, address, _WAIT, expected, ctypes.byref(timeout), None, 0) == 0:
        return True
    return ctypes.get_errno() != errno.ETIMEDOUT


def _wake(address: int) -> None:
    """Let everybody go on who sleeps in `wait` for the number at ``address``."""
    _syscall(_SYSCALL_NUMBER, address, _WAKE, _EVERYBODY, None, None, 0)


LINE_BYTES = 64
_WORDS = LINE_BYTES // 4
_COUNT, _CLOSED = 0, 1  # words of a rank's line
_CALLS = 2  # and the next one: what a rank is in, of its last two meetings; nobody is farther ahead than one
_SLICE_MILLISECONDS = 100
_LOOKS = 1000


class PeersMissingError(RuntimeError):
    """Some ranks did not come: they have ended, have closed, or the time is over. Numbers are places in the group."""

    def __init__(self, *, ended: Sequence[int] = (), closed: Sequence[int] = (), late: Sequence[int] = ()) -> None:
        self.ended, self.closed, self.late = tuple(ended), tuple(closed), tuple(late)
        super().__init__(f"ended: {self.ended}, closed: {self.closed}, late: {self.late}")


class CallsDifferError(RuntimeError):
    """All ranks have come, and not all for the same call."""


class Lockstep:
    """One rank's view of everybody's count, in the first ``size`` lines of a segment.

    ``processes``: a pidfd of each rank's process, which becomes readable when that ends.
    """

    def __init__(self, segment: Segment, rank: int, size: int, processes: Sequence[int]) -> None:
        self._words = memoryview(segment.mapping)[: size * LINE_BYTES].cast("I")
        self._mine = rank * _WORDS
        self._own_address = segment.address + rank * LINE_BYTES
        self._others = [
            (other * _WORDS, segment.address + other * LINE_BYTES) for other in range(size) if other != rank
        ]
        self._processes = processes
        self._count = 0
        self.look: Callable[[], object] | None = None
        """Called now and then while this rank waits; what it raises ends that."""
        self._looks = _LOOKS if size <= len(os.sched_getaffinity(0)) else 0

    def meet(self, seconds: float, call: int = 0) -> None:
        """Return once every rank has called this as often as this one has. Raises `PeersMissingError`, and
        `CallsDifferError` where not all of them have come for the same ``call``, of 32 bits."""
        words = self._words
        self._count = count = (self._count + 1) & 0xFFFFFFFF
        slot = _CALLS + (count & 1)
        words[self._mine + slot] = call
        words[self._mine] = count
        _wake(self._own_address)  # also if nobody sleeps: Python has no fence that would make asking first safe
        for place, address in self._others:
            if (words[place] - count) & 0x80000000:
                self._wait(place, address, count, seconds)
        for place, _ in self._others:
            if words[place + slot] != call:
                raise CallsDifferError

    def _wait(self, place: int, address: int, count: int, seconds: float) -> None:
        words = self._words
        for _ in range(self._looks):
            if not (words[place] - count) & 0x80000000:
                return
        deadline = time.monotonic() + seconds
        while (seen := words[place]) - count & 0x80000000:
            if not _sleep(address, seen, _SLICE_MILLISECONDS):
                self._look_around(count, is_late=time.monotonic() >= deadline)
                if self.look is not None:
                    self.look()

    def _look_around(self, count: int, *, is_late: bool) -> None:
        """Raise if somebody who is missing will not come. One that is here may end: it has done its part."""
        gone = self._ended()  # before the counts are read: a rank may come, and then end
        closed = [place // _WORDS for place, _ in self._others if self._words[place + _CLOSED]]
        missing = [place // _WORDS for place, _ in self._others if (self._words[place] - count) & 0x80000000]
        ended = [rank for rank in missing if rank in gone]
        left = [rank for rank in missing if rank in closed and rank not in ended]
        if ended or left or (is_late and missing):
            raise PeersMissingError(
                ended=ended, closed=left, late=[rank for rank in missing if rank not in (*ended, *left)]
            )

    def _ended(self) -> set[int]:
        poll = select.poll()
        ranks = {descriptor: rank for rank, descriptor in enumerate(self._processes)}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        return {ranks[descriptor] for descriptor, _ in poll.poll(0)}

    def leave(self, gone: bool = True) -> None:
        """Tell the others not to wait for this rank any more, or that it comes all the same."""
        self._words[self._mine + _CLOSED] = int(gone)
