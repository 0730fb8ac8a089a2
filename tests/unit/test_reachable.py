"""One walk over what a function reaches: wherever a module hides, it is found."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from torchstrat.core import reachable
from torchstrat.core.reachable import Start, walk_behind


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
    "namespace": lambda model: closing_over(argparse.Namespace(model=model)),
    "attribute of a module": lambda model: closing_over(Outer(model)),
    "attribute of an object in a module": lambda model: closing_over(Outer(Holder(model))),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_module_is_found(place: str) -> None:
    model = nn.Linear(1, 1)
    assert any(one is model for one in Start(PLACES[place](model), []).walk().modules)


def named_by_a_method(model: Any) -> Any:
    class Own:
        def look(self) -> Any:
            return model

    return closing_over([Own()])


def named_by_forward(model: Any) -> Any:
    class Own(nn.Module):
        def forward(self) -> Any:
            return model

    return closing_over(Own())


def kept_by_a_class(model: Any) -> Any:
    class Own:
        kept = model

        @classmethod
        def step(cls) -> None: ...

    return Own.step


def named_by_a_function_of_autograd(model: Any) -> Any:
    class Own(torch.autograd.Function):
        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return model

    return lambda x: Own.apply(x)


def hooked(model: Any, *, to: str) -> Any:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if to == "gradient":
        weight.register_hook(lambda grad: model)
    else:
        optimizer.register_step_pre_hook(lambda *_: model)
    return closing_over(optimizer)


def held_by_an_optimizer(model: Any) -> Any:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.average = Holder(model)
    return closing_over(optimizer)


BEHIND = {
    "a method": named_by_a_method,
    "forward": named_by_forward,
    "a class": kept_by_a_class,
    "a function of autograd": named_by_a_function_of_autograd,
    "a hook of a gradient": functools.partial(hooked, to="gradient"),
    "a hook of an optimizer": functools.partial(hooked, to="optimizer"),
    "an object of an optimizer": held_by_an_optimizer,
    "a key": lambda model: closing_over({model: 1}),
    "a weak reference": lambda model: closing_over(weakref.ref(model)),
}


@pytest.mark.parametrize("place", BEHIND)
def test_a_module_is_found_behind(place: str) -> None:
    model = nn.Linear(1, 1)
    front = Start(BEHIND[place](model), []).walk()
    assert not any(one is model for one in front.modules)
    assert any(one is model for one in walk_behind(front).modules)


def test_an_installed_package_names_nothing_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    step = named_by_a_method(model)
    monkeypatch.setattr(sys.modules[__name__], "__file__", "/usr/lib/python3/site-packages/other/steps.py")
    reachable._is_of_program.cache_clear()
    assert not walk_behind(Start(step, []).walk()).modules
    reachable._is_of_program.cache_clear()


def test_an_object_may_refuse_attributes_by_any_error() -> None:
    class Own:
        __slots__ = ("_members",)

        def __init__(self, **members: Any) -> None:
            self._members = members

        def __getattr__(self, name: str) -> Any:
            return self._members[name]

    model = nn.Linear(1, 1)
    assert Start(closing_over(Own(model=model)), []).walk().modules == [model]


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
