"""What the processes of a job tell each other without a meeting: notes in the store where they met.

Not through the process group: after a failure nobody may be listening there. `FailureBoard` has what each says that can
no longer take part. `StoredWords` are about one thing, how a pass over the data ended for each of them: a rank that
fails in it says so and goes on at once; one that comes to its end waits for what the others have to say.

Waits without an end, for processes that have ended or of ranks for each other, are found while they wait. `Peers` knows
which of a job's processes have ended, as far as this host can tell. The start of a group waits in the store for the
addresses of all of its members, and nobody looks there whether these still live. Once a group stands, its connections
tell.

`Standstill` finds ranks that wait for each other in different calls. A rank that skipped a call, or made one alone, is
found where the others meet it next, for what all are in is compared there. It never comes there where the two calls
talk over different channels: one waits for the next batch, say, and the other in a backward pass. So a rank that has
waited for a moment says in the store what it waits in, and how many calls it has made on each channel; and it looks at
what those say that it waits for. If one of them waits, too, for a call that this rank has not come to, or for one that
waits so, neither will go on.

That is certain, however old what is read: a rank cannot have left a call for which this one has not come. This one has
to know all calls to which it has come for that, and forgets those of channels that nobody uses any more, such as those
of earlier passes over the data. So a rank takes back what it said once that wait is over.
"""

from __future__ import annotations

import collections
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from torchstrat.distributed.collectives.shared_memory.lockstep import PeersMissingError

T = TypeVar("T")

PATIENCE_SECONDS = 2.0  # how long a rank that gave up waits for the others to say why they did
_TELLING_SECONDS = 10.0
"""How long a rank waits to be told by those that met it with another call: each tells, and ends; on a busy machine
later."""
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
        self._first, self._process = store, os.getpid()
        self._store: dist.Store | None = None
        self._late: threading.Thread | None = None

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork, whose connection is its parent's: the two would read each other's answers."""
        return self._process != os.getpid()

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
        self._start(lambda store: results.append(call(store)), seconds)
        return results[0] if results else otherwise

    def owe(self, call: Callable[[dist.Store], object]) -> None:
        """Make ``call(store)`` in any case: while the store does not answer the call waits for that, behind the others
        that do, and this thread does not."""
        self._start(call, 0.0 if self.is_gone else 2 * PATIENCE_SECONDS)

    def _start(self, call: Callable[[dist.Store], object], seconds: float) -> None:
        if self.is_inherited:
            return
        late = self._late

        def visit() -> None:
            if late is not None:
                late.join()
            try:
                if self._store is None:
                    self._store = self._first.clone()
                call(self._store)
            except Exception:  # the store went with the process that held it; then silence has to speak
                return

        thread = threading.Thread(target=visit, name="torchstrat-failure-note", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._late = thread


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

    @property
    def is_inherited(self) -> bool:
        return self._visits.is_inherited

    def post(self, message: str, *, leaves: bool = False) -> None:
        """Tell the others, without waiting for them, why this rank stopped taking part. The first reason counts.

        ``leaves``: those that wait for it are not to wait any longer.
        """
        if self.is_inherited:
            return
        if not self.has_note:
            self._write(message)
        if leaves and self.leaving is not None:  # now that the reason can be read
            self.leaving(True)

    def _write(self, message: str) -> None:
        self.has_note = True
        # Nobody says it again, and the others would wait for this rank until their timeout.
        self._visits.owe(lambda store: self._part_of(store).set(_key(self._rank), message))

    def clear(self) -> None:
        """Take this rank's note back: it takes part again. Costs nothing where there is none."""
        if self.has_note and not self.is_inherited:
            self.has_note = False
            if self.leaving is not None:
                self.leaving(False)
            self._visits.owe(lambda store: self._part_of(store).delete_key(_key(self._rank)))

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
        not called the same. Waits for them; a rank that did not say it in time is left out."""
        keys = {f"calls/{place}/{rank}": rank for rank in ranks}
        said = {self._rank: own}

        def tell_and_hear(store: dist.Store) -> None:
            store.set(f"calls/{place}/{self._rank}", own)
            collect(store, keys, said, _TELLING_SECONDS)

        self.visit(tell_and_hear, None, _TELLING_SECONDS + PATIENCE_SECONDS)
        return dict(said)

    def visit(self, call: Callable[[dist.Store], T], otherwise: T, seconds: float = 2 * PATIENCE_SECONDS) -> T:
        """See `StoreVisits.visit`; the store is the part of this board."""
        return self._visits.visit(lambda store: call(self._part_of(store)), otherwise, seconds)

    def _part_of(self, store: dist.Store) -> dist.Store:
        return dist.PrefixStore(self._prefix, store)


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


MOMENT_SECONDS = 0.5
"""How long a rank waits before it says so."""

_AT_ONCE = 64  # ranks that are asked after in one look
_SECONDS_PER_RANK = 0.01  # between two looks: one store answers all ranks
_GIVEN_UP_SECONDS = 2.0  # from then on a rank that has told of its failure, and has not come since, will not come
_PAST_CHANNELS = 64  # that nobody uses any more, and may still be waited in by who is about to find that it is over


class StandstillError(RuntimeError):
    """Ranks wait for each other, or for one that has failed.

    ``calls``: what each of them waits in, by rank of the job; empty where one has failed, as ``failed`` says.
    """

    def __init__(self, calls: Mapping[int, str], failed: Mapping[int, str]) -> None:
        self.calls, self.failed = dict(calls), dict(failed)
        super().__init__(f"waiting: {self.calls}, failed: {self.failed}")


class Channel:
    """Calls that are ordered among themselves, as one rank makes them.

    ``name``: the same on all ``ranks`` (of the job). ``board``: the prefix of the notes about failures.
    """

    __slots__ = (
        *("__weakref__", "begun", "board", "call", "count", "in_background", "name", "noted", "number", "ranks"),
        "seen",
    )

    def __init__(self, name: str, ranks: Sequence[int], board: str) -> None:
        self.name, self.ranks, self.board = name, tuple(ranks), board
        self.count = 0
        """Calls that this rank has made."""
        self.begun = 0
        """Those of them that go on by themselves, and have not been waited for yet."""
        self.call, self.number = "", 0
        """What it is in, and the how manieth that is; "": nothing."""
        self.in_background = False
        """Whether another thread than the program's makes the calls: who waits there keeps nobody."""
        self.noted = (0, 0.0)
        """The wait that was looked at last, and when that will be due again."""
        self.seen: dict[int, float] = {}
        """When ranks that this one waits for were first seen to have failed."""


class _Said(NamedTuple):
    """What a rank waits in, and which calls it has come to by then."""

    channel: str
    number: int
    call: str
    ranks: Sequence[int]
    counts: Mapping[str, int]
    background: Sequence[str]

    def comes_to(self, other: _Said) -> bool:
        """Whether it has been where ``other`` waits, or may come there by another thread."""
        return self.counts.get(other.channel, 0) >= other.number or other.channel in self.background


class Standstill:
    """One process's view of what the ranks of its job wait in.

    ``place``: where they say it in the store. What ranks of an earlier group have said there would be taken for theirs,
    of whose calls this one knows nothing.
    """

    def __init__(self, visits: StoreVisits, rank: int, size: int, place: str) -> None:
        self._visits, self._rank, self._place = visits, rank, place
        self._pause = max(MOMENT_SECONDS, size * _SECONDS_PER_RANK)
        self._channels: dict[str, Channel] = {}
        self._past: collections.deque[tuple[str, int, bool]] = collections.deque(maxlen=_PAST_CHANNELS)
        """Name, count and ``in_background`` of channels that nobody uses any more."""
        self._told: _Said | None = None
        """What stands in the store."""

    def channel(self, user: object, name: str, ranks: Sequence[int], board: str) -> Channel:
        """A new one. It is forgotten some time after ``user``, who makes its calls, is gone."""
        made = self._channels[name] = Channel(name, ranks, board)
        weakref.finalize(user, self._retire, made).atexit = False
        return made

    def _retire(self, channel: Channel) -> None:
        # In the middle of any other call, as garbage collections are: no lock, and nothing that waits.
        if self._channels.get(channel.name) is channel:
            del self._channels[channel.name]
        self._past.append((channel.name, channel.count, channel.in_background))

    def look(self, channel: Channel, *, at_once: bool = False) -> None:
        """Who waits in ``channel`` calls it now and then. Raises `StandstillError` if that will not end.

        ``at_once``: also if the wait has just begun, for a rank that is found to have ended is not waited for.
        """
        now = time.monotonic()
        number, due = channel.noted
        if number != channel.number:
            due = now + MOMENT_SECONDS / 2
            channel.noted, channel.seen = (channel.number, due), {}
        if (now < due and not at_once) or channel.in_background:
            return
        found = self._visits.visit(lambda store: self._find(store, channel), None)
        channel.noted = (channel.number, time.monotonic() + self._pause)
        if found is not None:
            raise found

    def over(self, channel: Channel) -> None:
        """The call that this rank is in on ``channel`` has come to its end. Costs nothing if nobody was told of it."""
        told = self._told
        if told is not None and (told.channel, told.number) == (channel.name, channel.number):
            self._told = None
            self._visits.owe(lambda store: store.delete_key(_wait_key(self._place, self._rank)))

    # -- in the store -----------------------------------------------------------------------------------------------

    def _find(self, store: dist.Store, channel: Channel) -> StandstillError | None:
        own = self._own(channel)
        if own != self._told:
            store.set(_wait_key(self._place, self._rank), json.dumps(own))
            self._told = own
        failed = self._failed(store, channel)
        if failed:
            return StandstillError({}, failed)
        calls = _Circle(store, self._place, self._rank, own).find()
        return StandstillError(calls, {}) if calls is not None else None

    def _own(self, channel: Channel) -> _Said:
        now = [(one.name, one.count, one.in_background) for one in list(self._channels.values())]
        known = [*list(self._past), *now]
        return _Said(
            channel.name,
            channel.number,
            channel.call,
            channel.ranks,
            {name: count for name, count, _ in known if count},
            [name for name, _, in_background in known if in_background],
        )

    def _failed(self, store: dist.Store, channel: Channel) -> dict[int, str]:
        """Those of the others that have told of their failure a while ago. One that goes on takes it back."""
        now = time.monotonic()
        failed = {}
        for rank in _others(channel.ranks, self._rank):
            note = note_of(store, channel.board, rank)
            if note is None:
                channel.seen.pop(rank, None)
            elif now - channel.seen.setdefault(rank, now) >= _GIVEN_UP_SECONDS:
                failed[rank] = note
        return failed


class _Circle:
    """Looks for ranks each of which waits for the next one, and the last for ``rank``."""

    def __init__(self, store: dist.Store, place: str, rank: int, own: _Said) -> None:
        self._store, self._place, self._rank, self._own = store, place, rank, own
        self._asked: set[int] = set()

    def find(self) -> dict[int, str] | None:
        """What they wait in, by rank."""
        found = self._from(self._own)
        return None if found is None else {self._rank: self._own.call, **found}

    def _from(self, at: _Said) -> dict[int, str] | None:
        for rank in _others(at.ranks, self._rank):
            if rank in self._asked or len(self._asked) >= _AT_ONCE:
                continue
            self._asked.add(rank)
            other = self._said_by(rank)
            if other is None or other.comes_to(at):
                continue
            if self._rank in other.ranks and not self._own.comes_to(other):
                return {rank: other.call}
            rest = self._from(other)
            if rest is not None:
                return {rank: other.call, **rest}
        return None

    def _said_by(self, rank: int) -> _Said | None:
        said = said_at(self._store, _wait_key(self._place, rank))
        return None if said is None else _Said(*json.loads(said))


def _others(ranks: Sequence[int], own: int) -> list[int]:
    """Those after ``own`` first: ranks that are many begin at different ones."""
    after = sum(rank <= own for rank in ranks)
    return [rank for rank in (*ranks[after:], *ranks[:after]) if rank != own][:_AT_ONCE]


def _wait_key(place: str, rank: int) -> str:
    return f"{place}/{rank}"
