"""Run functions in a group of local processes that look as if torchrun had started them.

::

    results = spawn(train, num_processes=2, args=(config,))        # one function, one group

    with Workers(num_processes=2) as workers:                      # many functions, one group: no start-up between
        losses = workers.run(train_and_return_loss, config)        # a list, by rank

The processes inherit no threads, locks or process groups: on Linux they are forks of a process that has done nothing
but import PyTorch and torchstrat, which takes milliseconds, elsewhere they are new. This process hosts their store on
a socket it has bound itself, as torchrun's agent does, so no port is ever guessed. Every run has a deadline; what is
still running then shows the stacks of all its threads and is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore

from torchstrat.core.errors import InvalidArgumentError, TorchstratError
from torchstrat.launch.fork_server import START_METHODS, StartMethod
from torchstrat.testing._child import Answer, Request, pack, serve, stacks_path, unpack

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
    def ends(self) -> list[Connection[object, object] | int]:
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


__all__ = ["DEFAULT_TIMEOUT_SECONDS", "Failure", "Workers", "WorkersError", "spawn"]

DEFAULT_TIMEOUT_SECONDS = 120.0
_GRACE_SECONDS = 10.0  # how long the others may go on once one process has failed: most are waiting for it


class WorkersError(TorchstratError, RuntimeError):
    """At least one process of a group did not return; the message shows every one of them.

    The group's processes have ended when this is raised. ``failures`` are in rank order.
    """

    def __init__(self, function: str, num_processes: int, failures: list[Failure]) -> None:
        self.failures = tuple(failures)
        parts = [f"{function} failed in {len(failures)} of {num_processes} processes:"]
        for failure in failures:
            parts.append(f"--- rank {failure.rank}: {failure.reason}")
            if failure.details:
                parts.append(failure.details.rstrip())
        super().__init__("\n".join(parts))


def spawn(
    function: Callable[..., object],
    num_processes: int,
    args: tuple[object, ...] = (),
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    env: Mapping[str, str] | None = None,
    start_method: StartMethod | None = None,
) -> list[Any]:
    """Run ``function(*args)`` once in each of ``num_processes`` new processes and return the results by rank.

    Function, arguments and results travel by pickle, or by cloudpickle, so that functions and classes of a notebook's
    cells and functions of functions do, too; tensors are copied. ``timeout_seconds`` counts from the start of the
    processes. ``env``, ``start_method``: as `Workers`. Blocks; raises `WorkersError`.
    """
    with Workers(num_processes, timeout_seconds=timeout_seconds, env=env, start_method=start_method) as workers:
        return workers.run(function, *args)


class Workers:
    """A group of processes, one per rank, that run one function after the other.

    A context manager: the processes end with the block. Every `run` finds a fresh store under ``MASTER_PORT``, so
    process groups of consecutive runs never meet; but a run has to destroy the one it makes. After a run that failed
    the next one starts new processes: nothing is known about the state of the old ones.

    Args:
        num_processes: how many, at least 1.
        timeout_seconds: for a run that does not say otherwise.
        env: added to the environment that they start with. ``OMP_NUM_THREADS`` is 1 if it is not there.
        start_method: ``"forkserver"``: forks of a process with Python's own fork server, which all groups of this
            process share, and which is kept until it ends. ``"spawn"``: each is a new interpreter. None: forks on
            Linux, unless there is an ``env``, for libraries may read their variables when they are imported.
    """

    def __init__(
        self,
        num_processes: int,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        env: Mapping[str, str] | None = None,
        start_method: StartMethod | None = None,
    ) -> None:
        if num_processes < 1:
            raise InvalidArgumentError(f"num_processes={num_processes} starts nothing; use 1 or more.")
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
            raise InvalidArgumentError(
                "processes were asked for by the program's main module while one of them imports it, as each of them "
                'does: put what starts them under `if __name__ == "__main__":`.'
            )
        self.num_processes = num_processes
        self.timeout_seconds = timeout_seconds
        possible = [method for method in START_METHODS if method in multiprocessing.get_all_start_methods()]
        if start_method is not None and start_method not in possible:
            raise InvalidArgumentError(
                f"start_method={start_method!r}: give {' or '.join(map(repr, possible))}, or None, which chooses."
            )
        forks = sys.platform == "linux" and not env
        self._method: StartMethod = start_method or ("forkserver" if forks else "spawn")
        self._env = {"OMP_NUM_THREADS": "1", **(env or {})}
        self._processes: list[Process] = []
        self._folder: Path | None = None
        # They are not daemons, for those may not have children, such as the workers of a DataLoader. Python would
        # wait for them at exit; this runs before, and when a group that nobody closed is garbage collected.
        self._finalizer = weakref.finalize(self, _end, self._processes)

    def __enter__(self) -> Workers:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes if none are running. `run` does it too; this chooses the moment."""
        if self._processes:
            return
        try:
            self._start()
        except BaseException:
            self._kill()
            raise

    def run(self, function: Callable[..., object], *args: object, timeout_seconds: float | None = None) -> list[Any]:
        """Call ``function(*args)`` in every process and return the results by rank.

        ``timeout_seconds`` replaces the group's for this run. Raises `WorkersError`, after which no process of the
        group is left; likewise on Ctrl-C.
        """
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        call = pack((function, args))  # before anything starts: what cannot travel fails here
        name = getattr(function, "__qualname__", repr(function))
        try:
            self.start()
            with _store() as port:
                for process in self._processes:
                    process.ask(Request(call, {**self._identity(process.rank), "MASTER_PORT": str(port)}))
                outcomes = self._collect(deadline, seconds)
        except BaseException:
            self._kill()
            raise
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if failures:
            self._kill()
            raise WorkersError(name, self.num_processes, failures)
        return [unpack(outcome) for outcome in outcomes if isinstance(outcome, bytes)]

    def close(self) -> None:
        """Let the processes leave, and end those that do not. May be called again; `run` then starts new ones."""
        for process in self._processes:
            process.dismiss()
        deadline = time.monotonic() + EXIT_SECONDS
        for process in self._processes:
            process.handle.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _identity(self, rank: int) -> dict[str, str]:
        size = str(self.num_processes)
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size),
            **dict.fromkeys(("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            # torchrun's way to say that the store runs already and rank 0 must not start its own.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": f"torchstrat-{os.getpid()}",
        }

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="torchstrat-workers-"))
        for rank in range(self.num_processes):
            environment = {**self._env, **self._identity(rank)}
            self._processes.append(Process(rank, self._folder, environment, self._method))

    def _kill(self) -> None:
        _end(self._processes)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _collect(self, deadline: float, seconds: float) -> list[bytes | Failure]:
        """The pickled result or the failure of every process, in rank order."""
        waiting = {process.rank: process for process in self._processes}
        outcomes: dict[int, bytes | Failure] = {}
        why = f"still running after {seconds:g} s"
        while waiting and (left := deadline - time.monotonic()) > 0:
            wait([end for process in waiting.values() for end in process.ends], timeout=left)
            for rank, process in list(waiting.items()):
                outcome = process.poll()
                if outcome is None:
                    continue
                outcomes[rank] = outcome
                del waiting[rank]
                if isinstance(outcome, Failure) and time.monotonic() + _GRACE_SECONDS < deadline:
                    deadline = time.monotonic() + _GRACE_SECONDS
                    why = f"still running {_GRACE_SECONDS:g} s after rank {rank} had failed"
        for rank, process in waiting.items():
            process.request_stacks()
            outcomes[rank] = Failure(rank, why, "")
        for rank, process in waiting.items():
            outcomes[rank] = Failure(rank, why, process.read_stacks(time.monotonic() + DUMP_SECONDS))
        return [outcomes[rank] for rank in sorted(outcomes)]


def _end(processes: list[Process]) -> None:
    for process in processes:
        process.kill()
    processes.clear()


@contextmanager
def _store() -> Iterator[int]:
    """Host a store for one run and yield its port."""
    # A TCPStore given a host still listens on every interface, unless it gets a socket that is already bound.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    try:
        yield port
    finally:
        del store
