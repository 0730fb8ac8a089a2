"""Variables on parameter servers, functions on workers, training asynchronous."""

from __future__ import annotations

import atexit
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core import nest
from torchstrat.core._torch_private import optimizers_without_compiler
from torchstrat.core.devices import resolve_compute_devices
from torchstrat.core.errors import ContextError, InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.core.variable.storage import Cell, Storage, VariablePlacement
from torchstrat.core.variable.variable import Variable, storage_of
from torchstrat.data.options import InputContext, InputOptions
from torchstrat.distributed.cluster_resolver import ClusterResolver
from torchstrat.distributed.cluster_spec import PARAMETER_SERVER, ROLES, WORKER, ClusterSpec
from torchstrat.parameter_server.membership.cluster_checks import check_parameter_server_cluster
from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.remote_value import DatasetForWorkers
from torchstrat.parameter_server.server_loss import POLICIES, CoordinatorAccess
from torchstrat.parameter_server.variables.optimizer_state import Kinds
from torchstrat.parameter_server.variables.remote_variable import RemoteStorage, recipe_of_variable
from torchstrat.parameter_server.variables.sharded_variable import ShardedVariable
from torchstrat.parameter_server.worker import executor
from torchstrat.replicas.in_process.engine import InProcessReplicas
from torchstrat.strategies.extended import StrategyExtended
from torchstrat.strategies.extended.destinations import join_places
from torchstrat.strategies.strategy import DEFAULT_TIMEOUT, Strategy

if TYPE_CHECKING:
    from torchstrat.parameter_server.coordinator import ClusterCoordinator
    from torchstrat.parameter_server.job import Job
    from torchstrat.parameter_server.membership.membership import Membership
    from torchstrat.parameter_server.variables.remote_access import ServerGroup

logger = logging.getLogger("torchstrat.parameter_server")


@final
@short_tracebacks
class ParameterServerStrategy(Strategy):
    """Asynchronous training: variables on servers (job ``ps``), functions on workers, this process coordinates.

    Everything made in ``scope()`` is placed on the servers, round robin. Use `ClusterCoordinator` to run functions::

        coordinator = ts.ClusterCoordinator(strategy)
        coordinator.schedule(worker_step, args=(iterator,))
        coordinator.join()

    Args:
        cluster_resolver: describes the cluster: at least one ``worker`` and one ``ps``; this process is its ``chief``,
            which need not be listed.
        variable_partitioner: one of `ts.partitioners`, or a function ``(shape, dtype) -> [shards, 1, …]``: splits
            variables along their first axis, and makes embedding tables travel by rows.
        rows_only: rows of a table that no gradient touches stay as they are, momentum and weight decay included, for
            every optimizer (as `torch.optim.SparseAdam` does). False: the rule for dense gradients, on whole shards.
            None: True, and a warning where an optimizer would move them on one device.
        elementwise_optimizers: classes of optimizers whose steps treat each element, or each row of a table, by
            itself, as those of SGD and Adam do: their variables are cut and spread over the servers. It is said of
            classes that torchstrat does not know; twelve steps are tried, and an error says where the numbers differ.
            Variables of other classes that it does not know stay whole and together, on one server, where any step is
            right.
        gradient_reduce_op: accepted on every strategy; a worker is one replica.
        on_server_loss: what the coordinator does when a server was lost, and with it the variables it held. ``"raise"``
            `ParameterServerUnavailable`, and leave restoring a checkpoint to the program; or ``"restore"`` the newest
            checkpoint by itself, as `ClusterCoordinator.restore_on_server_loss` says, and go on.
        timeout: how long to wait for servers that are not there yet, and for their answers.

    Nothing is contacted before the first ``scope()`` or `ClusterCoordinator`. Raises `ClusterConfigError` for a cluster
    that cannot work. The cluster's secret is read from ``TORCHSTRAT_SECRET``, or from the file that
    ``TORCHSTRAT_SECRET_FILE`` names.
    """

    _wraps_values = False
    _per_replica_input = "refused"
    _variable_placement = VariablePlacement.ONE
    _servers: ServerGroup | None
    _leaving: Callable[[], AbstractContextManager[None]]

    def __init__(
        self,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        rows_only: bool | None = None,
        elementwise_optimizers: Sequence[type[Optimizer]] = (),
        gradient_reduce_op: ReduceOp | str = "mean",
        on_server_loss: Literal["raise", "restore"] = "raise",
        timeout: timedelta = DEFAULT_TIMEOUT,
        _membership: Membership | None = None,
    ) -> None:
        self._made_with = (
            (cluster_resolver, variable_partitioner),
            {
                "rows_only": rows_only,
                "elementwise_optimizers": elementwise_optimizers,
                "gradient_reduce_op": gradient_reduce_op,
                "on_server_loss": on_server_loss,
                "timeout": timeout,
            },
        )
        if on_server_loss not in POLICIES:
            raise InvalidArgumentError(f'on_server_loss={on_server_loss!r} must be "raise" or "restore".')
        self._on_server_loss = on_server_loss
        if not isinstance(cluster_resolver, ClusterResolver):
            raise WrongTypeError(
                "ParameterServerStrategy needs a cluster resolver, such as "
                "ts.cluster_resolver.TFConfigClusterResolver(); got "
                f"{type(cluster_resolver).__name__} {cluster_resolver!r:.80}."
            )
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise WrongTypeError(
                "variable_partitioner must be one of ts.partitioners, or a function (shape, dtype) -> [shards, 1, …]; "
                f"got {type(variable_partitioner).__name__} {variable_partitioner!r:.80}. Two shards of everything are "
                "ts.partitioners.FixedShardsPartitioner(2)."
            )
        op = ReduceOp.parse(gradient_reduce_op)
        self._spec: ClusterSpec = cluster_resolver.cluster_spec()
        check_parameter_server_cluster(self._spec, cluster_resolver.task_type, cluster_resolver.task_id)
        self._partitioner = variable_partitioner
        self._rows_only = rows_only
        self._kinds = Kinds(elementwise_optimizers)
        self._timeout = timeout
        self._membership = _membership
        self._connected: Job | None = None
        self._coordinator: ClusterCoordinator | None = None
        self._lock = threading.RLock()
        self._scopes: list[ExitStack] = []
        self._beside: list[VariableSpec] = []
        self._keeps_whole = False
        self._hooked_counts: tuple[int, int, int] | None = None
        self._is_worker, self._servers, self._leaving = False, None, nullcontext
        self._set_up_engine("cpu:0", op, cluster_resolver)

    def _become_worker(
        self, device: str, servers: ServerGroup, leaving: Callable[[], AbstractContextManager[None]]
    ) -> ParameterServerStrategy:
        """Be what stands for the strategy in a scheduled function. ``servers``: as this worker calls them;
        ``leaving``: a block whose gradients are left to them."""
        self._leaving = leaving
        self._is_worker, self._servers = True, servers
        self._connected = self._coordinator = None
        self._scopes, self._beside, self._keeps_whole = [], [], False
        self._set_up_engine(device, ReduceOp.MEAN, None)
        return self

    @property
    def _variable_places(self) -> str:
        if self._is_worker or self._connected is None:
            return "parameter servers"
        held = self._connected.held_bytes()
        return ", ".join(f"ps {index} ({count:,} bytes)" for index, count in held.items())

    @property
    def _communication(self) -> str:
        """From this process, the coordinator or a worker, to the servers that it knows; and how it could be."""
        servers = self._servers if self._is_worker else self._connected and self._connected.servers
        if not servers:
            return "shared memory with tasks of the same host, torch.distributed.rpc with others; not connected yet"
        indices: dict[str, list[str]] = {}
        for index, way in servers.describe_ways().items():
            indices.setdefault(way, []).append(str(index))
        return "; ".join(f"{way} with ps {', '.join(which)}" for way, which in indices.items())

    def _set_up_engine(self, device: str, op: ReduceOp, resolver: ClusterResolver | None) -> None:
        devices = resolve_compute_devices([device], argument="device")
        self._engine = InProcessReplicas(self, devices, gradient_op=op)
        self.extended = StrategyExtended(self, devices, devices, resolver)

    # -- the cluster ------------------------------------------------------------------------------------------------

    @property
    def _job(self) -> Job:
        """The servers, and what is on them."""
        with self._lock:
            self._require_open()
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
            self._engine.registry,
            self._spec.num_tasks(PARAMETER_SERVER),
            self._spec.num_tasks(WORKER),
            self._partitioner,
            rows_only=self._rows_only,
            kinds=self._kinds,
            timeout_seconds=seconds,
        )
        _close_at_exit(self)
        return job

    def _coordinate(self, make: Callable[[Job, Callable[..., None], str], ClusterCoordinator]) -> ClusterCoordinator:
        with self._lock:
            if self._is_worker:
                raise ContextError("a scheduled function runs on a worker, which has no ClusterCoordinator of its own.")
            self._require_open()
            if self._coordinator is None:
                try:
                    self._coordinator = make(self._job, self._capture, self._on_server_loss)
                except BaseException:  # servers that are not there yet, Ctrl-C: who tries again begins anew
                    job, self._connected = self._connected, None
                    if job is not None:
                        job.close(finished=False)
                    raise
            return self._coordinator

    def _require_open(self) -> None:
        if self._closed:
            raise ContextError("this ParameterServerStrategy was closed; its job is over. Make a new strategy.")

    def close(self) -> None:
        """Tell servers and workers that the job is over, and stop. Waits for a checkpoint that is being written. May be
        called twice.

        Modules of the scope are ordinary ones after it, with the values that the servers had. Where these cannot be
        read any more, reading such a tensor is a `ContextError`.
        """
        self._close(finished=True, brings=True)

    def _close(self, *, finished: bool, brings: bool = False) -> None:
        """``brings``: the program may go on to use the modules, which get the servers' values."""
        self._closed = True
        _open.discard(self)
        if not self._is_worker and self._connected is not None:
            # Imported here: checkpoints import what strategies are made of.
            from torchstrat.checkpoint.writing import wait_for_saves

            wait_for_saves()
            job, self._connected = self._connected, None
            job.close(finished=finished, brings=brings)
        super().close()

    # -- scope ------------------------------------------------------------------------------------------------------

    def _enter_scope(self) -> None:
        if self._is_worker:
            raise ContextError(
                "scope() was opened in a scheduled function. The coordinator creates variables; functions use them."
            )
        from torchstrat.parameter_server.coordinator import ClusterCoordinator

        super()._enter_scope()
        stack = ExitStack()
        try:
            ClusterCoordinator(self)
            if not self._scopes:
                from torchstrat.parameter_server.variables.deferred_init import RecordInitialisers

                stack.enter_context(optimizers_without_compiler())
                stack.enter_context(RecordInitialisers())  # type: ignore[no-untyped-call]
                self._engine.registry.on_member = self._note_member
        except BaseException:
            super()._leave_scope(failed=True)
            raise
        self._scopes.append(stack)

    def _leave_scope(self, *, failed: bool) -> None:
        stack = self._scopes.pop()
        stack.close()
        if not self._scopes:
            self._engine.registry.on_member = None
        super()._leave_scope(failed=failed)
        if not failed and not self._scopes:
            self._job.seed = torch.initial_seed()
            self._job.commit()
            self._hook_state_dicts()

    def _note_member(self, module: nn.Module, name: str, member: object) -> None:
        if self._beside and isinstance(member, torch.Tensor):
            self._job.variables.put_beside(member, self._beside[-1])

    def _capture(self, fn: Callable[..., object], arguments: Iterable[object]) -> None:
        """Record what a function reaches. Trained state that was not made in the scope is an error."""
        registry = self._engine.registry
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
        from torchstrat.parameter_server.variables.remote_variable import hook_module, hook_optimizer

        registry = self._engine.registry
        if registry.counts == self._hooked_counts:
            return
        self._hooked_counts = registry.counts
        for module in registry.modules():
            hook_module(self._job, module)
        for optimizer in registry.optimizers():
            hook_optimizer(self._job, optimizer)

    def _pull(self, modules: list[nn.Module] | None) -> None:
        def pull() -> None:
            self._job.commit()
            self._job.pull(modules)

        if not self._is_worker:
            self._job.servers.asking(pull)

    def _grow_rows(self, weight: torch.Tensor, rows: int, init: Any) -> None:
        from torchstrat.parameter_server.variables.coordinator_state import grow

        self._job.servers.asking(lambda: grow(self._job, self._engine.registry, weight, rows, init))

    # -- variables --------------------------------------------------------------------------------------------------

    def _make_storage(self, initial: torch.Tensor, device: str, name: str) -> Storage:
        self._require_coordinator("Variable")
        if not self._scopes:
            return Cell(initial, device)
        job = self._job
        beside = self._beside[-1] if self._beside else None
        spec = job.placement.place(
            name, initial.shape, initial.dtype, "variable", with_variable=beside, may_split=False
        )
        job.add_variable(spec, initial)
        access = CoordinatorAccess(job)
        return RemoteStorage(spec, lambda: access)

    def _variable_made(self, variable: Variable) -> None:
        storage = storage_of(variable)
        if isinstance(storage, RemoteStorage):
            self._job.catalog.register(
                variable, ("variable", storage.spec.number), recipe_of_variable(variable, storage)
            )

    def _make_sharded_variable(self, initial_value: Any, name: Any, shape: Any, dtype: Any, **kind: Any) -> object:
        self._require_coordinator("Variable")
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

    def _require_coordinator(self, what: str) -> None:
        if self._is_worker:
            raise InvalidArgumentError(
                f"{what} was created in a scheduled function or a per-worker dataset function. Variables live on the "
                "parameter servers; create them on the coordinator, within `with strategy.scope():`."
            )

    @contextmanager
    def _colocating(self, variable: Any) -> Iterator[None]:
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
            self._job.variables.place_now(variable)
            spec = self._job.variables.spec_of(variable)
            if spec is not None:
                return spec
        elif isinstance(variable, ShardedVariable):
            raise InvalidArgumentError(f"{variable!r:.80} has shards on several servers; name one of its .variables.")
        raise InvalidArgumentError(f"{variable!r:.80} does not live on this strategy's parameter servers.")

    def _place_of(self, variable: Any) -> str | None:
        if isinstance(variable, torch.Tensor) and not self._is_worker:
            return join_places(f"ps:{shard.server}" for shard in self._spec_of(variable).shards)
        return None

    def _device_named(self, name: str | torch.device) -> str:
        """Also what `StrategyExtended.device_of` says, and TensorFlow's names of tasks."""
        tasks = "|".join(ROLES)
        names_task = isinstance(name, str) and re.match(rf"/job:({tasks})/|(({tasks}):\d+(, |$))+$", name)
        return str(name) if names_task else super()._device_named(name)

    # -- replicas ---------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """In a scheduled function: call ``fn`` as this worker's one replica. See `Strategy.run`.

        On the coordinator it runs here, on the values of this moment, and logs a warning.
        """
        if not self._is_worker:
            logger.warning(
                "strategy.run was called on the coordinator, so it runs here and changes no variable on the servers. "
                "Schedule a function that calls it: coordinator.schedule(fn)."
            )
        return super().run(fn, args, kwargs, options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In a scheduled function: leave the gradients that this block computes to the next step of any function.

        What the function neither steps with nor sets to nothing goes to the servers with its end, which add it up. The
        next ``optimizer.step()`` of a parameter, in whichever function and on whichever worker, takes it: exactly once,
        also where workers die. So does one of a parameter that has no gradient of its own then. ``zero_grad()`` in a
        function before its step discards what others have left; after it, it does not. In functions ``.grad`` shows the
        function's own part alone, and so does clipping see that alone. Gradients that a `GradScaler` has scaled are
        refused. Checkpoints do not hold what was left, and one that is restored empties it.

        On the coordinator it has no effect on functions that are scheduled in the block.
        """
        with super().no_sync(), self._leaving():
            yield

    def _check_replicas(self, when: str) -> None:
        if not when:  # TORCHSTRAT_CHECK is for whichever strategy is used, and has nothing to find here
            raise UnsupportedError(
                "check_replicas has nothing to compare on parameter servers: variables are on the servers once, and "
                "workers' copies are as old as their last pull, by design. Read what the servers have with "
                "strategy.extended.pull()."
            )

    # -- input ------------------------------------------------------------------------------------------------------

    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """A dataset for `ClusterCoordinator.create_per_worker_dataset`; on the coordinator it cannot be iterated."""
        if self._is_worker:
            return super().distribute_dataset(dataset, options)
        self._require_open()
        return DatasetForWorkers(lambda: self.distribute_dataset(dataset, options))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """A dataset for `ClusterCoordinator.create_per_worker_dataset`; on the coordinator it cannot be iterated.

        ``dataset_fn`` sees one input pipeline; `ClusterCoordinator.get_current_worker_index` and
        `ClusterCoordinator.num_workers` let each worker read a part.
        """
        if self._is_worker:
            return super().distribute_datasets_from_function(dataset_fn, options)
        self._require_open()
        return DatasetForWorkers(lambda: self.distribute_datasets_from_function(dataset_fn, options))

    def __repr__(self) -> str:
        if self._is_worker:
            return "<ParameterServerStrategy on a worker>"
        tasks = ", ".join(f"{self._spec.num_tasks(job)} {job}" for job in self._spec.jobs)
        return f"<ParameterServerStrategy of {tasks}>"

    def _facts(self) -> Iterator[tuple[str, object]]:
        if not self._is_worker:
            for job in self._spec.jobs:
                yield job, ", ".join(address or "-" for address in self._spec.job_tasks(job))
            yield "after the loss of a server", self._on_server_loss
        yield "communication", self._communication
        if self._closed:
            yield "state", "closed"


executor.make_strategy = lambda *given: object.__new__(ParameterServerStrategy)._become_worker(*given)


_open: weakref.WeakSet[ParameterServerStrategy] = weakref.WeakSet()


def _close_at_exit(strategy: ParameterServerStrategy) -> None:
    """An ordinary end of the program ends the job; a crash keeps the servers waiting for the next coordinator."""
    atexit.unregister(_close_all)  # once, and before what was registered since
    atexit.register(_close_all)
    _open.add(strategy)


def _close_all() -> None:
    for strategy in list(_open):
        strategy._close(finished=not _is_crashing())


def _is_crashing() -> bool:
    """Whether an exception ends the interpreter: then the next coordinator finds the variables as they are. Where a
    person types (notebooks, ``python -i``) exceptions end nothing."""
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
