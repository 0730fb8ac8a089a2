"""Values with one component per replica that are one tensor to the program: batches and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchstrat.core import nest
from torchstrat.core.reduction import ReduceOp
from torchstrat.core.values import BatchInfo, PerReplica
from torchstrat.data.rows import RowsOnTheirWay
from torchstrat.replicas.engine import regroup


class LaneValues(PerReplica[Any]):
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


class Placed(RowsOnTheirWay):
    """One replica's part of a leaf whose parts are on their way to the devices together."""

    __slots__ = ("replica", "stacked")

    def __init__(self, stacked: torch.Tensor, replica: int) -> None:
        self.stacked, self.replica = stacked, replica


def join(values: Sequence[Any], ids: tuple[int, ...], info: BatchInfo | None) -> PerReplica[Any]:
    """One leaf of a batch that an input pipeline hands out."""
    first = values[0]
    if isinstance(first, Placed):
        return LaneValues(first.stacked, len(ids), info, is_settled=True)
    return PerReplica(tuple(values), replica_ids=ids, batch_info=info)


def join_passes(results: Sequence[Any], replicas: Sequence[Sequence[int]]) -> Any:
    """What the passes of one run returned as what its replicas did. ``replicas``: of each pass."""
    return nest.map_structure(lambda leaf: _join_leaf(leaf, replicas), regroup(dict(enumerate(results))))


def _join_leaf(leaf: Any, replicas: Sequence[Sequence[int]]) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf  # the very same object in all passes
    own: dict[int, Any] = {}
    for ids, value in zip(replicas, leaf.values, strict=True):
        for replica in ids:
            own[replica] = value.component(replica) if isinstance(value, PerReplica) else value
    ordered = sorted(own)
    return PerReplica([own[replica] for replica in ordered], replica_ids=tuple(ordered))
