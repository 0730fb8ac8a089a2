"""How the processes of a cluster talk: the interface of the transport, and what can go wrong.

Implementations: `torchstrat.parameter_server.transport` on torch.distributed.rpc, and the in-memory
`torchstrat.testing.fake_network`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Protocol

from torchstrat.parameter_server.tasks import Peer


@dataclass(frozen=True)
class Handler:
    """What answers a method: ``answer(sender, payload)``.

    ``payload`` and the result are picklable and may hold tensors anywhere, which travel beside the pickle. With an
    ``executor`` the call is handed to it, so that a long one holds up nobody; without, it runs on the transport's own
    thread and must be short. What it raises is raised at the caller.
    """

    answer: Callable[[Peer, Any], Any]
    executor: Executor | None = None


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

    def call(self, to: Peer, method: str, payload: Any = None, *, timeout_seconds: float | None = None) -> Future[Any]:
        """Ask ``to``; the future has its answer.

        The future fails with `PeerUnavailableError` when the process is gone or was removed, with `PeerTimeoutError`
        after ``timeout_seconds`` (None: the endpoint's default), with what the handler raised otherwise. Callbacks of
        the future run on the transport's threads and must be short.
        """

    def watch(self, peer: Peer, on_lost: Callable[[Peer, str], None], *, deadline_seconds: float | None = None) -> None:
        """Call ``on_lost(peer, reason)`` once, when ``peer`` dies (within about 0.1 s) or is silent past the heartbeat
        deadline (stopped, cut off). ``deadline_seconds``: None is the endpoint's. Not called after `remove_peer`."""

    def close(self) -> None:
        """Stop at once, without waiting for anybody. Waiting calls fail. May be called twice."""
