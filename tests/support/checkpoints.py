"""For tests of checkpoints: objects to save, all that they hold bit for bit, and damage."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import torchstrat as ts
from torchstrat.partitioners import row_offsets

torch_alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
"""What torch.distributed.checkpoint says when it is used in one process; the second of itself, in torch 2.9."""

# -- objects ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.norm(self.table(ids)))
        return output


class Held:
    """Something of a user's own, with state of every kind."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state = {} if state is None else state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def job(seed: int = 0, rows: int = 6) -> dict[str, Any]:
    """A model, its optimizer of three groups, and a scheduler."""
    torch.manual_seed(seed)
    model = Net(rows)
    groups = [{"params": model.table.parameters(), "lr": 0.3}, {"params": [*model.norm.parameters()]}]
    optimizer = torch.optim.Adam(groups, lr=0.1 * (seed + 1))
    optimizer.add_param_group({"params": model.head.parameters(), "weight_decay": 0.1})
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def train(objects: dict[str, Any], steps: range) -> None:
    for step in steps:
        objects["optimizer"].zero_grad()
        objects["model"](torch.tensor([step % 6, 1, 2])).square().sum().backward()
        objects["optimizer"].step()
        objects["scheduler"].step()


def saved_job(path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of a job and a metric, and the job."""
    objects = job(0)
    train(objects, range(3))
    ts.Checkpoint(**objects, metric=torch.tensor([1.0, 2.0])).save(path)
    return path, objects


def sharded(rows: int, shards: int, start: float = 0.0) -> ts.ShardedVariable:
    """``(rows, 2)``: all numbers from ``start`` on."""
    whole = torch.arange(start, start + 2.0 * rows).reshape(rows, 2)
    return ts.ShardedVariable([nn.Parameter(whole[a:b].clone()) for a, b in row_offsets(rows, shards)])


# -- contents ---------------------------------------------------------------------------------------------------------


def contents(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: value.state_dict() for name, value in objects.items()}


def restored(path: Path) -> dict[str, Any]:
    """What a new job has after a restore."""
    objects = job(7)
    ts.Checkpoint(**objects).restore(path)
    return contents(objects)


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def stored(path: Path) -> dict[str, Any]:
    """All that a checkpoint has of its objects, by key, as PyTorch alone reads it."""
    described = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        key: torch.empty(one.size, dtype=one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
        for key, one in sorted(described.items())
        if not key.startswith("torchstrat.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


# -- damage -----------------------------------------------------------------------------------------------------------


def data_file(checkpoint: Path) -> Path:
    """The file with the tensors, of one that a single process wrote."""
    [file] = checkpoint.glob("*.distcp")
    return file


def flip(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
