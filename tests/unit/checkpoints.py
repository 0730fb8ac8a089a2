"""For tests of checkpoints: all that objects hold, compared bit for bit, and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def contents(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: value.state_dict() for name, value in objects.items()}


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def flip(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def stored(path: Path) -> dict[str, Any]:
    """All that a checkpoint has of its objects, by key."""
    from torchstrat.checkpoint.pieces import Piece
    from torchstrat.checkpoint.stored import open_checkpoint

    found = open_checkpoint(path)
    keys = sorted(key for key, where in found.paths.items() if where[0] != "torchstrat")
    return dict(zip(keys, found.read([(Piece(found.paths[key], ()), None) for key in keys]), strict=True))
