"""Comparing what torchstrat returned with what the case file recorded: values, dtypes, shapes, containers, errors."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchstrat as ts
from torchstrat.errors import CancelledError, ClosureInputError, StructureMismatchError, TorchstratError

BUILTIN: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError, KeyError, NotImplementedError, StopIteration)
}
"""Error classes that callers catch by name: here the same ones."""

SAME_NAME: dict[str, type[Exception]] = {kind.__name__: kind for kind in (CancelledError, ClosureInputError)}
"""Classes of TensorFlow's coordinator that torchstrat has under the same name."""

INTERNAL = {
    "InvalidArgumentError", "NotFoundError", "OutOfRangeError", "UnavailableError", "InternalError",
    "FailedPreconditionError", "AttributeError", "AssertionError", "IndexError", "ZeroDivisionError",
}  # fmt: skip
"""Error classes that show that TensorFlow failed; torchstrat fails too, with a class of its own."""

ABOUT_ATTRIBUTES = {
    "dataset/transform_not_allowed/001",
    "dataset/transform_not_allowed/002",
    "dataset/transform_not_allowed/003",
    "input_context/read_only/001",
    "input_options/is_tuple/001",
}
"""The cases in which an attribute does not exist or cannot be set: Python's own AttributeError says so here too.
Elsewhere an AttributeError shows an accident."""

ADAPTERS = str(Path(__file__).with_name("areas"))

HALF_PRECISION = {"float16": 1e-3, "bfloat16": 1e-2}


def compare(recorded: Any, actual: Any, tolerance: float, path: str) -> None:
    """Assert that ``actual`` is the recorded value; ``path`` names the place in the message."""
    if isinstance(recorded, dict):
        _compare_mapping(recorded, actual, tolerance, path)
    elif isinstance(recorded, list):
        _expect(isinstance(actual, list), path, "a list", actual)
        _compare_items(recorded, actual, tolerance, path)
    elif isinstance(recorded, bool | str) or recorded is None:
        _expect(type(actual) is type(recorded) and actual == recorded, path, repr(recorded), actual)
    else:
        _expect(isinstance(actual, int | float) and not isinstance(actual, bool), path, "a number", actual)
        _expect(math.isclose(actual, recorded, rel_tol=tolerance, abs_tol=tolerance / 10), path, repr(recorded), actual)


def _compare_mapping(recorded: dict[str, Any], actual: Any, tolerance: float, path: str) -> None:
    if isinstance(recorded.get("error"), str):
        compare_error(recorded["error"], recorded["error_bases"], actual, path)
    elif isinstance(actual, BaseException):
        raise AssertionError(f"{path}: TensorFlow returned a value; torchstrat raised {actual!r}") from actual
    elif {"dtype", "shape", "data"} <= recorded.keys():
        _compare_tensor(recorded, actual, tolerance, path)
    elif {"dtype", "shape"} <= recorded.keys() <= {"dtype", "shape", "spec"}:
        _compare_spec(recorded, actual, path)
    elif recorded.keys() == {"python", "type"}:
        _expect(type(actual).__name__ == recorded["type"], path, f"a Python {recorded['type']}", actual)
        found = actual.decode() if isinstance(actual, bytes) else actual
        _expect(found == recorded["python"], path, repr(recorded["python"]), actual)
    elif len(recorded) == 1 and next(iter(recorded)) in _CONTAINERS:
        [(kind, content)] = recorded.items()
        _CONTAINERS[kind](content, actual, tolerance, path)
    else:  # a record: named results of one case
        _compare_dict(recorded, actual, tolerance, path)


def _compare_items(recorded: list[Any], actual: Any, tolerance: float, path: str) -> None:
    _expect(len(actual) == len(recorded), path, f"{len(recorded)} items", actual)
    for index, (left, right) in enumerate(zip(recorded, actual, strict=True)):
        compare(left, right, tolerance, f"{path}[{index}]")


def _compare_dict(recorded: dict[str, Any], actual: Any, tolerance: float, path: str) -> None:
    _expect(isinstance(actual, Mapping), path, "a dict", actual)
    keys = {str(key): key for key in actual}  # JSON has string keys only
    _expect(keys.keys() == recorded.keys(), path, f"the keys {sorted(recorded)}", actual)
    for key, value in recorded.items():
        compare(value, actual[keys[key]], tolerance, f"{path}.{key}")


def _compare_tuple(content: Any, actual: Any, tolerance: float, path: str) -> None:
    _expect(isinstance(actual, tuple) and not hasattr(actual, "_fields"), path, "a tuple", actual)
    _compare_items(content, actual, tolerance, path)


def _compare_namedtuple(content: Any, actual: Any, tolerance: float, path: str) -> None:
    _expect(isinstance(actual, tuple) and hasattr(actual, "_asdict"), path, "a named tuple", actual)
    _compare_dict(content, actual._asdict(), tolerance, path)


def _compare_per_replica(content: Any, actual: Any, tolerance: float, path: str) -> None:
    _expect(isinstance(actual, ts.PerReplica), path, "a PerReplica", actual)
    _compare_items(content, actual.values, tolerance, path)


def _compare_mirrored(content: Any, actual: Any, tolerance: float, path: str) -> None:
    _expect(isinstance(actual, ts.Mirrored), path, "a Mirrored", actual)
    _compare_items(content, actual.values, tolerance, path)


def _compare_spec_per_replica(content: Any, actual: Any, tolerance: float, path: str) -> None:
    _expect(hasattr(actual, "values") and not isinstance(actual, Mapping), path, "a spec per replica", actual)
    _compare_items(content, actual.values, tolerance, path)


def _compare_ragged(content: Any, actual: Any, tolerance: float, path: str) -> None:
    _expect(isinstance(actual, torch.Tensor) and actual.is_nested, path, "a nested tensor", actual)
    compare(content, [row.tolist() for row in actual.unbind()], tolerance, path)


def _compare_sparse(content: Any, actual: Any, tolerance: float, path: str) -> None:
    _expect(isinstance(actual, torch.Tensor) and actual.layout is torch.sparse_coo, path, "a sparse tensor", actual)
    compare(content["values"], actual._values(), tolerance, f"{path}.values")
    compare(content["indices"], actual._indices().squeeze(0), tolerance, f"{path}.indices")


def _compare_variable(content: Any, actual: Any, tolerance: float, path: str) -> None:
    _expect(isinstance(actual, ts.Variable), path, "a Variable", actual)
    compare(content, actual.read_value(), tolerance, path)


_CONTAINERS = {
    "per_replica": _compare_per_replica,
    "mirrored": _compare_mirrored,
    "per_replica_spec": _compare_spec_per_replica,
    "tuple": _compare_tuple,
    "dict": _compare_dict,
    "namedtuple": _compare_namedtuple,
    "ragged": _compare_ragged,
    "indexed_slices": _compare_sparse,
    "variable": _compare_variable,
}


def _compare_tensor(recorded: dict[str, Any], actual: Any, tolerance: float, path: str) -> None:
    if recorded["dtype"] == "string":
        actual = np.asarray(actual, dtype=object) if isinstance(actual, str | bytes) else actual
        kinds: tuple[type, ...] = (np.ndarray,)
    else:
        kinds = (np.ndarray, np.generic) if recorded.get("numpy") else (torch.Tensor,)
    _expect(isinstance(actual, kinds), path, kinds[0].__name__, actual)
    _expect(_dtype_name(actual.dtype) == recorded["dtype"], path, f"dtype {recorded['dtype']}", actual)
    _expect(list(actual.shape) == recorded["shape"], path, f"shape {recorded['shape']}", actual)
    tolerance = max(tolerance, HALF_PRECISION.get(recorded["dtype"], 0.0))
    pairs = zip(_scalars(recorded["data"], len(recorded["shape"])), actual.reshape(-1).tolist(), strict=True)
    for index, (left, right) in enumerate(pairs):
        _compare_scalar(left, right, tolerance, f"{path}(element {index})")


def _scalars(data: Any, rank: int) -> list[Any]:
    return [data] if rank == 0 else [scalar for row in data for scalar in _scalars(row, rank - 1)]


def _compare_scalar(recorded: Any, actual: Any, tolerance: float, path: str) -> None:
    if isinstance(actual, complex):
        actual = [actual.real, actual.imag]
        _compare_scalar(recorded[0], actual[0], tolerance, path)
        _compare_scalar(recorded[1], actual[1], tolerance, path)
    elif isinstance(actual, float):
        expected = float(recorded)
        same = math.isclose(actual, expected, rel_tol=tolerance, abs_tol=tolerance / 10)
        _expect(same or (math.isnan(actual) and math.isnan(expected)), path, repr(recorded), actual)
    else:
        text = actual.decode() if isinstance(actual, bytes) else actual
        _expect(text == recorded, path, repr(recorded), actual)


def _compare_spec(recorded: dict[str, Any], actual: Any, path: str) -> None:
    _expect(hasattr(actual, "shape") and hasattr(actual, "dtype"), path, "an element spec", actual)
    _expect(list(actual.shape) == recorded["shape"], path, f"shape {recorded['shape']}", actual)
    _expect(_dtype_name(actual.dtype) == recorded["dtype"], path, f"dtype {recorded['dtype']}", actual)


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return "string" if name == "object" else name


def compare_error(recorded: str, bases: list[str], actual: Any, path: str) -> bool:
    """Assert that ``actual`` is an exception that may stand for the recorded class.

    A class that Python programmers catch by name must be that class here. TensorFlow's internal classes show only that
    it fails: here it must be an error that torchstrat raises on purpose, and that is a builtin class as well.

    Returns whether it is the recorded class, rather than one that stands for it.
    """
    if not isinstance(actual, BaseException):
        raise AssertionError(f"{path}: TensorFlow raised {recorded}; torchstrat returned {actual!r}")
    try:
        if recorded in INTERNAL:
            return _compare_internal_error(recorded, actual, path)
        known = BUILTIN | SAME_NAME
        wanted = next((known[name] for name in (recorded, *bases) if name in known), None)
        assert wanted is not None, f"{path}: no rule for the recorded class {recorded}"
        _expect(isinstance(actual, wanted), path, wanted.__name__, actual)
        return True
    except AssertionError as difference:
        raise difference from actual


def _compare_internal_error(recorded: str, actual: BaseException, path: str) -> bool:
    if recorded == "AttributeError" and re.split(r"[.\[]", path)[0] in ABOUT_ATTRIBUTES:
        _expect(isinstance(actual, AttributeError), path, recorded, actual)
        return True
    if isinstance(actual, StructureMismatchError) and recorded == "AssertionError":
        return True
    if recorded != "AttributeError" and _raised_by_the_case(recorded, actual):
        return True
    clear = isinstance(actual, TorchstratError) and isinstance(actual, ValueError | TypeError | RuntimeError)
    _expect(clear, path, f"an error of torchstrat's own in place of {recorded}", actual)
    require_explanation(actual, path)
    return False


GIVEN = re.compile(r"\d|'[^']*'|=|\bgot\b|\bNone\b|\b(is|has) no\b|\bbool\b")
NEEDED = re.compile(
    r"\b(must|needs?|least|equal|there (is|are)|outside|out of (range|bounds)|not in"
    r"|use|give|choose|pass|convert|batch|reshape|leave|open|combine|edit|ask|make|catch|return)\b",
    re.IGNORECASE,
)
ACCIDENTAL = re.compile(
    r"object has no attribute|object is not|(list|tuple|string|pop) .*index|unsupported operand|division by zero"
    r"|missing \d+ required|unexpected keyword"
)
FEWEST_WORDS = 6


def require_explanation(error: BaseException, path: str) -> None:
    """Assert that the message says what was given, and what was needed or is to be changed, in words of its own."""
    text = str(error)
    explains = GIVEN.search(text) and NEEDED.search(text) and len(text.split()) >= FEWEST_WORDS
    _expect(bool(explains), path, "a message that says what was given and what was needed or is to be changed", error)
    _expect(not ACCIDENTAL.search(text), path, "a message of torchstrat's own", error)


def _raised_by_the_case(recorded: str, actual: BaseException) -> bool:
    """Whether the replica's own function raised this class, so that it only had to pass through unchanged."""
    if type(actual).__module__.startswith(__package__):
        return type(actual).__name__ == recorded
    frames = list(traceback.walk_tb(actual.__traceback__))
    inside = bool(frames) and frames[-1][0].f_code.co_filename.startswith(ADAPTERS)
    return inside and type(actual).__name__ == recorded


def _expect(condition: bool, path: str, wanted: str, actual: Any) -> None:
    if not condition:
        raise AssertionError(f"{path}: expected {wanted}; got {type(actual).__name__} {actual!r}")
