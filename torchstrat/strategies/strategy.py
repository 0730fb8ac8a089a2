"""The one interface: what a training program says to whichever strategy it was given."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar, overload

import torch

from torchstrat import data
from torchstrat.core import context, nest, notebook_html
from torchstrat.core.context import RunOptions, engine_of, require_run_options, wraps_values
from torchstrat.core.engine import ReplicaEngine
from torchstrat.core.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.core.reduction import Axis, ReduceOp, parse_axis, parse_gather_axis, require_mean_without_axis
from torchstrat.core.tracebacks import short_tracebacks, shorten
from torchstrat.core.values import (
    DistributedValues,
    PerReplica,
    ValueContext,
    distribute_values,
    local_results,
    require_callable,
    require_finished,
    require_fitting_arguments,
    require_kwargs,
    require_list_or_tuple,
)
from torchstrat.core.variable.storage import VariableHome
from torchstrat.core.variable.variable import Variable, gathered, reduced
from torchstrat.data.options import InputOptions
from torchstrat.distributed.cluster import DEFAULT_TIMEOUT
from torchstrat.replicas.state_kinds import PeriodicChecks
from torchstrat.sharding.annotations import Annotator, LogicalDeviceMethods
from torchstrat.strategies.extended import StrategyExtended
from torchstrat.strategies.tf_names import SeedNames

logger = logging.getLogger("torchstrat.strategy")

_DEVICES_SHOWN = 8

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
K = TypeVar("K")
S = TypeVar("S", bound="Strategy")
T = TypeVar("T")


@short_tracebacks
class Scope:
    """``with strategy.scope():``. May be entered again, also while it is open; `as` gives the strategy."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __enter__(self) -> Strategy:
        self._strategy._enter_scope()  # noqa: SLF001
        return self._strategy

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._strategy._leave_scope(failed=kind is not None)  # noqa: SLF001
        counts = engine_of(self._strategy).registry.counts
        logger.debug(
            "the scope of %r is left; it knows %d modules, %d bare tensors, %d optimizers.", self._strategy, *counts
        )


@partial(short_tracebacks, but=("run",))
class Strategy(SeedNames, LogicalDeviceMethods):
    """Decides where variables live and on how many replicas a plain training step runs.

    Never instantiated itself: `OneDeviceStrategy`, `MirroredStrategy`, `MultiWorkerMirroredStrategy`,
    `CentralStorageStrategy`, `ParameterServerStrategy`, `TPUStrategy` are the final classes behind it. It is used like
    this::

        with strategy.scope():
            model = Net()
            optimizer = torch.optim.Adam(model.parameters())

        def train_step(batch): ...        # plain PyTorch; closes over model and optimizer

        for batch in strategy.distribute_dataset(loader):
            losses = strategy.run(train_step, args=(batch,))
            loss = strategy.reduce("mean", losses)
    """

    extended: StrategyExtended
    """The lower-level interface, for library code: `StrategyExtended`."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls: type[S], *args: Any, **kwargs: Any) -> S:
        self = super().__new__(cls)
        self._made_with = args, kwargs
        return self

    def __init__(self) -> None:
        raise TypeError("Strategy is an interface; create one of its implementations, such as ts.MirroredStrategy().")

    def _set_up(
        self,
        engine: ReplicaEngine,
        home: VariableHome,
        worker_devices: tuple[str, ...],
        resolver: object = None,
        *,
        annotator: Annotator | None = None,
        num_logical_devices: int = 1,
        extended: type[StrategyExtended] = StrategyExtended,
    ) -> None:
        """The end of each constructor: take the parts that differ from strategy to strategy."""
        self._engine, self._home, self._cluster_resolver = engine, home, resolver
        self._annotator, self._num_logical_devices = annotator, num_logical_devices
        self._periodic_checks = PeriodicChecks.from_environment()
        self.extended = extended(self, worker_devices)
        context.strategies.add(self)
        kind, replicas, places = type(self).__name__, ", ".join(worker_devices), ", ".join(home.devices)
        logger.debug("%s is made: replicas here on %s, variables on %s.", kind, replicas, places)

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over all processes; every one runs the step on its share of a global batch."""
        return self._engine.num_replicas

    @property
    def num_logical_devices(self) -> int:
        """The number of devices that compute one replica together; what partitions of its tensors multiply to."""
        return self._num_logical_devices

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one to print, log and save. Exactly one process of a job is."""
        return self._engine.is_chief

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver this strategy was made with, or None on a single machine."""
        return self._cluster_resolver

    # -- scope ------------------------------------------------------------------------------------------------------

    def scope(self) -> Scope:
        """Make this strategy current and record the modules, parameters and optimizers created in the block.

        With several processes every one enters and leaves it; on leaving, all take over rank 0's initial values.
        Raises `StrategyMixingError` inside another strategy's scope, `ContextError` inside a replica.
        """
        return Scope(self)

    def _enter_scope(self) -> None:
        context.require_cross(self, "scope")
        self._engine.scope_opened()
        context.push_cross(self)

    def _leave_scope(self, *, failed: bool) -> None:
        context.pop_cross(self)
        self._engine.scope_closed(failed=failed)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of the runs in this block accumulate on each replica without being combined.

        The first backward pass of a run after the block combines all of it; so does an optimizer's step, in a run or
        outside (then every process has to make it), and a run in which some replicas have no rows.
        """
        self._engine.set_no_sync(True)
        try:
            yield
        finally:
            self._engine.set_no_sync(False)

    # -- replicas ---------------------------------------------------------------------------------------------------

    # Types say what there is with several replicas; a program that is right for those is right for one. The structures
    # that steps return most have overloads: their leaves are what is wrapped.
    @overload
    def run(  # type: ignore[overload-overlap]
        self,
        fn: Callable[..., None],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> None: ...
    @overload
    def run(  # type: ignore[overload-overlap]
        self,
        fn: Callable[..., tuple[A, B]],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> tuple[PerReplica[A], PerReplica[B]]: ...
    @overload
    def run(  # type: ignore[overload-overlap]
        self,
        fn: Callable[..., tuple[A, B, C]],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> tuple[PerReplica[A], PerReplica[B], PerReplica[C]]: ...
    @overload
    def run(  # type: ignore[overload-overlap]
        self,
        fn: Callable[..., list[T]],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> list[PerReplica[T]]: ...
    @overload
    def run(  # type: ignore[overload-overlap]
        self,
        fn: Callable[..., dict[K, T]],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> dict[K, PerReplica[T]]: ...
    @overload
    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> PerReplica[T]: ...
    def run(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call ``fn`` once per replica, each with its own components of the distributed values in the arguments.

        Args:
            fn: a plain function, the training step. Replicas of one process call it one after the other.
            args, kwargs: nests; `PerReplica` and `Mirrored` leaves are opened, all else goes to every replica as it is.
            options: a `RunOptions`; only TPUs use it.

        Returns:
            With one replica in all, what ``fn`` returned. Otherwise a nest of the structure that ``fn`` returned, with
            `PerReplica` leaves; a leaf that is the very same object on all replicas of this process is not wrapped
            (with one replica per process every leaf is, since the others' objects cannot be seen).

        Every process has to call it, with the same ``fn``. Raises what a replica raised (with a note that names the
        replica), `ReplicaDivergenceError` if replicas did not make the same collective calls, and `ContextError` inside
        a replica. After a failure, with several replicas, parameters are as they were after the last optimizer step and
        buffers as before the run. With one replica per process there is no copy of a parameter that the step edits in
        place for the first time; a note at the exception names it. Nor is there of a buffer of a module in evaluation
        mode that a step changes for the first time.
        """
        try:
            require_callable(fn, "run")
            require_list_or_tuple(args)
            require_kwargs(kwargs)
            require_run_options(options)
            context.require_cross(self, "run")
            result = self._run_on_engine(fn, args, dict(kwargs or {}), options)
            require_finished(result)
            checks = self._periodic_checks
            if checks is not None and (number := checks.is_due()):
                self._engine.check_replicas(f", after run {number}")
            return result
        except BaseException as error:
            shorten(error)
            if isinstance(error, TypeError) and not isinstance(error, WrongTypeError):
                require_fitting_arguments(fn, args, kwargs)
            raise

    def _run_on_engine(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: dict[str, object], options: RunOptions | None
    ) -> object:
        """``options`` are about compiled steps."""
        return self._engine.run(fn, args, kwargs)

    @overload
    def reduce(
        self, reduce_op: ReduceOp | str, value: DistributedValues[T], axis: object = None, *, weighted: bool = False
    ) -> torch.Tensor | T: ...
    @overload
    def reduce(
        self, reduce_op: ReduceOp | str, value: dict[K, PerReplica[T]], axis: object = None, *, weighted: bool = False
    ) -> dict[K, torch.Tensor | T]: ...
    @overload
    def reduce(
        self, reduce_op: ReduceOp | str, value: object, axis: object = None, *, weighted: bool = False
    ) -> Any: ...
    def reduce(self, reduce_op: ReduceOp | str, value: object, axis: object = None, *, weighted: bool = False) -> Any:
        """Combine a value over replicas: "sum" or "mean".

        Args:
            value: a `PerReplica` value, or a nest of them; each leaf is reduced by itself.
            axis: None combines element by element and needs equal shapes. An int or a tuple of ints also reduces those
                dimensions; a mean then divides by the total number of entries, so partial batches weigh correctly.
            weighted: of a "mean" without an axis: replicas count by their rows, as their gradients do (or by what the
                step gave to `ReplicaContext.set_weight`), so that means over rows become the mean over the global
                batch. For what `run` returned for a batch of `distribute_dataset`; `ValueError` where nothing says how
                much each replica counts. Without it, replicas with few rows count like those with many.

        Returns a tensor (nest of tensors), on every process, on the CPU where there are several processes. A sum keeps
        the dtype, a mean of integers is of the default floating dtype. A plain Python number counts once per replica,
        as one that all replicas returned does; the mean of equal ones is that number. Every process has to call it.
        """
        context.require_cross(self, "reduce")
        op = ReduceOp.parse(reduce_op)
        axis = parse_axis(axis, op)
        if not isinstance(weighted, bool):
            raise WrongTypeError(
                f"reduce(weighted=…) must be True or False; got {type(weighted).__name__}. What each replica counts is "
                "what its step gives to ts.get_replica_context().set_weight(weight), or else its rows."
            )
        if weighted:
            require_mean_without_axis(op, axis)
            return nest.map_by_keys(self._weighted_mean, value)
        return nest.map_by_keys(lambda leaf: self._reduce_leaf(op, leaf, axis), value)

    def _weighted_mean(self, leaf: object) -> object:
        if isinstance(leaf, Variable):
            raise InvalidArgumentError(
                "reduce with weighted=True got a Variable, which has no rows; leave weighted out, or pass what "
                "strategy.run returned."
            )
        if not wraps_values(self) and not isinstance(leaf, DistributedValues):
            return self._reduce_leaf(ReduceOp.MEAN, leaf, None)
        return self._engine.weighted_mean(leaf)

    def _reduce_leaf(self, op: ReduceOp, leaf: object, axis: Axis) -> object:
        if isinstance(leaf, Variable):
            return reduced(leaf, op, axis)
        if axis is None and not wraps_values(self) and not isinstance(leaf, torch.Tensor | DistributedValues):
            return leaf  # one device has nothing to combine, and no reason to make an array or a variable a tensor
        return self._engine.reduce(op, leaf, axis)

    @overload
    def gather(self, value: DistributedValues[object], axis: object) -> torch.Tensor: ...
    @overload
    def gather(self, value: object, axis: object) -> Any: ...
    def gather(self, value: object, axis: object) -> Any:
        """Join the components of ``value`` (a `PerReplica` tensor, or a nest) along ``axis``, in replica order.

        Sizes may differ along ``axis`` only. Every process has to call it, and gets the result, on the CPU.
        """
        context.require_cross(self, "gather")
        dim = parse_gather_axis(axis)
        return nest.map_by_keys(lambda leaf: self._gather_leaf(leaf, dim), value)

    def _gather_leaf(self, leaf: object, dim: int) -> object:
        return gathered(leaf, dim) if isinstance(leaf, Variable) else self._engine.gather(leaf, dim)

    @overload
    def local_results(self, value: DistributedValues[T]) -> tuple[T, ...]: ...
    @overload
    def local_results(self, value: object) -> tuple[Any, ...]: ...
    def local_results(self, value: object) -> tuple[Any, ...]:
        """The components of ``value`` that live in this process, as a tuple; of a nest, a tuple of nests."""
        return local_results(value, self._engine.local_replicas)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], T]) -> PerReplica[T]:
        """Call ``value_fn(ValueContext)`` for each replica of this process; the results as `PerReplica` leaves."""
        context.require_not_mixed(self, "distribute_values_from_function")
        replicas = self._engine.local_replicas
        values: PerReplica[T] = distribute_values(value_fn, self.num_replicas_in_sync, replicas, wraps_values(self))
        return values

    # -- input ------------------------------------------------------------------------------------------------------

    def distribute_dataset(self, dataset: object, options: InputOptions | None = None) -> data.DistributedDataset:
        """Split the global batches of ``dataset`` over the replicas, in the background, each on its device.

        Args:
            dataset: a `torch.utils.data.DataLoader` whose ``batch_size`` is the global batch's, a `Dataset` or
                `IterableDataset` of batches, arrays, or any iterable of nests of tensors.

        Every process has to call it with an equal dataset. No row is lost: replicas that get none in the last step of
        an epoch are left out of that step. See `InputOptions` for sharding over processes.
        """
        return data.distribute_dataset(self, self._engine.layout, dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[data.InputContext], object], options: InputOptions | None = None
    ) -> data.DistributedDataset:
        """Like `distribute_dataset`, with a pipeline per process that yields batches of replica size.

        ``dataset_fn`` gets an `InputContext` and does batching and sharding itself.
        """
        return data.distribute_datasets_from_function(self, self._engine.layout, dataset_fn, options)

    # -- end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back what the strategy holds: threads, and the process group if it made one. May be called twice.

        A strategy whose replicas are all in this process may be used again afterwards; its threads then come back.
        """
        self._home.is_closed = True
        self._engine.close()

    def __enter__(self) -> NoReturn:
        raise ContextError("a strategy is not a context manager; write `with strategy.scope():`.")

    def __exit__(self, *_: object) -> None: ...

    def __copy__(self) -> NoReturn:
        raise ContextError(
            f"{type(self).__name__} cannot be copied by copy.copy: two strategies must not share variables. "
            "copy.deepcopy makes a second one, without variables."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise WrongTypeError(
            f"{type(self).__name__} cannot be pickled: its replicas, threads and connections belong to this process. "
            "Make a strategy in each process, and save what was trained with ts.Checkpoint."
        )

    def __deepcopy__(self, memo: object) -> Strategy:
        """A new strategy made with the same arguments."""
        args, kwargs = self._made_with
        return type(self)(*args, **kwargs)

    def __repr__(self) -> str:
        count = self.num_replicas_in_sync
        replicas = f"{count} replica{'' if count == 1 else 's'}"
        return f"<{type(self).__name__} with {replicas} on {_shortened(self.extended.worker_devices)}>"

    def _repr_html_(self) -> str:
        return notebook_html.facts(repr(self), self._facts())

    def _facts(self) -> Iterator[tuple[str, object]]:
        """What there is to say of it in a table, from what this process knows: nobody is asked."""
        yield "replicas", self.num_replicas_in_sync
        yield "devices here", _shortened(self.extended.worker_devices)
        yield "variables on", _shortened(self.extended.parameter_devices)
        if self.num_logical_devices > 1:
            yield "logical devices of a replica", self.num_logical_devices
        yield "communication", self._home.communication or self._engine.communication
        if self._home.is_closed:
            yield "state", "closed"


def _shortened(devices: Sequence[str]) -> str:
    if len(devices) > _DEVICES_SHOWN:
        return f"{devices[0]}, {devices[1]}, … {devices[-1]} ({len(devices)} in all)"
    return ", ".join(devices)


__all__ = ["DEFAULT_TIMEOUT", "DistributedValues", "Scope", "Strategy"]
