"""What the coordinator has sent to one process of a worker, and the batches made of what is new to it.

`WorkerCalls` are the dispatcher's calls to workers, and what they answer and report, as news for the scheduler. Without
the dispatcher's lock: what comes back is on a thread of the transport, or on the caller's if it failed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core._torch_private import own_buffers, own_parameters
from torchstrat.core.errors import (
    CommunicationError,
    InvalidArgumentError,
    NotSendableError,
    ParameterServerUnavailable,
    TorchstratError,
    WrongTypeError,
)
from torchstrat.core.reachable import HELPER_TYPES
from torchstrat.core.variable.variable import Variable
from torchstrat.core.variables import VariableRegistry
from torchstrat.distributed.cluster import PARAMETER_SERVER
from torchstrat.parameter_server.dispatch import (
    Arguments,
    Batch,
    Gradients,
    Modes,
    Options,
    Recalled,
    Report,
    ResourceSpec,
    ServerGone,
)
from torchstrat.parameter_server.interface import Peer, Task
from torchstrat.parameter_server.job import Job
from torchstrat.parameter_server.leases.dataset import LeasedDataset
from torchstrat.parameter_server.leases.lease import Tenure
from torchstrat.parameter_server.messages import Token
from torchstrat.parameter_server.remote_value import PerWorkerIterator, PerWorkerValues, RemoteValue, numbers_of
from torchstrat.parameter_server.scheduler_events import (
    MAX_ATTEMPTS,
    Event,
    Failed,
    Finished,
    HandedBack,
    WorkerLeaves,
    WorkerLost,
)
from torchstrat.parameter_server.serialization.captured_objects import Increment
from torchstrat.parameter_server.serialization.functions import unpack_exception
from torchstrat.parameter_server.serialization.pack_cache import KEPT_CODES, Packed, Recent
from torchstrat.parameter_server.serialization.plain import are_equal
from torchstrat.parameter_server.transport.requests import pack


@dataclass(slots=True)
class Work:
    """One scheduled function, as it will be sent."""

    code: bytes
    packed_code: Packed
    arguments: Packed
    options: Options
    modes: Modes
    seed: int
    value: RemoteValue[object]
    leases: tuple[Tenure, ...] = ()
    max_attempts: int | None = MAX_ATTEMPTS
    timeout_seconds: float | None = None


class GradientsOfJob:
    """Which gradients there are, by what the functions did that ended last. For the dispatcher, with its lock."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, str, str | None]] = {}
        """By parameter, the last change: its number, the incarnation that made it, and what there is since."""
        self._changes = 0

    def heard(self, of: KnownWorker, changes: Gradients) -> None:
        if changes:
            self._changes += 1
            self._last.update({number: (self._changes, of.peer.incarnation, kind) for number, kind in changes})

    def forget(self, gone: Iterable[Token]) -> None:
        """The program has dropped these."""
        for token in gone:
            if token[0] == "parameter":
                self._last.pop(token[1], None)

    def news_for(self, known: KnownWorker) -> Gradients:
        """What others have changed, which it is taken to know from now on."""
        told, known.gradient_changes = known.gradient_changes, self._changes
        if told == self._changes:  # as for most batches
            return ()
        own = known.peer.incarnation
        return tuple((number, kind) for number, (change, by, kind) in self._last.items() if change > told and by != own)


class KnownWorker:
    """One incarnation of a worker. For the dispatcher, with its lock."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.version = 0
        """Of the catalog of captured objects."""
        self.stops = 0
        """How often it has stopped at a function that did not return, as far as its reports are here."""
        self.left: tuple[int, ...] = ()
        """Parameters of which it holds gradients that no step has used, as far as its reports are here."""
        self.gradient_changes = 0
        """How many changes of the job's gradients it knows, see `GradientsOfJob`."""
        self.waiting: list[Batch] = []
        """For the answer to `telling`, before they are sent: a worker can bring two batches into order, not three."""
        self.telling: int | None = None
        """The number of a batch without functions that has no answer yet."""
        self._gone: list[Token] = []  # that it has not been told of
        self._next_number = 0
        self._open: dict[int, tuple[int, ...]] = {}  # batches without an answer: number → functions
        self._codes: Recent[frozenset[Token]] = Recent(KEPT_CODES)
        self._resources: set[int] = set()
        self._options: Options | None = None
        self._modes: Modes | None = None
        self._servers: Mapping[int, Peer] | None = None

    def batch(
        self,
        works: Mapping[int, Work],
        functions: tuple[int, ...],
        *,
        rested: bool,
        increments: tuple[Increment, ...],
        resources: Callable[[set[int]], list[ResourceSpec]],
        servers: Mapping[int, Peer],
        is_shared: bool,
        left_elsewhere: tuple[int, ...],
        accumulates: bool,
        gradients: Gradients,
        is_repeated: bool,
    ) -> Batch:
        """The next message: ``functions`` of ``works``, with what this worker does not have yet.

        ``resources``: numbers of per-worker values → the specs needed for them, those of their sources first.
        """
        codes: dict[bytes, tuple[int, Packed]] = {}
        settings: list[tuple[int, Options | None, Modes | None]] = []
        per_worker: set[int] = set()
        entries: list[tuple[int, int, Arguments, int]] = []
        for place, function in enumerate(functions):
            work = works[function]
            index = codes.get(work.code)
            if index is None:
                index = codes[work.code] = (len(codes), work.packed_code)
                _collect_per_worker(work.packed_code, per_worker)
            if work.options is not self._options or work.modes is not self._modes:
                self._set(place, work.options, work.modes, settings)
            packed = work.arguments
            arguments: Arguments = packed.blob
            if packed.tokens or packed.tensors:
                _collect_per_worker(packed, per_worker)
                arguments = packed.blob, packed.tensors, packed.buffers, packed.tokens
            entries.append((function, index[0], arguments, work.seed))
        gone, self._gone = tuple(self._gone), []
        number, self._next_number = self._next_number, self._next_number + 1
        self._open[number] = functions
        return Batch(
            number,
            self.stops,
            rested,
            tuple(entries),
            tuple(self._new_code(digest, packed) for digest, (_, packed) in codes.items()),
            tuple(settings),
            increments,
            self._new_resources(resources(per_worker)) if per_worker else (),
            self._new_servers(servers),
            is_shared,
            left_elsewhere,
            accumulates,
            gradients,
            gone,
            is_repeated,
        )

    def release(self, tokens: Collection[Token]) -> None:
        """The program has dropped these: the next batch tells of it."""
        self._gone += tokens
        self._codes.drop(lambda named: not named.isdisjoint(tokens))
        self._resources.difference_update(numbers_of(tokens))

    @property
    def is_to_be_told(self) -> bool:
        return bool(self._gone)

    def has_been_told(self, number: int) -> list[Batch]:
        """A batch is over: those that waited for it."""
        if number != self.telling:
            return []
        waiting, self.waiting, self.telling = self.waiting, [], None
        return waiting

    def answered(self, number: int) -> tuple[int, ...]:
        """A batch is over; its functions."""
        return self._open.pop(number, ())

    def lost_gradient(self, name: str) -> TorchstratError:
        """This one has gone: what later functions would have stepped with, of this parameter, is nowhere else."""
        return TorchstratError(
            f"{self.peer} has gone, and with it gradients of {name} that functions had left there for later ones: no "
            "step has used them. Values and the state of optimizers are complete, and functions that are queued run. "
            "Restore a checkpoint, or go on without; to accumulate gradients over functions and lose none, compute "
            "them in `with strategy.no_sync():`, which leaves them to the servers."
        )

    def recalled(self, functions: tuple[int, ...]) -> Recalled:
        """What to ask it for, to get these back."""
        wanted = frozenset(functions)
        asked = ((number, tuple(wanted.intersection(sent))) for number, sent in self._open.items())
        return tuple((number, found) for number, found in asked if found)

    def _set(
        self, place: int, options: Options, modes: Modes, settings: list[tuple[int, Options | None, Modes | None]]
    ) -> None:
        new_options = None if are_equal(self._options, options) else options  # which may have tensors
        new_modes = None if are_equal(self._modes, modes) else modes
        self._options, self._modes = options, modes  # equal ones too: the next may be the same objects
        if new_options is not None or new_modes is not None:
            settings.append((place, new_options, new_modes))

    def _new_code(self, digest: bytes, packed: Packed) -> tuple[bytes, Packed | None]:
        if digest in self._codes:
            self._codes.use(digest)
            return digest, None
        self._codes.add(digest, packed.tokens)
        return digest, packed

    def _new_resources(self, needed: Iterable[ResourceSpec]) -> tuple[ResourceSpec, ...]:
        new = tuple(spec for spec in needed if spec.number not in self._resources)
        self._resources.update(spec.number for spec in new)
        return new

    def _new_servers(self, servers: Mapping[int, Peer]) -> Mapping[int, Peer] | None:
        if self._servers == servers:
            return None
        self._servers = servers
        return servers


def _collect_per_worker(packed: Packed, numbers: set[int]) -> None:
    if packed.tokens:
        numbers.update(numbers_of(packed.tokens))


def without_unsendable(batch: Batch) -> tuple[Batch, dict[int, BaseException]]:
    """What is left of a batch that could not be sent, and the errors of the functions that it lacks: of those whose
    arguments cannot."""
    faults: dict[int, BaseException] = {}
    for function, _, arguments, _ in batch.functions:
        try:
            pack(arguments)
        except Exception as fault:
            faults[function] = NotSendableError(f"the arguments of function {function} cannot be sent: {fault}")
            faults[function].__cause__ = fault
    functions = tuple(
        (function, code, None if function in faults else arguments, seed)
        for function, code, arguments, seed in batch.functions
    )
    return batch._replace(functions=functions), faults


_UNLIMITED_SECONDS = math.inf  # functions take as long as they take; a worker that is gone ends the call


@dataclass(slots=True)
class News:
    """Events of one report, which belong together, and the results of the functions that finished, opened."""

    incarnation: str
    events: list[Event]
    results: Sequence[object] = ()
    report: Report | None = None


class WorkerCalls:
    """Thread-safe.

    Args:
        unpack: opens what a worker returned.
        is_over: told of a batch that was answered, or will not be; gives its functions.
        take: takes in news.
    """

    def __init__(
        self,
        job: Job,
        unpack: Callable[[Packed], object],
        is_over: Callable[[KnownWorker, int], tuple[int, ...]],
        take: Callable[[News], None],
    ) -> None:
        self._job, self._unpack = job, unpack
        self._is_over, self._take = is_over, take
        self.is_closed = False

    def send_batch(self, known: KnownWorker, batch: Batch) -> None:
        future = self._call(known.peer, "worker.run", batch)
        error = future.exception() if future.done() else None
        if isinstance(error, NotSendableError) and not hasattr(error, "__notes__"):  # not told by the worker
            rest, faults = without_unsendable(batch)
            self._tell(known.peer, [Failed(*_names(known.peer), *fault) for fault in faults.items()])
            future = self._call(known.peer, "worker.run", rest)
        future.add_done_callback(partial(self._answered, known, batch.number))

    def send_recall(self, known: KnownWorker, recalled: object) -> None:
        future = self._call(known.peer, "worker.recall", recalled)
        future.add_done_callback(partial(self._handed_back, known.peer))

    def left_gradients(self, peers: Iterable[Peer], numbers: Sequence[int]) -> set[int]:
        """Those of the parameters with these numbers that have a gradient on a worker. One that is lost has none."""
        calls = [self._call(peer, "worker.left_gradients", tuple(numbers)) for peer in peers]
        wait(calls, timeout=self._job.timeout_seconds)
        return {number for call in calls if call.done() and call.exception() is None for number in call.result()}

    def _call(self, peer: Peer, method: str, payload: object) -> Future[Any]:
        try:
            return self._job.endpoint.call(peer, method, payload, timeout_seconds=_UNLIMITED_SECONDS)
        except Exception as error:  # whatever it is, it is the functions' error, and not that of who happens to send
            failed: Future[object] = Future()
            failed.set_exception(error)
            return failed

    def _answered(self, known: KnownWorker, number: int, done: Future[Any]) -> None:
        if self.is_closed:
            return
        functions = self._is_over(known, number)
        error = done.exception()
        if error is None:
            self.reported(known.peer, done.result())
        elif isinstance(error, CommunicationError):
            # Usually the membership knows by now. A process that lives and cannot be talked to must start afresh.
            self._job.membership.give_up(known.peer, f"its answer did not come: {error}")
            self._tell(known.peer, [WorkerLost(*_names(known.peer), f"its answer did not come: {error}")])
        else:
            # It has learnt nothing of what came with the batch, nor does it go on to the next number.
            self._tell(known.peer, [Failed(*_names(known.peer), function, error) for function in functions])
            self._job.membership.give_up(known.peer, f"it could not take in what it was sent: {error}")

    def _handed_back(self, peer: Peer, done: Future[Any]) -> None:
        if done.exception() is None and done.result():  # an error is told by the batches' calls
            self._tell(peer, [HandedBack(*_names(peer), done.result())])

    def reported(self, peer: Peer, report: Report) -> None:
        """A report has come, before a batch's end or at it."""
        if self.is_closed:
            return
        events: list[Event] = []
        for function, outcome in report.ended:  # first of all: after an error nothing more is sent
            if isinstance(outcome, ServerGone):
                self._job.server_gone(peer, outcome, then=partial(self._failed_without_server, peer, function, outcome))
            else:
                events.append(Failed(*_names(peer), function, unpack_exception(outcome, self._unpack)))
        results: Sequence[object] = report.results
        if Packed in map(type, results):
            results, faults = self._unpacked(report)
            events += [Failed(*_names(peer), *fault) for fault in faults.items()]
        if report.leaving:
            events.append(WorkerLeaves(*_names(peer)))
        if report.finished:
            events.append(Finished(*_names(peer), report.finished, report.seconds))
        if report.handed_back:
            events.append(HandedBack(*_names(peer), report.handed_back))
        self._take(News(peer.incarnation, events, results, report))

    def _unpacked(self, report: Report) -> tuple[list[object], dict[int, BaseException]]:
        """The results, and the errors of those that cannot be opened."""
        results: list[object] = []
        faults: dict[int, BaseException] = {}
        for function, result in zip(report.finished, report.results, strict=True):
            try:
                results.append(self._unpack(result) if type(result) is Packed else result)
            except Exception as problem:
                results.append(None)
                faults[function] = problem
        return results, faults

    def _failed_without_server(self, peer: Peer, function: int, outcome: ServerGone) -> None:
        error = ParameterServerUnavailable(outcome.message, Task(PARAMETER_SERVER, outcome.index))
        self._tell(peer, [Failed(*_names(peer), function, error)])

    def _tell(self, peer: Peer, events: Sequence[Event]) -> None:
        self._take(News(peer.incarnation, list(events)))


def _names(peer: Peer) -> tuple[int, str]:
    """By which the scheduler knows a process."""
    return peer.task.index, peer.incarnation


_MOST_HOLDERS = 5


def release(objects: Sequence[object], job: Job, registry: VariableRegistry, works: Mapping[int, Work]) -> None:
    """Drop the objects with their parts. ``works``: the functions that have no outcome yet.

    Raises `InvalidArgumentError` naming what still needs them; nothing is dropped then. `WrongTypeError` for an object
    that is none that lives on servers or workers.
    """
    going = {id(part): part for value in objects for part in _parts_of(value)}
    for value in objects:
        known = value.reader if isinstance(value, LeasedDataset) else value
        if job.catalog.token_of(known) is None:
            raise InvalidArgumentError(f"{value!r:.80} is not on this strategy's servers or workers (any more).")
    holders = [*_functions(works, going), *_others(job, registry, going)]
    if holders:
        more = f" and {len(holders) - _MOST_HOLDERS} more" if len(holders) > _MOST_HOLDERS else ""
        raise InvalidArgumentError(
            f"{', '.join(_name_of(value) for value in objects)}: still needed by {', '.join(holders[:_MOST_HOLDERS])}"
            f"{more}. Release these with it, or wait for the functions with coordinator.join()."
        )
    registry.let_go(going.values())
    job.let_go(list(going.values()))


def _parts_of(value: object) -> Iterator[object]:
    """What goes with it, itself included."""
    if isinstance(value, nn.Module):
        for module in value.modules():
            yield from (module, *own_parameters(module).values(), *own_buffers(module).values())
            yield from (shard for shard in vars(module).values() if isinstance(shard, Variable))
    elif isinstance(value, LeasedDataset):
        yield value.reader
    elif isinstance(value, (torch.Tensor, Variable, PerWorkerValues, *HELPER_TYPES)):
        yield value
    else:
        raise WrongTypeError(
            "release takes modules, optimizers, variables, and per-worker or leased datasets, iterators and "
            f"resources; got {type(value).__name__} {value!r:.80}."
        )


def _needs(value: object) -> Iterator[object]:
    """What a function that refers to ``value`` may use, and what it cannot be without."""
    yield value
    if isinstance(value, nn.Module):
        yield from _parts_of(value)
    elif isinstance(value, Optimizer):
        yield from (tensor for group in value.param_groups for tensor in group["params"])
    elif isinstance(value, PerWorkerIterator):
        yield from value.built_from()
    elif isinstance(value, HELPER_TYPES):
        yield getattr(value, "optimizer", None)


def _is_needed(values: Iterable[object], going: Mapping[int, object]) -> bool:
    return any(id(need) in going for value in values for need in _needs(value))


def _functions(works: Mapping[int, Work], going: Mapping[int, object]) -> Iterator[str]:
    for number, work in works.items():
        if _is_needed((*work.packed_code.alive, *work.arguments.alive), going):
            yield f"function {number} ({work.value.name}), which has not ended"


def _others(job: Job, registry: VariableRegistry, going: Mapping[int, object]) -> Iterator[str]:
    for value in (*registry.modules(), *registry.helpers(), *job.catalog.registered()):
        needed = value.built_from() if isinstance(value, PerWorkerValues) else ()
        if id(value) not in going and _is_needed((value, *needed), going):
            yield _name_of(value)


def _name_of(value: object) -> str:
    return repr(value)[:80] if isinstance(value, PerWorkerValues | Variable) else f"a {type(value).__name__}"
