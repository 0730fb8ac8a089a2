"""Runs chosen tests in a copy of the tree, for a limited time, and ends what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.measuring.orphans import adopting_orphans, children, end
from scripts.measuring.parts import ROOT

_NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "outputs", "multirun", "__pycache__", ".*_cache")


@dataclass(frozen=True)
class Ended:
    """How pytest ended."""

    status: int | None
    """None: it took too long."""
    failed: tuple[str, ...] = ()
    """Tests: one, unless it failed in its tear-down too."""

    def __str__(self) -> str:
        if self.status is None:
            return "pytest takes too long"
        if self.status < 0:
            return f"pytest died of signal {-self.status}"
        return ", ".join(self.failed) or f"pytest ended with status {self.status}"


@contextlib.contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """For as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        shutil.copytree(root, Path(folder, "tree"), ignore=_NOT_COPIED)
        yield Path(folder, "tree")


class PytestRun:
    """Of the tests in ``tree``. ``limit_seconds``: start-up included."""

    def __init__(self, tree: Path, limit_seconds: float) -> None:
        self._tree, self._limit = tree, limit_seconds

    def __call__(self, tests: list[str]) -> Ended:
        """Run them in this order, until one fails."""
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            chosen, failed = Path(folder, "chosen.json"), Path(folder, "failed.txt")
            chosen.write_text(json.dumps(tests))
            failed.write_text("")
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "scripts.measuring.chosen"]
            status = self._run([*options, f"--chosen={chosen}", f"--failed={failed}", *files])
            return Ended(status, tuple(dict.fromkeys(failed.read_text().splitlines())))

    def _run(self, arguments: list[str]) -> int | None:
        earlier = children()
        with adopting_orphans():
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *arguments],
                cwd=self._tree,
                env=os.environ | {"PYTHONPATH": f"{self._tree}{os.pathsep}{ROOT}"},
                start_new_session=True,  # so that all of it can be ended
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                return process.wait(self._limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                while left := children() - earlier:
                    end(left)
