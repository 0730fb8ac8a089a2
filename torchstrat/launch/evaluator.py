"""The evaluator of a local cluster: SCRIPT once more, in a role that only watches checkpoints."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from torchstrat.distributed.cluster_spec import EVALUATOR
from torchstrat.launch.output import Console
from torchstrat.launch.reaper import Reaper
from torchstrat.launch.restarts import RestartPolicy
from torchstrat.launch.supervised import Program, SupervisedProcess
from torchstrat.parameter_server.interface import Task
from torchstrat.parameter_server.transport.auth import SECRET_FILE_VARIABLE, SECRET_VARIABLE

_TASK = Task(EVALUATOR, 0)
_DONE = 0
"""The exit status of an evaluator that has nothing more to do. After any other it is started again."""
_LOOK_SECONDS = 0.05
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
            self._process.join(_LOOK_SECONDS)
        return not self._process.alive
