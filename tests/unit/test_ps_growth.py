"""`ts.grow_rows`: a table that got rows while it was trained is the table that had them from the start.

With real processes, of which one is killed meanwhile: tests/multiprocess/test_ps_processes.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.support.checkpoint_writes import held_writes
from tests.support.checkpoints import same
from tests.support.gates import await_arrivals, close_gate, pass_gate
from tests.support.parameter_servers import WAIT, PerTensor, Program, on_servers
from torchstrat.errors import (
    ContextError,
    InvalidArgumentError,
    ParameterServerUnavailable,
    TorchstratError,
    UnsupportedError,
    WrongTypeError,
)
from torchstrat.testing.fake_cluster import FakeCluster

OLD, NEW, WIDTH = 10, 15, 3

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.5),
    "sparse adam": torch.optim.SparseAdam,
    "none": partial(torch.optim.SGD, lr=0.1),
}


def initial(rows: int) -> torch.Tensor:
    return torch.arange(rows * WIDTH, dtype=torch.float64).reshape(rows, WIDTH).sin()


class Model(nn.Module):
    """A table and what else is trained beside it."""

    def __init__(self, rows: int, optimizer: str = "adam", bag: bool = False) -> None:
        super().__init__()
        kind: Any = partial(nn.EmbeddingBag, mode="sum") if bag else nn.Embedding
        self.table = kind(rows, WIDTH, padding_idx=2, sparse=optimizer == "sparse adam", dtype=torch.float64)
        with torch.no_grad():
            self.table.weight.copy_(initial(rows))
        self.out = nn.Linear(WIDTH, 1, dtype=torch.float64)
        nn.init.ones_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        own = self.table.parameters() if optimizer == "sparse adam" else self.parameters()
        self.optimizer = OPTIMIZERS[optimizer](list(own), lr=0.1)

    def step(self, *ids: int) -> tuple[float, int]:
        self.optimizer.zero_grad()
        loss = self.out(self.table(torch.tensor([ids]))).square().sum()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach()), len(self.table.weight)

    def checkpoint(self) -> ts.Checkpoint:
        return ts.Checkpoint(table=self.table, out=self.out, optimizer=self.optimizer)


def grow(model: Model, rows: int = NEW) -> None:
    ts.grow_rows(model.table, rows, init=lambda _: initial(rows)[len(model.table.weight) :])


def state_of(program: Program) -> dict[str, Any]:
    """A copy of all that is trained."""
    model = program.made
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    own = {name: dict(model.optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    return values | {f"state of {name}": {k: torch.as_tensor(v).clone() for k, v in own[name].items()} for name in own}


@contextlib.contextmanager
def program_of(rows: int = OLD, optimizer: str = "adam", shards: int | None = 2, **options: Any) -> Iterator[Program]:
    options.setdefault("rows_only", True)
    bag = options.pop("bag", False)
    with on_servers(lambda: Model(rows, optimizer, bag), shards=shards, **options) as program:
        yield program


BEFORE, AFTER = [(1, 9), (0, 3), (9, 9)], [(9, 14), (10, 1), (14, 14), (5, 12)]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *((name, {}) for name in OPTIMIZERS if name != "none"),
        ("adam", {"rows_only": False}),
        ("momentum", {"rows_only": False, "shards": 3}),
        ("adam", {"shards": None}),
        ("adagrad", {"shards": 3, "bag": True}),
    ],
)
def test_it_is_the_table_that_was_as_large_from_the_start(optimizer: str, options: dict[str, Any]) -> None:
    """Also twice, and with two workers that had it when it was smaller."""
    with program_of(NEW, optimizer, **options) as program:
        losses = [program.run(Model.step, program.made, *ids)[0] for ids in [*BEFORE, *AFTER, *AFTER]]
        wanted = state_of(program)
    with program_of(OLD, optimizer, workers=2, **options) as program:
        model, weight = program.made, program.made.table.weight
        found = [program.run(Model.step, model, *ids) for ids in BEFORE]
        grow(model, 12)
        grow(model, NEW)
        grow(model, NEW)  # which there are already
        found += [program.run(Model.step, model, *ids) for ids in AFTER]
        program.coordinator.join(timeout=WAIT)
        found += [program.run(Model.step, model, *ids) for ids in AFTER]
        assert weight is model.table.weight
        assert (model.table.num_embeddings, tuple(weight.shape)) == (NEW, (NEW, WIDTH))
        assert [rows for _, rows in found] == [OLD] * len(BEFORE) + [NEW] * 2 * len(AFTER)
        assert [loss for loss, _ in found] == losses
        assert same(state_of(program), wanted)


def test_functions_in_flight_are_waited_for_and_those_in_the_queue_find_it() -> None:
    with program_of(workers=1) as program:
        model = program.made
        gate = close_gate("growing")

        def slow() -> tuple[int, int]:
            before = len(model.table.weight)
            pass_gate("growing")
            model.step(9, 9)
            return before, len(model.table.weight)

        running = program.coordinator.schedule(slow)
        await_arrivals("growing", 1)
        queued = [program.coordinator.schedule(Model.step, args=(model, 9)) for _ in range(3)]
        thread = threading.Thread(target=grow, args=(model,))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive(), "it waits for a function that is half-way"
        gate.set()
        thread.join(WAIT)
        assert running.get(timeout=WAIT) == (OLD, OLD)
        assert [value.get(timeout=WAIT)[1] for value in queued] == [NEW] * 3


@pytest.mark.parametrize("shards", [2, None])
def test_a_gradient_that_is_left_on_a_worker_is_still_added_to(shards: int | None) -> None:
    def backward(model: Model, *ids: int) -> None:
        model.table(torch.tensor(ids)).sum().backward()

    def last(model: Model, *ids: int) -> None:
        backward(model, *ids)
        model.optimizer.step()

    found = []
    for rows in (NEW, OLD):
        with program_of(rows, "sgd", shards) as program:
            program.run(backward, program.made, 1, 2)
            if rows == OLD:
                grow(program.made)
            program.run(last, program.made, 1, 14)
            found.append(state_of(program))
    assert same(*found)


# -- new rows ---------------------------------------------------------------------------------------------------------


def made(init: Callable[[torch.Tensor], Any] | None, device: str = "cpu", rows: int = 100) -> nn.Embedding:
    with torch.device(device):
        table = nn.Embedding(rows, 40, padding_idx=1)
    if init is not None:
        init(table.weight)
    return table


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("init", "low", "high", "std"),
    [
        (None, -6.0, 6.0, 1.0),
        (lambda w: nn.init.uniform_(w, 3.0, 5.0), 3.0, 5.0, 2 / 12**0.5),
        (lambda w: nn.init.constant_(w, 7.0), 7.0, 7.0, 0.0),
        (lambda w: nn.init.xavier_uniform_(w).data.mul_(0.5), -0.11, 0.11, 0.06),
    ],
)
def test_new_rows_are_filled_as_the_others_were(
    device: str, init: Callable[[torch.Tensor], Any] | None, low: float, high: float, std: float
) -> None:
    with on_servers(lambda: made(init, device), shards=2) as program:
        table = program.made
        ts.grow_rows(table, 500)
        assert table.weight.is_meta == (device == "meta")
        rows = program.run(lambda: table.weight.detach().clone())
        assert rows.shape == (500, 40)
        new = rows[100:]
        assert low <= float(new.min())
        assert float(new.max()) <= high
        assert float(new.std()) == pytest.approx(std, rel=0.05, abs=1e-6)
        assert std == 0 or len(new.unique(dim=0)) == 400
        ts.grow_rows(table, 510)
        again = program.run(lambda: table.weight.detach().clone())
        assert torch.equal(again[:500], rows)
        assert std == 0 or float(again[500:].std()) > 0


def test_what_init_says() -> None:
    for device in ("cpu", "meta"):
        with on_servers(lambda device=device: made(None, device), shards=2) as program:
            ts.grow_rows(program.made, 120, init=lambda rows: rows.fill_(4.0))
            rows = program.run(lambda table=program.made: table.weight.detach().clone())
            assert torch.equal(rows[100:], torch.full((20, 40), 4.0))
            assert not (rows[:100] == 4.0).any()


def copied(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.ones(100, 40))


UNKNOWN = "how new rows are to be initialised cannot be told"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (lambda: made(copied), UNKNOWN),
        (lambda: made(nn.init.orthogonal_), UNKNOWN),
        (lambda: nn.Embedding.from_pretrained(torch.ones(100, 40), freeze=False), UNKNOWN),
    ],
)
def test_an_initialiser_that_is_not_known_is_asked_for(table: Callable[[], nn.Embedding], message: str) -> None:
    with on_servers(table, shards=2) as program:
        with pytest.raises(InvalidArgumentError, match=message):
            ts.grow_rows(program.made, 120)
        assert program.made.weight.shape == (100, 40)
        ts.grow_rows(program.made, 120, init=nn.init.zeros_)
        assert not program.made.weight[100:].any()


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_of_before_and_after(tmp_path: Path) -> None:
    with program_of() as program:
        model, checkpoint = program.made, program.made.checkpoint()
        program.run(Model.step, model, 1, 9)
        checkpoint.save(tmp_path / "before")
        grow(model)
        program.run(Model.step, model, 9, 14)
        checkpoint.save(tmp_path / "after")
        saved = state_of(program)
        program.run(Model.step, model, 3, 14)
        trained = state_of(program)
        assert not same(saved, trained)
        with pytest.raises(InvalidArgumentError, match=r"table\.weight is torch\.float64 \(10, 3\) in the checkpoint"):
            checkpoint.restore(tmp_path / "before")
        assert same(state_of(program), trained)
        skipped = checkpoint.restore(tmp_path / "before", strict=False)
        assert skipped.mismatched_keys == ["optimizer.state.table.weight", "table.weight"]
        assert same(state_of(program)["table.weight"], trained["table.weight"])
        checkpoint.restore(tmp_path / "after")
        assert same(state_of(program), saved)
    with program_of(NEW, ps=3, shards=3) as program:
        program.made.checkpoint().restore(tmp_path / "after")
        assert same(state_of(program), saved)


def test_a_checkpoint_that_is_being_written_has_the_table_as_it_was(tmp_path: Path) -> None:
    with program_of() as program:
        model, checkpoint = program.made, program.made.checkpoint()
        program.run(Model.step, model, 1, 9)
        saved = state_of(program)
        with held_writes() as held:
            handle = checkpoint.save(tmp_path / "saved", asynchronous=True)
            grow(model)
            for ids in AFTER:
                program.run(Model.step, model, *ids)
            held.go_on.set()
            handle.result(WAIT)
    with program_of() as program:
        program.made.checkpoint().restore(tmp_path / "saved")
        assert same(state_of(program), saved)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_server_that_is_lost_afterwards(lost: int, tmp_path: Path) -> None:
    with program_of() as program:
        model, checkpoint = program.made, program.made.checkpoint()
        grow(model)
        program.run(Model.step, model, 9, 14)
        saved = state_of(program)
        checkpoint.save(tmp_path / "saved")
        program.cluster.wait_until_lost(program.cluster.kill_server(lost))
        with pytest.raises(ParameterServerUnavailable):
            grow(model, NEW + 1)
        program.cluster.start_server(lost)
        checkpoint.restore(tmp_path / "saved")
        assert same(state_of(program), saved)
        grow(model, NEW + 1)
        assert program.run(Model.step, model, NEW)[1] == NEW + 1


# -- what is refused --------------------------------------------------------------------------------------------------


def test_bad_arguments_change_nothing() -> None:
    with program_of() as program:
        table = program.made.table
        cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (WrongTypeError, "got a Linear", lambda: ts.grow_rows(program.made.out, 20)),  # type: ignore[arg-type]
            (WrongTypeError, "rows=1.5", lambda: ts.grow_rows(table, 1.5)),  # type: ignore[arg-type]
            (InvalidArgumentError, "only grow", lambda: ts.grow_rows(table, 9)),
            (InvalidArgumentError, "only grow", lambda: ts.grow_rows(table, 0)),
            (WrongTypeError, "init=3", lambda: ts.grow_rows(table, 20, init=3)),  # type: ignore[arg-type]
            (InvalidArgumentError, r"float64 \(5, 3\), or return", lambda: grow_by(table, torch.zeros(4, 3))),
            (InvalidArgumentError, r"got torch.float32 \(5, 3\)", lambda: grow_by(table, torch.zeros(5, 3))),
            (ZeroDivisionError, "division", lambda: ts.grow_rows(table, NEW, init=lambda _: 1 / 0)),
            (UnsupportedError, "also the bias|is also the weight", lambda: ts.grow_rows(program.made.out.weight, 9)),
            (UnsupportedError, "belongs to no strategy", lambda: ts.grow_rows(nn.Embedding(3, 2), 9)),
            (ContextError, "in a scheduled function", lambda: program.run(ts.grow_rows, table, 20)),
        ]
        for error, message, call in cases:
            with pytest.raises(error, match=message):
                call()
        take_error(program)
        view = table.weight.data
        with pytest.raises(InvalidArgumentError, match="shows its memory"):
            grow(program.made)
        del view
        assert table.num_embeddings == len(table.weight) == OLD
        assert program.run(Model.step, program.made, 9)[1] == OLD
        grow(program.made)
        assert program.run(Model.step, program.made, 14)[1] == NEW


def take_error(program: Program) -> None:
    """Of a function whose result has raised it already."""
    with contextlib.suppress(TorchstratError):
        program.coordinator.join(timeout=WAIT)


def grow_by(table: nn.Embedding, value: torch.Tensor) -> None:
    ts.grow_rows(table, NEW, init=lambda _: value)


class Unknown(PerTensor):
    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.add_(grad.sign(), alpha=-group["lr"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(OLD, WIDTH)
        self.out = nn.Linear(WIDTH, OLD)
        self.out.weight = self.table.weight
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)


class Stepped(nn.Module):
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.table = nn.Embedding(OLD, WIDTH)
        self.optimizer = optimizer(self.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Tied, "also the weight of a Linear, which depends"),
        (lambda: Stepped(Unknown), "stepped by Unknown, which looks at all at once"),
        (lambda: Stepped(torch.optim.Adafactor), "stepped by Adafactor, which looks at each parameter"),
    ],
)
def test_what_depends_on_the_number_of_rows_is_refused(make: Callable[[], Any], message: str) -> None:
    with on_servers(make, shards=2, rows_only=True) as program:
        with pytest.raises(UnsupportedError, match=message):
            ts.grow_rows(program.made.table, NEW)
        assert program.made.table.weight.shape == (OLD, WIDTH)


@pytest.mark.parametrize(
    "make", [lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]), lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1"])]
)
def test_other_strategies_say_what_to_do(make: Callable[[], ts.Strategy]) -> None:
    strategy = make()
    with strategy.scope():
        table = nn.Embedding(OLD, WIDTH)
    with pytest.raises(UnsupportedError, match=f"belongs to a {type(strategy).__name__}, and tables grow on parameter"):
        ts.grow_rows(table, NEW)
    strategy.close()


def test_ids_are_checked_against_the_rows_that_there_are() -> None:
    with program_of() as program:
        model = program.made
        with pytest.raises(InvalidArgumentError, match="id 14 is not in table"):
            program.run(Model.step, model, 14)
        take_error(program)
        grow(model)
        assert program.run(Model.step, model, 14)[1] == NEW
        assert torch.equal(F.embedding(torch.tensor([12]), model.table.weight).detach(), initial(NEW)[12:13])


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_no_sync_has_left_of_a_table_that_grows(is_whole: bool) -> None:
    with FakeCluster(workers=2, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(2))
        with strategy.scope():
            table = nn.Embedding(OLD, WIDTH, dtype=torch.float64)
            nn.init.zeros_(table.weight)
            optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        schedule = ts.ClusterCoordinator(strategy).schedule

        def leave() -> None:
            with ts.get_strategy().no_sync():
                (table.weight if is_whole else table(torch.arange(OLD))).sum().backward()

        def step() -> None:
            table(torch.tensor([0, NEW - 1])).sum().backward()
            optimizer.step()

        schedule(leave).get(timeout=WAIT)
        ts.grow_rows(table, NEW, init=nn.init.zeros_)
        schedule(step).get(timeout=WAIT)
        assert table.weight[:, 0].tolist() == [-2.0] + [-1.0] * (OLD - 1) + [0.0] * (NEW - OLD - 1) + [-1.0]
