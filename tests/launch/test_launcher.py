"""``torchstrat launch`` and `LocalCluster` with real processes: who is started again, what is said, and who remains."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from torchstrat.errors import ClusterConfigError, CommunicationTimeoutError, ContextError
from torchstrat.launch import LocalCluster, RestartPolicy
from torchstrat.launch.ports import ReservedPort, is_listening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 120.0
GONE_SECONDS = 20.0

ROLE = textwrap.dedent(
    """
    # In place of torchstrat.server: answers whoever connects with what it is, and stays until it is told to go.
    import argparse, json, os, signal, socket, subprocess, sys

    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", type=json.loads)
    parser.add_argument("--job")
    parser.add_argument("--index", type=int)
    me = parser.parse_args()
    if me.job in os.environ.get("DIES_AT_ONCE", "").split():
        sys.exit(3)
    if "STUBBORN" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"])
    host, _, port = me.cluster[me.job][me.index].rpartition(":")
    listening = socket.create_server((host, int(port)))
    print(f"{me.job} {me.index} listens")
    print("a warning", file=sys.stderr)
    print("and half a line", end="", flush=True)
    names = ("TF_CONFIG", "TORCHSTRAT_SECRET", "TORCHSTRAT_SECRET_FILE", "OMP_NUM_THREADS", "EXTRA")
    answer = {"pid": os.getpid(), "ppid": os.getppid(), **{name: os.environ.get(name) for name in names}}
    while True:
        connection, _ = listening.accept()
        with connection:
            try:
                connection.sendall(json.dumps(answer).encode())
            except OSError:
                pass
    """
)

COORDINATOR = textwrap.dedent(
    """
    # Waits for all tasks, writes down what they say, and then does what its argument says.
    import json, os, signal, socket, subprocess, sys, time

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

    what, folder = sys.argv[1:3]
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
    with open(os.path.join(folder, "answers.part"), "w") as file:
        json.dump(answers, file)
    os.rename(file.name, os.path.join(folder, "answers"))
    first = os.path.join(folder, "first")  # what was answered to a coordinator that asked to be run again
    if what == "again" and not os.path.exists(first):
        with open(first, "w") as file:
            json.dump(answers, file)
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

FORKER = textwrap.dedent(
    """
    # Starts launchers that need not import torch, which takes longer than all they do: forks of this process, which
    # has done so and has no threads.
    import json, os, sys
    from torchstrat.launch.launcher import main

    def launcher(order):
        if order["terminal"]:
            os.setsid()  # the first terminal that it opens is then its own
        for number, name in enumerate((order["terminal"] or "/dev/null", order["out"], order["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "rw"[n > 0]) for n in range(3))
        os.environ.clear()
        os.environ.update(order["environment"])
        status = main(order["words"], server_command=order["role"])
        sys.stdout.flush()
        os._exit(status)  # torch's way out takes a second

    for line in sys.stdin:
        order = json.loads(line)
        if "wait for" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait for"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                launcher(order)
        print(answer, flush=True)
    """
)


def wait_for(happens: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    until = time.monotonic() + seconds
    while not (result := happens()):
        assert time.monotonic() < until, f"after {seconds:g} s there is not: {what}"
        time.sleep(0.02)
    return result


def gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def descendants(pid: int) -> dict[int, str]:
    """Process id → command of everything that was started by a process, directly or not."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: commands[child] for child in found - {pid}}


class Forker:
    """A process that starts launchers."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("TORCHSTRAT_", "OMP_"))
        }
        self.environment["PYTHONPATH"] = path
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKER],
            env={**self.environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(DEADLINE_SECONDS)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    started = Forker()
    yield started
    started.close()


class Launched:
    """A launcher that runs, with files for what it says."""

    def __init__(
        self, forker: Forker, folder: Path, what: str, *options: str, terminal: str | None = None, **environment: str
    ) -> None:
        self.forker, self.folder = forker, folder
        (folder / "role.py").write_text(ROLE)
        (folder / "coordinator.py").write_text(COORDINATOR)
        for name in ("out", "err"):
            (folder / name).touch()
        self.status: int | None = None
        self.pid = forker.ask(
            {
                "words": ["--ps", "1", "--workers", "2", *options, str(folder / "coordinator.py"), what, str(folder)],
                "role": [sys.executable, str(folder / "role.py")],
                "terminal": terminal,
                "environment": {**forker.environment, **environment},
                "out": str(folder / "out"),
                "err": str(folder / "err"),
            }
        )

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def answers(self) -> dict[str, Any]:
        """What the coordinator has collected, once it has."""

        def there() -> bool:
            there = (self.folder / "answers").exists()
            assert there or not gone(self.pid), self.out + self.err
            return there

        wait_for(there, f"an answer of every task; {self.folder}")
        return json.loads((self.folder / "answers").read_text())

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit status, negative for a signal."""
        if self.status is None:
            wait_for(lambda: gone(self.pid), "an end of the launcher")
            self.status = self.forker.ask({"wait for": self.pid})
        return self.status

    def end(self) -> None:
        if self.status is None:
            rest = descendants(self.pid)
            self.signal(signal.SIGKILL)
            self.wait()
            for pid in rest:
                if not gone(pid):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launch(forker: Forker, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(what: str, *options: str, **more: Any) -> Launched:
        launched.append(Launched(forker, tmp_path, what, *options, **more))
        return launched[-1]

    yield start
    for each in launched:
        each.end()


def _said(launched: Launched, pattern: str) -> bool:
    return re.search(pattern, launched.err) is not None


def assert_all_gone(processes: dict[int, str]) -> None:
    assert len(processes) >= 2 * 4, "every task has a child of its own"
    wait_for(lambda: all(map(gone, processes)), "an end of all processes", GONE_SECONDS)


# ---- the end of the coordinator --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "status"), [("exit0", 0), ("exit7", 7), ("crash", 1), ("signal9", 137)])
def test_the_exit_status_is_the_coordinators(launch: Callable[..., Launched], what: str, status: int) -> None:
    launched = launch(what)
    pids = [answer["pid"] for task, answer in launched.answers().items() if task != "me"]
    assert launched.wait() == status, launched.err
    assert all(map(gone, pids)), "the launcher ended before those that it had started"
    assert "did not end" not in launched.err
    assert "restarted" not in launched.err
    assert ("RuntimeError: on purpose" in launched.err) == (what == "crash")


def test_output_has_the_name_of_the_task_and_the_coordinators_has_none(launch: Callable[..., Launched]) -> None:
    launched = launch("exit0", "--env", "EXTRA=for the others")
    assert launched.wait() == 0, launched.err
    expected = ["the coordinator's own line"]
    for task in ("ps 0", "worker 0", "worker 1"):
        expected += [f"[{task}] {task} listens", f"[{task}] and half a line"]
    assert sorted(launched.out.splitlines()) == sorted(expected)
    errors = [line for line in launched.err.splitlines() if not line.startswith("[torchstrat]")]
    assert sorted(errors) == [f"[{task}] a warning" for task in ("ps 0", "worker 0", "worker 1")]
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
def test_everybody_has_the_secret_and_nobody_shows_it(
    launch: Callable[..., Launched], tmp_path: Path, given: str | None
) -> None:
    secret = "0123456789abcdef" * 4
    file = tmp_path / "secret"
    file.write_text(secret + "\n")
    file.chmod(0o600)
    environment = {} if given is None else {given: str(file) if given.endswith("FILE") else secret}
    launched = launch("wait", **environment)
    answers = launched.answers()
    secrets = {answer["TORCHSTRAT_SECRET"] for answer in answers.values()}
    assert len(secrets) == 1
    found = secrets.pop()
    assert found == secret if given else re.fullmatch("[0-9a-f]{64}", found)
    assert answers["worker 0"]["TORCHSTRAT_SECRET_FILE"] is None
    commands = descendants(launched.pid)
    assert len(commands) >= 8
    assert not [command for command in commands.values() if found in command]
    launched.signal(signal.SIGINT)
    assert launched.wait() == 5
    assert found not in launched.out + launched.err


def test_a_secret_that_cannot_be_used_starts_nothing(launch: Callable[..., Launched]) -> None:
    launched = launch("wait", TORCHSTRAT_SECRET="short")
    assert launched.wait() == 2
    assert launched.err.startswith("[torchstrat] nothing was started: TORCHSTRAT_SECRET holds 5 characters")
    assert launched.out == ""


def test_the_command_as_users_type_it(tmp_path: Path) -> None:
    """The module, and the function behind the command ``torchstrat``: faulty input starts nothing."""
    entry = "import sys; from torchstrat.cli import main; sys.argv[0] = 'torchstrat'; sys.exit(main())"
    for command in (["-m", "torchstrat.launch"], ["-c", entry, "launch"]):
        finished = subprocess.run(
            [sys.executable, *command, "--ps", "1", "--workers", "0", "x.py"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        assert finished.returncode == 2
        assert finished.stderr.count("error:") == 1
        assert "--workers: '0' must be a whole number of at least 1" in finished.stderr
        assert finished.stdout == ""


# ---- who asks to be run again ----------------------------------------------------------------------------------------


def test_a_coordinator_that_exits_with_75_is_run_again_on_the_same_cluster(launch: Callable[..., Launched]) -> None:
    launched = launch("again", "--restarts", "0")
    assert launched.wait() == 0, launched.err
    first, second = json.loads((launched.folder / "first").read_text()), launched.answers()
    for task in ("ps 0", "worker 0", "worker 1"):
        assert first[task]["pid"] == second[task]["pid"]
    assert first["me"] == second["me"]
    assert launched.out.count("the coordinator's own line") == 2
    assert launched.err.count("[torchstrat] SCRIPT exited with status 75: it asks to be run again\n") == 1


def test_who_asks_again_and_again_waits_longer_and_longer(launch: Callable[..., Launched]) -> None:
    launched = launch("exit75")
    wait_for(partial(_said, launched, r"run again; it lived so shortly that this is in 1 s"), "a message that says so")
    launched.signal(signal.SIGTERM)
    assert launched.wait() in (75, 128 + signal.SIGTERM), "that of the last one, or of one that was just beginning"


def test_a_launcher_that_is_told_to_end_lets_the_coordinator_save_and_does_not_run_it_again(
    launch: Callable[..., Launched],
) -> None:
    """Servers and workers are there until it has ended, however often the signal comes."""
    launched = launch("save")
    for said in ("ready", "told"):
        wait_for(partial(_printed, launched, said), f"a coordinator that is {said}")
        launched.signal(signal.SIGTERM)
    assert launched.wait() == 75, launched.err
    assert "saved" in launched.out
    assert "run again" not in launched.err


def _printed(launched: Launched, line: str) -> bool:
    return line in launched.out.splitlines()


# ---- the end of others -----------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_comes_back_at_its_address(launch: Callable[..., Launched]) -> None:
    launched = launch("kill-worker")
    answers = launched.answers()
    assert launched.wait() == 0, launched.err
    before, again = answers["worker 1"], answers["again"]
    assert again["pid"] != before["pid"]
    assert again["TF_CONFIG"] == before["TF_CONFIG"]
    assert again["TORCHSTRAT_SECRET"] == before["TORCHSTRAT_SECRET"]
    assert re.search(
        rf"\[torchstrat\] worker 1 \(pid {before['pid']}\) was ended by SIGKILL .*; restarted", launched.err
    )
    assert gone(again["pid"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_is_the_coordinators(launch: Callable[..., Launched], number: signal.Signals) -> None:
    launched = launch("wait")
    launched.answers()
    processes = descendants(launched.pid)
    launched.signal(number)
    assert launched.wait() == (5 if number == signal.SIGINT else 128 + number)
    assert ("interrupted, and done with it" in launched.out) == (number == signal.SIGINT)
    assert "Traceback" not in launched.err
    assert_all_gone(processes)


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """The keyboard's end of a terminal, and the name of the other."""
    keyboard, screen = os.openpty()
    name = os.ttyname(screen)
    yield keyboard, name
    os.close(screen)
    os.close(keyboard)


def test_ctrl_c_at_a_terminal_interrupts_the_coordinator_once(
    launch: Callable[..., Launched], terminal: tuple[int, str]
) -> None:
    keyboard, name = terminal
    launched = launch("wait", terminal=name)
    launched.answers()
    processes = descendants(launched.pid)
    os.write(keyboard, b"\x03")
    assert launched.wait() == 5
    assert "interrupted, and done with it" in launched.out
    assert "Traceback" not in launched.err
    # At a terminal the coordinator's own children are its own business, as they are without a launcher.
    tasks = {pid: command for pid, command in processes.items() if "role.py" in command or "coordinator" in command}
    assert len(tasks) == 4
    wait_for(lambda: all(map(gone, tasks)), "an end of all tasks", GONE_SECONDS)
    for pid in processes:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_the_coordinator_reads_from_the_terminal(launch: Callable[..., Launched], terminal: tuple[int, str]) -> None:
    keyboard, name = terminal
    launched = launch("read", terminal=name)
    launched.answers()
    processes = descendants(launched.pid)
    os.write(keyboard, b"next\n")
    assert launched.wait() == 0, launched.err
    assert "read: next\n" in launched.out
    for pid in processes:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_second_signal_ends_everything(launch: Callable[..., Launched]) -> None:
    launched = launch("ignore", "--grace-seconds", "1000", STUBBORN="1")
    launched.answers()
    processes = descendants(launched.pid)
    launched.signal(signal.SIGINT)
    # Nothing visible comes of the first one. That the launcher has taken it shows in the set of pending signals.
    pending = Path("/proc") / str(launched.pid) / "status"
    wait_for(lambda: re.search(r"ShdPnd:\s*0+\n", pending.read_text()), "the first signal taken")
    time.sleep(0.2)  # and Python's handler run; were it not, both would be one and this test would wait in vain
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 137
    assert_all_gone(processes)


def test_who_does_not_end_is_killed_after_the_grace_period(launch: Callable[..., Launched]) -> None:
    launched = launch("exit0", "--grace-seconds", "0.5", STUBBORN="1")
    launched.answers()
    assert launched.wait() == 0
    for task in ("ps 0", "worker 0", "worker 1"):
        assert f"[torchstrat] {task} did not end within 0.5 s of SIGTERM; killed" in launched.err


def test_nothing_outlives_a_launcher_that_is_killed(launch: Callable[..., Launched]) -> None:
    launched = launch("ignore", STUBBORN="1")
    launched.answers()
    processes = descendants(launched.pid)
    launched.signal(signal.SIGKILL)
    launched.wait()
    assert_all_gone(processes)


def test_nothing_outlives_a_launcher_that_is_killed_after_its_reapers(launch: Callable[..., Launched]) -> None:
    launched = launch("ignore", STUBBORN="1")
    launched.answers()
    processes = descendants(launched.pid)
    reapers = [pid for pid, command in processes.items() if "_reaper.py" in command]
    assert len(reapers) == 2
    for pid in reapers:
        os.kill(pid, signal.SIGKILL)
    launched.signal(signal.SIGKILL)
    launched.wait()
    roles = {pid for pid, command in processes.items() if "role.py" in command or "coordinator.py" in command}
    assert len(roles) == 4
    wait_for(lambda: all(map(gone, roles)), "an end of the tasks, by the kernel", GONE_SECONDS)
    for pid in processes.keys() - roles:  # their children: only the reapers knew
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_who_dies_at_once_again_and_again_waits_longer_and_longer(launch: Callable[..., Launched]) -> None:
    launched = launch("wait", DIES_AT_ONCE="ps")
    line = (
        r"\[torchstrat\] ps 0 \(pid \d+\) exited with status 3 after \d\.\d s, so soon for the 3rd time in a row; next"
    )
    wait_for(partial(_said, launched, line), "a message that says so")
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 128 + signal.SIGTERM
    assert len(re.findall("ps 0 .*; restarted", launched.err)) == 1
    assert "next start in 1 s" in launched.err


def test_restarts_can_be_limited(launch: Callable[..., Launched]) -> None:
    launched = launch("wait", "--restarts", "1", "--no-restart-ps", DIES_AT_ONCE="ps worker")
    for task, restarted in (("ps 0", 0), ("worker 0", 1), ("worker 1", 1)):
        pattern = f"{task} .* exited with status 3 .*; not restarted"
        wait_for(partial(_said, launched, pattern), f"a message that {task} was given up")
        assert len(re.findall(f"{task} .*; restarted", launched.err)) == restarted
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 128 + signal.SIGTERM


# ---- a cluster of this process ---------------------------------------------------------------------------------------


def ask(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        return json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))


@pytest.fixture
def role(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "role.py").write_text(ROLE)
    return (sys.executable, str(tmp_path / "role.py"))


def test_a_local_cluster(role: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert "TORCHSTRAT_SECRET" not in os.environ
    others = descendants(os.getpid())
    with LocalCluster(workers=2, ps=1, env={"EXTRA": "yes"}, server_command=role) as cluster:
        cluster.wait_until_listening()
        spec = cluster.cluster_spec
        assert {job: spec.num_tasks(job) for job in spec.jobs} == {"chief": 1, "ps": 1, "worker": 2}
        resolver = cluster.resolver
        assert (resolver.cluster_spec(), resolver.task_type, resolver.task_id) == (spec, "chief", 0)
        assert os.environ["TORCHSTRAT_SECRET"] == cluster.secret
        assert cluster.secret not in repr(cluster)
        answer = ask(spec.task_address("worker", 1))
        assert answer["pid"] == cluster.process("worker", 1).pid
        assert (answer["ppid"], answer["EXTRA"]) == (os.getpid(), "yes")
        assert answer["TORCHSTRAT_SECRET"] == cluster.secret
        processes = descendants(os.getpid()).keys() - others.keys()
        assert len(processes) == 1 + 2 * 3, "the reaper, the tasks, and a child of each"
    assert "TORCHSTRAT_SECRET" not in os.environ
    assert repr(cluster) == "Cluster(ps=1, workers=2, closed)"
    wait_for(lambda: all(map(gone, processes)), "an end of all processes", GONE_SECONDS)
    assert not is_listening(spec.task_address("ps", 0))
    said = capfd.readouterr()
    assert "[worker 1] worker 1 listens\n" in said.out
    assert "[ps 0] a warning\n" in said.err
    cluster.stop()
    with pytest.raises(ContextError, match="another Cluster"):
        cluster.start()


def test_real_servers_and_workers() -> None:
    with LocalCluster(workers=1, ps=1) as cluster:
        cluster.wait_until_listening()
        pids = [cluster.process(job, 0).pid for job in ("ps", "worker")]
    assert all(map(gone, pids))


def test_killed_processes_come_back(role: tuple[str, ...]) -> None:
    with LocalCluster(workers=1, ps=1, server_command=role) as cluster:
        cluster.wait_until_listening()
        for job in ("worker", "ps"):
            pid = cluster.kill(job, 0)
            another = cluster.wait_until_restarted(job, 0, pid)
            assert another.pid != pid
            assert cluster.process(job, 0) is another
        cluster.wait_until_listening()
        assert ask(cluster.cluster_spec.task_address("ps", 0))["pid"] == cluster.process("ps", 0).pid


def test_without_restarts_they_come_back_when_told(role: tuple[str, ...]) -> None:
    with LocalCluster(workers=1, ps=1, restart=False, server_command=role) as cluster:
        cluster.wait_until_listening()
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
        assert ask(cluster.cluster_spec.task_address("ps", 0))["pid"] == third.pid


def test_a_worker_can_be_added(role: tuple[str, ...]) -> None:
    with LocalCluster(workers=1, ps=1, server_command=role) as cluster:
        assert cluster.add_worker() == 1
        cluster.wait_until_listening()
        config = json.loads(ask(cluster.cluster_spec.task_address("worker", 1))["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": 1}
        assert len(config["cluster"]["worker"]) == 2


def test_a_stopped_process_ends_too(role: tuple[str, ...]) -> None:
    with LocalCluster(workers=1, ps=1, server_command=role, grace_seconds=60) as cluster:
        cluster.wait_until_listening()
        pid = cluster.kill("worker", 0, signal.SIGSTOP)
        start = time.monotonic()
    assert gone(pid)
    assert time.monotonic() - start < 50, "it was woken to end, not waited for"


def test_unknown_tasks_are_named(role: tuple[str, ...]) -> None:
    with LocalCluster(workers=1, ps=1, restart=RestartPolicy(limit=2), server_command=role) as cluster:
        with pytest.raises(ClusterConfigError, match="no worker 7 here; the tasks of this cluster are: ps 0, worker 0"):
            cluster.process("worker", 7)


def test_an_error_in_the_block_ends_the_cluster(role: tuple[str, ...]) -> None:
    pids = []

    def train() -> None:
        with LocalCluster(workers=1, ps=1, server_command=role) as cluster:
            pids.append(cluster.process("worker", 0).pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert gone(pids[0])


def test_a_reserved_port_is_the_tasks_alone() -> None:
    port = ReservedPort()
    where = ("127.0.0.1", int(port.address.rpartition(":")[2]))
    assert not is_listening(port.address)
    for _ in range(2):  # a task, and the one after it
        with socket.create_server(where):
            assert is_listening(port.address)
    with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
        stranger.bind(where)
    port.close()
    port.close()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(where)
