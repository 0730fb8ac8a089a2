"""One process of a group started by `torchstrat.testing.spawn`, seen from outside."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from torchstrat.launch.fork_server import StartMethod
from torchstrat.testing._child import Answer, Request, serve, stacks_path

EXIT_SECONDS = 5.0  # how long a process that was told to leave may take
DUMP_SECONDS = 3.0  # how long a process that hangs may take to write its stacks

_PRELOADED = ("torchstrat.testing._child", "torchstrat", "torch._dynamo")
"""What processes of a group need. The last takes longest; PyTorch imports it for a process's first optimizer."""


@dataclass(frozen=True)
class Failure:
    """How one process failed to return."""

    rank: int
    reason: str
    """One line: the exception, "died of SIGSEGV", "still running after 120 s"."""
    details: str
    """The traceback of what was raised, or the stacks of all threads of what hung or crashed; may be empty."""


class Process:
    """One process of a group, seen from outside."""

    def __init__(self, rank: int, folder: Path, environment: Mapping[str, str], method: StartMethod) -> None:
        """``environment``: on top of this process's own."""
        self.rank = rank
        self._stacks = stacks_path(folder, rank)
        context = forking() if method == "forkserver" else multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.handle = context.Process(
            target=serve,
            args=(theirs, str(folder), rank, {**os.environ, **environment}),
            name=f"torchstrat-rank-{rank}",
            daemon=False,
        )
        # A new interpreter has to start with these: OpenMP counts its threads when torch is loaded.
        with _environment(environment):
            self.handle.start()
        theirs.close()  # so that its end is the only one, and its death closes the pipe

    @property
    def ends(self) -> list[Connection[Any, Any] | int]:
        return [self._connection, self.handle.sentinel]

    def ask(self, request: Request) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead; poll says how
            self._connection.send_bytes(pickle.dumps(request))

    def poll(self) -> bytes | Failure | None:
        """Its pickled result, how it failed, or None while it is at work."""
        try:
            if self._connection.poll():
                answer: Answer = pickle.loads(self._connection.recv_bytes())
                if answer.result is not None:
                    return answer.result
                return Failure(self.rank, answer.reason, answer.traceback)
        except (EOFError, ConnectionResetError):
            self.handle.join(EXIT_SECONDS)
        if self.handle.is_alive():
            return None
        return Failure(self.rank, _describe_exit(self.handle.exitcode), self._read())

    def request_stacks(self) -> None:
        if self.handle.is_alive() and self._stacks.exists() and self.handle.pid is not None:
            os.kill(self.handle.pid, signal.SIGUSR1)

    def read_stacks(self, deadline: float) -> str:
        """What `request_stacks` brought: written by a signal handler, so even while the thread is stuck in C."""
        text = ""
        while time.monotonic() < deadline and self.handle.is_alive():
            previous, text = text, self._read()
            if text and text == previous:
                return text
            time.sleep(0.05)
        return text or "(no stacks: it had not started up, or could not be interrupted)"

    def _read(self) -> str:
        return self._stacks.read_text(errors="replace") if self._stacks.exists() else ""

    def dismiss(self) -> None:
        self._connection.close()

    def kill(self) -> None:
        self._connection.close()
        if self.handle.is_alive():
            self.handle.kill()
        self.handle.join()
        self.handle.close()


def forking() -> ForkServerContext:
    """For forks of a fork server that is there: one for all groups of this process, kept until it ends. If the program
    has started one itself, that is used."""
    multiprocessing.set_forkserver_preload(list(_PRELOADED))
    with _environment({"OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


_environment_lock = threading.Lock()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Add to this process's environment while a child starts: `multiprocessing` cannot give a child its own."""
    with _environment_lock:
        saved = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in saved.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"died of {signal.Signals(-code).name} before it returned"
        except ValueError:
            return f"died of signal {-code} before it returned"
    return f"exited with status {code} before it returned"
