"""A `TPUStrategy` without TPUs and without torch_xla, for annotation maths and programs that use a TPU's methods."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.core.values import BatchInfo, PerReplica
from torchstrat.sharding.tpu.device_assignment import DeviceAssignment
from torchstrat.sharding.tpu.topology import Topology
from torchstrat.strategies.tpu import TPUStrategy
from torchstrat.testing.fake_spmd import FakeSpmdRuntime


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
    return TPUStrategy(
        device_assignment=DeviceAssignment(Topology.virtual(mesh_shape), places),
        _runtime=FakeSpmdRuntime(replicas * logical_devices, mesh_shape),
        **options,
    )


def runtime_of(strategy: TPUStrategy) -> FakeSpmdRuntime:
    """What the strategy of `fake_tpu_strategy` says its annotations to, and executes its programs on."""
    runtime = strategy._system.runtime
    assert isinstance(runtime, FakeSpmdRuntime)
    return runtime


def batch_of_replicas(parts: Sequence[torch.Tensor], *, run_empty: bool = False) -> PerReplica[torch.Tensor]:
    """A batch as an input pipeline hands it out, which knows how many rows each replica has.

    ``run_empty``: as of `InputOptions(empty_replicas="run")`.
    """
    return PerReplica(tuple(parts), batch_info=BatchInfo(tuple(map(len, parts)), run_empty=run_empty))
