"""Gradients that a function has left on its worker, for later functions to use.

On one device, and with one worker, gradients may be accumulated over functions. Of several workers each has those of
the functions that it happened to run, and a step would use these and miss the others: such a step is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from torchstrat import _torch_private
from torchstrat.errors import UnsupportedError
from torchstrat.operands import tensors_in
from torchstrat.parameter_server.worker.row_gradients import RowGradient
from torchstrat.parameter_server.worker.watched_parameter import GRAD, WatchedParameter


class LeftGradients:
    """Those of one worker. All of it costs something only where the job has several.

    Args:
        parameters: gives, of some numbers or of all, those that are parameters here.
    """

    def __init__(self, parameters: Callable[[Iterable[int] | None], Iterable[tuple[int, WatchedParameter]]]) -> None:
        self._parameters = parameters
        self._unused: set[int] = set()
        self._versions: dict[int, int] = {}  # of gradients, by parameter, that a step has used
        self._is_shared = False
        self._elsewhere: frozenset[int] = frozenset()
        self._marked: list[tuple[int, WatchedParameter]] = []  # for what is left elsewhere

    @property
    def unused(self) -> tuple[int, ...]:
        """Numbers of the parameters whose gradients no step has used, as they were when the last function ended."""
        return tuple(self._unused)

    def held(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Those of these parameters that have a gradient here, used or not, that is not zero."""
        gradients = ((number, GRAD.__get__(parameter)) for number, parameter in self._parameters(numbers))
        return tuple(number for number, gradient in gradients if gradient is not None and not _is_zero(gradient))

    def share(self, is_shared: bool, elsewhere: Collection[int]) -> None:
        """What the coordinator knows: whether there are other workers, and whose unused gradients these hold."""
        self._elsewhere = frozenset(elsewhere)
        if is_shared and not self._is_shared:
            self._is_shared = True
            self.end(None)

    def begin(self) -> None:
        """A function begins. What it reaches is not known before it has looked at gradients."""
        self._versions.clear()
        for number, parameter in self._marked:
            if number not in self._unused:
                parameter.has_left_gradient = False
        self._marked = list(self._parameters(self._elsewhere)) if self._elsewhere else []
        for _, parameter in self._marked:
            parameter.has_left_gradient = True

    def pushed(self, number: int, gradient: torch.Tensor) -> None:
        """A step has used it."""
        if self._is_shared:
            self._versions[number] = gradient._version

    def end(self, reached: Iterable[int] | None) -> None:
        """The function has ended: what it leaves is no later one's to step with. None: of all variables."""
        if not self._is_shared:
            return
        for number, parameter in self._parameters(None if reached is None else self._unused.union(reached)):
            gradient: torch.Tensor | None = GRAD.__get__(parameter)
            is_used = gradient is not None and self._versions.get(number) == gradient._version
            if gradient is None or (not is_used and _is_zero(gradient)):  # zeros are there to be added to
                parameter.has_left_gradient = False
                self._unused.discard(number)
                continue
            _mark(parameter, gradient)
            if is_used:
                self._unused.discard(number)
            else:
                self._unused.add(number)

    def forget(self, numbers: Iterable[int]) -> None:
        """These parameters are gone, and their gradients with them."""
        numbers = set(numbers)
        self._unused -= numbers
        self._marked = [(number, parameter) for number, parameter in self._marked if number not in numbers]
        for number in numbers:
            self._versions.pop(number, None)

    def check(self, optimizer: Optimizer, name_of: Callable[[torch.Tensor], str]) -> None:
        """Raise `UnsupportedError` where a step would use gradients that an earlier function left, or miss them."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if getattr(parameter, "has_left_gradient", False):
                    raise UnsupportedError(_refusal(f"{type(optimizer).__name__}.step()", name_of(parameter)))


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
        "This job has several workers, and each has the gradients of the functions that it ran: the others' would be "
        "missing. Compute all gradients of a step in the function that makes the step, begin functions with "
        "optimizer.zero_grad(), or use one worker, where gradients may be accumulated over functions."
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
