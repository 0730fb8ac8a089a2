"""Containers that are handed to replicas, and back, as what they are, or refused by name. Those of batches are rows of
`tests.matrix.batches`."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import torchstrat as ts
from torchstrat.errors import StructureMismatchError, WrongTypeError


@pytest.fixture
def strategy() -> Iterator[ts.Strategy]:
    made = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    yield made
    made.close()


class Node(dict):
    """Its constructor takes one dict."""

    def __init__(self, content, scale=1.0):
        super().__init__({name: content[name] for name in content.items() and content})
        self.scale = scale


class Settings(dict):
    """Its constructor takes named values."""

    def __init__(self, **values):
        super().__init__(**values)


class Frozen(dict):
    def __setitem__(self, key, value):
        raise RuntimeError("frozen")


class Pair(collections.namedtuple("Pair", "first second")):
    """Its constructor takes one value, and it has an attribute."""

    def __new__(cls, both, scale=2.0):
        made = super().__new__(cls, both, both)
        made.scale = scale
        return made


class ReadOnly(Mapping):
    def __init__(self, content):
        self.content = dict(content)

    def __getitem__(self, key):
        return self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


class Renamed(ReadOnly):
    def __init__(self, content):
        super().__init__({f"new {key}": value for key, value in content.items()})


def per_replica(*numbers: int) -> list[ts.PerReplica]:
    return [ts.PerReplica([torch.tensor(number), torch.tensor(2 * number)]) for number in numbers]


ONE, TWO = per_replica(1, 2)


@pytest.mark.parametrize(
    "value",
    [
        Node({"b": ONE, "a": TWO}, scale=3.0),
        Settings(alpha=ONE),
        collections.OrderedDict(b=ONE, a=TWO),
        collections.defaultdict(int, alpha=ONE),
        collections.UserDict(alpha=ONE),
        collections.ChainMap({"a": ONE}, {"b": TWO}),
        types.MappingProxyType({"a": ONE}),
        ReadOnly({"a": ONE}),
        Pair(ONE),
        (ONE, TWO),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_keeps_its_class_its_attributes_and_its_order(strategy: ts.Strategy, value: Any) -> None:
    """On its way to the replicas, and as their result; its constructor is not called."""
    seen: list[Any] = []
    result = strategy.run(lambda given: seen.append(given) or given, args=(value,))
    for number, given in enumerate(seen, 1):
        assert type(given) is type(result) is type(value)
        for name in ("scale", "default_factory"):
            assert getattr(given, name, None) == getattr(result, name, None) == getattr(value, name, None)
        pairs = [one.items() if hasattr(one, "items") else enumerate(one) for one in (given, result, value)]
        for (key, one), (of_result, both), (of_value, original) in zip(*pairs, strict=True):
            assert key == of_result == of_value
            assert one == original.values[number - 1] == both.values[number - 1]
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Renamed({"a": ONE}), r"Renamed cannot be handed to replicas.*plain dict"),
        (Frozen(a=ONE), r"Frozen cannot be handed to replicas.*frozen.*plain dict"),
    ],
)
def test_what_takes_no_other_values_is_refused(strategy: ts.Strategy, value: Any, message: str) -> None:
    with pytest.raises(WrongTypeError, match=message):
        strategy.run(lambda given: None, args=(value,))


@pytest.mark.parametrize("value", [OmegaConf.create({"later": "???", "layers": [1, 2]}), ReadOnly({"a": 1})])
def test_what_holds_nothing_of_a_replicas_own_is_passed_whole(strategy: ts.Strategy, value: Any) -> None:
    seen: list[Any] = []
    strategy.run(seen.append, args=(value,))
    assert [given is value for given in seen] == [True, True]


def test_dicts_of_each_replica_go_together_by_their_keys(strategy: ts.Strategy) -> None:
    def value(of: Any) -> dict[str, int]:
        made = {"a": 1, "b": 2}
        return made if of.replica_id_in_sync_group else {key: made[key] for key in reversed(made)}

    made: Any = strategy.distribute_values_from_function(value)
    assert {key: one.values for key, one in made.items()} == {"b": (2, 2), "a": (1, 1)}
    with pytest.raises(StructureMismatchError, match=r"the keys \['a'\] beside one with \['b'\]"):
        strategy.distribute_values_from_function(lambda of: {"ab"[of.replica_id_in_sync_group]: 1})


def test_keys_that_have_no_order_keep_their_own(strategy: ts.Strategy) -> None:
    """In what replicas do together, which otherwise goes by the order of the keys."""
    assert strategy.reduce("sum", {"b": ONE, 1: TWO, "a": ONE}) == {"b": 3, 1: 6, "a": 3}


def test_sizes_that_differ_are_a_plain_tuple_of_results(strategy: ts.Strategy) -> None:
    result = strategy.run(lambda: torch.Size([1 + ts.get_replica_context().replica_id_in_sync_group]))
    assert type(result) is tuple
    assert result[0].values == (1, 2)
