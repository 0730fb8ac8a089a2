"""The comparison itself: what it must accept and, above all, what it must refuse."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

import torchstrat as ts
from tests.conformance.harness import Case, check, decode, load_cases
from tests.conformance.verdicts import without_fields
from torchstrat.errors import InvalidArgumentError, StructureMismatchError, WrongTypeError

pytestmark = pytest.mark.conformance
Pair = namedtuple("Pair", ["x", "y"])
Spec = namedtuple("Spec", ["shape", "dtype"])
TWO = {"dtype": "float32", "shape": [2], "data": [1.0, "nan"]}
ONE = {"dtype": "float32", "shape": [], "data": 1.0}
INTERNAL = {"error": "InvalidArgumentError", "error_bases": ["OpError", "Exception"]}
VALUE_ERROR = {"error": "ValueError", "error_bases": ["Exception"]}
JSON_ERROR = {"error": "JSONDecodeError", "error_bases": ["ValueError", "Exception"]}
MISMATCH = {"error": "AssertionError", "error_bases": ["Exception"]}
CLEAR = "gather got axis=7 for tensors of 2 dimensions; use -2 to 1."
UNCLEAR = [
    "",
    "x",
    "something is wrong",
    "the value that was given is not a good one at all",
    "gather got axis=7 for tensors with 2 dimensions in all",
    "you must give something else to this function please",
    "use 0 to 1: list index out of range",
    "'NoneType' object has no attribute 'shape'; use another",
]
OfTheFunction = type("InvalidArgumentError", (Exception,), {"__module__": __name__})


def case(expect: Any) -> Case:
    return Case("area/op/000", "area", {}, "op", {}, expect)


@pytest.mark.parametrize(
    ("recorded", "actual"),
    [
        (TWO, torch.tensor([1.0, float("nan")])),
        (ONE, torch.tensor(1.0 + 1e-6)),
        (ONE | {"numpy": True}, np.float32(1.0)),
        ({"dtype": "string", "shape": [1], "data": ["a"]}, np.array(["a"], dtype=object)),
        ({"dtype": "complex64", "shape": [1], "data": [[1.0, 2.0]]}, torch.tensor([1 + 2j])),
        ({"per_replica": [ONE, None]}, ts.PerReplica([torch.tensor(1.0), None])),
        ({"mirrored": [ONE]}, ts.Mirrored([torch.tensor(1.0)])),
        ({"tuple": [ONE]}, (torch.tensor(1.0),)),
        ({"dict": {"a": ONE}}, {"a": torch.tensor(1.0)}),
        ({"namedtuple": {"x": ONE, "y": None}}, Pair(torch.tensor(1.0), None)),
        ({"python": 3, "type": "int"}, 3),
        ({"shape": [None, 2], "dtype": "int64"}, Spec((None, 2), torch.int64)),
        ({"tasks": {"0": "a"}, "bad": VALUE_ERROR}, {"tasks": {0: "a"}, "bad": ValueError()}),
        (VALUE_ERROR, InvalidArgumentError("x")),
        (JSON_ERROR, InvalidArgumentError("x")),
        (INTERNAL, InvalidArgumentError(CLEAR)),
        (MISMATCH, StructureMismatchError("x")),
    ],
)
def test_what_is_the_same_is_accepted(recorded: Any, actual: Any) -> None:
    check(case(recorded), actual)


@pytest.mark.parametrize(
    ("recorded", "actual"),
    [
        (TWO, torch.tensor([1.0, 2.0])),
        (ONE, torch.tensor(1.0 + 1e-4)),
        (ONE, torch.tensor(1.0, dtype=torch.float64)),
        (ONE, torch.tensor([1.0])),
        (ONE, 1.0),
        (ONE, np.float32(1.0)),
        (ONE | {"numpy": True}, torch.tensor(1.0)),
        ({"per_replica": [ONE]}, ts.Mirrored([torch.tensor(1.0)])),
        ({"per_replica": [ONE]}, ts.PerReplica([torch.tensor(1.0), torch.tensor(1.0)])),
        ({"per_replica": [ONE]}, torch.tensor(1.0)),
        ({"tuple": [ONE]}, [torch.tensor(1.0)]),
        ({"tuple": [ONE, ONE]}, Pair(torch.tensor(1.0), torch.tensor(1.0))),
        ([ONE], (torch.tensor(1.0),)),
        ({"dict": {"a": ONE}}, {"a": torch.tensor(1.0), "b": None}),
        ({"python": 1, "type": "int"}, True),
        ({"python": 1, "type": "int"}, 1.0),
        ({"python": True, "type": "bool"}, 1),
        ({"flag": True}, {"flag": 1}),
        ({"flag": True}, {}),
        ({"shape": [None], "dtype": "int64"}, Spec((3,), torch.int64)),
        (None, torch.tensor(1.0)),
        (ONE, ValueError("x")),
        ({"part": ONE}, {"part": ValueError("x")}),
        (VALUE_ERROR, torch.tensor(1.0)),
        (VALUE_ERROR, TypeError("x")),
        (VALUE_ERROR, WrongTypeError("x")),
        (INTERNAL, torch.tensor(1.0)),
        (INTERNAL, ValueError(CLEAR)),
        *((INTERNAL, InvalidArgumentError(text)) for text in UNCLEAR),
        (INTERNAL, IndexError("raised by accident")),
        ({"error": "IndexError", "error_bases": ["LookupError", "Exception"]}, IndexError("raised by accident")),
        ({"error": "NewError", "error_bases": ["Exception"]}, InvalidArgumentError("x")),
    ],
)
def test_what_differs_is_refused(recorded: Any, actual: Any) -> None:
    with pytest.raises(AssertionError):
        check(case(recorded), actual)


def test_an_internal_error_of_tensorflow_counts_as_a_difference() -> None:
    assert check(case(INTERNAL), InvalidArgumentError(CLEAR)) == 4
    assert check(case(INTERNAL), OfTheFunction("x")) is None
    assert check(case(VALUE_ERROR), InvalidArgumentError("x")) is None
    assert check(case(MISMATCH), StructureMismatchError("x")) is None


@pytest.mark.parametrize(
    "recorded",
    [
        ONE,
        TWO,
        {"dtype": "bfloat16", "shape": [1, 2], "data": [[1.0, 2.0]]},
        {"dtype": "complex64", "shape": [], "data": [1.0, 2.0]},
        {"dtype": "int64", "shape": [0, 2], "data": []},
        {"dtype": "string", "shape": [2], "data": ["a", "b"]},
        {"dtype": "float32", "shape": [1], "data": [1.0], "numpy": True},
        {"per_replica": [{"tuple": [ONE, None]}, {"dict": {"a": ONE}}]},
        {"namedtuple": {"x": ONE, "y": [ONE]}},
        {"python": 2.5, "type": "float64"},
        {"ragged": [[1, 1], [2, 2, 2]]},
        {
            "indexed_slices": {
                "values": {"dtype": "float32", "shape": [2, 1], "data": [[1.0], [2.0]]},
                "indices": {"dtype": "int64", "shape": [2], "data": [3, 3]},
            }
        },
    ],
)
def test_what_is_decoded_compares_equal_to_its_record(recorded: Any) -> None:
    check(case(recorded), decode(recorded))


def test_fields_without_counterpart_are_left_out_at_any_depth() -> None:
    stripped = without_fields(case({"a": {"b": 1, "c": [{"b": 2, "d": 3}]}}), ["b"])
    assert stripped.expect == {"a": {"c": [{"d": 3}]}}


def test_every_recorded_case_is_there_once() -> None:
    cases = load_cases()
    assert len(cases) == len({case.id for case in cases}) == 1776
    assert all(case.id.startswith(f"{case.area}/") for case in cases)
