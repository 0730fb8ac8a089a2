"""What of a batch is opened: the containers of `torchstrat.core.nest`, and dataclasses.

A program's own containers are rebuilt by their own protocol, or refused by name; values that were computed when one
was made are never those of other rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
from torch.nn.utils.rnn import PackedSequence

from torchstrat.core import nest
from torchstrat.core.errors import WrongTypeError

_MISSING: Final = object()


def is_container(value: Any) -> bool:
    """Whether a batch may have its leaves in ``value``."""
    return nest.is_nested(value) or _is_dataclass(value)


def _is_dataclass(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__dataclass_fields__")


def children(value: Any) -> list[Any]:
    """What a container holds, in order; of a dataclass, what it is made of."""
    if nest.is_nested(value):
        return nest.values_of(value)
    return [getattr(value, name) for name in names(value)]


def rebuild(like: Any, values: list[Any]) -> Any:
    """A container of the kind of ``like`` that holds ``values``.

    Raises:
        WrongTypeError: its class does not take them.
    """
    return nest.rebuild(like, values) if nest.is_nested(like) else _rebuild_dataclass(like, values)


def is_opaque(value: Any) -> bool:
    """Whether a container's parts belong together, so that they are neither cut nor emptied one by one."""
    return isinstance(value, PackedSequence)


def names(value: Any) -> list[str]:
    """Of the fields of a dataclass that it is made of."""
    return [field.name for field in dataclasses.fields(value) if field.init]


def _rebuild_dataclass(like: Any, values: list[Any]) -> Any:
    """By `dataclasses.replace`, so that what ``__post_init__`` computes is that of the new values."""
    given = dict(zip(names(like), values, strict=True))
    try:
        made = dataclasses.replace(like, **given)
        changed = [name for name, value in given.items() if getattr(made, name) is not value]
        if changed:
            raise TypeError(f"its __post_init__ makes something else of {', '.join(changed)}")
        _carry_over(like, made, given)
    except Exception as error:
        raise WrongTypeError(
            f"a batch that is a {type(like).__qualname__} cannot be split over replicas: dataclasses.replace does not "
            f"make one of other rows ({type(error).__name__}: {error}). Hand out a dict, or let the collate function "
            "compute what its __post_init__ does."
        ) from error
    return made


def _carry_over(like: Any, made: Any, given: dict[str, Any]) -> None:
    """Attributes that were set from outside come along; what follows from the fields has been computed anew."""
    others = {field.name for field in dataclasses.fields(like)} | set(getattr(like, "__dict__", ()))
    others -= set(given)
    if not others:
        return
    again = dataclasses.replace(like)
    for name in sorted(others):
        value, computed = getattr(like, name, _MISSING), getattr(again, name, _MISSING)
        if _is_equal(value, computed):
            continue
        if computed is not _MISSING:
            raise TypeError(f"its {name} has been changed since it was made")
        object.__setattr__(made, name, value)


def _is_equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and bool(torch.equal(first, second))
    return type(first) is type(second) and bool(first == second)
