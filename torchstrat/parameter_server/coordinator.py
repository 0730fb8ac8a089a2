"""`ClusterCoordinator`: schedules functions on the workers of a parameter-server cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchstrat import nest
from torchstrat.cluster_spec import WORKER
from torchstrat.errors import CommunicationTimeoutError, InvalidArgumentError, WrongTypeError
from torchstrat.parameter_server.dispatcher import Dispatcher, Work
from torchstrat.parameter_server.per_worker import (
    PerWorkerDataset,
    PerWorkerValues,
    ResourceTable,
    refuse_remote_values,
    require_builder,
)
from torchstrat.parameter_server.remote_value import RemoteValue
from torchstrat.parameter_server.tasks import Task
from torchstrat.parameter_server.travel.closures import pack, unpack_result
from torchstrat.parameter_server.worker.resources import ResourceSpec
from torchstrat.parameter_server.worker.run import current_worker_index
from torchstrat.values import require_callable, require_list_or_tuple

if TYPE_CHECKING:
    from torchstrat.strategies.parameter_server import ParameterServerStrategy

QUEUE_SIZE = 262_144


class ClusterCoordinator:
    """Runs functions on the workers of a `ParameterServerStrategy`, asynchronously, whatever happens to the workers.

    There is one per strategy: the first ``scope()`` makes it, and calling the class again returns the same object. All
    methods are for the coordinator's process; they may be called from several threads.

    A function may run more than once, when its worker is lost; what it changes on the parameter servers is applied
    once. Its Python state (a counter in its closure, a list it appends to) is a copy on each worker.

    Args:
        strategy: a `ParameterServerStrategy`.

    Raises `WrongTypeError` for another strategy, `CommunicationTimeoutError` if the servers cannot be found in time.
    """

    strategy: ParameterServerStrategy

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        from torchstrat.strategies.parameter_server import ParameterServerStrategy

        if not isinstance(strategy, ParameterServerStrategy):
            raise WrongTypeError(
                f"ClusterCoordinator needs a ParameterServerStrategy; got {strategy!r:.80}. Other strategies run "
                "functions themselves: call strategy.run."
            )
        return strategy._coordinate(lambda: object.__new__(cls)._set_up(strategy))

    def _set_up(self, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        self.strategy = strategy
        self._job = job = strategy._job
        self._resources = ResourceTable()
        job.connect()
        job.catalog.register(strategy, ("strategy",))
        job.catalog.register(self, ("coordinator",))
        self._resources.on_new = lambda made: job.catalog.register(made, made._token)
        self._dispatcher = Dispatcher(
            job, self._resources, unpack_result, queue_size=QUEUE_SIZE, name="torchstrat-coordinator"
        )
        job.on_server_lost = self._dispatcher.servers_lost
        job.on_worker_lost = self._dispatcher.worker_lost
        job.on_worker_leaves = self._dispatcher.worker_leaves
        job.start_workers(self._dispatcher.worker_joined)
        return self

    # -- functions --------------------------------------------------------------------------------------------------

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> RemoteValue:
        """Queue ``fn(*args, **kwargs)`` for any worker, and return at once the place where its result will be.

        Args:
            fn: any callable. It may reach the modules, optimizers and variables of the strategy's scope, which mean the
                worker's own there; per-worker values mean the executing worker's. All else is copied.
            args, kwargs: what can be pickled, and per-worker values; no `RemoteValue`.

        Waits while the queue is full (262,144 functions). Raises the error of an earlier function, once, and cancels
        what was queued; ``fn`` is then not queued either. Raises `NotSendableError` naming the part of ``fn`` that
        cannot travel, and `ParameterServerUnavailable` after a server was lost. Learning rates and other
        hyperparameters are those at this moment.
        """
        require_callable(fn, "schedule")
        require_list_or_tuple(args)
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise WrongTypeError(f"kwargs must be a dict of keyword arguments; got {type(kwargs).__name__}.")
        refuse_remote_values((list(args), kwargs or {}), RemoteValue, "schedule")
        self._raise_pending("this call's function was not queued")
        job = self._job
        self.strategy._capture(fn, (args, kwargs or {}))
        job.commit()
        code = pack(fn, job.catalog, what="fn")
        arguments = pack((tuple(args), dict(kwargs or {})), job.catalog, what="args")
        job.catalog.increments(job.catalog.version)  # what cannot travel is an error of this call
        options, modes = job.options(), job.modes()
        name = getattr(fn, "__qualname__", type(fn).__name__)

        def make(number: int) -> Work:
            value = RemoteValue(number, name, self._dispatcher.where)
            return Work(code.digest, code, arguments, options, modes, job.seed, value)

        return self._dispatcher.submit(make)

    def join(self, timeout: timedelta | float | None = None) -> None:
        """Wait until every scheduled function has run; ``timeout`` in seconds, None without end.

        Raises the first error of a function, once: then what was queued is cancelled and the coordinator goes on from
        clean. Raises `ParameterServerUnavailable` if a server was lost, and `CommunicationTimeoutError` that says what
        is still running where.
        """
        self._dispatcher.wait(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
        self._raise_pending("the functions that were queued behind it are cancelled")

    def done(self) -> bool:
        """Whether every scheduled function has run. Does not wait; raises a pending error like `join`."""
        self._raise_pending("the functions that were queued behind it are cancelled")
        return self._dispatcher.is_done

    def _raise_pending(self, consequence: str) -> None:
        try:
            self._dispatcher.raise_pending()
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"raised by an earlier function, or a lost server; {consequence}.")
            raise

    def fetch(self, val: Any) -> Any:
        """``val``, a nest, with every `RemoteValue` in it replaced by its result (tensors as NumPy arrays)."""
        return nest.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    # -- per-worker values ------------------------------------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """A dataset of which every worker makes its own copy, when it first needs it, by calling ``dataset_fn()``.

        ``dataset_fn`` takes no arguments and returns a `DataLoader`, a `Dataset` of batches, another iterable object,
        or what ``strategy.distribute_datasets_from_function`` gives. A dataset object is sent as it is. The workers do
        not share the rows among themselves: shuffle differently on each, or shard by `get_current_worker_index`.

        ``iter(result)`` starts a new pass on all workers; ``next`` on that works inside scheduled functions only.
        """
        if hasattr(dataset_fn, "_per_worker_source"):
            dataset_fn = dataset_fn._per_worker_source
        elif not _is_function(dataset_fn):
            dataset_fn = _Constant(_require_dataset(dataset_fn))
        require_builder(dataset_fn, "create_per_worker_dataset")
        name = getattr(dataset_fn, "__qualname__", type(dataset_fn).__name__)
        number = self._resources.next_number()
        spec = ResourceSpec(number, f"the per-worker dataset {name}", self._pack_builder(dataset_fn, "dataset_fn"))
        made: PerWorkerDataset = self._resources.add(PerWorkerDataset(self, spec, dataset_fn))
        return made

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """What else every worker makes for itself by calling ``fn()``: a vocabulary, a cache, a connection."""
        require_callable(fn, "create_per_worker_resource")
        require_builder(fn, "create_per_worker_resource")
        name = getattr(fn, "__qualname__", type(fn).__name__)
        spec = ResourceSpec(
            self._resources.next_number(), f"the per-worker resource {name}", self._pack_builder(fn, "fn")
        )
        made: PerWorkerValues = self._resources.add(PerWorkerValues(self, spec))
        return made

    def _pack_builder(self, fn: Callable[[], Any], what: str) -> Any:
        self.strategy._capture(fn, ())
        self._job.commit()
        return pack(fn, self._job.catalog, what=what)

    def get_current_worker_index(self) -> int:
        """The index of the worker that executes the calling function. `ContextError` outside of scheduled functions."""
        return current_worker_index()

    experimental_get_current_worker_index = get_current_worker_index

    # -- workers ----------------------------------------------------------------------------------------------------

    def add_worker(self, index: int, address: str) -> None:
        """Use one more worker, which listens at ``address``. Workers that know the coordinator's address join alone."""
        self._job.membership.add_task(Task(WORKER, index), address)

    def remove_worker(self, index: int, timeout: timedelta | float | None = None) -> None:
        """Let worker ``index`` finish what it runs, give it nothing more, and let it go.

        Waits for that; ``timeout`` in seconds. The process itself goes on and may be stopped now.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._dispatcher.drain(index)
        if not self._dispatcher.wait_released(index, seconds):
            raise CommunicationTimeoutError(
                f"worker {index} was still running a function after {seconds} s; it gets no more functions. Call "
                "remove_worker again to wait longer."
            )
        self._job.membership.remove_task(Task(WORKER, index))

    def _close(self) -> None:
        self._dispatcher.close()

    def __repr__(self) -> str:
        return f"<ClusterCoordinator of {self.strategy!r}>"


class _Constant:
    """A dataset function for a dataset that is there already."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self) -> Any:
        return self._dataset


def _is_function(dataset_fn: Any) -> bool:
    """Whether to call it for a dataset: a class of datasets is called; one of its objects, even if callable, is not."""
    if isinstance(dataset_fn, type):
        return True
    return callable(dataset_fn) and not (hasattr(dataset_fn, "__getitem__") or hasattr(dataset_fn, "__iter__"))


def _require_dataset(dataset: Any) -> Any:
    if isinstance(dataset, list | tuple | dict | str | bytes) or not (
        hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    ):
        raise InvalidArgumentError(
            "create_per_worker_dataset needs a function without arguments that returns a dataset, or a dataset; got "
            f"{type(dataset).__name__} {dataset!r:.80}."
        )
    return dataset
