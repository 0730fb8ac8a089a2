"""Tables with ``max_norm`` in runs: what they leave as it was. What is refused is in tests/matrix/scaled_tables.py."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial

import numpy
import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.replicas import opened
from torchstrat.errors import UnsupportedError

PLACES = ["mirrored x2", "apart x2"]


def _table() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(6, 3, max_norm=0.5)


@pytest.mark.parametrize("place", PLACES)
def test_copies_that_a_step_makes_are_ordinary_parameters(place):
    with opened(place) as strategy:
        with strategy.scope():
            table = _table()

        def step() -> list[type]:
            made = nn.Parameter(table.weight)
            assert made.data_ptr() == table.weight.data_ptr()
            stored = pickle.loads(pickle.dumps(table.weight))
            return [type(copy.deepcopy(table).weight), type(stored), type(made.data.clone())]

        for found in strategy.local_results(strategy.run(step)):
            assert found == [nn.Parameter, nn.Parameter, torch.Tensor]
        assert type(table.weight) is nn.Parameter


USES = {
    "norm": lambda weight: weight.norm(),
    "T": lambda weight: weight.T,
    "stack": lambda weight: torch.stack([weight]),
    "linear": lambda weight: nn.functional.linear(torch.ones(3), weight),
    "__array__": lambda weight: numpy.asarray(weight),
    "deepcopy": copy.deepcopy,
    "embedding with max_norm=None": lambda weight: nn.functional.embedding(torch.tensor([3]), weight),
    "tensor": lambda weight: torch.tensor(weight),
    "as_tensor": lambda weight: torch.as_tensor(weight),
    "asarray": lambda weight: torch.asarray(weight),
    "TensorBase": lambda weight: torch.Tensor(weight),
    "new_tensor": lambda weight: torch.zeros(1).new_tensor(weight),
    "new": lambda weight: torch.zeros(1).new(weight),
    "set_": lambda weight: torch.zeros(1).set_(weight),
    "sparse_coo_tensor": lambda weight: torch.sparse_coo_tensor(torch.arange(6)[None], weight),
    "as_subclass": lambda weight: weight.as_subclass(torch.Tensor),
    "detach": lambda weight: nn.ParameterList([weight]).state_dict(),
}


@pytest.mark.parametrize("name", USES)
def test_what_a_refusal_says(name):
    with opened("mirrored x2") as strategy:
        with strategy.scope():
            table = _table()

        def step() -> None:
            table(torch.tensor([1, 2]))
            assert torch.zeros_like(table.weight).shape == table.weight.shape
            assert table.weight.data_ptr()
            USES[name](table.weight)

        with pytest.raises(UnsupportedError, match=rf"Embedding\.weight \(6, 3\) has max_norm, .*\({name}\)"):
            strategy.run(step)


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_that_a_step_trains_for_itself(place):
    with opened(place) as strategy:
        with strategy.scope():
            table = _table()

        def step() -> float:
            own = copy.deepcopy(table)
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            own(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            return float(own.weight.detach().sum())

        first, *others = strategy.local_results(strategy.run(step))
        assert all(other == first for other in others)


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_raises_leaves_the_table_as_it_was(place):
    with opened(place) as strategy:
        with strategy.scope():
            table = _table()
        before = table.weight.detach().clone()

        def step() -> None:
            table(torch.tensor([1, 2]))
            table.weight.norm()

        with pytest.raises(UnsupportedError, match=r"Embedding\.weight \(6, 3\) has max_norm, .* \(norm\)"):
            strategy.run(step)
        assert type(table.weight) is nn.Parameter
        if place == "mirrored x2":
            assert torch.equal(table.weight, before)
        assert table.weight.norm() > 0


def test_a_table_that_an_interrupted_run_has_left_is_put_right_by_the_next():
    with opened("mirrored x2") as strategy:
        with strategy.scope():
            table = _table()
        kinds: list[type] = []
        strategy.run(lambda: kinds.append(type(table.weight)))
        table.weight.__class__ = kinds[0]
        assert type(table.weight) is not nn.Parameter
        assert table.weight.norm() > 0
        strategy.run(lambda: table(torch.tensor([1, 2])))
        assert type(table.weight) is nn.Parameter


def test_functions_that_have_to_be_compiled_whole_are_told_why():
    with opened("mirrored x2") as strategy:
        with strategy.scope():
            table = _table()
        look_up = torch.compile(lambda ids: table(ids), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="what a table with max_norm is used for has to be seen"):
            strategy.run(lambda: look_up(torch.tensor([1, 2])))


def test_lookups_outside_of_runs_are_pytorchs():
    torch.compiler.reset()  # another test may have had PyTorch give up on the forward pass of such layers
    with opened("mirrored x2"):
        ids, plain = torch.tensor([[1, 2]]), _table()
        expected = plain(ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.script(_table())(ids)  # which PyTorch 2.13 does without scaling any row
        assert torch.equal(torch.compile(_table(), backend="eager", fullgraph=True)(ids), expected)
        table = _table()
        table(ids)
        assert table.weight.norm() < _table().weight.norm()


def test_what_reads_tensors_is_pytorchs_again_after_a_run():
    readers = torch.tensor, torch.as_tensor, torch.asarray
    with opened("mirrored x2") as strategy:
        with strategy.scope():
            table = _table()
        strategy.run(lambda: table(torch.tensor([1, 2])))
        assert (torch.tensor, torch.as_tensor, torch.asarray) == readers


def test_a_use_on_a_replica_that_looks_nothing_up():
    with opened("mirrored x2") as strategy:
        with strategy.scope():
            table = _table()

        def step(*, looks_up: int) -> None:
            if ts.get_replica_context().replica_id_in_sync_group == looks_up:
                table(torch.tensor([1, 2]))
            else:
                table.weight.norm()

        for looks_up in (0, 1):
            with pytest.raises(UnsupportedError, match=r"Embedding\.weight \(6, 3\) has max_norm, .*\(norm\)"):
                strategy.run(partial(step, looks_up=looks_up))


def test_one_replica_uses_its_table_as_it_likes():
    with opened("mirrored x1") as strategy:
        with strategy.scope():
            table = _table()

        def step() -> torch.Tensor:
            table(torch.tensor([1, 2]))
            return table.weight.norm().detach()

        assert strategy.run(step) > 0
