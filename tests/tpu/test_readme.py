"""The example for TPUs of the documents, as a reader would save it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tpu

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_trains_and_explains(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tutorials" / "tpu.md").read_text(encoding="utf-8")
    (example,) = re.findall(r":caption: train_tpu.py\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "train.py"
    file.write_text(example, encoding="utf-8")
    finished = subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    losses = [float(loss) for loss in re.findall(r"^epoch \d: ([\d.]+)$", finished.stdout, re.MULTILINE)]
    assert len(losses) == 2
    assert "(d0, –)" in finished.stdout
    assert "each device holds 1.1 KiB of 2.3 KiB (50%)" in finished.stdout
    assert [int(run) for run in re.findall(r"^run (\d+): ", finished.stdout, re.MULTILINE)] == [0, 1, 3]
