"""What is trained: the same model, batch and optimizer for the floor and for everything compared with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """A plain MLP with ReLU and mean squared error, SGD with momentum, one thread per process."""

    widths: tuple[int, ...]
    replica_rows: int
    """Rows per replica and step; the global batch is this times the replicas."""
    steps: int
    """Timed steps of one measurement."""
    warm_up_steps: int

    def model(self) -> nn.Module:
        pairs = list(zip(self.widths, self.widths[1:], strict=False))
        layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    def replica_batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(replica_rows, first width)`` and targets ``(replica_rows, last width)``, allocated once."""
        generator = torch.Generator().manual_seed(seed)
        return (
            torch.randn(self.replica_rows, self.widths[0], generator=generator),
            torch.randn(self.replica_rows, self.widths[-1], generator=generator),
        )

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model().parameters())


WORKLOADS = {
    "mlp": Workload((784, 1024, 1024, 10), replica_rows=128, steps=100, warm_up_steps=20),
    "wide": Workload((1024, 4096, 4096, 1024), replica_rows=32, steps=20, warm_up_steps=4),
    "tiny": Workload((8, 8), replica_rows=8, steps=5000, warm_up_steps=500),
}
