"""From a plan of processes to replicas of several of them.

The communicator of a process that has nobody to talk to: one replica, or an axis of one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchstrat.core.communicator import Communicator, Words
from torchstrat.core.context import StrategyLike
from torchstrat.core.devices import torch_device
from torchstrat.core.reduction import ReduceOp
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.distributed.collectives.agreement import SumsInPlace
from torchstrat.distributed.collectives.process_group import Done, abandon
from torchstrat.distributed.collectives.shared_memory.in_place_sum import Piece
from torchstrat.distributed.collectives.shared_memory.neighbours import NotNeighboursError
from torchstrat.distributed.collectives.shm import SharedMemoryCommunicator, choose_communicator
from torchstrat.sharding.annotations import ShardingRules
from torchstrat.sharding.dtensor.devices import LogicalAxes, LogicalDevices, make_groups, make_mesh
from torchstrat.sharding.dtensor.engine import LogicalReplicas
from torchstrat.sharding.dtensor.replica_axis import OwnColumn, OwnColumnInPlace
from torchstrat.sharding.dtensor.same_calls import SameCalls


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


def replicas_of_processes(
    strategy: StrategyLike,
    plan: ProcessPlan,
    device: str,
    op: ReduceOp,
    timeout: timedelta,
    *,
    collectives: str,
    mesh_shape: Sequence[int],
    rules: ShardingRules | None,
) -> LogicalReplicas:
    """Every process of the job calls it; ``plan.size`` is a multiple of the logical devices."""
    axes = LogicalAxes(mesh_shape)
    logical = axes.num_logical_devices
    replicas, own = plan.size // logical, plan.rank % logical
    everyone, why = choose_communicator(plan, device, timeout, collectives)
    groups = _Groups(everyone)
    try:
        columns = [groups.of(tuple(range(start, plan.size, logical))) for start in range(logical)]
        within = make_groups(axes, replicas, plan.rank, groups.of)
        mesh = make_mesh(axes, replicas, device)
        column = groups.fastest(columns[own])
        of_column = OwnColumnInPlace if isinstance(column, SumsInPlace) else OwnColumn
        devices = LogicalDevices(
            axes,
            mesh,
            own,
            {chosen: groups.fastest(group) for chosen, group in within.items()},
            torch_device(device),
            groups.same_calls(replicas, plan.rank // logical, logical),
        )
        made = [group for group in mesh.get_all_groups() if group is not dist.group.WORLD]

        return LogicalReplicas(
            strategy,
            everyone,
            of_column(column, _Closing(everyone, groups, made), logical),
            devices,
            device,
            op,
            rules,
            communication=f"{why}; {logical} logical devices in each replica",
        )
    except BaseException:
        groups.close()
        everyone.close()
        raise


class _Groups:
    """The parts of a job that talk among themselves, each made once."""

    def __init__(self, everyone: Communicator) -> None:
        self._everyone = everyone
        self._quick: list[SharedMemoryCommunicator] = []
        self._fastest: dict[tuple[int, ...], Communicator] = {}

    def of(self, ranks: tuple[int, ...]) -> Communicator:
        """Every process of the job calls it."""
        if len(ranks) == 1:
            return Alone(ranks[0], self._everyone.timeout)
        return self._everyone.subgroup(ranks)

    def same_calls(self, replicas: int, own: int, logical: int) -> SameCalls | None:
        """Of the processes of replica ``own``; None where all talk in shared memory, which compares calls by itself.
        Every process of the job calls it."""
        if logical == 1 or isinstance(self._everyone, SharedMemoryCommunicator):
            return None
        channels = self._everyone.split()
        of_replicas = [
            channels.subgroup(tuple(range(replica * logical, (replica + 1) * logical))) for replica in range(replicas)
        ]
        return SameCalls(of_replicas[own])

    def fastest(self, group: Communicator) -> Communicator:
        """In shared memory, where the job is. The group's own processes call it."""
        if isinstance(group, Alone) or not isinstance(self._everyone, SharedMemoryCommunicator):
            return group
        if group.ranks not in self._fastest:
            try:
                quick = SharedMemoryCommunicator(_Borrowed(group))  # type: ignore[arg-type]
            except NotNeighboursError:
                return group
            self._quick.append(quick)
            self._fastest[group.ranks] = quick
        return self._fastest[group.ranks]

    def close(self) -> None:
        while self._quick:
            self._quick.pop().close()


class _Borrowed:
    """A group that outlives who uses it."""

    def __init__(self, group: Communicator) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def close(self) -> None: ...


class _Closing:
    """All processes of the job; closing them closes what was made of them."""

    def __init__(self, everyone: Communicator, groups: _Groups, made: list[Any]) -> None:
        """``made``: groups of torch's own."""
        self._everyone, self._groups = everyone, groups
        self._abandon = weakref.finalize(self, abandon, made)
        self._abandon.atexit = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._everyone, name)

    def close(self) -> None:
        self._groups.close()
        self._abandon()
        self._everyone.close()
