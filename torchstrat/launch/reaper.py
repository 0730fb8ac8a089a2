"""Nothing that was started here stays behind, even when this process is killed with SIGKILL.

Two nets: on Linux the kernel kills each child when this process ends; everywhere a small process waits for the end of
this one and kills whole process groups, which catches the children of children too, such as a data loader's. Both are
in `torchstrat.launch._reaper`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Neither the user's site packages nor PYTHON* variables: it needs the standard library and has to be quick.
_REAPER = (sys.executable, "-I", "-S", str(Path(__file__).parent / "_reaper.py"))
_END_SECONDS = 10.0


class Reaper:
    """The process that watches this one. Thread-safe.

    It is started by the constructor; `close` ends it when there are no groups left to watch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            _REAPER,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at a terminal goes to the whole group of the launcher
            bufsize=0,
        )

    def start(self, command: Sequence[str], *, own_group: bool, **options: Any) -> subprocess.Popen[bytes]:
        """Start a program that dies with this process; the calling thread has to live as long as the program.

        Args:
            command: The program and its arguments.
            own_group: Whether it leads a group (and session) of its own, which then ends as a whole.
            options: For `subprocess.Popen`.
        """
        process = subprocess.Popen(
            [*_REAPER, str(os.getpid()), *command],
            start_new_session=own_group,
            **options,
        )
        if own_group:
            self.watch(process.pid)
        return process

    def collect(
        self, process: subprocess.Popen[bytes], *, own_group: bool, before_status: Callable[[], None] = lambda: None
    ) -> int:
        """Wait for a program that was started here, kill what is left of its group, and return its exit status.

        ``before_status`` is called when it has ended, while its number is still its own.
        """
        wait_until_ended(process)
        before_status()
        if own_group:
            # Before the status is collected: until then nobody else can be given this number.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            self.forget(process.pid)
        return process.wait()

    def watch(self, group: int) -> None:
        """This group of processes ends with this one, whoever has started it."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Let it go. May be called twice."""
        with self._lock:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        with self._lock:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError, ValueError):  # somebody killed it: the other net remains
                self._process.stdin.write(line.encode())


def wait_until_ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until a child has ended and leave its status to be collected, so that its number stays taken."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        process.wait()
        return
    with contextlib.suppress(ChildProcessError):  # somebody else has collected it
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
