"""Which optimizers can step shards of a variable, as a trial finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchstrat.errors import UnsupportedError
from torchstrat.ftrl import Ftrl
from torchstrat.parameter_server.variables import elementwise
from torchstrat.parameter_server.variables.elementwise import is_elementwise

SPLITTABLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "SparseAdam": torch.optim.SparseAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "Adadelta": torch.optim.Adadelta,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "Ftrl": Ftrl,
}
WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
}


class PerTensor(torch.optim.Optimizer):
    """The base of the classes below: ``update`` steps one parameter."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"lr": 0.1, **settings})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class TrustRatio(PerTensor):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad * (p.norm() / p.grad.norm()), alpha=group["lr"])


class RowNorm(PerTensor):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad / p.grad.norm(dim=-1, keepdim=True), alpha=group["lr"])


class FactorsLargeTensors(PerTensor):
    """Element by element for small tensors alone, as factored optimizers do."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        scale = p.grad.square().mean().sqrt() if min(p.shape) >= 128 else p.grad.abs()
        p.sub_(p.grad / scale, alpha=group["lr"])


class CountsInGroup(PerTensor):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / group["k"])


class CountsOnItself(PerTensor):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.count += 1
        p.sub_(p.grad, alpha=group["lr"] / self.count)


class CountsBeside(PerTensor):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.state["all"]["k"] = self.state["all"].get("k", 0) + 1  # type: ignore[index]
        p.sub_(p.grad, alpha=group["lr"])


class Raises(PerTensor):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        raise ArithmeticError("never works")


class Random(PerTensor):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


def over(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]


@pytest.fixture(autouse=True)
def ask_anew():
    elementwise._answers.clear()


@pytest.mark.parametrize("shape", [(40, 7), (9,), (6, 4, 3, 3), (1, 5), ()])
@pytest.mark.parametrize("name", SPLITTABLE)
def test_elementwise_optimizers_split(name, shape):
    if name == "SparseAdam":
        shape = shape or (1,)  # a sparse gradient has rows, and a scalar has none
    assert is_elementwise(SPLITTABLE[name](over((2, 2))), shape)


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_of_whole_tensors_do_not(name):
    assert not is_elementwise(WHOLE[name](over((2, 2))), (40, 7))


@pytest.mark.parametrize(
    ("cls", "shape", "expected"),
    [
        (TrustRatio, (20, 3), False),
        (TrustRatio, (20,), False),
        (RowNorm, (20, 3), True),
        (FactorsLargeTensors, (100, 100), True),
        (FactorsLargeTensors, (1_000_000, 256), False),
        (Random, (20, 3), False),
    ],
)
def test_classes_of_the_users_own(cls, shape, expected):
    assert is_elementwise(cls(over((2, 2))), shape) is expected


@pytest.mark.parametrize(
    ("cls", "place"),
    [
        (CountsInGroup, r"self.param_groups\[0\]\['k'\]"),
        (CountsOnItself, "self.count"),
        (CountsBeside, r"self.state\['all'\]"),
    ],
)
def test_state_that_would_be_lost(cls, place):
    with pytest.raises(UnsupportedError, match=rf"{cls.__name__} keeps state in {place}\. .* use an optimizer that"):
        is_elementwise(cls(over((2, 2))), (20, 3))


def test_one_group_of_whole_tensors_is_enough():
    class Sometimes(PerTensor):
        def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
            scale = p.grad.norm() if group["normed"] else 1.0
            p.sub_(p.grad / scale, alpha=group["lr"])

    first, second = over((2, 2), (2, 2))
    groups = [{"params": [first], "normed": False}, {"params": [second], "normed": True}]
    assert not is_elementwise(Sometimes(groups), (20, 3))
    assert is_elementwise(Sometimes([{**groups[0], "params": [first]}]), (20, 3))


def test_steps_that_need_a_closure():
    with pytest.raises(UnsupportedError, match=r"LBFGS\.step needs a closure.*MirroredStrategy"):
        is_elementwise(torch.optim.LBFGS(over((2, 2))), (20, 3))


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_that_mean_nothing_on_a_server(flag):
    with pytest.raises(UnsupportedError, match=f"Adam has {flag}=True"):
        is_elementwise(torch.optim.Adam(over((2, 2)), **{flag: True}), (20, 3))


def test_a_step_that_fails():
    with pytest.raises(UnsupportedError, match=r"trial step of .*Raises.* failed with ArithmeticError: never works"):
        is_elementwise(Raises(over((2, 2))), (20, 3))


def test_the_optimizer_and_the_random_state_stay_as_they_are():
    optimizer = torch.optim.Adam(over((3, 3)))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    is_elementwise(optimizer, (20, 3))
    is_elementwise(Random(over((2, 2))), (20, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert optimizer.state == {}
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3, 3))


def test_an_answer_is_found_once_per_class_and_hyperparameters(monkeypatch):
    trials = []
    original = elementwise._try
    monkeypatch.setattr(elementwise, "_try", lambda *args: trials.append(1) or original(*args))
    for _ in range(3):
        is_elementwise(torch.optim.Adam(over((2, 2))), (20, 3))
    is_elementwise(torch.optim.Adam(over((2, 2))), (20, 3))
    assert len(trials) == 1
    is_elementwise(torch.optim.Adam(over((2, 2)), amsgrad=True), (20, 3))
    is_elementwise(torch.optim.Adam(over((2, 2))), (20,))
    assert len(trials) == 3
