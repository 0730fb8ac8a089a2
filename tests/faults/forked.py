"""Programs that are expected to die: each in a fork of a process that has imported torch already and started nothing.

Starting afresh takes seconds, a fork takes none, and whatever happens to it happens to it alone. `in_fork` forks this
process, `Forked` a server that has imported torch and done nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.faults.counting import PATIENCE_SECONDS, wait_until
from tests.patience import Patience
from torchstrat.testing.spawn import forking


class Outcome(NamedTuple):
    """What became of a fork."""

    how: str
    """"returned", "raised", the name of the signal that ended it, or "still running"."""
    text: str
    """What it returned, as text, or ``module.Class: message`` of what it raised."""
    seconds: float


def in_fork(seconds: float, is_over: Callable[[], bool], function: Callable[..., Any], *args: Any) -> Outcome:
    """Call ``function(*args)`` in a fork of this process; kill it after ``seconds``, or once ``is_over``.

    Nothing of it is left.
    """
    began = time.monotonic()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _report(theirs, function, args)
    os.close(theirs)
    told = _read(ours, began + seconds, is_over)
    os.close(ours)
    took = time.monotonic() - began
    if told is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if told is None:
        return Outcome("still running", "", took)
    if told:
        how, text = pickle.loads(told)
        return Outcome(how, text, took)
    return Outcome(signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "exited", "", took)


def _report(pipe: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        told = ("returned", str(function(*args)))
    except BaseException as error:  # SystemExit too
        told = ("raised", f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    os.write(pipe, pickle.dumps(told))
    os._exit(0)


def _read(pipe: int, deadline: float, is_over: Callable[[], bool]) -> bytes | None:
    """Everything until the other end is closed; None if that does not happen in time."""
    text = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], 0.2)
        if not ready:
            if is_over() or time.monotonic() > deadline:
                return None
            continue
        piece = os.read(pipe, 1 << 16)
        if not piece:
            return text
        text += piece


class Forked:
    """A process that makes something, and then calls what it is told with that. Nothing of it is left when it ends."""

    def __init__(self, make: Callable[..., Any] = object, *args: Any) -> None:
        context = forking()
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, args))
        self.process.start()
        theirs.close()
        self.result()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(made, *args)`` in the process, on its main thread."""
        self.start(function, *args)
        return self.result()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """As `run`, without waiting for the `result`."""
        self._connection.send((function, args))

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(PATIENCE_SECONDS)

    def signal(self, number: int) -> None:
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, number)
        if number == signal.SIGSTOP:  # kill(2) returns before all threads stand still: one may yet answer a call
            wait_until(lambda: _states(pid) == {"T"}, f"the stop of process {pid}")

    def end(self) -> None:
        """Whatever has become of it. May be called twice."""
        if self._connection.closed:
            return
        self._connection.close()
        self.process.join(1.0)  # it ends by itself, unless it is stopped or hangs
        with contextlib.suppress(ProcessLookupError):  # killed, and not yet known to have ended
            if self.process.exitcode is None:
                self.signal(signal.SIGKILL)
        self.process.join(PATIENCE_SECONDS)
        self.process.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def result(self) -> Any:
        """Of what was started."""
        patience = Patience(PATIENCE_SECONDS)
        while not self._connection.poll(1.0):
            if patience.is_over:
                raise TimeoutError(f"a process of this test said nothing for {PATIENCE_SECONDS:g} s")
        result = self._connection.recv()
        if isinstance(result, BaseException):
            raise result
        return result


def _serve(connection: Connection[Any, Any], make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    gc.freeze()  # a collection would otherwise go through all that was imported, and copy every page of it
    torch.set_num_threads(1)
    made: list[Any] = []
    function: Callable[..., Any] = lambda *args: made.append(make(*args))  # noqa: E731
    try:
        while True:
            try:
                answer = function(*made, *args)
            except Exception as error:
                answer = error
            connection.send(answer)
            function, args = connection.recv()
    except EOFError:  # whoever started it is no more
        os._exit(1)


def _states(pid: int) -> set[str]:
    """The letters in proc(5) of its threads: "T" for one that is stopped."""
    stats = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}
