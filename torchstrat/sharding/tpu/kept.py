"""Tensors of a step that somebody has kept: there is no value behind them, and they say what to do."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torchstrat.core._torch_private import DisableTorchFunctionSubclass
from torchstrat.core.errors import UnsupportedError
from torchstrat.sharding.tpu import _functorch_private as functorch

_TENSOR: Any = torch.Tensor
_FACTS = frozenset(
    getattr(_TENSOR, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_leaf", "requires_grad", "is_sparse", "is_meta")
)


class KeptTensor(torch.Tensor):
    """What a tensor that differs between replicas becomes when its run is over.

    It was one for all replicas, when there were no values; what the step returns is what has them.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            if func in _FACTS or functorch.interpreters():  # in a later run it has the values of its own
                return func(*args, **(kwargs or {}))
            kept = next((one for one in args if isinstance(one, cls)), None)
            shape = "" if kept is None else f" of shape {tuple(kept.shape)}"
        if func in (_TENSOR.__repr__, _TENSOR.__format__):
            return f"<a tensor{shape} of a run that is over>"
        raise UnsupportedError(
            f"a tensor{shape} was used outside of the run that it belongs to: a step has kept it (in a list, or "
            "as an attribute), or torch.utils.checkpoint computes again with it. On this strategy it stands for all "
            "replicas, and has no value. Return it from the step: run then has it for each replica."
        )


class Notes:
    """The tensors of one run that differ between replicas."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []

    def add(self, result: Any) -> None:
        """What an operation gave, which may be no such tensor at all."""
        if isinstance(result, torch.Tensor):
            self._known.append(weakref.ref(result))
        elif isinstance(result, list | tuple):
            for one in result:
                self.add(one)

    def close(self, is_lane_tensor: Any) -> None:
        """The run is over: who still has one learns so."""
        for reference in self._known:
            tensor = reference()
            if tensor is not None and type(tensor) is torch.Tensor and is_lane_tensor(tensor):
                tensor.__class__ = KeptTensor
        self._known = []


__all__ = ["KeptTensor", "Notes"]
