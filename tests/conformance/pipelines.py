"""The ``tf.data`` pipelines that cases name, as datasets of torchstrat and PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

import torchstrat as ts
from tests.conformance.harness import outcome
from torchstrat.core import nest

LIMIT = re.compile(r" \(infinite\), first (\d+) steps")


class Batches(IterableDataset[torch.Tensor]):
    """``from_generator``: batches that are made one by one."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self._batches


def ragged_rows(count: int) -> list[torch.Tensor]:
    """Row ``i``, from 1, holds ``i`` times ``i``."""
    return [torch.full((size,), size) for size in range(1, count + 1)]


def matrix(rows: int) -> torch.Tensor:
    return torch.arange(2 * rows).reshape(rows, 2)


def numbers(count: int) -> ts.data.Pipeline:
    return ts.data.ArrayDataset(torch.arange(count))


def columns(count: int, **functions: Callable[[torch.Tensor], torch.Tensor]) -> ts.data.Pipeline:
    return ts.data.ArrayDataset({name: function(torch.arange(count)) for name, function in functions.items()})


NAMED: dict[str, Callable[[], Any]] = {
    "from_tensor_slices(6x2 matrix) (never batched)": lambda: matrix(6),
    "from_tensors([1,2,3,4]) (one unbatched element)": lambda: torch.tensor([[1, 2, 3, 4]], dtype=torch.int32),
    "zip tuple (x, 10*x) batch 3 of range(5)": lambda: ts.data.ArrayDataset(
        (torch.arange(5), 10 * torch.arange(5))
    ).batch(3),
    "dict {a,b} batch 4 of range(6)": lambda: columns(6, a=torch.clone, b=torch.Tensor.float).batch(4),
    "strings batch 3": lambda: ts.data.ArrayDataset(np.array(["a", "b", "c", "d"], dtype=object)).batch(3),
    "padded_batch 2 ragged rows 1..5": lambda: DataLoader(
        ragged_rows(5),  # type: ignore[arg-type]
        batch_size=2,
        collate_fn=lambda rows: pad_sequence(rows, batch_first=True),
    ),
    "dense_to_ragged_batch(4) rows 1..6": lambda: DataLoader(
        [torch.full((row % 3 + 1,), row) for row in range(1, 7)],  # type: ignore[arg-type]
        batch_size=4,
        collate_fn=lambda rows: torch.nested.nested_tensor(rows, layout=torch.jagged),
    ),
    "from_generator unknown shape, elements [0..3],[4..6]": lambda: Batches([torch.arange(4), torch.arange(4, 7)]),
    "from_generator shape [None], elements [0..3],[4..6]": lambda: Batches([torch.arange(4), torch.arange(4, 7)]),
    "components with different leading dims (4 and 2)": lambda: (torch.arange(4)[None], torch.arange(2)[None]),
    "scalar component next to batch": lambda: [(torch.arange(4), torch.tensor(1))],
    "interleaved batches sizes 4,2 (concatenate)": lambda: [torch.arange(4), torch.arange(2)],
    "variable batch sizes 1,2,3,4": lambda: [torch.arange(size) for size in (1, 2, 3, 4)],
    "generator of 1,2,3,4-row arrays, policy OFF": lambda: Batches([torch.arange(size) for size in (1, 2, 3, 4)]),
    "matrix rows 5x2 batch 4": lambda: ts.data.ArrayDataset(matrix(5)).batch(4),
    "map after batch changes leading dim (x[:2])": lambda: numbers(8).batch(4).map(lambda batch: batch[:2]),
    "python list": lambda: [1, 2, 3],
    "function": lambda: lambda: None,
    "None": lambda: None,
    "tensor": lambda: torch.tensor(1),
}

STAGES: dict[str, Callable[[Any, list[str]], Any]] = {
    "range": lambda _, given: numbers(int(given[0])),
    "batch": lambda source, given: source.batch(int(given[0]), drop_remainder="drop_remainder=True" in given),
    "repeat": lambda source, given: source.repeat(*map(int, given)),
    "take": lambda source, given: source.take(int(given[0])),
    "map": lambda source, given: source.map({"x*2": lambda batch: batch * 2}[given[0]]),
    "unbatch": lambda source, given: source.unbatch(),
    "prefetch": lambda source, given: source.prefetch(int(given[0])),
}


def pipeline(text: str) -> Any:
    """The dataset that a case describes, such as ``range(10).batch(4, drop_remainder=True)``."""
    if text in NAMED:
        return NAMED[text]()
    text = LIMIT.sub("", text)
    text = re.sub(r" \(never batched.*\)|, policy OFF", "", text)
    source = None
    for name, arguments in re.findall(r"(\w+)\(([^)]*)\)", text):
        source = STAGES[name](source, [part.strip() for part in arguments.split(",") if part])
    return source


def limit(text: str) -> int | None:
    """The number of steps after which the recording stopped; None: at the end of the data."""
    found = LIMIT.search(text)
    return int(found[1]) if found else None


def read(dataset: Any, at_most: int | None = None) -> dict[str, Any]:
    """All steps of one pass, and how it ended."""
    steps: list[Any] = []
    iterator = iter(dataset)
    while at_most is None or len(steps) < at_most:
        found = outcome(lambda: next(iterator))
        if isinstance(found, StopIteration):
            return {"steps": steps, "end": "StopIteration"}
        if isinstance(found, Exception):
            raise found
        steps.append(found)
    return {"steps": steps, "end": "limit reached"}


def rows_of(steps: Any) -> list[Any]:
    """Every row that recorded or actual steps hold, in order."""
    if isinstance(steps, ts.PerReplica):
        return rows_of(list(steps.values))
    if isinstance(steps, dict) and "data" in steps:
        return steps["data"] if steps["shape"] else [steps["data"]]
    if isinstance(steps, dict):
        return rows_of(steps["per_replica"])
    if isinstance(steps, list):
        return [row for step in steps for row in rows_of(step)]
    found = nest.flatten(steps)[0].tolist()
    return found if isinstance(found, list) else [found]
