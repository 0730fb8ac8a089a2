"""Processes that go on together: each counts its steps where the others see it, and waits until they have come as far.

A rank's count is a 32-bit number on a cache line of its own, which wraps around. Waiting first looks about a thousand
times, which is quicker than sleeping where every rank has a core, then sleeps for a tenth of a second at a time; in
between it looks whether those it waits for still live.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

from torchstrat.collectives.shared_memory import futex
from torchstrat.collectives.shared_memory.segment import Segment

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
        futex.wake(self._own_address)  # also if nobody sleeps: Python has no fence that would make asking first safe
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
            if not futex.wait(address, seen, _SLICE_MILLISECONDS):
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
