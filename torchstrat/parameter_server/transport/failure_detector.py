"""The thread that finds out who is gone, and tells those who asked: one per process, however many it watches.

`Heartbeat` says who has been silent for too long: pure logic, told the time.

A process that was itself stopped (SIGSTOP, a laptop's sleep, a debugger) wakes up to find that nobody has answered for
hours. Silence is therefore measured on a clock that runs only while this process lives: between two beats it advances
by one interval at most, however much time has passed outside.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torchstrat.parameter_server.interface import Peer

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Silence(Generic[Key]):
    """``key`` was silent for ``seconds``, which is more than its deadline."""

    key: Key
    seconds: float
    deadline_seconds: float


@dataclass(frozen=True)
class Beat(Generic[Key]):
    """What one beat asks for: ``ask`` these for a sign of life; ``lost`` were silent too long, and are not watched
    any more."""

    ask: list[Key]
    lost: list[Silence[Key]]


class Heartbeat(Generic[Key]):
    """Call `beat` every ``interval_seconds``, and `heard` at every sign of life. Not thread-safe.

    A peer is lost when it was silent for more than ``deadline_seconds``, or the deadline that `watch` gave it; that is
    found within one more interval.
    ``now`` is in seconds, from one monotonic clock.
    """

    def __init__(self, interval_seconds: float, deadline_seconds: float, now: float) -> None:
        self.interval_seconds = interval_seconds
        self.deadline_seconds = deadline_seconds
        self._last_beat = now
        self._lived = 0.0
        self._heard: dict[Key, float] = {}
        self._deadlines: dict[Key, float] = {}

    def due_in(self, now: float) -> float:
        """Seconds until the next beat; 0 when it is late."""
        return max(0.0, self._last_beat + self.interval_seconds - now)

    def watch(self, key: Key, now: float, deadline_seconds: float | None = None) -> None:
        self._heard.setdefault(key, self._lived_until(now))
        self._deadlines[key] = self.deadline_seconds if deadline_seconds is None else deadline_seconds

    def forget(self, key: Key) -> None:
        self._heard.pop(key, None)
        self._deadlines.pop(key, None)

    def heard(self, key: Key, now: float) -> None:
        """``key`` gave a sign of life. Nothing happens if it is not watched (any more)."""
        if key in self._heard:
            self._heard[key] = self._lived_until(now)

    def beat(self, now: float) -> Beat[Key]:
        self._lived = self._lived_until(now)
        self._last_beat = now
        silences = [Silence(key, self._lived - heard, self._deadlines[key]) for key, heard in self._heard.items()]
        lost = [one for one in silences if one.seconds > one.deadline_seconds]
        for one in lost:
            self.forget(one.key)
        return Beat(list(self._heard), lost)

    def _lived_until(self, now: float) -> float:
        return self._lived + min(max(0.0, now - self._last_beat), self.interval_seconds)


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
