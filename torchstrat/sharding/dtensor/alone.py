"""The communicator of a process that has nobody to talk to: one replica, or an axis of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from torchstrat.distributed.collectives.process_group import Done
from torchstrat.distributed.collectives.shared_memory.in_place_sum import Piece
from torchstrat.distributed.collectives.words import Words


class Alone:
    """See `Communicator` and `SumsInPlace` for what the methods promise. ``rank_of_job`` is this process's."""

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

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        return value

    def subgroup(self, ranks: tuple[int, ...]) -> Alone:
        return self

    def split(self) -> Alone:
        return self

    def barrier(self, what: str) -> None: ...

    def report_failure(self, message: str, *, leaves: bool = False) -> None: ...

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
