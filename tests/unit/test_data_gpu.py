"""Batches on CUDA devices: where they arrive, and that copies which run ahead hand out the right numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.input_ranks import components, distribute, layout_in_process

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def devices() -> tuple[torch.device, ...]:
    return (torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1))


def test_components_are_on_their_replicas_devices() -> None:
    layout = layout_in_process(2, devices=devices())
    batches = [{"x": torch.arange(4), "sparse": torch.eye(4).to_sparse(), "name": ["a"] * 4}]
    [batch] = distribute(batches, layout)
    for name in ("x", "sparse"):
        assert [component.device for component in batch[name].values] == list(devices())
    assert components(batch["x"]) == [[0, 1], [2, 3]]
    assert batch["name"].values == (["a"] * 2,) * 2
    [batch] = distribute(batches, layout, fetch_to_device=False)
    assert [component.device.type for component in batch["x"].values] == ["cpu", "cpu"]


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_that_is_freed_early_is_not_overwritten_by_the_next_copy(workers: int) -> None:
    rows, width, steps = 8, 1 << 18, 24
    source: Any = list(torch.arange(rows * steps, dtype=torch.float32)[:, None].expand(-1, width))
    sums = []
    for batch in distribute(DataLoader(source, rows, num_workers=workers), layout_in_process(2, devices=devices())):
        for component in batch.values:
            busy = component
            for _ in range(20):  # keep the device behind the host, while the batch is dropped at once
                busy = busy + 0
            sums.append(busy.mean(dim=1))
        del batch, component, busy
    assert torch.cat([part.cpu() for part in sums]).tolist() == list(range(rows * steps))
