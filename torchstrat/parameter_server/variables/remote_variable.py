"""A `ts.Variable`'s component that a server keeps: every read is a pull, every assignment a push.

What ``state_dict()`` returns on the coordinator is what the servers hold at that moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core._torch_private import sparse_indices, sparse_values
from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.variable.storage import Edit
from torchstrat.core.variable.variable import Variable, VariableFacts, facts_of, variable_over
from torchstrat.core.variables import WeakOrdered
from torchstrat.parameter_server.messages import EditOp, VariableSpec
from torchstrat.parameter_server.serialization.path_errors import StaysHere
from torchstrat.parameter_server.variables.optimizer_state import RemoteOptimizerState
from torchstrat.parameter_server.variables.remote_access import VariableAccess

if TYPE_CHECKING:
    from torchstrat.parameter_server.job import Job
    from torchstrat.parameter_server.serialization.captured_objects import Objects

_OPERATIONS: dict[Edit, EditOp] = {Edit.ASSIGN: "assign", Edit.ADD: "add", Edit.SUB: "sub"}


class RemoteStorage:
    """``access()`` reaches the servers from the calling thread: as the coordinator, or for the function it runs. Where
    a coordinator restores them, what is read is read again, and what is changed goes with the rest.

    Additions are exact whatever other workers do meanwhile; of several plain assignments the last one stays.
    """

    def __init__(self, spec: VariableSpec, access: Callable[[], VariableAccess]) -> None:
        self.spec = spec
        self._access = access

    @property
    def device(self) -> str:
        return f"ps:{self.spec.shards[0].server}"

    @property
    def value_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    def lend(self) -> torch.Tensor:
        return self.copy()

    def copy(self) -> torch.Tensor:
        access = self._access()
        return access.servers.asking(lambda: access.read([self.spec])[0])

    # -- as a shard of a `ShardedVariable` ----------------------------------------------------------------------------

    def read(self) -> torch.Tensor:
        return self.copy()

    def read_rows(self, rows: torch.Tensor) -> torch.Tensor:
        ids, places = torch.unique(rows, return_inverse=True)
        access = self._access()
        return access.servers.asking(lambda: access.read_rows(self.spec, ids))[places]

    def edit(self, op: EditOp, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        access = self._access()
        access.servers.telling(lambda: access.edit(self.spec, op, value, rows))

    # -- as a component of a `Variable` -------------------------------------------------------------------------------

    def write(self, edit: Edit, value: torch.Tensor) -> None:
        if edit is Edit.SCATTER_ADD:
            self.edit("add", *_rows_of(self.spec, value))
            return
        if edit is Edit.ASSIGN and value.shape != self.shape:
            raise InvalidArgumentError(
                f"assign got shape {tuple(value.shape)}; variable {self.spec.name!r} on a parameter server has shape "
                f"{self.spec.shape} for good."
            )
        self.edit(_OPERATIONS[edit], value)


@dataclass(frozen=True)
class _VariableRecipe:
    """Builds a worker's object for a `Variable` that the coordinator has made."""

    spec: VariableSpec
    facts: VariableFacts

    def __call__(self, world: Objects) -> Variable:
        storage = RemoteStorage(self.spec, lambda: world.resolve(("access",)))
        return variable_over(storage, world.resolve(("strategy",)), self.facts)


def recipe_of_variable(variable: Variable, storage: RemoteStorage) -> Callable[[Objects], Variable]:
    return _VariableRecipe(storage.spec, facts_of(variable))


def _rows_of(spec: VariableSpec, sparse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (values, ids) of a sparse COO tensor; one that is sparse in further dimensions has these filled up."""
    if sparse.sparse_dim() == 1:
        return sparse_values(sparse), sparse_indices(sparse)[0]
    coalesced = sparse.coalesce()
    ids, inverse = torch.unique(coalesced.indices()[0], return_inverse=True)
    rows = torch.zeros((len(ids), *spec.shape[1:]), dtype=spec.dtype)
    rows.index_put_((inverse, *coalesced.indices()[1:]), coalesced.values(), accumulate=True)
    return rows, ids


_hooked = WeakOrdered()


def hook_module(job: Job, module: nn.Module) -> None:
    """Pull before ``module.state_dict()``. Once per module."""
    if _hooked.add(module):
        module.register_state_dict_pre_hook(_PullModule(job))


def hook_optimizer(job: Job, optimizer: Optimizer) -> None:
    """Pull the state before ``optimizer.state_dict()``, push it after ``optimizer.load_state_dict()``."""
    if _hooked.add(optimizer):
        # Wrappers around another optimizer often leave `Optimizer.__init__` out, and with it the places for hooks.
        vars(optimizer).setdefault("defaults", {})
        Optimizer.__setstate__(optimizer, {})
        optimizer.register_state_dict_pre_hook(_PullOptimizer(job))
        optimizer.register_load_state_dict_post_hook(_PushOptimizer(job))


class _Hook(StaysHere):
    def __init__(self, job: Job) -> None:
        self._job = weakref.ref(job)

    def _open_job(self) -> Job | None:
        """None after the strategy was closed or dropped: then the module is an ordinary one, with its last values."""
        job = self._job()
        return job if job is not None and job.is_open else None


class _PullModule(_Hook):
    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        job = self._open_job()
        if job is not None and prefix == "":  # the outermost call pulls for all modules below it

            def pull() -> None:
                job.commit()
                job.pull([module])

            job.servers.asking(pull)


class _PullOptimizer(_Hook):
    def __call__(self, optimizer: Optimizer) -> None:
        job = self._open_job()
        if job is not None and job.catalog.token_of(optimizer) is not None:  # else it was released

            def pull() -> None:
                job.commit()
                job.pull_optimizer(optimizer)

            job.servers.asking(pull)


class _PushOptimizer(_Hook):
    def __call__(self, optimizer: Optimizer) -> None:
        job = self._open_job()
        if job is not None and job.catalog.token_of(optimizer) is not None:

            def push() -> None:
                job.commit()
                if not isinstance(optimizer.state, RemoteOptimizerState):  # nothing tells that it is another one
                    job.push_optimizer(optimizer)
                job.push_options(optimizer)

            job.servers.telling(push)
