"""How a mesh of TPU cores becomes replicas: no core twice, blocks whole, rings closed, and what is refused."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.tpu.device_assignment import SINGLE_CORE_ASSIGNMENT, DeviceAssignment
from torchstrat.tpu.device_order import DeviceOrderMode, Tiling
from torchstrat.tpu.ring import ring_of_chips
from torchstrat.tpu.topology import Topology

examples = settings(max_examples=40, deadline=None, derandomize=True)
SIZES = st.tuples(*[st.integers(1, 4)] * 3, st.integers(1, 2))
BLOCKS = st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 2))


@st.composite
def tilings(draw: st.DrawFn, strides: bool = True) -> Tiling:
    mesh = draw(SIZES)
    shape = tuple(draw(st.integers(1, size)) for size in mesh)
    stride = tuple(draw(st.integers(1, size // used)) if strides else 1 for size, used in zip(mesh, shape, strict=True))
    return Tiling(mesh, shape, stride)


def build(tiling: Tiling, num_replicas: int, order: DeviceOrderMode = DeviceOrderMode.AUTO) -> DeviceAssignment:
    shape, stride = tiling.computation_shape, tiling.computation_stride
    return DeviceAssignment.build(Topology.virtual(tiling.mesh_shape), shape, stride, num_replicas, order)


def without_order(assignment: DeviceAssignment) -> list[list[list[int]]]:
    return sorted(sorted(replica) for replica in assignment.core_assignment.tolist())


@examples
@given(tiling=tilings(), data=st.data())
def test_no_core_is_used_twice_and_a_replica_is_one_block(tiling: Tiling, data: st.DataObject) -> None:
    replicas = data.draw(st.integers(0, tiling.max_replicas))
    order = data.draw(st.sampled_from([DeviceOrderMode.AUTO, DeviceOrderMode.MESH]))
    assignment = build(tiling, replicas, order)
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
        build(tiling, tiling.max_replicas + beyond)
    assert build(tiling, tiling.max_replicas).num_replicas == tiling.max_replicas
    cores = math.prod(tiling.mesh_shape)
    assert tiling.max_replicas * tiling.cores_per_replica <= cores


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
    ring = build(tiling, tiling.max_replicas, DeviceOrderMode.RING)
    assert ring == build(tiling, tiling.max_replicas)
    assert without_order(ring) == without_order(build(tiling, tiling.max_replicas, DeviceOrderMode.MESH))
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
@given(tiling=tilings(), data=st.data())
def test_three_entries_mean_one_in_z(tiling: Tiling, data: st.DataObject) -> None:
    x, y, _, core = tiling.mesh_shape
    (a, b, _, c), (s, t, _, u) = tiling.computation_shape, tiling.computation_stride
    flat = Tiling((x, y, 1, core), (a, b, 1, c), (s, t, 1, u))
    replicas = data.draw(st.integers(1, flat.max_replicas))
    three = DeviceAssignment.build(Topology.virtual([x, y, core]), [a, b, c], [s, t, u], replicas)
    assert three == build(flat, replicas)


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


def test_holes_leave_no_room_for_strides_and_rings() -> None:
    holey = Topology(mesh_shape=[2, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0]], [[1, 0, 0, 1]]])
    with pytest.raises(InvalidArgumentError, match=r"the mesh lacks 2 devices.*computation_stride \[2, 1, 1, 1\]"):
        DeviceAssignment.build(holey, computation_stride=[2, 1, 1, 1])
    with pytest.raises(InvalidArgumentError, match=r"the mesh lacks 2 devices.*RING is impossible"):
        DeviceAssignment.build(holey, device_order_mode=DeviceOrderMode.RING)


@pytest.mark.parametrize(
    ("shape", "stride", "replicas", "reason"),
    [
        ([2, 2, 1, 1], None, 4, "a replica takes 1 of a chip's 2 cores"),
        ([1, 2, 1, 2], [2, 1, 1, 1], 4, r"computation_stride is \[2, 1, 1, 1\]"),
        ([2, 2, 1, 2], None, 3, "num_replicas is 3, not 4"),
        ([2, 2, 1, 2], None, 0, "num_replicas is 0, not 4"),
    ],
)
def test_why_there_is_no_ring_is_said(shape: Any, stride: Any, replicas: int, reason: str) -> None:
    topology = Topology.virtual([4, 4, 1, 2])
    with pytest.raises(InvalidArgumentError, match=f"RING is impossible here: {reason}.* Use AUTO or MESH"):
        DeviceAssignment.build(topology, shape, stride, replicas, DeviceOrderMode.RING)
    assert DeviceAssignment.build(topology, shape, stride, replicas).num_replicas == replicas


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"computation_shape": [1, 1]}, InvalidArgumentError, r"computation_shape must be four .* got \[1, 1\]"),
        ({"computation_shape": [1, 1, 1, 0]}, InvalidArgumentError, "computation_shape must be four positive"),
        ({"computation_stride": [1, 1, 1, 1, 1]}, InvalidArgumentError, "computation_stride must be four"),
        ({"computation_stride": [1, 0, 1, 1]}, InvalidArgumentError, "computation_stride must be four positive"),
        ({"computation_shape": [1, 1, 1, 1.0]}, WrongTypeError, "computation_shape must hold integers"),
        ({"num_replicas": -1}, InvalidArgumentError, "must not be negative; got -1"),
        ({"num_replicas": 1.0}, WrongTypeError, "num_replicas must be an integer; got float 1.0"),
        ({"device_order_mode": "SPIRAL"}, InvalidArgumentError, "one of .'AUTO', 'RING', 'MESH'.*'SPIRAL'"),
        ({"topology": [2, 2, 1, 2]}, InvalidArgumentError, "must be a ts.tpu.Topology; got list"),
        ({"topology": b"garbage"}, InvalidArgumentError, "serialized is not a topology"),
    ],
)
def test_bad_arguments_of_build(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        DeviceAssignment.build(**({"topology": Topology.virtual([2, 2, 1, 2])} | arguments))


def test_the_order_may_be_a_number_and_the_topology_bytes() -> None:
    topology = Topology.virtual([2, 2, 1, 2])
    assert DeviceAssignment.build(
        topology.serialized(), [1, 1, 1, 2], num_replicas=4, device_order_mode=2
    ) == DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=4, device_order_mode=DeviceOrderMode.MESH)


@pytest.mark.parametrize(
    ("core_assignment", "message"),
    [
        ([[0, 0, 0, 0]], r"got the shape \[1, 4\]"),
        ([[[0, 0, 0]]], r"got the shape \[1, 1, 3\]"),
        ([], r"got the shape \[0\]"),
        ([[[0, 0, 0, 0]], []], "rectangular"),
        ([[[2, 0, 0, 0]]], r"\[2, 0, 0, 0\] are outside the mesh"),
        ([[[1, 0, 0, 1]]], r"no device stands at \[1, 0, 0, 1\]"),
    ],
)
def test_bad_assignments(core_assignment: Any, message: str) -> None:
    topology = Topology(mesh_shape=[2, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]]])
    with pytest.raises(InvalidArgumentError, match=message):
        DeviceAssignment(topology, core_assignment)


def test_one_core() -> None:
    topology = Topology.virtual([2, 2, 1, 2])
    single = DeviceAssignment(topology, SINGLE_CORE_ASSIGNMENT)
    assert single == DeviceAssignment.build(topology)
    assert (single.coordinates(0, 0), single.tpu_ordinal(), single.lookup_replicas(0, 0)) == ((0, 0, 0, 0), 0, [0])
    assert (single.tpu_device(), single.host_device()) == ("/task:0/device:TPU:0", "/task:0/device:CPU:0")
    assert single.topology is topology


def test_a_place_given_twice_has_names_but_makes_no_device_mesh() -> None:
    twice = DeviceAssignment(Topology.virtual([2, 1, 1, 1]), [[[1, 0, 0, 0]], [[-1, 0, 0, 0]]])
    assert [twice.tpu_device(replica, job="a") for replica in (0, 1)] == ["/job:a/task:0/device:TPU:1"] * 2
    assert twice.core_assignment.tolist() == [[[1, 0, 0, 0]], [[-1, 0, 0, 0]]]
    with pytest.raises(InvalidArgumentError, match=r"uses the devices \[1\] more than once"):
        twice.device_indices()


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


@pytest.mark.parametrize(("replica", "core", "name"), [(2, 0, "replica=2"), (-3, 0, "replica=-3"), (0, 2, "core=2")])
def test_numbers_that_do_not_exist(replica: int, core: int, name: str) -> None:
    assignment = DeviceAssignment.build(Topology.virtual([2, 1, 1, 2]), [1, 1, 1, 2], num_replicas=2)
    with pytest.raises(InvalidArgumentError, match=f"{name} does not exist; there are 2"):
        assignment.tpu_device(replica, core)
    with pytest.raises(InvalidArgumentError, match="no replica has its logical core -1"):
        assignment.lookup_replicas(0, -1)
    assert assignment.tpu_device(-1, -1) == "/task:0/device:TPU:3"


def test_equal_assignments_of_equal_topologies() -> None:
    assignment = DeviceAssignment.build(Topology.virtual([2, 1, 1, 2]), [1, 1, 1, 2], num_replicas=2)
    copy = pickle.loads(pickle.dumps(assignment))
    assert copy == assignment
    assert hash(copy) == hash(assignment)
    assert assignment != DeviceAssignment.build(Topology.virtual([2, 1, 1, 2]), [1, 1, 1, 2], num_replicas=1)
    assert assignment != DeviceAssignment(Topology.virtual([2, 1, 2, 2]), assignment.core_assignment)
    assert assignment != assignment.core_assignment.tolist()
    assert repr(assignment).endswith("missing_devices=0), num_replicas=2, num_cores_per_replica=2)")
    with pytest.raises(ValueError, match="read-only"):
        assignment.core_assignment[0] = 1


def test_nothing_is_an_assignment_too() -> None:
    empty = DeviceAssignment.build(Topology.virtual([2, 1, 1, 2]), [1, 1, 1, 2], num_replicas=0)
    assert empty.core_assignment.shape == (0, 2, 4)
    assert empty.device_indices().shape == (0, 2)
    with pytest.raises(InvalidArgumentError, match=r"0 replicas of 2 logical cores, on tasks \[\]"):
        empty.lookup_replicas(0, 0)
