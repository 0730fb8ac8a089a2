"""Losses over the global batch: is the gradient that of one device, whatever a loss divides by and looks at?

Rows: what the loss is. Columns: how the global batch falls on the replicas. A cell trains two linear layers for four
steps and compares their weights with a plain loop on the global batches.

Left out: three replicas under torchrun, whose launches here have two processes; the arithmetic is that of two. A
replica without rows under three replicas is not another case than under two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import torchstrat as ts
from tests.matrix import places
from tests.matrix.table import RIGHT, Cell, Expected, PlantedFault, Table, assert_close, cells_at, refused
from torchstrat import ReduceOp
from torchstrat.core import losses as own_losses
from torchstrat.core.values import DistributedValues
from torchstrat.errors import ContextError, InvalidArgumentError, UnsupportedError
from torchstrat.replicas import engine, exchange
from torchstrat.replicas.engine import StepWeights
from torchstrat.replicas.gradient_reducer import GradientReducer

CLASSES, FEATURES = 5, 6
Batch = tuple[torch.Tensor, ...]


class Row(NamedTuple):
    loss: Callable[[nn.ModuleList, Batch], torch.Tensor]
    """Of this replica's rows."""
    summed: bool = False
    """Whether gradients are summed over replicas."""
    plain: Callable[[nn.ModuleList, Batch], torch.Tensor] | None = None
    """The loss on one device, where it is not the same."""
    expected: Expected = RIGHT
    prepared: bool = False
    """Whether the step is given what a run before it returned of the batch."""
    beside: bool = False
    """Whether the run is given a second batch, which is split evenly."""
    expected_beside: Expected = RIGHT
    """Where replicas have another part of the first batch than of the second."""


def _scores(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    scores: torch.Tensor = model[0](batch[0])
    return scores


def _mean(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    return (_scores(model, batch) - batch[2]).square().mean()


def _sum(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    return (_scores(model, batch) - batch[2]).square().sum()


def _average_loss(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    per_row = (_scores(model, batch) - batch[2]).square().mean(dim=1)
    rows = ts.get_replica_context().all_reduce("sum", torch.tensor(len(per_row)))
    return ts.compute_average_loss(per_row, global_batch_size=int(rows))


def _labels_plainly(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(_scores(model, batch), batch[1], ignore_index=0)


def _labels(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    total = F.cross_entropy(_scores(model, batch), batch[1], ignore_index=0, reduction="sum")
    return ts.global_mean(total, (batch[1] != 0).sum())


def _labels_by_weight(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    count = (batch[1] != 0).sum()
    ts.get_replica_context().set_weight(float(count))
    return F.cross_entropy(_scores(model, batch), batch[1], ignore_index=0, reduction="sum") / count.clamp(min=1)


def _two_losses(
    labels: Callable[[nn.ModuleList, Batch], torch.Tensor], model: nn.ModuleList, batch: Batch
) -> torch.Tensor:
    """One by rows and one by labels, in one backward pass: no weight of the replica fits both."""
    return _mean(model, batch) + labels(model, batch)


WEIGHTS = torch.tensor([0.3, 1.0, 2.0, 0.1, 4.0], dtype=torch.float64)


def _class_weights_plainly(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(_scores(model, batch), batch[1], weight=WEIGHTS)


def _class_weights(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    total = F.cross_entropy(_scores(model, batch), batch[1], weight=WEIGHTS, reduction="sum")
    return ts.global_mean(total, WEIGHTS[batch[1]].sum())


def _features(model: nn.ModuleList, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return F.normalize(model[0](batch[0]), dim=1), F.normalize(model[1](batch[2]), dim=1)


def _contrast_plainly(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    u, v = _features(model, batch)
    return F.cross_entropy(u @ v.T, torch.arange(len(u)))


def _contrast_whole(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    u, v = ts.get_replica_context().all_gather(_features(model, batch), axis=0)
    return F.cross_entropy(u @ v.T, torch.arange(len(u)))


def _contrast_own_rows(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(*_own_rows(model, batch))


def _contrast_summed(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    scores, labels = _own_rows(model, batch)
    return ts.global_mean(F.cross_entropy(scores, labels, reduction="sum"), len(labels))


def _own_rows(model: nn.ModuleList, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    context = ts.get_replica_context()
    u, v = _features(model, batch)
    v = context.all_gather(v, axis=0)
    rows = context.all_gather(torch.tensor([len(u)]), axis=0)
    # Those without rows are not in the run, so the place among its replicas is not always the replica's id.
    before = int(rows[: min(context.replica_id_in_sync_group, len(rows) - 1)].sum())
    return u @ v.T, torch.arange(len(u)) + before


def _reduced(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    """The square of the mean score over the global batch: no mean of per-row losses."""
    context = ts.get_replica_context()
    scores = _scores(model, batch)
    total, count = context.all_reduce("sum", [scores.sum(dim=0), torch.tensor(float(len(scores)))])
    return ((total / count) ** 2).sum() + _mean(model, batch)


def _reduced_plainly(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    return (_scores(model, batch).mean(dim=0) ** 2).sum() + _mean(model, batch)


def _two_batches(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    return _mean(model, batch[:3]) + _mean(model, batch[3:])


def _two_batches_whole(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    first, second = (ts.global_mean(_sum(model, one), one[2].numel()) for one in (batch[:3], batch[3:]))
    return first + second


def _two_batches_summed(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    return _sum(model, batch[:3]) + _sum(model, batch[3:])


def _scaled_rows(model: nn.ModuleList, batch: Batch) -> torch.Tensor:
    """A lookup scales rows of the table, in place."""
    rows: torch.Tensor = model[2](batch[1])
    return (_scores(model, batch) + rows - batch[2]).square().mean()


ROWS: Mapping[str, Row] = {
    "mean": Row(_mean),
    "sum": Row(_sum, summed=True),
    "mean, from shares": Row(_average_loss, summed=True, plain=_mean),
    "by labels": Row(_labels, plain=_labels_plainly),
    "by labels, summed": Row(_labels, summed=True, plain=_labels_plainly),
    "by labels, set_weight": Row(_labels_by_weight, plain=_labels_plainly),
    "by rows and by labels": Row(partial(_two_losses, _labels), plain=partial(_two_losses, _labels_plainly)),
    "by class weights": Row(_class_weights, plain=_class_weights_plainly),
    "by class weights, summed": Row(_class_weights, summed=True, plain=_class_weights_plainly),
    "gathered features, whole": Row(_contrast_whole, plain=_contrast_plainly),
    "gathered features, own rows": Row(_contrast_own_rows, plain=_contrast_plainly),
    "gathered features, own rows, summed": Row(_contrast_summed, summed=True, plain=_contrast_plainly),
    "from all_reduce": Row(_reduced, plain=_reduced_plainly),
    "results of a run": Row(_mean, prepared=True),
    "two batches": Row(
        _two_batches,
        beside=True,
        expected_beside=refused(
            InvalidArgumentError,
            "batches of which replicas have different shares: .* rows of one and .* of another",
            "no one weight of a replica is right for both; global_mean, or drop_last=True",
        ),
    ),
    "two batches, global_mean": Row(_two_batches_whole, plain=_two_batches, beside=True),
    "two batches, summed": Row(_two_batches_summed, summed=True, beside=True),
    "table with max_norm": Row(_scaled_rows),
}

COLUMNS: Mapping[str, tuple[int, ...]] = {
    "even": (8, 12, 4, 8),
    "uneven": (8, 5, 7, 3),
    "no rows": (8, 1, 5, 1),
    "three replicas": (9, 7, 4, 5),
}
"""The rows of each global batch."""

BESIDE = (12, 12, 12, 12)
"""The same of what comes beside it."""

TWO = ("mirrored x2", "central_storage x2", *places.TORCHRUN, places.TPU)
THREE = ("mirrored x3", "central_storage x3")


def _batches(rows: tuple[int, ...], seed: int = 1) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(count, FEATURES, generator=draw, dtype=torch.float64),
            # Every global batch has a label that counts; which replica has how many is left to chance.
            torch.randint(0, CLASSES, (count,), generator=draw).index_fill_(0, torch.tensor([0]), 1),
            torch.randn(count, CLASSES, generator=draw, dtype=torch.float64),
        )
        for count in rows
    ]


def _build() -> tuple[nn.ModuleList, torch.optim.Optimizer]:
    torch.manual_seed(0)
    table = nn.Embedding(CLASSES, CLASSES, max_norm=0.8)
    model = nn.ModuleList([nn.Linear(FEATURES, CLASSES), nn.Linear(CLASSES, CLASSES), table]).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _step(
    model: nn.ModuleList,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.ModuleList, Batch], torch.Tensor],
    batch: Batch,
    beside: Batch = (),
) -> None:
    optimizer.zero_grad()
    loss_of(model, (*batch, *beside)).backward()
    optimizer.step()


def _copied(batch: Batch) -> Batch:
    return tuple(one.clone() for one in batch)


def _check(row: Row, rows: tuple[int, ...], place: str) -> None:
    plain, optimizer = _build()
    all_batches = [_batches(rows), *([_batches(BESIDE, 2)] if row.beside else [])]
    for given in zip(*all_batches, strict=True):
        _step(plain, optimizer, row.plain or row.loss, *given)
    with places.opened(place, **({"gradient_reduce_op": "sum"} if row.summed else {})) as strategy:
        with strategy.scope():
            model, optimizer = _build()
        step = partial(_step, model, optimizer, row.loss)
        for given in zip(*map(strategy.distribute_dataset, all_batches), strict=True):
            strategy.run(step, args=(strategy.run(_copied, args=given),) if row.prepared else given)
        strategy.extended.check_replicas()
        assert_close(dict(model.state_dict()), dict(plain.state_dict()))


_NEEDS_A_VALUE = refused(
    ContextError, r"\(tensor\).* in a step needs a value", "on a TPU one program is recorded for all replicas"
)
ON_TPU: Mapping[str, Expected] = {
    "by labels, set_weight": _NEEDS_A_VALUE,
    "gathered features, own rows": _NEEDS_A_VALUE,
    "gathered features, own rows, summed": _NEEDS_A_VALUE,
    "table with max_norm": refused(UnsupportedError, "max_norm.*global_view=True", "replicas share the table"),
}


def cells() -> Iterator[Cell]:
    for row_name, row in ROWS.items():
        for column, rows in COLUMNS.items():
            for place in THREE if column == "three replicas" else TWO:
                expected = row.expected_beside if row.beside and column != "even" else row.expected
                if place == places.TPU:
                    expected = ON_TPU.get(row_name, expected)
                yield Cell(row_name, column, place, partial(_check, row, rows, place), expected)


# -- planted faults --------------------------------------------------------------------------------------------------


def _sees_each(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[object]]:
    """The function, replaced by what ``make`` makes of it."""
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


FAULTS = (
    PlantedFault(
        "gradients from other replicas come without their weight",
        _sees_each(StepWeights, "relative", lambda _: lambda self, replica: 1.0),
        cells_at("gathered features, own rows", "uneven", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "gradients from other replicas keep their weight where they arrive",
        _sees_each(
            exchange,
            "_combined_by_weight",
            lambda found: lambda engine, op, gradients: [one * 1.1 for one in found(engine, op, gradients)],
        ),
        cells_at("gathered features, whole", "even"),
    ),
    PlantedFault(
        "the backward of all_gather keeps to this replica's own loss",
        _sees_each(exchange, "_combined_by_weight", lambda _: lambda engine, op, gradients: list(gradients)),
        cells_at("gathered features, own rows", "even"),
    ),
    PlantedFault(
        "replicas count alike whatever rows they have",
        _sees_each(StepWeights, "of_gradients", lambda _: lambda self, op, replica: 1.0),
        cells_at("mean", "uneven"),
    ),
    PlantedFault(
        "of several batches the first one's rows count",
        _sees_each(engine, "_has_equal_shares", lambda _: lambda one, other: True),
        cells_at("two batches", "uneven", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "results of a run do not say how many rows they have",
        lambda: patch.object(
            DistributedValues, "weights", property(lambda self: None, lambda self, value: None), create=True
        ),
        cells_at("results of a run", "uneven", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "set_weight is not heard",
        _sees_each(StepWeights, "override", lambda _: lambda self, replica, weight: None),
        cells_at("by labels, set_weight", "even", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "a sum is divided by the replicas",
        _sees_each(GradientReducer, "_factors_of", lambda _: lambda self, tensor: (1.0, 1.0 / len(self.shares))),
        cells_at("sum", "even"),
    ),
    PlantedFault(
        "global_mean takes summed gradients for averaged ones",
        lambda: patch.object(own_losses, "ReduceOp", type("Neither", (), {"SUM": "SUM"})),
        cells_at("by labels, summed", "even"),
    ),
    PlantedFault(
        "global_mean divides by what this replica has",
        _sees_each(
            ts.ReplicaContext,
            "all_reduce",
            lambda found: (
                lambda self, op, value: (
                    [found(self, op, value[0]), value[1]] if isinstance(value, list) else found(self, op, value)
                )
            ),
        ),
        cells_at("by labels", "uneven"),
    ),
    PlantedFault(
        "one replica is weighed as if it had a row more",
        _sees_each(StepWeights, "of_gradients", lambda found: lambda *run: found(*run) + float(run[-1] == 1)),
        cells_at("mean", "no rows"),
    ),
    PlantedFault(
        "the backward of all_reduce is a mean",
        _sees_each(
            exchange,
            "_combined_by_weight",
            lambda found: lambda engine, op, gradients: found(engine, ReduceOp.MEAN, gradients),
        ),
        cells_at("from all_reduce", "even", "mirrored x2"),
    ),
)

TABLE = Table(
    name="losses",
    question="Is the gradient of a loss over the global batch that of one device?",
    make_cells=cells,
    faults=FAULTS,
    alike=places.launch_of,
)
