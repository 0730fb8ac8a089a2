"""``torchstrat launch`` and `Cluster` with real processes: who is started again, what is said, and who remains."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import torchstrat as ts
from tests.support.launchers import ROLE, Launched, all_gone, launching  # noqa: F401
from tests.support.programs import COMMAND, SECONDS, descendants, gone, kill_what_is_left, run, wait_for
from torchstrat.errors import ClusterConfigError, CommunicationTimeoutError, ContextError
from torchstrat.launch import Cluster, RestartPolicy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

TASKS = ("ps 0", "worker 0", "worker 1")

COORDINATOR = textwrap.dedent(
    """
    # Waits for all tasks, writes down what they say, and then does what its argument says.
    import json, os, signal, socket, subprocess, sys, time
    from pathlib import Path

    def ask(address):
        host, _, port = address.rpartition(":")
        while True:
            try:
                with socket.create_connection((host, int(port)), 5) as connection:
                    text = b"".join(iter(lambda: connection.recv(65536), b""))
                    if text:
                        return json.loads(text)
            except OSError:
                time.sleep(0.02)

    what, folder = sys.argv[1], Path(sys.argv[2])

    def write_down(name):
        part = folder / "part"
        part.write_text(json.dumps(answers))
        part.rename(folder / name)

    config = json.loads(os.environ["TF_CONFIG"])
    tasks = {f"{job} {i}": a for job in ("ps", "worker") for i, a in enumerate(config["cluster"][job])}
    if what == "ignore":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"])
    answers = {task: ask(address) for task, address in tasks.items()}
    answers["me"] = {name: os.environ.get(name) for name in ("TF_CONFIG", "TORCHSTRAT_SECRET", "EXTRA", "STDIN")}
    if what == "kill-worker":
        before = answers["worker 1"]["pid"]
        os.kill(before, signal.SIGKILL)
        while (again := ask(tasks["worker 1"]))["pid"] == before:
            time.sleep(0.02)
        answers["again"] = again
    print("the coordinator's own line", flush=True)
    write_down("answers")
    if what == "again" and not (folder / "first").exists():
        write_down("first")
        sys.exit(75)
    try:
        if what in ("wait", "ignore"):
            while True:
                time.sleep(1)
        elif what == "crash":
            raise RuntimeError("on purpose")
        elif what.startswith("signal"):
            os.kill(os.getpid(), int(what.removeprefix("signal")))
        elif what.startswith("exit"):
            sys.exit(int(what.removeprefix("exit")))
        elif what == "save":
            heard = []
            signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
            print("ready", flush=True)
            while not heard:
                signal.pause()
            print("told", flush=True)
            while len(heard) < 2:
                signal.pause()
            for task, address in tasks.items():
                assert ask(address)["pid"] == answers[task]["pid"], f"{task} is not there any more"
            print("saved", flush=True)
            sys.exit(75)
        elif what == "read":
            print("read:", input())
    except KeyboardInterrupt:
        time.sleep(0.3)  # a second interrupt would come now
        print("interrupted, and done with it")
        sys.exit(5)
    """
)


@pytest.fixture
def launch(launching: Callable[..., Launched]) -> Callable[..., Launched]:  # noqa: F811
    return lambda what, *options, **more: launching(COORDINATOR, what, "--workers", "2", *options, **more)


def said(launched: Launched, pattern: str) -> None:
    wait_for(lambda: re.search(pattern, launched.err, re.MULTILINE), pattern)


# ---- the end of the coordinator --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "status"), [("exit0", 0), ("exit7", 7), ("crash", 1), ("signal9", 137)])
def test_the_exit_status_is_the_coordinators(launch: Any, what: str, status: int) -> None:
    launched = launch(what)
    pids = [answer["pid"] for task, answer in launched.answers().items() if task != "me"]
    launched.ends_with(status)
    assert all(map(gone, pids)), "the launcher ended before those that it had started"
    assert "did not end" not in launched.err
    assert "restarted" not in launched.err
    assert ("RuntimeError: on purpose" in launched.err) == (what == "crash")


def test_output_has_the_name_of_the_task_and_the_coordinators_has_none(launch: Any) -> None:
    launched = launch("exit0", "--env", "EXTRA=for the others")
    launched.ends_with(0)
    lines = [line for task in TASKS for line in (f"[{task}] {task} listens", f"[{task}] and half a line")]
    assert sorted(launched.out.splitlines()) == sorted(["the coordinator's own line", *lines])
    errors = [line for line in launched.err.splitlines() if not line.startswith("[torchstrat]")]
    assert sorted(errors) == [f"[{task}] a warning" for task in TASKS]
    assert "parameter servers: 1, workers: 2, each with OMP_NUM_THREADS=1 (--env" in launched.err
    answers = launched.answers()
    assert [answers[task]["EXTRA"] for task in ("ps 0", "worker 0", "me")] == ["for the others"] * 2 + [None]
    assert answers["worker 0"]["OMP_NUM_THREADS"] == "1"
    configs = {task: json.loads(answer["TF_CONFIG"]) for task, answer in answers.items()}
    assert configs["me"]["task"] == {"type": "chief", "index": 0}
    assert configs["worker 1"]["task"] == {"type": "worker", "index": 1}
    assert len({json.dumps(config["cluster"]) for config in configs.values()}) == 1
    addresses = [address for job in configs["me"]["cluster"].values() for address in job]
    assert len(set(addresses)) == 4
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)


@pytest.mark.parametrize("given", [None, "TORCHSTRAT_SECRET", "TORCHSTRAT_SECRET_FILE"])
def test_everybody_has_the_secret_and_nobody_shows_it(launch: Any, tmp_path: Path, given: str | None) -> None:
    secret = "0123456789abcdef" * 4
    file = tmp_path / "secret"
    file.write_text(secret + "\n")
    file.chmod(0o600)
    launched = launch("wait", **({} if given is None else {given: str(file) if given.endswith("FILE") else secret}))
    answers, commands = launched.answers(), launched.processes().values()
    (found,) = {answer["TORCHSTRAT_SECRET"] for answer in answers.values()}
    assert found == secret if given else re.fullmatch("[0-9a-f]{64}", found)
    assert answers["worker 0"]["TORCHSTRAT_SECRET_FILE"] is None
    assert not [command for command in commands if found in command]
    launched.signal(signal.SIGINT)
    launched.ends_with(5)
    assert found not in launched.out + launched.err


def test_a_secret_that_cannot_be_used_starts_nothing(launch: Any) -> None:
    launched = launch("wait", TORCHSTRAT_SECRET="short")
    launched.ends_with(2)
    assert launched.err.startswith("[torchstrat] nothing was started: TORCHSTRAT_SECRET holds 5 characters")
    assert launched.out == ""


def test_the_command_as_users_type_it_starts_nothing_for_faulty_input() -> None:
    finished = run(*COMMAND, "launch", "--ps", "1", "--workers", "0", "x.py")
    assert (finished.returncode, finished.stdout, finished.stderr.count("error:")) == (2, "", 1)
    assert "--workers: '0' must be a whole number of at least 1" in finished.stderr


# ---- who asks to be run again ----------------------------------------------------------------------------------------


def test_a_coordinator_that_exits_with_75_is_run_again_on_the_same_cluster(launch: Any) -> None:
    launched = launch("again", "--restarts", "0")
    launched.ends_with(0)
    first, second = json.loads((launched.folder / "first").read_text()), launched.answers()
    assert [first[task]["pid"] for task in TASKS] == [second[task]["pid"] for task in TASKS]
    assert first["me"] == second["me"]
    assert launched.out.count("the coordinator's own line") == 2
    assert launched.err.count("[torchstrat] SCRIPT exited with status 75: it asks to be run again\n") == 1


def test_who_asks_again_and_again_waits_longer_and_longer(launch: Any) -> None:
    launched = launch("exit75")
    said(launched, "run again; it lived so shortly that this is in 1 s")
    launched.signal(signal.SIGTERM)
    launched.ends_with(75, 128 + signal.SIGTERM)  # that of the last one, or of one that was just beginning


def test_a_launcher_that_is_told_to_end_lets_the_coordinator_save_and_does_not_run_it_again(launch: Any) -> None:
    """Servers and workers are there until it has ended, however often the signal comes."""
    launched = launch("save")
    for line in ("ready", "told"):
        wait_for(lambda line=line: line in launched.out.splitlines(), f"a coordinator that is {line}")
        launched.signal(signal.SIGTERM)
    launched.ends_with(75)
    assert "saved" in launched.out
    assert "run again" not in launched.err


# ---- the end of others -----------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_comes_back_at_its_address(launch: Any) -> None:
    launched = launch("kill-worker")
    answers = launched.answers()
    launched.ends_with(0)
    before, again = answers["worker 1"], answers["again"]
    assert again["pid"] != before["pid"]
    for name in ("TF_CONFIG", "TORCHSTRAT_SECRET"):
        assert again[name] == before[name]
    said(launched, rf"\[torchstrat\] worker 1 \(pid {before['pid']}\) was ended by SIGKILL .*; restarted")
    assert gone(again["pid"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_is_the_coordinators(launch: Any, number: signal.Signals) -> None:
    launched = launch("wait")
    processes = launched.processes()
    launched.signal(number)
    launched.ends_with(5 if number == signal.SIGINT else 128 + number)
    assert ("interrupted, and done with it" in launched.out) == (number == signal.SIGINT)
    assert "Traceback" not in launched.err
    all_gone(processes)


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """The keyboard's end of a terminal, and the name of the other."""
    keyboard, screen = os.openpty()
    yield keyboard, os.ttyname(screen)
    os.close(screen)
    os.close(keyboard)


@pytest.mark.parametrize(
    ("what", "typed", "status", "says"),
    [("wait", b"\x03", 5, "interrupted, and done with it\n"), ("read", b"next\n", 0, "read: next\n")],
)
def test_what_is_typed_at_a_terminal_is_the_coordinators(
    launch: Any, terminal: Any, what: str, typed: bytes, status: int, says: str
) -> None:
    keyboard, name = terminal
    launched = launch(what, terminal=name)
    processes = launched.processes()
    os.write(keyboard, typed)
    launched.ends_with(status)
    assert says in launched.out
    assert "Traceback" not in launched.err
    # At a terminal the coordinator's own children are its own business, as they are without a launcher.
    tasks = [pid for pid, command in processes.items() if "role.py" in command or "coordinator.py" in command]
    assert len(tasks) == 4
    all_gone(tasks)
    kill_what_is_left(processes)


def test_a_second_signal_ends_everything(launch: Any) -> None:
    launched = launch("ignore", "--grace-seconds", "1000", STUBBORN="1")
    processes = launched.processes()
    launched.signal(signal.SIGINT)
    # Nothing visible comes of the first one. That the launcher has taken it shows in the set of pending signals.
    pending = Path(f"/proc/{launched.pid}/status")
    wait_for(lambda: re.search(r"ShdPnd:\s*0+\n", pending.read_text()), "the first signal taken")
    time.sleep(0.2)  # and Python's handler run; were it not, both would be one and this test would wait in vain
    launched.signal(signal.SIGTERM)
    launched.ends_with(137)
    all_gone(processes)


def test_who_does_not_end_is_killed_after_the_grace_period(launch: Any) -> None:
    launched = launch("exit0", "--grace-seconds", "0.5", STUBBORN="1")
    launched.ends_with(0)
    for task in TASKS:
        assert f"[torchstrat] {task} did not end within 0.5 s of SIGTERM; killed" in launched.err


@pytest.mark.parametrize("reapers", ["live", "are killed before it"])
def test_nothing_outlives_a_launcher_that_is_killed(launch: Any, reapers: str) -> None:
    launched = launch("ignore", STUBBORN="1")
    processes = launched.processes()
    if reapers != "live":
        found = [pid for pid, command in processes.items() if "_reaper.py" in command]
        assert len(found) == 2
        for pid in found:
            os.kill(pid, signal.SIGKILL)
    launched.signal(signal.SIGKILL)
    launched.wait()
    if reapers == "live":
        all_gone(processes)
    else:  # by the kernel; of their children only the reapers knew
        roles = [pid for pid, command in processes.items() if "role.py" in command or "coordinator.py" in command]
        assert len(roles) == 4
        all_gone(roles)
        kill_what_is_left(processes)


def test_who_dies_at_once_again_and_again_waits_longer_and_longer(launch: Any) -> None:
    launched = launch("wait", DIES_AT_ONCE="ps")
    said(
        launched,
        r"\[torchstrat\] ps 0 \(pid \d+\) exited with status 3 after \d\.\d s, so soon for the 3rd time in a row; next",
    )
    launched.signal(signal.SIGTERM)
    launched.ends_with(128 + signal.SIGTERM)
    assert len(re.findall("ps 0 .*; restarted", launched.err)) == 1
    assert "next start in 1 s" in launched.err


def test_restarts_can_be_limited(launch: Any) -> None:
    launched = launch("wait", "--restarts", "1", "--no-restart-ps", DIES_AT_ONCE="ps worker")
    for task, restarted in zip(TASKS, (0, 1, 1), strict=True):
        said(launched, f"{task} .* exited with status 3 .*; not restarted")
        assert len(re.findall(f"{task} .*; restarted", launched.err)) == restarted
    launched.signal(signal.SIGTERM)
    launched.ends_with(128 + signal.SIGTERM)


# ---- a cluster of this process ---------------------------------------------------------------------------------------


def ask(spec: ts.cluster_resolver.ClusterSpec, job: str, index: int) -> dict[str, Any]:
    host, _, port = spec.task_address(job, index).rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        return json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., contextlib.AbstractContextManager[Cluster]]:
    """A cluster whose tasks only answer."""
    (tmp_path / "role.py").write_text(ROLE)
    role = (sys.executable, str(tmp_path / "role.py"))

    @contextlib.contextmanager
    def start(**options: Any) -> Iterator[Cluster]:
        with Cluster(ps=1, server_command=role, **{"workers": 1, **options}) as cluster:
            cluster.wait_until_listening()
            yield cluster

    return start


def test_a_local_cluster(started: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert "TORCHSTRAT_SECRET" not in os.environ
    others = descendants(os.getpid())
    with started(workers=2, env={"EXTRA": "yes"}) as cluster:
        spec, resolver = cluster.cluster_spec, cluster.resolver
        assert {job: spec.num_tasks(job) for job in spec.jobs} == {"chief": 1, "ps": 1, "worker": 2}
        assert (resolver.cluster_spec(), resolver.task_type, resolver.task_id) == (spec, "chief", 0)
        assert os.environ["TORCHSTRAT_SECRET"] == cluster.secret
        assert cluster.secret not in repr(cluster)
        answer = ask(spec, "worker", 1)
        assert answer["pid"] == cluster.process("worker", 1).pid
        assert (answer["ppid"], answer["EXTRA"]) == (os.getpid(), "yes")
        assert answer["TORCHSTRAT_SECRET"] == cluster.secret
        processes = descendants(os.getpid()).keys() - others.keys()
        assert len(processes) == 1 + 2 * 3, "the reaper, the tasks, and a child of each"
        with pytest.raises(ClusterConfigError, match="no worker 7 here; the tasks of this cluster are: ps 0, worker 0"):
            cluster.process("worker", 7)
    assert "TORCHSTRAT_SECRET" not in os.environ
    assert repr(cluster) == "Cluster(ps=1, workers=2, closed)"
    all_gone(processes)
    with pytest.raises(ConnectionRefusedError):
        ask(spec, "ps", 0)
    shown = capfd.readouterr()
    assert "[worker 1] worker 1 listens\n" in shown.out
    assert "[ps 0] a warning\n" in shown.err
    cluster.stop()
    with pytest.raises(ContextError, match="another Cluster"):
        cluster.start()


def test_killed_processes_come_back_and_workers_can_be_added(started: Any) -> None:
    with started(restart=RestartPolicy(limit=2)) as cluster:
        for job in ("worker", "ps"):
            pid = cluster.kill(job, 0)
            another = cluster.wait_until_restarted(job, 0, pid, SECONDS)
            assert another.pid != pid
            assert cluster.process(job, 0) is another
        no_port = mock.patch("torchstrat.launch.local_cluster.ReservedPort", side_effect=OSError("no port is free"))
        with no_port, pytest.raises(OSError, match="no port is free"):
            cluster.add_worker()
        assert cluster.add_worker() == 1
        cluster.wait_until_listening()
        assert ask(cluster.cluster_spec, "ps", 0)["pid"] == cluster.process("ps", 0).pid
        config = json.loads(ask(cluster.cluster_spec, "worker", 1)["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": 1}
        assert len(config["cluster"]["worker"]) == 2


def test_without_restarts_they_come_back_when_told(started: Any) -> None:
    with started(restart=False) as cluster:
        first = cluster.process("ps", 0)
        assert cluster.kill("ps", 0) == first.pid
        with pytest.raises(CommunicationTimeoutError, match=r"ps 0 at 127.*ps 0 .* was ended by SIGKILL"):
            cluster.wait_until_listening(60)
        with pytest.raises(CommunicationTimeoutError, match=rf"ps 0 had no process after pid {first.pid} .*SIGKILL"):
            cluster.wait_until_restarted("ps", 0, first.pid, timeout_seconds=0.1)
        with pytest.raises(ContextError, match="ps 0 has no process"):
            cluster.kill("ps", 0)
        second = cluster.restart("ps", 0)
        cluster.wait_until_listening()
        third = cluster.restart("ps", 0)
        cluster.wait_until_listening()
        assert len({first.pid, second.pid, third.pid}) == 3
        assert ask(cluster.cluster_spec, "ps", 0)["pid"] == third.pid


def test_a_stopped_process_ends_too_and_so_do_all_after_an_error(started: Any) -> None:
    pids, start = [], time.monotonic()

    def fails() -> None:
        with started(grace_seconds=60) as cluster:
            pids.extend([cluster.kill("worker", 0, signal.SIGSTOP), cluster.process("ps", 0).pid])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert all(map(gone, pids))
    assert time.monotonic() - start < 50, "it was woken to end, not waited for"
