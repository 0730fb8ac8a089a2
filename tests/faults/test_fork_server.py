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
from tests.faults.counting import PATIENCE_SECONDS, wait_until
from torchstrat.launch import LocalCluster
from torchstrat.launch.fork_server import why_not
from torchstrat.launch.restarts import RestartPolicy

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
AT_ONCE = RestartPolicy(first_delay_seconds=0.0)

pytestmark = [
    pytest.mark.deadline(300),
    pytest.mark.skipif(why_not() is not None, reason=f"there is no fork server: {why_not()}"),
]


@contextmanager
def coordinator_of(cluster: LocalCluster) -> Iterator[ts.ClusterCoordinator]:
    strategy = ts.ParameterServerStrategy(cluster.resolver)
    try:
        yield ts.ClusterCoordinator(strategy)
    finally:
        strategy.close()


def on_each_worker(coordinator: ts.ClusterCoordinator, number: int) -> dict[int, dict[str, Any]]:
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
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_each_fork_is_a_process_of_its_own() -> None:
    with LocalCluster(2, 1, env={**QUIET, "EXTRA": "yes"}) as cluster, coordinator_of(cluster) as coordinator:
        told = on_each_worker(coordinator, 2)
        assert [told[index]["pid"] for index in range(2)] == [
            cluster.process("worker", index).pid for index in range(2)
        ]
        assert told[0]["random"] != told[1]["random"]
        for index, one in told.items():
            assert one["environment"]["EXTRA"] == "yes"
            assert f'"index": {index}' in one["environment"]["TF_CONFIG"]
            assert one["arguments"][-4:] == ["--job", "worker", "--index", str(index)]
            assert one["name"] == f"worker {index}"
        pids = [cluster.process(*task).pid for task in (("worker", 0), ("worker", 1), ("ps", 0))]
        (parent,) = {parent_of(pid) for pid in pids}
        assert "torchstrat.launch._fork_server" in command_of(parent)
        assert len({os.getsid(pid) for pid in (parent, *pids)}) == 4
    assert all(map(is_gone, (parent, *pids)))
    assert cluster.process("worker", 0).poll() == 0


def test_programs_of_their_own() -> None:
    with LocalCluster(1, 1, env=QUIET, start_method="spawn") as cluster, coordinator_of(cluster) as coordinator:
        (told,) = on_each_worker(coordinator, 1).values()
        assert parent_of(told["pid"]) == os.getpid()
        assert "-m torchstrat.server" in command_of(told["pid"])


def test_what_cannot_be_forked_is_started(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A thread that an import has started would be missing in a fork."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with LocalCluster(1, 1, env={**QUIET, "PYTHONPATH": path}) as cluster, coordinator_of(cluster) as coordinator:
        (told,) = on_each_worker(coordinator, 1).values()
        assert parent_of(told["pid"]) == os.getpid()
    assert "worker 0 is a program of its own and not a fork: it has 2 threads" in capfd.readouterr().err


def test_the_fork_server_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """Its forks go on; whoever ends later is started again by another one."""
    with LocalCluster(2, 1, env=QUIET, restart=AT_ONCE) as cluster, coordinator_of(cluster) as coordinator:
        before = on_each_worker(coordinator, 2)
        servers = [parent_of(before[0]["pid"])]
        os.kill(servers[0], signal.SIGKILL)
        wait_until(lambda: parent_of(before[0]["pid"]) != servers[0], "the end of the fork server")
        assert on_each_worker(coordinator, 2)[0]["pid"] == before[0]["pid"]
        killed = cluster.kill("worker", 0)
        cluster.wait_until_restarted("worker", 0, killed)
        after = on_each_worker(coordinator, 2)
        assert after[0]["pid"] != killed
        assert after[1]["pid"] == before[1]["pid"]
        servers.append(parent_of(after[0]["pid"]))
        assert "torchstrat.launch._fork_server" in command_of(servers[1])
        pids = [cluster.process(*task).pid for task in (("worker", 0), ("worker", 1), ("ps", 0))]
    assert all(map(is_gone, (*servers, *pids)))
    assert re.search(rf"worker 0 \(pid {killed}\) exited with status 255 after .* restarted", capfd.readouterr().err)


def test_a_fork_that_cannot_be_watched_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with LocalCluster(1, 1, env=QUIET, restart=AT_ONCE) as cluster, coordinator_of(cluster) as coordinator:
        (before,) = on_each_worker(coordinator, 1).values()
        failed: list[int] = []

        def fail_once(pid: int) -> int:
            if not failed:
                failed.append(pid)
                raise OSError(errno.EMFILE, "Too many open files")
            return really(pid)

        really = os.pidfd_open
        monkeypatch.setattr(os, "pidfd_open", fail_once)
        cluster.kill("worker", 0)
        (after,) = on_each_worker(coordinator, 1).values()
        assert after["pid"] not in (before["pid"], failed[0])
        assert is_gone(failed[0])
    assert re.search(r"worker 0 could not be started \(.*Too many open files\)", capfd.readouterr().err)


SCRIPT = textwrap.dedent(
    """
    import sys
    from torchstrat.launch import LocalCluster

    with LocalCluster(1, 1) as cluster:
        cluster.wait_until_listening()
        print(cluster._reaper._process.pid, *(cluster.process(job, 0).pid for job in ("worker", "ps")), flush=True)
        sys.stdin.read()
    """
)


@pytest.mark.parametrize("who_else", ["nobody", "the reaper", "the fork server"])
def test_nobody_outlives_a_launcher_that_is_killed(who_else: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        line = next(one for one in launcher.stdout if re.fullmatch(r"[\d ]+\n", one))
        reaper, worker, server = map(int, line.split())
        fork_server = parent_of(worker)
        also = {"nobody": [], "the reaper": [reaper], "the fork server": [fork_server]}[who_else]
        for pid in also:
            os.kill(pid, signal.SIGKILL)
        launcher.kill()
        for pid in (reaper, worker, server, fork_server):
            wait_until(lambda pid=pid: is_gone(pid), f"the end of {pid}")  # type: ignore[misc]


WOKEN = textwrap.dedent(
    """
    import os, signal, sys, threading
    import torchstrat as ts
    from torchstrat.launch import LocalCluster

    with LocalCluster(1, 1, restart=False) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        coordinator = ts.ClusterCoordinator(strategy)
        given_up, tell = threading.Event(), strategy._job.on_worker_lost
        strategy._job.on_worker_lost = lambda *lost: (tell(*lost), given_up.set())
        worker = cluster.process("worker", 0).pid
        assert coordinator.schedule(os.getpid).get(timeout=60) == worker
        os.kill(worker, signal.SIGSTOP)
        given_up.wait()
        os.kill(worker, signal.SIGCONT)
        again = coordinator.schedule(lambda: (os.getpid(), sys.argv[1:])).get(timeout=60)
        assert again[0] == worker and again[1][-4:] == ["--job", "worker", "--index", "0"], again
        print(cluster._reaper._process.pid, worker, flush=True)
        sys.stdin.read()
    """
)


def test_who_was_given_up_starts_itself_again_and_ends_with_the_launcher() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WOKEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        line = next(one for one in launcher.stdout if re.fullmatch(r"[\d ]+\n", one))
        reaper, worker = map(int, line.split())
        assert "-m torchstrat.server" in command_of(worker)
        os.kill(reaper, signal.SIGKILL)
        launcher.kill()
        wait_until(lambda: is_gone(worker), "the end of the worker")


def test_who_stops_at_once_does_not_wait_for_the_imports() -> None:
    with LocalCluster(1, 1, env=QUIET) as cluster:
        (server,) = cluster._fork_server._servers  # type: ignore[union-attr]
        assert server._process is not None
        pid = server._process.pid
    assert is_gone(pid)
    assert not server.has_forked
