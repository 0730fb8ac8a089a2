"""What a run says at its end about the devices it had and the programs that its steps were compiled to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchstrat.strategies.tpu import TPUStrategy
from torchstrat.strategy import Strategy


@dataclass(frozen=True)
class ProgramRecord:
    """Of a strategy that compiles its steps."""

    event: ClassVar[str] = "programs"

    devices: int
    """Of the whole system; those that no replica uses compute along and count nothing."""
    replicas: int
    logical_devices: int
    """Of one replica."""
    compilations: list[str]
    """Each with the run that it was made for, counted from 0 over training and evaluation, and the reason."""

    def lines(self) -> list[str]:
        """For people: a line about the devices, then one for each compilation."""
        idle = self.devices - self.replicas * self.logical_devices
        devices = [
            _count(self.devices, "device"),
            f"{_count(self.replicas, 'replica')} × {_count(self.logical_devices, 'logical device')}",
            *([f"{idle} idle"] if idle else []),
            _count(len(self.compilations), "compilation"),
        ]
        return [", ".join(devices), *self.compilations]


def programs_of(strategy: Strategy) -> ProgramRecord | None:
    """What ``strategy`` has compiled so far; None if it is not one that compiles."""
    if not isinstance(strategy, TPUStrategy):
        return None
    assignment = strategy.device_assignment
    return ProgramRecord(
        devices=assignment.topology.num_tasks * assignment.topology.num_tpus_per_task,
        replicas=assignment.num_replicas,
        logical_devices=assignment.num_cores_per_replica,
        compilations=[f"run {one.run}: {one.reason}" for one in strategy.compilations],
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
