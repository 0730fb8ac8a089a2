"""``on_server_loss="restore"``: servers die, nobody intervenes, and every step counts once."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.parameter_servers import on_servers
from tests.support.server_losses import EVERY, STEPS, WAIT, Program, program
from tests.support.turns import every_second
from torchstrat import CheckpointManager
from torchstrat.errors import (
    CancelledByServerLossError,
    CommunicationTimeoutError,
    ContextError,
    InvalidArgumentError,
    ParameterServerUnavailable,
    WrongTypeError,
)
from torchstrat.parameter_server import job, server_loss
from torchstrat.parameter_server.variables.remote_access import ServerGroup
from torchstrat.testing.fake_cluster import FakeCluster


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_loss, "_PAUSE_SECONDS", 0.0)


# -- the loop goes on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("when", "servers"), every_second([1, EVERY, EVERY + 1, STEPS], [(0,), (1,), (0, 1)]))
def test_the_loop_does_not_notice(servers: tuple[int, ...], when: int, tmp_path: Path) -> None:
    with program(tmp_path) as running:
        workers = [running.cluster.peer("worker", index) for index in range(2)]
        running.train(lambda step: running.kill(*servers) if step == when else None)
        running.assert_exact()
        assert float(running.total) == STEPS
        assert running.restored == [(when - 1) // EVERY * EVERY]
        assert running.progress.step == STEPS
        assert workers == [running.cluster.peer("worker", index) for index in range(2)]


# -- the program of the documentation ---------------------------------------------------------------------------------


def documented_program() -> str:
    """The code of the page on checkpoints."""
    page = (Path(__file__).parents[2] / "docs/how_to/checkpoints.md").read_text()
    blocks = re.findall(r"```\{code-block\} python\n:caption: [^\n]*\n(.*?)```", page, re.DOTALL)
    return next(block for block in blocks if "restore_on_server_loss" in block)


@pytest.mark.parametrize("takes_back", [True, False])
def test_the_documented_program_counts_its_steps(takes_back: bool, tmp_path: Path) -> None:
    """Its counter is a plain number. The control: without ``on_restored`` it is ahead of the checkpoint."""
    code = documented_program()
    for old, new in {
        'ts.ParameterServerStrategy(resolver, on_server_loss="restore")': "running.strategy",
        'ts.CheckpointManager("checkpoints")': "running.manager",
        "batch_size=64": "batch_size=2",
        "step % 100": "step % 4",
        "optimizer=optimizer, data=leased": "optimizer=optimizer, total=running.total, data=leased",
        **({} if takes_back else {", on_restored=go_back": ""}),
    }.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    with program(tmp_path) as running:
        save, count, saved = running.manager.save, running.count, []

        def save_and_lose(*args: Any, **options: Any) -> Any:
            handle = save(*args, **options)
            handle.result()
            saved.append(args[1])
            if len(saved) == 3:
                running.schedule(1)[0].fetch(timeout=WAIT)
                running.kill_and_tell(1)
            return handle

        running.manager.save = save_and_lose  # type: ignore[method-assign]

        def train_step(rows: Any) -> None:
            for row in rows:
                count(int(row))

        names: dict[str, Any] = {"ts": ts, "running": running, "model": running.model, "train_step": train_step}
        names |= {"optimizer": running.optimizer, "dataset_fn": lambda: range(1, STEPS + 1)}
        exec(code, names)  # the program is the documentation's
        running.manager.close()
        leases = 3 * STEPS // 2
        assert running.counts() == [[3.0] * STEPS] * 3
        assert (names["step"] == leases) == takes_back
        assert names["step"] >= leases


# -- another loss meanwhile --------------------------------------------------------------------------------------------


def asked_of_servers(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """``change(ask, method)`` in the place of what the coordinator asks all servers."""
    ask = ServerGroup.ask

    def changed(group: ServerGroup, method: str, *rest: Any, **options: Any) -> Any:
        return change(lambda: ask(group, method, *rest, **options), method)

    monkeypatch.setattr(ServerGroup, "ask", changed)


@pytest.mark.parametrize("method", ["ps.catalog", "ps.read_checkpoint", "ps.adopt_checkpoint", "ps.read"])
@pytest.mark.parametrize(
    ("when", "victim"),
    [
        ("before", 0),
        ("after", 1),
        # Each moment once and each server once in every run.
        pytest.param("before", 1, marks=pytest.mark.soak),
        pytest.param("after", 0, marks=pytest.mark.soak),
    ],
)
def test_another_loss_while_restoring(method, when, victim, tmp_path, monkeypatch) -> None:
    died: list[str] = []
    with program(tmp_path) as running:

        def dies_once(ask: Any, asked: str) -> Any:
            if asked != method or died or not running.coordinator._on_server_loss._is_restoring:
                return ask()
            died.append(asked)
            if when == "before":
                running.kill(victim)
            answers = ask()
            if when == "after":
                running.kill(victim)
            return answers

        asked_of_servers(monkeypatch, dies_once)
        running.train(lambda made: running.kill(1) if made == EVERY + 2 else None)
        assert died
        running.assert_exact()
        assert running.restored == [EVERY]


def test_a_loss_that_only_a_call_has_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer can fail before the coordinator's own watch of the server does."""
    with program(tmp_path, trained=EVERY) as running:
        ask, failed = ServerGroup.ask, []

        def fails_once(group: ServerGroup, method: str, payloads: Any, *rest: Any, **options: Any) -> Any:
            if method == "ps.read" and not failed:
                failed.append(method)
                peer = running.cluster.peer("ps", 1)
                group._raise_unavailable(1, method, ts.errors.PeerUnavailableError("its connection broke", peer))
            return ask(group, method, payloads, *rest, **options)

        monkeypatch.setattr(ServerGroup, "ask", fails_once)
        running.assert_exact(EVERY)
        assert failed
        running.assert_goes_on()


# -- what becomes of functions -----------------------------------------------------------------------------------------


def test_what_was_queued_or_running_is_cancelled_and_results_that_had_come_stay(tmp_path: Path) -> None:
    with program(tmp_path, workers=1, trained=EVERY) as running:
        (early,) = running.schedule(1)
        assert early.fetch(timeout=WAIT) == 1
        with running.cluster.network.hold(running.cluster.peer("ps", 1), "ps.push") as held:
            caught = running.schedule(2, 3, 4)
            held.wait_until_reached()
            running.kill(1)
        for value in caught:
            with pytest.raises(CancelledByServerLossError, match="parameter server 1"):
                value.fetch(timeout=WAIT)
        assert early.fetch() == 1
        running.join()
        running.assert_goes_on()


def fetch_of_cancelled(running: Program) -> None:
    with pytest.raises(CancelledByServerLossError, match=r"count was not queued"):
        running.schedule(2)[0].fetch(timeout=WAIT)


CALLS: dict[str, tuple[Callable[[Program], Any], Any]] = {
    "schedule": (fetch_of_cancelled, None),  # the function of the call that restores is cancelled
    "join": (Program.join, None),
    "done": (lambda running: running.coordinator.done(), True),
    "state_dict": (lambda running: running.model.state_dict()["vectors.0"].sum(), EVERY),
    "variable": (lambda running: float(running.total), EVERY),
    "what is written to a variable goes with the rest": (lambda running: running.total.assign(100.0) and None, None),
    "optimizer": (lambda running: running.optimizer.state_dict()["state"][0]["sum"].sum(), EVERY),
    "a part of a checkpoint": (lambda running: restore_a_part(running, running.checkpoint, only="total"), True),
    "a checkpoint of less": (lambda running: restore_a_part(running, ts.Checkpoint(total=running.total)), True),
    "modules that are made": (lambda running: make_parameters(running), 8.0),
    "variables that are made": (lambda running: make_variables(running), 10.0),
    "data": (lambda running: running.coordinator.create_per_worker_dataset(lambda: iter([1])) and None, None),
}


def make_parameters(running: Program) -> float:
    with running.strategy.scope():
        made = nn.ParameterList(nn.Parameter(torch.full((2,), 1.0)) for _ in range(4))
    return sum(float(one.detach().sum()) for one in made)


def make_variables(running: Program) -> float:
    with running.strategy.scope():
        made = [ts.Variable(2.5) for _ in range(4)]
    return sum(float(one) for one in made)


def restore_a_part(running: Program, checkpoint: ts.Checkpoint, **options: Any) -> bool:
    path = running.manager.latest
    assert path is not None
    return not any(checkpoint.restore(path, **options))


@pytest.mark.parametrize("call", CALLS)
def test_the_first_call_restores(call: str, tmp_path: Path) -> None:
    with program(tmp_path, trained=EVERY) as running:
        running.schedule(1)[0].fetch(timeout=WAIT)
        running.kill_and_tell(1)
        made, result = CALLS[call]
        assert made(running) == result
        assert float(running.total) == EVERY
        running.assert_goes_on()


def test_calls_of_other_threads_wait_for_the_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restoring, go_on, values = threading.Event(), threading.Event(), []
    restore = CheckpointManager.restore

    def slow(manager: CheckpointManager, *args: Any) -> Any:
        restoring.set()
        assert go_on.wait(WAIT)
        return restore(manager, *args)

    with program(tmp_path, trained=EVERY) as running:
        monkeypatch.setattr(CheckpointManager, "restore", slow)
        running.kill_and_tell(1)
        restores = threading.Thread(target=running.coordinator.join)
        waits = threading.Thread(target=lambda: values.extend(running.schedule(9)))
        restores.start()
        assert restoring.wait(WAIT)
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
        assert not values
        go_on.set()
        restores.join(WAIT)
        waits.join(WAIT)
        with pytest.raises(CancelledByServerLossError, match="was not queued"):
            values[0].fetch(timeout=WAIT)
        running.assert_goes_on()


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_meets_a_loss_saves_nothing(asynchronous, tmp_path, caplog) -> None:
    with program(tmp_path, trained=EVERY) as running:
        running.schedule(EVERY + 1)
        running.join()
        running.kill_and_tell(1)
        handle = running.manager.save(running.checkpoint, EVERY + 1, asynchronous=asynchronous)
        with pytest.raises(CancelledByServerLossError, match="step-00000005 was not saved"):
            handle.result()
        assert "step-00000005 was not saved" in caplog.text
        assert [step for step, _ in running.manager.checkpoints] == [0, EVERY]
        running.assert_goes_on()


def test_a_loss_while_servers_write_in_the_background(tmp_path: Path) -> None:
    with program(tmp_path, trained=EVERY) as running:
        with running.cluster.network.hold(running.cluster.peer("ps", 1), "ps.write_checkpoint") as held:
            handle = running.manager.save(running.checkpoint, EVERY + 1, asynchronous=True)
            held.wait_until_reached()
            running.kill_and_tell(1)
        with pytest.warns(UserWarning, match="step-00000005 was not saved"):
            running.join()
        with pytest.raises(ParameterServerUnavailable):
            handle.result()
        running.manager.save(running.checkpoint, EVERY + 1)
        running.assert_goes_on()


# -- when it is an error after all -------------------------------------------------------------------------------------


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    with program(tmp_path, workers=1) as running:
        with running.cluster.network.hold(running.cluster.peer("ps", 1), "ps.push") as held:
            values = running.schedule(1, 2, 3)
            held.wait_until_reached()
            running.kill_and_tell(1)
        for _ in range(2):
            with pytest.raises(ParameterServerUnavailable, match=r"server 1 was lost.* there is no check") as caught:
                running.join()
            assert str(caught.value.task) == "ps 1"
        for value in values:  # what was queued is cancelled
            with pytest.raises((CancelledByServerLossError, ParameterServerUnavailable)):
                value.get(timeout=WAIT)
        assert running.restored == []


def test_what_on_restored_raises_is_raised(tmp_path: Path) -> None:
    def jump(step: int) -> None:
        raise StopIteration(step)

    with program(tmp_path, on_restored=jump, trained=EVERY) as running:
        running.kill_and_tell(1)
        with pytest.raises(StopIteration, match=str(EVERY)):
            running.schedule(1)
        running.train()
        running.assert_exact()


def test_a_server_that_does_not_come_back_is_named_and_the_program_may_restore(tmp_path: Path) -> None:
    with program(tmp_path, timeout_seconds=0.3, restarts_servers=False, trained=EVERY) as running:
        running.kill(1)
        with pytest.raises(ParameterServerUnavailable, match="could not bring the servers back: ps 1 did not") as first:
            running.train()
        with pytest.raises(ParameterServerUnavailable) as second:
            running.schedule(1)
        assert second.value is first.value  # it does not wait once more
        running.cluster.start_server(1)
        running.manager.restore(running.checkpoint)
        running.train()
        running.assert_exact()
        assert running.restored == []


def test_servers_that_die_again_and_again(tmp_path: Path) -> None:
    with program(tmp_path, max_restores=2, within=100, trained=EVERY) as running:
        now = [0.0]
        running.coordinator._on_server_loss._clock = lambda: now[0]
        for seconds in (10.0, 60.0, 111.0):  # the first one is too long ago to count, at the third
            now[0] = seconds
            running.kill_and_tell(1)
            running.join()
        now[0] = 159.0
        running.kill_and_tell(1)
        with pytest.raises(ParameterServerUnavailable, match="that is loss 3 within 100 s; max_restores=2"):
            running.join()
        assert running.restored == [EVERY] * 3


def test_losses_during_a_restore_are_over_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, tries = [0.0], []

    def always_interrupted(manager: CheckpointManager, checkpoint: ts.Checkpoint) -> int:
        now[0] += 25.0
        tries.append(now[0])
        raise ParameterServerUnavailable("parameter server 0 was lost again")

    with program(tmp_path, trained=EVERY) as running:
        running.coordinator._on_server_loss._clock = lambda: now[0]
        monkeypatch.setattr(CheckpointManager, "restore", always_interrupted)
        running.kill_and_tell(1)
        with pytest.raises(ParameterServerUnavailable, match="could not bring the servers back: parameter server 0"):
            running.join()
        assert tries == [25.0, 50.0, 75.0]


# -- saying from what --------------------------------------------------------------------------------------------------


def test_it_has_to_be_said_from_what() -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        coordinator = ts.ClusterCoordinator(cluster.strategy(on_server_loss="restore"))
        with pytest.raises(ContextError, match="restore_on_server_loss"):
            coordinator.schedule(int)


def test_a_policy_that_is_none() -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        with pytest.raises(InvalidArgumentError, match='on_server_loss=\'ignore\' must be "raise" or "restore"'):
            cluster.strategy(on_server_loss="ignore")


def test_from_what_it_cannot_restore(tmp_path: Path) -> None:
    with program(tmp_path) as running:
        restore, manager, checkpoint = running.coordinator.restore_on_server_loss, running.manager, running.checkpoint
        with pytest.raises(WrongTypeError, match="got Checkpoint and CheckpointManager"):
            restore(checkpoint, manager)
        with pytest.raises(WrongTypeError, match="restore_on_server_loss"):
            restore(manager, checkpoint, on_restored=3)
        for wrong in ({"max_restores": 0}, {"within": 0}):
            with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))}=0"):
                restore(manager, checkpoint, **wrong)
        with pytest.raises(InvalidArgumentError, match=r"leaves out .*: total, the state of Adagrad\."):
            restore(manager, ts.Checkpoint(model=running.model))
    with program(tmp_path, on_server_loss="raise") as running:
        with pytest.raises(InvalidArgumentError, match="on_server_loss='raise'"):
            running.coordinator.restore_on_server_loss(running.manager, running.checkpoint)


# -- a table that grows ------------------------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)

    def step(self, *ids: int) -> int:
        self.optimizer.zero_grad()
        self.table(torch.tensor(ids)).sum().backward()
        self.optimizer.step()
        return len(self.table.weight)


def test_a_server_that_is_lost_while_a_table_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the server of the new rows has them, the table has grown, and the other one learns of it later."""
    with on_servers(Table, shards=2, rows_only=True) as running:
        table, checkpoint = running.made.table, ts.Checkpoint(model=running.made)
        running.run(Table.step, running.made, 1, 9)
        checkpoint.save(tmp_path / "before")
        ask, asked = ServerGroup.ask, []

        def ask_once(self: ServerGroup, method: str, payloads: Any, **options: Any) -> Any:
            if method == "ps.grow":
                asked.append(payloads)
                if len(asked) == 2:
                    running.cluster.kill_server(next(iter(payloads)))
            return ask(self, method, payloads, **options)

        monkeypatch.setattr(ServerGroup, "ask", ask_once)
        with pytest.raises(ParameterServerUnavailable):
            ts.grow_rows(table, 15)
        assert table.num_embeddings == len(table.weight) == 15
        running.cluster.start_server(next(iter(asked[1])))
        with pytest.raises(InvalidArgumentError, match=r"\(10, 3\) in the checkpoint and torch\.float32 \(15, 3\)"):
            checkpoint.restore(tmp_path / "before")
        with pytest.warns(UserWarning, match="lost with the parameter server"):
            checkpoint.restore(tmp_path / "before", strict=False)
        ts.grow_rows(table, 15)
        assert running.run(Table.step, running.made, 1, 14) == 15
        checkpoint.save(tmp_path / "after")
        saved = table.weight.detach().clone()
        running.run(Table.step, running.made, 1, 14)
        checkpoint.restore(tmp_path / "after")
        assert torch.equal(table.weight.detach(), saved)


# -- servers that are late ---------------------------------------------------------------------------------------------


def test_state_that_did_not_reach_the_servers_comes_with_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    push, tries = job.Job.push_optimizer, iter((True, False))

    def late_once(self: job.Job, optimizer: torch.optim.Optimizer) -> None:
        if next(tries):
            raise CommunicationTimeoutError("a server was busy")
        push(self, optimizer)

    def step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()

    monkeypatch.setattr(job.Job, "push_optimizer", late_once)
    made: list[Any] = []

    def place() -> None:
        with strategy.scope():
            made.append(nn.Linear(1, 1, bias=False))
            nn.init.zeros_(made[0].weight)
            made.append(torch.optim.SGD(made[0].parameters(), lr=1.0, momentum=1.0))
            made[1].state[made[0].weight]["momentum_buffer"] = torch.full((1, 1), 2.0)

    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with pytest.raises(CommunicationTimeoutError):
            place()
        ts.coordinator.ClusterCoordinator(strategy).schedule(step, args=made).get(timeout=60)
        assert made[0].state_dict()["weight"].item() == -3.0
