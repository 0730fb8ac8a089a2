"""Optimizers on parameter servers: all of torch's, `ts.Ftrl`, and such as other packages and scripts have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.optim import Optimizer

import torchstrat as ts
from tests.matrix import on_servers
from tests.matrix.optimizer_programs import Make, Program, check, check_rows_stay
from tests.matrix.own_optimizers import OWN
from tests.matrix.table import RIGHT, Cell, Expected, PlantedFault, Table, documented, refused
from torchstrat.core import optimizers as tiers
from torchstrat.errors import NotSendableError, UnsupportedError
from torchstrat.parameter_server import job
from torchstrat.parameter_server.serialization import functions, pickler
from torchstrat.parameter_server.server import live_optimizer, optimizer_step
from torchstrat.parameter_server.variables import optimizer_state
from torchstrat.parameter_server.variables.placement import Bonds
from torchstrat.testing.fake_cluster import FakeCluster

# -- rows -------------------------------------------------------------------------------------------------------------

_SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "Adam": {"lr": 0.05, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Muon": {"lr": 0.02},
}
TORCH: dict[str, Make] = {
    name: partial(getattr(torch.optim, name), **_SETTINGS.get(name, {"lr": 0.05}))
    for name in sorted(dir(torch.optim))
    if isinstance(cls := getattr(torch.optim, name), type) and issubclass(cls, Optimizer) and cls is not Optimizer
}
"""Every optimizer that this version of torch has."""

ROWS: dict[str, Make] = {
    **{f"torch.optim.{name}": make for name, make in TORCH.items()},
    "torch.optim.SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "ts.Ftrl": partial(ts.Ftrl, lr=0.1, l1=0.01, l2=0.1, initial_accumulator_value=0.1),
    **OWN,
}
OF_SCRIPT = {f"{name} of the script": name for name in OWN}
"""Only where processes are real do classes of the script travel."""

SHARES_CLASS = {"Closing"}
"""What keeps state in its class: the threads of a fake cluster share it, and each other's copies of its methods."""

BY_LAYOUT = {"torch.optim.SGD", "torch.optim.Adagrad", "torch.optim.SparseAdam", "ts.Ftrl", "RowWise"}
"""What steps sparse gradients on one device."""

_REFUTED = "elementwise_optimizers names .*Leave it out"
NAMED: dict[str, Expected] = {
    "Lion": RIGHT,
    "Rebinding": RIGHT,
    "Tagged": RIGHT,
    "RowWise": RIGHT,
    "Lamb": refused(UnsupportedError, _REFUTED, "looks at a whole parameter"),
    "Factored": refused(UnsupportedError, _REFUTED, "looks at a whole parameter"),
    "Normalised": refused(UnsupportedError, _REFUTED, "looks at all parameters"),
    "Flag": refused(UnsupportedError, _REFUTED, "keeps state in an attribute"),
    "CountsInGroup": refused(UnsupportedError, _REFUTED, "keeps state in param_groups"),
    "Lists": refused(UnsupportedError, _REFUTED, "keeps state in an attribute"),
    "KeepsParameters": refused(
        NotSendableError, "keeps parameters in an attribute.*leave the class out", "keeps parameters in an attribute"
    ),
    "Lookahead": refused(UnsupportedError, "elementwise_optimizers.*Leave it out", "another optimizer steps"),
    "Centralised": RIGHT,
}
"""What comes of saying that a class of these works element by element, or row by row."""


def maker(row: str) -> Make:
    return ROWS[row]


def kind_of_row(row: str) -> tiers.Kind:
    return tiers.kind_of(ROWS[row]([torch.nn.Parameter(torch.ones(2, 2))]))


# -- columns and places -----------------------------------------------------------------------------------------------

PROGRAMS: dict[str, Program] = {
    "dense": Program(),
    "dense, 2 shards": Program(shards=2),
    "tables": Program(tables=True, rows_only=False),
    "tables, 3 shards": Program(tables=True, shards=3, rows_only=False),
    "tables, 3 shards, rows_only by default": Program(tables=True, shards=3, rows_only=None),
    "sparse tables": Program(tables=True, sparse=True),
    "sparse tables, 3 shards": Program(tables=True, sparse=True, shards=3),
    "tables, 3 shards, clipped": Program(tables=True, shards=3, rows_only=False, clips=True),
    "functions at once": Program(shards=2, at_once=True),
    "made in a later scope": Program(later=True),
    "state_dict loaded again": Program(shards=2, back="state_dict"),
    "checkpoint restored": Program(tables=True, shards=3, rows_only=False, back="checkpoint"),
    "dense, named elementwise": Program(shards=2, named=True),
    "tables, named elementwise": Program(tables=True, shards=3, named=True, rows_only=False),
    "sparse tables, named elementwise": Program(tables=True, sparse=True, shards=3, named=True),
}
FAKE = {f"{servers} servers, {workers} workers": (servers, workers) for servers in (1, 2) for workers in (1, 2)}
IN_PROCESSES = ("dense, 2 shards", "sparse tables, 3 shards", "functions at once")


def has_cell(row: str, column: str) -> bool:
    """Where one device has numbers to compare with."""
    program = PROGRAMS[column]
    if program.named and row not in NAMED:
        return False
    if program.tables and not program.sparse and row == "torch.optim.SparseAdam":
        return column == "tables"  # it says that it steps sparse gradients alone
    if program.sparse:
        return row in BY_LAYOUT
    return row != "torch.optim.SparseAdam"


def expected(row: str, column: str, servers: int) -> Expected:
    program, kind = PROGRAMS[column], kind_of_row(row)
    if row == "torch.optim.LBFGS":
        return refused(UnsupportedError, "LBFGS.step needs a closure.*synchronous strategy", "servers have no model")
    if row == "torch.optim.SparseAdam" and not program.sparse:
        return refused(UnsupportedError, "steps on sparse gradients alone", "as on one device")
    if program.named:
        return NAMED[row]
    if row == "BareLookahead" and (servers > 1 or program.shards):
        says = "constructor that calls Optimizer.__init__"
        return refused(UnsupportedError, says, "the scope has not seen it, and has placed variables for its base alone")
    if program.later and kind.tier is tiers.Tier.ALL and servers > 1:
        says = "Make it in the scope in which its parameters are made.*elementwise_optimizers"
        return refused(UnsupportedError, says, "its parameters lie on two servers already")
    if program.rows_only is None and kind.may_cut_rows and row not in ("torch.optim.SGD", "torch.optim.Adagrad"):
        return documented("rows without a gradient stay as they are", "rows_only=False.*rows_only=True")
    return RIGHT


def make_cells() -> Iterator[Cell]:
    for row in ROWS:
        for column in PROGRAMS:
            if has_cell(row, column) and row not in SHARES_CLASS:
                for place in FAKE:
                    if not PROGRAMS[column].at_once or FAKE[place][1] > 1:
                        yield _fake_cell(row, column, place)
    for row in [*ROWS, *OF_SCRIPT]:
        for column in IN_PROCESSES:
            if has_cell(OF_SCRIPT.get(row, row), column):
                to_be = expected(OF_SCRIPT.get(row, row), column, 2)
                yield on_servers.cell("optimizers", row, column, to_be, "tests.matrix.own_optimizers")


def _fake_cell(row: str, column: str, place: str) -> Cell:
    servers, workers = FAKE[place]
    to_be = expected(row, column, servers)
    compare = check_rows_stay if to_be.verdict == "documented" else check
    return Cell(row, column, place, partial(_in_fake_cluster, compare, row, column, servers, workers), to_be)


def _in_fake_cluster(compare: Callable[..., None], row: str, column: str, servers: int, workers: int) -> None:
    with FakeCluster(workers=workers, ps=servers) as cluster:
        compare(PROGRAMS[column], ROWS[row], cluster.strategy)


def check_of(own: Mapping[str, Make], row: str, column: str, resolver: Any) -> Callable[[], None]:
    """On a cluster of processes; ``own``: the classes of the script."""
    make = own[row.removesuffix(" of the script")] if row.endswith(" of the script") else ROWS[row]
    return partial(check, PROGRAMS[column], make, partial(ts.ParameterServerStrategy, resolver))


# -- planted faults ---------------------------------------------------------------------------------------------------


def _ids(place: str, row: str, *columns: str) -> Sequence[str]:
    return [f"{row} | {column} | {place}" for column in columns]


_fakes = partial(_ids, "2 servers, 2 workers")


def _all_are_elementwise(cls: type[Optimizer]) -> tiers.Kind:
    return tiers._KINDS.get(cls, tiers.Kind(tiers.Tier.ELEMENTS))


def _believing(self: optimizer_state.Kinds, optimizer: Optimizer) -> tiers.Kind:
    is_named = type(optimizer) in self._elementwise
    return tiers.Kind(tiers.Tier.ROWS) if is_named else tiers.kind_of(optimizer)


def _dense_only(step: Any, shards: Any) -> Any:
    rows = {key: torch.zeros_like(shards.tensor(key)).index_copy_(0, ids, rows) for key, ids, rows in step.rows}
    return {**dict(step.dense), **rows}


def _forgetting(self: live_optimizer.LiveOptimizer, options: Any) -> None:
    for group, new in zip(self._optimizer.param_groups, options, strict=True):
        for name in set(group) - {*new, "params"}:
            del group[name]


@contextmanager
def _copying_hooks() -> Iterator[None]:
    with (
        mock.patch.object(pickler, "is_library", lambda name: name != "torch.optim.optimizer"),
        mock.patch.object(functions, "take_over_steps"),
    ):
        yield


def _giving_each_its_cell() -> AbstractContextManager[object]:
    plainly = pickler.cloudpickle.Pickler._dynamic_function_reduce
    return mock.patch.object(pickler.ValuePickler, "_dynamic_function_reduce", plainly)


_COPIED_HOOKS = "a class of the script brings a copy of PyTorch's hooks"
_OWN_CELLS = "methods of a class that share a variable have one each where they arrive"

FAULTS = [
    PlantedFault(
        _COPIED_HOOKS,
        lambda: on_servers.marked(_COPIED_HOOKS, _copying_hooks),
        _ids(on_servers.PROCESSES, "Lion of the script", "functions at once"),
    ),
    PlantedFault(
        _OWN_CELLS,
        lambda: on_servers.marked(_OWN_CELLS, _giving_each_its_cell),
        _ids(on_servers.PROCESSES, "Closing of the script", "dense, 2 shards"),
    ),
    PlantedFault(
        "a class that is not known is taken for an elementwise one",
        lambda: mock.patch.object(tiers, "kind_of_class", _all_are_elementwise),
        [*_fakes("Normalised", "dense"), *_fakes("Flag", "dense")],
    ),
    PlantedFault(
        "nobody asks whether variables that are there already lie right",
        lambda: mock.patch.object(job, "check_places"),
        _ids("2 servers, 1 workers", "Normalised", "made in a later scope"),
    ),
    PlantedFault(
        "variables of an optimizer that looks at whole ones are cut",
        lambda: mock.patch.object(Bonds, "keeps_whole", return_value=None),
        _fakes("torch.optim.Adafactor", "dense, 2 shards"),
    ),
    PlantedFault(
        "variables of an optimizer that is not known lie on several servers",
        lambda: mock.patch.object(Bonds, "stepped_together_with", return_value=()),
        _fakes("Normalised", "dense"),
    ),
    PlantedFault(
        "the user's word is not tried",
        lambda: mock.patch.object(optimizer_state.Kinds, "of", _believing),
        _fakes("Lamb", "dense, named elementwise"),
    ),
    PlantedFault(
        "rows are dense gradients for every class",
        lambda: mock.patch.object(live_optimizer, "_gradients_of", _dense_only),
        _fakes("RowWise", "sparse tables"),
    ),
    PlantedFault(
        "a table travels by rows, whatever its optimizer makes of the layout",
        lambda: mock.patch.object(Bonds, "looks_at_layout", return_value=False),
        _fakes("RowWise", "tables, named elementwise"),
    ),
    PlantedFault(
        "memory that a step gives to a parameter is not kept",
        lambda: mock.patch.object(live_optimizer, "keep_elements"),
        _fakes("Rebinding", "dense"),
    ),
    PlantedFault(
        "memory that a step gives to a shard is not kept",
        lambda: mock.patch.object(optimizer_step, "keep_elements"),
        _fakes("Rebinding", "dense, named elementwise"),
    ),
    PlantedFault(
        "what a step sets in param_groups is gone at the next",
        lambda: mock.patch.object(live_optimizer.LiveOptimizer, "_take_options", _forgetting),
        _fakes("CountsInGroup", "dense"),
    ),
    PlantedFault(
        "nobody is told that rows without a gradient stay",
        lambda: mock.patch.object(optimizer_state, "moves_rows_without_gradient", return_value=False),
        _fakes("torch.optim.Adam", "tables, 3 shards, rows_only by default"),
    ),
]


TABLE = Table(
    "optimizers",
    "Which optimizers have the numbers of one device on parameter servers?",
    make_cells,
    always=(
        "KeepsParameters | dense | 2 servers, 2 workers",
        "Lookahead | dense, 2 shards | 2 servers, 2 workers",
        "torch.optim.SparseAdam | tables | 2 servers, 2 workers",
    ),
    faults=FAULTS,
    alike=lambda place: place.partition(",")[0],  # with one worker or two
)
