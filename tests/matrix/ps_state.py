"""State on parameter servers: does it mean what it means on one device, whoever edits it, and when?

Rows: the kinds of state. Columns: what is done to it. A cell trains a small model of which all state matters to what
functions return, one function after the other, on each worker in turn, while the other workers are in a function that
reaches the same and does nothing. It compares parameters, buffers, optimizer state, rates and what functions saw with a
plain loop.

Left out are combinations without a meaning (a number has no ``.data``); gradients on the coordinator, which has none;
the default dtype where all tasks are threads of one process, which has one; and edits of optimizer state by several
functions at once, which do not commute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial, partialmethod
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from tests.matrix import on_servers
from tests.matrix.ps_state_programs import Edit, Parts, Program, check, check_draws
from tests.matrix.table import RIGHT, Cell, Expected, PlantedFault, Table, documented, refused, switched_off
from torchstrat.errors import ContextError, UnsupportedError
from torchstrat.parameter_server.job import Job
from torchstrat.parameter_server.serialization.pickler import StepsOnCoordinator
from torchstrat.parameter_server.server import store
from torchstrat.parameter_server.server.shards import apply_edit
from torchstrat.parameter_server.variables import optimizer_state
from torchstrat.parameter_server.variables.attributes import PlainAttributes
from torchstrat.parameter_server.variables.coordinator_cache import CoordinatorCache
from torchstrat.parameter_server.variables.program_state import CapturedVariables
from torchstrat.parameter_server.variables.remote_access import VariableEdit
from torchstrat.parameter_server.worker import local_variables
from torchstrat.parameter_server.worker.gradients import LeftGradients
from torchstrat.parameter_server.worker.local_variables import Copies
from torchstrat.parameter_server.worker.session import Settings
from torchstrat.parameter_server.worker.stand_ins import WatchedParameter
from torchstrat.parameter_server.worker_sessions import KnownWorker
from torchstrat.testing.fake_cluster import FakeCluster

# -- edits ------------------------------------------------------------------------------------------------------------


def _weight_in_place(parts: Parts) -> None:
    with torch.no_grad():
        parts.model.first.weight.mul_(0.9)


def _weight_through_data(parts: Parts) -> None:
    parts.model.first.weight.data.mul_(0.9)


def _weight_filled_through_data(parts: Parts) -> None:
    parts.model.first.weight.data.fill_(0.3)


def _weight_anew(parts: Parts) -> None:
    parts.model.first.weight = nn.Parameter(torch.full((3, 4), 0.2, dtype=torch.float64))


def _initialise(parts: Parts) -> None:
    nn.init.constant_(parts.model.first.bias, 0.3)
    parts.model.last.reset_parameters()
    nn.init.eye_(parts.model.last.weight)
    nn.init.zeros_(parts.model.last.bias)


def _load(parts: Parts) -> None:
    parts.model.load_state_dict(
        {
            name: value * 0.5 if value.is_floating_point() else value + 3
            for name, value in parts.model.state_dict().items()
        }
    )


def _gradients_doubled(parts: Parts) -> None:
    for parameter in parts.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)


def _of_buffer(name: str, edit: Callable[[torch.Tensor], object]) -> Edit:
    def edit_it(parts: Parts) -> None:
        edit(getattr(parts.model, name))

    return edit_it


def _assigned(name: str, value: torch.Tensor) -> Edit:
    return lambda parts: setattr(parts.model, name, value.clone())


def _buffer(name: str, edit: Callable[[torch.Tensor], object], value: torch.Tensor) -> Mapping[str, Edit]:
    return {
        **dict.fromkeys((IN_FUNCTION, RAISED, IN_PLACE, AFTER_READING), _of_buffer(name, edit)),
        DATA: _of_buffer(name, lambda tensor: edit(tensor.data)),
        INIT: _of_buffer(name, lambda tensor: torch.nn.init.constant_(tensor, 2)),
        ASSIGNED: _assigned(name, value),
        LOADED: _load,
        AT_ONCE: _of_buffer(name, edit),
    }


def _momentum_halved(parts: Parts) -> None:
    for of_one in list(parts.optimizer.state.values()):
        if of_one.get("momentum_buffer") is not None:
            of_one["momentum_buffer"].mul_(0.5)


def _momentum_halved_through_data(parts: Parts) -> None:
    for number, of_one in enumerate(parts.optimizer.state.values()):
        if of_one.get("momentum_buffer") is not None and number % 2:
            of_one["momentum_buffer"].data.mul_(0.5)
        elif of_one.get("momentum_buffer") is not None:
            array = of_one["momentum_buffer"].numpy()
            array[...] = array * 0.5


def _state_cleared(parts: Parts) -> None:
    parts.optimizer.state.clear()


def _load_state(parts: Parts) -> None:
    state = parts.optimizer.state_dict()
    for of_one in state["state"].values():
        if of_one.get("momentum_buffer") is not None:
            of_one["momentum_buffer"] = of_one["momentum_buffer"] * 0.5
    state["param_groups"][1]["lr"] = 0.02
    parts.optimizer.load_state_dict(state)


def _load_empty_state(parts: Parts) -> None:
    parts.optimizer.load_state_dict({"state": {}, "param_groups": parts.optimizer.state_dict()["param_groups"]})


def _rate(parts: Parts) -> None:
    parts.optimizer.param_groups[0]["lr"] = 0.03
    parts.optimizer.param_groups[1]["momentum"] = 0.5


def _tensor_rate(parts: Parts) -> None:
    parts.optimizer.param_groups[0]["lr"].mul_(0.7)


def _decay(parts: Parts) -> None:
    parts.scheduler.gamma = 0.9


def _load_scheduler(parts: Parts) -> None:
    parts.scheduler.load_state_dict({**parts.scheduler.state_dict(), "gamma": 0.8, "last_epoch": 3})


def _toggle_mode(parts: Parts) -> None:
    parts.model.train(not parts.model.training)
    parts.model.last.train()


def _freeze(parts: Parts) -> None:
    parts.model.first.bias.requires_grad_(False)


def _attribute(parts: Parts) -> None:
    parts.model.scale = parts.model.scale * 0.7


def _dtype(parts: Parts) -> None:
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32)


# -- rows, columns and places -----------------------------------------------------------------------------------------

SUMMED = "buffer, floating, set to be a sum"

READ = "read after join"
IN_FUNCTION, RAISED = "edited in a function", "edited in a function that raised"
AT_ONCE, LEFT = "in two functions at once", "left for a later function"
IN_PLACE, AFTER_READING = "on the coordinator, in place", "on the coordinator, in place after reading"
DATA, INIT = "on the coordinator, through .data", "on the coordinator, nn.init"
ASSIGNED, LOADED = "on the coordinator, assigned", "on the coordinator, load_state_dict"
EMPTY = "on the coordinator, an empty state loaded"
COLUMNS = (READ, IN_FUNCTION, RAISED, AT_ONCE, LEFT, IN_PLACE, AFTER_READING, DATA, INIT, ASSIGNED, LOADED, EMPTY)

ROWS: Mapping[str, Mapping[str, Edit]] = {
    "parameter": {
        **dict.fromkeys((IN_FUNCTION, RAISED, IN_PLACE, AFTER_READING), _weight_in_place),
        DATA: _weight_filled_through_data,
        INIT: _initialise,
        ASSIGNED: _weight_anew,
        LOADED: _load,
        AT_ONCE: lambda parts: None,
    },
    "parameter, through .data": dict.fromkeys((IN_FUNCTION, RAISED), _weight_through_data),
    "gradient": {**dict.fromkeys((IN_FUNCTION, RAISED), _gradients_doubled), LEFT: lambda parts: None},
    "buffer, floating": _buffer("mean", lambda tensor: tensor.mul_(0.9), torch.full((4,), 0.7, dtype=torch.float64)),
    "buffer, with NaN": _buffer(
        "holes", lambda tensor: tensor[:1].add_(0.1), torch.tensor([0.9, float("nan")], dtype=torch.float64)
    ),
    SUMMED: dict.fromkeys((IN_FUNCTION, RAISED, AT_ONCE), _of_buffer("mean", lambda tensor: tensor.add_(0.25))),
    "buffer, a counter": _buffer("calls", lambda tensor: tensor.add_(5), torch.tensor(11)),
    "buffer, replaced by forward": _buffer(
        "replaced", lambda tensor: tensor.add_(0.5), torch.tensor(3.0, dtype=torch.float64)
    ),
    "optimizer state": {
        **dict.fromkeys((IN_FUNCTION, RAISED, IN_PLACE, AFTER_READING), _momentum_halved),
        ASSIGNED: _state_cleared,
        LOADED: _load_state,
        EMPTY: _load_empty_state,
    },
    "optimizer state, past versions": dict.fromkeys(
        (IN_FUNCTION, RAISED, IN_PLACE, AFTER_READING), _momentum_halved_through_data
    ),
    "hyperparameter": dict.fromkeys((IN_FUNCTION, RAISED, ASSIGNED), _rate),
    "hyperparameter, a tensor": dict.fromkeys((IN_FUNCTION, RAISED, IN_PLACE, AFTER_READING), _tensor_rate),
    "scheduler": {
        **dict.fromkeys((IN_FUNCTION, RAISED), lambda parts: parts.scheduler.step()),
        ASSIGNED: _decay,
        LOADED: _load_scheduler,
    },
    "training mode": dict.fromkeys((IN_FUNCTION, RAISED, ASSIGNED), _toggle_mode),
    "requires_grad": dict.fromkeys((IN_FUNCTION, RAISED, ASSIGNED), _freeze),
    "attribute": dict.fromkeys((IN_FUNCTION, RAISED, ASSIGNED), _attribute),
    "default dtype": dict.fromkeys((IN_FUNCTION, RAISED, ASSIGNED), _dtype),
}
DRAWS = {IN_FUNCTION: "in a function", ASSIGNED: "set", READ: "draws"}
"""Columns of random numbers, and what `check_draws` calls them."""
RANDOM = "random numbers"

FAKE = {f"{servers} servers, {workers} workers": (servers, workers) for servers in (1, 2) for workers in (1, 2)}


def _has_last_value(row: str) -> bool:
    return row.startswith("buffer") and row not in ("buffer, a counter", SUMMED)


def program_of(row: str, column: str) -> Program:
    edit = ROWS[row].get(column)
    has_tensor_rate = row == "hyperparameter, a tensor"
    if column in (IN_FUNCTION, RAISED, AT_ONCE):
        return Program(
            in_function=edit,
            edits_gradients=row == "gradient",
            is_put_back=row in PUT_BACK,
            is_a_copy=row == "attribute",
            raises=column == RAISED,
            at_once=column == AT_ONCE,
            is_last=column == AT_ONCE and _has_last_value(row),
            summed="mean" if row == SUMMED else "",
            has_tensor_rate=has_tensor_rate,
        )
    if column == LEFT:
        return Program(leaves_gradients=True)
    return Program(outside=edit, reads_first=column == AFTER_READING, has_tensor_rate=has_tensor_rate)


PUT_BACK = ("hyperparameter", "hyperparameter, a tensor", "training mode", "requires_grad", "default dtype")


def expected(row: str, column: str, workers: int, *, is_heard: bool = True) -> Expected:
    """``is_heard``: warnings come to this process, else to a stderr."""
    if column == LEFT and workers > 1:
        return refused(UnsupportedError, "earlier function left.*begin functions with", "each worker has its own")
    if row == "scheduler" and column in (IN_FUNCTION, RAISED):
        return refused(ContextError, r"StepLR.step\(\) .*on the coordinator", "the coordinator steps schedulers")
    if column == IN_FUNCTION and row in PUT_BACK:
        says = {"requires_grad": "take gradients", "hyperparameter": "set lr", "hyperparameter, a tensor": "set lr"}
        return documented("holds until the function ends, and is put back", says.get(row, "") if is_heard else "")
    if row == "attribute" and column in (IN_FUNCTION, RAISED):
        return documented("Python state is a copy per worker")
    if row.startswith("optimizer state") and column in (IN_FUNCTION, RAISED):
        return refused(UnsupportedError, "put state into .* or changed what is there", "the servers make the steps")
    if column == AT_ONCE and _has_last_value(row):
        return documented(
            "the last writer's value stays, unless the program sets sums", "last value stays" if is_heard else ""
        )
    if row == RANDOM and column == ASSIGNED:
        return documented("functions draw by the seed of the last scope")
    return RIGHT


def check_of(row: str, column: str, new_strategy: Callable[[], Any], workers: int) -> Callable[[], None]:
    if row == RANDOM:
        return partial(check_draws, new_strategy, DRAWS[column])
    return partial(check, program_of(row, column), new_strategy, workers)


def make_cells() -> Iterator[Cell]:
    for row, edits in [*ROWS.items(), (RANDOM, DRAWS)]:
        for column in COLUMNS:
            if column not in edits and (column != READ or row not in ROWS):
                continue
            for place, (servers, workers) in FAKE.items():
                if row != "default dtype" and (column != AT_ONCE or workers > 1):
                    run = partial(_in_fake_cluster, row, column, servers, workers)
                    yield Cell(row, column, place, run, expected(row, column, workers))
            expected_there = expected(row, column, 2, is_heard=False)
            yield on_servers.cell("ps_state", row, column, expected_there, "tests.matrix.ps_state_programs")


def _in_fake_cluster(row: str, column: str, servers: int, workers: int) -> None:
    with FakeCluster(workers=workers, ps=servers) as cluster:
        check_of(row, column, cluster.strategy, workers)()


def check_in_processes(row: str, column: str, resolver: Any) -> Callable[[], None]:
    return check_of(row, column, partial(ts.ParameterServerStrategy, resolver), 2)


# -- planted faults ---------------------------------------------------------------------------------------------------


def _in_worker_processes(
    fault: str, owner: Any, name: str, instead: Any
) -> Callable[[], AbstractContextManager[object]]:
    return lambda: on_servers.marked(fault, switched_off(owner, name, instead))


def _at(row: str, *columns: str, place: str = "2 servers, 2 workers") -> tuple[str, ...]:
    return tuple(f"{row} | {column} | {place}" for column in columns)


def _without_empty_ones(job: Job, whole: Callable[..., None], optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        whole(job, optimizer)


def _first_ones_only(known: KnownWorker, whole: Callable[..., None], *settings: Any) -> None:
    if known._options is None:
        whole(known, *settings)


def _buffers_as_values(self: Copies, numbers: list[int]) -> list[Any]:
    edits = []
    for number in numbers:
        if number in self._reference:
            edits.append(VariableEdit(self._specs[number], "assign", self._buffer(self._specs[number]).detach()))
    return edits


_NO_DTYPE_ON_WORKERS = "workers compute in PyTorch's default dtype"
_DTYPE_STAYS = "what a function sets of the default dtype stays"

FAULTS = [
    PlantedFault(
        "modes that a function sets stay",
        switched_off(Settings, "_put_back_modes", lambda self: 0),
        (*_at("training mode", IN_FUNCTION), *_at("requires_grad", IN_FUNCTION)),
    ),
    PlantedFault(
        "hyperparameters that a function sets stay",
        switched_off(Settings, "_put_back_groups", lambda self, optimizer, kept: None),
        (*_at("hyperparameter", IN_FUNCTION), *_at("hyperparameter, a tensor", IN_FUNCTION)),
    ),
    PlantedFault(
        "settings of the coordinator travel once",
        switched_off(KnownWorker, "_set", partialmethod(_first_ones_only, KnownWorker._set)),
        (*_at("hyperparameter", ASSIGNED), *_at("training mode", ASSIGNED)),
    ),
    PlantedFault(
        "attributes travel once",
        switched_off(PlainAttributes, "changed", lambda self, modules: {}),
        _at("attribute", ASSIGNED),
    ),
    PlantedFault(
        "buffers are known by their tensors",
        switched_off(Copies, "_buffer", lambda self, spec: self._tensors[spec.number]),
        _at("buffer, replaced by forward", READ),
    ),
    PlantedFault(
        "buffers that are the same by value are the same",
        switched_off(local_variables, "is_same", torch.equal),
        _at("buffer, with NaN", READ, IN_FUNCTION),
    ),
    PlantedFault(
        "counters are sent as values",
        switched_off(Copies, "_buffer_edits", _buffers_as_values),
        _at("buffer, a counter", AT_ONCE),
    ),
    PlantedFault(
        "what is set of buffers does not reach workers",
        switched_off(CapturedVariables, "aggregations", lambda self: {}),
        _at(SUMMED, AT_ONCE),
    ),
    PlantedFault(
        "conflicts are not noted",
        switched_off(store, "apply_edit", lambda edit, shards: apply_edit(edit, shards) or True),
        _at("buffer, floating", AT_ONCE),
    ),
    PlantedFault(
        "the coordinator's copies are taken for current",
        switched_off(CoordinatorCache, "is_current", lambda self, copy: True),
        (*_at("parameter", IN_PLACE), *_at("buffer, floating", IN_PLACE)),
    ),
    PlantedFault(
        "what the coordinator writes is not sent",
        switched_off(CoordinatorCache, "push_written", lambda self, copies=None: None),
        (*_at("parameter", INIT), *_at("buffer, floating", LOADED)),
    ),
    PlantedFault(
        "an empty state is not loaded",
        switched_off(Job, "push_optimizer", partialmethod(_without_empty_ones, Job.push_optimizer)),
        _at("optimizer state", EMPTY),
    ),
    PlantedFault(
        "what leaves no trace in versions of optimizer state is not seen",
        switched_off(optimizer_state, "_checksums", lambda state: []),
        _at("optimizer state, past versions", IN_FUNCTION, IN_PLACE, AFTER_READING),
    ),
    PlantedFault(
        "what a function writes to a parameter is not seen",
        switched_off(WatchedParameter, "is_written", lambda self: False),
        (*_at("parameter", IN_FUNCTION), *_at("parameter, through .data", IN_FUNCTION)),
    ),
    PlantedFault(
        "what goes past a parameter's version in a function is not seen",
        switched_off(WatchedParameter, "is_written", lambda self: self._version != self._version_stored),
        _at("parameter, through .data", IN_FUNCTION),
    ),
    PlantedFault(
        "a worker goes on with the values that it has",
        switched_off(Copies, "expire", lambda self: None),
        (*_at("parameter", RAISED), *_at("buffer, floating", RAISED)),
    ),
    PlantedFault(
        "gradients of an earlier function are anybody's",
        switched_off(LeftGradients, "check", lambda self, optimizer, name_of: None),
        _at("gradient", LEFT),
    ),
    PlantedFault(
        "workers step schedulers of their own",
        switched_off(StepsOnCoordinator, "__call__", lambda self: None),
        _at("scheduler", IN_FUNCTION),
    ),
    PlantedFault(
        "functions draw what their worker draws",
        switched_off(Job, "seed_of", lambda self, function: torch.initial_seed()),
        _at(RANDOM, READ, ASSIGNED),
    ),
    PlantedFault(
        _NO_DTYPE_ON_WORKERS,
        _in_worker_processes(_NO_DTYPE_ON_WORKERS, Settings, "_put_back_default_dtype", lambda self: None),
        _at("default dtype", ASSIGNED, place=on_servers.PROCESSES),
    ),
    PlantedFault(
        _DTYPE_STAYS,
        _in_worker_processes(_DTYPE_STAYS, Settings, "put_back", lambda self: None),
        _at("default dtype", IN_FUNCTION, place=on_servers.PROCESSES),
    ),
]

TABLE = Table(
    "ps_state",
    "Does state on parameter servers mean what it means on one device, whoever edits it?",
    make_cells,
    always=("scheduler | edited in a function that raised | 2 servers, 1 workers",),
    faults=FAULTS,
    alike=lambda place: place.partition(",")[0],  # with one worker or two
)
