"""Processes with an `RpcEndpoint`, for tests that call, kill and stop them.

PyTorch's RPC starts in a fork as it would in any process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tests.faults.forked import Forked
from torchstrat.parameter_server.interface import AnswerMemory, Endpoint, Handler, Peer, Task
from torchstrat.parameter_server.transport.rpc import RpcEndpoint

SECRET = b"the secret of the clusters in these tests"
PATIENCE_SECONDS = 60.0
"""For what takes milliseconds, on a machine that may be busy with anything."""

ELEMENTS = 2**20
"""Of a gradient: 4 MiB in float32, what `Handlers` sums."""


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
        self._sum = torch.zeros(ELEMENTS)

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

    def _push(self, _sender: Peer, gradient: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._sum += gradient
            return self._sum.clone()

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


class Node(Forked):
    """One process with an endpoint that answers `Handlers`; what it is told to call gets the endpoint."""

    def __init__(self, task: Task, *, secret: bytes = SECRET, **options: Any) -> None:
        super().__init__(_serving_endpoint, task, secret, options)
        self.peer: Peer = self.run(_peer_of)

    def call(self, to: Peer, method: str, payload: Any = None) -> Any:
        """Have the process call another one, which it adds; the answer."""
        return self.run(_call, to, method, payload)


def _serving_endpoint(task: Task, secret: bytes, options: Mapping[str, Any]) -> RpcEndpoint:
    endpoint = RpcEndpoint(task, secret=secret, **options)
    endpoint.serve(Handlers(endpoint).table())
    return endpoint


def _peer_of(endpoint: RpcEndpoint) -> Peer:
    return endpoint.peer


def _call(endpoint: RpcEndpoint, to: Peer, method: str, payload: Any) -> Any:
    endpoint.add_peer(to)
    return endpoint.call(to, method, payload).result(PATIENCE_SECONDS)


class Nodes(contextlib.ExitStack):
    """Starts processes, and ends those that are left. ``options``: of all their endpoints."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def start(self, job: str = "worker", index: int = 0, **options: Any) -> Node:
        return self.enter_context(Node(Task(job, index), **{**self._options, **options}))


@contextlib.contextmanager
def endpoint_with(**options: Any) -> Iterator[RpcEndpoint]:
    """This process's own."""
    endpoint = RpcEndpoint(Task("chief", 0), secret=SECRET, **options)
    try:
        yield endpoint
    finally:
        endpoint.close()


class Lost:
    """A callback for `Endpoint.watch` that remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[Peer, str]] = []
        self.at = 0.0
        self._event = threading.Event()

    def __call__(self, peer: Peer, reason: str) -> None:
        self.at = time.monotonic()
        self.told.append((peer, reason))
        self._event.set()

    def wait(self) -> str:
        assert self._event.wait(PATIENCE_SECONDS), "nobody was told"
        return self.told[0][1]


def error_of(future: Future[Any]) -> BaseException:
    error = future.exception(PATIENCE_SECONDS)
    assert error is not None
    return error
