"""The benchmark of what the coordinator costs per function: a row per number of workers, for each queue."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "ps_scheduling.py"


@pytest.mark.soak  # a benchmark, started like the others
def test_a_small_run_prints_both_tables() -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--small", "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    tables = re.findall(
        r"^(deep queue|two functions per worker)\nworkers .*\n((?:\d+ .*\n)+)largest", ended.stdout, re.MULTILINE
    )
    assert [name for name, _ in tables] == ["deep queue", "two functions per worker"], ended.stdout + ended.stderr
    for _, rows in tables:
        workers, cpu = zip(*(row.split()[:2] for row in rows.splitlines()), strict=True)
        assert workers == ("2", "4", "8", "16", "32", "64")
        assert all(float(figure) > 0 for figure in cpu)
    limits = re.findall(r"over smallest: ([\d.]+) \(limit 1.2\)", ended.stdout)
    assert ended.returncode == int(max(map(float, limits)) > 1.2)
