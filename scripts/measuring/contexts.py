"""Pytest plugin of ``./scripts/coverage``: what runs is put down to the test that it runs for, in other processes too.

* In pytest's process the context is the test, from its set-up to its tear-down; none between tests, as in imports.
* A process that is started, or forked by pytest's, takes the test of that moment: pytest keeps it in the variable
  ``PYTEST_CURRENT_TEST``, and the configuration of coverage reads it. One that outlives its test (a cluster of a
  module's fixture) stays with that test: see `coverings`.
* `Workers` are asked by many tests. Their functions take the test along.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.measuring.in_test import InTest, switch_to
from torchstrat.testing import Workers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds-of-tests", type=Path, help="where the seconds that each test took are written, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Contexts(config.getoption("--seconds-of-tests")))


class Contexts:
    def __init__(self, seconds_file: Path) -> None:
        self._seconds_file = seconds_file
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._test = ""
        self._run = Workers.run
        # After coverage's own, which starts to measure anew.
        os.register_at_fork(after_in_child=lambda: switch_to(self._test))

    def pytest_sessionstart(self) -> None:
        run = self._run

        def run_in_test(workers: Workers, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
            return run(workers, InTest(self._test, function), *args, **options)

        Workers.run = run_in_test  # type: ignore[method-assign, assignment]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test = item.nodeid
        switch_to(self._test)
        try:
            return (yield)
        finally:
            self._test = ""
            switch_to("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        Workers.run = self._run  # type: ignore[method-assign]
        self._seconds_file.write_text(json.dumps(self._seconds, indent=1))
