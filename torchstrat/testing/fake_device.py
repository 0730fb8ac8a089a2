"""A device made of ordinary host memory, which copies when it is waited for and complains about who does not wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch

from torchstrat.core.context import engine_of
from torchstrat.distributed.collectives.shared_memory import device_copies
from torchstrat.distributed.collectives.shared_memory.common_memory import why_not as why_no_common_memory
from torchstrat.distributed.collectives.shared_memory.device_copies import DeviceCopies
from torchstrat.replicas.per_process.engine import PerProcessReplica
from torchstrat.strategies.strategy import Strategy

__all__ = ["FakeDevice", "on_fake_device", "shares_steps", "why_no_common_memory"]


class FakeDevice:
    """Everything is on it but memory that was registered.

    Copies to the host are made when they are waited for, ``seconds`` later: who reads before that reads something else.
    Of copies to the device it looks again then: whether somebody has written to the source in between.
    """

    def __init__(self, *, refuses: bool = False, seconds: float = 0.0) -> None:
        self._refuses, self._seconds = refuses, seconds
        self.regions: dict[int, int] = {}
        self.to_host = self.to_device = 0
        self._started: list[Callable[[], object]] = []

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        if tensor.layout != torch.strided:
            return False
        return any(start <= tensor.data_ptr() < start + size for start, size in self.regions.items())

    def has(self, tensor: torch.Tensor) -> bool:
        return not self._is_on_host(tensor)

    def register(self, address: int, size: int) -> str | None:
        if self._refuses:
            return "no more memory can be locked"
        assert address not in self.regions
        self.regions[address] = size
        return None

    def unregister(self, address: int) -> None:
        del self.regions[address]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._is_on_host(target):
            assert target.is_contiguous(), "the host would need memory between"
            self.to_host += 1
            self._started += [partial(time.sleep, self._seconds), partial(target.copy_, source)]
            return
        self.to_device += 1
        target.copy_(source)
        seen = source.clone()

        def look_again() -> None:
            assert torch.equal(source.view(-1).view(torch.uint8), seen.view(-1).view(torch.uint8)), (
                "somebody has written to what the device was reading"
            )

        if self._is_on_host(source):
            self._started.append(look_again)

    @torch.no_grad()
    def _finish(self) -> None:
        started, self._started = self._started, []
        for one in started:
            one()

    def mark(self) -> Callable[[], None]:
        return self._finish


@contextlib.contextmanager
def on_fake_device(*, refuses: bool = False, seconds: float = 0.0) -> Iterator[list[FakeDevice]]:
    """Strategies that are made in this block compute on a fake device; the devices they have made."""
    made: list[FakeDevice] = []

    def make(_: str) -> DeviceCopies:
        made.append(FakeDevice(refuses=refuses, seconds=seconds))
        return DeviceCopies(made[-1])

    with mock.patch.object(device_copies, "device_copies", make):
        yield made


def shares_steps(strategy: Strategy, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the processes of a central storage strategy share out this optimizer's steps, in memory of the host."""
    engine = engine_of(strategy)
    assert isinstance(engine, PerProcessReplica)
    return engine.shares_steps(optimizer)
