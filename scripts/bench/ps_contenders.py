"""Starts a contender's processes, and measures them from outside: CPU clocks and memory of all, wall clock of each."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ps_workloads import Workload, from_arguments

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEADLINE_SECONDS = 600
RETAINED = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((2 << 30) - 1),
}
"""glibc keeps the pages of large blocks that were freed, instead of giving them back and having them cleared again."""

CONTENDERS: dict[str, tuple[str, dict[str, str]]] = {
    "floor": ("floor", {}),
    "floor_retained": ("floor", RETAINED),
    "tutorial": ("tutorial", {}),
    "torchstrat": ("torchstrat", {}),
    "torchstrat_rpc": ("torchstrat", {"TORCHSTRAT_SAME_HOST": "off"}),
}
"""Name → what is started, and with which variables of the environment."""


@dataclass(frozen=True)
class Measurement:
    wall: float
    """Seconds per step, of the slower worker."""
    cpu: float
    """CPU seconds per step, all processes together."""
    losses: list[float]
    peak: int
    """The most memory in bytes that each process has had, added up."""
    server_bytes: int
    """Resident memory of all servers, at the end."""
    idle_bytes: int
    """The same before they held anything, where it is known."""
    held_bytes: int
    """Variables and optimizer state, where the contender tells."""


def measure_once(contender: str, arguments: Sequence[str], root: Path = ROOT) -> Measurement:
    """Start fresh processes, as a launcher would, and let them run ``arguments`` (see `from_arguments`) once.

    ``root``: whose torchstrat they import.

    Raises `SystemExit` with what the processes complained of when one of them fails, or none answers in time.
    """
    workload = from_arguments(arguments)
    kind, variables = CONTENDERS[contender]
    with _processes(_commands(kind, workload), arguments, variables, root) as processes:
        speaking = [process for process in processes if not process.is_silent]
        facts = [process.listen("ready") for process in speaking]
        tasks = {job: pids for one in facts for job, pids in one.get("pids", {}).items()}
        servers = [process.pid for process in processes if process.is_silent] or tasks.get("ps", [])
        pids = [process.pid for process in processes] + [pid for of_job in tasks.values() for pid in of_job]
        before = sum(map(cpu_seconds, pids))
        for process in speaking:
            process.go_on()
        results = [process.listen("finished") for process in speaking]
        cpu = sum(map(cpu_seconds, pids)) - before
        peak = sum(map(peak_bytes, pids))
        server_bytes = sum(map(resident_bytes, servers)) if workload.problem is not None else 0
        for process in speaking:
            process.go_on()
    calls_of = 1 if workload.problem is not None else workload.workers
    return Measurement(
        wall=max(result["wall"] for result in results),
        cpu=cpu / workload.steps / calls_of / results[0].get("repeated", 1),
        losses=results[0].get("losses", []),
        peak=peak,
        server_bytes=server_bytes,
        idle_bytes=sum(one.get("idle_bytes", 0) for one in facts),
        held_bytes=results[0].get("held_bytes", 0),
    )


def _commands(kind: str, workload: Workload) -> list[tuple[list[str], bool]]:
    """The program and first arguments of each process, and whether it is silent, as a server that others call is."""
    workers = range(workload.workers)
    if kind == "floor":
        return [(["ps_floor.py", str(index)], False) for index in workers]
    if kind == "torchstrat":
        return [(["ps_torchstrat.py"], False)]
    if workload.problem is None:
        callees = [(["ps_tutorial.py", "worker", str(index)], True) for index in workers]
        return [*callees, (["ps_tutorial.py", "caller", "0"], False)]
    servers = [(["ps_tutorial.py", "server", str(index)], True) for index in range(workload.servers)]
    return servers + [(["ps_tutorial.py", "worker", str(index)], False) for index in workers]


class _Process:
    def __init__(self, command: list[str], environment: dict[str, str], root: Path, *, is_silent: bool) -> None:
        self.is_silent = is_silent
        self._complaints: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in `end`
        self._popen = subprocess.Popen(
            command,
            env=environment,
            cwd=root,  # `python -m` of the servers that it starts looks there before PYTHONPATH
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        self.pid = self._popen.pid
        self._name = " ".join(Path(part).name for part in command[1:])

    def listen(self, kind: str) -> dict[str, Any]:
        """The facts of the next message, which is to be of this kind."""
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):  # what else is printed
                facts: dict[str, Any] = json.loads(line)[kind]
                return facts
        code = self._popen.wait()
        raise SystemExit(f"{self._name} ended with {code} before it was {kind}:\n{self.complaints()}")

    def go_on(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write("go\n")
        self._popen.stdin.flush()

    def complaints(self) -> str:
        self._complaints.seek(0)
        return self._complaints.read()

    def kill(self) -> None:
        self._popen.kill()

    def wait(self) -> None:
        """Raises `SystemExit` if it failed."""
        if code := self._popen.wait():
            raise SystemExit(f"{self._name} ended with {code}:\n{self.complaints()}")

    def close(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout, self._complaints):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@contextlib.contextmanager
def _processes(
    commands: list[tuple[list[str], bool]], arguments: Sequence[str], variables: dict[str, str], root: Path
) -> Iterator[list[_Process]]:
    """The processes; at the end of the block they are to end by themselves. None is left in any case."""
    port = _free_port()
    processes: list[_Process] = []

    def give_up() -> None:
        for process in processes:
            process.kill()

    watchdog = threading.Timer(DEADLINE_SECONDS, give_up)
    try:
        for rank, ((program, *first), is_silent) in enumerate(commands):
            command = [sys.executable, str(HERE / program), *first, *arguments]
            environment = _environment(rank, len(commands), port, root) | variables
            processes.append(_Process(command, environment, root, is_silent=is_silent))
        watchdog.start()
        yield processes
        for process in processes:
            process.wait()
    finally:
        watchdog.cancel()
        for process in processes:
            process.close()
        if watchdog.ident is not None:
            watchdog.join()


def _environment(rank: int, size: int, port: int, root: Path) -> dict[str, str]:
    paths = [str(root), str(HERE), os.environ.get("PYTHONPATH")]  # a worker imports what scheduled functions name
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, all threads, to the nanosecond: Linux has a clock for every process."""
    return time.clock_gettime((~pid << 3) | 2)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(pid: int) -> int:
    """Since the process's program began; `resource.getrusage` counts what it was forked from."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
