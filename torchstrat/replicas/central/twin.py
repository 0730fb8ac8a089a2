"""A rank's own part of a step: an optimizer of the user's class over parts of the parameters, in common memory.

The user's own object is not stepped: its parameters and its state are what this rank is shown, and stay so. The twin
reads the hyperparameters anew at every step, because schedulers change them.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.core.optimizers import State, stand_in_of
from torchstrat.distributed.collectives.shared_memory.device_copies import DeviceCopies
from torchstrat.replicas.central.parameters import CentralParameters
from torchstrat.replicas.central.portions import Part
from torchstrat.replicas.central.state import CentralState, Made

_MISSING = object()


class _Piece:
    """One part: the leaf that is stepped, and what its state was before."""

    __slots__ = ("known", "leaf", "part", "tensor")

    def __init__(self, part: Part, tensor: torch.Tensor, leaf: torch.Tensor, known: dict[str, Any]) -> None:
        self.part, self.tensor, self.leaf, self.known = part, tensor, leaf, known

    @property
    def is_whole(self) -> bool:
        return self.part.stop - self.part.start == self.tensor.numel()

    def gradient(self) -> torch.Tensor | None:
        gradient = self.tensor.grad
        if gradient is not None and not self.is_whole:
            gradient = gradient.detach().reshape(-1)[self.part.start : self.part.stop]
        return gradient


class Twin:
    """Of one optimizer, for these parts of its ``tensors``.

    ``copies``: of a rank whose gradients, and some of whose parameters, lie on a device. The step is made on the host.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[Part],
        parameters: CentralParameters,
        state: CentralState,
        copies: DeviceCopies | None = None,
    ) -> None:
        self._copies = copies
        self._outside: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device without a place on the host
        self._state: State = collections.defaultdict(dict)
        self._pieces: dict[int, list[_Piece]] = {}
        for part in parts:
            tensor = tensors[part.number]
            leaf = _leaf(part, tensor, parameters)
            known = _state_of_part(part, tensor, optimizer, state)
            if copies is not None:
                known = _on_host(known, copies)
                if leaf is tensor and copies.has(tensor):
                    leaf = torch.empty(tensor.shape, dtype=tensor.dtype)
                    self._outside.append((tensor, leaf))
            if known:
                self._state[leaf] = dict(known)
            self._pieces.setdefault(id(tensor), []).append(_Piece(part, tensor, leaf, known))

    def make(self, optimizer: Optimizer) -> Optimizer:
        """What is stepped instead of ``optimizer``, with this step's gradients."""
        if self._copies is not None:
            return self._make_on_host(optimizer, self._copies)
        groups = []
        for group in optimizer.param_groups:
            pieces = [piece for tensor in group["params"] for piece in self._pieces.get(id(tensor), ())]
            for piece in pieces:
                piece.leaf.grad = piece.gradient()
            groups.append({**group, "params": [piece.leaf for piece in pieces]})
        return stand_in_of(type(optimizer), vars(optimizer), groups, self._state)

    def _make_on_host(self, optimizer: Optimizer, copies: DeviceCopies) -> Optimizer:
        """The same where gradients have to be copied first; and numbers that the optimizer keeps on the device, such as
        a gradient scaler's."""
        all_pieces = [
            [piece for tensor in group["params"] for piece in self._pieces.get(id(tensor), ())]
            for group in optimizer.param_groups
        ]
        copies.read([tensor.data for tensor, _ in self._outside], [leaf for _, leaf in self._outside])
        stepped = [
            (piece, gradient) for pieces in all_pieces for piece in pieces if (gradient := piece.gradient()) is not None
        ]
        for (piece, _), gradient in zip(stepped, copies.to_host([one for _, one in stepped]), strict=True):
            piece.leaf.grad = gradient
        groups = [
            {**_on_host(group, copies), "params": [piece.leaf for piece in pieces]}
            for group, pieces in zip(optimizer.param_groups, all_pieces, strict=True)
        ]
        return stand_in_of(type(optimizer), _on_host(vars(optimizer), copies), groups, self._state)

    def made(self) -> list[Made]:
        """After the step: the entries of state that are new; and sparse ones, which no other rank sees."""
        found = []
        for pieces in self._pieces.values():
            for piece in pieces:
                for name, value in self._state.get(piece.leaf, {}).items():
                    if piece.known.get(name, _MISSING) is not value or is_sparse(value):
                        found.append(Made(piece.part, name, value))
        return found

    def let_go(self) -> None:
        """The gradients are the program's again, which may want their memory back."""
        for pieces in self._pieces.values():
            for piece in pieces:
                if piece.leaf is not piece.tensor:
                    piece.leaf.grad = None
        if self._copies is not None:
            self._copies.to_device([leaf for _, leaf in self._outside], [tensor.data for tensor, _ in self._outside])

    def states(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """By parameter, where every part is a whole one."""
        all_pieces = (piece for pieces in self._pieces.values() for piece in pieces)
        return [(piece.tensor, self._state[piece.leaf]) for piece in all_pieces if piece.leaf in self._state]


def is_sparse(value: Any) -> bool:
    """Whether it is a tensor that cannot lie in common memory: a rank that steps it in place has told nobody."""
    return isinstance(value, torch.Tensor) and value.layout != torch.strided


def _on_host(values: dict[str, Any], copies: DeviceCopies) -> dict[str, Any]:
    return {n: copies.on_host(value) if isinstance(value, torch.Tensor) else value for n, value in values.items()}


def _leaf(part: Part, tensor: torch.Tensor, parameters: CentralParameters) -> torch.Tensor:
    place = parameters.place_of(tensor)
    if place is None:
        return tensor
    written = place.written.detach()
    is_whole = part.stop - part.start == tensor.numel()
    return written if is_whole else written.view(-1)[part.start : part.stop]


def _state_of_part(part: Part, tensor: torch.Tensor, optimizer: Optimizer, state: CentralState) -> dict[str, Any]:
    entries = state.entries(optimizer, tensor)
    if part.stop - part.start == tensor.numel():
        here = optimizer.state.get(tensor) or {}
        known = {name: value for name, value in here.items() if name not in entries or entries[name].value is not value}
        return known | {
            name: entry.value if entry.place is None else entry.place.written
            for name, entry in entries.items()
            if here.get(name) is entry.value
        }
    values = {}
    for name, entry in entries.items():
        value = entry.value
        if entry.place is not None:
            value = entry.place.written
            if value.shape == tensor.shape:
                value = value.view(-1)[part.start : part.stop]
            elif part.start > 0:
                value = value.clone()  # a count of steps, say: the rank with the first element keeps everyone's
        values[name] = value
    return values
