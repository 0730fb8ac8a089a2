"""Tensors put into memory that is shared, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchstrat.parameter_server.same_host.message import DTYPE_NUMBERS, INLINE_BYTES, Part, inline
from torchstrat.parameter_server.same_host.pool import Place
from torchstrat.parameter_server.worker import phases

_ALIGNED = 64
_MOST_INLINE_BYTES = 32 << 10  # in one message


def split_inline(tensors: Sequence[torch.Tensor]) -> tuple[list[Part | None], list[int]]:
    """The parts of those that travel in the message itself, and the indices of the others, whose parts are None."""
    parts: list[Part | None] = []
    others: list[int] = []
    left = _MOST_INLINE_BYTES
    for index, tensor in enumerate(tensors):
        size = tensor.nbytes
        if size <= INLINE_BYTES and size <= left:
            left -= size
            parts.append(inline(tensor))
        else:
            parts.append(None)
            others.append(index)
    return parts, others


def bytes_for(tensors: Sequence[torch.Tensor]) -> int:
    """Of one block that has room for all of them."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def put(
    tensors: Sequence[torch.Tensor], place: Place, memory: Callable[[Place, tuple[int, ...], torch.dtype], torch.Tensor]
) -> list[Part]:
    """Copy them to ``place``, where there are `bytes_for` them. ``memory`` gives the tensor at a place."""
    parts = []
    for tensor in tensors:
        shape = tuple(tensor.shape)
        memory(place, shape, tensor.dtype).copy_(tensor)
        phases.reached(phases.WRITING_GRADIENTS)
        parts.append((place.segment, place.offset, shape, DTYPE_NUMBERS[tensor.dtype]))
        place = Place(place.segment, place.offset + _aligned(tensor.nbytes))
    return parts


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
