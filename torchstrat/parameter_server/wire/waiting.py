"""The callers' side of calls: who waits for whom, and that each is told exactly once."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import Future
from typing import Any

from torchstrat.errors import PeerUnavailableError
from torchstrat.parameter_server.tasks import Peer


class Waiting:
    """The futures that wait for answers, by the incarnation they wait for. Each is settled exactly once, by whoever
    comes first: an answer, a timeout, `fail` because its peer was removed, the end. Thread-safe.

    Each gets an exception of its own: one that was raised keeps everything that the raising functions held, and those
    here are kept for whoever calls later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, set[Future[Any]]] = {}
        self._refused: dict[str, BaseException] = {}
        self._closed: BaseException | None = None

    def add(self, incarnation: str) -> Future[Any]:
        """A new future that waits for this peer; it has failed already if the peer's waiting futures have."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # so that nobody can cancel it: the message is on its way
        with self._lock:
            error = self._closed or self._refused.get(incarnation)
            if error is None:
                self._futures.setdefault(incarnation, set()).add(future)
                return future
        future.set_exception(copy.copy(error))
        return future

    def claim(self, incarnation: str, future: Future[Any]) -> bool:
        """Whether the caller is the one to settle it."""
        with self._lock:
            futures = self._futures.get(incarnation, set())
            claimed = future in futures
            futures.discard(future)
            return claimed

    def fail(self, incarnation: str, error: BaseException) -> None:
        """Fail what waits for this peer, now and later."""
        with self._lock:
            self._refused.setdefault(incarnation, error)
            failing = self._futures.pop(incarnation, set())
        for future in failing:
            future.set_exception(copy.copy(error))

    def fail_removed(self, peer: Peer, reason: str | None) -> None:
        """Fail what waits for a peer that was removed; ``reason``: why it was."""
        text = f"{peer} was removed from the cluster" + ("." if reason is None else f": {reason}.")
        self.fail(peer.incarnation, PeerUnavailableError(text, peer))

    def close(self, error: BaseException) -> None:
        with self._lock:
            self._closed = self._closed or error
            failing = [future for futures in self._futures.values() for future in futures]
            self._futures.clear()
        for future in failing:
            future.set_exception(copy.copy(error))
