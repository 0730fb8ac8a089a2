"""Pytest plugin of ``./scripts/mutants``: runs the tests of a list, and writes down which one failed."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chosen", type=Path, help="a JSON list of tests, in the order in which they are run")
    parser.addoption("--failed", type=Path, help="where the tests that failed are written, one a line")


@pytest.hookimpl(trylast=True)  # after the order that fixtures ask for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {test: number for number, test in enumerate(json.loads(config.getoption("--chosen").read_text()))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        with item.config.getoption("--failed").open("a") as file:
            print(item.nodeid, file=file)
    return report
