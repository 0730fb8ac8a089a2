"""What a module's ``state_dict()`` has beside its tensors: extra state, and the versions by which it converts old ones.

Versions are in a checkpoint under ``torchstrat.versions.<object>``: by the module's name within the object, what
``state_dict()._metadata`` says of it. In a plain file of ``torch.save`` they are where PyTorch keeps them.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from torchstrat.checkpoint.pieces import OWN, VERSIONS, KeyPath
from torchstrat.checkpoint.selection import is_under
from torchstrat.core import _torch_private

Versions = Mapping[str, Mapping[str, Any]]


def versions_path(name: str) -> KeyPath:
    return (OWN, VERSIONS, name)


def is_extra_state(key: str) -> bool:
    """Whether only the module's ``set_extra_state`` knows what may stand under this name of its ``state_dict()``."""
    return key.rpartition(".")[2] == _torch_private.EXTRA_STATE


def versions_of(state: Mapping[str, Any], name: str = "") -> dict[str, dict[str, Any]] | None:
    """Of a ``state_dict(prefix=f"{name}.")``; None where it has none."""
    found = getattr(state, "_metadata", None)
    if not isinstance(found, Mapping):
        return None
    return {key.removeprefix(name).removeprefix("."): dict(one) for key, one in found.items()}


def with_versions(state: Mapping[str, Any], versions: Versions | None) -> Mapping[str, Any]:
    """As ``load_state_dict`` takes it."""
    if versions is None:
        return state
    whole: Any = OrderedDict(state)
    whole._metadata = OrderedDict((key, dict(one)) for key, one in versions.items())
    return whole  # type: ignore[no-any-return]


def converters(module: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """The modules within that may convert what another version saved, by name, with their version. PyTorch's own only
    fill in what is missing."""
    for name, one in module.named_modules():
        made_by = next(base for base in type(one).__mro__ if "_load_from_state_dict" in vars(base))
        if not made_by.__module__.startswith("torch."):
            yield name, one, one._version


def assumed(module: nn.Module, versions: Versions | None, folder: object) -> Versions | None:
    """The program's own ``versions``, for a checkpoint of an earlier torchstrat, which has none."""
    found = [f"{name or 'the module'} ({type(one).__name__}, {number})" for name, one, number in converters(module)]
    if found:
        warnings.warn(
            f"{folder} was written by a torchstrat that did not keep the versions of modules; they are taken for those "
            f"of this program: {', '.join(found[:6])}. If the checkpoint is older than these, restore it with the "
            "program that wrote it, and save it again with this torchstrat.",
            stacklevel=2,
        )
    return versions


def not_converted(name: str, module: nn.Module, versions: Versions | None, keys: Iterable[str]) -> list[str]:
    """What a module would convert, of variables that it does not see because parameter servers read them: some of those
    that its ``state_dict()`` has under ``keys``."""
    problems = []
    for inside, one, number in converters(module):
        found = (versions or {}).get(inside, {}).get("version")
        is_read = any(is_under(key, inside) for key in keys)
        if found != number and is_read and next(one.parameters(), None) is not None:
            problems.append(
                f"{name}{inside and '.'}{inside} is of version {found} in the checkpoint and {number} in the program: "
                f"{type(one).__name__} converts what it loads, and parameter servers read for themselves. Restore the "
                "checkpoint without parameter servers, and save it again"
            )
    return problems
