"""The tensors that a variable's pieces are: PyTorch asks their class about everything that is done with them.

``torch.tensor(parameter)``, ``new_tensor``, ``torch.Tensor(parameter)`` and what else PyTorch reports as no function
call operators in the end, and a class with ``__torch_dispatch__`` hears of these. It calls them again, which PyTorch
reports: to the classes that refuse what they do not know, in a step (`torchstrat.sharding.dtensor.step`) and outside of
runs (`torchstrat.sharding.dtensor.no_values`). The backend's own work, where functions are not reported, goes through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrat.core._torch_private import DisableTorchDispatch

_PLAIN = "_plain_kind"


def piece_of(kind: type, value: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """A leaf that shares the memory of ``value``. ``kind``: the variable's class."""
    return torch.Tensor._make_subclass(class_of_pieces(kind), value.detach(), requires_grad)


@functools.cache
def class_of_pieces(kind: type) -> type:
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        return kind  # it hears of operators itself

    def passed_on(
        cls: type, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return call_operator(func, args, kwargs)

    members = {"__module__": kind.__module__, "__torch_dispatch__": classmethod(passed_on), _PLAIN: kind}
    if kind is torch.Tensor:  # whose own would make pieces of results, too
        members["__torch_function__"] = torch._C._disabled_torch_function_impl
    made: type = type(kind)(kind.__name__, (kind,), members)
    return made


def plain_kind(kind: type) -> Any:
    """The class of a variable, from that of its piece, or from one derived of that."""
    return getattr(kind, _PLAIN, kind)


def call_operator(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Reported like any function; below that, pieces are of no class of their own."""
    with DisableTorchDispatch():
        return func(*args, **(kwargs or {}))
