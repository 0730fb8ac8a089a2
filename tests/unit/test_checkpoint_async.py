"""Saving in the background, and at one moment across parameter servers whose functions go on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.checkpoints import contents, same
from tests.unit.gates import await_arrivals, close_gate, pass_gate
from torchstrat import Checkpoint, SaveHandle
from torchstrat.checkpoint import saving, writing
from torchstrat.errors import CommunicationTimeoutError, InvalidArgumentError, ParameterServerUnavailable
from torchstrat.parameter_server.dispatcher import Dispatcher
from torchstrat.parameter_server.server import checkpoint_shards
from torchstrat.testing.fake_cluster import FakeCluster

WAIT = 60


class HeldWrites:
    """Writing waits at a gate."""

    def __init__(self, write: Callable[..., Any]) -> None:
        self.write, self.reached, self.go_on = write, threading.Semaphore(0), threading.Event()
        self.error: Exception | None = None

    def __call__(self, *args: Any) -> Any:
        self.reached.release()
        assert self.go_on.wait(WAIT)
        if self.error is not None:
            raise self.error
        return self.write(*args)

    def wait_until_reached(self) -> None:
        assert self.reached.acquire(timeout=WAIT)


@contextlib.contextmanager
def held_writes(monkeypatch: pytest.MonkeyPatch, module: Any = writing) -> Iterator[HeldWrites]:
    with monkeypatch.context() as patched:
        held = HeldWrites(module.write_part)
        patched.setattr(module, "write_part", held)
        try:
            yield held
        finally:
            held.go_on.set()


def job(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}


def train(objects: dict[str, Any]) -> None:
    objects["optimizer"].zero_grad()
    objects["model"](torch.rand(4, 3)).square().sum().backward()
    objects["optimizer"].step()


def copy_of(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) for name, value in contents(objects).items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def restored(path: Path) -> dict[str, Any]:
    objects = job(7)
    Checkpoint(**objects).restore(path)
    return contents(objects)


# -- in one process ---------------------------------------------------------------------------------------------------


def test_a_blocking_save_returns_what_is_done(tmp_path: Path) -> None:
    handle = Checkpoint(**job()).save(tmp_path / "saved")
    assert handle.done()
    assert handle.result() == handle.path == tmp_path / "saved"


def save_and_train_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the checkpoint is of the moment of `save`, though training went on before it was written."""
    objects = job()
    train(objects)
    before = copy_of(objects)
    with held_writes(monkeypatch) as held:
        handle = Checkpoint(**objects).save(path, asynchronous=True)
        held.wait_until_reached()
        assert not handle.done()
        assert not path.exists()
        train(objects)
        assert not same(before, contents(objects))
        held.go_on.set()
        assert handle.result(WAIT) == path
    return same(before, restored(path))


def test_training_goes_on_while_the_state_of_before_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_and_train_on(tmp_path / "saved", monkeypatch)
    # The control: without copies it would be the state of later.
    monkeypatch.setattr(writing, "_copied", lambda writes: writes)
    assert not save_and_train_on(tmp_path / "torn", monkeypatch)


def test_waiting_for_a_save_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_writes(monkeypatch) as held:
        handle = Checkpoint(**job()).save(tmp_path / "saved", asynchronous=True)
        for timeout in (0.01, timedelta(milliseconds=10)):
            with pytest.raises(CommunicationTimeoutError, match=r"saved was not written after 0.01 s; it is still"):
                handle.result(timeout)
        held.go_on.set()
        handle.result(WAIT)


def failed_save(checkpoint: Checkpoint, path: Path, monkeypatch: pytest.MonkeyPatch) -> SaveHandle:
    with held_writes(monkeypatch) as held:
        held.error = OSError(28, "No space left on device")
        handle = checkpoint.save(path, asynchronous=True)
        held.go_on.set()
        told = threading.Event()
        handle.add_done_callback(lambda _: told.set())
        assert told.wait(WAIT)
    return handle


def test_an_error_in_the_background_is_told_by_the_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(**job())
    checkpoint.save(tmp_path / "saved")
    handle = failed_save(checkpoint, tmp_path / "saved", monkeypatch)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"cannot be written .*No space left"):
            handle.result()
    assert restored(tmp_path / "saved")  # the old one is there
    checkpoint.save(tmp_path / "saved")  # who asked is not told again


def test_an_error_in_the_background_that_nobody_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(**job())
    handle = failed_save(checkpoint, tmp_path / "saved", monkeypatch)
    with pytest.raises(InvalidArgumentError, match="No space left"):
        checkpoint.save(tmp_path / "next")
    assert not (tmp_path / "next").exists()
    checkpoint.save(tmp_path / "next")
    assert handle.done()
    assert "failed" in repr(handle)


@pytest.mark.parametrize("call", ["save", "save in the background", "restore"])
def test_what_comes_after_a_save_waits_for_it(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = job()
    checkpoint, other = Checkpoint(**objects), Checkpoint(**job(1))
    other.save(tmp_path / "other")
    order: list[str] = []
    handles: list[SaveHandle] = []

    def later() -> None:
        if call == "restore":
            other.restore(tmp_path / "other")
        else:
            handles.append(other.save(tmp_path / "later", asynchronous=call != "save"))
        order.append("later")

    with held_writes(monkeypatch) as held:
        handle = checkpoint.save(tmp_path / "saved", asynchronous=True)
        handle.add_done_callback(lambda _: order.append("saved"))
        held.wait_until_reached()
        second = threading.Thread(target=later)
        second.start()
        second.join(timeout=0.05)
        assert order == []
        held.go_on.set()
        second.join(timeout=WAIT)
        handle.result(WAIT)
        for one in handles:
            one.result(WAIT)
    assert sorted(order) == ["later", "saved"]
    assert restored(tmp_path / "saved")


def test_a_save_whose_thread_has_not_begun_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the thread that has asked for it."""
    checkpoint = Checkpoint(**job())
    late: list[threading.Thread] = []
    with monkeypatch.context() as patched:
        patched.setattr(saving, "TURN_TIMEOUT", timedelta(milliseconds=50))
        patched.setattr(threading.Thread, "start", lambda thread: late.append(thread))
        handle = checkpoint.save(tmp_path / "first", asynchronous=True)
        for call in (checkpoint.save, checkpoint.restore):
            with pytest.raises(CommunicationTimeoutError, match=r"second waited 0.05 s for saving .*first, which is"):
                call(tmp_path / "second")
    late[0].start()
    handle.result(WAIT)
    checkpoint.save(tmp_path / "second")


def test_where_no_thread_can_be_started_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    checkpoint = Checkpoint(**job())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        assert checkpoint.save(tmp_path / "saved", asynchronous=True).done()
    checkpoint.save(tmp_path / "next")
    assert restored(tmp_path / "saved")


# -- on parameter servers ---------------------------------------------------------------------------------------------


class Pair:
    """Two variables on two servers, and a function that adds 1 to both; ``gate``: waits there in between."""

    def __init__(self, cluster: FakeCluster, **options: Any) -> None:
        self.strategy = cluster.strategy(**options)
        with self.strategy.scope():
            first, second = ts.Variable(torch.zeros(2), name="first"), ts.Variable(torch.zeros(2), name="second")
        self.coordinator = ts.ClusterCoordinator(self.strategy)
        self.first, self.second = first, second
        self.checkpoint = Checkpoint(first=first, second=second)

        def add(gate: str | None = None) -> None:
            first.assign_add(torch.ones(2))
            if gate is not None:
                pass_gate(gate)
            second.assign_add(torch.ones(2))

        self.add = add

    @staticmethod
    def of(path: Path) -> tuple[float, float]:
        values = {"first": torch.full((2,), -1.0), "second": torch.full((2,), -1.0)}
        Checkpoint(**values).restore(path)
        assert all(bool((value == value[0]).all()) for value in values.values())
        return float(values["first"][0]), float(values["second"][0])


def save_half_way(path: Path) -> tuple[float, float]:
    with FakeCluster(workers=1, ps=2) as cluster:
        pair = Pair(cluster)
        gate = close_gate("half-way")
        pair.coordinator.schedule(pair.add, args=("half-way",))
        waiting = [pair.coordinator.schedule(pair.add) for _ in range(3)]
        await_arrivals("half-way", 1)
        saving = threading.Thread(target=pair.checkpoint.save, args=(path,))
        saving.start()
        saving.join(timeout=0.1)
        late = pair.coordinator.schedule(pair.add)  # the queue takes more meanwhile
        gate.set()
        saving.join(timeout=WAIT)
        assert not saving.is_alive()
        pair.coordinator.join(timeout=WAIT)
        pair.coordinator.fetch([*waiting, late])
        assert pair.first.read_value().tolist() == pair.second.read_value().tolist() == [5.0, 5.0]
    return Pair.of(path)


def test_no_function_is_half_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_half_way(tmp_path / "saved") == (1.0, 1.0)
    # The control: without the pause, the servers' moments are on two sides of the function's second change.
    monkeypatch.setattr(Dispatcher, "paused", lambda *_: contextlib.nullcontext())
    assert save_half_way(tmp_path / "torn") == (1.0, 0.0)


def test_a_function_that_was_lost_with_its_worker_ends_first(tmp_path: Path) -> None:
    """One server has what it changed, the other has not; so it runs again before the servers mark anything."""
    with FakeCluster(workers=2, ps=2) as cluster:
        pair = Pair(cluster)
        gate = close_gate("lost")
        pair.coordinator.schedule(pair.add, args=("lost",))
        await_arrivals("lost", 1)
        saving = threading.Thread(target=pair.checkpoint.save, args=(tmp_path / "saved",))
        saving.start()
        saving.join(timeout=0.1)
        dispatcher = pair.coordinator._dispatcher
        cluster.kill_worker(dispatcher._scheduler.worker_of(0))
        await_arrivals("lost", 1)  # on the other worker
        gate.set()
        saving.join(timeout=WAIT)
        pair.coordinator.join(timeout=WAIT)
    assert Pair.of(tmp_path / "saved") == (1.0, 1.0)


def test_a_function_that_does_not_end(tmp_path: Path) -> None:
    with FakeCluster(workers=1, ps=2) as cluster:
        pair = Pair(cluster, timeout=timedelta(seconds=1))
        gate = close_gate("endless")
        pair.coordinator.schedule(pair.add, args=("endless",))
        pair.coordinator.schedule(pair.add)
        await_arrivals("endless", 1)
        message = r"saving a checkpoint waited 1.0 s: function 0 on worker 0 is running, 1 functions are queued"
        with pytest.raises(CommunicationTimeoutError, match=message):
            pair.checkpoint.save(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        gate.set()
        pair.coordinator.join(timeout=WAIT)  # what was held back runs
        pair.checkpoint.save(tmp_path / "saved")
    assert Pair.of(tmp_path / "saved") == (2.0, 2.0)


def test_functions_run_while_servers_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCluster(workers=1, ps=2) as cluster, held_writes(monkeypatch, checkpoint_shards) as held:
        pair = Pair(cluster)
        pair.coordinator.schedule(pair.add)
        handle = pair.checkpoint.save(tmp_path / "saved", asynchronous=True)
        held.wait_until_reached()
        for _ in range(4):
            pair.coordinator.schedule(pair.add)
        pair.coordinator.join(timeout=WAIT)
        assert pair.first.read_value().tolist() == [5.0, 5.0]
        assert not handle.done()
        held.go_on.set()
        handle.result(WAIT)
        marks = [one.cut for ps in range(2) for one in cluster.service("ps", ps).store._variables.values()]
        assert marks == [None, None]
    first, second = Pair.of(tmp_path / "saved")
    assert first == second <= 1.0


@pytest.mark.parametrize("method", ["ps.begin_checkpoint", "ps.write_checkpoint"])
def test_a_server_that_dies_in_between(method: str, tmp_path: Path) -> None:
    with FakeCluster(workers=1, ps=2) as cluster:
        pair = Pair(cluster)
        pair.checkpoint.save(tmp_path / "saved")
        pair.coordinator.schedule(pair.add)
        pair.coordinator.join(timeout=WAIT)
        errors: list[BaseException] = []

        def save() -> None:
            try:
                pair.checkpoint.save(tmp_path / "saved")
            except ParameterServerUnavailable as error:
                errors.append(error)

        with cluster.network.hold(cluster.peer("ps", 1), method, "before") as held:
            saving = threading.Thread(target=save)
            saving.start()
            held.wait_until_reached()
            cluster.kill_server(1)
        saving.join(timeout=WAIT)
        assert [error.task.index for error in errors] == [1]
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]
        assert Pair.of(tmp_path / "saved") == (0.0, 0.0)
        cluster.start_server(1)
        pair.checkpoint.restore(tmp_path / "saved")
        pair.coordinator.schedule(pair.add)
        pair.coordinator.join(timeout=WAIT)
        pair.checkpoint.save(tmp_path / "saved")
        assert all(one.cut is None for one in cluster.service("ps", 0).store._variables.values())
    assert Pair.of(tmp_path / "saved") == (1.0, 1.0)


def test_a_server_that_has_no_memory_left_gives_the_checkpoint_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchstrat.parameter_server.server import cut

    def full(needed: int, what: str, advice: str) -> None:
        raise InvalidArgumentError(f"{what} needs {needed} bytes")

    with FakeCluster(workers=1, ps=2) as cluster, held_writes(monkeypatch, checkpoint_shards) as held:
        pair = Pair(cluster)
        monkeypatch.setattr(cut, "_CHECKED_BYTES", 0)
        monkeypatch.setattr(cut, "check_fits", full)
        handle = pair.checkpoint.save(tmp_path / "saved", asynchronous=True)
        held.wait_until_reached()
        pair.coordinator.schedule(pair.add)
        pair.coordinator.join(timeout=WAIT)
        assert pair.first.read_value().tolist() == [1.0, 1.0]
        held.go_on.set()
        with pytest.raises(ts.errors.TorchstratError, match=r"gave up a checkpoint .*copy of '(first|second)'"):
            handle.result(WAIT)
    assert not list(tmp_path.iterdir())
