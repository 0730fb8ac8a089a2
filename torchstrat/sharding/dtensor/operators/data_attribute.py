"""``tensor.data = …`` in a step, after which the tensor shows the memory of another one.

A variable that is cut then shows a piece of the other tensor, which goes on being what it was: who keeps ``p.data``,
gives ``p.data`` other elements, and then what was kept, has the first elements again. Of a tensor that is whole, or cut
otherwise, the piece is a part of memory that the program knows by another name. There a write to the variable would
change that tensor on each process in another place, so none is made as long as the program has it.

PyTorch asks only the tensor that is given memory. A plain one would take over what is none: a `CutTensor` has no memory
of its own, and the variable itself is this process's piece. So ``torch.Tensor.data`` is `_Data` where any are cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import increment_version

from torchstrat.core._torch_private import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    base_of,
    tensors_in_storage,
)
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.tensor_classes import getter, setter
from torchstrat.sharding.dtensor.cut_tensors import STAND_IN, CutTensor, cut_tensor, local_of, refused, shape_of
from torchstrat.sharding.dtensor.operators.rules import Call, rule

_OWN = torch.Tensor.data
_read, _write = getter("data"), setter("data")
_NAME = "Tensor.data"


class _Data:
    """``torch.Tensor.data``, which also asks the tensor whose memory is given."""

    def __get__(self, tensor: torch.Tensor | None, kind: type | None = None) -> object:
        """PyTorch tells classes of tensors what it finds at ``torch.Tensor``: its own, which they know."""
        return _OWN if tensor is None else _read(tensor)

    def __set__(self, tensor: torch.Tensor, value: object) -> None:
        if isinstance(value, torch.Tensor):
            is_cut = isinstance(value, CutTensor) or STAND_IN in value.__dict__
            if is_cut and not isinstance(tensor, CutTensor) and STAND_IN not in tensor.__dict__:
                raise refused(_NAME, "would give its memory to a tensor that is not cut, and a process has a piece")
        if self.behind is None:
            _write(tensor, value)
        else:
            type(self.behind).__set__(self.behind, tensor, value)

    behind: property | None = None
    """What somebody else has put there before, who asks as well."""


_DATA = _Data()
_strategies = 0
_is_kept = False
"""Whether somebody has put theirs before it, which stays and leads here."""


@contextmanager
def both_are_asked() -> Iterator[None]:
    """In this block ``tensor.data = value`` asks the class of ``value``, too."""
    global _strategies, _is_kept
    _strategies += 1
    if _strategies == 1 and not _is_kept:
        _DATA.behind = vars(torch.Tensor).get("data")
        torch.Tensor.data = _DATA  # type: ignore[assignment]
    try:
        yield
    finally:
        _strategies -= 1
        if not _strategies and not _is_kept:
            if vars(torch.Tensor)["data"] is not _DATA:
                _is_kept = True
            elif _DATA.behind is None:
                del torch.Tensor.data
            else:
                torch.Tensor.data = _DATA.behind


def show(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Have ``tensor``, which is not cut, show the memory of ``memory``, whatever class it is of."""
    with DisableTorchFunction():
        _write(tensor, memory)


@rule("detach", _read)
def detach(call: Call, tensor: CutTensor) -> torch.Tensor:
    """The same memory: of a variable, or of its gradient, it may be written to."""
    found: CutTensor = cut_tensor(local_of(tensor).detach(), tensor.cut, call.devices)
    found.is_value, found.is_gradient, found.lender = tensor.is_value, tensor.is_gradient, tensor.lender
    return found


@rule(_write)
def set_data(call: Call, target: torch.Tensor, value: torch.Tensor) -> None:
    if value is target:
        return
    if not isinstance(target, CutTensor):
        raise call.refused("would give its memory to a tensor that is not cut, and a process has a piece")
    if not target.can_be_written:
        raise call.refused("would change it in place; write the result to a new tensor")
    _require_alike(call, target, value)
    lender: weakref.ref[torch.Tensor] | None = None
    if isinstance(value, CutTensor) and value.cut == target.cut:
        memory, lender = local_of(value), value.lender
        if not value.can_be_written:
            _require_unshared(call, value)
    else:
        if isinstance(value, CutTensor) and value.can_be_written:
            raise call.refused("of another cut would become what the two have in common; give it value.clone()")
        lender = weakref.ref(_require_unshared(call, value))
        with torch.no_grad():
            memory = call.enter(value.detach(), target.cut, ())
    own = local_of(target)
    with DisableTorchFunctionSubclass():
        memory = memory.detach()
        _write(own, memory)
        increment_version(own)  # what autograd has saved of it is another memory
        if target.as_grad is not None:
            _write(target.as_grad, memory)
            increment_version(target.as_grad)
    target.lender = lender


def _require_alike(call: Call, target: CutTensor, value: torch.Tensor) -> None:
    if shape_of(value) != target.whole_shape or value.dtype != target.dtype or value.layout != torch.strided:
        raise call.refused(
            f"of shape {tuple(target.whole_shape)} and {target.dtype} would become one of shape "
            f"{tuple(shape_of(value))} and {value.dtype}; a variable stays what it is"
        )
    if not isinstance(value, CutTensor) and value.device != call.devices.device:
        raise call.refused(f"would move it to {value.device}; pieces stay on their logical devices")


def _require_unshared(call: Call, value: torch.Tensor) -> torch.Tensor:
    """A tensor that shares memory with others is known by them, too, and these are not asked. Returned is the tensor
    that lasts as long as anybody has this one: what it is a view of, or itself."""
    with DisableTorchFunctionSubclass():
        memory = local_of(value) if isinstance(value, CutTensor) else value
        base = base_of(memory)
        if tensors_in_storage(memory) > 1 + (base is not None) or not memory.untyped_storage().resizable():
            raise call.refused("would share memory with what others are views of; give it value.clone()")
    return value if base is None or isinstance(value, CutTensor) else base


def require_own_memory(tensors: Iterable[CutTensor], what: str) -> None:
    """Raise `UnsupportedError` for one that shows memory of a tensor that is whole, or cut otherwise, and still there.
    ``what``: is about to write to it."""
    for tensor in tensors:
        if tensor.lender is not None and tensor.lender() is not None:
            raise UnsupportedError(
                f"{what} a variable that is cut over logical devices, of shape {tuple(tensor.whole_shape)}. In this "
                "step it was given the memory of a tensor that is not cut like it, and which the program still has "
                "(variable.data = tensor): that would change on each process in another place. Copy its values "
                "instead, variable.data = tensor.clone()."
            )


def take_own_memory(tensors: Iterable[CutTensor]) -> None:
    """At the end of a step: of what has been given to them whole, keep the piece."""
    for tensor in tensors:
        if tensor.lender is not None:
            with DisableTorchFunctionSubclass():
                _write(local_of(tensor), local_of(tensor).clone(memory_format=torch.contiguous_format))
            tensor.lender = None
