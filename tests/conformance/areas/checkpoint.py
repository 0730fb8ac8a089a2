"""`Checkpoint` of variables in shards: any layout restores into any other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.areas.sharded_variable import detached
from tests.conformance.harness import Case, Difference
from torchstrat import Checkpoint, ShardedVariable


def sharded(rows: Sequence[int], values: torch.Tensor) -> ShardedVariable:
    return ShardedVariable([torch.nn.Parameter(part.clone()) for part in values.split(list(rows))])


def moved(saved: Any, restored: Any) -> Any:
    """``restored``, after it has got what ``saved`` had saved."""
    with tempfile.TemporaryDirectory() as folder:
        Checkpoint(v=saved).save(Path(folder) / "checkpoint")
        Checkpoint(v=restored).restore(Path(folder) / "checkpoint")
    return restored


def reshard(case: Case) -> dict[str, Any]:
    rows = case.setup["from_rows"]
    saved = sharded(rows, 10 + torch.arange(float(sum(rows))))
    to_rows = case.setup["to_rows"]
    return {"shards": detached(moved(saved, sharded(to_rows, torch.zeros(sum(to_rows)))))}


def plain_to_sharded(case: Case) -> dict[str, Any]:
    to_rows = case.setup["to_rows"]
    saved = ts.Variable([5.0, 6.0, 7.0, 8.0])
    return {"shards": detached(moved(saved, sharded(to_rows, torch.zeros(sum(to_rows)))))}


def saved_model_load(case: Case) -> dict[str, Any]:
    """What was saved in shards comes back as one ordinary variable."""
    rows = case.setup["from_rows"]
    loaded = moved(sharded(rows, 10 + torch.arange(float(sum(rows)))), ts.Variable(torch.zeros(sum(rows))))
    return {"value": loaded.read_value()}


OPS: dict[str, Callable[[Case], Any]] = {
    "plain_to_sharded": plain_to_sharded,
    "reshard": reshard,
    "saved_model_load": saved_model_load,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
FIELDS_WITHOUT_COUNTERPART = {"type": "is the class that TensorFlow's SavedModel loads variables as"}
