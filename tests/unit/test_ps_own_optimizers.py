"""Optimizers of the program's own classes, on one worker: their numbers are a plain loop's, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

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


def train(make: Callable[[Any], Any], between: Between, strategy: Any = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with strategy.scope() if strategy else nullcontext():
        program = Program(make)
    draw = torch.Generator().manual_seed(1)
    for index in range(-1, 4):
        if index >= 0:
            batch = torch.randn(8, 3, generator=draw), torch.randn(8, 2, generator=draw)
            if strategy:
                ts.ClusterCoordinator(strategy).schedule(program.step, batch).get(60)
            else:
                program.step(*batch)
        between(program, index)
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
