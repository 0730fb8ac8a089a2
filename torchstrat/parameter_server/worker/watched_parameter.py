"""A worker's copy of a parameter, which knows whether the function has written to it.

What a function writes to a parameter by hand (weight decay, clamping, an average) must reach the servers. In-place
operators count in ``_version``; what goes through ``.data`` or a NumPy array does not, so whoever takes one has the
value from before kept. An array may be taken of any tensor over the memory, so `torch.Tensor.numpy` tells of all in the
process.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchstrat._torch_private import DisableTorchFunctionSubclass
from torchstrat.tensor_bytes import is_same

DATA: Any = torch.Tensor.data
GRAD: Any = torch.Tensor.grad


class WatchedParameter(nn.Parameter):
    """Otherwise an ordinary parameter: torch does not look at its class."""

    _version_stored = 0
    _before: torch.Tensor | None = None
    has_other_memory = False
    """Whether a function has given it memory that may be another tensor's, too."""
    has_left_gradient = False
    """Whether functions before this one have left a gradient of it on a worker, and this one has not looked: see
    `left_gradients`. Autograd adds to it below Python; whoever sets it to nothing, or sees that there is none, asks
    here."""

    is_cleared = False
    """Whether somebody has set its gradient to nothing, also where there was none, or to something else: what others
    have left is no part of it."""

    @property
    def grad(self) -> torch.Tensor | None:
        gradient: torch.Tensor | None = GRAD.__get__(self)
        if gradient is None and self.has_left_gradient:
            self.has_left_gradient = False
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        GRAD.__set__(self, value)
        self.has_left_gradient, self.is_cleared = False, True

    @grad.deleter
    def grad(self) -> None:
        GRAD.__delete__(self)
        self.has_left_gradient, self.is_cleared = False, True

    @property
    def data(self) -> torch.Tensor:
        raw: torch.Tensor = DATA.__get__(self)
        self.keep_before()
        return raw

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self._before is None:
            self._before = self.memory
        DATA.__set__(self, value)
        self.has_other_memory = True

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        found = super().set_(*args, **kwargs)
        self.has_other_memory = True
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is an ordinary parameter of the function's own."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    def store(self, value: torch.Tensor) -> None:
        """``value`` is what the servers hold. They may have written it to `memory` themselves."""
        memory = self.memory
        if value.data_ptr() != memory.data_ptr():
            memory.copy_(value)
        self.settle()

    @property
    def memory(self) -> torch.Tensor:
        """The values, to be written by who tells this object; see `data`."""
        with DisableTorchFunctionSubclass():  # it may be pending
            value: torch.Tensor = DATA.__get__(self)
        return value

    def replace(self, value: torch.Tensor) -> None:
        """Another tensor of the same shape takes the place of the values."""
        with DisableTorchFunctionSubclass():
            DATA.__set__(self, value)
        self.settle()
        watch_arrays_over(self)

    def settle(self) -> None:
        """Servers and this copy agree now."""
        with DisableTorchFunctionSubclass():
            self._version_stored, self._before = self._version, None

    def is_written(self) -> bool:
        """Whether the function has changed the values since they agreed."""
        with DisableTorchFunctionSubclass():
            if self._version != self._version_stored:
                return True
        before = self._before
        return before is not None and not is_same(before, self.memory)

    def keep_before(self) -> None:
        """Somebody gets at the values past the counter of versions."""
        if self._before is None:
            self._before = self.memory.clone()


_by_address: dict[int, weakref.ref[WatchedParameter]] = {}


def watch_arrays_over(parameter: WatchedParameter) -> None:
    """From now on notice when somebody takes an array over its memory, through whichever tensor."""
    address = parameter.memory.untyped_storage().data_ptr()
    _by_address[address] = weakref.ref(parameter, functools.partial(_forget, address))


def be_told_of_arrays() -> None:
    """`watch_arrays_over` works from now on."""
    for name, take in _GIVE_ARRAYS.items():
        setattr(torch.Tensor, name, _telling(take))


def be_told_no_more() -> None:
    for name, take in _GIVE_ARRAYS.items():
        setattr(torch.Tensor, name, take)


def _forget(address: int, reference: weakref.ref[WatchedParameter]) -> None:
    if _by_address.get(address) is reference:
        del _by_address[address]


def _telling(take: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(take)
    def told(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _by_address:
            _keep_before(tensor)
        return take(tensor, *args, **kwargs)

    return told


def _keep_before(tensor: torch.Tensor) -> None:
    with DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return
        reference = _by_address.get(tensor.untyped_storage().data_ptr())
        parameter = None if reference is None else reference()
        if (
            parameter is not None
            and parameter.memory.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        ):
            parameter.keep_before()


_GIVE_ARRAYS = {name: getattr(torch.Tensor, name) for name in ("numpy", "__array__", "__dlpack__")}
