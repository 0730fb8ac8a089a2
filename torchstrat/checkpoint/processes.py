"""The processes that save or restore one checkpoint together, where every process runs the same program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from torchstrat.cluster import ProcessPlan
from torchstrat.collectives.communicator import Communicator
from torchstrat.errors import TorchstratError

_TIMEOUT = timedelta(minutes=30)


class Processes:
    """``communicator``: None for a process that is alone."""

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator

    @property
    def is_first(self) -> bool:
        return self._communicator is None or self._communicator.rank == 0

    def attempt(self, call: Callable[[], None], what: str) -> None:
        """Call it on each process, and raise on all where one raises: none goes on alone. ``what`` is for messages."""
        if self._communicator is None:
            call()
            return
        own: Exception | None = None
        try:
            call()
        except Exception as error:
            own = error
        told = self._communicator.all_gather_object(None if own is None else f"{type(own).__name__}: {own}", what)
        if own is not None:
            raise own
        failed = {rank: message for rank, message in enumerate(told) if message is not None}
        if failed:
            rank, message = next(iter(failed.items()))
            raise TorchstratError(f"{what} failed on rank {rank}: {message}")


@contextlib.contextmanager
def all_processes() -> Iterator[Processes]:
    """Those of the default process group, if there is one of more than one process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield Processes(None)
        return
    # Imported here: only where there are several processes.
    from torchstrat.collectives.process_group import ProcessGroupCommunicator

    rank, size = dist.get_rank(), dist.get_world_size()
    plan = ProcessPlan(rank, size, rank, size, None, False, f"rank {rank} of {size}")
    communicator = ProcessGroupCommunicator(plan, "cpu", _TIMEOUT)
    try:
        yield Processes(communicator)
    finally:
        communicator.close()
