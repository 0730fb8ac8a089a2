"""The meetings of replicas that take turns in one process, as the communicator that replicas of several processes have.

Nothing is sent: whoever comes to a meeting last has what all have brought, and what each gets back is made of it while
all stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch

from torchstrat import gradients as arithmetic
from torchstrat.collectives.communicator import Work
from torchstrat.collectives.shared_memory.in_place_sum import Piece
from torchstrat.collectives.words import Words
from torchstrat.replicas.in_process.baton import Baton
from torchstrat.replicas.thread_state import OwnSettings


class _Done:
    def wait(self) -> None:
        """It is."""


_DONE = _Done()


class InProcessCommunicator:
    """One object for all ``replicas``: ``rank`` is that of the replica whose turn it is. `begin` gives it the baton of
    a run. Objects are handed over as they are, without being pickled, and must not be changed by who gets them."""

    def __init__(self, replicas: Sequence[int]) -> None:
        self._places = {replica: place for place, replica in enumerate(replicas)}
        self._baton: Baton | None = None

    def begin(self, baton: Baton) -> None:
        self._baton = baton

    def end(self) -> None:
        self._baton = None

    @property
    def rank(self) -> int:
        """-1 while all stand still."""
        holder = None if self._baton is None else self._baton.holder
        return -1 if holder is None else self._places[holder]

    @property
    def size(self) -> int:
        return len(self._places)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._places)

    @property
    def timeout(self) -> timedelta:
        return timedelta.max  # nobody is waited for who is not here

    def _meet(self, what: str, payload: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """``combine``: what all bring → what each gets."""

        def meet(payloads: dict[int, Any]) -> dict[int, Any]:
            with OwnSettings():
                return dict(zip(payloads, combine(list(payloads.values())), strict=True))

        assert self._baton is not None
        return self._baton.meet(what, payload, meet)

    def _share(self, what: str, payload: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """The same where all get the same."""
        return self._meet(what, payload, lambda all_of: [combine(all_of)] * len(all_of))

    # -- collective calls -------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Work:
        self.sum_in_place([tensor], 1.0, what)
        return _DONE

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        def combine(tensors: list[torch.Tensor]) -> list[None]:
            for place, other in enumerate(tensors):
                if place != source:
                    other.copy_(tensors[source])
            return [None] * len(tensors)

        self._meet(what, tensor, combine)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        def combine(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
            # Copies: the first to go on may change what it has brought before the next one looks.
            return [[one.to(own.device, copy=True) for one in tensors] for own in tensors]

        return self._meet(what, tensor.detach(), combine)  # type: ignore[no-any-return]

    def all_gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        return self._share(what, list(numbers), lambda rows: rows)  # type: ignore[no-any-return]

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        return self._share(what, value, lambda values: values)  # type: ignore[no-any-return]

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        return self._share(what, value, lambda values: values[source])

    def barrier(self, what: str) -> None:
        self._share(what, None, lambda _: None)

    # -- sums where gradients lie -----------------------------------------------------------------------------------

    def sum_in_place(self, tensors: Sequence[torch.Tensor], factor: float, what: str) -> None:
        def combine(columns: list[Sequence[torch.Tensor]]) -> None:
            _sum(columns, factor)

        if tensors:
            self._share(what, tensors, combine)

    def all_gather_numbers_and_sum(
        self, numbers: Sequence[float], tensors: Sequence[torch.Tensor], what: str
    ) -> tuple[list[list[float]], Callable[[float], None] | None]:
        def combine(brought: dict[int, tuple[list[float], Sequence[torch.Tensor]]]) -> dict[int, Any]:
            columns = [one for _, one in brought.values()]
            made = [row for row, _ in brought.values()], _SumOnce(columns) if all(columns) else None
            return dict.fromkeys(brought, made)

        assert self._baton is not None
        return self._baton.meet(what, (list(numbers), tensors), combine)  # type: ignore[no-any-return]

    def sum_to_owners(
        self, tensors: Sequence[torch.Tensor], factor: float, owned: Sequence[Sequence[Piece]], what: str
    ) -> None:
        self.sum_in_place(tensors, factor, what)

    # -- between processes only -------------------------------------------------------------------------------------

    def subgroup(self, ranks: tuple[int, ...]) -> NoReturn:
        raise NotImplementedError("replicas of one process have a communicator for those of each run")

    def split(self) -> NoReturn:
        raise NotImplementedError("input of one process needs no channel")

    def words(self, what: str) -> Words:
        raise NotImplementedError("replicas of one process are told apart by nothing that could differ")

    def report_failure(self, message: str, *, leaves: bool = False) -> None:
        """The baton ends the others."""

    def forget_failure(self) -> None: ...

    def calls_differ(self, what: str, *, is_over: bool) -> str:
        """The baton tells."""
        return what

    def close(self) -> None: ...


class _SumOnce:
    """Makes the sums of all, the first time that one of them asks, in its `OwnSettings`."""

    def __init__(self, columns: list[Sequence[torch.Tensor]]) -> None:
        self._columns = columns

    def __call__(self, factor: float) -> None:
        if self._columns:
            _sum(self._columns, factor)
            self._columns = []


def _sum(columns: Sequence[Sequence[torch.Tensor]], factor: float) -> None:
    """``columns[replica][i]`` all become the same factor · Σ columns[replica][i]."""
    if len({tensor.device for column in columns for tensor in column}) == 1:
        arithmetic.combine_in_place(columns, factor)
        return
    groups: dict[tuple[torch.device, ...], list[int]] = {}
    for place, row in enumerate(zip(*columns, strict=True)):
        groups.setdefault(tuple(tensor.device for tensor in row), []).append(place)
    for devices, places in groups.items():
        chosen = [[column[place] for place in places] for column in columns]
        if devices.count(devices[0]) == len(devices):
            arithmetic.combine_in_place(chosen, factor)
            continue
        for row in zip(*chosen, strict=True):
            total = sum(tensor.to(devices[0]) for tensor in row) * factor
            for tensor in row:
                tensor.copy_(total)
