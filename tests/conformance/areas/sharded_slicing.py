"""`ts.ShardedVariable`: indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.conformance.areas.sharded_variable import variable_of
from tests.conformance.differences import raises, returns
from tests.conformance.harness import Case, Difference, decode

KEYS: dict[str, Any] = {
    "True": True,
    "[0, 1]": [0, 1],
    "[2:5, 0]": np.s_[2:5, 0],
    "[::2, 1:]": np.s_[::2, 1:],
    "[..., 1]": np.s_[..., 1],
    "[...]": np.s_[...],
    "[newaxis]": np.s_[None],
    "[newaxis, 1:3]": np.s_[None, 1:3],
    "[1, 1]": np.s_[1, 1],
    "[1, -1]": np.s_[1, -1],
    "[0, 5]": np.s_[0, 5],
    "[:, newaxis]": np.s_[:, None],
    "[1.5]": 1.5,
    "['a']": "a",
    "step 0": np.s_[::0],
    "slice(tensor 1, 3)": slice(torch.tensor(1), 3),
    "int tensor 1": torch.tensor(1),
}


def named_key(case: Case) -> torch.Tensor:
    return variable_of(case)[KEYS[case.inputs["index"]]]


def mask(case: Case) -> torch.Tensor:
    values = np.array(case.inputs["mask"])
    return variable_of(case)[values if case.inputs["kind"] == "numpy" else torch.from_numpy(values)]


def sliced(case: Case) -> torch.Tensor:
    return variable_of(case)[slice(*decode(case.inputs["slice"]))]


OPS: dict[str, Callable[[Case], Any]] = {
    "getitem_bool_mask": mask,
    "getitem_bool_mask_slice_bool": named_key,
    "getitem_int": lambda case: variable_of(case)[case.inputs["index"]],
    "getitem_list": named_key,
    "getitem_mixed": named_key,
    "getitem_slice": sliced,
    "getitem_slice_tensor": named_key,
    "getitem_tensor": named_key,
}
NEGATIVE_STEPS = (7, 18, 25, 42, 43, 52, 53, 54, 70, 78, 79, 90)
DIFFERS: dict[str, Difference] = {
    **{
        f"sharded_slicing/getitem_slice/{number:03}": raises(12, ValueError, "step -[0-9]+.*must be positive", sliced)
        for number in NEGATIVE_STEPS
    },
    "sharded_slicing/getitem_mixed/006": returns(
        12,
        "v[None, 1:3] has rows 1 and 2 of the whole variable.",
        {"dtype": "float32", "shape": [1, 2, 2], "data": [[[2.0, 3.0], [4.0, 5.0]]]},
        named_key,
    ),
}
NO_COUNTERPART: dict[str, str] = {}
