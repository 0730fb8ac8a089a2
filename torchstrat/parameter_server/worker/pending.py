"""Variables of a worker that are not current: the function that runs is not seen to reach them, they were never read,
or servers are still writing them.

Such a parameter or buffer has a class of its own, which PyTorch asks before it does anything with the values: the first
use brings them, on whichever thread, and makes an ordinary one of it again. So what a function is seen to reach need
not be all that it uses; it is what is brought before the function begins.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, cast

import torch

from torchstrat import _torch_private
from torchstrat.errors import ContextError
from torchstrat.operands import tensors_in
from torchstrat.parameter_server.variables.cached_parameter import NEEDS_NO_VALUES
from torchstrat.parameter_server.worker.watched_parameter import WatchedParameter

_ATTRIBUTE = "_torchstrat_pending"


class Bringer(Protocol):
    """Who has the variables of a worker."""

    def reach(self, number: int) -> None:
        """The function that runs turns out to have to do with variable ``number``."""

    def bring(self, number: int) -> None:
        """Afterwards variable ``number`` is current, and its tensor an ordinary one. On any thread.

        Raises:
            ParameterServerUnavailable: a server is gone.
        """


class _Asked:
    is_asked_first: ClassVar[bool] = True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NEEDS_NO_VALUES:
            if func == _GRAD.__set__:  # the gradient may be left for other functions, which have to know
                _reach(args[0])
            with _torch_private.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for tensor in tensors_in((args, kwargs)):
            wait_for(tensor)
        return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """One of the few that PyTorch does not ask about."""
        wait_for(self)  # which gives it another class
        return cast(torch.Tensor, self).set_(*args, **kwargs)


class PendingParameter(_Asked, WatchedParameter):
    """Whatever needs its values brings them."""


class PendingBuffer(_Asked, torch.Tensor):
    """The same of a buffer."""


def suspend(tensor: Any, bringer: weakref.ref[Bringer], number: int) -> None:
    """From now on whoever uses ``tensor``, which is variable ``number``, has it brought."""
    setattr(tensor, _ATTRIBUTE, (bringer, number))
    tensor.__class__ = PendingParameter if isinstance(tensor, WatchedParameter) else PendingBuffer


def resume(tensor: Any) -> None:
    """It is current."""
    if type(tensor) in _PENDING:
        tensor.__class__ = WatchedParameter if type(tensor) is PendingParameter else torch.Tensor
        delattr(tensor, _ATTRIBUTE)


def wait_for(tensor: Any) -> None:
    """Until the values of ``tensor`` are here; returns at once for anything that is current."""
    if type(tensor) in _PENDING:
        found = getattr(tensor, _ATTRIBUTE, None)
        if found is None:  # another thread has just brought it
            return
        bringer, number = cast(tuple[weakref.ref[Bringer], int], found)
        here = bringer()
        if here is None:
            raise ContextError("a variable was used on a worker after the coordinator that had sent it was gone.")
        here.bring(number)


def _reach(tensor: Any) -> None:
    found = getattr(tensor, _ATTRIBUTE, None)
    if found is not None and (bringer := found[0]()) is not None:
        bringer.reach(found[1])


def refuse_in_a_fork(pid: int) -> None:
    """Raises `ContextError` in another process than ``pid``, where the worker is: a function has forked this one, and
    nobody here can ask a server."""
    if os.getpid() != pid:
        raise ContextError(
            "variables on parameter servers were used in a process that a scheduled function, or a DataLoader of its "
            "worker, has forked. Use them in the function itself."
        )


_PENDING = frozenset((PendingParameter, PendingBuffer))
_GRAD: Any = torch.Tensor.grad
