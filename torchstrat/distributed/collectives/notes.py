"""What the processes of a job tell each other without a meeting: notes in the store where they met.

Not through the process group: after a failure nobody may be listening there. `FailureBoard` has what each says that can
no longer take part. `StoredWords` are about one thing, how a pass over the data ended for each of them: a rank that
fails in it says so and goes on at once; one that comes to its end waits for what the others have to say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from torchstrat.distributed.collectives.shared_memory.lockstep import PeersMissingError

T = TypeVar("T")

PATIENCE_SECONDS = 2.0  # how long a rank that gave up waits for the others to say why they did
_PAUSE_SECONDS = 0.05
_NOTHING = "\0"  # that nobody says


class StoreVisits:
    """Calls to the store at which all have met, for when nobody may be listening there.

    The process that hosts it may be the one that died, or that was stopped, and a stopped one never answers. So every
    visit is made on a thread of its own that is not waited for beyond a deadline; until it comes back the store counts
    as gone. And on a connection of its own: a thread that waits in the store, such as for the start of a group, keeps
    the first one to itself.
    """

    def __init__(self, store: Any) -> None:
        self._first = store
        self._store: dist.Store | None = None
        self._late: threading.Thread | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the store has been found not to answer, and does not yet.

        A thread that still waits holds the connection: nobody else may use it. One that came late, such as on a machine
        that stood still for a while, has let go of it.
        """
        return self._late is not None and self._late.is_alive()

    def visit(self, call: Callable[[dist.Store], T], otherwise: T, seconds: float = 2 * PATIENCE_SECONDS) -> T:
        """What ``call(store)`` makes of it, if that answers in time. What it raises counts as no answer."""
        if self.is_gone:
            return otherwise
        results: list[T] = []

        def visit() -> None:
            try:
                if self._store is None:
                    self._store = self._first.clone()
                results.append(call(self._store))
            except Exception:  # the store went with the process that held it; then silence has to speak
                return

        thread = threading.Thread(target=visit, name="torchstrat-failure-note", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._late = thread
        return results[0] if results else otherwise


class FailureBoard:
    """One rank's view of the notes that all ranks leave, in the part of the store that ``prefix`` names."""

    def __init__(self, visits: StoreVisits, prefix: str, global_rank: int) -> None:
        self._visits, self._prefix = visits, prefix
        self._rank = global_rank
        self.has_note = False
        """Whether this rank has told that it stopped taking part."""
        self.leaving: Callable[[bool], None] | None = None
        """Called with True when this rank will not come any more, and with False when it comes all the same."""

    @property
    def is_gone(self) -> bool:
        return self._visits.is_gone

    def post(self, message: str, *, leaves: bool = False) -> None:
        """Tell the others, without waiting for them, why this rank stopped taking part. The first reason counts.

        ``leaves``: those that wait for it are not to wait any longer.
        """
        if not self.has_note:
            self._write(message)
        if leaves and self.leaving is not None:  # now that the reason can be read
            self.leaving(True)

    def _write(self, message: str) -> None:
        self.has_note = True
        self.visit(lambda store: store.set(_key(self._rank), message), None)

    def clear(self) -> None:
        """Take this rank's note back: it takes part again. Costs nothing where there is none."""
        if self.has_note:
            self.has_note = False
            if self.leaving is not None:
                self.leaving(False)
            self.visit(lambda store: store.delete_key(_key(self._rank)), None)

    def read(self, ranks: Sequence[int], seconds: float = PATIENCE_SECONDS) -> dict[int, str]:
        """The notes of ``ranks``; waits a little (``seconds``) for all of them to write one.

        That the store takes its time to answer, on a machine that is busy, is not that they have written none.
        """
        said: dict[int, str] = {}
        keys = {_key(rank): rank for rank in ranks}
        self.visit(lambda store: collect(store, keys, said, seconds), None, seconds + PATIENCE_SECONDS)
        return dict(said)

    def calls(self, place: str, own: str, ranks: Sequence[int]) -> dict[int, str]:
        """What each of ``ranks`` says that it has called, all of which have met in ``place`` and find that they have
        not called the same. Waits a little for them; a rank that did not say it in time is left out."""
        keys = {f"calls/{place}/{rank}": rank for rank in ranks}
        said = {self._rank: own}

        def tell_and_hear(store: dist.Store) -> None:
            store.set(f"calls/{place}/{self._rank}", own)
            collect(store, keys, said, PATIENCE_SECONDS)

        self.visit(tell_and_hear, None, 2 * PATIENCE_SECONDS)
        return dict(said)

    def visit(self, call: Callable[[dist.Store], T], otherwise: T, seconds: float = 2 * PATIENCE_SECONDS) -> T:
        """See `StoreVisits.visit`; the store is the part of this board."""
        return self._visits.visit(lambda store: call(dist.PrefixStore(self._prefix, store)), otherwise, seconds)


def note_of(store: dist.Store, prefix: str, rank: int) -> str | None:
    """Why a rank stopped taking part, as it has told on the board of this ``prefix``."""
    return said_at(dist.PrefixStore(prefix, store), _key(rank))


def said_at(store: dist.Store, key: str) -> str | None:
    """What stands there; None where nothing does.

    A store's own ``get`` waits for what is not there, also where it was taken away since somebody asked for it.
    """
    found: str = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return None if found == _NOTHING else found


def collect(store: dist.Store, keys: Mapping[str, int], said: dict[int, str], seconds: float) -> None:
    """Add to ``said`` by rank what is at the ``keys``, waiting a little for those that are not there."""
    missing = dict(keys)
    deadline = time.monotonic() + seconds
    while missing:
        for key, rank in list(missing.items()):
            if (found := said_at(store, key)) is not None:
                said[rank] = found
                del missing[key]
        if not missing or time.monotonic() > deadline:
            return
        time.sleep(_PAUSE_SECONDS)


def _key(rank: int) -> str:
    return f"failures/{rank}"


_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.001, 0.05


class Place(Protocol):
    """Where words are left, and how a rank waits for those of the others."""

    def visit(self, call: Callable[[dist.Store], T], otherwise: T) -> T:
        """What ``call`` makes of a part of the store that nothing else has; see `StoreVisits.visit`."""

    def told(self) -> None:
        """This rank has left its word: nobody waits for it any more."""

    def wait(self, listen: Callable[[], dict[int, str]]) -> dict[int, str]:
        """``listen()``, whose errors become those of a call in which other ranks did not come."""

    def look(self) -> None:
        """Called now and then while this rank waits; raises where that has no end."""

    def ended(self) -> Sequence[int]:
        """The ranks whose processes are known to have ended."""


class StoredWords:
    """`Words` in the store where all have met.

    Args:
        rank: this process's place among ``size``.
        seconds: how long it waits for the others' words.
    """

    def __init__(self, place: Place, rank: int, size: int, seconds: float) -> None:
        self._place, self._rank, self._size, self._seconds = place, rank, size, seconds
        self._word: str | None = None
        self._is_left = False

    def tell(self, word: str) -> None:
        if self._word is None:
            self._word = word
            self._leave(word)
            self._place.told()

    def _leave(self, word: str) -> None:
        def leave(store: dist.Store) -> bool:
            store.set(str(self._rank), word)
            return True

        self._is_left = self._place.visit(leave, False)

    def of_all(self) -> dict[int, str]:
        return self._place.wait(self._listen)

    def _listen(self) -> dict[int, str]:
        missing = list(range(self._size))
        said: dict[int, str] = {}
        deadline, pause = time.monotonic() + self._seconds, _FIRST_LOOK_SECONDS
        while True:
            if self._word is not None and not self._is_left:
                self._leave(self._word)  # the store did not answer; without it the others would wait in vain
            ended = self._place.ended()  # before the store is asked: a rank may leave its word, and then end
            nothing: dict[int, str] = {}
            said.update(self._place.visit(partial(_heard, missing), nothing))
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

    def _forget(self, store: dist.Store) -> None:
        # The last of those that have read them all takes them away: passes are many.
        if store.add("read", 1) == self._size:
            for name in [*map(str, range(self._size)), "read"]:
                store.delete_key(name)


def _heard(missing: Sequence[int], store: dist.Store) -> dict[int, str]:
    return {rank: word for rank in missing if (word := said_at(store, str(rank))) is not None}
