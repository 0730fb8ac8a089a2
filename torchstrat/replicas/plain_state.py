"""What is no tensor and differs by process: modes, ``requires_grad``, plain attributes of modules, and what schedulers
and scalers keep. Where ranks have set any of it differently in a run, the first one's lasts, as in one process."""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat.collectives.communicator import Communicator
from torchstrat.replicas.optimizer_state import is_plain
from torchstrat.variables import Members, VariableRegistry

_OF_MODULES = frozenset(vars(nn.Module()))

Attributes = dict[tuple[int, str], bytes]
"""By the number of a module and the name of its attribute."""


def _helpers(members: Members) -> Iterator[Any]:
    """Schedulers and scalers."""
    return (one for one in members.helpers if not isinstance(one, Optimizer))


def _plain_of(helper: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(helper).items() if is_plain(value)}


def digest(members: Members) -> float:
    """Equal on ranks that have it alike, but for attributes of modules, which each replica has for itself."""
    flags = [module.training for module in members.modules]
    flags += [tensor.requires_grad for tensor in members.tensors]
    found = zlib.crc32(bytes(flags))
    for helper in members.helpers:
        if not isinstance(helper, Optimizer):
            found = zlib.crc32(repr(_plain_of(helper)).encode(), found)
    return float(found)


def level(communicator: Communicator, registry: VariableRegistry, source: int, call: str) -> None:
    """That of rank ``source`` becomes everyone's. All ranks call it."""
    members, tensors = registry.members(), registry.named_tensors()
    own = (
        {registry.number_of(module): module.training for module in members.modules},
        {name: tensor.requires_grad for name, tensor in tensors.items()},
        [_plain_of(one) for one in _helpers(members)],
    )
    modes, flags, kept = communicator.broadcast_object(own, source, call)
    for module in members.modules:
        module.training = modes.get(registry.number_of(module), module.training)
    for name, tensor in tensors.items():
        flag = flags.get(name, tensor.requires_grad)
        if flag != tensor.requires_grad and tensor.is_leaf and not is_lazy(tensor):
            tensor.requires_grad_(flag)
    for helper, told in zip(_helpers(members), kept, strict=False):
        vars(helper).update({name: value for name, value in told.items() if vars(helper).get(name) != value})


# -- attributes of modules: handed to ranks that have no rows in a run -------------------------------------------------


def attributes(registry: VariableRegistry) -> Attributes:
    """Those that can be handed over: no modules, parameters and what holds such."""
    found = {}
    for module in registry.modules():
        for name, value in vars(module).items():
            if name not in _OF_MODULES and (content := _pickled(value)) is not None:
                found[registry.number_of(module), name] = content
    return found


def changed(registry: VariableRegistry, before: Attributes) -> Attributes:
    return {key: content for key, content in attributes(registry).items() if before.get(key) != content}


def put(registry: VariableRegistry, told: Attributes) -> None:
    """Containers stay the objects that they are: the program may have others' references to them."""
    modules = {registry.number_of(module): module for module in registry.modules()}
    for (number, name), content in told.items():
        if number in modules:
            own, value = vars(modules[number]), pickle.loads(content)  # of a rank of this job
            if not _fill(own.get(name), value):
                own[name] = value


def _fill(own: Any, value: Any) -> bool:
    """Whether ``own`` has become what ``value`` is. Only what is one module's own may: an enumeration's member, a
    function or a frozen data class is there once, and others have it too."""
    if type(own) is not type(value):
        return False
    if isinstance(own, list):
        own[:] = value
    elif isinstance(own, dict):
        own.clear()
        own.update(value)
    elif not _is_own_data(own):
        return False
    if hasattr(own, "__dict__"):
        vars(own).clear()
        vars(own).update(vars(value))
    return True


def _is_own_data(value: Any) -> bool:
    if not dataclasses.is_dataclass(value) or isinstance(value, type | enum.Enum) or not hasattr(value, "__dict__"):
        return False
    return not value.__dataclass_params__.frozen  # type: ignore[attr-defined]


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> None:
        if isinstance(value, nn.Module) or (isinstance(value, torch.Tensor) and value.requires_grad):
            raise pickle.PicklingError("is not plain")


def _pickled(value: Any) -> bytes | None:
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except Exception:
        return None
    return file.getvalue()
