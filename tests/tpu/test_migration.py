"""MIGRATION.md's TPU program, as it stands there, on eight virtual devices."""

from __future__ import annotations

import pytest

from tests.migration import losses, program, run

pytestmark = pytest.mark.tpu


def test_the_program_trains(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = run(program("tpu"))["strategy"]
    assert (strategy.num_replicas_in_sync, strategy.num_logical_devices) == (4, 2)
    found = losses(capsys.readouterr().out)
    assert len(found) == 15
    assert found[-1] < found[0] * 0.95
