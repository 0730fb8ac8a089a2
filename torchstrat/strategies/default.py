"""The strategy outside of any scope: one replica, no scope needed, nothing distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast, final

from torchstrat.core import context
from torchstrat.core.errors import ContextError, UnsupportedError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.values import ValueContext
from torchstrat.core.variable.storage import VariableHome, VariablePlacement
from torchstrat.replicas.in_process.engine import InProcessReplicas
from torchstrat.strategies.extended import StrategyExtended
from torchstrat.strategies.strategy import Strategy

_NO_DEVICES = "the default strategy has no devices of its own; create a strategy, such as ts.MirroredStrategy()."
_NO_PROCESSES = "the default strategy has no processes to share a program between; create a strategy."


class _DefaultExtended(StrategyExtended):
    @property
    def worker_devices(self) -> NoReturn:
        raise ContextError(_NO_DEVICES)

    @property
    def parameter_devices(self) -> NoReturn:
        raise ContextError(_NO_DEVICES)

    @property
    def experimental_between_graph(self) -> NoReturn:
        raise UnsupportedError(_NO_PROCESSES)

    @property
    def experimental_should_init(self) -> NoReturn:
        raise UnsupportedError(_NO_PROCESSES)

    def non_slot_devices(self, var_list: Sequence[object]) -> Any:
        return self._smallest_name(var_list)

    def _require_scope(self, call: str) -> None:
        """The default strategy is in force wherever no other is."""
        context.require_not_mixed(self._strategy, call)


@final
class DefaultStrategy(Strategy):
    """What `get_strategy` returns outside of any scope, so that code written against a strategy runs without one."""

    def __init__(self) -> None:
        devices = ("cpu:0",)
        engine = InProcessReplicas(self, devices, gradient_op=ReduceOp.MEAN)
        self._set_up(engine, VariableHome(VariablePlacement.ONE, devices), devices, extended=_DefaultExtended)

    def _enter_scope(self) -> None:
        """It is in force already: a step that asks for the context finds the same one within the block as without."""
        if context.has_strategy():
            raise ContextError(
                f"the default strategy's scope cannot be entered inside the scope of {context.get_strategy()!r}."
            )

    def _leave_scope(self, *, failed: bool) -> None: ...

    def distribute_dataset(self, dataset: object, options: object = None) -> Any:
        """Nothing to distribute over: the dataset itself."""
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        from torchstrat.data.options import InputContext

        return dataset_fn(InputContext())

    def distribute_values_from_function(self, value_fn: Any) -> Any:
        return value_fn(ValueContext())

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ContextError("the default strategy is unique and cannot be copied.")

    def __repr__(self) -> str:
        return "<DefaultStrategy>"

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield "replicas", f"{self.num_replicas_in_sync}: no strategy is set, so nothing is distributed"


context.set_default(DefaultStrategy)

# Functions and classes of core as programs know them.
get_strategy = cast("Callable[[], Strategy]", context.get_strategy)
if TYPE_CHECKING:

    class ReplicaContext(context.ReplicaContext):
        strategy: Strategy

else:
    ReplicaContext = context.ReplicaContext
get_replica_context = cast("Callable[[], ReplicaContext | None]", context.get_replica_context)
