"""What the processes of a job tell each other when one of them can no longer take part.

It goes through the store where they met, not through the process group: after a failure nobody may be listening there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

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
        self._store: Any = None
        self._late: threading.Thread | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the store has been found not to answer, and does not yet.

        A thread that still waits holds the connection: nobody else may use it. One that came late, such as on a machine
        that stood still for a while, has let go of it.
        """
        return self._late is not None and self._late.is_alive()

    def visit(self, call: Callable[[Any], T], otherwise: T, seconds: float = 2 * PATIENCE_SECONDS) -> T:
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

        def tell_and_hear(store: Any) -> None:
            store.set(f"calls/{place}/{self._rank}", own)
            collect(store, keys, said, PATIENCE_SECONDS)

        self.visit(tell_and_hear, None, 2 * PATIENCE_SECONDS)
        return dict(said)

    def visit(self, call: Callable[[Any], T], otherwise: T, seconds: float = 2 * PATIENCE_SECONDS) -> T:
        """See `StoreVisits.visit`; the store is the part of this board."""
        return self._visits.visit(lambda store: call(dist.PrefixStore(self._prefix, store)), otherwise, seconds)


def note_of(store: Any, prefix: str, rank: int) -> str | None:
    """Why a rank stopped taking part, as it has told on the board of this ``prefix``."""
    return said_at(dist.PrefixStore(prefix, store), _key(rank))


def said_at(store: Any, key: str) -> str | None:
    """What stands there; None where nothing does.

    A store's own ``get`` waits for what is not there, also where it was taken away since somebody asked for it.
    """
    found: str = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return None if found == _NOTHING else found


def collect(store: Any, keys: Mapping[str, int], said: dict[int, str], seconds: float) -> None:
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
