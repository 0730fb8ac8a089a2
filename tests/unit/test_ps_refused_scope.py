"""What servers or workers cannot take is refused where it is brought, and where it is used; nothing else is."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.ps_worlds import Job
from torchstrat.errors import FunctionError, InvalidArgumentError, NotSendableError, UnsupportedError
from torchstrat.parameter_server.travel import pickling
from torchstrat.parameter_server.travel.world import World
from torchstrat.testing.fake_cluster import FakeCluster


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    def step() -> float:
        optimizer.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        return float(next(model.parameters()).detach().sum())

    return step


class WithLock(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.lock = threading.Lock()


def bad_lbfgs() -> Any:
    model = nn.Linear(2, 2)
    return model, torch.optim.LBFGS(model.parameters())


def bad_optimizer_with_a_lock() -> Any:
    model = nn.Linear(2, 2)
    return model, WithLock(model.parameters())


def bad_layout() -> Any:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(2).to_sparse())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def bad_module_with_a_lock() -> Any:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def strategy() -> Iterator[ts.ParameterServerStrategy]:
    with FakeCluster(workers=1, ps=2) as cluster:
        yield cluster.strategy()


@pytest.mark.parametrize(
    ("make", "error", "fails_at"),
    [
        (bad_lbfgs, UnsupportedError, "scope"),
        (bad_optimizer_with_a_lock, NotSendableError, "scope"),
        (bad_layout, NotImplementedError, "scope"),
        (bad_module_with_a_lock, NotSendableError, "use"),
    ],
)
def test_what_is_refused_is_not_in_the_way_of_the_rest(strategy, make, error, fails_at) -> None:
    coordinator = ts.ClusterCoordinator(strategy)

    def run(step: Callable[[], float]) -> float:
        return coordinator.schedule(step).get(timeout=30)

    with strategy.scope():
        earlier = nn.Linear(2, 2)
        its_optimizer = torch.optim.SGD(earlier.parameters(), lr=0.1)
    before = run(step_of(earlier, its_optimizer))
    refused = None
    if fails_at == "scope":
        with pytest.raises(error), strategy.scope():
            refused = make()
    else:
        with strategy.scope():
            refused = make()
    assert run(step_of(earlier, its_optimizer)) == pytest.approx(before - 0.1 * 2 * 4, abs=1e-5)
    with strategy.scope():
        later = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(later.parameters(), lr=0.1)
    first = run(step_of(later, optimizer))
    for _ in range(2):
        with pytest.raises(error):
            run(step_of(*refused))
    assert run(step_of(later, optimizer)) == pytest.approx(first - 0.1 * 2 * 4, abs=1e-5)


def test_a_module_is_taken_once_what_was_refused_has_gone(strategy) -> None:
    coordinator = ts.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = bad_module_with_a_lock()
    step = step_of(model, optimizer)
    with pytest.raises(NotSendableError, match="lock"):
        coordinator.schedule(step)
    del model.lock
    before = float(model.weight.detach().sum())
    assert coordinator.schedule(step).get(timeout=30) == pytest.approx(before - 0.1 * 2 * 4, abs=1e-5)


def test_a_model_beside_the_one_that_is_refused_trains(strategy) -> None:
    coordinator = ts.ClusterCoordinator(strategy)
    with pytest.raises(UnsupportedError), strategy.scope():  # noqa: PT012
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        refused = bad_lbfgs()
    before = float(model.weight.detach().sum())
    assert coordinator.schedule(step_of(model, optimizer)).get(timeout=30) == pytest.approx(
        before - 0.1 * 2 * 4, abs=1e-5
    )
    with pytest.raises(UnsupportedError):
        coordinator.schedule(step_of(*refused))


class WholeTables(torch.optim.Optimizer):
    """Of a script: nothing is known of it, so what it steps is on one server, whole."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        raise AssertionError("nobody steps it")


def test_a_whole_table_that_fits_on_no_server_is_refused_when_it_is_created() -> None:
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(2))
        coordinator, made = ts.ClusterCoordinator(strategy), []
        with pytest.raises(InvalidArgumentError, match=r"weight.*whole.*elementwise_optimizers=\[WholeTables\]"):
            huge_table(strategy, made)
        with strategy.scope():
            later = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(later.parameters(), lr=0.1)
        before = float(later.weight.detach().sum())
        after = coordinator.schedule(step_of(later, optimizer)).get(timeout=30)
        assert after == pytest.approx(before - 0.1 * 2 * 4, abs=1e-5)
        with pytest.raises(InvalidArgumentError, match="whole"):
            coordinator.schedule(lambda: made[0])


def huge_table(strategy: ts.ParameterServerStrategy, made: list[Any]) -> None:
    with strategy.scope():
        made.append(nn.Embedding(2**36, 8, device="meta"))
        made.append(WholeTables(made[0].parameters()))


@pytest.fixture
def only_here() -> Iterator[types.ModuleType]:
    """A module that is there when something is pickled, and not when it is unpickled."""
    module = types.ModuleType("only_here")
    exec(
        "import torch\nclass M(torch.nn.Linear): pass\nclass O(torch.optim.SGD): pass\nclass Config: size = 3",
        module.__dict__,
    )
    sys.modules["only_here"] = module
    yield module
    sys.modules.pop("only_here", None)


def test_what_a_worker_cannot_import_is_not_in_the_way_of_the_rest(only_here) -> None:
    job = Job()
    with job.scope():
        missing, good = only_here.M(2, 2), nn.Linear(2, 2)
        holder = nn.Sequential(nn.Linear(2, 2), missing)
        optimizer = only_here.O(good.parameters(), lr=0.1)
        job.registry.add_helper(optimizer)
        good.config = only_here.Config()
    increments = job.catalog.increments(0)
    with job.scope():
        around = nn.Sequential(missing)
    increments += job.catalog.increments(job.catalog.version)
    tokens = {name: job.catalog.token_of(value) for name, value in locals().items() if name != "job"}
    del sys.modules["only_here"]

    world = World(lambda spec: nn.Parameter(torch.ones(spec.shape)))
    for increment in increments:
        world.load(increment)
    own = world.resolve(tokens["good"])
    assert own(torch.ones(1, 2)).tolist() == [[3.0, 3.0]]
    assert not world.knows(tokens["missing"])
    assert world.resolve(tokens["holder"])[0](torch.ones(1, 2)).tolist() == [[3.0, 3.0]]
    uses: list[Callable[[], Any]] = [
        lambda: world.resolve(tokens["missing"]),
        lambda: world.resolve(tokens["optimizer"]),
        lambda: world.resolve(tokens["holder"])(torch.ones(1, 2)),
        lambda: list(world.resolve(tokens["around"]).parameters()),
        lambda: own.config.size,
        lambda: own.config == 3,
    ]
    for use in uses:
        with pytest.raises(FunctionError, match=r"need only_here\.\w+, which .* cannot import.*register_pickle"):
            use()


class RaisesWhenMade(nn.Linear):
    def __setstate__(self, state: Any) -> None:
        raise OSError("no such device here")


class RaisingList(list[int]):
    def extend(self, values: Any) -> None:
        raise OSError("no such device here")


class RaisingOptimizer(torch.optim.SGD):
    def __setstate__(self, state: Any) -> None:
        raise OSError("no such device here")


def _made_anew() -> Any:
    raise OSError("no such device here")


class RaisesInItsFunction:
    def __reduce__(self) -> Any:
        return _made_anew, ()


def test_what_raises_while_a_worker_makes_it_stops_nothing_else() -> None:
    job = Job()
    with job.scope():
        good, bad, around = nn.Linear(2, 1), RaisesWhenMade(2, 1), nn.Sequential(RaisesWhenMade(2, 1), nn.Tanh())
        holder = nn.Linear(1, 1)
        holder.numbers, holder.made = RaisingList([1, 2]), RaisesInItsFunction()
        optimizer, sgd = RaisingOptimizer(good.parameters(), lr=0.1), torch.optim.SGD(good.parameters(), lr=0.1)
    world = job.world()
    with job.scope():
        later = nn.Linear(2, 1)
    job.bring_up_to_date(world)
    tokens = {name: job.catalog.token_of(value) for name, value in locals().items() if name not in ("job", "world")}
    assert world.version == job.catalog.version
    assert isinstance(world.resolve(tokens["good"]), nn.Linear)
    assert isinstance(world.resolve(tokens["later"]), nn.Linear)
    assert world.resolve(tokens["around"])[1](torch.zeros(1)).tolist() == [0.0]
    assert world.resolve(tokens["holder"])(torch.zeros(1)).shape == (1,)
    assert world.resolve(tokens["sgd"]).param_groups[0]["params"] == list(world.resolve(tokens["good"]).parameters())
    uses: list[Callable[[], Any]] = [
        lambda: world.resolve(tokens["bad"]),
        lambda: world.resolve(tokens["optimizer"]),
        lambda: world.resolve(tokens["around"])(torch.ones(1, 2)),
        lambda: world.resolve(tokens["holder"]).numbers[0],
        lambda: world.resolve(tokens["holder"]).made.value,
    ]
    for use in uses:
        with pytest.raises(FunctionError, match=r"could not be made on this worker.*no such device here.*__setstate__"):
            use()


class Wrapping(torch.optim.Optimizer):
    """Whose groups are another optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_whose_groups_are_a_property_is_made_again() -> None:
    optimizer = Wrapping(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
    make, arguments, state, _, _, set_state = pickling._reduce_optimizer(optimizer)
    made = make(*arguments)
    set_state(made, state)
    assert made.param_groups is optimizer.inner.param_groups
