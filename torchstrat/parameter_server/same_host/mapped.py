"""The memory of a caller, as the process that it calls sees it."""

from __future__ import annotations

import math
import os

import numpy as np
import torch

from torchstrat.collectives.shared_memory.segment import Segment
from torchstrat.errors import CommunicationError
from torchstrat.parameter_server.same_host.pool import Place


class MappedMemory:
    """Segments of another process, by its numbers for them. For one thread."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def add(self, number: int, descriptor: int) -> None:
        """Map a segment, whose descriptor is then closed."""
        segment = Segment(descriptor, os.fstat(descriptor).st_size)
        segment.close()  # the descriptor: the memory stays as long as it is mapped
        self._segments[number] = segment

    def tensor(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What lies there, as long as the caller leaves it there. It keeps the segment mapped."""
        size = math.prod(shape) * dtype.itemsize
        segment = self._segments.get(place.segment)
        if segment is None or not 0 <= place.offset <= segment.size - size:
            raise CommunicationError(f"a message refers to {size} bytes at {place}, which its sender does not share.")
        array = np.ndarray((size,), np.uint8, buffer=segment.mapping, offset=place.offset)
        return torch.from_numpy(array).view(dtype).view(shape)

    def remove(self, number: int) -> None:
        """Its owner uses it no more. It stays mapped as long as a tensor is in it."""
        self._segments.pop(number, None)

    def clear(self) -> None:
        self._segments.clear()
