"""Rows of tables for the lookups of one worker: read when they are needed, or asked for ahead of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from torchstrat.core.errors import WrongTypeError
from torchstrat.parameter_server.interface import Peer
from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.variables.edits import put_rows
from torchstrat.parameter_server.variables.remote_access import RowsToCome, VariableAccess
from torchstrat.parameter_server.variables.sharded_indexing import ShardIndexError

ROWS_PER_ID = 64
"""Rows of a table for each id of a batch, up to which marks are faster than sorting. 26,624 ids of 1,000,000 rows: 0.35
ms instead of 1.3; looking through the marks takes 0.3 µs per 1,000 rows, sorting 50 µs per 1,000 ids."""


class UniqueIds:
    """For one thread. Keeps 9 bytes for each row of the largest table that was small enough."""

    def __init__(self) -> None:
        # Of NumPy: a tensor made in inference mode could not be written to outside of it.
        self._marks = np.zeros(0, np.bool_)
        self._places = np.zeros(0, np.int64)

    def of(self, spec: VariableSpec, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``ids`` of any shape, on any device → ``(n,)`` int64 on the CPU, sorted, each once; and where each of ``ids``
        is among them, int64 in their shape and on their device.

        Raises:
            ShardIndexError: an id is not in the table (an IndexError, and a ValueError).
            WrongTypeError: ids that are no int32 or int64, which PyTorch's own lookups refuse, too.
        """
        if ids.dtype is not torch.int64 and ids.dtype is not torch.int32:
            raise WrongTypeError(
                f"the ids of a lookup in table {spec.name} are {ids.dtype}; torch.int64 or torch.int32 is needed. "
                "Convert them first: ids.long()."
            )
        if ids.device.type == "cpu" and 0 < spec.shape[0] <= ROWS_PER_ID * ids.numel():
            lowest, highest = torch.aminmax(ids)
            _check(spec, int(lowest), int(highest))
            return self._by_marks(spec.shape[0], ids)
        unique, places = torch.unique(ids, return_inverse=True)
        unique = unique.to("cpu", torch.int64)
        if len(unique):
            _check(spec, int(unique[0]), int(unique[-1]))
        return unique, places

    def _by_marks(self, rows: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._marks) < rows:
            self._marks, self._places = np.zeros(rows, np.bool_), np.empty(rows, np.int64)
        marks, places, flat = self._marks[:rows], self._places, ids.reshape(-1).numpy()
        marks[flat] = True
        unique = np.flatnonzero(marks)
        marks[unique] = False
        places[unique] = np.arange(len(unique))
        return torch.from_numpy(unique), torch.from_numpy(places[flat]).view(ids.shape)


def _check(spec: VariableSpec, lowest: int, highest: int) -> None:
    if lowest < 0 or highest >= spec.shape[0]:
        wrong = lowest if lowest < 0 else highest
        raise ShardIndexError(
            f"id {wrong} is not in table {spec.name}, which has rows 0 to {spec.shape[0] - 1}; look up ids in that "
            "range, or make the table larger."
        )


LIMIT_BYTES = 256 << 20
"""Of rows that were asked for ahead and not taken yet."""


class Rows(NamedTuple):
    """``ids`` ``(n,)`` int64 on the CPU, sorted and unique; ``places``: where each of the ids that were looked up is
    among them, in their shape and on their device; ``values`` ``(n, …)`` on the CPU."""

    ids: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor


@dataclass(eq=False)
class _Ahead:
    """One request that no lookup has taken yet."""

    variable: int
    given: torch.Tensor
    """The ids as they were given, in a copy."""
    ids: torch.Tensor
    places: torch.Tensor
    rows: RowsToCome
    servers: Mapping[int, Peer]
    """Who was asked. After a loss there are others, with other values."""
    size_bytes: int
    is_of_this_function: bool = True

    def is_of(self, ids: torch.Tensor) -> bool:
        given = self.given
        return given.device == ids.device and given.dtype == ids.dtype and torch.equal(given, ids)


class TableRows:
    """On any thread, one at a time."""

    def __init__(self, access: VariableAccess, limit_bytes: int = LIMIT_BYTES) -> None:
        self._access = access
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()  # functions may start threads, and backward has some of its own
        self._unique = UniqueIds()
        self.ahead: list[_Ahead] = []

    def begin_function(self, *, rested: bool) -> None:
        """Where there is anything `ahead`. ``rested``: nothing that was known before may be used any more. Otherwise
        what was asked for in the function before this one still may."""
        with self._lock:
            self.ahead = [] if rested else [one for one in self.ahead if one.is_of_this_function]
            for one in self.ahead:
                one.is_of_this_function = False

    def forget(self, numbers: Collection[int]) -> None:
        """Of the rows that were asked for, those of these variables: they are gone."""
        with self._lock:
            self.ahead = [one for one in self.ahead if one.variable not in numbers]

    def prefetch(self, spec: VariableSpec, ids: torch.Tensor) -> None:
        """Ask for the rows of these ids, for one later `read`. Does not wait.

        Raises:
            ShardIndexError, WrongTypeError: as `UniqueIds.of`; nothing was asked for.
        """
        with self._lock, torch.inference_mode(False):  # a later lookup may be one that autograd sees
            self._prefetch(spec, ids.detach().clone())

    def _prefetch(self, spec: VariableSpec, given: torch.Tensor) -> None:
        unique, places = self._unique.of(spec, given)
        size_bytes = len(unique) * math.prod(spec.shape[1:]) * spec.dtype.itemsize
        if not 0 < size_bytes <= self._limit_bytes:
            return
        while sum(one.size_bytes for one in self.ahead) + size_bytes > self._limit_bytes:
            del self.ahead[0]
        servers = self._access.servers.peers()
        rows = self._access.start_reading_rows(spec, unique)
        self.ahead.append(_Ahead(spec.number, given, unique, places, rows, servers, size_bytes))

    def read(
        self, spec: VariableSpec, ids: torch.Tensor, *, fresh: bool = False, whole: torch.Tensor | None = None
    ) -> Rows:
        """The rows of these ids, of any shape, on any device.

        ``fresh``: as they are now, whatever was asked for ahead. ``whole``: all rows; nobody is asked.

        Raises:
            ShardIndexError, WrongTypeError: as `UniqueIds.of`.
            ParameterServerUnavailable: a server is gone, or has gone since it was asked.
        """
        with self._lock:
            if whole is not None:
                unique, places = self._unique.of(spec, ids.detach())
                return Rows(unique, places, whole.index_select(0, unique.to(whole.device)).cpu())
            return self._read(spec, ids.detach(), fresh)

    def _read(self, spec: VariableSpec, ids: torch.Tensor, fresh: bool) -> Rows:
        known = [] if fresh else self._known(spec)
        for one in known:
            if one.is_of(ids):
                self.ahead.remove(one)
                return Rows(one.ids, one.places, one.rows.wait())
        unique, places = self._unique.of(spec, ids)
        found = [(one, _find(one.ids, unique)) for one in known]
        most = max(found, key=lambda each: len(each[1].wanted), default=None)
        if most is None or not len(most[1].wanted):
            return Rows(unique, places, self._access.read_rows(spec, unique))
        one, common = most
        self.ahead.remove(one)
        rest = self._access.start_reading_rows(spec, unique[common.others])
        values = torch.empty((len(unique), *spec.shape[1:]), dtype=spec.dtype)
        put_rows(values, common.wanted, one.rows.wait().index_select(0, common.there))
        put_rows(values, common.others, rest.wait())
        return Rows(unique, places, values)

    def _known(self, spec: VariableSpec) -> list[_Ahead]:
        if not self.ahead:
            return []
        servers = self._access.servers.peers()
        self.ahead = [one for one in self.ahead if one.servers == servers]
        return [one for one in self.ahead if one.variable == spec.number]


class _Common(NamedTuple):
    wanted: torch.Tensor
    """Which of the ids that are wanted are there: their places."""
    there: torch.Tensor
    """Where those are."""
    others: torch.Tensor
    """Which of the ids that are wanted are not."""


def _find(there: torch.Tensor, wanted: torch.Tensor) -> _Common:
    """Both sorted and unique, ``there`` not empty."""
    places = torch.searchsorted(there, wanted).clamp_max_(len(there) - 1)
    is_there = there[places] == wanted
    return _Common(is_there.nonzero().flatten(), places[is_there], is_there.logical_not().nonzero().flatten())
