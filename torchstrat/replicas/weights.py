"""How much each replica of a run counts in the mean gradient, and which replicas have anything to do."""

from __future__ import annotations

from collections.abc import Iterable

from torchstrat.errors import StrategyMixingError
from torchstrat.values import BatchInfo


class StepWeights:
    """The weights of one run: rows where an input pipeline made the batch, else 1; `set_weight` overrides."""

    def __init__(self, replicas: Iterable[int], batch: BatchInfo | None) -> None:
        everyone = list(replicas)
        self.batch = batch
        self._said: dict[int, float | None] = {}
        if batch is None:
            self._weights = dict.fromkeys(everyone, 1.0)
            self.active = everyone
        else:
            if everyone and max(everyone) >= len(batch.rows):
                raise StrategyMixingError(
                    f"run was given a batch that another strategy has split over {len(batch.rows)} replicas; replica "
                    f"{max(everyone)} of this one has no part of it. Distribute the dataset by the strategy that runs "
                    "the step."
                )
            self._weights = {replica: float(batch.rows[replica]) for replica in everyone}
            self.active = [replica for replica in everyone if batch.rows[replica] > 0 or batch.run_empty]

    def override(self, replica: int, weight: float) -> None:
        self._weights[replica] = self._said[replica] = weight

    def hide(self, replica: int) -> None:
        """The step has given it a weight that cannot be looked at here."""
        self._said[replica] = None

    @property
    def are_said(self) -> bool:
        """Whether the step has called `set_weight`."""
        return bool(self._said)

    def known(self, replica: int) -> float | None:
        """As `of`, but None where neither a batch's rows nor the step said it."""
        rows = None if self.batch is None else float(self.batch.rows[replica])
        return self._said.get(replica, rows)

    def of(self, replica: int) -> float:
        return self._weights[replica]

    def relative(self, replica: int) -> float:
        """The weight of a replica where those of a batch that was split evenly are 1, so that nothing is rounded."""
        rows = [] if self.batch is None else [float(self.batch.rows[one]) for one in self.active]
        mean = sum(rows) / len(rows) if any(rows) else 1.0
        return self._weights[replica] / mean

    def values(self) -> list[float]:
        """Of the replicas that take part, in their order. When none has any weight they count alike."""
        weights = [self._weights[replica] for replica in self.active]
        return weights if any(weights) else [1.0] * len(weights)

    def rows_of(self, replica: int) -> int | None:
        return None if self.batch is None else self.batch.rows[replica]
