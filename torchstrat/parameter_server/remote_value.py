"""What `ClusterCoordinator.schedule` returns: the place where a function's result will be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar, overload

import torch
from numpy.typing import NDArray

from torchstrat import nest
from torchstrat.errors import CommunicationTimeoutError, InvalidArgumentError, WrongTypeError
from torchstrat.tracebacks import short_tracebacks

_making_event = threading.Lock()

T_co = TypeVar("T_co", covariant=True)
PlainT = TypeVar("PlainT", bool, int, float, complex, str, bytes, None)
"""What `RemoteValue.fetch` hands out as it is."""


@short_tracebacks
class RemoteValue(Generic[T_co]):
    """The result of a scheduled function. Made by `ClusterCoordinator.schedule` only.

    `get` and `fetch` wait until the function has run, on whichever worker, and raise what it raised.
    """

    __slots__ = ("__weakref__", "_error", "_event", "_function", "_has_ended", "_name", "_result", "_who")

    def __init__(self, function: int, name: str, who: Callable[[int], str]) -> None:
        self._function = function
        self._name = name
        self._who = who
        self._has_ended = False
        self._event: threading.Event | None = None  # made for the first who waits: most are never waited for
        self._result: Any = None
        self._error: BaseException | None = None

    def get(self, timeout: timedelta | float | None = None) -> T_co:
        """The result, with tensors on the CPU of the coordinator. ``timeout`` in seconds; None waits.

        Raises the function's own error, `CancelledError` if it was cancelled, `CommunicationTimeoutError`.
        """
        if not self._has_ended and not self._wait(_seconds(timeout)):
            raise CommunicationTimeoutError(
                f"{self._describe()} is not there after {timeout} s: {self._who(self._function)}."
            )
        if self._error is not None:
            raise self._error
        result: T_co = self._result
        return result

    @overload
    def fetch(self: RemoteValue[torch.Tensor], timeout: timedelta | float | None = None) -> NDArray[Any]: ...
    @overload
    def fetch(self: RemoteValue[PlainT], timeout: timedelta | float | None = None) -> PlainT: ...
    @overload
    def fetch(self, timeout: timedelta | float | None = None) -> Any: ...
    def fetch(self, timeout: timedelta | float | None = None) -> Any:
        """The result with every tensor as a NumPy array, but for sparse and nested ones. Otherwise as `get`."""
        return nest.map_structure(_to_numpy, self.get(timeout))

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            f"{self._describe()} is awaited on the coordinator and cannot be pickled; fetch it, and pass what it gives."
        )

    def _refuse(self, *_: Any) -> NoReturn:
        raise WrongTypeError(
            f"{self._describe()} was used as a number, and is only the place where that will be; write value.fetch() "
            "for it (or coordinator.fetch for many)."
        )

    __float__ = __int__ = __round__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def _set_result(self, result: Any) -> None:
        self._result = result
        self._end()

    def _set_error(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._has_ended = True  # first: who makes an event that is not seen below looks at this afterwards
        if self._event is not None:
            self._event.set()

    def _wait(self, seconds: float | None) -> bool:
        with _making_event:
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return self._has_ended or event.wait(seconds)

    def _describe(self) -> str:
        return f"the result of function {self._function} ({self._name})"

    def __repr__(self) -> str:
        if not self._has_ended:
            state = f"pending: {self._who(self._function)}"
        elif self._error is not None:
            state = f"failed: {self._error!r:.200}"
        else:
            state = f"{self._result!r:.200}"
        return f"<RemoteValue of function {self._function} ({self._name}), {state}>"


def _to_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return leaf
    if leaf.dtype == torch.bfloat16:
        leaf = leaf.float()  # NumPy has no bfloat16
    return leaf.detach().cpu().numpy()


def _seconds(timeout: timedelta | float | None) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
