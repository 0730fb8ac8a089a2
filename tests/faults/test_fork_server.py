"""Workers and servers that are forks of one process: as good as programs of their own, whoever is killed."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import torchstrat as ts
from tests.child_processes import children_of
from tests.faults.counting import AT_ONCE, PATIENCE_SECONDS, QUIET, wait_until
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


def child_with(command: str, parent: int) -> int:
    (found,) = (pid for pid in children_of(parent) if command in command_of(pid))
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for_end_of(*pids: int) -> None:
    wait_until(lambda: all(map(is_gone, pids)), f"the end of {pids}")


def test_each_fork_is_a_process_of_its_own() -> None:
    with cluster_of(2, {**QUIET, "EXTRA": "yes"}) as (cluster, coordinator):
        told, pids = on_each_worker(coordinator, 2), pids_of(cluster, 2)
        assert [one["pid"] for one in told] == pids[:2]
        assert told[0]["random"] != told[1]["random"]
        for index, one in enumerate(told):
            assert one["environment"]["EXTRA"] == "yes"
            assert f'"index": {index}' in one["environment"]["TF_CONFIG"]
            assert one["arguments"][-4:] == ["--job", "worker", "--index", str(index)]
            assert one["name"] == f"worker {index}"
        (parent,) = {parent_of(pid) for pid in pids}
        assert "torchstrat.launch._fork_server" in command_of(parent)
        assert len({os.getsid(pid) for pid in (parent, *pids)}) == 4
    assert all(map(is_gone, (parent, *pids)))
    assert cluster.process("worker", 0).poll() == 0


@pytest.mark.parametrize("why", ["it was asked for", "an import has started a thread"])
def test_programs_of_their_own(why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A thread that an import has started would be missing in a fork."""
    env, options = dict(QUIET), {"start_method": "spawn"}
    if why == "an import has started a thread":
        (tmp_path / "sitecustomize.py").write_text(
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
        )
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        options = {}
    with cluster_of(env=env, **options) as (_, coordinator):
        (told,) = on_each_worker(coordinator)
        assert parent_of(told["pid"]) == os.getpid()
        assert "-m torchstrat.server" in command_of(told["pid"])
    says_why = "worker 0 is a program of its own and not a fork: it has 2 threads" in capfd.readouterr().err
    assert says_why == (not options)


def test_the_fork_server_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """Its forks go on; whoever ends later is started again by another one."""
    with cluster_of(2, restart=AT_ONCE) as (cluster, coordinator):
        before = on_each_worker(coordinator, 2)
        first = parent_of(before[0]["pid"])
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: parent_of(before[0]["pid"]) != first, "the end of the fork server")
        assert on_each_worker(coordinator, 2)[0]["pid"] == before[0]["pid"]
        killed = cluster.kill("worker", 0)
        cluster.wait_until_restarted("worker", 0, killed)
        after = on_each_worker(coordinator, 2)
        assert after[0]["pid"] != killed
        assert after[1]["pid"] == before[1]["pid"]
        second = parent_of(after[0]["pid"])
        assert "torchstrat.launch._fork_server" in command_of(second)
        pids = pids_of(cluster, 2)
    assert all(map(is_gone, (first, second, *pids)))
    assert re.search(rf"worker 0 \(pid {killed}\) exited with status 255 after .* restarted", capfd.readouterr().err)


def test_a_fork_that_cannot_be_watched_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with cluster_of(restart=AT_ONCE) as (cluster, coordinator):
        (before,) = on_each_worker(coordinator)
        failed: list[int] = []

        def fail_once(pid: int) -> int:
            if not failed:
                failed.append(pid)
                raise OSError(errno.EMFILE, "Too many open files")
            return really(pid)

        really = os.pidfd_open
        monkeypatch.setattr(os, "pidfd_open", fail_once)
        cluster.kill("worker", 0)
        (after,) = on_each_worker(coordinator)
        assert after["pid"] not in (before["pid"], failed[0])
        assert is_gone(failed[0])
    assert re.search(r"worker 0 could not be started \(.*Too many open files\)", capfd.readouterr().err)


@contextmanager
def launcher_of(script: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program that starts a cluster, and the pids that it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        line = next(one for one in launcher.stdout if re.fullmatch(r"[\d ]+\n", one))
        yield launcher, [int(pid) for pid in line.split()]


SCRIPT = """
    import sys
    from torchstrat.launch import LocalCluster

    with LocalCluster(1, 1) as cluster:
        cluster.wait_until_listening()
        print(*(cluster.process(job, 0).pid for job in ("worker", "ps")), flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("who_else", ["nobody", "the reaper", "the fork server"])
def test_nobody_outlives_a_launcher_that_is_killed(who_else: str) -> None:
    with launcher_of(SCRIPT) as (launcher, (worker, server)):
        reaper, fork_server = child_with("_reaper.py", launcher.pid), parent_of(worker)
        if who_else != "nobody":
            os.kill(reaper if who_else == "the reaper" else fork_server, signal.SIGKILL)
        launcher.kill()
        wait_for_end_of(reaper, worker, server, fork_server)


WOKEN = """
    import os, signal, sys, time
    import torchstrat as ts
    from torchstrat.launch import LocalCluster

    with LocalCluster(1, 1, restart=False) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        coordinator = ts.ClusterCoordinator(strategy)
        worker = cluster.process("worker", 0).pid
        assert coordinator.schedule(os.getpid).get(timeout=60) == worker
        os.kill(worker, signal.SIGSTOP)
        again = coordinator.schedule(lambda: (os.getpid(), sys.argv[1:]))
        while "waits for a worker" not in repr(again):  # until it is given up
            time.sleep(0.01)
        os.kill(worker, signal.SIGCONT)
        pid, arguments = again.get(timeout=60)
        assert pid == worker and arguments[-4:] == ["--job", "worker", "--index", "0"], arguments
        print(worker, flush=True)
        sys.stdin.read()
"""


def test_who_was_given_up_starts_itself_again_and_ends_with_the_launcher() -> None:
    with launcher_of(WOKEN) as (launcher, (worker,)):
        assert "-m torchstrat.server" in command_of(worker)
        os.kill(child_with("_reaper.py", launcher.pid), signal.SIGKILL)
        launcher.kill()
        wait_for_end_of(worker)


def test_who_stops_at_once_does_not_wait_for_the_imports(capfd: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(1, 1, env=QUIET):
        pid = child_with("_fork_server", os.getpid())
    assert is_gone(pid)
    assert "listens on" not in capfd.readouterr().err, "it has not come to a fork"
