"""What users do with models, done with ones that are cut: the numbers of one process, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dtensor import programs
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-5}


def test_programs_give_the_numbers_of_one_process(two_processes: Workers) -> None:
    names = [*programs.PROGRAMS]
    expected = programs.run_all(1, names)
    for found in two_processes.run(programs.run_all, 2, names, timeout_seconds=200):
        for name, (seen, state) in expected.items():
            same(found[name][0], seen, name)
            same([*found[name][1].values()], [*state.values()], name)


def same(found: list[Any], expected: list[Any], name: str) -> None:
    assert len(found) == len(expected), name
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            tolerance = TOLERANCES.get(other.dtype, 1e-9)
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")
        else:
            assert one == other, name
