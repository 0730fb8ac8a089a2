"""Where TPU cores stand, how they become replicas, and which hosts have them."""

from __future__ import annotations

import base64
import itertools
import math
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import torchstrat as ts
from torchstrat.cluster_resolver import TPUClusterResolver
from torchstrat.distributed.tpu_topology import MAX_MESH_POINTS, TopologyFields, decode, encode
from torchstrat.errors import ClusterConfigError, ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.sharding.tpu.device_assignment import Tiling, ring_of_chips
from torchstrat.sharding.tpu.system import RuntimeDevices, default_mesh_shape, system_of
from torchstrat.testing.fake_tpu import FakeSpmdRuntime
from torchstrat.tpu import SINGLE_CORE_ASSIGNMENT, DeviceAssignment, DeviceOrderMode, Topology

examples = settings(max_examples=40, deadline=None, derandomize=True)

OF_A_V2_8 = base64.b64decode("CgQCAgECEAEYCCIgAAAAAAAAAAEBAAAAAQAAAQABAAAAAQABAQEAAAEBAAE=")
"""What TensorFlow reported of a TPU with 2 × 2 chips of two cores."""
OF_AN_OLD_V2_8 = base64.b64decode("CgMCAgIQARgIIhgAAAAAAAEAAQAAAQEBAAABAAEBAQABAQE=")
"""The same from the time when there was no z axis."""


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Small meshes; their devices in any order, some of them missing."""
    shape = draw(st.tuples(*[st.integers(1, 3)] * 4))
    points = draw(st.permutations([list(point) for point in np.ndindex(*shape)]))
    present = draw(st.integers(1, len(points)))
    per_task = draw(st.sampled_from([size for size in range(1, present + 1) if present % size == 0]))
    return Topology(mesh_shape=shape, device_coordinates=np.array(points[:present]).reshape(-1, per_task, 4))


@examples
@given(topologies())
def test_a_core_is_found_where_it_stands(topology: Topology) -> None:
    for task, devices in enumerate(topology.device_coordinates.tolist()):
        for ordinal, place in enumerate(devices):
            assert topology.task_ordinal_at_coordinates(place) == task
            assert topology.tpu_device_ordinal_at_coordinates(place) == ordinal
            assert topology.tpu_device_name_at_coordinates(place) == f"/task:{task}/device:TPU:{ordinal}"
            assert topology.cpu_device_name_at_coordinates(place, job="a") == f"/job:a/task:{task}/device:CPU:0"
    everywhere = topology.device_indices_at(topology.device_coordinates)
    assert everywhere.reshape(-1).tolist() == list(range(topology.num_tasks * topology.num_tpus_per_task))
    places = [*topology.device_coordinates.reshape(-1, 4).tolist(), *topology.missing_devices.tolist()]
    assert sorted(places) == [list(point) for point in np.ndindex(*topology.mesh_shape)]
    for hole in topology.missing_devices:
        with pytest.raises(InvalidArgumentError, match="no device stands at"):
            topology.task_ordinal_at_coordinates(hole)


@examples
@given(topologies(), topologies())
def test_topologies_are_equal_where_mesh_and_coordinates_are(one: Topology, other: Topology) -> None:
    for copy in (Topology(serialized=one.serialized()), pickle.loads(pickle.dumps(one))):
        assert copy == one
        assert hash(copy) == hash(one)
        assert copy.missing_devices.tolist() == one.missing_devices.tolist()
    same = one.mesh_shape.tolist() == other.mesh_shape.tolist() and (
        one.device_coordinates.tolist() == other.device_coordinates.tolist()
    )
    assert (one == other) is same
    assert (one.serialized() == other.serialized()) is same
    assert one != "topology"


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_of_real_tpus_are_read() -> None:
    assert Topology(serialized=OF_A_V2_8) == Topology.virtual([2, 2, 1, 2])
    assert Topology(serialized=OF_A_V2_8).serialized() == OF_A_V2_8
    old = Topology(serialized=OF_AN_OLD_V2_8)
    assert old.mesh_shape.tolist() == [2, 2, 1, 2]
    assert old.device_coordinates[0, 2:4].tolist() == [[0, 1, 0, 0], [0, 1, 0, 1]]


def test_fields_that_are_unknown_or_not_packed_are_understood() -> None:
    length, double, single, number = b"\x2a\x02\xff\xff", b"\x31" + b"\xff" * 8, b"\x3d" + b"\xff" * 4, b"\x40\xac\x02"
    unpacked = b"".join(b"\x08" + bytes([size]) for size in (2, 2, 1, 2))
    rest = OF_A_V2_8[6:]
    assert Topology(serialized=length + unpacked + double + rest + single + number).serialized() == OF_A_V2_8
    assert decode(b"\x10\x03\x10\x01").num_tasks == 1  # the last value counts


def test_numbers_above_127_take_several_bytes() -> None:
    line = Topology.virtual([300, 1, 1, 1])
    assert line.serialized()[:7] == b"\x0a\x05\xac\x02\x01\x01\x01"
    assert Topology(serialized=line.serialized()) == line


@examples
@given(st.binary(max_size=40), st.integers(0, len(OF_A_V2_8) - 1))
def test_damaged_bytes_are_refused_whatever_they_are(garbage: bytes, cut: int) -> None:
    for damaged in (garbage, OF_A_V2_8[:cut], OF_A_V2_8[:cut] + b"\xff" + OF_A_V2_8[cut + 1 :]):
        with pytest.raises(InvalidArgumentError):
            Topology(serialized=damaged)


def test_negative_coordinates_count_from_the_end_and_three_entries_leave_out_z() -> None:
    two = Topology.virtual([2, 1, 1, 2])
    assert two.tpu_device_ordinal_at_coordinates([-1, 0, 0, -2]) == 2
    three = Topology(mesh_shape=[2, 1, 2], device_coordinates=[[[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]])
    assert three == two == Topology.virtual([2, 1, 2])
    mixed = Topology(mesh_shape=torch.tensor([1, 1, 2]), device_coordinates=np.array([[[0, 0, 0, 0]], [[0, 0, 0, 1]]]))
    assert mixed.num_tasks == 2


def test_arrays_cannot_be_changed() -> None:
    coordinates = np.zeros((1, 1, 4), dtype=int)
    topology = Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=coordinates)
    for array in (topology.mesh_shape, topology.device_coordinates):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    coordinates[...] = 1
    assert topology.device_coordinates.tolist() == [[[0, 0, 0, 0]]]


def test_virtual_hosts_are_blocks_of_the_mesh() -> None:
    hosts = Topology.virtual([4, 2, 1, 2], host_shape=[2, 2, 1, 2])
    assert (hosts.num_tasks, hosts.num_tpus_per_task) == (2, 8)
    assert hosts.device_coordinates[1, :3].tolist() == [[2, 0, 0, 0], [2, 0, 0, 1], [3, 0, 0, 0]]
    assert repr(hosts) == "Topology(mesh_shape=[4, 2, 1, 2], num_tasks=2, num_tpus_per_task=8, missing_devices=0)"


# -- what a runtime describes -----------------------------------------------------------------------------------------


def described(topology: Topology) -> tuple[list[dict[str, Any]], list[int]]:
    """What a runtime says that numbers devices along the mesh, whichever process drives them."""
    attributes, processes = [], []
    points = sorted(topology.device_coordinates.reshape(-1, 4).tolist(), key=lambda p: (p[2], p[1], p[0], p[3]))
    for number, (*chip, core) in enumerate(points):
        attributes.append({"name": f"TPU:{number}", "coords": chip, "core_on_chip": core, "num_cores": 1})
        processes.append(topology.task_ordinal_at_coordinates([*chip, core]))
    return attributes, processes


HOSTS, SQUARE = Topology.virtual([4, 4, 1, 1], host_shape=[2, 2, 1, 1]), Topology.virtual([2, 2, 1, 1])


@examples
@given(st.randoms(use_true_random=False))
def test_the_order_in_which_the_runtime_lists_its_devices_does_not_matter(random: Any) -> None:
    pairs = list(zip(*described(HOSTS), strict=True))
    random.shuffle(pairs)
    attributes, processes = zip(*pairs, strict=True)
    devices = RuntimeDevices.from_attributes(attributes, processes)
    assert devices.topology == HOSTS
    assert devices.numbers.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_the_runtime_is_given_its_own_numbers() -> None:
    devices = RuntimeDevices.from_attributes(*described(HOSTS))
    assignment = DeviceAssignment.build(devices.topology, [2, 1, 1, 1], num_replicas=3)
    attributes, _ = described(HOSTS)
    numbers = devices.numbers_of(assignment).tolist()
    of_runtime = [[attributes[number]["coords"] for number in replica] for replica in numbers]
    assert of_runtime == assignment.core_assignment[..., :3].tolist()


def test_slices_stand_one_behind_the_other_and_begin_at_the_origin() -> None:
    attributes = [
        {"name": f"TPU:{number}", "coords": [x + 2, 4, 1], "core_on_chip": 0, "slice_index": index}
        for number, (index, x) in enumerate([(1, 0), (1, 1), (0, 0), (0, 1)])
    ]
    devices = RuntimeDevices.from_attributes(attributes, [1, 1, 0, 0])
    assert devices.topology == Topology.virtual([2, 1, 2, 1], host_shape=[2, 1, 1, 1])
    assert devices.numbers.tolist() == [2, 3, 0, 1]


def test_holes_are_accepted_where_asked_for() -> None:
    attributes, _ = described(SQUARE)
    fewer = [attributes[0], attributes[3] | {"name": "TPU:1"}]
    devices = RuntimeDevices.from_attributes(fewer, [0, 0], allow_missing=True)
    assert devices.topology.missing_devices.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


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
    system = system_of(FakeSpmdRuntime(devices))
    assert tuple(system.topology.mesh_shape) == shape
    assert list(system.devices.numbers) == list(range(devices))


def test_a_mesh_of_ones_own() -> None:
    assert tuple(system_of(FakeSpmdRuntime(8), (4, 2, 1, 1)).topology.mesh_shape) == (4, 2, 1, 1)


def test_connecting_is_not_needed() -> None:
    ts.tpu.experimental_connect_to_cluster(ts.cluster_resolver.TPUClusterResolver(tpu="local"))
    ts.tpu.experimental.experimental_connect_to_cluster(ts.cluster_resolver.ClusterSpec({"worker": ["a:1"]}))


# == how a mesh of cores becomes replicas: no core twice, blocks whole, rings closed =================================

SIZES = st.tuples(*[st.integers(1, 4)] * 3, st.integers(1, 2))
BLOCKS = st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 2))
AUTO, RING, MESH = DeviceOrderMode.AUTO, DeviceOrderMode.RING, DeviceOrderMode.MESH


@st.composite
def tilings(draw: st.DrawFn, strides: bool = True) -> Tiling:
    mesh = draw(SIZES)
    shape = tuple(draw(st.integers(1, size)) for size in mesh)
    stride = tuple(draw(st.integers(1, size // used)) if strides else 1 for size, used in zip(mesh, shape, strict=True))
    return Tiling(mesh, shape, stride)


def built(tiling: Tiling, num_replicas: int, order: DeviceOrderMode = AUTO) -> DeviceAssignment:
    shape, stride = tiling.computation_shape, tiling.computation_stride
    return DeviceAssignment.build(Topology.virtual(tiling.mesh_shape), shape, stride, num_replicas, order)


def without_order(assignment: DeviceAssignment) -> list[list[list[int]]]:
    return sorted(sorted(replica) for replica in assignment.core_assignment.tolist())


@examples
@given(tiling=tilings(), data=st.data())
def test_no_core_is_used_twice_and_a_replica_is_one_block(tiling: Tiling, data: st.DataObject) -> None:
    replicas = data.draw(st.integers(0, tiling.max_replicas))
    assignment = built(tiling, replicas, data.draw(st.sampled_from([AUTO, MESH])))
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (replicas, tiling.cores_per_replica)
    indices = assignment.device_indices()
    assert indices.shape == (replicas, tiling.cores_per_replica)
    assert len(set(indices.reshape(-1).tolist())) == indices.size
    for replica in assignment.core_assignment:
        axes = [range(n) for n in tiling.computation_shape]
        block = np.array(list(itertools.product(*axes))) * tiling.computation_stride + replica.min(axis=0)
        assert sorted(replica.tolist()) == block.tolist()


@examples
@given(tiling=tilings(), beyond=st.integers(1, 3))
def test_never_more_replicas_than_fit(tiling: Tiling, beyond: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"; {tiling.max_replicas} do. Ask for fewer"):
        built(tiling, tiling.max_replicas + beyond)
    assert built(tiling, tiling.max_replicas).num_replicas == tiling.max_replicas
    assert tiling.max_replicas * tiling.cores_per_replica <= math.prod(tiling.mesh_shape)


@examples
@given(mesh=SIZES, shape=BLOCKS, stride=BLOCKS)
def test_what_is_larger_than_the_mesh_is_refused(
    mesh: tuple[int, ...], shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    footprint = [n * s for n, s in zip(shape, stride, strict=True)]
    assume(any(used > size for used, size in zip(footprint, mesh, strict=True)))
    with pytest.raises(InvalidArgumentError, match=f"takes .{str(footprint)[1:-1]}. of the mesh"):
        DeviceAssignment.build(Topology.virtual(mesh), shape, stride)


@examples
@given(tiling=tilings(strides=False))
def test_a_ring_has_the_same_replicas_in_another_order(tiling: Tiling) -> None:
    assume(tiling.computation_shape[-1] == tiling.mesh_shape[-1])
    ring = built(tiling, tiling.max_replicas, RING)
    assert ring == built(tiling, tiling.max_replicas)
    assert without_order(ring) == without_order(built(tiling, tiling.max_replicas, MESH))
    cores = tiling.computation_shape[-1]
    chips = ring.core_assignment.reshape(ring.num_replicas, -1, cores, 4)
    assert (chips[..., :3] == chips[..., :1, :3]).all(), "the cores of a chip follow each other"
    assert (chips[..., 3] == np.arange(cores)).all()


@examples
@given(sizes=st.tuples(*[st.integers(1, 5)] * 3))
def test_chips_of_a_ring_are_linked(sizes: tuple[int, int, int]) -> None:
    ring = ring_of_chips(*sizes)
    assert sorted(ring) == list(itertools.product(*map(range, sizes)))
    assert ring[0] == (0, 0, 0)
    above_one = [size for size in sizes if size > 1]
    if len(above_one) >= 2 and not any(size % 2 for size in above_one):
        steps = np.abs(np.array(ring) - np.roll(ring, -1, axis=0)).sum(axis=1)
        assert set(steps.tolist()) == {1}
    else:
        assert ring == sorted(ring, key=lambda chip: chip[::-1])


@examples
@given(mesh=SIZES, data=st.data())
def test_a_mesh_with_holes_is_used_in_task_order(mesh: tuple[int, ...], data: st.DataObject) -> None:
    places = data.draw(st.permutations([list(point) for point in np.ndindex(*mesh)]))
    assume(len(places) > 1)
    present = data.draw(st.integers(1, len(places) - 1))
    holey = Topology(mesh_shape=mesh, device_coordinates=[places[:present]])
    shape = tuple(data.draw(st.integers(1, size)) for size in mesh)
    cores = math.prod(shape)
    fit = min(present // cores, Tiling(mesh, shape, (1, 1, 1, 1)).max_replicas)
    assignment = DeviceAssignment.build(holey, shape, num_replicas=fit)
    assert assignment.device_indices().reshape(-1).tolist() == list(range(fit * cores))
    assert assignment.core_assignment.shape == (fit, cores, 4)
    with pytest.raises(InvalidArgumentError, match=f"need {(fit + 1) * cores} cores; .*has {present} cores"):
        DeviceAssignment.build(holey, shape, num_replicas=fit + 1)


@examples
@given(tiling=tilings(strides=False), data=st.data())
def test_look_ups_agree_with_the_coordinates(tiling: Tiling, data: st.DataObject) -> None:
    topology = Topology.virtual(tiling.mesh_shape, host_shape=[1, 1, 1, tiling.mesh_shape[-1]])
    replicas = data.draw(st.integers(1, tiling.max_replicas))
    assignment = DeviceAssignment.build(topology, tiling.computation_shape, num_replicas=replicas)
    for core in range(assignment.num_cores_per_replica):
        found: dict[int, list[int]] = {}
        for replica in range(replicas):
            place = assignment.coordinates(replica, core)
            task, ordinal = topology.task_ordinal_at_coordinates(place), assignment.tpu_ordinal(replica, core)
            found.setdefault(task, []).append(replica)
            assert assignment.device_indices()[replica, core] == task * topology.num_tpus_per_task + ordinal
            assert assignment.tpu_device(replica, core) == f"/task:{task}/device:TPU:{ordinal}"
            assert assignment.host_device(replica, core, job="w") == f"/job:w/task:{task}/device:CPU:0"
        for task in range(-1, topology.num_tasks + 1):
            if task in found:
                assert assignment.lookup_replicas(task, core) == found[task]
            else:
                with pytest.raises(InvalidArgumentError, match=f"no replica has its logical core {core} on task"):
                    assignment.lookup_replicas(task, core)


V2_8, PAIR = Topology.virtual([2, 2, 1, 2]), Topology.virtual([2, 1, 1, 2])


def test_one_core_and_other_ways_to_say_the_same() -> None:
    single = DeviceAssignment(V2_8, SINGLE_CORE_ASSIGNMENT)
    assert single == DeviceAssignment.build(V2_8)
    assert (single.coordinates(0, 0), single.tpu_ordinal(), single.lookup_replicas(0, 0)) == ((0, 0, 0, 0), 0, [0])
    assert (single.tpu_device(), single.host_device()) == ("/task:0/device:TPU:0", "/task:0/device:CPU:0")
    assert single.topology is V2_8
    by_bytes = DeviceAssignment.build(V2_8.serialized(), [1, 1, 2], num_replicas=4, device_order_mode=2)
    assert by_bytes == DeviceAssignment.build(V2_8, [1, 1, 1, 2], num_replicas=4, device_order_mode=MESH)


def test_a_place_given_twice_has_names_but_makes_no_device_mesh() -> None:
    twice = DeviceAssignment(Topology.virtual([2, 1, 1, 1]), [[[1, 0, 0, 0]], [[-1, 0, 0, 0]]])
    assert [twice.tpu_device(replica, job="a") for replica in (0, 1)] == ["/job:a/task:0/device:TPU:1"] * 2
    assert twice.core_assignment.tolist() == [[[1, 0, 0, 0]], [[-1, 0, 0, 0]]]
    with pytest.raises(InvalidArgumentError, match=r"uses the devices \[1\] more than once"):
        twice.device_indices()


def test_negative_numbers_count_from_the_end_and_there_may_be_no_replica() -> None:
    assert DeviceAssignment.build(PAIR, [1, 1, 1, 2], num_replicas=2).tpu_device(-1, -1) == "/task:0/device:TPU:3"
    empty = DeviceAssignment.build(PAIR, [1, 1, 1, 2], num_replicas=0)
    assert empty.core_assignment.shape == (0, 2, 4)
    assert empty.device_indices().shape == (0, 2)


def test_equal_assignments_of_equal_topologies() -> None:
    assignment = DeviceAssignment.build(PAIR, [1, 1, 1, 2], num_replicas=2)
    copy = pickle.loads(pickle.dumps(assignment))
    assert copy == assignment
    assert hash(copy) == hash(assignment)
    assert assignment != DeviceAssignment.build(PAIR, [1, 1, 1, 2], num_replicas=1)
    assert assignment != DeviceAssignment(Topology.virtual([2, 1, 2, 2]), assignment.core_assignment)
    assert assignment != assignment.core_assignment.tolist()
    assert repr(assignment).endswith("missing_devices=0), num_replicas=2, num_cores_per_replica=2)")
    with pytest.raises(ValueError, match="read-only"):
        assignment.core_assignment[0] = 1


# == hosts: arguments before environment, addresses only, nobody contacted ===========================================

ADDRESSES = ["10.0.0.1:8470", "10.0.0.2:8470"]


@pytest.mark.parametrize(
    "tpu",
    [
        "grpc://10.0.0.1:8470,grpc://10.0.0.2:8470",
        "grpc://10.0.0.1:8470, 10.0.0.2:8470",
        ADDRESSES,
        ("grpc://10.0.0.1:8470", "10.0.0.2:8470"),
    ],
)
def test_addresses_are_the_hosts_of_one_job(tpu: Any) -> None:
    resolver = TPUClusterResolver(tpu, environ={"TPU_NAME": "grpc://other:1"})
    assert resolver.cluster_spec().as_dict() == {"worker": ADDRESSES}
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 0, "")
    assert resolver.master() == resolver.get_master() == "grpc://10.0.0.1:8470"
    assert resolver.master("worker", 1) == "grpc://10.0.0.2:8470"


def test_a_coordinator_is_a_job_of_its_own() -> None:
    resolver = TPUClusterResolver(ADDRESSES, job_name="tpu", coordinator_name="coordinator", coordinator_address="me:1")
    assert resolver.cluster_spec().as_dict() == {"tpu": ADDRESSES, "coordinator": ["me:1"]}
    assert (resolver.task_type, resolver.get_job_name()) == ("tpu", "tpu")
    assert resolver.master("coordinator", 0) == "grpc://me:1"


@pytest.mark.parametrize(
    ("tpu", "environ"), [("local", {"TPU_NAME": "grpc://a:1"}), (None, {"TPU_NAME": "local"}), ("", {})]
)
def test_the_tpu_of_this_machine_has_no_cluster(tpu: str | None, environ: dict[str, str]) -> None:
    resolver = TPUClusterResolver(tpu, environ=environ)
    assert resolver.cluster_spec().as_dict() == {}
    assert (resolver.master(), resolver.master("worker", 1), resolver.get_master()) == ("", "", "")
    assert (resolver.task_type, resolver.get_job_name()) == ("worker", "worker")
    assert resolver.process_plan() is None


@pytest.mark.parametrize("tpu", [None, ""])
def test_the_environment_says_what_the_argument_does_not(tpu: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"TPU_NAME": "grpc://named:1", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://pod:1"}
    assert TPUClusterResolver(tpu, environ=environ).master() == "grpc://pod:1"
    assert TPUClusterResolver(tpu, environ={"TPU_NAME": "grpc://named:1"}).master() == "grpc://named:1"
    monkeypatch.delenv("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", raising=False)
    monkeypatch.setenv("TPU_NAME", "grpc://named:1")
    resolver = TPUClusterResolver(tpu)
    monkeypatch.setenv("TPU_NAME", "grpc://changed:1")
    assert resolver.master() == "grpc://named:1"


def test_the_number_of_cores_is_known_after_initialisation() -> None:
    resolver = TPUClusterResolver("local")
    with pytest.raises(ContextError, match="initialize_tpu_system"):
        resolver.num_accelerators()
    with pytest.raises(InvalidArgumentError):
        resolver.set_tpu_topology(b"garbage")
    resolver.set_tpu_topology(Topology.virtual([4, 2, 1, 2], host_shape=[2, 2, 1, 2]).serialized())
    assert resolver.num_accelerators() == {"TPU": 8}


# == what is refused ==================================================================================================

NEGATIVE = b"\x0a\x0d\x01\x01\x01" + b"\xfe" + b"\xff" * 8 + b"\x01" + OF_A_V2_8[6:]
ZERO, ONE = [[[0, 0, 0, 0]]], [1, 1, 1, 1]
HOLEY = Topology(mesh_shape=[2, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0]], [[1, 0, 0, 1]]])
TWO, FOUR_BY_FOUR = Topology.virtual([1, 1, 1, 2]), Topology.virtual([4, 4, 1, 2])
OF_PAIR = DeviceAssignment.build(PAIR, [1, 1, 1, 2], num_replicas=2)
NOBODY = DeviceAssignment.build(PAIR, [1, 1, 1, 2], num_replicas=0)


def build(**arguments: Any) -> Any:
    return DeviceAssignment.build(**({"topology": V2_8} | arguments))


def ring(*arguments: Any) -> Any:
    return DeviceAssignment.build(FOUR_BY_FOUR, *arguments, RING)


def assigned(places: Any) -> Any:
    return DeviceAssignment(HOLEY, places)


def runtime(processes: Any = (0, 0, 0, 0), **of_second: Any) -> Any:
    attributes, _ = described(SQUARE)
    attributes[1] |= of_second
    return RuntimeDevices.from_attributes(attributes, processes)


INVALID: list[tuple[str, Callable[[], object]]] = [
    # bytes, meshes and coordinates
    ("unknown kind 7, in 7 bytes that begin with b'garbage'", lambda: Topology(b"garbage")),
    ("field 1 ends 3 bytes after the end", lambda: Topology(b"\x0a\x04\x01")),
    ("the number at byte 1 does not end", lambda: Topology(b"\x10\x80")),
    ("the number at byte 1 does not end", lambda: Topology(b"\x10" + b"\x80" * 10 + b"\x01")),
    (r"mesh_shape \[\], 0 tasks", lambda: Topology(b"")),
    ("7 coordinates", lambda: Topology(encode(TopologyFields([1, 1, 1, 2], 1, 2, [0] * 7)))),
    (r"got \[1, 1, 1, -2\]", lambda: Topology(NEGATIVE)),
    (f"most {MAX_MESH_POINTS}", lambda: Topology(encode(TopologyFields([2**31 - 1] * 4, 1, 1, [0] * 4)))),
    ("not both", lambda: Topology(OF_A_V2_8, [2, 2, 1, 2])),
    (r"mesh_shape must be four positive integers .*; got \[2, 2\]", lambda: Topology(None, [2, 2], ZERO)),
    (r"got \[1, 1, 1, 0\]", lambda: Topology(None, [1, 1, 1, 0], ZERO)),
    ("mesh_shape must be four", lambda: Topology(None, [ONE], ZERO)),
    (r"shape \(tasks, devices per task, 4\).*got \[1, 4\]", lambda: Topology(None, ONE, ZERO[0])),
    (r"got \[1, 1, 3\]", lambda: Topology(None, ONE, [[[0, 0, 0]]])),
    (r"at least one device; got \[1, 0\]", lambda: Topology(None, ONE, [[]])),
    ("must be rectangular", lambda: Topology(None, ONE, [[[0, 0, 0, 0]], []])),
    (r"\[2, 0, 0, 0\] are outside the mesh \[2, 1, 1, 1\]", lambda: Topology(None, [2, 1, 1, 1], [[[2, 0, 0, 0]]])),
    ("outside the mesh", lambda: Topology(None, [2, 1, 1, 1], [[[-1, 0, 0, 0]]])),
    (r"name \[1, 0, 0, 0\] more than once", lambda: Topology(None, [2, 1, 1, 1], [[[1, 0, 0, 0]]] * 2)),
    ("does not divide", lambda: Topology.virtual([4, 2, 1, 2], host_shape=[3, 2, 1, 2])),
    *(
        (".", lambda place=place: TWO.tpu_device_name_at_coordinates(place))
        for place in ([1, 0, 0, 0], [0, 0, 0, -3], [0, 0, 0], 0, ZERO[0])
    ),
    # what a runtime says
    ("device 1 has the name 'TPU', which does not end in its number", lambda: runtime(name="TPU")),
    ("device 1 has the name None", lambda: runtime(name=None)),
    (r"the device numbers \[0\] occur more than once", lambda: runtime(name="TPU:0")),
    (r"4 devices lack the numbers \[1\]", lambda: runtime(name="TPU:9")),
    ("TPU:1 has coords None", lambda: runtime(coords=None)),
    (r"TPU:1 has coords \[0, 1\]", lambda: runtime(coords=[0, 1])),
    ("not three numbers", lambda: runtime(coords=[0, 1, -1])),
    (r"2 devices of slice 0 are at \[0, 0, 0, 0\]", lambda: runtime(coords=[0, 0, 0])),
    ("TPU:1 has core_on_chip None", lambda: runtime(core_on_chip=None)),
    ("TPU:0 has slice_index None, which other devices have", lambda: runtime(slice_index=1)),
    ("4 devices have 3 process indices", lambda: runtime([0] * 3)),
    (r"process indices are \[0, 2\], not 0, 1, 2", lambda: runtime([0, 0, 2, 2])),
    ("different numbers of devices: {0: 3, 1: 1}", lambda: runtime([0, 0, 0, 1])),
    ("there is no device", lambda: RuntimeDevices.from_attributes([], [])),
    (
        r"device 0 .*; device 7 .*; and 4 more\. Every process",
        lambda: RuntimeDevices.from_attributes([{}] * 12, [0] * 12),
    ),
    (
        r"2 devices leave 2 points of the mesh \[2, 2, 1, 1\] empty",
        lambda: RuntimeDevices.from_attributes(
            [described(SQUARE)[0][i] | {"name": f"TPU:{i % 2}"} for i in (0, 3)], [0, 0]
        ),
    ),
    (
        r"num_tasks=1.*the runtime has .*num_tasks=4",
        lambda: RuntimeDevices.from_attributes(*described(HOSTS)).numbers_of(build(topology=FOUR_BY_FOUR)),
    ),
    ("has 6 places for 8 devices", lambda: system_of(FakeSpmdRuntime(8), (3, 2, 1, 1))),
    ("have places of their own", lambda: system_of(FakeSpmdRuntime(8, [2, 2, 1, 2]), (4, 2, 1, 1))),
    # assignments
    (r"computation_shape must be four .* got \[1, 1\]", lambda: build(computation_shape=[1, 1])),
    ("computation_shape must be four positive", lambda: build(computation_shape=[1, 1, 1, 0])),
    ("computation_stride must be four", lambda: build(computation_stride=[1, 1, 1, 1, 1])),
    ("computation_stride must be four positive", lambda: build(computation_stride=[1, 0, 1, 1])),
    ("must not be negative; got -1", lambda: build(num_replicas=-1)),
    ("one of .'AUTO', 'RING', 'MESH'.*'SPIRAL'", lambda: build(device_order_mode="SPIRAL")),
    ("must be a ts.tpu.Topology; got list", lambda: build(topology=[2, 2, 1, 2])),
    ("serialized is not a topology", lambda: build(topology=b"garbage")),
    (
        r"the mesh lacks 2 devices.*computation_stride \[2, 1, 1, 1\]",
        lambda: build(topology=HOLEY, computation_stride=[2, 1, 1, 1]),
    ),
    ("lacks 2 devices.*RING is impossible", lambda: build(topology=HOLEY, device_order_mode=RING)),
    (
        "RING is impossible here: a replica takes 1 of a chip's 2 cores.* Use AUTO or MESH",
        lambda: ring([2, 2, 1, 1], None, 4),
    ),
    (r"impossible here: computation_stride is \[2, 1, 1, 1\]", lambda: ring([1, 2, 1, 2], [2, 1, 1, 1], 4)),
    ("RING is impossible here: num_replicas is 3, not 4", lambda: ring([2, 2, 1, 2], None, 3)),
    ("RING is impossible here: num_replicas is 0, not 4", lambda: ring([2, 2, 1, 2], None, 0)),
    (r"got the shape \[1, 4\]", lambda: assigned(ZERO[0])),
    (r"got the shape \[1, 1, 3\]", lambda: assigned([[[0, 0, 0]]])),
    (r"got the shape \[0\]", lambda: assigned([])),
    ("rectangular", lambda: assigned([[[0, 0, 0, 0]], []])),
    (r"\[2, 0, 0, 0\] are outside the mesh", lambda: assigned([[[2, 0, 0, 0]]])),
    (r"no device stands at \[0, 0, 0, 1\]", lambda: assigned([[[0, 0, 0, 1]]])),
    ("replica=2 does not exist; there are 2", lambda: OF_PAIR.tpu_device(2, 0)),
    ("replica=-3 does not exist; there are 2", lambda: OF_PAIR.tpu_device(-3, 0)),
    ("core=2 does not exist; there are 2", lambda: OF_PAIR.tpu_device(0, 2)),
    ("no replica has its logical core -1", lambda: OF_PAIR.lookup_replicas(0, -1)),
    (r"0 replicas of 2 logical cores, on tasks \[\]", lambda: NOBODY.lookup_replicas(0, 0)),
]
WRONG_TYPE: list[tuple[str, Callable[[], object]]] = [
    ("needs mesh_shape and device_coordinates", lambda: Topology()),
    ("needs mesh_shape and device_coordinates", lambda: Topology(None, ONE)),
    ("mesh_shape", lambda: Topology(None, "1x1x1x1", ZERO)),
    ("device_coordinates", lambda: Topology(None, ONE, [[[0, 0, 0, 0.5]]])),
    ("serialized", lambda: Topology("text")),  # type: ignore[arg-type]
    ("computation_shape must hold integers", lambda: build(computation_shape=[1, 1, 1, 1.0])),
    ("num_replicas must be an integer; got float 1.0", lambda: build(num_replicas=1.0)),
    *(
        ("tpu must be 'local', 'grpc://host:port' or a list", lambda tpu=tpu: TPUClusterResolver(tpu))
        for tpu in (8470, [1], {"worker": ["a:1"]})
    ),
    (
        "needs a cluster resolver or a ClusterSpec; got str",
        lambda: ts.tpu.experimental_connect_to_cluster("grpc://a:1"),
    ),  # type: ignore[arg-type]
]
NO_CLUSTER: list[tuple[str, Callable[[], object]]] = [
    *(
        ("needs a name other than 'worker' and an address", lambda more=more: TPUClusterResolver(ADDRESSES, **more))
        for more in (
            {"coordinator_name": "c"},
            {"coordinator_address": "me:1"},
            {"coordinator_name": "worker", "coordinator_address": "me:1"},
        )
    ),
    ("tpu was not given, and neither KUBE.* nor TPU_NAME is set", lambda: TPUClusterResolver(environ={"TPU_NAME": ""})),
    *(
        (".", lambda tpu=tpu: TPUClusterResolver(tpu, environ={"TPU_NAME": "no-address"}))
        for tpu in ("my-tpu", "grpc://host", "host:port", "http://a:1", "a:1,,b:1", "grpc://", [])
    ),
    ("no task 2", lambda: TPUClusterResolver(ADDRESSES).master("worker", 2)),
]


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        *((InvalidArgumentError, *one) for one in INVALID),
        *((WrongTypeError, *one) for one in WRONG_TYPE),
        *((ClusterConfigError, *one) for one in NO_CLUSTER),
    ],
)
def test_what_is_refused(error: type[Exception], message: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("given", [{"CPU_NUM_DEVICES": "2"}, {"PJRT_DEVICE": "TPU"}])
def test_virtual_devices_that_do_not_fit_the_environment_leave_it_as_it_is(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=r"virtual_devices=4 needs .* unset it"):
        ts.tpu.initialize_tpu_system(virtual_devices=4)
    assert {name: os.environ.get(name) for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES")} == {
        "PJRT_DEVICE": given.get("PJRT_DEVICE"),
        "CPU_NUM_DEVICES": given.get("CPU_NUM_DEVICES"),
    }


def test_where_there_is_no_ring_there_are_other_orders() -> None:
    for arguments in (([2, 2, 1, 1], None, 4), ([1, 2, 1, 2], [2, 1, 1, 1], 4), ([2, 2, 1, 2], None, 3)):
        assert DeviceAssignment.build(FOUR_BY_FOUR, *arguments).num_replicas == arguments[-1]
