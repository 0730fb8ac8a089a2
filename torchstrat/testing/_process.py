"""One process of a group started by `torchstrat.testing.spawn`, seen from outside."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torchstrat.testing._child import Answer, Request, serve, stacks_path

EXIT_SECONDS = 5.0  # how long a process that was told to leave may take
DUMP_SECONDS = 3.0  # how long a process that hangs may take to write its stacks


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

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self._stacks = stacks_path(folder, rank)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.handle = context.Process(
            target=serve, args=(theirs, str(folder), rank), name=f"torchstrat-rank-{rank}", daemon=False
        )
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


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"died of {signal.Signals(-code).name} before it returned"
        except ValueError:
            return f"died of signal {-code} before it returned"
    return f"exited with status {code} before it returned"
