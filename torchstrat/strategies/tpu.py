"""Replicas and their logical devices on a TPU, by one compiled program for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from torchstrat.core.context import RunOptions
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.core.variable.storage import Cell, Storage, VariableHome, VariablePlacement
from torchstrat.distributed.cluster import ClusterResolver
from torchstrat.distributed.launcher import require_one_process
from torchstrat.sharding.annotations import ShardingRules, check_mesh_shape
from torchstrat.sharding.grid import DeviceGrid
from torchstrat.sharding.tpu.compilation import DEFAULT_MAX_DIFFERENT_GRAPHS, Compilation
from torchstrat.sharding.tpu.device_assignment import DeviceAssignment
from torchstrat.sharding.tpu.engine import SpmdReplicas
from torchstrat.sharding.tpu.spmd import SpmdRuntime
from torchstrat.sharding.tpu.system import TpuSystem, initialize_tpu_system, system_of, the_system
from torchstrat.strategies.extended import StrategyExtended
from torchstrat.strategies.strategy import Strategy


@final
@short_tracebacks
class TPUStrategy(Strategy):
    """Data parallelism over replicas, times model parallelism over each replica's logical devices.

    A step is recorded once for all replicas, compiled, and run on all devices. It sees its replica's batch, as on every
    strategy; the three annotations (`split_to_logical_devices`, `replicate_to_logical_devices`,
    `assign_to_logical_device`) say how tensors are cut over the replica's logical devices. What a step cannot do here,
    because it is recorded before it runs: read a tensor's value, or have results whose shape depends on values.

    Args:
        tpu_cluster_resolver: a `ts.cluster_resolver.TPUClusterResolver`; None: the TPU of this machine.
        device_assignment: a `ts.tpu.DeviceAssignment`; None: every device is a replica of one logical device. Devices
            that it leaves out compute along and count nothing.
        experimental_device_assignment: the same under its older name.
        gradient_reduce_op: "mean" (default; weighted by examples) or "sum".
        sharding_rules: parameters to be cut over logical devices, by name, for models that are not to be edited:
            ``{"*.linear1.weight": (None, "d0")}``. See `torchstrat.sharding.annotations`.
        logical_mesh_shape: how the rules see a replica's logical devices: the sizes of ``d0``, ``d1``, …; None: as one
            axis ``d0``.
        max_different_graphs: how many different shapes of input steps may be compiled for; more are an error.
        independent: this process trains by itself although a launcher has started it as one of several tasks.

    Raises:
        DeviceError: there is no TPU, and no virtual devices were asked for.
        UnsupportedError: torch_xla is missing or does not fit torch, the process used autograd before, or a launcher
            has started several processes, see ``independent``.
        InvalidArgumentError: the assignment's logical devices do not divide the devices; it is of another topology. At
            the first run: a sharding rule fits no parameter.
    """

    _engine: SpmdReplicas

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
        *,
        experimental_device_assignment: DeviceAssignment | None = None,
        gradient_reduce_op: ReduceOp | str = "mean",
        sharding_rules: Mapping[str, Sequence[Any]] | None = None,
        logical_mesh_shape: Sequence[int] | None = None,
        max_different_graphs: int = DEFAULT_MAX_DIFFERENT_GRAPHS,
        independent: bool = False,
        _runtime: SpmdRuntime | None = None,
    ) -> None:
        if _runtime is None:
            require_one_process("TPUStrategy", independent, "ts.MultiWorkerMirroredStrategy()")
        op = ReduceOp.parse(gradient_reduce_op)
        assignment = _one_assignment(device_assignment, experimental_device_assignment)
        if tpu_cluster_resolver is not None and not isinstance(tpu_cluster_resolver, ClusterResolver):
            raise WrongTypeError(
                "TPUStrategy needs a cluster resolver, such as ts.cluster_resolver.TPUClusterResolver(tpu=''), or "
                f"None; got {type(tpu_cluster_resolver).__name__} {tpu_cluster_resolver!r:.80}."
            )
        logical = 1 if assignment is None else assignment.num_cores_per_replica
        rules = _make_rules(sharding_rules, logical_mesh_shape, logical)
        system = _system(tpu_cluster_resolver, _runtime)
        if assignment is None:
            assignment = _every_device_one_replica(system)
        self._assignment = assignment
        self._unchecked_rules = rules
        grid = _grid(system, assignment)
        engine = SpmdReplicas(
            self,
            system.runtime,
            grid,
            assignment.num_replicas,
            op,
            rules.sharding_for if rules is not None else None,
            max_different_graphs,
        )
        self._set_up(
            engine,
            _Home(engine.device_of_replica(0), system.runtime),
            tuple(assignment.tpu_device(replica, 0) for replica in range(assignment.num_replicas)),
            tpu_cluster_resolver,
            annotator=_Annotator(engine, system, assignment),
            num_logical_devices=assignment.num_cores_per_replica,
            extended=TpuExtended,
        )

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def device_assignment(self) -> DeviceAssignment:
        """Which cores are which replica's logical devices."""
        return self._assignment

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """The programs that `run` was compiled to so far, in order, each with the reason.

        A step is compiled for its first run, mostly once more for the second (which finds gradients and optimizer state
        that the first made), and then once or twice for each new shape of its input.
        """
        return tuple(self._engine.log.entries)

    # -- run --------------------------------------------------------------------------------------------------------

    def _run_on_engine(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: dict[str, object], options: RunOptions | None
    ) -> object:
        if self._unchecked_rules is not None:
            self._unchecked_rules.require_all_used()
            self._unchecked_rules = None
        return self._engine.run(fn, args, kwargs, options)


class _Home(VariableHome):
    """One component for all replicas, where the runtime keeps tensors."""

    def __init__(self, device: str, runtime: SpmdRuntime) -> None:
        super().__init__(VariablePlacement.CENTRAL, (device,))
        self._runtime = runtime

    def make_storage(self, initial: torch.Tensor, device: str, name: str) -> Storage:
        return Cell(initial, device, self._runtime.device)


class _Annotator:
    """The annotations of a `TPUStrategy`. The compiled program does not tell what logical devices send each other."""

    traffic = None

    def __init__(self, engine: SpmdReplicas, system: TpuSystem, assignment: DeviceAssignment) -> None:
        self._system, self._assignment = system, assignment
        self.cut, self.entry_of = engine.cut, engine.annotations.entry_of
        self.assign = engine.annotations.assignments.assign

    def grid(self) -> tuple[DeviceGrid, list[str]]:
        """Without the devices that no replica uses."""
        numbers = self._system.devices.numbers_of(self._assignment)
        grid = DeviceGrid(tuple(tuple(int(number) for number in replica) for replica in numbers))
        return grid, [str(one["name"]) for one in self._system.runtime.device_attributes()]


class TpuExtended(StrategyExtended):
    """`StrategyExtended` with the counts that TPU programs ask for."""

    @property
    def num_hosts(self) -> int:
        """Hosts that have the first logical device of a replica."""
        assignment: DeviceAssignment = self._strategy.device_assignment  # type: ignore[attr-defined]
        tasks = {assignment.host_device(replica) for replica in range(assignment.num_replicas)}
        return len(tasks)

    @property
    def num_replicas_per_host(self) -> int:
        """Replicas that one host drives."""
        assignment: DeviceAssignment = self._strategy.device_assignment  # type: ignore[attr-defined]
        most = assignment.topology.num_tpus_per_task // assignment.num_cores_per_replica
        return min(assignment.num_replicas, max(most, 1))

    @property
    def experimental_require_static_shapes(self) -> bool:
        """TensorFlow's flag: whether shapes may not change from step to step. Each new shape is compiled."""
        return True


def _one_assignment(given: DeviceAssignment | None, experimental: DeviceAssignment | None) -> DeviceAssignment | None:
    if given is not None and experimental is not None:
        raise InvalidArgumentError(
            "TPUStrategy was given both device_assignment and experimental_device_assignment; they are one argument."
        )
    assignment = given if given is not None else experimental
    if assignment is None:
        return None
    if not isinstance(assignment, DeviceAssignment):
        raise WrongTypeError(
            "device_assignment must be a ts.tpu.DeviceAssignment, as DeviceAssignment.build makes them; got "
            f"{type(assignment).__name__} {assignment!r:.80}."
        )
    if assignment.num_replicas < 1:
        raise InvalidArgumentError("device_assignment has no replica; build it with num_replicas of at least 1.")
    return assignment


def _make_rules(
    rules: Mapping[str, Sequence[Any]] | None, mesh_shape: Sequence[int] | None, logical_devices: int
) -> ShardingRules | None:
    shape = check_mesh_shape(mesh_shape, logical_devices)
    return None if rules is None else ShardingRules(rules, shape)


def _system(resolver: ClusterResolver | None, runtime: SpmdRuntime | None) -> TpuSystem:
    if runtime is not None:
        return system_of(runtime)
    initialize_tpu_system(resolver)
    return the_system()


def _every_device_one_replica(system: TpuSystem) -> DeviceAssignment:
    coordinates = system.topology.device_coordinates.reshape(-1, 1, system.topology.mesh_rank)
    return DeviceAssignment(system.topology, coordinates)


def _grid(system: TpuSystem, assignment: DeviceAssignment) -> DeviceGrid:
    """The assignment's replicas first; then the other devices, as many at a time: a program runs on all of them."""
    logical = assignment.num_cores_per_replica
    total = system.runtime.num_devices
    used = np.asarray(system.devices.numbers_of(assignment))
    if total % logical:
        raise InvalidArgumentError(
            f"a replica of {logical} logical devices does not divide the {total} devices of {system.runtime.name}, and "
            "a program runs on all of them; choose a computation_shape whose product divides that number."
        )
    rest = np.setdiff1d(np.arange(total), used.reshape(-1)).reshape(-1, logical)
    return DeviceGrid(tuple(tuple(int(device) for device in row) for row in np.concatenate([used, rest])))
