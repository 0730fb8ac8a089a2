"""Saving in the background, and at one moment across parameter servers whose functions go on."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.faults.counting import wait_until
from tests.support.checkpoint_writes import WAIT, full_disk, held_writes
from tests.support.checkpoints import contents, job, restored, same, train
from tests.support.gates import await_arrivals, close_gate, pass_gate
from torchstrat import Checkpoint
from torchstrat.errors import (
    CommunicationTimeoutError,
    InvalidArgumentError,
    ParameterServerUnavailable,
    TorchstratError,
)
from torchstrat.testing.fake_cluster import FakeCluster


def test_training_goes_on_while_the_state_of_before_is_written(tmp_path: Path) -> None:
    objects, path = job(), tmp_path / "saved"
    train(objects, range(1))
    before = copy.deepcopy(contents(objects))
    with held_writes() as held:
        handle = Checkpoint(**objects).save(path, asynchronous=True)
        train(objects, range(1, 2))
        held.wait_until_reached()
        assert not handle.done()
        assert not path.exists()
        for timeout in (0.01, timedelta(milliseconds=10)):
            with pytest.raises(CommunicationTimeoutError, match=r"was not written after 0.01 s; it is still"):
                handle.result(timeout)
        held.go_on.set()
        assert handle.result(WAIT) == handle.path == path
    assert handle.done()
    assert same(before, restored(path))
    assert not same(before, contents(objects))


@pytest.mark.parametrize("asks", [True, False])
def test_an_error_in_the_background_is_told_once_to_whoever_did_not_ask(asks: bool, tmp_path: Path) -> None:
    checkpoint, told = Checkpoint(**job()), threading.Event()
    checkpoint.save(tmp_path / "saved")
    with full_disk():
        handle = checkpoint.save(tmp_path / "saved", asynchronous=True)
        handle.add_done_callback(lambda _: told.set())
        assert told.wait(WAIT)
    assert handle.done()
    assert "failed" in repr(handle)
    for call in (handle.result, handle.result) if asks else (lambda: checkpoint.save(tmp_path / "next"),):
        with pytest.raises(InvalidArgumentError, match=r"cannot be written .*No space left"):
            call()
    assert not (tmp_path / "next").exists()
    assert restored(tmp_path / "saved"), "the earlier one"
    checkpoint.save(tmp_path / "next")


def test_where_no_thread_can_be_started_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    checkpoint = Checkpoint(**job())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        assert checkpoint.save(tmp_path / "saved", asynchronous=True).done()
    handle = checkpoint.save(tmp_path / "next")
    assert handle.done()
    assert handle.result() == tmp_path / "next"
    assert restored(tmp_path / "saved")


class Pair:
    """Two variables on two servers, and a function that adds 1 to both; it may wait at the gate in between."""

    def __init__(self, cluster: FakeCluster, size: int = 2, **options: Any) -> None:
        self.strategy = cluster.strategy(**options)
        with self.strategy.scope():
            first, second = (ts.Variable(torch.zeros(size), name=name) for name in ("first", "second"))
        self.coordinator = ts.ClusterCoordinator(self.strategy)
        self.first, self.second = first, second
        self.checkpoint = Checkpoint(first=first, second=second)
        self.gate = close_gate("half-way")

        def add(waits: bool) -> None:
            first.assign_add(torch.ones(size))
            if waits:
                pass_gate("half-way")
            second.assign_add(torch.ones(size))

        self._add = add

    def add(self, times: int = 1, *, waits: bool = False, join: bool = False) -> ts.RemoteValue:
        for _ in range(times):
            last = self.coordinator.schedule(self._add, args=(waits,))
        if waits:
            await_arrivals("half-way", 1)
        if join:
            self.coordinator.join(timeout=WAIT)
        return last

    @contextlib.contextmanager
    def saving(self, path: Path) -> Iterator[list[BaseException]]:
        """A save that the block runs beside, and then the gate is opened; the error of a lost server."""
        errors: list[BaseException] = []

        def save() -> None:
            try:
                self.checkpoint.save(path)
            except ParameterServerUnavailable as error:
                errors.append(error)

        thread = threading.Thread(target=save)
        thread.start()
        thread.join(timeout=0.1)  # it waits for the function that runs
        try:
            yield errors
        finally:
            self.gate.set()
            thread.join(timeout=WAIT)
        assert not thread.is_alive()

    @staticmethod
    def of(path: Path) -> tuple[float, float]:
        values = {"first": torch.full((2,), -1.0), "second": torch.full((2,), -1.0)}
        Checkpoint(**values).restore(path)
        assert all(bool((value == value[0]).all()) for value in values.values())
        return float(values["first"][0]), float(values["second"][0])


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(workers=1, ps=2) as made:
        yield made


def test_no_function_is_half_in_a_checkpoint(cluster: FakeCluster, tmp_path: Path) -> None:
    pair = Pair(cluster)
    pair.add(waits=True)
    pair.add(3)
    with pair.saving(tmp_path / "saved"):
        pair.add()  # the queue takes more meanwhile
    pair.coordinator.join(timeout=WAIT)
    assert pair.first.read_value().tolist() == pair.second.read_value().tolist() == [5.0, 5.0]
    assert Pair.of(tmp_path / "saved") == (1.0, 1.0)


def test_a_function_that_was_lost_with_its_worker_ends_first(tmp_path: Path) -> None:
    """One server has what it changed, the other has not; so it runs again before the servers mark anything."""
    with FakeCluster(workers=2, ps=2) as cluster:
        pair = Pair(cluster)
        runs_on = re.search(r"runs on worker (\d)", repr(pair.add(waits=True)))
        assert runs_on is not None
        with pair.saving(tmp_path / "saved"):
            cluster.kill_worker(int(runs_on[1]))
            await_arrivals("half-way", 1)  # on the other worker
        pair.coordinator.join(timeout=WAIT)
    assert Pair.of(tmp_path / "saved") == (1.0, 1.0)


def test_a_function_that_does_not_end(cluster: FakeCluster, tmp_path: Path) -> None:
    pair = Pair(cluster, timeout=timedelta(seconds=4))  # which the last save keeps to, on a busy machine too
    pair.add(waits=True)
    pair.add()
    message = r"saving a checkpoint waited 4.0 s: function 0 on worker 0 is running, 1 functions are queued"
    with pytest.raises(CommunicationTimeoutError, match=message):
        pair.checkpoint.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    pair.gate.set()
    pair.coordinator.join(timeout=WAIT)  # what was held back runs
    pair.checkpoint.save(tmp_path / "saved")
    assert Pair.of(tmp_path / "saved") == (2.0, 2.0)


@contextlib.contextmanager
def held_servers(cluster: FakeCluster) -> Iterator[Any]:
    """They have marked the moment, and begin to write after the block."""
    first, second = (cluster.network.hold(cluster.peer("ps", index), "ps.write_checkpoint") for index in (0, 1))
    with first, second:
        yield first


def let_go(ended: list[Any]) -> set[int]:
    """Servers that have no copies of that moment any more, by the recorded answers."""
    return {one.peer.task.index for one in ended if one.kind == "result"}


def test_functions_run_while_servers_write(cluster: FakeCluster, tmp_path: Path) -> None:
    pair, ended = Pair(cluster), cluster.network.record("ps.end_checkpoint")
    pair.add()
    with held_servers(cluster) as held:
        handle = pair.checkpoint.save(tmp_path / "saved", asynchronous=True)
        held.wait_until_reached()
        pair.add(4, join=True)
        assert pair.first.read_value().tolist() == [5.0, 5.0]
        assert not handle.done()
    handle.result(WAIT)
    wait_until(lambda: let_go(ended) == {0, 1}, "both servers have let go")  # nobody waits for their answers
    first, second = Pair.of(tmp_path / "saved")
    assert first == second <= 1.0


@pytest.mark.parametrize("method", ["ps.begin_checkpoint", "ps.write_checkpoint"])
def test_a_server_that_dies_in_between(method: str, cluster: FakeCluster, tmp_path: Path) -> None:
    pair = Pair(cluster)
    pair.checkpoint.save(tmp_path / "saved")
    pair.add(join=True)
    ended = cluster.network.record("ps.end_checkpoint")
    with (
        cluster.network.hold(cluster.peer("ps", 1), method, "before") as held,
        pair.saving(tmp_path / "saved") as errors,
    ):
        held.wait_until_reached()
        cluster.kill_server(1)
    assert [error.task.index for error in errors] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert Pair.of(tmp_path / "saved") == (0.0, 0.0)
    cluster.start_server(1)
    pair.checkpoint.restore(tmp_path / "saved")
    wait_until(lambda: 0 in let_go(ended), "server 0 has let go")
    pair.add(join=True)
    pair.checkpoint.save(tmp_path / "saved")
    assert Pair.of(tmp_path / "saved") == (1.0, 1.0)


def test_a_server_that_has_no_memory_left_gives_the_checkpoint_up(cluster, tmp_path, monkeypatch) -> None:
    pair, read = Pair(cluster, size=1 << 22), Path.read_text
    with held_servers(cluster) as held:
        handle = pair.checkpoint.save(tmp_path / "saved", asynchronous=True)
        held.wait_until_reached()
        none_left = lambda file, **how: "MemAvailable: 1 kB" if file.name == "meminfo" else read(file, **how)  # noqa: E731
        monkeypatch.setattr(Path, "read_text", none_left)
        pair.add(join=True)
        assert pair.first.read_value().unique().tolist() == [1.0]
    with pytest.raises(TorchstratError, match=r"gave up a checkpoint .*copy of '(first|second)' .* needs 16,777,216"):
        handle.result(WAIT)
    assert not list(tmp_path.iterdir())
