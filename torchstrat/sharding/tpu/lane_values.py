"""Values with one component per replica that are one tensor to the program: results, batches, what the lanes see.

In this order: `LaneValues`, which `run` returns; `Feeder` and its placements, which bring batches to the devices, each
replica's part to its own, in the background while a step runs; `Inputs`, from what `run` was given to what the lanes of
each pass see.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torchstrat.core import nest
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.values import BatchInfo, DistributedValues, PerReplica
from torchstrat.data import rows
from torchstrat.data.prefetch import to_device
from torchstrat.data.rows import RowsOnTheirWay
from torchstrat.data.streams import Step
from torchstrat.replicas.engine import regroup
from torchstrat.sharding.grid import REPLICA_AXIS, DeviceGrid, Sharding
from torchstrat.sharding.tpu.spmd import SpmdRuntime


class LaneValues(PerReplica[torch.Tensor]):
    """A `PerReplica` whose components are the entries of one tensor ``[lanes, …]``, cut when somebody looks.

    ``stacked``: on the devices; entry ``i`` is replica ``i``'s, what lies behind the last replica's is nobody's.
    ``totals``: sum and mean over the replicas, where the step's own program computed them.

    Looking at `values` waits for the program and copies to the host, in one piece: cutting it up on the devices would
    be a program of its own for each replica.
    """

    __slots__ = ("_cut", "is_settled", "stacked", "totals")
    _shown_as = "PerReplica"

    def __init__(
        self,
        stacked: torch.Tensor,
        num_replicas: int,
        batch_info: BatchInfo | None = None,
        totals: dict[ReduceOp, torch.Tensor] | None = None,
        *,
        is_settled: bool,
    ) -> None:
        self.stacked, self.totals = stacked, totals or {}
        self.is_settled = is_settled
        """Whether the program that computes it has been started; if not, looking must not stop its recording."""
        self._cut: tuple[torch.Tensor, ...] | None = None
        self.replica_ids = tuple(range(num_replicas))
        self.batch_info = batch_info
        self.weights = None

    @property
    def values(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """The components, on the host; in a `merge_call` within a step, on the devices."""
        if not self.is_settled:
            return tuple(self.stacked[replica] for replica in self.replica_ids)
        if self._cut is None:
            self._cut = self.stacked.cpu()[: len(self.replica_ids)].unbind(0)
        return self._cut


Result = TypeVar("Result")
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Placed(RowsOnTheirWay):
    """One replica's part of a leaf whose parts are on their way to the devices together."""

    __slots__ = ("replica", "stacked")

    def __init__(self, stacked: torch.Tensor, replica: int) -> None:
        self.stacked, self.replica = stacked, replica


def join(values: Sequence[object], ids: tuple[int, ...], info: BatchInfo | None) -> PerReplica[object]:
    """One leaf of a batch that an input pipeline hands out."""
    first = values[0]
    if isinstance(first, Placed):
        return LaneValues(first.stacked, len(ids), info, is_settled=True)
    return PerReplica(tuple(values), replica_ids=ids, batch_info=info)


def join_passes(results: Sequence[Result], replicas: Sequence[Sequence[int]]) -> Result:
    """What the passes of one run returned as what its replicas did. ``replicas``: of each pass."""
    joined: Result = nest.map_structure(lambda leaf: _join_leaf(leaf, replicas), regroup(dict(enumerate(results))))
    return joined


def _join_leaf(leaf: object, replicas: Sequence[Sequence[int]]) -> object:
    if not isinstance(leaf, PerReplica):
        return leaf  # the very same object in all passes
    own: dict[int, object] = {}
    for ids, value in zip(replicas, leaf.values, strict=True):
        for replica in ids:
            own[replica] = value.component(replica) if isinstance(value, PerReplica) else value
    ordered = sorted(own)
    return PerReplica([own[replica] for replica in ordered], replica_ids=tuple(ordered))


MAXIMAL_RANK = 5
"""Of tensors that torch_xla's annotations take."""


class Feeder:
    """Makes tensors of the devices from tensors of the host."""

    def __init__(self, runtime: SpmdRuntime, grid: DeviceGrid) -> None:
        self._runtime, self._grid = runtime, grid
        self._cuts: dict[tuple[torch.Size, torch.dtype], Sharding] = {}  # by the shape of a row
        self._fed: MutableMapping[torch.Tensor, Sharding] = WeakTensorKeyDictionary()

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
            flat = self.stack([part.flatten(1) for part in parts])
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

    def upload(self, leaf: object) -> object:
        """A leaf of a batch for the only replica, whole on every device; itself where that cannot be in any thread."""
        if not isinstance(leaf, torch.Tensor) or leaf.requires_grad or not _is_on_host([leaf]):
            return leaf
        return self._runtime.replicate(leaf, self._grid)

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

    def place(self, step: Step) -> tuple[Step, tuple[()]]:
        """Start the copies, where all replicas have as many rows; uneven batches are taken apart when they are run, and
        what is not on the host or has too many dimensions is stacked then: that is recorded, by one thread alone."""
        structures = [nest.flatten_by_keys(component) for component in step.components]
        if len(set(map(len, structures))) > 1:
            return step, ()  # lists with an entry for each row
        columns = list(zip(*structures, strict=True))
        if not all(map(_is_even, columns)) or any(count == 0 for count in step.rows):
            return step, ()
        placed: list[list[object]] = [[] for _ in step.components]
        for column in columns:
            for own, leaf in zip(placed, self._placed(column), strict=True):
                own.append(leaf)
        components = tuple(_with_leaves(like, own) for like, own in zip(step.components, placed, strict=True))
        return Step(components, step.rows, step.checksum), ()

    def _placed(self, column: Sequence[object]) -> Sequence[object]:
        tensors = [one for one in column if isinstance(one, torch.Tensor)]
        if not tensors or not _is_on_host(tensors) or tensors[0].ndim >= MAXIMAL_RANK:
            return column
        spare = [tensors[0]] * (self._feeder.lanes - len(tensors))
        stacked = self._feeder.stack([*tensors, *spare])
        return [Placed(stacked, replica) for replica in range(len(tensors))]

    def receive(self, placed: tuple[Step, tuple[object, ...]]) -> Step:
        """In the thread that uses the batches: the runtime orders copies before their use by itself."""
        return placed[0]


def _with_leaves(like: nest.Nest, leaves: list[object]) -> nest.Nest:
    """``like`` with these in the places of what `nest.flatten_by_keys` finds in it."""
    remaining = iter(leaves)
    return nest.map_by_keys(lambda _: next(remaining), like)


def _is_even(column: Sequence[object]) -> bool:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        return not rows.is_array(first)
    return _is_dense(first) and all(
        isinstance(one, torch.Tensor) and one.shape == first.shape and one.dtype == first.dtype for one in column
    )


class WholePlacement:
    """As `LanePlacement`, for one replica, whose batches are tensors."""

    copies = True

    def __init__(self, feeder: Feeder, device: torch.device) -> None:
        self._feeder, self._device = feeder, device

    def place(self, step: Step) -> tuple[Step, tuple[()]]:
        components = tuple(rows.map_leaves(self._feeder.upload, component) for component in step.components)
        return Step(components, step.rows, step.checksum), ()

    def receive(self, placed: tuple[Step, tuple[object, ...]]) -> Step:
        """In the thread that uses the batches: here may be recorded what could not be copied."""
        step = placed[0]
        components = tuple(to_device(component, self._device) for component in step.components)
        return Step(components, step.rows, step.checksum)


def _is_on_host(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" and _is_dense(tensor) for tensor in tensors)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


@dataclass(frozen=True)
class Stacked:
    """A leaf that differs from lane to lane."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Pass:
    """Replicas whose inputs have the same shapes, and these inputs: leaves `Stacked`, or what all replicas share."""

    replicas: tuple[int, ...]
    args: list[object]
    kwargs: dict[str, object]


class Inputs:
    """The arguments of one run.

    Args:
        active: the replicas that have something to do.
        feeder: brings them to the devices. Lane ``i`` is replica ``i``'s.
    """

    def __init__(
        self, args: Sequence[object], kwargs: dict[str, object], active: Sequence[int], feeder: Feeder
    ) -> None:
        self._nest = (list(args), kwargs)
        self._active, self._feeder = list(active), feeder
        self._lanes = feeder.lanes

    def passes(self) -> list[Pass]:
        """One pass, or one for each set of replicas whose batches have other shapes than the rest's."""
        groups: dict[tuple[object, ...], list[int]] = {}
        columns = [self._column(leaf) for leaf in nest.leaves(self._nest) if isinstance(leaf, DistributedValues)]
        for place, replica in enumerate(self._active):
            shapes = tuple(None if column is None else _shape_of(column[place]) for column in columns)
            groups.setdefault(shapes, []).append(replica)
        return [self._pass(tuple(replicas)) for replicas in groups.values()]

    def _column(self, leaf: DistributedValues[object]) -> list[object] | None:
        """The active replicas' components; None for one tensor, whose components have one shape."""
        if isinstance(leaf, LaneValues) and leaf.stacked.shape[0] == self._lanes:
            return None
        return [leaf.component(replica) for replica in self._active]

    def _pass(self, replicas: tuple[int, ...]) -> Pass:
        args, kwargs = nest.map_structure(lambda leaf: self._leaf(leaf, replicas), self._nest)
        return Pass(replicas, args, kwargs)

    def _leaf(self, leaf: object, replicas: tuple[int, ...]) -> object:
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
            if all(_is_equal(part, parts[0]) for part in parts):
                return parts[0]
            if not all(isinstance(part, bool | int | float | complex) for part in parts):
                raise UnsupportedError(
                    "on this strategy a step is recorded once for all replicas, so what differs between them has to be "
                    f"tensors or numbers; got {type(parts[0]).__name__} {parts[0]!r:.60} and others. Pass an index "
                    "into a tensor, tensors in a dict or a tuple, or the same object to every replica."
                )
        own = dict(zip(replicas, parts, strict=True))
        tensors = [_to_tensor(own.get(lane, parts[0])) for lane in range(self._lanes)]
        if not isinstance(parts[0], torch.Tensor):  # numbers and arrays of several kinds, which one tensor is to have
            kind = functools.reduce(torch.promote_types, [one.dtype for one in tensors])
            tensors = [one.to(kind) for one in tensors]
        return Stacked(self._feeder.stack(tensors))


def _is_equal(part: object, first: object) -> bool:
    if part is first:
        return True
    try:
        return type(part) is type(first) and bool(part == first)
    except (RuntimeError, ValueError):  # an object compares tensors or arrays that it has
        return False


def _to_tensor(part: object) -> torch.Tensor:
    if isinstance(part, torch.Tensor):
        if part.is_nested or part.layout in _COMPRESSED:
            kind = "a nested tensor" if part.is_nested else f"a tensor of layout {part.layout}"
            raise UnsupportedError(
                f"{kind} cannot be on the devices of this strategy, which have every replica's part in one tensor. "
                "Hand out dense tensors: padded ones with their lengths, or tensor.to_dense()."
            )
        return part
    if isinstance(part, np.ndarray) and part.dtype.kind not in "biufc":
        raise UnsupportedError("strings cannot be on the devices of this strategy; encode them as numbers.")
    return torch.as_tensor(part)


def _shape_of(part: object) -> object:
    if isinstance(part, torch.Tensor):
        return part.dtype, None if part.is_nested else tuple(part.shape)
    if nest.is_nested(part):
        return type(part), tuple((key, _shape_of(child)) for key, child in nest.children(part))
    return tuple(part.shape) if isinstance(part, np.ndarray) else None


def global_inputs(
    args: Sequence[object], kwargs: dict[str, object], active: Sequence[int], feeder: Feeder
) -> tuple[list[object], dict[str, object]]:
    """The arguments for a step that sees the global batch: the replicas' parts joined along their first dimension."""

    def join(leaf: object) -> object:
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

    joined: tuple[list[object], dict[str, object]] = nest.map_structure(join, (list(args), kwargs))
    return joined
