"""Which functions of which batches this worker has yet to begin, and which of them it has promised not to run."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torchstrat.parameter_server.dispatch import Recalled


class BatchQueue:
    """Between the thread that runs functions and those on which recalls arrive. For one coordinator.

    A recall names functions by their batch, since a function may come back in a later one, and it may overtake a batch
    that it names: what is recalled of a batch that has not begun is promised, and left out when that begins.
    """

    def __init__(self) -> None:
        self.next = 0
        """The number of the batch that is to be run next."""
        self._lock = threading.Lock()
        self._is_running = False
        self._waiting: dict[int, None] = {}  # of the batch that runs: what has not begun
        self._promised: dict[int, set[int]] = {}  # of later batches, by their numbers

    def begin(self, functions: Iterable[int]) -> None:
        """The next batch begins."""
        with self._lock:
            self._is_running = True
            promised = self._promised.pop(self.next, ())
            self._waiting = {function: None for function in functions if function not in promised}

    def take(self, function: int) -> bool:
        """Whether to run it now. From then on it cannot be recalled."""
        return self._waiting.pop(function, False) is None  # one step, which needs no lock

    def take_rest(self) -> tuple[int, ...]:
        """What has not begun; it will not be run."""
        return tuple(function for function in list(self._waiting) if self.take(function))

    def end(self) -> None:
        """The batch is over."""
        with self._lock:
            self._is_running = False
            self.next += 1

    def recall(self, recalled: Recalled) -> tuple[int, ...]:
        """Those of the functions that have not begun, and will not be run; each is given once."""
        given: list[int] = []
        with self._lock:
            for number, functions in recalled:
                if number == self.next and self._is_running:
                    given += [function for function in functions if self.take(function)]
                elif number >= self.next:
                    promised = self._promised.setdefault(number, set())
                    given += [function for function in functions if function not in promised]
                    promised.update(functions)
        return tuple(given)
