"""Processes that outlive a cell: starting them anew for each would take longer than the cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.matrix.generated import Runner
from tests.matrix.places import Launcher
from tests.matrix.table import Table

_shared: list[Launcher | Runner] = []


@pytest.fixture(scope="session")
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    tables = [item.callspec.params.get("table") for item in request.session.items if hasattr(item, "callspec")]
    with Launcher(forks=any(isinstance(table, Table) and table.in_forks for table in tables)) as launcher:
        _shared.append(launcher)
        yield launcher
        _shared.remove(launcher)


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        _shared.append(runner)
        yield runner
        _shared.remove(runner)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # As in tests/multiprocess: what a failed run has ended starts again before the check for processes left behind.
    for launcher in _shared:
        launcher.start()
