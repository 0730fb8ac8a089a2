"""A server writes its own shards into a checkpoint, and reads them from one. Tables never pass through the coordinator.

Restoring has two steps, so that a damaged file changes no server: all of them read, and hold what they have read ready;
then all adopt it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path as Folder
from typing import Any

import torch

from torchstrat.checkpoint.files import read, write_part
from torchstrat.checkpoint.pieces import Path, Piece, goes_by_rows
from torchstrat.checkpoint.stored import open_checkpoint
from torchstrat.errors import InvalidArgumentError
from torchstrat.parameter_server.messages import AppliedPushes, ShardKey, Snapshot, StateOfShard
from torchstrat.parameter_server.server.store import VariableStore
from torchstrat.parameter_server.variables.checkpoint_orders import (
    AdoptOrder,
    ReadOrder,
    StatePiece,
    WriteOrder,
    WriteReport,
)


class CheckpointShards:
    """Thread-safe."""

    def __init__(self, store: VariableStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._ready: tuple[str, Snapshot] | None = None

    # -- writing ----------------------------------------------------------------------------------------------------

    def write(self, order: WriteOrder) -> WriteReport:
        """Write what the order names. The values, states and records are of one moment, between two pushes.

        Takes memory for a copy of what this server holds; pushes wait while it is made, not while it is written.
        Raises `InvalidArgumentError` where the folder cannot be seen or written to from here.
        """
        folder = self._visible(order.folder)
        found = self._untouched(order) if order.fill else self._collected(order)
        try:
            part = write_part(folder, order.number, found.tensors, found.values)
        except OSError as error:
            raise InvalidArgumentError(
                f"{self._store.owner} cannot write its part of a checkpoint to {folder}: {error}"
            ) from error
        return WriteReport(part, tuple(found.whole), tuple(found.without_state), found.applied)

    def _collected(self, order: WriteOrder) -> _Collected:
        snapshot = self._store.snapshot()
        found = _Collected(snapshot.applied)
        found.tensors += [(one.piece, _held(snapshot, one.key, self._store.owner)) for one in order.values]
        for one in order.states:
            shard = _held(snapshot, one.key, self._store.owner)
            state = snapshot.states.get(one.optimizer, {}).get(one.key)
            if not state:
                found.without_state.append(one)
            for name, value in (state or {}).items():
                path = (*one.piece.path, name)
                if one.cut and goes_by_rows(value, len(shard), tuple(shard.shape)):
                    found.add_rows(one, name, value)
                elif one.cut:
                    found.whole.append((path, value))
                elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
                    found.tensors.append((Piece(path, tuple(value.shape)), value))
                else:
                    found.values.append((path, value))
        return found

    def _untouched(self, order: WriteOrder) -> _Collected:
        found = _Collected(None)
        for one in order.states:
            for name, value in self._store.untouched_state(one.optimizer, one.key).items():
                found.add_rows(one, name, value)
        return found

    def _visible(self, name: str) -> Folder:
        folder = Folder(name)
        if not folder.is_dir():
            raise InvalidArgumentError(
                f"{self._store.owner} does not see {folder}. The path of a checkpoint must be on a file system that "
                "the coordinator and all parameter servers share, under the same name."
            )
        return folder

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, order: ReadOrder) -> None:
        """Read what the order names, and hold it ready. Nothing changes.

        Raises `InvalidArgumentError` where the folder cannot be seen from here, or a file is damaged.
        """
        stored = open_checkpoint(self._visible(order.folder))
        wanted: list[tuple[Piece, int | None]] = [
            (one.piece, self._store.shard_rows(one.key) if one.piece.shape else None) for one in order.values
        ]
        wanted += [(one.piece, one.rows) for one in order.states]
        found = read(stored, wanted)
        states: dict[int, dict[ShardKey, StateOfShard]] = {number: defaultdict(dict) for number in order.optimizers}
        for entry, value in zip(order.states, found[len(order.values) :], strict=True):
            states[entry.optimizer][entry.key][entry.name] = value
        values = {one.key: value for one, value in zip(order.values, found, strict=False)}
        ready = Snapshot(values, {number: dict(of_shards) for number, of_shards in states.items()}, None)
        with self._lock:
            self._ready = order.token, ready

    def adopt(self, order: AdoptOrder) -> None:
        """Replace values, states and records by what was read, in one cut.

        Records of the job that wrote the checkpoint are not put back: functions are numbered by the coordinator that
        schedules them, none of this one's is under way, and none will be repeated.
        """
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is None or ready[0] != order.token:
            raise InvalidArgumentError(
                f"{self._store.owner} has not read the checkpoint that it is to adopt; restore it again."
            )
        applied = AppliedPushes(order.next_function, order.next_function, {})
        self._store.restore(replace(ready[1], applied=applied))


@dataclass
class _Collected:
    """What goes into one file, and what a `WriteReport` says beside it."""

    applied: AppliedPushes | None
    tensors: list[tuple[Piece, torch.Tensor]] = field(default_factory=list)
    values: list[tuple[Path, Any]] = field(default_factory=list)
    whole: list[tuple[Path, Any]] = field(default_factory=list)
    without_state: list[StatePiece] = field(default_factory=list)

    def add_rows(self, state: StatePiece, name: str, value: torch.Tensor) -> None:
        self.tensors.append((state.piece.entry(name, (state.piece.shape[0], *value.shape[1:])), value))


def _held(snapshot: Snapshot, key: ShardKey, owner: str) -> torch.Tensor:
    if key not in snapshot.values:
        raise InvalidArgumentError(
            f"{owner} does not hold shard {key[1]} of variable number {key[0]}, which is to be saved; after a restart, "
            "restore a checkpoint first."
        )
    return snapshot.values[key]
