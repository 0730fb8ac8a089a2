"""The launcher's parts that need no processes: its command line, when it restarts, how it shows output."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchstrat.errors import ContextError, InvalidArgumentError
from torchstrat.launch import LocalCluster, RestartPolicy
from torchstrat.launch.command_line import LaunchOptions, coordinator_command, parse
from torchstrat.launch.output import Console, PrefixedOutput
from torchstrat.launch.restarts import Restarts
from torchstrat.launch.supervised import Program, SupervisedProcess, describe_end, ordinal

# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_the_words_after_the_script_are_the_scripts(script: str) -> None:
    options = parse(["--ps", "2", "--workers", "4", script, "--ps", "9", "--", "-x"], "launch")
    assert options == LaunchOptions(
        ps=2,
        workers=4,
        command=(sys.executable, script, "--ps", "9", "--", "-x"),
        env={},
        restarts=None,
        restart_ps=True,
        grace_seconds=10.0,
    )


def test_options(script: str) -> None:
    words = ["--ps=1", "--workers=1", "--env", "A=1", "--env", "B=x=y", "--restarts", "0", "--no-restart-ps"]
    options = parse([*words, "--grace-seconds", "2.5", "--", script], "launch")
    assert options.env == {"A": "1", "B": "x=y"}
    assert (options.restarts, options.restart_ps, options.grace_seconds) == (0, False, 2.5)
    assert options.command == (sys.executable, script)
    assert parse([*words, "--restarts", "unlimited", script], "launch").restarts is None
    assert options.keep_pages is None
    assert parse([*words, "--no-keep-pages", script], "launch").keep_pages is False
    assert parse([*words, "--keep-pages", script], "launch").keep_pages is True
    assert options.start_method is None
    assert parse([*words, "--start-method", "spawn", script], "launch").start_method == "spawn"


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
        (["--ps", "1", "--workers", "1"], "there is no SCRIPT"),
        (["--ps", "1", "--workers", "1", "--"], "there is no SCRIPT"),
        (["--ps", "0", "--workers", "1", "{script}"], "--ps: '0' must be a whole number of at least 1"),
        (["--ps", "1", "--workers", "0", "{script}"], "--workers: '0' must be"),
        (["--ps", "1", "--workers", "-2", "{script}"], "--workers"),
        (["--ps", "one", "--workers", "1", "{script}"], "--ps: 'one' must be"),
        (["--ps", "1", "--workers", "1", "--restarts", "-1", "{script}"], "--restarts"),
        (["--ps", "1", "--workers", "1", "--restarts", "often", "{script}"], "'often' must be .* 'unlimited'"),
        (["--ps", "1", "--workers", "1", "--env", "NAME", "{script}"], "'NAME' must be NAME=VALUE"),
        (["--ps", "1", "--workers", "1", "--grace-seconds", "nan", "{script}"], "'nan' must be a number of seconds"),
        (["--ps", "1", "--workers", "1", "{folder}/missing.py"], "there is no file '.*missing.py'"),
        (["--ps", "1", "--workers", "1", "no-such-program-anywhere"], "no program .* on the PATH"),
        (["--ps", "1", "--workers", "1", "{folder}/missing"], "there is no program '.*/missing' in"),
        (["--ps", "1", "--workers", "1", "{folder}"], "is a folder"),
        (["--ps", "1", "--workers", "1", "{folder}/data"], "is not executable; `chmod"),
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


def test_a_process_that_lived_is_replaced_at_once_each_time() -> None:
    restarts = Restarts(RestartPolicy())
    assert [restarts.delay_seconds(60.0) for _ in range(100)] == [0.0] * 100


def test_those_that_end_at_once_again_and_again_wait_longer_and_longer() -> None:
    restarts = Restarts(RestartPolicy(first_delay_seconds=1, longest_delay_seconds=5))
    assert [restarts.delay_seconds(0.1) for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert restarts.delay_seconds(60.0) == 0.0
    assert restarts.delay_seconds(0.1) == 0.0, "one that lived in between starts the count anew"
    for _ in range(3000):
        last = restarts.delay_seconds(0.1)
    assert last == 5.0


@pytest.mark.parametrize("limit", [0, 3])
def test_a_limit_counts_all_restarts(limit: int) -> None:
    restarts = Restarts(RestartPolicy(limit=limit))
    assert [restarts.delay_seconds(60.0) for _ in range(limit + 2)] == [0.0] * limit + [None, None]


def test_a_negative_limit_is_refused() -> None:
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


def test_how_processes_ended() -> None:
    assert describe_end(3) == "exited with status 3"
    assert describe_end(-9) == "was ended by SIGKILL"
    assert describe_end(-250) == "was ended by signal 250"
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]
    )


# ---- output ----------------------------------------------------------------------------------------------------------


def test_lines_get_their_prefix_and_the_streams_stay_apart(capsys: pytest.CaptureFixture[str]) -> None:
    (out, out_writer), (err, err_writer) = _pipe(), _pipe()
    output = PrefixedOutput(out, err, "worker 1", Console())
    out_writer.write(b"one\ntw")
    out_writer.write(b"o\n\nhalf a line")
    err_writer.write(b"caf\xc3\xa9 \xff\n")
    for writer in (out_writer, err_writer):
        writer.close()
    output.finish()
    said = capsys.readouterr()
    assert said.out == "[worker 1] one\n[worker 1] two\n[worker 1] \n[worker 1] half a line\n"
    assert said.err == "[worker 1] café \N{REPLACEMENT CHARACTER}\n"
    assert out.closed
    assert err.closed


def test_the_end_does_not_wait_for_whoever_keeps_the_pipe_open(capsys: pytest.CaptureFixture[str]) -> None:
    (out, out_writer), (err, err_writer) = _pipe(), _pipe()
    output = PrefixedOutput(out, err, "ps 0", Console())
    out_writer.write(b"last words")
    output.finish()
    assert capsys.readouterr().out == "[ps 0] last words\n"
    for writer in (out_writer, err_writer):
        writer.close()


def test_a_line_without_end_is_shown_in_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    (out, out_writer), (err, err_writer) = _pipe(), _pipe()
    output = PrefixedOutput(out, err, "ps 0", Console())
    length = 300_000
    out_writer.write(b"x" * length)
    for writer in (out_writer, err_writer):
        writer.close()
    output.finish()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert sum(line.count("x") for line in lines) == length


def test_a_console_that_cannot_say_it_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    Console().write("café\n", to_stderr=False)
    assert narrow.buffer.getvalue() == b"caf\\xe9\n"  # type: ignore[attr-defined]
    narrow.close()
    Console().write("nobody reads\n", to_stderr=False)


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    reader, writer = os.pipe()
    return io.FileIO(reader, "r"), io.FileIO(writer, "w")


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
