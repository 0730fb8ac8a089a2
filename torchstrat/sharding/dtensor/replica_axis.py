"""The processes of a job as replicas: ways for a strategy to talk along the replica axis only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from torchstrat.core.engine import Communicator, Done, Words, Work
from torchstrat.distributed.collectives.agreement import SumsInPlace
from torchstrat.distributed.collectives.shared_memory.in_place_sum import Piece


class Forwarding:
    """A `Communicator` whose calls are another one's, but for those that a class says."""

    def __init__(self, to: Communicator) -> None:
        self._to = to
        self.rank, self.size, self.ranks = to.rank, to.size, to.ranks

    @property
    def timeout(self) -> timedelta:
        return self._to.timeout

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Work:
        return self._to.all_reduce(tensor, what)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        self._to.broadcast(tensor, source, what)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        return self._to.all_gather(tensor, what)

    def all_gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        return self._to.all_gather_numbers(numbers, what)

    def all_gather_object(self, value: object, what: str) -> list[Any]:
        return self._to.all_gather_object(value, what)

    def broadcast_object(self, value: object, source: int, what: str) -> Any:
        return self._to.broadcast_object(value, source, what)

    def subgroup(self, ranks: tuple[int, ...]) -> Communicator:
        return self._to.subgroup(ranks)

    def split(self) -> Communicator:
        return self._to.split()

    def barrier(self, what: str) -> None:
        self._to.barrier(what)

    def report_failure(self, message: str, *, leaves: bool = False) -> None:
        self._to.report_failure(message, leaves=leaves)

    def leave_run(self) -> None:
        self._to.leave_run()

    def named(self, what: str) -> str:
        return self._to.named(what)

    def words(self, what: str) -> Words:
        return self._to.words(what)

    def calls_differ(self, what: str, *, is_over: bool) -> str:
        return self._to.calls_differ(what, is_over=is_over)

    def forget_failure(self) -> None:
        self._to.forget_failure()

    def close(self) -> None:
        self._to.close()


class FirstOfReplica(Forwarding):
    """A channel on which each replica speaks with one voice, that of its first logical device.

    ``rank`` and ``size`` count replicas. All processes take part in every call and get the same; what processes other
    than the first of a replica bring is not used. So all logical devices of a replica see the same data, even where
    their processes would have drawn, or counted, differently. For values in host memory.
    """

    def __init__(self, everyone: Communicator, logical_devices: int) -> None:
        super().__init__(everyone)
        self._logical = logical_devices
        self.rank, self.size = everyone.rank // logical_devices, everyone.size // logical_devices
        self.ranks = everyone.ranks[::logical_devices]

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Work:
        if self._to.rank % self._logical:
            tensor.zero_()
        return super().all_reduce(tensor, what)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        super().broadcast(tensor, source * self._logical, what)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        return super().all_gather(tensor, what)[:: self._logical]

    def all_gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        return super().all_gather_numbers(numbers, what)[:: self._logical]

    def all_gather_object(self, value: object, what: str) -> list[Any]:
        return super().all_gather_object(value, what)[:: self._logical]

    def broadcast_object(self, value: object, source: int, what: str) -> Any:
        return super().broadcast_object(value, source * self._logical, what)

    def subgroup(self, ranks: tuple[int, ...]) -> Communicator:
        raise NotImplementedError("input pipelines talk to all replicas")

    def split(self) -> Communicator:
        return FirstOfReplica(super().split(), self._logical)

    def close(self) -> None: ...


class OwnColumn(Forwarding):
    """The processes that are the same logical device of every replica: what gradients are combined over.

    All columns do the same at the same time. Groups are made by all processes of a job, so each makes those of the
    other columns too.

    Args:
        column: the communicator of these processes.
        everyone: of the whole job; closed with this.
    """

    def __init__(self, column: Communicator, everyone: Communicator, logical_devices: int) -> None:
        super().__init__(column)
        self._everyone, self._logical = everyone, logical_devices

    def subgroup(self, ranks: tuple[int, ...]) -> Communicator:
        """``ranks``: of replicas."""
        own = self._everyone.rank % self._logical
        columns = [
            self._everyone.subgroup(tuple(replica * self._logical + logical for replica in ranks))
            for logical in range(self._logical)
        ]
        return columns[own]

    def split(self) -> Communicator:
        return self

    def report_failure(self, message: str, *, leaves: bool = False) -> None:
        self._everyone.report_failure(message, leaves=leaves)

    def words(self, what: str) -> Words:
        return self._everyone.words(what)

    def forget_failure(self) -> None:
        self._everyone.forget_failure()

    def close(self) -> None:
        self._everyone.close()


class OwnColumnInPlace(OwnColumn):
    """The same where they add up in place, or there is but one: then gradients stay where they are."""

    _to: SumsInPlace

    def sum_in_place(self, tensors: Sequence[torch.Tensor], factor: float, what: str) -> None:
        self._to.sum_in_place(tensors, factor, what)

    def all_gather_numbers_and_sum(
        self, numbers: Sequence[float], tensors: Sequence[torch.Tensor], what: str
    ) -> tuple[list[list[float]], Callable[[float], None] | None]:
        return self._to.all_gather_numbers_and_sum(numbers, tensors, what)

    def sum_to_owners(
        self, tensors: Sequence[torch.Tensor], factor: float, owned: Sequence[Sequence[Piece]], what: str
    ) -> None:
        self._to.sum_to_owners(tensors, factor, owned, what)


class Alone:
    """Of a process that has nobody to talk to: one replica, or an axis of one.

    See `Communicator` and `SumsInPlace` for what the methods promise. ``rank_of_job`` is this process's.
    """

    rank, size = 0, 1

    def __init__(self, rank_of_job: int, timeout: timedelta) -> None:
        self.ranks = (rank_of_job,)
        self.timeout = timeout

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Done:
        return Done()

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None: ...

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        return [tensor.detach().clone()]

    def all_gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        return [[float(number) for number in numbers]]

    def all_gather_object(self, value: object, what: str) -> list[Any]:
        return [value]

    def broadcast_object(self, value: object, source: int, what: str) -> Any:
        return value

    def subgroup(self, ranks: tuple[int, ...]) -> Alone:
        return self

    def split(self) -> Alone:
        return self

    def barrier(self, what: str) -> None: ...

    def report_failure(self, message: str, *, leaves: bool = False) -> None: ...

    def leave_run(self) -> None: ...

    def named(self, what: str) -> str:
        return what

    def words(self, what: str) -> Words:
        raise NotImplementedError("a rank that is alone has nobody to tell")

    def calls_differ(self, what: str, *, is_over: bool) -> str:
        raise NotImplementedError("a rank that is alone has nobody to differ from")

    def forget_failure(self) -> None: ...

    def close(self) -> None: ...

    def sum_in_place(self, tensors: Sequence[torch.Tensor], factor: float, what: str) -> None:
        if factor != 1.0:
            for tensor in tensors:
                tensor.mul_(factor)

    def all_gather_numbers_and_sum(
        self, numbers: Sequence[float], tensors: Sequence[torch.Tensor], what: str
    ) -> tuple[list[list[float]], Callable[[float], None] | None]:
        return self.all_gather_numbers(numbers, what), None

    def sum_to_owners(
        self, tensors: Sequence[torch.Tensor], factor: float, owned: Sequence[Sequence[Piece]], what: str
    ) -> None:
        self.sum_in_place(tensors, factor, what)
