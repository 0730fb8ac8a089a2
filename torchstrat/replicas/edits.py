"""Parameters that a step's own code has changed in place: where replicas did so differently, the first one's count.

Decay and clamping are the same on every rank and need nothing. Random noise is not: each replica draws its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from torchstrat.collectives.communicator import Communicator
from torchstrat.replicas.agreement import fingerprint
from torchstrat.replicas.roster import Roster
from torchstrat.replicas.transfer import broadcast_tensors

_PROBED = 4  # elements of each tensor


class ParameterEdits:
    """Notices edits by version counters and, because ``.data`` goes around those, by a sample of elements."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are now equal on all ranks."""
        for tensor in tensors:
            self._noted[id(tensor)] = (weakref.ref(tensor), tensor._version)

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """A run over ``tensors`` begins. What the program did to them in between it did on all ranks."""
        self._noted = {}
        self.note(tensors)

    def since_noted(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for tensor in tensors:
            reference, version = self._noted.get(id(tensor), (None, 0))
            if reference is not None and reference() is tensor and tensor._version != version:
                found.append(tensor.detach())
        return found

    def summary(self, roster: Roster) -> tuple[float, float, float]:
        """Numbers that are equal on ranks whose parameters are."""
        return (*fingerprint(self.since_noted(roster.tensors)), _probe(roster.tensors))

    def make_equal(self, communicator: Communicator, roster: Roster, call: str) -> None:
        """Overwrite what differs with the first rank's. All ranks call it, when summaries differ."""
        roster = roster.in_common(communicator, call)
        prints = [fingerprint([tensor]) for tensor in roster.tensors]
        everyone = communicator.all_gather_object(prints, call)
        differing = [
            tensor.data
            for tensor, each in zip(roster.tensors, zip(*everyone, strict=True), strict=True)
            if any(one != each[0] for one in each)
        ]
        broadcast_tensors(communicator, differing, 0, call)
        self.note(roster.tensors)


def _probe(tensors: Iterable[torch.Tensor]) -> float:
    """A checksum of a few elements of each tensor in host memory. Reading them on a GPU would make the host wait."""
    samples: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        size = tensor.numel()
        if size and tensor.device.type == "cpu" and tensor.is_contiguous():
            count = min(size, _PROBED)
            sample = torch.as_strided(tensor.detach(), (count,), (size // count,), tensor.storage_offset())
            samples.setdefault(tensor.dtype, []).append(sample)
    return fingerprint(torch.cat(pieces) for pieces in samples.values())[0]
