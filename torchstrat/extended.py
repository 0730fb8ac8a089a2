"""`strategy.extended`: what library code needs beyond `Strategy` itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchstrat.reduction import ReduceOp

if TYPE_CHECKING:
    from torchstrat.strategy import Strategy


class StrategyExtended:
    """The lower-level half of a strategy."""

    def __init__(
        self,
        strategy: Strategy,
        worker_devices: tuple[str, ...],
        parameter_devices: tuple[str, ...],
        cluster_resolver: Any = None,
    ) -> None:
        self._strategy = strategy
        self._worker_devices = worker_devices
        self._parameter_devices = parameter_devices
        self._cluster_resolver = cluster_resolver

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that the replicas of this process compute on, in PyTorch's spelling."""
        return self._worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables."""
        return self._parameter_devices

    @property
    def gradient_reduce_op(self) -> ReduceOp:
        """How gradients of the replicas are combined: `ReduceOp.MEAN` (the default) or `ReduceOp.SUM`."""
        return self._strategy._engine.gradient_op
