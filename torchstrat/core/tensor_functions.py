"""Functions of PyTorch by what they do to a tensor's values, for classes that are asked (``__torch_function__``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

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
