"""What a run says at its end about its devices: the programs that its steps were compiled to, and what the logical
devices of its replicas sent each other."""

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


@dataclass(frozen=True)
class TrafficRecord:
    """Of a strategy whose replicas are several processes each."""

    event: ClassVar[str] = "logical_devices"

    replicas: int
    logical_devices: int
    """Of one replica."""
    sent_bytes_per_step: int
    """By each process to the other logical devices of its replica, in the mean training step."""

    def lines(self) -> list[str]:
        """For people."""
        text = (
            f"{self.replicas} × {self.logical_devices} processes; each sent {self.sent_bytes_per_step:,} bytes per "
            "step to the other logical devices of its replica"
        )
        return [text]


class StepTraffic:
    """Adds up what training steps send; what evaluation sends is left out."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._traffic = strategy, strategy.extended.logical_traffic
        self._steps = self._sent = self._before = 0

    def step_begins(self) -> None:
        if self._traffic is not None:
            self._before = self._traffic.total_bytes

    def step_ends(self) -> None:
        if self._traffic is not None:
            self._steps += 1
            self._sent += self._traffic.total_bytes - self._before

    def record(self) -> TrafficRecord | None:
        """None where replicas have one logical device, or nobody counts."""
        if self._traffic is None:
            return None
        strategy, mean = self._strategy, self._sent // max(1, self._steps)
        return TrafficRecord(strategy.num_replicas_in_sync, strategy.num_logical_devices, mean)
