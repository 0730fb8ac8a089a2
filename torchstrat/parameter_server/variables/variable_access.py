"""Reading and changing whole variables that live on servers, from any process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from torchstrat.parameter_server.messages import (
    COORDINATOR,
    EditOp,
    Push,
    PushReply,
    RowsRequest,
    Shard,
    ShardEdit,
    ShardKey,
    VariableSpec,
)
from torchstrat.parameter_server.variables.placement import pieces
from torchstrat.parameter_server.variables.server_group import ServerGroup
from torchstrat.parameter_server.variables.values_to_come import ValuesToCome
from torchstrat.parameter_server.worker import phases


class VariableEdit(NamedTuple):
    """A change of a whole variable, or of its ``rows``; see `ShardEdit`. ``base``: of one that is not cut."""

    spec: VariableSpec
    op: EditOp
    value: torch.Tensor
    rows: torch.Tensor | None = None
    base: torch.Tensor | None = None


class Sender(Protocol):
    """Names the pushes of a process, so that servers can tell repetitions."""

    def next_push(self) -> tuple[int, int, str]:
        """(function, index, incarnation) of the push that is about to be sent."""

    def check(self, index: int, parts: Mapping[int, Mapping[str, Any]], servers: ServerGroup) -> None:
        """Raise `RepeatedFunctionError` where this push must not be sent, by what servers have applied before."""


class CoordinatorSender:
    """The coordinator repeats nothing, so its pushes need no records."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation

    def next_push(self) -> tuple[int, int, str]:
        return COORDINATOR, 0, self._incarnation

    def check(self, index: int, parts: Mapping[int, Mapping[str, Any]], servers: ServerGroup) -> None: ...


class RowsToCome:
    """Rows that were asked for: ``values`` come to ``rows``."""

    def __init__(self, rows: torch.Tensor, values: ValuesToCome) -> None:
        self._rows, self._values = rows, values

    def wait(self) -> torch.Tensor:
        """The rows ``(n, …)``, on the CPU.

        Raises:
            ParameterServerUnavailable: a server that was asked is gone, or did not answer in time.
        """
        self._values.fetch_all()
        return self._rows


class VariableAccess:
    """``sender()``: on whose behalf the calling thread pushes."""

    def __init__(self, servers: ServerGroup, sender: Callable[[], Sender]) -> None:
        self.servers = servers
        self._sender = sender

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, specs: Sequence[VariableSpec]) -> list[torch.Tensor]:
        """The values of whole variables, on the CPU, each read without tearing; one call per server."""
        wanted = shard_keys(specs)
        answers = self.servers.ask("ps.read", wanted)
        values = {key: value for index, keys in wanted.items() for key, value in zip(keys, answers[index], strict=True)}
        return [assemble(spec, values) for spec in specs]

    def start_reading(self, specs: Sequence[VariableSpec], into: Sequence[torch.Tensor]) -> ValuesToCome:
        """Ask for what `read` returns, without waiting. ``into``: a contiguous tensor per variable, where its value is
        wanted; see `Endpoint.call`, also for what holds when it does not come."""
        wanted = shard_keys(specs)
        values = ValuesToCome(self.servers, "ps.read", wanted, places_by_server(specs, into))
        values.ask(wanted)
        return values

    def read_rows(self, spec: VariableSpec, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``(n, …)`` of one variable. ``ids`` ``(n,)`` int64 on the CPU, sorted, unique and in range."""
        return self.start_reading_rows(spec, ids).wait()

    def start_reading_rows(self, spec: VariableSpec, ids: torch.Tensor) -> RowsToCome:
        """Ask for what `read_rows` returns, without waiting."""
        parts = split_rows(spec, ids)
        rows = self.servers.empty((len(ids), *spec.shape[1:]), spec.dtype)
        keys: dict[int, list[ShardKey]] = defaultdict(list)
        requests: dict[int, list[RowsRequest]] = defaultdict(list)
        places: dict[int, list[torch.Tensor]] = defaultdict(list)
        for number, shard, where in parts:
            keys[shard.server].append((spec.number, number))
            requests[shard.server].append(RowsRequest((spec.number, number), ids[where] - shard.start))
            places[shard.server].append(rows[where])
        values = ValuesToCome(self.servers, "ps.read_rows", keys, places)
        values.ask(requests)
        return RowsToCome(rows, values)

    # -- changing ---------------------------------------------------------------------------------------------------

    def edit(self, spec: VariableSpec, op: EditOp, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Change a variable. ``value`` broadcasts to it; with ``rows`` (ids ``(n,)``) it has shape ``(n, …)``."""
        self.push(edits=[VariableEdit(spec, op, value, rows)])

    def push(self, edits: Iterable[VariableEdit]) -> None:
        self.send_push(edits_by_server(edits))

    def send_push(
        self,
        parts: Mapping[int, Mapping[str, Any]],
        specs: Sequence[VariableSpec] = (),
        into: Sequence[torch.Tensor] | None = None,
        *,
        others: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    ) -> ValuesToCome:
        """One push in parts, one for each server, under one name. It is applied when this returns.

        ``others``: what it does on servers where it changes only what functions have left for steps.
        ``specs``: variables whose values it is to bring; ``into``: where to, see `start_reading`; None: such a push is
        rare, and brings nothing.
        """
        wanted = shard_keys(specs)
        places = None if into is None else places_by_server(specs, into)
        values = ValuesToCome(self.servers, "ps.push", wanted, places, _values_of)
        # One that steps nothing is asked for values all the same.
        if servers := parts.keys() | wanted.keys() | others.keys():
            sender, changed = self._sender(), tuple(parts)
            function, index, incarnation = sender.next_push()
            sender.check(index, parts, self.servers)
            pushes = {
                server: Push(
                    function,
                    index,
                    incarnation,
                    wants=tuple(wanted.get(server, ())),
                    servers=changed if server in parts else (),
                    **(parts.get(server) or others.get(server, {})),
                )
                for server in servers
            }
            values.ask(pushes, _one_has_applied if phases.is_observed() else None)
            values.wait_until_done()
            phases.reached(phases.PUSHED)
        return values


def _values_of(reply: PushReply) -> Sequence[torch.Tensor]:
    return reply.values


def _one_has_applied() -> None:
    phases.reached(phases.PUSHED_TO_ONE)


def shard_keys(specs: Iterable[VariableSpec]) -> dict[int, list[ShardKey]]:
    """The shards of these variables, by server."""
    keys: dict[int, list[ShardKey]] = defaultdict(list)
    for spec in specs:
        for number, shard in enumerate(spec.shards):
            keys[shard.server].append((spec.number, number))
    return keys


def places_by_server(specs: Sequence[VariableSpec], into: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """The parts of ``into``, a tensor per variable, that belong to the shards; in the order of `shard_keys`."""
    places: dict[int, list[torch.Tensor]] = defaultdict(list)
    for spec, whole in zip(specs, into, strict=True):
        for shard, part in zip(spec.shards, pieces(spec, whole), strict=True):
            places[shard.server].append(part)
    return places


def assemble(spec: VariableSpec, values: Mapping[ShardKey, torch.Tensor]) -> torch.Tensor:
    """The whole variable from its shards' values."""
    parts = [values[spec.number, number] for number in range(len(spec.shards))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_rows(spec: VariableSpec, ids: torch.Tensor) -> list[tuple[int, Shard, slice]]:
    """Which part of the sorted ``ids`` lies in which shard: (number of the shard, shard, slice of ids), none empty."""
    if len(spec.shards) == 1:
        return [(0, spec.shards[0], slice(0, len(ids)))] if len(ids) else []
    stops = torch.tensor([shard.stop for shard in spec.shards])
    ends = [0, *torch.searchsorted(ids, stops).tolist()]
    return [
        (number, shard, slice(ends[number], ends[number + 1]))
        for number, shard in enumerate(spec.shards)
        if ends[number] < ends[number + 1]
    ]


def edits_by_server(edits: Iterable[VariableEdit]) -> dict[int, dict[str, Any]]:
    """The parts of a push that makes these."""
    parts: dict[int, dict[str, Any]] = defaultdict(dict)
    for edit in edits:
        for server, of_shard in shard_edits(edit):
            parts[server]["edits"] = (*parts[server].get("edits", ()), of_shard)
    return parts


def shard_edits(edit: VariableEdit) -> list[tuple[int, ShardEdit]]:
    """One edit of a variable as edits of its shards, each with its server."""
    spec, op, value, rows, base = edit
    value = value.detach().cpu()
    if rows is not None:
        ids, order = torch.sort(rows.cpu().to(torch.int64), stable=True)
        value = value.expand(len(ids), *spec.shape[1:])[order]
        return [
            (shard.server, ShardEdit((spec.number, number), op, value[where], ids[where] - shard.start))
            for number, shard, where in split_rows(spec, ids)
        ]
    if len(spec.shards) == 1:
        base = None if base is None else base.cpu()
        return [(spec.shards[0].server, ShardEdit((spec.number, 0), op, value, None, base))]
    per_row = value.dim() == len(spec.shape) and value.shape[0] == spec.shape[0]
    parts = pieces(spec, value) if per_row else [value] * len(spec.shards)
    return [
        (shard.server, ShardEdit((spec.number, number), op, part))
        for number, (shard, part) in enumerate(zip(spec.shards, parts, strict=True))
    ]
