"""Every way to write to a variable on parameter servers × who writes, and when.

Functions add 1 to every element with each step, beside the write or around it. A write has to change the value of one
moment: what comes of it is what the write makes of the value after some number of steps, and all the other steps. Of
several workers a function's write is assigned, and steps of others are lost: then the program has to be told.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import torchstrat as ts
from tests.matrix import on_servers
from tests.matrix.table import RIGHT, Cell, Expected, PlantedFault, Table, refused, switched_off
from torchstrat.errors import InvalidArgumentError
from torchstrat.parameter_server.server import store
from torchstrat.parameter_server.server.shards import HeldShards
from torchstrat.parameter_server.variables import coordinator_cache
from torchstrat.parameter_server.variables.cached_parameter import TensorCall
from torchstrat.parameter_server.variables.coordinator_cache import CachedVariable, CoordinatorCache
from torchstrat.parameter_server.worker.local_variables import Copies
from torchstrat.parameter_server.worker.stand_ins import WatchedParameter
from torchstrat.testing.fake_cluster import FakeCluster

SHAPE = (6, 2)
STEPS = 12


class Write(NamedTuple):
    """``make`` writes; ``to`` gives the value after it, by that before."""

    make: Callable[[Any], object]
    to: Callable[[torch.Tensor], torch.Tensor]


def _with_row(before: torch.Tensor) -> torch.Tensor:
    after = before.clone()
    after[1] = 70.0
    return after


def _step_by_hand(weight: Any) -> None:
    weight.grad = torch.full_like(weight, -3.5)
    torch.optim.SGD([weight], lr=1.0).step()


ROWS: dict[str, Write] = {
    "in place": Write(lambda weight: weight.mul_(2), lambda before: before * 2),
    # No whole number: it could be what others' steps have added meanwhile.
    "an operator": Write(lambda weight: weight.__iadd__(5.5), lambda before: before + 5.5),
    "a row": Write(lambda weight: weight.__setitem__(1, 70.0), _with_row),
    "a view": Write(lambda weight: weight[1].fill_(70.0), _with_row),
    "detach()": Write(lambda weight: weight.detach().mul_(2), lambda before: before * 2),
    ".data": Write(lambda weight: weight.data.mul_(2), lambda before: before * 2),
    ".data, a row": Write(lambda weight: weight.data[1].fill_(70.0), _with_row),
    ".data, assigned": Write(lambda weight: setattr(weight, "data", torch.ones(SHAPE)), torch.ones_like),
    "nn.init": Write(lambda weight: nn.init.constant_(weight, 3.0), lambda before: torch.full_like(before, 3.0)),
    "out=": Write(lambda weight: torch.mul(weight, 2, out=weight), lambda before: before * 2),
    "foreach": Write(lambda weight: torch._foreach_mul_([weight], 2), lambda before: before * 2),
    "vector_to_parameters": Write(
        lambda weight: nn.utils.vector_to_parameters(torch.ones(12), [weight]), torch.ones_like
    ),
    "an optimizer of its own": Write(_step_by_hand, lambda before: before + 3.5),
}
ARRAY = "a NumPy array"
"""The way that cannot wait: the write is seen when the next function is scheduled."""
ROWS[ARRAY] = Write(lambda weight: weight.detach().numpy().__setitem__(1, 70.0), _with_row)

REST, FLIGHT = "on the coordinator, at rest", "on the coordinator, functions in flight"
FUNCTION, BESIDE = "in a function", "in a function beside others"
COLUMNS = (REST, FLIGHT, FUNCTION, BESIDE)
KINDS = ("parameter", "table")
FAKE = {f"{workers} workers": workers for workers in (1, 2)}
SECONDS = 60


def expected(way: str, column: str, workers: int) -> Expected:
    if way == ARRAY and column == FLIGHT:
        return refused(InvalidArgumentError, "was written .* after functions had changed it", "an array cannot wait")
    if way == "an optimizer of its own" and column in (FUNCTION, BESIDE):
        return refused(InvalidArgumentError, "steps an optimizer .* of its own", "servers make the steps")
    return RIGHT


def check(kind: str, way: str, column: str, new_strategy: Callable[..., Any], workers: int) -> None:
    strategy = new_strategy()
    coordinator = ts.ClusterCoordinator(strategy)
    write = ROWS[way]
    try:
        with strategy.scope():
            module: Any = nn.Embedding(*SHAPE) if kind == "table" else nn.Linear(SHAPE[1], SHAPE[0], bias=False)
            with torch.no_grad():
                module.weight.copy_(torch.arange(12.0).reshape(SHAPE))
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        first = torch.arange(12.0).reshape(SHAPE)
        is_table = kind == "table"

        def step() -> None:
            optimizer.zero_grad()
            weight = module(torch.arange(SHAPE[0])) if is_table else module.weight
            (-weight.sum()).backward()
            time.sleep(0.001)
            optimizer.step()

        def make_write() -> None:
            with torch.no_grad():
                write.make(module.weight)

        def write_in_function() -> None:
            make_write()
            if column == BESIDE:
                time.sleep(0.02)  # others make steps

        for number in range(STEPS):
            coordinator.schedule(step)
            if number != STEPS // 2:
                continue
            if column == REST:
                coordinator.join(SECONDS)
            if way == ARRAY and column == FLIGHT:
                array = module.weight.detach().numpy()
                coordinator.schedule(step).get(SECONDS)  # so that a function has changed it since
                array[1] = 70.0
            elif column in (REST, FLIGHT):
                make_write()
            else:
                if column == FUNCTION:
                    coordinator.join(SECONDS)
                coordinator.schedule(write_in_function)
                if column == FUNCTION:
                    coordinator.join(SECONDS)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            coordinator.join(SECONDS)
        found = module.weight.detach().clone()
        held = coordinator.schedule(lambda: module.weight.detach().clone()).get(SECONDS)
        assert torch.equal(found, held), f"the coordinator has {found}, and the servers {held}"
    finally:
        strategy.close()
    is_told = any("by hand while functions on other workers changed the same" in str(one.message) for one in told)
    assert not is_told or (column == BESIDE and workers > 1), "there is nobody whose changes could be lost"
    possible = [write.to(first + before) + (STEPS - before) for before in range(STEPS + 1)]
    if column in (REST, FUNCTION):
        possible = possible[STEPS // 2 + 1 : STEPS // 2 + 2]
    is_right = is_told or any(torch.equal(found, one) for one in possible)
    assert is_right, f"{found} is no value after a write and {STEPS} steps, and nobody has said so"


def make_cells() -> Iterator[Cell]:
    for kind in KINDS:
        for way in ROWS:
            for column in COLUMNS:
                row = f"{kind}: {way}"
                for place, workers in FAKE.items():
                    run = partial(_in_fake_cluster, kind, way, column, workers)
                    yield Cell(row, column, place, run, expected(way, column, workers))
                yield on_servers.cell("ps_writes", row, column, expected(way, column, 2), __name__)


def _in_fake_cluster(kind: str, way: str, column: str, workers: int) -> None:
    with FakeCluster(workers=workers, ps=2) as cluster:
        check(kind, way, column, partial(cluster.strategy, ts.partitioners.FixedShardsPartitioner(2)), workers)


# -- real processes ---------------------------------------------------------------------------------------------------


def check_of(row: str, column: str, resolver: Any) -> Callable[[], None]:
    kind, _, way = row.partition(": ")
    new_strategy = partial(ts.ParameterServerStrategy, resolver, ts.partitioners.FixedShardsPartitioner(2))
    return partial(check, kind, way, column, new_strategy, 2)


# -- planted faults ---------------------------------------------------------------------------------------------------


def _at(way: str, *columns: str, kind: str = "parameter", place: str = "2 workers") -> tuple[str, ...]:
    return tuple(f"{kind}: {way} | {column} | {place}" for column in columns)


def _note_versions_only(self: CachedVariable) -> bool:
    tensor = self.tensor()
    return tensor is not None and tensor._version != self.version


FAULTS = [
    PlantedFault(
        "writes do not wait for functions",
        switched_off(CoordinatorCache, "paused", lambda self, who: contextlib.nullcontext()),
        (*_at("in place", FLIGHT), *_at("an operator", FLIGHT), *_at("a row", FLIGHT), *_at(".data", FLIGHT)),
    ),
    PlantedFault(
        "copies are always current",
        switched_off(CoordinatorCache, "is_current", lambda self, copy: True),
        (*_at("in place", REST), *_at("a row", REST)),
    ),
    PlantedFault(
        "a write is sent with the next function",
        switched_off(CoordinatorCache, "write", lambda self, copies, call: call.run()),
        (*_at("in place", REST, FLIGHT), *_at("a row", REST, FLIGHT)),
    ),
    PlantedFault(
        "nothing that the coordinator writes is sent",
        switched_off(CoordinatorCache, "_assign", lambda self, copies: None),
        (*_at("in place", REST), *_at("nn.init", REST)),
    ),
    PlantedFault(
        "what leaves no trace in a version is not seen",
        switched_off(CachedVariable, "is_written", _note_versions_only),
        (*_at(ARRAY, REST), *_at(".data", REST)),
    ),
    PlantedFault(
        "what is handed out is not kept in mind",
        switched_off(TensorCall, "hands_out", property(lambda self: False)),
        (*_at(ARRAY, REST), *_at(".data, assigned", REST)),
    ),
    PlantedFault(
        "views do not ask",
        switched_off(coordinator_cache, "aliases_in", lambda result, memory: iter(())),
        (*_at("a view", FLIGHT), *_at(".data, a row", FLIGHT), *_at("detach()", FLIGHT)),
    ),
    PlantedFault(
        "old arrays are sent as they are",
        switched_off(CoordinatorCache, "_assign_unless_changed", lambda self, written: self._assign(written)),
        _at(ARRAY, FLIGHT),
    ),
    PlantedFault(
        "what a function overwrites is not noted",
        switched_off(HeldShards, "is_known", lambda self, key: True),
        (*_at("in place", BESIDE), *_at("an operator", BESIDE), *_at("a row", BESIDE), *_at(".data", BESIDE)),
    ),
    PlantedFault(
        "servers apply no edits",
        switched_off(store, "apply_edit", lambda edit, shards: True),
        (*_at("in place", REST, FUNCTION), *_at("a row", FUNCTION)),
    ),
    PlantedFault(
        "what a function writes is not seen",
        switched_off(WatchedParameter, "is_written", lambda self: False),
        (*_at("in place", FUNCTION), *_at("a row", FUNCTION)),
    ),
    PlantedFault(
        "functions' writes are not pushed",
        switched_off(Copies, "take_edits", lambda self: []),
        (*_at("in place", FUNCTION), *_at("in place", FUNCTION, kind="table")),
    ),
]

TABLE = Table(
    "ps_writes",
    "Does every way to write to a variable on parameter servers change the value of that moment, and nothing else?",
    make_cells,
    always=(
        "parameter: a NumPy array | in a function | 2 workers",
        "table: vector_to_parameters | in a function | 2 workers",
    ),
    faults=FAULTS,
    alike=lambda place: "" if place in FAKE else place,
)


def main() -> None:
    from tests.matrix.ps_writes import check_of

    on_servers.answer(partial(on_servers.on_one_cluster, "ps_writes", check_of))


if __name__ == "__main__":
    main()
