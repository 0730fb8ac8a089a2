"""`Lease`: a few rows of one epoch, for one scheduled function; a worker's `Reader` makes a batch of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, default_collate

from torchstrat.core.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.data.marks import unmarked
from torchstrat.parameter_server.leases.epoch import Epoch, Positions, RowNumbers, RowOrder
from torchstrat.parameter_server.serialization.path_errors import Refused
from torchstrat.parameter_server.worker.executor import current_worker_index


class Account:
    """Of one leased dataset: where the rows of the epoch under way are, and the order in which they are handed out.

    The coordinator's threads need it too: with ``lock``.
    """

    epoch: Epoch
    order: RowOrder

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def begin(self, epoch: Epoch, order: RowOrder) -> None:
        """Leases of other epochs are void."""
        self.epoch, self.order = epoch, order

    def finish(self, epoch: Epoch, number: int) -> None:
        """A lease's rows are finished, and will not come again."""
        positions = epoch.finish(number)
        if epoch is self.epoch:
            for start, stop in positions:
                self.order.forget(start, stop)


class Lease:
    """Rows that one function is to be given as its batch. Made by iterating over a `LeasedDataset`.

    ``coordinator.schedule(fn, args=(lease,))`` calls ``fn`` with the batch itself: the executing worker reads the rows
    from its own copy of the dataset and collates them. When the worker is lost, the function runs again on another one,
    with the same rows. A lease is for one function; it may be anywhere in its ``args`` and ``kwargs``, and only there.
    """

    __slots__ = ("_reader", "_tenure", "number", "positions", "rows")

    def __init__(
        self, account: Account, epoch: Epoch, reader: object, number: int, positions: Positions, rows: RowNumbers
    ) -> None:
        self.number = number
        """Counted from 0 over the whole job."""
        self.positions = positions
        """Where in the epoch's order the rows are: intervals ``(start, stop)``, one but for rows that came back."""
        self.rows = rows
        """Their numbers in the dataset, ``(len,)`` int64, in the order in which the batch has them."""
        self._reader = reader
        self._tenure = Tenure(account, epoch, number, len(rows))

    @property
    def epoch(self) -> int:
        """The number of the epoch that the rows are of."""
        return self._tenure.epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return repr(self._tenure)

    def __reduce__(self) -> tuple[object, ...]:
        """What a worker unpickles is the batch."""
        found = _packing.leases
        if found is None:
            raise NotAnArgumentError(self)
        found.append(self._tenure)
        return read_batch, (self._reader, self.rows.tobytes())  # an array takes 0.2 ms to pickle


class Tenure:
    """What becomes of a lease, for the coordinator."""

    __slots__ = ("_account", "_epoch", "_function", "_number", "_rows", "_sent")

    def __init__(self, account: Account, epoch: Epoch, number: int, rows: int) -> None:
        self._account, self._epoch, self._number, self._rows = account, epoch, number, rows
        self._function: int | None = None
        self._sent = False

    @property
    def epoch(self) -> int:
        return self._epoch.number

    def __repr__(self) -> str:
        return f"<Lease {self._number}: {self._rows} rows of epoch {self.epoch}>"

    def claim(self, function: int) -> None:
        """Function ``function`` gets it. Raises for one that has a function, and for one that is void."""
        with self._account.lock:
            if self._function is not None:
                raise InvalidArgumentError(
                    f"{self!r} was scheduled before, with function {self._function}; a lease is for one function. Take "
                    "another one from the leased dataset's iterator."
                )
            if self._epoch is not self._account.epoch:
                raise OutdatedLeaseError(
                    f"{self!r} is void: since it was handed out, the leased dataset went to the position of a "
                    "checkpoint. Schedule the leases that come now."
                )
            if not self._epoch.holds(self._number):
                raise ContextError(
                    f"{self!r} is void: since it was handed out, another `for` over the leased dataset has begun, "
                    "which hands its rows out again. Schedule the leases that come now."
                )
            self._epoch.schedule(self._number)
            self._function = function

    def unclaim(self) -> None:
        with self._account.lock:
            self._epoch.unschedule(self._number)
            self._function = None

    def was_sent(self) -> None:
        """The function goes to a worker."""
        with self._account.lock:
            if self._sent:
                self._epoch.repeat(self._number)
            self._sent = True

    def was_handed_back(self) -> None:
        """The worker has not begun the function, so that sending it again repeats nothing."""
        with self._account.lock:
            self._sent = False

    def ended(self, *, returned: bool) -> None:
        """The function has its outcome: it ``returned``; else it raised, or was cancelled."""
        with self._account.lock:
            if returned:
                self._account.finish(self._epoch, self._number)
            else:
                self._epoch.give_back(self._number)


class OutdatedLeaseError(ContextError):
    """A lease was handed out before its dataset went to another position."""


class NotAnArgumentError(Refused, WrongTypeError):
    """A lease is pickled elsewhere than among a function's arguments."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(
            lease,
            "a lease becomes a batch where it is an argument. Pass it in schedule(fn, args=(lease,)), not in the "
            "function's closure, a partial or a global.",
        )


class _Packing(threading.local):
    leases: list[Tenure] | None = None


_packing = _Packing()


@contextmanager
def leases_among_arguments() -> Iterator[list[Tenure]]:
    """While a function's arguments are pickled in this thread: those of the leases among them."""
    found: list[Tenure] = []
    _packing.leases = found
    try:
        yield found
    finally:
        _packing.leases = None


def claim_all(leases: list[Tenure], function: int) -> None:
    """All or none of them for a function. Raises `InvalidArgumentError` or `ContextError`."""
    claimed: list[Tenure] = []
    try:
        for lease in leases:
            lease.claim(function)
            claimed.append(lease)
    except Exception:
        for lease in claimed:
            lease.unclaim()
        raise


class ReaderBuilder:
    """Builds a worker's `Reader`; travels to the workers with the user's functions.

    Args:
        rows: how many the coordinator counts on.
    """

    def __init__(self, dataset_fn: Callable[[], object], rows: int, collate_fn: Callable[..., object] | None) -> None:
        self.dataset_fn = dataset_fn
        self.rows = rows
        self._collate_fn = collate_fn

    def __call__(self) -> Reader:
        dataset = self.dataset_fn()
        worker = current_worker_index()
        found = number_of_rows(dataset, f" on worker {worker}")
        if found != self.rows:
            raise InvalidArgumentError(
                f"the dataset has {found} rows on worker {worker}, and {self.rows} on the coordinator; leases need "
                "the same rows everywhere. Look at the files that this worker reads, and build no part of the dataset: "
                "leases share the rows out."
            )
        return Reader(dataset, default_collate if self._collate_fn is None else self._collate_fn)


class Reader:
    """A worker's own copy of a leased dataset, and batches out of it."""

    def __init__(self, dataset: Any, collate: Callable[..., object]) -> None:
        self._dataset = dataset
        self._collate = collate

    def read(self, rows: RowNumbers) -> object:
        """The rows as a batch, read and collated as a `DataLoader` does."""
        indices = rows.tolist()
        if getattr(self._dataset, "__getitems__", None) is not None:
            return unmarked(self._collate(self._dataset.__getitems__(indices)))
        return unmarked(self._collate([self._dataset[index] for index in indices]))


def read_batch(reader: Reader, rows: bytes) -> object:
    """What a lease is unpickled with, on a worker. ``rows``: their numbers, int64."""
    return reader.read(np.frombuffer(rows, dtype=np.int64))


def number_of_rows(dataset: Any, where: str = "") -> int:
    """The length of a dataset whose rows have numbers. Raises `InvalidArgumentError` for another kind."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise InvalidArgumentError(
            f"the dataset function gives a DataLoader{where}; leases make the batches themselves. Return its dataset, "
            "and give batch_size, shuffle and collate_fn to create_leased_dataset."
        )
    has_numbers = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset | dict | str | bytes)
    if not has_numbers:
        raise InvalidArgumentError(
            f"the dataset function gives {kind}{where}, whose rows have no numbers, so they cannot be leased. Return "
            "one with __getitem__ and __len__; or use coordinator.create_per_worker_dataset, with which each worker "
            "goes through a copy of its own and an epoch is not exact."
        )
    try:
        return len(dataset)
    except TypeError:
        raise InvalidArgumentError(
            f"the dataset function gives {kind}{where}, which has no __len__; an epoch of leases needs to know how "
            "many rows there are."
        ) from None
