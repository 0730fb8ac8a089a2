"""How a `Variable` comes to be: its kind and its first value, checked, and the same on every process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchstrat.core import context
from torchstrat.core.errors import InvalidArgumentError, VariableKindError, WrongTypeError
from torchstrat.core.reduction import ReduceOp, VariableAggregation, VariableSynchronization
from torchstrat.core.values import PerReplica
from torchstrat.core.variable.aggregation import require_mean_of_floats
from torchstrat.core.variable.storage import VariablePlacement, to_tensor

if TYPE_CHECKING:
    from torchstrat.strategies.strategy import Strategy


def placement_of(strategy: Strategy) -> VariablePlacement:
    """Central storage with a single replica keeps ordinary variables."""
    placement = strategy._variable_placement
    if placement is VariablePlacement.CENTRAL and strategy.num_replicas_in_sync == 1:
        return VariablePlacement.ONE
    return placement


def parse_aggregation(aggregation: Any, name: str) -> VariableAggregation:
    if aggregation is None:
        return VariableAggregation.NONE
    if not isinstance(aggregation, VariableAggregation):
        raise VariableKindError(
            f"Variable {name!r} got aggregation={aggregation!r}; use a member of ts.VariableAggregation, such as "
            "ts.VariableAggregation.SUM."
        )
    return aggregation


def parse_synchronization(synchronization: Any, name: str) -> VariableSynchronization:
    if synchronization is None:
        return VariableSynchronization.AUTO
    if not isinstance(synchronization, VariableSynchronization):
        raise VariableKindError(
            f"Variable {name!r} got synchronization={synchronization!r}; use a member of ts.VariableSynchronization, "
            "such as ts.VariableSynchronization.ON_READ."
        )
    return synchronization


def check_mirrored(
    name: str, aggregation: VariableAggregation, synchronization: VariableSynchronization, dtype: torch.dtype
) -> None:
    """What mirrored variables cannot be, whatever the number of replicas."""
    if synchronization is VariableSynchronization.NONE:
        raise InvalidArgumentError(
            f"Variable {name!r}: synchronization NONE has no meaning for mirrored variables; use AUTO, ON_WRITE or "
            "ON_READ."
        )
    if aggregation is VariableAggregation.MEAN:
        require_mean_of_floats(dtype, f"mirrored Variable {name!r}")


def initial_tensor(value: Any, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    """What the user gave as the first value, as a detached tensor of ``dtype`` (None: its own)."""
    if value is None:
        raise InvalidArgumentError(
            f"Variable {name!r} needs an initial_value: a tensor, numbers, or a function that gives one."
        )
    if callable(value):
        value = value()
    if isinstance(value, PerReplica):
        raise WrongTypeError(f"Variable {name!r} got a PerReplica initial value; all replicas start from the same one.")
    if isinstance(value, torch.Tensor) and dtype is not None:
        value = value.detach().to(dtype)
    return to_tensor(value, dtype, "Variable")


def spans_processes(strategy: Strategy) -> bool:
    return len(strategy._engine.local_replicas) < strategy._engine.num_replicas


def agreed_initial(strategy: Strategy, initial: torch.Tensor) -> torch.Tensor:
    """Rank 0's first value; in a run, that of the first replica that takes part. Every process calls it."""
    if not spans_processes(strategy):
        return initial
    if context.replica_of(strategy, "Variable") is None:
        return from_first_replica(strategy, initial)
    gathered: torch.Tensor = strategy._engine.all_gather(initial.unsqueeze(0), 0)
    return gathered[0].detach()


def from_first_replica(strategy: Strategy, local: torch.Tensor) -> torch.Tensor:
    """Replica 0's ``local`` on every process, outside of a replica's code: a sum to which the others bring zeros, so
    that each process handles one copy, not one per replica. In one process ``local`` is replica 0's already."""
    if not spans_processes(strategy):
        return local
    carrier = local.to(torch.uint8) if local.dtype == torch.bool else local
    replicas = strategy._engine.local_replicas
    share = carrier if replicas[0] == 0 else torch.zeros_like(carrier)
    total: torch.Tensor = strategy._engine.reduce(ReduceOp.SUM, PerReplica((share,), replica_ids=replicas), None)
    return total.to(local)
