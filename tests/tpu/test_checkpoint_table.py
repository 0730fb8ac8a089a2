"""Checkpoints between replicas of a TPU and everything else: what any saves, the other restores, bit for bit.

What others save is made by a process of one device, since this one belongs to the TPU. What the TPU has saved is read
back by the other layouts of it, and by plain PyTorch objects; the table in tests/multiprocess has the rest.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrat as ts
from tests.multiprocess.checkpoint_jobs import DENSE, Job, make, restore, save, synchronous
from tests.tpu.models import make_strategy
from tests.unit.checkpoints import same, stored

pytestmark = pytest.mark.tpu

LAYOUTS = {"4x1": (4, 1), "2x2": (2, 2)}

_ONE_DEVICE = """
import sys
from pathlib import Path
from tests.multiprocess.checkpoint_jobs import IN_PROCESS, save
with IN_PROCESS["one_device"](1) as job:
    save(job, Path(sys.argv[1]), range(4))
"""


@pytest.fixture(scope="module", autouse=True)
def system() -> None:
    """Before any plain backward pass of this file."""
    ts.tpu.initialize_tpu_system(virtual_devices=8)


def on_tpu(layout: str, seed: int) -> Any:
    return synchronous(lambda: make_strategy(*LAYOUTS[layout]), seed, DENSE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("saved")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", _ONE_DEVICE, str(folder / "one_device")]
    ran = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    for seed, layout in enumerate(LAYOUTS):
        with on_tpu(layout, seed) as job:
            save(job, folder / layout, range(3 + seed), begin=folder / "one_device")
    return {kind: str(folder / kind) for kind in ("one_device", *LAYOUTS)}


@pytest.fixture(params=[*LAYOUTS, "plain PyTorch"])
def restorer(request: pytest.FixtureRequest) -> Iterator[Job]:
    if request.param == "plain PyTorch":
        yield Job(make(99), lambda steps: None)
        return
    with on_tpu(request.param, 99) as job:
        yield job


def test_it_restores_what_all_have_saved(restorer: Job, saved: dict[str, str], tmp_path: Path) -> None:
    restore(restorer, saved, tmp_path)
    contents = {kind: stored(Path(path)) for kind, path in saved.items()}
    heads = [one["model.head.weight"] for one in contents.values()]
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(heads))
    wrong = []
    for kind, expected in contents.items():
        found = stored(tmp_path / kind)
        assert found.keys() == expected.keys()
        wrong += [(kind, key) for key in expected if not same(expected[key], found[key])]
    assert wrong == []


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
