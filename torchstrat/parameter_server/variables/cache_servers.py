"""The servers of a job, as the coordinator's cache asks them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchstrat.parameter_server.messages import InitialOp, RepeatedOps, VariableSpec
from torchstrat.parameter_server.variables.variable_access import VariableEdit

if TYPE_CHECKING:
    from torchstrat.parameter_server.job import Job


class CacheServers:
    """Through losses of servers, as all calls of the coordinator; see `OnServerLoss`."""

    def __init__(self, job: Job) -> None:
        self._job: Job = weakref.proxy(job)
        self._repeated = 0

    def read(self, specs: Sequence[VariableSpec]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self._job.access.read(specs)
        return found

    def read_rows(self, spec: VariableSpec, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._job.access.read_rows(spec, ids)
        return rows

    def assign(self, values: Sequence[tuple[VariableSpec, torch.Tensor]]) -> None:
        self._job.access.push([VariableEdit(spec, "assign", value) for spec, value in values])

    def assign_rows(self, spec: VariableSpec, value: torch.Tensor, rows: torch.Tensor | None) -> None:
        self._job.access.edit(spec, "assign", value, rows)

    def repeat(self, spec: VariableSpec, recipe: tuple[InitialOp, ...]) -> None:
        self._repeated += 1
        seed = hash((self._job.seed, spec.number, self._repeated)) % 2**63
        orders: dict[int, list[RepeatedOps]] = defaultdict(list)
        for number, shard in enumerate(spec.shards):
            orders[shard.server].append(RepeatedOps((spec.number, number), recipe, seed))
        self._job.servers.ask("ps.repeat", orders)

    def attempt(self, call: Callable[[], Any], after_restore: Callable[[], Any]) -> Any:
        return self._job.attempt(call, after_restore)
