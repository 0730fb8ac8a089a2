"""What `Strategy.run` takes, hands to replicas and returns, and how its results are opened and combined.

What is wrapped and what is not has been recorded from TensorFlow: `tests.conformance.areas.run`.
"""

from __future__ import annotations

import copy
import pickle
from collections import deque, namedtuple
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import torchstrat as ts
from tests.support.replicas import cpus, replica
from torchstrat.errors import InvalidArgumentError, StructureMismatchError, UnsupportedError, WrongTypeError
from torchstrat.testing import fake_tpu_strategy

Pair = namedtuple("Pair", ["left", "right"])


@pytest.fixture
def strategy() -> Iterator[ts.Strategy]:
    made = ts.MirroredStrategy(cpus(2))
    yield made
    made.close()


def test_every_replica_sees_its_own_components(strategy: ts.Strategy) -> None:
    seen: list[Any] = []
    values, shared = ts.PerReplica(["a", "b"]), object()
    strategy.run(
        lambda *args, **kwargs: seen.append((args, kwargs)),
        args=(values, [values, {"deep": (values, 1)}], shared),
        kwargs={"pair": Pair(values, ts.Mirrored([5, 6]))},
    )
    assert seen == [
        ((letter, [letter, {"deep": (letter, 1)}], shared), {"pair": Pair(letter, 5 + index)})
        for index, letter in enumerate("ab")
    ]


def test_structures_are_kept(strategy: ts.Strategy) -> None:
    result = strategy.run(lambda: {"list": [replica()], "pair": Pair(replica(), (replica(), None))})
    assert result["list"][0].values == result["pair"].right[0].values == (0, 1)
    assert isinstance(result["pair"], Pair)
    assert result["pair"].right[1] is None
    opened = tuple({"list": [index], "pair": Pair(index, (index, None))} for index in range(2))
    assert strategy.local_results(result) == opened
    assert strategy.run(lambda: torch.ones(1) if replica() else None).values[0] is None


@pytest.mark.parametrize("runs_before", [0, 1])
def test_a_closed_strategy_that_runs_again_combines_what_runs_leave(strategy: ts.Strategy, runs_before: int) -> None:
    with strategy.scope():
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)

    def accumulate() -> None:
        with strategy.no_sync():
            strategy.run(lambda: (weight * replica()).sum().backward())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(runs_before):
        accumulate()
    for number in range(1, 3):
        strategy.close()
        accumulate()
        assert float(weight.detach()) == -0.5 * (runs_before + number)


def test_a_step_between_runs_that_is_refused_is_refused_again(strategy: ts.Strategy) -> None:
    with strategy.scope():
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
    with strategy.no_sync():
        strategy.run(lambda: (weight * (1 + replica())).sum().backward())
    assert weight.grad is not None
    weight.grad.mul_(0.5)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="changed between runs"):
            optimizer.step()
    assert float(weight.detach()) == 0.0


class Replay(deque[int]):
    def __init__(self, capacity: int) -> None:
        super().__init__(maxlen=capacity)


class Names(set[int]):
    def __init__(self, *, first: int) -> None:
        super().__init__({first})


class Counting(list[int]):
    count = 0

    def append(self, value: int) -> None:
        self.count += 1
        super().append(value)


class Holding(torch.nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.weight, self.held = torch.nn.Parameter(torch.zeros(1)), held


HELD = {
    "deque": (lambda: Replay(2), lambda held: held.append(len(held))),
    "set": (lambda: Names(first=7), lambda held: held.add(len(held))),
    "list": (Counting, lambda held: held.append(len(held))),
    "named tuple": (lambda: Pair([], torch.zeros(2)), lambda held: (held.left.append(1), held.right.add_(1))),
}


@pytest.mark.parametrize("name", HELD)
def test_containers_of_a_class_of_ones_own_are_each_replicas_own(strategy: ts.Strategy, name: str) -> None:
    make, fill = HELD[name]
    plain = make()
    with strategy.scope():
        module = Holding(make())

    def step(held: Any) -> str:
        fill(held)
        return f"{held!r} {getattr(held, '__dict__', None)}"

    for _ in range(3):
        wanted = step(plain)
        results = strategy.run(lambda: (step(module.held), replica()))
        assert strategy.local_results(results) == ((wanted, 0), (wanted, 1))


def test_what_a_module_that_a_step_makes_holds_is_each_replicas_own_from_its_makers_turn_on(
    strategy: ts.Strategy,
) -> None:
    with strategy.scope():
        module = Holding(None)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    class Made(Holding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.held.append(replica())
            return x * self.weight

    def step() -> str:
        if module.held is None:
            module.held = Made([])
        (module.held(module.weight)).sum().backward()
        optimizer.step()
        return str(module.held.held)

    assert strategy.local_results(strategy.run(step)) == ("[0]", "[0, 1]")
    assert strategy.local_results(strategy.run(step)) == ("[0, 0]", "[0, 1, 1]")


@pytest.mark.parametrize("results", [([1], [1, 2]), ({"a": 1}, {"b": 1}), ([1], (1,)), ([1], 1)])
def test_structures_that_differ(strategy: ts.Strategy, results: tuple[Any, Any]) -> None:
    with pytest.raises(StructureMismatchError, match=r"replica 0 returned .* and replica 1"):
        strategy.run(lambda: results[replica()])


def test_the_only_replica_with_rows_has_results_of_its_own(strategy: ts.Strategy) -> None:
    """Of two; the other one's would have been others."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(5.0)), batch_size=4)
    found = []
    for batch in strategy.distribute_dataset(loader):
        total, (rows, name) = strategy.run(lambda part: (part[0].sum(), (len(part[0]), "rows")), args=(batch,))
        found.append((float(strategy.reduce("sum", total)), [int(one) for one in strategy.local_results(rows)], name))
    assert found == [(6.0, [2], "rows"), (4.0, [1], "rows")]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    **{
        f"args={type(args).__name__}": ({"fn": print, "args": args}, ValueError, r"write args=\(value,\)")
        for args in (torch.ones(2), {"x": 1}, "ab", None, ts.PerReplica([1, 2]), iter([1]))
    },
    "no function": ({"fn": 3}, TypeError, "run needs a function; got int"),
    "no component for a replica": (
        {"fn": print, "args": (ts.PerReplica([1]),)},
        InvalidArgumentError,
        r"components for replicas \[0\], not for replica 1",
    ),
}


@pytest.mark.parametrize(("call", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_said_before_anything_runs(
    strategy: ts.Strategy, call: Any, error: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=says):
        strategy.run(**call)
    assert capsys.readouterr().out == ""
    assert strategy.run(lambda: "still usable") == "still usable"


def test_local_results_of_what_is_not_distributed(strategy: ts.Strategy) -> None:
    tensor = torch.ones(1)
    assert strategy.local_results(tensor) == (tensor,)
    assert strategy.local_results(None) == (None,)
    assert strategy.local_results([1, {"k": 2}]) == ([1, {"k": 2}],) * 2
    with strategy.scope():
        v = ts.Variable(2.0)
    for index, one in enumerate(strategy.local_results({"v": v})):
        assert one["v"] is strategy.local_results(v)[index]


def test_per_replica_values_are_inert_and_mirrored_ones_act_as_their_first(strategy: ts.Strategy) -> None:
    value = strategy.run(lambda: torch.tensor([1.0]))
    assert not isinstance(value, Iterable)
    for use in (len, list, lambda v: v[0]):
        with pytest.raises(TypeError):
            use(value)
    for convert in (np.asarray, lambda v: torch.add(v, 1), lambda v: torch.stack([v, v])):
        with pytest.raises(ValueError, match=r"use strategy\.reduce, strategy\.gather|Use strategy\.reduce"):
            convert(value)
    assert repr(ts.PerReplica([1, "a"])) == "PerReplica:{\n  0: 1,\n  1: 'a'\n}"
    assert ts.PerReplica([1]) != ts.PerReplica([1])
    mirrored = ts.Mirrored([torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])])
    assert (mirrored + 1).tolist() == (1 + mirrored).tolist() == [2, 3]
    assert torch.add(mirrored, mirrored).tolist() == [2, 4]  # type: ignore[call-overload]
    assert (mirrored.shape, len(mirrored), float(mirrored[1])) == ((2,), 2, 2.0)
    number = ts.Mirrored([3, 3])
    assert (number * 0.5, 0.5 - number, number**-1, -number, number < 3.5) == (1.5, -2.5, 1 / 3, -3, True)


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


# -- options -----------------------------------------------------------------------------------------------------------

FIELDS = ("enable_dynamic_batch_size", "bucketizing_dynamic_shape", "xla_options")
every_kind = pytest.mark.parametrize("make", [lambda: ts.OneDeviceStrategy("cpu"), fake_tpu_strategy])


def fields(options: ts.RunOptions) -> tuple[Any, ...]:
    long = tuple(getattr(options, f"experimental_{name}") for name in FIELDS)
    assert long == tuple(getattr(options, name) for name in FIELDS) == tuple(options)
    return long


def test_run_options_have_two_spellings_and_are_immutable_tuples() -> None:
    assert fields(ts.RunOptions()) == (True, False, None)
    options = ts.RunOptions(False, True, {"a": 1})
    assert fields(options) == (False, True, {"a": 1})
    for prefix in ("", "experimental_"):
        for number, name in enumerate(FIELDS):
            expected: list[Any] = [True, False, None]
            expected[number] = options[number]
            assert fields(ts.RunOptions(**{prefix + name: options[number]})) == tuple(expected)
            with pytest.raises(AttributeError):
                setattr(options, prefix + name, None)
    for other in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert type(other) is ts.RunOptions
        assert other == options


@pytest.mark.parametrize("name", FIELDS)
def test_options_that_are_given_twice(name: str) -> None:
    with pytest.raises(WrongTypeError, match=f"both {name} and experimental_{name}"):
        ts.RunOptions(**{name: True, f"experimental_{name}": True})
    with pytest.raises(TypeError, match="one field"):
        ts.RunOptions(True, True, True, **{name: True})


@every_kind
def test_run_takes_options_and_nothing_else_for_them(make: Any) -> None:
    strategy = make()
    for options in ((True, False, None), {"xla_options": None}, "dynamic", True):
        with pytest.raises(WrongTypeError, match=r"options must be a ts\.RunOptions or None"):
            strategy.run(lambda: None, options=options)
    for options in (None, ts.RunOptions(), ts.RunOptions(enable_dynamic_batch_size=False)):
        assert strategy.run(lambda: None, options=options) is None
    strategy.close()
