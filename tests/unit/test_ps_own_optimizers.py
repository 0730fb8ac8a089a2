"""Optimizers of the program's own classes, on one worker: their numbers are a plain loop's, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torchstrat as ts
from tests.matrix.gradient_updates import Decaying, Lookahead
from tests.matrix.table import assert_close
from tests.support.parameter_servers import on_servers
from tests.support.turns import every_second
from torchstrat.errors import UnsupportedError
from torchstrat.testing.fake_cluster import FakeCluster
from torchstrat.testing.training import dtype_and_seed

Make = Callable[[Any], Any]


class Place(NamedTuple):
    """Where a program trains: plainly, or on the servers of a cluster."""

    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    cluster: FakeCluster | None = None


Between = Callable[["Program", int, Place], None]


class Program:
    """Four steps; ``between(program, index, place)`` is called before the first, with -1, and behind each."""

    def __init__(self, make: Make) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = make(self.model.parameters())

    def clamp(self, *_: Any) -> None:
        with torch.no_grad():
            self.model[2].weight.clamp_(-0.1, 0.1)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (self.model(x) - y).square().mean().backward()
        self.stepped(x)

    def stepped(self, x: torch.Tensor) -> None:
        self.optimizer.step()

    def numbers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.model.state_dict().items():
            yield name, value.detach().clone()
        one, depth = self.optimizer, 0
        while one is not None:
            yield f"{depth}.rates", torch.tensor([group.get("lr", 0.0) for group in one.param_groups])
            for name in one.__dict__.keys() & {"scale", "count"}:
                yield f"{depth}.{name}", torch.tensor(float(getattr(one, name)))
            for index, parameter in enumerate(self.model.parameters()):
                for name, value in one.state.get(parameter, {}).items():
                    yield f"{depth}.{index}.{name}", torch.as_tensor(value).clone()
            one, depth = getattr(one, "base", None), depth + 1


def train(
    make: Make, between: Between, kind: type[Program], cluster: FakeCluster | None, **options: Any
) -> dict[str, torch.Tensor]:
    strategy = cluster.strategy(**options) if cluster else None
    place = Place(strategy.scope, cluster) if strategy else Place()
    torch.manual_seed(0)
    with place.scope():
        program = kind(make)
    draw = torch.Generator().manual_seed(1)
    for index in range(-1, 4):
        if index >= 0:
            batch = torch.randn(8 + index, 3, generator=draw), torch.randn(8 + index, 2, generator=draw)
            if strategy:
                ts.ClusterCoordinator(strategy).schedule(program.step, batch).get(60)
            else:
                program.step(*batch)
        if strategy:
            strategy.extended.pull()
        between(program, index, place)
    if strategy:
        strategy.extended.pull()
    return dict(program.numbers())


def check(
    make: Make, between: Between, kind: type[Program] = Program, *, ps: int = 2, restarts: bool = False, **options: Any
) -> None:
    """On servers it comes to the numbers of the plain loop. ``options``: of the strategy."""
    with dtype_and_seed(torch.float64, 0), FakeCluster(workers=1, ps=ps, restarts_servers=restarts) as cluster:
        wanted = train(make, between, kind, None)
        assert_close(train(make, between, kind, cluster, **options), wanted)


def at(*wanted: int) -> Callable[[Callable[[Any], Any]], Between]:
    """``act`` behind these steps alone; -1 is before the first."""
    return lambda act: lambda program, index, _: act(program) if index in wanted else None


NOTHING = at()(lambda _: None)


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1)


def with_momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


# -- hooks around steps, and steps that the program puts into the object ----------------------------------------------


class Overriding(SGD):
    """Derives from SGD and does not call its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


def _replace_step(program: Program) -> None:
    """By one that shrinks the parameters first."""
    optimizer, parameters = program.optimizer, list(program.model.parameters())
    plain = optimizer.step

    def step(self: Optimizer, closure: Any = None) -> Any:
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.9)
        return plain()

    optimizer.step = MethodType(step, optimizer)


def _for_a_while(begin: Callable[[Any], object], end: Callable[[Any], object], first: int, last: int) -> Between:
    return lambda program, index, _: (
        program.__dict__.update(begun=begin(program)) if index == first else index == last and end(program)
    )


def _scheduled(of: Callable[[Any], Optimizer], before: Callable[[Any], object]) -> Between:
    """A scheduler is stepped behind each step."""

    def between(program: Any, index: int, _: Place) -> None:
        if index == -1:
            before(program)
            program.scheduler = torch.optim.lr_scheduler.StepLR(of(program), 1, 0.5)
        else:
            program.scheduler.step()

    return between


def hooked(kind: str) -> Callable[[Any], Any]:
    return lambda program: getattr(program.optimizer, f"register_step_{kind}_hook")(program.clamp)


AROUND: dict[str, Between] = {
    "a hook from the start": at(-1)(hooked("post")),
    "a hook later": at(1)(hooked("post")),
    "a hook before the step, later": at(1)(hooked("pre")),
    "a hook for a while": _for_a_while(hooked("post"), lambda program: program.begun.remove(), -1, 1),
    "a step from the start": at(-1)(_replace_step),
    "a step from the start, and scheduled": _scheduled(lambda program: program.optimizer, _replace_step),
    "a step later": at(1)(_replace_step),
    "a step for a while": _for_a_while(_replace_step, lambda program: program.optimizer.__dict__.pop("step"), 0, 2),
}


@pytest.mark.parametrize("kind", [SGD, Overriding])
@pytest.mark.parametrize("around", AROUND)
def test_hooks_around_steps_and_steps_in_the_object_are_those_of_the_program(around: str, kind: Any) -> None:
    SGD([torch.empty(0)])  # from now on PyTorch's hooks are around its step
    check(lambda parameters: kind(parameters, lr=0.1), AROUND[around])


def test_a_hook_counts_on_its_worker_while_other_settings_change() -> None:
    batch = torch.ones(1, 3), torch.ones(1, 2)
    with on_servers(lambda: Program(sgd), ps=1) as job:
        program, seen = job.made, list[int]()
        job.coordinator.schedule(program.step, batch)
        program.optimizer.register_step_post_hook(lambda *_: seen.append(len(seen)))

        def step_and_count() -> int:
            program.step(*batch)
            hook = next(iter(program.optimizer._optimizer_step_post_hooks.values()))
            return len(hook.__closure__[0].cell_contents)

        counts = []
        for training in (True, False, True):
            program.model.train(training)
            counts.append(job.run(step_and_count))
        assert counts == [1, 2, 3]


@pytest.mark.parametrize("when", [-1, 1])
@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize(
    ("make", "hooked", "says"),
    [
        (lambda parameters: Decaying(parameters, lr=0.1), lambda own: own, "SGD.step, called within it"),
        (lambda parameters: Lookahead(sgd(parameters)), lambda own: own.base, "those of the SGD that it wraps"),
    ],
    ids=["super().step()", "wrapped"],
)
def test_hooks_in_the_middle_of_a_step_are_refused(
    make: Make, hooked: Callable[[Any], Any], says: str, kind: str, when: int
) -> None:
    SGD([torch.empty(0)])  # from now on PyTorch's hooks are around its step
    act = at(when)(lambda program: getattr(hooked(program.optimizer), f"register_step_{kind}_hook")(program.clamp))
    with pytest.raises(UnsupportedError, match=says):
        check(make, act)


GLOBAL_HOOKS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "before steps": register_optimizer_step_pre_hook,
    "after steps": register_optimizer_step_post_hook,
    "forward": register_module_forward_hook,
    "backward": register_module_full_backward_hook,
}


@pytest.mark.parametrize("name", GLOBAL_HOOKS)
def test_hooks_on_everything_are_refused_as_long_as_they_are_there(name: str) -> None:
    batch = torch.ones(1, 3), torch.ones(1, 2)
    with on_servers(lambda: Program(sgd), ps=1) as job:
        job.run(job.made.step, *batch)
        handle = GLOBAL_HOOKS[name](lambda *_: None)
        try:
            with pytest.raises(UnsupportedError, match=r"<lambda> is registered as a hook on all (modules|optimizers)"):
                job.coordinator.schedule(job.made.step, batch)
        finally:
            handle.remove()
        job.run(job.made.step, *batch)


# -- attributes, entries of groups, and calls of either of two --------------------------------------------------------


class Scaling(SGD):
    """By an entry of its group, if it has one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * group.get("scale", 1.0))


class Averaging(SGD):
    """Keeps averages in a list, and the last step's length in a tensor that is another one each time."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.averages = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.length: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        super().step()
        with torch.no_grad():
            self.length = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
            for average, p in zip(self.averages, self.param_groups[0]["params"], strict=True):
                average.lerp_(p, 0.1)


def _use_averages(program: Program) -> None:
    with torch.no_grad():
        for average, p in zip(program.optimizer.averages, program.model.parameters(), strict=True):
            p.copy_(average / (1 + program.optimizer.length))


class InTwoParts(SGD):
    """Climbs, and goes back as far as it has kept in an attribute."""

    kept_in: type = dict

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.climbed = self.kept_in()

    @torch.no_grad()
    def climb(self) -> None:
        for number, p in enumerate(self.param_groups[0]["params"]):
            by = 0.1 * p.grad
            p.add_(by)
            if isinstance(self.climbed, dict):
                self.climbed[number] = by
            elif len(self.climbed) <= number:
                self.climbed.append(by)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for number, p in enumerate(self.param_groups[0]["params"]):
            p.sub_(self.climbed[number] + 0.1 * p.grad)


class InAList(InTwoParts):
    kept_in = list


class Climbing(Program):
    def stepped(self, x: torch.Tensor) -> None:
        self.optimizer.climb()


class ThenStepping(Climbing):
    def stepped(self, x: torch.Tensor) -> None:
        super().stepped(x)
        self.optimizer.step()


@pytest.mark.parametrize("make", [InTwoParts, InAList])
@pytest.mark.parametrize("kind", [Climbing, ThenStepping])
def test_tensors_that_a_function_puts_into_attributes_are_refused(kind: type[Program], make: type[InTwoParts]) -> None:
    with pytest.raises(UnsupportedError, match=f"put tensors into attributes of {make.__name__}"):
        check(make, NOTHING, kind)


class Fading(SGD):
    """Steps by an attribute that it changes, and counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.scale, self.fading, self.count = 1.0, 1.0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.scale)
        self.scale *= self.fading


class Uncounted(SGD):
    """Changes nothing of its own, so that it may be cut."""

    scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.scale)


def _set(*indices: int, **values: float) -> Between:
    return at(*indices)(lambda program: program.optimizer.__dict__.update(values))


def _in_turn(*all_of_them: Between) -> Between:
    return lambda *args: [one(*args) for one in all_of_them] and None


def test_what_steps_have_set_is_that_of_the_last_pull_and_what_a_function_sets_is_put_back() -> None:
    with on_servers(lambda: Program(Fading)) as job:
        program, optimizer, batch = job.made, job.made.optimizer, (torch.ones(1, 3), torch.ones(1, 2))

        def set_it() -> None:
            optimizer.scale, optimizer.new = 5.0, 1

        job.run(program.step, *batch)
        job.strategy.extended.pull()
        job.run(program.step, *batch)
        assert optimizer.count == 1, "of the last pull"
        with pytest.warns(UserWarning, match=r"set scale of Fading from 1\.0 to 5\.0 \(steps are made on the servers"):
            job.run(set_it)
        assert job.run(lambda: (optimizer.scale, hasattr(optimizer, "new"))) == (1.0, False)
        job.run(program.step, *batch)
        job.strategy.extended.pull()
        assert (optimizer.count, optimizer.scale) == (3, 1.0)


def test_a_list_that_a_function_puts_in_the_place_of_none_is_put_back() -> None:
    with on_servers(lambda: Program(Fading)) as job:
        optimizer = job.made.optimizer
        optimizer.kept = None

        def set_it() -> int:
            optimizer.kept = [1]
            return 7

        assert job.run(lambda: optimizer.kept) is None
        with pytest.warns(UserWarning, match=r"set kept of Fading from None to \[1\] \(steps are made on the servers"):
            assert job.run(set_it) == 7
        assert job.run(lambda: optimizer.kept) is None


# -- optimizers that wrap others --------------------------------------------------------------------------------------


class Apart(Optimizer):
    """Has groups of its own."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {"decay": 0.9})
        self.base = base

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(group["decay"])


class Forwarding(Lookahead):
    """Saves and loads what it wraps, and then has its groups again."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "own": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        super().load_state_dict(state["own"])
        self.param_groups = self.base.param_groups


class Showing(Optimizer):
    """Shows groups and state of what it wraps as its own."""

    param_groups = property(lambda self: self.base.param_groups, lambda self, _: None)  # type: ignore[assignment]
    state = property(lambda self: self.base.state, lambda self, _: None)  # type: ignore[assignment]

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        pass

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class First(Optimizer):
    """Has the first parameter of those that it steps."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups[0]["params"][:1], {})
        self.base = base

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Counting(SGD):
    """Steps by what it has counted, and shows that in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.count, self.scale = 0, 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["k"] = self.count
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * self.scale / self.count)


WRAPPERS: dict[str, Make] = {
    "shares groups": lambda parameters: Lookahead(with_momentum(parameters)),
    "has groups of its own": lambda parameters: Apart(with_momentum(parameters)),
    "loads both": lambda parameters: Forwarding(with_momentum(parameters)),
    "shows the other's": lambda parameters: Showing(with_momentum(parameters)),
    "of a class of one's own": lambda parameters: Apart(Counting(parameters, lr=0.1)),
}


def _reload(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _set_rate(optimizer: Any) -> None:
    name = "lr" if "lr" in optimizer.param_groups[0] else "decay"
    optimizer.param_groups[0][name] *= 0.3


def _wrapper(program: Program) -> Any:
    return program.optimizer


def _base(program: Program) -> Any:
    return program.optimizer.base


def _went_back(to: Callable[[Program], Any]) -> Between:
    saved: list[Any] = []

    def between(program: Program, index: int, _: Place) -> None:
        if index == 0:
            saved.append(copy.deepcopy((program.model.state_dict(), to(program).state_dict())))
        if index == 2:
            program.model.load_state_dict(saved[-1][0])
            to(program).load_state_dict(saved[-1][1])

    return between


def _loaded(which: Callable[[Program], Any], whose: Callable[[Program], Any]) -> Between:
    return at(1)(lambda program: (_reload(which(program)), _set_rate(whose(program))))


LOADED = {
    f"the {which.__name__[1:]} loaded, then a rate of the {whose.__name__[1:]} set": _loaded(which, whose)
    for which in (_wrapper, _base)
    for whose in (_wrapper, _base)
}
BETWEEN: dict[str, Between] = {
    "nothing": NOTHING,
    "a rate of the wrapped one": at(1)(lambda program: _set_rate(_base(program))),
    "its schedule": _scheduled(_base, lambda _: None),
    "its state cleared": at(1)(lambda program: _base(program).state.clear()),
    "its state saved and loaded later": _went_back(_base),
    "the wrapper's state saved and loaded later": _went_back(_wrapper),
    **LOADED,
}


@pytest.mark.parametrize(("between", "wrapper"), every_second(BETWEEN, WRAPPERS))
def test_a_wrapper_and_what_it_wraps_are_those_of_the_program(between: str, wrapper: str) -> None:
    check(WRAPPERS[wrapper], BETWEEN[between])


def _part_and_merge(program: Program, index: int, _: Place) -> None:
    if index == 0:
        _reload(_wrapper(program))
        _set_rate(_wrapper(program))
    if index == 1:
        _base(program).param_groups = _wrapper(program).param_groups
    if index == 2:
        _set_rate(_base(program))


def _train_the_rest(program: Program, index: int, place: Place) -> None:
    if index == 1:
        with place.scope():
            program.optimizer.add_param_group({"params": [*program.model[2].parameters()], "lr": 0.02})


class InTurns(Program):
    """A step of either: they have one state."""

    def stepped(self, x: torch.Tensor) -> None:
        (self.optimizer if len(x) % 2 else self.optimizer.base).step()


OTHERS: dict[str, tuple[Make, Between, type[Program]]] = {
    "tensors in attributes, after a pull": (Averaging, at(1, 2)(_use_averages), Program),
    "attributes before anything was sent, and between": (
        Fading,
        _in_turn(_set(-1, scale=2.0), _set(0, scale=5.0)),
        Program,
    ),
    "an attribute that steps change too, as it was before": (
        Fading,
        _in_turn(_set(-1, fading=0.5), _set(1, scale=1.0)),
        Program,
    ),
    "an attribute that has not gone there yet": (Fading, _in_turn(_set(-1, fading=0.5), _set(3, scale=1.0)), Program),
    "an entry of a group deleted": (
        lambda parameters: Scaling([{"params": list(parameters), "scale": 0.2}], lr=0.1),
        at(1)(lambda program: program.optimizer.param_groups[0].pop("scale")),
        Program,
    ),
    **{
        f"attribute {name} of what is wrapped": (
            WRAPPERS["of a class of one's own"],
            at(1)(lambda program, name=name, value=value: setattr(_base(program), name, value)),
            Program,
        )
        for name, value in (("scale", 0.5), ("count", 0))
    },
    "groups that part and become one again": (WRAPPERS["shares groups"], _part_and_merge, Program),
    **{
        f"a wrapper of a wrapper, {name}": (
            lambda parameters: Lookahead(WRAPPERS["shares groups"](parameters)),
            it,
            Program,
        )
        for name, it in LOADED.items()
    },
    "a step of either": (WRAPPERS["shares groups"], NOTHING, InTurns),
}


@pytest.mark.parametrize(("make", "between", "kind"), OTHERS.values(), ids=OTHERS)
def test_other_programs_with_optimizers_of_their_own(make: Make, between: Between, kind: type[Program]) -> None:
    check(make, between, kind)


def test_attributes_of_an_optimizer_that_was_cut_are_the_programs() -> None:
    two_shards = ts.partitioners.FixedShardsPartitioner(2)
    check(
        lambda parameters: Uncounted(parameters, lr=0.1),
        _set(0, scale=10.0),
        elementwise_optimizers=[Uncounted],
        variable_partitioner=two_shards,
    )


def test_parameters_that_come_later_are_stepped_by_what_is_wrapped() -> None:
    check(lambda parameters: Lookahead(with_momentum(list(parameters)[:2])), _train_the_rest, ps=1)


def test_parameters_of_what_is_wrapped_alone_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="to no parameter group of First itself"):
        check(lambda parameters: First(with_momentum(parameters)), NOTHING)


@pytest.mark.parametrize("wrapper", [None, "shares groups", "has groups of its own"])
def test_servers_that_are_started_again_get_such_optimizers_and_their_state(
    wrapper: str | None, tmp_path: Path
) -> None:
    def between(program: Program, index: int, place: Place) -> None:
        wrapped = {"base": program.optimizer.base} if wrapper else {}
        checkpoint = ts.Checkpoint(model=program.model, optimizer=program.optimizer, **wrapped)
        folder = tmp_path / ("servers" if place.cluster else "plain")
        if index == 1:
            checkpoint.save(folder)
        if index == 2:
            for server in range(2) if place.cluster else ():
                place.cluster.wait_until_lost(place.cluster.kill_server(server))
            checkpoint.restore(folder)

    make = WRAPPERS[wrapper] if wrapper else lambda parameters: Decaying(parameters, lr=0.1, momentum=0.9)
    check(make, between, restarts=True)
