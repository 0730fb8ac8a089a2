"""What the coordinator's cache asks of the functions that are scheduled, and of the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from torchstrat.parameter_server.messages import InitialOp, VariableSpec

Moment = tuple[int, int]
"""How many functions have been scheduled, and how many of them had not ended."""


class Functions(Protocol):
    """What has been scheduled."""

    @property
    def next_function(self) -> int:
        """How many there are."""

    @property
    def num_unfinished(self) -> int:
        """How many of them have not ended."""

    def paused(self, timeout_seconds: float, who: str) -> AbstractContextManager[None]:
        """A block in which no function is half-way, and none begins."""


class NoFunctions:
    """Before there is a coordinator that could schedule any."""

    next_function = 0
    num_unfinished = 0

    def paused(self, timeout_seconds: float, who: str) -> AbstractContextManager[None]:
        return nullcontext()


class Servers(Protocol):
    """Where the values are."""

    def read(self, specs: Sequence[VariableSpec]) -> list[torch.Tensor]: ...

    def read_rows(self, spec: VariableSpec, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, which are sorted, unique and in range."""

    def assign(self, values: Sequence[tuple[VariableSpec, torch.Tensor]]) -> None: ...

    def assign_rows(self, spec: VariableSpec, value: torch.Tensor, rows: torch.Tensor | None) -> None:
        """``value`` is that of these rows (``(n,)`` int64; None: of all)."""

    def repeat(self, spec: VariableSpec, recipe: tuple[InitialOp, ...]) -> None:
        """The servers do this to their values."""

    def attempt(self, call: Callable[[], Any], after_restore: Callable[[], Any]) -> Any:
        """``call()``; ``after_restore()`` where servers had to be restored before or in it."""


class NoServers:
    """Where variables are only planned."""

    def read(self, specs: Sequence[VariableSpec]) -> list[torch.Tensor]:
        raise AssertionError("there are no servers to read from")

    def read_rows(self, spec: VariableSpec, ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("there are no servers to read from")

    def assign(self, values: Sequence[tuple[VariableSpec, torch.Tensor]]) -> None:
        raise AssertionError("there are no servers to write to")

    def assign_rows(self, spec: VariableSpec, value: torch.Tensor, rows: torch.Tensor | None) -> None:
        raise AssertionError("there are no servers to write to")

    def repeat(self, spec: VariableSpec, recipe: tuple[InitialOp, ...]) -> None:
        raise AssertionError("there are no servers to write to")

    def attempt(self, call: Callable[[], Any], after_restore: Callable[[], Any]) -> Any:
        return call()
