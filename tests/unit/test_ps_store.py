"""What a parameter server holds: creating, reading, pushing, checkpoints; and what threads may do at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.unit.ps_server_helpers import (
    BY_ROWS,
    add_edit,
    add_optimizer,
    dense_step,
    make_spec,
    make_store,
    new_shards,
    options_of,
    push_of,
    whole,
)
from torchstrat import host_memory
from torchstrat.errors import FencedError, InvalidArgumentError, NotSendableError, TorchstratError, UnsupportedError
from torchstrat.host_memory import available_bytes
from torchstrat.parameter_server.endpoint import FRESH
from torchstrat.parameter_server.messages import (
    COORDINATOR,
    NewShard,
    OptimizerStep,
    Push,
    RowsRequest,
    ShardEdit,
    Snapshot,
    VariableSpec,
)
from torchstrat.parameter_server.server.packing import pack_optimizer
from torchstrat.parameter_server.server.service import VariableServer
from torchstrat.parameter_server.server.store import VariableStore
from torchstrat.parameter_server.tasks import Peer, Task

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.3, lr_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


def run_threads(*targets: Callable[[], None]) -> None:
    """Run them at the same time; raise what the first one raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(targets))

    def main(target: Callable[[], None]) -> None:
        try:
            barrier.wait(timeout=30)
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=main, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=50)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


# -- creating --------------------------------------------------------------------------------------------------------


def test_values_are_the_servers_own():
    value = torch.arange(10.0)
    store = make_store(value, shards=3)
    value.fill_(-1)
    first = whole(store, shards=3)
    first.fill_(-2)
    assert torch.equal(whole(store, shards=3), torch.arange(10.0))


def test_creating_again_keeps_the_value():
    store = make_store(torch.zeros(4))
    spec = make_spec(0, torch.zeros(4))
    store.create(new_shards(spec, torch.ones(4)))
    assert torch.equal(whole(store), torch.zeros(4))
    with pytest.raises(InvalidArgumentError, match="ps 0 has variable 0 as"):
        store.create(new_shards(make_spec(0, torch.zeros(5)), torch.zeros(5)))


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(4, dtype=torch.float64)])
def test_a_value_that_does_not_fit_its_spec(value):
    store = VariableStore("ps 7")
    spec = make_spec(0, torch.zeros(4), name="weights")
    with pytest.raises(InvalidArgumentError, match=r"'weights' on ps 7 must be torch.float32 of shape \(4,\)"):
        store.create([NewShard(spec, 0, value)])
    assert store.number_of_variables == 0


def test_shards_that_do_not_fit_the_machine(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    store = VariableStore("ps 0")
    small, table = make_spec(0, torch.zeros(100)), make_spec(1, torch.zeros(50, 4), name="table")
    new = [*new_shards(small, torch.zeros(100)), NewShard(table, 0, None, recipe=())]
    with pytest.raises(
        InvalidArgumentError, match=r"'table' .*800 bytes after 400 bytes for others.* needs 1,200 .*1,000"
    ):
        store.create(new)
    assert store.number_of_variables == 0
    store.create(new[:1])
    assert store.total_bytes == 400


def test_memory_left_is_the_least_of_machine_and_control_groups(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert available_bytes(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:    50 kB\n")
    (proc / "self" / "cgroup").write_text("4:memory:/job\n0::/slice/task\n")
    assert available_bytes(proc, groups) == 50 * 1024

    inner = groups / "slice" / "task"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5000\n")
    assert available_bytes(proc, groups) == 50 * 1024
    (inner.parent / "memory.max").write_text("40000\n")
    (inner.parent / "memory.current").write_text("30000\n")
    (inner.parent / "memory.stat").write_text("anon 20000\ninactive_file 9000\n")
    assert available_bytes(proc, groups) == 19000

    old = groups / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("12000\n")
    (old / "memory.usage_in_bytes").write_text("13000\n")
    assert available_bytes(proc, groups) == 0


def test_this_machines_memory_is_known():
    found = available_bytes()
    assert found is None or found > 1 << 20


# -- optimizers on dense shards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_step_as_the_whole_variable_does(name, shards):
    torch.manual_seed(3)
    parameter = torch.nn.Parameter(torch.randn(11, 3, dtype=torch.float64))
    optimizer = OPTIMIZERS[name]([parameter])
    store = make_store(parameter.detach(), shards=shards)
    add_optimizer(store, optimizer, [[0]])
    spec = make_spec(0, parameter, shards)
    for step in range(5):
        gradient = torch.randn_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = float(group["lr"]) * 0.9
        dense = tuple(((0, n), gradient[one.start : one.stop].clone()) for n, one in enumerate(spec.shards))
        store.push(push_of(function=step, steps=(OptimizerStep(0, options_of(optimizer), dense=dense),)))
        parameter.grad = gradient.clone()
        optimizer.step()
    # The fused kernels of the CPU round the last elements of a tensor, which do not fill a vector, another way.
    tolerance = 1e-14 if "fused" in name else 0.0
    torch.testing.assert_close(whole(store, shards=shards), parameter.detach(), rtol=tolerance, atol=0.0)
    states = store.optimizer_state(0)
    for key, value in optimizer.state[parameter].items():
        for number, shard in enumerate(spec.shards):
            expected = value
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                expected = value[shard.start : shard.stop]
            torch.testing.assert_close(states[0, number][key], expected, rtol=tolerance, atol=0.0)


def test_groups_have_their_own_hyperparameters_and_parameters_without_gradient_rest():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "lr": 0.25}], lr=1.0)
    store = make_store(*(parameter.detach() for parameter in parameters))
    add_optimizer(store, optimizer, [[0], [1, 2]])
    store.push(push_of(steps=(dense_step(optimizer, v0=torch.ones(3), v2=torch.ones(3)),)))
    assert [float(whole(store, number)[0]) for number in range(3)] == [0.5, 1.0, 0.75]


def test_an_optimizer_of_a_script_with_attributes_of_its_own():
    class Halving(torch.optim.Optimizer):
        def __init__(self, params: Any, factor: float) -> None:
            super().__init__(params, {})
            self.factor = factor

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(self.factor)

    optimizer = Halving([torch.nn.Parameter(torch.ones(2))], 0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    store = make_store(torch.ones(2))
    add_optimizer(store, optimizer, [[0]])
    store.push(push_of(steps=(dense_step(optimizer, v0=torch.ones(2)),)))
    assert torch.equal(whole(store), torch.full((2,), 0.5))
    assert calls == []


def test_a_scheduler_that_has_wrapped_step_stays_with_its_optimizer():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    store = make_store(torch.ones(2))
    add_optimizer(store, optimizer, [[0]])
    store.push(push_of(steps=(dense_step(optimizer, v0=torch.ones(2)),)))
    assert torch.equal(whole(store), torch.zeros(2))


def test_optimizers_that_cannot_be_sent():
    class Keeping(torch.optim.SGD):
        pass

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Keeping([parameter], lr=1.0)
    optimizer.mine = {"all": [parameter]}
    with pytest.raises(NotSendableError, match="Keeping keeps parameters in an attribute of its own"):
        pack_optimizer(optimizer, BY_ROWS)
    pack_optimizer(optimizer)
    optimizer.mine = threading.Lock()
    with pytest.raises(NotSendableError, match=r"Keeping cannot be sent .*: self\.mine cannot be pickled"):
        pack_optimizer(optimizer)


def test_the_interpreters_switch_interval_is_put_back():
    before = sys.getswitchinterval()
    servers = [VariableServer() for _ in range(2)]
    for server in servers:
        server.attach(Wire())  # type: ignore[arg-type]
    assert sys.getswitchinterval() < before
    servers[0].close()
    assert sys.getswitchinterval() < before
    servers[1].close()
    servers[1].close()
    assert sys.getswitchinterval() == before


def test_adding_an_optimizer_again():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.Adam(parameters)
    store = make_store(torch.ones(2), torch.ones(2))
    add_optimizer(store, optimizer, [[0]])
    store.push(push_of(steps=(dense_step(optimizer, v0=torch.ones(2)),)))
    add_optimizer(store, optimizer, [[0, 1]])
    assert float(store.optimizer_state(0)[0, 0]["step"]) == 1
    for other, groups in ((torch.optim.SGD(parameters), [[0, 1]]), (optimizer, [[1, 0]])):
        with pytest.raises(InvalidArgumentError, match="ps 0 has optimizer 0 as"):
            add_optimizer(store, other, groups)


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_that_mean_nothing_on_a_server(flag):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    store = make_store(torch.ones(2))
    add_optimizer(store, optimizer, [[0]])
    optimizer.param_groups[0][flag] = True
    with pytest.raises(UnsupportedError, match=f"{flag}=True in parameter group 0"):
        add_optimizer(store, optimizer, [[0]])
    with pytest.raises(UnsupportedError, match=f"{flag}=True in parameter group 0"):
        store.push(push_of(steps=(dense_step(optimizer, v0=torch.ones(2)),)))
    assert torch.equal(whole(store), torch.ones(2))


def test_an_optimizer_that_raises_in_its_step_names_what_it_may_have_changed():
    class Picky(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            if any(bool((p.grad < 0).any()) for group in self.param_groups for p in group["params"]):
                raise ArithmeticError("negative")

    optimizer = Picky([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    store = make_store(torch.ones(2))
    add_optimizer(store, optimizer, [[0]])
    with pytest.raises(TorchstratError, match=r"raised ArithmeticError: negative.*'v0' on ps 0 already"):
        store.push(push_of(function=4, steps=(dense_step(optimizer, v0=-torch.ones(2)),)))
    assert store.push(push_of(function=4, steps=(dense_step(optimizer, v0=torch.ones(2)),))).applied


# -- a push is applied whole or not at all ---------------------------------------------------------------------------

ROWS = torch.tensor([0, 2])
ADAM = torch.optim.Adam([torch.nn.Parameter(torch.zeros(4, 2))])
OPTIONS = options_of(ADAM)
INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "unknown variable": ({"edits": (add_edit(9, 1.0, torch.zeros(4)),)}, "no variable number 9"),
    "unknown shard": ({"edits": (ShardEdit((0, 3), "add", torch.zeros(4, 2)),)}, "no shard 3 of 'v0'"),
    "unknown want": ({"wants": ((5, 0),)}, "no variable number 5"),
    "unknown optimizer": ({"steps": (OptimizerStep(8, OPTIONS),)}, "knows no optimizer 8"),
    "too few groups": ({"steps": (OptimizerStep(0, ()),)}, "hyperparameters of 0 parameter groups; it has 1"),
    "gradient of another shape": (
        {"steps": (OptimizerStep(0, OPTIONS, dense=(((0, 0), torch.zeros(4)),)),)},
        r"must be torch.float32 of shape \(4, 2\)",
    ),
    "gradient of another dtype": (
        {"steps": (OptimizerStep(0, OPTIONS, dense=(((0, 0), torch.zeros(4, 2).double()),)),)},
        "got torch.float64",
    ),
    "variable of no group": (
        {"steps": (OptimizerStep(0, OPTIONS, dense=(((1, 0), torch.zeros(3)),)),)},
        "'v1' on ps 0 is in no parameter group",
    ),
    "two gradients": (
        {"steps": (OptimizerStep(0, OPTIONS, (((0, 0), torch.zeros(4, 2)),), (((0, 0), ROWS, torch.zeros(2, 2)),)),)},
        "two gradients of 'v0'",
    ),
    "unsorted rows": (
        {"steps": (OptimizerStep(0, OPTIONS, rows=(((0, 0), ROWS.flip(0), torch.zeros(2, 2)),)),)},
        "sorted and unique",
    ),
    "repeated rows": (
        {"steps": (OptimizerStep(0, OPTIONS, rows=(((0, 0), ROWS * 0, torch.zeros(2, 2)),)),)},
        "sorted and unique",
    ),
    "rows out of range": (
        {"steps": (OptimizerStep(0, OPTIONS, rows=(((0, 0), ROWS + 2, torch.zeros(2, 2)),)),)},
        r"must be in \[0, 4\); got ids from 2 to 4",
    ),
    "negative rows": (
        {"steps": (OptimizerStep(0, OPTIONS, rows=(((0, 0), ROWS - 1, torch.zeros(2, 2)),)),)},
        "got ids from -1 to 1",
    ),
    "int32 rows": (
        {"steps": (OptimizerStep(0, OPTIONS, rows=(((0, 0), ROWS.int(), torch.zeros(2, 2)),)),)},
        "must be an int64 tensor of one dimension",
    ),
    "too few rows of gradient": (
        {"steps": (OptimizerStep(0, OPTIONS, rows=(((0, 0), ROWS, torch.zeros(1, 2)),)),)},
        r"of shape \(2, 2\); got torch.float32 of shape \(1, 2\)",
    ),
    "edit of another shape": (
        {"edits": (add_edit(0, torch.zeros(3), torch.zeros(4, 2)),)},
        r"must broadcast to \(4, 2\)",
    ),
    "edit that would grow": ({"edits": (add_edit(0, torch.zeros(7, 4, 2), torch.zeros(0)),)}, "must broadcast to"),
    "edit that would truncate": ({"edits": (add_edit(2, torch.zeros(2), torch.zeros(2)),)}, "would lose its value"),
    "no such edit": ({"edits": (ShardEdit((0, 0), "pow", torch.zeros(4, 2)),)}, "'pow' is no edit"),  # type: ignore[arg-type]
    "scatter out of range": (
        {"edits": (add_edit(0, torch.zeros(2, 2), torch.zeros(0), torch.tensor([3, 4])),)},
        "got ids from 3 to 4",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_part_leaves_everything_as_it_was(case):
    store = make_store(torch.ones(4, 2), torch.ones(3), torch.ones(2, dtype=torch.int64))
    add_optimizer(store, ADAM, [[0]])
    parts, message = INVALID[case]
    valid = {
        "edits": (add_edit(1, 1.0, torch.zeros(3)), add_edit(0, 1.0, torch.zeros(4, 2))),
        "steps": (dense_step(ADAM, v0=torch.ones(4, 2)),),
    }
    before = store.snapshot()
    mixed = {name: (*valid.get(name, ()), *parts.get(name, ())) for name in ("edits", "steps", "wants")}
    with pytest.raises(InvalidArgumentError, match=message):
        store.push(push_of(function=5, **mixed))
    after = store.snapshot()
    assert all(torch.equal(value, after.values[key]) for key, value in before.values.items())
    assert after.states == {0: {}}
    assert after.applied is not None
    assert after.applied.masks == {}

    assert store.push(push_of(function=5, **valid)).applied  # the same push, repaired
    assert not torch.equal(whole(store, 1), before.values[1, 0])


def test_edits_come_before_steps_and_answers_after_both():
    store = make_store(torch.ones(2), torch.ones(2))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    add_optimizer(store, optimizer, [[0]])
    reply = store.push(
        push_of(
            edits=(ShardEdit((0, 0), "assign", torch.tensor([5.0, 6.0])),),
            steps=(dense_step(optimizer, v0=torch.ones(2)),),
            wants=((1, 0), (0, 0)),
        )
    )
    assert reply.applied
    assert torch.equal(reply.values[0], torch.ones(2))
    assert torch.equal(reply.values[1], torch.tensor([4.0, 5.0]))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("assign", [9.0, 2.0, 4.0]),
        ("add", [9.0, 2.0, 4.0 + 2 + 8 + 4]),
        ("sub", [-7.0, 2.0, 4.0 - 2 - 8 - 4]),
        ("mul", [8.0, 2.0, 4.0 * 2 * 8 * 4]),
        ("div", [1 / 8, 2.0, 4.0 / 2 / 8 / 4]),
        ("min", [1.0, 2.0, 2.0]),
        ("max", [8.0, 2.0, 8.0]),
    ],
)
def test_rows_that_repeat_in_an_edit_accumulate(op, expected):
    store = make_store(torch.tensor([1.0, 2.0, 4.0]))
    first = 9.0 if op == "assign" else 8.0
    edit = ShardEdit((0, 0), op, torch.tensor([2.0, first, 8.0, 4.0]), torch.tensor([2, 0, 2, 2]))
    store.push(push_of(edits=(edit,)))
    assert whole(store).tolist() == expected


def test_a_scalar_is_edited_and_stepped_and_has_no_rows():
    parameter = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    store = make_store(parameter.detach())
    add_optimizer(store, optimizer, [[0]])
    edit = ShardEdit((0, 0), "mul", torch.tensor(3.0))
    store.push(push_of(edits=(edit,), steps=(dense_step(optimizer, v0=torch.tensor(1.0)),)))
    assert float(whole(store)) == 5.0
    with pytest.raises(InvalidArgumentError, match="is a scalar and has no rows"):
        store.read_rows([RowsRequest((0, 0), torch.tensor([0]))])


def test_reading_rows_in_any_order():
    store = make_store(torch.arange(8.0).reshape(4, 2))
    [rows, none] = store.read_rows(
        [RowsRequest((0, 0), torch.tensor([3, 0, 3])), RowsRequest((0, 0), torch.zeros(0, dtype=torch.int64))]
    )
    assert rows.tolist() == [[6.0, 7.0], [0.0, 1.0], [6.0, 7.0]]
    assert none.shape == (0, 2)
    with pytest.raises(InvalidArgumentError, match=r"\[0, 4\); got ids from 0 to 4"):
        store.read_rows([RowsRequest((0, 0), torch.tensor([0, 4]))])


# -- checkpoints -----------------------------------------------------------------------------------------------------


def trained_store() -> tuple[VariableStore, torch.optim.Optimizer]:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(3))])
    store = make_store(torch.ones(4, 2), torch.ones(3))
    add_optimizer(store, optimizer, [[0, 1]])
    store.push(push_of(function=2, steps=(dense_step(optimizer, v0=torch.rand(4, 2), v1=torch.rand(3)),)))
    return store, optimizer


def equal_snapshots(one: Snapshot, other: Snapshot) -> bool:
    assert one.states.keys() == other.states.keys()
    assert all(one.states[number].keys() == other.states[number].keys() for number in one.states)
    return (
        all(torch.equal(one.values[key], other.values[key]) for key in one.values | other.values)
        and all(
            torch.equal(value, other.states[number][key][name])
            for number, states in one.states.items()
            for key, state in states.items()
            for name, value in state.items()
        )
        and one.applied == other.applied
    )


def test_a_snapshot_brings_values_state_and_records_back():
    store, optimizer = trained_store()
    snapshot = store.snapshot()
    step = dense_step(optimizer, v0=torch.rand(4, 2))
    store.push(push_of(function=3, steps=(step,)))
    assert not equal_snapshots(snapshot, store.snapshot())
    store.restore(snapshot)
    assert equal_snapshots(snapshot, store.snapshot())
    assert not store.push(push_of(function=2, steps=(step,))).applied
    assert store.push(push_of(function=3, steps=(step,))).applied


def test_restoring_into_another_job_clears_the_records():
    store, _ = trained_store()
    store.forget_below(3)
    with pytest.raises(FencedError):
        store.push(push_of(function=2))
    store.restore(Snapshot({(1, 0): torch.zeros(3)}, {}, None))
    assert torch.equal(whole(store, 1), torch.zeros(3))
    assert store.optimizer_state(0).keys() == {(0, 0), (1, 0)}
    assert store.push(push_of(function=2)).applied


def test_restoring_what_does_not_fit_changes_nothing():
    store, _ = trained_store()
    before = store.snapshot()
    for values, states in (
        ({(0, 0): torch.zeros(4, 2), (1, 0): torch.zeros(2)}, {}),
        ({(0, 0): torch.zeros(4, 2)}, {7: {}}),
    ):
        with pytest.raises(InvalidArgumentError):
            store.restore(Snapshot(values, states, None))
    assert equal_snapshots(before, store.snapshot())


def test_a_snapshot_that_would_not_fit_in_memory(monkeypatch):
    store, _ = trained_store()
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 10)
    with pytest.raises(InvalidArgumentError, match="a snapshot of what ps 0 holds"):
        store.snapshot()


def test_optimizer_state_is_read_and_loaded_by_shard():
    store, _ = trained_store()
    state = store.optimizer_state(0, [(1, 0)])
    assert state.keys() == {(1, 0)}
    state[1, 0]["exp_avg"] += 1
    assert not torch.equal(store.optimizer_state(0)[1, 0]["exp_avg"], state[1, 0]["exp_avg"])
    store.load_optimizer_state(0, state)
    assert torch.equal(store.optimizer_state(0)[1, 0]["exp_avg"], state[1, 0]["exp_avg"])
    with pytest.raises(InvalidArgumentError, match="no variable number 9"):
        store.load_optimizer_state(0, {(9, 0): {}})


def test_the_catalog_tells_contents_apart_and_not_values():
    first, second = trained_store()[0], trained_store()[0]
    assert first.catalog()["digest"] == second.catalog()["digest"]
    assert first.catalog()["next_function"] == 3
    second.create(new_shards(make_spec(2, torch.zeros(1)), torch.zeros(1)))
    assert first.catalog()["digest"] != second.catalog()["digest"]
    assert [one["name"] for one in second.catalog()["variables"]] == ["v0", "v1", "v2"]


def test_reset_forgets_everything():
    store, _ = trained_store()
    store.fence("w0")
    store.reset()
    assert store.catalog() == VariableStore("ps 0").catalog()
    with pytest.raises(InvalidArgumentError, match="holds no variable number 0"):
        store.read([(0, 0)])
    store.create(new_shards(make_spec(0, torch.zeros(5)), torch.zeros(5)))
    assert store.push(push_of(function=2, incarnation="w0", edits=(add_edit(0, 1.0, torch.zeros(5)),))).applied


# -- threads ---------------------------------------------------------------------------------------------------------


def test_no_update_of_overlapping_pushes_is_lost():
    store = make_store(torch.zeros(500), torch.zeros(500), torch.zeros(500))
    pairs = [(0, 1), (1, 2), (2, 0)]

    def pusher(pair: tuple[int, int], worker: int) -> None:
        for function in range(60):
            edits = tuple(add_edit(number, 1.0, torch.zeros(500)) for number in pair)
            store.push(push_of(function=worker * 1000 + function, edits=edits))

    run_threads(*(lambda pair=pair, worker=worker: pusher(pair, worker) for worker, pair in enumerate(pairs)))
    assert all(torch.equal(whole(store, number), torch.full((500,), 120.0)) for number in range(3))


def test_the_same_push_from_several_threads_is_applied_once():
    store = make_store(torch.zeros(1000))
    applied: list[bool] = []

    def pusher() -> None:
        for function in range(40):
            reply = store.push(
                push_of(function=function, edits=(add_edit(0, 1.0, torch.zeros(1000)),), wants=((0, 0),))
            )
            assert float(reply.values[0][0]) >= function + 1
            applied.append(reply.applied)

    run_threads(pusher, pusher, pusher)
    assert sum(applied) == 40
    assert torch.equal(whole(store), torch.full((1000,), 40.0))


class HalfWay:
    """Stops an edit between the two halves of a shard, until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def apply(self, edit: ShardEdit, shards: Any) -> None:
        shard = shards.tensor(edit.key)
        half = len(shard) // 2
        shard[:half] += edit.value[:half]
        self.reached.set()
        assert self.go_on.wait(timeout=30)
        shard[half:] += edit.value[half:]


@contextmanager
def stopped_half_way(store: VariableStore, monkeypatch: pytest.MonkeyPatch, **push: Any) -> Iterator[HalfWay]:
    half_way = HalfWay()
    monkeypatch.setattr("torchstrat.parameter_server.server.store.apply_edit", half_way.apply)
    thread = threading.Thread(target=store.push, args=(push_of(edits=(add_edit(0, 1.0, torch.zeros(8)),), **push),))
    thread.start()
    assert half_way.reached.wait(timeout=30)
    try:
        yield half_way
    finally:
        half_way.go_on.set()
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.mark.parametrize("how", ["read", "read_rows", "snapshot", "push"])
def test_a_read_waits_for_the_end_of_a_push(how, monkeypatch):
    store = make_store(torch.zeros(8), torch.zeros(8))
    reads = {
        "read": lambda: store.read([(0, 0)])[0],
        "read_rows": lambda: store.read_rows([RowsRequest((0, 0), torch.arange(8))])[0],
        "snapshot": lambda: store.snapshot().values[0, 0],
        "push": lambda: store.push(push_of(wants=((0, 0),))).values[0],
    }
    seen: list[torch.Tensor] = []
    with stopped_half_way(store, monkeypatch) as half_way:
        torn = store._variables[0].shards[0].clone()
        assert len(torn.unique()) == 2, "the control: without the lock, the read would be torn"
        assert torch.equal(whole(store, 1), torch.zeros(8)), "other variables are free meanwhile"
        reader = threading.Thread(target=lambda: seen.append(reads[how]()))
        reader.start()
        reader.join(timeout=0.05)
        assert not seen
        half_way.go_on.set()
        reader.join(timeout=30)
    assert torch.equal(seen[0], torch.ones(8))


def test_a_fence_waits_for_the_push_that_is_being_applied(monkeypatch):
    store = make_store(torch.zeros(8))
    fenced = threading.Event()
    with stopped_half_way(store, monkeypatch, function=1, incarnation="old") as half_way:
        fence = threading.Thread(target=lambda: (store.fence("old"), fenced.set()))
        fence.start()
        assert not fenced.wait(timeout=0.05)
        half_way.go_on.set()
        fence.join(timeout=30)
    assert fenced.is_set()
    assert torch.equal(whole(store), torch.ones(8))
    with pytest.raises(FencedError, match=r"ps 0 refuses push 1 of function 1.*incarnation old"):
        store.push(push_of(function=1, index=1, incarnation="old"))
    store.push(push_of(function=1, index=1, incarnation="new"))


def test_a_push_that_waited_while_the_server_was_reset_changes_nothing(monkeypatch):
    store = make_store(torch.zeros(8))
    errors: list[BaseException] = []

    def push() -> None:
        try:
            store.push(push_of(function=9, edits=(add_edit(0, 1.0, torch.zeros(8)),)))
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


class Wire:
    """An endpoint that is called from the same process."""

    def __init__(self) -> None:
        self.peer = Peer(Task("ps", 3), "abc", "url", "host", 12)
        self.peers: list[Peer] = []

    def add_peer(self, peer: Peer) -> None:
        self.peers.append(peer)


@pytest.fixture
def server() -> Iterator[VariableServer]:
    server = VariableServer(threads=2)
    server.attach(Wire())  # type: ignore[arg-type]
    yield server
    server.close()


def ask(server: VariableServer, method: str, payload: Any = None) -> Any:
    handler = server.handlers()[method]
    assert handler.executor is not None
    arguments = (FRESH,) if handler.takes_memory else ()
    sender = Peer(Task("worker", 0), "w", "url")
    return handler.executor.submit(handler.answer, sender, payload, *arguments).result(timeout=30)


def test_the_service_answers_with_what_the_store_does(server):
    value = torch.arange(6.0).reshape(3, 2)
    spec = make_spec(0, value)
    optimizer = torch.optim.Adam([torch.nn.Parameter(value.clone())])
    ask(server, "ps.create", new_shards(spec, value))
    add_optimizer(server.store, optimizer, [[0]])
    assert torch.equal(ask(server, "ps.read", [(0, 0)])[0], value)
    assert ask(server, "ps.read_rows", [RowsRequest((0, 0), torch.tensor([1]))])[0].tolist() == [[2.0, 3.0]]
    push = push_of(function=0, steps=(dense_step(optimizer, v0=torch.ones(3, 2)),))
    assert ask(server, "ps.push", push).applied
    assert not ask(server, "ps.push", push).applied
    states = ask(server, "ps.optimizer_state", (0, None))
    ask(server, "ps.load_optimizer_state", (0, states))
    snapshot = ask(server, "ps.snapshot")
    ask(server, "ps.restore", snapshot)
    ask(server, "ps.forget_below", 1)
    with pytest.raises(FencedError, match=r"ps 3 \(pid 12 on host\) refuses"):
        ask(server, "ps.push", push)
    ask(server, "ps.fence", "w9")
    assert ask(server, "ps.catalog")["digest"] == server.status()["digest"]
    assert server.status()["variables"] == 1
    other = Peer(Task("worker", 1), "w1", "url")
    ask(server, "ps.add_peer", other)
    assert server._endpoint is not None
    assert server._endpoint.peers == [other]  # type: ignore[attr-defined]
    server.coordinator_left(finished=False)
    assert server.status()["variables"] == 1
    server.drain(1.0)
    server.coordinator_left(finished=True)
    assert server.status()["variables"] == 0


def test_orders_do_not_queue_behind_pushes(server, monkeypatch):
    store = server.store
    store.create(new_shards(make_spec(0, torch.zeros(8)), torch.zeros(8)))
    handler = server.handlers()["ps.push"]
    half_way = HalfWay()
    monkeypatch.setattr("torchstrat.parameter_server.server.store.apply_edit", half_way.apply)
    pushes = [
        handler.executor.submit(  # type: ignore[union-attr]
            handler.answer,
            Peer(Task("worker", 0), "w", "url"),
            push_of(edits=(add_edit(0, 1.0, torch.zeros(8)),)),
            FRESH,
        )
        for _ in range(3)
    ]
    assert half_way.reached.wait(timeout=30)
    assert ask(server, "ps.catalog")["next_function"] == 0
    half_way.go_on.set()
    for push in pushes:
        push.result(timeout=30)
    assert torch.equal(whole(store), torch.full((8,), 3.0))


def test_coordinator_pushes_are_never_dropped():
    store = make_store(torch.zeros(2))
    push = Push(COORDINATOR, 0, "chief", edits=(add_edit(0, 1.0, torch.zeros(2)),))
    assert all(store.push(push).applied for _ in range(3))
    assert torch.equal(whole(store), torch.full((2,), 3.0))


def test_a_spec_names_its_parts():
    spec = make_spec(0, torch.zeros(10), shards=2, name="table")
    store = VariableStore("ps 0")
    store.create(new_shards(spec, torch.zeros(10)))
    assert isinstance(spec, VariableSpec)
    with pytest.raises(InvalidArgumentError, match="'table/part_1' on ps 0"):
        store.read_rows([RowsRequest((0, 1), torch.tensor([7]))])
