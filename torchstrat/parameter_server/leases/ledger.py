"""The account of one epoch's rows."""

from __future__ import annotations

from dataclasses import dataclass

from torchstrat.core.errors import LedgerError


@dataclass(frozen=True)
class Ledger:
    """What has become of the rows of one epoch, at one moment. Every field but ``epoch`` counts rows.

    At every moment ``rows == finished + scheduled + left + lost``, each row being in one of these, and
    ``handed_out == finished + scheduled + lost + returned``.

    Attributes:
        epoch: counted from 0.
        rows: that the epoch has; with ``drop_last``, less those at its end that make no whole batch.
        handed_out: in leases, each time that a row is in one. Resumed epochs begin with what was finished.
        finished: in leases whose functions have returned.
        scheduled: in leases whose functions have not ended yet: queued, or on a worker.
        left: to be handed out, for the first time or again.
        repeated: sent to a worker again, because the one before was lost, and may have begun them; the function runs
            again with the same rows, and what it had changed on the servers already is not changed twice.
        returned: that came back, each time: their function raised or was cancelled, or their lease was never scheduled
            before the next ``for`` over the dataset began. They are handed out again.
        lost: in leases that were handed out and not scheduled.
        twice: finished more than once; always 0 but for a bug of torchstrat.
        lost_rows: numbers of rows of the dataset that are lost, not more than ten.
    """

    epoch: int
    rows: int
    handed_out: int
    finished: int
    scheduled: int
    left: int
    repeated: int
    returned: int
    lost: int
    twice: int = 0
    lost_rows: tuple[int, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every row of the epoch was finished."""
        return self.finished == self.rows

    def check(self, *, complete: bool = True) -> None:
        """Raise `LedgerError` unless every row of the epoch was finished exactly once.

        ``complete=False``: in the middle of an epoch; rows may be with functions, or left.
        """
        problems = []
        if self.twice:
            problems.append(f"{_rows(self.twice)} finished twice")
        if self.lost:
            such_as = f"{', '.join(map(str, self.lost_rows))}{', …' if self.lost > len(self.lost_rows) else ''}"
            problems.append(f"{_rows(self.lost)} handed out in leases that were never scheduled: {such_as}")
        if self.rows != self.finished + self.scheduled + self.left + self.lost:
            problems.append(
                f"{self.finished} finished, {self.scheduled} with functions, {self.left} to be handed out and "
                f"{self.lost} lost do not make {self.rows}"
            )
        if self.handed_out != self.finished + self.scheduled + self.lost + self.returned:
            problems.append(
                f"{self.handed_out} were handed out, and {self.finished} finished, {self.scheduled} with functions, "
                f"{self.lost} lost and {self.returned} returned do not make that"
            )
        if complete and not problems and not self.is_complete:
            problems.append(
                f"{_rows(self.rows - self.finished)} not finished: {self.scheduled} with functions (wait for these "
                f"with coordinator.join()), {self.left} to be handed out (by another `for` over the leased dataset)"
            )
        if problems:
            raise LedgerError(f"epoch {self.epoch} of {self.rows} rows: {'; '.join(problems)}.")


def _rows(number: int) -> str:
    return f"{number} row was" if number == 1 else f"{number} rows were"
