"""Recorded TensorFlow behaviour, replayed through torchstrat's public API.

``cases.json`` holds what ``tf.distribute`` 2.19 did: one entry per call, with its inputs and its result or error. Each
area of the file has one adapter module in ``areas/`` that says how the call is spelled here::

    OPS: dict[str, Callable[[Case], Any]]      # performs the call; returns the actual result, or raises
    DIFFERS: dict[str, Difference]             # case id -> where torchstrat decided otherwise, and what it promises
    NO_COUNTERPART: dict[str, str]             # case id -> why the case means nothing in PyTorch
    FIELDS_WITHOUT_COUNTERPART: dict[str, str] # optional: field of a recorded record -> why it means nothing here

An adapter turns words ("returns a dict of two tensors") into code; it never repairs a result. `check` compares.
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchstrat as ts
from tests.conformance.comparison import compare, compare_error

CASES = Path(__file__).with_name("cases.json")
DEFAULT_TOLERANCE = 1e-5
TOLERANCES = {"central_train": 1e-4, "ps_train": 1e-4}
ACCIDENTS_OF_TENSORFLOW = 4
RULES = {
    1: "no row is ever lost",
    2: "any InputOptions on every strategy, nothing is sticky",
    3: "the resolver of a parameter-server strategy",
    ACCIDENTS_OF_TENSORFLOW: "where TensorFlow fails by accident, an error that explains",
    5: "dtypes follow PyTorch",
    6: "checks do not depend on the number of replicas",
    7: "schedule takes any callable, and results may hold None",
    8: "reduce has a default axis and maps over nests",
    9: "annotations of logical devices on every strategy, also eagerly",
    10: "three entries of a mesh are [x, y, core]",
    11: "TF_CONFIG is checked when it is read, with one class of error",
    12: "a ShardedVariable slices as PyTorch, and refuses extra rows",
    13: "the id of a replica is a Python int",
    14: "a function that ran twice is applied once",
    15: "gradients are averaged unless they are to be summed",
    16: "devices are checked when a strategy is built",
    17: "assign_to_logical_device under SPMD warns",
    18: "variables aggregate as recorded",
    19: "what exists in TensorFlow alone: graphs, tracing, class names",
    20: "what PyTorch spells differently",
    21: "what was agreed later: plain Python numbers and others",
    22: "tables on servers move by rows",
}
"""The deliberate differences of the semantics document, by their numbers."""


@dataclass(frozen=True)
class Case:
    """One recorded call. ``setup``, ``inputs`` and ``expect`` are as in the file: see `decode`."""

    id: str
    area: str
    setup: dict[str, Any]
    op: str
    inputs: Any
    expect: Any
    note: str | None = None

    @property
    def tolerance(self) -> float:
        return TOLERANCES.get(self.area, DEFAULT_TOLERANCE)


@dataclass(frozen=True)
class Difference:
    """A deliberate difference from TensorFlow.

    ``number`` is one of `RULES`. ``promise(case)`` performs the
    call and asserts what torchstrat does instead; it fails when torchstrat does not.
    """

    number: int
    promise: Callable[[Case], None]


@cache
def _all_cases() -> tuple[Case, ...]:
    fields = ("id", "area", "setup", "op", "inputs", "expect", "note")
    return tuple(
        Case(**{name: entry.get(name) for name in fields}) for entry in json.loads(CASES.read_text(encoding="utf-8"))
    )


def load_cases(areas: Collection[str] | None = None) -> list[Case]:
    """The recorded cases of ``areas`` (all of them for None), in the order of the file."""
    return [case for case in _all_cases() if areas is None or case.area in areas]


def decode(value: Any) -> Any:
    """An input of the case file as Python and PyTorch objects, recursively.

    Tensors become `torch.Tensor`, or `numpy.ndarray` where the case recorded a NumPy value; strings have no tensor
    type in PyTorch and become NumPy object arrays. ``per_replica`` and ``mirrored`` become distributed values.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if {"dtype", "shape", "data"} <= value.keys():
        return _decode_tensor(value)
    if "python" in value:
        return np.float64(value["python"]) if value["type"] == "float64" else value["python"]
    if len(value) == 1:
        [(kind, content)] = value.items()
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](content)
    return {key: decode(item) for key, item in value.items()}


def sparse_rows(indices: Sequence[int] | torch.Tensor, rows: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A sparse COO tensor of shape ``size`` with these ``rows``, in this order: what is IndexedSlices in TensorFlow."""
    where = torch.as_tensor(indices)[None]
    return torch.sparse_coo_tensor(where, rows, tuple(size), check_invariants=True)


def _decode_sparse(content: dict[str, Any]) -> torch.Tensor:
    rows, indices = decode(content["values"]), decode(content["indices"])
    return sparse_rows(indices, rows, (int(indices.max()) + 1, *rows.shape[1:]))


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "per_replica": lambda content: ts.PerReplica([decode(item) for item in content]),
    "mirrored": lambda content: ts.Mirrored([decode(item) for item in content]),
    "tuple": lambda content: tuple(decode(item) for item in content),
    "dict": lambda content: {key: decode(item) for key, item in content.items()},
    "namedtuple": lambda content: namedtuple("Recorded", content)(**{k: decode(v) for k, v in content.items()}),
    "ragged": lambda content: torch.nested.nested_tensor([torch.tensor(r) for r in content], layout=torch.jagged),
    "indexed_slices": _decode_sparse,
}


def _decode_tensor(value: dict[str, Any]) -> Any:
    shape, name = tuple(value["shape"]), value["dtype"]
    if name == "string":
        return np.array(value["data"], dtype=object).reshape(shape)
    flat = [_decode_number(item) for item in _scalars(value["data"], len(shape))]
    dtype = getattr(torch, name)
    tensor = torch.tensor(flat, dtype=dtype).reshape(shape)
    return tensor.numpy() if value.get("numpy") else tensor


def _scalars(data: Any, rank: int) -> list[Any]:
    if rank == 0:
        return [data]
    return [scalar for row in data for scalar in _scalars(row, rank - 1)]


def _decode_number(item: Any) -> Any:
    if isinstance(item, list):
        return complex(float(item[0]), float(item[1]))
    return float(item) if isinstance(item, str) else item


def outcome(call: Callable[[], Any]) -> Any:
    """What ``call`` returned, or the exception it raised: for cases that record several results, some errors."""
    try:
        return call()
    except Exception as error:
        return error


def check(case: Case, actual: Any) -> int | None:
    """Assert that ``actual``, a result or a raised exception, is what was recorded.

    Compares values with the tolerance of the area, and exactly: dtype, shape, kind of container, class of error.

    Returns:
        None where torchstrat does the same; 4 where TensorFlow failed with an internal error and torchstrat with a
        clear error of its own.

    Raises:
        AssertionError: they differ; the message has the path to the first difference.
    """
    recorded = case.expect
    if isinstance(recorded, dict) and isinstance(recorded.get("error"), str):
        same_class = compare_error(recorded["error"], recorded["error_bases"], actual, case.id)
        return None if same_class else ACCIDENTS_OF_TENSORFLOW
    if isinstance(actual, BaseException):
        raise AssertionError(f"{case.id}: TensorFlow returned a value; torchstrat raised {actual!r}") from actual
    compare(recorded, actual, case.tolerance, case.id)
    return None


_open_strategies: list[ts.Strategy] = []


def opened(strategy: Any) -> Any:
    """``strategy``, noted down to be closed after the case, so that no replica's thread outlives it."""
    _open_strategies.append(strategy)
    return strategy


def close_strategies() -> None:
    while _open_strategies:
        _open_strategies.pop().close()


def make_strategy(setup: dict[str, Any]) -> ts.Strategy:
    """The strategy a case was recorded under; replica ``i`` computes on the virtual device ``cpu:i``. See `opened`."""
    kind, devices = setup["strategy"], [f"cpu:{index}" for index in range(setup.get("replicas", 1))]
    if kind == "default":
        return ts.get_strategy()
    if kind == "one_device":
        return opened(ts.OneDeviceStrategy(devices[0]))
    if kind == "mirrored":
        return opened(ts.MirroredStrategy(devices=devices, gradient_reduce_op="sum"))
    if kind in ("central", "central_v1"):
        return opened(ts.CentralStorageStrategy(devices, parameter_device="cpu:0", gradient_reduce_op="sum"))
    raise ValueError(f"case setup names strategy {kind!r}, which this process cannot build")
