"""One mutant in a copy of the tree, against the tests that run its line.

What fails is run again without the mutant, once: a test that fails then too says nothing about it, and the mutant is
tried without that test. The same holds for what takes too long.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.measuring.coverings import Covering
from scripts.measuring.pytest_run import Ended

KILLED, TIMED_OUT, SURVIVED, NOT_COVERED, GONE = "killed", "timed out", "survived", "not covered", "gone"

_START_SECONDS = 15.0
"""For pytest to import PyTorch, on a busy machine."""
_MOST_UNRELIABLE = 3
"""Tests that fail without the mutant too. With more of them nothing is known."""
_NO_TESTS = 5  # pytest's status where it has found none


@dataclass(frozen=True)
class Verdict:
    """What came of a mutant."""

    outcome: str
    by: str = ""
    """The test that failed, or how else pytest ended."""
    tests: int = 0
    """That were chosen."""
    covering: int = 0
    """That run the line."""
    seconds: float = 0.0


class Trials:
    """Of mutants of ``tree``, whose files are changed and put back.

    Args:
        run: Runs tests in the tree until one fails.
        seconds: Of each test, as measured: the fastest are run first, and of more than can be run in the time the
            slowest are left out.
        limit_seconds: That a run may take.
    """

    def __init__(
        self, tree: Path, run: Callable[[list[str]], Ended], seconds: Mapping[str, float], limit_seconds: float
    ) -> None:
        self.tree = tree
        self._run, self._seconds, self._limit = run, seconds, limit_seconds

    def choose(self, covering: Covering) -> list[str]:
        """Tests that surely run the line come before those that may; of each, the fastest first."""
        left = max(self._limit - _START_SECONDS, 0.0) / 2  # of what was measured, on a machine that may be busier now
        chosen: list[str] = []
        for tests in (covering.certain, covering.possible):
            for test in sorted(tests, key=lambda test: (self._seconds.get(test, 0.0), test)):
                left -= self._seconds.get(test, 0.0)
                if chosen and left < 0:
                    break
                chosen.append(test)
        return [test for test in chosen if (self.tree / test.partition("::")[0]).exists()]

    def try_out(self, file: str, mutated: str, covering: Covering) -> Verdict:
        """Try the mutated text of this file."""
        chosen = self.choose(covering)
        began = time.monotonic()
        outcome, by = self._judge(file, mutated, chosen)
        number = len(covering.certain | covering.possible)
        return Verdict(outcome, by, len(chosen), number, round(time.monotonic() - began, 1))

    def _judge(self, file: str, mutated: str, tests: list[str]) -> tuple[str, str]:
        for _ in range(_MOST_UNRELIABLE + 1):
            if not tests:
                return NOT_COVERED, ""
            with self._mutated(file, mutated):
                ended = self._run(tests)
            if ended.status == _NO_TESTS:
                return NOT_COVERED, ""
            if ended.status == 0:
                return SURVIVED, ""
            # Where no test is named pytest itself has ended: one test shows whether it does so without the mutant.
            without = self._run(list(ended.failed) or (tests if ended.status is None else tests[:1]))
            if without.status == 0:
                return (TIMED_OUT if ended.status is None else KILLED), str(ended)
            if not without.failed:
                return SURVIVED, f"without the mutant too: {without}"
            tests = [test for test in tests if test not in without.failed]
        return SURVIVED, "too many tests fail without the mutant too"

    @contextlib.contextmanager
    def _mutated(self, file: str, text: str) -> Iterator[None]:
        path = self.tree / file
        before, status = path.read_bytes(), path.stat()
        path.write_text(text, encoding="utf-8")
        # Python takes compiled code for that of the file if its size and its second are the same.
        os.utime(path, (status.st_atime, time.time() + 10 + hash(text) % 100_000))
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
