"""One task of a local cluster: its process is started, watched, and started again when it ends.

When, says a `RestartPolicy`, which knows no clock and no process. What several of them print is made readable: whole
lines, each with the name of its task before it (`PrefixedOutput`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from torchstrat.core.errors import CommunicationTimeoutError, ContextError, InvalidArgumentError
from torchstrat.launch.fork_server import Reaper

_CHUNK_BYTES = 65536
_PIPE_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 65536
"""A line that is longer is shown in pieces, so that a program that never ends its lines does not fill the memory."""


class Console:
    """Where lines go: this process's standard output and error, as they are when something is written. Thread-safe.

    Never raises: a reader who left (``… | head``) must not stop those who write.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, text: str, *, to_stderr: bool) -> None:
        """Write whole lines."""
        stream = sys.stderr if to_stderr else sys.stdout
        with self._lock, contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()

    def report(self, message: str) -> None:
        """A line of the launcher's own, on standard error."""
        self.write(f"[torchstrat] {message}\n", to_stderr=True)


class PrefixedOutput:
    """Carries the output of one process to a console, in a thread of its own.

    Args:
        stdout, stderr: The reading ends of its pipes; they are closed here, by `finish`.
        name: Goes before each line, in brackets.
        console: Where the lines go.
    """

    def __init__(self, stdout: IO[bytes], stderr: IO[bytes], name: str, console: Console) -> None:
        self._prefix = f"[{name}] "
        self._console = console
        self._streams: dict[IO[bytes], bool] = {stdout: False, stderr: True}  # whether it is stderr
        self._part = {False: b"", True: b""}  # the line that has not ended yet, of stdout and stderr
        self._process_ended, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry, name=f"output of {name}", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._process_ended)
            os.close(self._wake)
            raise

    def finish(self) -> None:
        """Show what is left, once the process has ended; then no thread and no pipe remains.

        The end of the pipes is not waited for: a child of the process may hold them open for ever.
        """
        os.close(self._wake)
        self._thread.join()
        os.close(self._process_ended)

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._process_ended, selectors.EVENT_READ, None)
            for stream, to_stderr in self._streams.items():
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, to_stderr)
            ended = False
            while not ended:
                for key, _ in selector.select():
                    if key.data is None:
                        ended = True
                    elif not self._read(key.fd, to_stderr=key.data):
                        selector.unregister(key.fileobj)
        for stream, to_stderr in self._streams.items():
            # What the process wrote is in the pipe by now, and a pipe holds 1 MiB at most. Without a bound a child that
            # it left behind could keep us here.
            for _ in range(_PIPE_BYTES // _CHUNK_BYTES + 1):
                if not self._read(stream.fileno(), to_stderr=to_stderr):
                    break
            stream.close()
            if self._part[to_stderr]:
                self._show([self._part[to_stderr]], to_stderr=to_stderr)

    def _read(self, descriptor: int, *, to_stderr: bool) -> bool:
        """Show the whole lines of what is there; False when there is nothing."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        *lines, part = (self._part[to_stderr] + chunk).split(b"\n")
        if len(part) > _LONGEST_LINE_BYTES:
            lines.append(part)
            part = b""
        self._part[to_stderr] = part
        self._show(lines, to_stderr=to_stderr)
        return bool(chunk)

    def _show(self, lines: list[bytes], *, to_stderr: bool) -> None:
        if lines:
            text = "".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines)
            self._console.write(text, to_stderr=to_stderr)


@dataclass(frozen=True)
class RestartPolicy:
    """How often, and how fast, a task is started again.

    A process that lived is replaced at once. One that ended within ``quick_seconds`` of its start is replaced at once
    too the first time, for it may have been killed; if that goes on, the next ones wait for ``first_delay_seconds``,
    then twice as long each time, up to ``longest_delay_seconds``.

    Args:
        limit: Starts after the first one, in all; None: any number.
    """

    limit: int | None = None
    quick_seconds: float = 10.0
    first_delay_seconds: float = 1.0
    longest_delay_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 0:
            raise InvalidArgumentError(f"limit={self.limit} must be at least 0, or None for any number of restarts.")


@dataclass
class Restarts:
    """The restarts of one task so far."""

    policy: RestartPolicy
    total: int = 0
    quick_ends: int = 0
    """Processes in a row that ended soon after their start."""

    def delay_seconds(self, lived_seconds: float) -> float | None:
        """How long to wait before the next start, after a process that lived this long; None: do not start it."""
        policy = self.policy
        if policy.limit is not None and self.total >= policy.limit:
            return None
        self.total += 1
        self.quick_ends = self.quick_ends + 1 if lived_seconds < policy.quick_seconds else 0
        if self.quick_ends < 2:
            return 0.0
        # The exponent is bounded too: 2.0 ** 1024 is an OverflowError.
        return min(policy.first_delay_seconds * 2.0 ** min(self.quick_ends - 2, 60), policy.longest_delay_seconds)


class Process(Protocol):
    """What `subprocess.Popen` is of a process that was started, and others can be."""

    pid: int
    returncode: int | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Starter(Protocol):
    """How the processes of one task are started, each in a group of its own, with its output in pipes. Called on the
    supervisor's thread, which lives as long as they do."""

    def start(self) -> Process:
        """Raises OSError where it cannot be, for the moment."""

    def collect(self, process: Process, *, before_status: Callable[[], None]) -> int:
        """As `Reaper.collect`."""


class Program:
    """A program and its arguments, with the whole environment that it gets."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], reaper: Reaper) -> None:
        self._command, self._environment, self._reaper = list(command), dict(environment), reaper

    def start(self) -> subprocess.Popen[bytes]:
        return self._reaper.start(
            self._command,
            own_group=True,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def collect(self, process: Process, *, before_status: Callable[[], None]) -> int:
        assert isinstance(process, subprocess.Popen)
        return self._reaper.collect(process, own_group=True, before_status=before_status)


class SupervisedProcess:
    """A task's processes, one after the other, until `stop` is asked for. Any thread may call.

    A thread of its own starts them all and lives as long as they do.

    Args:
        name: Of the task, such as ``worker 1``.
        starter: Starts them.
        policy: When it is started again.
        console: Where its output goes, and what happens to it.
        done_status: The exit status by which it says that it has nothing more to do; no other one is started then.
            None: there is no such status.
    """

    def __init__(
        self,
        name: str,
        starter: Starter,
        policy: RestartPolicy,
        console: Console,
        *,
        done_status: int | None = None,
    ) -> None:
        self.name = name
        self._done_status = done_status
        self._is_done = False
        self._restarts = Restarts(policy)
        self._starter, self._console = starter, console
        self._changed = threading.Condition()
        self._process: Process | None = None
        self._runs = False  # and its number is its own: signals are sent while this holds, under the lock
        self._stopping = False
        self._start_asked = False
        self._given_up: str | None = None
        self._thread = threading.Thread(target=self._live, name=f"supervisor of {name}", daemon=True)
        self._thread.start()

    # ---- asked by others ---------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether its process runs, or another one will."""
        return self._thread.is_alive()

    @property
    def state(self) -> str:
        """What it does now, for people."""
        process = self._process
        if self._given_up is not None:
            return f"{self._given_up}; not restarted"
        if not self.alive:
            return "ended"
        return f"pid {process.pid}" if self._runs and process is not None else "starting"

    @property
    def given_up(self) -> str | None:
        """How its last process ended, if no other is going to be started; None otherwise."""
        return self._given_up

    def process(self, timeout_seconds: float = 30.0) -> Process:
        """The process that runs, or the last one that did; waits for the first."""
        self.wait_for_another(None, timeout_seconds)
        assert self._process is not None
        return self._process

    def wait_for_another(self, pid: int | None, timeout_seconds: float) -> Process:
        """Wait until the task has had a process after the one with this number (None: any), and return it.

        Raises:
            CommunicationTimeoutError: none was started in time.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._process is not None and self._process.pid != pid, timeout_seconds
            ):
                after = "no process" if pid is None else f"no process after pid {pid}"
                ended = f"; it {self._given_up} and is not restarted" if self._given_up else ""
                raise CommunicationTimeoutError(f"{self.name} had {after} within {timeout_seconds:g} s{ended}.")
            assert self._process is not None
            return self._process

    def send_signal(self, number: int, *, whole_group: bool = False) -> int | None:
        """Send a signal to its process, or to all of its group; returns the process's number, None if none runs."""
        with self._changed:
            process = self._process
            if not self._runs or process is None or process.returncode is not None:
                return None
            try:
                (os.killpg if whole_group else os.kill)(process.pid, number)
            except ProcessLookupError:  # who was given the process by `process` has collected its status meanwhile
                return None
            return process.pid

    def wait_for_end(self, pid: int, timeout_seconds: float) -> bool:
        """Wait until its process is not, or no longer, the one with this number; False if it still is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._runs or self._process is None or self._process.pid != pid, timeout_seconds
            )

    def restart(self, timeout_seconds: float = 30.0) -> Process:
        """Kill its process, if there is one, and start another at once, whatever the policy says; return that."""
        with self._changed:
            if self._stopping:
                raise ContextError(f"{self.name} belongs to a cluster that was stopped; start another one.")
            before = self._process.pid if self._process is not None else None
            self._start_asked = True
            self._changed.notify_all()
            self.send_signal(signal.SIGKILL)  # still under the lock, so that it cannot hit the new one
        return self.wait_for_another(before, timeout_seconds)

    def request_stop(self) -> None:
        """Ask its process to end (SIGTERM); no other one is started."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)  # a process that was stopped would not hear it

    def join(self, timeout_seconds: float) -> bool:
        """Wait for its end after `request_stop`; False if it is still there."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # ---- the supervisor's own thread ---------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._stopping:
            started = time.monotonic()
            how = self._run()
            if not self._wait_for_next_start(how, time.monotonic() - started):
                return

    def _run(self) -> str:
        """One process, from start to end; returns how it ended."""
        try:
            process = self._starter.start()
        except OSError as error:  # no more processes, memory or descriptors; there may be some again later
            return f"could not be started ({error})"
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            output = PrefixedOutput(process.stdout, process.stderr, self.name, self._console)
        except (OSError, RuntimeError) as error:  # no descriptor or no thread is left for what it prints
            os.killpg(process.pid, signal.SIGKILL)
            self._starter.collect(process, before_status=self._ended)
            for stream in (process.stdout, process.stderr):
                stream.close()
            return f"could not be started ({error})"
        with self._changed:
            self._process, self._runs, self._start_asked = process, True, False
            self._changed.notify_all()
            late = self._stopping
        if late:  # it was asked for while this one was being started
            self.send_signal(signal.SIGTERM)
        status = self._starter.collect(process, before_status=self._ended)
        output.finish()
        self._is_done = status == self._done_status
        return f"(pid {process.pid}) {describe_end(status)}"

    def _ended(self) -> None:
        with self._changed:
            self._runs = False
            self._changed.notify_all()

    def _wait_for_next_start(self, how: str, lived_seconds: float) -> bool:
        """Whether there is to be another process; returns when it is time to start it."""
        how = f"{how} after {lived_seconds:.1f} s"
        with self._changed:
            if self._stopping or self._is_done:
                return False
            if self._start_asked:
                return True
            delay = self._restarts.delay_seconds(lived_seconds)
            if delay is None:
                self._given_up = how
                self._console.report(f"{self.name} {how}; not restarted (limit: {self._restarts.policy.limit})")
            elif delay:
                times = f"for the {ordinal(self._restarts.quick_ends)} time in a row"
                self._console.report(f"{self.name} {how}, so soon {times}; next start in {delay:g} s")
            else:
                self._console.report(f"{self.name} {how}; restarted")
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopping or self._start_asked, delay)
            self._given_up = None
            return not self._stopping


def describe_end(status: int) -> str:
    """How a process ended, from what `subprocess.Popen.returncode` says."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def ordinal(number: int) -> str:
    """2 → 2nd."""
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 <= number % 100 <= 20 else last}"
