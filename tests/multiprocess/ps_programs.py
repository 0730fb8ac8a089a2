"""Tasks and coordinators as real processes that say on stdout what happens to them, one JSON list per line.

``python -m tests.multiprocess.ps_programs task OPTIONS`` and ``… coordinator OPTIONS``; `Program` starts them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOON = 90.0
"""For a process to start on a busy machine, too: importing torch takes seconds."""


class Program:
    """A process, and what it has said. Ends with the ``with`` block."""

    def __init__(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        self._changed = threading.Condition()
        self.events: list[list[Any]] = []
        self.stderr = ""
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**_without_secrets(os.environ), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_events, self._read_errors)]
        for reader in self._readers:
            reader.start()

    @classmethod
    def task(cls, spec: Mapping[str, Any], job: str, index: int = 0, *, secret: str, **options: Any) -> Program:
        """A task whose service remembers a token; see `run_task` for the options."""
        described = json.dumps({"spec": spec, "job": job, "index": index, **options})
        return cls(sys.executable, "-m", __name__, "task", described, env={"TORCHSTRAT_SECRET": secret})

    @classmethod
    def coordinator(cls, spec: Mapping[str, Any], *, secret: str) -> Program:
        """A coordinator that looks for the tasks of ``spec``, and finishes when it is asked to."""
        described = json.dumps({"spec": spec})
        return cls(sys.executable, "-m", __name__, "coordinator", described, env={"TORCHSTRAT_SECRET": secret})

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.kill()
        self.wait()

    def wait_for(self, *beginning: Any, times: int = 1) -> list[Any]:
        """The event that begins like this, for the ``times``-th time."""

        def found() -> list[list[Any]]:
            return [event for event in self.events if event[: len(beginning)] == list(beginning)]

        with self._changed:
            came = self._changed.wait_for(lambda: len(found()) >= times or self._process.poll() is not None, SOON)
            self._changed.wait_for(lambda: len(found()) >= times, 1.0)  # what it said before it ended
            assert came, (beginning, self.events, self.stderr)
            assert len(found()) >= times, (beginning, self.events, self.stderr)
            return found()[times - 1]

    def wait_for_line(self, text: str) -> None:
        """Until stderr has it."""
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.stderr, SOON), (text, self.stderr)

    def wait(self) -> int:
        """Until it has ended; its exit code."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        code = self._process.wait(SOON)
        for reader in self._readers:
            reader.join(SOON)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        return code

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def stop(self) -> None:
        """kill -STOP; `go_on` undoes it."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._changed:
                self.stderr += line
                self._changed.notify_all()


def _without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environ.items() if not name.startswith("TORCHSTRAT_") and name != "TF_CONFIG"
    }


def _tell(*event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class _Token:
    """A service whose state is a token, drawn when the process starts."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(4)

    def handlers(self) -> Mapping[str, Any]:
        return {}

    def attach(self, endpoint: Any) -> None:
        pass

    def status(self) -> Mapping[str, Any]:
        return {"token": self._token}

    def coordinator_arrived(self, coordinator: Any) -> None:
        _tell("arrived", coordinator.pid)

    def coordinator_left(self, *, finished: bool) -> None:
        _tell("left", finished)

    def drain(self, timeout_seconds: float) -> None:
        _tell("drain", timeout_seconds)

    def close(self) -> None:
        _tell("closed")


class _Unreachable:
    """An endpoint that nobody calls."""

    def __init__(self, task: Any, *, secret: bytes = b"", host: str = "") -> None:
        from torchstrat.parameter_server.tasks import Peer

        self.peer = Peer(task, secrets.token_hex(16), "tcp://127.0.0.1:1", "this host", os.getpid())

    def serve(self, handlers: Any) -> None:
        pass

    def add_peer(self, peer: Any) -> None:
        pass

    def remove_peer(self, peer: Any) -> None:
        pass

    def close(self) -> None:
        pass


def run_task(options: dict[str, Any]) -> None:
    """``spec``, ``job``, ``index``; ``torch``: pretend to have that version; ``stuck``: have a thread that hangs, and
    little patience with it; others are `ts.Server`'s."""
    from torchstrat import Server
    from torchstrat.parameter_server.meeting import task_host, task_server, versions

    pretended = options.pop("torch", None)
    if pretended is not None:
        mine = versions.local_versions()
        task_host.local_versions = lambda: versions.Versions(mine.torchstrat, pretended, mine.python)
    if options.pop("stuck", False):
        task_server.GRACE_SECONDS = 0.5
        threading.Thread(target=threading.Event().wait).start()
    server = Server(
        options.pop("spec"),
        options.pop("job"),
        options.pop("index"),
        make_service=lambda task: _Token(),
        make_endpoint=_Unreachable,
        start=False,
        **options,
    )
    sys.exit(server.run())


def run_coordinator(options: dict[str, Any]) -> None:
    """Tells of joining and leaving until stdin ends; then it has finished. A line on stdin gives that worker up."""
    from torchstrat.cluster_spec import ClusterSpec
    from torchstrat.errors import TorchstratError
    from torchstrat.parameter_server.meeting.rendezvous import Rendezvous
    from torchstrat.parameter_server.meeting.secret import load_secret
    from torchstrat.parameter_server.tasks import Task

    rendezvous = Rendezvous(
        ClusterSpec(options["spec"]),
        _Unreachable(Task("chief", 0)).peer,
        load_secret(),
        on_joined=lambda peer, status: _tell("joined", str(peer.task), peer.pid, peer.incarnation, status),
        on_left=lambda peer, reason: _tell("left", str(peer.task), peer.pid, peer.incarnation, reason),
    )
    rendezvous.start()
    try:
        rendezvous.wait_for([Task(job, index) for job in options["spec"] for index in range(1)], SOON)
        _tell("all are here")
    except TorchstratError as error:
        _tell("error", type(error).__name__, str(error))
    sys.stdin.read()
    rendezvous.close(finished=True)


if __name__ == "__main__":
    {"task": run_task, "coordinator": run_coordinator}[sys.argv[1]](json.loads(sys.argv[2]))
