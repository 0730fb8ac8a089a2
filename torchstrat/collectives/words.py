"""What ranks say about one thing without meeting there: how a pass over the data ended for each of them.

A rank that fails in it says so and goes on at once; one that comes to its end waits for what the others have to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.001, 0.05


class Words:
    """One rank's view.

    Args:
        store: where they are left, under a name that nothing else has.
        rank: this process's place among ``size``.
        visit: makes a call to the store that may have to be given up; see `FailureBoard`.
        ended: the ranks whose processes are known to have ended.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        visit: Callable[..., Any],
        ended: Callable[[], Sequence[int]],
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._visit, self._ended = visit, ended
        self._told = False

    def tell(self, word: str) -> None:
        """Leave it, for good and without waiting. The first counts."""
        if not self._told:
            self._told = True
            self._visit(lambda: self._leave(word), None)

    def of_all(self, seconds: float) -> dict[int, str]:
        """Every rank's word, as soon as it is there; without those of ranks that do not leave one."""
        return dict(self._visit(lambda: self._wait(seconds), {}, seconds))

    def _leave(self, word: str) -> None:
        self._store.set(str(self._rank), word)

    def _wait(self, seconds: float) -> dict[int, str]:
        missing = list(range(self._size))
        said: dict[int, str] = {}
        deadline, pause = time.monotonic() + seconds, _FIRST_LOOK_SECONDS
        while True:
            ended = self._ended()  # before the store is asked: a rank may leave its word, and then end
            for rank in list(missing):
                if self._store.check([str(rank)]):
                    said[rank] = self._store.get(str(rank)).decode()
                    missing.remove(rank)
            if not missing or time.monotonic() > deadline or any(rank in ended for rank in missing):
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)
        self._forget()
        return said

    def _forget(self) -> None:
        # The last of those that have read them all takes them away: passes are many.
        if self._store.add("read", 1) == self._size:
            for name in [*map(str, range(self._size)), "read"]:
                self._store.delete_key(name)
