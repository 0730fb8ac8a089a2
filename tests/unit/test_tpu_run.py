"""`TPUStrategy.run`: what steps are given, what `run` returns, and where it may be called; on the fake of the CPU."""

from __future__ import annotations

import copy
import threading
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.tpu_beside_mirrored import fake_tpu, here, own
from torchstrat.errors import ContextError, InvalidArgumentError, StructureMismatchError, UnsupportedError

Pair = namedtuple("Pair", ["left", "right"])


@pytest.fixture
def strategy() -> Iterator[ts.TPUStrategy]:
    with fake_tpu(2) as made:
        yield made


# -- results --------------------------------------------------------------------------------------------------------


def test_a_tensor_of_each_replica_is_a_per_replica_value(strategy: ts.TPUStrategy) -> None:
    result = strategy.run(lambda x: x * 2, args=(own(1.0, 2.0),))
    assert isinstance(result, ts.PerReplica)
    assert repr(result) == "PerReplica:{\n  0: tensor(2.),\n  1: tensor(4.)\n}"
    assert [float(one) for one in strategy.local_results(result)] == [2.0, 4.0]
    assert float(strategy.reduce("sum", result)) == 6.0
    assert float(strategy.reduce("mean", result)) == 3.0


def test_a_fresh_tensor_that_is_equal_everywhere_is_one_too(strategy: ts.TPUStrategy) -> None:
    result = strategy.run(lambda: torch.ones(2))
    assert isinstance(result, ts.PerReplica)
    assert [one.tolist() for one in result.values] == [[1, 1], [1, 1]]
    assert strategy.gather(result, axis=0).tolist() == [1, 1, 1, 1]


def test_what_all_replicas_share_is_not_wrapped(strategy: ts.TPUStrategy) -> None:
    given = torch.ones(2)
    with strategy.scope():
        layer = nn.BatchNorm1d(2)
    for value in (given, layer.weight, layer.running_mean, None, 3, "text", object()):
        assert strategy.run(lambda value, own_value=value: value, args=(value,)) is value
    assert strategy.run(lambda: layer.weight) is layer.weight
    assert strategy.run(lambda: layer.running_mean) is layer.running_mean


def test_nests_keep_their_structure(strategy: ts.TPUStrategy) -> None:
    result = strategy.run(lambda x: {"list": [x, None], "pair": Pair(x + 1, ("a", 5))}, args=(own(1, 2),))
    assert [int(one) for one in result["list"][0].values] == [1, 2]
    assert result["list"][1] is None
    assert isinstance(result["pair"], Pair)
    assert [int(one) for one in result["pair"].left.values] == [2, 3]
    assert result["pair"].right == ("a", 5)


def test_one_replica_gives_bare_values() -> None:
    with fake_tpu(1) as strategy:
        result = strategy.run(lambda x: {"x": x + 1, "id": here().replica_id_in_sync_group}, args=(torch.ones(2),))
        assert isinstance(result["x"], torch.Tensor)
        assert result["x"].tolist() == [2, 2]
        assert result["id"] == 0
        assert strategy.run(lambda x: x + 1, args=(own(1.0),)).item() == 2.0


def test_results_do_not_change_with_what_they_were_made_of(strategy: ts.TPUStrategy) -> None:
    with strategy.scope():
        layer = nn.Linear(1, 1)
    before = strategy.run(lambda: layer.weight * 1)
    shared = strategy.run(lambda: layer.weight.detach())
    first = layer.weight.detach().item()
    with torch.no_grad():
        layer.weight.add_(1)
    assert [one.item() for one in (*before.values, *shared.values)] == [first] * 4


def test_results_are_given_to_the_next_run(strategy: ts.TPUStrategy) -> None:
    result = strategy.run(lambda x: x + 1, args=(own([1.0, 2.0], [3.0, 4.0]),))
    again = strategy.run(lambda x: x * 2, args=(result,))
    assert [one.tolist() for one in again.values] == [[4, 6], [8, 10]]
    assert strategy.gather(again, axis=0).tolist() == [4, 6, 8, 10]


def test_large_results_are_reduced_as_small_ones_are(strategy: ts.TPUStrategy) -> None:
    for size in (3, 5000):
        result = strategy.run(lambda x, size=size: x.expand(size) + 0, args=(own(1.0, 5.0),))
        assert set(strategy.reduce("mean", result).tolist()) == {3.0}
        assert strategy.reduce("sum", result).shape == (size,)
        assert float(strategy.reduce("sum", result, axis=0)) == 6.0 * size


def test_reduce_of_integers_and_bools(strategy: ts.TPUStrategy) -> None:
    result = strategy.run(lambda x: (x, x > 1), args=(own(1, 2),))
    assert int(strategy.reduce("sum", result[0])) == 3
    assert [bool(one) for one in result[1].values] == [False, True]


# -- inputs ---------------------------------------------------------------------------------------------------------


def test_each_replica_sees_its_own_components(strategy: ts.TPUStrategy) -> None:
    x = own([1.0, 2.0], [3.0, 4.0])
    result = strategy.run(
        lambda a, *rest, **named: (a.sum(), rest[0][0]["deep"][0] + 1, named["pair"].left * named["pair"].right),
        args=(x, [{"deep": (x, 1)}]),
        kwargs={"pair": Pair(ts.PerReplica([2, 3]), 10)},
    )
    assert [float(one) for one in result[0].values] == [3, 7]
    assert [one.tolist() for one in result[1].values] == [[2, 3], [4, 5]]
    assert [int(one) for one in result[2].values] == [20, 30]


def test_a_step_sees_the_shape_of_one_replica(strategy: ts.TPUStrategy) -> None:
    seen: list[Any] = []
    strategy.run(lambda x: seen.append((x.shape, x.ndim, len(x), x.dtype)), args=(own([[1, 2]], [[3, 4]]),))
    assert seen == [((1, 2), 2, 1, torch.int64)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.5, 2.5], [1.5, 2.5]),
        ([True, False], [True, False]),
        ([np.float64(1), np.float64(2)], [1.0, 2.0]),
        ([np.ones(2), np.zeros(2)], [[1, 1], [0, 0]]),
    ],
)
def test_numbers_and_arrays_of_each_replica_are_tensors(
    strategy: ts.TPUStrategy, values: list[Any], expected: list[Any]
) -> None:
    result = strategy.run(lambda x: x, args=(ts.PerReplica(values),))
    assert [one.tolist() for one in result.values] == expected


def test_equal_python_objects_are_one(strategy: ts.TPUStrategy) -> None:
    same = object()
    for first, second in (("a", "a"), (3, 3), (None, None), (same, same)):
        assert strategy.run(lambda x: x, args=(ts.PerReplica([first, second]),)) is first


@pytest.mark.parametrize("values", [["a", "b"], [object(), object()], [None, 1], [np.array(["a"]), np.array(["b"])]])
def test_different_python_objects_are_refused(strategy: ts.TPUStrategy, values: list[Any]) -> None:
    called: list[Any] = []
    with pytest.raises(UnsupportedError, match=r"tensors or numbers|strings"):
        strategy.run(called.append, args=(ts.PerReplica(values),))
    assert called == []


def test_mirrored_values_and_plain_ones(strategy: ts.TPUStrategy) -> None:
    value = ts.Mirrored([torch.tensor([1.0, 2.0])] * 2)
    array = np.ones(2)
    result = strategy.run(lambda m, a: (m + 1, a), args=(value, array))
    assert [one.tolist() for one in result[0].values] == [[2, 3], [2, 3]]
    assert result[1] is array


def test_values_without_a_component_for_a_replica(strategy: ts.TPUStrategy) -> None:
    with pytest.raises(InvalidArgumentError, match=r"components for replicas \[0\], not for replica 1"):
        strategy.run(lambda x: x, args=(own(1.0),))


def test_replicas_know_their_number(strategy: ts.TPUStrategy) -> None:
    ids = strategy.run(lambda: torch.as_tensor(here().replica_id_in_sync_group))
    assert [int(one) for one in ids.values] == [0, 1]
    assert strategy.run(lambda: here().num_replicas_in_sync) == 2
    assert strategy.run(lambda: len(here().devices)) == 1
    rows = strategy.run(lambda x: x[here().replica_id_in_sync_group], args=(torch.tensor([5.0, 6.0]),))
    assert [float(one) for one in rows.values] == [5, 6]


# -- a step that fails, and calls in the wrong place ----------------------------------------------------------------


def test_an_error_of_the_step_is_the_users_own(strategy: ts.TPUStrategy) -> None:
    def step() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        strategy.run(step)
    assert strategy.run(lambda: "still usable") == "still usable"
    assert not ts.has_strategy()


def test_run_in_a_run(strategy: ts.TPUStrategy) -> None:
    with pytest.raises(ContextError, match=r"run was called inside .*replica.* it works outside of run"):
        strategy.run(lambda: strategy.run(lambda: None))
    assert strategy.run(lambda: 1) == 1


def test_reduce_in_a_run(strategy: ts.TPUStrategy) -> None:
    with pytest.raises(ContextError, match=r"reduce was called inside .*replica"):
        strategy.run(lambda x: strategy.reduce("sum", x), args=(own(1.0, 2.0),))


def test_after_close() -> None:
    with fake_tpu(2) as strategy:
        strategy.close()
        with pytest.raises(ContextError, match="has been closed"):
            strategy.run(lambda: None)
        with pytest.raises(ContextError, match="has been closed"), strategy.scope():
            pass


def test_one_run_at_a_time(strategy: ts.TPUStrategy) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def waits() -> None:
        inside.set()
        assert go_on.wait(30)

    other = threading.Thread(target=strategy.run, args=(waits,))
    other.start()
    try:
        assert inside.wait(30)
        with pytest.raises(ContextError, match="while another run of it goes on, in another thread"):
            strategy.run(lambda: None)
    finally:
        go_on.set()
        other.join()
    assert strategy.run(lambda: 2) == 2


def test_passes_return_equal_structures(strategy: ts.TPUStrategy) -> None:
    with pytest.raises(StructureMismatchError, match="the same structure"):
        strategy.run(lambda x: [x] * len(x), args=(own([1.0], [1.0, 2.0]),))


def test_copies(strategy: ts.TPUStrategy) -> None:
    with pytest.raises(ContextError, match=r"cannot be copied by copy\.copy"):
        copy.copy(strategy)
    with strategy.scope():
        model = nn.Linear(1, 1)
    twin = copy.deepcopy(strategy)
    try:
        assert type(twin) is ts.TPUStrategy
        assert twin is not strategy
        assert twin.num_replicas_in_sync == 2
        assert twin.device_assignment.core_assignment.tolist() == strategy.device_assignment.core_assignment.tolist()
        assert twin.compilations == ()
        with pytest.warns(UserWarning, match="TPUStrategy.scope.. has not seen"):
            twin.run(lambda: model(torch.ones(1)).sum())
    finally:
        twin.close()


def test_variables_of_elsewhere_are_adopted_with_a_warning(strategy: ts.TPUStrategy) -> None:
    model = nn.Linear(3, 1)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    with pytest.warns(UserWarning, match=r"TPUStrategy\.scope\(\) has not seen: a Linear made outside of it"):
        strategy.run(step, args=(own([[1.0, 0, 0]], [[3.0, 0, 0]]),))
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2, 0, 0]]


def test_an_optimizer_of_another_thread_that_is_in_its_step_when_a_run_begins() -> None:
    """The hooks that see when an optimizer steps are PyTorch's global ones."""
    begun, over = threading.Event(), threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            begun.set()
            assert over.wait(60)

    failures: list[BaseException] = []
    optimizer = Slow([nn.Parameter(torch.zeros(1))], lr=0.1)

    def train() -> None:
        try:
            optimizer.step()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    assert begun.wait(60)

    def step(x: torch.Tensor) -> torch.Tensor:
        over.set()  # the other one ends, and its hooks are called, while this step is watched
        thread.join(60)
        return x + 1

    with fake_tpu(2) as strategy:
        strategy.run(step, args=(own(1.0, 2.0),))
    assert not failures
