"""The end of a connection that answers, in memory of the one that called."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeAlias

import torch

from torchstrat.parameter_server.interface import Peer
from torchstrat.parameter_server.same_host.channel import (
    ASKED,
    DTYPES,
    INLINE,
    Answer,
    Channel,
    Dropped,
    NeedsRoom,
    Part,
    Request,
    Room,
    TooLongError,
    Written,
    bytes_for,
    from_inline,
    put,
    split_inline,
)
from torchstrat.parameter_server.same_host.pool import MappedMemory, Place
from torchstrat.parameter_server.transport.envelopes import Packed
from torchstrat.parameter_server.transport.requests import Incoming

_LONG_BYTES = 32 << 10

Serve: TypeAlias = Callable[[Incoming, Callable[[Packed], None]], None]
"""What happens to a request: it is called with it, and with where the answer goes."""


class Callee:
    """Requests arrive on a thread of its own, which ends with the connection; answers go out from any thread."""

    def __init__(
        self, channel: Channel, sender: Peer, serve: Serve, *, on_sign: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self._channel, self._sender, self._serve = channel, sender, serve
        self._on_sign, self._on_end = on_sign, on_end
        self._memory = MappedMemory()
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Packed, _Room]] = {}  # answers for which there is no room yet
        self._thread = threading.Thread(target=self._receive, name=f"torchstrat-calls-of-{sender.task}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hang_up(self) -> None:
        self._channel.hang_up()

    # -- on the thread that receives --------------------------------------------------------------------------------

    def _receive(self) -> None:
        while (received := self._channel.receive()) is not None:
            message, segments, dropped = received
            for number in dropped:
                self._memory.remove(number)
            for number, descriptor in segments:
                self._memory.add(number, descriptor)
            self._on_sign()
            if isinstance(message, Request):
                self._asked(message)
            elif isinstance(message, Room):
                self._got_room(message)
            elif isinstance(message, Dropped):
                with self._lock:
                    self._waiting.pop(message.call, None)
        self._channel.close()
        self._memory.clear()
        with self._lock:
            self._waiting.clear()
        self._on_end()

    def _asked(self, request: Request) -> None:
        data = request.data
        text = data if isinstance(data, bytes) else self._tensor(data).numpy().tobytes()
        payload = Packed(text, [self._tensor(part) for part in request.parts])
        number = request.call
        given = [None if part is None else self._tensor(part) for part in request.into]
        room = _Room(given, lambda count: self._tell(Written(number, count)))
        self._serve(
            Incoming(self._sender, request.method, payload, room, is_borrowed=True),
            lambda answer: self._reply(number, answer, room),
        )

    def _tensor(self, part: Part) -> torch.Tensor:
        segment, offset, shape, dtype = part
        if segment == INLINE:
            return from_inline(part)
        return self._memory.tensor(Place(segment, offset), shape, DTYPES[dtype])

    def _got_room(self, found: Room) -> None:
        with self._lock:
            waiting = self._waiting.pop(found.call, None)
        if waiting is not None:
            answer, room = waiting
            self._send(found.call, answer, room, Place(found.segment, found.offset))

    # -- on any thread ----------------------------------------------------------------------------------------------

    def _reply(self, call: int, answer: Packed, room: _Room) -> None:
        self._send(call, answer, room, None)

    def _send(self, call: int, answer: Packed, room: _Room, place: Place | None) -> None:
        """Send what needs no more room, or comes to ``place``; otherwise ask for it."""
        data: bytes | Part = answer.data
        if not answer.tensors and len(answer.data) <= _LONG_BYTES:
            self._tell(Answer(call, data, ()))
            return
        is_long = len(answer.data) > _LONG_BYTES
        parts: list[Part | None] = [room.part_of(tensor) for tensor in answer.tensors]
        moving = [index for index, part in enumerate(parts) if part is None]
        inlined, others = split_inline([answer.tensors[index] for index in moving])
        for index, part in zip(moving, inlined, strict=True):
            parts[index] = part
        moving = [moving[index] for index in others]
        tensors = [answer.tensors[index] for index in moving]
        if is_long:
            tensors.append(torch.frombuffer(bytearray(answer.data), dtype=torch.uint8))
        if tensors:
            if place is None:
                with self._lock:
                    self._waiting[call] = answer, room
                self._tell(NeedsRoom(call, bytes_for(tensors)))
                return
            placed = put(tensors, place, self._memory.tensor)
            if is_long:
                data = placed.pop()
            for index, part in zip(moving, placed, strict=True):
                parts[index] = part
        self._tell(Answer(call, data, tuple(part for part in parts if part is not None)))

    def _tell(self, message: Answer | Written | NeedsRoom) -> None:
        try:
            self._channel.send(message)
        except (OSError, TooLongError):
            self._channel.hang_up()  # the caller has gone; or it could never be told, and has to know that


class _Room:
    """The memory that a caller gave for the answer's tensors; see `AnswerMemory`."""

    def __init__(self, given: list[torch.Tensor | None], tell: Callable[[int], None]) -> None:
        self._given, self._tell = given, tell
        self._taken: dict[int, int] = {}  # address → place

    def empty(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        given = self._given[index] if index < len(self._given) else None
        if given is None or tuple(given.shape) != shape or given.dtype != dtype:
            return torch.empty(shape, dtype=dtype)
        self._taken[given.data_ptr()] = index
        return given

    def written(self, count: int) -> None:
        if all(index in self._taken.values() for index in range(count)):  # otherwise the answer carries some of them
            self._tell(count)

    def part_of(self, tensor: torch.Tensor) -> Part | None:
        index = self._taken.get(tensor.data_ptr()) if math.prod(tensor.shape) else None
        return None if index is None else (ASKED, index, (), 0)
