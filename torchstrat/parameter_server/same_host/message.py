"""What travels over a socket of one host: a few plain values, and where the tensors lie that belong to them.

Both ends have proved who they are before the first of these is read, which is why they may be pickled.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple, TypeAlias

import torch

from torchstrat.tensor_bytes import bytes_of

LARGEST_BYTES = 96 << 10
"""Of a message: a socket takes whole ones, up to the size of its buffer. What is longer lies in shared memory."""

INLINE_BYTES = 2 << 10
"""Tensors up to here travel in the message itself: that costs less than finding a place for them."""

INLINE = -1
ASKED = -2

Part: TypeAlias = tuple[int, Any, tuple[int, ...], int]
"""A tensor: (number of the caller's segment, byte offset in it, shape, `DTYPES` index), or

- (`INLINE`, its bytes, shape, dtype): a small one;
- (`ASKED`, n, (), 0): the one at place n of what the caller gave for the answer, which holds the value now.
"""

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""Those that `payloads` sends as they are."""

DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class Request(NamedTuple):
    """``call``: the caller's number for it. ``data`` and ``parts``: the pickle and the tensors of the payload, as
    `Packed` has them; a long pickle is a tensor of bytes. ``into``: memory for the answer's tensors, in their order."""

    call: int
    method: str
    data: bytes | Part
    parts: tuple[Part, ...]
    into: tuple[Part | None, ...]


class Answer(NamedTuple):
    """To the request with this number."""

    call: int
    data: bytes | Part
    parts: tuple[Part, ...]


class Written(NamedTuple):
    """What was asked is done, and the first so many tensors of the answer to come lie where the caller wanted them."""

    call: int
    tensors: int


class NeedsRoom(NamedTuple):
    """The answer has ``size`` bytes that the caller has given no memory for."""

    call: int
    size: int


class Room(NamedTuple):
    """The memory that was asked for: byte ``offset`` of segment number ``segment``."""

    call: int
    segment: int
    offset: int


class Dropped(NamedTuple):
    """The caller does not want that answer any more: it has it, or no memory for it."""

    call: int


Message: TypeAlias = Request | Answer | Written | NeedsRoom | Room | Dropped

_KINDS: tuple[type[Any], ...] = (Request, Answer, Written, NeedsRoom, Room, Dropped)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}


def encode(message: Message, new_segments: tuple[int, ...], dropped_segments: tuple[int, ...]) -> bytes:
    """``new_segments``: the numbers of those whose descriptors go along; ``dropped_segments``: of those that none will
    refer to."""
    # As a plain tuple: naming the class would cost more than all the rest.
    return pickle.dumps((new_segments, dropped_segments, _NUMBER_OF[type(message)], tuple(message)), protocol=5)


def decode(content: memoryview) -> tuple[Message, tuple[int, ...], tuple[int, ...]]:
    new_segments, dropped_segments, number, values = pickle.loads(content)
    return _KINDS[number](*values), new_segments, dropped_segments


def inline(tensor: torch.Tensor) -> Part:
    """A small tensor on the CPU, as part of a message."""
    content = bytes_of(tensor.contiguous()).numpy().tobytes()
    return INLINE, content, tuple(tensor.shape), DTYPE_NUMBERS[tensor.dtype]


def from_inline(part: Part) -> torch.Tensor:
    """The tensor, in memory of its own."""
    _, content, shape, dtype = part
    if not content:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(content), dtype=DTYPES[dtype]).view(shape)
