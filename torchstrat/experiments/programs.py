"""What a run says at its end about its devices: the programs that its steps were compiled to, and what the logical
devices of its replicas sent each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchstrat.experiments.metrics_file import Record
from torchstrat.strategies.tpu import TPUStrategy
from torchstrat.strategy import Strategy


def programs_of(strategy: Strategy) -> Record | None:
    """What ``strategy`` has compiled so far; None if it is not one that compiles.

    ``devices`` are those of the whole system; those that no replica uses compute along and count nothing.
    ``compilations`` have the run that each was made for, counted from 0 over training and evaluation, and the reason.
    """
    if not isinstance(strategy, TPUStrategy):
        return None
    assignment = strategy.device_assignment
    return {
        "event": "programs",
        "devices": assignment.topology.num_tasks * assignment.topology.num_tpus_per_task,
        "replicas": assignment.num_replicas,
        "logical_devices": assignment.num_cores_per_replica,
        "compilations": [f"run {one.run}: {one.reason}" for one in strategy.compilations],
    }


class StepTraffic:
    """Adds up what training steps send to other logical devices of a replica; what evaluation sends is left out."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._traffic = strategy, strategy.extended.logical_traffic
        self._steps = self._sent = 0

    def of_step(self, step: Callable[[], Any]) -> Any:
        """What ``step()`` returns."""
        if self._traffic is None:  # replicas have one logical device, or nobody counts
            return step()
        before = self._traffic.total_bytes
        returned = step()
        self._steps, self._sent = self._steps + 1, self._sent + self._traffic.total_bytes - before
        return returned

    def record(self) -> Record | None:
        """``sent_bytes_per_step``: by each process, in the mean step. None where nothing was counted."""
        if self._traffic is None:
            return None
        return {
            "event": "logical_devices",
            "replicas": self._strategy.num_replicas_in_sync,
            "logical_devices": self._strategy.num_logical_devices,
            "sent_bytes_per_step": self._sent // max(1, self._steps),
        }


def told(record: Record) -> list[str]:
    """A record of this module, for people."""
    if record["event"] == "logical_devices":
        size = f"{record['replicas']} × {record['logical_devices']} processes"
        sent = f"{record['sent_bytes_per_step']:,} bytes per step"
        return [f"{size}; each sent {sent} to the other logical devices of its replica"]
    devices, replicas, logical = record["devices"], record["replicas"], record["logical_devices"]
    idle, compilations = devices - replicas * logical, record["compilations"]
    size = f"{_count(devices, 'device')}, {_count(replicas, 'replica')} × {_count(logical, 'logical device')}"
    return [f"{size}{f', {idle} idle' if idle else ''}, {_count(len(compilations), 'compilation')}", *compilations]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
