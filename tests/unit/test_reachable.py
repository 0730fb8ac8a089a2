"""One walk over what a function reaches: wherever a module hides, it is found."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from torchstrat.reachable import Start


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
