"""Batches on CUDA devices: where they arrive, and that copies which run ahead hand out the right numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit.data_ranks import layout_in_process
from torchstrat import data
from torchstrat.data import InputOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def devices() -> tuple[torch.device, ...]:
    return (torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1))


def test_components_are_on_their_replicas_devices() -> None:
    layout = layout_in_process(2, devices=devices())
    batches = [{"x": torch.arange(4), "sparse": torch.eye(4).to_sparse(), "name": ["a"] * 4}]
    [batch] = data.distribute_dataset(None, layout, batches, None)  # type: ignore[arg-type]
    for name in ("x", "sparse"):
        assert [component.device for component in batch[name].values] == list(devices())
    assert [component.tolist() for component in batch["x"].values] == [[0, 1], [2, 3]]
    assert batch["name"].values == (["a"] * 2,) * 2
    [batch] = data.distribute_dataset(None, layout, batches, InputOptions(fetch_to_device=False))  # type: ignore[arg-type]
    assert [component.device.type for component in batch["x"].values] == ["cpu", "cpu"]


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_that_is_freed_early_is_not_overwritten_by_the_next_copy(workers: int) -> None:
    rows, width, steps = 8, 1 << 18, 24
    source = torch.arange(rows * steps, dtype=torch.float32)[:, None].expand(-1, width)
    layout = layout_in_process(2, devices=devices())
    loader = DataLoader(list(source), batch_size=rows, num_workers=workers)  # type: ignore[arg-type]
    sums = []
    for batch in data.distribute_dataset(None, layout, loader, None):  # type: ignore[arg-type]
        for component in batch.values:
            busy = component
            for _ in range(20):  # keep the device behind the host, while the batch is dropped at once
                busy = busy + 0
            sums.append(busy.mean(dim=1))
        del batch, component, busy
    assert torch.cat([part.cpu() for part in sums]).tolist() == list(range(rows * steps))
