"""Optimizers of the program's own classes, on one worker: their numbers are a plain loop's, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torchstrat as ts
from tests.matrix.gradient_updates import Decaying, Lookahead
from tests.matrix.table import assert_close
from torchstrat.errors import UnsupportedError
from torchstrat.testing.fake_cluster import FakeCluster
from torchstrat.testing.training import dtype_and_seed

Between = Callable[["Program", int], None]


class Program:
    """Four steps; ``between(program, index)`` is called behind each."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = make(self.model.parameters())

    def clamp(self, *_: Any) -> None:
        with torch.no_grad():
            self.model[2].weight.clamp_(-0.1, 0.1)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (self.model(x) - y).square().mean().backward()
        self.optimizer.step()

    def numbers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.model.state_dict().items():
            yield name, value.detach().clone()
        one, depth = self.optimizer, 0
        while one is not None:
            yield f"{depth}.rates", torch.tensor([group.get("lr", 0.0) for group in one.param_groups])
            for index, parameter in enumerate(self.model.parameters()):
                for name, value in one.state.get(parameter, {}).items():
                    yield f"{depth}.{index}.{name}", torch.as_tensor(value).clone()
            one, depth = getattr(one, "base", None), depth + 1


def take_step(program: Any, batch: tuple[torch.Tensor, torch.Tensor], strategy: Any) -> None:
    """On servers, or plainly where there is no strategy."""
    if strategy:
        ts.ClusterCoordinator(strategy).schedule(program.step, batch).get(60)
    else:
        program.step(*batch)


def train(make: Callable[[Any], Any], between: Between, strategy: Any = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with strategy.scope() if strategy else nullcontext():
        program = Program(make)
    draw = torch.Generator().manual_seed(1)
    for index in range(-1, 4):
        if index >= 0:
            batch = torch.randn(8, 3, generator=draw), torch.randn(8, 2, generator=draw)
            take_step(program, batch, strategy)
        if strategy:
            strategy.extended.pull()
        between(program, index)
    if strategy:
        strategy.extended.pull()
    return dict(program.numbers())


def check(make: Callable[[Any], Any], between: Between) -> None:
    """On servers it comes to the numbers of the plain loop."""
    with dtype_and_seed(torch.float64, 0), FakeCluster(workers=1, ps=2) as cluster:
        wanted = train(make, between)
        assert_close(train(make, between, cluster.strategy()), wanted)


# -- hooks around steps -----------------------------------------------------------------------------------------------


def at(*wanted: int) -> Callable[[Callable[[Program], Any]], Between]:
    """``act`` behind these steps alone; -1 is before the first."""
    return lambda act: lambda program, index: act(program) if index in wanted else None


class Scaling(SGD):
    """By an entry of its group, if it has one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * group.get("scale", 1.0))


class Overriding(SGD):
    """Derives from SGD and does not call its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


def removed_later(program: Program, index: int) -> None:
    if index == -1:
        program.handle = program.optimizer.register_step_post_hook(program.clamp)  # type: ignore[attr-defined]
    if index == 1:
        program.handle.remove()  # type: ignore[attr-defined]


HOOKS: dict[str, Between] = {
    "from the start": at(-1)(lambda program: program.optimizer.register_step_post_hook(program.clamp)),
    "later": at(1)(lambda program: program.optimizer.register_step_post_hook(program.clamp)),
    "before the step, later": at(1)(lambda program: program.optimizer.register_step_pre_hook(program.clamp)),
    "for a while": removed_later,
}


@pytest.mark.parametrize("kind", [SGD, Overriding])
@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_around_steps_are_those_of_the_program(hooks: str, kind: type[Optimizer]) -> None:
    SGD([torch.empty(0)])  # from now on PyTorch's hooks are around its step
    check(lambda parameters: kind(parameters, lr=0.1), HOOKS[hooks])  # type: ignore[call-arg]


def test_a_hook_counts_on_its_worker_while_other_settings_change() -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            program = Program(lambda parameters: SGD(parameters, lr=0.1))
        coordinator = ts.ClusterCoordinator(strategy)
        seen: list[int] = []
        coordinator.schedule(program.step, (torch.ones(1, 3), torch.ones(1, 2)))
        program.optimizer.register_step_post_hook(lambda *_: seen.append(len(seen)))

        def step_and_count() -> int:
            program.step(torch.ones(1, 3), torch.ones(1, 2))
            hook = next(iter(program.optimizer._optimizer_step_post_hooks.values()))
            return len(hook.__closure__[0].cell_contents)

        counts = []
        for training in (True, False, True):
            program.model.train(training)
            counts.append(coordinator.schedule(step_and_count).get(60))
        assert counts == [1, 2, 3]


@pytest.mark.parametrize("when", [-1, 1])
@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize(
    ("make", "hooked", "says"),
    [
        (lambda parameters: Decaying(parameters, lr=0.1), lambda own: own, "SGD.step, called within it"),
        (lambda parameters: Lookahead(SGD(parameters, lr=0.1)), lambda own: own.base, "those of the SGD that it wraps"),
    ],
    ids=["super().step()", "wrapped"],
)
def test_hooks_in_the_middle_of_a_step_are_refused(
    make: Callable[[Any], Any], hooked: Callable[[Any], Any], says: str, kind: str, when: int
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
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            program = Program(lambda parameters: SGD(parameters, lr=0.1))
        coordinator = ts.ClusterCoordinator(strategy)
        batch = torch.ones(1, 3), torch.ones(1, 2)
        coordinator.schedule(program.step, batch).get(60)
        handle = GLOBAL_HOOKS[name](lambda *_: None)
        try:
            with pytest.raises(UnsupportedError, match=r"<lambda> is registered as a hook on all (modules|optimizers)"):
                coordinator.schedule(program.step, batch)
        finally:
            handle.remove()
        coordinator.schedule(program.step, batch).get(60)


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


def _replaced_under_a_scheduler(program: Program, index: int) -> None:
    if index == -1:
        _replace_step(program)
        program.scheduler = torch.optim.lr_scheduler.StepLR(program.optimizer, 1, 0.5)  # type: ignore[attr-defined]
    else:
        program.scheduler.step()  # type: ignore[attr-defined]


def _replaced_for_a_while(program: Program, index: int) -> None:
    if index == 0:
        _replace_step(program)
    if index == 2:
        del program.optimizer.step


STEPS: dict[str, Between] = {
    "from the start": at(-1)(_replace_step),
    "from the start, and scheduled": _replaced_under_a_scheduler,
    "later": at(1)(_replace_step),
    "for a while": _replaced_for_a_while,
}


@pytest.mark.parametrize("kind", [SGD, Overriding])
@pytest.mark.parametrize("steps", STEPS)
def test_a_step_that_the_program_puts_into_the_object(steps: str, kind: type[Optimizer]) -> None:
    check(lambda parameters: kind(parameters, lr=0.1), STEPS[steps])  # type: ignore[call-arg]


# -- attributes -------------------------------------------------------------------------------------------------------


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


def test_tensors_that_steps_keep_in_attributes_are_here_after_a_pull() -> None:
    check(Averaging, at(1, 2)(_use_averages))


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


@pytest.mark.parametrize("kind", [InTwoParts, InAList])
@pytest.mark.parametrize("steps", [True, False])
def test_tensors_that_a_function_puts_into_attributes_are_refused(steps: bool, kind: type[InTwoParts]) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            program = Program(kind)
        coordinator = ts.ClusterCoordinator(strategy)

        def climb() -> None:
            program.model(torch.ones(1, 3)).sum().backward()
            program.optimizer.climb()
            if steps:
                program.optimizer.step()

        with pytest.raises(UnsupportedError, match=f"put tensors into attributes of {kind.__name__}"):
            coordinator.schedule(climb).get(60)


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


def _momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "shares groups": lambda parameters: Lookahead(_momentum(parameters)),
    "has groups of its own": lambda parameters: Apart(_momentum(parameters)),
    "loads both": lambda parameters: Forwarding(_momentum(parameters)),
    "shows the other's": lambda parameters: Showing(_momentum(parameters)),
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


def _halve_rate(program: Program, index: int) -> None:
    if index == -1:
        program.scheduler = torch.optim.lr_scheduler.StepLR(_base(program), 1, 0.5)  # type: ignore[attr-defined]
    else:
        program.scheduler.step()  # type: ignore[attr-defined]


def _went_back(to: Callable[[Program], Any]) -> Between:
    saved: list[Any] = []

    def between(program: Program, index: int) -> None:
        if index == 0:
            saved.append(copy.deepcopy((program.model.state_dict(), to(program).state_dict())))
        if index == 2:
            program.model.load_state_dict(saved[-1][0])
            to(program).load_state_dict(saved[-1][1])

    return between


BETWEEN: dict[str, Between] = {
    "nothing": at()(lambda _: None),
    "a rate of the wrapped one": at(1)(lambda program: _set_rate(_base(program))),
    "its schedule": _halve_rate,
    "its state cleared": at(1)(lambda program: _base(program).state.clear()),
    "its state saved and loaded later": _went_back(_base),
    "the wrapper's state saved and loaded later": _went_back(_wrapper),
}


def _merged_again(program: Program, index: int) -> None:
    if index == 0:
        _reload(_wrapper(program))
        _set_rate(_wrapper(program))
    if index == 1:
        _base(program).param_groups = _wrapper(program).param_groups
    if index == 2:
        _set_rate(_base(program))


def _loaded(which: Callable[[Program], Any], whose: Callable[[Program], Any]) -> Between:
    def act(program: Program) -> None:
        _reload(which(program))
        _set_rate(whose(program))

    return at(1)(act)


for _which in (_wrapper, _base):
    for _whose in (_wrapper, _base):
        _name = f"the {_which.__name__[1:]} loaded, then a rate of the {_whose.__name__[1:]} set"
        BETWEEN[_name] = _loaded(_which, _whose)


def test_groups_that_part_and_become_one_again() -> None:
    check(WRAPPERS["shares groups"], _merged_again)


@pytest.mark.parametrize("between", [name for name in BETWEEN if "loaded, then" in name])
def test_a_wrapper_of_a_wrapper(between: str) -> None:
    check(lambda parameters: Lookahead(Lookahead(_momentum(parameters))), BETWEEN[between])


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("between", BETWEEN)
def test_a_wrapper_and_what_it_wraps_are_those_of_the_program(between: str, wrapper: str) -> None:
    check(WRAPPERS[wrapper], BETWEEN[between])


def test_what_is_deleted_from_a_group_is_gone() -> None:
    act = at(1)(lambda program: program.optimizer.param_groups[0].pop("scale"))
    check(lambda parameters: Scaling([{"params": list(parameters), "scale": 0.2}], lr=0.1), act)


@pytest.mark.parametrize(("name", "value"), [("scale", 0.5), ("count", 0)])
def test_attributes_of_what_is_wrapped(name: str, value: float) -> None:
    act = at(1)(lambda program: setattr(_base(program), name, value))
    check(WRAPPERS["of a class of one's own"], act)


def test_a_step_of_either() -> None:
    """Both in turns: they have one state."""

    class InTurns(Program):
        def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
            self.optimizer.zero_grad()
            (self.model(x) - y).square().mean().backward()
            (self.optimizer if len(x) % 2 else self.optimizer.base).step()

    def train_in_turns(strategy: Any = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope() if strategy else nullcontext():
            program = InTurns(WRAPPERS["shares groups"])
        for rows in (3, 4, 5, 6):
            batch = torch.ones(rows, 3), torch.ones(rows, 2)
            take_step(program, batch, strategy)
        return dict(program.numbers())

    with dtype_and_seed(torch.float64, 0), FakeCluster(workers=1, ps=2) as cluster:
        assert_close(train_in_turns(cluster.strategy()), train_in_turns())


class First(Optimizer):
    """Has the first parameter of those that it steps."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups[0]["params"][:1], {})
        self.base = base

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def test_parameters_of_what_is_wrapped_alone_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="to no parameter group of First itself"):
        check(lambda parameters: First(_momentum(parameters)), BETWEEN["nothing"])


def test_parameters_that_come_later_are_stepped_by_what_is_wrapped() -> None:
    def train_later(strategy: Any = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope() if strategy else nullcontext():
            program = Program(lambda parameters: Lookahead(_momentum(list(parameters)[:2])))
        for index in range(4):
            if index == 2:
                with strategy.scope() if strategy else nullcontext():
                    program.optimizer.add_param_group({"params": [*program.model[2].parameters()], "lr": 0.02})
            batch = torch.ones(4, 3), torch.ones(4, 2)
            take_step(program, batch, strategy)
        return dict(program.numbers())

    with dtype_and_seed(torch.float64, 0), FakeCluster(workers=1, ps=1) as cluster:
        assert_close(train_later(cluster.strategy()), train_later())


@pytest.mark.parametrize("wrapper", [None, "shares groups", "has groups of its own"])
def test_servers_that_are_started_again_get_such_optimizers_and_their_state(
    wrapper: str | None, tmp_path: Path
) -> None:
    make = WRAPPERS[wrapper] if wrapper else lambda parameters: Decaying(parameters, lr=0.1, momentum=0.9)

    def train_on(cluster: FakeCluster | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        strategy = cluster.strategy() if cluster else None
        with strategy.scope() if strategy else nullcontext():
            program = Program(make)
        wrapped = {"base": program.optimizer.base} if wrapper else {}
        checkpoint = ts.Checkpoint(model=program.model, optimizer=program.optimizer, **wrapped)
        folder = tmp_path / ("servers" if cluster else "plain")
        for index in range(6):
            batch = torch.ones(index + 1, 3), torch.ones(index + 1, 2)
            take_step(program, batch, strategy)
            if index == 1:
                checkpoint.save(folder)
            if index == 3:
                for server in range(2) if cluster else ():
                    cluster.wait_until_lost(cluster.kill_server(server))
                checkpoint.restore(folder)
        return dict(program.numbers())

    with dtype_and_seed(torch.float64, 0), FakeCluster(workers=1, ps=2, restarts_servers=True) as cluster:
        assert_close(train_on(cluster), train_on(None))
