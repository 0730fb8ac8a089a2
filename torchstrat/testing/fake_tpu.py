"""A `TPUStrategy` without TPUs and without torch_xla, for annotation maths and programs that use a TPU's methods.

Its `SpmdRuntime` of plain CPU tensors checks and writes down what the strategy says to a compiler runtime. Operations
run at once, on whole tensors; nothing is cut, so a step computes what it would with all devices in one. Annotations
that a real runtime would ignore in silence, or take for something else, are errors here.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torchstrat.core.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.core.values import BatchInfo, PerReplica
from torchstrat.distributed.tpu_topology import Topology
from torchstrat.sharding.grid import REPLICA_AXIS, DeviceGrid, Sharding
from torchstrat.sharding.tpu.device_assignment import DeviceAssignment
from torchstrat.strategies.strategy import Strategy
from torchstrat.strategies.tpu import TPUStrategy


@final
class FakeSpmdRuntime:
    """`num_devices` devices that are not there.

    Args:
        num_devices: how many devices a program runs on.
        mesh_shape: ``[x, y, z, core]`` or ``[x, y, core]``: the devices describe themselves as TPU cores on such a
            mesh, numbered core first, then along x, y and z. None: they have no coordinates, like virtual devices.
        num_hosts: how many hosts drive them, as many devices each.

    Attributes:
        program: what the next `execute` runs, for `compiles`: one that was not executed before counts as compiled.
            None, as at the start: nothing is ever compiled. Tests set it.
        executions, waits: how often `execute` was called, and how often with ``wait=True``.
        placed: how often `place` was called.
        traced: how many steps were recorded, see `tracing`.

    Raises `InvalidArgumentError` where these numbers do not fit each other.
    """

    name = "a fake of the CPU"

    def __init__(self, num_devices: int, mesh_shape: Sequence[int] | None = None, num_hosts: int = 1) -> None:
        self._num_devices, self._num_hosts = operator.index(num_devices), operator.index(num_hosts)
        if self._num_devices < 1 or self._num_hosts < 1 or self._num_devices % self._num_hosts:
            raise InvalidArgumentError(
                f"num_devices={num_devices} and num_hosts={num_hosts}: there must be at least one of each, and as many "
                "devices on each host."
            )
        self._mesh_shape = None if mesh_shape is None else _mesh(mesh_shape, self._num_devices)
        self._annotations: Any = WeakTensorKeyDictionary()
        self._programs: set[Hashable] = set()
        self._tracing = False
        self.program: Hashable | None = None
        self.executions = self.waits = self.placed = self.traced = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_devices(self) -> int:
        return self._num_devices

    @property
    def num_hosts(self) -> int:
        return self._num_hosts

    def device_attributes(self) -> list[Mapping[str, object]]:
        """As torch_xla has them: ``{"name": "TPU:1", "coords": [0, 0, 0], "core_on_chip": 1, "process_index": 0}``."""
        if self._mesh_shape is None:
            return [{"name": f"CPU:{number}"} for number in range(self._num_devices)]
        x, y, _, cores = self._mesh_shape
        described: list[Mapping[str, object]] = []
        for number in range(self._num_devices):
            chip, core = divmod(number, cores)
            coords = [chip % x, chip // x % y, chip // (x * y)]
            host = number * self._num_hosts // self._num_devices
            described.append({"name": f"TPU:{number}", "coords": coords, "core_on_chip": core, "process_index": host})
        return described

    def annotate(self, tensor: torch.Tensor, sharding: Sharding, grid: DeviceGrid) -> None:
        """Write down that ``tensor`` is cut like that, for as long as it lives; see `annotation`.

        Raises `InvalidArgumentError` for what a real runtime does not do: a tensor that does not divide, a grid without
        all devices, axes that are not the grid's, an axis used twice.
        """
        if not isinstance(tensor, torch.Tensor):
            raise WrongTypeError(f"only a tensor can be cut over devices; got {type(tensor).__name__}.")
        self._check_grid(grid)
        _check_sharding(tuple(tensor.shape), sharding, grid)
        self._annotations[tensor] = (sharding, grid)

    def annotation(self, tensor: torch.Tensor) -> Sharding | None:
        """How this very tensor object was last annotated; None if it was not. For tests."""
        found = self._annotations.get(tensor)
        return None if found is None else found[0]

    def sharding_of(self, tensor: torch.Tensor) -> str:
        """``{devices=[4,1]0,1,2,3}``: into how many parts each dimension is cut, and who holds them, row-major."""
        found = self._annotations.get(tensor)
        if found is None:
            return ""
        sharding, grid = found
        if sharding.is_replicated:
            return "{replicated}"
        parts = sharding.parts(grid.num_replicas)
        # One element for each part, so that the start of a slice is the number of the part.
        tiles = sharding.tiles(parts, grid)
        order = sorted(tiles, key=lambda device: ([part.start for part in tiles[device]], device))
        copies = len(order) // math.prod(parts)
        shape = ",".join(map(str, (*parts, copies) if copies > 1 else parts))
        last = " last_tile_dim_replicate" if copies > 1 else ""
        return f"{{devices=[{shape}]{','.join(map(str, order))}{last}}}"

    def place(self, parts: Sequence[torch.Tensor], sharding: Sharding, grid: DeviceGrid) -> torch.Tensor:
        """The parts stacked, and annotated. Raises as `annotate`, and if there is not one equal part per replica."""
        if len(parts) != grid.num_replicas:
            raise InvalidArgumentError(f"place was given {len(parts)} parts for {grid.num_replicas} replicas.")
        kinds = {(tuple(part.shape), part.dtype, part.device.type) for part in parts}
        if len(kinds) != 1 or kinds.pop()[2] != "cpu":
            described = ", ".join(f"{part.dtype} {tuple(part.shape)} on {part.device}" for part in parts)
            raise InvalidArgumentError(f"place needs equal parts on the host; got {described}.")
        if not sharding.spec or sharding.spec[0] != (REPLICA_AXIS,):
            raise InvalidArgumentError(
                f"place makes a first dimension of one entry per replica, and {sharding.spec} does not cut it over "
                "the replicas."
            )
        stacked = torch.stack(tuple(parts))
        self.annotate(stacked, sharding, grid)
        self.placed += 1
        return stacked

    def replicate(self, tensor: torch.Tensor, grid: DeviceGrid) -> torch.Tensor:
        """A copy. Raises if ``tensor`` is not on the host."""
        if tensor.device.type != "cpu":
            raise InvalidArgumentError(f"replicate needs a tensor on the host; got one on {tensor.device}.")
        self.placed += 1
        return tensor.clone()

    def execute(self, *, wait: bool = False) -> None:
        """Count; everything has run already. See `program`."""
        self.executions += 1
        self.waits += wait
        if self.program is not None:
            self._programs.add(self.program)

    def has_recorded(self) -> bool:
        """Always: what is called has been computed, and nobody counts it."""
        return True

    def compiles(self) -> int:
        """How many different programs were executed, as `program` told them apart."""
        return len(self._programs)

    def seed(self, value: int) -> None:
        """Operations draw from PyTorch's generator of the CPU, so this seeds it for everybody."""
        torch.default_generator.manual_seed(value)

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def restore_random_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Raises `ContextError` if a step is being recorded already."""
        if self._tracing:
            raise ContextError("a step was to be recorded while another one is; record one after the other.")
        self._tracing = True
        try:
            yield
            self.traced += 1
        finally:
            self._tracing = False

    def _check_grid(self, grid: DeviceGrid) -> None:
        held = sorted(device for replica in grid.devices for device in replica)
        if held != list(range(self._num_devices)):
            raise InvalidArgumentError(
                f"the grid holds the devices {held}; a program runs on all of 0 to {self._num_devices - 1}."
            )


def _mesh(mesh_shape: Sequence[int], num_devices: int) -> tuple[int, ...]:
    sizes = tuple(operator.index(size) for size in mesh_shape)
    mesh = (*sizes[:2], 1, *sizes[2:]) if len(sizes) == 3 else sizes
    if len(mesh) != 4 or min(mesh) < 1 or math.prod(mesh) != num_devices:
        raise InvalidArgumentError(
            f"mesh_shape={list(sizes)} has to be [x, y, z, core] with {num_devices} places, as many as devices."
        )
    return mesh


def _check_sharding(shape: tuple[int, ...], sharding: Sharding, grid: DeviceGrid) -> None:
    if math.prod(sharding.axis_sizes) != grid.num_logical_devices:
        raise InvalidArgumentError(
            f"axes of sizes {sharding.axis_sizes} are not the {grid.num_logical_devices} logical devices of the grid."
        )
    if sharding.rank != len(shape):
        raise InvalidArgumentError(
            f"a tensor of shape {shape} was to be cut by {sharding.spec}, which has {sharding.rank} entries."
        )
    parts = sharding.parts(grid.num_replicas)
    if any(size % count for size, count in zip(shape, parts, strict=True)):
        raise InvalidArgumentError(
            f"a tensor of shape {shape} does not divide into {parts} equal parts; a compiler would keep it whole and "
            "not say so."
        )


def fake_tpu_strategy(replicas: int = 1, logical_devices: int = 1, **options: Any) -> TPUStrategy:
    """A `TPUStrategy` of that many replicas with that many logical devices each, which computes on the CPU.

    Annotations are checked as on a TPU, steps see their replica's batch, and gradients are those of all replicas; but
    tensors stay whole, and nothing is compiled.

    Args:
        replicas: how many run the step in sync.
        logical_devices: how many each of them has.
        options: further arguments of `TPUStrategy`, such as ``sharding_rules``.

    Raises `InvalidArgumentError` if a number is below 1.
    """
    replicas, logical_devices = operator.index(replicas), operator.index(logical_devices)
    if replicas < 1 or logical_devices < 1:
        raise InvalidArgumentError(
            f"replicas={replicas} and logical_devices={logical_devices}: each has to be at least 1."
        )
    # A row of the mesh is a replica. Places are given one by one, since the usual order in a mesh may be a ring.
    mesh_shape = [logical_devices, replicas, 1, 1]
    places = [[[x, y, 0, 0] for x in range(logical_devices)] for y in range(replicas)]
    runtime = FakeSpmdRuntime(replicas * logical_devices, mesh_shape)
    assignment = DeviceAssignment(Topology.virtual(mesh_shape), places)
    strategy = TPUStrategy(device_assignment=assignment, _runtime=runtime, **options)
    _runtimes[strategy] = runtime
    return strategy


_runtimes: weakref.WeakKeyDictionary[Strategy, FakeSpmdRuntime] = weakref.WeakKeyDictionary()
"""Of the strategies that were made here."""


def runtime_of(strategy: Strategy) -> FakeSpmdRuntime:
    """What the strategy of `fake_tpu_strategy` says its annotations to, and executes its programs on."""
    return _runtimes[strategy]


def batch_of_replicas(parts: Sequence[torch.Tensor], *, run_empty: bool = False) -> PerReplica[torch.Tensor]:
    """A batch as an input pipeline hands it out, which knows how many rows each replica has.

    ``run_empty``: as of `InputOptions(empty_replicas="run")`.
    """
    return PerReplica(tuple(parts), batch_info=BatchInfo(tuple(map(len, parts)), run_empty=run_empty))
