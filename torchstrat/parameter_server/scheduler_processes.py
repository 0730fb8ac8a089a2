"""What the scheduler knows of workers: each process, and the batches that it has."""

from __future__ import annotations

from collections.abc import Iterable

_BATCH_SECONDS = 0.005
"""How long a worker should take for a batch: much longer than a message takes, much shorter than anybody minds."""
_REMEMBERED = 16
"""About how many functions the mean duration is taken over: few, since the first one of a worker imports and unpickles
for seconds, and batches of one should soon be over."""


class Batch:
    """Functions that were sent together and have no outcome yet, in their order."""

    __slots__ = ("functions", "process")

    def __init__(self, process: Process, functions: Iterable[int]) -> None:
        self.process = process
        self.functions = dict.fromkeys(functions)


class Process:
    """One incarnation of a worker, from joining to loss or release."""

    __slots__ = (
        *("alone", "asked", "batches", "draining", "incarnation", "leaving", "level", "reported", "stalled"),
        "worker",
    )

    def __init__(self, worker: int, incarnation: str) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.batches: list[Batch] = []  # in the order in which it runs them
        self.level: int | None = None  # its place in `Scheduler._free`
        self.draining = False  # the user removes it
        self.leaving = False  # it said itself that it leaves
        self.alone = False  # it runs a function that was lost before
        self.reported = False  # an outcome since the last moment, or it had nothing to do before
        self.stalled = False
        self.asked = False  # to hand back a part, and has neither done so nor reported an outcome since

    @property
    def count(self) -> int:
        return sum(len(batch.functions) for batch in self.batches)

    @property
    def functions(self) -> list[int]:
        return [function for batch in self.batches for function in batch.functions]


class Durations:
    """How long functions take: of the last ones, since older ones count less and less."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._functions = 0.0

    def learn(self, seconds: float, functions: int) -> None:
        """So many took so long together."""
        self.seconds += seconds
        self._functions += functions
        if self._functions >= 2 * _REMEMBERED:
            kept = _REMEMBERED / self._functions
            self.seconds *= kept
            self._functions *= kept

    def size_of_batch(self, most: int) -> int:
        """How many take about `_BATCH_SECONDS`: one, while that is not known."""
        if not self._functions:
            return 1
        if self.seconds * most > _BATCH_SECONDS * self._functions:
            most = int(_BATCH_SECONDS * self._functions / self.seconds)
        return max(1, most)


def takes_functions(process: Process) -> bool:
    return not (process.draining or process.leaving or process.stalled)
