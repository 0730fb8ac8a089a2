"""Processes that outlive a test: starting them anew for each would take longer than the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fork_servers import clusters_share_a_fork_server, kept_fork_server  # noqa: F401
from torchstrat.testing import Workers

_shared: list[Workers] = []


@pytest.fixture(scope="session")
def two_processes() -> Iterator[Workers]:
    """A group of two processes for functions that leave nothing behind; see `Workers.run`."""
    with Workers(2, timeout_seconds=300) as workers:
        _shared.append(workers)
        yield workers
        _shared.remove(workers)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # A failed run ends the group's processes. They start again here, before any fixture of the next test, so that the
    # check for processes left behind does not take them for that test's.
    for workers in _shared:
        workers.start()
