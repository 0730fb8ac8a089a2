"""Hyperparameters of optimizers: where replicas have set other ones, the first one's count.

In one process they do because the first replica's optimizer is the one that steps. Between processes every rank steps
its copy, or its share, of the parameters with what stands in its own groups, and would never meet the others again.
"""

from __future__ import annotations

import operator
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchstrat.collectives.agreement import fingerprint
from torchstrat.collectives.communicator import Communicator

_PLAIN = (bool, int, float, complex, str, type(None))


class _Digest(NamedTuple):
    found: list[Any]
    """All that there is in the groups, the lists of parameters among it."""
    number: float
    tensors: list[torch.Tensor]
    """Those among the values, which may be edited in place and are not in the number."""


_digests: weakref.WeakKeyDictionary[Optimizer, _Digest] = weakref.WeakKeyDictionary()


class Difference(NamedTuple):
    group: int
    name: str
    first: Any
    other: Any


def places(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """Where an optimizer with these ``attributes`` keeps what its step may set: a count, the next rate."""
    return [attributes, *attributes.get("param_groups", ())]


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What it has there now."""
    return [dict(place) for place in places(vars(optimizer))]


def put(attributes: dict[str, Any], changed: Sequence[Mapping[str, Any]]) -> None:
    """Make in another replica's optimizer the `changes` that there were in one."""
    for place, values in zip(places(attributes), changed, strict=False):
        place.update(values)


def changes(optimizer: Optimizer, before: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The values there that are not those of ``before``, but for parameters."""
    return [
        {
            name: value
            for name, value in place.items()
            if name != "params" and earlier.get(name, _NOTHING) is not value and _is_value(value)
        }
        for place, earlier in zip(places(vars(optimizer)), before, strict=False)
    ]


_NOTHING = object()


def digest(optimizer: Optimizer) -> float:
    """A number that is equal on ranks whose groups are. Every step asks, and hardly any has changed them."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        found += group.values()
    known = _digests.get(optimizer)
    if known is None or len(known.found) != len(found) or not all(map(operator.is_, known.found, found)):
        values = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
        known = _digest_of(found, values)
        if not any(map(_may_change, values)):
            _digests[optimizer] = known
    return known.number + sum(fingerprint(known.tensors)) if known.tensors else known.number


def _digest_of(found: list[Any], values: list[Any]) -> _Digest:
    number = float(zlib.crc32(repr([value for value in values if is_plain(value)]).encode()))
    return _Digest(found, number, [one for one in values if isinstance(one, torch.Tensor) and one.is_cpu])


def _may_change(value: Any) -> bool:
    """Whether it may become another plain value and stay the same object, as ``group["betas"][0] = 0.8`` makes it."""
    return isinstance(value, list) or (isinstance(value, tuple) and any(map(_may_change, value)))


def _is_value(value: Any) -> bool:
    return is_plain(value) or isinstance(value, torch.Tensor)


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text or the like, or a list or tuple of these."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(is_plain, value)))


def differing(first: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> Difference | None:
    """The first plain value that two replicas' groups, or attributes, do not have alike."""
    for number, (group, other) in enumerate(zip(first, others, strict=False)):
        for name, value in group.items():
            theirs = other.get(name)
            if value is not theirs and name != "params" and is_plain(value) and is_plain(theirs) and value != theirs:
                return Difference(number, name, value, theirs)
    return None


def level(communicator: Communicator, optimizer: Optimizer, call: str) -> Difference | None:
    """The first rank's become everyone's. All ranks call it, when digests differ; they come to the same `differing`."""
    own = [{name: value for name, value in group.items() if _is_value(value)} for group in optimizer.param_groups]
    for group in own:
        group.pop("params", None)
    told, *others = communicator.all_gather_object(own, call)
    for group, values in zip(optimizer.param_groups, told, strict=False):
        for name, value in values.items():
            here = group.get(name)
            if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor) and here.shape == value.shape:
                with torch.no_grad():
                    here.copy_(value)
            elif not isinstance(here, torch.Tensor):
                group[name] = value
    return next((found for one in others if (found := differing(told, one)) is not None), None)
