"""Captured objects: tokens, increments, and what a worker makes of them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.unit.ps_worlds import Job, make_tensor
from torchstrat.errors import ContextError, FunctionError, InvalidArgumentError, NotSendableError
from torchstrat.parameter_server.travel.closures import pack, unpack
from torchstrat.parameter_server.travel.sendable import StaysHere
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.second(self.first(x))))


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_worker_gets_the_structure_and_its_own_tensors(job):
    with job.scope():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
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


def test_no_value_of_a_variable_travels(job):
    with job.scope():
        model = Net()
        torch.optim.SGD(model.parameters(), lr=0.1)
    [increment] = job.catalog.increments(0)
    assert increment.tensors == ()
    secret = model.first.weight.detach().numpy().tobytes()
    assert secret not in increment.blob


def test_an_optimizer_travels_without_state_and_works_there(job):
    with job.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state

    world = job.world()
    [(_, own)] = world.optimizers()
    assert not own.state
    copy = world.resolve(job.catalog.token_of(model))
    before = copy.weight.detach().clone()
    copy(torch.ones(1, 2)).sum().backward()
    own.step()
    assert not torch.equal(copy.weight, before)
    own.zero_grad()


class Averaged(torch.optim.SGD):
    """Sets an attribute of its own, which torch's way to pickle optimizers leaves out."""

    def __init__(self, params: Any, lr: float, rho: float) -> None:
        super().__init__(params, lr=lr)
        self.rho = rho


def test_an_optimizers_own_attributes_travel(job):
    with job.scope():
        model = nn.Linear(2, 1)
        optimizer = Averaged(model.parameters(), lr=0.1, rho=0.5)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step` in something that cannot be pickled
    [(_, own)] = job.world().optimizers()
    assert own.rho == 0.5
    assert "step" not in vars(own)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 1)],
            milestones=[2],
        ),
    ],
    ids=["step", "lambda", "one_cycle", "plateau", "sequential"],
)
@pytest.mark.parametrize("inside", [True, False], ids=["in scope", "outside"])
def test_a_scheduler_may_be_reached_but_not_stepped(job, make, inside):
    with job.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = make(optimizer) if inside else None
    scheduler = scheduler or make(optimizer)
    world = job.world()

    def rate() -> float:
        return scheduler.get_last_lr()[0]

    def step() -> None:
        scheduler.step()

    assert job.send(rate, world)() == scheduler.get_last_lr()[0]
    with pytest.raises(ContextError, match=r"LR.*\.step\(\) was called in a scheduled function.*on the coordinator"):
        job.send(step, world)()
    optimizer.step()
    is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    scheduler.step(*([1.0] if is_plateau else []))  # the coordinator's own still steps


def test_a_gradient_scaler_travels(job):
    with job.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert job.call(lambda: scaler.get_scale()) == 8.0


def test_increments_build_on_each_other(job):
    with job.scope():
        trunk = nn.Linear(2, 2)
    world = job.world()
    assert world.version == job.catalog.version == 1
    with job.scope():
        head = nn.Sequential(trunk, nn.Linear(2, 1))
    job.bring_up_to_date(world)
    assert world.version == 2
    own = world.resolve(job.catalog.token_of(head))
    assert own[0] is world.resolve(job.catalog.token_of(trunk))
    assert job.catalog.increments(2) == []

    late = World(make_tensor)
    increments = job.catalog.increments(0)
    assert [increment.number for increment in increments] == [1, 2]
    with pytest.raises(FunctionError, match="out of order: increment 2 builds on 1, and this worker has 0"):
        late.load(increments[1])
    for increment in (*increments, *increments):  # again: nothing changes
        late.load(increment)
    assert late.resolve(job.catalog.token_of(head))[0] is late.resolve(job.catalog.token_of(trunk))


def test_a_half_built_model_is_left_alone(job):
    with job.scope():
        model = nn.Linear(2, 2)
    job.world()
    with job.scope():
        half = nn.Sequential(nn.Linear(2, 2))
        half.lock = threading.Lock()  # could not travel
        late = World(make_tensor)
        for increment in job.catalog.increments(0, new=False):
            late.load(increment)
        assert [token for token, _ in late.modules()] == [job.catalog.token_of(model)]
        job.catalog.trim(1)  # and the same when it is made anew
        [increment] = job.catalog.increments(0, new=False)
        late = World(make_tensor)
        late.load(increment)
        assert [token for token, _ in late.modules()] == [job.catalog.token_of(model)]
        assert late.version == 1
    del half.lock
    job.bring_up_to_date(late)
    assert type(late.resolve(job.catalog.token_of(half))) is nn.Sequential


def test_a_new_child_of_an_old_module_comes_with_it(job):
    with job.scope():
        model = nn.Sequential(nn.Linear(2, 2))
    job.world()
    job.catalog.trim(1)
    model.append(nn.Tanh())
    assert job.catalog.token_of(model[1]) is not None
    late = World(make_tensor)
    for increment in job.catalog.increments(0, new=False):
        late.load(increment)
    assert late.resolve(job.catalog.token_of(model))[1] is late.resolve(job.catalog.token_of(model[1]))


def test_children_that_only_the_tree_knows(job):
    with job.scope():
        model = nn.Sequential(nn.Linear(2, 2))
    model.append(nn.Tanh())  # after the scope
    assert job.catalog.token_of(model[1]) is not None
    world = job.world()
    assert world.resolve(job.catalog.token_of(model))[1] is world.resolve(job.catalog.token_of(model[1]))


def test_what_is_dropped_is_left_out_for_those_who_come_later(job):
    with job.scope():
        kept, dropped = nn.Linear(2, 2), nn.Linear(3, 3)
    early = job.world()
    kept_token, dropped_token = job.catalog.token_of(kept), job.catalog.token_of(dropped)
    job.forget(dropped)
    del dropped
    gc.collect()

    late = job.world()
    assert [token for token, _ in late.modules()] == [kept_token]
    assert late.version == early.version
    assert len(list(late.tensors())) == 2

    with job.scope():
        third = nn.Linear(1, 1)
    for world in (early, late):
        job.bring_up_to_date(world)
        assert [token for token, _ in world.modules()] == [kept_token, job.catalog.token_of(third)]
    with pytest.raises(FunctionError, match="does not have"):
        early.resolve(dropped_token)


def test_a_packed_function_keeps_alive_what_it_refers_to(job):
    with job.scope():
        model = nn.Linear(2, 2)
    packed, token = pack((model,), job.catalog, "args"), job.catalog.token_of(model)
    job.world()
    del model
    gc.collect()
    world = job.world()
    assert unpack(packed, world) == (world.resolve(token),)


def test_trimmed_increments_are_made_anew(job):
    for _ in range(3):
        with job.scope():
            job.registry.add_helper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    kept = []
    for _ in range(3):
        with job.scope():
            kept.append(nn.Linear(1, 1))
        job.catalog.increments(0)
    world = job.world()
    job.catalog.trim(world.version)
    assert job.catalog.increments(world.version) == []
    with pytest.raises(InvalidArgumentError, match="trimmed"):
        job.catalog.increments(1)
    [whole] = job.catalog.increments(0)
    assert whole.since == 0
    late = World(make_tensor)
    late.load(whole)
    assert [token for token, _ in late.modules()] == [job.catalog.token_of(module) for module in kept]


def test_a_bare_parameter_goes_with_the_next_increment(job):
    with job.scope():
        weight = nn.Parameter(torch.ones(2))
    job.place(weight)
    world = job.world()
    assert world.version == 0

    own = job.send(lambda: weight, world)()
    assert torch.equal(own, torch.full((2,), 100.0 + job.spec_of(weight).number))
    assert own is world.resolve(job.catalog.token_of(weight))
    assert world.spec_of(own) == job.spec_of(weight)
    assert world.spec_of(torch.ones(2)) is None


class Strategylike:
    pass


class Slotted:
    """Cannot be held weakly."""

    __slots__ = ()


def test_registered_objects(job):
    strategy, dataset = Strategylike(), Slotted()
    job.catalog.register(strategy, ("strategy",))
    job.catalog.register(dataset, ("per_worker", 3))
    with pytest.raises(InvalidArgumentError, match="belongs to another object"):
        job.catalog.register(Strategylike(), ("strategy",))
    made = []

    def make_missing(token: Any) -> Any:
        made.append(token)
        return ["the worker's"]

    world = job.world(make_missing=make_missing)
    own = Strategylike()
    world.register(("strategy",), own)
    fn = job.send(lambda: (strategy, dataset), world)
    assert fn()[0] is own
    assert fn()[1] == ["the worker's"]
    assert job.send(lambda: dataset, world)() is fn()[1]
    assert made == [("per_worker", 3)]


def test_a_reference_to_nothing(job):
    strategy = Strategylike()
    job.catalog.register(strategy, ("strategy",))
    packed = pack(lambda: strategy, job.catalog)
    with pytest.raises(
        FunctionError, match=r"refers to \('strategy',\), which this worker does not have. It has: none"
    ):
        unpack(packed, job.world())


class Counter:
    def __init__(self, owner: Any = None) -> None:
        self.owner = owner


def test_a_recipe_builds_the_workers_object(job):
    strategy, counter = Strategylike(), Counter()
    job.catalog.register(strategy, ("strategy",))
    job.catalog.register(counter, ("variable", 0), recipe=lambda world: Counter(owner=strategy))
    with job.scope():
        model = nn.Linear(1, 1)
        model.counter = counter
    world = World(make_tensor)
    world.register(("strategy",), own := Strategylike())
    job.bring_up_to_date(world)
    made = world.resolve(("variable", 0))
    assert made.owner is own
    assert world.resolve(job.catalog.token_of(model)).counter is made
    assert job.send(lambda: counter, world)() is made


class Hook(StaysHere):
    def __init__(self) -> None:
        self.lock = threading.Lock()  # could not travel

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        with self.lock:
            raise AssertionError("called on a worker")


def test_hooks_may_stay_behind(job):
    with job.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_forward_pre_hook(Hook())
    optimizer.register_step_pre_hook(Hook())
    model.register_forward_hook(lambda module, inputs, output: output + 1)  # the user's own travels
    world = job.world()
    own = world.resolve(job.catalog.token_of(model))
    assert own(torch.zeros(1, 1)).item() == own.bias.item() + 1


def test_state_of_a_captured_module_that_cannot_travel_is_named(job):
    with job.scope():
        model = nn.Sequential(nn.Linear(1, 1))
    model[0].extra = {"lock": threading.Lock()}
    with pytest.raises(NotSendableError, match=r"^Sequential\.0\.extra\['lock'\] \(a _thread.lock\) cannot travel"):
        job.catalog.increments(0)
    del model[0].extra
    assert job.world().version == 1


def test_a_head_put_on_outside_the_scope_is_named(job):
    with job.scope():
        model = nn.Sequential(nn.Linear(1, 1))
    model.append(nn.Linear(1, 1))
    with pytest.raises(NotSendableError, match=r"^Sequential\.1\.weight .*created outside the strategy's scope"):
        job.catalog.increments(0)


def test_frozen_state_without_a_variable_goes_by_value(job):
    with job.scope():
        model = nn.Linear(2, 2)
    model.register_buffer("table", torch.arange(3.0))
    own = job.world().resolve(job.catalog.token_of(model))
    assert torch.equal(own.table, torch.arange(3.0))
    assert own.table is not model.table


def test_classes_of_captured_modules_in_a_function(job):
    """A class of this function's reaches workers with its instances, the same class with both of two increments."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self) -> torch.Tensor:
            return self.weight * 2

    with job.scope():
        first = Local()
    world = job.world()
    with job.scope():
        second = Local()
    job.bring_up_to_date(world)
    copies = [world.resolve(job.catalog.token_of(module)) for module in (first, second)]
    assert type(copies[0]) is type(copies[1])
    assert torch.equal(copies[1](), 2 * copies[1].weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 3))),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
        lambda: prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5),
        lambda: nn.LSTM(4, 3),
        lambda: nn.TransformerEncoderLayer(4, 2, dropout=0.0),
        lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(4, 3)),
    ],
    ids=["weight norm", "orthogonal", "spectral norm", "pruned", "lstm", "transformer", "averaged"],
)
def test_modules_that_hold_more_than_parameters(job, make):
    with job.scope():
        model = make()
    assert model.training
    own = job.world().resolve(job.catalog.token_of(model))
    own.load_state_dict(model.state_dict())  # the worker's part is to bring the values
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    own.eval(), model.eval()
    found, expected = own(x), model(x)
    if isinstance(found, tuple):
        found, expected = found[0], expected[0]
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in own.parameters() if parameter.requires_grad)
