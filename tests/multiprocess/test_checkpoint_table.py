"""Any strategy restores, bit for bit, what any other has saved: on any number of servers, replicas and processes.

Each one saves once, after training of its own. Each one restores all of these, and saves what it then has: that is to
be the same as what it was given, whole tensors and values by their names, and different before.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import kept_checkpoints as kept
from tests.multiprocess.checkpoint_jobs import (
    IN_PROCESS,
    PER_PROCESS,
    restore,
    restore_on_every_rank,
    save,
    save_on_every_rank,
)
from tests.support.checkpoints import same, stored
from torchstrat.testing import Workers

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore:attribute .seen. of a Kept"),  # the coordinator alone keeps and saves it
]


@pytest.fixture(scope="module")
def saved(two_processes: Workers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where each strategy has saved what it trained."""
    folder = tmp_path_factory.mktemp("saved")
    paths = {kind: folder / kind for kind in (*IN_PROCESS, *PER_PROCESS)}
    for seed, kind in enumerate(paths):
        if kind in PER_PROCESS:
            two_processes.run(save_on_every_rank, kind, str(paths[kind]), seed)
            continue
        with IN_PROCESS[kind](seed) as job:
            begin = paths["one_device"] if kind.startswith("tpu") else None
            save(job, paths[kind], range(4 + seed % 2), begin)
    return {kind: str(path) for kind, path in paths.items()}


@pytest.fixture(scope="module")
def contents(saved: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {kind: stored(Path(path)) for kind, path in saved.items()}


def test_what_is_saved(contents: dict[str, dict[str, Any]]) -> None:
    """The same names, whoever saved, and other values; state of optimizers that is not that of the beginning."""
    expected = contents["one_device"].keys()
    assert {
        "model.table.weight",
        "adam.state.head.weight.exp_avg",
        "adam.state.norm.bias.exp_avg_sq",
        "rows.state.table.weight.exp_avg_sq",
        "model.norm.running_var",
        "scheduler.last_epoch",
        "count",
    } <= expected
    for seed, (kind, found) in enumerate(contents.items()):
        assert found.keys() == expected, kind
        if not kind.startswith("tpu"):  # which begin with another's
            steps = 4 if kind in PER_PROCESS else 4 + seed % 2
            replicas = 2 if kind.startswith(("mirrored", "central")) else 1
            assert found["count"] == seed + steps * replicas, kind
        moments = found["rows.state.table.weight.exp_avg"]
        touched = moments.abs().sum(1) > 0
        assert touched.any(), kind
        assert not touched.all(), kind
        assert found["adam.state.head.weight.exp_avg_sq"].abs().sum() > 0
    for one, other in itertools.combinations(contents.values(), 2):
        assert not torch.equal(one["model.head.weight"], other["model.head.weight"])


@pytest.mark.parametrize("restorer", [*IN_PROCESS, *PER_PROCESS])
def test_it_restores_what_all_have_saved(
    restorer: str,
    saved: dict[str, str],
    contents: dict[str, dict[str, Any]],
    two_processes: Workers,
    tmp_path: Path,
) -> None:
    if restorer in IN_PROCESS:
        with IN_PROCESS[restorer](99) as job:
            restore(job, saved, tmp_path)
    else:
        two_processes.run(restore_on_every_rank, restorer, saved, str(tmp_path))
    found = {saver: stored(tmp_path / saver) for saver in saved}
    assert all(found[saver].keys() == contents[saver].keys() for saver in saved)
    wrong = [(saver, key) for saver, one in contents.items() for key in one if not same(one[key], found[saver][key])]
    assert wrong == []


def test_kept_ones_are_of_different_values() -> None:
    for one, other in itertools.combinations(map(kept.expected, kept.KINDS), 2):
        assert kept.differences(one["model"], other["model"]) != []
        assert one["draws"] != other["draws"]


@pytest.mark.parametrize("kind", kept.IN_PROCESS)
def test_this_process_restores_kept_ones(kind: str) -> None:
    with kept.IN_PROCESS[kind](kept.NEW_SEED) as job:
        assert kept.restored(job) == {}


@pytest.mark.parametrize("kind", kept.PER_PROCESS)
def test_several_processes_restore_kept_ones(kind: str, two_processes: Workers) -> None:
    assert two_processes.run(kept.restored_on_every_rank, kind) == [{}, {}]
