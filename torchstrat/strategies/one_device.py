"""Everything on one device: the strategy to write and debug a program with."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

from torchstrat.core.devices import resolve_compute_devices
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.core.variable.storage import VariableHome, VariablePlacement
from torchstrat.distributed.launcher import require_one_process
from torchstrat.replicas.in_process.engine import InProcessReplicas
from torchstrat.strategies.strategy import DEFAULT_TIMEOUT, Strategy


@final
@short_tracebacks
class OneDeviceStrategy(Strategy):
    """One replica, variables on its device. The step runs on the calling thread, on the user's own objects.

    Args:
        device: where to compute, such as ``"cpu:0"`` or ``"cuda:0"``; None: the first GPU, or the CPU without one.
        gradient_reduce_op: accepted on every strategy; with one replica the mean is the sum.
        timeout: accepted on every strategy; nothing here waits for anybody.
        independent: where a launcher started several processes, each is meant to be a job of its own.
            ``TORCHSTRAT_INDEPENDENT=1`` in the environment says the same for every strategy.

    Raises `DeviceError` for a device that cannot be parsed or is absent, and `UnsupportedError` where a launcher
    (torchrun, srun, mpirun, ``TF_CONFIG``) started several processes that are not ``independent``.
    """

    def __init__(
        self,
        device: Any = None,
        *,
        gradient_reduce_op: ReduceOp | str = "mean",
        timeout: timedelta = DEFAULT_TIMEOUT,
        independent: bool = False,
    ) -> None:
        op = ReduceOp.parse(gradient_reduce_op)
        spanning = "MultiWorkerMirroredStrategy, MirroredStrategy or CentralStorageStrategy"
        require_one_process("OneDeviceStrategy", independent, spanning)
        devices = resolve_compute_devices(None if device is None else [device], argument="device")[:1]
        engine = InProcessReplicas(self, devices, gradient_op=op)
        self._set_up(engine, VariableHome(VariablePlacement.ONE, devices), devices)
