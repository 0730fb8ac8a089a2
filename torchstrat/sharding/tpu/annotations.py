"""The annotations that cut tensors over a replica's logical devices, forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from torchstrat.sharding.grid import DeviceGrid, Sharding
from torchstrat.sharding.layout import ShardedEntry
from torchstrat.sharding.logical_devices import Assignments
from torchstrat.sharding.tpu.lanes import Lanes
from torchstrat.sharding.tpu.spmd import SpmdRuntime
from torchstrat.sharding.tpu.variables import DeviceVariables


class _Cut(torch.autograd.Function):
    """A copy that is cut, and whose gradient is cut the same way.

    A copy, because a tensor that is cut already cannot be cut otherwise, and chains of annotations may."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, annotate: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.annotate = annotate
        # Not clone(): of an input of the program that is the input itself, which has been cut already.
        cut = torch.cat([tensor.unsqueeze(0)]).squeeze(0)
        annotate(cut)
        return cut

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Cut.apply(gradient, ctx.annotate), None  # type: ignore[no-untyped-call]


class Annotations:
    """What was said about tensors of one strategy."""

    def __init__(self, runtime: SpmdRuntime, grid: DeviceGrid, variables: DeviceVariables) -> None:
        self._runtime, self._grid, self._variables = runtime, grid, variables
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], ShardedEntry]] = {}
        self.assignments = Assignments(
            "a compiled program runs on all logical devices at once and cannot keep a tensor to one of them"
        )

    def cut(self, tensor: torch.Tensor, sharding: Sharding, lanes: Lanes | None) -> torch.Tensor:
        """``tensor`` cut like ``sharding``. ``lanes``: of the pass that is recorded, if one is."""
        if lanes is not None and lanes.is_lane_tensor(tensor):
            with lanes.left("a logical device annotation"):
                stacked = self._cut(lanes.stacked(tensor), sharding.stacked())
            cut = lanes.hide(stacked)
            self._remember(cut, ShardedEntry(tuple(stacked.shape), sharding.stacked(), cut.dtype))
            return cut
        if self._variables.is_variable(tensor):
            self._variables.shard(tensor, sharding)
            return tensor
        if tensor.device != self._runtime.device:
            tensor = tensor.to(self._runtime.device)
        with nullcontext() if lanes is None else lanes.left("a logical device annotation"):
            cut = self._cut(tensor, sharding)
        self._remember(cut, ShardedEntry(tuple(cut.shape), sharding, cut.dtype))
        return cut

    def _cut(self, tensor: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        def annotate(one: torch.Tensor) -> None:
            self._runtime.annotate(one, sharding, self._grid)

        cut: torch.Tensor = _Cut.apply(tensor, annotate)  # type: ignore[no-untyped-call]
        return cut

    def _remember(self, tensor: torch.Tensor, entry: ShardedEntry) -> None:
        key, entries = id(tensor), self._entries
        entries[key] = weakref.ref(tensor, lambda _: entries.pop(key, None)), entry

    def entry_of(self, tensor: torch.Tensor) -> ShardedEntry | None:
        """How a variable or an annotated tensor is cut; None for a tensor about which nothing was said."""
        if self._variables.is_variable(tensor):
            return ShardedEntry(tuple(tensor.shape), self._variables.planned(tensor), tensor.dtype)
        found = self._entries.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]
