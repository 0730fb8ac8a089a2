"""From what `run` was given to what the lanes of each pass see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchstrat.core import nest
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.values import DistributedValues, PerReplica
from torchstrat.sharding.tpu.feeding import Feeder
from torchstrat.sharding.tpu.lane_values import LaneValues


@dataclass(frozen=True)
class Stacked:
    """A leaf that differs from lane to lane."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Pass:
    """Replicas whose inputs have the same shapes, and these inputs: leaves `Stacked`, or what all replicas share."""

    replicas: tuple[int, ...]
    args: list[Any]
    kwargs: dict[str, Any]


class Inputs:
    """The arguments of one run.

    Args:
        active: the replicas that have something to do.
        feeder: brings them to the devices. Lane ``i`` is replica ``i``'s.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        active: Sequence[int],
        feeder: Feeder,
    ) -> None:
        self._nest = (list(args), kwargs)
        self._active, self._feeder = list(active), feeder
        self._lanes = feeder.lanes

    def passes(self) -> list[Pass]:
        """One pass, or one for each set of replicas whose batches have other shapes than the rest's."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        columns = [self._column(leaf) for leaf in nest.leaves(self._nest) if isinstance(leaf, DistributedValues)]
        for place, replica in enumerate(self._active):
            shapes = tuple(None if column is None else _shape_of(column[place]) for column in columns)
            groups.setdefault(shapes, []).append(replica)
        return [self._pass(tuple(replicas)) for replicas in groups.values()]

    def _column(self, leaf: DistributedValues[Any]) -> list[Any] | None:
        """The active replicas' components; None for one tensor, whose components have one shape."""
        if isinstance(leaf, LaneValues) and leaf.stacked.shape[0] == self._lanes:
            return None
        return [leaf.component(replica) for replica in self._active]

    def _pass(self, replicas: tuple[int, ...]) -> Pass:
        args, kwargs = nest.map_structure(lambda leaf: self._leaf(leaf, replicas), self._nest)
        return Pass(replicas, args, kwargs)

    def _leaf(self, leaf: Any, replicas: tuple[int, ...]) -> Any:
        if not isinstance(leaf, DistributedValues):
            return self._feeder.share(leaf) if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(leaf, LaneValues) and leaf.stacked.shape[0] == self._lanes:
            return Stacked(self._feeder.recut(leaf.stacked))
        parts = [leaf.component(replica) for replica in replicas]
        if any(
            nest.is_nested(part) for part in parts
        ):  # lists of each replica's own examples, as many and of one shape
            own_leaf = lambda *leaves: self._leaf(PerReplica(leaves, replica_ids=replicas), replicas)  # noqa: E731
            return nest.map_structure(own_leaf, parts[0], *parts[1:])
        if not any(isinstance(part, torch.Tensor | np.ndarray | np.generic) for part in parts):
            if all(part is parts[0] or (type(part) is type(parts[0]) and part == parts[0]) for part in parts):
                return parts[0]
            if not all(isinstance(part, bool | int | float | complex) for part in parts):
                raise UnsupportedError(
                    "on this strategy a step is recorded once for all replicas, so what differs between them has to be "
                    f"tensors or numbers; got {type(parts[0]).__name__} {parts[0]!r:.60} and others. Pass an index "
                    "into a tensor, or the same object to every replica."
                )
        own = dict(zip(replicas, parts, strict=True))
        tensors = [_to_tensor(own.get(lane, parts[0])) for lane in range(self._lanes)]
        return Stacked(self._feeder.stack(tensors))


def _to_tensor(part: Any) -> torch.Tensor:
    if isinstance(part, torch.Tensor):
        return part
    if isinstance(part, np.ndarray) and part.dtype.kind not in "biufc":
        raise UnsupportedError("strings cannot be on the devices of this strategy; encode them as numbers.")
    return torch.as_tensor(part)


def _shape_of(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.dtype, tuple(part.shape)
    if nest.is_nested(part):
        return type(part), tuple((key, _shape_of(child)) for key, child in nest.children(part))
    return tuple(part.shape) if isinstance(part, np.ndarray) else None


def global_inputs(
    args: Sequence[Any], kwargs: dict[str, Any], active: Sequence[int], feeder: Feeder
) -> tuple[Any, Any]:
    """The arguments for a step that sees the global batch: the replicas' parts joined along their first dimension."""

    def join(leaf: Any) -> Any:
        if not isinstance(leaf, DistributedValues):
            return feeder.share(leaf) if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(leaf, LaneValues) and leaf.stacked.ndim > 1:
            return feeder.flatten(leaf.stacked[: len(leaf.replica_ids)])
        parts = [leaf.component(replica) for replica in active]
        if all(part is parts[0] for part in parts):
            return feeder.share(parts[0]) if isinstance(parts[0], torch.Tensor) else parts[0]
        if all(isinstance(part, list | tuple) for part in parts):  # each replica's own examples
            whole = nest.rebuild(parts[0], [one for part in parts for one in part])
            return nest.map_structure(lambda one: feeder.share(one) if isinstance(one, torch.Tensor) else one, whole)
        tensors = [_to_tensor(part) for part in parts]
        if any(tensor.ndim == 0 for tensor in tensors):
            raise UnsupportedError(
                "with global_view=True a step sees the replicas' batches as one, and single numbers that differ "
                "between replicas are no batch; pass a tensor with one row for each."
            )
        dim = 0 if leaf.batch_info is None else leaf.batch_info.dim
        joined = torch.cat([tensor.cpu() for tensor in tensors], dim)
        return feeder.share(joined) if dim else feeder.rows(joined)

    joined: tuple[Any, Any] = nest.map_structure(join, (list(args), kwargs))
    return joined
