"""Reading and changing whole variables that live on servers, from any process.

All servers of a job are called in parallel, one message each, a lost one named. Values that they have been asked for
come one after the other, as they are written.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from torchstrat.core.errors import CommunicationTimeoutError, ParameterServerUnavailable, PeerUnavailableError
from torchstrat.distributed.cluster import PARAMETER_SERVER
from torchstrat.parameter_server import phases
from torchstrat.parameter_server.interface import Endpoint, Peer, Task
from torchstrat.parameter_server.messages import (
    COORDINATOR,
    Dropped,
    EditOp,
    InitialOp,
    Push,
    PushReply,
    RepeatedOps,
    RowsRequest,
    Shard,
    ShardEdit,
    ShardKey,
    VariableSpec,
)
from torchstrat.parameter_server.variables.placement import pieces

_Answer = TypeVar("_Answer")


class ServerGroup:
    """Who the servers are at the moment, and how to ask them. Thread-safe.

    A call never goes to another incarnation than the one that was made known by `use`: a server that was started again
    holds fresh values.
    """

    def __init__(self, endpoint: Endpoint, *, timeout_seconds: float) -> None:
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._lost: dict[int, str] = {}
        # `OnServerLoss.attempt`, where a coordinator calls them
        self.attempt: Callable[[Callable[[], object], Callable[[], object]], Any] = lambda call, after_restore: call()

    def asking(self, call: Callable[[], _Answer]) -> _Answer:
        """``call()``, once more where servers had to be restored before or in it; it has to be one that may be
        repeated."""
        answer: _Answer = self.attempt(call, lambda: self.asking(call))
        return answer

    def telling(self, call: Callable[[], None]) -> None:
        """``call()``, which changes what servers hold; nothing where they had to be restored before or in it."""
        self.attempt(call, lambda: None)

    def use(self, peers: Mapping[int, Peer]) -> None:
        """These are the servers from now on. Their former incarnations are not called any more."""
        with self._lock:
            old = [peer for index, peer in self._peers.items() if peers.get(index) != peer]
            self._peers = dict(peers)
            self._lost = {}
        for peer in old:
            self._endpoint.remove_peer(peer)
        for peer in peers.values():
            self._endpoint.add_peer(peer)

    def mark_lost(self, index: int, reason: str) -> None:
        """Fail calls to server ``index`` at once, until `use` names a new one."""
        with self._lock:
            self._lost[index] = reason

    def peers(self) -> dict[int, Peer]:
        with self._lock:
            return dict(self._peers)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `Endpoint.empty`: for what goes to servers, or comes from them."""
        return self._endpoint.empty(shape, dtype)

    def give_back_memory(self) -> None:
        """As `Endpoint.give_back_memory`."""
        self._endpoint.give_back_memory()

    def describe_ways(self) -> dict[int, str]:
        """For people: how calls to each server travel."""
        return {index: self._endpoint.describe_way(peer) for index, peer in sorted(self.peers().items())}

    def ask(
        self, method: str, payloads: Mapping[int, object], *, timeout_seconds: float | None = None
    ) -> dict[int, Any]:
        """Send each server its payload, and wait for all answers. ``timeout_seconds``: None for the group's.

        Raises `ParameterServerUnavailable` naming the server that is gone or did not answer in time. What a handler
        raised is raised here. All answers have arrived, or failed, when this returns or raises.
        """
        futures = {index: self.send(index, method, payload, timeout_seconds) for index, payload in payloads.items()}
        return self.answers(method, futures)

    def answers(self, method: str, futures: Mapping[int, Future[object]]) -> dict[int, object]:
        """Wait for what `send` has sent, to each server at most once. Raises as `ask` does."""
        concurrent.futures.wait(futures.values())
        return {index: self._result(index, method, future) for index, future in futures.items()}

    def ask_all(self, method: str, payload: object = None) -> dict[int, Any]:
        """Send all servers the same."""
        return self.ask(method, dict.fromkeys(self.peers(), payload))

    def send(
        self,
        index: int,
        method: str,
        payload: object,
        timeout_seconds: float | None = None,
        into: Sequence[torch.Tensor] | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> Future[object]:
        """Send one server its payload, without waiting. `answers` waits, and says which server is gone. ``into`` and
        ``on_written``: as `Endpoint.call`."""
        with self._lock:
            peer, lost = self._peers.get(index), self._lost.get(index)
        if peer is None or lost is not None:
            failed: Future[object] = Future()
            failed.set_exception(PeerUnavailableError(lost or "it has not joined yet", peer))
            return failed
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        return self._endpoint.call(peer, method, payload, timeout_seconds=seconds, into=into, on_written=on_written)

    def _result(self, index: int, method: str, future: Future[object]) -> object:
        try:
            return future.result()
        except PeerUnavailableError as error:
            self._raise_unavailable(index, method, error)
        except CommunicationTimeoutError as error:
            self._raise_unavailable(index, method, error)

    def _raise_unavailable(self, index: int, method: str, error: Exception) -> NoReturn:
        task = Task(PARAMETER_SERVER, index)
        raise ParameterServerUnavailable(
            f"parameter server {index} is unavailable ({method}): {error} The variables it held are gone with it. "
            "Start it again (a launcher does that by itself) and restore a checkpoint with ts.Checkpoint(…).restore.",
            task,
        ) from error


class ValuesToCome:
    """One call to each of several servers, whose answers hold the values of shards. Thread-safe.

    Where memory is shared, a server says that it has done what it was asked to do (applied a push) before it writes
    values, and tells from time to time how far it is; otherwise all of that comes with its answer.

    Args:
        wanted: the shards whose values each server was asked for, in the order of its answer.
        places: where these are wanted, in the same order; see `Endpoint.call`, also for None.
        values_in: the values in an answer.
    """

    def __init__(
        self,
        servers: ServerGroup,
        method: str,
        wanted: Mapping[int, Sequence[ShardKey]],
        places: Mapping[int, Sequence[torch.Tensor]] | None,
        values_in: Callable[[Any], Sequence[torch.Tensor]] = list,
    ) -> None:
        self._servers, self._method, self._values_in = servers, method, values_in
        self._where = {key: (server, n) for server, keys in wanted.items() for n, key in enumerate(keys)}
        self._places = places
        self._futures: dict[int, Future[object]] = {}
        self._answers: dict[int, Sequence[torch.Tensor]] = {}
        # Futures keep what they are to call. That must not be this object: it would keep the places, too, until Python
        # looks for cycles.
        self._news = _News()

    def ask(self, payloads: Mapping[int, object], on_sign: Callable[[], None] | None = None) -> None:
        """Send each server its payload. ``on_sign``: called once for each that has done what it was asked to do."""
        self._news.on_sign = on_sign
        for server, payload in payloads.items():
            places = None if self._places is None else self._places.get(server, ())
            told = partial(self._news.written, server)
            future = self._servers.send(server, self._method, payload, into=places, on_written=told)
            self._futures[server] = future
            future.add_done_callback(partial(self._news.answered, server))

    def wait_until_done(self) -> None:
        """Until every server has done what it was asked to do; the values may be on their way.

        Raises:
            ParameterServerUnavailable: one is gone, or did not answer in time.
        """
        told = self._news.count_of
        self._news.wait_for(lambda: all(f.done() or told(s) is not None for s, f in self._futures.items()))
        finished = {server: future for server, future in self._futures.items() if future.done()}
        self._servers.answers(self._method, finished)

    def is_written(self, keys: Sequence[ShardKey]) -> bool:
        """Whether `fetch` would not have to wait."""
        return all(self._is_told(key) or self._future_of(key).done() for key in keys)

    def fetch(self, keys: Sequence[ShardKey]) -> None:
        """Wait until the values of these shards are at their places.

        Raises:
            ParameterServerUnavailable: the server of one is gone, or did not answer in time.
        """
        if not self.is_written(keys):
            self._news.wait_for(lambda: self.is_written(keys))
        for key in keys:
            if self._is_told(key):
                continue
            server, number = self._where[key]
            value = self._answer_of(server)[number]
            assert self._places is not None
            place = self._places[server][number]
            if value.data_ptr() != place.data_ptr():
                place.copy_(value)

    def fetch_all(self) -> None:
        """As `fetch`, of whatever was asked for."""
        self.fetch(list(self._where))

    def _answer_of(self, server: int) -> Sequence[torch.Tensor]:
        if server not in self._answers:
            answers = self._servers.answers(self._method, {server: self._futures[server]})
            self._answers[server] = self._values_in(answers[server])
        return self._answers[server]

    def _is_told(self, key: ShardKey) -> bool:
        server, number = self._where[key]
        return number < (self._news.count_of(server) or 0)

    def _future_of(self, key: ShardKey) -> Future[object]:
        return self._futures[self._where[key][0]]


class _News:
    """What the transport's threads have to say. ``on_sign``: called once for each server that says something."""

    def __init__(self) -> None:
        self.on_sign: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._heard_of: set[int] = set()
        self._written: dict[int, int] = {}

    def written(self, server: int, count: int) -> None:
        with self._changed:
            self._written[server] = count
            self._changed.notify_all()
        self._sign_of(server)

    def answered(self, server: int, _: Future[object]) -> None:
        with self._changed:
            self._changed.notify_all()
        self._sign_of(server)

    def count_of(self, server: int) -> int | None:
        """How many values this server has written; None: it has said nothing but, perhaps, its answer."""
        return self._written.get(server)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(condition)

    def _sign_of(self, server: int) -> None:
        if self.on_sign is not None and server not in self._heard_of:
            self._heard_of.add(server)  # one thread at a time has something to say of a server
            self.on_sign()


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

    def check(self, index: int, parts: Mapping[int, Mapping[str, object]], servers: ServerGroup) -> None:
        """Raise `RepeatedFunctionError` where this push must not be sent, by what servers have applied before."""


class CoordinatorSender:
    """The coordinator repeats nothing, so its pushes need no records."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation

    def next_push(self) -> tuple[int, int, str]:
        return COORDINATOR, 0, self._incarnation

    def check(self, index: int, parts: Mapping[int, Mapping[str, object]], servers: ServerGroup) -> None: ...


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
        self.last_push = (0, 0)
        """Its function, and its index among that one's."""

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

    def repeat(self, spec: VariableSpec, recipe: tuple[InitialOp, ...], seed: int) -> None:
        """Let the servers do this to their values."""
        orders: dict[int, list[RepeatedOps]] = defaultdict(list)
        for number, shard in enumerate(spec.shards):
            orders[shard.server].append(RepeatedOps((spec.number, number), recipe, seed))
        self.servers.ask("ps.repeat", orders)

    def push(self, edits: Iterable[VariableEdit]) -> None:
        self.send_push(edits_by_server(edits))

    def send_push(
        self,
        parts: Mapping[int, Mapping[str, object]],
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
            self.last_push = function, index
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


def edits_by_server(edits: Iterable[VariableEdit]) -> dict[int, dict[str, object]]:
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
        if op == "renorm":
            return [
                (shard.server, ShardEdit((spec.number, number), op, value, ids[where] - shard.start))
                for number, shard, where in split_rows(spec, ids)
            ]
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


# -- after a lost coordinator: what the next one makes under the same numbers it finds as the last one left it ---------

_MOST_UNSEEN_FUNCTIONS = 2**20
"""How far the number of a function that a coordinator has dispatched may be above those that servers have heard of:
functions that push nothing, and the length of its queue, with room to spare."""


def retire_earlier_functions(servers: ServerGroup, next_function: int) -> int:
    """The first number for functions of this coordinator, above all of an earlier one: what those push is refused.

    One of them may be running on a worker, under a number that no server has seen yet. Were it given out again, the
    servers would take one function's pushes for repetitions of the other's.
    """
    servers.ask_all("ps.forget_below", next_function + _MOST_UNSEEN_FUNCTIONS)
    return next_function + _MOST_UNSEEN_FUNCTIONS


def release_others(servers: ServerGroup, variables: Collection[int], optimizers: Collection[int]) -> None:
    """Let servers drop all but these. What has a number of those would be taken for something new that gets it."""
    orders = {}
    for index, catalog in servers.ask_all("ps.catalog").items():
        orders[index] = Dropped(
            tuple(one["number"] for one in catalog["variables"] if one["number"] not in variables),
            tuple(one["number"] for one in catalog["optimizers"] if one["number"] not in optimizers),
        )
    servers.ask("ps.release", orders)
