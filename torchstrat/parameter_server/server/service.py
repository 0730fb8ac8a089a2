"""The role ``ps`` as its process hosts it: the store's methods, as messages.

A server writes its own shards into a checkpoint, and reads them from one (`CheckpointShards`). Tables never pass
through the coordinator. Saving has two steps, so that all servers save one moment: all of them mark what they hold,
while the coordinator lets nothing run; then each writes what was marked, while pushes go on.

Restoring has two steps, so that a damaged file changes no server: all of them read and check; then all adopt it, into
the memory of what they held before, which is all the memory it takes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchstrat.checkpoint.files import BlockSource, write_part
from torchstrat.checkpoint.pieces import KeyPath, Piece, is_block, shape_goes_by_rows
from torchstrat.checkpoint.reading import Prepared, prepare
from torchstrat.checkpoint.stored import open_checkpoint
from torchstrat.core.errors import CommunicationTimeoutError, InvalidArgumentError
from torchstrat.core.kept_pages import give_back_pages
from torchstrat.parameter_server.interface import AnswerMemory, Endpoint, Handler, Peer
from torchstrat.parameter_server.messages import (
    AdoptOrder,
    AppliedPushes,
    ReadOrder,
    ShardKey,
    StatePiece,
    WriteOrder,
    WriteReport,
)
from torchstrat.parameter_server.server.snapshot import Cut, CutRows, FrozenRows
from torchstrat.parameter_server.server.store import VariableStore
from torchstrat.parameter_server.variables.attributes import put_back

_SWITCH_INTERVAL_SECONDS = 5e-4
"""Of the interpreter, while a server runs. Its threads spend their time in torch, without the interpreter's lock; with
Python's 5 ms a thread that comes back from there waits that long, per call, for one that is busy in Python."""

_LEAVE_MUCH_FREE = (
    *("ps.create", "ps.grow", "ps.release", "ps.load_optimizer_state"),
    *("ps.read_checkpoint", "ps.end_checkpoint"),
)
"""Orders for which a server takes, for a while, as much memory again as it holds; or that give back what it held."""

_switches_lock = threading.Lock()
_before: list[float] = []


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """A setting of the whole process: the first server in it sets it, the last one puts it back."""
    with _switches_lock:
        _before.append(_before[0] if _before else sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    try:
        yield
    finally:
        with _switches_lock:
            before = _before.pop()
            if not _before:
                sys.setswitchinterval(before)


class VariableServer:
    """A `Service`: messages are those of `VariableStore`'s methods of these names, payloads their arguments.

    Reads, pushes and checkpoints run on four threads, so that several fused optimizers step at once; reads and
    pushes of processes of the same host on a thread per process. Short orders of the coordinator (fence, forget,
    catalog, dtype) have a thread of their own and never queue behind those.
    """

    def __init__(self, *, owns_process: bool = True) -> None:
        self._owns_process = owns_process
        self.store = VariableStore()
        self._work = ThreadPoolExecutor(4, thread_name_prefix="torchstrat-ps")
        self._orders = ThreadPoolExecutor(1, thread_name_prefix="torchstrat-ps-orders")
        self._checkpoints = CheckpointShards(self.store)
        self._switching: contextlib.ExitStack = contextlib.ExitStack()
        self._has_left_overs = threading.Event()
        self._coordinator: Peer | None = None

    def handlers(self) -> Mapping[str, Handler]:
        store = self.store
        steps: dict[str, Callable[[Peer, Any, AnswerMemory], object]] = {
            "ps.read": lambda sender, keys, memory: store.read(keys, memory, sender.incarnation),
            "ps.read_rows": lambda _, requests, memory: store.read_rows(requests, memory),
            "ps.push": lambda _, push, memory: store.push(push, memory),
        }
        work: dict[str, Callable[[Any], object]] = {
            "ps.create": store.create,
            "ps.repeat": store.repeat,
            "ps.grow": store.grow,
            "ps.add_optimizer": store.add_optimizer,
            "ps.release": store.release,
            "ps.optimizer_state": lambda payload: store.optimizer_state(*payload),
            "ps.load_optimizer_state": lambda payload: store.load_optimizer_state(*payload),
            "ps.optimizer_options": lambda payload: store.optimizer_options(*payload),
            "ps.load_optimizer_options": lambda payload: store.load_optimizer_options(*payload),
            "ps.begin_checkpoint": lambda token: store.begin_cut(token).report(),
            "ps.write_checkpoint": self._checkpoints.write,
            "ps.end_checkpoint": self._end_checkpoint,
            "ps.read_checkpoint": self._checkpoints.read,
            "ps.adopt_checkpoint": self._checkpoints.adopt,
        }
        orders: dict[str, Callable[[Any], object]] = {
            "ps.fence": store.fence,
            "ps.forget_below": self._forget_below,
            "ps.take_conflicts": lambda _: store.take_conflicts(),
            "ps.left_gradients": store.left_gradients,
            "ps.step_result": lambda payload: store.result_of(*payload),
            "ps.applied_parts": store.applied_parts,  # behind the fence of who ran it before
            "ps.catalog": lambda _: store.catalog(),
            "ps.use_default_dtype": self._use_default_dtype,
        }
        for name in _LEAVE_MUCH_FREE:
            work[name] = self._noting_left_overs(work[name])
        # The store copies what it keeps, so that orders need not be copied before.
        handlers = {name: Handler(_without_sender(answer), self._work, borrows=True) for name, answer in work.items()}
        handlers |= {name: Handler(_without_sender(answer), self._orders) for name, answer in orders.items()}
        return handlers | {name: self._step(answer) for name, answer in steps.items()}

    def _step(self, answer: Callable[[Peer, object, AnswerMemory], object]) -> Handler:
        return Handler(answer, self._work, takes_memory=True, borrows=True, may_hold_up_its_caller=True)

    def attach(self, endpoint: Endpoint) -> None:
        self.store.owner = str(endpoint.peer)
        self._switching.enter_context(_quick_switches())

    def status(self) -> Mapping[str, object]:
        """``digest`` of the catalog, ``variables``: how many, ``next_function``: see `VariableStore.catalog`."""
        catalog = self.store.catalog()
        return {
            "digest": catalog["digest"],
            "variables": len(catalog["variables"]),
            "next_function": catalog["next_function"],
        }

    def coordinator_arrived(self, coordinator: Peer) -> None:
        """It asks for the catalog, and creates what it misses. Gradients that another program's functions have left for
        its steps are nothing to this one, nor is what that has set on classes."""
        if self._coordinator not in (None, coordinator):
            self.store.drop_gradients()
            put_back()
        self._coordinator = coordinator

    def coordinator_left(self, *, finished: bool) -> None:
        """After a job that has finished the server is as new; one that was lost finds everything as it was."""
        if finished:
            self.store.reset()
            put_back()
            give_back_pages()
        else:
            self.store.end_cut()

    def drain(self, timeout_seconds: float) -> None:
        """Let the pushes that have begun end, as far as the time allows."""
        try:
            self.store.wait_until_idle(timeout_seconds)
        except CommunicationTimeoutError:
            return  # the process ends all the same; who waits for an answer learns it from that

    def close(self) -> None:
        self._work.shutdown(wait=False, cancel_futures=True)
        self._orders.shutdown(wait=False, cancel_futures=True)
        self._switching.close()

    def _end_checkpoint(self, token: str) -> None:
        self.store.end_cut(token)
        self._checkpoints.forget(token)

    def _noting_left_overs(self, answer: Callable[[object], object]) -> Callable[[object], object]:
        def noting(payload: object) -> object:
            try:
                return answer(payload)
            finally:
                self._has_left_overs.set()

        return noting

    def _forget_below(self, function: int) -> None:
        """Comes when functions have ended: by then nobody holds what they, and all before them, were sent."""
        self.store.forget_below(function)
        if self._has_left_overs.is_set():
            self._has_left_overs.clear()
            give_back_pages()

    def _use_default_dtype(self, dtype: torch.dtype) -> None:
        """Optimizers make state of it."""
        if self._owns_process:
            torch.set_default_dtype(dtype)


def _without_sender(answer: Callable[[object], object]) -> Callable[[Peer, object], object]:
    return lambda _sender, payload: answer(payload)


class CheckpointShards:
    """What a server writes of its store into checkpoints, and reads. Thread-safe."""

    def __init__(self, store: VariableStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._ready: tuple[ReadOrder, Prepared] | None = None

    # -- writing ----------------------------------------------------------------------------------------------------

    def write(self, order: WriteOrder) -> WriteReport:
        """Write what the order names, as it was when ``order.token`` was marked.

        Takes memory for a block, and for what pushes change before it is written; a push waits at most while a block is
        copied. Raises `InvalidArgumentError` where the folder cannot be seen or written to from here, `TorchstratError`
        where the cut was given up.
        """
        folder = self._visible(order.folder)
        cut = self._store.cut(order.token)
        try:
            found = self._collected(cut, order)
            part = write_part(folder, order.number, found.tensors, found.values)
        except OSError as error:
            raise InvalidArgumentError(
                f"{self._store.owner} cannot write its part of a checkpoint to {folder}: {error}"
            ) from error
        finally:
            self._store.end_cut(order.token)
        return WriteReport(part, tuple(found.whole), cut.copied_bytes)

    def _collected(self, cut: Cut, order: WriteOrder) -> _Collected:
        found = _Collected()
        for fill in order.fills:  # first: some are copies of rows that are still to be taken
            self._add_fill(cut, fill, found)
        values: dict[ShardKey, torch.Tensor | CutRows] = {}  # one source for a variable of two names
        for value in order.values:
            if value.key not in values:
                values[value.key] = self._value(cut, value.key)
            found.tensors.append((value.piece, values[value.key]))
        for one in order.states:
            shape = tuple(self._value(cut, one.key).shape)
            for name, entry in cut.variables[one.key[0]].states.get((one.optimizer, one.key[1]), {}).items():
                frozen = isinstance(entry, FrozenRows)
                source = self._store.rows_of(cut, one.key, one.optimizer, name) if frozen else entry
                self._add_entry(one, name, source, shape, found)
        return found

    @staticmethod
    def _add_entry(state: StatePiece, name: str, entry: Any, shape: tuple[int, ...], found: _Collected) -> None:
        """``shape``: of the shard that this is an entry of the state of."""
        path = (*state.piece.path, name)
        is_tensor = isinstance(entry, CutRows) or is_block(entry)
        if state.cut and is_tensor and shape_goes_by_rows(tuple(entry.shape), shape[0] if shape else 1, shape):
            found.add_rows(state, name, entry)
        elif state.cut:
            found.whole.append((path, entry.look() if isinstance(entry, CutRows) else entry))
        elif is_tensor:
            found.tensors.append((Piece(path, tuple(entry.shape)), entry))
        else:
            found.values.append((path, entry))

    def _value(self, cut: Cut, key: ShardKey) -> torch.Tensor | CutRows:
        """A copy of a scalar, or the rows of what has any."""
        variable = cut.variables.get(key[0])
        if variable is None or key[1] not in variable.values:
            raise InvalidArgumentError(
                f"{self._store.owner} does not hold shard {key[1]} of variable number {key[0]}, which is to be saved; "
                "after a restart, restore a checkpoint first."
            )
        value: torch.Tensor | FrozenRows = variable.values[key[1]]
        return self._store.rows_of(cut, key) if isinstance(value, FrozenRows) else value

    def _add_fill(self, cut: Cut, fill: StatePiece, found: _Collected) -> None:
        table = self._value(cut, fill.key)
        for name, entry in self._store.untouched_entries(fill.optimizer, fill.key).items():
            if entry.fill is not None:
                found.add_rows(fill, name, OneValue((table.shape[0], *entry.shape), entry.dtype, entry.fill))
            else:  # a copy of the table
                found.add_rows(fill, name, table.look() if isinstance(table, CutRows) else table)

    def _visible(self, name: str) -> Path:
        folder = Path(name)
        if not folder.exists():
            raise InvalidArgumentError(
                f"{self._store.owner} does not see {folder}. The path of a checkpoint must be on a file system that "
                "the coordinator and all parameter servers share, under the same name."
            )
        return folder

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, order: ReadOrder) -> None:
        """Read and check what the order names, and hold the files ready. Nothing changes.

        Raises `InvalidArgumentError` where the folder cannot be seen from here, or a file is damaged.
        """
        stored = open_checkpoint(self._visible(order.folder))
        wanted: list[tuple[Piece, int | None]] = [
            (one.piece, self._store.shard_rows(one.key) if one.piece.shape else None) for one in order.values
        ]
        wanted += [(one.piece, one.rows) for one in order.states]
        self._hold((order, prepare(stored, wanted)))

    def adopt(self, order: AdoptOrder) -> None:
        """Replace values, states and records by what was read, in one cut.

        Records of the job that wrote the checkpoint are not put back: functions are numbered by the coordinator that
        schedules them, none of this one's is under way, and none will be repeated.

        Raises `InvalidArgumentError`, before anything changes, for what was not read or does not fit; `TorchstratError`
        where the disk fails now: then this server holds a mixture, until another restore.
        """
        with self._lock:
            ready = self._ready
        if ready is None or ready[0].token != order.token:
            raise InvalidArgumentError(
                f"{self._store.owner} has not read the checkpoint that it is to adopt; restore it again."
            )
        read, prepared = ready
        try:
            self._store.overwrite(
                [one.key for one in read.values],
                [(one.optimizer, one.key, one.name) for one in read.states],
                read.stepped,
                AppliedPushes(order.next_function, order.next_function, {}),
                prepared,
            )
        finally:
            self._hold(None)

    def forget(self, token: str) -> None:
        """What was read under ``token`` will not be adopted: another server could not read its part."""
        with self._lock:
            is_this = self._ready is not None and self._ready[0].token == token
        if is_this:
            self._hold(None)

    def _hold(self, ready: tuple[ReadOrder, Prepared] | None) -> None:
        with self._lock:
            before, self._ready = self._ready, ready
        if before is not None:
            before[1].close()


@dataclass
class _Collected:
    """What goes into one file, and what a `WriteReport` says beside it."""

    tensors: list[tuple[Piece, torch.Tensor | BlockSource]] = field(default_factory=list)
    values: list[tuple[KeyPath, object]] = field(default_factory=list)
    whole: list[tuple[KeyPath, object]] = field(default_factory=list)

    def add_rows(self, state: StatePiece, name: str, source: torch.Tensor | BlockSource) -> None:
        self.tensors.append((state.piece.entry(name, (state.piece.shape[0], *source.shape[1:])), source))


@dataclass(frozen=True)
class OneValue:
    """A `BlockSource` of rows that are all alike."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: float | complex

    def rows(self, first: int, stop: int) -> torch.Tensor:
        return torch.full((stop - first, *self.shape[1:]), self.value, dtype=self.dtype)
