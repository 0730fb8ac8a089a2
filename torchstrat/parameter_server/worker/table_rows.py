"""Rows of tables for the lookups of one worker: read when they are needed, or asked for ahead of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.tasks import Peer
from torchstrat.parameter_server.variables.edits import put_rows
from torchstrat.parameter_server.variables.remote_access import RowsToCome, VariableAccess
from torchstrat.parameter_server.worker.unique_ids import UniqueIds

LIMIT_BYTES = 256 << 20
"""Of rows that were asked for ahead and not taken yet."""


class Rows(NamedTuple):
    """``ids`` ``(n,)`` int64 on the CPU, sorted and unique; ``places``: where each of the ids that were looked up is
    among them, in their shape and on their device; ``values`` ``(n, …)`` on the CPU."""

    ids: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
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
    function: int
    size_bytes: int

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
        self._ahead: list[_Ahead] = []
        self._function = 0

    def begin_function(self, *, rested: bool) -> None:
        """``rested``: nothing that was known before may be used any more. Otherwise what was asked for in the function
        before this one still may."""
        with self._lock:
            self._function += 1
            if self._ahead:
                self._ahead = [] if rested else [one for one in self._ahead if one.function >= self._function - 1]

    def forget(self, numbers: Collection[int]) -> None:
        """Of the rows that were asked for, those of these variables: they are gone."""
        with self._lock:
            self._ahead = [one for one in self._ahead if one.variable not in numbers]

    def prefetch(self, spec: VariableSpec, ids: torch.Tensor) -> None:
        """Ask for the rows of these ids, for one later `read`. Does not wait.

        Raises:
            InvalidArgumentError: an id is not in the table; nothing was asked for.
        """
        with self._lock, torch.inference_mode(False):  # a later lookup may be one that autograd sees
            self._prefetch(spec, ids.detach().clone())

    def _prefetch(self, spec: VariableSpec, given: torch.Tensor) -> None:
        unique, places = self._unique.of(spec, given)
        size_bytes = len(unique) * math.prod(spec.shape[1:]) * spec.dtype.itemsize
        if not 0 < size_bytes <= self._limit_bytes:
            return
        while sum(one.size_bytes for one in self._ahead) + size_bytes > self._limit_bytes:
            del self._ahead[0]
        servers = self._access.servers.peers()
        rows = self._access.start_reading_rows(spec, unique)
        self._ahead.append(_Ahead(spec.number, given, unique, places, rows, servers, self._function, size_bytes))

    def read(
        self, spec: VariableSpec, ids: torch.Tensor, *, fresh: bool = False, whole: torch.Tensor | None = None
    ) -> Rows:
        """The rows of these ids, of any shape, on any device.

        ``fresh``: as they are now, whatever was asked for ahead. ``whole``: all rows; nobody is asked.

        Raises:
            InvalidArgumentError: an id is not in the table.
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
                self._ahead.remove(one)
                return Rows(one.ids, one.places, one.rows.wait())
        unique, places = self._unique.of(spec, ids)
        found = [(one, _find(one.ids, unique)) for one in known]
        most = max(found, key=lambda each: len(each[1].wanted), default=None)
        if most is None or not len(most[1].wanted):
            return Rows(unique, places, self._access.read_rows(spec, unique))
        one, common = most
        self._ahead.remove(one)
        rest = self._access.start_reading_rows(spec, unique[common.others])
        values = torch.empty((len(unique), *spec.shape[1:]), dtype=spec.dtype)
        put_rows(values, common.wanted, one.rows.wait().index_select(0, common.there))
        put_rows(values, common.others, rest.wait())
        return Rows(unique, places, values)

    def _known(self, spec: VariableSpec) -> list[_Ahead]:
        if not self._ahead:
            return []
        servers = self._access.servers.peers()
        self._ahead = [one for one in self._ahead if one.servers == servers]
        return [one for one in self._ahead if one.variable == spec.number]


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
