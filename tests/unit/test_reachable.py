"""One walk over what a function reaches: wherever a module hides, it is found."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from torchstrat.core.reachable import Start


class Holder:
    def __init__(self, content: Any) -> None:
        self.content = content

    def step(self) -> Any:
        return self.content

    def __call__(self) -> Any:
        return self.content


class Slots:
    __slots__ = ("__hidden", "content")

    def __init__(self, content: Any, hidden: Any = None) -> None:
        self.content, self.__hidden = content, hidden


class MoreSlots(Slots):
    __slots__ = ("more",)


@dataclasses.dataclass(slots=True)
class Data:
    content: Any


class Outer(nn.Module):
    def __init__(self, content: Any) -> None:
        super().__init__()
        self.plain = [content]


def closing_over(content: Any) -> Any:
    return lambda: content


def cached(content: Any) -> Any:
    @functools.lru_cache
    def step() -> Any:
        return content

    return step


PLACES = {
    "closure": closing_over,
    "partial": lambda model: functools.partial(closing_over(None), model),
    "partial of a partial": lambda model: functools.partial(functools.partial(closing_over(model))),
    "bound method": lambda model: Holder(model).step,
    "callable object": Holder,
    "cached function": cached,
    "list of dictionaries": lambda model: closing_over([{"a": {1: model}}]),
    "set": lambda model: closing_over({model}),
    "deque": lambda model: closing_over(collections.deque([model])),
    "slots": lambda model: closing_over(MoreSlots(model)),
    "private slots": lambda model: closing_over(MoreSlots(None, model)),
    "dataclass": lambda model: closing_over(Data(model)),
    "attribute of a module": lambda model: closing_over(Outer(model)),
    "attribute of an object in a module": lambda model: closing_over(Outer(Holder(model))),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_module_is_found(place: str) -> None:
    model = nn.Linear(1, 1)
    assert any(one is model for one in Start(PLACES[place](model), []).walk().modules)


def test_plain_tensors_are_told_from_leaves() -> None:
    leaf, plain = torch.zeros(1, requires_grad=True), torch.zeros(1)
    reached = Start(closing_over([leaf, plain]), []).walk()
    assert [id(one) for one in reached.tensors] == [id(leaf)]
    assert [id(one) for one in reached.plain] == [id(plain)]


MODEL, LIST = nn.Linear(1, 1), [1]


def loss_of(x: Any) -> Any:
    return MODEL(x)


def through_a_helper(x: Any) -> Any:
    return loss_of(x).sum()


def itself(x: Any) -> Any:
    return itself(MODEL(x))


def through_a_list() -> Any:
    return loss_of(LIST)


@pytest.mark.parametrize(("step", "is_closed"), [(through_a_helper, True), (itself, True), (through_a_list, False)])
def test_a_step_is_walked_again_only_where_it_reaches_what_may_have_changed(step: Any, is_closed: bool) -> None:
    start = Start(step, [])
    assert start.is_closed == is_closed
    assert start.walk().modules == [MODEL]


def test_a_helper_that_reaches_another_model_makes_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Start(through_a_helper, [])
    before.forget_objects()
    assert Start(through_a_helper, []).is_same(before)
    monkeypatch.setitem(globals(), "MODEL", nn.Linear(1, 1))
    assert not Start(through_a_helper, []).is_same(before)


def test_an_attribute_is_not_the_global_of_the_same_name() -> None:
    def step(trainer: Any) -> Any:
        return trainer.MODEL(1)

    assert not Start(step, []).walk().modules
