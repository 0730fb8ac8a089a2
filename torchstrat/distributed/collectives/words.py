"""What ranks say about one thing without meeting there: how a pass over the data ended for each of them.

A rank that fails in it says so and goes on at once; one that comes to its end waits for what the others have to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torchstrat.distributed.collectives.failures import said_at
from torchstrat.distributed.collectives.shared_memory.lockstep import PeersMissingError

_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.001, 0.05


class Place(Protocol):
    """Where words are left, and how a rank waits for those of the others."""

    def visit(self, call: Callable[[Any], Any], otherwise: Any) -> Any:
        """What ``call`` makes of a part of the store that nothing else has; see `StoreVisits.visit`."""

    def told(self) -> None:
        """This rank has left its word: nobody waits for it any more."""

    def wait(self, listen: Callable[[], dict[int, str]]) -> dict[int, str]:
        """``listen()``, whose errors become those of a call in which other ranks did not come."""

    def look(self) -> None:
        """Called now and then while this rank waits; raises where that has no end."""

    def ended(self) -> Sequence[int]:
        """The ranks whose processes are known to have ended."""


class Words:
    """One rank's view.

    Args:
        rank: this process's place among ``size``.
        seconds: how long it waits for the others' words.
    """

    def __init__(self, place: Place, rank: int, size: int, seconds: float) -> None:
        self._place, self._rank, self._size, self._seconds = place, rank, size, seconds
        self._word: str | None = None
        self._is_left = False

    def tell(self, word: str) -> None:
        """Leave it, for good and without waiting. The first counts."""
        if self._word is None:
            self._word = word
            self._leave()
            self._place.told()

    def _leave(self) -> None:
        def leave(store: Any) -> bool:
            store.set(str(self._rank), self._word)
            return True

        self._is_left = self._place.visit(leave, False)

    def of_all(self) -> dict[int, str]:
        """Every rank's word, as soon as all are there.

        A store that does not answer for a while is asked again. Raises `CommunicationTimeoutError` where a word does
        not come in time, and `CommunicationError` where a rank has ended without one, or waits for this one in another
        call.
        """
        return self._place.wait(self._listen)

    def _listen(self) -> dict[int, str]:
        missing = list(range(self._size))
        said: dict[int, str] = {}
        deadline, pause = time.monotonic() + self._seconds, _FIRST_LOOK_SECONDS
        while True:
            if self._word is not None and not self._is_left:
                self._leave()  # the store did not answer; without it the others would wait in vain
            ended = self._place.ended()  # before the store is asked: a rank may leave its word, and then end
            said.update(self._place.visit(partial(_heard, missing), {}))
            missing = [rank for rank in missing if rank not in said]
            if not missing:
                break
            if gone := [rank for rank in missing if rank in ended]:
                raise PeersMissingError(ended=gone)
            if time.monotonic() > deadline:
                raise PeersMissingError(late=missing)
            self._place.look()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)
        self._place.visit(self._forget, None)
        return said

    def _forget(self, store: Any) -> None:
        # The last of those that have read them all takes them away: passes are many.
        if store.add("read", 1) == self._size:
            for name in [*map(str, range(self._size)), "read"]:
                store.delete_key(name)


def _heard(missing: Sequence[int], store: Any) -> dict[int, str]:
    return {rank: word for rank in missing if (word := said_at(store, str(rank))) is not None}
