"""The README's example, as a reader would save it: the same file under ``python`` and under ``torchrun``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHES = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def save(number: int, file: Path) -> Path:
    """The README's Python block with that number, as a file."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    file.write_text(blocks[number], encoding="utf-8")
    return file


@pytest.fixture
def example(tmp_path):
    return save(0, tmp_path / "train.py")


def test_the_parameter_server_example_trains(tmp_path):
    finished = subprocess.run(
        [sys.executable, "-m", "torchstrat.launch", "--ps", "2", "--workers", "2", str(save(1, tmp_path / "train.py"))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    printed = re.findall(r"^loss ([\d.]+)", finished.stdout, re.MULTILINE)
    assert len(printed) == 1, finished.stdout
    assert float(printed[0]) < 10.0  # 13 for a model that always says 0


@pytest.mark.parametrize(("launch", "replicas"), [("python", 1), ("torchrun", 2)])
def test_the_example_trains(example, launch, replicas):
    finished = subprocess.run(
        [*LAUNCHES[launch], str(example)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    printed = re.findall(r"(\d+) replicas, loss ([\d.]+)", finished.stdout)
    assert [int(number) for number, _ in printed] == [replicas], finished.stdout  # one process speaks for all
    assert float(printed[0][1]) < 2.0  # it starts at about 8
