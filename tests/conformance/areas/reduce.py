"""`Strategy.reduce`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import torchstrat as ts
from tests.conformance.differences import integer_mean, raises, returns
from tests.conformance.harness import Case, Difference, decode, make_strategy, sparse_rows
from torchstrat.errors import WrongTypeError

AXIS_KINDS: dict[str, Any] = {
    "str '0'": "0",
    "float 0.0": 0.0,
    "bool True": True,
    "bool False": False,
    "numpy int64 0": np.int64(0),
    "int32 tensor 0": torch.tensor(0, dtype=torch.int32),
    "empty tuple": (),
}
OP_OBJECTS: dict[str, Any] = {
    "ReduceOp.SUM": ts.ReduceOp.SUM,
    "ReduceOp.MEAN": ts.ReduceOp.MEAN,
    "None": None,
    "int 0": 0,
}


def reduce(case: Case) -> Any:
    axis = case.inputs["axis"]
    axis = tuple(axis) if case.inputs.get("axis_is_tuple") else axis
    return make_strategy(case.setup).reduce(case.inputs["reduce_op"], decode(case.inputs["value"]), axis=axis)


def reduce_axis_kind(case: Case) -> Any:
    axis = AXIS_KINDS[case.inputs["axis_kind"]]
    return make_strategy(case.setup).reduce(case.inputs["reduce_op"], decode(case.inputs["value"]), axis=axis)


def reduce_in_replica_context(case: Case) -> Any:
    strategy = make_strategy(case.setup)
    return strategy.run(lambda: strategy.reduce("SUM", torch.tensor(1.0), axis=None))


def reduce_sparse(case: Case) -> Any:
    value = ts.PerReplica(
        [
            sparse_rows([1], torch.tensor([[1.0]]), (4, 1)),
            sparse_rows([1, 3], torch.tensor([[2.0], [3.0]]), (4, 1)),
        ]
    )
    return make_strategy(case.setup).reduce(case.inputs["reduce_op"], value, axis=None)


def reduce_missing_axis(case: Case) -> Any:
    value = ts.PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    return make_strategy(case.setup).reduce(case.inputs["reduce_op"], value)


def reduce_nested(case: Case) -> Any:
    value = ts.PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    return make_strategy(case.setup).reduce(case.inputs["reduce_op"], (value, value), axis=case.inputs["axis"])


def reduce_op_object(case: Case) -> Any:
    axis = case.inputs["axis"]
    shape = () if axis is None else (1,)
    value = ts.PerReplica([torch.full(shape, 1.0), torch.full(shape, 2.0)])
    return make_strategy(case.setup).reduce(OP_OBJECTS[case.inputs["reduce_op_object"]], value, axis=axis)


def reduce_variable(case: Case) -> Any:
    strategy = make_strategy(case.setup)
    with strategy.scope():
        variable = ts.Variable(case.inputs["value"]["variable_created_in_scope"])
    return strategy.reduce(case.inputs["reduce_op"], variable, axis=case.inputs["axis"])


OPS: dict[str, Callable[[Case], Any]] = {
    "reduce": reduce,
    "reduce_axis_kind": reduce_axis_kind,
    "reduce_axis_kind_fresh_strategy": reduce_axis_kind,
    "reduce_dtype": reduce,
    "reduce_in_replica_ctx": reduce_in_replica_context,
    "reduce_indexed_slices": reduce_sparse,
    "reduce_int_mean": reduce,
    "reduce_missing_axis": reduce_missing_axis,
    "reduce_nested": reduce_nested,
    "reduce_op_object": reduce_op_object,
    "reduce_op_spelling": reduce,
    "reduce_partial": reduce,
    "reduce_plain": reduce,
    "reduce_shape_mismatch": reduce,
    "reduce_variable": reduce_variable,
}
_ZERO = returns(21, "A Python 0 is a number like others.", {"python": 0, "type": "int"}, reduce)
_SUM_OF_ZEROS = returns(21, "A Python 0 counts once per replica.", {"dtype": "int64", "shape": [], "data": 0}, reduce)
_SIX = {"dtype": "float32", "shape": [], "data": 6.0}
DIFFERS: dict[str, Difference] = {
    "reduce/reduce/053": integer_mean(reduce),
    "reduce/reduce/054": integer_mean(reduce),
    "reduce/reduce_dtype/018": integer_mean(reduce),
    "reduce/reduce_dtype/020": integer_mean(reduce),
    "reduce/reduce_int_mean/002": integer_mean(reduce),
    "reduce/reduce_partial/043": integer_mean(reduce),
    # TensorFlow took the equal int 0 of an earlier call on the same strategy from its cache.
    "reduce/reduce_axis_kind/006": raises(2, WrongTypeError, "axis must be None, an int or a tuple", reduce_axis_kind),
    "reduce/reduce_missing_axis/001": returns(
        8, "axis defaults to None.", {"dtype": "float32", "shape": [2], "data": [4.0, 6.0]}, reduce_missing_axis
    ),
    **dict.fromkeys([f"reduce/reduce_plain/{number}" for number in ("014", "032", "050", "068")], _ZERO),
    "reduce/reduce_plain/067": _SUM_OF_ZEROS,
    "reduce/reduce_nested/002": returns(8, "Maps over the nest.", {"tuple": [_SIX, _SIX]}, reduce_nested),
}
NO_COUNTERPART: dict[str, str] = {}
