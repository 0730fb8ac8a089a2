"""`strategy.extended`: what library code needs beyond `Strategy` itself.

Functions run on every component of a variable, and values are combined or copied to chosen places. A destination is a
device name, a variable, or a distributed value; the last two mean "wherever that one lives".
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core import context, memory, nest
from torchstrat.core.context import StrategyLike, engine_of, enter, enter_cross, home_of, placement_of, wraps_values
from torchstrat.core.devices import canonical, torch_device
from torchstrat.core.engine import ReplicaEngine, within
from torchstrat.core.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.core.memory import MemoryEstimate
from torchstrat.core.reduction import ReduceOp, VariableAggregation
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.core.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    first_here,
    local_results,
    require_callable,
    require_kwargs,
    require_list_or_tuple,
    select_replica,
)
from torchstrat.core.variable.storage import VariablePlacement, from_first_replica, spans_processes
from torchstrat.core.variable.variable import (
    Variable,
    central_component,
    components_of,
    container_of,
    reduced,
    storage_of,
    updating,
)
from torchstrat.parameter_server.variable_home import join_places
from torchstrat.parameter_server.variables.sharded_variable import ShardedVariable
from torchstrat.sharding.annotations import annotator_of

if TYPE_CHECKING:
    from torchstrat.sharding.dtensor.devices import Traffic


_Function = Callable[..., object]
_Args = tuple[object, ...]
_Kwargs = dict[str, object]

_Places = str | list[tuple[int, str]]
"""One device, or a device for each of several replicas."""


def _reduce_to(strategy: StrategyLike, reduce_op: ReduceOp | str, value: object, destinations: object) -> Any:
    """``value`` combined over replicas: a tensor where there is one destination, `Mirrored` where there are several."""
    op = ReduceOp.parse(reduce_op)
    places = _places(strategy, destinations)
    if not wraps_values(strategy):
        return value  # one replica: it is where it has to be
    if isinstance(value, Variable):
        value = reduced(value, op, None)
    elif not isinstance(value, Mirrored) or op is not ReduceOp.MEAN:
        with within("reduce_to"):
            value = engine_of(strategy).reduce(op, value, None)
    return _put(value, places)


def _broadcast_to(strategy: StrategyLike, tensor: object, destinations: object) -> Any:
    """A copy of ``tensor`` at each destination. A Python number is everywhere already."""
    if isinstance(tensor, bool | int | float):
        return tensor
    places = _places(strategy, destinations)
    return _put(tensor, places) if wraps_values(strategy) else tensor


def _put(value: object, places: _Places) -> Any:
    if isinstance(value, Variable):
        value = value.read_value()
    if isinstance(value, DistributedValues):
        value = first_here(value)
    if isinstance(places, str):
        return _copy(value, places)
    copies = [_copy(value, device) for _, device in places]
    return Mirrored(copies, replica_ids=tuple(replica for replica, _ in places))


def _copy(value: object, device: str) -> object:
    return value.to(torch_device(device), copy=True) if isinstance(value, torch.Tensor) else value


def _places(strategy: StrategyLike, destinations: object) -> _Places:
    if isinstance(destinations, str | torch.device):
        if destinations == "":
            raise InvalidArgumentError("destinations is an empty string; name a device, or pass a variable or a value.")
        return home_of(strategy).device_named(destinations)
    if isinstance(destinations, ShardedVariable):
        place: str = strategy.extended.device_of(destinations)
        return place
    if isinstance(destinations, Variable):
        components = components_of(destinations)
        return _of_replicas(strategy, tuple(components)) if components else storage_of(destinations).device
    if isinstance(destinations, DistributedValues):
        return _of_replicas(strategy, destinations.replica_ids)
    if isinstance(destinations, torch.Tensor):
        known = strategy.extended.variable_created_in_scope(destinations)
        return strategy.extended.device_of(destinations) if known else canonical(destinations.device)
    raise InvalidArgumentError(
        f"destinations must be a device name, a variable or a distributed value; got {type(destinations).__name__} "
        f"{destinations!r:.80}."
    )


def _of_replicas(strategy: StrategyLike, replicas: tuple[int, ...]) -> _Places:
    places = [(replica, engine_of(strategy).device_of_replica(replica)) for replica in replicas]
    return places[0][1] if strategy.num_replicas_in_sync == 1 else places


def _require_pairs(pairs: object) -> None:
    is_list = isinstance(pairs, list | tuple)
    wrong = [one for one in pairs if not (isinstance(one, list | tuple) and len(one) == 2)] if is_list else [pairs]  # type: ignore[attr-defined]
    if wrong:
        raise WrongTypeError(
            "batch_reduce_to needs a list of pairs (value, destinations); got "
            f"{type(wrong[0]).__name__} {wrong[0]!r:.80}. Write batch_reduce_to(op, [(value, destinations)])."
        )


def _update(strategy: StrategyLike, var: object, fn: _Function, args: _Args, kwargs: _Kwargs, group: bool) -> Any:
    """Call ``fn`` for each component of ``var`` in cross-replica context; see `StrategyExtended.update`."""
    one_replica = placement_of(strategy) is VariablePlacement.ONE
    if not one_replica and not strategy.extended.variable_created_in_scope(var):
        raise InvalidArgumentError(
            f"update needs a variable of {strategy!r}: a ts.Variable made in its scope, or a parameter or buffer that "
            f"it has seen; got {type(var).__name__} {var!r:.80}."
        )
    if components := components_of(var):
        return _for_each(strategy, lambda replica, *a, **k: fn(components[replica], *a, **k), args, kwargs, group)
    if isinstance(var, Variable):
        var = central_component(var)
    with torch.no_grad():  # a parameter may be edited in place
        return _once(strategy, lambda *a, **k: fn(var, *a, **k), args, kwargs, group)


def _update_non_slot(strategy: StrategyLike, fn: _Function, args: _Args, kwargs: _Kwargs, group: bool) -> Any:
    """Call ``fn`` where state that belongs to no single variable lives: once, or once per replica where mirrored."""
    if placement_of(strategy) is VariablePlacement.MIRRORED:
        return _for_each(strategy, lambda _, *a, **k: fn(*a, **k), args, kwargs, group)
    return _once(strategy, fn, args, kwargs, group)


def _once(strategy: StrategyLike, fn: _Function, args: _Args, kwargs: _Kwargs, group: bool) -> object:
    central = placement_of(strategy) is VariablePlacement.CENTRAL

    def first(leaf: object) -> Any:
        if not isinstance(leaf, PerReplica | Mirrored):
            return leaf
        value = first_here(leaf)
        return from_first_replica(engine_of(strategy), value) if central and isinstance(value, torch.Tensor) else value

    with enter_cross(strategy):
        result = fn(*nest.map_structure(first, list(args)), **nest.map_structure(first, kwargs))
    return result if group else _opened(strategy, result)


def _for_each(strategy: StrategyLike, fn: _Function, args: _Args, kwargs: _Kwargs, group: bool) -> object:
    """``fn(replica, *args, **kwargs)`` for the replicas of this process, each with its components of the arguments."""
    replicas, results = engine_of(strategy).local_replicas, []
    inputs = [(select_replica(replica, list(args)), select_replica(replica, kwargs)) for replica in replicas]
    for replica, (own_args, own_kwargs) in zip(replicas, inputs, strict=True):
        with enter(strategy, None), updating(replica):
            results.append(fn(replica, *own_args, **own_kwargs))
    if strategy.num_replicas_in_sync == 1:
        return results[0] if group else _opened(strategy, results[0])
    grouped = nest.map_structure(lambda *leaves: _group(leaves, replicas), results[0], *results[1:])
    return grouped if group else _opened(strategy, grouped)


def _group(leaves: tuple[object, ...], replicas: tuple[int, ...]) -> Any:
    """One leaf of what the calls returned: the variable whose components these are, one object, or `Mirrored`."""
    first, container = leaves[0], container_of(leaves[0])
    if container is not None and all(map(operator.is_, leaves, components_of(container).values())):
        return container
    if len(leaves) > 1 and all(leaf is first for leaf in leaves):
        return first
    return Mirrored(leaves, replica_ids=replicas)


def _opened(strategy: StrategyLike, result: object) -> Any:
    replicas = engine_of(strategy).local_replicas
    return nest.map_structure(lambda leaf: local_results(leaf, replicas), result)


@short_tracebacks
class StrategyExtended:
    """The lower-level half of a strategy.

    *Variables* here are `Variable` objects and the parameters and buffers that the strategy knows. Unless said
    otherwise the methods work in cross-replica context, and with several processes every one has to call them.
    """

    def __init__(self, strategy: StrategyLike, worker_devices: tuple[str, ...]) -> None:
        self._strategy = strategy
        self._worker_devices = worker_devices

    @property
    def _engine(self) -> ReplicaEngine:
        return engine_of(self._strategy)

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that the replicas of this process compute on, in PyTorch's spelling."""
        return self._worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables."""
        return home_of(self._strategy).devices

    @property
    def gradient_reduce_op(self) -> ReduceOp:
        """How gradients of the replicas are combined: `ReduceOp.MEAN` (the default) or `ReduceOp.SUM`."""
        return self._engine.gradient_op

    @property
    def logical_traffic(self) -> Traffic | None:
        """What this process has sent to the other logical devices of its replica. None where replicas have one, and on
        TPUs, where the compiled program does not tell."""
        annotator = annotator_of(self._strategy)
        return None if annotator is None else annotator.traffic

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is the one to write checkpoints."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is the one to write logs."""
        return self._strategy.is_chief

    @property
    def experimental_between_graph(self) -> bool:
        """TensorFlow's flag: whether each process makes its own part of the program."""
        return spans_processes(self._engine) or placement_of(self._strategy) is VariablePlacement.CENTRAL

    @property
    def experimental_should_init(self) -> bool:
        """TensorFlow's flag: whether this process gives variables their initial values. Every process does."""
        return True

    @property
    def experimental_require_static_shapes(self) -> bool:
        """TensorFlow's flag: whether shapes may not change from step to step. They may."""
        return False

    # -- replicas ---------------------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., object], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        """`Strategy.run` under its older name."""
        return self._strategy.run(fn, args=args, kwargs=kwargs)

    def reduce_to(self, reduce_op: ReduceOp | str, value: object, destinations: object) -> Any:
        """``value`` combined over replicas, at ``destinations``: a device name, a variable or a distributed value.

        Returns a tensor for one destination, and for a value or a variable with several components a `Mirrored` value.
        """
        context.require_cross(self._strategy, "reduce_to")
        return _reduce_to(self._strategy, reduce_op, value, destinations)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[object, object]]
    ) -> list[object]:
        """`reduce_to` for each ``(value, destinations)`` pair, in order."""
        context.require_cross(self._strategy, "batch_reduce_to")
        op = ReduceOp.parse(reduce_op)
        _require_pairs(value_destination_pairs)
        if not value_destination_pairs and wraps_values(self._strategy):
            raise InvalidArgumentError("batch_reduce_to got no (value, destinations) pairs; give at least one.")
        return [_reduce_to(self._strategy, op, value, destinations) for value, destinations in value_destination_pairs]

    def broadcast_to(self, tensor: object, destinations: object) -> Any:
        """Copies of ``tensor`` at ``destinations``, with the same results as `reduce_to`. Numbers stay as they are."""
        context.require_cross(self._strategy, "broadcast_to")
        return _broadcast_to(self._strategy, tensor, destinations)

    # -- variables --------------------------------------------------------------------------------------------------

    def update(
        self,
        var: object,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> Any:
        """Run ``fn(component, *args, **kwargs)`` for every component of ``var``, in cross-replica context.

        Where there is one component (one device, central storage, a parameter), distributed arguments are replaced by
        their first component; else by the one of the same replica. Called in a replica, it runs once for all of them.

        Returns what ``fn`` returned (`Mirrored` for several components); with ``group=False`` as a tuple of local
        results. Raises `ValueError` if ``var`` is no variable of this strategy.
        """
        require_callable(fn, "update")
        require_list_or_tuple(args)
        require_kwargs(kwargs)

        def across(strategy: StrategyLike, *merged_args: object, **merged_kwargs: object) -> Any:
            return _update(strategy, var, fn, merged_args, merged_kwargs, group)

        if context.replica_of(self._strategy, "update") is None:
            return across(self._strategy, *args, **(kwargs or {}))
        return self._engine.merge_call(across, tuple(args), dict(kwargs or {}))

    def update_non_slot(
        self,
        colocate_with: object,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` at each place that `non_slot_devices` gave; results as of `update`."""
        require_callable(fn, "update_non_slot")
        require_list_or_tuple(args)
        require_kwargs(kwargs)
        context.require_cross(self._strategy, "update_non_slot")
        return _update_non_slot(self._strategy, fn, tuple(args), dict(kwargs or {}), group)

    def read_var(self, v: object) -> torch.Tensor:
        """The current value of a variable, as a new tensor."""
        if isinstance(v, Variable):
            return v.read_value()
        if isinstance(v, torch.Tensor):
            return v.detach().clone()
        if isinstance(v, ShardedVariable):
            return torch.as_tensor(v).detach().clone()
        raise InvalidArgumentError(f"read_var needs a variable; got {type(v).__name__} {v!r:.80}.")

    def value_container(self, value: object) -> Any:
        """The variable whose component ``value`` is; anything else is its own container."""
        container = container_of(value)
        return value if container is None else container

    def variable_created_in_scope(self, v: object) -> bool:
        """Whether ``v`` is a variable of this strategy: made in its scope, or adopted by one of its runs."""
        if isinstance(v, Variable):
            return context.strategy_of(v) is self._strategy
        if isinstance(v, ShardedVariable):
            return all(map(self.variable_created_in_scope, v.variables))
        return isinstance(v, torch.Tensor) and v in self._engine.registry

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: object) -> Iterator[None]:
        """Variables created in this block live where ``colocate_with_variable`` does, as all of this strategy do.

        Raises `ContextError` outside of the strategy's scope and `ValueError` if it is not this strategy's variable.
        """
        self._require_scope("colocate_vars_with")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise InvalidArgumentError(
                "colocate_vars_with needs a variable created in this strategy's scope; got "
                f"{type(colocate_with_variable).__name__} {colocate_with_variable!r:.80}."
            )
        with home_of(self._strategy).colocating(colocate_with_variable):
            yield

    def set_aggregation(self, module: nn.Module, name: str, aggregation: VariableAggregation | str) -> None:
        """Say what becomes of buffer ``name`` of ``module`` where a step changes it on several replicas.

        ``aggregation``: "mean" of the replicas' values (what floating buffers of modules in training mode get unless
        told otherwise, as running statistics want it; an error for integers); "sum" of their changes, for counts,
        histograms and totals; "only_first_replica"; "none":
        each replica keeps its own from run to run, such as a recurrent state with a row for each of its rows, and
        what is saved is the first one's. Every process has to call it. Raises `ValueError` if there is no such buffer.

        On parameter servers it says what becomes of the changes of several workers: "sum" adds them all, "mean" and
        "only_first_replica" mean that the last one stays; "none" is refused when a function is scheduled. The
        coordinator has to call it.
        """
        self._engine.registry.buffer_rules.set(module, name, aggregation)

    def check_replicas(self) -> None:
        """Make sure that what has to be equal on all replicas is: parameters, buffers, optimizer state and settings,
        schedulers, modes (`torchstrat.replicas.state_kinds` lists them).

        Compares digests of all values, which takes about as long as reading them. Every process has to call it, between
        runs; with ``TORCHSTRAT_CHECK=every:100`` in its environment it is called after every 100th run. Raises
        `ReplicaDriftError`, on every process, that names the first thing that differs and who has what;
        `NotImplementedError` on parameter servers, whose workers' copies differ by design.
        """
        context.require_cross(self._strategy, "check_replicas")
        home_of(self._strategy).require_comparable()
        self._engine.check_replicas("")

    def pull(self, model: nn.Module | None = None) -> None:
        """Bring the current values of ``model`` (None: of every variable) into this process's tensors.

        For parameter servers, where reading a tensor brings its value anyway: this is one call for all, and for code
        that takes memory without asking (modules of `torch.jit`, C++ extensions). On all other strategies the tensors
        are the variables, and nothing is done. Local.
        """
        home_of(self._strategy).pull(None if model is None else [model])

    def _require_scope(self, call: str) -> None:
        context.require_cross(self._strategy, call)
        if context.get_strategy() is not self._strategy:
            raise ContextError(
                f"{call} was called outside of the scope of {self._strategy!r}; use `with strategy.scope():`."
            )

    def non_slot_devices(self, var_list: Sequence[object]) -> Any:
        """Where state shared by all of ``var_list`` belongs: in central storage (and by default) with the variable of
        the smallest name, which is returned; elsewhere on the devices of the replicas."""
        if placement_of(self._strategy) is VariablePlacement.CENTRAL:
            return self._smallest_name(var_list)
        return home_of(self._strategy).devices

    def _smallest_name(self, var_list: Sequence[object]) -> object:
        registry = self._engine.registry

        def name(variable: object) -> str:
            return variable.name if isinstance(variable, Variable) else registry.describe(variable)  # type: ignore[arg-type]

        if not var_list:
            raise InvalidArgumentError("non_slot_devices got no variables; give at least one.")
        return min(var_list, key=name)

    def device_of(self, variable: object) -> str:
        """The canonical device, such as ``"cpu:1"``, of a variable: in a replica's code that of its component, else
        that of the first component. Of a variable in shards all of their places: ``"ps:0, ps:1"``."""
        if isinstance(variable, Variable):
            return storage_of(variable).device
        if isinstance(variable, ShardedVariable):
            return join_places(map(self.device_of, variable.variables))
        if not self.variable_created_in_scope(variable):
            raise InvalidArgumentError(f"device_of needs a variable of this strategy; got {variable!r:.80}.")
        place = home_of(self._strategy).place_of(variable)
        if place is not None:
            return place
        replica = context.replica_of(self._strategy, "device_of")
        if replica is None or placement_of(self._strategy) is not VariablePlacement.MIRRORED:
            return home_of(self._strategy).devices[0]
        return self._engine.device_of_replica(replica)

    def describe(self) -> str:
        """What this strategy runs on, in words: replicas, devices, and how replicas talk to each other and why so. On a
        coordinator also how many bytes of variables each parameter server holds.

        Local: any process may call it alone.
        """
        engine, home = self._engine, home_of(self._strategy)
        return (
            f"{type(self._strategy).__name__}: {engine.num_replicas} replicas, {len(engine.local_replicas)} of them in "
            f"this process on {', '.join(self.worker_devices)}; variables on {home.places}; "
            f"communication: {home.communication or engine.communication}"
        )

    def estimate(self, model: nn.Module, optimizer: Optimizer | None = None) -> MemoryEstimate:
        """Bytes that parameters, buffers, gradients and optimizer state will take, by device and on the host.

        Call it before anything is allocated: ``model`` may be made on ``torch.device("meta")``, and ``optimizer`` over
        its parameters; neither is changed. Counts the state that stays between steps, over all processes of the job,
        without activations and batches. Local: any process may call it alone.
        """
        return memory.estimate(model, optimizer, self._engine.copies())
