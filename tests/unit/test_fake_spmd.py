"""The fake of a compiler runtime: what it notes down, and what it refuses where a real one would quietly do else."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import torchstrat as ts
from torchstrat.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.sharding.grid import DeviceGrid, Sharding
from torchstrat.testing import fake_tpu_strategy
from torchstrat.testing.fake_spmd import FakeSpmdRuntime
from torchstrat.tpu.runtime_devices import RuntimeDevices

GRID = DeviceGrid(((0, 1, 2, 3), (4, 5, 6, 7)))


@pytest.fixture
def runtime() -> FakeSpmdRuntime:
    return FakeSpmdRuntime(8)


# -- devices -----------------------------------------------------------------------------------------------------------


def test_devices(runtime: FakeSpmdRuntime) -> None:
    assert (runtime.num_devices, runtime.num_hosts, runtime.device) == (8, 1, torch.device("cpu"))
    assert runtime.name
    assert [own["name"] for own in runtime.device_attributes()] == [f"CPU:{number}" for number in range(8)]
    assert not any("coords" in own for own in runtime.device_attributes())


def test_cores_of_chips_are_numbered_core_first_then_along_x_y_z() -> None:
    found = FakeSpmdRuntime(16, [2, 2, 2, 2], num_hosts=2).device_attributes()
    assert found[0] == {"name": "TPU:0", "coords": [0, 0, 0], "core_on_chip": 0, "process_index": 0}
    assert [own["core_on_chip"] for own in found] == [0, 1] * 8
    assert [own["coords"] for own in found[::2]] == [[x, y, z] for z in (0, 1) for y in (0, 1) for x in (0, 1)]
    assert [own["process_index"] for own in found] == [0] * 8 + [1] * 8


@pytest.mark.parametrize("mesh", [[8, 1, 1, 1], [2, 2, 2], [2, 2, 1, 2], (1, 1, 4, 2)])
def test_they_make_a_mesh(mesh: Any) -> None:
    found = FakeSpmdRuntime(8, mesh).device_attributes()
    devices = RuntimeDevices.from_attributes(found, [0] * 8)
    expected = [*mesh[:2], 1, mesh[2]] if len(mesh) == 3 else [*mesh]
    assert devices.topology.mesh_shape.tolist() == expected


@pytest.mark.parametrize(
    "arguments", [(0,), (8, None, 3), (8, None, 0), (8, [2, 2]), (8, [2, 2, 1]), (8, [2, 2, 2, 2]), (8, [-2, -4, 1])]
)
def test_numbers_that_do_not_fit(arguments: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        FakeSpmdRuntime(*arguments)


# -- annotations -------------------------------------------------------------------------------------------------------


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


def test_annotations_keep_nothing_alive(runtime: FakeSpmdRuntime) -> None:
    tensor = torch.zeros(4)
    runtime.annotate(tensor, Sharding.split((4,)), GRID)
    assert len(runtime._annotations) == 1
    del tensor
    gc.collect()
    assert len(runtime._annotations) == 0


def test_what_it_says_about_a_tensor(runtime: FakeSpmdRuntime) -> None:
    for shape, sharding, text in (
        ((8, 4), Sharding.replicated(2, 4), "{replicated}"),
        ((8, 4), Sharding.split((2, 2)), "{devices=[2,2,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"),
        ((2, 8), Sharding.split((4,)).stacked(), "{devices=[2,4]0,1,2,3,4,5,6,7}"),
    ):
        tensor = torch.zeros(shape)
        runtime.annotate(tensor, sharding, GRID)
        assert runtime.sharding_of(tensor) == text


@pytest.mark.parametrize(
    ("shape", "sharding", "grid", "message"),
    [
        ((6, 4), Sharding.split((4, 1)), GRID, "does not divide into"),
        ((4,), Sharding.split((4, 1)), GRID, "has 2 entries"),
        ((4,), Sharding.split((2,)), GRID, "are not the 4 logical devices"),
        ((4,), Sharding.split((4,)), DeviceGrid(((0, 1, 2, 3),)), "runs on all of 0 to 7"),
        ((4,), Sharding.split((4,)), DeviceGrid(((0, 1, 2, 3), (5, 6, 7, 8))), "runs on all of 0 to 7"),
    ],
)
def test_annotations_that_a_compiler_would_misunderstand(
    runtime: FakeSpmdRuntime, shape: tuple[int, ...], sharding: Sharding, grid: DeviceGrid, message: str
) -> None:
    tensor = torch.zeros(shape)
    with pytest.raises(InvalidArgumentError, match=message):
        runtime.annotate(tensor, sharding, grid)
    assert runtime.annotation(tensor) is None


def test_only_tensors_are_annotated(runtime: FakeSpmdRuntime) -> None:
    with pytest.raises(WrongTypeError, match="got list"):
        runtime.annotate([1.0], Sharding.split((4,)), GRID)  # type: ignore[arg-type]


# -- placing -----------------------------------------------------------------------------------------------------------


def test_parts_are_stacked(runtime: FakeSpmdRuntime) -> None:
    sharding = Sharding.split((4,)).stacked()
    placed = runtime.place([torch.zeros(4), torch.ones(4)], sharding, GRID)
    assert placed.tolist() == [[0.0] * 4, [1.0] * 4]
    assert runtime.annotation(placed) == sharding
    assert runtime.placed == 1


@pytest.mark.parametrize(
    ("parts", "sharding", "message"),
    [
        ([torch.zeros(4)], Sharding.split((4,)).stacked(), "1 parts for 2 replicas"),
        ([torch.zeros(4), torch.zeros(8)], Sharding.split((4,)).stacked(), "needs equal parts"),
        ([torch.zeros(4), torch.zeros(4, dtype=torch.int64)], Sharding.split((4,)).stacked(), "needs equal parts"),
        ([torch.zeros(4, device="meta")] * 2, Sharding.split((4,)).stacked(), "on the host"),
        ([torch.zeros(4)] * 2, Sharding.replicated(2, 4), "does not cut it over the replicas"),
        ([torch.zeros(6)] * 2, Sharding.split((4,)).stacked(), "does not divide"),
    ],
)
def test_parts_that_cannot_be_placed(
    runtime: FakeSpmdRuntime, parts: list[torch.Tensor], sharding: Sharding, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        runtime.place(parts, sharding, GRID)
    assert runtime.placed == 0


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


# -- the strategy on it ------------------------------------------------------------------------------------------------


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


def test_a_step_on_it_trains_as_on_one_device() -> None:
    """Two replicas, four logical devices: the gradient is the mean over the whole batch."""
    batch = torch.arange(32.0).reshape(4, 8) / 32

    def losses(strategy: ts.Strategy, parts: list[int]) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(rows: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            hidden = strategy.split_to_logical_devices(model(rows), parts)
            loss = (hidden - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        found = []
        for rows in strategy.distribute_dataset([batch, batch, batch]):
            found.append(strategy.reduce("mean", strategy.run(step, args=(rows,))).item())
        weight = model.weight.detach().clone()
        strategy.close()
        return found, weight

    fake, plain = losses(fake_tpu_strategy(2, 4), [1, 4]), losses(ts.OneDeviceStrategy("cpu"), [1, 1])
    assert fake[0] == pytest.approx(plain[0], rel=1e-6)
    torch.testing.assert_close(fake[1], plain[1], rtol=1e-6, atol=1e-7)
    assert fake[0][2] < fake[0][0]


def test_rules_are_passed_on() -> None:
    strategy = fake_tpu_strategy(2, 4, sharding_rules={"0.weight": ("d0", None)})
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    runtime: Any = strategy._system.runtime
    assert runtime.annotation(model[0].weight) == Sharding((4,), (("d0",), ()))
    assert runtime.annotation(model[0].bias) == Sharding.replicated(1, 4)
    strategy.close()
    with pytest.raises(InvalidArgumentError, match="axis 'd1'"):
        fake_tpu_strategy(2, 4, sharding_rules={"0.weight": ("d1", None)})


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (-1, 2)])
def test_numbers_of_replicas_and_devices(numbers: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="each has to be at least 1"):
        fake_tpu_strategy(*numbers)
