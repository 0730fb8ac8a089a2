"""Tables with ``max_norm`` in runs: what they leave as it was. What is refused is in tests/matrix/scaled_tables.py."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torchstrat as ts
from tests.support.replicas import opened
from torchstrat.errors import UnsupportedError

PLACES = ["mirrored x2", "apart x2"]


def _table() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(6, 3, max_norm=0.5)


@contextmanager
def opened_with_table(place: str = "mirrored x2") -> Iterator[tuple[ts.Strategy, nn.Embedding]]:
    with opened(place) as strategy:
        with strategy.scope():
            table = _table()
        yield strategy, table


def look_up(table: nn.Embedding) -> torch.Tensor:
    return table(torch.tensor([1, 2]))


@pytest.mark.parametrize("place", PLACES)
def test_copies_that_a_step_makes_and_trains_are_ordinary_parameters(place):
    with opened_with_table(place) as (strategy, table):

        def step() -> tuple[Any, ...]:
            made, own = nn.Parameter(table.weight), copy.deepcopy(table)
            assert made.data_ptr() == table.weight.data_ptr()
            stored = pickle.loads(pickle.dumps(table.weight))
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            look_up(own).sum().backward()
            optimizer.step()
            return type(own.weight), type(stored), type(made.data.clone()), float(own.weight.detach().sum())

        first, *others = strategy.local_results(strategy.run(step))
        assert first[:3] == (nn.Parameter, nn.Parameter, torch.Tensor)
        assert all(other == first for other in others)
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


@pytest.mark.parametrize(("name", "place"), [*((name, "mirrored x2") for name in USES), ("norm", "apart x2")])
def test_what_a_refusal_says_and_that_it_leaves_the_table_as_it_was(name, place):
    with opened_with_table(place) as (strategy, table):
        before = table.weight.detach().clone()

        def step(looks_up: int | None = None) -> None:
            if looks_up in (None, ts.get_replica_context().replica_id_in_sync_group):
                look_up(table)
            if looks_up != ts.get_replica_context().replica_id_in_sync_group:
                assert torch.zeros_like(table.weight).shape == table.weight.shape
                assert table.weight.data_ptr()
                USES[name](table.weight)

        # A replica may use it that looks nothing up.
        for looks_up in (None, 0, 1) if (name, place) == ("norm", "mirrored x2") else (None,):
            with pytest.raises(UnsupportedError, match=rf"Embedding\.weight \(6, 3\) has max_norm, .*\({name}\)"):
                strategy.run(step, (looks_up,))
            assert type(table.weight) is nn.Parameter
            if place == "mirrored x2":
                assert torch.equal(table.weight, before)
            assert table.weight.norm() > 0


def test_after_a_run_and_after_one_that_was_interrupted_all_is_pytorchs():
    with opened_with_table() as (strategy, table):
        kinds: list[type] = []
        strategy.run(lambda: kinds.append(type(table.weight)))
        table.weight.__class__ = kinds[0]
        assert type(table.weight) is not nn.Parameter
        assert table.weight.norm() > 0
        strategy.run(lambda: look_up(table))
        assert type(table.weight) is nn.Parameter


def test_functions_that_have_to_be_compiled_whole_are_told_why():
    with opened_with_table() as (strategy, table):
        compiled = torch.compile(lambda ids: table(ids), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="what a table with max_norm is used for has to be seen"):
            strategy.run(lambda: compiled(torch.tensor([1, 2])))


def test_lookups_outside_of_runs_and_of_one_replica_are_pytorchs():
    torch.compiler.reset()  # another test may have had PyTorch give up on the forward pass of such layers
    with opened("mirrored x2"):
        ids, plain = torch.tensor([[1, 2]]), _table()
        expected = plain(ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)  # from torch 2.14 on
            torch.jit.script(_table())(ids)  # which PyTorch 2.13 does without scaling any row
        assert torch.equal(torch.compile(_table(), backend="eager", fullgraph=True)(ids), expected)
        assert plain.weight.norm() < _table().weight.norm()
    with opened_with_table("mirrored x1") as (strategy, table):
        assert strategy.run(lambda: (look_up(table), table.weight.norm().detach())[1]) > 0


def test_a_tensor_without_memory_that_something_keeps_is_passed_over():
    traced = torch.zeros(6, 3)
    torch._C._set_throw_on_mutable_data_ptr(traced)  # as PyTorch's compiler does with what it traces with
    with opened_with_table() as (strategy, table):
        strategy.run(lambda: look_up(table))
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        traced.data_ptr()


def test_operators_are_looked_at_where_a_step_may_look_up_rows_itself():
    """And not for each layer that is called so."""
    seen: list[bool] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            seen.append(bool(_get_current_dispatch_mode_stack()))
            return self.embedding(ids)

    class OfFunctions(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            seen.append(bool(_get_current_dispatch_mode_stack()))
            return F.embedding(ids, self.embedding.weight) + nn.functional.embedding(ids, self.embedding.weight)

    for kind, expected in ((Net, False), (OfFunctions, True)):
        strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            net = kind()
        strategy.run(lambda net=net: net(torch.tensor([1, 2])))
        strategy.close()
        assert seen == [expected] * 2
        seen.clear()
