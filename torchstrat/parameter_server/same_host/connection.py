"""The two ends of a connection: `Caller`, which owns all memory, and `Callee`, which answers in it."""

from __future__ import annotations

import itertools
import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

import torch

from torchstrat.core.errors import CommunicationError, PeerTimeoutError, PeerUnavailableError
from torchstrat.distributed.collectives.shared_memory.common_memory import NoRoomError
from torchstrat.parameter_server.interface import Peer
from torchstrat.parameter_server.same_host.channel import (
    ASKED,
    DTYPE_NUMBERS,
    DTYPES,
    INLINE,
    Answer,
    Channel,
    Dropped,
    More,
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
from torchstrat.parameter_server.same_host.pool import MappedMemory, Place, SharedPool
from torchstrat.parameter_server.transport.requests import Incoming, Packed


class Process:
    """The process that had this number when this was made. Where the system does not tell, it never ends."""

    def __init__(self, pid: int) -> None:
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError:  # a sandbox that forbids it, or a process of another namespace
            self._descriptor = -1

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then, so that it writes to no memory any more."""
        if self._descriptor < 0:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


Arrived = Callable[[Callable[[], Packed]], None]
"""Called once, with a function that returns the answer or raises why there is none."""

_LONG_BYTES = 32 << 10
_MOST_PARTS = 128
"""In one message."""
_DEATH_SECONDS = 7.0
"""A process that has hung up is usually about to end. One that is not (it was stopped, and given up) costs the memory
of its open calls."""


@dataclass
class _Call:
    """``due``: on the monotonic clock. ``kept``: memory that the other end may use until it has answered. ``arrived``:
    None once the caller was told that it took too long. ``on_written``: see `Endpoint.call`. ``parts``: of the
    answer, the first."""

    method: str
    arrived: Arrived | None
    seconds: float
    due: float
    into: Sequence[torch.Tensor]
    kept: list[torch.Tensor]
    on_written: Callable[[int], None] | None
    parts: list[Part] = field(default_factory=list)


class Caller:
    """Thread-safe. Answers arrive on a thread of its own, which ends with the connection.

    ``on_broken`` is called on that thread, once, when the other end has hung up; ``on_sign`` at every answer.
    """

    def __init__(
        self,
        channel: Channel,
        pool: SharedPool,
        peer: Peer,
        process: Process,
        *,
        on_broken: Callable[[], None],
        on_sign: Callable[[], None],
    ) -> None:
        self.peer = peer
        self._channel, self._pool, self._process = channel, pool, process
        self._on_broken, self._on_sign = on_broken, on_sign
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] | None = {}  # None: it is over
        self._thread = threading.Thread(target=self._receive, name=f"torchstrat-answers-{peer.task}", daemon=True)
        self._thread.start()

    def call(
        self,
        method: str,
        packed: Packed,
        seconds: float,
        arrived: Arrived,
        into: Sequence[torch.Tensor] | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> bool:
        """Send a request; False if it cannot go this way (nothing was sent, and ``arrived`` is not called).

        Args:
            seconds: how long to wait; infinite is fine.
            into: memory for the answer's tensors, in their order; where it is this process's shared memory, and fits,
                they are these very tensors. None: a rare call, for which no memory is kept.
            on_written: see `Endpoint.call`.
        """
        try:
            request, kept, segments = self._prepared(next(self._numbers), method, packed, into or (), into is not None)
        except NoRoomError:
            return False
        due = time.monotonic() + seconds
        with self._lock:
            if self._calls is None:
                return False
            self._calls[request.call] = _Call(method, arrived, seconds, due, into or (), kept, on_written)
        try:
            self._channel.send(request, segments)
        except (TooLongError, OSError):
            with self._lock:  # who receives may have found that it is over, and answered
                return self._calls is None or self._calls.pop(request.call, None) is None
        return True

    def _prepared(
        self, number: int, method: str, packed: Packed, into: Sequence[torch.Tensor], keep: bool
    ) -> tuple[Request, list[torch.Tensor], set[int]]:
        """The request, the memory that it refers to, and in which segments that is."""
        data: bytes | Part = packed.data
        tensors = packed.tensors
        is_long = len(packed.data) > _LONG_BYTES
        if is_long:
            tensors = [*tensors, torch.frombuffer(bytearray(packed.data), dtype=torch.uint8)]
        if not tensors and not into:
            return Request(number, method, data, (), ()), [], set()
        parts, others = split_inline(tensors)
        kept: list[torch.Tensor] = []
        moving = []
        for index in others:
            place = self._pool.place_of(tensors[index]) if tensors[index].is_contiguous() else None
            if place is None:
                moving.append(index)
            else:
                parts[index] = (*place, tuple(tensors[index].shape), DTYPE_NUMBERS[tensors[index].dtype])
                kept.append(tensors[index])
        if moving:
            block = self._pool.empty((bytes_for([tensors[index] for index in moving]),), torch.uint8, keep=keep)
            kept.append(block)
            start = self._pool.place_of(block)
            assert start is not None
            memory = _within(block, start)
            for index, part in zip(moving, put([tensors[index] for index in moving], start, memory), strict=True):
                parts[index] = part
        found = [part for part in parts if part is not None]
        if is_long:
            data = found.pop()
        places = tuple(self._part_of(tensor) for tensor in into)
        segments = {part[0] for part in (*found, *places) if part is not None and part[0] >= 0}
        if not isinstance(data, bytes):
            segments.add(data[0])
        return Request(number, method, data, tuple(found), places), kept, segments

    def _part_of(self, tensor: torch.Tensor) -> Part | None:
        place = self._pool.place_of(tensor) if tensor.is_contiguous() and tensor.numel() else None
        return None if place is None else (*place, tuple(tensor.shape), DTYPE_NUMBERS[tensor.dtype])

    def expire(self, now: float) -> float:
        """Tell who has waited too long. Returns when the next one will have; infinity if nobody waits."""
        late: list[tuple[_Call, Arrived]] = []
        with self._lock:
            waiting = [call for call in (self._calls or {}).values() if call.arrived is not None]
            for call in waiting:
                if call.due <= now and call.arrived is not None:
                    late.append((call, call.arrived))
                    call.arrived = None  # its memory stays as it is, until the other end has said that it is done
            soonest = min((call.due for call in waiting if call.arrived is not None), default=math.inf)
        for call, arrived in late:
            arrived(_raising(timed_out(self.peer, call.method, call.seconds)))
        return soonest

    def hang_up(self) -> None:
        self._channel.hang_up()

    # -- on the thread that receives --------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while (received := self._channel.receive()) is not None:
                message = received.message
                self._on_sign()
                if isinstance(message, Answer):
                    self._answered(message)
                    if self._channel.has_news:  # that the other end need not keep mapped what this call was given
                        self._send(Dropped(message.call))
                elif isinstance(message, More):
                    self._got_parts(message)
                elif isinstance(message, Written):
                    self._was_written(message)
                elif isinstance(message, NeedsRoom):
                    self._make_room(message)
        finally:  # also where an answer could not be taken in: who waits for others is to hear that
            self._over()

    def _over(self) -> None:
        with self._lock:
            calls, self._calls = self._calls or {}, None
        self._channel.close()
        self._on_broken()
        for call in calls.values():
            if call.arrived is not None:
                gone = f"{self.peer} is gone; {call.method!r} was not answered (its connection was closed)."
                call.arrived(_raising(PeerUnavailableError(gone, self.peer)))
        if calls and not self._process.wait(_DEATH_SECONDS):
            self._pool.give_up([tensor for call in calls.values() for tensor in (*call.kept, *call.into)])
        self._process.close()

    def _answered(self, answer: Answer) -> None:
        with self._lock:
            call = None if self._calls is None else self._calls.pop(answer.call, None)
        if call is None or call.arrived is None:
            return
        into, kept, parts = call.into, call.kept, (*call.parts, *answer.parts)
        call.arrived(lambda: Packed(self._text(answer.data, kept), [self._tensor(part, into, kept) for part in parts]))

    def _got_parts(self, more: More) -> None:
        with self._lock:
            call = None if self._calls is None else self._calls.get(more.call)
        if call is not None:
            call.parts.extend(more.parts)

    def _was_written(self, news: Written) -> None:
        with self._lock:
            call = None if self._calls is None else self._calls.get(news.call)
        if call is not None and call.arrived is not None and call.on_written is not None:
            call.on_written(news.tensors)

    def _text(self, data: bytes | Part, kept: list[torch.Tensor]) -> bytes:
        return data if isinstance(data, bytes) else self._tensor(data, (), kept).numpy().tobytes()

    def _tensor(self, part: Part, into: Sequence[torch.Tensor], kept: list[torch.Tensor]) -> torch.Tensor:
        """An answer's tensor: one that the caller gave, or a new one in memory of its own."""
        where, offset, shape, dtype = part
        if where == ASKED:
            return into[offset]
        if where == INLINE:
            return from_inline(part)
        room = kept[-1]  # what was made for this answer, see `_make_room`
        start = self._pool.place_of(room)
        assert start is not None
        return _within(room, start)(Place(where, offset), shape, DTYPES[dtype]).clone()

    def _make_room(self, wanted: NeedsRoom) -> None:
        with self._lock:
            call = None if self._calls is None else self._calls.get(wanted.call)
        if call is None:
            return
        try:
            room = self._pool.empty((wanted.size,), torch.uint8, keep=False)
        except NoRoomError as error:
            with self._lock:
                if self._calls is not None:
                    self._calls.pop(wanted.call, None)
            self._send(Dropped(wanted.call))
            if call.arrived is not None:
                text = f"the answer of {self.peer} to {call.method!r} does not fit into memory: {error.strerror}."
                call.arrived(_raising(CommunicationError(text)))
            return
        call.kept.append(room)
        place = self._pool.place_of(room)
        assert place is not None
        self._send(Room(wanted.call, *place), place.segment)

    def _send(self, message: Room | Dropped, *segments: int) -> None:
        try:
            self._channel.send(message, segments)
        except OSError:
            self._channel.hang_up()  # it is over, and the thread will find out


def _within(block: torch.Tensor, start: Place) -> Callable[[Place, tuple[int, ...], torch.dtype], torch.Tensor]:
    """The tensors in a block of bytes that begins at ``start``, by their places."""

    def tensor(place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        first = place.offset - start.offset
        return block[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    return tensor


def timed_out(peer: Peer, method: str, seconds: float) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"{peer} did not answer {method!r} within {seconds:g} s. It may be busy, stopped, or cut off; "
        "allow more time if the call is a long one."
    )


def _raising(error: Exception) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


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
        try:
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
        finally:  # also where a request could not be taken in: the caller would wait for its answer without end
            self._over()

    def _over(self) -> None:
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
        found = [part for part in parts if part is not None]
        while len(found) > _MOST_PARTS:
            self._tell(More(call, tuple(found[:_MOST_PARTS])))
            del found[:_MOST_PARTS]
        self._tell(Answer(call, data, tuple(found)))

    def _tell(self, message: Answer | More | Written | NeedsRoom) -> None:
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
