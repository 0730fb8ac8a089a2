"""Imports what a worker or a server needs, once, and forks them: ``python -m torchstrat.launch._fork_server FD FD``.

The first descriptor is a socket on which `torchstrat.launch.fork_server` sends requests, the second the reading end of
a pipe that ends with the launcher. A fork has sockets, threads and random numbers of its own: nothing here starts a
thread or opens a connection, and a process that is not alone with itself refuses to fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

import numpy as np
import torch

from torchstrat import server
from torchstrat.core import without_collection
from torchstrat.launch.fork_server import receive, send

_IMPORTED_LATER = ("torch._dynamo", "torch.distributed.checkpoint")
"""What workers and servers need before long, and PyTorch imports when it is needed."""

_PR_SET_NAME = 15  # <linux/prctl.h>
_F_SETSIG = 10  # <linux/fcntl.h>


def main() -> int:
    connection, life = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    with without_collection():
        for name in _IMPORTED_LATER:
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork would otherwise write to, and so copy, every page that they share
    while True:
        received = receive(connection)
        if received is None:
            return 0
        request, descriptors = received
        if "collect" in request:
            send(connection, {"status": _status_of(request["collect"])})
            continue
        reason = _why_not()
        if reason is not None:
            _close(descriptors)
            send(connection, {"refused": reason})
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(request, descriptors, life)
            _end(server.main(request["arguments"]))
        _close(descriptors)
        send(connection, {"pid": pid})


def _why_not() -> str | None:
    """Why a fork of this process might not work as a new process would."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"it has {threads} threads"
    return "it uses CUDA" if torch.cuda.is_initialized() else None


def _become(request: dict[str, Any], descriptors: list[int], life: int) -> None:
    os.setsid()
    _die_with(life)
    for number, descriptor in enumerate(descriptors, start=1):  # standard output and error
        os.dup2(descriptor, number)
    _close(descriptors)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]
    # For one that has to start itself again: as `subprocess` would have started it.
    sys.orig_argv[:] = [sys.executable, "-m", "torchstrat.server", *request["arguments"]]
    random.seed()
    np.random.seed()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, request["name"].encode()[:15], 0, 0, 0)
    threading.current_thread().name = request["name"]


def _die_with(life: int) -> None:
    """Have the kernel kill this process at the end of that pipe. The usual way, PR_SET_PDEATHSIG, looks at the parent,
    which is the fork server and may end before."""
    own = os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK)  # whom it signals is said of an opening
    os.set_inheritable(own, True)  # also after it has started itself again
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([own], [], [], 0)[0]:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


def _end(code: int) -> NoReturn:
    """As an interpreter ends, but for taking apart what was imported, whose pages it would have to copy for that."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads, or it is closed
            stream.flush()
    os._exit(code)


def _status_of(pid: int) -> int:
    """Of a fork that has ended. What is left of its group is killed before its number can be another's."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
