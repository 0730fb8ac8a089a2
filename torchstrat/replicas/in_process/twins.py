"""Modules that a step makes anew on every replica of one process: what each makes in the place of the first one's is
the same variable, as it is between processes. It begins with the first one's values, and gradients are combined."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchstrat.replicas.newborn import parameters_of
from torchstrat.replicas.roster import Roster


class _Use(NamedTuple):
    module: weakref.ref[nn.Module]
    kind: type
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    """As they were before."""


class Twins:
    """Of one run. Modules are told apart by when a replica uses them first: the first one's third new module and
    another's third are twins, unless they are one and the same."""

    def __init__(self) -> None:
        self._uses: dict[int, list[_Use]] = {}
        self._first_of: dict[int, torch.Tensor] = {}  # by `id` of another replica's

    def begin(self, replicas: Sequence[int]) -> None:
        self._uses = {replica: [] for replica in replicas}

    def end(self) -> None:
        self._uses, self._first_of = {}, {}

    def note_use(self, module: nn.Module, replica: int) -> None:
        """``replica`` uses a module that has been made in this run, or given a member."""
        uses = self._uses[replica]
        if not any(use.module() is module for use in uses):
            is_first = uses is next(iter(self._uses.values()))
            buffers = [buffer.detach().clone() for buffer in _buffers_of(module)] if is_first else []
            uses.append(_Use(weakref.ref(module), type(module), parameters_of(module), buffers))

    def pair(self, module: nn.Module, replica: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``replica`` has made a module and is about to use it. It gets the first one's buffers; the result has its
        parameters, and the first replica's like them."""
        first = next(iter(self._uses.values()))
        number, own = len(self._uses[replica]), parameters_of(module)
        if first is self._uses[replica] or number >= len(first) or first[number].module() is module:
            return []
        _, kind, theirs, buffers = first[number]
        if kind is not type(module) or _kinds(own) != _kinds(theirs):
            return []
        pairs = list(zip(own, theirs, strict=True))
        self._first_of.update((id(one), other) for one, other in pairs)
        if _kinds(_buffers_of(module)) == _kinds(buffers):
            for buffer, found in zip(_buffers_of(module), buffers, strict=True):
                buffer.data.copy_(found)
        return pairs

    def are_of_first(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether each of these is a twin of one of the first replica's."""
        return all(id(tensor) in self._first_of for tensor in tensors)

    def renamed(self, roster: Roster, hidden: set[int]) -> Roster:
        """Without the ``hidden`` ones; twins under the names, and in the places, that the first replica's have."""
        names = {id(tensor): name for name, tensor in roster.items()}
        own = {}
        for name, tensor in roster.items():
            if id(tensor) not in hidden:
                first = self._first_of.get(id(tensor))
                own[name if first is None else names.get(id(first), name)] = tensor
        return Roster.of({name: own[name] for name in roster.names if name in own})


def _buffers_of(module: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in module._buffers.values() if buffer is not None and not is_lazy(buffer)]


def _kinds(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]
