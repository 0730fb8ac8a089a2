"""Captured objects: tokens, increments, and what a worker makes of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import lr_scheduler

from tests.support.ps_worlds import Job, make_tensor
from torchstrat.errors import ContextError, FunctionError, InvalidArgumentError, NotSendableError
from torchstrat.parameter_server.travel.closures import pack, unpack
from torchstrat.parameter_server.travel.world import World


class Net(nn.Module):
    """Tied weights, a shared child, buffers, a child without members, and Python state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm
        self.act = nn.ReLU()
        self.history = ["made"]


@pytest.fixture
def job() -> Job:
    return Job()


def made_in_scope(job: Job, make: Callable[[], Any]) -> Any:
    with job.scope():
        return make()


def linear(job: Job, size: int = 2) -> nn.Linear:
    return made_in_scope(job, lambda: nn.Linear(size, size))


def modules_of(world: World) -> list[Any]:
    return [token for token, _ in world.modules()]


def tokens(job: Job, *objects: Any) -> list[Any]:
    return [job.catalog.token_of(one) for one in objects]


def late(job: Job, **options: Any) -> World:
    """A worker that joins now."""
    world = World(make_tensor)
    for increment in job.catalog.increments(0, **options):
        world.load(increment)
    return world


def test_a_worker_gets_the_structure_and_its_own_tensors(job: Job) -> None:
    model = made_in_scope(job, Net)
    optimizer = made_in_scope(job, lambda: torch.optim.Adam(model.parameters(), lr=0.25))
    world = job.world()
    copy = world.resolve(job.catalog.token_of(model))
    assert type(copy) is Net
    assert copy is not model
    assert copy.history == ["made"]
    assert copy.second.weight is copy.first.weight
    assert copy.again is copy.norm
    assert world.resolve(job.catalog.token_of(model.act)) is copy.act
    assert isinstance(copy.first.weight, nn.Parameter)
    assert not isinstance(copy.norm.running_mean, nn.Parameter)
    number = job.spec_of(model.first.weight).number
    assert torch.equal(copy.first.weight, torch.full((3, 3), 100.0 + number))
    [(token, own)] = world.optimizers()
    assert token == job.catalog.token_of(optimizer)
    assert [id(p) for p in own.param_groups[0]["params"]] == [id(p) for p in copy.parameters()]
    assert own.param_groups[0]["lr"] == 0.25


def test_no_value_of_a_variable_and_no_state_travels(job: Job) -> None:
    model = linear(job)
    optimizer = made_in_scope(job, lambda: torch.optim.Adam(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    increments = job.catalog.increments(0)
    secret = model.weight.detach().numpy().tobytes()
    assert all(increment.tensors == () and secret not in increment.blob for increment in increments)
    [(_, own)] = job.world().optimizers()
    assert not own.state


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 1)], milestones=[2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("inside", [True, False], ids=["in scope", "outside"])
def test_a_scheduler_may_be_reached_but_not_stepped(job: Job, name: str, inside: bool) -> None:
    model = linear(job)
    optimizer = made_in_scope(job, lambda: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    scheduler = made_in_scope(job, lambda: SCHEDULERS[name](optimizer)) if inside else SCHEDULERS[name](optimizer)
    world = job.world()
    assert job.send(lambda: scheduler.get_last_lr()[0], world)() == scheduler.get_last_lr()[0]
    with pytest.raises(ContextError, match=r"LR.*\.step\(\) was called in a scheduled function.*on the coordinator"):
        job.send(lambda: scheduler.step(), world)()
    optimizer.step()
    scheduler.step(*([1.0] if name == "plateau" else []))  # the coordinator's own still steps


def test_increments_build_on_each_other(job: Job) -> None:
    trunk = linear(job)
    world = job.world()
    assert world.version == job.catalog.version == 1
    head = made_in_scope(job, lambda: nn.Sequential(trunk, nn.Linear(2, 1)))
    job.bring_up_to_date(world)
    assert world.version == 2
    assert world.resolve(job.catalog.token_of(head))[0] is world.resolve(job.catalog.token_of(trunk))
    assert job.catalog.increments(2) == []

    other = World(make_tensor)
    increments = job.catalog.increments(0)
    assert [increment.number for increment in increments] == [1, 2]
    with pytest.raises(FunctionError, match="out of order: increment 2 builds on 1, and this worker has 0"):
        other.load(increments[1])
    for increment in (*increments, *increments):  # again: nothing changes
        other.load(increment)
    assert other.resolve(job.catalog.token_of(head))[0] is other.resolve(job.catalog.token_of(trunk))


def test_a_half_built_model_is_left_alone(job: Job) -> None:
    model = linear(job)
    job.world()
    with job.scope():
        half = nn.Sequential(nn.Linear(2, 2))
        half.lock = threading.Lock()  # could not travel
        assert modules_of(late(job, new=False)) == tokens(job, model)
        job.catalog.trim(1)  # and the same when it is made anew
        world = late(job, new=False)
        assert modules_of(world) == tokens(job, model)
        assert world.version == 1
    del half.lock
    job.bring_up_to_date(world)
    assert type(world.resolve(job.catalog.token_of(half))) is nn.Sequential


@pytest.mark.parametrize("is_known", [True, False])
def test_a_child_that_only_the_tree_knows_comes_with_its_module(job: Job, is_known: bool) -> None:
    model = made_in_scope(job, lambda: nn.Sequential(nn.Linear(2, 2)))
    if is_known:
        job.world()
        job.catalog.trim(1)
    model.append(nn.Tanh())  # after the scope
    assert job.catalog.token_of(model[1]) is not None
    world = late(job, new=False) if is_known else job.world()
    assert world.resolve(job.catalog.token_of(model))[1] is world.resolve(job.catalog.token_of(model[1]))


def test_what_is_dropped_is_left_out_for_those_who_come_later(job: Job) -> None:
    kept, dropped = linear(job), linear(job, 3)
    early = job.world()
    [dropped_token] = tokens(job, dropped)
    job.forget(dropped)
    del dropped
    gc.collect()

    later = job.world()
    assert modules_of(later) == tokens(job, kept)
    assert later.version == early.version
    assert len(list(later.tensors())) == 2

    third = linear(job, 1)
    for world in (early, later):
        job.bring_up_to_date(world)
        assert modules_of(world) == tokens(job, kept, third)
    with pytest.raises(FunctionError, match="does not have"):
        early.resolve(dropped_token)


def test_a_packed_function_keeps_alive_what_it_refers_to(job: Job) -> None:
    model = linear(job)
    packed, [token] = pack((model,), job.catalog, "args"), tokens(job, model)
    job.world()
    del model
    gc.collect()
    world = job.world()
    assert unpack(packed, world) == (world.resolve(token),)


def test_trimmed_increments_are_made_anew(job: Job) -> None:
    for _ in range(3):
        made_in_scope(job, lambda: job.registry.add_helper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)))
    kept = []
    for _ in range(3):
        kept.append(linear(job, 1))
        job.catalog.increments(0)
    world = job.world()
    job.catalog.trim(world.version)
    assert job.catalog.increments(world.version) == []
    with pytest.raises(InvalidArgumentError, match="trimmed"):
        job.catalog.increments(1)
    [whole] = job.catalog.increments(0)
    assert whole.since == 0
    assert modules_of(late(job)) == tokens(job, *kept)


class Strategylike: ...


def test_registered_objects(job: Job) -> None:
    strategy, made = Strategylike(), []
    job.catalog.register(strategy, ("strategy",))
    with pytest.raises(InvalidArgumentError, match="belongs to another object"):
        job.catalog.register(Strategylike(), ("strategy",))
    with pytest.raises(FunctionError, match=r"refers to \('strategy',\), which this worker does not have.* has: none"):
        unpack(pack(lambda: strategy, job.catalog), job.world())
    fn = job.send(lambda: strategy, job.world(make_missing=lambda token: made.append(token) or ["the worker's"]))
    assert fn() == ["the worker's"]
    assert made == [("strategy",)]


def test_state_of_a_captured_module_that_cannot_travel_is_named(job: Job) -> None:
    model = made_in_scope(job, lambda: nn.Sequential(nn.Linear(1, 1)))
    model[0].extra = {"lock": threading.Lock()}
    with pytest.raises(NotSendableError, match=r"^Sequential\.0\.extra\['lock'\] \(a _thread.lock\) cannot travel"):
        job.catalog.increments(0)
    del model[0].extra
    assert job.world().version == 1


def test_a_head_put_on_outside_the_scope_is_named(job: Job) -> None:
    model = made_in_scope(job, lambda: nn.Sequential(nn.Linear(1, 1)))
    model.append(nn.Linear(1, 1))
    with pytest.raises(NotSendableError, match=r"^Sequential\.1\.weight .*created outside the strategy's scope"):
        job.catalog.increments(0)


def test_frozen_state_without_a_variable_goes_by_value(job: Job) -> None:
    model = linear(job)
    model.register_buffer("table", torch.arange(3.0))
    own = job.world().resolve(job.catalog.token_of(model))
    assert torch.equal(own.table, torch.arange(3.0))
    assert own.table is not model.table


def test_classes_of_captured_modules_in_a_function(job: Job) -> None:
    """A class of this function's reaches workers with its instances, the same class with both of two increments."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self) -> torch.Tensor:
            return self.weight * 2

    first = made_in_scope(job, Local)
    world = job.world()
    second = made_in_scope(job, Local)
    job.bring_up_to_date(world)
    copies = [world.resolve(token) for token in tokens(job, first, second)]
    assert type(copies[0]) is type(copies[1])
    assert torch.equal(copies[1](), 2 * copies[1].weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 3))),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
        lambda: prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5),
        lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(4, 3)),
    ],
    ids=["orthogonal", "spectral norm", "pruned", "averaged"],
)
def test_modules_that_hold_more_than_parameters(job: Job, make: Callable[[], nn.Module]) -> None:
    """More of them train in the contract's cases."""
    model = made_in_scope(job, make)
    own = job.world().resolve(job.catalog.token_of(model))
    own.load_state_dict(model.state_dict())  # the worker's part is to bring the values
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    found = own.eval()(x)
    torch.testing.assert_close(found, model.eval()(x))
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in own.parameters() if parameter.requires_grad)
