"""What functions change of settings holds until they end; the coordinator's hold from when a function is scheduled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.parameter_server.dispatch import DEFAULT_DTYPE
from torchstrat.parameter_server.travel.world import World
from torchstrat.parameter_server.worker.settings import Settings
from torchstrat.testing.fake_cluster import FakeCluster


class Program:
    def __init__(self, cluster: FakeCluster) -> None:
        strategy = cluster.strategy()
        with strategy.scope():
            self.model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
            self.optimizer = torch.optim.SGD(
                [{"params": [self.model[0].weight]}, {"params": [self.model[0].bias], "lr": torch.tensor(0.5)}], lr=0.1
            )
        self.coordinator = ts.ClusterCoordinator(strategy)

    def run(self, function: Callable[[], Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = self.coordinator.schedule(function)
            self.coordinator.join(timeout=30)
        return value.get()


@pytest.fixture
def program() -> Iterator[Program]:
    with FakeCluster(workers=1, ps=1) as cluster:
        yield Program(cluster)


def fails(function: Callable[[], Any]) -> Callable[[], Any]:
    def function_that_fails() -> None:
        function()
        raise KeyError("after it has set something")

    return function_that_fails


def changes_of(program: Program) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """What a function does, and what another one sees of it."""
    model, optimizer = program.model, program.optimizer
    groups = lambda: optimizer.param_groups  # noqa: E731

    def load() -> None:
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 7.0
        optimizer.load_state_dict(state)

    return {
        "eval": (lambda: model.eval() and None, lambda: [one.training for one in model.modules()]),
        "a child's mode": (lambda: model[1].train(False) and None, lambda: [one.training for one in model.modules()]),
        "freezing": (
            lambda: model.requires_grad_(False) and None,
            lambda: [p.requires_grad for p in model.parameters()],
        ),
        "rate": (lambda: groups()[0].update(lr=3.0), lambda: groups()[0]["lr"]),
        "new name": (lambda: groups()[0].update(mine=3.0), lambda: sorted(groups()[0])),
        "deleted name": (lambda: groups()[0].pop("nesterov") and None, lambda: sorted(groups()[0])),
        "tensor": (lambda: groups()[1]["lr"].mul_(3.0) and None, lambda: float(groups()[1]["lr"])),
        "fewer groups": (lambda: groups().pop() and None, lambda: len(groups())),
        "fewer parameters": (lambda: groups()[0]["params"].clear(), lambda: len(groups()[0]["params"])),
        "load_state_dict": (load, lambda: groups()[0]["lr"]),
        "gradient mode": (lambda: torch.set_grad_enabled(False) and None, torch.is_grad_enabled),
        "autocast": (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
        "default device": (lambda: torch.set_default_device("meta"), lambda: str(torch.empty(1).device)),
    }


@pytest.mark.parametrize("how", ["returns", "raises"])
@pytest.mark.parametrize(
    "name",
    [
        *("eval", "a child's mode", "freezing", "rate", "new name", "deleted name", "tensor"),
        *("fewer groups", "fewer parameters", "load_state_dict", "gradient mode", "autocast", "default device"),
    ],
)
def test_what_a_function_sets_is_put_back(program: Program, name: str, how: str) -> None:
    change, look = changes_of(program)[name]
    before = program.run(look)
    if how == "returns":
        program.run(change)
    else:
        with pytest.raises(KeyError):
            program.run(fails(change))
    assert program.run(look) == before


def test_what_the_coordinator_sets_holds_from_then_on(program: Program) -> None:
    model, optimizer = program.model, program.optimizer
    look = lambda: (model.training, optimizer.param_groups[0]["lr"], float(optimizer.param_groups[1]["lr"]))  # noqa: E731
    program.run(lambda: model.eval() and None)
    model.eval()
    optimizer.param_groups[0]["lr"] = 2.0
    optimizer.param_groups[1]["lr"].fill_(4.0)
    assert program.run(look) == (False, 2.0, 4.0)
    model.train()
    assert program.run(look) == (True, 2.0, 4.0)


def test_plain_attributes_that_the_coordinator_sets_hold_from_then_on(program: Program) -> None:
    model = program.model
    look = lambda: (model[1].p, getattr(model, "extra", None), model[0].in_features)  # noqa: E731
    assert program.run(look) == (0.5, None, 2)
    model[1].p = 0.25
    assert program.run(look) == (0.25, None, 2)
    for value in (0.1, 0.2, 0.3):  # the last may have the address of the first
        model[1].p = value
    model.extra = ("two", 2)
    assert program.run(look) == (0.3, ("two", 2), 2)
    model[1].p = 0.5
    model.extra = None
    assert program.run(look) == (0.5, None, 2)


def test_what_a_function_sets_of_attributes_is_its_workers_until_the_coordinator_sets_it(program: Program) -> None:
    model = program.model
    program.run(lambda: setattr(model[1], "p", 0.75))
    model.eval()
    assert program.run(lambda: model[1].p) == 0.75
    model[1].p = 0.125
    assert program.run(lambda: model[1].p) == 0.125


def test_attributes_that_do_not_follow_are_warned_of_once(program: Program) -> None:
    model = program.model
    model.names = ["a"]
    assert program.run(lambda: model.names) == ["a"]
    model.names = ["b"]
    with pytest.warns(UserWarning, match=r"attribute 'names' of a Sequential was set on the coordinator.*argument"):
        program.coordinator.schedule(lambda: 0)
    model.names = ["c"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert program.coordinator.schedule(lambda: model.names).get(timeout=30) == ["a"]


def test_a_change_of_a_rate_is_warned_of_once() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    world = World(lambda spec: torch.empty(0))
    world.register(("helper", 0), optimizer)
    settings = Settings(world, lambda number: torch.empty(0))
    settings.set_options({0: ({name: value for name, value in optimizer.param_groups[0].items() if name != "params"},)})
    optimizer.param_groups[0]["lr"] = 0.1 + 0.0  # the same
    settings.put_back()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.warns(UserWarning, match=r"set lr of group 0 of SGD from 0.1 to 0.5.*Set it on the coordinator"):
        settings.put_back()
    optimizer.param_groups[0]["lr"] = 0.7
    settings.put_back()
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
def test_the_default_dtype_is_the_programs_and_is_put_back() -> None:
    settings = Settings(World(lambda spec: torch.empty(0)), lambda number: torch.empty(0))
    settings.set_modes({DEFAULT_DTYPE: torch.float64})
    assert torch.zeros(1).dtype is torch.float64
    torch.set_default_dtype(torch.float16)
    settings.put_back()
    assert torch.zeros(1).dtype is torch.float64


@pytest.mark.usefixtures("default_dtype")
def test_a_worker_in_the_coordinators_process_leaves_the_default_dtype_alone() -> None:
    settings = Settings(World(lambda spec: torch.empty(0)), lambda number: torch.empty(0), owns_process=False)
    settings.set_modes({DEFAULT_DTYPE: torch.float64})
    settings.put_back()
    assert torch.zeros(1).dtype is torch.float32
