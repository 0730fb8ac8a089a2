"""Checkpoints that an earlier torchstrat wrote under each strategy are restored on a TPU's devices, bit for bit."""

from __future__ import annotations

import pytest

from tests.kept_checkpoints import NEW_SEED, job_on_tpu, restored

pytestmark = pytest.mark.tpu


def test_a_tpu_restores_them() -> None:
    with job_on_tpu(NEW_SEED) as job:
        assert restored(job) == {}
