"""Who has been silent for too long: pure logic, told the time.

A process that was itself stopped (SIGSTOP, a laptop's sleep, a debugger) wakes up to find that nobody has answered for
hours. Silence is therefore measured on a clock that runs only while this process lives: between two beats it advances
by one interval at most, however much time has passed outside.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

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
