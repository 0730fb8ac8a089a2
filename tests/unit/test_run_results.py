"""What `Strategy.run` hands to replicas and returns, and how its results are opened and combined."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import torchstrat as ts
from torchstrat.errors import InvalidArgumentError, StructureMismatchError

Pair = namedtuple("Pair", ["left", "right"])


@pytest.fixture
def strategy() -> Iterator[ts.Strategy]:
    made = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    yield made
    made.close()


def replica() -> int:
    context = ts.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def test_every_replica_sees_its_own_components(strategy: ts.Strategy) -> None:
    seen: list[Any] = []
    values = ts.PerReplica(["a", "b"])
    shared = object()
    strategy.run(
        lambda *args, **kwargs: seen.append((args, kwargs)),
        args=(values, [values, {"deep": (values, 1)}], shared),
        kwargs={"pair": Pair(values, ts.Mirrored([5, 6]))},
    )
    for index, letter in enumerate("ab"):
        expected = (letter, [letter, {"deep": (letter, 1)}], shared), {"pair": Pair(letter, 5 + index)}
        assert seen[index] == expected


def test_one_object_is_not_wrapped_and_equal_ones_are(strategy: ts.Strategy) -> None:
    same = torch.ones(1)
    for value in (None, 3, "text", same):
        assert strategy.run(lambda value=value: value) is value
    fresh = strategy.run(lambda: torch.ones(1))
    assert isinstance(fresh, ts.PerReplica)
    assert strategy.run(lambda: (same, torch.ones(1)))[0] is same


def test_structures_are_kept(strategy: ts.Strategy) -> None:
    result = strategy.run(lambda: {"list": [replica()], "pair": Pair(replica(), (replica(), None))})
    assert result["list"][0].values == (0, 1)
    assert isinstance(result["pair"], Pair)
    assert result["pair"].right[0].values == (0, 1)
    assert result["pair"].right[1] is None
    assert strategy.local_results(result) == tuple(
        {"list": [index], "pair": Pair(index, (index, None))} for index in range(2)
    )
    assert strategy.run(lambda: torch.ones(1) if replica() else None).values[0] is None


@pytest.mark.parametrize("results", [([1], [1, 2]), ({"a": 1}, {"b": 1}), ([1], (1,)), ([1], 1)])
def test_structures_that_differ(strategy: ts.Strategy, results: tuple[Any, Any]) -> None:
    with pytest.raises(StructureMismatchError, match=r"replica 0 returned .* and replica 1"):
        strategy.run(lambda: results[replica()])


def test_one_replica_gives_bare_values() -> None:
    for strategy in (ts.OneDeviceStrategy("cpu:0"), ts.MirroredStrategy(["cpu:0"])):
        assert strategy.run(lambda x: {"x": x + 1}, args=(ts.PerReplica([1]),)) == {"x": 2}
        wrapped = strategy.distribute_values_from_function(lambda context: context.num_replicas_in_sync)
        assert strategy.local_results(wrapped) == (1,)
        assert isinstance(wrapped, ts.PerReplica) is isinstance(strategy, ts.MirroredStrategy)
        strategy.close()


def test_the_only_replica_with_rows_has_results_of_its_own(strategy: ts.Strategy) -> None:
    """Of two; the other one's would have been others."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(5.0)), batch_size=4)
    sums, counts, names = [], [], []
    for batch in strategy.distribute_dataset(loader):
        total, (rows, name) = strategy.run(lambda part: (part[0].sum(), (len(part[0]), "rows")), args=(batch,))
        sums.append(float(strategy.reduce("sum", total)))
        counts.append([int(one) for one in strategy.local_results(rows)])
        names.append(name)
    assert sums == [0.0 + 1.0 + 2.0 + 3.0, 4.0]
    assert counts[-1] == [1]
    assert names == ["rows", "rows"]


@pytest.mark.parametrize("args", [torch.ones(2), {"x": 1}, "ab", None, ts.PerReplica([1, 2]), iter([1])])
def test_args_are_a_list_or_a_tuple(strategy: ts.Strategy, args: Any) -> None:
    with pytest.raises(ValueError, match=r"write args=\(value,\)"):
        strategy.run(print, args=args)


def test_functions_and_options(strategy: ts.Strategy) -> None:
    with pytest.raises(TypeError, match="run needs a function; got int"):
        strategy.run(3)  # type: ignore[arg-type]
    options = ts.RunOptions(enable_dynamic_batch_size=False)
    assert options == (False, False, None)
    assert options.enable_dynamic_batch_size is options.experimental_enable_dynamic_batch_size is False
    assert strategy.run(lambda: None, options=options) is None
    with pytest.raises(TypeError, match=r"ts\.RunOptions or None"):
        strategy.run(lambda: None, options={"dynamic": True})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one field"):
        ts.RunOptions(True, enable_dynamic_batch_size=True)


def test_an_exception_is_the_users_own_and_stops_the_rest(strategy: ts.Strategy) -> None:
    reached: list[int] = []

    def step() -> None:
        reached.append(replica())
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as raised:
        strategy.run(step)
    assert reached == [0]
    assert "replica 0 of 2" in "".join([*getattr(raised.value, "__notes__", []), str(raised.value)])
    assert strategy.run(lambda: "still usable") == "still usable"


def test_values_without_a_component_for_a_replica(strategy: ts.Strategy) -> None:
    called: list[int] = []
    with pytest.raises(InvalidArgumentError, match=r"components for replicas \[0\], not for replica 1"):
        strategy.run(called.append, args=(ts.PerReplica([1]),))
    assert called == []


def test_local_results_of_what_is_not_distributed(strategy: ts.Strategy) -> None:
    tensor = torch.ones(1)
    assert strategy.local_results(tensor) == (tensor,)
    assert strategy.local_results(None) == (None,)
    assert strategy.local_results([1, {"k": 2}]) == ([1, {"k": 2}],) * 2
    with strategy.scope():
        v = ts.Variable(2.0)
    for index, one in enumerate(strategy.local_results({"v": v})):
        assert one["v"] is strategy.local_results(v)[index]


def test_per_replica_values_are_inert(strategy: ts.Strategy) -> None:
    value = strategy.run(lambda: torch.tensor([1.0]))
    for use in (float, len, iter, lambda v: v + 1, lambda v: v[0]):
        with pytest.raises(TypeError):
            use(value)
    for convert in (np.asarray, lambda v: torch.add(v, 1), lambda v: torch.stack([v, v])):
        with pytest.raises(ValueError, match=r"use strategy\.reduce, strategy\.gather|Use strategy\.reduce"):
            convert(value)
    assert repr(ts.PerReplica([1, "a"])) == "PerReplica:{\n  0: 1,\n  1: 'a'\n}"
    assert ts.PerReplica([1]) != ts.PerReplica([1])


def test_mirrored_values_act_as_their_first_component() -> None:
    value = ts.Mirrored([torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])])
    assert (value + 1).tolist() == (1 + value).tolist() == [2, 3]
    assert torch.add(value, value).tolist() == [2, 4]  # type: ignore[call-overload]
    assert (value.shape, len(value), float(value[1])) == ((2,), 2, 2.0)


def test_reduce_maps_over_nests(strategy: ts.Strategy) -> None:
    result = strategy.run(lambda: {"a": torch.tensor(replica() + 1.0), "b": [torch.tensor([replica() + 1])]})
    total = strategy.reduce("sum", result)
    assert (float(total["a"]), total["b"][0].tolist()) == (3.0, [3])
    assert strategy.gather(result["b"], axis=0)[0].tolist() == [1, 2]


def test_distribute_values_from_function(strategy: ts.Strategy) -> None:
    value = strategy.experimental_distribute_values_from_function(lambda c: {"text": str(c), "none": None})
    assert isinstance(value["none"], ts.PerReplica)
    assert value["text"].values[1].endswith("(replica id 1,  total replicas in sync: 2)")
    with pytest.raises(TypeError):
        strategy.distribute_values_from_function(lambda: None)  # type: ignore[misc,arg-type]
