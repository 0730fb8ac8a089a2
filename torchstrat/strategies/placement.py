"""From an update policy and a plan of processes to an engine: the one way in, for every strategy with replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchstrat.core import terminal
from torchstrat.core.devices import (
    local_devices,
    require_present,
    resolve_compute_devices,
    resolve_parameter_device,
    torch_device,
)
from torchstrat.core.engine import ReplicaEngine
from torchstrat.core.errors import DeviceError, InvalidArgumentError, WrongTypeError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.variable.storage import VariableHome, VariablePlacement
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.replicas.in_process.engine import InProcessReplicas
from torchstrat.replicas.update_policies import LocalUpdate, PrimaryUpdate, ShardedUpdate, UpdatePolicy
from torchstrat.sharding.annotations import ShardingRules, check_mesh_shape
from torchstrat.strategies.strategy import Strategy

COLLECTIVES = ("auto", "shared_memory", "process_group")
"""How processes may talk: what is there, memory that they share on one host, or torch.distributed's process group."""


def check_collectives(collectives: str) -> str:
    if collectives not in COLLECTIVES:
        raise InvalidArgumentError(
            f"collectives={collectives!r} is not known; choose one of {', '.join(map(repr, COLLECTIVES))}."
        )
    return collectives


@dataclass(frozen=True)
class LogicalLayout:
    """How many processes compute one replica together, and how its parameters are cut over them.

    ``mesh_shape``: how ``rules`` see them.
    """

    devices: int
    mesh_shape: tuple[int, ...]
    rules: ShardingRules | None

    @staticmethod
    def checked(
        devices: int, rules: Mapping[str, Sequence[Any]] | None, mesh_shape: Sequence[int] | None
    ) -> LogicalLayout:
        """From a constructor's arguments. Raises `WrongTypeError` and `InvalidArgumentError`."""
        if isinstance(devices, bool) or not isinstance(devices, int):
            raise WrongTypeError(f"logical_devices_per_replica must be an integer; got {devices!r:.80}.")
        if devices < 1:
            raise InvalidArgumentError(f"logical_devices_per_replica={devices}; the least is 1.")
        shape = check_mesh_shape(mesh_shape, devices)
        return LogicalLayout(devices, shape, None if rules is None else ShardingRules(rules, shape))

    def require_processes(self, plan: ProcessPlan | None) -> None:
        """Raise `InvalidArgumentError` unless there are as many processes as logical devices, for whole replicas."""
        if self.devices == 1:
            return
        processes = 1 if plan is None else plan.size
        if processes % self.devices:
            started = "this process is alone" if processes == 1 else f"there are {processes} processes"
            raise InvalidArgumentError(
                f"logical_devices_per_replica={self.devices} needs a process for each logical device, and {started}; "
                f"start replicas x {self.devices} of them, such as torchrun --nproc-per-node {self.devices} …, or "
                "leave the argument out."
            )


def own_device(devices: Sequence[Any] | None, plan: ProcessPlan) -> str:
    """The device of this process's replica: the one given, else the GPU of its local rank, else the CPU."""
    if devices is None:
        gpus = local_devices("cuda")
        if not gpus:
            return "cpu:0"
        if plan.local_rank >= len(gpus):
            raise DeviceError(
                f"{plan.name} has local rank {plan.local_rank} and this machine has {len(gpus)} GPUs; start at most "
                f"{len(gpus)} processes per machine, or pass the device to use."
            )
        return gpus[plan.local_rank]
    if isinstance(devices, str) or len(devices) != 1:
        raise DeviceError(
            f"under torchrun every process has one replica, so at most one device can be given; got {devices!r}. "
            "Leave the argument out to use the GPU of the local rank, or the CPU."
        )
    return require_present(devices[0])


def place_replicas(
    strategy: Strategy,
    policy: UpdatePolicy,
    plan: ProcessPlan | None,
    devices: Sequence[Any] | None,
    op: ReduceOp,
    timeout: timedelta,
    collectives: str,
    *,
    logical: LogicalLayout | None = None,
    resolver: object = None,
    argument: str = "devices",
) -> None:
    """Give ``strategy`` its engine, and what says where all is: one replica in each process of the ``plan``, or, in a
    process of its own, on each of ``devices``, which the user knows as that ``argument``."""
    home = policy.device if isinstance(policy, PrimaryUpdate) else None
    plan = None if plan is None or plan.size == 1 else plan
    found = resolve_compute_devices(devices, argument=argument) if plan is None else (own_device(devices, plan),)
    places = (resolve_parameter_device(home, found),) if isinstance(policy, PrimaryUpdate) else found
    engine: ReplicaEngine
    annotator, num_logical_devices = None, 1
    if plan is None:
        local = policy if isinstance(policy, LocalUpdate) else None
        central = torch_device(places[0]) if isinstance(policy, PrimaryUpdate) else None
        engine = InProcessReplicas(strategy, found, central, op, local)
    elif logical is not None and logical.devices > 1:
        from torchstrat.sharding.dtensor.engine import replicas_of_processes

        engine = annotator = replicas_of_processes(
            strategy,
            plan,
            found[0],
            op,
            timeout,
            collectives=collectives,
            mesh_shape=logical.mesh_shape,
            rules=logical.rules,
        )
        num_logical_devices = logical.devices
    else:
        through_host = isinstance(policy, ShardedUpdate) and (home is None or places[0].startswith("cpu"))
        engine = _one_replica(strategy, policy, plan, found[0], op, timeout, collectives, through_host)
    kind = VariablePlacement.CENTRAL if isinstance(policy, PrimaryUpdate) else VariablePlacement.MIRRORED
    variables = VariableHome(kind, places)
    strategy._set_up(engine, variables, found, resolver, annotator=annotator, num_logical_devices=num_logical_devices)  # noqa: SLF001


def _one_replica(
    strategy: Strategy,
    policy: UpdatePolicy,
    plan: ProcessPlan,
    device: str,
    op: ReduceOp,
    timeout: timedelta,
    collectives: str,
    through_host: bool,
) -> ReplicaEngine:
    """``through_host``: on a GPU, gradients meet in host memory, and central variables are stepped there, if the
    processes can share it."""
    # Imported here: torch.distributed is only needed, and only loaded, where there are several processes.
    from torchstrat.core.kept_pages import StepPages
    from torchstrat.distributed.collectives.shared_memory.common_memory import SharesMemory
    from torchstrat.distributed.collectives.shared_memory.device_copies import device_copies
    from torchstrat.distributed.collectives.shm import choose_communicator
    from torchstrat.replicas.per_process.engine import PerProcessReplica
    from torchstrat.replicas.per_process.local_engine import LocalProcessReplica

    is_central, is_sharded = isinstance(policy, PrimaryUpdate), isinstance(policy, ShardedUpdate)
    if is_central and not is_sharded:
        collectives = "process_group"
    pages = StepPages(device)  # before the communicator's threads
    copies = device_copies(device) if through_host else None
    with terminal.shown(f"waiting for all of {plan.size} processes", here=plan.rank == 0):
        communicator, why = choose_communicator(plan, device, timeout, collectives, copies)
    if isinstance(policy, LocalUpdate):
        return LocalProcessReplica(strategy, communicator, device, policy, why)
    return PerProcessReplica(
        strategy,
        communicator,
        device,
        op,
        central=is_central,
        communication=why,
        keeps_gradients=isinstance(policy, ShardedUpdate) and policy.keeps_gradients,
        copies=copies if isinstance(communicator, SharesMemory) else None,
        pages=pages,
    )
