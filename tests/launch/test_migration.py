"""MIGRATION.md's parameter-server program, as it stands there, with real servers and workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.migration import losses, program

ROOT = Path(__file__).resolve().parents[2]


def test_the_parameter_server_program_trains(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(program("ps"), encoding="utf-8")
    finished = subprocess.run(
        [sys.executable, "-m", "torchstrat.launch", "--ps", "2", "--workers", "2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = losses(finished.stdout)
    assert len(found) == 4, finished.stdout
    assert found[-1] < found[0] / 2
