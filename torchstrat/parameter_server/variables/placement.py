"""Which server holds what: round robin over the servers in order of creation, every shard counting as one.

Optimizers ask of the places of their variables: to stay whole, and to be together.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch.optim import Optimizer

from torchstrat.core.errors import UnsupportedError
from torchstrat.core.optimizers import Gradients, Kind, Tier
from torchstrat.parameter_server.messages import Shard, VariableSpec
from torchstrat.parameter_server.partitioners import row_offsets, shards_of

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


def pieces(spec: VariableSpec, whole: torch.Tensor) -> list[torch.Tensor]:
    """``whole``, which has the variable's rows, cut into its shards (views)."""
    if not spec.shape:
        return [whole]
    return [whole[shard.start : shard.stop] for shard in spec.shards]


def held_bytes(specs: Iterable[VariableSpec], num_servers: int) -> dict[int, int]:
    """How many bytes of variables each server has."""
    held = dict.fromkeys(range(num_servers), 0)
    for spec in specs:
        for number, shard in enumerate(spec.shards):
            held[shard.server] += spec.shard_bytes(number)
    return held


class Bonds:
    """Of all variables that there are optimizers of, at one moment.

    An optimizer of which nothing is known may look at all its parameters, so these go to one server; also those of
    another such optimizer that shares one with it.
    """

    def __init__(self, optimizers: Iterable[tuple[Optimizer, Kind]]) -> None:
        self._whole: dict[int, str] = {}
        self._by_layout: set[int] = set()
        self._together: dict[int, list[torch.Tensor]] = {}
        for optimizer, kind in optimizers:
            tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            if not kind.may_cut_rows:
                self._whole |= {id(tensor): type(optimizer).__name__ for tensor in tensors}
            if kind.gradients is Gradients.BY_LAYOUT:
                self._by_layout |= set(map(id, tensors))
            if kind.tier is Tier.ALL:
                self._bind(tensors)

    def _bind(self, tensors: Sequence[torch.Tensor]) -> None:
        joined: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            for other in self._together.get(id(tensor), [tensor]):
                joined[id(other)] = other
        group = list(joined.values())
        self._together |= dict.fromkeys(joined, group)

    def keeps_whole(self, tensor: torch.Tensor) -> str | None:
        """The class of an optimizer that has to step it whole."""
        return self._whole.get(id(tensor))

    def looks_at_layout(self, tensor: torch.Tensor) -> bool:
        """Whether its gradient has to be dense where the program makes a dense one: then it does not travel by rows."""
        return id(tensor) in self._by_layout

    def stepped_together_with(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._together.get(id(tensor), ())


def check_places(optimizer: Optimizer, kind: Kind, specs: Sequence[VariableSpec]) -> None:
    """Raise `UnsupportedError` where variables were placed before this optimizer over them was made, and cannot be
    stepped by it there."""
    name = type(optimizer).__name__
    cut = [] if kind.may_cut_rows else [spec for spec in specs if len(spec.shards) > 1]
    servers = sorted({shard.server for spec in specs for shard in spec.shards})
    by_rows = [spec for spec in specs if spec.by_rows] if kind.gradients is Gradients.BY_LAYOUT else []
    if by_rows:
        raise UnsupportedError(
            f"{name} steps table {by_rows[0].name!r}, which travels by rows, and may treat sparse and dense gradients "
            "in different ways. Make it in the scope in which its parameters are made, by a constructor that calls "
            "Optimizer.__init__, so that they are placed for it."
        )
    if not cut and (kind.tier is not Tier.ALL or len(servers) < 2):
        return
    where = (
        f"{cut[0].name!r}, which is in {len(cut[0].shards)} shards"
        if cut
        else f"variables that lie on servers {', '.join(map(str, servers))}"
    )
    looks_at = "whole parameters" if kind.tier is Tier.PARAMETERS else "all of them at once"
    remedy = f", or, if it treats each element by itself, name it: elementwise_optimizers=[{name}]"
    raise UnsupportedError(
        f"{name} steps {where}, and may look at {looks_at}. Make it in the scope in which its parameters are made, "
        "by a constructor that calls Optimizer.__init__, so that they are placed for it"
        f"{remedy if kind.tier is Tier.ALL else ''}."
    )
