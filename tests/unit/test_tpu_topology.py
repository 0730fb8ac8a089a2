"""Where TPU cores stand: lookups, bytes, what is refused, and the topology of what a runtime describes."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.tpu.coordinates import MAX_MESH_POINTS
from torchstrat.tpu.device_assignment import DeviceAssignment
from torchstrat.tpu.runtime_devices import RuntimeDevices
from torchstrat.tpu.topology import Topology
from torchstrat.tpu.topology_wire import TopologyFields, decode, encode

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
@given(topologies())
def test_bytes_and_pickles_come_back_equal(topology: Topology) -> None:
    for copy in (Topology(serialized=topology.serialized()), pickle.loads(pickle.dumps(topology))):
        assert copy == topology
        assert hash(copy) == hash(topology)
        assert copy.missing_devices.tolist() == topology.missing_devices.tolist()


@examples
@given(topologies(), topologies())
def test_topologies_are_equal_where_mesh_and_coordinates_are(one: Topology, other: Topology) -> None:
    same = one.mesh_shape.tolist() == other.mesh_shape.tolist() and (
        one.device_coordinates.tolist() == other.device_coordinates.tolist()
    )
    assert (one == other) is same
    assert (one.serialized() == other.serialized()) is same
    assert one != "topology"


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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"garbage", "unknown kind 7, in 7 bytes that begin with b'garbage'"),
        (b"\x0a\x04\x01", "field 1 ends 3 bytes after the end"),
        (b"\x10\x80", "the number at byte 1 does not end"),
        (b"\x10" + b"\x80" * 10 + b"\x01", "the number at byte 1 does not end"),
        (b"", r"mesh_shape \[\], 0 tasks"),
        (encode(TopologyFields([1, 1, 1, 2], 1, 2, [0] * 7)), "7 coordinates"),
        (b"\x0a\x0d\x01\x01\x01" + b"\xfe" + b"\xff" * 8 + b"\x01" + OF_A_V2_8[6:], r"got \[1, 1, 1, -2\]"),
        (encode(TopologyFields([2**31 - 1] * 4, 1, 1, [0] * 4)), f"at most {MAX_MESH_POINTS}"),
    ],
)
def test_what_is_wrong_with_bytes_is_said(data: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Topology(serialized=data)


@pytest.mark.parametrize(
    ("mesh_shape", "coordinates", "message"),
    [
        ([2, 2], [[[0, 0, 0, 0]]], r"mesh_shape must be four positive integers .*; got \[2, 2\]"),
        ([1, 1, 1, 0], [[[0, 0, 0, 0]]], r"got \[1, 1, 1, 0\]"),
        ([[1, 1, 1, 1]], [[[0, 0, 0, 0]]], "mesh_shape must be four"),
        ([1, 1, 1, 1], [[0, 0, 0, 0]], r"shape \(tasks, devices per task, 4\).*got \[1, 4\]"),
        ([1, 1, 1, 1], [[[0, 0, 0]]], r"got \[1, 1, 3\]"),
        ([1, 1, 1, 1], [[]], r"at least one device; got \[1, 0\]"),
        ([1, 1, 1, 1], [[[0, 0, 0, 0]], []], "must be rectangular"),
        ([2, 1, 1, 1], [[[2, 0, 0, 0]]], r"\[2, 0, 0, 0\] are outside the mesh \[2, 1, 1, 1\]"),
        ([2, 1, 1, 1], [[[-1, 0, 0, 0]]], "outside the mesh"),
        ([2, 1, 1, 1], [[[1, 0, 0, 0]], [[1, 0, 0, 0]]], r"name \[1, 0, 0, 0\] more than once"),
    ],
)
def test_what_is_no_topology_is_refused(mesh_shape: Any, coordinates: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Topology(mesh_shape=mesh_shape, device_coordinates=coordinates)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mesh_shape": [1, 1, 1, 1]},
        {"mesh_shape": "1x1x1x1", "device_coordinates": [[[0, 0, 0, 0]]]},
        {"mesh_shape": [1, 1, 1, 1], "device_coordinates": [[[0, 0, 0, 0.5]]]},
        {"serialized": "text"},
    ],
)
def test_other_types_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(WrongTypeError):
        Topology(**arguments)


def test_bytes_exclude_the_rest() -> None:
    with pytest.raises(InvalidArgumentError, match="not both"):
        Topology(serialized=OF_A_V2_8, mesh_shape=[2, 2, 1, 2])


@pytest.mark.parametrize("place", [[1, 0, 0, 0], [0, 0, 0, -3], [0, 0, 0], 0, [[0, 0, 0, 0]]])
def test_a_look_up_needs_one_place_of_the_mesh(place: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Topology.virtual([1, 1, 1, 2]).tpu_device_name_at_coordinates(place)


def test_negative_coordinates_count_from_the_end() -> None:
    assert Topology.virtual([2, 1, 1, 2]).tpu_device_ordinal_at_coordinates([-1, 0, 0, -2]) == 2


def test_three_entries_leave_out_z() -> None:
    three = Topology(mesh_shape=[2, 1, 2], device_coordinates=[[[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]])
    assert three == Topology.virtual([2, 1, 1, 2]) == Topology.virtual([2, 1, 2])
    mixed = Topology(mesh_shape=torch.tensor([1, 1, 2]), device_coordinates=np.array([[[0, 0, 0, 0]], [[0, 0, 0, 1]]]))
    assert mixed.num_tasks == 2


def test_arrays_cannot_be_changed() -> None:
    topology = Topology.virtual([2, 1, 1, 1])
    for array in (topology.mesh_shape, topology.device_coordinates):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    coordinates = np.zeros((1, 1, 4), dtype=int)
    topology = Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=coordinates)
    coordinates[...] = 1
    assert topology.device_coordinates.tolist() == [[[0, 0, 0, 0]]]


def test_virtual_hosts_are_blocks_of_the_mesh() -> None:
    hosts = Topology.virtual([4, 2, 1, 2], host_shape=[2, 2, 1, 2])
    assert (hosts.num_tasks, hosts.num_tpus_per_task) == (2, 8)
    assert hosts.device_coordinates[1, :3].tolist() == [[2, 0, 0, 0], [2, 0, 0, 1], [3, 0, 0, 0]]
    with pytest.raises(InvalidArgumentError, match="does not divide"):
        Topology.virtual([4, 2, 1, 2], host_shape=[3, 2, 1, 2])
    assert repr(hosts) == "Topology(mesh_shape=[4, 2, 1, 2], num_tasks=2, num_tpus_per_task=8, missing_devices=0)"


def described(topology: Topology) -> tuple[list[dict[str, Any]], list[int]]:
    """What a runtime says that numbers devices along the mesh, whichever process drives them."""
    attributes, processes = [], []
    points = sorted(topology.device_coordinates.reshape(-1, 4).tolist(), key=lambda p: (p[2], p[1], p[0], p[3]))
    for number, (*chip, core) in enumerate(points):
        attributes.append({"name": f"TPU:{number}", "coords": chip, "core_on_chip": core, "num_cores": 1})
        processes.append(topology.task_ordinal_at_coordinates([*chip, core]))
    return attributes, processes


HOSTS = Topology.virtual([4, 4, 1, 1], host_shape=[2, 2, 1, 1])


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
    numbers = devices.numbers_of(assignment)
    attributes, _ = described(HOSTS)
    of_runtime = [[attributes[number]["coords"] for number in replica] for replica in numbers.tolist()]
    assert of_runtime == assignment.core_assignment[..., :3].tolist()
    other = DeviceAssignment.build(Topology.virtual([4, 4, 1, 1]))
    with pytest.raises(InvalidArgumentError, match=r"num_tasks=1.*the runtime has .*num_tasks=4"):
        devices.numbers_of(other)


def test_slices_stand_one_behind_the_other_and_begin_at_the_origin() -> None:
    attributes = [
        {"name": f"TPU:{number}", "coords": [x + 2, 4, 1], "core_on_chip": 0, "slice_index": index}
        for number, (index, x) in enumerate([(1, 0), (1, 1), (0, 0), (0, 1)])
    ]
    devices = RuntimeDevices.from_attributes(attributes, [1, 1, 0, 0])
    assert devices.topology == Topology.virtual([2, 1, 2, 1], host_shape=[2, 1, 1, 1])
    assert devices.numbers.tolist() == [2, 3, 0, 1]


def test_holes_are_accepted_where_asked_for() -> None:
    attributes, processes = described(Topology.virtual([2, 2, 1, 1]))
    fewer = [attributes[0], attributes[3] | {"name": "TPU:1"}]
    with pytest.raises(InvalidArgumentError, match=r"2 devices leave 2 points of the mesh \[2, 2, 1, 1\] empty"):
        RuntimeDevices.from_attributes(fewer, processes[:2])
    devices = RuntimeDevices.from_attributes(fewer, processes[:2], allow_missing=True)
    assert devices.topology.missing_devices.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "TPU"}, "device 1 has the name 'TPU', which does not end in its number"),
        ({"name": None}, "device 1 has the name None"),
        ({"name": "TPU:0"}, r"the device numbers \[0\] occur more than once"),
        ({"name": "TPU:9"}, r"4 devices lack the numbers \[1\]"),
        ({"coords": None}, "TPU:1 has coords None"),
        ({"coords": [0, 1]}, r"TPU:1 has coords \[0, 1\]"),
        ({"coords": [0, 1, -1]}, "not three numbers"),
        ({"coords": [0, 0, 0]}, r"2 devices of slice 0 are at \[0, 0, 0, 0\]"),
        ({"core_on_chip": None}, "TPU:1 has core_on_chip None"),
        ({"slice_index": 1}, "TPU:0 has slice_index None, which other devices have"),
    ],
)
def test_a_runtime_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    attributes, processes = described(Topology.virtual([2, 2, 1, 1]))
    attributes[1] |= change
    with pytest.raises(InvalidArgumentError, match=message):
        RuntimeDevices.from_attributes(attributes, processes)


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([0, 0, 0], "4 devices have 3 process indices"),
        ([0, 0, 2, 2], r"process indices are \[0, 2\], not 0, 1, 2"),
        ([0, 0, 0, 1], "different numbers of devices: {0: 3, 1: 1}"),
    ],
)
def test_processes_are_complete_and_alike(processes: list[int], message: str) -> None:
    attributes, _ = described(Topology.virtual([2, 2, 1, 1]))
    with pytest.raises(InvalidArgumentError, match=message):
        RuntimeDevices.from_attributes(attributes, processes)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(InvalidArgumentError, match="there is no device"):
        RuntimeDevices.from_attributes([], [])
    with pytest.raises(InvalidArgumentError, match=r"device 0 .*; device 7 .*; and 4 more\. Every process"):
        RuntimeDevices.from_attributes([{}] * 12, [0] * 12)
