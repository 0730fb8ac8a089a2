"""`ts.Checkpoint` of what lives on parameter servers: they write and read it, and come back from being killed.

That any strategy restores what any other has saved, on any number of servers, is in
tests/multiprocess/test_checkpoint_table.py; what state can be, in tests/matrix/round_trips.py.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.checkpoint_writes import full_disk
from tests.support.checkpoints import contents, flip, same
from tests.support.gates import await_arrivals, close_gate, pass_gate
from tests.support.parameter_servers import WAIT, Program, Tables, on_servers
from torchstrat import Checkpoint
from torchstrat.errors import (
    ContextError,
    InvalidArgumentError,
    ParameterServerUnavailable,
)


class Saved(Tables):
    make_optimizer = torch.optim.Adam

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.seen = ts.Variable(0.0, name="seen")

    def go_back(self, loss: torch.Tensor, number: int) -> None:
        super().go_back(loss, number)
        self.seen.assign_add(1.0)

    def objects(self) -> dict[str, Any]:
        """Its modules apart, since the whole of it has the optimizer as well."""
        modules = {name: getattr(self, name) for name in ("table", "bag", "norm", "out")}
        return {**modules, "optimizer": self.optimizer, "scheduler": self.scheduler, "seen": self.seen}


class Job:
    """A coordinator's program on a cluster of threads."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.cluster, self.coordinator, self.strategy = program.cluster, program.coordinator, program.strategy
        self.parts, self.folder = program.made, folder
        self.objects = self.parts.objects()
        self.checkpoint = Checkpoint(**self.objects)

    def train(self, *steps: int) -> list[float]:
        results = []
        for number in steps:
            results.append(self.coordinator.schedule(Saved.train_step, args=(self.parts, number)))
            self.parts.scheduler.step()
        self.coordinator.join(timeout=30)
        return [float(result.fetch()) for result in results]

    def save(self, name: str = "saved") -> None:
        self.checkpoint.save(self.folder / name)

    def restore(self, name: str = "saved") -> None:
        self.checkpoint.restore(self.folder / name)

    def state(self) -> dict[str, Any]:
        """Everything, as the program sees it."""
        named = {name: value for name, value in self.objects.items() if name != "seen"}
        return {**contents(named), "seen": float(self.objects["seen"])}

    def lose(self, *servers: int) -> None:
        for index in servers:
            self.cluster.kill_server(index)
        which = f" {servers[0]}" if len(servers) == 1 else ""
        with pytest.raises(ParameterServerUnavailable, match=f"parameter server{which}"):
            self.train(100)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """On two servers, trained for three steps and saved."""
    with on_servers(Saved, shards=2, rows_only=True) as program:
        made = Job(program, tmp_path)
        made.train(0, 1, 2)
        made.save()
        yield made


# -- there and back ---------------------------------------------------------------------------------------------------


def test_training_goes_on_from_a_checkpoint_with_the_same_numbers(job: Job) -> None:
    saved = job.state()
    undisturbed = job.train(3, 4, 5)
    assert not same(saved, job.state())
    job.restore()
    assert same(saved, job.state())
    assert job.train(3, 4, 5) == undisturbed
    assert job.train(3, 4, 5) != undisturbed, "the control: from other values there come other numbers"


def test_the_state_of_an_optimizer_is_that_of_the_checkpoint(job: Job) -> None:
    """Also where it was read just before, and no function has run since."""
    weight, state = job.parts.out.weight, job.parts.optimizer.state
    saved = copy.deepcopy(dict(state[weight]))
    job.train(3)
    assert not same(dict(state[weight]), saved)
    job.restore()
    assert same(dict(state[weight]), saved)


def test_a_part_is_restored_and_the_rest_stays(job: Job) -> None:
    """On servers that hold the rest, and after one of them was lost."""
    saved = copy.deepcopy(job.state())
    job.train(3, 4, 5)
    trained = copy.deepcopy(job.state())
    names = ("table", "optimizer.state.table.weight")
    skipped = job.checkpoint.restore(job.folder / "saved", only=names)
    assert not any(skipped)
    after = job.state()
    assert same(after["table"], saved["table"])
    assert not same(after["table"], trained["table"])
    rest = [name for name in trained if name not in ("table", "optimizer")]
    assert all(same(after[name], trained[name]) for name in rest), "the rest is as it was"
    of_table = job.parts.optimizer.state_dict()["param_groups"][0]["params"][0]
    for number, state in after["optimizer"]["state"].items():
        expected = saved if number == of_table else trained
        assert same(state, expected["optimizer"]["state"][number])
    assert same(after["optimizer"]["param_groups"], trained["optimizer"]["param_groups"])
    job.restore()
    assert same(job.state(), saved)


def test_what_fits_is_restored(tmp_path: Path) -> None:
    with on_servers(lambda: Table("adam"), shards=2, rows_only=True) as program:
        program.coordinator.schedule(Table.step, args=(program.made, 3, 17))
        program.coordinator.join(timeout=30)
        program.made.checkpoint.save(tmp_path / "saved")
        rows = program.made.table.weight.detach().clone()
    with on_servers(lambda: Table("adam", seed=1), shards=2, rows_only=True) as program:
        made = program.made
        with program.strategy.scope():
            made.other = nn.Embedding(21, 3, dtype=torch.float64)
            made.optimizer.add_param_group({"params": made.other.parameters()})
        program.coordinator.schedule(lambda: (made.other(torch.tensor([1])).sum().backward(), made.optimizer.step()))
        program.coordinator.join(timeout=30)
        before = {name: value.clone() for name, value in made.optimizer.state[made.other.weight].items()}
        checkpoint = Checkpoint(table=made.table, other=made.other, optimizer=made.optimizer)
        with pytest.raises(InvalidArgumentError, match=r"other\.weight is missing in the checkpoint"):
            checkpoint.restore(tmp_path / "saved")
        skipped = checkpoint.restore(tmp_path / "saved", strict=False)
        assert "other.weight" in skipped.missing_keys
        assert torch.equal(made.table.weight.detach(), rows)
        assert same(dict(made.optimizer.state[made.other.weight]), before)


def test_every_server_writes_its_own_shards(job: Job) -> None:
    files = {file.name: file.stat().st_size for file in (job.folder / "saved").iterdir()}
    assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "torchstrat.json"]
    assert min(files.values()) > 0
    assert os.listdir(job.folder) == ["saved"]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.5),
    "sparse adam": torch.optim.SparseAdam,
    "adam": torch.optim.Adam,
    "momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
}


class Table(nn.Module):
    def __init__(self, name: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(20, 3, sparse=name == "sparse adam", dtype=torch.float64)
        self.optimizer = OPTIMIZERS[name](list(self.table.parameters()), lr=0.1)
        self.checkpoint = Checkpoint(table=self.table, optimizer=self.optimizer)

    def step(self, *rows: int) -> None:
        self.optimizer.zero_grad()
        self.table(torch.tensor(rows)).square().sum().backward()
        self.optimizer.step()

    def state(self) -> Any:
        return copy.deepcopy((self.table.state_dict(), self.optimizer.state_dict()["state"]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_step_rows_go_on_on_other_servers(name: str, tmp_path: Path) -> None:
    """With accumulators and moments of the rows that were touched, those that were not, and the number of steps."""

    def go_on(ps: int, shards: int | None, seed: int) -> tuple[Any, Any]:
        """The state where it starts, and where it ends."""
        with on_servers(partial(Table, name, seed), shards, ps=ps, rows_only=True) as program:
            made = program.made
            if seed:
                made.checkpoint.restore(tmp_path / "saved")
            first = made.state()
            for step in range(4, 9) if seed else range(4):
                program.run(Table.step, made, step, step + 1, 7)
            if not seed:
                made.checkpoint.save(tmp_path / "saved")
            return first, made.state()

    _, saved = go_on(2, 3, seed=0)
    assert saved[1], "there is state to be lost"
    plain = Table(name, seed=9)
    plain.checkpoint.restore(tmp_path / "saved")
    assert same(plain.state(), saved)
    assert name != "adagrad" or bool((plain.state()[1][0]["sum"][10:] == 0.5).all()), "of a shard that no step touched"
    start, undisturbed = go_on(2, 3, seed=1)
    assert same(start, saved)
    for ps, shards in ((3, 5), (1, None)):
        start, end = go_on(ps, shards, seed=2)
        assert same(start, saved)
        assert not same(end, saved)
        # A table that is in one piece is no table of rows to Adam and momentum: they step all of it.
        assert same(end, undisturbed) == (shards is not None or name in ("adagrad", "sparse adam"))


def test_tables_on_meta_stay_there(tmp_path: Path) -> None:
    def make(seed: int) -> nn.Embedding:
        torch.manual_seed(seed)
        return nn.Embedding(10, 3, device="meta")

    def values(program: Program) -> torch.Tensor:
        return program.run(lambda table: table(torch.arange(10)).detach(), program.made)

    with on_servers(partial(make, 2), 2) as program:
        Checkpoint(model=program.made).save(tmp_path / "table")
        saved = values(program)
        assert program.made.weight.is_meta
    with on_servers(partial(make, 3), 3, ps=3) as program:
        assert not torch.equal(saved, values(program))
        Checkpoint(model=program.made).restore(tmp_path / "table")
        assert torch.equal(saved, values(program))
        assert program.made.weight.is_meta
    with pytest.raises(InvalidArgumentError, match=r"model\.weight is on meta and has no value"):
        Checkpoint(model=make(0)).save(tmp_path / "other")


# -- a server was lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [[(1,), (0,)], [(0, 1)]], ids=["one, then the other", "all"])
def test_lost_servers_come_back(rounds: list[tuple[int, ...]], job: Job) -> None:
    saved = job.state()
    undisturbed = job.train(3, 4, 5)
    for lost in rounds:
        others = [job.cluster.peer("worker", 0), *(job.cluster.peer("ps", n) for n in (0, 1) if n not in lost)]
        job.lose(*lost)
        for index in lost:
            job.cluster.start_server(index)
        job.restore()
        assert same(saved, job.state())
        assert job.train(3, 4, 5) == undisturbed
        now = [job.cluster.peer("worker", 0), *(job.cluster.peer("ps", n) for n in (0, 1) if n not in lost)]
        assert now == others


def test_no_function_runs_before_the_restore_has_succeeded(job: Job) -> None:
    job.save("bad")
    undisturbed = job.train(3, 4)
    flip(job.folder / "bad" / "__2_0.distcp")
    job.lose(1)
    job.cluster.start_server(1)
    with pytest.raises(InvalidArgumentError, match=r"__2_0\.distcp is damaged"):
        job.restore("bad")
    with pytest.raises((ParameterServerUnavailable, ContextError)):
        job.train(0)
    job.restore()
    assert job.train(3, 4) == undisturbed


def test_what_the_checkpoint_lacks_is_said(job: Job) -> None:
    lost = int(job.strategy.extended.device_of(job.parts.seen).removeprefix("ps:"))
    checkpoint = Checkpoint(**{name: value for name, value in job.objects.items() if name != "seen"})
    checkpoint.save(job.folder / "most")
    job.lose(lost)
    job.cluster.start_server(lost)
    with pytest.warns(UserWarning, match="seen: lost with the parameter server, and not restored"):
        checkpoint.restore(job.folder / "most")
    assert float(job.parts.seen) == 0.0
    job.train(0)
    assert float(job.parts.seen) == 1.0


# -- one cut ----------------------------------------------------------------------------------------------------------


def test_restore_waits_for_the_functions_that_run(job: Job) -> None:
    gate, seen = close_gate("restore"), job.parts.seen

    def slow() -> None:
        pass_gate("restore")
        seen.assign_add(100.0)

    job.coordinator.schedule(slow)
    await_arrivals("restore", 1)
    threading.Timer(0.05, gate.set).start()
    job.restore()
    assert float(seen) == 3.0


def test_records_of_pushes_are_saved_and_not_put_back(job: Job) -> None:
    records = json.loads((job.folder / "saved" / "torchstrat.json").read_text())["servers"]
    assert [records[index]["next_function"] for index in "01"] == [3, 3]
    job.train(3, 4)
    job.restore()
    assert job.cluster.service("ps", 0).store.catalog()["next_function"] == 5
    job.train(3)


# -- what is refused --------------------------------------------------------------------------------------------------


@contextmanager
def refused(job: Job, message: str) -> Iterator[None]:
    """And nothing has changed."""
    before = job.state()
    with pytest.raises(InvalidArgumentError, match=message):
        yield
    assert same(before, job.state())


def test_what_does_not_fit_changes_no_server(job: Job) -> None:
    Checkpoint(out=nn.Linear(4, 5).double(), table=Saved().table).save(job.folder / "other")
    with refused(job, r"out\.weight is torch.float64 \(5, 4\) in the checkpoint and torch.float64 \(3, 4\)"):
        Checkpoint(out=job.parts.out, table=job.parts.table).restore(job.folder / "other")


def test_a_server_that_cannot_write_leaves_the_earlier_checkpoint(job: Job) -> None:
    saved = job.state()
    job.train(3)
    with (
        full_disk("*/__1_0.distcp"),
        pytest.raises(InvalidArgumentError, match=r"ps \d.* cannot write its part .*No sp"),
    ):
        job.save()
    assert os.listdir(job.folder) == ["saved"]
    job.restore()
    assert same(saved, job.state())


def test_a_file_that_the_coordinator_cannot_see(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda file: file.name != "__1_0.distcp" and is_file(file))
    with pytest.raises(InvalidArgumentError, match="is not to be seen by the coordinator"):
        job.save()


def test_not_in_a_scheduled_function(job: Job) -> None:
    path, table = str(job.folder / "inside"), job.parts.table
    job.coordinator.schedule(lambda: Checkpoint(table=table).save(path))
    with pytest.raises(ContextError, match="in a scheduled function"):
        job.coordinator.join(timeout=WAIT)


class Refuses:
    def state_dict(self) -> dict[str, int]:
        return {"version": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("another version")


def test_an_object_that_refuses_comes_last_and_a_note_says_what_is_restored(job: Job, tmp_path: Path) -> None:
    checkpoint = Checkpoint(own=Refuses(), **job.objects)
    checkpoint.save(tmp_path / "with")
    with pytest.raises(ValueError, match="another version") as raised:
        checkpoint.restore(tmp_path / "with")
    names = ", ".join(name for name in job.objects if name != "scheduler")
    left = "own, scheduler, the job's random numbers"
    assert f"restored are: {names}; not, or not whole: {left}." in str(raised.value.__notes__)
    job.train(0)
