"""Every training case, one after the other in processes that the real torchrun started."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.programs import TORCHRUN, succeed
from torchstrat.testing import contract
from torchstrat.testing.record import snapshots_path

PROCESSES = 2


# tests/multiprocess has every case under every row, and test_train.py a real torchrun; new is one case after another.
@pytest.mark.soak
@pytest.mark.deadline(300)
@pytest.mark.parametrize("row", contract.TORCHRUN)
def test_numbers_of_one_device(row: str, tmp_path: Path) -> None:
    succeed(*TORCHRUN, f"--nproc-per-node={PROCESSES}", "-m", "torchstrat.testing.record", row, tmp_path)
    ranks = [torch.load(snapshots_path(tmp_path, rank)) for rank in range(PROCESSES)]
    names = [name for name, case in contract.CASES.items() if not case.needs_compiler]
    assert [list(snapshots) for snapshots in ranks] == [names] * PROCESSES
    for name in names:
        case = contract.CASES[name]
        expected = contract.reference(case, PROCESSES)
        contract.check_agreement(case, [snapshots[name] for snapshots in ranks])
        for snapshots in ranks:
            contract.check(case, snapshots[name], expected)
