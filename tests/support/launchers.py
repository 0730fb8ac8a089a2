"""``torchstrat launch`` around tasks that are no servers: what each is told, who is started again, and who remains."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import SECONDS, descendants, environment, fork, gone, kill_what_is_left, wait_for

ROLE = textwrap.dedent(
    """
    # In place of torchstrat.server: answers whoever connects with what it is, and stays until it is told to go.
    import argparse, contextlib, json, os, signal, socket, subprocess, sys

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
        with connection, contextlib.suppress(OSError):
            connection.sendall(json.dumps(answer).encode())
    """
)


def _launcher(words: list[str], files: list[str], terminal: bool, own: dict[str, str]) -> None:
    from torchstrat.launch.launcher import main

    if terminal:
        os.setsid()  # the first terminal that it opens is then its own
    for number, name in enumerate(files):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "rw"[number > 0]) for number in range(3))
    os.environ.clear()
    os.environ.update(own)
    status = main(words, server_command=[sys.executable, str(Path(files[1]).with_name("role.py"))])
    sys.stdout.flush()
    os._exit(status)  # PyTorch's way out takes a second


class Launched:
    """A launcher that runs, with files for what it says. Its coordinator is told ``what``, and the folder."""

    def __init__(
        self, folder: Path, script: str, what: str, *options: str, terminal: str | None = None, **changes: str
    ) -> None:
        self.folder = folder
        (folder / "role.py").write_text(ROLE)
        (folder / "coordinator.py").write_text(script)
        for name in ("out", "err"):
            (folder / name).touch()
        words = ["--ps", "1", *options, str(folder / "coordinator.py"), what, str(folder)]
        files = [terminal or "/dev/null", str(folder / "out"), str(folder / "err")]
        own = {name: value for name, value in environment().items() if not name.startswith("OMP_")}
        self._process = fork(_launcher, words, files, terminal is not None, {**own, **changes})
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def there(self, name: str) -> bool:
        """Whether the coordinator has left this file."""
        there = (self.folder / name).exists()
        assert there or not gone(self.pid), self.out + self.err
        return there

    def answers(self) -> dict[str, Any]:
        """What the coordinator has collected, once it has."""
        wait_for(lambda: self.there("answers"), f"an answer of every task; {self.folder}")
        return json.loads((self.folder / "answers").read_text())

    def processes(self) -> dict[int, str]:
        """All of it, once every task has answered."""
        self.answers()
        found = descendants(self.pid)
        assert len(found) >= 2 * 4, "every task has a child of its own"
        return found

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int | None:
        """The exit status, negative for a signal."""
        self._process.join(SECONDS)
        return self._process.exitcode

    def ends_with(self, *status: int) -> None:
        assert self.wait() in status, self.out + self.err

    def end(self) -> None:
        rest = descendants(self.pid)
        if self._process.is_alive():
            self._process.kill()
            self.wait()
        kill_what_is_left(rest)
        self._process.close()


@pytest.fixture
def launching(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a launcher; it is ended with the test."""
    launched: list[Launched] = []

    def start(*arguments: str, **more: Any) -> Launched:
        launched.append(Launched(tmp_path, *arguments, **more))
        return launched[-1]

    yield start
    for each in launched:
        each.end()


def all_gone(pids: Any) -> None:
    wait_for(lambda: all(map(gone, pids)), "an end of all processes", seconds=20)
