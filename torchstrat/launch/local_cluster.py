"""The servers and workers of one cluster as processes of this machine.

Loopback addresses that stay the same task's while its processes come and go.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from torchstrat.core import notebook_html
from torchstrat.core.context import is_open
from torchstrat.core.errors import (
    ClusterConfigError,
    CommunicationTimeoutError,
    ContextError,
    InvalidArgumentError,
    WrongTypeError,
)
from torchstrat.core.kept_pages import KEEP_PAGES_VARIABLE, environment_that_keeps_pages, glibc_version, is_wanted
from torchstrat.core.terminal import is_listening
from torchstrat.distributed.cluster import CHIEF, PARAMETER_SERVER, WORKER, ClusterSpec
from torchstrat.distributed.cluster_resolver import SimpleClusterResolver
from torchstrat.launch.fork_server import (
    START_METHODS,
    ForkedProcess,
    ForkRefusedError,
    ForkServer,
    Reaper,
    StartMethod,
    why_not,
)
from torchstrat.launch.supervised import Console, Process, Program, RestartPolicy, Starter, SupervisedProcess
from torchstrat.parameter_server.interface import Task
from torchstrat.parameter_server.transport.auth import SECRET_FILE_VARIABLE, SECRET_VARIABLE, load_secret, new_secret
from torchstrat.strategies.parameter_server import ParameterServerStrategy

HOST = "127.0.0.1"


class ReservedPort:
    """A free TCP port of the loopback interface, kept from others until `close`.

    It is bound here and not listened on. With SO_REUSEADDR on both sockets Linux lets a task listen on it all the same,
    again after each restart, while nobody is given it by chance, neither as a free port nor as the near end of a
    connection. (A port that is looked up and let go can be gone at the next restart.) Other systems refuse a second
    socket, so there the port is let go at once: a task that finds it taken ends and is started again.
    """

    _HOLDS = sys.platform == "linux"

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((HOST, 0))
            self.address = f"{HOST}:{self._socket.getsockname()[1]}"
        except BaseException:
            self._socket.close()
            raise
        if not self._HOLDS:
            self._socket.close()

    def close(self) -> None:
        """Let others have it. May be called twice."""
        self._socket.close()


SERVER_COMMAND = (sys.executable, "-m", "torchstrat.server")
GRACE_SECONDS = 10.0
_LAST_SECONDS = 10.0  # for a process to disappear after SIGKILL
_POLL_SECONDS = 0.05


def _require_settings(env: object, restart: object, server_command: object, grace_seconds: object) -> None:
    """Of `Cluster`, before anything is started."""
    if env is not None and not isinstance(env, Mapping):
        raise WrongTypeError(f"env={env!r:.80} must be a dict of variables: env={{'OMP_NUM_THREADS': '2'}}.")
    if not isinstance(restart, bool | RestartPolicy | Mapping):
        raise WrongTypeError(f"restart={restart!r:.80} must be True, False, a RestartPolicy, or a dict of one per job.")
    if isinstance(server_command, str) or not isinstance(server_command, Sequence) or not server_command:
        raise WrongTypeError(
            f"server_command={server_command!r:.80} must be a program and its arguments: ('python', 'my_server.py')."
        )
    if isinstance(grace_seconds, bool) or not isinstance(grace_seconds, int | float):
        raise WrongTypeError(f"grace_seconds={grace_seconds!r:.80} must be a number of seconds.")
    if grace_seconds < 0:
        raise InvalidArgumentError(f"grace_seconds={grace_seconds} must be 0 or more.")


class Cluster:
    """Servers and workers on free loopback ports; this process is their coordinator.

    In a notebook, one cell makes it, and others train::

        cluster = ts.launch.Cluster(ps=2, workers=2)
        strategy = cluster.strategy()

    A cluster that `strategy` has started ends with `close`, when another one is started in this way (so when its cell
    is run again, changed or not), or with this process, whichever comes first. There is one of them at a time, and it
    stays when its names are deleted. Cells that were interrupted or raised leave it as it is.

    A script says where it ends::

        with ts.launch.Cluster(ps=2, workers=2) as cluster:
            strategy = cluster.strategy()

    Processes that end are started again at the same address. Their output appears here, each line with its task before
    it. While it runs ``os.environ`` has the cluster's secret, a fresh one unless it had one before; afterwards it is as
    it was. No process is left after the end, nor when this process ends in any other way, SIGKILL included.

    Args:
        workers, ps: How many, at least 1 each.
        env: Variables for the workers and servers, on top of this process's own. OMP_NUM_THREADS is 1 for them if
            neither has it, since they share the cores of one machine; PYTHONUNBUFFERED is 1 likewise, and
            TORCH_CPP_LOG_LEVEL is ERROR, since RPC warns of every connection that ends.
        restart: Whether, or when, processes that ended are started again: one answer for all, or one per job.
        server_command: The program of workers and servers. ``--cluster JSON --job ps --index 0`` follows it.
        start_method: ``"forkserver"``: workers and servers are forks of one process that has imported PyTorch and
            torchstrat, so that one which was killed is back in a fraction of a second, and all share the memory of what
            was imported. ``"spawn"``: each is a program of its own. None: the first, where there can be one (Linux 5.3,
            the usual ``server_command``, an OMP_NUM_THREADS that starts no threads at import). Libraries read their
            variables when the first process starts, those that a worker imports itself when it does.
        grace_seconds: From SIGTERM to SIGKILL, at the end.
        keep_pages: Whether workers and servers keep the pages of memory that they have freed, which spares them the
            page faults of every step's gradients; their resident size then stays at its peak. They are started with
            ``MALLOC_…`` variables for glibc, of which those that the user has set stay as they are. None: what
            ``TORCHSTRAT_KEEP_PAGES`` (0 or 1) says, else they do.

    Raises:
        InvalidArgumentError: there would be no worker or no server, a variable is no string, or the method does not
            exist, or not here.
    """

    def __init__(
        self,
        workers: int = 2,
        ps: int = 2,
        *,
        env: Mapping[str, str] | None = None,
        restart: bool | RestartPolicy | Mapping[str, RestartPolicy] = True,
        server_command: Sequence[str] = SERVER_COMMAND,
        start_method: StartMethod | None = None,
        grace_seconds: float = GRACE_SECONDS,
        keep_pages: bool | None = None,
    ) -> None:
        for name, count in (("workers", workers), ("ps", ps)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InvalidArgumentError(f"{name}={count!r}: a cluster needs at least 1 of them.")
        _require_settings(env, restart, server_command, grace_seconds)
        for variable, value in (env or {}).items():
            if not isinstance(variable, str) or not isinstance(value, str):
                raise InvalidArgumentError(f"env has {variable!r}: {value!r}; environment variables are strings.")
        self._numbers = {PARAMETER_SERVER: ps, WORKER: workers}
        self._env = dict(env or {})
        if isinstance(restart, bool):
            restart = RestartPolicy(limit=None if restart else 0)
        if isinstance(restart, RestartPolicy):
            restart = dict.fromkeys(self._numbers, restart)
        self._policies = {**dict.fromkeys(self._numbers, RestartPolicy()), **restart}
        self._server_command = tuple(server_command)
        self._forks_tasks = self._check_start_method(start_method)
        self._grace_seconds = grace_seconds
        self._keep_pages = keep_pages
        self._console = Console()
        self._ports: dict[Task, ReservedPort] = {}
        self._tasks: dict[Task, SupervisedProcess] = {}
        self._reaper: Reaper | None = None
        self._fork_server: ForkServer | None = None
        self._secret = ""
        self._environment_before: dict[str, str | None] = {}
        self._hurried = threading.Event()
        self._strategy: ParameterServerStrategy | None = None

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        # Without the secret: what is shown ends up in logs.
        return f"Cluster(ps={self._numbers[PARAMETER_SERVER]}, workers={self._numbers[WORKER]}, {self._state})"

    def _repr_html_(self) -> str:
        rows = [(str(task), self._ports[task].address, supervised.state) for task, supervised in self._tasks.items()]
        return notebook_html.table(repr(self), ("task", "address", "process"), rows)

    @property
    def _state(self) -> str:
        return "running" if self._reaper is not None else "closed" if self._ports else "not started"

    # ---- what it is --------------------------------------------------------------------------------------------------

    @property
    def cluster_spec(self) -> ClusterSpec:
        """All addresses, the coordinator's (``chief``) too."""
        if not self._ports:
            raise ContextError(
                "the cluster has no addresses before it is started: use it in a with statement, or call strategy()."
            )
        jobs: dict[str, dict[int, str]] = {}
        for task, port in self._ports.items():
            jobs.setdefault(task.job, {})[task.index] = port.address
        return ClusterSpec(jobs)

    @property
    def resolver(self) -> SimpleClusterResolver:
        """Describes the cluster to this process, its coordinator."""
        return SimpleClusterResolver(self.cluster_spec, task_type=CHIEF, task_id=0)

    @property
    def secret(self) -> str:
        """What every process of the cluster has to know. Inside the block it is in ``os.environ`` as well."""
        return self._secret

    def environment_of(self, job: str, index: int) -> dict[str, str]:
        """What a process started by hand as this task needs beside the usual: TF_CONFIG and the secret."""
        tf_config = {"cluster": self.cluster_spec.as_dict(), "task": {"type": job, "index": index}}
        return {"TF_CONFIG": json.dumps(tf_config), SECRET_VARIABLE: self._secret}

    def process(self, job: str, index: int) -> Process:
        """A task's process: the one that runs, or the last one that did. For its ``pid``; use `kill` to end it."""
        return self._task(job, index).process()

    # ---- what can be done to it --------------------------------------------------------------------------------------

    def strategy(
        self, variable_partitioner: Callable[..., Any] | None = None, **options: Any
    ) -> ParameterServerStrategy:
        """A new `ParameterServerStrategy` on this cluster; the arguments are its. Starts the cluster, if nothing has.

        A cluster has one strategy at a time: the one that was made here before is closed, and its variables are gone.

        Raises:
            ContextError: the cluster was closed, or a `with` statement's is to have a strategy while the one of another
                cell has: a process coordinates one cluster at a time.
        """
        if self._reaper is None:
            self._start_without_end()
        elif _without_end is not None and _without_end is not self:
            _without_end.require_free()
        if self._strategy is not None:
            self._strategy.close()
        self._strategy = ParameterServerStrategy(self.resolver, variable_partitioner, **options)
        return self._strategy

    def start(self) -> None:
        """Start all processes; does not wait for them. Who calls it calls `close`; a cluster is started once.

        Raises:
            ClusterConfigError: the environment's secret or its ``TORCHSTRAT_KEEP_PAGES`` cannot be used.
            ContextError: it was started before.
        """
        self._require_new()
        self._keep_pages = is_wanted(self._keep_pages, {**os.environ, **self._env})
        self._secret = _secret_of(os.environ)
        try:
            self._reaper = Reaper()
            for task in (
                Task(CHIEF, 0),
                *(Task(job, i) for job, number in self._numbers.items() for i in range(number)),
            ):
                self._ports[task] = ReservedPort()
            self._set_environment()
            if self._forks_tasks:
                self._fork_server = ForkServer(self._environment(), self._reaper)
            for task in self._ports:
                if task.job != CHIEF:
                    self._start(task)
        except BaseException:  # Ctrl-C, too: whoever tries again finds it as it was
            self.close()
            self._ports.clear()
            self._tasks.clear()
            self._fork_server = None
            self._hurried.clear()
            raise

    def close(self) -> None:
        """Close the strategy that was made here, and end all processes: SIGTERM, then SIGKILL for those that are still
        there. May be called again."""
        global _without_end
        if _without_end is self:
            _without_end = None
            atexit.unregister(self.close)
        try:
            if self._strategy is not None:
                self._strategy.close()
            self._let_them_end()
        except BaseException:  # Ctrl-C: once more, and faster
            self._hurried.set()
            raise
        finally:
            self._kill_the_rest()
            if self._fork_server is not None:
                self._fork_server.close()
            if self._reaper is not None:
                self._reaper.close()
                self._reaper = None
            for port in self._ports.values():
                port.close()
            self._restore_environment()

    stop = close
    """The older name."""

    def hurry(self) -> None:
        """Kill everything now: a `close` in another thread, or in the one that this interrupts, waits no longer."""
        self._hurried.set()

    def kill(self, job: str, index: int, signal_number: int = signal.SIGKILL) -> int:
        """Send a signal to a task's process and return its pid; with SIGKILL, once it has ended.

        Raises:
            ContextError: the task has no process now.
        """
        supervised = self._task(job, index)
        pid = supervised.send_signal(signal_number)
        if pid is None:
            raise ContextError(f"{job} {index} has no process at the moment; see wait_until_restarted.")
        if signal_number == signal.SIGKILL:
            supervised.wait_for_end(pid, _LAST_SECONDS)
        return pid

    def restart(self, job: str, index: int) -> Process:
        """Start a task's process again, now: kills the one that runs. Returns the new one."""
        return self._task(job, index).restart()

    def add_worker(self) -> int:
        """Start one more worker, and return its index.

        It listens where ``cluster.cluster_spec.task_address("worker", index)`` says. A strategy that was made before
        does not know of it: tell its coordinator, ``coordinator.add_worker(index, address)``.
        """
        if self._reaper is None:
            raise ContextError("a worker can be added to a cluster that runs, inside the with statement.")
        task = Task(WORKER, self._numbers[WORKER])
        self._ports[task] = ReservedPort()
        self._numbers[WORKER] += 1
        self._start(task)
        return task.index

    def wait_until_restarted(self, job: str, index: int, pid: int, timeout_seconds: float = 30.0) -> Process:
        """Wait until a task has another process than the one with this pid, and return it.

        Raises:
            CommunicationTimeoutError: it has not.
        """
        return self._task(job, index).wait_for_another(pid, timeout_seconds)

    def wait_until_listening(self, timeout_seconds: float = 120.0) -> None:
        """Wait until every task accepts connections.

        Raises:
            CommunicationTimeoutError: some do not in time, or ended and are not started again; the message names them.
        """
        deadline = time.monotonic() + timeout_seconds
        waited_for = list(self._tasks)
        while waited_for := [task for task in waited_for if not is_listening(self._ports[task].address)]:
            ended = [f"{task} {how}" for task in waited_for if (how := self._tasks[task].given_up)]
            if ended or time.monotonic() > deadline:
                states = "; ".join(ended) if ended else f"after {timeout_seconds:g} s; see their output"
                names = ", ".join(f"{task} at {self._ports[task].address}" for task in waited_for)
                raise CommunicationTimeoutError(f"not listening: {names} ({states}).")
            time.sleep(_POLL_SECONDS)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _start_without_end(self) -> None:
        """Start it for as long as nobody says otherwise, in the place of the one that was started so before."""
        global _without_end
        self._require_new()
        if _without_end is not None:
            _without_end.close()
        _without_end = self
        atexit.register(self.close)
        self.start()

    def require_free(self) -> None:
        """Raise `ContextError` while a strategy that was made here is open: a process coordinates one cluster."""
        if self._strategy is not None and is_open(self._strategy):
            raise ContextError(
                f"this process coordinates another cluster, {self!r}; end it with its close() first, or make the "
                "strategy on that one."
            )

    def _require_new(self) -> None:
        if self._ports:
            raise ContextError(f"this cluster was started before, and is {self._state}; make another Cluster.")

    def _task(self, job: str, index: int) -> SupervisedProcess:
        supervised = self._tasks.get(Task(job, index))
        if supervised is None:
            known = ", ".join(map(str, self._tasks)) or "none; it has not been started"
            raise ClusterConfigError(f"there is no {job} {index} here; the tasks of this cluster are: {known}.")
        return supervised

    def _start(self, task: Task) -> None:
        assert self._reaper is not None
        cluster = json.dumps(self.cluster_spec.as_dict())
        arguments = ["--cluster", cluster, "--job", task.job, "--index", str(task.index)]
        environment = {**self._environment(), **self.environment_of(task.job, task.index)}
        program = Program([*self._server_command, *arguments], environment, self._reaper)
        starter: Starter = program
        if self._fork_server is not None:
            starter = _Fork(str(task), arguments, environment, self._fork_server, program, self._console)
        self._tasks[task] = SupervisedProcess(str(task), starter, self._policies[task.job], self._console)

    def _environment(self) -> dict[str, str]:
        """Of all workers and servers, but for what says who they are."""
        environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **(environment_that_keeps_pages(glibc_version()) if self._keep_pages else {}),
            **os.environ,
            **self._env,
            KEEP_PAGES_VARIABLE: "1" if self._keep_pages else "0",
        }
        environment.pop(SECRET_FILE_VARIABLE, None)
        return environment

    def _check_start_method(self, method: StartMethod | None) -> bool:
        """Whether tasks are to be forked."""
        if method is not None and method not in START_METHODS:
            raise InvalidArgumentError(f'start_method={method!r} is neither "forkserver" nor "spawn", nor None.')
        reason = why_not()
        if self._server_command != SERVER_COMMAND:
            reason = f"server_command is {self._server_command}, a program of its own"
        if method == "forkserver" and reason is not None:
            raise InvalidArgumentError(f'start_method="forkserver" is not possible: {reason}. Use "spawn", or None.')
        return method != "spawn" and reason is None

    def _let_them_end(self) -> None:
        for supervised in self._tasks.values():
            supervised.request_stop()
        if self._fork_server is not None:
            self._fork_server.start_no_more()
        deadline = time.monotonic() + self._grace_seconds
        for supervised in self._tasks.values():
            while not supervised.join(_POLL_SECONDS) and time.monotonic() < deadline and not self._hurried.is_set():
                pass

    def _kill_the_rest(self) -> None:
        rest = {task: supervised for task, supervised in self._tasks.items() if supervised.alive}
        for task, supervised in rest.items():
            if not self._hurried.is_set():
                self._console.report(f"{task} did not end within {self._grace_seconds:g} s of SIGTERM; killed")
            supervised.send_signal(signal.SIGKILL, whole_group=True)
        for task, supervised in rest.items():
            if not supervised.join(_LAST_SECONDS):
                self._console.report(f"{task} is still there {_LAST_SECONDS:g} s after SIGKILL")

    def _set_environment(self) -> None:
        self._environment_before = {name: os.environ.get(name) for name in (SECRET_VARIABLE, SECRET_FILE_VARIABLE)}
        os.environ[SECRET_VARIABLE] = self._secret
        os.environ.pop(SECRET_FILE_VARIABLE, None)

    def _restore_environment(self) -> None:
        for name, value in self._environment_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment_before = {}


_without_end: Cluster | None = None
"""The one that runs and that no ``with`` and no caller of `Cluster.start` ends. Here, and not only with whom it was
given to: a program may keep nothing but the strategy, or a model."""


class _Fork:
    """A task's processes as forks; as programs, where the fork server says that it cannot."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        server: ForkServer,
        program: Program,
        console: Console,
    ) -> None:
        self._name, self._arguments, self._environment = name, arguments, environment
        self._server, self._program, self._console = server, program, console

    def start(self) -> Process:
        try:
            return self._server.start(self._name, self._arguments, self._environment)
        except ForkRefusedError as error:
            self._console.report(f"{self._name} is a program of its own and not a fork: {error}")
            return self._program.start()

    def collect(self, process: Process, *, before_status: Callable[[], None]) -> int:
        if isinstance(process, ForkedProcess):
            return self._server.collect(process, before_status=before_status)
        return self._program.collect(process, before_status=before_status)


def _secret_of(environ: Mapping[str, str]) -> str:
    """The secret that the environment says, else a fresh one."""
    if environ.get(SECRET_VARIABLE) or environ.get(SECRET_FILE_VARIABLE):
        try:
            return load_secret(environ).decode()
        except UnicodeDecodeError:
            raise ClusterConfigError(
                f"the file named by {SECRET_FILE_VARIABLE} is not text, which an environment variable has to be; make "
                "one with `openssl rand -hex 32`."
            ) from None
    return new_secret()


LocalCluster = Cluster  # its name before notebooks shared it; programs import it from here
