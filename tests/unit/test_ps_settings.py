"""What functions change of settings holds until they end; the coordinator's hold from when a function is scheduled.

What the table of state in tests/matrix edits as well (modes, `requires_grad`, rates) is left to it.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import torchstrat as ts
from tests.support.gates import await_arrivals, close_gate, pass_gate
from tests.support.turns import every_second
from torchstrat.errors import (
    ContextError,
    FunctionError,
    InvalidArgumentError,
    NotSendableError,
    TorchstratError,
    UnsupportedError,
)
from torchstrat.testing.fake_cluster import FakeCluster


class Program:
    def __init__(self, cluster: FakeCluster) -> None:
        strategy = cluster.strategy()
        with strategy.scope():
            self.model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
            groups = [{"params": [self.model[0].weight]}, {"params": [self.model[0].bias], "lr": 0.5}]
            self.optimizer = torch.optim.SGD(groups, lr=0.1)
        self.coordinator = ts.ClusterCoordinator(strategy)

    def run(self, function: Callable[[], Any], warned: str = "ignore") -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter(warned)  # type: ignore[arg-type]
            value = self.coordinator.schedule(function)
            self.coordinator.join(timeout=30)
        return value.get()


@pytest.fixture
def program() -> Iterator[Program]:
    with FakeCluster(workers=1, ps=1) as cluster:
        yield Program(cluster)


def test_a_parameter_of_a_later_group_that_no_module_has(program: Program) -> None:
    model, optimizer = program.model, program.optimizer

    def train(others: list[nn.Parameter]) -> None:
        optimizer.zero_grad()
        torch.stack([p.sum() for p in (*model.parameters(), *others)]).sum().backward()
        optimizer.step()

    program.run(lambda: train([]))
    with program.coordinator.strategy.scope():
        later = nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [later], "lr": 0.25})
    program.run(lambda: train([]))
    assert later.tolist() == [1.0, 1.0]
    program.run(lambda: train([later]))
    assert later.tolist() == [0.75, 0.75]


def _load_rate(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    optimizer.load_state_dict(state)


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "new name": (lambda it: it.param_groups[0].update(mine=3.0), lambda it: sorted(it.param_groups[0])),
    "deleted name": (lambda it: it.param_groups[0].pop("nesterov"), lambda it: sorted(it.param_groups[0])),
    "fewer groups": (lambda it: it.param_groups.pop(), lambda it: len(it.param_groups)),
    "fewer parameters": (lambda it: it.param_groups[0]["params"].clear(), lambda it: len(it.param_groups[0]["params"])),
    "load_state_dict": (_load_rate, lambda it: it.param_groups[0]["lr"]),
    "gradient mode": (lambda _: torch.set_grad_enabled(False), lambda _: torch.is_grad_enabled()),
    "autocast": (lambda _: torch.set_autocast_enabled("cpu", True), lambda _: torch.is_autocast_enabled("cpu")),
    "mode and rate": (
        lambda it: (torch.set_grad_enabled(False), it.param_groups[0].update(lr=7.0)),
        lambda it: (torch.is_grad_enabled(), it.param_groups[0]["lr"]),
    ),
    "default device": (lambda _: torch.set_default_device("meta"), lambda _: str(torch.empty(1).device)),
}
"""What a function does, and what another one sees of it."""


@pytest.mark.parametrize("how", ["returns", "raises", "warnings are errors"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_function_sets_is_put_back(program: Program, name: str, how: str) -> None:
    optimizer, (change, look) = program.optimizer, CHANGES[name]

    def set_it() -> None:
        change(optimizer)
        if how == "raises":
            raise KeyError("after it has set something")

    before = program.run(lambda: look(optimizer))
    if how == "raises":
        with pytest.raises(KeyError):
            program.run(set_it)
    else:
        with suppress(UserWarning):
            program.run(set_it, "error" if how == "warnings are errors" else "ignore")
    assert program.run(lambda: look(optimizer)) == before


def test_an_average_in_frozen_parameters_needs_no_no_grad(program: Program) -> None:
    """PyTorch allows it: they become part of a graph."""
    with program.coordinator.strategy.scope():
        average = copy.deepcopy(program.model).requires_grad_(False)

    strategy = program.coordinator.strategy

    def train(model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, *, is_plain: bool) -> float:
        optimizer.zero_grad()
        torch.stack([p.square().sum() for p in model.parameters()]).sum().backward()
        optimizer.step()
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            q.mul_(0.9).add_(p, alpha=0.1)
        with nullcontext() if is_plain else strategy.no_sync():
            return float(q.detach().sum())

    its_model, its_optimizer = program.model, program.optimizer
    plain = copy.deepcopy((its_model, average))
    rates = zip(plain[0].parameters(), (0.1, 0.5), strict=True)
    optimizer = torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in rates])
    for _ in range(3):
        seen = program.run(lambda: train(its_model, average, its_optimizer, is_plain=False), "error")
        assert seen == pytest.approx(train(*plain, optimizer, is_plain=True))
    torch.testing.assert_close(average.state_dict(), plain[1].state_dict())
    assert not any(p.requires_grad for p in average.parameters())


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_a_function_has_written_before_it_raises_stays(program: Program, error: type[BaseException]) -> None:
    bias = program.model[0].bias

    def write() -> None:
        bias.data.fill_(7.0)
        raise error

    with pytest.raises((error, FunctionError)):
        program.run(write)
    assert bias.tolist() == [7.0, 7.0]


def test_a_change_of_a_rate_is_warned_of_once(program: Program) -> None:
    optimizer = program.optimizer

    def set_rate(rate: float) -> Callable[[], None]:
        return lambda: optimizer.param_groups[0].update(lr=rate)

    program.run(set_rate(0.1 + 0.0), "error")  # the same
    with pytest.warns(UserWarning, match=r"set lr of group 0 of SGD from 0.1 to 0.5.*Set it on the coordinator"):
        program.coordinator.schedule(set_rate(0.5)).get(timeout=30)
    program.run(set_rate(0.7), "error")
    assert program.run(lambda: optimizer.param_groups[0]["lr"]) == 0.1


def test_a_hyperparameter_may_be_a_tensor_of_several_elements(program: Program) -> None:
    optimizer, seen = program.optimizer, []
    for value in (torch.ones(3), torch.ones(3), torch.tensor([2.0, 1.0]), None):
        optimizer.param_groups[0]["scales"] = value
        seen.append(program.run(lambda: optimizer.param_groups[0]["scales"]))
    assert [None if one is None else one.tolist() for one in seen] == [[1.0] * 3, [1.0] * 3, [2.0, 1.0], None]


def test_a_hyperparameter_may_be_a_sparse_tensor(program: Program) -> None:
    optimizer = program.optimizer
    optimizer.param_groups[0]["mask"] = torch.eye(2).to_sparse()
    for _ in range(2):
        assert program.run(lambda: optimizer.param_groups[0]["mask"].to_dense().tolist()) == [[1.0, 0.0], [0.0, 1.0]]


def test_a_hyperparameter_that_cannot_travel_is_an_error_of_schedule(program: Program) -> None:
    optimizer = program.optimizer
    look = lambda: optimizer.param_groups[1]["lr"]  # noqa: E731
    optimizer.param_groups[1]["own"] = lambda: 3
    with pytest.raises(NotSendableError, match="'own' of a parameter group cannot travel"):
        program.run(look)
    del optimizer.param_groups[1]["own"]
    optimizer.param_groups[1]["lr"] = 0.25
    assert program.run(look) == 0.25


def test_a_change_of_what_pytorch_keeps_for_a_thread_is_warned_of(program: Program) -> None:
    with pytest.warns(UserWarning, match="a scheduled function set .* That holds until the function ends"):
        program.coordinator.schedule(lambda: torch.set_grad_enabled(False)).get(timeout=30)


def test_plain_attributes_that_the_coordinator_sets_hold_from_then_on(program: Program) -> None:
    model = program.model
    look = lambda: (model[1].p, getattr(model, "extra", None), model[0].in_features)  # noqa: E731
    assert program.run(look) == (0.5, None, 2)
    for values in ([0.25], [0.1, 0.2, 0.3]):  # the last may have the address of another
        for model[1].p in values:
            model.extra = ("two", len(values))
        assert program.run(look) == (values[-1], ("two", len(values)), 2)
    program.run(lambda: setattr(model[1], "p", 0.75))
    model.eval()
    assert program.run(look)[0] == 0.75, "what a function sets is its worker's, until the coordinator sets it"
    model[1].p, model.extra = 0.5, None
    assert program.run(look) == (0.5, None, 2)


def test_an_attribute_that_gets_another_name_does_so_on_workers(program: Program) -> None:
    model = program.model
    model.extra = 5
    look = lambda: (getattr(model, "extra", None), getattr(model, "other", None))  # noqa: E731
    assert [program.run(look) for _ in range(4)] == [(5, None)] * 4
    del model.extra
    model.other = 5
    assert program.run(look) == (None, 5)


class _OnlyHere:
    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0] * 10,)

    def __reduce__(self) -> tuple[Any, ...]:
        return _not_there, ()


def _not_there() -> None:
    raise ValueError("what the hook needs is not on this machine")


def test_no_function_runs_without_what_workers_could_not_take_in(program: Program) -> None:
    assert program.run(lambda: 1) == 1
    handle = program.model.register_forward_pre_hook(_OnlyHere())
    for _ in range(2):
        with pytest.raises(ValueError, match="not on this machine"):
            program.run(lambda: 2)
    handle.remove()
    assert program.run(lambda: 3) == 3


def test_one_is_another_number_than_one_point_zero(program: Program) -> None:
    model = program.model
    for model.extra in (1, 1, 1.0, True, (1, 2), (1, 2.0), (True, 2.0)):
        assert repr(program.run(lambda: model.extra)) == repr(model.extra)


def test_attributes_that_do_not_follow_are_warned_of_once(program: Program) -> None:
    model = program.model
    model.names = ["a"]
    assert program.run(lambda: model.names) == ["a"]
    model.names = ["b"]
    with pytest.warns(UserWarning, match=r"attribute 'names' of a Sequential was set.* on the coordinator.*argument"):
        program.coordinator.schedule(lambda: 0)
    model.names = ["c"]
    assert program.run(lambda: model.names, "error") == ["a"]


@dataclasses.dataclass(slots=True)
class Slotted:
    gain: Any = 1.0
    dtype: torch.dtype = torch.float64


CHANGES_IN_PLACE: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "a list": ([1.0], lambda kept: kept.append(2.0)),
    "within a dictionary": ({"layer": {"gain": [1.0]}}, lambda kept: kept["layer"]["gain"].clear()),
    "a record": (SimpleNamespace(gain=1.0, names=["a"]), lambda kept: setattr(kept, "gain", 2.0)),
    "a record with slots": (Slotted(), lambda kept: setattr(kept, "gain", 2.0)),
    "a record in a record": (Slotted(SimpleNamespace(act=torch.relu, gain=[1])), lambda kept: kept.gain.gain.append(2)),
    "an ordered dictionary": (OrderedDict(gain=1.0), lambda kept: kept.update(gain=2.0)),
    "a queue": (deque([1.0]), lambda kept: kept.append(2.0)),
    "a large dictionary": (dict.fromkeys(range(300), 1.0), lambda kept: kept.update(gain=2.0)),
    "OmegaConf's": (OmegaConf.create({"of": {"layer": {"gain": [1.0]}}}), lambda kept: kept.of.layer.gain.append(2.0)),
    "a tensor": (torch.ones(2), lambda kept: kept.mul_(2)),
    "an array": (np.ones(2), lambda kept: kept.fill(2)),
}


@pytest.mark.parametrize(("kept", "change"), CHANGES_IN_PLACE.values(), ids=CHANGES_IN_PLACE)
def test_attributes_that_are_changed_in_place_are_warned_of(
    kept: Any, change: Callable[[Any], object], program: Program
) -> None:
    program.model[0].kept = copy.deepcopy(kept)
    for _ in range(3):
        program.run(lambda: 0, "error")
        repr(program.model[0].kept)  # OmegaConf's caches what it looks up
    change(program.model[0].kept)
    with pytest.warns(UserWarning, match="attribute 'kept' of a Linear was set, or changed in place, on the coord"):
        program.coordinator.schedule(lambda: 0)


def test_a_worker_in_the_coordinators_process_leaves_the_default_dtype_alone(program: Program) -> None:
    """On workers of their own it is the program's: tests/multiprocess/test_ps_process_settings.py."""
    before, gate = torch.get_default_dtype(), close_gate("default dtype")
    program.coordinator.schedule(lambda: pass_gate("default dtype"))
    seen = program.coordinator.schedule(torch.get_default_dtype)
    try:
        torch.set_default_dtype(torch.float64)
        gate.set()
        assert seen.get(timeout=30) is torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(before)


# -- what functions write by hand --------------------------------------------------------------------------------------


def test_functions_that_overwrite_each_others_values_are_warned_of_once() -> None:
    with FakeCluster(workers=2, ps=1) as cluster:
        program = Program(cluster)
        model, coordinator = program.model, program.coordinator

        def at_once(writes: list[Callable[[], object]]) -> None:
            def function(write: Callable[[], object]) -> None:
                pass_gate("write")  # with the values that were there before either
                with torch.no_grad():
                    write()

            gate = close_gate("write")
            for write in writes:
                coordinator.schedule(function, args=(write,))
            await_arrivals("write", len(writes))
            gate.set()
            coordinator.join(timeout=30)

        weight, bias, more = (
            lambda: model[0].weight.mul_(2),
            lambda: model[0].bias.mul_(2),
            lambda: model[0].bias.add_(1),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            at_once([weight, bias])
            at_once([weight])
            at_once([bias, bias])  # of the same
        with pytest.warns(UserWarning, match=r"written to bias of module \d.* by hand.*on other workers.*coordinator"):
            at_once([bias, more])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            at_once([bias, more])


# -- gradients that functions leave on workers, for later functions to use: allowed with one worker, else refused ------


def _leave(backward: Callable[[], Any]) -> None:
    with ts.get_strategy().no_sync():
        backward()


class Gradients:
    """A model with one weight, zero at first; its gradient is 1 for each backward pass, and the rate is 1.

    ``is_seen``: to be reached by the functions. Else they find it in a plain list.
    """

    def __init__(self, cluster: FakeCluster, is_seen: bool) -> None:
        self.workers = len(cluster.spec.task_indices("worker"))
        strategy = cluster.strategy()
        with strategy.scope():
            self.model = model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            model.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            box: Any = nn.Module()
            box.kept = [model]
            self.begun = ts.Variable(torch.tensor(0), name="begun")
        self.calls = 0
        self.coordinator = ts.ClusterCoordinator(strategy)
        x = torch.ones(1, 1)
        of: Callable[[], nn.Linear] = (lambda: model) if is_seen else (lambda: box.kept[0])
        stepped = (lambda: optimizer) if is_seen else (lambda: box.kept[0].optimizer)
        self.parts: dict[str, Callable[[], Any]] = {
            "backward": lambda: of()(x).sum().backward(),
            "leave": lambda: _leave(lambda: of()(x).sum().backward()),
            "leave nested": lambda: _leave(lambda: _leave(lambda: of()(x).sum().backward())),
            "leave scaled": lambda: _leave(lambda: torch.amp.GradScaler("cpu").scale(of()(x).sum()).backward()),
            "leave and raise": lambda: _leave(lambda: (of()(x).sum().backward(), {}["no"])),
            "clear module": lambda: of().zero_grad(),
            "remove": lambda: setattr(of().weight, "grad", None),
            "delete": lambda: delattr(of().weight, "grad"),
            "create_graph": lambda: (of()(x) + 0 * of()(x) ** 2).sum().backward(create_graph=True),
            "step": lambda: stepped().step(),
            "clear": lambda: stepped().zero_grad(),
            "set to zero": lambda: stepped().zero_grad(set_to_none=False),
            "fill": lambda: of().weight.grad.fill_(0),
            "assign": lambda: setattr(of().weight, "grad", torch.ones(1, 1)),
            "halve": lambda: of().weight.grad.mul_(0.5),
            "look": lambda: float(of().weight.grad),
            "give": lambda: {"grad": of().weight.grad, "rows": [of().weight.grad[0]]},
            "clip": lambda: nn.utils.clip_grad_norm_(of().parameters(), 100.0),
            "meet": lambda: pass_gate("meeting"),
        }

    def run(self, worker: int | None, names: str) -> Any:
        """These, in one function, on that worker. None: on each, and none goes past "meet" before all are there."""
        self.calls += self.workers
        coordinator, begun, all_of_them = self.coordinator, self.begun, self.calls
        parts = [self.parts[name] for name in names.split(", ")]

        def function() -> Any:
            begun.assign_add(1)
            while int(begun.read_value()) < all_of_them:  # so each worker has one
                time.sleep(0.001)
            runs_here = worker in (None, coordinator.get_current_worker_index())
            return [part() for part in parts][-1] if runs_here else None

        gate = close_gate("meeting")
        values = [self.coordinator.schedule(function) for _ in range(self.workers)]
        if "meet" in names:
            await_arrivals("meeting", self.workers)
            gate.set()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, of create_graph
            self.coordinator.join()
        return next((value.get() for value in values if value.get() is not None), None)

    def weight(self) -> float:
        return float(self.model.state_dict()["weight"])


@contextmanager
def program_of(workers: int, is_seen: bool = True) -> Iterator[tuple[Gradients, FakeCluster]]:
    with FakeCluster(workers=workers, ps=1) as cluster:
        yield Gradients(cluster, is_seen), cluster


def plain_weight(functions: list[str]) -> float:
    """What a loop on one device comes to."""
    weight, gradient = 0.0, 0.0
    for part in ", ".join(functions).split(", "):
        if part in ("leave", "leave nested", "backward"):
            gradient += 1
        elif part == "step":
            weight -= gradient
        elif part in ("clear", "clear module", "remove", "set to zero", "fill", "assign"):
            gradient = float(part == "assign")
    return weight


@pytest.mark.parametrize(
    "functions",
    [
        # Each clears what is there before.
        ["clear, backward, step"] * 3,
        ["backward, step, clear"] * 3,
        ["set to zero, backward, step"] * 3,
        ["backward, step, set to zero"] * 3,
        ["clear, backward", "clear, backward, step, clear", "clear", "backward, step, clear", "backward, step"],
        ["clear, backward, backward, clip, step", "clear, backward, look, step"],
        ["backward, fill, backward, step", "set to zero, backward, step", "clear, backward, step"],
        ["backward", "assign, step, clear", "clear, backward, step, clear", "backward, step"],
        # Gradients that are left to the servers.
        ["leave", "leave", "backward, step, clear"] * 2,
        ["leave", "backward, step, clear", "step, clear"],
        ["leave, leave nested", "leave", "step, clear"],  # of no gradient of its own
        ["leave, backward", "step, clear"],
        ["leave, step, clear", "backward, step, clear"],
        ["leave, step, clear, leave", "leave", "step, clear"],
        ["leave", "clear, backward, step, clear"],
        ["leave", "clear module, backward, step, clear"],
        ["leave", "set to zero, backward, step, clear"],
        ["leave", "backward, remove, backward, step, clear"],
        ["leave", "clear", "step, clear"],
        ["leave", "leave, clear", "leave", "step, clear"],
        ["leave", "clear, leave", "step, clear"],
        ["leave", "step, clear, leave", "backward, step, clear", "step, clear"],
        ["leave", "clear, backward, step, clear, leave", "step, clear"],
        ["leave", "step, clear, backward, step, clear"],
        ["leave, clip, step", "clear, backward, step, clear"],
    ],
)
@pytest.mark.parametrize(("workers", "is_seen"), every_second([1, 2], [True, False]))
def test_what_is_cleared_or_left_under_no_sync_is_that_of_one_device(
    functions: list[str], workers: int, is_seen: bool
) -> None:
    with program_of(workers, is_seen) as (program, _):
        for number, names in enumerate(functions):
            program.run(number % workers, names)
        assert program.weight() == plain_weight(functions)


@pytest.mark.parametrize(
    ("functions", "weight"),
    [
        (["backward, step, clear", "leave"], -2 - 2),  # nobody has set the other's to nothing
        (["backward, step", "delete", "leave"], -2 - 2),
        (["backward, step, meet, clear, leave"], -2 - 2),  # what was left since the own step is for the next one
        (["clear, meet, leave"], -1),  # whoever comes second has, as it would were anything there
        (["clear module, meet, leave"], -1),
    ],
)
@pytest.mark.parametrize("is_seen", [True, False])
def test_two_workers_that_do_not_know_of_each_other_leave_gradients(
    functions: list[str], weight: float, is_seen: bool
) -> None:
    with program_of(2, is_seen) as (program, _):
        for names in functions:
            program.run(None, names)
        program.run(0, "step, clear")
        assert program.weight() == weight


LEFT = r"an earlier function left on a worker.*zero_grad"


@pytest.mark.parametrize(
    ("functions", "worker", "says"),
    [
        *(
            (functions, 0, LEFT)
            for functions in (
                ["backward", "step"],
                ["backward", "backward, step"],
                ["clear, backward, step", "backward, step"],
                ["backward", "create_graph, step"],
                ["backward", "halve"],
                ["assign", "step"],
                ["backward", "look"],
                ["backward", "clip"],
                ["backward, set to zero", "backward", "step"],
                ["leave", "backward", "step"],  # what is left beside no_sync stays on the worker
            )
        ),
        # What is left on another worker is missed.
        *((["backward", last], 1, "an earlier function left on a worker") for last in ("step", "backward, step")),
        (["backward", "leave"], 0, r"backward\(\) under no_sync .*an earlier function left on a worker"),
        (["leave", "backward, step, step"], 0, r"a second SGD.step\(\) .*zero_grad"),
        (["leave scaled"], 0, "GradScaler .*under no_sync"),
    ],
)
@pytest.mark.parametrize("is_seen", [True, False])
def test_what_another_function_left_is_refused(functions: list[str], worker: int, says: str, is_seen: bool) -> None:
    *before, last = functions
    with program_of(2, is_seen) as (two, _):
        for names in before:
            two.run(0, names)
        weight = two.weight()
        with pytest.raises(UnsupportedError, match=says):
            two.run(worker, last)
        assert two.weight() == weight or "step, step" in last, "the first of two steps was made"
        weight = two.weight()
        two.run(worker, "clear, backward, step")
        assert two.weight() == weight - 1
        for one, names in ((1 - worker, "clear"), (worker, "clear"), (worker, "backward, step, clear"), (0, "leave")):
            two.run(one, names)
        assert two.weight() == weight - 2
        two.run(1, "step, clear")
        assert two.weight() == weight - 3


@pytest.mark.parametrize("names", ["clear, backward, step, give", "clear, backward, give"])
def test_a_function_may_return_its_own_gradients(names: str) -> None:
    with program_of(2) as (two, _):
        for worker in (0, 1, 0):
            found = two.run(worker, names)
            assert (float(found["grad"]), float(found["rows"][0])) == (1.0, 1.0)
        with pytest.raises(UnsupportedError, match="an earlier function left on a worker"):
            two.run(0, "give")


def test_with_one_worker_gradients_are_accumulated_over_functions_until_a_second_one_comes() -> None:
    with program_of(1) as (program, cluster):
        for names in ["backward"] * 4 + ["step, clear"]:
            program.run(0, names)
        assert program.weight() == -4.0
        program.run(0, "backward")
        assert program.run(0, "look") == 1.0
        cluster.start_worker(1)
        program.workers = 2
        with pytest.raises(UnsupportedError, match="an earlier function left on a worker"):
            program.run(0, "step")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_on_the_coordinator_does_not_pass_over_what_functions_have_left(workers: int) -> None:
    with program_of(workers) as (program, _):
        optimizer, weight = program.model.optimizer, program.model.weight
        optimizer.step()  # before any function, as in front of a scheduler's first step
        program.run(0, "clear, backward, step, clear")
        optimizer.step()
        program.run(workers - 1, "backward")
        with pytest.raises(ContextError, match=r"SGD.step\(\) was called on the coordinator.*left that of weight"):
            optimizer.step()
        weight.grad = torch.ones(1, 1)  # the program's own
        optimizer.step()
        weight.grad = None
        assert program.weight() == -2.0
        program.run(workers - 1, "clear")
        optimizer.step()
        program.run(0, "leave")
        with pytest.raises(ContextError, match=r"left that of weight.*under no_sync on the servers"):
            optimizer.step()
        program.run(workers - 1, "step, clear")
        optimizer.step()
        assert program.weight() == -3.0


@pytest.mark.parametrize(
    "look",
    [
        lambda model: model.optimizer.zero_grad(),
        lambda model: model.zero_grad(),
        lambda model: setattr(model.weight, "grad", None),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: model.weight.grad,
    ],
    ids=["optimizer", "module", "none", "clip", "read"],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_who_looks_for_gradients_on_the_coordinator_is_told_once_where_they_are(
    look: Callable[[Any], object], workers: int
) -> None:
    with program_of(workers) as (program, _):
        look(program.model)
        program.run(0, "clear, backward, step, clear")
        look(program.model)
        program.run(0, "clear, backward, step")
        copy.deepcopy(program.model), program.model.double().float()
        with pytest.warns(UserWarning, match="gradient of weight of module 0 was looked for, or cleared, on the coord"):
            [look(program.model) for _ in range(4)]
        look(program.model)


def test_steps_are_looked_at_as_long_as_the_strategy_is_open() -> None:
    before = len(_global_optimizer_pre_hooks)
    with program_of(1) as (program, _):
        program.run(0, "backward")
        assert len(_global_optimizer_pre_hooks) > before
    assert len(_global_optimizer_pre_hooks) == before
    program.model.optimizer.step()


# -- gradients that functions leave to the servers ---------------------------------------------------------------------


def test_what_a_function_that_raises_has_left_counts() -> None:
    with program_of(2) as (program, _):
        program.run(0, "leave")
        with pytest.raises(KeyError):
            program.run(1, "leave and raise")
        program.run(0, "step, clear")
        assert program.weight() == -2


def test_a_checkpoint_holds_nothing_of_what_was_left_and_empties_it(tmp_path: Path) -> None:
    with program_of(2) as (program, _):
        checkpoint = ts.Checkpoint(model=program.model, optimizer=program.model.optimizer)
        program.run(0, "leave")
        checkpoint.save(tmp_path / "first")
        program.run(1, "step, clear")  # saving changes nothing
        assert program.weight() == -1
        program.run(0, "leave")
        checkpoint.restore(tmp_path / "first")
        program.run(1, "step, clear")
        assert program.weight() == 0


@pytest.mark.parametrize("rows_only", [True, False])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_rows_of_tables_that_are_left(cls: type[torch.optim.Optimizer], rows_only: bool) -> None:
    """Each row in each step, so that rows_only changes nothing."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 1))
        return model, cls(model.parameters(), lr=0.1)

    plain, its_optimizer = make()
    with FakeCluster(workers=2, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(2), rows_only=rows_only)
        with strategy.scope():
            model, optimizer = make()
        coordinator = ts.ClusterCoordinator(strategy)

        def leave(ids: torch.Tensor) -> None:
            _leave(lambda: model(ids).square().sum().backward())

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            for rows in ([0, 1, 1], [1, 2, 3], [4, 5, 0]):
                ids = torch.tensor(rows)
                coordinator.schedule(leave, args=(ids,))
                plain(ids).square().sum().backward()
            coordinator.join()
            coordinator.schedule(step)
            coordinator.join()
            its_optimizer.step()
            its_optimizer.zero_grad()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("functions", "is_lost"),
    [
        (["clear, backward, step"], False),
        (["backward, step, clear"], False),
        (["backward", "clear"], False),
        (["backward", "set to zero"], False),
        (["clear, backward, step", "clear, backward"], True),
        (["backward"], True),
    ],
)
@pytest.mark.parametrize("is_found_out_first", [True, False])
def test_gradients_that_go_with_their_worker_are_an_error_once(
    functions: list[str], is_lost: bool, workers: int, is_found_out_first: bool
) -> None:
    with program_of(workers) as (program, cluster):
        for names in functions:
            program.run(0, names)
        weight = program.weight()
        gone = cluster.service("worker", 0)
        if is_found_out_first:
            cluster.wait_until_lost(cluster.kill_worker(0))
        cluster.start_worker(0)  # else in the place of one of which nobody has heard that it is gone
        gone.close()
        if is_lost:
            with pytest.raises(TorchstratError, match=r"worker 0.*and with it gradients of weight.*no step has used"):
                program.coordinator.join()
        program.run(0, "clear, backward, step, clear")
        assert program.weight() == weight - 1


def _what_is_set(x: torch.Tensor, weight: nn.Parameter) -> tuple[bool, bool, torch.dtype]:
    product = x @ weight
    return product.requires_grad, product.is_inference(), product.dtype


@pytest.mark.parametrize(
    "block",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_a_function_runs_within_the_blocks_that_it_was_scheduled_in(
    program: Program, block: Callable[[], AbstractContextManager[Any]]
) -> None:
    weight, x = program.model[0].weight, torch.ones(1, 2)

    def look() -> tuple[bool, bool, torch.dtype]:
        return _what_is_set(x, weight)

    outside = _what_is_set(x, weight)
    with block():
        here = _what_is_set(x, weight)
        assert program.run(look, "error") == here != outside
    assert program.run(look, "error") == outside  # the same function, not packed anew
    with block():
        assert program.run(look, "error") == here


class _Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("block", "named"),
    [
        (_Watching, "_Watching"),
        (lambda: FlopCounterMode(display=False), "FlopCounterMode"),
        (lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), "saved_tensors_hooks"),
    ],
    ids=["function mode", "dispatch mode", "hooks on saved tensors"],
)
def test_a_block_that_would_not_see_the_function_is_refused(
    program: Program, block: Callable[[], AbstractContextManager[Any]], named: str
) -> None:
    with block(), pytest.raises(UnsupportedError, match=named):
        program.coordinator.schedule(torch.get_default_dtype)
    with torch.device("cpu"):
        assert program.run(torch.get_default_dtype) is torch.get_default_dtype()


class _Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, 3))


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(4, 3), torch.ones(2, 1)], ids=["fewer", "more", "one"])
def test_a_buffer_keeps_its_shape(program: Program, value: torch.Tensor) -> None:
    """Of one that fits after broadcasting the worker had another one than the servers."""
    with program.coordinator.strategy.scope():
        model = _Remembers()

    def put() -> None:
        model.seen = value  # type: ignore[assignment]

    with pytest.raises(InvalidArgumentError, match=r"gave seen of module \d \(2, 3\) another shape"):
        program.run(put)
    assert program.run(lambda: model.seen).equal(torch.zeros(2, 3))


@pytest.mark.parametrize("is_declared", [False, True], ids=["registered there", "registered as None"])
def test_a_buffer_that_functions_make_is_warned_of_once(program: Program, is_declared: bool) -> None:
    """It is the worker's alone, and so is what functions count in it."""
    with program.coordinator.strategy.scope():
        model = _Remembers()
        if is_declared:
            model.register_buffer("made", None)

    def make() -> None:
        if getattr(model, "made", None) is None:
            model.register_buffer("made", torch.zeros(1)) if not is_declared else setattr(model, "made", torch.zeros(1))
        model.seen = model.seen + 1  # a variable: nothing is said

    with pytest.warns(UserWarning, match="has given a _Remembers a buffer, 'made'.*this worker's alone") as told:
        assert [program.run(make, "always") for _ in range(2)] == [None, None]
    assert len(told) == 1


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_on_a_thread_of_the_function_is_refused(program: Program, make: Callable[..., Any]) -> None:
    """It was made there, and its values written over what other workers had trained."""
    with program.coordinator.strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = make(model.parameters(), lr=0.1)

    def step(*, starts_thread: bool) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        if starts_thread:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(optimizer.step).exception()
        else:
            optimizer.step()

    before = model.weight.detach().clone()
    with pytest.raises(UnsupportedError, match=rf"steps {make.__name__} on a thread of its own"):
        program.run(lambda: step(starts_thread=True))
    assert model.weight.equal(before)
    program.run(lambda: step(starts_thread=False))
    assert not model.weight.equal(before)


@pytest.mark.parametrize("name", ["get_scale", "state_dict"])
def test_who_asks_the_coordinators_scaler_is_told_once_that_workers_have_theirs(program: Program, name: str) -> None:
    with program.coordinator.strategy.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        other = torch.amp.GradScaler("cpu", init_scale=8.0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return scaler.get_scale()

    getattr(scaler, name)()  # no function has it yet
    assert program.coordinator.schedule(step).get(60) == 16.0
    other.get_scale()
    with pytest.warns(
        UserWarning, match=rf"GradScaler.{name}.. was called on the coordinator.*Return scaler.get_scale"
    ):
        getattr(scaler, name)()
    assert scaler.get_scale() == 8.0  # said once


def _take_out(model: nn.Sequential) -> None:
    del model[2]


def _set_a_layer(model: nn.Sequential) -> None:
    model[1] = nn.Identity()


def _exchange(model: nn.Sequential) -> None:
    model[0], model[1] = model[1], model[0]


def _reorder(model: nn.Sequential) -> None:
    first = model._modules.pop("0")
    model._modules["0"] = first


def _take_out_the_bias(model: nn.Sequential) -> None:
    model[0].bias = None  # type: ignore[assignment]


def _share_a_parameter(model: nn.Sequential) -> None:
    model[0].bias = model[2].bias  # type: ignore[assignment]


def _add_a_linear(model: nn.Sequential) -> None:
    model.add_module("head", nn.Linear(2, 2))


MEMBERS_CHANGED: dict[Callable[[nn.Sequential], None], str] = {
    _take_out: "a Sequential consists of: its layer '2' is gone",
    _set_a_layer: "its layer '1' is another one",
    _exchange: "its layer '0' is another one, its layer '1' is another one",
    _reorder: "its layers are in another order",
    _take_out_the_bias: "a Linear consists of: its parameter 'bias' is None",
    _share_a_parameter: "its parameter 'bias' is another one",
    _add_a_linear: "has made a parameter, 'weight' of a Linear",
}


@pytest.fixture
def layers() -> Iterator[tuple[ts.ClusterCoordinator, nn.Sequential]]:
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2))
        yield ts.ClusterCoordinator(strategy), model


def _names(model: nn.Module) -> list[str]:
    return [
        f"{type(one).__name__} {name} {[*one._parameters.values()].count(None)}" for name, one in model.named_modules()
    ]


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("change", MEMBERS_CHANGED, ids=lambda change: change.__name__.strip("_"))
def test_members_that_a_function_changes_are_put_back(
    layers: tuple[ts.ClusterCoordinator, nn.Sequential], change: Callable[[nn.Sequential], None], raises: bool
) -> None:
    """What it raises itself is what the program is told of."""
    coordinator, model = layers

    def function() -> None:
        change(model)
        if raises:
            raise KeyError("its own")

    before = coordinator.schedule(lambda: [*_names(model), len({*map(id, model.parameters())})]).fetch()
    expected = (KeyError, "its own") if raises else (UnsupportedError, MEMBERS_CHANGED[change])
    coordinator.schedule(function)
    with pytest.raises(expected[0], match=expected[1]):
        coordinator.join(timeout=30)
    assert coordinator.schedule(lambda: [*_names(model), len({*map(id, model.parameters())})]).fetch() == before


def test_members_may_be_others_until_the_function_ends(layers: tuple[ts.ClusterCoordinator, nn.Sequential]) -> None:
    coordinator, model = layers

    def function() -> int:
        kept, model[1] = model[1], nn.Identity()
        first, names = model[0], [*model._modules]
        del model._modules["0"]
        model._modules["0"] = first
        model._modules.update({name: model._modules.pop(name) for name in names})
        model[1] = kept
        return len(model)

    assert coordinator.schedule(function).fetch() == 3


def test_a_layer_without_parameters_that_functions_make_is_warned_of_once(
    layers: tuple[ts.ClusterCoordinator, nn.Sequential],
) -> None:
    coordinator, model = layers

    def function() -> int:
        if not hasattr(model[2], "act"):
            model[2].act = nn.ReLU()
        return len([*model.modules()])

    with pytest.warns(UserWarning, match="has given a Linear a layer, a ReLU.*this worker's alone") as told:
        assert [coordinator.schedule(function).fetch() for _ in range(3)] == [5, 5, 5]
    assert len(told) == 1
