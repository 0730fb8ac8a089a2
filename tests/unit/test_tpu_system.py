"""What of the TPU system needs no runtime: virtual meshes, and names that TensorFlow programs call."""

from __future__ import annotations

import math

import pytest

import torchstrat as ts
from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.testing.fake_spmd import FakeSpmdRuntime
from torchstrat.tpu.system import default_mesh_shape, system_of


def test_connecting_is_not_needed() -> None:
    ts.tpu.experimental_connect_to_cluster(ts.cluster_resolver.TPUClusterResolver(tpu="local"))
    ts.tpu.experimental.experimental_connect_to_cluster(ts.cluster_resolver.ClusterSpec({"worker": ["a:1"]}))
    with pytest.raises(WrongTypeError, match="needs a cluster resolver or a ClusterSpec; got str"):
        ts.tpu.experimental_connect_to_cluster("grpc://10.0.0.1:8470")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "shape"),
    [
        (1, (1, 1, 1, 1)),
        (2, (1, 1, 1, 2)),
        (3, (3, 1, 1, 1)),
        (8, (2, 2, 1, 2)),
        (12, (3, 2, 1, 2)),
        (64, (8, 4, 1, 2)),
    ],
)
def test_meshes_of_virtual_devices(devices: int, shape: tuple[int, ...]) -> None:
    assert default_mesh_shape(devices) == shape
    assert math.prod(shape) == devices
    system = system_of(FakeSpmdRuntime(devices))
    assert tuple(system.topology.mesh_shape) == shape
    assert list(system.devices.numbers) == list(range(devices))


def test_a_mesh_of_ones_own() -> None:
    assert tuple(system_of(FakeSpmdRuntime(8), (4, 2, 1, 1)).topology.mesh_shape) == (4, 2, 1, 1)
    with pytest.raises(InvalidArgumentError, match="has 6 places for 8 devices"):
        system_of(FakeSpmdRuntime(8), (3, 2, 1, 1))
    with pytest.raises(InvalidArgumentError, match="have places of their own"):
        system_of(FakeSpmdRuntime(8, [2, 2, 1, 2]), (4, 2, 1, 1))
