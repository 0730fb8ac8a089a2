"""Variables on parameter servers, functions on workers, training asynchronous."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, final

from torch.optim import Optimizer

from torchstrat.core.devices import resolve_compute_devices
from torchstrat.core.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.data.options import InputContext, InputOptions
from torchstrat.distributed.cluster import ClusterSpec
from torchstrat.distributed.cluster_resolver import ClusterResolver
from torchstrat.parameter_server.membership.cluster_checks import check_parameter_server_cluster
from torchstrat.parameter_server.remote_value import DatasetForWorkers
from torchstrat.parameter_server.server_loss import POLICIES
from torchstrat.parameter_server.variable_home import CoordinatorHome, WorkerHome
from torchstrat.parameter_server.variables.optimizer_state import Kinds
from torchstrat.parameter_server.worker import executor
from torchstrat.replicas.in_process.engine import InProcessReplicas
from torchstrat.strategies.strategy import DEFAULT_TIMEOUT, Strategy

if TYPE_CHECKING:
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

    _home: CoordinatorHome | WorkerHome

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
        self._made_with[1].pop("_membership", None)  # a copy has a cluster of its own
        if on_server_loss not in POLICIES:
            raise InvalidArgumentError(f'on_server_loss={on_server_loss!r} must be "raise" or "restore".')
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
        engine = self._replica_on("cpu:0", op)
        home = CoordinatorHome(
            engine,
            engine.device_of_replica(0),
            self._spec,
            variable_partitioner,
            rows_only=rows_only,
            kinds=Kinds(elementwise_optimizers),
            on_server_loss=on_server_loss,
            timeout=timeout,
            membership=_membership,
        )
        self._set_up(engine, home, home.devices, cluster_resolver)

    def _become_worker(
        self, device: str, servers: ServerGroup, leaving: Callable[[], AbstractContextManager[None]]
    ) -> ParameterServerStrategy:
        """Be what stands for the strategy in a scheduled function."""
        engine = self._replica_on(device, ReduceOp.MEAN)
        home = WorkerHome(engine.device_of_replica(0), servers, leaving)
        self._set_up(engine, home, home.devices)
        return self

    def _replica_on(self, device: str, op: ReduceOp) -> InProcessReplicas:
        return InProcessReplicas(self, resolve_compute_devices([device], argument="device"), gradient_op=op)

    def close(self) -> None:
        """Tell servers and workers that the job is over, and stop. Waits for a checkpoint that is being written. May be
        called twice.

        Modules of the scope are ordinary ones after it, with the values that the servers had. Where these cannot be
        read any more, reading such a tensor is a `ContextError`.
        """
        if isinstance(self._home, CoordinatorHome):
            self._home.close(finished=True, brings=True)
        else:
            super().close()

    # -- scope ------------------------------------------------------------------------------------------------------

    def _enter_scope(self) -> None:
        home = self._home
        if isinstance(home, WorkerHome):
            raise ContextError(
                "scope() was opened in a scheduled function. The coordinator creates variables; functions use them."
            )
        from torchstrat.parameter_server.coordinator import ClusterCoordinator

        super()._enter_scope()
        try:
            ClusterCoordinator(self)
            home.open_scope()
        except BaseException:
            super()._leave_scope(failed=True)
            raise

    def _leave_scope(self, *, failed: bool) -> None:
        assert isinstance(self._home, CoordinatorHome)
        self._home.close_scope()
        super()._leave_scope(failed=failed)
        if not failed:
            self._home.commit_scope()

    # -- replicas ---------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """In a scheduled function: call ``fn`` as this worker's one replica. See `Strategy.run`.

        On the coordinator it runs here, on the values of this moment, writes what it changes to the servers, and logs a
        warning.
        """
        if isinstance(self._home, CoordinatorHome):
            logger.warning(
                "strategy.run was called on the coordinator, so it runs here, on the values of this moment, and what "
                "it changes is written to the servers; no worker takes part. Schedule a function that calls it: "
                "coordinator.schedule(fn)."
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
        leaving = self._home.leaving() if isinstance(self._home, WorkerHome) else nullcontext()
        with super().no_sync(), leaving:
            yield

    # -- input ------------------------------------------------------------------------------------------------------

    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """A dataset for `ClusterCoordinator.create_per_worker_dataset`; on the coordinator it cannot be iterated."""
        if isinstance(self._home, WorkerHome):
            return super().distribute_dataset(dataset, options)
        self._home.require_open()
        return DatasetForWorkers(lambda: self.distribute_dataset(dataset, options))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """A dataset for `ClusterCoordinator.create_per_worker_dataset`; on the coordinator it cannot be iterated.

        ``dataset_fn`` sees one input pipeline; `ClusterCoordinator.get_current_worker_index` and
        `ClusterCoordinator.num_workers` let each worker read a part.
        """
        if isinstance(self._home, WorkerHome):
            return super().distribute_datasets_from_function(dataset_fn, options)
        self._home.require_open()
        return DatasetForWorkers(lambda: self.distribute_datasets_from_function(dataset_fn, options))

    def __repr__(self) -> str:
        if isinstance(self._home, WorkerHome):
            return "<ParameterServerStrategy on a worker>"
        tasks = ", ".join(f"{self._spec.num_tasks(job)} {job}" for job in self._spec.jobs)
        return f"<ParameterServerStrategy of {tasks}>"

    def _facts(self) -> Iterator[tuple[str, object]]:
        if isinstance(self._home, CoordinatorHome):
            for job in self._spec.jobs:
                yield job, ", ".join(address or "-" for address in self._spec.job_tasks(job))
            yield "after the loss of a server", self._home.on_server_loss
        yield "communication", self._home.communication
        if self._home.is_closed:
            yield "state", "closed"


executor.make_strategy = lambda *given: object.__new__(ParameterServerStrategy)._become_worker(*given)  # noqa: SLF001
