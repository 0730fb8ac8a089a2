"""The objects of a checkpoint: what each is made of, under which names, and how it takes its values back.

An item says what is to be written and what it wants to read; it does neither. What lives on parameter servers it only
names: `RemoteSlot` and `RemoteState` go to the servers, which write and read it themselves.

Beside tensors a module's ``state_dict()`` has extra state, and the versions by which it converts old ones. Versions are
in a checkpoint under ``torchstrat.versions.<object>``: by the module's name within the object, what
``state_dict()._metadata`` says of it. In a plain file of ``torch.save`` they are where PyTorch keeps them.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchstrat.checkpoint.pieces import (
    OWN,
    STRUCTURE,
    VERSIONS,
    KeyPath,
    Piece,
    flatten,
    is_block,
    is_of_job,
    is_under,
    key_of,
    restructured,
    structure_of,
    unflatten,
)
from torchstrat.checkpoint.remote import RemoteSlot, RemoteState, RemoteVariable, Servers
from torchstrat.core import _torch_private
from torchstrat.core._torch_private import version_of
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.tensor_classes import whole_value_of
from torchstrat.core.variable.tensor_like import TensorInShards
from torchstrat.core.variable.variable import Variable

if TYPE_CHECKING:
    from torchstrat.checkpoint.files import Stored
    from torchstrat.checkpoint.pieces import Comparison

Versions = Mapping[str, Mapping[str, Any]]


def versions_path(name: str) -> KeyPath:
    return (OWN, VERSIONS, name)


def is_extra_state(key: str) -> bool:
    """Whether only the module's ``set_extra_state`` knows what may stand under this name of its ``state_dict()``."""
    return key.rpartition(".")[2] == _torch_private.EXTRA_STATE


def versions_of(state: Mapping[str, object], name: str = "") -> dict[str, dict[str, Any]] | None:
    """Of a ``state_dict(prefix=f"{name}.")``; None where it has none."""
    found = getattr(state, "_metadata", None)
    if not isinstance(found, Mapping):
        return None
    return {key.removeprefix(name).removeprefix("."): dict(one) for key, one in found.items()}


def with_versions(state: Mapping[str, object], versions: Versions | None) -> Mapping[str, Any]:
    """As ``load_state_dict`` takes it."""
    if versions is None:
        return state
    return _torch_private.with_metadata(state, OrderedDict((key, dict(one)) for key, one in versions.items()))


def converters(module: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """The modules within that may convert what another version saved, by name, with their version. PyTorch's own only
    fill in what is missing."""
    for name, one in module.named_modules():
        made_by = next(base for base in type(one).__mro__ if "_load_from_state_dict" in vars(base))
        if not made_by.__module__.startswith("torch."):
            yield name, one, version_of(one)


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


Want = tuple[Piece, int | None]
"""What to read: a piece and its number of rows; None for the whole tensor, or for another value than a tensor."""


@dataclass
class Writes:
    """What an item has in this process to be written."""

    tensors: list[tuple[Piece, torch.Tensor]] = field(default_factory=list)
    values: list[tuple[KeyPath, object]] = field(default_factory=list)
    replicated: frozenset[KeyPath] = frozenset()
    """Tensors that are equal on all processes that hold them, so that any of these may write them."""


@dataclass
class Reads:
    """What an item wants: ``wants`` here, the rest on the servers. ``put`` takes the values of ``wants``."""

    wants: list[Want] = field(default_factory=list)
    put: Callable[[Sequence[Any]], None] = lambda values: None
    slots: list[RemoteSlot] = field(default_factory=list)
    states: list[tuple[RemoteState, tuple[KeyPath, ...]]] = field(default_factory=list)
    """With the paths of the entries that the checkpoint has, which replace all that there are."""
    problems: Callable[[Sequence[object]], dict[str, str]] = lambda values: {}
    """What does not fit of the values that were read, by name: what could not be seen before. Changes nothing, and
    ``put`` leaves it alone."""


class Item(Protocol):
    """One object of a checkpoint."""

    name: str

    def names(self) -> list[str]:
        """Of what can be restored by itself."""

    def remote_slots(self) -> list[RemoteSlot]: ...
    def remote_states(self) -> list[RemoteState]: ...
    def writes(self) -> Writes: ...

    def reads(self, stored: Stored, comparison: Comparison) -> Reads:
        """Compare what is taken with what is stored, and tell ``comparison`` of what does not fit; changes nothing."""


def expect(stored: Stored, piece: Piece, dtype: torch.dtype | None, comparison: Comparison) -> bool:
    """Whether the checkpoint has this tensor (``dtype`` None: this other value)."""
    key = piece.key
    if key not in stored.paths:
        comparison.missing(key)
        return False
    shape, found = stored.shape(key), stored.dtype(key)
    if (found is None) != (dtype is None):
        comparison.differs(key, f"{key} is {'no' if found is None else 'a'} tensor in the checkpoint")
        return False
    if dtype is not None and (shape != piece.shape or found != dtype):
        text = f"{key} is {found} {shape} in the checkpoint and {dtype} {piece.shape} in the program"
        comparison.differs(key, text)
        return False
    return True


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether it is expanded, so that nothing can be written to it."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return False
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(frozen=True, eq=False)
class _Part:
    """A tensor of a module, or a shard of a `ShardedVariable`. ``key``: in the module's state_dict; None: a shard."""

    piece: Piece
    holder: Any
    key: str | None = None

    @property
    def rows(self) -> int | None:
        shape = self.holder.shape
        return int(shape[0]) if len(shape) else None


class TensorsItem:
    """A module, a `Variable`, a `ShardedVariable` or a tensor. Shards together are one tensor, under the name of the
    whole."""

    def __init__(self, name: str, value: Any, servers: Servers | None) -> None:
        self.name = name
        self._value = value
        self._servers = servers
        self._values: dict[KeyPath, object] = {}
        self._versions: Versions | None = None
        self.parts: list[_Part] = []
        if isinstance(value, TensorInShards):
            self._add_shards((name,), value)
        elif isinstance(value, nn.Module):
            self._add_module(value)
        else:
            self.parts.append(_Part(Piece((name,), tuple(value.shape)), value, ""))

    @property
    def is_module(self) -> bool:
        return isinstance(self._value, nn.Module) and not isinstance(self._value, TensorInShards)

    def _add_module(self, module: nn.Module) -> None:
        sharded = {path: one for path, one in module.named_modules() if isinstance(one, TensorInShards)}
        for path, one in sharded.items():
            self._add_shards((self.name, path), one)
        shards = tuple(f"{path}.part_" for path in sharded)
        # A prefix: what is hooked to the outermost state_dict() of a module on parameter servers fetches all values.
        state = module.state_dict(prefix=f"{self.name}.", keep_vars=True)
        self._versions = versions_of(state, self.name)
        for key, value in state.items():
            key = key.removeprefix(f"{self.name}.")
            if shards and key.startswith(shards):
                continue
            if isinstance(value, torch.Tensor) and is_lazy(value):
                raise InvalidArgumentError(
                    f"{self.name}.{key} has no shape yet: run the lazy module once before it is saved or restored."
                )
            if is_block(value) and not is_extra_state(key):
                self.parts.append(_Part(Piece((self.name, key), tuple(value.shape)), value, key))
            else:
                self._values[self.name, key] = value

    def _add_shards(self, path: KeyPath, sharded: TensorInShards) -> None:
        for shard, (start, _) in zip(sharded.variables, sharded.row_spans, strict=True):
            self.parts.append(_Part(Piece(path, tuple(sharded.shape), start), shard))

    def _spec(self, part: _Part) -> RemoteVariable | None:
        return None if self._servers is None else self._servers.spec_of(part.holder)

    def remote_slots(self) -> list[RemoteSlot]:
        return [RemoteSlot(spec, part.piece) for part in self.parts if (spec := self._spec(part)) is not None]

    def remote_states(self) -> list[RemoteState]:
        return []

    def writes(self) -> Writes:
        here = [part for part in self.parts if self._spec(part) is None]
        # Buffers may differ: each process has seen other rows.
        replicated = frozenset(part.piece.path for part in here if isinstance(part.holder, nn.Parameter | Variable))
        values = [(path, _whole(value)) for path, value in self._values.items()]
        if self._versions is not None:
            values.append((versions_path(self.name), self._versions))
        return Writes([(part.piece, _read(part)) for part in here], values, replicated)

    def names(self) -> list[str]:
        return [*(part.piece.key for part in self.parts), *map(key_of, self._values)]

    def reads(self, stored: Stored, comparison: Comparison) -> Reads:
        takes = comparison.takes
        elsewhere = self._under_other_names(stored)
        missing = {part: other for part, other in elsewhere.items() if takes(part.piece.key)}
        wanted = dict.fromkeys(missing.get(part, part) for part in self.parts if takes(part.piece.key))
        parts = [part for part in wanted if expect(stored, part.piece, _dtype(part.holder), comparison)]
        parts = [part for part in parts if self._expect_own_elements(part, comparison)]
        others = [path for path in self._values if takes(key_of(path))]
        others = [path for path in others if self._expect_value(stored, path, comparison)]
        for key in sorted(stored.under(self.name).keys() - set(self.names())):
            if takes(key):
                comparison.unexpected(key)
        if not parts and not others:
            return Reads()
        versions = self._stored_versions(stored)
        here = [part for part in parts if self._spec(part) is None]
        if len(here) < len(parts) and self.is_module:
            keys = [str(part.piece.path[-1]) for part in parts]
            for problem in not_converted(self.name, self._value, versions, keys):
                comparison.wrong(problem)
        wants: list[Want] = [(part.piece, part.rows) for part in here]
        wants += [(Piece(path, stored.shape(key_of(path)) or ()), None) for path in others]
        remote = [RemoteSlot(spec, part.piece) for part in parts if (spec := self._spec(part)) is not None]
        return Reads(
            wants,
            lambda values: self._put(here, missing, others, values, versions),
            remote,
            problems=lambda values: self._compared(others, values[len(here) :]),
        )

    def _expect_own_elements(self, part: _Part, comparison: Comparison) -> bool:
        """Whether it can be written to, as far as PyTorch says before it does; a module that converts what it loads may
        replace what it has."""
        convert = (name for name, _, _ in converters(self._value)) if self.is_module else ()
        if not isinstance(part.holder, torch.Tensor) or not shares_elements(part.holder):
            return True
        if any(is_under(part.key or "", name) for name in convert):
            return True
        comparison.differs(
            part.piece.key,
            f"{part.piece.key} of shape {tuple(part.holder.shape)} is expanded in the program: several of its elements "
            "are one place in memory, which takes no values of theirs; make it a .clone()",
        )
        return False

    def _under_other_names(self, stored: Stored) -> dict[_Part, _Part]:
        """The parts that the checkpoint does not have under their own name, each with one that is the same tensor."""
        there = {id(part.holder): part for part in self.parts if part.piece.key in stored.paths}
        return {
            part: there[id(part.holder)]
            for part in self.parts
            if part.piece.key not in stored.paths and id(part.holder) in there
        }

    def _expect_value(self, stored: Stored, path: KeyPath, comparison: Comparison) -> bool:
        piece = Piece(path, ())
        if is_extra_state(str(path[-1])) and piece.key in stored.paths:
            return True
        return expect(stored, piece, None, comparison)

    def _stored_versions(self, stored: Stored) -> Versions | None:
        path = versions_path(self.name)
        if key_of(path) in stored.paths:
            [found] = stored.read([(Piece(path, ()), None)])
            return found  # type: ignore[no-any-return]
        if self.is_module and any(is_of_job(path) for path in stored.under(OWN).values()):
            return assumed(self._value, self._versions, stored.folder)
        return None

    def _compared(self, paths: Sequence[KeyPath], values: Sequence[object]) -> dict[str, str]:
        """Of tensors that are no blocks, whose shapes are known once they are read."""
        problems = {}
        for path, value in zip(paths, values, strict=True):
            own, key = self._values[path], key_of(path)
            if isinstance(own, torch.Tensor) and not is_extra_state(str(path[-1])) and _kind(own) != _kind(value):
                problems[key] = f"{key} is {_kind(value)} in the checkpoint and {_kind(own)} in the program"
        return problems

    def _put(
        self,
        parts: Sequence[_Part],
        missing: Mapping[_Part, _Part],
        others: Sequence[KeyPath],
        values: Sequence[Any],
        versions: Versions | None,
    ) -> None:
        of_module: dict[str, object] = {}
        for part, value in zip(parts, values, strict=False):
            if part.key and isinstance(self._value, nn.Module):
                of_module[part.key] = value
            else:
                _write(part, value)
        for part, other in missing.items():
            if other.key in of_module and part.key:
                of_module[part.key] = of_module[other.key]
        skipped = self._compared(others, values[len(parts) :])
        for path, value in zip(others, values[len(parts) :], strict=True):
            if key_of(path) not in skipped:
                of_module[str(path[1])] = value
        if of_module:  # names have been compared already
            self._value.load_state_dict(with_versions(of_module, versions), strict=False)


def _kind(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} {tuple(value.shape)} ({str(value.layout).removeprefix('torch.')})"


def _whole(value: object) -> Any:
    """With its numbers, where it stands for numbers elsewhere."""
    elsewhere = whole_value_of(value) if isinstance(value, torch.Tensor) and value.is_meta else None
    return value if elsewhere is None else elsewhere.get()


def _dtype(holder: torch.Tensor | Variable) -> torch.dtype:
    return holder.dtype


def _read(part: _Part) -> torch.Tensor:
    if isinstance(part.holder, Variable):
        return part.holder.read_value()
    tensor: torch.Tensor = part.holder if isinstance(part.holder, torch.Tensor) else part.holder.read()
    elsewhere = whole_value_of(tensor)
    if elsewhere is not None:
        return elsewhere.get()
    if tensor.is_meta:
        raise InvalidArgumentError(
            f"{part.piece.key} is on meta and has no value: it is on no parameter server of an open strategy. Create "
            "it in the scope of the strategy, or give it a device."
        )
    return tensor


def _write(part: _Part, value: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(part.holder, Variable):
            part.holder.assign(value)
        elif isinstance(part.holder, torch.Tensor):
            elsewhere = whole_value_of(part.holder)
            if elsewhere is None:
                part.holder.copy_(value)
            else:
                elsewhere.put(value)
        else:
            part.holder.edit("assign", value)


class StatefulItem:
    """Anything else with ``state_dict()`` and ``load_state_dict()``: schedulers, scalers, what the user has made."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self._value = value

    def remote_slots(self) -> list[RemoteSlot]:
        return []

    def remote_states(self) -> list[RemoteState]:
        return []

    def writes(self) -> Writes:
        writes = Writes()
        state = self._value.state_dict()
        structure = structure_of(state)
        if structure is not None:
            writes.values.append(((OWN, STRUCTURE, self.name), structure))
        for path, value in flatten((self.name,), state).items():
            if is_block(value) and not value.is_meta:
                writes.tensors.append((Piece(path, tuple(value.shape)), value))
            else:
                writes.values.append((path, value))
        return writes

    def names(self) -> list[str]:
        return [self.name]

    def reads(self, stored: Stored, comparison: Comparison) -> Reads:
        if not comparison.takes(self.name):
            return Reads()
        paths = list(stored.under(self.name).values())
        if not paths:
            comparison.missing(self.name)
            return Reads()
        about: KeyPath = (OWN, STRUCTURE, self.name)
        there = [about] if key_of(about) in stored.paths else []
        wants: list[Want] = [(Piece(path, ()), None) for path in (*paths, *there)]

        def put(values: Sequence[Any]) -> None:
            state = unflatten(dict(zip(paths, values, strict=False)), depth=1)
            self._value.load_state_dict(restructured(values[-1], state) if there else state)

        return Reads(wants, put)
