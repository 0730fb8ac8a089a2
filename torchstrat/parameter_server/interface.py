"""How the processes of a cluster talk: the interface of the transport, and what can go wrong.

Implementations: `torchstrat.parameter_server.transport.rpc` on torch.distributed.rpc, and the in-memory
`torchstrat.testing.fake_network`.

Who takes part are tasks, by role and index, and the processes that are them at the moment. A `Service` is what a role
does, as seen by the process that hosts it: ``ps`` holds variables, ``worker`` runs functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, order=True)
class Task:
    """A place in the cluster: ``job`` is ``chief``, ``worker``, ``ps`` or ``evaluator``."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


@dataclass(frozen=True)
class Peer:
    """One process that is, or was, a task. A task that is started again is another peer.

    ``incarnation`` is a random hexadecimal string, fresh at each start; ``url`` is where its messages go; ``pid`` and
    ``host`` are for error messages.
    """

    task: Task
    incarnation: str
    url: str
    host: str = ""
    pid: int = 0

    @property
    def name(self) -> str:
        """Unique in the job, made of letters, digits and underscores."""
        return f"{self.task.job}_{self.task.index}_{self.incarnation}"

    def __str__(self) -> str:
        return f"{self.task} (pid {self.pid} on {self.host})" if self.host else str(self.task)


class AnswerMemory(Protocol):
    """Where a handler should put the tensors of its answer, so that they need not be copied on their way."""

    def empty(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor, values arbitrary, for number ``index`` of the tensors in the answer."""

    def written(self, count: int) -> None:
        """What the call was to do is done, and the first ``count`` tensors of the answer have their values: whoever
        asked may be told, where that is possible, while the others are written."""


class FreshMemory:
    """An `AnswerMemory` of the process itself."""

    def empty(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def written(self, count: int) -> None:
        """Nobody can be told."""


FRESH = FreshMemory()


@dataclass(frozen=True)
class Handler:
    """What answers a method: ``answer(sender, payload)``; if it ``takes_memory``, with an `AnswerMemory` after these.

    ``payload`` and the result are picklable and may hold tensors anywhere, which travel beside the pickle. With an
    ``executor`` the call is handed to it, so that a long one holds up nobody; without, it runs on the transport's own
    thread and must be short. What it raises is raised at the caller.

    ``borrows``: it keeps no tensor of the payload once it has answered, so that these may lie in the caller's memory.
    ``may_hold_up_its_caller``: where a caller has a thread here to itself, that runs it, in the place of the executor;
    only what the same process asks after it has to wait.
    """

    answer: Callable[..., object]
    executor: Executor | None = None
    takes_memory: bool = False
    borrows: bool = False
    may_hold_up_its_caller: bool = False


class Endpoint(Protocol):
    """This process's end. Thread-safe."""

    @property
    def peer(self) -> Peer:
        """This process."""

    def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Answer these methods from now on. Calls of methods that are not served yet are refused as an error."""

    def add_peer(self, peer: Peer) -> None:
        """Make a peer callable. Adding it again does nothing; another incarnation of its task is another peer."""

    def remove_peer(self, peer: Peer, reason: str | None = None) -> None:
        """Never call it again; its calls are refused from now on, and those that wait for it fail. ``reason``: for what
        they raise."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor, its values arbitrary, that `call` can send or fill without a copy where the way allows it. It is
        an ordinary tensor of this process otherwise, and everywhere else."""

    def give_back_memory(self) -> None:
        """What tensors of `empty` have left free goes back to the system, as far as it is large: the like of them will
        not be needed again."""

    def describe_way(self, to: Peer) -> str:
        """For people: how calls to this peer travel, and why. Waits until it is known."""

    def call(
        self,
        to: Peer,
        method: str,
        payload: object = None,
        *,
        timeout_seconds: float | None = None,
        into: Sequence[torch.Tensor] | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> Future[object]:
        """Ask ``to``; the future has its answer.

        ``into``: contiguous tensors of `empty`. Where the way allows it, number i of the tensors in the answer is
        written into ``into[i]``, and is this very tensor; so its values are arbitrary until the call is answered. If it
        fails, somebody may go on writing to them: they must not be used any more. None says that calls like this one
        are rare, so that memory for its tensors is not worth keeping.

        ``on_written``: called with a number, where the way and the handler allow it, before there is an answer: the
        handler has done what it was asked to do, and the first so many of ``into`` have their values already. Called
        again with larger ones. It runs on the transport's threads and must be short.

        The future fails with `PeerUnavailableError` when the process is gone or was removed, with `PeerTimeoutError`
        after ``timeout_seconds`` (None: the endpoint's default), with what the handler raised otherwise. Callbacks of
        the future run on the transport's threads and must be short.
        """

    def watch(self, peer: Peer, on_lost: Callable[[Peer, str], None], *, deadline_seconds: float | None = None) -> None:
        """Call ``on_lost(peer, reason)`` once, when ``peer`` dies (within about 0.1 s) or is silent past the heartbeat
        deadline (stopped, cut off). ``deadline_seconds``: None is the endpoint's. Not called after `remove_peer`."""

    def close(self) -> None:
        """Stop at once, without waiting for anybody. Waiting calls fail. May be called twice."""


class Service(Protocol):
    """One role. The host calls these methods one at a time, from its own thread."""

    def handlers(self) -> Mapping[str, Handler]:
        """What it answers; asked once, before any coordinator is known."""

    def attach(self, endpoint: Endpoint) -> None:
        """This process's end of the cluster's messages; called once, before it serves."""

    def status(self) -> Mapping[str, object]:
        """Plain data about what it holds, for a coordinator that has just arrived (part of the greeting)."""

    def coordinator_arrived(self, coordinator: Peer) -> None:
        """A coordinator, the first or a later one, may be called from now on."""

    def coordinator_left(self, *, finished: bool) -> None:
        """The coordinator said good-bye (``finished``), or was lost and may come back."""

    def drain(self, timeout_seconds: float) -> None:
        """SIGTERM: finish or hand back what is being worked on, tell the coordinator, return within the time."""

    def close(self) -> None:
        """The process is about to end."""
