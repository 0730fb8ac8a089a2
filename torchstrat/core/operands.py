"""What an operator of PyTorch was called with."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in positional or keyword arguments, as deep as operators take them: in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
