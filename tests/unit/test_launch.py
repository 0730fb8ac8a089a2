"""The launcher's parts that need no processes: its command line, when it restarts, how it shows output."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from torchstrat.core.terminal import is_listening
from torchstrat.errors import ContextError, InvalidArgumentError
from torchstrat.launch import LocalCluster, RestartPolicy
from torchstrat.launch.fork_server import Reaper
from torchstrat.launch.launcher import LaunchOptions, coordinator_command, launch, parse
from torchstrat.launch.local_cluster import ReservedPort
from torchstrat.launch.supervised import (
    Console,
    PrefixedOutput,
    Program,
    Restarts,
    SupervisedProcess,
    describe_end,
    ordinal,
)

# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


ONE = ["--ps", "1", "--workers", "1"]


def test_the_words_after_the_script_are_the_scripts(script: str) -> None:
    options = parse(["--ps", "2", "--workers", "4", script, "--ps", "9", "--", "-x"], "launch")
    command = (sys.executable, script, "--ps", "9", "--", "-x")
    expected = LaunchOptions(
        ps=2, workers=4, command=command, env={}, restarts=None, restart_ps=True, grace_seconds=10.0
    )
    assert options == expected
    assert (options.keep_pages, options.start_method) == (None, None)


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["--env", "A=1", "--env", "B=x=y"], "env", {"A": "1", "B": "x=y"}),
        (["--restarts", "0"], "restarts", 0),
        (["--restarts", "3", "--restarts", "unlimited"], "restarts", None),
        (["--no-restart-ps"], "restart_ps", False),
        (["--grace-seconds", "2.5"], "grace_seconds", 2.5),
        (["--no-keep-pages"], "keep_pages", False),
        (["--keep-pages"], "keep_pages", True),
        (["--start-method", "spawn"], "start_method", "spawn"),
    ],
)
def test_options(words: list[str], option: str, value: Any, script: str) -> None:
    options = parse(["--ps=1", "--workers=1", *words, "--", script], "launch")
    assert getattr(options, option) == value
    assert options.command == (sys.executable, script)


def test_a_program_runs_by_itself(tmp_path: Path) -> None:
    program = tmp_path / "run"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert coordinator_command([str(program), "-m", "x"]) == (str(program), "-m", "x")
    assert Path(coordinator_command(["sh", "-c", "true"])[0]).name == "sh"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--ps, --workers"),
        (ONE, "there is no SCRIPT"),
        ([*ONE, "--"], "there is no SCRIPT"),
        (["--ps", "0", "--workers", "1", "{script}"], "--ps: '0' must be a whole number of at least 1"),
        (["--ps", "1", "--workers", "0", "{script}"], "--workers: '0' must be"),
        (["--ps", "1", "--workers", "-2", "{script}"], "--workers"),
        (["--ps", "one", "--workers", "1", "{script}"], "--ps: 'one' must be"),
        ([*ONE, "--restarts", "-1", "{script}"], "--restarts"),
        ([*ONE, "--restarts", "often", "{script}"], "'often' must be .* 'unlimited'"),
        ([*ONE, "--env", "NAME", "{script}"], "'NAME' must be NAME=VALUE"),
        ([*ONE, "--grace-seconds", "nan", "{script}"], "'nan' must be a number of seconds"),
        ([*ONE, "{folder}/missing.py"], "there is no file '.*missing.py'"),
        ([*ONE, "no-such-program-anywhere"], "no program .* on the PATH"),
        ([*ONE, "{folder}/missing"], "there is no program '.*/missing' in"),
        ([*ONE, "{folder}"], "is a folder"),
        ([*ONE, "{folder}/data"], "is not executable; `chmod"),
    ],
)
def test_one_clear_message_and_status_2(
    words: list[str], message: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(script).parent
    (folder / "data").write_text("")
    words = [word.format(script=script, folder=folder) for word in words]
    with pytest.raises(SystemExit) as end:
        parse(words, "torchstrat launch")
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.count("error:") == 1


# ---- restarts --------------------------------------------------------------------------------------------------------


def test_who_lived_is_replaced_at_once_and_who_ends_at_once_again_and_again_waits_longer_and_longer() -> None:
    restarts = Restarts(RestartPolicy(first_delay_seconds=1, longest_delay_seconds=5))
    assert [restarts.delay_seconds(60.0) for _ in range(100)] == [0.0] * 100
    assert [restarts.delay_seconds(0.1) for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert restarts.delay_seconds(60.0) == 0.0
    assert restarts.delay_seconds(0.1) == 0.0, "one that lived in between starts the count anew"
    assert [restarts.delay_seconds(0.1) for _ in range(3000)][-1] == 5.0


@pytest.mark.parametrize("limit", [0, 3])
def test_a_limit_counts_all_restarts(limit: int) -> None:
    restarts = Restarts(RestartPolicy(limit=limit))
    assert [restarts.delay_seconds(60.0) for _ in range(limit + 2)] == [0.0] * limit + [None, None]
    with pytest.raises(InvalidArgumentError, match="limit=-1"):
        RestartPolicy(limit=-1)


class LateReaper:
    """Notices the end of a process when it is told to: as a thread that does not get to run."""

    def __init__(self) -> None:
        self.may_look = threading.Event()

    def start(self, command: Sequence[str], *, own_group: bool, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, start_new_session=own_group, **options)

    def collect(self, process: subprocess.Popen[bytes], *, own_group: bool, before_status: Callable[[], None]) -> int:
        assert self.may_look.wait(60)
        before_status()
        return process.wait()


@pytest.mark.parametrize("knows", [True, False])
def test_signals_for_a_process_whose_status_somebody_else_has_collected(knows: bool) -> None:
    reaper: Any = LateReaper()
    supervised = SupervisedProcess(
        "worker 0", Program([sys.executable, "-c", ""], os.environ, reaper), RestartPolicy(limit=0), Console()
    )
    process = supervised.process()
    assert process.wait(60) == 0  # its number may be another process's by now
    if not knows:
        process.returncode = None  # between the system's answer and the note of it
    assert supervised.send_signal(signal.SIGKILL, whole_group=True) is None
    supervised.request_stop()
    reaper.may_look.set()
    assert supervised.join(60)


def test_a_process_whose_output_nobody_can_carry_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Any] = []

    def refuses_once(*arguments: Any) -> Any:
        if refused:
            return PrefixedOutput(*arguments)
        refused.append(arguments[0])
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("torchstrat.launch.supervised.PrefixedOutput", refuses_once)
    reaper = Reaper()
    forever = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    supervised = SupervisedProcess("worker 0", Program(forever, os.environ, reaper), RestartPolicy(), Console())
    assert supervised.process(60).poll() is None
    assert refused[0].closed
    supervised.request_stop()
    assert supervised.join(60)
    reaper.close()


class TakesTime:
    """In place of the cluster, and of the evaluator. The cluster's end takes so long that a signal comes."""

    hurried: ClassVar[list[str]] = []

    def __init__(self, *arguments: Any, **_: object) -> None:
        self.name = "evaluator" if arguments[0] == ("true",) else "cluster"

    def __enter__(self) -> TakesTime:
        return self

    def __exit__(self, *_: object) -> None: ...

    def environment_of(self, job: str, index: int) -> dict[str, str]:
        return {}

    def close(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def hurry(self) -> None:
        self.hurried.append(self.name)

    def finish(self, *, training_is_done: bool) -> None:
        assert training_is_done


def test_a_signal_while_the_cluster_ends_is_for_the_evaluator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Cluster", "EvaluatorProcess"):
        monkeypatch.setattr(f"torchstrat.launch.launcher.{name}", TakesTime)
    options = LaunchOptions(
        ps=1, workers=1, command=("true",), env={}, restarts=0, restart_ps=True, grace_seconds=1.0, evaluator=True
    )
    assert launch(options) == 0
    assert TakesTime.hurried == ["cluster", "evaluator"]


def test_how_processes_ended() -> None:
    ends = ["exited with status 3", "was ended by SIGKILL", "was ended by signal 250"]
    assert [describe_end(status) for status in (3, -9, -250)] == ends
    numbers = ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]
    assert [ordinal(int(number[:-2])) for number in numbers] == numbers


# ---- output and ports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "err", "is_closed"),
    [
        ([b"one\ntw", b"o\n\nhalf a line"], b"caf\xc3\xa9 \xff\n", True),
        ([b"last words"], b"", False),  # the end does not wait for whoever keeps the pipe open
        ([b"x" * 300_000], b"", True),  # a line without end is shown in pieces
    ],
)
def test_lines_get_their_prefix_and_the_streams_stay_apart(
    out: list[bytes], err: bytes, is_closed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pipes = [os.pipe() for _ in range(2)]
    readers, writers = ([io.FileIO(pipe[end], "rw"[end]) for pipe in pipes] for end in range(2))
    output = PrefixedOutput(*readers, "ps 1", Console())
    for text in out:
        writers[0].write(text)
    writers[1].write(err)
    for writer in writers if is_closed else ():
        writer.close()
    output.finish()
    said = capsys.readouterr()
    lines = [line.removeprefix("[ps 1] ") for line in said.out.splitlines()]
    assert all(line.startswith("[ps 1] ") for line in said.out.splitlines())
    if len(out[0]) < 1000:
        assert lines == b"".join(out).decode().split("\n")
    else:
        assert len(lines) > 1
        assert "".join(lines) == out[0].decode()
    assert said.err == ("[ps 1] café \N{REPLACEMENT CHARACTER}\n" if err else "")
    for writer in writers:
        writer.close()
    assert not is_closed or all(reader.closed for reader in readers)


def test_a_console_that_cannot_say_it_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    Console().write("café\n", to_stderr=False)
    assert narrow.buffer.getvalue() == b"caf\\xe9\n"  # type: ignore[attr-defined]
    narrow.close()
    Console().write("nobody reads\n", to_stderr=False)


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


# ---- a cluster that was not started ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ps": 0}, "ps=0"),
        ({"workers": 0}, "workers=0"),
        ({"workers": True}, "workers=True"),
        ({"workers": "2"}, "workers='2'"),
        ({"env": {"A": 1}}, "'A': 1"),
        ({"start_method": "fork"}, "start_method='fork' is neither"),
        ({"start_method": "forkserver", "server_command": ("serve",)}, r"not possible: server_command is \('serve',\)"),
    ],
)
def test_a_cluster_needs_workers_servers_and_strings(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LocalCluster(**arguments)  # type: ignore[arg-type]


def test_a_cluster_that_was_not_started_says_so() -> None:
    cluster = LocalCluster()
    assert repr(cluster) == "Cluster(ps=2, workers=2, not started)"
    with pytest.raises(ContextError, match="with statement"):
        cluster.cluster_spec
    with pytest.raises(ContextError, match="with statement"):
        cluster.add_worker()
    cluster.stop()
