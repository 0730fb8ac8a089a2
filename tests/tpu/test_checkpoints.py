"""Checkpoints between replicas of a TPU and everything else: what any saves, the other restores, bit for bit.

What others save, an earlier torchstrat has saved. What the TPU has saved is read back by the other layouts of it, and
by plain PyTorch objects; the table in tests/multiprocess has the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.kept_checkpoints import NEW_SEED, job_on_tpu, restored
from tests.multiprocess.checkpoint_jobs import DENSE, Job, make, restore, save, synchronous
from tests.support.checkpoints import same, stored
from tests.tpu.models import make_strategy

pytestmark = pytest.mark.tpu

LAYOUTS = {"4x1": (4, 1), "2x2": (2, 2)}


@pytest.fixture(scope="module", autouse=True)
def system() -> None:
    """Before any plain backward pass of this file."""
    ts.tpu.initialize_tpu_system(virtual_devices=8)


def on_tpu(layout: str, seed: int) -> Any:
    return synchronous(lambda: make_strategy(*LAYOUTS[layout]), seed, DENSE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("saved")
    for seed, (layout, begin) in enumerate({"4x1": None, "2x2": folder / "4x1"}.items()):
        with on_tpu(layout, seed) as job:
            save(job, folder / layout, range(3 + seed), begin=begin)
    return {layout: str(folder / layout) for layout in LAYOUTS}


def test_what_an_earlier_torchstrat_wrote_under_each_strategy_is_restored() -> None:
    with job_on_tpu(NEW_SEED) as job:
        assert restored(job) == {}


@pytest.mark.parametrize("restorer", [*LAYOUTS, "plain PyTorch"])
def test_it_restores_what_the_tpu_has_saved(restorer: str, saved: dict[str, str], tmp_path: Path) -> None:
    if restorer in LAYOUTS:
        with on_tpu(restorer, 99) as job:
            restore(job, saved, tmp_path)
    else:
        restore(Job(make(99), lambda steps: None), saved, tmp_path)
    contents = {kind: stored(Path(path)) for kind, path in saved.items()}
    one, other = (each["model.head.weight"] for each in contents.values())
    assert not torch.equal(one, other)
    for kind, expected in contents.items():
        found = stored(tmp_path / kind)
        assert found.keys() == expected.keys()
        assert [key for key in expected if not same(expected[key], found[key])] == []


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def draws(strategy: ts.Strategy) -> list[float]:
        return [one.cpu().item() for one in strategy.local_results(strategy.run(lambda: torch.rand(())))]

    def job(seed: int) -> tuple[ts.Strategy, ts.Checkpoint]:
        torch.manual_seed(seed)
        strategy = make_strategy(4, 1)
        with strategy.scope():
            model = torch.nn.Linear(2, 2)
        return strategy, ts.Checkpoint(model=model)

    before, checkpoint = job(7)
    draws(before)
    checkpoint.save(tmp_path / "saved")
    expected = [draws(before), draws(before)]
    before.close()
    after, checkpoint = job(8)
    checkpoint.restore(tmp_path / "saved")
    assert [draws(after), draws(after)] == expected
    after.close()
