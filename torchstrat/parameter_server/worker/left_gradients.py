"""Gradients that a function has left on its worker, for later functions to use.

On one device, and with one worker, gradients may be accumulated over functions. Of several workers each has those of
the functions that it happened to run, and a step would use these and miss the others: such a step is refused.

What a function computes under ``strategy.no_sync()``, and neither steps with nor sets to nothing, leaves the worker
with its end: the servers add it up, and the next step of any function takes it. A function that sets a gradient to
nothing before it steps discards what others have left, as it would on one device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from torchstrat import _torch_private
from torchstrat.errors import UnsupportedError
from torchstrat.operands import tensors_in
from torchstrat.parameter_server.worker.row_gradients import RowGradient
from torchstrat.parameter_server.worker.watched_parameter import GRAD, WatchedParameter


class LeftGradients:
    """Those of one worker. Where it is the only one, and ``no_sync`` was not used, they are counted alone.

    Args:
        parameters: gives, of some numbers or of all, those that are parameters here.
    """

    def __init__(self, parameters: Callable[[Iterable[int] | None], Iterable[tuple[int, WatchedParameter]]]) -> None:
        self._parameters = parameters
        self._unused: set[int] = set()
        self._is_shared = False
        self._elsewhere: frozenset[int] = frozenset()
        self._marked: list[tuple[int, WatchedParameter]] = []  # for what is left elsewhere
        self.accumulates = False
        """Whether functions of the job are known to have left gradients to the servers."""
        self._blocks = 0  # of `no_sync`, in one another
        self._of_blocks: set[int] = set()  # parameters whose gradients these have changed
        self._stepped: set[int] = set()  # parameters that this function has stepped, and
        self._uncleared: set[int] = set()  # not set the gradients of to nothing since
        self.has_scaled = False
        """Whether this function has scaled a loss."""

    @property
    def unused(self) -> tuple[int, ...]:
        """Numbers of the parameters whose gradients no step has used, as they were when the last function ended."""
        return tuple(self._unused)

    def held(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Those of these parameters that have a gradient here, used or not, that is not zero."""
        gradients = ((number, GRAD.__get__(parameter)) for number, parameter in self._parameters(numbers))
        return tuple(number for number, gradient in gradients if gradient is not None and not _is_zero(gradient))

    def share(self, is_shared: bool, elsewhere: Collection[int], *, accumulates: bool) -> None:
        """What the coordinator knows: whether there are other workers, whose unused gradients these hold, and whether
        functions have left any to the servers."""
        self._elsewhere = frozenset(elsewhere)
        self.accumulates |= accumulates
        if (is_shared or self.accumulates) and not self._is_shared:
            self._is_shared = True
            self.end(None)

    def begin(self) -> None:
        """A function begins. What it reaches is not known before it has looked at gradients."""
        self._of_blocks.clear()
        self._stepped.clear()
        self._uncleared.clear()
        self.has_scaled = False
        if self.accumulates:
            for _, parameter in self._parameters(None):
                parameter.is_cleared = False
        for number, parameter in self._marked:
            if number not in self._unused:
                parameter.has_left_gradient = False
        self._marked = list(self._parameters(self._elsewhere)) if self._elsewhere else []
        for _, parameter in self._marked:
            parameter.has_left_gradient = True

    def pushed(self, gradient: torch.Tensor) -> None:
        """A step has used it."""
        setattr(gradient, _USED_AT, gradient._version)

    def end(self, reached: Iterable[int] | None) -> None:
        """The function has ended: what it leaves is no later one's to step with. None: of all variables."""
        for number, parameter in self._parameters(None if reached is None else self._unused.union(reached)):
            gradient: torch.Tensor | None = GRAD.__get__(parameter)
            is_used = gradient is not None and _is_used(gradient)
            if gradient is None or (not is_used and _is_zero(gradient)):  # zeros are there to be added to
                parameter.has_left_gradient = False
                self._unused.discard(number)
                continue
            if self._is_shared:
                _mark(parameter, gradient)
            if is_used:
                self._unused.discard(number)
            else:
                self._unused.add(number)

    # -- under no_sync -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """The gradients that are computed in it are for whichever function steps next."""
        before = {} if self._blocks else dict(self._states())
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                changed = (number for number, now in self._states() if not _is_same(before.get(number), now))
                self._of_blocks.update(changed)

    def _states(self) -> Iterator[tuple[int, _State]]:
        with _torch_private.DisableTorchFunctionSubclass():
            for number, parameter in self._parameters(None):
                gradient: torch.Tensor | None = GRAD.__get__(parameter)
                if gradient is not None:
                    yield number, (gradient, gradient._version)

    def take(self, name_of: Callable[[torch.Tensor], str]) -> list[tuple[WatchedParameter, torch.Tensor]]:
        """What the function, which has ended, leaves to the servers: it is not here any more."""
        found: list[tuple[WatchedParameter, torch.Tensor]] = []
        for _, parameter in self._parameters(self._of_blocks):
            gradient = parameter.grad
            if gradient is None or _is_used(gradient) or _is_zero(gradient):
                continue
            if parameter.has_left_gradient:
                raise UnsupportedError(_refusal("backward() under no_sync", name_of(parameter)))
            if self.has_scaled:
                raise UnsupportedError(
                    f"a scheduled function has scaled its loss by a GradScaler and left the gradient of "
                    f"{name_of(parameter)} under no_sync for a later step, which would add it to gradients of another "
                    "scale, or of none. Leave unscaled gradients, or step in the same function."
                )
            found.append((parameter, gradient))
        for parameter, _ in found:
            is_cleared = parameter.is_cleared
            parameter.grad = None
            parameter.is_cleared = is_cleared
        if found and not self.accumulates:
            self.share(True, self._elsewhere, accumulates=True)
        return found

    def take_cleared(self, optimizer: Optimizer | None, number_of: Callable[[torch.Tensor], int | None]) -> list[int]:
        """Of which parameters what others have left is to go, before ``optimizer`` steps, or at the function's end."""
        if not self.accumulates:
            return []
        cleared = {number for number, parameter in self._parameters(None) if parameter.is_cleared}
        for _, parameter in self._parameters(cleared):
            parameter.is_cleared = False
        # What was left since the function's own step is for the next one.
        discarded = sorted(cleared - self._stepped)
        self._uncleared -= cleared
        if optimizer is not None:
            found = (number_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
            numbers = {number for number in found if number is not None}
            self._stepped |= numbers
            self._uncleared |= numbers
        return discarded

    def forget(self, numbers: Iterable[int]) -> None:
        """These parameters are gone, and their gradients with them."""
        numbers = set(numbers)
        self._unused -= numbers
        self._marked = [(number, parameter) for number, parameter in self._marked if number not in numbers]

    def check(
        self,
        optimizer: Optimizer,
        name_of: Callable[[torch.Tensor], str],
        number_of: Callable[[torch.Tensor], int | None],
    ) -> None:
        """Raise `UnsupportedError` where a step would use gradients that an earlier function left, or miss them."""
        step = f"{type(optimizer).__name__}.step()"
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if getattr(parameter, "has_left_gradient", False):
                    raise UnsupportedError(_refusal(step, name_of(parameter)))
                if self._uncleared and number_of(parameter) in self._uncleared and not parameter.is_cleared:
                    raise UnsupportedError(
                        f"a second {step} in a scheduled function would use the gradient of {name_of(parameter)} once "
                        "more. In a job that leaves gradients to later functions by no_sync a part of it may have been "
                        "on the servers, which the first step has used up. Call zero_grad() and compute it again."
                    )


_USED_AT = "_torchstrat_used_at"
"""Attribute of a gradient: its version when a step used it."""

_State = tuple[torch.Tensor, int]
"""A gradient and its version."""


def _is_same(then: _State | None, now: _State) -> bool:
    return then is not None and then[0] is now[0] and then[1] == now[1]


class LeftGradient(torch.Tensor):
    """A gradient of an earlier function. Setting it to zero makes it an ordinary one; nothing else can be done with it,
    for on another worker it would be another one."""

    is_asked_first: ClassVar[bool] = True
    _parameter: weakref.ref[WatchedParameter]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _ASKS_NO_VALUES:
            left: list[Any] = [tensor for tensor in tensors_in((args, kwargs)) if type(tensor) is LeftGradient]
            if func not in _SETS_TO_ZERO and not (func is torch.Tensor.fill_ and args[1] == 0):
                raise UnsupportedError(_refusal(getattr(func, "__name__", str(func)), "a parameter"))
            for tensor in left:
                parameter = tensor._parameter()
                if parameter is not None:
                    parameter.has_left_gradient = False
                tensor.__class__ = torch.Tensor
        with _torch_private.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _is_used(gradient: torch.Tensor) -> bool:
    """Whether a step has used it as it is."""
    return getattr(gradient, _USED_AT, None) == gradient._version


def _mark(parameter: WatchedParameter, gradient: torch.Tensor) -> None:
    parameter.has_left_gradient = True
    if type(gradient) in (torch.Tensor, RowGradient):
        marked: Any = gradient
        marked.__class__ = LeftGradient
        marked._parameter = weakref.ref(parameter)


def _is_zero(gradient: torch.Tensor) -> bool:
    with _torch_private.DisableTorchFunctionSubclass():
        return not (gradient.count_nonzero() if gradient.layout == torch.strided else gradient._nnz())


def _refusal(what: str, of: str) -> str:
    return (
        f"{what} in a scheduled function would use the gradient of {of} that an earlier function left on a worker. "
        "This job has several workers, or uses no_sync, and each worker has the gradients of the functions that it "
        "ran: the others' would be missing. Compute gradients for a later function within `with strategy.no_sync():`, "
        "or all gradients of a step in the function that makes the step; begin functions with optimizer.zero_grad()."
    )


def _methods(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name) for name in names}


def _properties(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


_ASKS_NO_VALUES = frozenset(
    {
        *_properties("requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim", "_version"),
        *_properties("is_sparse", "is_cuda", "is_cpu", "is_meta", "nbytes", "itemsize"),
        *_methods("size", "dim", "numel", "detach_", "requires_grad_", "__hash__", "is_floating_point", "is_complex"),
        *_methods("stride", "storage_offset", "element_size", "is_contiguous", "get_device"),
    }
)
_SETS_TO_ZERO = frozenset({torch.Tensor.zero_, torch._foreach_zero_, torch.zero_})
