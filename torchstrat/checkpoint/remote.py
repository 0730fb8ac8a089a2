"""What lives on parameter servers, as checkpoints see it: they name it, and the servers write and read it themselves.

The room of the servers is above this one: `connected` has those that a strategy of this process talks to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from torchstrat.checkpoint.pieces import KeyPath, Piece
from torchstrat.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torchstrat.checkpoint.files import Stored, WrittenPart

_Result = TypeVar("_Result")


class RemoteVariable(Protocol):
    """A variable on the servers, in what way they know it. Checkpoints hand it on."""

    @property
    def number(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def shards(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class RemoteSlot:
    """A variable on the servers, and what piece of a checkpoint's tensor it is."""

    spec: RemoteVariable
    piece: Piece


@dataclass(frozen=True)
class RemoteState:
    """An optimizer's state of a variable on the servers. The entries of the state lie under ``piece.path``."""

    optimizer: int
    spec: RemoteVariable
    piece: Piece


@dataclass(frozen=True)
class ServersWritten:
    """``whole_…``: small entries of optimizer state that the coordinator is to write, once for all shards of a
    variable. ``applied``: each server's records of applied pushes."""

    parts: list[WrittenPart]
    whole_tensors: list[tuple[Piece, torch.Tensor]]
    whole_values: list[tuple[KeyPath, object]]
    applied: Mapping[str, object]


class ServerCut(Protocol):
    """All servers have marked what they held at one moment, and wait to be told what to write of it. Until `end` they
    save what changes."""

    def write(
        self, folder: Path, slots: Sequence[RemoteSlot], states: Sequence[RemoteState], first_number: int
    ) -> ServersWritten:
        """Let every server write its part into ``folder``. Raises `ParameterServerUnavailable`, and
        `InvalidArgumentError` naming the server that cannot write there."""

    def end(self) -> None:
        """It was written, or will not be. Does not wait."""


class Restoring(Protocol):
    """All servers have read and hold it ready."""

    def adopt(self) -> None:
        """All servers take over; the coordinator's copies follow; functions may run again."""


class Servers(Protocol):
    """The servers that objects of a checkpoint may live on."""

    def spec_of(self, value: object) -> RemoteVariable | None:
        """Of a tensor or a `Variable`; None for one that lives in this process. Asks no server."""

    def number_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Of an optimizer that the servers step; None for another. Asks no server."""

    def push_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the servers its parameter groups. This does ask one, where steps there set them too."""

    def counters(self) -> dict[str, int]:
        """What the random numbers of the next function follow from. While no function runs."""

    def load_counters(self, state: Mapping[str, int]) -> None:
        """Let the next function draw what that of the training would have drawn, whatever its number is here."""

    def prepare_to_save(self) -> None:
        """The servers get what the program has made or written since. Raises `ParameterServerUnavailable`."""

    def paused(self) -> AbstractContextManager[None]:
        """A block in which no function is half-way on the servers, and none begins; the program's optimizers have what
        steps have set in their groups. Raises `CommunicationTimeoutError` naming functions that do not end, and
        `ParameterServerUnavailable`."""

    def begin(self) -> ServerCut:
        """Let all servers mark what they hold at this moment. Raises `ParameterServerUnavailable`."""

    def prepare_to_restore(self) -> None:
        """Give variables that are new their places. Nobody is asked: a server may be gone."""

    def restore(
        self,
        stored: Stored,
        slots: Sequence[RemoteSlot],
        states: Sequence[tuple[RemoteState, tuple[KeyPath, ...]]],
        *,
        whole: bool,
        takes_back: bool,
    ) -> Restoring:
        """Wait until nothing runs and all servers are there, and let them read. No value has changed yet.

        ``whole``: not a part that was named. ``takes_back``: what a lost server held may come from this checkpoint;
        else raises `ParameterServerUnavailable` where one is lost."""

    def restoring(self, objects: Mapping[str, object], restore: Callable[[bool], _Result], *, whole: bool) -> _Result:
        """``restore(takes_back)`` of these objects, or of a part of them. Where something else takes lost servers back,
        it does so before a part is restored."""


class Attempt(Protocol):
    """See `OnServerLoss.attempt`."""

    def __call__(self, call: Callable[[], _Result], after_restore: Callable[[], _Result], /) -> _Result: ...


attempts: weakref.WeakKeyDictionary[object, Attempt] = weakref.WeakKeyDictionary()
"""By manager: how it saves through losses of servers, see `ClusterCoordinator.restore_on_server_loss`."""

connected: weakref.WeakSet[Servers] = weakref.WeakSet()
"""Of the open strategies of this process."""


def servers_of(tensors: Iterable[object]) -> Servers | None:
    """Those on which any of these live; None where all are in this process.

    Raises `InvalidArgumentError` where they live on servers of several strategies.
    """
    tensors = list(tensors)
    found = [one for one in connected if any(one.spec_of(tensor) is not None for tensor in tensors)]
    if len(found) > 1:
        raise InvalidArgumentError(
            "the objects of one checkpoint live on the servers of several strategies; make a ts.Checkpoint for each."
        )
    return found[0] if found else None
