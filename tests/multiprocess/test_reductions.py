"""`reduce` and `gather` between processes: results, and errors, are those of one process to the last bit."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import torchstrat as ts
from torchstrat.testing import Workers

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "equal": ((2, 3), (2, 3)),
    "uneven rows": ((2, 3), (4, 3)),
    "no rows": ((2, 3), (0, 3)),
    "uneven columns": ((2, 3), (2, 1)),
    "three dimensions": ((1, 2, 3), (1, 2, 3)),
    "other ranks": ((2, 3), (2,)),
    "large": ((512, 513), (512, 513)),
    "large and uneven": ((512, 513), (2, 513)),
}
"""Of the two ranks' values. Large tensors are added up on the way, small ones collected."""
DTYPES = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32)
Call = Callable[[ts.Strategy, Any], Any]


def calls() -> Iterator[tuple[str, list[torch.Tensor], Call]]:
    """A name, both ranks' values, whole numbers whose sums are exact in any order, and what is called with one."""
    for (name, shapes), dtype in itertools.product(SHAPES.items(), DTYPES):
        draw = torch.Generator().manual_seed(3)
        values = [torch.randint(-9, 10, shape, generator=draw).to(dtype) for shape in shapes]
        for axis in (None, 0, -1, 1, (0, 1)):
            for op in ("sum", "mean"):
                made: Call = lambda s, value, op=op, axis=axis: s.reduce(op, value, axis=axis)  # noqa: E731
                yield f"{op} of {name} {dtype}, {axis}", values, made
            if isinstance(axis, int):
                made = lambda s, value, axis=axis: s.gather(value, axis=axis)  # noqa: E731
                yield f"gather of {name} {dtype}, {axis}", values, made


def outcome(call: Callable[[], torch.Tensor]) -> Any:
    try:
        found = call()
    except ValueError as error:
        return type(error).__name__, str(error)
    return found.dtype, found.shape, zlib.crc32(found.contiguous().numpy().tobytes())


def outcomes(rank: int | None = None) -> dict[str, Any]:
    """In a process, or in this one with both replicas."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"]) if rank is None else ts.MirroredStrategy(["cpu"])
    found = {}
    for name, values, call in calls():
        value = ts.PerReplica(values) if rank is None else strategy.run(lambda: values[rank])  # noqa: B023
        found[name] = outcome(lambda: call(strategy, value))  # noqa: B023
    strategy.close()
    return found


def in_a_process() -> dict[str, Any]:
    return outcomes(int(os.environ["RANK"]))


def test_processes_get_what_one_process_gets(two_processes: Workers) -> None:
    expected = outcomes()
    for found in two_processes.run(in_a_process):
        assert found == expected
