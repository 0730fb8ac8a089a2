"""Coordinators and tasks that do nothing but meet, in one process on loopback; and what may lie on the way between."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any

from torchstrat.cluster_resolver import ClusterSpec
from torchstrat.parameter_server.interface import Peer, Task
from torchstrat.parameter_server.membership.membership import Rendezvous
from torchstrat.parameter_server.membership.task_host import TaskHost

SOON = 30.0
SECRET, OTHER_SECRET = b"s" * 32, b"o" * 32
WORKER, SERVER = Task("worker", 0), Task("ps", 0)
_incarnations = itertools.count()


def free_address() -> str:
    """Below the range from which the system gives out ports by itself, so that nobody else is given it."""
    for port in random.Random().sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return f"127.0.0.1:{port}"
    raise RuntimeError("no free port")


def dial(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), SOON)


def new_peer(task: Task) -> Peer:
    number = next(_incarnations)
    return Peer(task, f"{number:032x}", f"tcp://127.0.0.1:{number}", "here", number)


class Log:
    """What happened, in order; for tests to wait for."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()

    def add(self, *event: Any) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[0] in kinds]

    def kinds(self) -> list[str]:
        return [event[0] for event in self.events]

    def wait_for(self, *beginning: Any, times: int = 1) -> tuple[Any, ...]:
        """The event that begins like this, for the ``times``-th time."""

        def found() -> list[tuple[Any, ...]]:
            return [event for event in self.events if event[: len(beginning)] == beginning]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= times, SOON), (beginning, self.events)
            return found()[times - 1]


class StandIn:
    """A service, or an endpoint, that writes down what is asked of it, and on which thread."""

    def __init__(self, task: Task, *, log: Log | None = None, prefix: str = "", **_options: Any) -> None:
        self.peer, self.log, self._prefix = new_peer(task), log or Log(), prefix
        self.threads: set[str] = set()
        self.failing: dict[str, Exception] = {}

    def handlers(self) -> Mapping[str, Any]:
        return {"answer": None}

    def status(self) -> Mapping[str, Any]:
        self._note("status")
        return {"holds": ["a table"]}

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Whatever else services and endpoints can be asked, such as "arrived", "drain", "add_peer" and "close"."""
        return partial(self._note, self._prefix + name.removeprefix("coordinator_"))

    def _note(self, *event: Any, **options: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.log.add(*event, *options.values())
        if event[0] in self.failing:
            raise self.failing[event[0]]


class HostedTask(TaskHost):
    """With a log of its lines, and of what it asks of its service and its endpoint (``endpoint close``)."""

    def __init__(self, spec: Mapping[str, Any], task: Task = WORKER, **options: Any) -> None:
        self.log = Log()
        self.service = StandIn(task, log=self.log)
        defaults: dict[str, Any] = {
            "secret": SECRET,
            "make_endpoint": partial(StandIn, log=self.log, prefix="endpoint "),
            "say": partial(self.log.add, "said"),
            "restart": partial(self.log.add, "restarted"),
        }
        super().__init__(ClusterSpec(spec), task, service=self.service, **{**defaults, **options})

    def said(self, number: int) -> str:
        """The line of that number; the first says where the task listens."""
        return str(self.log.wait_for("said", times=number)[1])

    def hang_up(self) -> None:
        """The connection to the coordinator breaks, and both live."""
        if self._session is not None:
            self._session.channel.hang_up()

    def die(self) -> None:
        """End without a word, as kill -9 does: the connection breaks, the port is free."""
        self._ending = True
        self.hang_up()
        self.stop()
        self.join()


class Coordinator(Rendezvous):
    """With a log of who joined and left. Callbacks in ``options`` get the coordinator first, and are not logged."""

    def __init__(self, spec: Mapping[str, Any], *, secret: bytes = SECRET, **options: Any) -> None:
        self.log, self.me = Log(), new_peer(Task("chief", 0))
        bound = {name: partial(callback, self) for name, callback in options.items()}
        callbacks = {"on_joined": partial(self.log.add, "joined"), "on_left": partial(self.log.add, "left"), **bound}
        super().__init__(ClusterSpec(spec), self.me, secret, **callbacks)

    def die(self) -> None:
        self.close(finished=False)


class Cast(ExitStack):
    """Starts coordinators and tasks, and ends them all."""

    def task(self, spec: Mapping[str, Any], task: Task = WORKER, **options: Any) -> HostedTask:
        host = HostedTask(spec, task, **options)
        host.start()
        self.callback(host.join)
        self.callback(host.stop)
        return host

    def coordinator(self, spec: Mapping[str, Any], **options: Any) -> Coordinator:
        coordinator = Coordinator(spec, **options)
        self.callback(coordinator.close, finished=True)
        coordinator.start()
        return coordinator

    def pair(self, task: Task = WORKER, **options: Any) -> tuple[dict[str, list[str]], HostedTask, Coordinator]:
        """A cluster of one task, which has joined."""
        spec = {task.job: [free_address()]}
        host, coordinator = self.task(spec, task, **options), self.coordinator(spec)
        coordinator.wait_for([task], SOON)
        return spec, host, coordinator


class Wire:
    """Between a dialer and a listener: keeps what each says, and may change it.

    ``change(who, offset, data)``: what to pass on of the ``data`` that starts at that byte of what ``who`` says.
    """

    def __init__(
        self,
        dialer: socket.socket,
        listener: socket.socket,
        change: Callable[[str, int, bytes], list[bytes]] = lambda who, offset, data: [data],
    ) -> None:
        self.said: dict[str, list[bytes]] = {"dialer": [], "listener": []}
        self._ends, self._change = {"dialer": dialer, "listener": listener}, change
        self._threads = [
            threading.Thread(target=self._pass_on, args=("dialer", dialer, listener)),
            threading.Thread(target=self._pass_on, args=("listener", listener, dialer)),
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, who: str, data: bytes) -> None:
        """Say something that the other side did not."""
        self._ends[who].sendall(data)

    def _pass_on(self, who: str, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                offset = sum(map(len, self.said[who]))
                parts = self._change(who, offset, data)
                self.said[who].append(data)
                for part in parts:
                    sink.sendall(part)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in self._ends.values():
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends.values():
            end.close()


@contextmanager
def wire_to(address: str) -> Iterator[tuple[socket.socket, Wire]]:
    """A socket that leads to that port, and what lies between."""
    mine, near = socket.socketpair()
    with closing(mine), closing(Wire(near, dial(address))) as wire:
        yield mine, wire


def flipped(data: bytes, draw: random.Random) -> bytes:
    """With one bit another."""
    changed = bytearray(data)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)
