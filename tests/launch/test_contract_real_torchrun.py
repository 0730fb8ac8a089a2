"""Every training case, one after the other in processes that the real torchrun started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchstrat.testing import contract
from torchstrat.testing.record import snapshots_path

pytestmark = pytest.mark.launch

PROCESSES = 2
ROOT = Path(__file__).parents[2]

ROWS = [
    # tests/multiprocess has every case under every row; what is new here is torchrun and one case after another.
    pytest.param(row, marks=[] if row == "mirrored" else pytest.mark.soak)
    for row in contract.TORCHRUN
]


@pytest.mark.deadline(300)
@pytest.mark.parametrize("row", ROWS)
def test_numbers_of_one_device(row: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    command = [*torchrun, "-m", "torchstrat.testing.record", row, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr

    ranks = [torch.load(snapshots_path(tmp_path, rank)) for rank in range(PROCESSES)]
    names = [name for name, case in contract.CASES.items() if not case.needs_compiler]
    assert [list(snapshots) for snapshots in ranks] == [names] * PROCESSES
    for name in names:
        case = contract.CASES[name]
        expected = contract.reference(case, PROCESSES)
        contract.check_agreement(case, [snapshots[name] for snapshots in ranks])
        for snapshots in ranks:
            contract.check(case, snapshots[name], expected)
