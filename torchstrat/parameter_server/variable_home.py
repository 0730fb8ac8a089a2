"""What stands behind a `ParameterServerStrategy`: the job that the coordinator's process has, or a worker's servers.

And behind a `ts.Variable`: a component that a server keeps, of which every read is a pull and every assignment a push.
What ``state_dict()`` returns on the coordinator is what the servers hold at that moment.
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core import nest
from torchstrat.core._torch_private import optimizers_without_compiler, sparse_indices, sparse_values
from torchstrat.core.engine import ReplicaEngine
from torchstrat.core.errors import ContextError, InvalidArgumentError, UnsupportedError
from torchstrat.core.registration_order import WeakOrdered
from torchstrat.core.variable.storage import Cell, Edit, Storage, VariableHome, VariablePlacement
from torchstrat.core.variable.variable import Variable, VariableFacts, facts_of, storage_of, variable_over
from torchstrat.distributed.cluster import PARAMETER_SERVER, ROLES, WORKER, ClusterSpec
from torchstrat.parameter_server.messages import EditOp, VariableSpec
from torchstrat.parameter_server.serialization.path_errors import StaysHere
from torchstrat.parameter_server.variables.optimizer_state import Kinds, RemoteOptimizerState
from torchstrat.parameter_server.variables.remote_access import VariableAccess
from torchstrat.parameter_server.variables.sharded_variable import ShardedVariable

if TYPE_CHECKING:
    from torchstrat.parameter_server.job import Job
    from torchstrat.parameter_server.membership.membership import Membership
    from torchstrat.parameter_server.serialization.captured_objects import Objects
    from torchstrat.parameter_server.variables.remote_access import ServerGroup

C = TypeVar("C")


class ServerHome(VariableHome):
    """Variables live on parameter servers; the processes that use them are the coordinator and the workers."""

    def __init__(self, device: str) -> None:
        super().__init__(VariablePlacement.ONE, (device,))

    @property
    def servers(self) -> ServerGroup | None:
        """Those that this process knows."""
        raise NotImplementedError

    @property
    def places(self) -> str:
        return "parameter servers"

    @property
    def communication(self) -> str:
        """From this process to the servers that it knows; and how it could be."""
        if not self.servers:
            return "shared memory with tasks of the same host, torch.distributed.rpc with others; not connected yet"
        indices: dict[str, list[str]] = {}
        for index, way in self.servers.describe_ways().items():
            indices.setdefault(way, []).append(str(index))
        return "; ".join(f"{way} with ps {', '.join(which)}" for way, which in indices.items())

    def device_named(self, name: str | torch.device) -> str:
        """Also what `StrategyExtended.device_of` says, and TensorFlow's names of tasks."""
        tasks = "|".join(ROLES)
        names_task = isinstance(name, str) and re.match(rf"/job:({tasks})/|(({tasks}):\d+(, |$))+$", name)
        return str(name) if names_task else super().device_named(name)

    def require_comparable(self) -> None:
        raise UnsupportedError(
            "check_replicas has nothing to compare on parameter servers: variables are on the servers once, and "
            "workers' copies are as old as their last pull, by design. Read what the servers have with "
            "strategy.extended.pull()."
        )

    def coordinate(self, make: Callable[[Job, Callable[..., None], str], C]) -> C:
        """The one coordinator of the strategy; ``make`` gets the job, what records functions, and `on_server_loss`."""
        raise NotImplementedError


class WorkerHome(ServerHome):
    """For what stands for the strategy in a scheduled function. ``servers``: as this worker calls them; ``leaving``: a
    block whose gradients are left to them."""

    is_worker = True

    def __init__(self, device: str, servers: ServerGroup, leaving: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(device)
        self._servers, self.leaving = servers, leaving

    @property
    def servers(self) -> ServerGroup:
        return self._servers

    def make_storage(self, initial: torch.Tensor, device: str, name: str) -> Storage:
        raise _created_on_worker()

    def make_sharded(self, initial_value: object, name: object, shape: object, dtype: object, **kind: object) -> object:
        raise _created_on_worker()

    def coordinate(self, make: Callable[[Job, Callable[..., None], str], C]) -> C:
        raise ContextError("a scheduled function runs on a worker, which has no ClusterCoordinator of its own.")


def _created_on_worker() -> InvalidArgumentError:
    return InvalidArgumentError(
        "Variable was created in a scheduled function or a per-worker dataset function. Variables live on the "
        "parameter servers; create them on the coordinator, within `with strategy.scope():`."
    )


class CoordinatorHome(ServerHome):
    """For the coordinator's process: the servers, and what is on them. Nothing is contacted before `job` is needed."""

    def __init__(
        self,
        engine: ReplicaEngine,
        device: str,
        spec: ClusterSpec,
        partitioner: Callable[..., Any] | None,
        *,
        rows_only: bool | None,
        kinds: Kinds,
        on_server_loss: str,
        timeout: timedelta,
        membership: Membership | None,
    ) -> None:
        super().__init__(device)
        self._engine, self._registry = engine, engine.registry
        self._spec, self._partitioner = spec, partitioner
        self._rows_only, self._kinds, self._timeout = rows_only, kinds, timeout
        self._membership = membership
        self.on_server_loss = on_server_loss
        self._connected: Job | None = None
        self.coordinator: Any = None
        self._lock = threading.RLock()
        self._scopes: list[ExitStack] = []
        self._beside: list[VariableSpec] = []
        self._keeps_whole = False
        self._hooked_counts: tuple[int, int, int] | None = None

    @property
    def servers(self) -> ServerGroup | None:
        return None if self._connected is None else self._connected.servers

    @property
    def places(self) -> str:
        if self._connected is None:
            return super().places
        held = self._connected.held_bytes()
        return ", ".join(f"ps {index} ({count:,} bytes)" for index, count in held.items())

    # -- the cluster ------------------------------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        with self._lock:
            self.require_open()
            if self._connected is None:
                self._connected = self._make_job()
            return self._connected

    def _make_job(self) -> Job:
        from torchstrat.parameter_server.job import Job
        from torchstrat.parameter_server.membership.membership import ClusterMembership
        from torchstrat.parameter_server.transport.auth import load_secret

        seconds = self._timeout.total_seconds()
        membership = self._membership or ClusterMembership(self._spec, load_secret(), timeout_seconds=seconds)
        job = Job(
            membership,
            self._registry,
            self._spec.num_tasks(PARAMETER_SERVER),
            self._spec.num_tasks(WORKER),
            self._partitioner,
            rows_only=self._rows_only,
            kinds=self._kinds,
            timeout_seconds=seconds,
        )
        _close_at_exit(self)
        return job

    def coordinate(self, make: Callable[[Job, Callable[..., None], str], C]) -> C:
        with self._lock:
            self.require_open()
            if self.coordinator is None:
                try:
                    self.coordinator = make(self.job, self._capture, self.on_server_loss)
                except BaseException:  # servers that are not there yet, Ctrl-C: who tries again begins anew
                    job, self._connected = self._connected, None
                    if job is not None:
                        job.close(finished=False)
                    raise
            return self.coordinator  # type: ignore[no-any-return]

    def require_open(self) -> None:
        if self.is_closed:
            raise ContextError("this ParameterServerStrategy was closed; its job is over. Make a new strategy.")

    def close(self, *, finished: bool, brings: bool = False) -> None:
        """``brings``: the program may go on to use the modules, which get the servers' values."""
        self.is_closed = True
        _open.discard(self)
        if self._connected is not None:
            # Imported here: checkpoints import what strategies are made of.
            from torchstrat.checkpoint.writing import wait_for_saves

            wait_for_saves()
            job, self._connected = self._connected, None
            job.close(finished=finished, brings=brings)
        self._engine.close()

    # -- scope ------------------------------------------------------------------------------------------------------

    def open_scope(self) -> None:
        stack = ExitStack()
        if not self._scopes:
            from torchstrat.parameter_server.variables.deferred_init import RecordInitialisers

            stack.enter_context(optimizers_without_compiler())
            stack.enter_context(RecordInitialisers())  # type: ignore[no-untyped-call]
            self._registry.on_member = self._note_member
        self._scopes.append(stack)

    def close_scope(self) -> None:
        self._scopes.pop().close()
        if not self._scopes:
            self._registry.on_member = None

    def commit_scope(self) -> None:
        """What was made in it goes to the servers, when the outermost one was left."""
        if not self._scopes:
            self.job.seed = torch.initial_seed()
            self.job.servers.asking(self.job.commit)
            self._hook_state_dicts()

    def _note_member(self, module: nn.Module, name: str, member: object) -> None:
        if self._beside and isinstance(member, torch.Tensor):
            self.job.variables.put_beside(member, self._beside[-1])

    def _capture(self, fn: Callable[..., object], arguments: Iterable[object]) -> None:
        """Record what a function reaches. Trained state that was not made in the scope is an error."""
        registry = self._registry
        before = registry.counts
        adopted = registry.adopt(fn, nest.leaves(list(arguments)))
        if adopted:
            registry.forget_since(before)  # or it would be there when the function is scheduled once more
            raise InvalidArgumentError(
                f"the function uses trainable variables that the scope has not seen: {', '.join(adopted)}. They are "
                "not on the parameter servers, and a worker would train a copy that nobody sees. Create them, and the "
                "optimizer, within `with strategy.scope():`, each in a module or an optimizer."
            )
        self._hook_state_dicts()

    def _hook_state_dicts(self) -> None:
        registry = self._registry
        if registry.counts == self._hooked_counts:
            return
        self._hooked_counts = registry.counts
        for module in registry.modules():
            hook_module(self.job, module)
        for optimizer in registry.optimizers():
            hook_optimizer(self.job, optimizer)

    # -- variables --------------------------------------------------------------------------------------------------

    def pull(self, modules: list[nn.Module] | None) -> None:
        def pull() -> None:
            self.job.commit()
            self.job.pull(modules)

        self.job.servers.asking(pull)

    def grow_rows(self, weight: torch.Tensor, rows: int, init: Any) -> bool:
        from torchstrat.parameter_server.variables.coordinator_state import grow

        self.job.servers.asking(lambda: grow(self.job, self._registry, weight, rows, init))
        return True

    def make_storage(self, initial: torch.Tensor, device: str, name: str) -> Storage:
        if not self._scopes:
            return Cell(initial, device)
        job = self.job
        beside = self._beside[-1] if self._beside else None
        spec = job.placement.place(
            name, initial.shape, initial.dtype, "variable", with_variable=beside, may_split=False
        )
        job.add_variable(spec, initial)
        access = job.access
        return RemoteStorage(spec, lambda: access)

    def made(self, variable: Any) -> None:
        storage = storage_of(variable)
        if isinstance(storage, RemoteStorage):
            self.job.catalog.register(
                variable, ("variable", storage.spec.number), recipe_of_variable(variable, storage)
            )

    def make_sharded(self, initial_value: Any, name: Any, shape: Any, dtype: Any, **kind: Any) -> object:
        if self._partitioner is None or self._beside or self._keeps_whole or not self._scopes:
            return None
        from torchstrat.parameter_server.variables.sharded_variable import create_variable

        def make(value: torch.Tensor, part_name: str | None) -> Variable:
            self._keeps_whole = True
            try:
                return Variable(value, name=part_name, **kind)
            finally:
                self._keeps_whole = False

        return create_variable(self._partitioner, initial_value, name, shape, dtype, make)

    @contextmanager
    def colocating(self, variable: object) -> Iterator[None]:
        self._beside.append(self._spec_of(variable))
        try:
            yield
        finally:
            self._beside.pop()

    def _spec_of(self, variable: object) -> VariableSpec:
        if isinstance(variable, Variable):
            storage = storage_of(variable)
            if isinstance(storage, RemoteStorage):
                return storage.spec
        elif isinstance(variable, torch.Tensor):
            self.job.variables.place_now(variable)
            spec = self.job.variables.spec_of(variable)
            if spec is not None:
                return spec
        elif isinstance(variable, ShardedVariable):
            raise InvalidArgumentError(f"{variable!r:.80} has shards on several servers; name one of its .variables.")
        raise InvalidArgumentError(f"{variable!r:.80} does not live on this strategy's parameter servers.")

    def place_of(self, variable: object) -> str | None:
        if isinstance(variable, torch.Tensor):
            return join_places(f"ps:{shard.server}" for shard in self._spec_of(variable).shards)
        return None


def join_places(shards: Iterable[str]) -> str:
    """The places of a variable's shards, in the order of its rows, each once."""
    return ", ".join(dict.fromkeys(shards))


_open: weakref.WeakSet[CoordinatorHome] = weakref.WeakSet()


def _close_at_exit(home: CoordinatorHome) -> None:
    """An ordinary end of the program ends the job; a crash keeps the servers waiting for the next coordinator."""
    atexit.unregister(_close_all)  # once, and before what was registered since
    atexit.register(_close_all)
    _open.add(home)


def _close_all() -> None:
    for home in list(_open):
        home.close(finished=not _is_crashing())


def _is_crashing() -> bool:
    """Whether an exception ends the interpreter: then the next coordinator finds the variables as they are. Where a
    person types (notebooks, ``python -i``) exceptions end nothing."""
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")


# -- a variable on servers ---------------------------------------------------------------------------------------------

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
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"a module of TorchScript ({module.original_name}) was made in the scope, and C++ has its variables, "
                "where servers do not reach. Make the module itself in the scope; what torch.jit makes of that one "
                "outside has the servers' values when it is called."
            )
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
