"""What a step itself makes, on every replica: modules and leaf tensors, each with an optimizer; and modules that it
makes where there is none yet, which the other replicas of one process find, and changes without calling them.

Rows: what is made. Columns: what becomes of it. A cell compares with a plain loop on the global batches, on two
replicas of two rows: what is of a replica's rows alone is plainly trained on these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torchstrat as ts
from tests.matrix import places
from tests.matrix.table import (
    RIGHT,
    Cell,
    Expected,
    PlantedFault,
    Table,
    assert_close,
    cells_at,
    refused,
    switched_off,
)
from torchstrat.core import reachable
from torchstrat.core.variables import VariableRegistry
from torchstrat.errors import ReplicaDivergenceError, UnsupportedError
from torchstrat.replicas.in_process.component_attributes import ComponentAttributes
from torchstrat.replicas.in_process.component_buffers import ComponentBuffers
from torchstrat.replicas.in_process.components import Components
from torchstrat.replicas.roster import Twins
from torchstrat.sharding.tpu.edits import OwnLeaves

PLACES = ("mirrored x2", "central_storage x2", *places.TORCHRUN, places.TPU)
Kept = dict[str, Any]


class Scaled(nn.Module):
    """A layer with a parameter and a buffer that are drawn."""

    factors: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.rand(3, generator=draw, dtype=torch.float64))
        self.register_buffer("factors", 1 + torch.rand(3, generator=draw, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.factors


def _replica() -> int:
    context = ts.get_replica_context()
    replica = 0 if context is None else context.replica_id_in_sync_group
    return 0 if isinstance(replica, torch.Tensor) else replica  # one call for all replicas


def _module(x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    layer = Scaled(7 + _replica())  # of which the first one's counts, and a plain program's
    return layer, list(layer.parameters())


_ORIGINAL = Scaled(3)


def _copy(x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """What a replica adapts to its own rows."""
    layer = copy.deepcopy(_ORIGINAL)
    return layer, list(layer.parameters())


def _copy_with_another(x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """One of its parameters is made anew."""
    layer, _ = _copy(x)
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    return layer, list(layer.parameters())


def _parameter(x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """In no module."""
    weight = nn.Parameter(_ORIGINAL.weight.detach().clone())
    return weight.__mul__, [weight]


def _leaf(x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """A change of each row, as attacks on a model look for."""
    change = torch.ones(x.shape, dtype=torch.float64, requires_grad=True)
    return change.__mul__, [change]


def _shared_leaf(x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    return weight.__mul__, [weight]


def _train(layer: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        (layer(x) - 1).square().sum(dim=1).mean().backward()
        optimizer.step()


def _by_hand(layer: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Gradients that no backward pass has combined."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    gradients = torch.autograd.grad((layer(x) - 1).square().sum(dim=1).mean(), tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient * 0.5
    optimizer.step()


def _step(make: Callable[[torch.Tensor], Any], becomes: str, kept: Kept, x: torch.Tensor) -> torch.Tensor:
    if becomes != "kept" or not kept:
        layer, tensors = make(x)
        made = {"layer": layer, "optimizer": torch.optim.SGD(tensors, 0.1, momentum=0.5)}
        if becomes in ("kept", "made anew, seen from outside"):
            kept.update(made)
    else:
        made = kept
    train = _by_hand if becomes == "made anew, gradients by hand" else _train
    train(made["layer"], made["optimizer"], x)
    changed: torch.Tensor = made["layer"](x).detach()
    return changed


ROWS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "a module": _module,
    "a deep copy": _copy,
    "a deep copy with another parameter": _copy_with_another,
    "a parameter in no module": _parameter,
    "a leaf tensor of each row": _leaf,
    "a leaf tensor of all rows": _shared_leaf,
}
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "a module": ("made anew", "made anew, gradients by hand", "kept"),
    "a deep copy": ("made anew", "made anew, gradients by hand", "made anew, seen from outside", "kept"),
    "a deep copy with another parameter": ("made anew", "made anew, gradients by hand"),
    "a parameter in no module": ("made anew", "made anew, gradients by hand", "made anew, seen from outside", "kept"),
    "a leaf tensor of each row": ("made anew", "made anew, gradients by hand", "made anew, seen from outside"),
    "a leaf tensor of all rows": ("kept",),
}
"""By row: what has a meaning. A second replica does not see what the first one made anew, and keeps its own."""


def _run(strategy: Any, row: str, column: str) -> torch.Tensor:
    kept: Kept = {}
    step = partial(_step, ROWS[row], column, kept)
    draw = torch.Generator().manual_seed(0)
    batches = [torch.rand(4, 3, generator=draw, dtype=torch.float64) for _ in range(3)]
    if strategy is not None:
        found = [strategy.run(step, args=(batch,)) for batch in strategy.distribute_dataset(batches)]
        return torch.cat([strategy.gather(one, axis=0) for one in found])
    if row.startswith("a deep copy") or row in ("a parameter in no module", "a leaf tensor of each row"):
        return torch.cat([step(half) for batch in batches for half in batch.split(2)])
    return torch.cat([step(batch) for batch in batches])


def _check(row: str, column: str, place: str) -> None:
    wanted = _run(None, row, column)
    with places.opened(place) as strategy:
        seen = _run(strategy, row, column)
    assert_close({"rows": seen}, {"rows": wanted}, 1e-12)


def _expected(row: str, column: str) -> Expected:
    if column == "kept" and row != "a module":
        says = "no variables of the strategy.*within `with strategy.scope"
        return refused(ReplicaDivergenceError, says, "is each replica's own until its optimizer is shared")
    return RIGHT


# -- found by the other replicas of the process ----------------------------------------------------------------------


def _move(average: nn.Module, model: nn.Module, by: float, shrinks: float = 1.0) -> None:
    with torch.no_grad():
        for one, other in zip(average.parameters(), model.parameters(), strict=True):
            one.lerp_(other, by).mul_(shrinks)


class Average(nn.Module):
    """Of a model, faster at first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        _move(self.model, model, 1 / (1 + self.updates))


class Seen(nn.Module):
    """What rows have been like."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def look_at(self, x: torch.Tensor) -> None:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)

    def replace(self, x: torch.Tensor) -> None:
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1


class Found(NamedTuple):
    make: Callable[[nn.Module], Any]
    change: Callable[[Any, nn.Module, torch.Tensor], object]
    first_is_none: bool = False
    """Whether the first change leaves what has just been made as it is."""


FOUND: Mapping[str, Found] = {
    "a deep copy, moved": Found(copy.deepcopy, lambda made, model, x: _move(made, model, 0.3, shrinks=0.9)),
    "an average": Found(Average, lambda made, model, x: made.update(model), first_is_none=True),
    "an AveragedModel": Found(AveragedModel, lambda made, model, x: made.update_parameters(model)),
    "a buffer": Found(lambda model: Seen(), lambda made, model, x: made.look_at(x)),
    "a buffer that is replaced": Found(lambda model: Seen(), lambda made, model, x: made.replace(x)),
}
AFTER, AT_ONCE, TWICE = "found, changed after the step", "found, changed at once", "found, changed on both sides of it"
LATER = ", in a later run"


class _Finding:
    """A program that makes something in its first run or its second."""

    def __init__(self, found: Found, column: str) -> None:
        self.found, self.column = found, column.removesuffix(LATER)
        self.is_due = self.column == column
        torch.manual_seed(3)
        self.model = nn.Linear(3, 3).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.3)
        self.made: Any = None

    def _make(self) -> None:
        if self.made is None and self.is_due:
            self.made = self.found.make(self.model)

    def _change(self, x: torch.Tensor) -> None:
        if self.made is not None:
            self.found.change(self.made, self.model, x)

    def step(self, x: torch.Tensor) -> None:
        if self.column != AT_ONCE:
            self._make()
        if self.column == TWICE:
            self._change(x)
        _train_once(self.model, self.optimizer, x)
        self._make()
        self._change(x)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {**self.model.state_dict(), **{f"made {name}": one for name, one in self.made.state_dict().items()}}


def _train_once(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - 1).square().sum(dim=1).mean().backward()
    optimizer.step()


def _check_found(row: str, column: str, place: str) -> None:
    draw = torch.Generator().manual_seed(0)
    batches = [torch.rand(4, 3, generator=draw, dtype=torch.float64) for _ in range(4)]
    plain = _Finding(FOUND[row], column)
    for batch in batches:
        plain.step(batch)
        plain.is_due = True
    with places.opened(place) as strategy:
        with strategy.scope():
            program = _Finding(FOUND[row], column)
        for batch in strategy.distribute_dataset(batches):
            strategy.run(program.step, args=(batch,))
            program.is_due = True
        assert_close(program.state, plain.state, 1e-12)


def _expected_of_found(row: str, column: str, place: str) -> Expected:
    if place == places.TPU:  # all replicas share what is made
        if row in ("a buffer", "a buffer that is replaced"):
            return refused(
                UnsupportedError, "used outside of the run that it belongs to", "its values are a step's own"
            )
        return RIGHT
    column = column.removesuffix(LATER)
    if place in places.TORCHRUN or column == AFTER or (column == AT_ONCE and FOUND[row].first_is_none):
        return RIGHT
    says = "replica 0 has made .* replica 1, which found it there, has changed it otherwise.*within `with strategy"
    return refused(ReplicaDivergenceError, says, "what was changed before another replica finds it is changed again")


BESIDE = "set in the run that makes a member"


class _Beside(nn.Module):
    """Makes a buffer in its second run, and sets a number: where it makes it (a width), or in every run (a rate)."""

    def __init__(self, row: str) -> None:
        super().__init__()
        self.row, self.runs = row, 0
        self.layer = nn.Linear(3, 3).double()
        self.width, self.rate, self.loss = 1, 1.0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.runs > 1 and "gain" not in self._buffers:
            self.register_buffer("gain", torch.full((3,), 0.5, dtype=torch.float64))
            self.width = 2 if self.row == "a number of the member, one more" else 3
        if self.row == "a number that is lowered":
            self.rate *= 0.9
        if self.row == "a number that grows":
            self.rate += 0.5
        if self.row == "a number that is set anew":
            self.loss = float(self.runs)
        y: torch.Tensor = self.layer(x) * self.width * self.rate
        return y * self.gain if self.runs > 1 else y  # type: ignore[operator]


REFUSED = ("a number that is lowered", "a number that grows", "a number of the member, one more")
NUMBERS = (*REFUSED, "a number that is set anew", "a number of the member")


def _check_beside(row: str, place: str) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = (4, 3, 4) if place == places.TPU else (4, 4, 4)  # for equal numbers a step is recorded once, for all
    batches = [torch.rand(count, 3, generator=draw, dtype=torch.float64) for count in rows]

    def train(steps: Any, run: Callable[..., Any], model: Any) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in steps:
            run(partial(_train_once, model, optimizer), args=(batch,))
        numbers = {name: torch.tensor(float(getattr(model, name))) for name in ("width", "rate", "loss")}
        return {**model.state_dict(), **numbers}

    torch.manual_seed(3)
    plain = train(batches, lambda step, args: step(*args), _Beside(row))
    with places.opened(place) as strategy:
        torch.manual_seed(3)
        with strategy.scope():
            model = _Beside(row)
        assert_close(train(strategy.distribute_dataset(batches), strategy.run, model), plain, 1e-12)


def _expected_beside(row: str, place: str) -> Expected:
    if (place in places.IN_PROCESS or place == places.TPU) and row in REFUSED:
        says = "replica 0 has changed '(rate|width)' of _Beside from .* replica 1 (found|was left).*strategy.scope"
        return refused(ReplicaDivergenceError, says, "whether each replica changes it is seen when it has")
    return RIGHT


def cells() -> Iterator[Cell]:
    for row in NUMBERS:
        for place in PLACES:
            yield Cell(row, BESIDE, place, partial(_check_beside, row, place), _expected_beside(row, place))
    for row in FOUND:
        for column in (one + when for one in (AFTER, AT_ONCE, TWICE) for when in ("", LATER)):
            for place in PLACES:
                check = partial(_check_found, row, column, place)
                yield Cell(row, column, place, check, _expected_of_found(row, column, place))
    for row, columns in COLUMNS.items():
        for column in columns:
            for place in PLACES:
                yield Cell(row, column, place, partial(_check, row, column, place), _expected(row, column))


FAULTS = (
    PlantedFault(
        "each replica's module is its own",
        lambda: patch.object(Twins, "pair", lambda self, module, replica: []),
        ("a module | made anew | mirrored x2",),
    ),
    PlantedFault(
        "what a recorded step makes is one for all replicas",
        lambda: patch.object(OwnLeaves, "is_new", lambda *_: False),
        cells_at("a deep copy", "made anew", places.TPU)
        + cells_at("a parameter in no module", "made anew", places.TPU),
    ),
    PlantedFault(
        "nobody notices an optimizer that a later step goes on with",
        lambda: patch.object(VariableRegistry, "note_step_of", lambda *_: None),
        cells_at("a leaf tensor of all rows", "kept", "torchrun mirrored", places.TPU),
    ),
    PlantedFault(
        "what has been changed before others find it is changed again",
        switched_off(Components, "refuse_changes_of_made", lambda self, *, at_end: None),
        (f"a buffer | {AT_ONCE} | mirrored x2", f"an AveragedModel | {TWICE} | mirrored x2"),
    ),
    PlantedFault(
        "a number that has been told with a member, or has not, counts as it is",
        switched_off(ComponentAttributes, "refuse_other_numbers", lambda self: None),
        (f"a number that is lowered | {BESIDE} | mirrored x2", f"{REFUSED[2]} | {BESIDE} | mirrored x2"),
    ),
    PlantedFault(
        "nobody counts by how many tensors a buffer was replaced",
        switched_off(ComponentBuffers, "note_assignment", lambda self, module, name, replica: None),
        (f"a buffer that is replaced | {AFTER} | mirrored x2",),
    ),
    PlantedFault(
        "what has not been called is one for all replicas",
        switched_off(Components, "_register_unused", lambda self: None),
        (f"a buffer | {AFTER} | mirrored x2",),
    ),
    PlantedFault(
        "attributes of what was made are one for all replicas",
        switched_off(ComponentAttributes, "add", lambda self, modules, owner: None),
        (f"an average | {AFTER} | mirrored x2",),
    ),
    PlantedFault(
        "deep copies are seen in a step's first run only",
        switched_off(reachable.CreationWatch, "note_copy", lambda self: None),
        (f"a deep copy, moved | {TWICE}{LATER} | mirrored x2",),
    ),
)

TABLE = Table(
    name="made_in_steps",
    question="Does what a step itself makes mean what it means on one device?",
    make_cells=cells,
    faults=FAULTS,
    alike=places.launch_of,
)
