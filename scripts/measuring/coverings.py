"""Which tests run a line, as ``./scripts/coverage`` has seen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

from scripts.measuring.parts import ROOT, finished_parts

_OF_PROCESS = re.compile(r"(?P<started>.*) \((?:setup|call|teardown)\)(?:\|(?P<asked>.*))?", re.DOTALL)
"""What coverage keeps of a process that a test has started, and of what a test has asked it for."""


@dataclass(frozen=True)
class Covering:
    """Tests that run some lines."""

    certain: frozenset[str]
    possible: frozenset[str]
    """The others of a file of which a test has started a process that runs them: it may have been for all."""


class Coverings:
    """All parts that have finished, of ``into``."""

    def __init__(self, into: Path) -> None:
        parts = finished_parts(into)
        self.seconds: dict[str, float] = {}
        self.sources: dict[str, str] = {}
        for part in parts:
            assert part.summary is not None
            self.seconds |= part.seconds
            self.sources |= part.summary["sources"]
        self._data = [CoverageData(str(part.data)) for part in parts]
        for data in self._data:
            data.read()

    def of(self, file: str, lines: set[int]) -> Covering:
        certain: set[str] = set()
        files: set[str] = set()
        for data in self._data:
            for line, contexts in data.contexts_by_lineno(str(ROOT / file)).items():
                if line not in lines:
                    continue
                for context in contexts:
                    test, outlives = test_of(context)
                    certain.add(test)
                    files |= {test.partition("::")[0]} if outlives else set()
        possible = {test for test in self.seconds if test.partition("::")[0] in files}
        return Covering(frozenset(certain & self.seconds.keys()), frozenset(possible - certain))


def test_of(context: str) -> tuple[str, bool]:
    """The test, and whether it is only that one which started the process."""
    of_process = _OF_PROCESS.fullmatch(context)
    if of_process is None:
        return context, False
    return of_process["asked"] or of_process["started"], not of_process["asked"]
