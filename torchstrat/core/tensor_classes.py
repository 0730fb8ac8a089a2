"""Classes of tensors that are asked about what is done with them, and functions of PyTorch by what they do to values.

`WholeValue` stands for a value which lies elsewhere in pieces. Its classes have ``__torch_dispatch__`` and so hear of
what PyTorch reports as no function (``torch.tensor(parameter)``, ``new_tensor``, ``torch.Tensor(parameter)``): these
call operators in the end. They call them again, which PyTorch reports: to the classes that refuse what they do not
know, in a step (`torchstrat.sharding.dtensor.step`) and outside of runs (`torchstrat.sharding.dtensor.no_values`). The
backend's own work, where functions are not reported, goes through.

Checkpoints ask for whole values; the backend that cuts variables says how to get them and how to give others.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torchstrat.core._torch_private import DisableTorchDispatch, alias_of, ignores_functions


class WholeValue(NamedTuple):
    """``get`` and ``put`` may involve other processes, which then make the same calls. ``entry``: makes of this
    process's piece of an entry of an optimizer's state what the program has there."""

    get: Callable[[], torch.Tensor]
    put: Callable[[torch.Tensor], None]
    entry: Callable[[torch.Tensor], torch.Tensor]


_known: dict[int, tuple[weakref.ref[torch.Tensor], WholeValue]] = {}


def stands_for(tensor: torch.Tensor, value: WholeValue) -> None:
    """``tensor``, for as long as it lives. ``value`` must not keep it alive."""
    key = id(tensor)

    def forget(reference: object) -> None:
        if key in _known and _known[key][0] is reference:
            del _known[key]

    _known[key] = weakref.ref(tensor, forget), value


def whole_value_of(tensor: torch.Tensor) -> WholeValue | None:
    """None for a tensor that has its value itself."""
    found = _known.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else None


_memory: dict[type, Callable[[object], torch.Tensor]] = {}


def has_memory(kind: type, piece: Callable[[Any], torch.Tensor]) -> None:
    """Tensors of this very class have no memory but that of their ``piece``."""
    _memory[kind] = piece


def memory_of(value: object) -> Any:
    """What the engine looks at, where the program may have a tensor that stands for the whole: the piece. Of all else,
    itself."""
    piece = _memory.get(type(value))
    return value if piece is None else piece(value)


_PLAIN = "_plain_kind"


def in_place_of(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` as what can take the place of ``tensor``: a parameter of one, with or without a gradient alike."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)


def piece_of(kind: type, value: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """A leaf that shares the memory of ``value``. ``kind``: the variable's class."""
    return alias_of(value, class_of_pieces(kind), requires_grad)


@functools.cache
def class_of_pieces(kind: type) -> type:
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        return kind  # it hears of operators itself

    def passed_on(
        cls: type,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: object = None,
    ) -> object:
        return call_operator(func, args, kwargs)

    members = {"__module__": kind.__module__, "__torch_dispatch__": classmethod(passed_on), _PLAIN: kind}
    if kind is torch.Tensor:  # whose own would make pieces of results, too
        members["__torch_function__"] = ignores_functions
    made: type = type(kind)(kind.__name__, (kind,), members)
    return made


def plain_kind(kind: type) -> Any:
    """The class of a variable, from that of its piece, or from one derived of that."""
    return getattr(kind, _PLAIN, kind)


def call_operator(func: Callable[..., object], args: Sequence[object], kwargs: Any) -> object:
    """Reported like any function; below that, pieces are of no class of their own."""
    with DisableTorchDispatch():
        return func(*args, **(kwargs or {}))


_asking: dict[tuple[type, type], Any] = {}


def asking_class(mixin: type, kind: type) -> Any:
    """A class like ``kind`` whose objects ask ``mixin``."""
    if (mixin, kind) not in _asking:
        _asking[mixin, kind] = type(kind)(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
    return _asking[mixin, kind]


def class_behind(asking: type) -> Any:
    """Of what `asking_class` has made, the ``kind``."""
    return asking.__mro__[2]


def methods(*names: str) -> set[object]:
    return {getattr(torch.Tensor, name) for name in names}


def getter(name: str) -> Callable[[torch.Tensor], object]:
    """What reads the property ``name`` of tensors."""
    read: Callable[[torch.Tensor], object] = getattr(torch.Tensor, name).__get__
    return read


def setter(name: str) -> Callable[[torch.Tensor, object], None]:
    """What writes it."""
    write: Callable[[torch.Tensor, object], None] = getattr(torch.Tensor, name).__set__
    return write


def properties(*names: str) -> set[object]:
    """What reads them."""
    return {*map(getter, names)}


def _is_kind(name: str) -> bool:
    """Whether it is a property that says of which kind a tensor is: ``is_meta``, ``is_cuda``, ``is_quantized`` …"""
    return name.startswith("is_") and not callable(getattr(torch.Tensor, name))


NEEDS_NO_VALUES = frozenset(
    {
        *properties("grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim"),
        *properties("nbytes", "itemsize", "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *properties(*(name for name in dir(torch.Tensor) if _is_kind(name))),
        *methods("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset"),
        *methods("is_contiguous", "is_floating_point", "is_complex", "get_device", "__hash__", "__len__"),
        *methods("is_inference", "is_signed", "is_coalesced", "_is_view", "dim_order"),
        *methods("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(setter("grad"), setter("requires_grad"), torch.Tensor.grad.__delete__),  # type: ignore[union-attr]
    }
)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in positional or keyword arguments, as deep as operators take them: in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
