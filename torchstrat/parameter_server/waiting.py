"""While the coordinator waits for functions: how long it does, what people are told meanwhile, and Ctrl-C.

That comes between two calls of the bookkeeping, and not in the middle of one. `KeyboardInterrupt` comes between any
two bytecodes of the main thread. A call that was left half-way would have taken a batch from where it waits and not
sent it, so that `join` of the next cell of a notebook waits for ever. It is held back until the call is complete; a
second one is not, for a server may not answer.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import NamedTuple

from torchstrat.parameter_server.scheduler import Scheduler

# Without the search for an enum, which takes longer than all else here: it is asked in every `schedule`.
_current_handler = getattr(signal, "_signal", signal).getsignal


class _HeldBack:
    """``with held_back:`` on any thread, also within another. Takes the place of Python's own handler alone: who has
    set another one decides."""

    def __init__(self) -> None:
        self.depth = 0  # of the main thread; no other is interrupted
        self._has_come = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self.depth == 0 and _current_handler(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)  # IPython puts Python's own back for every cell
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self.depth = max(self.depth - 1, 0)  # a second interrupt may have come in the middle of `let_through`
            if self.depth == 0:
                self.raise_what_has_come()

    def raise_what_has_come(self) -> None:
        if self._has_come:
            self._has_come = False
            raise KeyboardInterrupt

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.depth and not self._has_come:
            self._has_come = True
        else:
            self._has_come = False
            signal.default_int_handler(number, frame)

    def let_through(self) -> _LetThrough:
        """For what waits in such a block."""
        return _LetThrough(self)

    def put_back(self) -> None:
        """Python's own handler is the one again, as other libraries expect where nobody has set any."""
        if threading.current_thread() is threading.main_thread() and _current_handler(signal.SIGINT) == (
            self._on_interrupt
        ):
            signal.signal(signal.SIGINT, signal.default_int_handler)


class _LetThrough:
    def __init__(self, held_back: _HeldBack) -> None:
        self._held_back = held_back
        self.depth = 0

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._held_back.raise_what_has_come()
            self.depth, self._held_back.depth = self._held_back.depth, 0

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._held_back.depth = self.depth


held_back = _HeldBack()


GRACE_SECONDS = 0.1
"""For the news of an end that is on its way, or waits for a thread of this process."""


class _Running(NamedTuple):
    function: int
    due: float
    was_looked_at: bool = False


class TimeLimits:
    """Of the functions that workers run now: each one's first. A worker is named by its incarnation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, _Running] = {}

    @property
    def due(self) -> float:
        """When to call `passed`, by the clock; never (infinity) if no function has a limit."""
        return min((running.due for running in self._running.values()), default=math.inf)

    def look(self, first: Iterable[tuple[str, int, float]]) -> bool:
        """What runs now: (worker, function, its limit in seconds), of functions that have one. Whether `due` is earlier
        than it was."""
        before, now = self.due, self._clock()
        known = self._running
        self._running = {
            worker: known[worker]
            if worker in known and known[worker].function == function
            else _Running(function, now + limit)
            for worker, function, limit in first
        }
        return self.due < before

    def passed(self) -> list[tuple[str, int]]:
        """Workers whose functions have run for too long, with these; each once."""
        now, found = self._clock(), []
        for worker, running in list(self._running.items()):
            if running.due > now:
                continue
            if running.was_looked_at:
                found.append((worker, running.function))
                self._running[worker] = running._replace(due=math.inf)
            else:
                self._running[worker] = running._replace(due=now + GRACE_SECONDS, was_looked_at=True)
        return found


def where(scheduler: Scheduler, present: Sequence[int], function: int) -> str:
    """What a function waits for. ``present``: the indices of the workers that are there."""
    worker = scheduler.worker_of(function)
    if worker is not None:
        first = scheduler.functions_at(worker)[0]
        if function == first:
            return f"it runs on worker {worker}"
        return f"it waits on worker {worker}, behind function {first}"
    if not present:
        return "it waits for a worker, and none has joined"
    return f"it waits for one of workers {list(present)}"


def waiting_for(scheduler: Scheduler, present: Sequence[int], seconds: float | None, who: str) -> str:
    """What ``who`` has waited for in vain; ``present`` as in `where`."""
    running = []
    for worker in present:
        if functions := scheduler.functions_at(worker):
            first, behind = functions[0], functions[1:]
            running.append(
                f"function {first} on worker {worker}" + (f" (with {len(behind)} behind it)" if behind else "")
            )
    return (
        f"{who} waited {seconds} s: {', '.join(running) if running else 'nothing'} is running, {scheduler.queued} "
        f"functions are queued, workers {list(present)} are there. Give it more time, or look at those workers."
    )
