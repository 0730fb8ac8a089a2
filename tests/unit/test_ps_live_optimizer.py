"""Optimizers of classes that may do anything: one object, on the one server that has their variables.

That many such classes have the numbers of one device is in tests/matrix/optimizers.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.parameter_servers import WAIT, PerTensor, on_servers, states_are_close
from torchstrat.errors import InvalidArgumentError, NotSendableError, TorchstratError, UnsupportedError

ONES = torch.ones(3)


class CountsInGroup(PerTensor):
    """Its step divides the rate by how many there have been, which it keeps in ``param_groups``."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"] / group["k"])


class Lists(PerTensor):
    """State in a list beside the parameters, all of which each step changes."""

    velocities: tuple[torch.Tensor, ...] = ()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        self.velocities = self.velocities or tuple(map(torch.zeros_like, every))
        for p, velocity in zip(every, self.velocities, strict=True):
            velocity.mul_(0.5).add_(0 if p.grad is None else p.grad)
            p.sub_(velocity)


class Average(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(grad, 0.25))


class Shrinks(PerTensor):
    """Makes another shape of its parameter."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.data = p.data[:2]


def parameters(count: int = 1, start: float = 0.0) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.full((3,), start)) for _ in range(count)])


class Job:
    """A program whose functions step vectors with the gradients that they are given."""

    def __init__(self, program: Any) -> None:
        self.program, self.strategy = program, program.strategy
        self.parameters, self.optimizer = program.made
        self.group, self.lists = self.optimizer.param_groups[0], [self.parameters]

    def step(self, *gradients: torch.Tensor | None) -> None:
        def function(lists: list[nn.ParameterList], optimizer: Any) -> None:
            for parameter, gradient in zip([one for of_list in lists for one in of_list], gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

        self.program.run(function, self.lists, self.optimizer)

    def values(self) -> list[float]:
        """Of each vector, all of whose elements are equal."""
        found = [value for one in self.lists for value in one.state_dict().values()]
        assert all(bool((value == value[0]).all()) for value in found)
        return [float(value[0]) for value in found]


@contextmanager
def stepping(cls: type[PerTensor], count: int = 1, start: float = 0.0, **settings: Any) -> Iterator[Job]:
    def make() -> tuple[nn.ParameterList, PerTensor]:
        made = parameters(count, start)
        return made, cls(made.parameters(), lr=1.0, **settings)

    with on_servers(make) as program:
        yield Job(program)


def test_what_the_program_sets_what_steps_set_and_what_was_told() -> None:
    """Steps without a gradient are steps, too."""
    with stepping(CountsInGroup, 2) as job:
        for count, gradients in enumerate(((None, None), (None, ONES)), start=1):
            job.step(*gradients)
            assert job.optimizer.state_dict()["param_groups"][0]["k"] == count
        assert job.values() == [0.0, -0.5]
        job.group["k"] = 1  # as it was told once, in functions that were scheduled then: no wish
        job.group["lr"] = 3.0  # as a scheduler does
        job.step(ONES, ONES)
        assert job.values() == [-1.0, -1.5]
        job.group["k"] = 7
        job.step(ONES, ONES)
        assert job.values() == [-1.375, -1.875]
        state = job.optimizer.state_dict()
        state["param_groups"][0]["k"] = 1
        job.optimizer.load_state_dict(state)
        job.step(ONES, ONES)
        assert job.values() == [-2.875, -3.375]


def test_the_program_and_steps_set_the_same() -> None:
    with stepping(CountsInGroup, k=0) as job:
        job.step(ONES)
        job.group["k"] = 7
        with pytest.raises(UnsupportedError, match=r"param_groups\[0\]\['k'\] of .* to 7, and its steps.* set it to 1"):
            job.step(ONES)
        assert job.values() == [-1.0]


@pytest.mark.parametrize("cls", [CountsInGroup, Lists])
def test_groups_that_come_later(cls: type[PerTensor]) -> None:
    with stepping(cls) as job:
        job.step(ONES)
        with job.strategy.scope():
            job.lists.append(later := parameters())
            job.optimizer.add_param_group({"params": later.parameters(), "lr": 2.0})
        if cls is Lists:  # its list is shorter, as in a plain program
            with pytest.raises(TorchstratError, match=r"Lists.step raised ValueError: zip"):
                job.step(None, ONES)
        else:
            job.step(ONES, ONES)
            assert job.values() == [-1.5, -2.0]


def test_a_step_that_makes_another_shape() -> None:
    with (
        stepping(Shrinks) as job,
        pytest.raises(TorchstratError, match=r"torch.float32 of shape \(2,\) of .* keep both"),
    ):
        job.step(ONES)


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        (torch.zeros(3, device="meta"), "Average keeps a tensor .* on the meta device"),
        (threading.Lock(), r"Average cannot be sent .*: self\.mine cannot be pickled"),
    ],
    ids=["meta", "lock"],
)
def test_what_cannot_be_sent(attribute: Any, says: str) -> None:
    def make() -> Average:
        made = Average(parameters().parameters())
        made.mine = attribute
        return made

    with pytest.raises(NotSendableError, match=says), on_servers(make):
        pass


# -- where its variables lie ------------------------------------------------------------------------------------------


def test_variables_lie_together_and_the_others_are_spread() -> None:
    def make() -> tuple[list[nn.Parameter], Any]:
        tensors = [nn.Parameter(torch.zeros(4, 2)) for _ in range(8)]
        # The second and the third share a parameter, so all of theirs are together.
        optimizers = [CountsInGroup(tensors[:2]), Lists([tensors[2], tensors[4]]), Lists([tensors[4], tensors[3]])]
        spread = [torch.optim.SGD(tensors[5:6]), Average(tensors[7:])]
        return tensors, [*optimizers, *spread, torch.optim.Adafactor(tensors[6:7])]

    with on_servers(make, shards=2, elementwise_optimizers=[Average]) as program:
        places = program.places(*program.made[0])
    assert places[0] == places[1]
    assert places[2] == places[3] == places[4]
    assert {places[0], places[2]} == {"ps:0", "ps:1"}
    assert {*places[5:8:2]} <= {"ps:0, ps:1", "ps:1, ps:0"}
    assert places[6] in ("ps:0", "ps:1")


def test_a_table_that_fits_on_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    says = r"weight of module .* bytes.*Average steps it, .* one server, whole\..*elementwise_optimizers=\[Average\]"

    def make() -> tuple[nn.Embedding, Average]:
        monkeypatch.setattr("torchstrat.host_memory.available_bytes", lambda: 1000)
        table = nn.Embedding(100, 8)
        return table, Average(table.parameters())

    with pytest.raises(InvalidArgumentError, match=says), on_servers(make, shards=2):
        pass


# -- on workers -------------------------------------------------------------------------------------------------------


class InTwoParts(PerTensor):
    """As SAM: a step away, and the step from there."""

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad)

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.copy_(self.state[p]["old"]).sub_(grad)


@pytest.mark.parametrize("then_steps", [True, False])
def test_state_that_a_function_makes_by_itself(then_steps: bool) -> None:
    def make() -> tuple[nn.Module, InTwoParts]:
        model = nn.Linear(2, 1)
        return model, InTwoParts(model.parameters())

    def step(model: nn.Module, optimizer: InTwoParts) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.first_step()
        if then_steps:
            optimizer.step()

    with on_servers(make) as program:
        before = {name: value.clone() for name, value in program.made[0].state_dict().items()}
        with pytest.raises(UnsupportedError, match=r"put state into InTwoParts\.state outside of its step\(\)"):
            program.run(step, *program.made)
        states_are_close(program.made[0].state_dict(), before, 0.0)


def test_another_models_optimizer_steps_between_forward_and_backward() -> None:
    """As GANs do, with batch norm: its step brings back the buffers of all."""

    def make() -> tuple[nn.ModuleList, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        models = nn.ModuleList([nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.Linear(3, 1)]).double()
        return models, [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step(batch: torch.Tensor, models: nn.ModuleList, optimizers: list[torch.optim.Optimizer]) -> torch.Tensor:
        made = models[0](batch)
        optimizers[1].zero_grad()
        models[1](made.detach()).square().mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = models[1](made).square().mean()
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    batches = torch.randn(3, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = make()
    expected = [step(batch, *plain) for batch in batches]
    with on_servers(make) as program:
        values = [program.coordinator.schedule(step, args=(batch, *program.made)) for batch in batches]
        found = [value.get(timeout=WAIT) for value in values]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        states_are_close(program.made[0].state_dict(), plain[0].state_dict(), 1e-10)
