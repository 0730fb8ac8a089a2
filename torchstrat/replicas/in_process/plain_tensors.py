"""Tensors that a step reaches and that are no state of the strategy: in closures, lists, objects of the program's own.

Replicas of one process share them, so what each does to them in place is done once for each: a sum over rows comes out
as on one device, and an average moves twice. Nobody can tell which of them was meant, so a warning names them.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable

import torch


class PlainTensors:
    """Of one strategy."""

    def __init__(self) -> None:
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._changed_by: dict[int, set[int]] = {}
        self._is_told = False

    def begin(self, tensors: Iterable[torch.Tensor], others: Container[int]) -> None:
        """A run begins. ``others``: the ``id`` of tensors that change hands."""
        self._changed_by = {}
        if self._is_told:
            return
        known = [one for one in tensors if id(one) not in others and not one.is_inference()]
        self._versions = [(one, one._version) for one in known]

    def park(self, replica: int) -> None:
        """The turn of ``replica`` ends."""
        for place, (tensor, version) in enumerate(self._versions):
            if tensor._version != version:
                self._versions[place] = tensor, tensor._version
                self._changed_by.setdefault(place, set()).add(replica)

    def end(self) -> None:
        versions, self._versions = self._versions, []
        found = [versions[place][0] for place, replicas in self._changed_by.items() if len(replicas) > 1]
        if not found:
            return
        self._is_told = True
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.warn(
            f"the step changes a tensor of shape {tuple(found[0].shape)}{more} in place, which is in no module: in a "
            "closure, a list or an object of the program's own. The replicas of this process share it, and each has "
            "changed it, one after the other: what adds up has added up over all of them, but an average has moved "
            "once for each. State that all replicas change alike, to be changed once, belongs into a module as a "
            "buffer or a frozen parameter (torch.nn.Parameter(tensor, requires_grad=False)), or is changed outside of "
            "Strategy.run; return from the step what counts rows. Under torchrun each process has such a tensor for "
            "itself.",
            stacklevel=2,
        )
