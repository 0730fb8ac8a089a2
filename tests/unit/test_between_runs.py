"""What a program changes between two runs is seen by the second, whatever a run has kept from the first.

Each change is made to a model in training, under a strategy and in a plain loop on the whole batch; the parameters have
to agree afterwards. Then the check that a run makes is switched off, and the same comparison has to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import torchstrat as ts
from tests.unit.in_process_strategies import opened
from torchstrat._torch_private import count_function_modes, optimizer_pre_hooks, registration_hooks
from torchstrat.gradients import GradientHooks
from torchstrat.replicas.components import Components
from torchstrat.replicas.gradient_exchange import GradientExchange
from torchstrat.variables import VariableRegistry

pytestmark = pytest.mark.unit

STRATEGIES = ["mirrored x2", "central x2", "apart x2"]
CHANGES: dict[str, Callable[[Any], None]] = {}


class Program:
    """A model and what trains it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4, affine=False))
        for parameter in self.model.parameters():
            parameter.data.normal_(generator=generator)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.batch = torch.randn(8, 4, generator=generator)

    def make_step(self) -> Callable[[torch.Tensor], None]:
        """A step that reaches its model and optimizer and nothing else, so that a walk from it is made once only."""
        model, optimizer = self.model, self.optimizer

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            model[:2](batch).square().mean().backward()
            if len(model) > 3:
                loss = model[3](model[:2](batch)).square().mean()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()

        return step

    def values(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *self.model.buffers())]


def change(function: Callable[[Program], None]) -> Callable[[Program], None]:
    CHANGES[function.__name__] = function
    return function


@change
def edited_in_place(program: Program) -> None:
    program.model[0].weight.data.mul_(2)


@change
def edited_in_numpy(program: Program) -> None:
    program.model[0].weight.detach().numpy()[:] *= 2


@change
def given_other_data(program: Program) -> None:
    program.model[0].weight.data = program.model[0].weight.data * 2


@change
def replaced_parameter(program: Program) -> None:
    program.model[0].weight = nn.Parameter(program.model[0].weight.detach() * 2)
    program.optimizer.param_groups[0]["params"] = list(program.model.parameters())


@change
def loaded_by_assignment(program: Program) -> None:
    program.model.load_state_dict({name: value * 2 for name, value in program.model.state_dict().items()}, assign=True)
    program.optimizer.param_groups[0]["params"] = list(program.model.parameters())


@change
def child_behind_the_hooks(program: Program) -> None:
    head = nn.Linear(4, 2)
    for parameter in head.parameters():
        parameter.data.fill_(0.5)
    program.model._modules["3"] = head
    program.optimizer.param_groups[0]["params"].extend(head.parameters())


class Mean(nn.Module):
    """Has a buffer and no parameters, so no optimizer knows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        ts.get_strategy().extended.set_aggregation(self, "mean", "mean")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return x


@change
def buffer_behind_the_hooks(program: Program) -> None:
    program.model._modules["3"] = Mean()


@change
def lazy_child_behind_the_hooks(program: Program) -> None:
    program.model._modules["3"] = head = nn.LazyLinear(2)
    head.register_forward_pre_hook(lambda module, _: [p.data.fill_(0.5) for p in module.parameters()] and None)
    program.optimizer.param_groups[0]["params"].extend(head.parameters())


@change
def other_model(program: Program) -> None:
    program.__init__()  # type: ignore[misc]
    program.model[0].weight.data.mul_(2)


@change
def kept_gradient(program: Program) -> None:
    """``zero_grad`` no longer sees it, but the optimizer does."""
    program.model[1].register_parameter("scale", nn.Parameter(torch.ones(2)))
    program.optimizer.add_param_group({"params": [program.model[1].scale]})
    program.model[1].scale.grad = torch.ones(2)
    program.optimizer.zero_grad = lambda: [setattr(p, "grad", None) for p in program.model[0].parameters()]  # type: ignore[assignment,method-assign,misc]


@change
def frozen(program: Program) -> None:
    program.model[0].bias.requires_grad_(False)
    program.model[0].bias.grad = None


@change
def other_learning_rate(program: Program) -> None:
    program.optimizer.param_groups[0]["lr"] = 0.5


def plain(name: str) -> list[torch.Tensor]:
    program = Program()
    for number in range(4):
        if number == 2:
            CHANGES[name](program)
        program.make_step()(program.batch)
    return program.values()


def under(strategy: ts.Strategy, name: str) -> list[torch.Tensor]:
    with strategy.scope():
        program = Program()
    batch = strategy.distribute_values_from_function(
        lambda context: program.batch.chunk(2)[context.replica_id_in_sync_group]
    )
    for number in range(4):
        if number == 2:
            CHANGES[name](program)
        strategy.run(program.make_step(), args=(batch,))
    return program.values()


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    assert len(one) == len(other)
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.filterwarnings("ignore:the step uses trainable variables that")
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("name", CHANGES)
def test_it_is_seen(name: str, kind: str) -> None:
    with opened(kind) as strategy:
        assert difference(under(strategy, name), plain(name)) < 1e-6


class _FirstMembers:
    """What the registry had at the first run."""

    def __init__(self) -> None:
        self._original = VariableRegistry.members
        self._kept: Any = None

    def __get__(self, registry: Any, _: Any) -> Callable[[], Any]:
        def members() -> Any:
            self._kept = self._kept or self._original(registry)
            return self._kept

        return members


def _no_refresh(self: Components, tensors: Any = None, original: Any = Components.refresh) -> None:
    if tensors is not None or not any(slot.data for slot in self.slots()):
        original(self, tensors)
    for slot in self.slots():
        slot.data[self._home], slot.versions[self._home] = slot.tensor.data, slot.tensor._version


CONTROLS: dict[str, tuple[Any, str, Any, str]] = {
    "children are not looked for": (
        VariableRegistry,
        "_has_unknown_children",
        lambda self: False,
        "buffer_behind_the_hooks",
    ),
    "members are those of the first run": (VariableRegistry, "members", _FirstMembers(), "replaced_parameter"),
    "copies are not made anew": (Components, "refresh", _no_refresh, "edited_in_place"),
    "hooks are not attached again": (GradientHooks, "attach", lambda self, tensors, early: None, "replaced_parameter"),
}


@pytest.mark.filterwarnings("ignore:the step uses trainable variables that")
@pytest.mark.filterwarnings("ignore:the replicas have changed")
@pytest.mark.parametrize("control", CONTROLS)
def test_it_is_not_seen_with_the_check_switched_off(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, off, name = CONTROLS[control]
    monkeypatch.setattr(owner, attribute, off)
    # Clipping combines what no hook has told of; here it would hide that nothing was.
    monkeypatch.setattr(GradientExchange, "before_clipping", lambda self, gradients: None)
    with opened("mirrored x2") as strategy:
        try:
            values = under(strategy, name)
        except (RuntimeError, ValueError, KeyError):
            return  # noticed as well
        assert difference(values, plain(name)) > 1e-3


# -- what a run leaves behind ------------------------------------------------------------------------------------------


@pytest.fixture
def strategy() -> Iterator[ts.Strategy]:
    with opened("mirrored x2") as strategy:
        yield strategy


def test_what_a_replica_leaves_on_its_thread_goes_with_it(strategy: ts.Strategy) -> None:
    class Mode(TorchFunctionMode):
        pass

    left = strategy.local_results(strategy.run(lambda: Mode().__enter__()))
    assert len(left) == 2
    assert strategy.run(count_function_modes) == 0


def test_the_hooks_of_a_run_go_with_it(strategy: ts.Strategy) -> None:
    seen = []

    def step() -> None:
        seen.append([len(hooks) for hooks in (*registration_hooks, optimizer_pre_hooks)])

    with strategy.scope():  # the members' hooks are there already, and stay
        strategy.run(step)
        assert [len(hooks) for hooks in registration_hooks] == [1, 1, 1]
        assert not optimizer_pre_hooks
    strategy.run(step)
    assert seen == [[1, 1, 1, 1]] * 4
    assert not any(registration_hooks)
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    assert not any(registration_hooks)
    assert not optimizer_pre_hooks
