"""What a parameter server holds: creating, reading, pushing; and what threads may do at the same time.

That steps have the numbers of one device is shown by programs: tests/unit/test_ps_rows.py, tests/matrix/optimizers.py.
"""

from __future__ import annotations

import collections
import itertools
import pickle
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.parameter_servers import PerTensor
from tests.support.server_stores import (
    add_edit,
    add_optimizer,
    dense_step,
    held_by,
    make_spec,
    make_store,
    new_shards,
    options_of,
    push_of,
    row_step,
    whole,
)
from torchstrat import Ftrl
from torchstrat.core import memory
from torchstrat.core.memory import available_bytes
from torchstrat.core.optimizers import Gradients, Kind, Tier
from torchstrat.errors import (
    CommunicationTimeoutError,
    FencedError,
    InvalidArgumentError,
    RepeatedFunctionError,
    UnsupportedError,
)
from torchstrat.parameter_server.interface import Peer, Task
from torchstrat.parameter_server.messages import (
    COORDINATOR,
    Accumulation,
    AppliedPushes,
    InitialOp,
    NewShard,
    OptimizerStep,
    Push,
    RowsRequest,
    SetAttribute,
    ShardEdit,
)
from torchstrat.parameter_server.server.deduplication import AppliedRecords, EarlierRuns, part_of
from torchstrat.parameter_server.server.optimizer_step import fast_step_of
from torchstrat.parameter_server.server.service import VariableServer
from torchstrat.parameter_server.server.store import VariableStore
from torchstrat.parameter_server.variables.attributes import KnownNamespace, put
from torchstrat.parameter_server.variables.deferred_init import RecordInitialisers, recipe_of, replay
from torchstrat.testing.fake_cluster import FakeCluster

APPLY_EDIT = "torchstrat.parameter_server.server.store.apply_edit"
ONES = torch.ones(2)


def stepped_by(optimizer: torch.optim.Optimizer, *values: torch.Tensor, kind: Kind | None = None) -> VariableStore:
    """A store of which the optimizer steps all variables, in one group."""
    store = make_store(*values)
    add_optimizer(store, optimizer, [range(len(values))], kind)
    return store


def sgd(value: torch.Tensor = ONES) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(value.clone())], lr=1.0)


# -- creating --------------------------------------------------------------------------------------------------------


def test_creating_again_keeps_the_value() -> None:
    store = make_store(torch.zeros(4))
    store.create(new_shards(make_spec(0, torch.zeros(4)), torch.ones(4)))
    assert torch.equal(whole(store), torch.zeros(4))
    with pytest.raises(InvalidArgumentError, match="ps 0 has variable 0 as"):
        store.create(new_shards(make_spec(0, torch.zeros(5)), torch.zeros(5)))


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(4, dtype=torch.float64)])
def test_a_value_that_does_not_fit_its_spec(value: torch.Tensor) -> None:
    store = VariableStore("ps 7")
    spec = make_spec(0, torch.zeros(4), name="weights")
    with pytest.raises(InvalidArgumentError, match=r"'weights' on ps 7 must be torch.float32 of shape \(4,\)"):
        store.create([NewShard(spec, 0, value)])
    assert store.catalog()["variables"] == []


def test_shards_that_do_not_fit_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    store = VariableStore("ps 0")
    small, table = make_spec(0, torch.zeros(100)), make_spec(1, torch.zeros(50, 4), name="table")
    new = [*new_shards(small, torch.zeros(100)), NewShard(table, 0, None, recipe=())]
    with pytest.raises(
        InvalidArgumentError, match=r"'table' .*800 bytes after 400 bytes for others.* needs 1,200 .*1,000"
    ):
        store.create(new)
    assert store.catalog()["variables"] == []
    store.create(new[:1])
    assert store.total_bytes == 400


def test_memory_left_is_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    def write(**files: str) -> None:
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("0", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def left() -> int | None:
        return available_bytes(tmp_path / "proc", tmp_path / "cgroup")

    assert left() is None
    write(proc__meminfo="MemTotal: 100 kB\nMemAvailable:    50 kB\n")
    write(proc__self__cgroup="4:memory:/job\n0::/slice/task\n")
    assert left() == 50 * 1024
    write(cgroup__slice__task__memory0max="max\n", cgroup__slice__task__memory0current="5000\n")
    assert left() == 50 * 1024
    write(cgroup__slice__memory0max="40000\n", cgroup__slice__memory0current="30000\n")
    write(cgroup__slice__memory0stat="anon 20000\ninactive_file 9000\n")
    assert left() == 19000
    write(cgroup__memory__job__memory0limit_in_bytes="12000\n", cgroup__memory__job__memory0usage_in_bytes="13000\n")
    assert left() == 0
    here = available_bytes()
    assert here is None or here > 1 << 20


# -- optimizers ------------------------------------------------------------------------------------------------------


def test_adding_an_optimizer_again() -> None:
    parameters = [torch.nn.Parameter(ONES.clone()) for _ in range(2)]
    optimizer = torch.optim.Adam(parameters)
    store = make_store(ONES, ONES)
    add_optimizer(store, optimizer, [[0]])
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    add_optimizer(store, optimizer, [[0, 1]])
    assert float(store.optimizer_state(0)[0, 0]["step"]) == 1
    for other, groups in ((torch.optim.SGD(parameters), [[0, 1]]), (optimizer, [[1, 0]])):
        with pytest.raises(InvalidArgumentError, match="ps 0 has optimizer 0 as"):
            add_optimizer(store, other, groups)


class Remembers(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[p].setdefault("seen", []).append(grad)


def test_tensors_in_lists_of_a_state_are_the_servers_own() -> None:
    optimizer = Remembers([torch.nn.Parameter(ONES.clone())])
    store = stepped_by(optimizer, ONES, kind=Kind(Tier.ROWS))
    sent = ONES.clone()
    store.push(push_of(steps=(dense_step(optimizer, v0=sent),)))
    sent.fill_(7)  # the memory is the worker's again
    given = store.optimizer_state(0)
    assert torch.equal(given[0, 0]["seen"][0], ONES)
    given[0, 0]["seen"][0].fill_(7)
    assert torch.equal(store.optimizer_state(0)[0, 0]["seen"][0], ONES)
    store.load_optimizer_state(0, given)
    given[0, 0]["seen"][0].fill_(9)
    assert torch.equal(store.optimizer_state(0)[0, 0]["seen"][0], ONES * 7)


class StartsWithState(PerTensor):
    """Its constructor makes state from values that parameters have then."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["first"] = p.detach().clone()

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"])
        p.lerp_(self.state[p]["first"], 0.5)


def test_state_of_its_constructor_is_there_again_before_the_first_step() -> None:
    optimizer = StartsWithState([torch.nn.Parameter(ONES.clone())], lr=1.0)
    store = stepped_by(optimizer, ONES)
    for _ in range(2):
        store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert torch.equal(whole(store), ONES * 0.25)
    store.load_optimizer_state(0, {(0, 0): {}})
    store.push(push_of(edits=(ShardEdit((0, 0), "assign", ONES),)))
    store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert torch.equal(whole(store), ONES * 0.5)


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_that_mean_nothing_on_a_server(flag: str) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(ONES.clone())])
    store = stepped_by(optimizer, ONES)
    optimizer.param_groups[0][flag] = True
    with pytest.raises(UnsupportedError, match=f"{flag}=True in parameter group 0"):
        add_optimizer(store, optimizer, [[0]])
    with pytest.raises(UnsupportedError, match=f"{flag}=True in parameter group 0"):
        store.push(push_of(steps=(dense_step(optimizer, v0=ONES),)))
    assert torch.equal(whole(store), ONES)


# -- what a step costs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_what_tables_are_trained_with_most_makes_no_optimizer(cls, monkeypatch) -> None:
    table = torch.ones(17, 3)
    optimizer = cls([torch.nn.Parameter(table.clone())], lr=0.3)  # type: ignore[call-arg]
    store = stepped_by(optimizer, table)
    ids = torch.tensor([1, 2])
    store.push(push_of(steps=(row_step(optimizer, ids, torch.ones(2, 3)),)))  # may make the state
    monkeypatch.setattr("torchstrat.parameter_server.server.shard_optimizer.ShardOptimizer.step", None)
    store.push(push_of(steps=(row_step(optimizer, ids, torch.ones(2, 3)),)))
    assert bool((whole(store)[ids] < 1).all())
    if cls is torch.optim.SGD:
        before, gradient = whole(store), torch.linspace(-3, 3, 51).view(17, 3)
        store.push(push_of(steps=(dense_step(optimizer, v0=gradient),)))
        assert torch.equal(whole(store), before.add(gradient, alpha=-0.3))
    assert fast_step_of(type("Mine", (cls,), {})) is None


class LargestTensor(TorchDispatchMode):
    """Notes every operator that makes or fills a tensor of more elements than ``limit``."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.limit:
                self.seen.add(func._schema.name)
        return result


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, weight_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.03),
    "ftrl": lambda p: Ftrl(p, lr=0.1, l1=0.01, l2=0.02, l2_shrinkage=0.1, beta=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_push_costs_what_its_rows_cost(name: str) -> None:
    optimizer = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))])
    store = stepped_by(optimizer, torch.zeros(5000, 4), kind=Kind(Tier.ROWS))
    push = push_of(steps=(row_step(optimizer, torch.tensor([7, 4000]), torch.ones(2, 4)),))
    with LargestTensor(1000) as first:
        store.push(push)
    assert {"aten::zeros", "aten::full"} & first.seen, "the control: the first push makes state for all rows"
    with LargestTensor(1000) as later:
        store.push(push)
    free = {"aten::view", "aten::as_strided", "aten::detach", "aten::alias"}
    assert later.seen <= free, "what takes memory or time of its own"


def test_state_that_does_not_fit_is_told_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = OPTIMIZERS["adam"]([torch.nn.Parameter(torch.zeros(1))])
    store = stepped_by(optimizer, torch.zeros(100, 4))
    push = push_of(steps=(row_step(optimizer, torch.tensor([7]), torch.ones(1, 4)),))
    monkeypatch.setattr(memory, "available_bytes", lambda: 3000)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"state of torch.optim.adam.Adam for 'v0' on ps 0 needs 3,200"):
            store.push(push)
    assert torch.equal(whole(store), torch.zeros(100, 4))
    monkeypatch.setattr(memory, "available_bytes", lambda: 4000)
    store.push(push)
    assert whole(store).count_nonzero() == 4


# -- a push is applied whole or not at all ---------------------------------------------------------------------------

IDS = torch.tensor([0, 2])
ADAM = torch.optim.Adam([torch.nn.Parameter(torch.zeros(4, 2))])


def stepping(*dense: Any, rows: Any = (), options: Any = None, number: int = 0) -> dict[str, Any]:
    return {"steps": (OptimizerStep(number, options_of(ADAM) if options is None else options, dense, rows),)}


def rows_of(ids: torch.Tensor, count: int = 2) -> Any:
    return (((0, 0), ids, torch.zeros(count, 2)),)


def editing(*edits: ShardEdit) -> dict[str, Any]:
    return {"edits": edits}


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "unknown variable": (editing(add_edit(9, 1.0, torch.zeros(4))), "no variable number 9"),
    "unknown shard": (editing(ShardEdit((0, 3), "add", torch.zeros(4, 2))), "no shard 3 of 'v0'"),
    "unknown want": ({"wants": ((5, 0),)}, "no variable number 5"),
    "unknown optimizer": (stepping(number=8), "knows no optimizer 8"),
    "too few groups": (stepping(options=()), "hyperparameters of 0 parameter groups; it has 1"),
    "gradient of another shape": (stepping(((0, 0), torch.zeros(4))), r"must be torch.float32 of shape \(4, 2\)"),
    "gradient of another dtype": (stepping(((0, 0), torch.zeros(4, 2).double())), "got torch.float64"),
    "variable of no group": (stepping(((1, 0), torch.zeros(3))), "'v1' on ps 0 is in no parameter group"),
    "two gradients": (stepping(((0, 0), torch.zeros(4, 2)), rows=rows_of(IDS)), "two gradients of 'v0'"),
    "unsorted rows": (stepping(rows=rows_of(IDS.flip(0))), "sorted and unique"),
    "repeated rows": (stepping(rows=rows_of(IDS * 0)), "sorted and unique"),
    "rows out of range": (stepping(rows=rows_of(IDS + 2)), r"must be in \[0, 4\); got ids from 2 to 4"),
    "negative rows": (stepping(rows=rows_of(IDS - 1)), "got ids from -1 to 1"),
    "int32 rows": (stepping(rows=rows_of(IDS.int())), "must be an int64 tensor of one dimension"),
    "too few rows of gradient": (
        stepping(rows=rows_of(IDS, 1)),
        r"of shape \(2, 2\); got torch.float32 of shape \(1, 2\)",
    ),
    "edit of another shape": (editing(add_edit(0, torch.zeros(3), ONES)), r"must broadcast to \(4, 2\)"),
    "edit that would grow": (editing(add_edit(0, torch.zeros(7, 4, 2), ONES)), "must broadcast to"),
    "edit that would truncate": (editing(add_edit(2, torch.zeros(2), ONES)), "would lose its value"),
    "no such edit": (editing(ShardEdit((0, 0), "pow", torch.zeros(4, 2))), "'pow' is no edit"),  # type: ignore[arg-type]
    "scatter out of range": (
        editing(add_edit(0, torch.zeros(2, 2), ONES, torch.tensor([3, 4]))),
        "got ids from 3 to 4",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_part_leaves_everything_as_it_was(case: str) -> None:
    store = make_store(torch.ones(4, 2), torch.ones(3), torch.ones(2, dtype=torch.int64))
    add_optimizer(store, ADAM, [[0]])
    parts, message = INVALID[case]
    valid: dict[str, Any] = {
        "edits": (add_edit(1, 1.0, torch.zeros(3)), add_edit(0, 1.0, torch.zeros(4, 2))),
        "steps": (dense_step(ADAM, v0=torch.ones(4, 2)),),
    }
    before = held_by(store)
    mixed = {name: (*valid.get(name, ()), *parts.get(name, ())) for name in ("edits", "steps", "wants")}
    with pytest.raises(InvalidArgumentError, match=message):
        store.push(push_of(function=5, **mixed))
    after = held_by(store)
    assert all(torch.equal(value, after.values[key]) for key, value in before.values.items())
    assert after.states == {0: {}}
    assert after.applied.masks == {}
    assert store.push(push_of(function=5, **valid)).applied  # the same push, repaired
    assert not store.push(push_of(function=5, **valid)).applied
    assert not torch.equal(whole(store, 1), before.values[1, 0])


OVERWRITES: dict[str, tuple[list[Push], bool]] = {
    "nothing has come between": ([], False),
    "its own step, whose values it has": (
        [push_of(function=2, wants=((0, 0),), edits=(add_edit(0, 1.0, ONES),))],
        False,
    ),
    "its own write": ([push_of(function=2, edits=(ShardEdit((0, 0), "assign", ONES * 2),))], False),
    "another's change": ([push_of(function=2, incarnation="w1", edits=(add_edit(0, 1.0, ONES),))], True),
    "another's, and it has read since": (
        [push_of(function=2, incarnation="w1", edits=(add_edit(0, 1.0, ONES),)), push_of(function=3, wants=((0, 0),))],
        False,
    ),
    "another's, of other rows of it": (
        [push_of(function=2, incarnation="w1", edits=(add_edit(0, torch.ones(1), ONES, torch.tensor([1])),))],
        True,
    ),
    "another's write of the same": (
        [push_of(function=2, incarnation="w1", edits=(ShardEdit((0, 0), "assign", ONES * 5),))],
        False,
    ),
    "another's write that changes nothing": (
        [push_of(function=2, incarnation="w1", edits=(ShardEdit((0, 0), "assign", ONES),))],
        False,
    ),
    "another's change of another variable": (
        [push_of(function=2, incarnation="w1", edits=(add_edit(1, 1.0, ONES),))],
        False,
    ),
    "the coordinator's write": ([push_of(edits=(ShardEdit((0, 0), "assign", ONES * 2),))], True),
}
"""What comes between the values that worker w0 was given and its write, and whether that is lost."""


@pytest.mark.parametrize("between", OVERWRITES)
@pytest.mark.parametrize("how", ["read", "pushed"])
def test_what_a_write_overwrites_is_noted(between: str, how: str) -> None:
    store = make_store(ONES, ONES)
    if how == "read":
        store.read([(0, 0)], reader="w0")
    else:
        store.push(push_of(function=1, wants=((0, 0),)))
    store.read([(0, 0)], reader="w1")
    pushes, is_lost = OVERWRITES[between]
    for push in pushes:
        store.push(push)
    store.push(push_of(function=4, edits=(ShardEdit((0, 0), "assign", ONES * 5),)))
    assert torch.equal(whole(store), ONES * 5)
    assert store.take_conflicts() == ((0,) if is_lost else ())
    store.push(push_of(function=5, edits=(ShardEdit((0, 0), "assign", ONES * 6),)))
    assert store.take_conflicts() == ()


def test_edits_come_before_steps_and_answers_after_both() -> None:
    optimizer = sgd()
    store = make_store(ONES, ONES)
    add_optimizer(store, optimizer, [[0]])
    edits = (ShardEdit((0, 0), "assign", torch.tensor([5.0, 6.0])), add_edit(0, IDS + 1.0, ONES, torch.tensor([1, 1])))
    reply = store.push(push_of(edits=edits, steps=(dense_step(optimizer, v0=ONES),), wants=((1, 0), (0, 0))))
    assert reply.applied
    assert [value.tolist() for value in reply.values] == [[1.0, 1.0], [4.0, 9.0]]


EDITS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "assign": lambda old, new: new.expand_as(old).clone(),
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "min": torch.min,
    "max": torch.max,
}


@pytest.mark.parametrize("op", EDITS)
def test_edits_broadcast_and_rows_that_repeat_accumulate(op: Any) -> None:
    store, whole_value = make_store(torch.arange(1.0, 9.0).reshape(4, 2)), torch.tensor([2.0, 4.0])
    ids, rows = torch.tensor([2, 0, 2, 2]), torch.tensor([[2.0, 4.0], [8.0, 1.0], [8.0, 2.0], [4.0, 16.0]])
    expected = EDITS[op](whole(store), whole_value)
    for row, value in zip(ids, rows, strict=True):
        expected[row] = EDITS[op](expected[row], value)
    store.push(push_of(edits=(ShardEdit((0, 0), op, whole_value), ShardEdit((0, 0), op, rows, ids))))
    assert torch.equal(whole(store), expected)


@pytest.mark.parametrize(
    ("value", "divisors", "expected"),
    [
        (torch.tensor([[100]], dtype=torch.int8), [[8], [20]], 0),
        (torch.tensor([[1e38]]), [[1e30], [1e30]], 1e-22),
    ],
)
def test_rows_are_divided_again_and_again_also_by_more_than_their_dtype_holds(
    value: torch.Tensor, divisors: list[list[float]], expected: float
) -> None:
    store = make_store(value)
    edit = ShardEdit((0, 0), "div", torch.tensor(divisors, dtype=value.dtype), torch.tensor([0, 0]))
    store.push(push_of(edits=(edit,)))
    assert whole(store).item() == pytest.approx(expected, rel=1e-3, abs=0.0)


class KeepsGradient(PerTensor):
    """Without a copy, where nobody looks for it."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        last = self.state[p].setdefault("last", collections.deque(maxlen=1))
        for earlier in last:
            p.sub_(earlier.to_dense())
        last.append(grad)


@pytest.mark.parametrize(("gradients", "rows_only"), [(Gradients.ALIKE, True), (Gradients.BY_LAYOUT, False)])
@pytest.mark.parametrize("by_rows", [False, True])
def test_gradients_that_an_optimizer_keeps_are_not_the_senders_memory(
    gradients: Gradients, rows_only: bool, by_rows: bool
) -> None:
    optimizer = KeepsGradient([nn.Parameter(torch.zeros(2, 1))])
    store = make_store(torch.zeros(2, 1))
    add_optimizer(store, optimizer, [[0]], Kind(Tier.ELEMENTS, gradients), rows_only=rows_only)
    for _ in range(2):
        sent, ids = torch.ones(2, 1), torch.arange(2)
        step = row_step(optimizer, ids, sent) if by_rows else dense_step(optimizer, v0=sent)
        store.push(push_of(steps=(step,)))
        sent.fill_(7.0)
        ids.fill_(1)
    assert whole(store).flatten().tolist() == [-1.0, -1.0]


def test_a_scalar_is_edited_and_stepped_and_has_no_rows() -> None:
    optimizer = sgd(torch.tensor(2.0))
    store = stepped_by(optimizer, torch.tensor(2.0))
    edit = ShardEdit((0, 0), "mul", torch.tensor(3.0))
    store.push(push_of(edits=(edit,), steps=(dense_step(optimizer, v0=torch.tensor(1.0)),)))
    assert float(whole(store)) == 5.0
    with pytest.raises(InvalidArgumentError, match="is a scalar and has no rows"):
        store.read_rows([RowsRequest((0, 0), torch.tensor([0]))])


def test_reset_forgets_everything() -> None:
    optimizer = OPTIMIZERS["adam"]([torch.nn.Parameter(torch.ones(3))])
    store, other = (stepped_by(optimizer, torch.full((3,), value)) for value in (0.0, 1.0))
    store.push(push_of(function=2, steps=(dense_step(optimizer, v0=torch.ones(3)),)))
    assert store.catalog()["digest"] == other.catalog()["digest"], "of what there is, not of values"
    other.create(new_shards(make_spec(1, torch.zeros(1)), torch.zeros(1)))
    assert store.catalog()["digest"] != other.catalog()["digest"]
    store.fence("w0")
    store.reset()
    assert store.catalog() == VariableStore("ps 0").catalog()
    with pytest.raises(InvalidArgumentError, match="holds no variable number 0"):
        store.read([(0, 0)])
    store.create(new_shards(make_spec(0, torch.zeros(5)), torch.zeros(5)))
    assert store.push(push_of(function=2, incarnation="w0", edits=(add_edit(0, 1.0, torch.zeros(5)),))).applied


# -- threads ---------------------------------------------------------------------------------------------------------


class HalfWay:
    """Stops an edit between the two halves of a shard, until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on, self.torn = threading.Event(), threading.Event(), torch.empty(0)

    def apply(self, edit: ShardEdit, shards: Any) -> None:
        shard = shards.tensor(edit.key)
        half = len(shard) // 2
        shard[:half] += edit.value[:half]
        self.torn = shard.clone()
        self.reached.set()
        assert self.go_on.wait(timeout=30)
        shard[half:] += edit.value[half:]


ADD_ONE = (add_edit(0, 1.0, torch.zeros(8)),)


@contextmanager
def stopped_half_way(store: VariableStore, monkeypatch: pytest.MonkeyPatch, **push: Any) -> Iterator[HalfWay]:
    half_way = HalfWay()
    monkeypatch.setattr(APPLY_EDIT, half_way.apply)
    thread = threading.Thread(target=store.push, args=(push_of(edits=ADD_ONE, **push),))
    thread.start()
    assert half_way.reached.wait(timeout=30)
    try:
        yield half_way
    finally:
        half_way.go_on.set()
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.mark.parametrize("how", ["read", "read_rows", "cut", "push", "fence"])
def test_it_waits_for_the_end_of_a_push(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(torch.zeros(8), torch.zeros(8))
    calls: dict[str, Callable[[], Any]] = {
        "read": lambda: store.read([(0, 0)])[0],
        "read_rows": lambda: store.read_rows([RowsRequest((0, 0), torch.arange(8))])[0],
        "cut": lambda: store.rows_of(store.begin_cut("token"), (0, 0)).rows(0, 8),
        "push": lambda: store.push(push_of(wants=((0, 0),))).values[0],
        "fence": lambda: (store.fence("old"), whole(store))[1],
    }
    seen: list[torch.Tensor] = []
    with stopped_half_way(store, monkeypatch, function=1, incarnation="old") as half_way:
        assert len(torch.unique(half_way.torn)) == 2, "the control: without the lock, the read would be torn"
        assert torch.equal(whole(store, 1), torch.zeros(8)), "other variables are free meanwhile"
        caller = threading.Thread(target=lambda: seen.append(calls[how]()))
        caller.start()
        caller.join(timeout=0.05)
        assert not seen
        half_way.go_on.set()
        caller.join(timeout=30)
    assert torch.equal(seen[0], torch.ones(8))
    if how == "fence":
        with pytest.raises(FencedError, match=r"ps 0 refuses push 1 of function 1.*incarnation old"):
            store.push(push_of(function=1, index=1, incarnation="old"))
        store.push(push_of(function=1, index=1, incarnation="new"))


def test_a_push_that_waited_while_the_server_was_reset_changes_nothing() -> None:
    store = make_store(torch.zeros(8))
    errors: list[BaseException] = []

    def push() -> None:
        try:
            store.push(push_of(function=9, edits=ADD_ONE))
        except InvalidArgumentError as error:
            errors.append(error)

    variable = store._variables[0]
    with variable.lock:
        waiting = threading.Thread(target=push)
        waiting.start()
        waiting.join(timeout=0.05)
        variable.is_dropped = True  # what reset does, with the lock held
    waiting.join(timeout=30)
    assert len(errors) == 1
    assert torch.equal(variable.shards[0], torch.zeros(8))


# -- as a service ----------------------------------------------------------------------------------------------------


def test_orders_do_not_queue_behind_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    half_way = HalfWay()
    monkeypatch.setattr(APPLY_EDIT, half_way.apply)
    with FakeCluster(workers=1, ps=1) as cluster:
        peer, caller = cluster.peer("ps", 0), cluster.network.endpoint(Task("worker", 0))
        caller.add_peer(peer)
        caller.call(peer, "ps.create", new_shards(make_spec(0, torch.zeros(8)), torch.zeros(8))).result(timeout=30)
        pushes = [caller.call(peer, "ps.push", push_of(edits=ADD_ONE)) for _ in range(5)]
        assert half_way.reached.wait(timeout=30)
        assert caller.call(peer, "ps.catalog").result(timeout=30)["next_function"] == 0
        half_way.go_on.set()
        assert all(push.result(timeout=30).applied for push in pushes)
        assert torch.equal(caller.call(peer, "ps.read", [(0, 0)]).result(timeout=30)[0], torch.full((8,), 5.0))


def test_the_interpreters_switch_interval_is_put_back() -> None:
    before = sys.getswitchinterval()
    with FakeCluster(workers=1, ps=2) as cluster:
        assert sys.getswitchinterval() < before
        cluster.kill_server(1)
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


# -- what it imports while it steps: not PyTorch's compiler, which takes seconds and 70 MiB --------------------------

PROGRAM = textwrap.dedent(
    """
    import sys

    import torch
    from torch import nn

    from tests.support.server_stores import NewOptimizer, OptimizerStep, make_store, options_of, pack_optimizer, push_of


    def made(cls):
        # As a coordinator makes it, but for the compiler, which would be imported here.
        optimizer = object.__new__(cls)
        optimizer.add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__.__get__(optimizer)
        cls.__init__(optimizer, [nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 2))], lr=0.1)
        del optimizer.add_param_group
        return optimizer


    for cls in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam):
        optimizer, store = made(cls), make_store(torch.ones(6, 2), torch.ones(6, 2))
        store.add_optimizer(NewOptimizer(0, pack_optimizer(optimizer), ((0, 1),)))
        for count in range(3):
            rows, dense = (((0, 0), torch.tensor([1, 4]), torch.ones(2, 2)),), (((1, 0), torch.ones(6, 2)),)
            step = OptimizerStep(0, options_of(optimizer), dense, rows)
            values = store.push(push_of(function=count, steps=(step,), wants=((1, 0),))).values
        assert (values[0] < 1).all(), cls
    print("torch._dynamo" in sys.modules)
    optimizer.step()
    print("torch._dynamo" in sys.modules)
    """
)


def test_steps_without_the_compiler_that_an_optimizers_own_step_imports() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["False", "True"]


# -- records of applied pushes: exactly once, fencing, bounded memory --------------------------------------------------


def apply(
    records: AppliedRecords, function: int, index: int = 0, incarnation: str = "w", *, fails: bool = False
) -> bool:
    if not records.begin(function, index, incarnation):
        return False
    (records.abandon if fails else records.finish)(function, index, incarnation)
    return True


EVENTS = st.tuples(
    st.sampled_from(["push", "push", "push", "fail", "forget", "back", "fence", "clear"]),
    st.integers(COORDINATOR, 8),
    st.sampled_from([0, 1, 2, 200]),
    st.sampled_from("vw"),
)


@settings(max_examples=200)
@given(st.lists(EVENTS, max_size=40))
def test_against_a_set(events: list[tuple[str, int, int, str]]) -> None:
    """Also that what was loaded is what there was, and is nobody else's; and that fences outlive it."""
    records, applied, fenced, below, following = AppliedRecords("ps 4"), set(), set(), 0, 0
    for what, function, index, incarnation in events:
        if what == "forget":
            records.forget_below(function)
            below, following = max(below, function), max(following, function)
            applied = {one for one in applied if one[0] >= below}
        elif what == "fence":
            records.fence(incarnation)
            fenced.add(incarnation)
        elif what == "back":
            before = records.state()
            apply(records, 300 + index, incarnation="x")
            records.load_state(before)
        elif what == "clear":
            records.clear()
            applied, fenced, below, following = set(), set(), 0, 0
        elif incarnation in fenced or COORDINATOR < function < below:
            says = f"incarnation {incarnation}" if incarnation in fenced else f"finished all functions below {below}"
            with pytest.raises(FencedError, match=f"ps 4 refuses push {index} of function {function}: .*{says}"):
                apply(records, function, index, incarnation)
        else:
            is_new = (function, index) not in applied
            assert apply(records, function, index, incarnation, fails=what == "fail") == is_new
            if function != COORDINATOR:
                following = max(following, function + 1)
                applied |= {(function, index)} if what == "push" else set()
    masks = {function: sum(1 << i for f, i in applied if f == function) for function, _ in applied}
    assert records.state() == AppliedPushes(below, following, masks)
    assert records.next_function == following
    assert len(records.state().masks) == len(masks)


def test_a_push_that_ends_after_its_function_was_forgotten_leaves_no_record() -> None:
    records = AppliedRecords()
    assert records.begin(1, 0, "w")
    records.forget_below(2)
    records.finish(1, 0, "w")
    assert len(records.state().masks) == 0


def test_fencing_waits_for_pushes_of_that_process_only() -> None:
    records = AppliedRecords("ps 0")
    records.begin(1, 0, "old")
    records.begin(2, 0, "other")
    with pytest.raises(
        CommunicationTimeoutError, match=re.escape("ps 0 was still busy with a push of old after 0.01 s")
    ):
        records.fence("old", timeout_seconds=0.01)
    records.finish(1, 0, "old")
    records.fence("old", timeout_seconds=0.01)
    with pytest.raises(CommunicationTimeoutError):
        records.wait_until_idle(0.01)
    records.abandon(2, 0, "other")
    records.wait_until_idle(0.01)


@pytest.mark.parametrize("fails", [False, True])
def test_a_repetition_waits_for_the_one_that_is_being_applied(fails: bool) -> None:
    records = AppliedRecords()
    assert records.begin(3, 0, "first")
    answers: list[bool] = []
    repetition = threading.Thread(target=lambda: answers.append(records.begin(3, 0, "second")))
    repetition.start()
    repetition.join(timeout=0.05)
    assert not answers
    end: Callable[..., None] = records.abandon if fails else records.finish
    end(3, 0, "first")
    repetition.join(timeout=30)
    assert answers == [fails]


# -- initialisers recorded on meta tensors, and replayed on the shards of a table -------------------------------------


ROWS, WIDTH = 2000, 50

INITIALISERS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal_": lambda t: nn.init.normal_(t, 0.5, 0.1),
    "uniform_": lambda t: nn.init.uniform_(t, -0.2, 0.7),
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t, 0.1, 0.5, -0.3, 0.9),
    "trunc_normal_, far tails": lambda t: nn.init.trunc_normal_(t, 0.0, 1.0, 1.0, 1.5),
    "xavier_uniform_": lambda t: nn.init.xavier_uniform_(t, gain=2.0),
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "kaiming_normal_": lambda t: nn.init.kaiming_normal_(t, mode="fan_out"),
    "constant_": lambda t: nn.init.constant_(t, 0.25),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "normal_, clamped": lambda t: t.data.normal_().mul_(0.5).add_(1).clamp_(min=0.2, max=1.5),
    "erfinv_": lambda t: t.data.uniform_(-0.9, 0.9).erfinv_().mul_(0.3 * 2**0.5).add_(0.1),
    "exponential_": lambda t: t.data.exponential_(2.0),
    "bernoulli_": lambda t: t.data.bernoulli_(0.3),
    "divided and shifted": lambda t: t.data.normal_().div_(4).sub_(0.5),
}

BOUNDED = ("uniform", "trunc", "const", "ones", "zeros", "clamped", "bernoulli")


def recorded(initialise: Callable[[torch.Tensor], object], *shape: int) -> nn.Parameter:
    with RecordInitialisers():
        parameter = nn.Parameter(torch.empty(shape, device="meta"))
        initialise(parameter)
    return parameter


def replayed(parameter: torch.Tensor, shards: int = 1, seed: int = 7) -> torch.Tensor:
    recipe = pickle.loads(pickle.dumps(recipe_of(parameter, "table")))
    rows = parameter.shape[0]
    cuts = [rows * part // shards for part in range(shards + 1)]
    return torch.cat(
        [
            replay(recipe, (j - i, *parameter.shape[1:]), parameter.dtype, seed, i, rows)
            for i, j in itertools.pairwise(cuts)
        ]
    )


@pytest.mark.filterwarnings("ignore:mean is more than 2 std:UserWarning")
@pytest.mark.parametrize("name", INITIALISERS)
def test_the_distribution_is_the_initialisers_whatever_the_number_of_shards(name: str) -> None:
    torch.manual_seed(3)
    plain = torch.empty(ROWS, WIDTH)
    INITIALISERS[name](plain)
    parameter = recorded(INITIALISERS[name], ROWS, WIDTH)
    got = replayed(parameter, shards=3)
    assert got.shape == plain.shape
    # Two samples of 100,000: the Kolmogorov-Smirnov distance stays below 0.0102 but once in 30,000 seeds.
    grid = torch.quantile(plain.flatten(), torch.linspace(0, 1, 501))
    below = [torch.searchsorted(sample.flatten().sort().values, grid, right=True) for sample in (plain, got)]
    assert int((below[0] - below[1]).abs().max()) < 0.0102 * plain.numel()
    # Mean and variance within six standard errors of their difference.
    error = 6 * plain.std() * (2 / plain.numel()) ** 0.5 + 1e-7
    assert abs(plain.mean() - got.mean()) <= error
    assert abs(plain.std() - got.std()) <= 2 * error
    if any(word in name for word in BOUNDED):
        torch.testing.assert_close(got.aminmax(), plain.aminmax(), rtol=0.0, atol=1e-3)
    assert all(torch.equal(got, replayed(parameter, shards)) for shards in (1, 2, 5, 7))


def test_blocks_and_seeds_differ_and_the_global_generator_is_left_alone() -> None:
    parameter = recorded(nn.init.normal_, 5000, WIDTH)
    before = torch.get_rng_state()
    one, other, again = (replayed(parameter, seed=seed) for seed in (1, 2, 1))
    assert len(torch.unique(one[:, 0])) == 5000
    assert abs(float((one * other).mean())) < 0.01
    assert torch.equal(one, again)
    replayed(recorded(nn.init.trunc_normal_, 50, 3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("padding", [0, 3, -1])
def test_an_embeddings_padding_row(padding: int) -> None:
    with RecordInitialisers():
        table = nn.Embedding(10, 4, padding_idx=padding, device="meta")
    assert recipe_of(table.weight)[-1] == InitialOp("fill_", (0,), {}, padding % 10)
    for shards in (1, 5):
        zero_rows = (replayed(table.weight, shards) == 0).all(dim=1).nonzero().flatten().tolist()
        assert zero_rows == [padding % 10]


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w[2].zero_(),
        lambda w: w.data[2:4].fill_(0.0),
        lambda w: w.data.__setitem__(2, 0.0),
        lambda w: w.data.__setitem__(slice(2, 4), torch.zeros(2, 4, device="meta")),
        lambda w: w.data[2].mul_(0),
    ],
)
def test_rows_written_apart(write: Callable[[torch.Tensor], object]) -> None:
    with RecordInitialisers(), torch.no_grad():
        weight = nn.Parameter(torch.empty(10, 4, device="meta").normal_())
        write(weight)
    got = replayed(weight, 2)
    assert (got[2] == 0).all()
    assert (got[4:] != 0).all()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.zeros(3, 2, device="meta"), 0.0),
        (lambda: torch.ones(3, 2, device="meta"), 1.0),
        (lambda: torch.full((3, 2), 2.5, device="meta"), 2.5),
        (lambda: torch.zeros(3, 2, device="meta") + 1.5, 1.5),
        (lambda: torch.ones_like(torch.empty(3, 2, device="meta")).mul(3.0).sub(1.0), 2.0),
        (lambda: torch.full_like(torch.empty(3, 2, device="meta"), 4.0).clone(), 4.0),
        (lambda: torch.empty(3, 2, device="meta").normal_().fill_(5.0), 5.0),
        (lambda: nn.Linear(2, 3, device="meta").weight.new_full((3, 2), 6.0), 6.0),
    ],
)
def test_factories_and_what_is_computed_from_them(make: Callable[[], torch.Tensor], expected: float) -> None:
    with RecordInitialisers():
        tensor = make()
    assert torch.equal(replayed(nn.Parameter(tensor), 3), torch.full((3, 2), expected))


def test_random_factories() -> None:
    with RecordInitialisers():
        normal, uniform = torch.randn(400, 9, device="meta") * 0.02 + 1, torch.rand(400, 9, device="meta")
    assert abs(float(replayed(normal).std()) - 0.02) < 0.002
    assert 0.9 < float(replayed(normal).mean()) < 1.1
    assert 0.0 <= float(replayed(uniform).min()) < 0.01 < 0.99 < float(replayed(uniform).max()) <= 1.0


def test_scalars_other_dtypes_and_a_shard_without_rows() -> None:
    with RecordInitialisers():
        scalar = torch.empty((), device="meta").uniform_(2, 3)
        counter = torch.zeros(3, dtype=torch.int64, device="meta")
        half = torch.empty(40, 3, dtype=torch.bfloat16, device="meta").normal_()
    assert 2 <= float(replay(recipe_of(scalar), (), torch.float32, 0, 0, 1)) <= 3
    assert replayed(counter).dtype == torch.int64
    assert replayed(half, 2).dtype == torch.bfloat16
    assert replay((InitialOp("zero_", ()),), (0, 4), torch.float32, 0, 3, 5).shape == (0, 4)


# -- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (nn.init.orthogonal_, "(orthogonal_|copy_)"),  # torch skips these on meta since 2.13 or so, and tried before
        (lambda w: nn.init.sparse_(w, 0.1), "(sparse_|index_put_)"),
        (nn.init.eye_, r"eye\(out=\)"),
        (lambda w: w.data.copy_(torch.zeros(200, 4)), "copy_"),
        (lambda w: w.data[:, 1].fill_(0), "fill_ on a part of it that is not made of whole rows"),
        (lambda w: w.data[1, 2].fill_(0), "fill_ on a part of it that is not made of whole rows"),
        (lambda w: w.data[:100].zero_(), r"(fill_|zero_) on 100 of its 200 rows; at most 64"),
        (lambda w: w.data.add_(torch.ones(4, device="meta")), "add_"),
        (lambda w: w.data.index_fill_(0, torch.tensor([1], device="meta"), 0.0), "index_fill_"),
        (lambda w: torch._foreach_mul_([w.data], torch.ones((), device="meta")), "_foreach_mul_"),
    ],
)
def test_what_cannot_be_repeated_on_a_shard(write: Callable[[torch.Tensor], object], what: str) -> None:
    with RecordInitialisers():
        layer = nn.Linear(4, 200, device="meta")
        write(layer.weight)
    with pytest.raises(UnsupportedError, match=f"rnn.weight, made on meta, was written by {what}.*make it on the CPU"):
        recipe_of(layer.weight, "rnn.weight")
    with RecordInitialisers():
        nn.init.normal_(layer.weight)
    assert recipe_of(layer.weight)[0].name == "normal_"


def test_nothing_has_filled_it() -> None:
    empty = torch.empty(3, device="meta")

    def stop() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), RecordInitialisers():
        stop()
    outside = nn.init.trunc_normal_(torch.empty(3, 2, device="meta").normal_())
    for tensor, says in (
        (nn.Parameter(empty), r"emb\.weight, made on meta, has no initial value"),
        (outside, "has no initial value"),  # nothing is recorded any more
        (nn.Linear(2, 2).to("meta").weight, "loses its values"),
        (torch.zeros(3), "is on cpu, not on meta"),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            recipe_of(tensor, "emb.weight")
    with pytest.raises(InvalidArgumentError, match="'set_', which is no known initialiser"):
        replay((InitialOp("set_", ()),), (3,), torch.float32, 0, 0, 3, "table")


def test_an_imported_trunc_normal_is_recorded_too() -> None:
    from torch.nn.init import trunc_normal_

    assert float(replayed(recorded(lambda t: trunc_normal_(t, std=0.02), 10, 3)).abs().max()) < 0.2


# -- gradients that functions leave for the next step ------------------------------------------------------------------


class Halves(PerTensor):
    """Of nobody's knowledge: stepped as in a plain program."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        p.sub_(grad.to_dense() if grad.is_sparse else grad, alpha=group["lr"] / self.state[p]["steps"])


TAKERS: dict[str, tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], Kind | None]] = {
    "SGD": (partial(torch.optim.SGD, lr=0.5), None),
    "SGD with momentum": (partial(torch.optim.SGD, lr=0.5, momentum=0.5), None),
    "Adagrad": (partial(torch.optim.Adagrad, lr=0.5), None),
    "Adam": (partial(torch.optim.Adam, lr=0.5), None),
    "Adafactor": (partial(torch.optim.Adafactor, lr=0.5), None),
    "one of its own": (partial(Halves, lr=0.5), Kind(Tier.ALL)),
}
WHOLE, FEW, OTHERS = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 2]), torch.tensor([1, 2, 3])


def gradient_of(ids: torch.Tensor | None) -> dict[str, Any]:
    """Of variable 0, with whole numbers, which add up the same in any order."""
    if ids is None:
        return {"dense": (((0, 0), WHOLE + 1),)}
    return {"rows": (((0, 0), ids, WHOLE[ids] + 1),)}


@pytest.mark.parametrize("rows_only", [True, False])
@pytest.mark.parametrize("own", ["none", "dense", "rows"])
@pytest.mark.parametrize("left", ["dense", "rows", "both"])
@pytest.mark.parametrize("taker", TAKERS)
def test_a_step_takes_what_functions_have_left(taker: str, left: str, own: str, rows_only: bool) -> None:
    """Twice: the second one finds nothing, or what was left since."""
    make, kind = TAKERS[taker]
    optimizer = make([nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))])
    stores = []
    for _ in range(2):
        stores.append(make_store(torch.ones(4, 2), torch.ones(4, 2)))
        add_optimizer(stores[-1], optimizer, [[0, 1]], kind, rows_only=rows_only)
    taking, summed = stores
    options = options_of(optimizer)
    kinds = {"none": [], "dense": [None], "rows": [FEW, OTHERS], "both": [FEW, None]}
    for function in (0, 10, 20):
        parts = [gradient_of(ids) for ids in kinds[left]] if function != 10 else []
        for number, part in enumerate(parts, function):
            push = push_of(function=number, accumulation=Accumulation(**part))
            assert taking.push(push).applied
            assert not taking.push(push).applied  # its function runs again
        value = whole(taking)
        own_part = gradient_of(kinds[own][0]) if kinds[own] else {}
        step = push_of(function=function + 5, steps=(OptimizerStep(0, options, **own_part),))
        assert taking.push(step).applied
        assert not taking.push(step).applied
        total = [*parts, *([own_part] if own_part else [])]
        if any("dense" in part for part in total):
            dense = torch.zeros(4, 2)
            for part in total:
                [(_, *gradient)] = [*part.get("dense", ()), *part.get("rows", ())]
                dense = dense + gradient[0] if len(gradient) == 1 else dense.index_add(0, gradient[0], gradient[1])
            expected: dict[str, Any] = {"dense": (((0, 0), dense),)}
        elif total:
            ids = torch.cat([part["rows"][0][1] for part in total])
            values = torch.cat([part["rows"][0][2] for part in total])
            unique, places = torch.unique(ids, return_inverse=True)
            rows = torch.zeros(len(unique), 2).index_add_(0, places, values)
            expected = {"rows": (((0, 0), unique, rows),)}
        else:
            expected = {}
        summed.push(push_of(function=function, steps=(OptimizerStep(0, options, **expected),)))
        assert torch.equal(whole(taking), whole(summed))
        assert torch.equal(whole(taking, 1), whole(summed, 1))
        assert torch.equal(whole(taking), value) == (not total)


def left_to(store: VariableStore) -> VariableStore:
    store.push(push_of(function=1, accumulation=Accumulation(((((0, 0), ONES)),))))
    return store


def test_whoever_sets_gradients_to_nothing_discards_what_was_left_before_its_own() -> None:
    optimizer = sgd()
    nothing = OptimizerStep(0, options_of(optimizer))
    store = left_to(stepped_by(optimizer, ONES, ONES))
    store.push(push_of(function=2, accumulation=Accumulation(discards=(0, 7)), steps=(nothing,)))
    assert torch.equal(whole(store), ONES)
    left_to(store).push(push_of(function=3, accumulation=Accumulation((((0, 0), ONES * 4),), discards=(0,))))
    store.push(push_of(function=4, accumulation=Accumulation(discards=(1,)), steps=(nothing,)))
    assert torch.equal(whole(store), ONES * -3)


def test_a_step_that_cannot_be_made_leaves_what_was_left() -> None:
    optimizer = sgd()
    store = left_to(stepped_by(optimizer, ONES))
    for wrong in (
        {"steps": (dense_step(optimizer, v0=torch.ones(3)),)},
        {"accumulation": Accumulation((((0, 0), torch.ones(3)),))},
        {"accumulation": Accumulation((((0, 0), torch.ones(2, dtype=torch.float64)),))},
        {"accumulation": Accumulation((), (((0, 0), torch.tensor([1, 0]), torch.ones(2)),), (0,))},
        {"accumulation": Accumulation((((5, 0), ONES),))},
    ):
        with pytest.raises(InvalidArgumentError):
            store.push(push_of(function=2, **wrong))
    store.push(push_of(function=2, steps=(OptimizerStep(0, options_of(optimizer)),)))
    assert torch.equal(whole(store), ONES * 0)


def test_gradients_end_with_their_program() -> None:
    optimizer, peers = sgd(), [Peer(Task("chief", 0), incarnation, "memory:", 1) for incarnation in "ab"]
    server = VariableServer()
    server.store.create(new_shards(make_spec(0, ONES), ONES))
    add_optimizer(server.store, optimizer, [[0]])
    server.coordinator_arrived(peers[0])
    for function, peer, weight in ((3, peers[0], 0.0), (5, peers[1], 0.0)):
        server.store.push(push_of(function=function, accumulation=Accumulation((((0, 0), ONES),))))
        server.coordinator_arrived(peer)
        server.store.push(push_of(function=function + 1, steps=(OptimizerStep(0, options_of(optimizer)),)))
        assert torch.equal(whole(server.store), ONES * weight)
    server.close()


# -- functions that run again ------------------------------------------------------------------------------------------


def rows_step(*ids: int, optimizer: int = 0) -> dict[str, Any]:
    rows = torch.tensor(ids)
    return {"steps": (OptimizerStep(optimizer, ({},), (), (((0, 0), rows, torch.ones(len(ids), 2)),)),)}


def add_to(number: int, *rows: int) -> dict[str, Any]:
    return {"edits": (ShardEdit((number, 0), "add", torch.ones(1), torch.tensor(rows) if rows else None),)}


def leaves(*numbers: int) -> dict[str, Any]:
    return {"accumulation": Accumulation(tuple(((number, 0), ONES) for number in numbers), discards=(7,))}


@pytest.mark.parametrize(
    ("before", "applied", "now", "is_refused"),
    [
        ({0: rows_step(1, 2), 1: rows_step(3)}, (0, 1), {0: rows_step(1, 2), 1: rows_step(3)}, False),
        ({0: rows_step(1, 2), 1: rows_step(3)}, (0,), {0: rows_step(1, 2), 1: rows_step(4)}, False),  # not known there
        ({0: rows_step(1, 2), 1: rows_step(3)}, (0,), {0: rows_step(1, 4), 1: rows_step(3)}, True),
        ({0: rows_step(1, 2), 1: rows_step(3)}, (0, 1), {0: rows_step(1, 4), 1: rows_step(3)}, False),  # it is dropped
        ({0: rows_step(1, 2), 1: rows_step(3)}, (), {0: add_to(7)}, False),
        ({0: rows_step(1, 2)}, (0,), {}, False),
        ({0: rows_step(1, 2)}, (0,), {0: rows_step(1, 2, optimizer=1)}, True),
        ({0: add_to(1)}, (0,), {1: add_to(2)}, True),
        ({0: leaves(1), 1: leaves(2)}, (0,), {0: leaves(1), 1: leaves(3)}, False),
        ({0: leaves(1), 1: leaves(2)}, (0,), {0: leaves(2), 1: leaves(2)}, True),
        ({0: leaves(1)}, (0,), {0: add_to(1)}, True),
        ({0: add_to(1)}, (0,), {0: add_to(1), 1: add_to(2)}, True),
        ({0: add_to(1)}, (0,), {0: add_to(2)}, True),
        ({0: add_to(1)}, (0,), {0: add_to(1, 5)}, True),
        ({0: add_to(1, 5), 1: add_to(2)}, (0,), {0: add_to(1, 6), 1: add_to(2)}, True),
        ({0: add_to(1)}, (0,), {0: {"edits": (ShardEdit((1, 0), "assign", torch.ones(1)),)}}, True),
    ],
)
def test_what_a_repeated_run_may_change(
    before: dict[int, Any], applied: tuple[int, ...], now: dict[int, Any], is_refused: bool
) -> None:
    servers = tuple(before)
    parts = {server: {0: part_of(servers, **before[server])} for server in applied}
    earlier = EarlierRuns(3, parts)
    earlier.check(1, {0: add_to(9)})  # of another push nothing was applied
    with pytest.raises(RepeatedFunctionError, match="function 3 runs again") if is_refused else nullcontext():
        earlier.check(0, now)


def test_steps_that_only_take_what_is_there_may_be_left_out_or_come_later() -> None:
    """Whether functions have left gradients is not known alike when a function runs again."""
    taking = part_of((0,), steps=(OptimizerStep(0, ({},)),))
    EarlierRuns(3, {0: {0: part_of((0,), **rows_step(1))}, 1: {0: taking}}).check(0, {0: rows_step(2)})
    for applied, now in (((0, 1), {1: rows_step(1)}), ((1,), {1: rows_step(1)}), ((1,), {1: add_to(1)})):
        parts = {server: {0: part_of((0,), **rows_step(1)) if server == 0 else taking} for server in applied}
        with pytest.raises(RepeatedFunctionError):
            EarlierRuns(3, parts).check(0, now)


def test_what_was_applied_is_remembered_until_its_function_is_forgotten() -> None:
    store = make_store(torch.zeros(2), torch.zeros(2))
    for function in range(2):
        edit = ShardEdit((function, 0), "add", torch.ones(2))
        store.push(Push(function, 0, "w", edits=(edit,), servers=(0,)))
    assert {index: part.names for index, part in store.applied_parts(1).items()} == {0: ("v1",)}
    store.forget_below(1)
    assert store.applied_parts(0) == {}
    assert store.applied_parts(1) != {}
    store.forget_below(2)
    assert store.applied_parts(1) == {}


def test_one_is_another_number_than_one_point_zero_where_it_is_set_on_a_class() -> None:
    class Own:
        factor: object = 1

    known = KnownNamespace(Own)
    for value in (1.0, True, (1, 2), (1, 2.0), 0.0, -0.0):
        Own.factor = value
        known.look()
        assert repr(known.set["factor"].value) == repr(value)


def test_an_attribute_of_a_class_that_gets_another_name_is_seen() -> None:
    class Own:
        factor = 1.5

    known = KnownNamespace(Own)
    before = known.changes(vars(Own))
    assert known.changes(vars(Own)) == before
    Own.rate = Own.factor  # type: ignore[attr-defined]
    del Own.factor
    assert known.changes(vars(Own)) != before


def test_what_a_job_has_set_on_a_class_ends_with_it() -> None:
    class Own:
        factor = 1.0

    server = VariableServer()
    try:
        assert [*put(Own(), {(0, "factor"): SetAttribute(2, 2.0), (0, "late"): SetAttribute(2, 3.0)})] == []
        list(put(Own(), {(0, "factor"): SetAttribute(1, 7.0)}))  # of a function that was scheduled before
        assert (Own.factor, Own.late) == (2.0, 3.0)  # type: ignore[attr-defined]
        server.coordinator_left(finished=True)
        assert Own.factor == 1.0
        assert not hasattr(Own, "late")
    finally:
        server.close()
