"""Which server holds what: round robin over the servers in order of creation, every shard counting as one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from torchstrat.parameter_server.messages import Shard, VariableSpec
from torchstrat.partitioners import row_offsets, shards_of

logger = logging.getLogger("torchstrat.parameter_server")

Partitioner = Callable[..., Sequence[int]]


class Placement:
    """Numbers the variables of one job and places their shards. Pure; nobody is contacted."""

    def __init__(self, num_servers: int, partitioner: Partitioner | None) -> None:
        self.num_servers = num_servers
        self.partitioner = partitioner
        self._numbers = itertools.count()
        self._turns = itertools.count()

    def place(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        kind: Literal["parameter", "buffer", "variable"],
        *,
        requires_grad: bool = False,
        with_variable: VariableSpec | None = None,
        may_split: bool = True,
        is_table: bool = False,
    ) -> VariableSpec:
        """The place of a new variable.

        Args:
            with_variable: put it on the server of this one (its first shard's), whole; takes no turn.
            may_split: False keeps it whole whatever the partitioner says.
            is_table: may be an embedding's weight: workers read it by rows, if there is a partitioner at all.

        Raises `InvalidArgumentError` for what a user's own partitioner returned.
        """
        shape = tuple(shape)
        rows = shape[0] if shape else 1
        partitioner = self.partitioner if may_split and shape and with_variable is None else None
        count = 1 if partitioner is None else shards_of(partitioner, shape, dtype)
        spec = VariableSpec(
            number=next(self._numbers),
            name=name,
            shape=shape,
            dtype=dtype,
            kind=kind,
            shards=tuple(
                Shard(self._server(with_variable), start, stop)
                for start, stop in (row_offsets(rows, count) if count > 1 else [(0, rows)])
            ),
            requires_grad=requires_grad,
            by_rows=partitioner is not None and kind == "parameter" and len(shape) == 2 and is_table,
        )
        servers = [shard.server for shard in spec.shards]
        logger.debug("%s %s of shape %s is placed on parameter servers %s.", kind, name, shape, servers)
        return spec

    def _server(self, with_variable: VariableSpec | None) -> int:
        if with_variable is not None:
            return with_variable.shards[0].server
        return next(self._turns) % self.num_servers


def seed_of_variable(seed: int, spec: VariableSpec) -> int:
    """For what servers draw of it: one for all shards, which draw parts of one table. ``seed``: the job's."""
    return hash((seed, spec.number)) % 2**63


def pieces(spec: VariableSpec, whole: torch.Tensor) -> list[Any]:
    """``whole``, which has the variable's rows, cut into its shards (views)."""
    if not spec.shape:
        return [whole]
    return [whole[shard.start : shard.stop] for shard in spec.shards]
