"""What the coordinator sends a worker, and what comes back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torchstrat.parameter_server.tasks import Peer
from torchstrat.parameter_server.worker.resources import ResourceSpec

KEPT_CODES = 256
"""How many functions a worker keeps unpickled. The coordinator keeps the same account of it."""


class Recent:
    """The most recently used entries. Two of them that see the same calls hold the same keys."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def use(self, key: Hashable) -> Any:
        self._entries.move_to_end(key)
        return self._entries[key]

    def add(self, key: Hashable, value: Any = None) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)


Options = Mapping[int, tuple[Mapping[str, Any], ...]]
"""Optimizer's number → its parameter groups: hyperparameters, and under ``params`` the numbers of the variables."""

Modes = Mapping[Any, bool]
"""Token of a module → whether it is in training mode; token of a parameter → whether it requires a gradient."""


@dataclass(frozen=True)
class Dispatch:
    """One function to run. What the worker has been sent before is left out, and known to it by name.

    Args:
        code: digest of the function; ``packed_code`` its pickle, or None where the worker has it.
        arguments: (args, kwargs), pickled.
        increments: captured objects that are new to the worker.
        resources: per-worker values that are new to the worker.
        options: hyperparameters in force when the function was scheduled; None: as at the last dispatch.
        servers: who the servers are; None: as at the last dispatch.
        rested: the worker's copies of variables may be out of date.
        modes: which modules train and which parameters take gradients on the coordinator; None: as at the last
            dispatch.
        seed: of the function's random state.
    """

    function: int
    code: bytes
    packed_code: Any
    arguments: Any
    increments: tuple[Any, ...]
    resources: tuple[ResourceSpec, ...]
    options: Options | None
    servers: Mapping[int, Peer] | None
    rested: bool
    seed: int
    modes: Modes | None


@dataclass(frozen=True)
class Returned:
    """The function ended; ``result`` is pickled."""

    result: Any


@dataclass(frozen=True)
class Raised:
    """The function raised ``error``, or its result could not be sent."""

    error: BaseException


@dataclass(frozen=True)
class ServerGone:
    """A server did not answer this worker, so the function has no outcome."""

    peer: Peer | None
    index: int
    reason: str


@dataclass(frozen=True)
class NotRun:
    """The worker is leaving, or was not ready: the function is to run elsewhere."""


Outcome = Returned | Raised | ServerGone | NotRun
