"""What the coordinator has sent to one process of a worker, and the batches made of what is new to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torchstrat.errors import NotSendableError
from torchstrat.parameter_server.dispatch import KEPT_CODES, Arguments, Batch, Modes, Options, Recalled, Recent
from torchstrat.parameter_server.leases.lease import Lease
from torchstrat.parameter_server.per_worker import numbers_of
from torchstrat.parameter_server.remote_value import RemoteValue
from torchstrat.parameter_server.scheduler_events import MAX_ATTEMPTS
from torchstrat.parameter_server.serialization.functions import Packed
from torchstrat.parameter_server.tasks import Peer
from torchstrat.parameter_server.transport.envelopes import pack


@dataclass(slots=True)
class Work:
    """One scheduled function, as it will be sent."""

    code: bytes
    packed_code: Packed
    arguments: Packed
    options: Options
    modes: Modes
    seed: int
    value: RemoteValue[Any]
    leases: tuple[Lease, ...] = ()
    max_attempts: int | None = MAX_ATTEMPTS
    timeout_seconds: float | None = None


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
        self.waiting: list[Batch] = []
        """For the answer to `telling`, before they are sent: a worker can bring two batches into order, not three."""
        self.telling: int | None = None
        """The number of a batch without functions that has no answer yet."""
        self._gone: list[Any] = []  # that it has not been told of
        self._next_number = 0
        self._open: dict[int, tuple[int, ...]] = {}  # batches without an answer: number → functions
        self._codes = Recent(KEPT_CODES)
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
        increments: tuple[Any, ...],
        resources: Any,
        servers: Mapping[int, Peer],
        is_shared: bool,
        left_elsewhere: tuple[int, ...],
        accumulates: bool,
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
            gone,
            is_repeated,
        )

    def release(self, tokens: Collection[Any]) -> None:
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

    def recalled(self, functions: tuple[int, ...]) -> Recalled:
        """What to ask it for, to get these back."""
        wanted = frozenset(functions)
        asked = ((number, tuple(wanted.intersection(sent))) for number, sent in self._open.items())
        return tuple((number, found) for number, found in asked if found)

    def _set(
        self, place: int, options: Options, modes: Modes, settings: list[tuple[int, Options | None, Modes | None]]
    ) -> None:
        new_options = None if self._options == options else options
        new_modes = None if self._modes == modes else modes
        self._options, self._modes = options, modes  # equal ones too: the next may be the same objects
        if new_options is not None or new_modes is not None:
            settings.append((place, new_options, new_modes))

    def _new_code(self, digest: bytes, packed: Packed) -> tuple[bytes, Packed | None]:
        if digest in self._codes:
            self._codes.use(digest)
            return digest, None
        self._codes.add(digest, packed.tokens)
        return digest, packed

    def _new_resources(self, needed: Any) -> tuple[Any, ...]:
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


def without_unsendable(batch: Batch, error: BaseException) -> tuple[Batch, dict[int, BaseException]]:
    """What can be sent of a batch that could not: the batch, and the errors of the functions that are left out.

    All are, where the fault is not in the arguments of some; the batch's number has to reach the worker even so.
    """
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
    rest = batch._replace(functions=functions)
    try:
        pack(rest)
    except Exception:
        nothing = Batch(batch.number, batch.stops, batch.rested, (), gone=batch.gone)
        return nothing, {function: faults.get(function, error) for function, *_ in functions}
    return rest, faults
