"""The fake of a compiler runtime: what it notes down, and what it refuses where a real one would quietly do else."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import torchstrat as ts
from torchstrat.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.sharding.grid import DeviceGrid, Sharding
from torchstrat.testing import fake_tpu_strategy
from torchstrat.testing.fake_tpu import FakeSpmdRuntime

GRID = DeviceGrid(((0, 1, 2, 3), (4, 5, 6, 7)))
SPLIT, STACK = Sharding.split((4,)), Sharding.split((4,)).stacked()


@pytest.fixture
def runtime() -> FakeSpmdRuntime:
    return FakeSpmdRuntime(8)


# -- devices -----------------------------------------------------------------------------------------------------------


def test_devices(runtime: FakeSpmdRuntime) -> None:
    assert (runtime.num_devices, runtime.num_hosts, runtime.device) == (8, 1, torch.device("cpu"))
    assert runtime.name
    assert runtime.device_attributes() == [{"name": f"CPU:{number}"} for number in range(8)]


def test_cores_of_chips_are_numbered_core_first_then_along_x_y_z() -> None:
    found = FakeSpmdRuntime(16, [2, 2, 2, 2], num_hosts=2).device_attributes()
    assert found[0] == {"name": "TPU:0", "coords": [0, 0, 0], "core_on_chip": 0, "process_index": 0}
    assert [own["core_on_chip"] for own in found] == [0, 1] * 8
    assert [own["coords"] for own in found[::2]] == [[x, y, z] for z in (0, 1) for y in (0, 1) for x in (0, 1)]
    assert [own["process_index"] for own in found] == [0] * 8 + [1] * 8


@pytest.mark.parametrize("mesh", [[8, 1, 1, 1], [2, 2, 2], [2, 2, 1, 2], (1, 1, 4, 2)])
def test_they_make_a_mesh(mesh: Any) -> None:
    strategy = ts.TPUStrategy(_runtime=FakeSpmdRuntime(8, mesh))
    expected = [*mesh[:2], 1, mesh[2]] if len(mesh) == 3 else [*mesh]
    assert strategy.device_assignment.topology.mesh_shape.tolist() == expected
    assert strategy.num_replicas_in_sync == 8
    strategy.close()


# -- annotations and parts ---------------------------------------------------------------------------------------------


def test_an_annotation_is_that_of_the_object_and_the_last(runtime: FakeSpmdRuntime) -> None:
    tensor = torch.zeros(4, 8)
    assert runtime.annotation(tensor) is None
    assert runtime.sharding_of(tensor) == ""
    runtime.annotate(tensor, Sharding.split((1, 4)), GRID)
    assert runtime.annotation(tensor) == Sharding.split((1, 4))
    assert runtime.annotation(tensor.clone()) is None
    assert runtime.annotation(torch.zeros(4, 8)) is None
    runtime.annotate(tensor, Sharding.replicated(2, 4), GRID)
    assert runtime.annotation(tensor) == Sharding.replicated(2, 4)
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("shape", "sharding", "text"),
    [
        ((8, 4), Sharding.replicated(2, 4), "{replicated}"),
        ((8, 4), Sharding.split((2, 2)), "{devices=[2,2,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"),
        ((2, 8), STACK, "{devices=[2,4]0,1,2,3,4,5,6,7}"),
    ],
)
def test_what_it_says_about_a_tensor(
    runtime: FakeSpmdRuntime, shape: tuple[int, ...], sharding: Sharding, text: str
) -> None:
    tensor = torch.zeros(shape)
    runtime.annotate(tensor, sharding, GRID)
    assert runtime.sharding_of(tensor) == text


def test_parts_are_stacked(runtime: FakeSpmdRuntime) -> None:
    placed = runtime.place([torch.zeros(4), torch.ones(4)], STACK, GRID)
    assert placed.tolist() == [[0.0] * 4, [1.0] * 4]
    assert runtime.annotation(placed) == STACK
    assert runtime.placed == 1


def annotated(shape: Any, sharding: Sharding, grid: DeviceGrid = GRID) -> None:
    runtime = FakeSpmdRuntime(8)
    tensor = torch.zeros(shape)
    try:
        runtime.annotate(tensor, sharding, grid)
    finally:
        assert runtime.annotation(tensor) is None


def placed(parts: list[torch.Tensor], sharding: Sharding) -> None:
    runtime = FakeSpmdRuntime(8)
    try:
        runtime.place(parts, sharding, GRID)
    finally:
        assert runtime.placed == 0


@pytest.mark.parametrize(
    ("call", "args", "message"),
    [
        # what a compiler would misunderstand
        (annotated, ((6, 4), Sharding.split((4, 1))), "does not divide into"),
        (annotated, ((4,), Sharding.split((4, 1))), "has 2 entries"),
        (annotated, ((4,), Sharding.split((2,))), "are not the 4 logical devices"),
        (annotated, ((4,), SPLIT, DeviceGrid(((0, 1, 2, 3),))), "runs on all of 0 to 7"),
        (annotated, ((4,), SPLIT, DeviceGrid(((0, 1, 2, 3), (5, 6, 7, 8)))), "runs on all of 0 to 7"),
        (placed, ([torch.zeros(4)], STACK), "1 parts for 2 replicas"),
        (placed, ([torch.zeros(4), torch.zeros(8)], STACK), "needs equal parts"),
        (placed, ([torch.zeros(4), torch.zeros(4, dtype=torch.int64)], STACK), "needs equal parts"),
        (placed, ([torch.zeros(4, device="meta")] * 2, STACK), "on the host"),
        (placed, ([torch.zeros(4)] * 2, Sharding.replicated(2, 4)), "does not cut it over the replicas"),
        (placed, ([torch.zeros(6)] * 2, STACK), "does not divide"),
        # numbers that do not fit each other
        (FakeSpmdRuntime, (0,), "at least one of each"),
        (FakeSpmdRuntime, (8, None, 3), "as many devices on each host"),
        (FakeSpmdRuntime, (8, None, 0), "at least one of each"),
        *((FakeSpmdRuntime, (8, mesh), "with 8 places") for mesh in ([2, 2], [2, 2, 1], [2, 2, 2, 2], [-2, -4, 1])),
        *((fake_tpu_strategy, numbers, "each has to be at least 1") for numbers in ((0, 1), (1, 0), (-1, 2))),
    ],
)
def test_what_is_refused(call: Any, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call(*args)


def test_only_tensors_are_annotated(runtime: FakeSpmdRuntime) -> None:
    with pytest.raises(WrongTypeError, match="got list"):
        runtime.annotate([1.0], SPLIT, GRID)  # type: ignore[arg-type]


# -- programs ----------------------------------------------------------------------------------------------------------


def test_programs_are_compiled_once_each(runtime: FakeSpmdRuntime) -> None:
    runtime.execute()
    assert runtime.compiles() == 0
    for program, compiled in ((("step", 4), 1), (("step", 4), 1), (("step", 2), 2), (("step", 4), 2), (None, 2)):
        runtime.program = program
        runtime.execute(wait=program is None)
        assert runtime.compiles() == compiled
    assert (runtime.executions, runtime.waits) == (6, 1)


def test_one_step_is_recorded_at_a_time(runtime: FakeSpmdRuntime) -> None:
    with runtime.tracing():
        with pytest.raises(ContextError, match="one after the other"), runtime.tracing():
            raise AssertionError("never entered")
        assert runtime.traced == 0
    with pytest.raises(KeyError), runtime.tracing():
        raise KeyError
    with runtime.tracing():
        pass
    assert runtime.traced == 2


def test_the_stream_of_random_numbers(runtime: FakeSpmdRuntime) -> None:
    outside = torch.get_rng_state()
    try:
        runtime.seed(3)
        first = torch.rand(4)
        state = runtime.random_state()
        second = torch.rand(4)
        assert not torch.equal(first, second)
        runtime.restore_random_state(state)
        assert torch.equal(torch.rand(4), second)
        runtime.seed(3)
        assert torch.equal(torch.rand(4), first)
    finally:
        torch.set_rng_state(outside)


@pytest.mark.parametrize(("replicas", "logical_devices"), [(1, 1), (3, 1), (1, 4), (2, 4)])
def test_a_strategy_of_that_many(replicas: int, logical_devices: int) -> None:
    strategy = fake_tpu_strategy(replicas, logical_devices)
    assert isinstance(strategy, ts.TPUStrategy)
    assert strategy.num_replicas_in_sync == replicas
    assignment = strategy.device_assignment
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (replicas, logical_devices)
    value = torch.zeros(2, 4 * logical_devices)
    assert strategy.split_to_logical_devices(value, [1, logical_devices]).shape == value.shape
    with pytest.raises(InvalidArgumentError, match=f"a replica has {logical_devices} logical device"):
        strategy.split_to_logical_devices(torch.zeros(2, 5), [1, 5])
    strategy.close()
