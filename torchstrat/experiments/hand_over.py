"""How rank 0 hands the runs of one command to the other processes.

Only rank 0 composes a configuration and names a folder; the others learn both here. Composing on every rank would
give each its own run folder (ranks start seconds apart, so ``${now:}`` differs) and, in a sweep, as many announcements
as there are ranks.

The messages are JSON under keys of the store that the launcher provides, so nothing that arrives is executed, and the
runs stay apart from each other by the launcher's id in the key.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchstrat.errors import CommunicationTimeoutError

MEETING_TIMEOUT = timedelta(minutes=10)
"""Until every rank has been started. Machines of one job can be minutes apart."""

HAND_OVER_TIMEOUT = timedelta(minutes=10)
"""From the end of one run to the next: rank 0 draws a picture and composes a configuration in between."""

OUTCOME_TIMEOUT = timedelta(seconds=10)
"""From one rank's failure to that of another, when both have the same cause."""


class HandOver:
    """One rank's end of the channel. Every method of rank 0 has its counterpart on the others, in the same order.

    ``store``: one that nobody has written to (`fresh_store`).
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self._size = size
        self._runs = 0

    def publish(self, run: Mapping[str, Any] | int) -> None:
        """Rank 0: hand a run to the others, or the exit status after the last one. Does not wait for them."""
        self._store.set(f"run/{self._runs}", json.dumps(run))
        self._runs += 1

    def wait_until_read(self, timeout: timedelta = OUTCOME_TIMEOUT) -> None:
        """Rank 0: stay until the others know of the end, for the store may live in this process. Gives up quietly."""
        with contextlib.suppress(RuntimeError):
            self._store.wait([f"left/{rank}" for rank in range(1, self._size)], timeout)

    def receive(self, timeout: timedelta = HAND_OVER_TIMEOUT) -> Mapping[str, Any] | int:
        """The others: wait for the next run, or for the exit status after the last one.

        Raises:
            CommunicationTimeoutError: rank 0 said neither within ``timeout``.
        """
        key = f"run/{self._runs}"
        try:
            self._store.wait([key], timeout)
        except RuntimeError as error:
            raise CommunicationTimeoutError(
                f"rank {self.rank} waited {timeout.total_seconds():.0f} s for rank 0 to hand over run {self._runs}; is "
                "it alive, and can it be reached at MASTER_ADDR?"
            ) from error
        run: Mapping[str, Any] | int = json.loads(self._store.get(key))
        self._runs += 1
        if isinstance(run, int):
            self._store.set(f"left/{self.rank}", "")
        return run

    def report_outcome(self, succeeded: bool) -> None:
        """Say how the current run ended here, for `failed` elsewhere."""
        self._store.set(f"outcome/{self._runs - 1}/{self.rank}", json.dumps(succeeded))

    def failed(self, rank: int, timeout: timedelta = OUTCOME_TIMEOUT) -> bool:
        """Whether the current run ended in an error on that rank. If not, it may wait for ranks that gave up."""
        key = f"outcome/{self._runs - 1}/{rank}"
        try:
            self._store.wait([key], timeout)
        except RuntimeError:
            return False
        return json.loads(self._store.get(key)) is False

    def everyone_failed(self, timeout: timedelta = OUTCOME_TIMEOUT) -> bool:
        return all(self.failed(rank, timeout) for rank in range(self._size))
