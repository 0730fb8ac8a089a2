"""Tensors that stand for a value which is elsewhere in pieces: how to get all of it, and how to give it another.

Checkpoints ask here; who cuts variables tells.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class WholeValue(NamedTuple):
    """``get`` and ``put`` may involve other processes, which then make the same calls."""

    get: Callable[[], torch.Tensor]
    put: Callable[[torch.Tensor], None]


_known: dict[int, tuple[weakref.ref[torch.Tensor], WholeValue]] = {}


def stands_for(tensor: torch.Tensor, value: WholeValue) -> None:
    """``tensor``, for as long as it lives. ``value`` must not keep it alive."""
    key = id(tensor)

    def forget(reference: Any) -> None:
        if key in _known and _known[key][0] is reference:
            del _known[key]

    _known[key] = weakref.ref(tensor, forget), value


def whole_value_of(tensor: torch.Tensor) -> WholeValue | None:
    """None for a tensor that has its value itself."""
    found = _known.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else None
