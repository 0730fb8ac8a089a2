"""What the scheduler knows of functions that were lost with their workers."""

from __future__ import annotations

from collections.abc import Iterable, KeysView

from torchstrat.parameter_server.scheduler_events import MAX_ATTEMPTS


class LostFunctions:
    """Of functions that have no outcome yet: how each was lost, every time, and how often that may be."""

    def __init__(self) -> None:
        self._losses: dict[int, list[str]] = {}
        self._limits: dict[int, int | None] = {}  # other than `MAX_ATTEMPTS`

    def limit(self, function: int, max_attempts: int | None) -> None:
        if max_attempts != MAX_ATTEMPTS:
            self._limits[function] = max_attempts

    def add(self, function: int, how: str) -> None:
        self._losses.setdefault(function, []).append(how)

    def times(self, function: int) -> int:
        """How often it was lost; then it may have been begun."""
        return len(self._losses.get(function, ()))

    def losses(self, function: int) -> tuple[str, ...]:
        return tuple(self._losses.get(function, ()))

    def is_used_up(self, function: int) -> bool:
        """Whether it must not be run again."""
        limit = self._limits.get(function, MAX_ATTEMPTS)
        return limit is not None and self.times(function) >= limit

    def forget(self, functions: Iterable[int]) -> None:
        """They have their outcomes."""
        if self._losses or self._limits:
            for function in functions:
                self._losses.pop(function, None)
                self._limits.pop(function, None)

    def functions(self) -> KeysView[int]:
        return self._losses.keys()
