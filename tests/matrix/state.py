"""State of synchronous replicas: does it mean what it means on one device, whatever a program does to it, and when?

Rows: the kinds of state, by the rules of `torchstrat.replicas.state_kinds.KINDS`. Columns: what is done to it. A cell
trains a small model, which uses that state in its forward pass or its step, and compares parameters, buffers, rates and
what the step returned with a plain loop on the global batches.

Left out are combinations without a meaning:

* of a row and what cannot be done to it (`Row.can`): a number has no ``.data``, a scheduler has no dtype;
* "differently" for what is each replica's own by its rule (a list, a row of each row), and for random numbers;
* "after a run that raised" for all but parameters and buffers, of which `Strategy.run` speaks;
* a buffer or an attribute with a row for each row of the batch, and batches of other sizes.

Autocast cells are in float32 with a tolerance of 2 in a hundred, since halves of a batch round to bfloat16 otherwise
than the whole; all others in float64.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    documented,
    refused,
    switched_off,
)
from torchstrat.core.buffer_rules import BufferRules
from torchstrat.core.variables import VariableRegistry
from torchstrat.errors import UnsupportedError
from torchstrat.replicas import optimizer_state, table_memory
from torchstrat.replicas.central.state import Entry
from torchstrat.replicas.in_process.component_attributes import ComponentAttributes, ComponentHelpers, KeptAttributes
from torchstrat.replicas.in_process.components import Components
from torchstrat.replicas.per_process.edits import StateEdits
from torchstrat.replicas.state import OwnCopies, TensorSlot
from torchstrat.replicas.state_kinds import KINDS

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Kept:
    """What a module keeps in a data class."""

    scale: float = 1.0
    history: list[float] = field(default_factory=lambda: [1.0])


class Phase(enum.Enum):
    """Its members are there once in a process, whoever has them as an attribute."""

    WHOLE = 1.0
    HALF = 0.5


class Own(list):  # type: ignore[type-arg]
    """A list of a class of its own."""


class Net(nn.Module):
    """Has state of every kind, and uses what the row is about."""

    def __init__(self, row: str) -> None:
        super().__init__()
        self.row = row
        self.first, self.last, self.drop = nn.Linear(6, 5), nn.Linear(5, 3), nn.Dropout(0.0)
        self.table = nn.Parameter(torch.randn(40, 3) * 2)
        self.register_buffer("mean", torch.full((6,), 0.5))
        self.register_buffer("calls", torch.ones((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("holes", torch.tensor([0.5, float("nan")]))
        self.register_buffer("rows", None)
        self.scale, self.history, self.kept, self.mask = 1.0, [1.0], None, torch.ones(5)
        self.carried: list[torch.Tensor] = []
        self.data, self.own, self.phase = Kept(), Own([1.0]), Phase.WHOLE
        self.half = self.mean[:3] if row == "attribute, a view of a buffer" else self.mean
        self.chosen = [self.first.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.row == "table with max_norm":
            ids = (x[:, :2] * 10).long().abs() % 40  # most of them are one replica's alone
            return self.last(self.first(x)) + nn.functional.embedding(ids, self.table, max_norm=1.0).mean(1)
        hidden = torch.tanh(self.first(x - self.mean) * self.scale * self.mask)
        if self.row == "buffer, a count that sums up":
            self.seen += len(x)
        if self.row == "buffer, a row per row":
            rows = hidden.detach() if self.rows is None else hidden.detach() * 0.5 + self.rows
            self.rows, hidden = rows, hidden + rows
        if self.row == "attribute carried on":
            self.carried[:] = [sum((rows * 0.5 for rows in self.carried), start=hidden.detach())]
            hidden = hidden + self.carried[0]
        if self.row == "attribute left by forward":
            self.kept = hidden
        if self.row == "attribute, a view of a buffer":
            hidden = hidden * self.half.sum()
        if self.row == "attribute, list of parameters":
            hidden = hidden * self.chosen[0].mean()
        if self.row == "training mode":
            hidden = hidden * (1.0 if self.drop.training else 0.5)
        scaled = hidden * (self.calls.to(x.dtype) / 10 + self.holes[0]) * sum(self.history)
        scaled = scaled * self.data.scale * sum(self.data.history) * sum(self.own) * self.phase.value
        return self.last(scaled.to(x.dtype))


class Program:
    """One training program, under a strategy or plain."""

    def __init__(self, row: str, wrap: str = "") -> None:
        torch.manual_seed(0)
        self.model, self.wrap = Net(row), wrap
        self.set_aggregations()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.row, self.has_flat = row, False
        if row.startswith("memory") and "later" not in row:
            self.flatten()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.call: Callable[..., Any] = (
            torch.compile(self.model, backend="aot_eager") if wrap == "compiled" else self.model
        )
        self.is_read_by_owner = False

    def set_aggregations(self) -> None:
        extended = ts.get_strategy().extended
        extended.set_aggregation(self.model, "seen", "sum")
        extended.set_aggregation(self.model, "rows", "none")

    def flatten(self) -> None:
        parameters = list(self.model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters))
        start, gradients, self.has_flat = 0, "gradients" in self.row, True
        if self.row == "memory of gradients, a buffer":
            self.model.register_buffer("flat", flat, persistent=False)
        elif "of nobody" not in self.row:
            self.optimizer.flat = flat  # type: ignore[attr-defined]
        for p in parameters:
            view = flat[start : start + p.numel()].view_as(p)
            start += p.numel()
            if gradients:
                p.grad = view
            else:
                view.copy_(p.detach())
                p.data = view

    @property
    def flat(self) -> torch.Tensor:
        """The whole memory; in the row that says so, nobody holds it but its views."""
        if not self.has_flat:
            return torch.zeros(1)
        if "of nobody" in self.row:
            base = self.model.first.weight.grad._base  # type: ignore[union-attr]
            assert base is not None
            return base
        return self.model.flat if "buffer" in self.row else self.optimizer.flat  # type: ignore[return-value,attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wrap == "checkpointed":
            return checkpoint(self.call, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.call(x)  # type: ignore[no-any-return]

    def step(self, edit: Callable[[Program], None] | None, fails: Callable[[], bool], batch: Batch) -> torch.Tensor:
        x, y = (part.to(self.model.first.weight.dtype) for part in batch)
        if self.has_flat and "gradients" in self.row:
            self.flat.zero_()
        else:
            self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.wrap == "autocast" else nullcontext():
            prediction = self.forward(x)
            if self.wrap == "autocast":
                assert self.model.first(x).dtype == torch.bfloat16
        losses = (prediction.to(y.dtype) - y).square().mean(dim=1)
        if self.row == "scaler":
            self.scaler.scale(losses.mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            losses.mean().backward()
            self.optimizer.step()
        if self.row == "attribute left by forward":
            losses = losses + self.model.kept.detach().sum(dim=1).to(losses.dtype)  # after two meetings
        if not self.is_read_by_owner:
            losses = losses + self.number().to(losses.dtype)
        if edit is not None:
            edit(self)
        if fails():
            raise ZeroDivisionError
        if self.row == "scheduler":
            self.scheduler.step()
        return losses.detach()

    def number(self) -> torch.Tensor:
        """What the step reads of the row's state after its meetings."""
        value = ROWS[self.row].read(self)
        value = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        return value.to(torch.float64).nan_to_num(0.0).sum()

    def numbers(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        if self.row != "buffer, a row per row" and not self.is_read_by_owner:
            found["what the row is about"] = torch.as_tensor(ROWS[self.row].read(self), dtype=torch.float64)
        found.pop("rows", None)
        return {name: value.detach().clone() for name, value in found.items()}


# -- rows ------------------------------------------------------------------------------------------------------------

TENSOR = frozenset({"in place", "through .data", "initialised", "assigned", "loaded", "replaced in the step"})


@dataclass(frozen=True)
class Row:
    kind: str
    """Of `torchstrat.replicas.state_kinds.KINDS`."""
    read: Callable[[Program], Any]
    edit: Callable[[Program, float], None]
    can: frozenset[str] = frozenset()
    """Of the columns in `SOME`."""
    slot: Callable[[Program], tuple[Any, str]] | None = None
    """Where it is: an object and the name of its attribute."""
    merges: str = "first"
    """What becomes of edits that differ: the "first" replica's, their "mean", or it is each replica's "own"."""


def _mul(read: Callable[[Program], torch.Tensor]) -> Callable[[Program, float], None]:
    def edit(program: Program, by: float) -> None:
        with torch.no_grad():
            read(program).mul_(by)

    return edit


def _momentum(program: Program) -> torch.Tensor:
    state = program.optimizer.state[program.model.first.weight]
    return state.get("momentum_buffer", torch.zeros(1))  # type: ignore[no-any-return]


def _set_rate(program: Program, by: float) -> None:
    program.optimizer.param_groups[0]["lr"] = 0.1 * by


def _set_base(program: Program, by: float) -> None:
    program.scheduler.base_lrs = [0.1 * by]
    program.optimizer.param_groups[0]["lr"] = 0.1 * by


def _halve_flat(program: Program, by: float) -> None:
    """After the step, so that the next one has to begin with zeroes."""
    program.flat.mul_(by)


def _append(program: Program, by: float) -> None:
    program.model.history.append(by - 1)
    if len(program.model.history) > 2:
        del program.model.history[0]


def _set_scale(program: Program, by: float) -> None:
    program.model.scale = program.model.scale * by


def _set_data(program: Program, by: float) -> None:
    program.model.data.scale = program.model.data.scale * by
    program.model.data.history.append(by - 1)
    del program.model.data.history[:-2]


def _next_phase(program: Program, by: float) -> None:
    program.model.phase = Phase.HALF if program.model.phase is Phase.WHOLE else Phase.WHOLE


def _choose(program: Program, by: float) -> None:
    first = program.model.first
    program.model.chosen = [first.bias if program.model.chosen[0] is first.weight else first.weight]


def _count(program: Program, by: float) -> None:
    program.model.calls += round(20 * by) - 17


def _toggle(program: Program, by: float) -> None:
    bias = program.model.last.bias
    bias.requires_grad_(not bias.requires_grad)


def _nothing(program: Program, by: float) -> None:
    """What the step itself does to it is enough."""


FAILS = frozenset({"after a run that raised"})
CAST = frozenset({"cast"})
DIFFERENTLY = frozenset({"edited differently"})
EMPTY = frozenset({"an empty one loaded"})

ROWS: Mapping[str, Row] = {
    "parameter": Row(
        "parameter",
        lambda p: p.model.first.weight,
        _mul(lambda p: p.model.first.weight),
        TENSOR | FAILS | CAST | DIFFERENTLY,
        lambda p: (p.model.first, "weight"),
    ),
    "table with max_norm": Row("parameter", lambda p: p.model.table, _mul(lambda p: p.model.table), CAST),
    "gradient": Row("gradient", lambda p: p.model.first.weight.grad, _mul(lambda p: p.model.first.weight.grad), CAST),
    "buffer, floating": Row(
        "buffer",
        lambda p: p.model.mean,
        _mul(lambda p: p.model.mean),
        TENSOR | FAILS | CAST | DIFFERENTLY,
        lambda p: (p.model, "mean"),
        merges="mean",
    ),
    "buffer, integer": Row(
        "buffer", lambda p: p.model.calls, _count, frozenset({"in place", "loaded"}) | FAILS | DIFFERENTLY
    ),
    "buffer, NaN in it": Row(
        "buffer",
        lambda p: p.model.holes,
        _mul(lambda p: p.model.holes),
        TENSOR | FAILS | CAST,
        lambda p: (p.model, "holes"),
    ),
    "buffer, a row per row": Row("buffer", lambda p: 0.0, _nothing, merges="own"),
    "buffer, a count that sums up": Row("buffer", lambda p: 0.0, _nothing, frozenset({"loaded"}), merges="own"),
    "optimizer state": Row(
        "optimizer state",
        _momentum,
        _mul(_momentum),
        frozenset({"in place", "through .data", "loaded", "replaced in the step"}) | CAST | DIFFERENTLY | EMPTY,
    ),
    "hyperparameter": Row(
        "hyperparameter",
        lambda p: p.optimizer.param_groups[0]["lr"],
        _set_rate,
        frozenset({"in place", "loaded"}) | DIFFERENTLY,
    ),
    "scheduler": Row(
        "scheduler and scaler",
        lambda p: p.optimizer.param_groups[0]["lr"],
        _set_base,
        frozenset({"in place", "loaded"}) | DIFFERENTLY,
    ),
    "scaler": Row(
        "scheduler and scaler", lambda p: p.scaler.get_scale(), _nothing, frozenset({"loaded"}), merges="own"
    ),
    "training mode": Row(
        "training mode",
        lambda p: p.model.drop.training,
        lambda p, by: p.model.drop.train(by != 0.9) and None,
        frozenset({"in place"}) | DIFFERENTLY,
    ),
    "requires_grad": Row(
        "requires_grad",
        lambda p: p.model.last.bias.requires_grad,
        _toggle,
        merges="own",
    ),
    "attribute": Row("attribute", lambda p: p.model.scale, _set_scale, frozenset({"in place"}), merges="own"),
    "attribute, plain tensor": Row(
        "attribute",
        lambda p: p.model.mask,
        _mul(lambda p: p.model.mask),
        frozenset({"in place", "through .data", "assigned", "replaced in the step"}),
        lambda p: (p.model, "mask"),
        merges="own",
    ),
    "attribute, list": Row("attribute", lambda p: sum(p.model.history), _append, frozenset({"in place"}), merges="own"),
    "attribute, data class": Row(
        "attribute", lambda p: p.model.data.scale, _set_data, frozenset({"in place"}), merges="own"
    ),
    "attribute, list of an own class": Row(
        "attribute",
        lambda p: sum(p.model.own),
        lambda p, by: p.model.own.__setitem__(0, p.model.own[0] * by),
        merges="own",
    ),
    "attribute, enumeration": Row("attribute", lambda p: p.model.phase.value, _next_phase, merges="own"),
    "attribute, a view of a buffer": Row("attribute", lambda p: p.model.half, _mul(lambda p: p.model.mean)),
    "attribute, list of parameters": Row("attribute", lambda p: p.model.chosen[0].mean(), _choose, merges="own"),
    "attribute left by forward": Row("attribute", lambda p: 0.0, _nothing, merges="own"),
    "attribute carried on": Row("attribute", lambda p: 0.0, _nothing, merges="own"),
    **{
        name: Row("memory", lambda p: p.flat, _mul(lambda p: p.flat), frozenset({"in place"}))
        for name in ("memory of parameters", "memory of parameters, made later")
    },
    **{
        name: Row("memory", lambda p: p.flat, _halve_flat, merges="own")
        for name in (
            "memory of gradients",
            "memory of gradients, a buffer",
            "memory of gradients, of nobody",
            "memory of gradients, made later",
        )
    },
}


# -- columns ---------------------------------------------------------------------------------------------------------

Edit = Callable[[Program], None]


def _replica() -> int:
    context = ts.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


def _alike(row: Row) -> Edit:
    return lambda program: row.edit(program, 0.9)


def _differently(row: Row, *, plain: bool) -> Edit:
    if plain:
        return lambda program: row.edit(program, 0.925 if row.merges == "mean" else 0.9)
    return lambda program: row.edit(program, 0.9 + 0.05 * _replica())


def _replace_in_step(row: Row) -> Edit:
    def edit(program: Program) -> None:
        if row.kind == "optimizer state":
            state = program.optimizer.state[program.model.first.weight]
            if state:
                state["momentum_buffer"] = state["momentum_buffer"] * 0.9
        elif row.kind == "parameter":
            row.read(program).data = row.read(program).data * 0.9
        else:
            assert row.slot is not None
            owner, name = row.slot(program)
            setattr(owner, name, getattr(owner, name) * 0.9)

    return edit


def _outside(row: Row, how: str) -> Edit:
    def change(program: Program) -> None:
        value = row.read(program)
        if how == "in place":
            row.edit(program, 0.8)
        elif how == "through .data":
            value.data = value.data * 0.8
        elif how == "initialised":
            nn.init.constant_(value, 0.25)
        elif how == "assigned":
            assert row.slot is not None
            owner, name = row.slot(program)
            if row.kind != "parameter":
                setattr(owner, name, value * 0.8)
                return
            made = nn.Parameter(value.detach() * 0.8)
            program.optimizer.param_groups[0]["params"][0] = made
            setattr(owner, name, made)
        elif how == "loaded":
            _load(program, row)
        elif how == "an empty one loaded":
            program.optimizer.load_state_dict({**program.optimizer.state_dict(), "state": {}})

    return change


def _load(program: Program, row: Row) -> None:
    if row.kind in ("optimizer state", "hyperparameter"):
        state = copy.deepcopy(program.optimizer.state_dict())
        for entry in state["state"].values():
            if "momentum_buffer" in entry:
                entry["momentum_buffer"] *= 0.8
        state["param_groups"][0]["lr"] = 0.05
        program.optimizer.load_state_dict(state)
    elif row.kind == "scheduler and scaler":
        program.scheduler.load_state_dict({**program.scheduler.state_dict(), "base_lrs": [0.02]})
        program.scaler.load_state_dict({**program.scaler.state_dict(), "scale": 8.0})
    else:
        state = {name: value * 2 for name, value in program.model.state_dict().items()}
        program.model.load_state_dict(state)


def _cast(program: Program, index: int) -> None:
    if index == 1:
        program.model.float()
    if index == 3:
        program.model.double()


EVEN, GAPS = (8, 8, 8, 8, 8), (8, 1, 8, 1, 8)
SOME = TENSOR | FAILS | CAST | DIFFERENTLY | EMPTY
COLUMNS = (
    "edited alike",
    "edited differently",
    "compiled",
    "autocast",
    "checkpointed",
    "in place",
    "through .data",
    "initialised",
    "assigned",
    "loaded",
    "an empty one loaded",
    "replaced in the step",
    "cast",
    "after a run that raised",
    "no rows",
)
"""Where no other column says otherwise the step edits the state, and reads it after its meetings before."""


def _batches(rows: Sequence[int]) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 6, generator=draw, dtype=torch.float64), torch.randn(n, 3, generator=draw, dtype=torch.float64))
        for n in rows
    ]


def _train(strategy: Any, row_name: str, column: str, *, is_read_by_owner: bool = False) -> dict[str, torch.Tensor]:
    """``is_read_by_owner``: only one process has the state, so what the others read of it is not compared."""
    row, is_plain = ROWS[row_name], strategy is None
    edit: Edit | None = _alike(row)
    if column == "edited differently":
        edit = _differently(row, plain=is_plain)
    elif column == "replaced in the step":
        edit = _replace_in_step(row)
    elif column in TENSOR | EMPTY | CAST:
        edit = None
    dtype = torch.float32 if column == "autocast" else torch.float64
    before, failing, returned = torch.get_default_dtype(), [False], []
    torch.set_default_dtype(dtype)
    try:
        with nullcontext() if is_plain else strategy.scope():
            program = Program(row_name, column if column in ("compiled", "autocast", "checkpointed") else "")
        program.is_read_by_owner = is_read_by_owner
        rows = GAPS if column == "no rows" else EVEN
        step = partial(program.step, edit, lambda: failing[0])
        batches = _batches(rows)
        for index, batch in enumerate(batches if is_plain else strategy.distribute_dataset(batches)):
            if column == "cast":
                _cast(program, index)
            elif index == 1 and row_name.endswith("made later"):
                program.flatten()
            elif index == 2 and column in (TENSOR | EMPTY) - {"replaced in the step"}:
                _outside(row, column)(program)
            if index == 2 and column == "after a run that raised":
                _fail(strategy, program, edit, batch, failing)
            if is_plain:
                returned.append(step(batch))
            else:
                losses = strategy.run(step, args=(batch,))
                returned.append(strategy.gather(losses, axis=0))
        if not is_plain:
            strategy.extended.check_replicas()
        return {**program.numbers(), "returned": torch.cat(returned)}
    finally:
        torch.set_default_dtype(before)


def _fail(strategy: Any, program: Program, edit: Edit | None, batch: Any, failing: list[bool]) -> None:
    """A run that steps, edits and raises. What it did up to its step stays; in plain there is no such edit."""
    failing[0] = True
    try:
        if strategy is None:
            program.step(None, lambda: True, batch)
        else:
            strategy.run(partial(program.step, edit, lambda: True), args=(batch,))
    except ZeroDivisionError:
        pass
    finally:
        failing[0] = False


def _check(row_name: str, column: str, place: str) -> None:
    by_owner = row_name == "optimizer state" and place == places.CENTRAL_ON_SOCKETS
    wanted = _train(None, row_name, column, is_read_by_owner=by_owner)
    with places.opened(place) as strategy:
        seen = _train(strategy, row_name, column, is_read_by_owner=by_owner)
    tolerance = {"autocast": 2e-2, "cast": 1e-4}.get(column, 1e-10)
    assert_close(seen, wanted, tolerance)


PLACES = ("mirrored x2", "central_storage x2", *places.TORCHRUN, places.TPU)


def _has_meaning(row: Row, column: str, place: str) -> bool:
    if (
        place == places.TPU
        and column == "edited differently"
        and row in (ROWS["buffer, integer"], ROWS["training mode"])
    ):
        return False  # a replica's id is a tensor there, which Python does not round and no mode can be
    if row in (ROWS["buffer, a row per row"], ROWS["attribute carried on"]) and column == "no rows":
        return False
    return column not in SOME or column in row.can


def _expected_on_tpu(row_name: str, column: str) -> Expected:
    in_one_program = "on a TPU one program is recorded for all replicas"
    if row_name == "table with max_norm":
        return refused(UnsupportedError, "max_norm.*global_view=True", "replicas share the table")
    if column == "checkpointed":
        says = "computed again by torch.utils.checkpoint.*global_view=True"
        return refused(UnsupportedError, says, in_one_program)
    if (row_name, column) == ("buffer, a count that sums up", "compiled"):
        return refused(UnsupportedError, "add_ cannot run in a step.*global_view=True", in_one_program)
    if (row_name, column) == ("optimizer state", "edited differently"):
        return refused(UnsupportedError, "mul_ in place would write what differs between replicas", in_one_program)
    if column == "edited differently" and row_name in ("hyperparameter", "scheduler"):
        return refused(UnsupportedError, "the step needs the value of a tensor", in_one_program)
    return _expected(row_name, column, places.TPU)


def _expected(row_name: str, column: str, place: str) -> Expected:
    if column == "edited differently" and row_name.startswith("buffer"):
        became = "their mean" if row_name == "buffer, floating" else "the first replica's"
        return documented(f"is {became}", "differs between replicas, and is .*set_aggregation")
    if column == "edited differently" and row_name in ("hyperparameter", "scheduler"):
        return documented("is the first replica's", "have set lr of group 0 of SGD differently")
    if column == "edited differently" and row_name == "optimizer state" and place != places.CENTRAL_ON_SOCKETS:
        return documented("is the first replica's", "have changed what an optimizer keeps of Linear.weight")
    return RIGHT


def cells() -> Iterator[Cell]:
    assert {row.kind for row in ROWS.values()} <= {kind.name for kind in KINDS}
    for row_name, row in ROWS.items():
        for column in COLUMNS:
            for place in PLACES:
                if not _has_meaning(row, column, place):
                    continue
                check = partial(_check, row_name, column, place)
                is_on_tpu = place == places.TPU
                verdict = _expected_on_tpu(row_name, column) if is_on_tpu else _expected(row_name, column, place)
                yield Cell(row_name, column, place, check, verdict)


# -- planted faults --------------------------------------------------------------------------------------------------


FAULTS = (
    PlantedFault(
        "optimizer state is one dictionary that all replicas edit",
        switched_off(ComponentHelpers, "_share_state", lambda self, helper, own: None),
        cells_at("optimizer state", "edited alike", "mirrored x2", "central_storage x2"),
    ),
    PlantedFault(
        "attributes of modules do not change hands",
        switched_off(ComponentAttributes, "install", lambda self, replica: None),
        cells_at("attribute left by forward", "edited alike"),
    ),
    PlantedFault(
        "attributes do not stay each replica's own",
        switched_off(KeptAttributes, "take", lambda self, module, leader: {}),
        cells_at("attribute carried on", "edited alike"),
    ),
    PlantedFault(
        "lists in attributes are shared",
        switched_off(OwnCopies, "copy", lambda self, value, owner, replica: value),
        cells_at("attribute, list", "edited alike"),
    ),
    PlantedFault(
        "what shares memory with variables is not looked for",
        switched_off(VariableRegistry, "_note_vectors", lambda self, plain: None),
        cells_at("memory of gradients", "edited alike") + cells_at("memory of parameters", "edited alike"),
    ),
    PlantedFault(
        "rows that a lookup has scaled are the first replica's",
        switched_off(Components, "merge_rows", lambda self: None),
        cells_at("table with max_norm", "checkpointed"),
    ),
    PlantedFault(
        "between processes rows that a lookup has scaled are the first rank's",
        switched_off(table_memory, "scaled_rows", lambda first, other, *, is_known: torch.zeros(0).long()),
        cells_at("table with max_norm", "checkpointed", "torchrun mirrored"),
    ),
    PlantedFault(
        "hyperparameters are each rank's own",
        switched_off(optimizer_state, "digest", lambda optimizer: 0.0),
        cells_at("hyperparameter", "edited differently", "torchrun mirrored", "torchrun central_storage"),
    ),
    PlantedFault(
        "optimizer state is each rank's own",
        switched_off(StateEdits, "digest", lambda self, optimizer: 0.0),
        cells_at("optimizer state", "edited differently", "torchrun mirrored", "torchrun central_storage"),
    ),
    PlantedFault(
        "gradients kept for other replicas do not follow a cast",
        switched_off(TensorSlot, "cast_grads", lambda self, dtype: None),
        cells_at("parameter", "cast"),
    ),
    PlantedFault(
        "buffers that are to be summed are averaged",
        switched_off(BufferRules, "needs_before", lambda self, module, name: False),
        cells_at("buffer, a count that sums up", "edited alike", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "no replica keeps a buffer of its own",
        switched_off(BufferRules, "keeps_own", lambda self, module, name: False),
        cells_at("buffer, a row per row", "edited alike", "mirrored x2", "torchrun mirrored"),
    ),
    PlantedFault(
        "state that was moved through .data is taken for the old one",
        switched_off(Entry, "is_kept", lambda self, value: value is self.value),
        cells_at("optimizer state", "through .data", "torchrun central_storage"),
    ),
)

TABLE = Table(
    name="state",
    question="Does state mean what it means on one device, whatever a program does to it?",
    make_cells=cells,
    always=(
        "attribute carried on | checkpointed | mirrored x2",
        "buffer, NaN in it | replaced in the step | tpu x2, computed on the CPU",
        "buffer, a row per row | checkpointed | mirrored x2",
        "memory of parameters | no rows | torchrun central_storage",
        "optimizer state | an empty one loaded | torchrun central_storage",
        "optimizer state | cast | torchrun central_storage",
        "optimizer state | replaced in the step | torchrun mirrored",
        "parameter | edited differently | central_storage x2",
        "requires_grad | autocast | torchrun central_storage on sockets",
        "training mode | edited differently | torchrun central_storage",
    ),
    faults=FAULTS,
    alike=places.launch_of,
)
