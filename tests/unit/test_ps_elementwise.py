"""Of what kind an optimizer is: as it is listed, or as the user says, which a trial checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.parameter_servers import PerTensor
from torchstrat import Ftrl
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.optimizer_tiers import UNKNOWN, Gradients, Kind, Tier, is_listed
from torchstrat.parameter_server.variables.elementwise import Kinds, check_word

LISTED = {one for one in vars(torch.optim).values() if isinstance(one, type) and is_listed(one)}
WHOLE = {torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS}
SPLITTABLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{cls.__name__: cls for cls in sorted(LISTED - WHOLE, key=lambda cls: cls.__name__)},
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad, started": partial(torch.optim.Adagrad, initial_accumulator_value=0.5),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "Adam fused": partial(torch.optim.Adam, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "RMSprop, centered": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Ftrl": Ftrl,
}


class RowNorm(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad / grad.norm(dim=-1, keepdim=True), alpha=group["lr"])


class FactorsLargeTensors(PerTensor):
    """Element by element for small tensors alone, as factored optimizers do."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        scale = grad.square().mean().sqrt() if min(p.shape) >= 128 else grad.abs()
        p.sub_(grad / scale, alpha=group["lr"])


class NormedGroups(PerTensor):
    """Whole tensors in those groups that say so."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad / (grad.norm() if group["normed"] else 1.0), alpha=group["lr"])


class ByLayout(PerTensor):
    """Sums squares by rows for sparse gradients, by elements for dense ones."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            state.setdefault("rows", p.new_zeros(len(p))).index_add_(0, rows, values.square().flatten(1).mean(1))
            scale = state["rows"][rows].sqrt().reshape(-1, *(1 for _ in p.shape[1:]))
            p.index_add_(0, rows, -group["lr"] * values / scale)
        else:
            state.setdefault("sum", torch.zeros_like(p)).add_(grad.square())
            p.sub_(grad / state["sum"].sqrt(), alpha=group["lr"])


class Sometimes(PerTensor):
    """Looks at the whole from the tenth step on."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["k"] = state.get("k", 0) + 1
        p.sub_(grad / (grad.norm() if state["k"] > 9 else 1.0), alpha=group["lr"])


class CountsInGroup(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        p.sub_(grad, alpha=group["lr"] / group["k"])


class CountsOnItself(PerTensor):
    count = 0

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        self.count += 1
        p.sub_(grad, alpha=group["lr"] / self.count)


class CountsBeside(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        self.state["all"]["k"] = self.state["all"].get("k", 0) + 1  # type: ignore[index]
        p.sub_(grad, alpha=group["lr"])


class Raises(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        raise ArithmeticError("never works")


class Random(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad + torch.randn_like(p), alpha=group["lr"])


class OfTorch(torch.optim.Adam):
    """A subclass is another class."""


class Searching(torch.optim.LBFGS): ...


def over(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]


def kind_of(cls: Callable[..., torch.optim.Optimizer], *shapes: tuple[int, ...], **settings: Any) -> Kind:
    """Of a class of which the user says that it steps element by element, or row by row."""
    optimizer = cls(over((2, 2)), **settings)
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    return Kinds([type(optimizer)]).of(optimizer)


def test_every_optimizer_of_torch_is_listed() -> None:
    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type)]
    unlisted = {cls for cls in classes if issubclass(cls, torch.optim.Optimizer)} - LISTED
    assert unlisted == {torch.optim.Optimizer}, "decide what kind these are of, in torchstrat/optimizer_tiers.py"


@pytest.mark.parametrize("name", SPLITTABLE)
def test_listed_optimizers_are_cut_and_the_trial_agrees(name: str) -> None:
    """So that neither has learned it from the other."""
    assert Kinds().of(SPLITTABLE[name](over((2, 2)))).may_cut_rows
    optimizer = SPLITTABLE[name](over((40, 7), (9,)))
    gradients = {check_word(optimizer, shape) for shape in [(40, 7), (9,), (6, 4, 3, 3), (6, 5)]}
    assert (Gradients.SPARSE in gradients) == (name == "SparseAdam")


@pytest.mark.parametrize("cls", sorted(WHOLE - {torch.optim.LBFGS}, key=str), ids=lambda cls: cls.__name__)
def test_listed_optimizers_of_whole_tensors_are_not(cls: type[torch.optim.Optimizer]) -> None:
    optimizer = cls(over((2, 2)))  # type: ignore[call-arg]
    assert Kinds().of(optimizer).tier is Tier.PARAMETERS
    with pytest.raises(UnsupportedError, match="came to values that are up to"):
        check_word(optimizer, (40, 7))


@pytest.mark.parametrize("cls", [RowNorm, ByLayout, CountsOnItself, OfTorch])
def test_any_other_class_stays_whole(cls: type[torch.optim.Optimizer]) -> None:
    assert Kinds().of(cls(over((20, 3)))) == UNKNOWN  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("cls", "shape", "gradients"),
    [
        (RowNorm, (20, 3), Gradients.ALIKE),
        (FactorsLargeTensors, (100, 100), Gradients.ALIKE),
        (ByLayout, (20, 3), Gradients.BY_LAYOUT),
        (OfTorch, (20, 3), Gradients.ALIKE),
        (partial(NormedGroups, normed=False), (20, 3), Gradients.ALIKE),
    ],
)
def test_what_the_user_says_of_a_class(cls: Any, shape: tuple[int, ...], gradients: Gradients) -> None:
    assert kind_of(cls, shape) == Kind(Tier.ROWS, gradients)


APART = "elementwise_optimizers names .*{}, .* apart.* Leave it out"
LOST = r"{}, which keeps state in {}\. .* Leave it out"
REFUSED: list[tuple[Any, tuple[int, ...], str]] = [
    (FactorsLargeTensors, (1_000_000, 256), APART),
    (Sometimes, (20, 3), APART),
    (Sometimes, (20,), APART),
    (Random, (20, 3), APART),
    (CountsInGroup, (20, 3), LOST.format("{}", r"self.param_groups\[0\]\['k'\]")),
    (CountsOnItself, (20, 3), LOST.format("{}", "self.count")),
    (CountsBeside, (20, 3), LOST.format("{}", r"self.state\['all'\]")),
    (Searching, (20, 3), r"{}\.step needs a closure.*MirroredStrategy"),
    (partial(OfTorch, capturable=True), (20, 3), "{} has capturable=True"),
    (partial(OfTorch, differentiable=True), (20, 3), "{} has differentiable=True"),
    (Raises, (20, 3), r"trial step of .*{}.* failed with ArithmeticError: never works"),
]


@pytest.mark.parametrize(("cls", "shape", "says"), REFUSED)
def test_what_the_user_says_is_refuted(cls: Any, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says.format(getattr(cls, "func", cls).__name__)):
        kind_of(cls, shape)


def test_one_group_of_whole_tensors_is_enough() -> None:
    first, second = over((20, 3), (20, 3))
    groups = [{"params": [first], "normed": False}, {"params": [second], "normed": True}]
    with pytest.raises(UnsupportedError, match="NormedGroups"):
        Kinds([NormedGroups]).of(NormedGroups(groups))


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (torch.optim.SGD, WrongTypeError, "must be a list of classes"),
        ("MyOptimizer", WrongTypeError, "must be a list of classes"),
        ([torch.nn.Linear], WrongTypeError, "derived from torch.optim.Optimizer"),
        ([torch.optim.Adafactor], InvalidArgumentError, "names Adafactor, whose steps look at each parameter"),
    ],
)
def test_what_cannot_be_said(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Kinds(given)


def test_the_optimizer_and_the_random_state_stay_as_they_are() -> None:
    optimizer = CountsOnItself(over((20, 3)))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for named in (CountsOnItself, Random):
        with pytest.raises(UnsupportedError):
            Kinds([named]).of(optimizer if named is CountsOnItself else Random(over((20, 3))))
    assert torch.equal(torch.get_rng_state(), before)
    assert optimizer.state == {}
    assert optimizer.count == 0
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(20, 3))


def test_an_answer_is_found_once_per_class_and_hyperparameters() -> None:
    steps = []

    class Noted(PerTensor):
        def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
            steps.append(1)

    def asks(*shapes: tuple[int, ...], **settings: Any) -> bool:
        before = len(steps)
        Kinds([Noted]).of(Noted(over(*shapes), **settings))
        return len(steps) > before

    assert [asks((20, 3)), asks((20, 3)), asks((20, 3))] == [True, False, False]
    assert [asks((20, 3), extra=1), asks((20, 3), (20, 4))] == [True, True]
