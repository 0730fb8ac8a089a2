"""`ts.partitioners`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.conformance.harness import Case, Difference
from torchstrat import partitioners


def dtype_of(name: str) -> Any:
    return np.dtype(object) if name == "string" else getattr(torch, name)


def called(kind: type[partitioners.Partitioner]) -> Callable[[Case], Any]:
    """The partitioner made with all inputs but ``shape`` and ``dtype``, and called with these."""

    def operation(case: Case) -> Any:
        arguments = {key: value for key, value in case.inputs.items() if key not in ("shape", "dtype", "defaults")}
        partitions = kind(**arguments)(case.inputs["shape"], dtype_of(case.inputs["dtype"]))
        return {"partitions": partitions}

    return operation


OPS: dict[str, Callable[[Case], Any]] = {
    "FixedShardsPartitioner": called(partitioners.FixedShardsPartitioner),
    "MaxSizePartitioner": called(partitioners.MaxSizePartitioner),
    "MaxSizePartitioner_ctor": lambda case: partitioners.MaxSizePartitioner(**case.inputs),
    "MinSizePartitioner": called(partitioners.MinSizePartitioner),
    "MinSizePartitioner_ctor": lambda case: partitioners.MinSizePartitioner(**case.inputs),
    "Partitioner_base": lambda _: partitioners.Partitioner()([4, 2], torch.float32),
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
