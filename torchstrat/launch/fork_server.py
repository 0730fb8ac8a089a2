"""Workers and servers that start in milliseconds, and none that stays behind.

A `ForkServer` forks a process that has imported PyTorch and torchstrat. On Linux only: elsewhere a process with that
many libraries in it cannot be forked safely, nor can its end be seen by one that is not its parent.

Nothing that was started here stays behind, even when this process is killed with SIGKILL. Two nets: on Linux the kernel
kills each child when this process ends; everywhere a small process (`Reaper`) waits for the end of this one and kills
whole process groups, which catches the children of children too, such as a data loader's. Both are in
`torchstrat.launch._reaper`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, get_args

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


StartMethod = Literal["forkserver", "spawn"]
"""What Python's multiprocessing calls the ways to start a process."""

START_METHODS: tuple[StartMethod, ...] = get_args(StartMethod)

_LENGTH = struct.Struct("!I")
"""Before each message to the fork server and from it, which is JSON."""

_MOST_DESCRIPTORS = 2

UNKNOWN_STATUS = 255
"""Of a fork that ended after its fork server: nobody was told how."""

_PROGRAM = (sys.executable, "-m", "torchstrat.launch._fork_server")


class ForkRefusedError(Exception):
    """The fork server has something in it that a fork would not survive; the message says what."""


def why_not() -> str | None:
    """Why there can be no fork server on this machine; None if there can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if not os.path.isdir("/proc/self/task"):
        return "it needs /proc"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"it needs Linux 5.3: {error}"
    return None


class ForkedProcess:
    """As `subprocess.Popen` of a process that somebody else waits for."""

    def __init__(self, pid: int, server: _Server, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr
        self.server = server
        self._is_collected = threading.Event()
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit status, once it has ended and its supervisor has seen it."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        if not self._is_collected.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def wait_until_ended(self) -> None:
        """Its number stays taken."""
        ended = select.poll()
        ended.register(self._descriptor, select.POLLIN)
        ended.poll()

    def end_with(self, status: int) -> None:
        """Told by who collected its status; once."""
        self.returncode = status
        os.close(self._descriptor)
        self._is_collected.set()


class ForkServer:
    """Starts processes of one environment, on any thread. One that was killed is started anew; its forks go on.

    Args:
        environment: The whole environment of the fork server, read by the libraries that it imports. Each fork is given
            its own on top of that.
        reaper: Ends everything with this process.
    """

    def __init__(self, environment: Mapping[str, str], reaper: Reaper) -> None:
        self._environment, self._reaper = dict(environment), reaper
        self._lock = threading.Lock()
        self._servers = [_Server(self._environment, reaper)]
        self._is_closing = False

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        """``python -m torchstrat.server ARGUMENTS…``, with its output in pipes, in a group of its own. The first one
        waits for the imports.

        Raises:
            OSError: it could not be started, or nothing is to be started any more.
            ForkRefusedError: not in this way.
        """
        with self._lock:
            if self._is_closing:
                raise OSError("the cluster is being stopped")
            if self._servers[-1].has_ended:
                self._servers.append(_Server(self._environment, self._reaper))
            server = self._servers[-1]
        return server.fork(name, arguments, environment)

    def collect(self, process: ForkedProcess, *, before_status: Callable[[], None]) -> int:
        """As `Reaper.collect`."""
        process.wait_until_ended()
        before_status()
        status = process.server.collect(process.pid)
        process.end_with(status)
        return status

    def start_no_more(self) -> None:
        """Who waits for the imports does so no longer."""
        with self._lock:
            self._is_closing = True
            if not self._servers[-1].has_forked:
                self._servers[-1].kill()

    def close(self) -> None:
        """After the forks have ended; those that have not are killed."""
        self.start_no_more()
        for server in self._servers:
            server.close()


class _Server:
    """One process."""

    def __init__(self, environment: Mapping[str, str], reaper: Reaper) -> None:
        self._reaper = reaper
        self._environment = environment
        self._lock = threading.Lock()
        """One question at a time."""
        self._connection, theirs = socket.socketpair()
        life, self._life = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_started = threading.Event()
        self._is_closed = False
        self.has_ended = False
        self.has_forked = False
        # A thread of its own, since it dies with the thread that started it.
        self._thread = threading.Thread(target=self._live, args=(theirs, life), name="fork server", daemon=True)
        self._thread.start()
        self._is_started.wait()

    def fork(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        request = {"name": name, "arguments": list(arguments), "environment": dict(environment)}
        with contextlib.ExitStack() as writers, contextlib.ExitStack() as unless_it_works:
            (stdout, out), (stderr, err) = (_pipe(writers, unless_it_works) for _ in range(2))
            answer = self._ask(request, [out.fileno(), err.fileno()])
            if "refused" in answer:
                raise ForkRefusedError(answer["refused"])
            self.has_forked = True
            pid: int = answer["pid"]
            self._reaper.watch(pid)
            unless_it_works.callback(self._give_up, pid)
            process = ForkedProcess(pid, self, stdout, stderr)
            unless_it_works.pop_all()
            return process

    def collect(self, pid: int) -> int:
        try:
            status: int = self._ask({"collect": pid})["status"]
        except OSError:  # the kernel has given it to another parent, which has collected it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            status = UNKNOWN_STATUS
        self._reaper.forget(pid)
        return status

    def _give_up(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.collect(pid)

    def kill(self) -> None:
        if self._process is not None and not self.has_ended:
            self._process.kill()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.kill()
            self._thread.join()
            self._connection.close()
            os.close(self._life)

    def _live(self, theirs: socket.socket, life: int) -> None:
        try:
            with theirs:
                self._process = self._reaper.start(
                    [*_PROGRAM, str(theirs.fileno()), str(life)],
                    own_group=True,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), life),
                )
        except OSError:  # no more processes or memory; there may be some again later
            self.has_ended = True
            return
        finally:
            os.close(life)
            self._is_started.set()
        self._reaper.collect(self._process, own_group=True, before_status=self._ended)

    def _ended(self) -> None:
        self.has_ended = True

    def _ask(self, question: Mapping[str, object], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            send(self._connection, question, descriptors)
            received = receive(self._connection)
        if received is None:
            raise ConnectionError("the process that forks workers and servers has ended")
        answer, _ = received
        return answer


def send(connection: socket.socket, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
    """What JSON can say, and up to two open files."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(body))], list(descriptors))
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and the descriptors of its files, which the caller closes; None at the other side's end."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_DESCRIPTORS, socket.MSG_WAITALL)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = connection.recv(length, socket.MSG_WAITALL)
    return (json.loads(body), descriptors) if len(body) == length else None


def _pipe(writers: contextlib.ExitStack, readers: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Its two ends, which these close."""
    reader, writer = os.pipe()
    return readers.enter_context(os.fdopen(reader, "rb")), writers.enter_context(os.fdopen(writer, "wb"))
