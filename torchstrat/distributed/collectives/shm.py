"""Collectives in memory that the processes of one host share: no byte crosses a socket. Else sockets are chosen.

Everything else (other channels, subgroups, notes about failures) is left to the process group, and so are tensors on
GPUs, but for gradients: these are added up in host memory, where the ranks are told to.
"""

from __future__ import annotations

import functools
import pickle
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch

from torchstrat.core.engine import Communicator, Done, Words, Work
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.tensor_bytes import bytes_of
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.distributed.collectives.agreement import pickled
from torchstrat.distributed.collectives.process_group import SUMMED_AS, ProcessGroupCommunicator
from torchstrat.distributed.collectives.shared_memory.common_memory import CommonMemory, Kind, Place, size_of
from torchstrat.distributed.collectives.shared_memory.device_copies import DeviceCopies
from torchstrat.distributed.collectives.shared_memory.in_place_sum import BLOCK_BYTES, Blocks, InPlaceSum, Piece
from torchstrat.distributed.collectives.shared_memory.neighbours import (
    Neighbours,
    NoSharedMemoryError,
    NotNeighboursError,
)


class StagedSum:
    """`InPlaceSum` for tensors on a device, in host memory, or some here and some there."""

    def __init__(self, on_host: InPlaceSum, copies: DeviceCopies, rank: int) -> None:
        self._on_host, self._copies, self._rank = on_host, copies, rank

    def __call__(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        staged = self._copies.to_host(tensors)
        self._on_host(staged, factor)
        self._bring_back([(one, tensor) for one, tensor in zip(staged, tensors, strict=True) if one is not tensor])

    def to_owners(self, tensors: Sequence[torch.Tensor], factor: float, owned: Sequence[Sequence[Piece]]) -> None:
        """Only what this rank owns goes back to the device."""
        staged = self._copies.to_host(tensors)
        self._on_host.to_owners(staged, factor, owned)
        self._bring_back(
            [
                (one.view(-1)[start:stop], tensors[number].detach().view(-1)[start:stop])
                for number, start, stop in owned[self._rank]
                if (one := staged[number]) is not tensors[number]
            ]
        )

    def _bring_back(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copies.to_device([one for one, _ in pairs], [tensor for _, tensor in pairs])

    def publish_small(
        self, tensors: Sequence[torch.Tensor], turn: int, after_bytes: int
    ) -> Callable[[float], None] | None:
        """None for tensors on a device: they are not there before the meeting."""
        if any(self._copies.has(tensor) for tensor in tensors):
            return None
        return self._on_host.publish_small(tensors, turn, after_bytes)


T = TypeVar("T")

_LENGTH = struct.Struct("<Q")
_layout_of = functools.lru_cache(64)(lambda count: struct.Struct(f"<{count}d"))
_NUMBERS = 1
"""The code of calls whose ranks tell each other what they are in."""
_ANY = -1
"""The size of messages of any lengths."""


@functools.lru_cache(maxsize=4096)
def _code(what: str, size: int) -> int:
    return zlib.crc32(f"{what} of {size}".encode())


class SharedMemoryCommunicator:
    """One process's end. See `Communicator` for what the methods promise.

    Args:
        sockets: the same processes' process group; closed together with this.
        copies: of a rank on a device, whose gradients are added up in host memory; closed together with this.

    Raises `NotNeighboursError`, on every rank, where the processes cannot share memory.
    """

    def __init__(self, sockets: ProcessGroupCommunicator, copies: DeviceCopies | None = None) -> None:
        self._sockets = sockets
        self._copies = copies
        self.rank, self.size, self.ranks = sockets.rank, sockets.size, sockets.ranks
        self._seconds = sockets.timeout.total_seconds()
        self._call = 0
        """Of the collective that is going on, the same on all ranks."""
        self._neighbours = Neighbours(sockets)
        try:
            self._blocks = Blocks(self._neighbours, self.rank, self.size)
        except BaseException:
            self._neighbours.close()
            raise
        sockets.call_when_leaving(self._blocks.lockstep.leave)
        self._blocks.lockstep.look = sockets.look
        on_host = InPlaceSum(self._blocks, self._meet)
        self._in_place_sum = on_host if copies is None else StagedSum(on_host, copies, self.rank)

    @property
    def timeout(self) -> timedelta:
        return self._sockets.timeout

    def _meet(self) -> None:
        self._blocks.lockstep.meet(self._seconds, self._call)

    def _guard(self, what: str, call: Callable[[], T], code: int) -> T:
        """Run one collective, of which all ranks have the same code."""
        self._call = code
        return self._sockets.guard(what, call, is_last_if_left=True)

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        return self.all_gather_numbers_and_sum(numbers, (), what)[0]

    def all_gather_numbers_and_sum(
        self, numbers: Sequence[float], tensors: Sequence[torch.Tensor], what: str
    ) -> tuple[list[list[float]], Callable[[float], None] | None]:
        layout = _layout_of(len(numbers))
        message = layout.pack(*numbers)

        def exchange() -> tuple[list[list[float]], Callable[[float], None] | None]:
            turn = self._blocks.take_turns(1)
            rows = self._blocks.rows[turn]
            rows[self.rank][: len(message)] = message
            add_up = self._in_place_sum.publish_small(tensors, turn, after_bytes=len(message)) if tensors else None
            self._blocks.lockstep.meet(self._seconds, _NUMBERS)
            return [list(layout.unpack_from(row)) for row in rows], add_up

        return self._sockets.guard(what, exchange, is_last_if_left=True)

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Work:
        if tensor.device.type != "cpu" or tensor.dtype == torch.bool or tensor.dtype in SUMMED_AS:
            return self._sockets.all_reduce(tensor, what)
        self.sum_in_place([tensor], 1.0, what)
        return Done()

    def sum_in_place(self, tensors: Sequence[torch.Tensor], factor: float, what: str) -> None:
        size = sum(tensor.numel() for tensor in tensors)
        self._guard(what, lambda: self._in_place_sum(tensors, factor), _code(what, size))

    def sum_to_owners(
        self, tensors: Sequence[torch.Tensor], factor: float, owned: Sequence[Sequence[Piece]], what: str
    ) -> None:
        size = sum(tensor.numel() for tensor in tensors)
        self._guard(what, lambda: self._in_place_sum.to_owners(tensors, factor, owned), _code(what, size))

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        if tensor.device.type != "cpu":
            self._sockets.broadcast(tensor, source, what)
        elif tensor.numel():
            content = bytes_of(tensor)
            self._guard(what, lambda: self._broadcast(content, source), _code(what, content.numel()))

    def _broadcast(self, content: torch.Tensor, source: int) -> None:
        for start in range(0, content.numel(), BLOCK_BYTES):
            piece = content[start : start + BLOCK_BYTES]
            block = self._blocks.take_turn_of(torch.uint8)[source][: piece.numel()]
            if self.rank == source:
                block.copy_(piece)
            self._meet()
            if self.rank != source:
                piece.copy_(block)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        if tensor.device.type != "cpu":
            return self._sockets.all_gather(tensor, what)
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        received = [torch.empty_like(tensor) for _ in range(self.size)]
        if tensor.numel():
            own, targets = bytes_of(tensor), [bytes_of(one) for one in received]
            self._guard(what, lambda: self._all_gather(own, targets), _code(what, own.numel()))
        return received

    def _all_gather(self, own: torch.Tensor, received: list[torch.Tensor]) -> None:
        for start in range(0, own.numel(), BLOCK_BYTES):
            piece = own[start : start + BLOCK_BYTES]
            blocks = [block[: piece.numel()] for block in self._blocks.take_turn_of(torch.uint8)]
            blocks[self.rank].copy_(piece)
            self._meet()
            for target, block in zip(received, blocks, strict=True):
                target[start : start + BLOCK_BYTES].copy_(block)

    def all_gather_object(self, value: object, what: str) -> list[Any]:
        message, what = pickled(value, what), self.named(what)
        return [
            pickle.loads(told) for told in self._guard(what, lambda: self._gather_bytes(message), _code(what, _ANY))
        ]

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        """Messages of any lengths. What does not fit into the first round follows in as many as the longest takes."""
        room = BLOCK_BYTES - _LENGTH.size
        rows = self._blocks.take_turn()
        _LENGTH.pack_into(rows[self.rank], 0, len(message))
        first = message[:room]
        rows[self.rank][_LENGTH.size : _LENGTH.size + len(first)] = first
        self._meet()
        lengths = [_LENGTH.unpack_from(row)[0] for row in rows]
        received = [
            bytearray(row[_LENGTH.size : _LENGTH.size + min(length, room)])
            for row, length in zip(rows, lengths, strict=True)
        ]
        for start in range(room, max(lengths), BLOCK_BYTES):
            rows = self._blocks.take_turn()
            part = message[start : start + BLOCK_BYTES]
            rows[self.rank][: len(part)] = part
            self._meet()
            for collected, row, length in zip(received, rows, lengths, strict=True):
                collected += row[: max(0, min(length - start, BLOCK_BYTES))]
        return [bytes(collected) for collected in received]

    def broadcast_object(self, value: object, source: int, what: str) -> Any:
        message, what = pickled(value, what) if self.rank == source else b"", self.named(what)
        told = self._guard(what, lambda: self._gather_bytes(message), _code(what, _ANY))[source]
        return value if self.rank == source else pickle.loads(told)

    def barrier(self, what: str) -> None:
        self._guard(what, self._meet, _code(what, 0))

    # -- memory -----------------------------------------------------------------------------------------------------

    def share_memory(self, kinds: Sequence[Kind], what: str) -> list[Place]:
        def share() -> list[Place]:
            segment = self._neighbours.share(size_of(kinds))
            memory, failure = None, None
            try:
                memory = CommonMemory(segment)
            except OSError as error:
                segment.close()
                failure = f"{segment.size:,} bytes could not be mapped twice: {error}"
            self._neighbours.agree(failure)
            assert memory is not None
            return memory.places(kinds)

        return self._guard(what, share, _code(what, 0))

    # -- left to the process group ----------------------------------------------------------------------------------

    def subgroup(self, ranks: tuple[int, ...]) -> Communicator:
        return self._sockets.subgroup(ranks)

    def split(self) -> Communicator:
        return self._sockets.split()

    def report_failure(self, message: str, *, leaves: bool = False) -> None:
        self._sockets.report_failure(message, leaves=leaves)

    def named(self, what: str) -> str:
        return self._sockets.named(what)

    def leave_run(self) -> None:
        self._sockets.leave_run()

    def words(self, what: str) -> Words:
        return self._sockets.words(what)

    def calls_differ(self, what: str, *, is_over: bool) -> str:
        return self._sockets.calls_differ(what, is_over=is_over)

    def forget_failure(self) -> None:
        self._sockets.forget_failure()

    def close(self) -> None:
        if self._sockets.is_inherited:
            return
        if self._copies is not None:
            self._copies.close()
        self._sockets.call_when_leaving(None)
        self._blocks.lockstep.leave()
        self._sockets.close()
        self._neighbours.close()


class Chosen(NamedTuple):
    communicator: Communicator
    why: str
    """What is in use and why, in words."""


def choose_communicator(
    plan: ProcessPlan, device: str, timeout: timedelta, collectives: str, copies: DeviceCopies | None = None
) -> Chosen:
    """Every process of the job calls it, with the same ``collectives``: "auto", "shared_memory" or "process_group".

    ``copies``: of a rank on a device whose gradients are to meet in host memory. Without them those on GPUs use NCCL.

    Raises `UnsupportedError`, on all of them, where shared memory was asked for and cannot be had.
    """
    is_on_gpu = device.startswith("cuda")
    if collectives == "process_group":
        name = "NCCL" if is_on_gpu else "gloo"
        return Chosen(ProcessGroupCommunicator(plan, device, timeout), f"{name}, as was asked for")
    if is_on_gpu and copies is None:
        sockets = ProcessGroupCommunicator(plan, device, timeout)
        return _without(sockets, collectives, "NCCL", "replicas compute on GPUs")
    sockets = ProcessGroupCommunicator(plan, "cpu", timeout)
    try:
        why = f"shared memory: all {plan.size} processes are on this host"
        if copies is not None:
            why += ", and copy between it and their devices"
        return Chosen(SharedMemoryCommunicator(sockets, copies), why)
    except NotNeighboursError as reason:
        name = "NCCL" if is_on_gpu else "gloo"
        if collectives == "auto" and isinstance(reason, NoSharedMemoryError):
            warnings.warn(
                f"the processes talk through sockets ({name}), which is slower, because they could not share memory: "
                f"{reason}. Pass collectives='process_group' if that is meant.",
                stacklevel=5,
            )
        if collectives == "auto" and is_on_gpu:
            sockets.close()
            sockets = ProcessGroupCommunicator(plan, device, timeout)
        return _without(sockets, collectives, name, str(reason))


def _without(sockets: ProcessGroupCommunicator, collectives: str, name: str, reason: str) -> Chosen:
    if collectives == "shared_memory":
        sockets.close()
        raise UnsupportedError(
            f"collectives='shared_memory' was asked for, and shared memory cannot be used: {reason}. Leave the "
            "argument out to use what is there."
        )
    return Chosen(sockets, f"{name}, because {reason}")
