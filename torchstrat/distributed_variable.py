"""`Variable`: state of a program that is neither a parameter nor a buffer, kept where the strategy keeps its variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchstrat import context, reduction
from torchstrat.devices import torch_device
from torchstrat.errors import (
    InvalidArgumentError,
    ReplicaDivergenceError,
    UnsupportedError,
    VariableKindError,
    WrongTypeError,
)
from torchstrat.reduction import Axis, ReduceOp, VariableAggregation, VariableSynchronization
from torchstrat.tensor_like import TensorLike
from torchstrat.values import PerReplica, select_replica
from torchstrat.variable_aggregation import Given, exchange_values, merge_values, require_mean_of_floats
from torchstrat.variable_storage import (
    Cell,
    DeclaredShape,
    Edit,
    VariablePlacement,
    check_edit,
    parse_shape,
    to_tensor,
)

if TYPE_CHECKING:
    from torchstrat.strategy import Strategy

_updated_replica: ContextVar[int | None] = ContextVar("_updated_replica", default=None)


@contextmanager
def updating(replica: int) -> Iterator[None]:
    """For `StrategyExtended.update`: in this block, mirrored variables mean their component of one replica."""
    token = _updated_replica.set(replica)
    try:
        yield
    finally:
        _updated_replica.reset(token)


class Variable(TensorLike):
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

    _strategy: Strategy
    _kind: VariablePlacement
    _cells: tuple[Cell, ...]
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
        initial_value: Any = None,
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

        def create(_: Any, given: Any) -> Variable:
            first = given.values[0] if isinstance(given, PerReplica) else given
            made = object.__new__(cls)
            made._set_up(strategy, first.value, name, aggregation, synchronization, shape, dtype)
            return made

        engine = strategy._engine
        in_replica = context.replica_of(strategy, "Variable") is not None
        if in_replica and engine.num_replicas > 1 and not _spans_processes(strategy):
            made: Variable = engine.merge_call(create, (Given(initial_value),), {})
            return made
        return create(strategy, Given(initial_value))

    def _set_up(
        self,
        strategy: Strategy,
        initial_value: Any,
        name: str | None,
        aggregation: VariableAggregation | None,
        synchronization: VariableSynchronization | None,
        shape: Sequence[int | None] | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._strategy = strategy
        self.name = "Variable" if name is None else str(name)
        self._kind = strategy._variable_placement
        if self._kind is VariablePlacement.CENTRAL and strategy.num_replicas_in_sync == 1:
            self._kind = VariablePlacement.ONE
        self.aggregation = _parse_aggregation(aggregation, self.name)
        self.synchronization = _parse_synchronization(synchronization, self.name)
        initial = _initial_tensor(initial_value, dtype, self.name)
        self._check_kind(initial.dtype)
        initial = _agreed_initial(strategy, initial)
        self._declared = parse_shape(shape, initial)
        mirrored = self._kind is VariablePlacement.MIRRORED
        devices = strategy.extended._parameter_devices
        self._cells = tuple(Cell(initial, device) for device in (devices if mirrored else devices[:1]))
        self._replicas = strategy._engine.local_replicas
        self._container, self._components = None, ()
        if mirrored:
            self._components = tuple(self._view(cell) for cell in self._cells)
        strategy.extended._remember(self)

    def _check_kind(self, dtype: torch.dtype) -> None:
        if self._kind is not VariablePlacement.MIRRORED:
            return
        if self.synchronization is VariableSynchronization.NONE:
            raise InvalidArgumentError(
                f"Variable {self.name!r}: synchronization NONE has no meaning for mirrored variables; use AUTO, ON_WRITE "
                "or ON_READ."
            )
        if self.aggregation is VariableAggregation.MEAN:
            require_mean_of_floats(dtype, f"mirrored Variable {self.name!r}")

    def _view(self, cell: Cell) -> Variable:
        """One component as a variable of its own, which shares the cell."""
        view = object.__new__(type(self))
        view._strategy, view._kind, view._replicas = self._strategy, VariablePlacement.ONE, self._replicas
        view.name, view.aggregation, view.synchronization = self.name, self.aggregation, self.synchronization
        view._declared, view._cells, view._container, view._components = self._declared, (cell,), self, ()
        return view

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """A variable of its own with the same values, of the same strategy."""
        copy = self._view(Cell(self._cells[0].lend(), self._cells[0].device))
        copy._kind, copy._container = self._kind, None
        if self._components:
            copy._cells = tuple(Cell(cell.lend(), cell.device) for cell in self._cells)
            copy._components = tuple(copy._view(cell) for cell in copy._cells)
        memo[id(self)] = copy
        self._strategy.extended._remember(copy)
        return copy

    def __copy__(self) -> Variable:
        return self.__deepcopy__({})

    # -- reading ----------------------------------------------------------------------------------------------------

    def read_value(self) -> torch.Tensor:
        """The current value, as a new tensor. In a replica's code it is that replica's; elsewhere the first component's.

        An ON_READ variable outside of `run` is combined; with several processes, every one has to read it then.
        """
        return self._combined() if self._combines() else self._carried(self._cell().copy())

    def value(self) -> torch.Tensor:
        """The same as `read_value`."""
        return self.read_value()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The current value as a new NumPy array."""
        return np.asarray(self.read_value().cpu().numpy())

    def _lend(self) -> torch.Tensor:
        return self._combined() if self._combines() else self._carried(self._cell().lend())

    @property
    def shape(self) -> torch.Size:
        return self._cell().shape

    @property
    def dtype(self) -> torch.dtype:
        return self._cells[0].dtype

    @property
    def device(self) -> torch.device:
        """Where a value read here lives. `StrategyExtended.device_of` tells where the variable does."""
        replica = self._own_replica()
        if replica is not None and self._kind is VariablePlacement.CENTRAL:
            return torch_device(self._strategy._engine.device_of_replica(replica))
        return torch_device(self._cell().device)

    @property
    def trainable(self) -> bool:
        return False

    def _own_replica(self) -> int | None:
        """The replica of this variable's strategy whose component is meant here, if it is one of this process."""
        here = context.get_replica_context()
        if here is not None and here.strategy is self._strategy:
            replica: int | None = here.replica_id_in_sync_group
        else:
            replica = _updated_replica.get()
        return replica if replica in self._replicas else None

    def _cell(self) -> Cell:
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
                f"Variable {self.name!r} is ON_READ with aggregation NONE: outside of run it has no single value. Read it in a "
                "replica, open it with strategy.local_results, or create it with SUM, MEAN or ONLY_FIRST_REPLICA."
            )
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return from_first_replica(self._strategy, self._cells[0].copy())
        op = ReduceOp.from_variable_aggregation(self.aggregation)
        total: torch.Tensor = self._strategy._engine.reduce(op, self._per_replica(), None)
        return total.to(torch_device(self._cells[0].device))

    def _per_replica(self) -> PerReplica:
        """What each replica of this process reads."""
        cells = self._cells if self._components else self._cells * len(self._replicas)
        return PerReplica([cell.lend() for cell in cells], replica_ids=self._replicas)

    def _local_components(self) -> tuple[Variable, ...]:
        return self._components or (self,)

    def _reduced(self, op: ReduceOp, axis: Axis) -> Any:
        """`Strategy.reduce` of this variable. It is equal on all replicas, and so its own mean, unless it is ON_READ."""
        engine = self._strategy._engine
        if axis is not None or self._is_on_read:
            return engine.reduce(op, self._per_replica() if self._kind is not VariablePlacement.ONE else self._lend(), axis)
        if op is ReduceOp.MEAN or not self._strategy._wraps_values:
            return self
        return reduction.reduce_plain(op, self._cells[0].copy(), None, engine.num_replicas)

    def _gathered(self, dim: int) -> torch.Tensor:
        """`Strategy.gather` of this variable: its components joined; a single one as it is."""
        engine = self._strategy._engine
        if self._components:
            joined: torch.Tensor = engine.gather(self._per_replica(), dim)
            return joined
        whole: torch.Tensor = engine.gather(self.read_value(), dim)
        return whole

    # -- assigning --------------------------------------------------------------------------------------------------

    def assign(self, value: Any) -> Variable:
        """Replace the value, which must have the variable's shape and dtype. Returns the variable (its component)."""
        return self._edit(Edit.ASSIGN, value)

    def assign_add(self, delta: Any) -> Variable:
        """Add ``delta``, which may broadcast to the variable's shape. Returns the variable (its component)."""
        return self._edit(Edit.ADD, delta)

    def assign_sub(self, delta: Any) -> Variable:
        """Subtract ``delta``, which may broadcast to the variable's shape. Returns the variable (its component)."""
        return self._edit(Edit.SUB, delta)

    def scatter_add(self, sparse_delta: torch.Tensor) -> Variable:
        """Add a sparse COO tensor of the variable's shape; repeated indices add up. Returns the variable."""
        return self._edit(Edit.SCATTER_ADD, sparse_delta)

    def _edit(self, edit: Edit, value: Any) -> Variable:
        if self._kind is VariablePlacement.ONE:
            if isinstance(value, PerReplica):
                raise WrongTypeError(
                    f"{edit.value} got a PerReplica value for a variable with one component; open it with "
                    "strategy.local_results, or combine it with strategy.reduce, first."
                )
            self._write(self._cells, edit, to_tensor(value, self.dtype, edit.value))
            return self
        replica = context.replica_of(self._strategy, edit.value)
        if replica is None:
            return self._edit_across(edit, value)
        return self._edit_in_replica(edit, select_replica(replica, value), replica)

    def _write(self, cells: Sequence[Cell], edit: Edit, value: torch.Tensor) -> None:
        for cell in cells:
            check_edit(edit, value, cell.shape, self._declared)
        for cell in cells:
            cell.write(edit, value)

    def _edit_across(self, edit: Edit, value: Any) -> Variable:
        """As it is: a `PerReplica` value gives each component its own, and a single one the first replica's."""
        if not self._components:
            if isinstance(value, PerReplica):
                value = from_first_replica(self._strategy, to_tensor(value.values[0], self.dtype, edit.value))
            self._write(self._cells, edit, to_tensor(value, self.dtype, edit.value))
            return self
        only = _updated_replica.get()
        if only is None and self._is_on_read and self.aggregation is VariableAggregation.SUM:
            value = self._share_of_sum(edit, value)
        for replica, component in zip(self._replicas, self._components, strict=True):
            if only in (None, replica):
                component._edit(edit, select_replica(replica, value))
        return self

    def _share_of_sum(self, edit: Edit, value: Any) -> Any:
        """What each component has to hold so that their sum is ``value``."""
        if edit is not Edit.ASSIGN:
            raise InvalidArgumentError(
                f"{edit.value} outside of run on the ON_READ variable {self.name!r} with aggregation SUM: its components add "
                "up, and it is not clear which is to change. Use assign, or do it in a replica."
            )
        if isinstance(value, PerReplica):
            return value
        return (to_tensor(value, self.dtype, edit.value) / self._strategy.num_replicas_in_sync).to(self.dtype)

    def _edit_in_replica(self, edit: Edit, value: Any, replica: int) -> Variable:
        if self._components and (self._is_on_read or self.aggregation is VariableAggregation.NONE):
            return self._components[self._replicas.index(replica)]._edit(edit, value)
        if self.aggregation is VariableAggregation.NONE:
            raise InvalidArgumentError(
                f"{edit.value} in a replica on Variable {self.name!r}, which has aggregation NONE: {len(self._replicas)} "
                "replicas would each assign to the one copy. Create it with aggregation=VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA, or assign outside of run."
            )
        engine = self._strategy._engine
        if not _spans_processes(self._strategy):
            edited: Variable = engine.merge_call(_merge_edit, (self, edit, Given(value)), {})
            return edited
        where = torch_device(engine.device_of_replica(replica))
        self._write(self._cells, edit, exchange_values(engine, self.aggregation, edit, value, self.dtype, where))
        return self._components[0] if self._components else self

    def __repr__(self) -> str:
        values = [cell.copy() for cell in self._cells]
        shown = repr(values[0])
        if self._components:
            shown = "{" + ", ".join(f"{r}: {v!r}" for r, v in zip(self._replicas, values, strict=True)) + "}"
        facts = f"shape={tuple(self._cells[0].shape)}, dtype={self.dtype}, aggregation={self.aggregation.name}"
        return f"<Variable {self.name!r} {facts} on {', '.join(cell.device for cell in self._cells)}: {shown}>"


def _merge_edit(strategy: Any, variable: Any, edit: Any, given: Any) -> Any:
    """All replicas of this process assign to one variable: combine their values, write once."""
    if not isinstance(variable, Variable) or not isinstance(edit, Edit):
        raise ReplicaDivergenceError(
            "the replicas assigned to different variables, or in different ways, in one place of the step: "
            f"{variable!r:.200}, {edit!r:.200}. Every replica has to make the same assignments in the same order."
        )
    values = [one.value for one in given.values] if isinstance(given, PerReplica) else [given.value]
    variable._write(variable._cells, edit, merge_values(variable.aggregation, edit, values, variable.dtype))
    if not variable._components:
        return variable
    return PerReplica(variable._components, replica_ids=variable._replicas)


def _spans_processes(strategy: Strategy) -> bool:
    return len(strategy._engine.local_replicas) < strategy._engine.num_replicas


def _initial_tensor(value: Any, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    if value is None:
        raise InvalidArgumentError(f"Variable {name!r} needs an initial_value: a tensor, numbers, or a function that gives one.")
    if callable(value):
        value = value()
    if isinstance(value, PerReplica):
        raise WrongTypeError(f"Variable {name!r} got a PerReplica initial value; all replicas start from the same one.")
    if isinstance(value, torch.Tensor) and dtype is not None:
        value = value.detach().to(dtype)
    return to_tensor(value, dtype, "Variable")


def _agreed_initial(strategy: Strategy, initial: torch.Tensor) -> torch.Tensor:
    """Rank 0's initial value; in a run, that of the first replica that takes part."""
    if not _spans_processes(strategy):
        return initial
    if context.replica_of(strategy, "Variable") is None:
        return from_first_replica(strategy, initial)
    gathered: torch.Tensor = strategy._engine.all_gather(initial.unsqueeze(0), 0)
    return gathered[0].detach()


def from_first_replica(strategy: Strategy, local: torch.Tensor) -> torch.Tensor:
    """Replica 0's ``local`` on every process: a sum to which the others bring zeros, so that one copy travels."""
    if not _spans_processes(strategy):
        return local
    carrier = local.to(torch.uint8) if local.dtype == torch.bool else local
    replicas = strategy._engine.local_replicas
    share = carrier if replicas[0] == 0 else torch.zeros_like(carrier)
    total: torch.Tensor = strategy._engine.reduce(ReduceOp.SUM, PerReplica((share,), replica_ids=replicas), None)
    return total.to(local)


def _parse_aggregation(aggregation: Any, name: str) -> VariableAggregation:
    if aggregation is None:
        return VariableAggregation.NONE
    if not isinstance(aggregation, VariableAggregation):
        raise VariableKindError(
            f"Variable {name!r} got aggregation={aggregation!r}; use a member of ts.VariableAggregation, such as "
            "ts.VariableAggregation.SUM."
        )
    return aggregation


def _parse_synchronization(synchronization: Any, name: str) -> VariableSynchronization:
    if synchronization is None:
        return VariableSynchronization.AUTO
    if not isinstance(synchronization, VariableSynchronization):
        raise VariableKindError(
            f"Variable {name!r} got synchronization={synchronization!r}; use a member of ts.VariableSynchronization, "
            "such as ts.VariableSynchronization.ON_READ."
        )
    return synchronization
