"""The agent of torch.distributed.rpc, which knows only itself, and the address at which newcomers find it.

This is the only file that imports torch.distributed.rpc; `rpc` tells what for.

PyTorch's agent closes its listener at the first connection that ends before its hello (`Listener`). The socket itself
is kept open here by a second descriptor (`Door`), so a newcomer is never refused: the kernel queues it, a thread of
this module accepts it, and passes what it says to another agent of this process, and back. By then its hello has
come, so no end of a newcomer can close the other agent's listener.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from torchstrat.core.errors import CommunicationError, InvalidArgumentError
from torchstrat.parameter_server.interface import Peer
from torchstrat.parameter_server.membership.control_channel import keep_out_of_children, shut_down
from torchstrat.parameter_server.transport.requests import SELF_TEST

try:
    import torch.distributed.autograd as dist_autograd
    from torch._C._distributed_rpc import (
        TensorPipeAgent,
        WorkerInfo,
        _cleanup_python_rpc_handler,
        _invoke_rpc_python_udf,
        _is_current_rpc_agent_set,
        _reset_current_rpc_agent,
        _set_and_start_rpc_agent,
    )
    from torch.distributed import HashStore
    from torch.distributed.rpc import TensorPipeRpcBackendOptions, internal

    _init_autograd = dist_autograd._init  # noqa: SLF001
    _update_group_membership = TensorPipeAgent._update_group_membership  # noqa: SLF001
    # The functions that the C++ side of RPC looks up, once, to turn what arrives into Python objects and back.
    _HOOKS = {
        name: getattr(internal, name) for name in ("serialize", "deserialize", "_run_function", "_handle_exception")
    }
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"torchstrat's parameter servers need a part of torch.distributed.rpc that torch {torch.__version__} does not "
        f"have: {error}. They support torch 2.9 and later, on Linux and macOS, built with distributed support."
    ) from error

__all__ = ["NEVER", "Agent", "Door", "Listener", "WorkerInfo", "address_of", "interface_of", "shut_down_connections"]


class Listener:
    """The socket on which an agent listens, found among this process's file descriptors.

    An agent takes the end of a connection that has not said hello for an error of its listener, and closes that for
    good. A stranger can do it, and so can a peer that is killed in the fraction of a millisecond before its hello.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self._descriptor, self._identity = -1, (0, 0)
        for descriptor, candidate in _sockets():
            with contextlib.suppress(OSError):
                listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and candidate.getsockname() == address:
                    self._descriptor, self._identity = descriptor, _identity(descriptor)

    @property
    def is_open(self) -> bool:
        """Also True where it could not be found: then nothing is known."""
        if self._descriptor < 0:
            return True
        try:
            return _identity(self._descriptor) == self._identity
        except OSError:
            return False

    def duplicate(self) -> socket.socket | None:
        """The same socket by another descriptor: it listens as long as one of the two is open. None if not found."""
        return socket.socket(fileno=os.dup(self._descriptor)) if self._descriptor >= 0 else None


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def shut_down_connections(url: str) -> None:
    """End every connection that this process has made to this address. The reads on them then fail, which makes RPC
    close and free them; it offers no other way to hang up."""
    address = address_of(url)
    for _, connection in _sockets():
        with contextlib.suppress(OSError):  # not connected
            if connection.getpeername() == address:
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process's internet sockets, with their file descriptors; each is a duplicate, closed when the next comes."""
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    for descriptor in map(int, os.listdir(folder)):
        with contextlib.suppress(OSError):  # closed in between
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    if duplicate.family == socket.AF_INET:
                        yield descriptor, duplicate


def address_of(url: str) -> tuple[str, int]:
    """Of ``uv://127.0.0.1:40123``."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    return host.strip("[]"), int(port)


_HELLO_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 0.02
"""Until a connection that the agent is about to accept has left the queue."""

_AT_ONCE_BYTES = 1 << 18

_log = logging.getLogger(__name__)


class Door:
    """Stands behind ``listener`` until it is closed.

    Args:
        another: the address of another agent of this process that listens; called, on a thread of this object, for
            each newcomer after ``listener`` was closed.
    """

    def __init__(self, listener: Listener, another: Callable[[], tuple[str, int]]) -> None:
        self._listener, self._another = listener, another
        self._closed = threading.Event()
        self._socket = listener.duplicate()
        if self._socket is not None:
            keep_out_of_children(self._socket)
            threading.Thread(target=self._watch, name="torchstrat-door", daemon=True).start()

    def close(self) -> None:
        """Before the agent is: nobody is let in any more. Who is in stays."""
        self._closed.set()
        if self._socket is not None:
            shut_down(self._socket)

    def _watch(self) -> None:
        assert self._socket is not None
        with self._socket as door:
            somebody_is_there = select.poll()
            somebody_is_there.register(door, select.POLLIN)
            while not self._closed.is_set():
                somebody_is_there.poll()
                if self._closed.is_set():
                    return
                if self._listener.is_open:
                    self._closed.wait(_LOOK_AGAIN_SECONDS)
                    continue
                try:
                    newcomer, _ = door.accept()
                except OSError:  # out of descriptors, or it went away
                    self._closed.wait(_LOOK_AGAIN_SECONDS)
                    continue
                keep_out_of_children(newcomer)
                threading.Thread(target=self._let_in, args=(newcomer,), name="torchstrat-newcomer", daemon=True).start()

    def _let_in(self, newcomer: socket.socket) -> None:
        with newcomer:
            try:
                newcomer.settimeout(_HELLO_SECONDS)
                hello = newcomer.recv(_AT_ONCE_BYTES)
                newcomer.settimeout(None)
            except OSError:
                return
            if not hello:
                return
            try:
                inside = socket.create_connection(self._another())
            except Exception:
                _log.exception("somebody who called could not be let in")
                return
            keep_out_of_children(inside)
            with inside:
                for each in (newcomer, inside):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(
                    target=_pass_on, args=(inside, newcomer), name="torchstrat-to-newcomer", daemon=True
                )
                back.start()
                _pass_on(newcomer, inside, hello)
                back.join()


def _pass_on(source: socket.socket, to: socket.socket, first: bytes = b"") -> None:
    """Until one of them ends; then both do."""
    memory = memoryview(bytearray(_AT_ONCE_BYTES))
    with contextlib.suppress(OSError):
        to.sendall(first)
        while count := source.recv_into(memory):
            to.sendall(memory[:count])
    shut_down(source)
    shut_down(to)


_GET_ADDRESS = 0x8915 if sys.platform == "linux" else 0xC0206921  # SIOCGIFADDR of Linux, of macOS and the BSDs


def interface_of(host: str) -> tuple[str, str]:
    """The interface that has the IPv4 address ``host`` (a name is looked up first), and the address.

    Raises `InvalidArgumentError` that lists this machine's addresses.
    """
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidArgumentError(f"host {host!r} has no IPv4 address: {error}. {_advice()}") from None
    wanted = [str(entry[4][0]) for entry in found]
    for interface, address in _addresses().items():
        if address in wanted:
            return interface, address
    raise InvalidArgumentError(f"host {host!r} ({', '.join(wanted)}) is no address of this machine. {_advice()}")


def _advice() -> str:
    return "Use one of " + ", ".join(f"{address} ({name})" for name, address in _addresses().items()) + "."


def _addresses() -> dict[str, str]:
    """The main IPv4 address of each interface that is up."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s16x", name.encode())
            try:
                answer = fcntl.ioctl(any_socket, _GET_ADDRESS, request)
            except OSError:  # it has none
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


_RPC_THREADS = 8
"""Threads on which messages are unsealed, short handlers run and answers arrive. They cost nothing while they wait."""

NEVER = 0.0
_LONGEST = 1e6  # RPC counts milliseconds in 32 bits; who waits longer than 11 days means for ever
_SELF_TEST_SECONDS = 30.0
_INTERFACE_VARIABLE = "TP_SOCKET_IFNAME"
_LARGEST_ID = 2**15 - 1
_FLUSH_SECONDS, _SHUTDOWN_SECONDS = 1.0, 2.0
_retired: list[TensorPipeAgent] = []
"""Agents that were shut down while handlers were at work, which would answer through memory that is no longer there."""


class Agent:
    """TensorPipe agents that know nobody but themselves, listening on ``host``: one, and another for newcomers as soon
    as something has made that one deaf (see `Door`). One per process.

    ``hooks`` take the place of the functions by which RPC unpickles, runs and pickles, from before it listens.
    """

    _open: ClassVar[str | None] = None
    """Name of the one there is."""

    def __init__(
        self, name: str, host: str, timeout_seconds: float, hooks: Mapping[str, Callable[..., object]]
    ) -> None:
        interface, address = interface_of(host)
        if _is_current_rpc_agent_set():
            raise CommunicationError(_why_taken(Agent._open))
        self._name, self._timeout_seconds = name, timeout_seconds
        self._ids = iter(range(1, _LARGEST_ID + 1))
        self._peers: dict[str, tuple[WorkerInfo, str]] = {}
        self._lock = threading.Lock()
        """For who adds a peer, and who puts another agent in the place of the one by which peers are called."""
        self._earlier: list[TensorPipeAgent] = []
        self._closed = False
        _init_autograd(0)
        self._agent: TensorPipeAgent | None
        self._agent, self._store = self._made()
        self._door: Door | None = None
        Agent._open = name
        try:
            with _hooked(hooks):
                with _listening_on(interface):
                    _set_and_start_rpc_agent(self._current())
                self._check_hooks()
                self._expect_ends(self._current())
            self.url = self._url_of(self._store)
            self._listener = Listener(address_of(self.url))
            if self._listener.address[0] != address:
                raise InvalidArgumentError(
                    f"asked to listen on {host} ({address}), PyTorch listens on {self.url}: it chooses an address once "
                    "per process, or the interface has several. Use its main address, from the start of the process."
                )
            self._door = Door(self._listener, self._that_listens)
        except BaseException:
            self.close()
            raise

    def add(self, peer: Peer, *, is_self: bool) -> WorkerInfo:
        if is_self:
            return self._current().get_worker_info()
        number = next(self._ids, None)
        if number is None:
            raise CommunicationError(
                f"this process has known {_LARGEST_ID} peers, which is all RPC can count; restart it."
            )
        worker = WorkerInfo(peer.name, number)
        with self._lock:
            self._peers[peer.name] = worker, peer.url
            _introduce(worker, peer.url, self._current(), self._store)
        return worker

    def forget(self, peer: Peer) -> None:
        """Another agent need not know it."""
        with self._lock:
            self._peers.pop(peer.name, None)

    def send(self, to: WorkerInfo, sealed: bytes, tensors: list[torch.Tensor], seconds: float) -> Any:
        """A torch future; 0 seconds: it may take for ever."""
        if seconds > _LONGEST:
            seconds = NEVER
        if seconds != NEVER:
            seconds = max(seconds, 0.001)  # RPC counts in milliseconds, and takes 0 for no limit
        while True:
            agent = self._agent
            try:
                return _invoke_rpc_python_udf(to, sealed, tensors, seconds, True)  # type: ignore[arg-type]
            except RuntimeError:
                with self._lock:
                    if agent is self._agent:
                        raise  # else it came between two agents

    def flush(self) -> None:
        """What was answered is on its way when this returns: the agent writes in the order in which it was told to."""
        with contextlib.suppress(RuntimeError):
            self.send(self._current().get_worker_info(), SELF_TEST, [], _FLUSH_SECONDS).wait()

    def close(self, is_idle: Callable[[], bool] = lambda: True) -> None:
        """Shut down without asking anybody. A handler that blocks one of RPC's threads is left to itself.

        ``is_idle``: whether nothing is being answered any more, asked when the agents have been shut down.
        """
        if self._door is not None:
            self._door.close()
        with self._lock:
            self._closed = True
            agents = [*self._earlier, self._current()]
            self._earlier, self._agent = [], None
        shutdowns = [
            threading.Thread(target=agent.shutdown, name="torchstrat-rpc-shutdown", daemon=True) for agent in agents
        ]
        for shutdown in shutdowns:
            shutdown.start()
        for shutdown in shutdowns:
            shutdown.join(_SHUTDOWN_SECONDS)
        has_ended = not any(shutdown.is_alive() for shutdown in shutdowns)
        if has_ended and _is_current_rpc_agent_set():
            _cleanup_python_rpc_handler()  # so that the next agent, ours or not, looks its functions up again
            _reset_current_rpc_agent()
            Agent._open = None
        if not has_ended or not is_idle():
            _retired.extend(agents)

    def _made(self) -> tuple[TensorPipeAgent, HashStore]:
        """An agent, not started, and the store in which it looks for addresses."""
        store = HashStore()
        options = TensorPipeRpcBackendOptions(
            num_worker_threads=_RPC_THREADS,
            rpc_timeout=self._timeout_seconds,
            # Shared memory would be faster, but polls: half a core per idle process. Reading from another process's
            # memory (cma) is chosen by itself where both ends are on one host.
            _transports=["uv"],
            _channels=["cma", "basic"] if sys.platform == "linux" else ["basic"],
        )
        # world_size=None makes a group that may grow, and waits for nobody.
        return TensorPipeAgent(store, self._name, 0, None, options, {}, []), store

    def _current(self) -> TensorPipeAgent:
        assert self._agent is not None
        return self._agent

    def _expect_ends(self, agent: TensorPipeAgent) -> None:
        """Have it know that connections may end, of which it would warn in a group that has not ended itself.

        It leaves the group, which is that of itself alone, and goes on as before.
        """
        agent.join()

    def _url_of(self, store: HashStore) -> str:
        return store.get(f"addrs/{self._name}").decode()

    def _that_listens(self) -> tuple[str, int]:
        """The address of an agent that is not deaf; starts one if there is none.

        The one before goes on for those that are connected to it, and with what it has been asked to send. Whoever is
        called from now on is called by the new one, for RPC knows one agent at a time.
        """
        with self._lock:
            if self._closed:
                raise CommunicationError(f"{self._name} is closed.")
            if not self._listener.is_open:
                agent, store = self._made()
                for worker, url in self._peers.values():
                    _introduce(worker, url, agent, store)
                _reset_current_rpc_agent()
                _set_and_start_rpc_agent(agent)
                self._expect_ends(agent)
                self._earlier.append(self._current())
                self._agent, self._store = agent, store
                self._listener = Listener(address_of(self._url_of(store)))
                _log.warning("a connection to %s ended before it had begun; it listens anew", self._name)
            return self._listener.address

    def _check_hooks(self) -> None:
        """Send a message that is not sealed to this very process: were the hooks not in force, anybody's would run."""
        reply = self.send(self._current().get_worker_info(), SELF_TEST, [], _SELF_TEST_SECONDS).wait()
        if reply is not None:
            raise CommunicationError(
                f"torch {torch.__version__} does not let messages be authenticated before they are unpickled; the "
                "process would run what anybody sends to it. Please report this version."
            )


def _why_taken(name: str | None) -> str:
    """Of a process that has an agent: that of this name, or somebody else's."""
    if name is None:
        return (
            "this process uses torch.distributed.rpc already, and torchstrat needs RPC for itself. Shut it down first, "
            "torch.distributed.rpc.shutdown(), or use another process."
        )
    if not name.startswith("chief"):
        task = " ".join(name.split("_")[:-1])
        return f"this process is {task} of a cluster already, and can be one task only. Start another process for this."
    return (
        "this process has a ParameterServerStrategy that was not closed, perhaps since an exception came before that; "
        "a process is the coordinator of one cluster at a time. Call strategy.close() on that one first, or start the "
        "process anew."
    )


def _introduce(worker: WorkerInfo, url: str, to: TensorPipeAgent, store: HashStore) -> None:
    store.set(f"addrs/{worker.name}", url)
    _update_group_membership(to, worker, [], {}, True)


@contextlib.contextmanager
def _hooked(hooks: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Let RPC find these functions in the place of its own; it looks for them once, at an agent's first message."""
    for name, hook in hooks.items():
        setattr(internal, name, hook)
    try:
        yield
    finally:
        for name, original in _HOOKS.items():
            setattr(internal, name, original)


@contextlib.contextmanager
def _listening_on(interface: str) -> Iterator[None]:
    before = os.environ.get(_INTERFACE_VARIABLE)
    os.environ[_INTERFACE_VARIABLE] = interface
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE_VARIABLE]
        else:
            os.environ[_INTERFACE_VARIABLE] = before
