"""Containers that a program passes to a step arrive as what they are, or are refused by name."""

from __future__ import annotations

import collections
import types

import pytest
import torch
from omegaconf import OmegaConf

import torchstrat as ts
from torchstrat import nest
from torchstrat.errors import WrongTypeError


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
    def __new__(cls, both):
        return super().__new__(cls, both, both)


def doubled(value):
    return nest.map_structure(lambda leaf: leaf * 2, value)


def test_a_mapping_keeps_its_class_its_attributes_and_its_order():
    node = Node({"b": 1, "a": 2}, scale=3.0)
    made = doubled(node)
    assert type(made) is Node
    assert (list(made.items()), made.scale) == ([("b", 2), ("a", 4)], 3.0)
    assert node == {"b": 1, "a": 2}


@pytest.mark.parametrize(
    "value",
    [
        Settings(alpha=1),
        collections.OrderedDict(alpha=1),
        collections.defaultdict(int, alpha=1),
        collections.UserDict(alpha=1),
    ],
)
def test_constructors_are_not_called(value):
    made = doubled(value)
    assert type(made) is type(value)
    assert dict(made) == {"alpha": 2}
    assert getattr(made, "default_factory", None) is getattr(value, "default_factory", None)


def test_tuples():
    made = doubled(Pair(1))
    assert type(made) is Pair
    assert made == (2, 2)
    assert nest.map_structure(str, torch.Size([1, 2])) == ("1", "2")


class ReadOnly(collections.abc.Mapping):
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


@pytest.mark.parametrize("value", [types.MappingProxyType({"a": 1}), ReadOnly({"a": 1})])
def test_a_read_only_mapping_keeps_its_class(value):
    made = doubled(value)
    assert type(made) is type(value)
    assert dict(made) == {"a": 2}
    assert nest.map_structure(lambda leaf: leaf, value) is value


def test_a_read_only_mapping_that_its_constructor_does_not_make_is_refused():
    with pytest.raises(WrongTypeError, match=r"Renamed cannot be handed to replicas.*plain dict"):
        doubled(Renamed({"a": 1}))


@pytest.mark.parametrize(
    "value",
    [
        types.MappingProxyType({"a": 1}),
        ReadOnly({"a": 1}),
        collections.UserDict(a=1),
        collections.ChainMap({"a": 1}, {"b": 2}),
    ],
)
def test_mappings_that_are_no_dicts_are_results_too(value):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    result = strategy.run(lambda given: doubled(given), args=(value,))
    strategy.close()
    assert type(result) is type(value)
    assert {name: leaf if isinstance(leaf, int) else leaf.values[0] for name, leaf in result.items()} == {
        name: 2 * leaf for name, leaf in value.items()
    }


def test_what_takes_no_other_values_is_refused():
    with pytest.raises(WrongTypeError, match=r"Frozen cannot be handed to replicas.*frozen.*plain dict"):
        doubled(Frozen(a=1))


def test_a_configuration_is_passed_whole():
    config = OmegaConf.create({"rate": 0.5, "later": "???", "layers": [1, 2]})
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(given):
        return given is config and given.rate * given.layers[1]

    seen = strategy.local_results(strategy.run(step, args=(config,)))
    strategy.close()
    assert seen == (1.0, 1.0)


class Damaged(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise OSError("row 5 is damaged")
        return torch.tensor([float(index)])


def test_an_error_of_a_row_is_not_the_end_of_the_data():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    batches = iter(strategy.distribute_dataset(torch.utils.data.DataLoader(Damaged(), batch_size=4)))
    next(batches)
    for _ in range(3):
        with pytest.raises(OSError, match="row 5 is damaged"):
            next(batches)
    strategy.close()


class ScalingLoader(torch.utils.data.DataLoader):
    """As loaders of graphs do it: the batches are finished by an iterator of its own."""

    def _get_iterator(self):
        return ([x * 10] for (x,) in super()._get_iterator())


def test_a_loader_is_iterated_as_its_class_says():
    loader = ScalingLoader(torch.utils.data.TensorDataset(torch.arange(4.0)), batch_size=4)
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    (batch,) = strategy.distribute_dataset(loader)
    assert torch.cat(strategy.local_results(batch[0])).tolist() == [0.0, 10.0, 20.0, 30.0]
    strategy.close()


def test_a_loader_is_iterated_as_it_says_itself():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4.0)), batch_size=4)
    plain = loader._get_iterator
    loader._get_iterator = lambda: ([x * 10] for (x,) in plain())
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    (batch,) = strategy.distribute_dataset(loader)
    assert torch.cat(strategy.local_results(batch[0])).tolist() == [0.0, 10.0, 20.0, 30.0]
    strategy.close()
