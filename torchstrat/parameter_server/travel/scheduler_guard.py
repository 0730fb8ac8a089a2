"""Learning-rate schedulers belong to the coordinator: on a worker their ``step`` says so."""

from __future__ import annotations

from typing import Any, NoReturn

from torchstrat.errors import ContextError


class StepsOnCoordinator:
    """Takes the place of a scheduler's ``step`` in a worker's copy."""

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ContextError(
            f"{self._scheduler}.step() was called in a scheduled function. Every worker would step a copy of its own; "
            "call scheduler.step() on the coordinator, between schedule calls: the rate that is in force when a "
            "function is sent travels with it."
        )
