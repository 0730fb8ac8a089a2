"""The experiments for logical devices: real processes, data and files, and plain PyTorch's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.programs import checked, ranks, trained
from torchstrat.app.report import read_metrics

for module in ("hydra", "sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(module)

STEPS = 4
SHORT = [
    "debug=steps",
    f"max_steps={STEPS}",
    f"snapshot_after_steps={STEPS}",
    "data.global_batch=60",
    "cluster.accelerator=cpu",
]
EXPERIMENTS = [
    "digits_transformer_tensor_parallel",
    # Their numbers are compared with plain training in tests/multiprocess too, without the application.
    pytest.param("digits_mlp_tensor_parallel", marks=pytest.mark.soak),
    pytest.param("digits_convnet_spatial", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_one_override_takes_an_experiment_to_processes(experiment: str, tmp_path: Path) -> None:
    cut, plain = tmp_path / "cut", tmp_path / "plain"
    overrides = [f"experiment={experiment}", "strategy=mirrored", *SHORT]
    of_two = ["strategy.logical_devices=2", "curves=true", "hydra.run.dir=cut"]
    said = "".join(checked(rank).stderr for rank in ranks(tmp_path, *overrides, *of_two))
    trained(tmp_path, *overrides, "strategy.replicas=1", "hydra.run.dir=plain")
    first, second = (torch.load(run / f"parameters_after_step_{STEPS}.pt", weights_only=True) for run in (cut, plain))
    assert first.keys() == second.keys()
    for name, value in second.items():
        assert torch.allclose(first[name], value, rtol=1e-4, atol=2e-6), name
    (record,) = read_metrics(cut, "logical_devices")
    assert (record["replicas"], record["logical_devices"]) == (1, 2)
    assert record["sent_bytes_per_step"] > 0
    assert f"each sent {record['sent_bytes_per_step']:,} bytes per step" in said
    assert (cut / "sharding.png").exists()
