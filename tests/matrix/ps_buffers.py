"""Buffers on parameter servers that are one tensor, show one memory, or take each other's place.

Rows: how the buffers of two modules belong together. Columns: what becomes of one of them, and where. A cell runs
functions whose results depend on both, one after the other, and compares what they return and leave with a plain loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.matrix import on_servers
from tests.matrix.table import RIGHT, Cell, Expected, PlantedFault, Table, assert_close, refused, switched_off
from torchstrat.errors import InvalidArgumentError, UnsupportedError
from torchstrat.parameter_server.variables import program_state
from torchstrat.parameter_server.variables.cached_parameter import TensorCall
from torchstrat.parameter_server.variables.coordinator_cache import CoordinatorCache
from torchstrat.parameter_server.variables.program_state import CapturedVariables
from torchstrat.parameter_server.worker import local_variables
from torchstrat.parameter_server.worker.local_variables import Copies
from torchstrat.testing.fake_cluster import FakeCluster

ONE, PARTS, OWN = "one tensor in two modules", "parts of one memory", "tensors of their own"
ROWS = (ONE, PARTS, OWN)

Edit = Callable[[Any], object]


def _move(model: Any) -> None:
    model.second.x, model.first.x = model.first.x, torch.ones_like(model.first.x)


def _exchange(model: Any) -> None:
    model.first.x, model.second.x = model.second.x, model.first.x


def _assign(model: Any) -> None:
    model.second.x = model.second.x + 1


def _load(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def _by_module(model: Any) -> None:
    F.batch_norm(_ROWS, model.second.x, torch.ones(4).double(), training=True)


def _by_operator(model: Any) -> None:
    torch.batch_norm(_ROWS, None, None, model.second.x, torch.ones(4).double(), True, 0.1, 1e-5, False)


def _normalise(rows: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(rows, mean, variance, training=True)


def _by_script(model: Any) -> None:
    torch.jit.script(_normalise)(_ROWS, model.second.x, torch.ones(4).double())


class _Normalising(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.held = module

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(rows, self.held.x, torch.ones(4).double(), training=True)


def _by_scripted_module(model: Any) -> None:
    torch.jit.script(_Normalising(model.second))(_ROWS)


_ROWS = torch.arange(12, dtype=torch.float64).reshape(3, 4)
READ = "read"
IN_FUNCTION, ASSIGNED_THERE = "in place, in functions", "assigned in functions"
OTHER_DTYPE = "assigned in functions, of another dtype"
MOVED, EXCHANGED = "on the coordinator, moved to the other module", "on the coordinator, exchanged"
ASSIGNED = "on the coordinator, assigned"
BY_MODULE, BY_OPERATOR = "on the coordinator, by F.batch_norm", "on the coordinator, by torch.batch_norm"
BY_SCRIPT, BY_SCRIPTED = "on the coordinator, by a script of F.batch_norm", "on the coordinator, by a scripted module"
"""These change it without a trace in its version."""
IN_FUNCTIONS: Mapping[str, Edit] = {
    IN_FUNCTION: lambda model: model.second.x.add_(1),
    ASSIGNED_THERE: _assign,
    OTHER_DTYPE: lambda model: setattr(model.second, "x", model.second.x.float()),
}
OUTSIDE: Mapping[str, Edit] = {
    READ: lambda model: model.state_dict(),
    "on the coordinator, in place": lambda model: model.second.x.add_(1),
    "on the coordinator, through .data": lambda model: model.first.x.data.mul_(3),
    "on the coordinator, load_state_dict": _load,
    BY_MODULE: _by_module,
    BY_OPERATOR: _by_operator,
    BY_SCRIPT: _by_script,
    BY_SCRIPTED: _by_scripted_module,
    ASSIGNED: _assign,
    MOVED: _move,
    EXCHANGED: _exchange,
    "one module is dropped": lambda model: delattr(model, "first"),
}
COLUMNS = (*IN_FUNCTIONS, *OUTSIDE)
FAKE = {f"{workers} workers": workers for workers in (1, 2)}
ROUNDS, SECONDS = 5, 60


def expected(row: str, column: str) -> Expected:
    if row == ONE and column in (ASSIGNED_THERE, OTHER_DTYPE, ASSIGNED, MOVED):
        return refused(UnsupportedError, "have one tensor as their buffer x of .*copy_", "on servers they stay one")
    if column == OTHER_DTYPE:
        return refused(InvalidArgumentError, "gave x of .* another dtype, torch.float32", "variables keep their dtype")
    if row == PARTS and column in IN_FUNCTIONS:
        return refused(UnsupportedError, r"x of .* shares its memory with x of .*clone\(\)", "each has its own there")
    return RIGHT


def _build(row: str) -> nn.Module:
    model: Any = nn.ModuleDict({"first": nn.Module(), "second": nn.Module(), "layer": nn.Linear(2, 2)}).double()
    memory = torch.arange(6, dtype=torch.float64)
    first = memory[:4]
    second = {ONE: first, PARTS: memory[2:], OWN: memory[2:].clone()}[row]
    model.first.register_buffer("x", first)
    model.second.register_buffer("x", second)
    return model


def _program(row: str, column: str, scope: Any, call: Callable[..., Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with scope:
        model: Any = _build(row)
        optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.01)
    edit = IN_FUNCTIONS.get(column)

    def step() -> list[torch.Tensor]:
        if edit is not None:
            edit(model)
        if row == OWN:  # what is on the coordinator is old
            model.second.x.add_(0.5)
        held = [one.x for one in (getattr(model, "first", None), model.second) if one is not None]
        optimizer.zero_grad()
        (model.layer.weight.sum() * sum(one.sum() for one in held)).backward()
        optimizer.step()
        return [one.clone() for one in held]

    found: dict[str, torch.Tensor] = {}
    for number in range(ROUNDS):
        if number == 2 and column in OUTSIDE:
            with torch.no_grad():
                OUTSIDE[column](model)
        found |= {f"round {number}, {place}": one for place, one in enumerate(call(step))}
    return found | {name: value.clone() for name, value in model.state_dict().items()}


def check(row: str, column: str, new_strategy: Callable[[], Any]) -> None:
    strategy = new_strategy()
    try:
        coordinator = ts.ClusterCoordinator(strategy)
        seen = _program(row, column, strategy.scope(), lambda step: coordinator.schedule(step).get(SECONDS))
    finally:
        strategy.close()
    wanted = _program(row, column, contextlib.nullcontext(), lambda step: step())
    assert_close(seen, wanted)
    assert seen.keys() == wanted.keys()


def make_cells() -> Iterator[Cell]:
    for row in ROWS:
        for column in COLUMNS:
            for place, workers in FAKE.items():
                yield Cell(row, column, place, partial(_in_fake_cluster, row, column, workers), expected(row, column))
            yield on_servers.cell("ps_buffers", row, column, expected(row, column), __name__)


def _in_fake_cluster(row: str, column: str, workers: int) -> None:
    with FakeCluster(workers=workers, ps=2) as cluster:
        check(row, column, cluster.strategy)


def check_of(row: str, column: str, resolver: Any) -> Callable[[], None]:
    return partial(check, row, column, partial(ts.ParameterServerStrategy, resolver))


# -- planted faults ---------------------------------------------------------------------------------------------------


def _at(row: str, *columns: str) -> tuple[str, ...]:
    return tuple(f"{row} | {column} | 1 workers" for column in columns)


def _one_by_one(self: CoordinatorCache, tensors: Mapping[int, torch.Tensor]) -> None:
    for number, tensor in tensors.items():
        spec = self._copies[number].spec
        self.release(number)
        self._copies[number] = self._new(spec, tensor)
        self._copies[number].is_replaced = True


FAULTS = [
    PlantedFault(
        "each module has a variable of its own",
        switched_off(CapturedVariables, "_tied", lambda self, name, tensor: None),
        (*_at(ONE, READ, IN_FUNCTION, ASSIGNED), *_at(ONE, "on the coordinator, through .data")),
    ),
    PlantedFault(
        "what shows one memory is not looked for",
        switched_off(program_state, "overlap", lambda one, other: False),
        _at(PARTS, IN_FUNCTION),
    ),
    PlantedFault(
        "a function may put another tensor into one of several modules",
        switched_off(Copies, "_require_one", lambda self, spec: None),
        _at(ONE, ASSIGNED_THERE),
    ),
    PlantedFault(
        "the program may put another tensor into one of several modules",
        switched_off(CapturedVariables, "_require_one", lambda self, number, slots: None),
        _at(ONE, ASSIGNED),
    ),
    PlantedFault(
        "a buffer of another dtype is sent",
        switched_off(local_variables, "_require_form", lambda spec, value: None),
        _at(OWN, OTHER_DTYPE),
    ),
    PlantedFault(
        "what leaves no trace in a version is not known by its call",
        switched_off(TensorCall, "uncounted", property(lambda self: [])),
        _at(OWN, BY_MODULE, BY_OPERATOR),
    ),
    PlantedFault(
        "buffers that take each other's place have the values that are here",
        switched_off(CoordinatorCache, "replace", _one_by_one),
        (*_at(OWN, MOVED), *_at(OWN, EXCHANGED)),
    ),
]

TABLE = Table(
    "ps_buffers",
    "Do buffers on parameter servers that are one tensor, show one memory or change places stay what they are?",
    make_cells,
    always=(
        "one tensor in two modules | assigned in functions | 2 workers",
        "parts of one memory | assigned in functions, of another dtype | 2 workers",
    ),
    faults=FAULTS,
    alike=lambda place: "" if place in FAKE else place,
)


def main() -> None:
    from tests.matrix.ps_buffers import check_of

    on_servers.answer(partial(on_servers.on_one_cluster, "ps_buffers", check_of))


if __name__ == "__main__":
    main()
