"""The processes that save or restore one checkpoint together, where every process runs the same program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from torchstrat.core.errors import TorchstratError
from torchstrat.distributed.cluster import ProcessPlan

if TYPE_CHECKING:
    from torchstrat.distributed.collectives.process_group import ProcessGroupCommunicator

_TIMEOUT = timedelta(minutes=30)  # where no strategy has one

_Value = TypeVar("_Value")


class Processes:
    """``communicator``: None for a process that is alone. ``call``: what all are in, by a name that is the same on
    all; paths, which may differ, are in the ``what`` of the methods."""

    def __init__(self, communicator: ProcessGroupCommunicator | None, call: str) -> None:
        self._communicator, self._call = communicator, call

    @property
    def rank(self) -> int:
        return 0 if self._communicator is None else self._communicator.rank

    @property
    def size(self) -> int:
        return 1 if self._communicator is None else self._communicator.size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def go_on_in_background(self) -> None:
        """From now on a thread of its own calls the methods: the program may go on while that waits, and waits itself
        while that goes on."""
        if self._communicator is not None:
            self._communicator.channel.in_background = True

    def attempt(self, call: Callable[[], object], what: str) -> None:
        """Call it on each process, and raise on all where one raises: none goes on alone. ``what`` is for messages."""
        self.gather(lambda: (call(), None)[1], what)

    def gather(self, call: Callable[[], _Value], what: str) -> list[_Value]:
        """Call it on each process; the picklable results of all, in the order of ranks. Raises on all where one raises:
        there what it raised, elsewhere `TorchstratError` naming the rank."""
        if self._communicator is None:
            return [call()]
        own: Exception | None = None
        value: _Value | None = None
        try:
            value = call()
        except Exception as error:
            own = error
        told = self._communicator.all_gather_object((value, own and f"{type(own).__name__}: {own}"), self._call)
        if own is not None:
            raise own
        for rank, (_, message) in enumerate(told):
            if message is not None:
                raise TorchstratError(f"{what} failed on rank {rank}: {message}")
        return [value for value, _ in told]

    def of_first(self, call: Callable[[], _Value], what: str) -> _Value:
        """What ``call`` returns on rank 0, where alone it is called; picklable. Raises on all where it raises."""
        if self._communicator is None:
            return call()
        found: list[_Value] = []
        self.attempt(lambda: found.append(call()) if self.is_first else None, what)
        value: _Value = self._communicator.broadcast_object(found[0] if found else None, 0, self._call)
        return value

    def all_values(self, value: _Value) -> list[_Value]:
        """Any picklable value of every process, in the order of ranks."""
        return [value] if self._communicator is None else self._communicator.all_gather_object(value, self._call)


@contextlib.contextmanager
def all_processes(call: str, objects: Mapping[str, object]) -> Iterator[Processes]:
    """Those of the default process group, if there is one of more than one process.

    Where a strategy has the ``objects``, its processes first agree that all of them are in this ``call``.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield Processes(None, call)
        return
    # Imported here: only where there are several processes.
    from torchstrat.checkpoint.job_state import everyone_of
    from torchstrat.distributed.collectives.agreement import agree
    from torchstrat.distributed.collectives.process_group import ProcessGroupCommunicator

    rank, size = dist.get_rank(), dist.get_world_size()
    plan = ProcessPlan(rank, size, rank, size, None, False, f"rank {rank} of {size}")
    timeout, everyone = _TIMEOUT, everyone_of(objects)
    if everyone is not None and everyone.size == size:
        agree(everyone, call)
        timeout = everyone.timeout
    communicator = ProcessGroupCommunicator(plan, "cpu", timeout, is_passing=True)
    try:
        yield Processes(communicator, call)
    finally:
        communicator.close()
