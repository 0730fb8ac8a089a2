"""The coordinator's part in checkpoints of what lives on parameter servers: it gives orders, and checks the outcome.

Saving: dispatching pauses until no function is half-way, all servers mark what they hold, and dispatching goes on; that
is one moment across all servers. Then every server writes its own shards as they were then. If a server or this process
dies in between, nothing of it appears; a mark that nobody asks for any more goes with the next one, or with the job.

Restoring: nothing runs, then all servers read, then all adopt. Servers that were started again and hold nothing get
their variables and optimizers first. Only when all of them have adopted do functions run again, on the same workers.

Records of applied pushes are saved, each server's in one cut with its values. They are not put back: they are keyed by
the numbers of functions of the job that wrote them. In another job these numbers mean other functions. In the same job
all functions that were scheduled before have ended, or were cancelled because a server was lost, and their numbers are
not used again; what a late process would still push under them is refused.
"""

from __future__ import annotations

import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from torchstrat.checkpoint.optimizer_item import want_of_entry
from torchstrat.checkpoint.pieces import KeyPath, Piece
from torchstrat.checkpoint.remote import RemoteSlot, RemoteState, RemoteVariable, ServersWritten
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.variable.variable import Variable, storage_of
from torchstrat.parameter_server.messages import (
    AdoptOrder,
    CutReport,
    ReadOrder,
    ShardPiece,
    StateEntry,
    StatePiece,
    VariableSpec,
    WriteOrder,
    WriteReport,
)
from torchstrat.parameter_server.variable_home import RemoteStorage
from torchstrat.parameter_server.variables.coordinator_state import CoordinatorState

if TYPE_CHECKING:
    from torchstrat.checkpoint.files import Stored, WrittenPart
    from torchstrat.parameter_server.dispatcher import Dispatcher
    from torchstrat.parameter_server.job import Job


_WRITE_SECONDS = 3600.0
"""For one server to write its part. A server that dies is noticed long before."""

_Result = TypeVar("_Result")


class TakesBack(Protocol):
    """See `Servers.restoring`."""

    def restoring(
        self, objects: Mapping[str, object], restore: Callable[[bool], _Result], *, whole: bool
    ) -> _Result: ...


class ServerCheckpoint:
    """The servers of one open strategy, as a checkpoint sees them; see `Servers`."""

    def __init__(self, job: Job, dispatcher: Dispatcher) -> None:
        self._job, self._dispatcher = job, dispatcher
        self._takes_back: TakesBack | None = None

    def leave_losses_to(self, takes_back: TakesBack) -> None:
        """From now on lost servers are taken back by it, and by restores of all that it would restore."""
        self._takes_back = takes_back

    # -- what is where ----------------------------------------------------------------------------------------------

    def spec_of(self, value: object) -> VariableSpec | None:
        if isinstance(value, Variable):
            storage = storage_of(value)
            is_ours = isinstance(storage, RemoteStorage) and self._job.holds(storage.spec)
            return storage.spec if isinstance(storage, RemoteStorage) and is_ours else None
        return self._job.variables.spec_of(value) if isinstance(value, torch.Tensor) else None

    def number_of(self, optimizer: Optimizer) -> int | None:
        return self._job.optimizer_number(optimizer)

    def push_options(self, optimizer: Optimizer) -> None:
        self._job.push_options(optimizer)

    # -- random numbers ---------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        ended = self._dispatcher.ended_functions
        return {"seed": self._job.seed, "functions": ended + self._job.functions_elsewhere}

    def load_counters(self, state: Mapping[str, int]) -> None:
        self._job.seed = state["seed"]
        self._job.functions_elsewhere = state["functions"] - self._dispatcher.next_function

    # -- saving -----------------------------------------------------------------------------------------------------

    def prepare_to_save(self) -> None:
        self._job.commit()

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._dispatcher.paused(self._job.timeout_seconds, "saving a checkpoint"):
            self._job.pull_options(self._job.optimizers())
            yield

    def begin(self) -> JobCut:
        token = uuid.uuid4().hex
        try:
            return JobCut(self._job, token, self._job.servers.ask_all("ps.begin_checkpoint", token))
        except BaseException:
            _end(self._job, token)
            raise

    # -- restoring --------------------------------------------------------------------------------------------------

    def prepare_to_restore(self) -> None:
        self._job.variables.place_new()

    def restoring(self, objects: Mapping[str, object], restore: Callable[[bool], _Result], *, whole: bool) -> _Result:
        if self._takes_back is None:
            return restore(True)
        return self._takes_back.restoring(objects, restore, whole=whole)

    def restore(
        self,
        stored: Stored,
        slots: Sequence[RemoteSlot],
        states: Sequence[tuple[RemoteState, tuple[KeyPath, ...]]],
        *,
        whole: bool,
        takes_back: bool,
    ) -> ServersRestoring:
        self._dispatcher.wait(self._job.timeout_seconds)
        slots = list({slot.spec.number: slot for slot in slots}.values())  # one of a variable's names is enough
        if takes_back:
            started_again = self._job.readmit_servers()
        else:
            self._dispatcher.require_servers()
            started_again = set()
        covered = {slot.spec.number for slot in slots}
        stepped = {(state.optimizer, state.spec.number) for state, _ in states}
        lost = self._job.create_missing(covered, started_again)
        _warn_of_lost(lost, stored.folder)
        token = uuid.uuid4().hex
        orders = self._read_orders(stored, token, slots, states, tuple(sorted(stepped)))
        try:
            self._job.servers.ask("ps.read_checkpoint", orders)
        except BaseException:
            _end(self._job, token)
            raise
        return ServersRestoring(self._job, self._dispatcher, token, [slot.spec for slot in slots], whole=whole)

    def _read_orders(
        self,
        stored: Stored,
        token: str,
        slots: Sequence[RemoteSlot],
        states: Sequence[tuple[RemoteState, tuple[KeyPath, ...]]],
        stepped: tuple[tuple[int, int], ...],
    ) -> dict[int, ReadOrder]:
        values = {
            server: [ShardPiece(one.key, stored.place_of(one.piece)) for one in of_server]
            for server, (of_server, _) in _by_server(slots, ()).items()
        }
        entries: dict[int, list[StateEntry]] = defaultdict(list)
        for state, paths in states:
            for number, shard in enumerate(state.spec.shards):
                rows = shard.stop - shard.start if state.spec.shape else None
                for path in paths:
                    piece, wanted = want_of_entry(stored, path, state.piece.part(shard.start), rows)
                    key = state.spec.number, number
                    entry = StateEntry(state.optimizer, key, str(path[-1]), stored.place_of(piece), wanted)
                    entries[shard.server].append(entry)
        folder = str(stored.folder)
        return {
            server: ReadOrder(folder, token, tuple(values.get(server, ())), tuple(entries[server]), stepped)
            for server in self._job.server_peers()
        }


class JobCut:
    """See `ServerCut`."""

    def __init__(self, job: Job, token: str, reports: Mapping[int, CutReport]) -> None:
        self._job = job
        self._token = token
        self._reports = reports

    def write(
        self, folder: Path, slots: Sequence[RemoteSlot], states: Sequence[RemoteState], first_number: int
    ) -> ServersWritten:
        reports: dict[int, WriteReport] = self._job.servers.ask(
            "ps.write_checkpoint", self._orders(folder, slots, states, first_number), timeout_seconds=_WRITE_SECONDS
        )
        whole: dict[KeyPath, object] = {}
        for report in reports.values():
            _require_visible(folder, report.part, self._job)
            for path, value in report.whole:
                whole.setdefault(path, value)
        tensors = {path: value for path, value in whole.items() if isinstance(value, torch.Tensor)}
        return ServersWritten(
            [report.part for report in reports.values()],
            [(Piece(path, tuple(value.shape)), value) for path, value in tensors.items()],
            [(path, value) for path, value in whole.items() if path not in tensors],
            {str(server): asdict(report.applied) for server, report in self._reports.items()},
        )

    def _orders(
        self, folder: Path, slots: Sequence[RemoteSlot], states: Sequence[RemoteState], first_number: int
    ) -> dict[int, WriteOrder]:
        by_server = _by_server(slots, states)
        stepped = {
            (one.optimizer, one.key[0])
            for server, (_, of_server) in by_server.items()
            for one in of_server
            if (one.optimizer, one.key) in self._reports[server].with_state
        }
        orders = {}
        for server, (values, of_server) in by_server.items():
            there = [one for one in of_server if (one.optimizer, one.key) in self._reports[server].with_state]
            fills = [one for one in of_server if one not in there and (one.optimizer, one.key[0]) in stepped]
            number = first_number + server
            orders[server] = WriteOrder(str(folder), number, self._token, tuple(values), tuple(there), tuple(fills))
        return orders

    def end(self) -> None:
        _end(self._job, self._token)


def _end(job: Job, token: str) -> None:
    for server in job.server_peers():
        job.servers.send(server, "ps.end_checkpoint", token)


def _by_server(
    slots: Iterable[RemoteSlot], states: Iterable[RemoteState]
) -> dict[int, tuple[list[ShardPiece], list[StatePiece]]]:
    orders: dict[int, tuple[list[ShardPiece], list[StatePiece]]] = defaultdict(lambda: ([], []))
    for slot in slots:
        for number, shard in enumerate(slot.spec.shards):
            piece = slot.piece.part(shard.start)
            orders[shard.server][0].append(ShardPiece((slot.spec.number, number), piece))
    for state in states:
        cut = state.spec.shape != state.piece.shape or len(state.spec.shards) > 1
        for number, shard in enumerate(state.spec.shards):
            piece = state.piece.part(shard.start)
            orders[shard.server][1].append(StatePiece(state.optimizer, (state.spec.number, number), piece, cut))
    return orders


class ServersRestoring:
    """See `Restoring`."""

    def __init__(
        self, job: Job, dispatcher: Dispatcher, token: str, specs: Sequence[RemoteVariable], *, whole: bool
    ) -> None:
        self._job = job
        self._dispatcher = dispatcher
        self._token = token
        self._specs = specs
        self._whole = whole

    def adopt(self) -> None:
        self._job.servers.ask_all("ps.adopt_checkpoint", AdoptOrder(self._token, self._dispatcher.next_function))
        if self._whole:
            self._job.take_over_no_more()
        self._job.pull_variables(self._specs)
        for optimizer in self._job.optimizers():
            CoordinatorState.expire(optimizer)
        self._dispatcher.servers_restored()


def _require_visible(folder: Path, part: WrittenPart, job: Job) -> None:
    for name, check in part.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != check.bytes:
            raise InvalidArgumentError(
                f"{file}, which a parameter server has written, is not to be seen by the coordinator. The path of a "
                "checkpoint must be on a file system that the coordinator and all parameter servers share "
                f"({', '.join(map(str, job.server_peers().values()))})."
            )


def _warn_of_lost(names: Sequence[str], folder: Path) -> None:
    if names:
        warnings.warn(
            f"{', '.join(names)}: lost with the parameter server, and not restored from {folder}. They begin "
            "again, parameters with the values that the coordinator read last, others with zeros. Name them in "
            "ts.Checkpoint(…) to have them saved.",
            stacklevel=4,
        )
