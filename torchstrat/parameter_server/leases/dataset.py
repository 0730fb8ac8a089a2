"""`LeasedDataset`: an epoch's rows, handed out until each was finished exactly once; `Ledger` is the account of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torchstrat.core.errors import ContextError, InvalidArgumentError, LedgerError, WrongTypeError
from torchstrat.core.values import require_callable
from torchstrat.data.spec import undisturbed_randomness
from torchstrat.parameter_server.leases.epoch import (
    DrawnOrder,
    DrawOrder,
    Epoch,
    InOrder,
    RowOrder,
    ShuffledOrder,
    rows_at,
)
from torchstrat.parameter_server.leases.lease import Account, Lease, ReaderBuilder, number_of_rows


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


_MOST_EXAMPLES = 10
_STATE = ("epoch", "seed", "shuffle", "dataset_rows", "rows", "finished", "repeated", "returned")


class LeasedDataset:
    """Rows that scheduled functions share. Made by `ClusterCoordinator.create_leased_dataset`, on the coordinator.

    ::

        while leased.epoch < 3:
            for lease in leased:                                      # what is left of the epoch
                coordinator.schedule(step, args=(lease,))             # step gets the batch
            coordinator.join()
            leased.ledger.check()                                     # every row exactly once

    **Iterating** yields `Lease` objects until all rows of the epoch have been handed out. It does not wait for the
    functions. Rows whose function raised or was cancelled come again, from the same iterator or the next ``for``; an
    epoch is over when all its rows are finished, and a ``for`` that finds it so begins the next one. Where functions
    still run then, it waits for them first as `ClusterCoordinator.join` does, and raises like it; call
    ``join(timeout)`` before for a limit. A ``for`` also takes back leases that were handed out before it and never
    scheduled: they are void then. One thread at a time iterates.

    **What is exactly once** is that a function with a row returns. What it changes on the servers is changed once too,
    however often it was repeated because workers were lost. A function that raises after it has changed something has
    changed it, and its rows come again.

    **Checkpoints**: `ts.Checkpoint(data=leased, …)`. The position is the epoch's number and which rows are finished,
    and goes on with any number of workers and servers and any batch size. Leases that were handed out before `restore`
    are void; an iterator goes on from the restored position to the end of the epoch that it was for.

    Attributes:
        batch_size: rows per lease. May be changed at any time; leases that exist stay as they are.
        dataset_rows: rows of the whole dataset.
    """

    def __init__(
        self,
        join: Callable[[], None],
        is_idle: Callable[[], bool],
        reader: object,
        dataset_rows: int,
        batch_size: int,
        *,
        shuffle: bool | DrawOrder,
        seed: int,
        drop_last: bool,
        name: str,
    ) -> None:
        self._join, self._is_idle = join, is_idle  # of the coordinator that leases are scheduled with
        self.reader = reader
        """What stands for each worker's own `Reader`."""
        self.dataset_rows = dataset_rows
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._name = name
        self._numbers = itertools.count()
        self._handing_out = threading.RLock()  # around what is drawn from the order, which may be the user's code
        self._account = Account()
        self._begin(Epoch(0, self._rows_of_epoch()), seed)

    # -- handing out --------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Rows per lease. The last one of an epoch may have fewer."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        require_batch_size(batch_size)
        with self._handing_out, self._account.lock:
            self._batch_size = batch_size
            epoch, order = self._account.epoch, self._account.order
            if not epoch.handed_out:  # another rest may be dropped, and nothing was drawn from the order
                self._account.begin(Epoch(epoch.number, self._rows_of_epoch()), order)

    def __len__(self) -> int:
        """How many leases a whole epoch has with the present batch size, if no row has to come again."""
        return (self._rows_of_epoch() + self._batch_size - 1) // self._batch_size

    def __iter__(self) -> Iterator[Lease]:
        with self._account.lock:
            self._account.epoch.give_back_unscheduled()
            has_rows = bool(self._account.epoch.left)
        if not has_rows:
            self._end_epoch()
        return self._leases(self._account.epoch.number)

    def _leases(self, last_epoch: int) -> Iterator[Lease]:
        """To the end of epoch ``last_epoch``, from wherever it is: a restored checkpoint may be of an earlier one."""
        while self._account.epoch.number <= last_epoch:
            lease = self._next()
            if lease is not None:
                yield lease
            elif self._account.epoch.number >= last_epoch:
                return
            else:
                self._end_epoch()

    def _next(self) -> Lease | None:
        """None if there is nothing to be handed out at the moment."""
        with self._handing_out:
            with self._account.lock:
                epoch, order, number = self._account.epoch, self._account.order, next(self._numbers)
                positions = epoch.hand_out(number, self._batch_size)
            if not positions:
                return None
            try:
                rows = rows_at(order, positions)
            except BaseException:
                with self._account.lock:
                    epoch.give_back(number)
                raise
        return Lease(self._account, epoch, self.reader, number, positions, rows)

    def _end_epoch(self) -> None:
        """Wait for the functions that still have rows; begin the next epoch if all rows are finished then."""
        if not self._account.epoch.is_complete:
            self._join()
        with self._handing_out:
            ledger = self.ledger
            if ledger.is_complete:
                ledger.check()
                self._begin(Epoch(ledger.epoch + 1, self._rows_of_epoch()), self._seed)

    def _begin(self, epoch: Epoch, seed: int) -> None:
        order = self._order_of(epoch.number, seed)  # which may be the user's code: it may raise, or take long
        with self._account.lock:
            self._seed = seed
            self._account.begin(epoch, order)

    def _rows_of_epoch(self) -> int:
        return self.dataset_rows - (self.dataset_rows % self._batch_size if self._drop_last else 0)

    def _order_of(self, epoch: int, seed: int) -> RowOrder:
        if callable(self._shuffle):
            return DrawnOrder(self._shuffle(epoch), self.dataset_rows, epoch)
        return ShuffledOrder(self.dataset_rows, seed, epoch) if self._shuffle else InOrder()

    # -- the account --------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number, from 0, of the epoch that the next ``for`` is of: how many have been finished."""
        with self._account.lock:
            return self._account.epoch.number + self._account.epoch.is_complete

    @property
    def ledger(self) -> Ledger:
        """What has become of the rows of the epoch that is under way, at this moment. It stays that of a finished epoch
        until a ``for`` begins the next."""
        with self._account.lock:
            epoch = self._account.epoch
            lost = epoch.lost
            return Ledger(
                epoch.number,
                epoch.rows,
                handed_out=epoch.handed_out,
                finished=len(epoch.finished),
                scheduled=len(epoch.scheduled),
                left=len(epoch.left),
                repeated=epoch.repeated,
                returned=epoch.returned,
                lost=len(lost),
                twice=len(epoch.twice),
                lost_rows=tuple(rows_at(self._account.order, lost.copy().take(_MOST_EXAMPLES)).tolist()),
            )

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch is: its number, the order, and which positions of it are finished.

        What a function is doing at the moment counts as not done. `ts.Checkpoint.save` asks while nothing runs; who
        asks by himself calls ``coordinator.join()`` before.
        """
        with self._account.lock:
            epoch = self._account.epoch
            return {
                "epoch": epoch.number,
                "seed": self._seed,
                "shuffle": self._kind_of_order(),
                "dataset_rows": self.dataset_rows,
                "rows": epoch.rows,
                "finished": list(epoch.finished),
                "repeated": epoch.repeated,
                "returned": epoch.returned,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a `state_dict`: what is not finished there is handed out, in that epoch's order.

        The seed becomes that of the state. Leases that were handed out before are void.

        Raises:
            InvalidArgumentError: the state is of another kind of object, of a dataset with another number of rows, or
                of one that was shuffled in another way; nothing has changed.
            ContextError: functions are running; their rows would be handed out twice.
        """
        missing = [key for key in _STATE if key not in state]
        if missing:
            raise InvalidArgumentError(
                f"this is no state of a leased dataset: it has no {', '.join(missing)}, only {', '.join(state)}."
            )
        for what, given, own in (
            ("rows", state["dataset_rows"], self.dataset_rows),
            ("order", state["shuffle"], self._kind_of_order()),
        ):
            if given != own:
                raise InvalidArgumentError(
                    f"{self._name} does not fit the position that is to be restored: its {what} is {own!r}, and was "
                    f"{given!r} when it was saved. Create it over the same rows, with the same `shuffle`."
                )
        if not self._is_idle():
            raise ContextError(
                f"{self._name} cannot go to another position while functions run: call coordinator.join() before "
                "load_state_dict, or restore it with ts.Checkpoint, which waits for them."
            )
        epoch = Epoch(state["epoch"], state["rows"], state["finished"], state["repeated"], state["returned"])
        with self._handing_out:
            self._begin(epoch, state["seed"])

    def _kind_of_order(self) -> str:
        return "given" if callable(self._shuffle) else "shuffled" if self._shuffle else "as stored"

    def __reduce__(self) -> NoReturn:
        raise WrongTypeError(
            f"{self._name} hands rows out on the coordinator and cannot travel. Iterate over it there, and schedule "
            "functions with its leases: `for lease in leased: coordinator.schedule(fn, args=(lease,))`."
        )

    def __repr__(self) -> str:
        return f"<{self._name}: {self.dataset_rows} rows, epoch {self.epoch}>"


def require_batch_size(batch_size: object) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InvalidArgumentError(f"batch_size={batch_size!r} must be a whole number of rows, at least 1.")


def reader_builder(
    make_dataset: Callable[[], object],
    batch_size: object,
    shuffle: object,
    seed: object,
    collate_fn: Callable[..., object] | None,
    rows: object,
) -> ReaderBuilder:
    """Check what `ClusterCoordinator.create_leased_dataset` was given, and make of it what builds the workers' readers.
    The length of the dataset is ``rows``, or that of the one which ``make_dataset`` makes here."""
    require_batch_size(batch_size)
    if not isinstance(shuffle, bool) and not callable(shuffle):
        raise InvalidArgumentError(
            f"shuffle={shuffle!r:.80} must be True, False, or a function that takes the number of an epoch and returns "
            "its rows' numbers."
        )
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise InvalidArgumentError(f"seed={seed!r:.80} must be a whole number that torch.manual_seed takes.")
    if collate_fn is not None:
        require_callable(collate_fn, "create_leased_dataset(collate_fn=…)")
    if rows is None:
        with undisturbed_randomness():
            rows = number_of_rows(make_dataset())
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 0:
        raise InvalidArgumentError(f"rows={rows!r} must be the number of rows of the dataset.")
    return ReaderBuilder(make_dataset, rows, collate_fn)
