"""The table that `ts.estimate` returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchstrat.core.memory import Holding, Sizes
from torchstrat.sharding.layout import size_text, table

_TITLES = ("strategy", "processes", "each of", "parameters", "gradients", "optimizer", "other", "activations")
_NUMBERS = tuple(range(3, 10))  # columns that are aligned to the right


@dataclass(frozen=True)
class Row:
    """What each of ``count`` equal holders has and sends under one strategy."""

    strategy: str
    processes: str
    """How the job is started."""
    holder: str
    """A device, a process, or a task of a cluster."""
    memory: Holding
    """Between two steps."""
    activations_bytes: int | None
    """What a forward pass keeps for the backward pass; None where no batch was given."""
    sent_bytes: int
    """To other holders, in one step; on parameter servers in one step of each worker."""
    count: int = 1

    @property
    def total_bytes(self) -> int:
        """At the end of a forward pass, as far as it is known."""
        return self.memory.total_bytes + (self.activations_bytes or 0)

    def cells(self) -> tuple[str, ...]:
        memory = self.memory
        activations = "?" if self.activations_bytes is None else size_text(self.activations_bytes)
        return (
            f"{self.count} × {self.holder}",
            size_text(memory.parameters_bytes),
            size_text(memory.gradients_bytes),
            size_text(memory.optimizer_state_bytes),
            size_text(memory.buffers_bytes + memory.communication_bytes),
            activations,
            size_text(self.total_bytes),
            size_text(self.sent_bytes),
        )


@dataclass(frozen=True, repr=False)
class Estimate:
    """What `ts.estimate` returns: a table, as which it prints."""

    rows: tuple[Row, ...]
    sizes: Sizes
    """Of one copy of everything."""
    optimizers: tuple[str, ...]
    """Their classes."""

    def of(self, strategy: str, processes: str | None = None) -> list[Row]:
        """The rows of one strategy; ``processes``: of one way to start it."""
        return [row for row in self.rows if row.strategy == strategy and processes in (None, row.processes)]

    def __repr__(self) -> str:
        sizes, made = self.sizes, ", ".join(self.optimizers) or "no optimizer"
        heading = (
            f"parameters {size_text(sizes.parameters)}, buffers {size_text(sizes.buffers)}, gradients "
            f"{size_text(sizes.gradients)}, state of {made} {size_text(sizes.optimizer_state)}"
        )
        lines: list[tuple[str, ...]] = [(*_TITLES, "in all", "sent per step")]
        before = ("", "")
        for row in self.rows:
            start = row.strategy, row.processes
            lines.append((*(("", "") if start == before else start), *row.cells()))
            before = start
        return "\n".join([heading, "", *table(lines, right=_NUMBERS)])


def joined(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Equal holders of a strategy as one row, where the first of them was."""
    found: dict[Row, Row] = {}
    for row in rows:
        kind = replace(row, memory=replace(row.memory, device=""), count=0)
        found[kind] = replace(found[kind], count=found[kind].count + row.count) if kind in found else row
    return tuple(found.values())
