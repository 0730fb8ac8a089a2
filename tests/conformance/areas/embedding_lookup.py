"""`ts.embedding_lookup` and its sparse forms, over tables in shards."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.harness import Case, Difference
from torchstrat.partitioners import row_offsets


def table(case: Case) -> ts.ShardedVariable:
    """``"13x2, value[r,c]=2r+c+0.5"`` in the case's number of shards."""
    [rows, columns] = map(int, re.findall(r"^(\d+)x(\d+), value\[r,c\]=2r\+c\+0\.5$", case.setup["table"])[0])
    whole = 2.0 * torch.arange(rows)[:, None] + torch.arange(columns) + 0.5
    parts = [whole[start:stop] for start, stop in row_offsets(rows, case.setup["shards"])]
    return ts.ShardedVariable([torch.nn.Parameter(part.clone()) for part in parts])


def lookup(dtype: torch.dtype) -> Callable[[Case], Any]:
    def operation(case: Case) -> Any:
        ids = torch.tensor(case.inputs["ids"], dtype=dtype)
        return ts.embedding_lookup(table(case), ids, max_norm=case.inputs.get("max_norm"))

    return operation


def sparse(function: Callable[..., torch.Tensor]) -> Callable[[Case], Any]:
    def operation(case: Case) -> Any:
        given = case.inputs
        indices, shape = torch.tensor(given["indices"]), given["dense_shape"]
        ids = (indices, torch.tensor(given["ids"]), shape)
        weights = None if given["weights"] is None else (indices, torch.tensor(given["weights"]), shape)
        default = {"default_id": given["default_id"]} if "default_id" in given else {}
        return function(table(case), ids, weights, combiner=given["combiner"], **default)

    return operation


OPS: dict[str, Callable[[Case], Any]] = {
    "embedding_lookup": lookup(torch.int64),
    "embedding_lookup_float_ids": lookup(torch.float32),
    "embedding_lookup_int32": lookup(torch.int32),
    "embedding_lookup_max_norm": lookup(torch.int64),
    "embedding_lookup_scalar_id": lookup(torch.int64),
    "embedding_lookup_sparse": sparse(ts.embedding_lookup_sparse),
    "safe_embedding_lookup_sparse": sparse(ts.safe_embedding_lookup_sparse),
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
