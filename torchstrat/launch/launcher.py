"""``torchstrat launch``: a local cluster around the coordinator's process, and its evaluator.

The evaluator is SCRIPT once more, in a role that only watches checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from torchstrat.checkpoint.numbered import told_directories
from torchstrat.checkpoint.preemption import EXIT_CODE
from torchstrat.core.errors import TorchstratError
from torchstrat.distributed.cluster_spec import CHIEF, EVALUATOR, PARAMETER_SERVER, WORKER
from torchstrat.launch.command_line import USAGE_ERROR, LaunchOptions, parse
from torchstrat.launch.local_cluster import SERVER_COMMAND, Cluster
from torchstrat.launch.output import Console
from torchstrat.launch.reaper import Reaper
from torchstrat.launch.restarts import RestartPolicy, Restarts
from torchstrat.launch.supervised import Program, SupervisedProcess
from torchstrat.parameter_server.interface import Task
from torchstrat.parameter_server.transport.auth import SECRET_FILE_VARIABLE, SECRET_VARIABLE

_TASK = Task(EVALUATOR, 0)
_DONE = 0
"""The exit status of an evaluator that has nothing more to do. After any other it is started again."""
_EVALUATOR_LOOK_SECONDS = 0.05
_LAST_SECONDS = 10.0  # to disappear after SIGKILL


class EvaluatorProcess:
    """Started on entering; gone after the block.

    It is no member of the cluster: nobody dials it, it dials nobody, and it does not get the cluster's secret.

    Args:
        command: The coordinator's program and its arguments: TF_CONFIG tells the two apart.
        environment: What TF_CONFIG and the user add to this process's own variables.
        policy: When it is started again.
        seconds: How long it may take to evaluate what is left when the coordinator has ended.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], policy: RestartPolicy, seconds: float
    ) -> None:
        self._command = command
        self._environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **environment}
        for name in (SECRET_VARIABLE, SECRET_FILE_VARIABLE):
            self._environment.pop(name, None)
        self._policy = policy
        self._seconds = seconds
        self._console = Console()
        self._hurried = threading.Event()

    def __enter__(self) -> EvaluatorProcess:
        self._reaper = Reaper()
        self._process = SupervisedProcess(
            str(_TASK),
            Program(self._command, self._environment, self._reaper),
            self._policy,
            self._console,
            done_status=_DONE,
        )
        return self

    def finish(self, *, training_is_done: bool) -> None:
        """Let it evaluate what is left, and end; then end it.

        A training that is done has left its end mark beside the checkpoints, at which the evaluator ends by itself.
        Otherwise, and when the time is over, it is told by SIGTERM (see `SidecarEvaluator.start`), and at last killed.
        """
        if self._process.alive:
            self._console.report(f"{_TASK} has up to {self._seconds:g} s for the checkpoints that are left")
        until = time.monotonic() + self._seconds
        if training_is_done:
            self._wait(until)
        self._process.request_stop()
        if not self._wait(until + (_LAST_SECONDS if training_is_done else 0.0)):
            self._console.report(f"{_TASK} did not end in time; killed (--evaluator-seconds)")

    def hurry(self) -> None:
        """Wait for it no longer. May be called in a signal handler."""
        self._hurried.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._process.request_stop()
            self._process.send_signal(signal.SIGKILL, whole_group=True)
            if not self._process.join(_LAST_SECONDS):
                self._console.report(f"{_TASK} is still there {_LAST_SECONDS:g} s after SIGKILL")
        finally:
            self._reaper.close()

    def _wait(self, until: float) -> bool:
        """Whether it has ended for good by then."""
        while self._process.alive and time.monotonic() < until and not self._hurried.is_set():
            self._process.join(_EVALUATOR_LOOK_SECONDS)
        return not self._process.alive


_LOOK_SECONDS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Those that are the coordinator's. SIGUSR1 is how Slurm warns of the end (``--signal=USR1@60``)."""


def main(
    arguments: Sequence[str], *, program: str = "torchstrat launch", server_command: Sequence[str] = SERVER_COMMAND
) -> int:
    """Launch what the words after ``program`` say; returns the exit status. Call it from the main thread.

    That is the coordinator's, or 128 and the number of the signal that ended it, as a shell has it. A coordinator that
    exits with 75 asks to be run again (see `torchstrat.PreemptionHandler`), and is, on the same cluster; after a signal
    to this process 75 is the status like any other. A command line or a secret that cannot be used exits with 2 before
    anything starts.
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
    cluster = Cluster(
        options.workers,
        options.ps,
        env=options.env,
        restart={WORKER: policy, PARAMETER_SERVER: policy if options.restart_ps else RestartPolicy(0)},
        server_command=server_command,
        start_method=options.start_method,
        grace_seconds=options.grace_seconds,
        keep_pages=options.keep_pages,
    )
    coordinator = _Coordinator(cluster)
    with _PassedOn(coordinator), cluster, contextlib.ExitStack() as stack:
        threads = options.env.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
        Console().report(
            f"parameter servers: {options.ps}, workers: {options.workers}, each with OMP_NUM_THREADS={threads or 1}"
            f"{'' if threads else ' (--env OMP_NUM_THREADS=… changes it)'}"
        )
        if options.evaluator:
            environment = {**options.env, **cluster.environment_of(EVALUATOR, 0)}
            coordinator.evaluator = stack.enter_context(
                EvaluatorProcess(options.command, environment, policy, options.evaluator_seconds)
            )
            mark_finished = stack.enter_context(told_directories())
        status = coordinator.run(options.command)
        if coordinator.evaluator is not None:
            cluster.close()  # workers and servers have nothing more to do
            coordinator.is_over = True
            if status == 0:
                mark_finished()
            coordinator.evaluator.finish(training_is_done=status == 0)
        return status


class _Coordinator:
    """The processes that run SCRIPT, one after the other while they ask for it, with this one's input and output.

    At a terminal it shares the launcher's process group, so that it may read from it (a debugger does). Otherwise it
    has a session of its own, like workers and servers, which ends as a whole.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.evaluator: EvaluatorProcess | None = None
        self.is_over = False
        """Its process has ended, and the launcher waits for the evaluator alone."""
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None
        self._runs = False
        self._signals: list[int] = []
        self._at_terminal = sys.stdin is not None and sys.stdin.isatty()

    def run(self, command: Sequence[str]) -> int:
        """Start it, unless a signal has come already, wait for its end, and start it again if it says so; returns its
        last status. Main thread."""
        restarts = Restarts(RestartPolicy())  # not those of workers and servers: this is no failure
        while True:
            started = time.monotonic()
            status = self._run_once(command)
            if status != EXIT_CODE or self._signals:
                return status
            delay = restarts.delay_seconds(time.monotonic() - started) or 0.0
            Console().report(
                f"SCRIPT exited with status {EXIT_CODE}: it asks to be run again"
                f"{f'; it lived so shortly that this is in {delay:g} s' if delay else ''}"
            )
            until = time.monotonic() + delay
            while (left := until - time.monotonic()) > 0 and not self._signals:
                time.sleep(min(left, _LOOK_SECONDS))
            if self._signals:
                return status

    def _run_once(self, command: Sequence[str]) -> int:
        reaper = Reaper()
        try:
            if self._signals:
                return 128 + self._signals[0]
            environment = {"PYTHONUNBUFFERED": "1", **os.environ, **self._cluster.environment_of(CHIEF, 0)}
            self._process = reaper.start(command, own_group=not self._at_terminal, env=environment)
            self._runs = True
            if self._signals:  # before the line above
                self._send(signal.SIGKILL if self._is_pressed else self._signals[0])
            status = self._wait(reaper, self._process)
        finally:
            self._runs = False
            reaper.close()
        return status if status >= 0 else 128 - status

    @property
    def _is_pressed(self) -> bool:
        """Whether a person asks for the second time. A scheduler that does, for all that it knows, has to let the first
        signal's save end: what it wants to end by force, it kills."""
        return len(self._signals) > 1 and signal.SIGINT in self._signals

    def on_signal(self, number: int) -> None:
        """Pass signals on to it; end everything at the second, if one of the two was Ctrl-C. Runs as a signal
        handler."""
        self._signals.append(number)
        if not self._is_pressed and not self.is_over:
            if not (self._at_terminal and number == signal.SIGINT):  # the terminal has told it, too
                self._send(number)
        else:
            self._cluster.hurry()
            if self.evaluator is not None:
                self.evaluator.hurry()
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
