"""A socket that carries messages, and beside them the descriptors of memory that the other side has not seen yet.

A message is a few plain values, and where the tensors lie that belong to them: in memory that is shared, one after the
other. Both ends have proved who they are before the first of these is read, which is why they may be pickled.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from torchstrat.core.tensor_bytes import bytes_of
from torchstrat.parameter_server import phases
from torchstrat.parameter_server.membership.control_channel import keep_out_of_children, shut_down
from torchstrat.parameter_server.same_host.pool import Place, SharedPool

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
"""Those that `envelopes` sends as they are."""

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


class More(NamedTuple):
    """Parts of the answer to come, behind those that were sent before: one message does not hold them all."""

    call: int
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


Message: TypeAlias = Request | Answer | More | Written | NeedsRoom | Room | Dropped

_KINDS: tuple[type[object], ...] = (Request, Answer, More, Written, NeedsRoom, Room, Dropped)
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


_BUFFER_BYTES = 1 << 20
_MOST_DESCRIPTORS = 64
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)


class TooLongError(Exception):
    """A message does not fit into the socket's buffer, or names too much new memory at once. Nothing was sent."""


class Received(NamedTuple):
    """``segments``: (number, descriptor) of what the message is the first to refer to; ``dropped``: of what none will
    refer to any more."""

    message: Message
    segments: list[tuple[int, int]]
    dropped: tuple[int, ...]


class Channel:
    """One end. Anybody may send; one thread receives."""

    def __init__(self, sock: socket.socket, pool: SharedPool | None = None) -> None:
        """``pool``: the memory that messages of this end refer to; None: they refer to the other end's."""
        self._socket = sock
        self._pool = pool
        self._known: set[int] = set()  # segments that the other end has
        self._dropped = 0  # how many of those that the pool has dropped it has been told of
        self._sending = threading.Lock()
        self._buffer = memoryview(bytearray(LARGEST_BYTES))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        keep_out_of_children(sock)

    def send(self, message: Message, segments: Iterable[int] = ()) -> None:
        """``segments``: those that the message refers to. Raises `TooLongError`, and OSError once it is broken."""
        with self._sending:
            new = tuple({number for number in segments if number not in self._known})
            dropped = () if self._pool is None else tuple(self._pool.dropped_since(self._dropped))
            content = encode(message, new, tuple(number for number in dropped if number in self._known))
            if len(content) > LARGEST_BYTES or len(new) > _MOST_DESCRIPTORS:
                raise TooLongError(f"{len(content):,} bytes with {len(new)} descriptors")
            if new:
                assert self._pool is not None
                socket.send_fds(self._socket, [content], [self._pool.segment(number).descriptor for number in new])
                self._known.update(new)
            else:
                self._socket.send(content)
            self._known.difference_update(dropped)
            self._dropped += len(dropped)

    @property
    def has_news(self) -> bool:
        """Whether the next message will say that segments were dropped."""
        return self._pool is not None and self._pool.has_dropped(self._dropped)

    def receive(self) -> Received | None:
        """The next message; None at the end."""
        try:
            size, ancillary, flags, _ = self._socket.recvmsg_into(
                [self._buffer], _DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return None
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        if not size or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            # The end; or this process has no room for more descriptors, and cannot understand what follows.
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        message, new, dropped = decode(self._buffer[:size])
        return Received(message, list(zip(new, descriptors, strict=True)), dropped)

    def hang_up(self) -> None:
        """Let both ends find that it is over; who receives closes."""
        shut_down(self._socket)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
