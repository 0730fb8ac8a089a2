"""Clusters whose workers and servers are forks of one process for all tests, which has made its imports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.child_processes import children_of
from tests.faults.counting import QUIET, wait_until
from torchstrat.core.kept_pages import environment_that_keeps_pages, glibc_version
from torchstrat.launch import fork_server, local_cluster
from torchstrat.launch.reaper import Reaper


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


@pytest.fixture(scope="session")
def kept_fork_server() -> Iterator[fork_server.ForkServer]:
    pages = environment_that_keeps_pages(glibc_version())
    reaper = Reaper()
    kept = fork_server.ForkServer(
        {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **pages, **os.environ, **QUIET}, reaper
    )
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
