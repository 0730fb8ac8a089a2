"""Hyperparameters of optimizers with one replica per process: where ranks have set other ones, the first rank's count.

In one process they do because the first replica's optimizer is the one that steps. Between processes every rank steps
its copy, or its share, of the parameters with what stands in its own groups, and would never meet the others again.
"""

from __future__ import annotations

import operator
import weakref
import zlib
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.collectives.communicator import Communicator
from torchstrat.replicas.agreement import fingerprint

_PLAIN = (bool, int, float, complex, str, type(None))
_digests: weakref.WeakKeyDictionary[Optimizer, tuple[list[Any], float]] = weakref.WeakKeyDictionary()


def digest(optimizer: Optimizer) -> float:
    """A number that is equal on ranks whose groups are. Every step asks, and hardly any has changed them."""
    values = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    known = _digests.get(optimizer)
    if known is not None and len(known[0]) == len(values) and all(map(operator.is_, known[0], values)):
        found = known[1]
    else:
        found = float(zlib.crc32(repr([value for value in values if _is_plain(value)]).encode()))
        _digests[optimizer] = values, found
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.is_cpu]
    return found + sum(fingerprint(tensors)) if tensors else found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def level(communicator: Communicator, optimizer: Optimizer, call: str) -> None:
    """The first rank's become everyone's. All ranks call it, when digests differ."""
    own = [
        {name: value for name, value in group.items() if _is_plain(value) or isinstance(value, torch.Tensor)}
        for group in optimizer.param_groups
    ]
    for group in own:
        group.pop("params", None)
    told = communicator.broadcast_object(own, 0, call)
    for group, values in zip(optimizer.param_groups, told, strict=False):
        for name, value in values.items():
            here = group.get(name)
            if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor) and here.shape == value.shape:
                with torch.no_grad():
                    here.copy_(value)
            elif not isinstance(here, torch.Tensor):
                group[name] = value
