"""Tables whose lookups scale rows in place (``max_norm``): is every other use of one, in a step that looks rows up,
that of one device, or refused? A replica scales the rows of its own part of the batch alone.

Rows: what else the step does with the table. Columns: how it looks rows up. A cell trains for four steps on global
batches whose replicas look other rows up, and compares with a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch import tensor as copied
from torch.utils.checkpoint import checkpoint

import torchstrat as ts
from tests.matrix import places
from tests.matrix.scaled_table_faults import FAULTS
from tests.matrix.table import (
    RIGHT,
    Cell,
    Expected,
    Table,
    assert_close,
    refused,
)
from torchstrat.errors import UnsupportedError

HEIGHT, WIDTH, NORM = 40, 5, 0.8
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """A column: how rows are looked up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = torch.randn(HEIGHT, WIDTH, dtype=torch.float64)
        self.table = self.make(made)
        self.head = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("kept", made.clone())
        self.runs = 0

    @property
    def weight(self) -> torch.Tensor:
        weight = self.table.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def make(self, values: torch.Tensor) -> nn.Module:
        table = nn.Module()
        table.weight = nn.Parameter(values)
        return table

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids``: (rows, 2); (rows, width)."""
        raise NotImplementedError


class _OfEmbedding(Net):
    def make(self, values: torch.Tensor) -> nn.Module:
        return nn.Embedding.from_pretrained(values, freeze=False, max_norm=NORM)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(ids)
        return found.mean(1)


class _OfEmbeddingBag(Net):
    def make(self, values: torch.Tensor) -> nn.Module:
        return nn.EmbeddingBag.from_pretrained(values, freeze=False, max_norm=NORM)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(ids)
        return found


class _ByFunction(Net):
    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight, max_norm=NORM).mean(1)


class _ByPosition(Net):
    """Its code does not say so."""

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight, None, NORM).mean(1)


NETS: Mapping[str, type[Net]] = {
    "nn.Embedding": _OfEmbedding,
    "nn.EmbeddingBag": _OfEmbeddingBag,
    "functional.embedding": _ByFunction,
    "functional.embedding by position": _ByPosition,
}
POSITION = "functional.embedding by position"


def _loss(found: torch.Tensor, net: Net, batch: Batch) -> torch.Tensor:
    return (net.head(found) - batch[1]).square().mean()


def _scores(net: Net, found: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (net.head(found) @ table.T).square().mean() * 0.1


Use = Callable[[Net, Batch], torch.Tensor]


def _alone(net: Net, batch: Batch) -> torch.Tensor:
    return _loss(net.look_up(batch[0]), net, batch)


def _twice(net: Net, batch: Batch) -> torch.Tensor:
    return _loss(net.look_up(batch[0]) + net.look_up((batch[0] + 1) % HEIGHT), net, batch)


def _tied(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    return _loss(found, net, batch) + _scores(net, found, net.weight)


def _without_gradient(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    with torch.no_grad():
        by = net.weight.norm()
    return _loss(found, net, batch) * by


def _detached(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    return _loss(found, net, batch) + _scores(net, found, net.weight.detach())


def _data(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    return _loss(found, net, batch) + _scores(net, found, net.weight.data)


def _read(net: Net, batch: Batch, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    found = net.look_up(batch[0])
    return _loss(found, net, batch) + _scores(net, found, read(net.weight.requires_grad_(False)))


def _assigned(weight: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(1, dtype=weight.dtype)
    made.data = weight
    return made


def _copied(weight: torch.Tensor) -> torch.Tensor:
    return torch.asarray(weight, copy=True, requires_grad=False)


def _array_before(
    net: Net, batch: Batch, make: Callable[[torch.Tensor], Any] = lambda weight: weight.numpy()
) -> torch.Tensor:
    array = make(net.weight.detach())
    found = net.look_up(batch[0])
    return _loss(found, net, batch) * float((array**2).sum())


def _array_attribute(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    return _loss(found, net, batch) * float((net.array**2).sum())


def _attribute(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    return _loss(found, net, batch) + _scores(net, found, net.same)


def _later(net: Net, batch: Batch, use: Use) -> torch.Tensor:
    """Operators are listened to in the first run alone."""
    net.runs += 1
    return (use if net.runs > 1 else _alone)(net, batch)


def _hooked(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    net.weight.register_hook(lambda gradient: gradient * 0.5)
    return _loss(found, net, batch)


def _buffer(net: Net, batch: Batch) -> torch.Tensor:
    return _loss(F.embedding(batch[0], net.kept, max_norm=NORM).mean(1), net, batch)


def _view_before(net: Net, batch: Batch) -> torch.Tensor:
    view = net.weight[:]
    found = net.look_up(batch[0])
    return _loss(found, net, batch) + _scores(net, found, view)


def _alias_before(net: Net, batch: Batch, alias: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    same = alias(net.weight)
    found = net.look_up(batch[0])
    return _loss(found, net, batch) + _scores(net, found, same)


def _before(net: Net, batch: Batch) -> torch.Tensor:
    by = net.weight.sum()
    return _loss(net.look_up(batch[0]), net, batch) + by * 0.01


def _norm_before(net: Net, batch: Batch) -> torch.Tensor:
    by = net.weight.detach().norm()
    return _loss(net.look_up(batch[0]), net, batch) * by


def _many(batch: Batch) -> torch.Tensor:
    """Ids of which some are looked up with the other replica's rows."""
    return (batch[0][:, :1] + torch.arange(HEIGHT // 2)) % HEIGHT


def _other_norm(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    return _loss(found + F.embedding(_many(batch), net.weight, max_norm=0.5).mean(1), net, batch)


def _without_norm(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    return _loss(found + F.embedding(_many(batch), net.weight).mean(1), net, batch)


def _edited(net: Net, batch: Batch, edit: Callable[[torch.Tensor], object]) -> torch.Tensor:
    loss = _alone(net, batch)
    with torch.no_grad():
        edit(net.weight)
    return loss


_decayed = partial(_edited, edit=lambda weight: weight.mul_(0.9))
_shifted = partial(_edited, edit=lambda weight: weight.add_(0.5))


def _decayed_and_looked_up(net: Net, batch: Batch) -> torch.Tensor:
    net.look_up(batch[0])
    with torch.no_grad():
        net.weight.mul_(0.5)
    return _alone(net, (_many(batch), batch[1]))


def _on_another(net: Net, batch: Batch, looks_up: int) -> torch.Tensor:
    """One replica looks rows up, the other one uses the table as a whole."""
    context = ts.get_replica_context()
    if context is None or context.replica_id_in_sync_group == looks_up or context.num_replicas_in_sync == 1:
        return _alone(net, batch)
    return _loss(net.weight[:1], net, batch) * net.weight.norm()


def _on_one_alone(net: Net, batch: Batch) -> torch.Tensor:
    """The other replica leaves the table alone."""
    context, features, half = ts.get_replica_context(), batch[1] * 0.5, len(batch[0]) // 2
    if context is None or context.num_replicas_in_sync == 1:
        return _loss(torch.cat([net.look_up(batch[0][:half]), features[half:]]), net, batch)
    return _loss(features if context.replica_id_in_sync_group else net.look_up(batch[0]), net, batch)


def _computed(net: Net, batch: Batch) -> torch.Tensor:
    table = net.weight * 2
    found = F.embedding(batch[0], table, max_norm=NORM).mean(1)
    return _loss(found, net, batch) + _scores(net, found, table)


def _through_a_view(net: Net, batch: Batch) -> torch.Tensor:
    found = F.embedding(batch[0] % 20, net.weight[:20], max_norm=NORM).mean(1)
    return _loss(found, net, batch) + _scores(net, found, net.weight)


def _recomputed(net: Net, batch: Batch) -> torch.Tensor:
    found = checkpoint(net.look_up, batch[0], use_reentrant=False)
    return _loss(found, net, batch)


def _compiled_use(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    scores = torch.compile(_scores, backend="aot_eager", dynamic=True)
    return _loss(found, net, batch) + scores(net, found, net.weight)


def _compiled_lookups(net: Net, batch: Batch) -> torch.Tensor:
    return torch.compile(_alone, backend="aot_eager", dynamic=True)(net, batch)


def _compiled_whole(net: Net, batch: Batch) -> torch.Tensor:
    return torch.compile(_tied, backend="aot_eager", dynamic=True)(net, batch)


# -- steps -----------------------------------------------------------------------------------------------------------

Step = Callable[[Net, torch.optim.Optimizer, Use, Batch], None]


def _by_backward(net: Net, optimizer: torch.optim.Optimizer, use: Use, batch: Batch) -> None:
    optimizer.zero_grad()
    use(net, batch).backward()
    optimizer.step()


def _by_grad(net: Net, optimizer: torch.optim.Optimizer, use: Use, batch: Batch) -> None:
    parameters = list(net.parameters())
    found = torch.autograd.grad(use(net, batch), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    optimizer.step()


def _by_closure(net: Net, optimizer: torch.optim.Optimizer, use: Use, batch: Batch) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = use(net, batch)
        loss.backward()
        return float(loss)

    optimizer.step(closure)


def _then_read(net: Net, optimizer: torch.optim.Optimizer, use: Use, batch: Batch) -> None:
    _by_backward(net, optimizer, use, batch)
    net.seen += net.weight.detach().norm()


def _without_step(net: Net, optimizer: torch.optim.Optimizer, use: Use, batch: Batch) -> None:
    with torch.no_grad():
        net.seen += use(net, batch)


def _in_two_parts(net: Net, optimizer: torch.optim.Optimizer, use: Use, batch: Batch) -> None:
    optimizer.zero_grad()
    half = len(batch[0]) // 2
    for part in ((batch[0][:half], batch[1][:half]), (batch[0][half:], batch[1][half:])):
        (use(net, part) / 2).backward()
    optimizer.step()


def _after_merge_call(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    ts.get_replica_context().merge_call(lambda strategy: None)
    return _loss(found, net, batch)


def _in_merge_call(net: Net, batch: Batch) -> torch.Tensor:
    found = net.look_up(batch[0])
    by = ts.get_replica_context().merge_call(lambda strategy: float(net.weight.detach().norm()))
    return _loss(found, net, batch) * by


def _by_two_optimizers(net: Net, optimizer: torch.optim.Optimizer, use: Use, batch: Batch) -> None:
    """The first one steps all but the table."""
    optimizer.zero_grad()
    use(net, batch).backward()
    net.of_head.step()
    optimizer.step()


def _frozen(net: Net, batch: Batch) -> torch.Tensor:
    net.weight.requires_grad_(False)
    return _alone(net, batch)


def _frozen_and_used(net: Net, batch: Batch) -> torch.Tensor:
    net.weight.requires_grad_(False)
    return _tied(net, batch)


def _sgd(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def _lbfgs(net: Net) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)


OF_BUFFER = refused(
    UnsupportedError,
    r"looks rows up with max_norm in \w+\.kept, a buffer.*torch\.nn\.Parameter\(table, requires_grad=False\)",
    "a buffer becomes the mean of what replicas have scaled",
)
REFUSED = refused(
    UnsupportedError,
    r"has max_norm, and the step uses it .* beside looking rows up",
    "each replica has scaled only rows of its own part of the batch; scale all after the optimizer's step",
)


def nothing(net: Net) -> object:
    return None


class Row(NamedTuple):
    use: Use
    expected: Expected = RIGHT
    step: Step = _by_backward
    optimizer: Callable[[Net], torch.optim.Optimizer] = _sgd
    runs: int = 4
    compiled_before: bool = False
    """Whether functions are compiled before the strategy's first run."""
    between: Callable[[Net], object] = nothing
    """What the program does before each run."""


def _with_alias(net: Net) -> torch.optim.Optimizer:
    net.same = net.weight.data
    return _sgd(net)


def _with_array(net: Net) -> torch.optim.Optimizer:
    net.array = net.weight.detach().numpy()
    return _sgd(net)


@torch.no_grad()
def _shift(net: Net) -> None:
    net.weight.add_(0.5)


def _of_table(net: Net) -> torch.optim.Optimizer:
    net.of_head = torch.optim.SGD(net.head.parameters(), lr=0.1)
    return torch.optim.SGD([net.weight], lr=0.1)


ROWS: Mapping[str, Row] = {
    "nothing else": Row(_alone),
    "nothing else, the table frozen": Row(_frozen),
    "a merge_call": Row(_after_merge_call),
    "another optimizer's step": Row(_alone, step=_by_two_optimizers, optimizer=_of_table),
    "looked up twice": Row(_twice),
    "looked up in two parts of a batch": Row(_alone, step=_in_two_parts),
    "looked up again while backward recomputes": Row(_recomputed),
    "gradients by autograd.grad": Row(_alone, step=_by_grad),
    "a closure": Row(_alone, step=_by_closure),
    "a closure, evaluated several times": Row(_alone, step=_by_closure, optimizer=_lbfgs),
    "used before the lookup": Row(_before),
    "used before the lookup, without gradient": Row(_norm_before),
    "used after the optimizer's step": Row(_alone, step=_then_read),
    "scaled by a number": Row(_decayed),
    "looked up in a compiled function": Row(_compiled_lookups),
    "scaled by a number, and looked up": Row(_decayed_and_looked_up, REFUSED),
    "changed otherwise": Row(_shifted, REFUSED),
    "changed otherwise, between runs": Row(_alone, between=_shift),
    "used as a whole": Row(_tied, REFUSED),
    "used as a whole, by autograd.grad": Row(_tied, REFUSED, _by_grad),
    "used as a whole, in a closure": Row(_tied, REFUSED, _by_closure),
    "used without gradient": Row(_without_gradient, REFUSED),
    "used as a whole, the table frozen": Row(_frozen_and_used, REFUSED),
    "looked up on one replica alone": Row(_on_one_alone),
    "used where another one looks up": Row(partial(_on_another, looks_up=0), REFUSED),
    "used where another one looks up, before": Row(partial(_on_another, looks_up=1), REFUSED),
    "used where another one looks up, without a step": Row(partial(_on_another, looks_up=1), REFUSED, _without_step),
    "used in a merge_call": Row(_in_merge_call, REFUSED),
    "used by detach()": Row(_detached, REFUSED),
    "used by .data": Row(_data, REFUSED),
    "used by a view from before": Row(_view_before, REFUSED),
    "used by torch.asarray": Row(partial(_read, read=_copied), REFUSED),
    "used by new_tensor": Row(partial(_read, read=lambda weight: weight.new_empty(0).new_tensor(weight)), REFUSED),
    "used by torch.tensor, imported": Row(partial(_read, read=copied), REFUSED),
    "used by an assignment to .data": Row(partial(_read, read=_assigned), REFUSED),
    "used by as_subclass": Row(partial(_read, read=lambda weight: weight.as_subclass(torch.Tensor)), REFUSED),
    "used by torch.DoubleTensor": Row(partial(_read, read=lambda weight: torch.DoubleTensor(weight)), REFUSED, runs=1),
    "used by DLPack from before": Row(
        partial(_alias_before, alias=lambda weight: torch.from_dlpack(weight.detach())), REFUSED, runs=1
    ),
    "used by NumPy from before": Row(_array_before, REFUSED),
    "used by NumPy from before, in the first run": Row(_array_before, REFUSED, runs=1),
    "used by NumPy from before the run": Row(_array_attribute, REFUSED, optimizer=_with_array, runs=1),
    "used by NumPy from before the run, in the second run": Row(
        partial(_later, use=_array_attribute), REFUSED, optimizer=_with_array
    ),
    "used by NumPy over DLPack": Row(partial(_array_before, make=np.from_dlpack), REFUSED, runs=1),
    "used by NumPy over DLPack, in the second run": Row(
        partial(_later, use=partial(_array_before, make=np.from_dlpack)), REFUSED
    ),
    "used by a copy of NumPy's from before": Row(partial(_array_before, make=lambda weight: weight.numpy().copy())),
    "used by an attribute from before the run": Row(_attribute, REFUSED, optimizer=_with_alias),
    "used by an attribute from before, in the second run": Row(
        partial(_later, use=_attribute), REFUSED, optimizer=_with_alias
    ),
    "used by a view from before, in the second run": Row(partial(_later, use=_view_before), REFUSED),
    "used by torch.asarray, in the second run": Row(partial(_later, use=partial(_read, read=_copied)), REFUSED),
    "used by new_tensor, in the second run": Row(
        partial(_later, use=partial(_read, read=lambda weight: weight.new_empty(0).new_tensor(weight))), REFUSED
    ),
    "a hook is registered": Row(_hooked),
    "a buffer is looked up": Row(_buffer, OF_BUFFER),
    "used by a view from before, in the first run": Row(_view_before, REFUSED, runs=1),
    "used by .data from before, in the first run": Row(
        partial(_alias_before, alias=lambda weight: weight.data), REFUSED, runs=1
    ),
    "used by detach() from before, in the first run": Row(
        partial(_alias_before, alias=torch.Tensor.detach), REFUSED, runs=1
    ),
    "used where another one looks up, before, in the first run": Row(partial(_on_another, looks_up=1), REFUSED, runs=1),
    "looked up with another norm": Row(_other_norm, REFUSED),
    "looked up without a norm": Row(_without_norm, REFUSED),
    "a part is looked up": Row(_through_a_view, REFUSED),
    "a table that the step computes": Row(_computed, REFUSED),
    "used in a compiled function": Row(_compiled_use, REFUSED),
    "looked up and used in a compiled function": Row(_compiled_whole, REFUSED),
    "looked up and used in a function compiled before": Row(_compiled_whole, REFUSED, compiled_before=True),
    "looked up in a function compiled before": Row(_compiled_lookups, compiled_before=True),
}

COLUMNS = tuple(NETS)
UNSEEN = refused(
    UnsupportedError,
    rf"{REFUSED.says}|"
    r"looks rows of \w+\.weight .* up with max_norm, and not on every replica.* Give max_norm by its name",
    "in the first run nobody knows what has used a table before it is known to be one",
)

PLACES = ("mirrored x2", "central_storage x2", *places.TORCHRUN)


def _batches() -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, HEIGHT, (8, 2), generator=draw),
            torch.randn(8, WIDTH, generator=draw, dtype=torch.float64),
        )
        for _ in range(4)
    ]


def _check(row: Row, column: str, place: str) -> None:
    torch.compiler.reset()
    plain = NETS[column]()
    optimizer = row.optimizer(plain)
    for batch in _batches()[: row.runs]:
        row.between(plain)
        row.step(plain, optimizer, row.use, batch)
    if not row.compiled_before:
        torch.compiler.reset()
    with places.opened(place) as strategy:
        with strategy.scope():
            net = NETS[column]()
            optimizer = row.optimizer(net)
        step = partial(row.step, net, optimizer, row.use)
        for batch in strategy.distribute_dataset(_batches()[: row.runs]):
            row.between(net)
            strategy.run(step, args=batch and (batch,))
        strategy.extended.check_replicas()
        assert_close(dict(net.state_dict()), dict(plain.state_dict()))


def _expected(row: str, column: str, place: str) -> Expected:
    """Where the code does not say what is a table, the first run has to find out. In one process the second replica
    knows it."""
    if column == POSITION and "another one looks up" in row:
        return UNSEEN
    if column == POSITION and row == "looked up on one replica alone" and place in places.TORCHRUN:
        return UNSEEN
    return ROWS[row].expected


def cells() -> Iterator[Cell]:
    for row_name, row in ROWS.items():
        for column in COLUMNS:
            for place in PLACES:
                check = partial(_check, row, column, place)
                yield Cell(row_name, column, place, check, _expected(row_name, column, place))


TABLE = Table(
    name="scaled_tables",
    question="Is every other use of a table whose lookups scale rows that of one device, or refused?",
    make_cells=cells,
    always=(
        "a closure | nn.Embedding | torchrun central_storage",
        "a closure, evaluated several times | nn.EmbeddingBag | torchrun central_storage",
        "a merge_call | functional.embedding | mirrored x2",
        "used as a whole, in a closure | functional.embedding | torchrun central_storage",
    ),
    faults=FAULTS,
    alike=places.launch_of,
)
