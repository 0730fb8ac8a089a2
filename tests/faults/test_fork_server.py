"""Workers and servers that are forks of one process: as good as programs of their own, whoever is killed."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import torchstrat as ts
from tests.child_processes import children_of
from tests.faults.counting import AT_ONCE, PATIENCE_SECONDS, QUIET, wait_until
from tests.faults.forked import Forked
from tests.support.programs import gone
from torchstrat.launch import LocalCluster

pytestmark = [
    pytest.mark.deadline(300),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there is no fork server"),
]


@contextmanager
def cluster_of(
    workers: int = 1, env: dict[str, str] = QUIET, **options: Any
) -> Iterator[tuple[LocalCluster, ts.ClusterCoordinator]]:
    with LocalCluster(workers, 1, env=env, **options) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        try:
            yield cluster, ts.ClusterCoordinator(strategy)
        finally:
            strategy.close()


def on_each_worker(coordinator: ts.ClusterCoordinator, number: int = 1) -> list[dict[str, Any]]:
    """What each worker says of its process."""

    def describe() -> dict[str, Any]:
        import random

        import numpy as np

        return {
            "index": coordinator.get_current_worker_index(),
            "pid": os.getpid(),
            "random": (random.getstate(), tuple(np.random.get_state()[1])),
            "environment": dict(os.environ),
            "arguments": sys.argv[1:],
            "name": Path("/proc/self/comm").read_text().strip(),
        }

    found: dict[int, dict[str, Any]] = {}
    while len(found) < number:
        told = coordinator.schedule(describe).get(PATIENCE_SECONDS)
        found[told["index"]] = told
    return [found[index] for index in range(number)]


def pids_of(cluster: LocalCluster, workers: int) -> list[int]:
    return [cluster.process(*task).pid for task in (*(("worker", index) for index in range(workers)), ("ps", 0))]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def child_with(command: str, parent: int, before: Set[int] = frozenset()) -> int:
    """Once it has come to its command: what has just been started is a copy of its parent first."""

    def found() -> list[int]:
        return [pid for pid in children_of(parent) - before if command in command_of(pid)]

    wait_until(lambda: bool(found()), f"a child that runs {command}")
    (pid,) = found()
    return pid


def wait_for_end_of(*pids: int) -> None:
    wait_until(lambda: all(map(gone, pids)), f"the end of {pids}")


def test_each_fork_is_a_process_of_its_own_and_another_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also when the fork server was killed, and when one that was just forked cannot be watched."""
    with cluster_of(2, {**QUIET, "EXTRA": "yes"}, restart=AT_ONCE) as (cluster, coordinator):
        told, pids = on_each_worker(coordinator, 2), pids_of(cluster, 2)
        assert [one["pid"] for one in told] == pids[:2]
        assert told[0]["random"] != told[1]["random"]
        for index, one in enumerate(told):
            assert one["environment"]["EXTRA"] == "yes"
            assert f'"index": {index}' in one["environment"]["TF_CONFIG"]
            assert one["arguments"][-4:] == ["--job", "worker", "--index", str(index)]
            assert one["name"] == f"worker {index}"
        (first,) = {parent_of(pid) for pid in pids}
        assert "torchstrat.launch._fork_server" in command_of(first)
        assert len({os.getsid(pid) for pid in (first, *pids)}) == 4

        os.kill(first, signal.SIGKILL)
        wait_until(lambda: parent_of(pids[0]) != first, "the end of the fork server")
        assert on_each_worker(coordinator, 2)[0]["pid"] == pids[0], "its forks go on"
        killed = cluster.kill("worker", 0)
        cluster.wait_until_restarted("worker", 0, killed, PATIENCE_SECONDS)
        after = on_each_worker(coordinator, 2)
        assert after[0]["pid"] != killed
        assert after[1]["pid"] == pids[1]
        second = parent_of(after[0]["pid"])
        assert "torchstrat.launch._fork_server" in command_of(second)

        failed: list[int] = []

        def fail_once(pid: int) -> int:
            if not failed:
                failed.append(pid)
                raise OSError(errno.EMFILE, "Too many open files")
            return really(pid)

        really = os.pidfd_open
        monkeypatch.setattr(os, "pidfd_open", fail_once)
        cluster.kill("worker", 0)
        last = on_each_worker(coordinator, 2)[0]["pid"]
        assert last not in (after[0]["pid"], failed[0])
        assert gone(failed[0])
        assert parent_of(last) == second
    assert all(map(gone, (first, second, last, *pids)))
    assert cluster.process("worker", 0).poll() == 0
    said = capfd.readouterr().err
    assert re.search(rf"worker 0 \(pid {killed}\) exited with status 255 after .* restarted", said)
    assert re.search(r"worker 0 could not be started \(.*Too many open files\)", said)


@pytest.mark.parametrize("why", ["it was asked for", "an import has started a thread"])
def test_programs_of_their_own(why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A thread that an import has started would be missing in a fork."""
    env, options, said = dict(QUIET), {"start_method": "spawn"}, ""
    if why == "an import has started a thread":
        (tmp_path / "sitecustomize.py").write_text(
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
        )
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        options = {}

    def says_why() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "worker 0 is a program of its own and not a fork: it has 2 threads" in said

    with LocalCluster(1, 1, env=env, **options) as cluster:
        if not options:
            wait_until(says_why, lambda: f"the refusal, after {said!r},")
        worker = cluster.process("worker", 0).pid
        assert parent_of(worker) == os.getpid()
        # It has none yet where it is about to become this program.
        wait_until(lambda: "-m torchstrat.server" in command_of(worker), "a program of its own")
    assert says_why() == (not options)


@contextmanager
def launcher_of(make: Callable[[], LocalCluster]) -> Iterator[tuple[Forked, int, int, int, int]]:
    """A process that has made a cluster, and the pids of its reaper, fork server, worker and server."""
    with Forked(make) as launcher:
        worker, server, fork_server = launcher.run(pids_in_launcher)
        yield launcher, child_with("_reaper.py", launcher.process.pid), fork_server, worker, server


def pids_in_launcher(cluster: LocalCluster) -> tuple[int, int, int]:
    server = cluster.process("ps", 0).pid
    return cluster.process("worker", 0).pid, server, parent_of(server)


def small_cluster() -> LocalCluster:
    cluster = LocalCluster(1, 1, env=QUIET)
    cluster.start()
    cluster.wait_until_listening()
    return cluster


def test_nobody_outlives_a_launcher_that_is_killed_after_the_fork_server() -> None:
    """With all of it there: test_notebook.py."""
    with launcher_of(small_cluster) as (launcher, reaper, fork_server, worker, server):
        os.kill(fork_server, signal.SIGKILL)
        launcher.kill()
        wait_for_end_of(reaper, worker, server, fork_server)


def woken_cluster() -> LocalCluster:
    cluster = LocalCluster(1, 1, env=QUIET, restart=False)
    cluster.start()
    coordinator = ts.ClusterCoordinator(ts.ParameterServerStrategy(cluster.resolver))
    worker = cluster.process("worker", 0).pid
    assert coordinator.schedule(os.getpid).get(PATIENCE_SECONDS) == worker
    os.kill(worker, signal.SIGSTOP)
    again = coordinator.schedule(lambda: (os.getpid(), sys.argv[1:]))
    wait_until(lambda: "waits for a worker" in repr(again), "that it is given up")
    os.kill(worker, signal.SIGCONT)
    pid, arguments = again.get(PATIENCE_SECONDS)
    assert pid == worker
    assert arguments[-4:] == ["--job", "worker", "--index", "0"]
    return cluster


def test_who_was_given_up_starts_itself_again_and_ends_with_the_launcher_though_the_reaper_was_killed() -> None:
    with launcher_of(woken_cluster) as (launcher, reaper, fork_server, worker, server):
        assert "-m torchstrat.server" in command_of(worker)
        os.kill(reaper, signal.SIGKILL)
        launcher.kill()
        wait_for_end_of(reaper, worker, server, fork_server)


def test_who_stops_at_once_does_not_wait_for_the_imports(capfd: pytest.CaptureFixture[str]) -> None:
    before = children_of(os.getpid())  # the fork server that other tests share, perhaps
    with LocalCluster(1, 1, env=QUIET):
        pid = child_with("_fork_server", os.getpid(), before)
    assert gone(pid)
    assert "listens on" not in capfd.readouterr().err, "it has not come to a fork"
