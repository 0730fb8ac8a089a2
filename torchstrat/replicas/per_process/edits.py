"""Parameters that a step's own code has changed in place: where replicas did so differently, the first one's count,
but for rows of tables that a lookup has scaled (`renormed_rows`).

Decay and clamping are the same on every rank and need nothing. Random noise is not: each replica draws its own.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from torchstrat.collectives.agreement import fingerprint
from torchstrat.collectives.communicator import Communicator
from torchstrat.replicas import renormed_rows
from torchstrat.replicas.per_process.state_edits import StateEdits
from torchstrat.replicas.renormed_rows import renormed_weights
from torchstrat.replicas.roster import Roster
from torchstrat.replicas.state import sample


class ParameterEdits:
    """Notices edits by version counters and, because ``.data`` goes around those, by a sample of bytes.

    ``modules()``: all that there are.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]] = tuple) -> None:
        self._modules = modules
        self.state = StateEdits()
        """Of what optimizers keep."""
        self._edited: set[int] = set()  # ids of those that the program has edited in some step
        self._copies: dict[int, torch.Tensor] = {}
        self._noted: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are now equal on all ranks."""
        for tensor in tensors:
            self._noted[id(tensor)] = weakref.ref(tensor), tensor._version
            if self._edited and id(tensor) in self._edited:
                self._copies[id(tensor)] = tensor.detach().clone()

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """A run over ``tensors`` begins. What the program did to them in between it did on all ranks."""
        self._noted, self._copies = {}, {}
        self._edited -= renormed_weights(self._modules()) if self._edited else set()
        self.note(tensors)

    def since_noted(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that the program has edited."""
        found, noted = [], self._noted
        for tensor in tensors:
            known = noted.get(id(tensor))
            if known is not None and tensor._version != known[1] and known[0]() is tensor:
                found.append(tensor)
        if found:
            self._edited.update(map(id, found))
        return found

    def undo(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """After a failure: make them what they were when they were noted. Returns those of which there is no copy, as
        the program has edited them for the first time: copies of all would cost every run."""
        self.state.end()
        self.state.forget()
        edited = self.since_noted(tensors)
        for tensor in edited:
            if id(tensor) in self._copies:
                tensor.data.copy_(self._copies[id(tensor)])
        lost = [tensor for tensor in edited if id(tensor) not in self._copies]
        self.note(edited)
        return lost

    def summary(self, roster: Roster) -> tuple[float, float, float]:
        """Numbers that are equal on ranks whose parameters are."""
        return (*fingerprint(self.since_noted(roster.tensors)), _probe(roster.tensors))

    def make_equal(self, communicator: Communicator, roster: Roster, call: str) -> list[torch.Tensor]:
        """Overwrite what differs with the first rank's; the tensors of which that lost something. All ranks call it,
        when summaries differ."""
        roster = roster.in_common(communicator, call)
        prints = [fingerprint([tensor]) for tensor in roster.tensors]
        everyone = communicator.all_gather_object(prints, call)
        differing = [
            tensor
            for tensor, each in zip(roster.tensors, zip(*everyone, strict=True), strict=True)
            if any(one != each[0] for one in each)
        ]
        scaled = self.level(communicator, differing, call)
        self.note(roster.tensors)
        of_all = {id(tensor) for tensor in scaled}
        return [tensor for tensor in differing if id(tensor) not in of_all]

    def level(self, communicator: Communicator, tensors: list[torch.Tensor], call: str) -> list[torch.Tensor]:
        """Overwrite these with the first rank's, but for rows that a lookup has scaled elsewhere; the tensors that have
        such rows. All ranks call it."""
        known = renormed_weights(self._modules())
        numbers = {number for number, tensor in enumerate(tensors) if id(tensor) in known}
        scaled = renormed_rows.level(communicator, [tensor.data for tensor in tensors], numbers, call)
        return [tensors[number] for number in sorted(scaled)]


def _probe(tensors: Iterable[torch.Tensor]) -> float:
    """A checksum of a few bytes of each tensor in host memory. Reading them on a GPU would make the host wait."""
    return float(zlib.crc32(b"".join(map(sample, tensors))))
