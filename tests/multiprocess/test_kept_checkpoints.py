"""Checkpoints that an earlier torchstrat wrote under each strategy are restored under each strategy, bit for bit.

That of a TPU's devices restores them in tests/tpu.
"""

from __future__ import annotations

import pytest

from tests.kept_checkpoints import (
    IN_PROCESS,
    KINDS,
    NEW_SEED,
    PER_PROCESS,
    differences,
    expected,
    restored,
    restored_on_every_rank,
)
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess


def test_they_are_of_different_values() -> None:
    contents = [expected(kind) for kind in KINDS]
    for number, one in enumerate(contents):
        for other in contents[:number]:
            assert differences(one["model"], other["model"]) != []
            assert one["draws"] != other["draws"]


@pytest.mark.parametrize("kind", IN_PROCESS)
def test_this_process_restores_them(kind: str) -> None:
    with IN_PROCESS[kind](NEW_SEED) as job:
        assert restored(job) == {}


@pytest.mark.parametrize("kind", PER_PROCESS)
def test_several_processes_restore_them(kind: str, two_processes: Workers) -> None:
    assert two_processes.run(restored_on_every_rank, kind) == [{}, {}]
