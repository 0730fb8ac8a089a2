"""Rows per second of training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Clock:
    """Counts rows and seconds of training epochs; evaluation, between them, is left out."""

    def __init__(self) -> None:
        self._epochs: list[tuple[int, float]] = []  # rows, seconds of each finished epoch
        self._rows = 0
        self._began = 0.0
        self._before = (0, 0.0)  # rows, seconds of the epoch in the process that this one goes on from

    def begin_epoch(self) -> None:
        (self._rows, seconds), self._before = self._before, (0, 0.0)
        self._began = time.perf_counter() - seconds

    def count(self, rows: int) -> None:
        self._rows += rows

    def epoch_rate(self) -> float:
        return self._rows / max(time.perf_counter() - self._began, 1e-9)

    def end_epoch(self) -> None:
        self._epochs.append((self._rows, time.perf_counter() - self._began))

    def state_dict(self) -> dict[str, Any]:
        """Within an epoch: what was counted until now."""
        return {"epochs": list(self._epochs), "epoch": (self._rows, time.perf_counter() - self._began)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before `begin_epoch`, which then goes on with the epoch that was under way."""
        self._epochs = [(rows, seconds) for rows, seconds in state["epochs"]]
        rows, seconds = state["epoch"]
        self._before = (rows, seconds)

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self._epochs)

    def steady_rate(self) -> float:
        """The first epoch warms caches, threads and connections up; it counts only if it is the only one."""
        counted = self._epochs[1:] or self._epochs
        return sum(rows for rows, _ in counted) / max(sum(seconds for _, seconds in counted), 1e-9)
