"""`ts.Server`: this process as a worker or a parameter server of a cluster.

The service of each role is imported when its first task starts.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchstrat.core import kept_pages
from torchstrat.core.errors import ClusterConfigError, ContextError, InvalidArgumentError
from torchstrat.core.tracebacks import short_tracebacks
from torchstrat.distributed.cluster import CHIEF, EVALUATOR, PARAMETER_SERVER, WORKER, ClusterSpec
from torchstrat.parameter_server.interface import Endpoint, Service, Task
from torchstrat.parameter_server.membership.task_host import (
    DEFAULT_DRAIN_TIMEOUT_SECONDS,
    DEFAULT_ORPHAN_TIMEOUT_SECONDS,
    EXIT_FAILED,
    TaskHost,
)
from torchstrat.parameter_server.phases import PLAN_VARIABLE, follow_plan
from torchstrat.parameter_server.transport.auth import load_secret, new_secret

_SERVICES: dict[str, tuple[str, str, Callable[[Task], tuple[object, ...]]]] = {
    PARAMETER_SERVER: ("torchstrat.parameter_server.server.service", "VariableServer", lambda task: ()),
    WORKER: ("torchstrat.parameter_server.worker.worker", "FunctionWorker", lambda task: (task.index,)),
}
"""Job → module, class, arguments of its constructor."""

_RUN_INSTEAD = {
    CHIEF: "the chief is the coordinator: it runs your program, which makes a ParameterServerStrategy and a "
    "ClusterCoordinator",
    EVALUATOR: "an evaluator runs a program of yours that waits for checkpoints and evaluates them",
}


def check_role(task: Task) -> None:
    """Raises `ClusterConfigError` unless tasks of that job are servers of the cluster; says what they run instead."""
    if task.job in _SERVICES:
        return
    served = " and ".join(repr(job) for job in _SERVICES)
    instead = _RUN_INSTEAD.get(task.job, f"{task.job!r} is no role of a cluster")
    raise ClusterConfigError(f"a Server runs the jobs {served}, and this process is {task}: {instead}.")


def make_service(task: Task) -> Service:
    """What ``task`` runs. Raises `ClusterConfigError` as `check_role` does."""
    check_role(task)
    module, name, arguments = _SERVICES[task.job]
    service: Service = getattr(importlib.import_module(module), name)(*arguments(task))
    return service


ORPHAN_TIMEOUT_VARIABLE = "TORCHSTRAT_ORPHAN_TIMEOUT"
DEFAULT_PROTOCOL = "grpc"
"""What TensorFlow's programs and `Server.target` call it. What travels is torch.distributed.rpc."""

LOCAL_JOB = "localhost"
GRACE_SECONDS = 10.0
"""After draining, and after the main thread has ended, for everything else to end."""


@short_tracebacks
class Server:
    """Makes this process a task of a cluster: a worker, which runs functions, or a parameter server.

    It may be started before or after the coordinator, and outlives it: it serves one coordinator after another. The
    same program may run in every process and branch on the role::

        resolver = ts.cluster_resolver.TFConfigClusterResolver()
        if resolver.task_type in ("worker", "ps"):
            ts.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        else:
            ...  # the coordinator

    ``python -m torchstrat.server`` does the first half without a program. All processes need the cluster's secret, see
    ``TORCHSTRAT_SECRET``. The task listens on its own address in the cluster and nowhere else; give it a port below
    those that the system hands out by itself (``net.ipv4.ip_local_port_range``), which may be taken when it restarts.

    Args:
        cluster_spec: The cluster, a `ClusterSpec` or a dict like its argument.
        job_name: This process's job; may be left out when there is one.
        task_index: Its index in the job; may be left out when the job has one task.
        protocol: ``"grpc"`` (or None), the only one; the name is TensorFlow's.
        start: Call `start` at once.
        secret: The cluster's, in place of the environment's.
        listen: ``host:port`` to bind in place of the task's address, for machines with several interfaces.
        orphan_timeout_seconds: How long it keeps its state after its coordinator was lost, until one takes over; then
            the process ends. None: what ``TORCHSTRAT_ORPHAN_TIMEOUT`` says, else 600. ``float("inf")``: for ever.
        drain_timeout_seconds: On SIGTERM, for what it is doing to be finished or handed back.
        exit_when_finished: `join` returns when the coordinator has finished.
        keep_pages: Whether this process keeps the pages of memory that it has freed, which spares it the page faults of
            every step's gradients; its resident size then stays at its peak. It is set in glibc when the server is
            started, for all of the process, and stays so. Start the server before other threads, which might not
            keep theirs. None: what ``TORCHSTRAT_KEEP_PAGES`` (0 or 1) says, else it does.
        make_service, make_endpoint: In place of the role's own service and of the RPC transport, for tests.

    Raises:
        ClusterConfigError: ``job_name`` or ``task_index`` was left out where it is not clear; there is no secret; and
            what `start` raises.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, object],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        start: bool = True,
        *,
        secret: str | bytes | None = None,
        listen: str | None = None,
        orphan_timeout_seconds: float | None = None,
        drain_timeout_seconds: float = DEFAULT_DRAIN_TIMEOUT_SECONDS,
        exit_when_finished: bool = False,
        keep_pages: bool | None = None,
        make_service: Callable[[Task], Service] = make_service,
        make_endpoint: Callable[..., Endpoint] | None = None,
    ) -> None:
        self._spec = ClusterSpec(cluster_spec)
        job = _the_only_job(self._spec) if job_name is None else job_name
        self._task = Task(job, _the_only_index(self._spec, job) if task_index is None else task_index)
        self._protocol = protocol or DEFAULT_PROTOCOL
        self._secret, self._listen = secret, listen
        self._orphan_timeout_seconds = orphan_timeout_seconds
        self._drain_timeout_seconds = drain_timeout_seconds
        self._exit_when_finished = exit_when_finished
        self._keep_pages = keep_pages
        self._make_service = make_service
        self._make_endpoint = make_endpoint or _rpc_endpoint
        self._host: TaskHost | None = None
        if start:
            self.start()

    @classmethod
    def create_local_server(cls, start: bool = True, **options: Any) -> Server:
        """One worker in this process, on a free port of the loopback interface: job ``localhost``, task 0.

        Args:
            start: Call `start` at once.
            options: The keyword-only arguments of the class. Without a secret, here or in the environment, a fresh one
                is made, which only this process knows.
        """
        if options.get("secret") is None:
            try:
                options["secret"] = load_secret()
            except ClusterConfigError:
                options["secret"] = new_secret()
        return cls({LOCAL_JOB: ["localhost:0"]}, LOCAL_JOB, 0, start=start, **options)

    @property
    def job_name(self) -> str:
        """This process's job."""
        return self._task.job

    @property
    def task_index(self) -> int:
        """This process's index in its job."""
        return self._task.index

    @property
    def protocol(self) -> str:
        """As given; ``"grpc"`` by default."""
        return self._protocol

    @property
    def target(self) -> str:
        """``protocol://host:port`` where a coordinator finds this task; with the port it was given, once started."""
        address = self._spec.task_address(self._task.job, self._task.index)
        bound = self._host.address if self._host is not None else None
        if bound is not None and address.rpartition(":")[2] == "0":
            address = f"{address.rpartition(':')[0]}:{bound.rpartition(':')[2]}"
        return f"{self._protocol}://{address}"

    def start(self) -> None:
        """Listen from now on, and say so on stderr. Does nothing when it has been started.

        Raises:
            ClusterConfigError: the cluster has no such task, and no chief to dial; its role is none that a server has;
                its address cannot be bound; there is no secret; ``TORCHSTRAT_KEEP_PAGES`` is neither 0 nor 1.
            InvalidArgumentError: an unknown protocol.
        """
        if self._host is None:
            host = self._make_host()
            host.start()
            self._host = host

    def join(self) -> None:
        """Serve until this process is told to end; the end of a process that does nothing else.

        On SIGTERM, if this is the main thread: what the task is doing is finished or handed back, the coordinator is
        told, and this returns; a second one ends the process as usual. When the process was lost by its cluster (it was
        stopped for too long), it starts its command line again.

        Raises:
            ContextError: it was not started.
            SystemExit: with code 69 when the coordinator was lost and none came in time, 77 when the coordinator does
                not want this task, 75 when the process should be started again and cannot do it itself.
        """
        if self._host is None:
            raise ContextError("this Server was not started; call start() before join().")
        code = self.run()
        if code:
            sys.exit(code)

    def run(self) -> int:
        """As `join`, with `start` before it if that was not called, and the exit code as its result.

        Once the main thread has ended, the process ends within `GRACE_SECONDS`, even if a function that a worker ran
        hangs in a thread that Python would wait for.

        Raises:
            What `start` raises.
        """
        host = self._host or self._make_host()
        with _draining_on_sigterm(host, self._drain_timeout_seconds + GRACE_SECONDS):
            if self._host is None:
                host.start()  # under the handler: who sees that it listens may tell it to end
                self._host = host
            code = host.join()
        end_even_if_stuck(code)
        return code

    def stop(self) -> None:
        """End the task, without finishing what it does. Does nothing when it was not started."""
        if self._host is not None:
            self._host.stop()
            self._host.join()

    def _make_host(self) -> TaskHost:
        if PLAN_VARIABLE in os.environ:  # a test makes processes of this task die at chosen places
            follow_plan(os.environ[PLAN_VARIABLE], self._task)
        if self._protocol != DEFAULT_PROTOCOL:
            raise InvalidArgumentError(
                f"protocol={self._protocol!r} is unknown; leave it out, or give {DEFAULT_PROTOCOL!r}."
            )
        role = Task(WORKER, 0) if self._task.job == LOCAL_JOB else self._task
        check_role(role)
        secret, timeout = load_secret(secret=self._secret), _orphan_timeout(self._orphan_timeout_seconds)
        if kept_pages.is_wanted(self._keep_pages, os.environ):
            kept_pages.keep_pages()  # before the threads of what follows
        return TaskHost(
            self._spec,
            self._task,
            secret,
            self._make_service(role),
            make_endpoint=self._make_endpoint,
            listen=self._listen,
            orphan_timeout_seconds=timeout,
            drain_timeout_seconds=self._drain_timeout_seconds,
            exit_when_finished=self._exit_when_finished,
        )


def _rpc_endpoint(task: Task, *, secret: bytes, host: str) -> Endpoint:
    from torchstrat.parameter_server.transport.rpc import RpcEndpoint  # imports torch.distributed.rpc

    return RpcEndpoint(task, secret=secret, host=host)


def _the_only_job(spec: ClusterSpec) -> str:
    if len(spec.jobs) != 1:
        raise ClusterConfigError(f"give job_name, one of the cluster's jobs: {sorted(spec.jobs)}.")
    return spec.jobs[0]


def _the_only_index(spec: ClusterSpec, job: str) -> int:
    indices = spec.task_indices(job)
    if len(indices) != 1:
        raise ClusterConfigError(f"give task_index, one of the tasks of job {job!r}: {indices}.")
    return indices[0]


def _orphan_timeout(seconds: float | None) -> float | None:
    """What was given, else what the environment says, else the default; None is for ever."""
    source = "orphan_timeout_seconds"
    given: float | str | None = seconds
    if given is None:
        source, given = ORPHAN_TIMEOUT_VARIABLE, os.environ.get(ORPHAN_TIMEOUT_VARIABLE)
    if given is None:
        return DEFAULT_ORPHAN_TIMEOUT_SECONDS
    try:
        limit = float(given)
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise ClusterConfigError(f"{source}={given!r} must be a number of seconds of at least 0, or inf.")
    return None if limit > threading.TIMEOUT_MAX else limit


def end_even_if_stuck(code: int) -> None:
    """Have this process end with ``code`` soon after its main thread, even if another thread hangs.

    A worker's functions run in a thread that Python waits for. One that hangs was handed back when the worker drained,
    and must not hold the process.
    """
    main = threading.main_thread()
    if all(thread.daemon or thread is main for thread in threading.enumerate()):
        return

    def end() -> None:
        main.join()
        time.sleep(GRACE_SECONDS)
        os._exit(code)

    threading.Thread(target=end, name="ends the process", daemon=True).start()


@contextmanager
def _draining_on_sigterm(host: TaskHost, limit_seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # Python runs signal handlers in the main thread
        yield
        return

    def drain(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        host.terminate()
        last_resort.start()

    last_resort = threading.Timer(limit_seconds, os._exit, (EXIT_FAILED,))
    last_resort.daemon = True
    before = signal.signal(signal.SIGTERM, drain)
    try:
        yield
    finally:
        last_resort.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
