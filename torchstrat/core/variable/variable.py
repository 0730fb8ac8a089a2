"""`Variable`: state that is neither a parameter nor a buffer, kept where the strategy keeps its variables.

Assigning to it from a replica's code happens once for all replicas, as it does from everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from torchstrat.core import context, reduction
from torchstrat.core.context import StrategyLike, engine_of, home_of, placement_of, wraps_values
from torchstrat.core.devices import torch_device
from torchstrat.core.engine import Communicator, ReplicaEngine, within
from torchstrat.core.errors import (
    InvalidArgumentError,
    ReplicaDivergenceError,
    TorchstratError,
    UnsupportedError,
    WrongTypeError,
)
from torchstrat.core.reduction import Axis, ReduceOp, VariableAggregation, VariableSynchronization
from torchstrat.core.values import PerReplica, first_here, select_replica
from torchstrat.core.variable.storage import (
    Cell,
    DeclaredShape,
    Edit,
    Given,
    Storage,
    VariablePlacement,
    check_edit,
    check_mirrored,
    exchange_values,
    from_first_replica,
    initial_tensor,
    merge_values,
    parse_aggregation,
    parse_shape,
    parse_synchronization,
    spans_processes,
    to_tensor,
)
from torchstrat.core.variable.tensor_like import TensorLike, array_of

_updated_replica: ContextVar[int | None] = ContextVar("_updated_replica", default=None)


@contextmanager
def updating(replica: int) -> Iterator[None]:
    """For `StrategyExtended.update`: in this block, mirrored variables mean their component of one replica."""
    token = _updated_replica.set(replica)
    try:
        yield
    finally:
        _updated_replica.reset(token)


def updated_replica() -> int | None:
    return _updated_replica.get()


class Variable(TensorLike, context.OfStrategy):
    """A tensor that replicas share: counters, sums for metrics, running statistics. Read it like a tensor.

    It belongs to the strategy in whose scope it is created and lives where that strategy keeps its variables: one
    component on one device or in central storage, a component per replica where variables are mirrored. Created in a
    replica's code, it is one variable for all replicas. Outside of any scope it is an ordinary variable.

    Args:
        initial_value: a tensor, an array, numbers, or a function without arguments that gives one of these. With
            several processes rank 0's is everyone's, so every process has to create the variable.
        trainable: False or None. Trained state is an `torch.nn.Parameter`.
        name: for messages, and for `StrategyExtended.non_slot_devices`.
        aggregation: what happens to the values that several replicas assign: NONE (an error in central storage; each
            replica's own component where mirrored), SUM, MEAN, or ONLY_FIRST_REPLICA.
        synchronization: ON_READ gives each replica of a mirrored strategy a component of its own until the variable is
            read outside of `run`, where its aggregation then combines them. AUTO is ON_WRITE. Other strategies have one
            component and ignore it.
        shape: what later values have to fit; None entries fit any size. Default: the initial value's shape.
        dtype: default: the initial value's.

    Assignments in a replica's code involve all replicas of the run and are applied once; outside of `run`, in a
    `merge_call` and in `StrategyExtended.update` they are applied as they are. In the scope of another strategy they
    raise `StrategyMixingError`.
    """

    _kind: VariablePlacement
    _cells: tuple[Storage, ...]
    _replicas: tuple[int, ...]  # of the cells, where mirrored; else those of this process
    _declared: DeclaredShape
    _container: Variable | None
    _components: tuple[Variable, ...]
    name: str
    aggregation: VariableAggregation
    synchronization: VariableSynchronization

    # Not __init__: the replicas of one process that each create a variable all get the same object.
    def __new__(
        cls,
        initial_value: object = None,
        trainable: bool | None = None,
        name: str | None = None,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
        synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
        shape: Sequence[int | None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Variable:
        if trainable:
            raise UnsupportedError(
                "a Variable is not trained: no optimizer sees it. Use torch.nn.Parameter for trained state."
            )
        strategy = context.get_strategy()
        sharded = home_of(strategy).make_sharded(
            initial_value, name, shape, dtype, aggregation=aggregation, synchronization=synchronization
        )
        if sharded is not None:
            return sharded  # type: ignore[return-value]  # parameter servers with a partitioner; documented there

        def create(_: object, given: Any) -> Variable:
            first = given.values[0] if isinstance(given, PerReplica) else given
            made = object.__new__(cls)
            made._set_up(strategy, first.value, name, aggregation, synchronization, shape, dtype)
            return made

        engine = engine_of(strategy)
        in_replica = context.replica_of(strategy, "Variable") is not None
        if in_replica and engine.num_replicas > 1 and not spans_processes(engine):
            made: Variable = engine.merge_call(create, (Given(initial_value),), {})
            return made
        return create(strategy, Given(initial_value))

    def _set_up(
        self,
        strategy: StrategyLike,
        initial_value: object,
        name: str | None,
        aggregation: VariableAggregation | None,
        synchronization: VariableSynchronization | None,
        shape: Sequence[int | None] | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.name = "Variable" if name is None else str(name)
        kind = _placement_of(strategy)
        self.aggregation = parse_aggregation(aggregation, self.name)
        self.synchronization = parse_synchronization(synchronization, self.name)
        mirrored = kind is VariablePlacement.MIRRORED
        initial = initial_tensor(initial_value, dtype, self.name)
        declared = parse_shape(shape, initial)
        if mirrored:
            check_mirrored(self.name, self.aggregation, self.synchronization, initial.dtype)
        with within(f"the first value of Variable {self.name!r}"):
            initial = _agreed_initial(strategy, initial)
        home = home_of(strategy)
        places = home.devices if mirrored else home.devices[:1]
        cells = tuple(home.make_storage(initial, device, self.name) for device in places)
        self._fill(strategy, self.name, self.aggregation, self.synchronization, declared, kind, cells)
        _number(strategy, self)
        home.made(self)

    def _fill(
        self,
        strategy: StrategyLike,
        name: str,
        aggregation: VariableAggregation,
        synchronization: VariableSynchronization,
        declared: DeclaredShape,
        kind: VariablePlacement,
        cells: tuple[Storage, ...],
        container: Variable | None = None,
    ) -> Variable:
        """Be a variable whose values are there already. Returns itself."""
        self._strategy, self._kind, self._replicas = strategy, kind, engine_of(strategy).local_replicas
        self.name, self.aggregation, self.synchronization = name, aggregation, synchronization
        self._declared, self._cells, self._container = declared, cells, container
        self._components = tuple(map(self._view, cells)) if kind is VariablePlacement.MIRRORED else ()
        return self

    def _like(self, kind: VariablePlacement, cells: tuple[Storage, ...], container: Variable | None = None) -> Variable:
        facts = self._strategy, self.name, self.aggregation, self.synchronization, self._declared
        return object.__new__(type(self))._fill(*facts, kind, cells, container)

    def _view(self, cell: Storage) -> Variable:
        """One component as a variable of its own, which shares the cell."""
        return self._like(VariablePlacement.ONE, (cell,), self)

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        """A variable of its own with the same values, of the same strategy."""
        copy = memo[id(self)] = self._like(self._kind, tuple(map(_local_copy, self._cells)))
        _number(self._strategy, copy)
        return copy

    def __copy__(self) -> Variable:
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickled and saved as a plain tensor: strategies do not travel."""
        return self._cell().copy().__reduce_ex__(protocol)

    @property
    def _engine(self) -> ReplicaEngine:
        return engine_of(self._strategy)

    # -- reading ----------------------------------------------------------------------------------------------------

    def read_value(self) -> torch.Tensor:
        """The current value, as a new tensor: in a replica's code that replica's, elsewhere the first component's.

        An ON_READ variable outside of `run` is combined; with several processes, every one has to read it then.
        """
        return self._combined() if self._combines() else self._carried(self._cell().copy())

    def value(self) -> torch.Tensor:
        """The same as `read_value`."""
        return self.read_value()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The current value as a new NumPy array; float32 for bfloat16, which NumPy has not."""
        return array_of(self.read_value())

    def _lend(self) -> torch.Tensor:
        return self._combined() if self._combines() else self._carried(self._cell().lend())

    @property
    def shape(self) -> torch.Size:
        """The shape of the current value."""
        return self._cell().shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all its values."""
        return self._cells[0].dtype

    @property
    def device(self) -> torch.device:
        """Where a value read here lives. `StrategyExtended.device_of` tells where the variable does."""
        replica = self._own_replica()
        if replica is not None and self._kind is VariablePlacement.CENTRAL:
            return torch_device(self._engine.device_of_replica(replica))
        return self._cell().value_device

    @property
    def trainable(self) -> bool:
        """False: trained state is a `torch.nn.Parameter`."""
        return False

    def _own_replica(self) -> int | None:
        """The replica of this variable's strategy whose component is meant here, if it is one of this process."""
        here = context.get_replica_context()
        if here is not None and here.strategy is self._strategy:
            replica: int | None = here.replica_id_in_sync_group
        else:
            replica = updated_replica()
        # Where a step runs for all replicas at once the number is a tensor, and there is one component.
        return replica if isinstance(replica, int) and replica in self._replicas else None

    def _cell(self) -> Storage:
        replica = self._own_replica()
        if replica is None or len(self._cells) == 1:
            return self._cells[0]
        return self._cells[self._replicas.index(replica)]

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Central values go to the replica that reads them."""
        return tensor if self._kind is VariablePlacement.ONE else tensor.to(self.device)

    @property
    def _is_on_read(self) -> bool:
        return self._kind is VariablePlacement.MIRRORED and self.synchronization is VariableSynchronization.ON_READ

    def _combines(self) -> bool:
        return self._is_on_read and self._own_replica() is None

    def _combined(self) -> torch.Tensor:
        if self.aggregation is VariableAggregation.NONE:
            raise InvalidArgumentError(
                f"Variable {self.name!r} is ON_READ with aggregation NONE: outside of run it has no single value. Read "
                "it in a replica, open it with strategy.local_results, or create it with aggregation SUM, MEAN or "
                "ONLY_FIRST_REPLICA."
            )
        with within(f"reading Variable {self.name!r}"):
            if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                return from_first_replica(self._engine, self._cells[0].copy())
            op = ReduceOp.from_variable_aggregation(self.aggregation)
            total: torch.Tensor = self._engine.reduce(op, self._per_replica(), None)
        return total.to(self._cells[0].value_device)

    def _per_replica(self) -> PerReplica[object]:
        """What each replica of this process reads."""
        cells = self._cells if self._components else self._cells * len(self._replicas)
        return PerReplica([cell.lend() for cell in cells], replica_ids=self._replicas)

    def _local_components(self) -> tuple[Variable, ...]:
        return self._components or (self,)

    def _reduced(self, op: ReduceOp, axis: Axis) -> object:
        """`Strategy.reduce` of this variable. It is equal on all replicas, so its own mean, unless it is ON_READ."""
        engine = self._engine
        if axis is not None or self._is_on_read:
            whole = self._kind is VariablePlacement.ONE
            return engine.reduce(op, self.read_value() if whole else self._per_replica(), axis)
        if op is ReduceOp.MEAN or not wraps_values(self._strategy):
            return self
        return reduction.reduce_plain(op, self._cells[0].copy(), None, engine.num_replicas)

    def _gathered(self, dim: int) -> torch.Tensor:
        """`Strategy.gather` of this variable: its components joined; a single one as it is."""
        engine = self._engine
        if self._components:
            joined: torch.Tensor = engine.gather(self._per_replica(), dim)
            return joined
        whole: torch.Tensor = engine.gather(self.read_value(), dim)
        return whole

    # -- assigning --------------------------------------------------------------------------------------------------

    def assign(self, value: object) -> Variable:
        """Replace the value, which must have the variable's shape and dtype. Returns the variable (its component)."""
        return self._assign(Edit.ASSIGN, value)

    def assign_add(self, delta: object) -> Variable:
        """Add ``delta``, which may broadcast to the variable's shape. Returns the variable (its component)."""
        return self._assign(Edit.ADD, delta)

    def assign_sub(self, delta: object) -> Variable:
        """Subtract ``delta``, which may broadcast to the variable's shape. Returns the variable (its component)."""
        return self._assign(Edit.SUB, delta)

    def scatter_add(self, sparse_delta: torch.Tensor) -> Variable:
        """Add a sparse COO tensor of the variable's shape; repeated indices add up. Returns the variable."""
        return self._assign(Edit.SCATTER_ADD, sparse_delta)

    def _assign(self, edit: Edit, value: object) -> Variable:
        """Make one assignment; what the method that the user called returns."""
        if self._kind is VariablePlacement.ONE:
            if isinstance(value, PerReplica):
                raise WrongTypeError(
                    f"{edit.value} got a PerReplica value for a variable with one component; open it with "
                    "strategy.local_results, or combine it with strategy.reduce, first."
                )
            self._write(edit, to_tensor(value, self.dtype, edit.value))
            return self
        replica = context.replica_of(self._strategy, edit.value)
        if replica is None:
            return self._across(edit, value)
        return self._in_replica(edit, select_replica(replica, value), replica)

    def _write(self, edit: Edit, value: torch.Tensor) -> None:
        for cell in self._cells:
            check_edit(edit, value, cell.shape, self._declared)
        for cell in self._cells:
            cell.write(edit, value)

    def _across(self, edit: Edit, value: object) -> Variable:
        """As it is: a `PerReplica` value gives each component its own, and a single one the first replica's."""
        only = updated_replica()
        if not self._components:
            if isinstance(value, PerReplica):
                with within(f"{edit.value} of Variable {self.name!r}"):
                    value = from_first_replica(self._engine, to_tensor(first_here(value), self.dtype, edit.value))
            self._write(edit, to_tensor(value, self.dtype, edit.value))
            return self
        if only is None and self._is_on_read and self.aggregation is VariableAggregation.SUM:
            value = self._share_of_sum(edit, value)
        for replica, component in zip(self._replicas, self._components, strict=True):
            if only in (None, replica):
                component._assign(edit, select_replica(replica, value))
        return self

    def _share_of_sum(self, edit: Edit, value: object) -> object:
        """What each component has to hold so that their sum is ``value``."""
        if edit is not Edit.ASSIGN:
            raise InvalidArgumentError(
                f"{edit.value} outside of run on the ON_READ variable {self.name!r} with aggregation SUM: its "
                "components add up, and it is not clear which is to change. Use assign, or do it in a replica."
            )
        if isinstance(value, PerReplica):
            return value
        whole, count = to_tensor(value, self.dtype, edit.value), self._strategy.num_replicas_in_sync
        if whole.is_floating_point() or whole.is_complex():
            return whole / count
        # Whole numbers seldom divide: the first replicas have one more.
        share, rest = whole // count, whole % count
        return PerReplica([share + (rest > one).to(self.dtype) for one in self._replicas], replica_ids=self._replicas)

    def _in_replica(self, edit: Edit, value: object, replica: int) -> Variable:
        if self._components and (self._is_on_read or self.aggregation is VariableAggregation.NONE):
            return self._components[self._replicas.index(replica)]._assign(edit, value)
        if self.aggregation is VariableAggregation.NONE:
            raise InvalidArgumentError(
                f"{edit.value} in a replica on Variable {self.name!r}, which has aggregation NONE: "
                f"{self._strategy.num_replicas_in_sync} replicas would each assign to the one copy. Create it with "
                "aggregation=ts.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or assign outside of run."
            )
        engine = self._engine
        if not spans_processes(engine):
            merged: Variable = engine.merge_call(_merge, (self, edit, Given(value)), {})
            return merged
        where = torch_device(engine.device_of_replica(replica))
        with within(f"{edit.value} of Variable {self.name!r}"):
            total = exchange_values(engine, self.aggregation, edit, value, self.dtype, where)
        self._write(edit, total)
        return self._components[0] if self._components else self

    def __repr__(self) -> str:
        try:
            values = [cell.copy() for cell in self._cells]
            shown = repr(values[0])
        except TorchstratError as error:  # on a server that is gone, say: whoever looks wants to know what this is
            values, shown = [], f"no value to show ({error})"
        if values and self._components:
            shown = "{" + ", ".join(f"{r}: {v!r}" for r, v in zip(self._replicas, values, strict=True)) + "}"
        facts = f"shape={tuple(self._cells[0].shape)}, dtype={self.dtype}, aggregation={self.aggregation.name}"
        return f"<Variable {self.name!r} {facts} on {', '.join(cell.device for cell in self._cells)}: {shown}>"


def _number(strategy: StrategyLike, variable: Variable) -> None:
    """Those made in a replica's code are left out, because a process without rows does not run it."""
    if context.replica_of(strategy, "Variable") is None:
        engine_of(strategy).registry.variables.add(variable)


def _placement_of(strategy: StrategyLike) -> VariablePlacement:
    """Central storage with a single replica keeps ordinary variables."""
    placement = placement_of(strategy)
    if placement is VariablePlacement.CENTRAL and strategy.num_replicas_in_sync == 1:
        return VariablePlacement.ONE
    return placement


def _agreed_initial(strategy: StrategyLike, initial: torch.Tensor) -> torch.Tensor:
    """Rank 0's first value; in a run, that of the first replica that takes part. Every process calls it."""
    engine = engine_of(strategy)
    if not spans_processes(engine):
        return initial
    if context.replica_of(strategy, "Variable") is None:
        return from_first_replica(engine, initial)
    gathered: torch.Tensor = engine.all_gather(initial.unsqueeze(0), 0)
    return gathered[0].detach()


def _local_copy(cell: Storage) -> Cell:
    """Of a component that another process keeps: on the CPU of this one."""
    return cell.__deepcopy__({}) if isinstance(cell, Cell) else Cell(cell.lend(), "cpu:0")


def _merge(strategy: object, variable: Any, edit: Any, given: Any) -> Any:
    """All replicas of this process assign to one variable: combine their values, write once."""
    if isinstance(variable, PerReplica) or isinstance(edit, PerReplica):
        raise ReplicaDivergenceError(
            "the replicas assigned to different variables, or in different ways, in one place of the step: "
            f"{variable!r:.200}, {edit!r:.200}. Every replica has to make the same assignments in the same order."
        )
    values = [one.value for one in given.values] if isinstance(given, PerReplica) else [given.value]
    total = merge_values(variable.aggregation, edit, values, variable.dtype)
    variable._write(edit, total)
    components = components_of(variable)
    return PerReplica(list(components.values()), replica_ids=tuple(components)) if components else variable


def components_of(variable: object) -> dict[int, Variable]:
    """By replica of this process; empty for all but variables with a component on each."""
    return dict(zip(variable._replicas, variable._components, strict=False)) if isinstance(variable, Variable) else {}


VariableFacts = tuple[str, VariableAggregation, VariableSynchronization, DeclaredShape]
"""What another process makes the same variable of, over a storage of its own."""


def facts_of(variable: Variable) -> VariableFacts:
    return variable.name, variable.aggregation, variable.synchronization, variable._declared


def variable_over(storage: Storage, strategy: StrategyLike, facts: VariableFacts) -> Variable:
    return object.__new__(Variable)._fill(strategy, *facts, VariablePlacement.ONE, (storage,))


def storage_of(variable: Variable) -> Storage:
    """Where its value is; in a replica that of its component, else that of the first."""
    return variable._cell()


def reduced(variable: Variable, op: ReduceOp, axis: Axis) -> object:
    """What `Strategy.reduce` gives for it."""
    return variable._reduced(op, axis)


def gathered(variable: Variable, dim: int) -> torch.Tensor:
    """What `Strategy.gather` gives for it."""
    return variable._gathered(dim)


def central_component(variable: Variable) -> Variable:
    """Of a variable in central storage its one component, as a variable of its own; any other as it is."""
    return variable._view(variable._cells[0]) if variable._kind is VariablePlacement.CENTRAL else variable


def container_of(value: object) -> Variable | None:
    """Whose component ``value`` is."""
    return value._container if isinstance(value, Variable) else None


# -- replicas that sat a run out ------------------------------------------------------------------------------------


def hand_over(communicator: Communicator, variables: Mapping[int, Variable], source: int) -> None:
    """After a run in which some processes had nothing to do: rank ``source``'s values for all variables that are to be
    equal everywhere. ``variables`` have the same number on all processes; one may have dropped some already."""
    shared = {
        number: variable._cells[0]
        for number, variable in variables.items()
        if not variable._is_on_read and variable.aggregation is not VariableAggregation.NONE
    }
    values = {number: cell.copy() for number, cell in shared.items()} if communicator.rank == source else None
    call = "the end of a run (handing its variables to replicas without rows)"
    for number, value in communicator.broadcast_object(values, source, call).items():
        if communicator.rank != source and number in shared:
            shared[number].write(Edit.ASSIGN, value)
