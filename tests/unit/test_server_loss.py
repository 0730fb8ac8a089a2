"""``on_server_loss="restore"``: servers die, nobody intervenes, and every step counts once."""

from __future__ import annotations

import inspect
import itertools
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import torchstrat as ts
from tests.unit.checkpoints import flip
from tests.unit.server_losses import EVERY, STEPS, WAIT, Launcher, Program, exact
from torchstrat import CheckpointManager
from torchstrat.errors import (
    CancelledByServerLossError,
    ContextError,
    InvalidArgumentError,
    ParameterServerUnavailable,
    WrongTypeError,
)
from torchstrat.parameter_server import server_loss
from torchstrat.parameter_server.variables.server_group import ServerGroup
from torchstrat.testing.fake_cluster import FakeCluster


@contextmanager
def program(folder: Path, *, workers: int = 2, **options: Any) -> Iterator[tuple[Program, Launcher]]:
    with FakeCluster(workers=workers, ps=2) as cluster:
        made = Program(cluster, folder / "checkpoints", **options)
        yield made, Launcher(made)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_loss, "_PAUSE_SECONDS", 0.0)


# -- the loop goes on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("when", [1, EVERY, EVERY + 1, STEPS])
def test_the_loop_does_not_notice(servers: tuple[int, ...], when: int, tmp_path: Path) -> None:
    with program(tmp_path) as (running, launcher):
        workers = [running.cluster.peer("worker", index) for index in range(2)]
        running.train(lambda step: launcher.kill(*servers) if step == when else None)
        assert running.counts() == exact()
        assert float(running.total) == STEPS
        assert running.restored == [(when - 1) // EVERY * EVERY]
        assert running.progress.step == STEPS
        assert workers == [running.cluster.peer("worker", index) for index in range(2)]


def test_losses_one_after_the_other(tmp_path: Path) -> None:
    with program(tmp_path) as (running, launcher):
        running.train(lambda made: launcher.kill(made % 2) if made % 5 == 0 else None)
        assert running.counts() == exact()
        assert len(running.restored) >= 3


def test_with_raise_the_same_program_ends_with_the_error(tmp_path: Path) -> None:
    with program(tmp_path, on_server_loss="raise") as (running, launcher):
        with pytest.raises(ParameterServerUnavailable, match="parameter server 1"):
            running.train(lambda made: launcher.kill(1) if made == 6 else None)


def test_with_a_position_that_does_not_go_back_steps_are_missing(tmp_path: Path) -> None:
    """The control: what is trained again is what the checkpoint says is to come."""
    with program(tmp_path, saves_progress=False) as (running, launcher):
        running.train(lambda made: launcher.kill(1) if made == EVERY + 2 else None)
        assert running.restored == [EVERY]
        assert running.counts() != exact()
        assert running.counts()[0][EVERY : EVERY + 2] == [0.0, 0.0]


def test_without_the_servers_that_lived_going_back_steps_count_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a server that was not lost holds what was trained since the checkpoint."""
    ask = ServerGroup.ask

    def only_to_the_lost(group: ServerGroup, method: str, payloads: Any, *rest: Any, **options: Any) -> Any:
        if method == "ps.adopt_checkpoint":
            payloads = {1: payloads[1]}
        return ask(group, method, payloads, *rest, **options)

    with program(tmp_path, workers=1) as (running, launcher):
        monkeypatch.setattr(ServerGroup, "ask", only_to_the_lost)

        def lose(made: int) -> None:
            if made == EVERY + 2:
                running.coordinator.join(timeout=WAIT)
                launcher.kill(1)

        running.train(lose)
        assert max(max(vector) for vector in running.counts()) > 1.0


# -- leased rows -------------------------------------------------------------------------------------------------------


def train_leased(running: Program, launcher: Launcher, kills: tuple[int, ...], *, saves_position: bool) -> None:
    """Two epochs over as many rows as there are places, two rows at a time; every fourth lease is a checkpoint."""
    coordinator, count = running.coordinator, running.count
    leased = coordinator.create_leased_dataset(lambda: range(1, STEPS + 1), batch_size=2, shuffle=True, seed=3)
    objects = {"model": running.model, "optimizer": running.optimizer, "total": running.total}
    checkpoint = ts.Checkpoint(**objects, **({"data": leased} if saves_position else {}))
    coordinator.restore_on_server_loss(running.manager, checkpoint, on_restored=running.restored.append)

    def train_step(rows: Any) -> None:
        for row in rows:
            count(int(row))

    step = 0
    running.manager.save(checkpoint, step)
    while leased.epoch < 2:
        for lease in leased:
            coordinator.schedule(train_step, args=(lease,))
            step += 1
            if step in kills:
                if not saves_position:
                    coordinator.join(timeout=WAIT)  # so that something was trained since the checkpoint
                launcher.kill(step % 2)
            if step % 4 == 0:
                running.manager.save(checkpoint, step, asynchronous=True)
        coordinator.join(timeout=WAIT)
    running.manager.close()


@pytest.mark.parametrize("kills", [(3,), (6,), (2, 10), (12,)])
@pytest.mark.filterwarnings("ignore:.*was not saved:UserWarning")  # a kill may meet a save under way
def test_every_row_counts_once_in_each_epoch(kills: tuple[int, ...], tmp_path: Path) -> None:
    with program(tmp_path) as (running, launcher):
        train_leased(running, launcher, kills, saves_position=True)
        assert running.counts() == [[2.0] * STEPS] * 3
        assert float(running.total) == 2 * STEPS
        assert len(running.restored) >= len(kills)


def documented_program() -> str:
    """The code of the docstring."""
    text = inspect.cleandoc(ts.ClusterCoordinator.restore_on_server_loss.__doc__ or "")
    lines = text.split("A whole program::\n", 1)[1].split("\n")
    code = itertools.takewhile(lambda line: not line or line.startswith("    "), lines)
    return textwrap.dedent("\n".join(code))


@pytest.mark.parametrize("takes_back", [True, False])
def test_the_documented_program_counts_its_steps(takes_back: bool, tmp_path: Path) -> None:
    """Its counter is a plain number. The control: without ``on_restored`` it is ahead of the checkpoint."""
    code = documented_program()
    for old, new in {
        'ts.ParameterServerStrategy(resolver, on_server_loss="restore")': "running.strategy",
        'ts.CheckpointManager("checkpoints")': "running.manager",
        "batch_size=64": "batch_size=2",
        "step % 100": "step % 4",
        **({} if takes_back else {", on_restored=go_back": ""}),
    }.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    with program(tmp_path) as (running, launcher):
        save, count, saved = running.manager.save, running.count, []

        def save_and_lose(*args: Any, **options: Any) -> Any:
            handle = save(*args, **options)
            handle.result()
            saved.append(args[1])
            if len(saved) == 3:
                running.coordinator.schedule(running.count, args=(1,)).fetch(timeout=WAIT)
                launcher.kill_and_tell(1)
            return handle

        running.manager.save = save_and_lose  # type: ignore[method-assign]

        def train_step(rows: Any) -> None:
            for row in rows:
                count(int(row))

        names: dict[str, Any] = {"ts": ts, "running": running, "model": running.model, "train_step": train_step}
        names |= {"optimizer": running.optimizer, "dataset_fn": lambda: range(1, STEPS + 1)}
        code = code.replace("optimizer=optimizer, data=leased", "optimizer=optimizer, total=running.total, data=leased")
        exec(code, names)  # the program is the documentation's
        running.manager.close()
        leases = 3 * STEPS // 2
        assert running.counts() == [[3.0] * STEPS] * 3
        assert (names["step"] == leases) == takes_back
        assert names["step"] >= leases


@pytest.mark.filterwarnings("ignore:.*was not saved:UserWarning")
def test_without_the_position_of_the_rows_some_are_lost(tmp_path: Path) -> None:
    """The control."""
    with program(tmp_path) as (running, launcher):
        train_leased(running, launcher, (3, 6), saves_position=False)
        assert running.restored
        assert min(min(vector) for vector in running.counts()) < 2.0


# -- another loss meanwhile --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ps.catalog", "ps.read_checkpoint", "ps.adopt_checkpoint", "ps.read"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("victim", [0, 1])
def test_another_loss_while_restoring(
    method: str, when: str, victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, died = ServerGroup.ask, []

    with program(tmp_path) as (running, launcher):

        def dies_once(group: ServerGroup, asked: str, payloads: Any, *rest: Any, **options: Any) -> Any:
            if asked != method or died or not running.coordinator._on_server_loss._is_restoring:
                return ask(group, asked, payloads, *rest, **options)
            died.append(asked)
            if when == "before":
                launcher.kill(victim)
            answers = ask(group, asked, payloads, *rest, **options)
            if when == "after":
                launcher.kill(victim)
            return answers

        monkeypatch.setattr(ServerGroup, "ask", dies_once)
        running.train(lambda made: launcher.kill(1) if made == EVERY + 2 else None)
        assert died
        assert running.counts() == exact()
        assert running.restored == [EVERY]


def test_a_loss_that_only_a_call_has_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer can fail before the coordinator's own watch of the server does."""
    with program(tmp_path) as (running, _):
        running.train(steps=EVERY)
        ask, failed = ServerGroup.ask, []

        def fails_once(group: ServerGroup, method: str, payloads: Any, *rest: Any, **options: Any) -> Any:
            if method == "ps.read" and not failed:
                failed.append(method)
                peer = running.cluster.peer("ps", 1)
                group._raise_unavailable(1, method, ts.errors.PeerUnavailableError("its connection broke", peer))
            return ask(group, method, payloads, *rest, **options)

        monkeypatch.setattr(ServerGroup, "ask", fails_once)
        assert running.counts() == exact(EVERY)
        assert failed
        assert running.restored == [EVERY]
        running.train()
        assert running.counts() == exact()


# -- what becomes of functions -----------------------------------------------------------------------------------------


def test_what_was_queued_or_running_is_cancelled_and_results_that_had_come_stay(tmp_path: Path) -> None:
    with program(tmp_path, workers=1) as (running, launcher):
        running.train(steps=EVERY)
        early = running.coordinator.schedule(running.count, args=(1,))
        assert early.fetch(timeout=WAIT) == 1
        with running.cluster.network.hold(running.cluster.peer("ps", 1), "ps.push") as held:
            caught = [running.coordinator.schedule(running.count, args=(place,)) for place in (2, 3, 4)]
            held.wait_until_reached()
            launcher.kill(1)
        for value in caught:
            with pytest.raises(CancelledByServerLossError, match="parameter server 1"):
                value.fetch(timeout=WAIT)
        assert early.fetch() == 1
        running.coordinator.join(timeout=WAIT)
        assert running.restored == [EVERY]
        assert running.counts() == exact(EVERY)


@pytest.mark.parametrize("call", ["schedule", "join", "done", "state_dict", "variable", "optimizer", "data"])
def test_the_first_call_restores(call: str, tmp_path: Path) -> None:
    with program(tmp_path) as (running, launcher):
        running.train(steps=EVERY)
        running.coordinator.schedule(running.count, args=(1,)).fetch(timeout=WAIT)
        launcher.kill_and_tell(1)
        calls: dict[str, Any] = {
            "schedule": lambda: running.coordinator.schedule(running.count, args=(2,)),
            "join": lambda: running.coordinator.join(timeout=WAIT),
            "done": lambda: running.coordinator.done(),
            "state_dict": lambda: running.model.state_dict()["vectors.0"].sum(),
            "variable": lambda: float(running.total),
            "optimizer": lambda: running.optimizer.state_dict()["state"][0]["sum"].sum(),
            "data": lambda: running.coordinator.create_per_worker_dataset(lambda: [1]),
        }
        result = calls[call]()
        assert running.restored == [EVERY]
        if call in ("state_dict", "variable", "optimizer"):
            assert float(result) == EVERY
        if call == "done":
            assert result is True
        assert running.counts() == exact(EVERY)


def test_the_function_of_the_call_that_restores_is_cancelled(tmp_path: Path) -> None:
    with program(tmp_path) as (running, launcher):
        running.train(steps=EVERY)
        launcher.kill_and_tell(1)
        value = running.coordinator.schedule(running.count, args=(1,))
        with pytest.raises(CancelledByServerLossError, match=r"count was not queued"):
            value.fetch(timeout=WAIT)
        assert running.counts() == exact(EVERY)


def test_what_the_program_writes_to_a_variable_goes_with_the_rest(tmp_path: Path) -> None:
    with program(tmp_path) as (running, launcher):
        running.train(steps=EVERY)
        launcher.kill_and_tell(0)
        running.total.assign(100.0)
        assert running.restored == [EVERY]
        assert float(running.total) == EVERY


def test_a_function_that_failed_by_itself_is_undone_with_the_rest(tmp_path: Path) -> None:
    with program(tmp_path, workers=1) as (running, launcher):
        running.train(steps=EVERY)
        total = running.total

        def fails() -> None:
            total.assign_add(7.0)
            raise KeyError("mine")

        failed = running.coordinator.schedule(fails)
        with pytest.raises(KeyError, match="mine"):
            failed.get(timeout=WAIT)
        launcher.kill_and_tell(1)
        running.coordinator.join(timeout=WAIT)
        assert float(running.total) == EVERY
        running.train()
        assert running.counts() == exact()


def test_calls_of_other_threads_wait_for_the_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restoring, go_on = threading.Event(), threading.Event()
    restore = CheckpointManager.restore

    def slow(manager: CheckpointManager, *args: Any) -> Any:
        restoring.set()
        assert go_on.wait(WAIT)
        return restore(manager, *args)

    with program(tmp_path) as (running, launcher):
        running.train(steps=EVERY)
        monkeypatch.setattr(CheckpointManager, "restore", slow)
        launcher.kill_and_tell(1)
        values: list[Any] = []
        restores = threading.Thread(target=running.coordinator.join)
        restores.start()
        assert restoring.wait(WAIT)
        waits = threading.Thread(target=lambda: values.append(running.coordinator.schedule(running.count, args=(9,))))
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
        assert not values
        go_on.set()
        restores.join(WAIT)
        waits.join(WAIT)
        with pytest.raises(CancelledByServerLossError, match="was not queued"):
            values[0].fetch(timeout=WAIT)
        assert running.restored == [EVERY]
        assert running.counts() == exact(EVERY)


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_meets_a_loss_saves_nothing(
    asynchronous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with program(tmp_path) as (running, launcher):
        running.train(steps=EVERY)
        running.coordinator.schedule(running.count, args=(EVERY + 1,))
        running.coordinator.join(timeout=WAIT)
        launcher.kill_and_tell(1)
        handle = running.manager.save(running.checkpoint, EVERY + 1, asynchronous=asynchronous)
        with pytest.raises(CancelledByServerLossError, match="step-00000005 was not saved"):
            handle.result()
        assert "step-00000005 was not saved" in caplog.text
        assert [step for step, _ in running.manager.checkpoints] == [0, EVERY]
        assert running.restored == [EVERY]
        running.train()
        assert running.counts() == exact()


def test_a_loss_while_servers_write_in_the_background(tmp_path: Path) -> None:
    with program(tmp_path) as (running, launcher):
        running.train(steps=EVERY)
        with running.cluster.network.hold(running.cluster.peer("ps", 1), "ps.write_checkpoint") as held:
            handle = running.manager.save(running.checkpoint, EVERY + 1, asynchronous=True)
            held.wait_until_reached()
            launcher.kill_and_tell(1)
        with pytest.warns(UserWarning, match="step-00000005 was not saved"):
            running.coordinator.join(timeout=WAIT)
        with pytest.raises(ParameterServerUnavailable):
            handle.result()
        assert running.restored == [EVERY]
        running.manager.save(running.checkpoint, EVERY + 1)
        running.train()
        assert running.counts() == exact()


def test_the_newest_that_is_intact(tmp_path: Path) -> None:
    with program(tmp_path) as (running, launcher):
        running.train(steps=2 * EVERY)
        newest = running.manager.latest
        assert newest is not None
        flip(next(newest.glob("*.distcp")))
        launcher.kill_and_tell(1)
        with pytest.warns(UserWarning, match="is damaged"):
            running.coordinator.join(timeout=WAIT)
        assert running.restored == [EVERY]
        assert running.counts() == exact(EVERY)
        running.train()
        assert running.counts() == exact()


# -- when it is an error after all -------------------------------------------------------------------------------------


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    with program(tmp_path, workers=1) as (running, launcher):
        with running.cluster.network.hold(running.cluster.peer("ps", 1), "ps.push") as held:
            for place in (1, 2, 3):
                running.coordinator.schedule(running.count, args=(place,))
            held.wait_until_reached()
            launcher.kill_and_tell(1)
        for _ in range(2):
            with pytest.raises(ParameterServerUnavailable, match=r"server 1 was lost.* there is no check") as caught:
                running.coordinator.join(timeout=WAIT)
            assert str(caught.value.task) == "ps 1"
        running.coordinator._dispatcher.wait(WAIT)
        assert running.coordinator._dispatcher.is_done  # what was queued is cancelled
        assert running.restored == []


def test_what_on_restored_raises_is_raised(tmp_path: Path) -> None:
    def jump(step: int) -> None:
        raise StopIteration(step)

    with program(tmp_path) as (running, launcher):
        running.coordinator.restore_on_server_loss(running.manager, running.checkpoint, on_restored=jump)
        running.train(steps=EVERY)
        launcher.kill_and_tell(1)
        with pytest.raises(StopIteration, match=str(EVERY)):
            running.coordinator.schedule(running.count, args=(1,))
        running.train()
        assert running.counts() == exact()


def test_a_server_that_does_not_come_back_is_named_and_the_program_may_restore(tmp_path: Path) -> None:
    with program(tmp_path, timeout_seconds=0.3) as (running, _):
        running.train(steps=EVERY)
        running.cluster.kill_server(1)
        with pytest.raises(ParameterServerUnavailable, match="could not bring the servers back: ps 1 did not") as first:
            running.train()
        with pytest.raises(ParameterServerUnavailable) as second:
            running.coordinator.schedule(running.count, args=(1,))
        assert second.value is first.value  # it does not wait once more
        running.cluster.start_server(1)
        running.manager.restore(running.checkpoint)
        running.train()
        assert running.counts() == exact()
        assert running.restored == []


def test_servers_that_die_again_and_again(tmp_path: Path) -> None:
    with program(tmp_path, max_restores=2, within=100) as (running, launcher):
        now = [0.0]
        running.coordinator._on_server_loss._clock = lambda: now[0]
        running.train(steps=EVERY)
        for seconds in (10.0, 60.0, 111.0):  # the first one is too long ago to count, at the third
            now[0] = seconds
            launcher.kill_and_tell(1)
            running.coordinator.join(timeout=WAIT)
        now[0] = 159.0
        launcher.kill_and_tell(1)
        with pytest.raises(ParameterServerUnavailable, match="that is loss 3 within 100 s; max_restores=2"):
            running.coordinator.join(timeout=WAIT)
        assert running.restored == [EVERY] * 3


def test_losses_during_a_restore_are_over_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, tries = [0.0], []

    def always_interrupted(manager: CheckpointManager, checkpoint: ts.Checkpoint) -> int:
        now[0] += 25.0
        tries.append(now[0])
        raise ParameterServerUnavailable("parameter server 0 was lost again")

    with program(tmp_path) as (running, launcher):
        running.train(steps=EVERY)
        running.coordinator._on_server_loss._clock = lambda: now[0]
        monkeypatch.setattr(CheckpointManager, "restore", always_interrupted)
        launcher.kill_and_tell(1)
        with pytest.raises(ParameterServerUnavailable, match="could not bring the servers back: parameter server 0"):
            running.coordinator.join(timeout=WAIT)
        assert tries == [25.0, 50.0, 75.0]


# -- saying from what --------------------------------------------------------------------------------------------------


def test_it_has_to_be_said_from_what(tmp_path: Path) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy(on_server_loss="restore")
        with strategy.scope():
            total = ts.Variable(0.0)
        coordinator = ts.ClusterCoordinator(strategy)
        with pytest.raises(ContextError, match="restore_on_server_loss"):
            coordinator.schedule(lambda: total.assign_add(1.0))


def test_a_policy_that_is_none() -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        with pytest.raises(InvalidArgumentError, match='on_server_loss=\'ignore\' must be "raise" or "restore"'):
            cluster.strategy(on_server_loss="ignore")


def test_from_what_it_cannot_restore(tmp_path: Path) -> None:
    with program(tmp_path) as (running, _):
        restore = running.coordinator.restore_on_server_loss
        manager, checkpoint = running.manager, running.checkpoint
        with pytest.raises(WrongTypeError, match="got Checkpoint and CheckpointManager"):
            restore(checkpoint, manager)
        with pytest.raises(WrongTypeError, match="restore_on_server_loss"):
            restore(manager, checkpoint, on_restored=3)
        for wrong in ({"max_restores": 0}, {"within": 0}):
            with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))}=0"):
                restore(manager, checkpoint, **wrong)
        with pytest.raises(InvalidArgumentError, match=r"leaves out .*: total, the state of Adagrad\."):
            restore(manager, ts.Checkpoint(model=running.model))
    with program(tmp_path, on_server_loss="raise") as (running, _):
        with pytest.raises(InvalidArgumentError, match="on_server_loss='raise'"):
            running.coordinator.restore_on_server_loss(running.manager, running.checkpoint)
