"""``torchstrat launch``: a local cluster around the coordinator's process, and its evaluator.

The evaluator is SCRIPT once more, in a role that only watches checkpoints. What the user typed is checked before
anything starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from torchstrat.checkpoint.numbered import told_directories
from torchstrat.checkpoint.preemption import EXIT_CODE
from torchstrat.core.errors import TorchstratError
from torchstrat.core.terminal import parser_with_examples
from torchstrat.distributed.cluster import CHIEF, EVALUATOR, PARAMETER_SERVER, WORKER
from torchstrat.launch.fork_server import START_METHODS, Reaper, StartMethod
from torchstrat.launch.local_cluster import SERVER_COMMAND, Cluster
from torchstrat.launch.supervised import Console, Program, RestartPolicy, Restarts, SupervisedProcess
from torchstrat.parameter_server.interface import Task
from torchstrat.parameter_server.transport.auth import SECRET_FILE_VARIABLE, SECRET_VARIABLE

USAGE_ERROR = 2
"""The exit status for a command line that cannot be carried out, as argparse has it."""


@dataclass(frozen=True)
class LaunchOptions:
    """A command line that can be carried out. ``command``: the coordinator's program and its arguments.

    ``restarts``: of each worker, server and evaluator, None for any number; ``restart_ps``: whether servers are
    restarted at all.
    """

    ps: int
    workers: int
    command: tuple[str, ...]
    env: dict[str, str]
    restarts: int | None
    restart_ps: bool
    grace_seconds: float
    keep_pages: bool | None = None
    start_method: StartMethod | None = None
    """These two: see `Cluster`."""
    evaluator: bool = False
    evaluator_seconds: float = 120.0
    """What the evaluator has for the checkpoints that are left when the coordinator has ended."""


def parse(arguments: Sequence[str], program: str) -> LaunchOptions:
    """Options from the words after ``program``. Says what is wrong on stderr and exits with `USAGE_ERROR`."""
    parser = _parser(program)
    parsed = parser.parse_args(arguments)
    words = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not words:
        parser.error("there is no SCRIPT to run as the coordinator; write it after the options.")
    try:
        command = coordinator_command(words)
    except ValueError as error:
        parser.error(str(error))
    return LaunchOptions(
        ps=parsed.ps,
        workers=parsed.workers,
        command=command,
        env=dict(parsed.env),
        restarts=parsed.restarts,
        restart_ps=parsed.restart_ps,
        grace_seconds=parsed.grace_seconds,
        keep_pages=parsed.keep_pages,
        start_method=parsed.start_method,
        evaluator=parsed.evaluator,
        evaluator_seconds=parsed.evaluator_seconds,
    )


def coordinator_command(words: Sequence[str]) -> tuple[str, ...]:
    """What is started for SCRIPT and its arguments: Python scripts by this Python, anything else by itself.

    Raises:
        ValueError: there is no such file, or it cannot be executed.
    """
    script, arguments = words[0], words[1:]
    path = Path(script)
    if path.is_dir():
        raise ValueError(f"{script!r} is a folder; name the script in it.")
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"there is no file {script!r} in {str(Path.cwd())!r}.")
        if not os.access(path, os.R_OK):
            raise ValueError(f"{script!r} cannot be read; change its permissions.")
        return (sys.executable, script, *arguments)
    found = shutil.which(script)
    if found is None and path.is_file():
        raise ValueError(
            f"{script!r} is not executable; `chmod +x` it, put its interpreter before it, or let its name end in .py."
        )
    if found is None:
        where = f"in {str(Path.cwd())!r}" if os.sep in script else "on the PATH"
        raise ValueError(f"there is no program {script!r} {where}.")
    return (found, *arguments)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = parser_with_examples(
        program,
        "Run SCRIPT as the coordinator of a cluster on this machine, with parameter servers and workers that are "
        "started again when they end. SCRIPT is a Python file or a program; -- may stand before it. Everything ends "
        "with SCRIPT, whose exit status is the launcher's. A SCRIPT that exits with 75 is run again. SIGTERM and the "
        "like go to SCRIPT alone.",
        (
            f"{program} --ps 2 --workers 2 train_ps.py",
            f"{program} --ps 1 --workers 2 -- python -m package.train --epochs 3",
            f"{program} --ps 2 --workers 4 --evaluator --env OMP_NUM_THREADS=2 train_ps.py",
        ),
        usage=f"{program} --ps N --workers N [options] SCRIPT [ARGUMENT …]",
    )
    parser.add_argument("--ps", type=_at_least_one, required=True, metavar="N", help="parameter servers")
    parser.add_argument("--workers", type=_at_least_one, required=True, metavar="N", help="workers")
    parser.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for workers, servers and the evaluator, not for SCRIPT as coordinator; may be repeated",
    )
    parser.add_argument(
        "--restarts",
        type=_number_of_restarts,
        default=None,
        metavar="N|unlimited",
        help="how often each worker, server and evaluator is started again (unlimited)",
    )
    parser.add_argument(
        "--no-restart-ps",
        dest="restart_ps",
        action="store_false",
        help="leave a parameter server that ended; its variables are gone either way",
    )
    parser.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="what workers and servers have to end by themselves when SCRIPT has ended (10)",
    )
    parser.add_argument(
        "--keep-pages",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="workers and servers keep the pages of memory that they have freed: steps are faster, their resident size "
        "stays at its peak (TORCHSTRAT_KEEP_PAGES; they do)",
    )
    parser.add_argument(
        "--start-method",
        choices=START_METHODS,
        default=None,
        help="forkserver: workers and servers are forks of one process, which start in milliseconds; spawn: each is a "
        "program of its own (forkserver, where it can be)",
    )
    parser.add_argument(
        "--evaluator",
        action="store_true",
        help="start SCRIPT once more as the evaluator, which watches the checkpoints (TF_CONFIG tells it so)",
    )
    parser.add_argument(
        "--evaluator-seconds",
        type=_seconds,
        default=LaunchOptions.evaluator_seconds,
        metavar="S",
        help="what the evaluator has for the checkpoints that are left when SCRIPT has ended (120)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT …]", help="the coordinator")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1: a cluster needs one of each.")
    return number


def _number_of_restarts(text: str) -> int | None:
    if text == "unlimited":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0, or 'unlimited'.")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, at least 0.")
    return seconds


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE.")
    return name, value


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
            coordinator.is_over = True
            cluster.close()  # workers and servers have nothing more to do
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
        """Its process has ended, and the launcher waits for the others."""
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
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

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
