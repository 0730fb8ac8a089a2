"""``torchstrat launch``: a local cluster around the coordinator's process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from torchstrat.cluster_spec import CHIEF, PARAMETER_SERVER, WORKER
from torchstrat.errors import TorchstratError
from torchstrat.launch.command_line import USAGE_ERROR, LaunchOptions, parse
from torchstrat.launch.local_cluster import SERVER_COMMAND, LocalCluster
from torchstrat.launch.output import Console
from torchstrat.launch.reaper import Reaper
from torchstrat.launch.restarts import RestartPolicy

_LOOK_SECONDS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(
    arguments: Sequence[str], *, program: str = "torchstrat launch", server_command: Sequence[str] = SERVER_COMMAND
) -> int:
    """Launch what the words after ``program`` say; returns the exit status. Call it from the main thread.

    That is the coordinator's, or 128 and the number of the signal that ended it, as a shell has it. A command line or
    a secret that cannot be used exits with 2 before anything starts.
    """
    options = parse(arguments, program)
    try:
        return launch(options, server_command)
    except TorchstratError as error:
        Console().report(f"nothing was started: {error}")
        return USAGE_ERROR


def launch(options: LaunchOptions, server_command: Sequence[str] = SERVER_COMMAND) -> int:
    """Run the coordinator within a cluster of its own; returns its exit status. See `main`."""
    policy = RestartPolicy(options.restarts)
    cluster = LocalCluster(
        options.workers,
        options.ps,
        env=options.env,
        restart={WORKER: policy, PARAMETER_SERVER: policy if options.restart_ps else RestartPolicy(0)},
        server_command=server_command,
        grace_seconds=options.grace_seconds,
    )
    coordinator = _Coordinator(cluster)
    with _PassedOn(coordinator), cluster:
        threads = options.env.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
        Console().report(
            f"parameter servers: {options.ps}, workers: {options.workers}, each with OMP_NUM_THREADS={threads or 1}"
            f"{'' if threads else ' (--env OMP_NUM_THREADS=… changes it)'}"
        )
        return coordinator.run(options.command)


class _Coordinator:
    """The process that runs SCRIPT, with this one's input and output.

    At a terminal it shares the launcher's process group, so that it may read from it (a debugger does). Otherwise it
    has a session of its own, like workers and servers, which ends as a whole.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None
        self._runs = False
        self._signals: list[int] = []
        self._at_terminal = sys.stdin is not None and sys.stdin.isatty()

    def run(self, command: Sequence[str]) -> int:
        """Start it, unless a signal has come already, and wait for its end. Main thread."""
        reaper = Reaper()
        try:
            if self._signals:
                return 128 + self._signals[0]
            environment = {"PYTHONUNBUFFERED": "1", **os.environ, **self._cluster.environment_of(CHIEF, 0)}
            self._process = reaper.start(command, own_group=not self._at_terminal, env=environment)
            self._runs = True
            if self._signals:  # before the line above
                self._send(self._signals[0] if len(self._signals) == 1 else signal.SIGKILL)
            status = self._wait(reaper, self._process)
        finally:
            self._runs = False
            reaper.close()
        return status if status >= 0 else 128 - status

    def on_signal(self, number: int) -> None:
        """Pass the first signal on to it; end everything at the second. Runs as a signal handler."""
        self._signals.append(number)
        if len(self._signals) == 1:
            if not (self._at_terminal and number == signal.SIGINT):  # the terminal has told it, too
                self._send(number)
        else:
            self._cluster.hurry()
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._runs and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _wait(self, reaper: Reaper, process: subprocess.Popen[bytes]) -> int:
        """Wait in short pieces: a signal that comes just before a system call that waits, after Python has last looked
        for one, would not be handled before that call returns."""
        statuses: list[int] = []

        def collect() -> None:
            statuses.append(reaper.collect(process, own_group=not self._at_terminal, before_status=self._ended))

        collector = threading.Thread(target=collect, name="end of the coordinator", daemon=True)
        collector.start()
        while collector.is_alive():
            collector.join(_LOOK_SECONDS)
        return statuses[0]

    def _ended(self) -> None:
        self._runs = False


class _PassedOn:
    """While it is entered, signals to this process go to the coordinator instead."""

    def __init__(self, coordinator: _Coordinator) -> None:
        self._coordinator = coordinator
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in _SIGNALS:
            self._before[number] = signal.getsignal(number)
            if self._before[number] is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                signal.signal(number, self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._coordinator.on_signal(number)
