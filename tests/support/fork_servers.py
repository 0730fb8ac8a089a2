"""Clusters whose workers and servers are forks of one process for all tests, which has made its imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest

from tests.child_processes import children_of
from tests.faults.counting import QUIET, wait_until
from torchstrat.core.kept_pages import environment_that_keeps_pages, glibc_version
from torchstrat.launch import _fork_server, fork_server, local_cluster
from torchstrat.launch.fork_server import Reaper


class OfOneCluster:
    """In place of a cluster's own `ForkServer`: one that has made its imports, and does not end with the cluster."""

    def __init__(self, kept: fork_server.ForkServer) -> None:
        self._kept, self._is_closing = kept, False
        self.collect = kept.collect

    def start(self, *args: Any) -> fork_server.ForkedProcess:
        if self._is_closing:
            raise OSError("the cluster is being stopped")
        return self._kept.start(*args)

    def start_no_more(self) -> None:
        self._is_closing = True

    close = start_no_more


class _Forking(Reaper):
    """Starts a fork server as a fork of this process, which has made its imports."""

    def start(self, command: Sequence[str], *, pass_fds: Sequence[int], **options: Any) -> Any:
        return _OwnFork(pass_fds)


class _OwnFork:
    """A fork server, as a `subprocess.Popen`."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._serve(descriptors)
            finally:
                os._exit(1)

    @staticmethod
    def _serve(descriptors: Sequence[int]) -> None:
        os.setsid()
        kept = sorted(descriptors)
        for below, above in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(below + 1, above)
        sys.argv[1:] = map(str, descriptors)
        os._exit(_fork_server.main())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextlib.contextmanager
def clusters_of_this_program(*, are_measured: bool) -> Iterator[None]:
    """Their workers and servers are forks of a fork of it: of a program that is itself a fork of one with all imports,
    and has started no thread yet. ``are_measured``: of one that starts as a cluster's own, for malloc's settings."""
    reaper = Reaper() if are_measured else _Forking()
    kept = fork_server.ForkServer(_environment(), reaper)

    def of_one_cluster(*_: object) -> OfOneCluster:
        return OfOneCluster(kept)

    try:
        with mock.patch.object(local_cluster, "ForkServer", of_one_cluster):
            yield
    finally:
        kept.close()
        reaper.close()


def _environment() -> dict[str, str]:
    pages = environment_that_keeps_pages(glibc_version())
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **pages, **os.environ, **QUIET}


@pytest.fixture(scope="session")
def kept_fork_server() -> Iterator[fork_server.ForkServer]:
    reaper = Reaper()
    kept = fork_server.ForkServer(_environment(), reaper)
    yield kept
    kept.close()
    reaper.close()


@pytest.fixture
def clusters_share_a_fork_server(
    kept_fork_server: fork_server.ForkServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Its imports take longer than most tests. What is of the fork server itself: tests/faults/test_fork_server.py."""
    monkeypatch.setattr(local_cluster, "ForkServer", lambda *_: OfOneCluster(kept_fork_server))
    yield
    for server in kept_fork_server._servers:
        pid = server._process.pid
        wait_until(lambda pid=pid: not children_of(pid), f"the end of all forks of {pid}")
