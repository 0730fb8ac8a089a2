"""Of what kind an optimizer is: as it is listed, or as the user says, which a trial checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchstrat import Ftrl
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.optimizer_tiers import UNKNOWN, Gradients, Kind, Tier, is_listed
from torchstrat.parameter_server.variables import elementwise
from torchstrat.parameter_server.variables.elementwise import Kinds

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


class OverAll(PerTensor):
    """Scales by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


class ByLayout(PerTensor):
    """Sums squares by rows for sparse gradients, by elements for dense ones."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if p.grad.is_sparse:
            grad = p.grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            state.setdefault("rows", p.new_zeros(len(p))).index_add_(0, rows, values.square().flatten(1).mean(1))
            scale = state["rows"][rows].sqrt().reshape(-1, *(1 for _ in p.shape[1:]))
            p.index_add_(0, rows, -group["lr"] * values / scale)
        else:
            state.setdefault("sum", torch.zeros_like(p)).add_(p.grad.square())
            p.sub_(p.grad / state["sum"].sqrt(), alpha=group["lr"])


class Flag(PerTensor):
    """Makes its state where an attribute says that it has not yet."""

    has_state = False

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.has_state:
            self.state[p]["sum"] = torch.zeros_like(p)
            self.has_state = True
        p.sub_(p.grad, alpha=group["lr"])


class Sometimes(PerTensor):
    """Looks at the whole from the tenth step on."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["k"] = state.get("k", 0) + 1
        p.sub_(p.grad / (p.grad.norm() if state["k"] > 9 else 1.0), alpha=group["lr"])


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


def said_to_be_elementwise(cls: type[torch.optim.Optimizer], *shapes: tuple[int, ...]) -> Kind:
    return Kinds([cls]).of(cls(over(*shapes)))


@pytest.fixture(autouse=True)
def ask_anew():
    elementwise._answers.clear()


@pytest.mark.parametrize("name", SPLITTABLE)
def test_listed_optimizers_are_cut(name):
    assert Kinds().of(SPLITTABLE[name](over((2, 2)))).may_cut_rows


@pytest.mark.parametrize("name", WHOLE)
def test_listed_optimizers_of_whole_tensors_are_not(name):
    assert Kinds().of(WHOLE[name](over((2, 2)))).tier is Tier.PARAMETERS


def test_every_optimizer_of_torch_is_listed():
    names = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)]
    classes = {getattr(torch.optim, name) for name in names} - {torch.optim.Optimizer}
    unlisted = [cls for cls in classes if issubclass(cls, torch.optim.Optimizer) and not is_listed(cls)]
    assert not unlisted, "decide what kind these are of, in torchstrat/optimizer_tiers.py"


@pytest.mark.parametrize("name", SPLITTABLE)
def test_the_trial_agrees_with_the_list(name, monkeypatch):
    """So that neither has learned it from the other."""
    optimizer = SPLITTABLE[name](over((40, 7), (9,)))
    gradients = {elementwise.check_word(optimizer, shape) for shape in [(40, 7), (9,), (6, 4, 3, 3), (6, 5)]}
    assert (Gradients.SPARSE in gradients) == (name == "SparseAdam")


@pytest.mark.parametrize("name", WHOLE)
def test_the_trial_agrees_with_the_list_of_whole_tensors(name):
    with pytest.raises(UnsupportedError, match="came to values that are up to"):
        elementwise.check_word(WHOLE[name](over((2, 2))), (40, 7))


@pytest.mark.parametrize("cls", [TrustRatio, RowNorm, OverAll, ByLayout, Flag, Random, CountsOnItself])
def test_any_other_class_stays_whole(cls):
    assert Kinds().of(cls(over((20, 3)))) == UNKNOWN


def test_a_subclass_is_another_class():
    class Mine(torch.optim.Adam):
        pass

    assert Kinds().of(Mine(over((20, 3)))) == UNKNOWN
    assert Kinds([Mine]).of(Mine(over((20, 3)))).may_cut_rows


@pytest.mark.parametrize(
    ("cls", "shape", "gradients"),
    [
        (RowNorm, (20, 3), Gradients.ALIKE),
        (FactorsLargeTensors, (100, 100), Gradients.ALIKE),
        (ByLayout, (20, 3), Gradients.BY_LAYOUT),
    ],
)
def test_what_the_user_says_of_a_class(cls, shape, gradients):
    assert said_to_be_elementwise(cls, shape) == Kind(Tier.ROWS, gradients)


@pytest.mark.parametrize(
    ("cls", "shape"),
    [
        (TrustRatio, (20, 3)),
        (TrustRatio, (20,)),
        (FactorsLargeTensors, (1_000_000, 256)),
        (OverAll, (20, 3)),
        (Sometimes, (20, 3)),
        (Random, (20, 3)),
    ],
)
def test_what_the_user_says_is_refuted(cls, shape):
    optimizer = cls(over((2, 2)))
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.empty(shape, device="meta"))]
    with pytest.raises(
        UnsupportedError, match=rf"elementwise_optimizers names .*{cls.__name__}, .* apart.* Leave it out"
    ):
        Kinds([cls]).of(optimizer)


@pytest.mark.parametrize(
    ("cls", "place"),
    [
        (CountsInGroup, r"self.param_groups\[0\]\['k'\]"),
        (CountsOnItself, "self.count"),
        (CountsBeside, r"self.state\['all'\]"),
        (Flag, "self.has_state"),
    ],
)
def test_state_that_would_be_lost(cls, place):
    with pytest.raises(UnsupportedError, match=rf"{cls.__name__}, which keeps state in {place}\. .* Leave it out"):
        said_to_be_elementwise(cls, (20, 3))


def test_one_group_of_whole_tensors_is_enough():
    class Normed(PerTensor):
        def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
            scale = p.grad.norm() if group["normed"] else 1.0
            p.sub_(p.grad / scale, alpha=group["lr"])

    first, second = over((20, 3), (20, 3))
    groups = [{"params": [first], "normed": False}, {"params": [second], "normed": True}]
    with pytest.raises(UnsupportedError, match="Normed"):
        Kinds([Normed]).of(Normed(groups))
    assert Kinds([Normed]).of(Normed([{**groups[0], "params": [first]}])).may_cut_rows


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (torch.optim.SGD, WrongTypeError, "must be a list of classes"),
        ("MyOptimizer", WrongTypeError, "must be a list of classes"),
        ([torch.nn.Linear], WrongTypeError, "derived from torch.optim.Optimizer"),
        ([torch.optim.Adafactor], InvalidArgumentError, "names Adafactor, whose steps look at each parameter"),
    ],
)
def test_what_cannot_be_said(given, error, says):
    with pytest.raises(error, match=says):
        Kinds(given)


def test_steps_that_need_a_closure():
    class Searching(torch.optim.LBFGS):
        pass

    with pytest.raises(UnsupportedError, match=r"Searching\.step needs a closure.*MirroredStrategy"):
        said_to_be_elementwise(Searching, (20, 3))


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_that_mean_nothing_on_a_server(flag):
    class Mine(torch.optim.Adam):
        pass

    with pytest.raises(UnsupportedError, match=f"Mine has {flag}=True"):
        Kinds([Mine]).of(Mine(over((20, 3)), **{flag: True}))


def test_a_step_that_fails():
    with pytest.raises(UnsupportedError, match=r"trial step of .*Raises.* failed with ArithmeticError: never works"):
        said_to_be_elementwise(Raises, (20, 3))


def test_the_optimizer_and_the_random_state_stay_as_they_are():
    optimizer = RowNorm(over((20, 3)))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    Kinds([RowNorm]).of(optimizer)
    with pytest.raises(UnsupportedError):
        said_to_be_elementwise(Random, (20, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert optimizer.state == {}
    assert optimizer.count == 0
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(20, 3))


def test_an_answer_is_found_once_per_class_and_hyperparameters(monkeypatch):
    trials = []
    original = elementwise._Trial.result
    monkeypatch.setattr(elementwise._Trial, "result", lambda trial: trials.append(1) or original(trial))
    kinds = Kinds([RowNorm])
    for _ in range(3):
        kinds.of(RowNorm(over((20, 3))))
    assert len(trials) == 1
    kinds.of(RowNorm(over((20, 3)), extra=1))
    kinds.of(RowNorm(over((20, 3), (20, 4))))
    assert len(trials) == 3
