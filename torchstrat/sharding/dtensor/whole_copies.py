"""Whole values of what is cut that the program has: from ``state_dict()``, or given to ``load_state_dict()``.

On one device these are what steps change, and here they are copies. Where a program loads one of them again it gets
what one device would have there by then, and not what there was. A ``copy.deepcopy`` of them is a copy everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from torchstrat.core._torch_private import version_of
from torchstrat.core.errors import UnsupportedError
from torchstrat.sharding.dtensor.cut_tensors import CutTensor, local_of


class _Copy(NamedTuple):
    whole: weakref.ref[torch.Tensor]
    version: int
    source: Callable[[], CutTensor]
    source_version: int


class WholeCopies:
    """Of the variables of one strategy, and of what optimizers keep of them."""

    def __init__(self) -> None:
        self._known: dict[int, _Copy] = {}

    def note(self, whole: torch.Tensor, source: Callable[[], CutTensor]) -> None:
        """``whole`` has the values of what ``source()`` gives, and would be it on one device."""
        key = id(whole)

        def forget(reference: object) -> None:
            if key in self._known and self._known[key].whole is reference:
                del self._known[key]

        version = version_of(local_of(source()))
        self._known[key] = _Copy(weakref.ref(whole, forget), version_of(whole), source, version)

    def current(self, value: torch.Tensor) -> torch.Tensor:
        """What ``value`` would be by now: itself, where it is no copy. What the program has written to it is so there,
        too.

        Raises `UnsupportedError` where steps have changed it as well.
        """
        known = self._known.get(id(value))
        if known is None or known.whole() is not value:
            return value
        source = known.source()
        if version_of(value) != known.version:
            piece = local_of(source)
            if version_of(piece) != known.source_version:
                raise UnsupportedError(
                    "load_state_dict was given a tensor that state_dict() has returned, or that was loaded before, for "
                    "a parameter that is cut over logical devices, and both the program and steps have changed it "
                    "since. On one device it is one tensor, which both change. Take a copy.deepcopy of a state to "
                    "change it."
                )
            with torch.no_grad():
                piece.copy_(source.devices.own_piece(value.detach(), source.cut))
            self.note(value, known.source)
        return source
