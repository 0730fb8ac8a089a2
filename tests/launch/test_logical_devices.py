"""The experiments for logical devices under torchrun: real processes, data and files, and plain PyTorch's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchstrat.experiments.metrics_file import read_metrics

for module in ("hydra", "sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(module)

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
DEADLINE_SECONDS = 240  # below that of the test, so that what the processes said is shown
STEPS = 4
SHORT = [
    "debug=steps",
    f"max_steps={STEPS}",
    f"snapshot_after_steps={STEPS}",
    "data.global_batch=60",
    "cluster.accelerator=cpu",
    "hydra.run.dir=run",
]
EXPERIMENTS = [
    "digits_transformer_tensor_parallel",
    # Their numbers are compared with plain training in tests/multiprocess too, without the application.
    pytest.param("digits_mlp_tensor_parallel", marks=pytest.mark.soak),
    pytest.param("digits_convnet_spatial", marks=pytest.mark.soak),
]


def trained(folder: Path, launcher: list[str], *overrides: str) -> tuple[Path, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "HYDRA_"))}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    folder.mkdir()
    finished = subprocess.run(
        [sys.executable, *launcher, str(TRAIN), *SHORT, *overrides],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    return folder / "run", finished.stderr


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_one_override_takes_an_experiment_to_processes(experiment: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    overrides = [f"experiment={experiment}", "strategy=mirrored"]
    cut, said = trained(tmp_path / "cut", torchrun, *overrides, "strategy.logical_devices=2", "curves=true")
    plain, _ = trained(tmp_path / "plain", [], *overrides, "strategy.replicas=1")
    first, second = (torch.load(run / f"parameters_after_step_{STEPS}.pt", weights_only=True) for run in (cut, plain))
    assert first.keys() == second.keys()
    for name, value in second.items():
        assert torch.allclose(first[name], value, rtol=1e-4, atol=2e-6), name
    (record,) = read_metrics(cut, "logical_devices")
    assert (record["replicas"], record["logical_devices"]) == (1, 2)
    assert record["sent_bytes_per_step"] > 0
    assert f"each sent {record['sent_bytes_per_step']:,} bytes per step" in said
    assert (cut / "sharding.png").exists()
