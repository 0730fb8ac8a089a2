"""Bringing batches to the devices: each replica's part to its own, in the background while a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torchstrat.core import nest
from torchstrat.data import rows
from torchstrat.data.streams import Step
from torchstrat.sharding.grid import REPLICA_AXIS, DeviceGrid, Sharding
from torchstrat.sharding.tpu.lane_values import Placed
from torchstrat.sharding.tpu.spmd import SpmdRuntime

MAXIMAL_RANK = 5
"""Of tensors that torch_xla's annotations take."""


class Feeder:
    """Makes tensors of the devices from tensors of the host."""

    def __init__(self, runtime: SpmdRuntime, grid: DeviceGrid) -> None:
        self._runtime, self._grid = runtime, grid
        self._cuts: dict[tuple[torch.Size, torch.dtype], Sharding] = {}  # by the shape of a row
        self._fed: Any = WeakTensorKeyDictionary()

    def remember_cut(self, stacked: torch.Tensor, sharding: Sharding) -> None:
        """A step has cut one of its inputs: from now on inputs of that shape come cut to the devices, however many rows
        they have. (Were the number of rows to matter, every partial batch would be compiled twice.)"""
        self._cuts[stacked.shape[2:], stacked.dtype] = sharding

    def _cut_of(self, shape: torch.Size, dtype: torch.dtype) -> Sharding | None:
        found = self._cuts.get((shape[2:], dtype))
        if found is None or found.rank != len(shape):
            return None
        parts = found.parts(self._grid.num_replicas)
        return found if all(size % count == 0 for size, count in zip(shape, parts, strict=True)) else None

    def recut(self, stacked: torch.Tensor) -> torch.Tensor:
        """An input that was on its way before its shape's cut was known, cut like the later ones."""
        wanted = self._cut_of(stacked.shape, stacked.dtype)
        if wanted is not None and self._fed.get(stacked, wanted) != wanted:
            self._runtime.annotate(stacked, wanted, self._grid)
            self._fed[stacked] = wanted
        return stacked

    @property
    def lanes(self) -> int:
        return self._grid.num_replicas

    def replicated(self, rank: int) -> Sharding:
        """Whole on every logical device."""
        return Sharding.replicated(rank, self._grid.num_logical_devices)

    def stack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Equal parts, one for each lane, as one tensor ``[lanes, …]`` that is cut over the replicas."""
        shape = parts[0].shape
        if len(shape) >= MAXIMAL_RANK:  # of what can be cut
            flat = self.stack([part.reshape(shape[0], -1) for part in parts])
            return flat.reshape(len(parts), *shape)
        whole = torch.Size((len(parts), *shape))
        sharding = self._cut_of(whole, parts[0].dtype) or self.replicated(len(shape)).stacked()
        if all(part.device.type == "cpu" for part in parts):
            stacked = self._runtime.place([part.detach() for part in parts], sharding, self._grid)
        else:
            stacked = torch.stack([part.to(self._runtime.device) for part in parts])
            self._runtime.annotate(stacked, sharding, self._grid)
        self._fed[stacked] = sharding
        return stacked

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor for all replicas, whole on every device."""
        if tensor.device == self._runtime.device:
            return tensor
        shared = tensor.to(self._runtime.device)
        self._runtime.annotate(shared, self.replicated(shared.ndim), self._grid)
        return shared

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        """A global batch of the host, its rows cut over the replicas where they divide."""
        return self._by_rows(batch.to(self._runtime.device))

    def flatten(self, stacked: torch.Tensor) -> torch.Tensor:
        """``[replicas, rows, …]`` as the global batch ``[replicas × rows, …]``, cut the same way."""
        return self._by_rows(stacked.flatten(0, 1))

    def _by_rows(self, batch: torch.Tensor) -> torch.Tensor:
        cut = self.replicated(batch.ndim)
        if batch.shape[0] % self.lanes == 0:
            cut = Sharding(cut.axis_sizes, ((REPLICA_AXIS,), *cut.spec[1:]))
        self._runtime.annotate(batch, cut, self._grid)
        return batch


class LanePlacement:
    """What an input pipeline does with a step's batches before they are asked for. See `torchstrat.data.prefetch`."""

    copies = True

    def __init__(self, feeder: Feeder) -> None:
        self._feeder = feeder

    def place(self, step: Step) -> tuple[Step, tuple[Any, ...]]:
        """Start the copies, where all replicas have as many rows; uneven batches are taken apart when they are run."""
        structures = [nest.flatten(component) for component in step.components]
        columns = list(zip(*structures, strict=True))
        if not all(map(_is_even, columns)) or any(count == 0 for count in step.rows):
            return step, ()
        placed: list[list[Any]] = [[] for _ in step.components]
        for column in columns:
            for own, leaf in zip(placed, self._placed(column), strict=True):
                own.append(leaf)
        components = tuple(nest.unflatten(like, own) for like, own in zip(step.components, placed, strict=True))
        return Step(components, step.rows, step.checksum), ()

    def _placed(self, column: Sequence[Any]) -> list[Any]:
        if not isinstance(column[0], torch.Tensor):
            return list(column)
        spare = [column[0]] * (self._feeder.lanes - len(column))
        stacked = self._feeder.stack([*column, *spare])
        return [Placed(stacked, replica) for replica in range(len(column))]

    def receive(self, placed: tuple[Step, tuple[Any, ...]]) -> Step:
        """In the thread that uses the batches: the runtime orders copies before their use by itself."""
        return placed[0]


def _is_even(column: Sequence[Any]) -> bool:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        return not rows.is_array(first)
    return first.layout == torch.strided and all(
        isinstance(one, torch.Tensor) and one.shape == first.shape and one.dtype == first.dtype for one in column
    )
