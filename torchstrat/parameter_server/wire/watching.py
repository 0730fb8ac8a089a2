"""The thread that finds out who is gone, and tells those who asked: one per process, however many it watches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torchstrat.parameter_server.tasks import Peer
from torchstrat.parameter_server.wire.heartbeat import Heartbeat

OnLost = Callable[[Peer, str], None]

_log = logging.getLogger(__name__)


class Watching:
    """Tells watchers once that a peer is lost: because the transport says so (`lost`), or by its silence.

    ``ask(peer)`` has to send a peer a question; its answer, and any other message of the peer, is to be reported by
    `heard`. All callbacks run on the one thread of this object, never inside a method of it. Thread-safe; the thread
    starts with the first `watch`.
    """

    def __init__(self, ask: Callable[[Peer], None], *, heartbeat_seconds: float, deadline_seconds: float) -> None:
        self._ask = ask
        self._news = threading.Condition()  # guards everything below
        self._heartbeat: Heartbeat[str] = Heartbeat(heartbeat_seconds, deadline_seconds, time.monotonic())
        self._watchers: dict[str, list[tuple[Peer, OnLost]]] = {}
        self._lost: dict[str, str] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, peer: Peer, on_lost: OnLost, deadline_seconds: float | None = None) -> None:
        with self._news:
            if self._closed:
                return
            self._watchers.setdefault(peer.incarnation, []).append((peer, on_lost))
            self._heartbeat.watch(peer.incarnation, time.monotonic(), deadline_seconds)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="torchstrat-heartbeat", daemon=True)
                self._thread.start()
            self._news.notify()

    def lost(self, incarnation: str, reason: str) -> None:
        """Tell its watchers at once. Nothing happens if nobody watches it."""
        with self._news:
            if incarnation in self._watchers:
                self._lost.setdefault(incarnation, reason)
                self._news.notify()

    def heard(self, incarnation: str) -> None:
        with self._news:
            self._heartbeat.heard(incarnation, time.monotonic())

    def forget(self, incarnation: str) -> None:
        """Nobody is told any more; a callback that has begun may still be running."""
        with self._news:
            self._watchers.pop(incarnation, None)
            self._lost.pop(incarnation, None)
            self._heartbeat.forget(incarnation)

    def close(self) -> None:
        """Forget everybody and end the thread; waits a moment for a callback that is running."""
        with self._news:
            self._closed = True
            self._watchers.clear()
            self._news.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._closed and not self._lost and not self._is_due():
                    self._news.wait(self._heartbeat.due_in(time.monotonic()) if self._watchers else None)
                if self._closed:
                    return
                asked = self._beat() if self._is_due() else []
                told = self._take_lost()
            for on_lost, peer, reason in told:
                try:
                    on_lost(peer, reason)
                except Exception:
                    _log.exception("a callback failed that was told of the loss of %s", peer)
            for peer in asked:
                self._ask(peer)

    def _is_due(self) -> bool:
        return bool(self._watchers) and self._heartbeat.due_in(time.monotonic()) == 0

    def _beat(self) -> list[Peer]:
        beat = self._heartbeat.beat(time.monotonic())
        for one in beat.lost:
            silence = f"{one.seconds:.1f} s (deadline {one.deadline_seconds:g} s)"
            self._lost.setdefault(one.key, f"gave no sign of life for {silence}: stopped, hung or cut off")
        return [self._watchers[incarnation][0][0] for incarnation in beat.ask]

    def _take_lost(self) -> list[tuple[OnLost, Peer, str]]:
        told = []
        for incarnation, reason in self._lost.items():
            self._heartbeat.forget(incarnation)
            told += [(on_lost, peer, reason) for peer, on_lost in self._watchers.pop(incarnation, ())]
        self._lost.clear()
        return told
