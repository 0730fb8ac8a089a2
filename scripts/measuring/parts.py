"""Tests run under coverage, a part at a time: a part that has finished is not run again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coverage import Coverage

from scripts.measuring.orphans import adopting_orphans, children, wait_for_new

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torchstrat"

_LAST_SECONDS = 60.0

CONFIGURATION = """\
[run]
branch = True
parallel = True
data_file = {data}
include = {package}/*
# Of processes that a test starts; pytest sets the variable.
context = ${{PYTEST_CURRENT_TEST-}}
# Forks, and processes that leave without Python's exit, are measured too. Those that are started are by themselves: the
# file that coverage has among the site packages looks at COVERAGE_PROCESS_START.
patch = _exit, fork
# Tests take a warning for an error, and read what programs print.
disable_warnings = no-data-collected, trace-changed, already-imported, module-not-imported, module-not-measured
"""


@dataclass(frozen=True)
class Part:
    """Some tests. ``folder`` is what came of them: measured data, seconds and a summary."""

    arguments: tuple[str, ...]
    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def summary(self) -> dict[str, Any] | None:
        """Of a part that has finished."""
        file = self.folder / "summary.json"
        return json.loads(file.read_text()) if file.exists() else None

    @property
    def seconds(self) -> dict[str, float]:
        """Of each test, under coverage."""
        seconds: dict[str, float] = json.loads((self.folder / "seconds.json").read_text())
        return seconds

    def run(self) -> int:
        """Run the tests and combine what their processes have measured; pytest's exit status."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        configuration = self.folder / "coveragerc"
        configuration.write_text(CONFIGURATION.format(data=self.folder / "raw" / "data", package=PACKAGE))
        (self.folder / "raw").mkdir()
        sources = hashes()
        began = time.perf_counter()
        status = self._pytest(configuration)
        tested = time.perf_counter()
        processes = self._combine()
        summary = {
            "arguments": self.arguments,
            "status": status,
            "processes": processes,
            "seconds": round(tested - began, 1),
            "seconds_to_combine": round(time.perf_counter() - tested, 1),
            "python": sys.version.split()[0],
            "sources": sources,
        }
        if status in (0, 1):  # else it was interrupted, or there was nothing to run
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=1))
        return status

    def _pytest(self, configuration: Path) -> int:
        environment = os.environ | {
            "COVERAGE_PROCESS_START": str(configuration),
            "COVERAGE_CORE": "ctrace",  # the core that newer Pythons take by themselves has no contexts
        }
        plugin = ["-p", "scripts.measuring.contexts", f"--seconds-of-tests={self.folder / 'seconds.json'}"]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, *self.arguments]
        earlier = children()
        with adopting_orphans():
            status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            wait_for_new(earlier, _LAST_SECONDS)  # fork servers end, and write, after who started them
        return status

    def _combine(self) -> int:
        """How many processes there were."""
        raw = [file for file in sorted((self.folder / "raw").iterdir()) if not file.name.endswith("-journal")]
        if raw:
            combined = Coverage(data_file=self.data, config_file=False)
            combined.combine([str(file) for file in raw])
            combined.save()
        shutil.rmtree(self.folder / "raw")
        return len(raw)


def folders_of_tests() -> list[str]:
    """Each is a part. Those of TPUStrategy need an environment of their own: ``./scripts/coverage`` adds them."""
    folders = [f for f in sorted((ROOT / "tests").iterdir()) if f.name != "tpu" and any(f.rglob("test_*.py"))]
    return [f"tests/{folder.name}" for folder in folders]


def part_of(arguments: list[str], into: Path) -> Part:
    """A part has the name of its arguments."""
    name = re.sub(r"[^\w.-]+", "-", " ".join(arguments)).strip("-")
    if len(name) > 60:
        name = f"{name[:50]}-{hashlib.sha256(repr(arguments).encode()).hexdigest()[:8]}"
    return Part(tuple(arguments), into / "parts" / name)


def finished_parts(into: Path) -> list[Part]:
    folders = sorted((into / "parts").iterdir()) if (into / "parts").exists() else []
    parts = [Part((), folder) for folder in folders]
    return [part for part in parts if part.summary is not None]


def hashes(root: Path = ROOT) -> dict[str, str]:
    """Of the package's files: what lines were measured of."""
    files = sorted((root / "torchstrat").rglob("*.py"))
    return {file.relative_to(root).as_posix(): hash_of(file.read_bytes()) for file in files}


def hash_of(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]
