"""What a variable that is cut is outside of `run`: a tensor that has a shape and no values, and says so.

Whatever is not known to need none raises `ContextError`: reading and writing, by whatever way. PyTorch does not: its
tensors on ``meta`` take every write without a word, some functions of ``torch.nn.init`` return at once for them, and on
the CPU a linear layer of a tensor with weights on ``meta`` returns a tensor with whatever was in memory. So these
tensors tell of the device where the pieces are, and nothing else of what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchstrat.core import gradients
from torchstrat.core._torch_private import DisableTorchFunctionSubclass, can_show_memory_of, foreach_zero_
from torchstrat.core.errors import ContextError
from torchstrat.core.tensor_classes import getter, methods, piece_of, properties, setter, tensors_in

METADATA = {  # what can be asked of a tensor without a look at its elements
    *properties(
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "itemsize", "nbytes"
    ),
    *properties("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
    *methods("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "get_device"),
    *methods("__len__", "retain_grad", "requires_grad_"),
    setter("requires_grad"),
    *(gradients.register_hook, gradients.told_hook, torch.is_floating_point, torch.is_complex, torch.numel),
    can_show_memory_of,
}


NOTE = "_without_values"
"""The attribute of such a tensor that has what is known of it."""


@dataclass(frozen=True)
class Note:
    """``what``: what it is, for errors. ``device``: where the pieces are. ``zero``: sets the pieces to 0. ``copy``: a
    tensor like it, whose pieces are copies."""

    what: str
    device: torch.device
    zero: Callable[[], None] | None = None
    copy: Callable[[], torch.Tensor] | None = None


def without_values(tensor: torch.Tensor, note: Note) -> torch.Tensor:
    """``tensor``, on meta and made by `piece_of`, as one that raises `ContextError` where values are needed."""
    tensor.__class__ = _class_of(type(tensor))
    vars(tensor)[NOTE] = note
    return tensor


_DEVICES: dict[object, Callable[[torch.device], object]] = {
    **dict.fromkeys(properties("device"), lambda device: device),
    **dict.fromkeys(properties("is_meta"), lambda device: False),
    **dict.fromkeys(properties("is_cpu"), lambda device: device.type == "cpu"),
    **dict.fromkeys(properties("is_cuda"), lambda device: device.type == "cuda"),
    torch.Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index,
}
_ALIASES = {torch.Tensor.detach, torch.detach, getter("data")}
"""What returns the same values under another name: there are none under that, too."""
_NEEDS_NO_VALUES = METADATA | {
    *properties(
        "grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "retains_grad", "name", "output_nr"
    ),
    *map(setter, ("grad", "_backward_hooks")),
    *(gradients.register_post_accumulate_grad_hook, gradients.told_post_accumulate_grad_hook),
    *methods("__repr__", "__format__", "__hash__", "stride", "is_contiguous", "storage_offset"),
    *methods("is_shared", "is_same_size"),
}


_CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}
_MAY_CHANGE_NOTHING = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.copy_, setter("data"), *_CASTS}


@functools.cache
def _class_of(kind: type) -> type:
    if kind.__dict__.get("_has_no_values", False):
        return kind

    def torch_function(
        cls: type,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        with DisableTorchFunctionSubclass():
            return _asked(func, args, kwargs or {})

    members = {
        "__module__": kind.__module__,
        "__torch_function__": classmethod(torch_function),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
        "set_": _set,
        "_has_no_values": True,
    }
    made: type = type(kind)(kind.__name__, (kind,), members)
    return made


def _asked(func: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> object:
    first = args[0] if args else None
    note: Note | None = vars(first).get(NOTE) if isinstance(first, torch.Tensor) else None
    if note is not None and isinstance(first, torch.Tensor):
        if func in _DEVICES:
            return _DEVICES[func](note.device)
        if func in _NEEDS_NO_VALUES:
            return func(*args, **kwargs)
        if func in _ALIASES:
            alias = func(*args, **kwargs)
            assert isinstance(alias, torch.Tensor)
            return without_values(piece_of(torch.Tensor, alias, requires_grad=False), note)
        if func in _MAY_CHANGE_NOTHING and _changes_nothing(func, first, args, kwargs):
            return first
        if func is torch.Tensor.zero_ and note.zero is not None:
            note.zero()
            return first
    if func is foreach_zero_ and all(NOTE in vars(one) for one in tensors_in(args)):
        for one in tensors_in(args):
            _asked(torch.Tensor.zero_, (one,), {})
        return None
    known = [vars(one)[NOTE] for one in tensors_in((args, kwargs)) if NOTE in vars(one)]
    raise _refused(getattr(func, "__name__", str(func)), known[0].what if known else "a variable")


def _changes_nothing(func: object, first: torch.Tensor, args: Sequence[object], kwargs: dict[str, object]) -> bool:
    """Whether it makes the tensor what it is, moves it to where it is, or writes its own values to it."""
    if func in _CASTS:
        return first.dtype == _CASTS[func]
    if func is torch.Tensor.cpu:
        return _changes_nothing(torch.Tensor.to, first, (first, "cpu"), {})
    if func is not torch.Tensor.to:
        other = args[1] if len(args) > 1 else None
        return isinstance(other, torch.Tensor) and vars(other).get(NOTE) is vars(first)[NOTE]
    note: Note = vars(first)[NOTE]
    given = [*args[1:], *(value for name, value in kwargs.items() if name in ("device", "dtype"))]
    if kwargs.get("copy") or True in given[2:]:
        return False
    for one in given:
        if isinstance(one, torch.dtype):
            if one != first.dtype:
                return False
        elif isinstance(one, str | torch.device | int) and not isinstance(one, bool):
            device = torch.device(one)
            if device.type != note.device.type or device.index not in (None, note.device.index, 0):
                return False
        elif isinstance(one, torch.Tensor):
            return False
    return True


def _refused(name: str, what: str) -> ContextError:
    return ContextError(
        f"{name} was called outside of run with {what} that is cut over logical devices, where no process has its "
        "values. Call it in the function that strategy.run calls, where it is whole to the program; use what "
        "state_dict() returns to read values outside, and load_state_dict() or Checkpoint.restore to give others."
    )


def _deepcopy(self: torch.Tensor, memo: dict[int, torch.Tensor]) -> torch.Tensor:
    if id(self) in memo:
        return memo[id(self)]
    note: Note = vars(self)[NOTE]
    if note.copy is None:
        raise _refused("copy.deepcopy", note.what)
    memo[id(self)] = made = note.copy()
    return made


def _set(self: torch.Tensor, *_: object) -> object:
    """Which PyTorch does not report."""
    raise _refused("set_", vars(self)[NOTE].what)


def _reduce_ex(self: torch.Tensor, protocol: object) -> object:
    raise ContextError(
        f"{vars(self)[NOTE].what} that is cut over logical devices cannot be pickled, nor can a model that has one: "
        "its values are in pieces. Save model.state_dict(), which every logical device calls, or use Checkpoint.save."
    )
