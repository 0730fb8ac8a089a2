"""Processes with an `RpcEndpoint`, for tests that call, kill and stop them.

They are forked from a server that has imported torch once and done nothing else, which takes milliseconds instead of
seconds; PyTorch's RPC starts in the fork, as it would in any process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from torchstrat.parameter_server.endpoint import AnswerMemory, Endpoint, Handler
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.parameter_server.transport import RpcEndpoint
from torchstrat.testing._process import forking

SECRET = b"the secret of the clusters in these tests"
PATIENCE_SECONDS = 60.0
"""For what takes milliseconds, on a machine that may be busy with anything."""


def _state_of(thread: Path) -> str:
    """The letter in proc(5): "T" for one that is stopped."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


class Odd(Exception):  # noqa: N818
    """Cannot be built again from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Telling(ValueError):  # noqa: N818
    """Carries more than its message."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, number)
        self.number = number


class Handlers:
    """What every endpoint of these tests answers, on any transport."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._executor = ThreadPoolExecutor(4)
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._count = 0
        self._sum = torch.zeros(4 * 2**20 // 4)

    def table(self) -> Mapping[str, Handler]:
        return {
            "echo": Handler(lambda _sender, payload: payload),
            "echo_on_executor": Handler(lambda _sender, payload: payload, self._executor),
            "who": Handler(lambda sender, _payload: sender),
            "fail": Handler(self._fail),
            "fail_on_executor": Handler(self._fail, self._executor),
            "describe": Handler(self._describe),
            "wait": Handler(lambda _sender, _payload: self._released.wait(PATIENCE_SECONDS), self._executor),
            "release": Handler(lambda _sender, _payload: self._released.set()),
            "lambda": Handler(lambda _sender, _payload: lambda: None),
            "call_back": Handler(self._call_back, self._executor),
            "push": Handler(self._push, self._executor),
            "push_in_place": Handler(
                self._push_in_place, self._executor, takes_memory=True, borrows=True, may_hold_up_its_caller=True
            ),
            "write_two": Handler(self._write_two, self._executor, takes_memory=True, borrows=True),
            "keep": Handler(self._keep),
            "kept": Handler(lambda _sender, _payload: self._kept),
            "count": Handler(self._counted, self._executor),
        }

    def close(self) -> None:
        self._released.set()
        self._executor.shutdown()

    def _fail(self, _sender: Peer, kind: str) -> None:
        raise {
            "telling": Telling("it is told", 42),
            "odd": Odd("one", "another"),
            "exit": SystemExit(3),
        }[kind]

    @staticmethod
    def _describe(_sender: Peer, tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
        return [
            (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.untyped_storage().nbytes())
            for tensor in tensors
        ]

    def _call_back(self, sender: Peer, method: str) -> Any:
        self._endpoint.add_peer(sender)
        return self._endpoint.call(sender, method, "back").result(PATIENCE_SECONDS)

    def _counted(self, _sender: Peer, _payload: Any) -> int:
        with self._lock:
            self._count += 1
            return self._count

    def _push_in_place(self, _sender: Peer, gradient: torch.Tensor, memory: AnswerMemory) -> torch.Tensor:
        with self._lock:
            self._sum += gradient
            return memory.empty(0, tuple(self._sum.shape), self._sum.dtype).copy_(self._sum)

    def _write_two(self, _sender: Peer, _payload: Any, memory: AnswerMemory) -> list[torch.Tensor]:
        """Tells of the first at once; the second comes when it is told to go on."""
        memory.written(0)
        first, second = (memory.empty(place, tuple(self._sum.shape), self._sum.dtype) for place in range(2))
        first.fill_(1)
        memory.written(1)
        self._released.wait(PATIENCE_SECONDS)
        return [first, second.fill_(2)]

    def _keep(self, _sender: Peer, tensor: torch.Tensor) -> None:
        self._kept = tensor

    def _push(self, _sender: Peer, gradient: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._sum += gradient
            return self._sum.clone()


class Node:
    """One process with an endpoint that answers `Handlers`, seen from outside."""

    def __init__(self, task: Task, *, secret: bytes = SECRET, **options: Any) -> None:
        context = forking()
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(theirs, task, secret, options))
        self._ended = False
        self.process.start()
        theirs.close()
        self.peer: Peer = self._receive()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(endpoint, *args)`` in the process, on its main thread."""
        self.start(function, *args)
        return self._receive()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """As `run`, without waiting for the result."""
        self._connection.send((function, args))

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(PATIENCE_SECONDS)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            self._wait_until_stopped(self.process.pid)

    @staticmethod
    def _wait_until_stopped(pid: int) -> None:
        """kill(2) returns before the process's threads stand still: one may yet answer a call."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(_state_of(thread) != "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
            assert time.monotonic() < deadline, f"process {pid} was told to stop and goes on"
            time.sleep(0.001)

    def leave(self) -> int | None:
        """Let the process end by itself; its exit code."""
        self._connection.close()
        self.process.join(PATIENCE_SECONDS)
        return self.process.exitcode

    def end(self) -> None:
        """Leave nothing of the process behind, whatever has become of it. May be called twice."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):  # killed, and not yet known to have ended
            if self.process.exitcode is None:
                self.signal(signal.SIGKILL)
        self.process.join(PATIENCE_SECONDS)
        self.process.close()
        self._connection.close()

    def _receive(self) -> Any:
        if not self._connection.poll(PATIENCE_SECONDS):
            raise TimeoutError(f"a process of this test said nothing for {PATIENCE_SECONDS:g} s")
        result = self._connection.recv()
        if isinstance(result, BaseException):
            raise result
        return result


class Nodes:
    """Starts processes, and ends those that are left."""

    def __init__(self, **options: Any) -> None:
        """``options``: of all their endpoints."""
        self._options = options
        self._nodes: list[Node] = []

    def start(self, job: str = "worker", index: int = 0, **options: Any) -> Node:
        self._nodes.append(Node(Task(job, index), **{**self._options, **options}))
        return self._nodes[-1]

    def end(self) -> None:
        for node in self._nodes:
            node.end()


def _live(connection: Connection[Any, Any], task: Task, secret: bytes, options: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        endpoint = RpcEndpoint(task, secret=secret, **options)
    except Exception as error:
        connection.send(error)
        return
    handlers = Handlers(endpoint)
    endpoint.serve(handlers.table())
    connection.send(endpoint.peer)
    try:
        while True:
            function, args = connection.recv()
            try:
                connection.send(function(endpoint, *args))
            except Exception as error:
                connection.send(error)
    except EOFError:
        handlers.close()
        # The endpoint is left open: the end of the interpreter has to see to it.


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """For what cannot be waited for: numbers in /proc. ``what``: for the error, perhaps as it is by then."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(
                f"{what if isinstance(what, str) else what()} did not come true within {PATIENCE_SECONDS:g} s"
            )
        time.sleep(0.01)
