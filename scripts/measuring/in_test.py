"""What a process that is asked for several tests does to tell them apart. It is imported there: no pytest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coverage import Coverage


class InTest:
    """A function that is called in another process for a test. It has the name of the function, for messages."""

    def __init__(self, test: str, function: Callable[..., Any]) -> None:
        self._test, self._function = test, function
        self.__qualname__ = getattr(function, "__qualname__", repr(function))

    def __call__(self, *args: Any) -> Any:
        switch_to(self._test)
        return self._function(*args)


def switch_to(test: str) -> None:
    if (coverage := Coverage.current()) is not None:
        coverage.switch_context(test)
