"""When a process that ended is started again. Pure: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass

from torchstrat.core.errors import InvalidArgumentError


@dataclass(frozen=True)
class RestartPolicy:
    """How often, and how fast, a task is started again.

    A process that lived is replaced at once. One that ended within ``quick_seconds`` of its start is replaced at once
    too the first time, for it may have been killed; if that goes on, the next ones wait for ``first_delay_seconds``,
    then twice as long each time, up to ``longest_delay_seconds``.

    Args:
        limit: Starts after the first one, in all; None: any number.
    """

    limit: int | None = None
    quick_seconds: float = 10.0
    first_delay_seconds: float = 1.0
    longest_delay_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 0:
            raise InvalidArgumentError(f"limit={self.limit} must be at least 0, or None for any number of restarts.")


@dataclass
class Restarts:
    """The restarts of one task so far."""

    policy: RestartPolicy
    total: int = 0
    quick_ends: int = 0
    """Processes in a row that ended soon after their start."""

    def delay_seconds(self, lived_seconds: float) -> float | None:
        """How long to wait before the next start, after a process that lived this long; None: do not start it."""
        policy = self.policy
        if policy.limit is not None and self.total >= policy.limit:
            return None
        self.total += 1
        self.quick_ends = self.quick_ends + 1 if lived_seconds < policy.quick_seconds else 0
        if self.quick_ends < 2:
            return 0.0
        # The exponent is bounded too: 2.0 ** 1024 is an OverflowError.
        return min(policy.first_delay_seconds * 2.0 ** min(self.quick_ends - 2, 60), policy.longest_delay_seconds)
