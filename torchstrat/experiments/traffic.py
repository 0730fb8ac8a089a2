"""What a run says at its end about what the logical devices of its replicas sent each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchstrat.strategy import Strategy


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
