"""All servers of a job, as one process calls them: in parallel, one message each, a lost one named."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import torch

from torchstrat.cluster_spec import PARAMETER_SERVER
from torchstrat.errors import CommunicationTimeoutError, ParameterServerUnavailable, PeerUnavailableError
from torchstrat.parameter_server.endpoint import Endpoint
from torchstrat.parameter_server.tasks import Peer, Task


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
        self,
        method: str,
        payloads: Mapping[int, Any],
        *,
        timeout_seconds: float | None = None,
    ) -> dict[int, Any]:
        """Send each server its payload, and wait for all answers. ``timeout_seconds``: None for the group's.

        Raises `ParameterServerUnavailable` naming the server that is gone or did not answer in time. What a handler
        raised is raised here. All answers have arrived, or failed, when this returns or raises.
        """
        futures = {index: self.send(index, method, payload, timeout_seconds) for index, payload in payloads.items()}
        return self.answers(method, futures)

    def answers(self, method: str, futures: Mapping[int, Future[Any]]) -> dict[int, Any]:
        """Wait for what `send` has sent, to each server at most once. Raises as `ask` does."""
        concurrent.futures.wait(futures.values())
        return {index: self._result(index, method, future) for index, future in futures.items()}

    def ask_all(self, method: str, payload: Any = None) -> dict[int, Any]:
        """Send all servers the same."""
        return self.ask(method, dict.fromkeys(self.peers(), payload))

    def send(
        self,
        index: int,
        method: str,
        payload: Any,
        timeout_seconds: float | None = None,
        into: Sequence[torch.Tensor] | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> Future[Any]:
        """Send one server its payload, without waiting. `answers` waits, and says which server is gone. ``into`` and
        ``on_written``: as `Endpoint.call`."""
        with self._lock:
            peer, lost = self._peers.get(index), self._lost.get(index)
        if peer is None or lost is not None:
            failed: Future[Any] = Future()
            failed.set_exception(PeerUnavailableError(lost or "it has not joined yet", peer))
            return failed
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        return self._endpoint.call(peer, method, payload, timeout_seconds=seconds, into=into, on_written=on_written)

    def _result(self, index: int, method: str, future: Future[Any]) -> Any:
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
