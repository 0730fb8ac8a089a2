"""What servers or workers cannot take is refused where it is brought, and where it is used; nothing else is."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.ps_worlds import Job as Worlds
from torchstrat.errors import FunctionError, InvalidArgumentError, NotSendableError, UnsupportedError
from torchstrat.parameter_server.travel import pickling
from torchstrat.parameter_server.travel.world import World
from torchstrat.testing.fake_cluster import FakeCluster


class Job:
    """A coordinator's program; steps of an ordinary model change the sum of its weights by 0.8."""

    def __init__(self, strategy: ts.ParameterServerStrategy) -> None:
        self.strategy, self.coordinator = strategy, ts.ClusterCoordinator(strategy)

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        def step() -> float:
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            return float(next(model.parameters()).detach().sum())

        return self.coordinator.schedule(step).get(timeout=30)

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        with self.strategy.scope():
            return ordinary()

    def assert_trains(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before = float(model.state_dict()["weight"].sum())
        assert self.run(model, optimizer) == pytest.approx(before - 0.1 * 2 * 4, abs=1e-5)


def ordinary(**attributes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    vars(model).update(attributes)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class WithLock(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.lock = threading.Lock()


def bad_layout() -> Any:
    model, optimizer = ordinary()
    model.register_buffer("mask", torch.ones(2).to_sparse())
    return model, optimizer


def with_optimizer(kind: Any) -> Any:
    model = nn.Linear(2, 2)
    return model, kind(model.parameters())


@pytest.fixture
def job() -> Iterator[Job]:
    with FakeCluster(workers=1, ps=2) as cluster:
        yield Job(cluster.strategy())


@pytest.mark.parametrize(
    ("make", "error", "fails_at"),
    [
        (lambda: with_optimizer(torch.optim.LBFGS), UnsupportedError, "scope"),
        (lambda: with_optimizer(WithLock), NotSendableError, "scope"),
        (bad_layout, NotImplementedError, "scope"),
        (lambda: ordinary(lock=threading.Lock()), NotSendableError, "use"),
    ],
    ids=["an optimizer with closures", "an optimizer with a lock", "a layout", "a module with a lock"],
)
def test_what_is_refused_is_not_in_the_way_of_the_rest(job: Job, make: Any, error: Any, fails_at: str) -> None:
    earlier = job.made()
    job.assert_trains(*earlier)
    refused = beside = None
    with pytest.raises(error) if fails_at == "scope" else nullcontext(), job.strategy.scope():
        beside, refused = ordinary(), make()
    job.assert_trains(*earlier)
    later = job.made()
    job.assert_trains(*later)
    for _ in range(2):
        with pytest.raises(error):
            job.run(*refused)
    job.assert_trains(*later)
    if error is UnsupportedError:
        job.assert_trains(*beside)


def test_a_module_is_taken_once_what_was_refused_has_gone(job: Job) -> None:
    with job.strategy.scope():
        model, optimizer = ordinary(lock=threading.Lock())
    with pytest.raises(NotSendableError, match="lock"):
        job.run(model, optimizer)
    del model.lock
    job.assert_trains(model, optimizer)


class WholeTables(torch.optim.Optimizer):
    """Of a script: nothing is known of it, so what it steps is on one server, whole."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        raise AssertionError("nobody steps it")


def test_a_whole_table_that_fits_on_no_server_is_refused_when_it_is_created() -> None:
    with FakeCluster(workers=1, ps=2) as cluster:
        job, made = Job(cluster.strategy(ts.partitioners.FixedShardsPartitioner(2))), []
        refusal = r"weight.*whole.*elementwise_optimizers=\[WholeTables\]"
        with pytest.raises(InvalidArgumentError, match=refusal), job.strategy.scope():  # noqa: PT012
            made.append(nn.Embedding(2**36, 8, device="meta"))
            made.append(WholeTables(made[0].parameters()))
        job.assert_trains(*job.made())
        with pytest.raises(InvalidArgumentError, match="whole"):
            job.coordinator.schedule(lambda: made[0])


def assert_need(uses: list[Callable[[], Any]], message: str) -> None:
    for use in uses:
        with pytest.raises(FunctionError, match=message):
            use()


def test_what_a_worker_cannot_import_is_not_in_the_way_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    only_here = types.ModuleType("only_here")  # there when something is pickled, and not when it is unpickled
    exec(
        "import torch\nclass M(torch.nn.Linear): pass\nclass O(torch.optim.SGD): pass\nclass Config: size = 3",
        vars(only_here),
    )
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    worlds = Worlds()
    with worlds.scope():
        missing, good = only_here.M(2, 2), nn.Linear(2, 2)
        holder = nn.Sequential(nn.Linear(2, 2), missing)
        optimizer = only_here.O(good.parameters(), lr=0.1)
        worlds.registry.add_helper(optimizer)
        good.config = only_here.Config()
    increments = worlds.catalog.increments(0)
    with worlds.scope():
        around = nn.Sequential(missing)
    increments += worlds.catalog.increments(worlds.catalog.version)
    tokens = [worlds.catalog.token_of(value) for value in (missing, good, holder, optimizer, around)]
    del sys.modules["only_here"]
    world = World(lambda spec: nn.Parameter(torch.ones(spec.shape)))
    for increment in increments:
        world.load(increment)
    x = torch.ones(1, 2)
    assert not world.knows(tokens[0])
    own, own_holder = world.resolve(tokens[1]), world.resolve(tokens[2])
    assert own(x).tolist() == own_holder[0](x).tolist() == [[3.0, 3.0]]
    uses: list[Callable[[], Any]] = [
        lambda: world.resolve(tokens[0]),
        lambda: world.resolve(tokens[3]),
        lambda: own_holder(x),
        lambda: list(world.resolve(tokens[4]).parameters()),
        lambda: own.config.size,
        lambda: own.config == 3,
    ]
    assert_need(uses, r"need only_here\.\w+, which .* cannot import.*register_pickle")


def _raises(*_: Any) -> Any:
    raise OSError("no such device here")


class RaisesWhenMade(nn.Linear):
    __setstate__ = _raises


class RaisingList(list[int]):
    extend = _raises


class RaisingOptimizer(torch.optim.SGD):
    __setstate__ = _raises


class RaisesInItsFunction:
    def __reduce__(self) -> Any:
        return _raises, ()


def test_what_raises_while_a_worker_makes_it_stops_nothing_else() -> None:
    worlds = Worlds()
    with worlds.scope():
        good, bad, around = nn.Linear(2, 1), RaisesWhenMade(2, 1), nn.Sequential(RaisesWhenMade(2, 1), nn.Tanh())
        holder = nn.Linear(1, 1)
        holder.numbers, holder.made = RaisingList([1, 2]), RaisesInItsFunction()
        optimizer, sgd = RaisingOptimizer(good.parameters(), lr=0.1), torch.optim.SGD(good.parameters(), lr=0.1)
    world = worlds.world()
    with worlds.scope():
        later = nn.Linear(2, 1)
    worlds.bring_up_to_date(world)
    assert world.version == worlds.catalog.version

    def own(value: Any) -> Any:
        return world.resolve(worlds.catalog.token_of(value))

    assert isinstance(own(good), nn.Linear)
    assert isinstance(own(later), nn.Linear)
    assert own(around)[1](torch.zeros(1)).tolist() == [0.0]
    assert own(holder)(torch.zeros(1)).shape == (1,)
    assert own(sgd).param_groups[0]["params"] == list(own(good).parameters())
    uses: list[Callable[[], Any]] = [
        lambda: own(bad),
        lambda: own(optimizer),
        lambda: own(around)(torch.ones(1, 2)),
        lambda: own(holder).numbers[0],
        lambda: own(holder).made.value,
    ]
    assert_need(uses, r"could not be made on this worker.*no such device here.*__setstate__")


class Wrapping(torch.optim.Optimizer):
    """Whose groups are another optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]


def test_an_optimizer_whose_groups_are_a_property_is_made_again() -> None:
    optimizer = Wrapping(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
    make, arguments, state, _, _, set_state = pickling._reduce_optimizer(optimizer)
    made = make(*arguments)
    set_state(made, state)
    assert made.param_groups is optimizer.inner.param_groups
