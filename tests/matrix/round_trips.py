"""State that goes to a file and comes back: is it what plain PyTorch would have brought back?

Rows: what ``state_dict()`` can hold. Columns: the way there and back. A program under a strategy has trained values; a
new one, which begins with others, gets them back through the file, and the judge is what ``torch.save`` and
``load_state_dict`` make of the same without a strategy. Everything is compared bit for bit, with its dtype, its class
and the order of its keys.

Left out: on parameter servers, ways that take a module with them as it is (``torch.save(model)``, ``torch.export``):
these are about stand-ins. Under torchrun, ways to parameter servers, whose coordinator is a program of its own.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

import torchstrat as ts
from tests.matrix import places
from tests.matrix import round_trip_rows as rows
from tests.matrix.round_trip_rows import Objects
from tests.matrix.round_trip_ways import (
    COLUMNS,
    IN_SHARDS,
    OF_MODULES,
    ON_SERVERS,
    PROCESSES,
    SERVERS,
    WITHOUT_US,
    Found,
    Program,
    copied,
    folder,
    found_of,
    leave,
    made,
    opened,
)
from tests.matrix.table import (
    RIGHT,
    Cell,
    Expected,
    PlantedFault,
    Table,
    cells_at,
    documented,
    observe,
    refused,
    switched_off,
)
from torchstrat.checkpoint import items, optimizer_item, safetensors_file, stored
from torchstrat.core import _torch_private
from torchstrat.core.tensor_classes import memory_of
from torchstrat.errors import ContextError, InvalidArgumentError, TorchstratError, UnsupportedError
from torchstrat.parameter_server import job
from torchstrat.sharding.dtensor.parameters import CutVariables

consolidated = import_module("torchstrat.checkpoint.consolidate")  # where the function has the name of its module

PLACES = (
    "one_device",
    "mirrored x2",
    "central_storage x2",
    *places.TORCHRUN,
    places.LOGICAL_DEVICES,
    ON_SERVERS,
    IN_SHARDS,
)


class Row(NamedTuple):
    make: Callable[[bool], Objects]
    """The objects of a program, plainly; whether they are trained."""
    expected: Mapping[str, Expected] = {}
    """By column, by place, or by ``column | place``, where it is not right."""
    without: tuple[str, ...] = ()
    """Columns that say nothing of it."""
    in_file: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state
    """What becomes of the states on their way to a plain file."""


NO_FILE_FOR_CODE = ("torch.save(model)", "torch.export", "safetensors")
"""What objects that are no modules do not go through."""
BUT_FILE_IN = tuple(column for column in COLUMNS if column != "plain file in")

BETWEEN_PROCESSES = (
    "checkpoint",
    "checkpoint to plain",
    "checkpoint from plain",
    "consolidate",
    "plain file in",
    "plain file out",
    *OF_MODULES,
)
"""A cell's meetings take a while. The other columns run in one such place, since nothing else differs for them."""

INTO_STRATEGY = ("checkpoint", "checkpoint from plain", "plain file in")
"""Those of them at whose end the objects are under the strategy still."""

_IN_PIECES = {
    "torch.save(model)": refused(TorchstratError, "cannot be pickled.*state_dict", "its values are in pieces"),
    "torch.export": refused(ContextError, "outside of run.*state_dict", "it looks at values, which no process has"),
}
_NO_VARIABLE = refused(UnsupportedError, "'held of module .*dense tensors", "variables of servers are dense")
_ON_SERVERS = dict.fromkeys(SERVERS, _NO_VARIABLE) | {"checkpoint to servers": _NO_VARIABLE}
_NO_DENSE = refused(InvalidArgumentError, "held is missing", "safetensors has dense tensors only")
_NO_TENSOR = {"safetensors": refused(InvalidArgumentError, "_extra_state is missing", "safetensors has tensors only")}
_AS_DICT = documented("weights_only=True refuses other mappings", "count, a defaultdict, is written as a dict")


def _objects(make: Callable[[bool], Any]) -> Callable[[bool], Objects]:
    return lambda trained: {"object": rows.Words(make(trained))}


def _buffers() -> Iterator[tuple[str, Row]]:
    dense: dict[str, Callable[[], torch.Tensor]] = {
        "float64": lambda: torch.tensor([1.5, float("nan"), -0.0], dtype=torch.float64),
        "int8": lambda: torch.arange(3, dtype=torch.int8),
        "uint16": lambda: torch.tensor([3, 60000], dtype=torch.uint16),
        "bool": lambda: torch.tensor([True, False]),
        "complex64": lambda: torch.tensor([1 + 2j, 3 - 4j]),
        "complex128": lambda: torch.tensor([1 + 2j], dtype=torch.complex128),
        "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "bfloat16": lambda: torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "float8": lambda: torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn),
        "scalar": lambda: torch.tensor(7),
        "zero-size": lambda: torch.zeros(0, 3),
    }
    no_code = {"safetensors": refused(InvalidArgumentError, "held is of torch.complex128", "the format has none")}
    for name, make in dense.items():
        yield name, Row(partial(rows.buffers, make), no_code if name == "complex128" else {})
    more: dict[str, Callable[[], torch.Tensor]] = {
        "quantized": lambda: torch.quantize_per_tensor(torch.tensor([0.5, 1.0, -0.3]), 0.1, 2, torch.qint8),
        "sparse": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,)).coalesce(),
        "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    }
    for name, make in more.items():
        without = () if name == "sparse" else ("torch.export",)
        yield name, Row(partial(rows.buffers, make), {"safetensors": _NO_DENSE, **_ON_SERVERS}, without)


ROWS: Mapping[str, Row] = {
    "parameters": Row(rows.module),
    "parameters, bfloat16": Row(partial(rows.module, dtype=torch.bfloat16)),
    "parameters, complex": Row(rows.complex_parameters, without=("torch.export",)),
    "parameters, not contiguous": Row(rows.transposed),
    "parametrized": Row(rows.parametrized, without=("torch.export", "torch.save(model)")),
    "tied names": Row(rows.tied),
    "tied names, one in the file": Row(rows.tied, without=BUT_FILE_IN, in_file=rows.named_once),
    **{f"buffer, {name}": row for name, row in _buffers()},
    "extra state, dict": Row(partial(rows.extra, {"n": 0}, {"n": 5, "of": [1, "two"]}), _NO_TENSOR),
    "extra state, number": Row(partial(rows.extra, 0, 5), _NO_TENSOR),
    "extra state, None before": Row(partial(rows.extra, None, {"n": 1}), _NO_TENSOR),
    "extra state, a tensor that grows": Row(partial(rows.extra, torch.zeros(2), torch.arange(7.0))),
    "extra state, a tensor that was none": Row(partial(rows.extra, None, torch.arange(7.0))),
    "extra state, tensors in a list": Row(partial(rows.extra, [], [torch.arange(7.0), torch.ones(2)]), _NO_TENSOR),
    "extra state, bytes": Row(
        partial(rows.extra, torch.zeros(0, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8))
    ),
    "versions of modules": Row(rows.versioned),
    "versions of modules, an older file": Row(
        rows.versioned,
        {
            f"plain file in | {place}": refused(
                InvalidArgumentError,
                "of version 1 in the checkpoint and 2 in the program",
                "servers read for themselves",
            )
            for place in SERVERS
        },
        without=tuple(set(COLUMNS) - {"plain file in", "plain file, load_state_dict"}),
        in_file=rows.of_version_1,
    ),
    "averaged model": Row(rows.averaged),
    **{
        f"scheduler, {kind}": Row(partial(rows.scheduler, kind), without=NO_FILE_FOR_CODE)
        for kind in ("StepLR", "ReduceLROnPlateau", "SequentialLR")
    },
    "scaler": Row(rows.scaler, without=NO_FILE_FOR_CODE),
    "object with a nest": Row(rows.nest, without=NO_FILE_FOR_CODE),
    "object with a defaultdict": Row(
        _objects(lambda trained: {"count": defaultdict(int, seen=3 * trained), "more": 1}),
        {"consolidate": _AS_DICT},
        NO_FILE_FOR_CODE,
    ),
    "object that is empty": Row(_objects(lambda trained: {}), without=(*NO_FILE_FOR_CODE, "checkpoint from plain")),
    "optimizer without state": Row(partial(rows.optimizer, "SGD", {"lr": 0.1}), without=NO_FILE_FOR_CODE),
    "optimizer, momentum": Row(partial(rows.optimizer, "SGD", {"momentum": 0.9}), without=NO_FILE_FOR_CODE),
    "optimizer, Adam": Row(partial(rows.optimizer, "Adam", {"amsgrad": True}), without=NO_FILE_FOR_CODE),
    "optimizer, a tensor's rate": Row(
        partial(rows.optimizer, "Adam", {"lr": torch.tensor(0.1), "foreach": False}), without=NO_FILE_FOR_CODE
    ),
    "optimizer, Adafactor": Row(partial(rows.optimizer, "Adafactor", {}), without=NO_FILE_FOR_CODE),
    "optimizer with a count in its state": Row(rows.counted_in_state, without=NO_FILE_FOR_CODE),
    "optimizer that saves more": Row(rows.counting, without=NO_FILE_FOR_CODE),
}
IN_PROCESSES = ("parameters", "buffer, float64", "versions of modules", "optimizer, Adam", "optimizer, momentum")


# -- a cell -----------------------------------------------------------------------------------------------------------


def _wanted(row: Row, column: str) -> dict[str, Found]:
    if column in WITHOUT_US:
        with folder() as path:
            return COLUMNS[column](Program(row.make(True), row.make(False), row.make, row.in_file, path))
    fresh = row.make(False)
    states = {name: copied(value.state_dict()) for name, value in row.make(True).items()}
    for name, state in row.in_file(states).items():
        if isinstance(fresh[name], nn.Module):
            fresh[name].load_state_dict(state, strict=False)
        else:
            fresh[name].load_state_dict(state)
    return found_of(fresh)


def _brought_back(row: Row, column: str, place: str, strategy: Any, close: Callable[[], None]) -> dict[str, Found]:
    trained, fresh = made(strategy, row.make), made(strategy, row.make)
    for name, value in row.make(True).items():
        trained[name].load_state_dict(copied(value.state_dict()))
    with folder() as path:
        return COLUMNS[column](Program(trained, fresh, row.make, row.in_file, path, place, close))


def _check(row: Row, column: str, place: str) -> None:
    wanted = _wanted(row, column)
    with ExitStack() as stack:
        strategy = stack.enter_context(opened(place))
        owns = strategy.is_chief
        seen = _brought_back(row, column, place, strategy, stack.close)
    if column in INTO_STRATEGY and place == places.CENTRAL_ON_SOCKETS and not owns and "optimizer" in wanted:
        assert seen["optimizer"].state["state"].keys() <= {"steps"}, "the state is on another rank than the owner"
        return
    compare(seen, wanted, as_dict=column == "consolidate")


def compare(seen: Mapping[str, Found], wanted: Mapping[str, Found], *, as_dict: bool = False) -> None:
    for name, one in wanted.items():
        wrong = differences(seen[name].state, one.state, name, as_dict)
        assert not wrong, "\n".join(wrong)
        assert seen[name].parameters == one.parameters, f"{name} has {seen[name].parameters} parameters: ties are lost"


def differences(found: Any, wanted: Any, where: str, as_dict: bool = False) -> list[str]:
    """Where two states are not the same, bit for bit. ``as_dict``: other mappings may have become that."""
    if isinstance(wanted, Mapping):
        if type(found) is not type(wanted) and not (as_dict and type(found) is dict):
            return [f"{where}: a {type(found).__name__} instead of a {type(wanted).__name__}"]
        if [*found] != [*wanted]:
            return [f"{where}: {type(found).__name__} of {[*found]} instead of {type(wanted).__name__} of {[*wanted]}"]
        return [line for key in wanted for line in differences(found[key], wanted[key], f"{where}.{key}", as_dict)]
    if isinstance(wanted, list | tuple):
        if type(found) is not type(wanted) or len(found) != len(wanted):
            return [f"{where}: {found!r} instead of {wanted!r}"]
        return [line for n, one in enumerate(wanted) for line in differences(found[n], one, f"{where}[{n}]")]
    if isinstance(wanted, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == wanted.dtype and _bits(found) == _bits(wanted)
        return [] if same else [f"{where}: {found!r} instead of {wanted!r}"]
    return [] if found == wanted and type(found) is type(wanted) else [f"{where}: {found!r} instead of {wanted!r}"]


def _bits(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        tensor = tensor.to_sparse_coo().coalesce()
        return tensor.shape, tensor.indices().tolist(), tensor.values().tolist()
    if tensor.is_quantized:
        return tensor.shape, tensor.int_repr().tolist(), tensor.q_scale(), tensor.q_zero_point()
    flat = tensor.resolve_conj().contiguous().reshape(-1)
    return tensor.shape, flat.view(torch.uint8).tolist()


# -- real processes ---------------------------------------------------------------------------------------------------


def _check_in_processes(row: str) -> None:
    """Raise what the row came to. All of them run on one cluster, when the first is asked for."""
    outcome = _outcomes()[row]
    assert outcome == "", outcome


@functools.cache
def _outcomes() -> dict[str, str]:
    with ts.testing.LocalCluster(workers=2, ps=2) as cluster:
        found = {}
        for name in IN_PROCESSES:
            row = ROWS[name]

            def run(row: Row = row) -> None:
                strategy = ts.ParameterServerStrategy(cluster.resolver)
                try:
                    seen = _brought_back(row, "checkpoint", PROCESSES, strategy, strategy.close)
                finally:
                    strategy.close()
                compare(seen, _wanted(row, "checkpoint"))

            found[name] = observe(Cell(name, "checkpoint", PROCESSES, run)).text
    return found


def _expected(row: Row, column: str, place: str) -> Expected:
    if place == places.LOGICAL_DEVICES and column in OF_MODULES:
        return _IN_PIECES[column]
    if place == places.CENTRAL_ON_SOCKETS and column in INTO_STRATEGY and row in _of_optimizers():
        return documented("the owner alone has the state of optimizers")
    for key in (f"{column} | {place}", place, column):
        if key in row.expected:
            return row.expected[key]
    return RIGHT


def _of_optimizers() -> list[Row]:
    return [row for name, row in ROWS.items() if name.startswith("optimizer, ")]


def _has_cell(row: Row, column: str, place: str) -> bool:
    if column in row.without or (place in SERVERS and column in OF_MODULES):
        return False
    if place == "torchrun mirrored":
        return column != "checkpoint to servers"
    return place not in (*places.TORCHRUN, places.LOGICAL_DEVICES) or column in BETWEEN_PROCESSES


def cells() -> Iterator[Cell]:
    for place in PLACES:  # first, since a bundle of cells is of one place
        for name, row in ROWS.items():
            for column in COLUMNS:
                if _has_cell(row, column, place):
                    check = partial(_check, row, column, place)
                    yield Cell(name, column, place, check, _expected(row, column, place))
    for name in IN_PROCESSES:
        yield Cell(name, "checkpoint", PROCESSES, partial(_check_in_processes, name))


# -- planted faults --------------------------------------------------------------------------------------------------


def _put_together(variables: CutVariables, value: Any) -> Any:
    """Whatever it is."""
    return torch.cat([memory_of(value)] * 2) if isinstance(value, torch.Tensor) and value.ndim else value


FAULTS = (
    PlantedFault(
        "a checkpoint does not keep the versions of modules",
        switched_off(items, "versions_of", lambda state, name="": None),
        cells_at("versions of modules", "checkpoint", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "a consolidated file does not have the versions of modules",
        switched_off(consolidated, "_versions_of", lambda stored: {}),
        cells_at("versions of modules", "consolidate"),
    ),
    PlantedFault(
        "versions in a plain file are not read",
        switched_off(stored, "versions_of", lambda state, name="": None),
        cells_at("versions of modules", "plain file in"),
    ),
    PlantedFault(
        "extra state is taken for a weight",
        switched_off(items, "is_extra_state", lambda key: False),
        cells_at("extra state, a tensor that grows", "checkpoint"),
    ),
    PlantedFault(
        "each name of a tied weight has to be in the file",
        switched_off(items.TensorsItem, "_under_other_names", lambda self, stored: {}),
        cells_at("tied names, one in the file", "plain file in"),
    ),
    PlantedFault(
        "holes are left for tensors that nobody fills",
        switched_off(consolidated, "_has_tensors", lambda tree: False),
        cells_at("object with a nest", "consolidate"),
    ),
    PlantedFault(
        "every tensor is written as its numbers",
        switched_off(items, "is_block", lambda value: isinstance(value, torch.Tensor)),
        cells_at("buffer, quantized", "checkpoint"),
    ),
    PlantedFault(
        "servers take variables that are more than their numbers",
        switched_off(job, "is_block", lambda value: True),
        cells_at("buffer, quantized", "checkpoint", ON_SERVERS),
    ),
    PlantedFault(
        "the nest of a state_dict is rebuilt from plain dictionaries",
        switched_off(items, "structure_of", lambda value: None),
        cells_at("object with a nest", "checkpoint"),
    ),
    PlantedFault(
        "bfloat16 is written under the name of float16",
        switched_off(safetensors_file, "_CODES", {**safetensors_file._CODES, torch.bfloat16: "F16"}),
        cells_at("parameters, bfloat16", "safetensors"),
    ),
    PlantedFault(
        "what a class adds to its state_dict stays on the coordinator",
        switched_off(_torch_private, "saves_more", lambda optimizer: False),
        cells_at("optimizer that saves more", "checkpoint", ON_SERVERS),
    ),
    PlantedFault(
        "groups of an optimizer on servers are not restored",
        switched_off(optimizer_item.OptimizerItem, "_put_options", lambda self, paths, values: None),
        cells_at("optimizer, Adam", "checkpoint", ON_SERVERS),
    ),
    PlantedFault(
        "state of an optimizer is saved in pieces",
        switched_off(CutVariables, "whole_state", lambda self, value: memory_of(value)),
        cells_at("optimizer, Adam", "checkpoint to plain", places.LOGICAL_DEVICES),
    ),
    PlantedFault(
        "what of an optimizer's state is no piece is put together",
        switched_off(CutVariables, "whole_state", _put_together),
        cells_at("optimizer, Adafactor", "checkpoint to plain", places.LOGICAL_DEVICES),
    ),
)

TABLE = Table(
    name="round_trips",
    question="Does state that goes to a file come back as plain PyTorch would bring it back?",
    make_cells=cells,
    always=(
        "buffer, conjugate | checkpoint to plain | torchrun mirrored",
        "optimizer that saves more | plain file in | two logical devices",
        "optimizer that saves more | plain file, load_state_dict | parameter servers",
        "optimizer with a count in its state | plain file in | parameter servers",
        "optimizer, Adam | checkpoint from plain | two logical devices",
        "optimizer, a tensor's rate | checkpoint from plain | torchrun central_storage",
        "versions of modules, an older file | plain file in | parameter servers",
    ),
    faults=FAULTS,
    alike=lambda place: ON_SERVERS if place == IN_SHARDS else places.launch_of(place),
    bundle=20,
    leave=leave,
)
