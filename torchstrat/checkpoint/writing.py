"""A save: the state at one moment, its way to the disk, which may still be under way, and the handle that tells of it.

`take` runs while the program waits, and on parameter servers while no function runs. `write` needs nothing of the
program any more, so it may run on a thread of its own; one save at a time does. That thread is no daemon: a program
that ends waits for it.

What several processes hold is written by one of them. Parameters and optimizer state are the same on every process that
holds them, so the bytes are spread evenly. Anything else (buffers, counters) may differ from process to process, and
what belongs together must not be put together from several: it is written by the first that holds it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from torchstrat.checkpoint import job_state
from torchstrat.checkpoint.files import WrittenPart, write_metadata, write_part
from torchstrat.checkpoint.folder import written_whole
from torchstrat.checkpoint.items import Item, Writes
from torchstrat.checkpoint.job_state import JobState, Processes
from torchstrat.checkpoint.manifest import write_manifest
from torchstrat.checkpoint.optimizer_item import make_items
from torchstrat.checkpoint.pieces import KeyPath, key_of
from torchstrat.checkpoint.remote import RemoteSlot, RemoteState, ServerCut, Servers, ServersWritten
from torchstrat.checkpoint.stored import INDEX
from torchstrat.core.errors import CancelledByServerLossError, CommunicationTimeoutError, InvalidArgumentError
from torchstrat.core.memory import check_fits
from torchstrat.core.tracebacks import short_tracebacks

logger = logging.getLogger("torchstrat.checkpoint")

TURN_TIMEOUT = timedelta(hours=1)
"""How long a save or a restore waits for the save before it."""


@short_tracebacks
class SaveHandle:
    """What `Checkpoint.save` returns: the outcome of a save, once there is one. Thread-safe.

    ``path`` is where the checkpoint appears.
    """

    def __init__(self, path: Path, outcome: Future[Path]) -> None:
        self.path, self._outcome = path, outcome
        self._was_told = False

    def done(self) -> bool:
        """Whether the checkpoint is on the disk, or failed to get there."""
        return self._outcome.done()

    def result(self, timeout: timedelta | float | None = None) -> Path:
        """Wait until it is on the disk; returns ``path``. ``timeout`` in seconds, None without end.

        Raises what went wrong, at every call; what was at ``path`` before is still there then. After ``timeout`` raises
        `CommunicationTimeoutError`, and the save goes on.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        try:
            error = self._outcome.exception(seconds)
        except FutureTimeoutError:
            raise CommunicationTimeoutError(
                f"the checkpoint {self.path} was not written after {seconds:g} s; it is still being written."
            ) from None
        if error is not None:
            self._was_told = True
            raise error
        return self.path

    def add_done_callback(self, fn: Callable[[SaveHandle], object]) -> None:
        """Call ``fn(handle)`` when it is done, on the thread that writes; at once if it is. What ``fn`` raises is
        logged."""
        self._outcome.add_done_callback(lambda _: fn(self))

    def raise_untold(self) -> None:
        """The error, if it has failed and nobody has been told by `result` or by this."""
        if self._outcome.done() and self._outcome.exception() is not None and not self._was_told:
            self.result()

    def __repr__(self) -> str:
        if not self.done():
            return f"<SaveHandle of {self.path}: being written>"
        return f"<SaveHandle of {self.path}: {'written' if self._outcome.exception() is None else 'failed'}>"


def not_saved(path: Path) -> SaveHandle:
    """The handle of a save that a loss has ended."""
    problem = f"{path} was not saved: a parameter server was lost, and all servers went back to an earlier checkpoint."
    logger.warning(problem)
    outcome: Future[Path] = Future()
    outcome.set_exception(CancelledByServerLossError(problem))
    return SaveHandle(path, outcome)


_NOT_STARTED = 0
"""No thread's number."""


class _Turns:
    """Who saves or restores: one at a time in a process, so that parameter servers hold one cut at most, and all
    processes of a job meet in the same order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._what = ""
        self._thread: int | None = None
        self._depth = 0

    def take(self, what: str) -> None:
        """Wait for what is under way. The thread that has the turn may take it again: a restore within a save, which a
        lost server brings about. Raises `CommunicationTimeoutError` naming what it waited for."""
        me = threading.get_ident()
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread in (None, me), TURN_TIMEOUT.total_seconds()):
                raise CommunicationTimeoutError(
                    f"{what} waited {TURN_TIMEOUT.total_seconds():g} s for {self._what}, which is still under way."
                )
            if self._depth == 0:
                self._what = what
            self._thread = me
            self._depth += 1

    def give(self) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._thread = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def held(self, what: str) -> Iterator[None]:
        self.take(what)
        try:
            yield
        finally:
            self.give()

    def pass_to(self, thread: int) -> None:
        """The turn belongs to the thread of this number from now on; `_NOT_STARTED`: to one that will say so itself."""
        with self._changed:
            self._thread = thread


turns = _Turns()


def wait_for_saves() -> None:
    """Until no save is under way; its outcome stays with its handle. For who closes what a save still needs."""
    try:
        with turns.held("closing"):
            pass
    except CommunicationTimeoutError as error:
        logger.error("%s It will fail.", error)


def here_and_now(path: Path, outcome: Future[Path], write: Callable[[], None]) -> None:
    """Write, give the turn back, which the caller has, and tell the ``outcome``."""
    try:
        write()
    except BaseException as error:
        turns.give()
        outcome.set_exception(error)
        raise
    turns.give()
    logger.debug("the checkpoint %s is saved.", path)
    outcome.set_result(path)


def in_background(path: Path, outcome: Future[Path], write: Callable[[], None]) -> None:
    """`here_and_now` on a thread of its own."""

    def write_or_log() -> None:
        try:
            write()
        except BaseException as error:
            # Before anybody who waits for it is told: that may be the end of the program.
            logger.error("the checkpoint %s was not saved: %s", path, error)
            raise

    def run() -> None:
        turns.pass_to(threading.get_ident())
        with contextlib.suppress(BaseException):  # the handle tells it
            here_and_now(path, outcome, write_or_log)

    thread = threading.Thread(target=run, name=f"torchstrat-save-{path.name}", daemon=False)
    turns.pass_to(_NOT_STARTED)  # before it starts: until then the caller's next save would take this one's turn
    try:
        thread.start()
    except RuntimeError:  # no more threads: then here
        here_and_now(path, outcome, write)


_SHARED_BYTES = 1 << 20
"""Smaller tensors are not worth another file: the first that holds them writes them."""

Place = tuple[KeyPath, int]
"""What is written once: a path, and the row of the whole tensor at which the piece begins (-1: no tensor)."""


@dataclass(frozen=True)
class Offer:
    """What one process could write. ``like``: dtype and shape of the piece, which must agree; None for other values.
    ``shared``: any that holds it may write it; otherwise the first."""

    place: Place
    like: tuple[str, tuple[int, ...], tuple[int, ...]] | None
    bytes: int
    shared: bool


def offers_of(writes: Writes) -> list[Offer]:
    offers = []
    for piece, tensor in writes.tensors:
        shared = piece.path in writes.replicated and tensor.nbytes >= _SHARED_BYTES
        like = (str(tensor.dtype), tuple(tensor.shape), piece.shape)
        offers.append(Offer((piece.path, piece.start), like, tensor.nbytes, shared))
    return offers + [Offer((path, -1), None, 0, shared=False) for path, _ in writes.values]


def share(offers: Sequence[Sequence[Offer]], sees: Sequence[bool], folder: str) -> list[set[Place]]:
    """For each rank what it writes. ``sees``: whether that rank sees ``folder``; only such ranks write.

    Every rank computes the same. Raises `InvalidArgumentError` for what only ranks hold that do not see the folder, and
    for one name of different things.
    """
    holders: dict[Place, list[int]] = defaultdict(list)
    known: dict[Place, Offer] = {}
    for rank, of_rank in enumerate(offers):
        for offer in of_rank:
            first = known.setdefault(offer.place, offer)
            if first.like != offer.like:
                raise InvalidArgumentError(
                    f"{key_of(offer.place[0])} is {_shown(first)} on rank {holders[offer.place][0]} and "
                    f"{_shown(offer)} on rank {rank}; a checkpoint needs the same objects on every rank."
                )
            holders[offer.place].append(rank)
    refuse_twice(place[0] for place in known)
    written: list[set[Place]] = [set() for _ in offers]
    loads = [0] * len(offers)
    able_for = {place: [rank for rank in ranks if sees[rank]] for place, ranks in holders.items()}
    # Those without a choice first, then the large ones: what comes later evens the loads out.
    choice = {place: len(able_for[place]) if offer.shared else 1 for place, offer in known.items()}
    for place, offer in sorted(
        known.items(), key=lambda item: (choice[item[0]], -item[1].bytes, key_of(item[0][0]), item[0][1])
    ):
        able = able_for[place]
        if not able:
            raise InvalidArgumentError(
                f"{key_of(place[0])} is held by rank {holders[place][0]} alone, which does not see {folder}. The path "
                "of a checkpoint must be on a file system that all processes share, under the same name."
            )
        rank = min(able, key=lambda one: (loads[one], one)) if offer.shared else able[0]
        written[rank].add(place)
        loads[rank] += offer.bytes
    return written


def selected(writes: Writes, places: set[Place]) -> Writes:
    """The part of ``writes`` that is in ``places``."""
    return Writes(
        [(piece, tensor) for piece, tensor in writes.tensors if (piece.path, piece.start) in places],
        [(path, value) for path, value in writes.values if (path, -1) in places],
    )


def refuse_twice(paths: Iterable[KeyPath]) -> None:
    """Raise `InvalidArgumentError` where two paths have one name in the file."""
    by_key: dict[str, KeyPath] = {}
    for path in paths:
        if by_key.setdefault(key_of(path), path) != path:
            raise InvalidArgumentError(
                f"two values of the checkpoint would both be called {key_of(path)}: {by_key[key_of(path)]} and {path}. "
                "Give their objects other names."
            )


def _shown(offer: Offer) -> str:
    return "no tensor" if offer.like is None else f"{offer.like[0]} {offer.like[1]}"


_REMEDY = ". Free space there, or give another path; what was saved before is as it was."


@dataclass(frozen=True)
class State:
    """What a checkpoint is made of, at one moment. ``here``: what this process holds. ``job``: of the job itself.
    ``servers``: None where nothing lives on parameter servers; ``slots`` and ``states`` name what does."""

    here: Writes
    job: JobState
    servers: ServerCut | None = None
    slots: Sequence[RemoteSlot] = ()
    states: Sequence[RemoteState] = ()

    def close(self) -> None:
        """It was written, or will not be."""
        if self.servers is not None:
            self.servers.end()


def take(objects: Mapping[str, object], servers: Servers | None, *, copies: bool) -> State:
    """The state of ``objects``, on servers as well, at one moment: no function is half-way, and none begins meanwhile.

    Args:
        copies: of what lives in this process, so that it may change from now on. With parameter servers there are
            copies always: functions go on at once, and tables are not here.
    """
    if servers is None:
        return State(_joined(make_items(objects, None), copies=copies), job_state.take(objects, None))
    servers.prepare_to_save()
    with servers.paused():
        items = make_items(objects, servers)
        here = _joined(items, copies=True)
        job = job_state.take(objects, servers)
        cut = servers.begin()
    slots = [slot for item in items for slot in item.remote_slots()]
    return State(here, job, cut, slots, [state for item in items for state in item.remote_states()])


def _joined(items: Iterable[Item], *, copies: bool) -> Writes:
    every = [item.writes() for item in items]
    joined = Writes(
        [one for writes in every for one in writes.tensors],
        [one for writes in every for one in writes.values],
        frozenset().union(*(writes.replicated for writes in every)),
    )
    return _copied(joined) if copies else joined


def _copied(writes: Writes) -> Writes:
    check_fits(
        sum(tensor.nbytes for _, tensor in writes.tensors),
        "a copy of what is saved while the program goes on",
        "Save without asynchronous=True.",
    )
    tensors = [(piece, tensor.detach().to("cpu", copy=True)) for piece, tensor in writes.tensors]
    return Writes(tensors, [(path, _copy(value)) for path, value in writes.values], writes.replicated)


def _copy(value: object) -> object:
    """As it would come back from the file."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    packed = io.BytesIO()
    torch.save(value, packed)
    packed.seek(0)
    return torch.load(packed, map_location="cpu", weights_only=False)


def write(target: Path, state: State, processes: Processes) -> None:
    """Write it; it appears at ``target`` whole. Every process calls it, and it fails on all of them or on none."""
    what = f"saving {target}"
    with contextlib.ExitStack() as stack:
        # Rank 0 makes the folder and puts it in its place; the others write to it in between.
        folder = Path(processes.of_first(lambda: str(stack.enter_context(written_whole(target))), what))
        mine = _share(folder, state.here, processes)
        _add_job(mine, processes.all_values(state.job), processes)
        parts, applied = _write_parts(folder, state, mine, processes, what)

        def finish() -> None:
            if processes.is_first:
                _finish(target, folder, parts, applied)
            stack.close()

        processes.attempt(finish, what)


def _share(folder: Path, writes: Writes, processes: Processes) -> Writes:
    if processes.size == 1:
        refuse_twice([*[piece.path for piece, _ in writes.tensors], *[path for path, _ in writes.values]])
        return writes
    told = processes.all_values((offers_of(writes), folder.is_dir()))
    places = share([offers for offers, _ in told], [sees for _, sees in told], str(folder))
    return selected(writes, places[processes.rank])


def _add_job(mine: Writes, states: Sequence[JobState], processes: Processes) -> None:
    """The first process writes what all have: it is small."""
    if processes.is_first:
        writes = job_state.writes_of(states)
        mine.tensors += writes.tensors
        mine.values += writes.values


def _write_parts(
    folder: Path, state: State, mine: Writes, processes: Processes, what: str
) -> tuple[list[WrittenPart], Mapping[str, object]]:
    """What all processes and servers have written; each server's records of applied pushes."""

    def write_mine() -> tuple[list[WrittenPart], Mapping[str, object]]:
        tensors, values = list(mine.tensors), list(mine.values)
        written: ServersWritten | None = None
        if state.servers is not None:
            written = state.servers.write(folder, state.slots, state.states, first_number=processes.size)
            tensors += written.whole_tensors
            values += written.whole_values
            refuse_twice([*[piece.path for piece, _ in tensors], *[path for path, _ in values]])
        try:
            part = write_part(folder, processes.rank, tensors, values)
        except OSError as error:
            raise InvalidArgumentError(
                f"the checkpoint cannot be written to {folder.parent}: {error}{_REMEDY}"
            ) from error
        return [part, *(written.parts if written is not None else ())], {} if written is None else written.applied

    every = processes.gather(write_mine, what)
    applied = {server: records for _, of_servers in every for server, records in of_servers.items()}
    return [part for parts, _ in every for part in parts], applied


def _finish(target: Path, folder: Path, parts: Sequence[WrittenPart], applied: Mapping[str, object]) -> None:
    try:
        for part in parts:
            for name, check in part.files.items():
                if not (folder / name).is_file() or (folder / name).stat().st_size != check.bytes:
                    raise InvalidArgumentError(
                        f"{folder / name}, which another process has written, is not to be seen by this one. The path "
                        "of a checkpoint must be on a file system that all processes share."
                    )
        files = {name: check for part in parts for name, check in part.files.items()}
        files[INDEX] = write_metadata(folder, parts)
        write_manifest(folder, files, {"servers": applied} if applied else {})
    except OSError as error:
        raise InvalidArgumentError(f"the checkpoint cannot be written to {target}: {error}{_REMEDY}") from error
