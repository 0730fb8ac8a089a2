"""`ClusterCoordinator`: schedules functions on the workers of a parameter-server cluster."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from numpy.typing import NDArray

from torchstrat.checkpoint.remote import attempts, connected
from torchstrat.core import nest
from torchstrat.core.context import StrategyLike, engine_of, home_of
from torchstrat.core.errors import (
    CancelledByServerLossError,
    CommunicationTimeoutError,
    FunctionSetAsideError,
    InvalidArgumentError,
    NotSendableError,
    RepeatedFunctionError,
    WrongTypeError,
)
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.core.values import require_callable, require_kwargs, require_list_or_tuple
from torchstrat.distributed.cluster import WORKER
from torchstrat.parameter_server.dispatch import ResourceSpec
from torchstrat.parameter_server.dispatcher import Dispatcher
from torchstrat.parameter_server.interface import Task
from torchstrat.parameter_server.job import Job
from torchstrat.parameter_server.leases.dataset import LeasedDataset, reader_builder
from torchstrat.parameter_server.leases.epoch import DrawOrder
from torchstrat.parameter_server.leases.lease import (
    Lease,
    OutdatedLeaseError,
    Tenure,
    claim_all,
    leases_among_arguments,
)
from torchstrat.parameter_server.messages import Reader
from torchstrat.parameter_server.remote_value import (
    Constant,
    DatasetForWorkers,
    PerWorkerDataset,
    PerWorkerValues,
    PlainT,
    RemoteValue,
    ResourceTable,
    is_function,
    refuse_remote_values,
    require_builder,
    require_dataset,
)
from torchstrat.parameter_server.scheduler_events import MAX_ATTEMPTS
from torchstrat.parameter_server.serialization.functions import pack, simple_arguments, unpack_result
from torchstrat.parameter_server.serialization.pack_cache import Packed, Remembered
from torchstrat.parameter_server.serialization.plain import ATOMS
from torchstrat.parameter_server.server_loss import (
    RESTORE,
    OnServerLoss,
    RaiseLoss,
    RestoreNewest,
    require_complete,
    require_kinds,
)
from torchstrat.parameter_server.variable_home import ServerHome
from torchstrat.parameter_server.variables.server_checkpoint import ServerCheckpoint
from torchstrat.parameter_server.waiting import held_back
from torchstrat.parameter_server.worker.executor import current_worker_index
from torchstrat.parameter_server.worker_sessions import Work, release

if TYPE_CHECKING:
    from torchstrat.checkpoint import Checkpoint, CheckpointManager

QUEUE_SIZE = 262_144

_Limits = tuple[int | None, float | None]
"""Of attempts, and of seconds."""

_USUAL_LIMITS: _Limits = MAX_ATTEMPTS, None

T = TypeVar("T")


_Capture = Callable[[Callable[..., object], Iterable[object]], None]
"""Records what a function and its arguments reach."""


@short_tracebacks
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

    strategy: StrategyLike

    def __new__(cls, strategy: StrategyLike) -> ClusterCoordinator:
        home = home_of(strategy) if isinstance(strategy, StrategyLike) else None
        if not isinstance(home, ServerHome):
            raise WrongTypeError(
                f"ClusterCoordinator needs a ParameterServerStrategy; got {strategy!r:.80}. Other strategies run "
                "functions themselves: call strategy.run."
            )
        return home.coordinate(partial(cls._set_up, object.__new__(cls), strategy))

    def _set_up(self, strategy: StrategyLike, job: Job, capture: _Capture, on_server_loss: str) -> ClusterCoordinator:
        self.strategy, self._job, self._capture, self._policy = strategy, job, capture, on_server_loss
        self._resources = ResourceTable()
        self._functions = Remembered(job.catalog)
        self._joined = 0
        job.connect()
        job.catalog.register(strategy, ("strategy",))
        job.catalog.register(self, ("coordinator",))
        self._resources.on_new = job.catalog.register
        self._dispatcher = Dispatcher(
            job, self._resources, unpack_result, queue_size=QUEUE_SIZE, name="torchstrat-coordinator"
        )
        self._where = self._dispatcher.where  # one for all results
        self._on_server_loss: OnServerLoss = RaiseLoss(on_server_loss)
        job.cache.functions = self._dispatcher
        job.on_server_lost = self._dispatcher.servers_lost
        job.on_worker_lost = self._dispatcher.worker_lost
        job.on_worker_leaves = self._dispatcher.worker_leaves
        job.start_workers(self._dispatcher.worker_joined)
        self._servers = ServerCheckpoint(job, self._dispatcher)
        connected.add(self._servers)
        job.on_close = self._close
        _collect_garbage_once()
        return self

    # -- functions --------------------------------------------------------------------------------------------------

    def schedule(
        self,
        fn: Callable[..., T],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        timeout: timedelta | float | None = None,
        max_attempts: int | None = MAX_ATTEMPTS,
    ) -> RemoteValue[T]:
        """Queue ``fn(*args, **kwargs)`` for any worker, and return at once the place where its result will be.

        Args:
            fn: any callable. It may reach the modules, optimizers and variables of the strategy's scope, which mean the
                worker's own there; per-worker values mean the executing worker's. All else is copied.
            args, kwargs: what can be pickled, and per-worker values; no `RemoteValue`. In place of a `Lease`, ``fn``
                gets its rows as a batch.
            timeout: how long one run of ``fn`` may take on a worker, in seconds; None: any time. A worker on which it
                takes longer is given up and replaced, which ends the run as a crash does.
            max_attempts: how often ``fn`` is run where its worker is lost each time, at least 3; None: any number.
                After that its outcome is a `FunctionSetAsideError`. From the second loss on it comes last.

        Waits while the queue is full (262,144 functions). Raises the error of an earlier function, once, and cancels
        what was queued; ``fn`` is then not queued either. Raises `NotSendableError` naming the part of ``fn`` that
        cannot travel, and `ParameterServerUnavailable` after a server was lost, unless it restores the servers (see
        `restore_on_server_loss`); then ``fn``, which was meant for what was there before, is cancelled. Learning rates
        and other hyperparameters are those at this moment.
        """
        require_callable(fn, "schedule")
        require_list_or_tuple(args, WrongTypeError)
        require_kwargs(kwargs)
        if args or kwargs:
            refuse_remote_values((list(args), kwargs or {}), RemoteValue, "schedule")
        limits = _limits_of(timeout, max_attempts)
        on_loss = self._on_server_loss
        on_loss.require_ready()
        if not on_loss.restores:
            return self._schedule(fn, args, kwargs, limits)
        try:
            return on_loss.attempt(lambda: self._schedule(fn, args, kwargs, limits), lambda: self._came_too_late(fn))
        except OutdatedLeaseError:  # between two calls of the user's, who need not know
            return self._came_too_late(fn)

    def _schedule(
        self, fn: Callable[..., T], args: Sequence[object], kwargs: Mapping[str, object] | None, limits: _Limits
    ) -> RemoteValue[T]:
        with held_back:
            return self._pack_and_submit(fn, args, kwargs, limits)

    def _pack_and_submit(
        self, fn: Callable[..., T], args: Sequence[object], kwargs: Mapping[str, object] | None, limits: _Limits
    ) -> RemoteValue[T]:
        self._raise_pending("this call's function was not queued")
        job, catalog = self._job, self._job.catalog
        reading = job.read()
        known = job.known(reading)
        code = None
        if known is not None and self._brings_nothing_new(args, kwargs):
            code = self._functions.find(fn)
        if code is None:
            known = None
            # Leases reach nothing. As objects that no earlier call had, they would have everything walked through anew.
            given = [leaf for leaf in nest.leaves((list(args), kwargs or {})) if not isinstance(leaf, Lease)]
            self._capture(fn, given)
            job.commit()
            code = pack(fn, catalog, what="fn", remembered=self._functions)
        arguments, leases = self._pack_arguments(args, kwargs)
        if known is None or not catalog.is_up_to_date:
            try:
                catalog.increments(catalog.version)
            except NotSendableError:  # it may be about what this call does not use, and the catalog has left out now
                code = pack(fn, catalog, what="fn", remembered=self._functions)
                arguments, leases = self._pack_arguments(args, kwargs)
                catalog.increments(catalog.version)  # what cannot travel is an error of this call
        options, modes = known or job.settle(reading)

        def make(number: int) -> Work:
            if leases:
                claim_all(leases, number)
            value: RemoteValue[T] = RemoteValue(number, _name_of(fn), self._where)
            return Work(
                code.digest, code, arguments, options, modes, job.seed_of(number), value, tuple(leases), *limits
            )

        return self._dispatcher.submit(make)

    def _pack_arguments(
        self, args: Sequence[object], kwargs: Mapping[str, object] | None
    ) -> tuple[Packed, list[Tenure]]:
        catalog = self._job.catalog
        arguments = simple_arguments(args, kwargs, catalog)
        if arguments is not None:
            return arguments, []
        with leases_among_arguments() as leases:
            return pack((tuple(args), dict(kwargs or {})), catalog, what="args"), leases

    def _brings_nothing_new(self, args: Sequence[object], kwargs: Mapping[str, object] | None) -> bool:
        """Whether nothing trainable can be behind these arguments that has not been captured yet."""
        if not args and not kwargs:
            return True
        token_of = self._job.catalog.token_of
        return all(
            type(leaf) in ATOMS
            or isinstance(leaf, Lease)
            or (type(leaf) is torch.Tensor and not leaf.requires_grad)
            or token_of(leaf) is not None
            for leaf in nest.leaves((list(args), kwargs or {}))
        )

    def _came_too_late(self, fn: Callable[..., T]) -> RemoteValue[T]:
        value: RemoteValue[T] = RemoteValue(self._dispatcher.next_function, _name_of(fn), self._where)
        value.set_exception(
            CancelledByServerLossError(
                f"{_name_of(fn)} was not queued: when it was scheduled, a parameter server had been lost, and all "
                "servers went back to a checkpoint."
            )
        )
        return value

    def join(self, timeout: timedelta | float | None = None) -> None:
        """Wait until every scheduled function has run; ``timeout`` in seconds, None without end.

        Raises the first error of a function, once: then what was queued is cancelled and the coordinator goes on from
        clean. Raises `ParameterServerUnavailable` if a server was lost, and `CommunicationTimeoutError` that says what
        is still running where. Where it restores the servers instead (see `restore_on_server_loss`), it returns after
        that; ``timeout`` does not count it.

        What steps of optimizer classes of the program's own have set in groups, and numbers, strings and tuples in
        attributes, is in the objects here afterwards.
        """
        self._on_server_loss.attempt(lambda: self._join(timeout), lambda: self.join(timeout))

    def _join(self, timeout: timedelta | float | None) -> None:
        self._dispatcher.wait(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
        self._raise_pending()
        self._job.warn_of_conflicts(wrote_parameters=self._dispatcher.wrote_parameters)
        if self._joined != self._dispatcher.next_function:
            self._joined = self._dispatcher.next_function
            reader = Reader.AT_REST if self._dispatcher.is_done else Reader.PROGRAM
            self._job.pull_options(self._job.optimizers(), reader)

    def done(self) -> bool:
        """Whether every scheduled function has run. Raises a pending error like `join`.

        Does not wait, but for a restore that `restore_on_server_loss` asks for.
        """
        return self._on_server_loss.attempt(self._done, self.done)

    def _done(self) -> bool:
        self._raise_pending()
        return self._dispatcher.is_done

    def _raise_pending(self, consequence: str = "the functions that were queued behind it are cancelled") -> None:
        try:
            self._dispatcher.raise_pending()
        except (FunctionSetAsideError, RepeatedFunctionError):
            raise  # they say whose they are, and what becomes of the others
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"raised by an earlier function, or for a task that was lost; {consequence}.")
            raise

    @overload
    def fetch(self, val: RemoteValue[torch.Tensor]) -> NDArray[Any]: ...
    @overload
    def fetch(self, val: RemoteValue[PlainT]) -> PlainT: ...
    @overload
    def fetch(self, val: object) -> Any: ...
    def fetch(self, val: object) -> Any:
        """``val``, a nest, with every `RemoteValue` in it replaced by its result (tensors as NumPy arrays)."""
        return nest.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    # -- lost servers -----------------------------------------------------------------------------------------------

    def restore_on_server_loss(
        self,
        manager: CheckpointManager,
        checkpoint: Checkpoint,
        *,
        on_restored: Callable[[int], object] | None = None,
        max_restores: int = 10,
        within: timedelta | float = timedelta(hours=1),
    ) -> None:
        """Say from what ``ParameterServerStrategy(on_server_loss="restore")`` restores.

        When a server dies, something starts it again (`torchstrat launch`, Kubernetes), empty. The next call of this
        process that needs the servers (`schedule`, `join`, `done`, ``manager.save``, reading, writing or making
        variables, `release`, restoring a part of a checkpoint) waits until all of them are there, takes **all** of
        them, and every object of ``checkpoint``, back to the newest checkpoint that is intact, and goes on. Nothing
        that was trained since stays, on any server. If another server is lost meanwhile, it begins again. For the
        program it is as if the call had been made just before the loss:

        - Functions that were queued or running are cancelled, the one of the `schedule` that restores included: their
          `RemoteValue` raises `CancelledByServerLossError`. Who fetches results has to expect that.
        - `join` and `done` then find nothing left to run. How far the training is, the objects of the checkpoint say: a
          leased dataset hands out again what the checkpoint has not seen.
        - ``manager.save`` saves nothing, and its handle's ``result()`` raises. Values that the program writes to
          variables are lost with the rest; what it reads is read again.

        A loop that counts steps instead of leasing rows keeps its counter in an object of the checkpoint, adds 1 before
        `schedule`, and calls `join` before it saves. Per-worker datasets go on where they are, on their workers. May be
        called again, to restore from something else. A whole program is on the documentation's page on checkpoints.

        Args:
            manager: where the program saves ``checkpoint``; it has to have saved it once when a server is lost.
            checkpoint: all modules, optimizers and variables of the strategy, and what must go back with them.
            on_restored: called after each restore with the checkpoint's step, in the thread whose call did it, before
                that call goes on. What it raises, that call raises: a way out of a loop that is to begin elsewhere.
            max_restores, within: as many restores in this time (a timedelta, or seconds); the next loss is an error.

        A loss raises `ParameterServerUnavailable` after all, then and in every later call until the program restores a
        checkpoint, where there is no intact checkpoint; where a server is not back within the strategy's ``timeout``;
        or after ``max_restores``.

        Raises `InvalidArgumentError` if the strategy has another ``on_server_loss``, or variables or optimizers that
        the checkpoint does not have.
        """
        if self._policy != RESTORE:
            raise InvalidArgumentError(
                f"the strategy has on_server_loss={self._policy!r}, which leaves restoring to the "
                f"program; make it with ParameterServerStrategy(…, on_server_loss={RESTORE!r})."
            )
        require_kinds(manager, checkpoint)
        if on_restored is not None:
            require_callable(on_restored, "restore_on_server_loss")
        seconds = within.total_seconds() if isinstance(within, timedelta) else within
        if max_restores < 1 or seconds <= 0:
            raise InvalidArgumentError(
                f"max_restores={max_restores} within={within}: at least 1 restore in more than 0 seconds is needed; "
                'on_server_loss="raise" restores nothing.'
            )
        require_complete(checkpoint, self._job, self._servers)
        self._on_server_loss = on_loss = RestoreNewest(
            self._dispatcher,
            manager,
            checkpoint,
            self._servers,
            on_restored=on_restored,
            limit=max_restores,
            within_seconds=seconds,
            timeout_seconds=self._job.timeout_seconds,
        )
        attempts[manager] = self._job.servers.attempt = on_loss.attempt
        self._servers.leave_losses_to(on_loss)

    # -- per-worker values ------------------------------------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_fn: object) -> PerWorkerDataset:
        """A dataset of which every worker makes its own copy, when it first needs it, by calling ``dataset_fn()``.

        ``dataset_fn`` takes no arguments and returns a `DataLoader`, a `Dataset` of batches, what
        ``strategy.distribute_datasets_from_function`` gives, or another iterable object, but for lists, tuples,
        dictionaries and strings, whose entries may be rows as well as batches: an error here, or of the first function
        that needs what ``dataset_fn`` returned. A dataset object is sent as it is. The workers do not share the rows
        among themselves: shuffle differently on each, or let each read a part::

            def dataset_fn():
                part = coordinator.get_current_worker_index() % coordinator.num_workers()
                return ts.data.ArrayDataset(x, y).shard(coordinator.num_workers(), part).batch(64)

        `create_leased_dataset` shares rows exactly, whichever workers come and go.

        ``iter(result)`` starts a new pass on all workers; ``next`` on that works inside scheduled functions only.
        """
        if isinstance(dataset_fn, DatasetForWorkers):
            make = dataset_fn.make
        else:
            make = dataset_fn if is_function(dataset_fn) else Constant(require_dataset(dataset_fn))
        require_builder(make, "create_per_worker_dataset")
        number, what = self._resources.next_number(), f"the per-worker dataset {_name_of(make)}"
        return PerWorkerDataset(
            self._resources, ResourceSpec(number, what, self._pack_builder(make, "dataset_fn")), make
        )

    def create_per_worker_resource(self, fn: Callable[[], object]) -> PerWorkerValues:
        """What else every worker makes for itself by calling ``fn()``: a vocabulary, a cache, a connection."""
        require_builder(fn, "create_per_worker_resource")
        number, what = self._resources.next_number(), f"the per-worker resource {_name_of(fn)}"
        return PerWorkerValues(self._resources, ResourceSpec(number, what, self._pack_builder(fn, "fn")))

    def create_leased_dataset(
        self,
        dataset_fn: object,
        batch_size: int,
        *,
        shuffle: bool | DrawOrder = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[..., object] | None = None,
        rows: int | None = None,
    ) -> LeasedDataset:
        """A dataset whose rows the workers share: an epoch sees every row exactly once, whatever happens to workers.

        ::

            leased = coordinator.create_leased_dataset(make_dataset, batch_size=64, shuffle=True)
            for lease in leased:
                coordinator.schedule(step, args=(lease,))  # step gets the batch

        A function that is repeated because its worker was lost gets the same rows again; rows of one that raises or is
        cancelled are handed out again. `LeasedDataset` says what is counted, and how an epoch is saved and resumed.

        Args:
            dataset_fn: called without arguments on each worker, when the first function needs its rows: the whole
                dataset, with ``__len__`` and ``__getitem__`` (or ``__getitems__``), the same on each. A dataset object
                is sent as it is. Its rows are read on the worker, before the function begins, with the function's
                random state.
            batch_size: rows per lease.
            shuffle: each epoch in another order, which ``seed`` and the number of the epoch determine. Or a function:
                the number of an epoch → its rows' numbers, each once; drawn from as rows are handed out, and again when
                the epoch is resumed.
            drop_last: an epoch ends with the last whole batch; what is left of it differs from epoch to epoch if it
                is shuffled.
            collate_fn: a list of rows → a batch; None: as `DataLoader` does it.
            rows: the length of the dataset. None: ``dataset_fn`` is called here once, to ask; give it where that is
                costly. A worker that finds another length fails with an error that names it.

        Raises `InvalidArgumentError` for a dataset whose rows have no numbers (use `create_per_worker_dataset`).
        """
        make_dataset = dataset_fn if is_function(dataset_fn) else Constant(dataset_fn)
        require_builder(make_dataset, "create_leased_dataset")
        builder = reader_builder(make_dataset, batch_size, shuffle, seed, collate_fn, rows)
        name = f"the leased dataset {_name_of(dataset_fn)}"
        self._capture(make_dataset, (collate_fn,))
        packed = self._pack_builder(builder, "create_leased_dataset")
        table = self._resources
        reader = PerWorkerValues(table, ResourceSpec(table.next_number(), name, packed))
        return LeasedDataset(
            self.join,
            lambda: self._dispatcher.is_idle,
            reader,
            builder.rows,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            name=name,
        )

    def release(self, *objects: object) -> None:
        """Drop modules, optimizers, variables, datasets, iterators and resources from servers and workers, now.

        What the program has no reference to any more goes by itself. This is for what it cannot drop, or keeps for
        later: modules keep the values that were last read (take ``state_dict()`` before), and a function that uses them
        again is refused. Servers and workers let go of them when the functions that run now have ended; does not wait.

        Raises `InvalidArgumentError` naming what still needs one of them: a function that has not ended, an optimizer
        or a module around it that is not released with it, an iterator of a dataset. `WrongTypeError` for anything
        else, `InvalidArgumentError` for what was not made with this coordinator's strategy.
        """
        self._job.servers.asking(self._job.commit)
        with self._dispatcher.unfinished() as works:
            release(objects, self._job, engine_of(self.strategy).registry, works)

    def _pack_builder(self, fn: Callable[[], object], what: str) -> Packed:
        self._capture(fn, ())
        self._job.servers.asking(self._job.commit)
        return pack(fn, self._job.catalog, what=what)

    def get_current_worker_index(self) -> int:
        """The index of the worker that executes the calling function. `ContextError` outside of scheduled functions."""
        return current_worker_index()

    experimental_get_current_worker_index = get_current_worker_index

    def num_workers(self) -> int:
        """How many workers the cluster's description has; also within scheduled functions and functions that make a
        dataset, so that each worker can read a part of the rows.

        Workers that join later (`add_worker`) are not in it, and one that is lost still is: the number stays, as parts
        have to. Which worker reads what is then not exact; `create_leased_dataset` shares rows exactly.
        """
        return self._job.num_workers

    # -- workers ----------------------------------------------------------------------------------------------------

    def add_worker(self, index: int, address: str) -> None:
        """Use one more worker, which listens at ``address``; one that was removed, again: its process starts afresh.
        Workers that know the coordinator's address join alone."""
        self._dispatcher.readmitted.add(index)
        self._job.membership.add_task(Task(WORKER, index), address)

    def remove_worker(self, index: int, timeout: timedelta | float | None = None) -> None:
        """Let worker ``index`` finish what it runs, give it nothing more, and let it go.

        Waits for that; ``timeout`` in seconds. The process itself goes on and may be stopped now. `add_worker` uses the
        index again.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if isinstance(index, bool) or not isinstance(index, int):
            raise WrongTypeError(
                f"remove_worker needs the index of a worker; got {type(index).__name__} {index!r:.80}."
            )
        if index < 0:
            raise InvalidArgumentError(f"remove_worker({index}): indices of workers are 0 or more.")
        self._dispatcher.drain(index)
        if not self._dispatcher.wait_released(index, seconds):
            raise CommunicationTimeoutError(
                f"worker {index} was still running a function after {seconds} s; it gets no more functions. Call "
                "remove_worker again to wait longer."
            )
        self._job.membership.remove_task(Task(WORKER, index))

    def _close(self) -> None:
        connected.discard(self._servers)
        self._dispatcher.close()
        held_back.put_back()

    def __repr__(self) -> str:
        return f"<ClusterCoordinator of {self.strategy!r}>"


def take_in_losses(coordinator: ClusterCoordinator) -> None:
    """What it was told of tasks that are gone holds when this returns."""
    coordinator._dispatcher.take_in()  # noqa: SLF001


@cache
def _collect_garbage_once() -> None:
    """All that imports have made is new to the garbage collector. It would go through it, which takes 0.1 s, when the
    first few thousand functions have been scheduled."""
    gc.collect()


def _limits_of(timeout: timedelta | float | None, max_attempts: int | None) -> _Limits:
    if timeout is None and max_attempts == MAX_ATTEMPTS:
        return _USUAL_LIMITS
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is not None and not seconds > 0:
        raise InvalidArgumentError(f"timeout={timeout!r} must be more than 0 seconds, or None for any time.")
    if max_attempts is not None and max_attempts < 3:
        raise InvalidArgumentError(
            f"max_attempts={max_attempts} must be at least 3, or None for any number: the first loss may be another "
            "function's, and before the third attempt all that waits is run, so that it does not go with this one."
        )
    return max_attempts, seconds


def _name_of(fn: object) -> str:
    name: str = getattr(fn, "__qualname__", type(fn).__name__)
    return name
