"""`ClusterCoordinator.create_leased_dataset` over a cluster of threads: batches, losses, errors, positions."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import torchstrat as ts
from tests.support.gates import DEADLINE_SECONDS, await_arrivals, close_gate, pass_gate
from torchstrat import Lease, LeasedDataset
from torchstrat.errors import (
    CancelledByServerLossError,
    CancelledError,
    ClosureInputError,
    ContextError,
    InvalidArgumentError,
    LedgerError,
    NotSendableError,
    WrongTypeError,
)
from torchstrat.testing.fake_cluster import FakeCluster

ROWS = 100
ALL = list(range(ROWS))


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(workers=2, ps=2) as cluster:
        yield cluster


@pytest.fixture
def coordinator(cluster: FakeCluster) -> ts.ClusterCoordinator:
    return ts.ClusterCoordinator(cluster.strategy())


class Rows(Dataset[int]):
    """Row n is the number n."""

    def __init__(self, rows: int = ROWS) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> int:
        return index


class CountedRows:
    """A program that counts, on the servers, how often each row was trained on."""

    def __init__(
        self, cluster: FakeCluster, batch_size: int = 8, *, on_server_loss: str = "raise", **options: Any
    ) -> None:
        self.strategy = strategy = cluster.strategy(on_server_loss=on_server_loss)
        with strategy.scope():
            self.table = table = torch.nn.Embedding(ROWS, 1)
            self.optimizer = optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        self.coordinator = ts.ClusterCoordinator(strategy)
        with torch.no_grad():
            table.weight.zero_()
        self.leased = self.coordinator.create_leased_dataset(Rows, batch_size, **options)
        self.checkpoint = ts.Checkpoint(table=table, optimizer=optimizer, data=self.leased)

        def count(rows: torch.Tensor, gate: str | None = None) -> list[int]:
            table.zero_grad()
            (-table(rows)).sum().backward()
            optimizer.step()
            if gate is not None:
                pass_gate(gate)
            return rows.tolist()

        self.count = count

    def schedule(self, lease: Lease, gate: str | None = None, work: Any = None) -> ts.RemoteValue:
        return self.coordinator.schedule(work or self.count, args=(lease, gate))

    def join(self) -> None:
        self.coordinator.join(DEADLINE_SECONDS)

    def train(self, leases: Iterable[Lease] | None = None) -> list[int]:
        """What is left of the epoch, or these: the rows, in the order of the functions."""
        values = [self.schedule(lease) for lease in (self.leased if leases is None else leases)]
        self.join()
        return rows_of_values(values)

    def half(self, leases: int = 5, skip: int = 2) -> None:
        """Train on some leases of an epoch, with a gap."""
        self.train(lease for lease in itertools.islice(self.leased, leases) if lease.number != skip)

    def queue(self, gate: str, work: Any = None) -> tuple[threading.Event, list[Any], list[Any]]:
        """A function on each worker that does its ``work`` and waits at a gate; the rest of the epoch behind them."""
        event = close_gate(gate)
        leases = iter(self.leased)
        held = [self.schedule(next(leases), gate, work) for _ in range(2)]
        await_arrivals(gate, 2)
        return event, held, [self.schedule(lease) for lease in leases]

    def check(self, times: int = 1) -> None:
        """The ledger of the epoch adds up, and every row was trained on so many times."""
        self.leased.ledger.check()
        assert [int(count) for count in self.table.state_dict()["weight"].flatten()] == [times] * ROWS


def numbers(batch: torch.Tensor) -> list[int]:
    found: list[int] = batch.tolist()
    return found


def fail(batch: Any, gate: str | None = None) -> None:
    if gate is not None:
        pass_gate(gate)
    raise KeyError("a row that nobody understands")


def rows_of(leases: Iterable[Lease]) -> list[int]:
    return [int(row) for lease in leases for row in lease.rows]


def rows_of_values(values: Iterable[ts.RemoteValue]) -> list[int]:
    return [row for value in values for row in value.get()]


def error_of(value: ts.RemoteValue) -> Exception | None:
    try:
        value.get(DEADLINE_SECONDS)
    except Exception as error:
        return error
    return None


# -- batches ----------------------------------------------------------------------------------------------------------


class Pairs(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((2,), index), "y": float(index)}


class InOneRead(Pairs):
    """Says itself how it reads several rows."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"x": torch.tensor(indices), "y": 0.5}] * len(indices)


@pytest.mark.parametrize("dataset", [Pairs, InOneRead, lambda: TensorDataset(torch.arange(10)), lambda: Rows(10)])
def test_a_function_gets_the_batch_that_a_data_loader_would_give(coordinator: Any, dataset: Any) -> None:
    leased = coordinator.create_leased_dataset(dataset, 4)
    assert len(leased) == 3
    values = [coordinator.schedule(lambda batch: batch, args=(lease,)) for lease in leased]
    for value, expected in zip(values, DataLoader(dataset(), batch_size=4), strict=True):
        torch.testing.assert_close(value.get(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dataset", [Rows(8), list(range(8)), range(8), lambda: Rows(8)])
def test_what_may_be_leased_and_a_collate_function_of_the_users(coordinator: Any, dataset: Any) -> None:
    offset = 1000
    leased = coordinator.create_leased_dataset(dataset, 3, collate_fn=lambda rows: [row + offset for row in rows])
    values = [coordinator.schedule(lambda batch: batch, args=(lease,)) for lease in leased]
    assert coordinator.fetch(values) == [[1000, 1001, 1002], [1003, 1004, 1005], [1006, 1007]]


def test_a_lease_may_be_anywhere_among_the_arguments(coordinator: ts.ClusterCoordinator) -> None:
    leases = iter(coordinator.create_leased_dataset(Rows, 2))

    class Task:
        def __init__(self, lease: Lease) -> None:
            self.batch = lease

    def work(pair: Any, *, task: Any, again: Any) -> list[Any]:
        return [numbers(pair[0]["a"]), numbers(task.batch), again is task.batch]

    first, second = next(leases), next(leases)
    value = coordinator.schedule(work, args=([{"a": first}],), kwargs={"task": Task(second), "again": second})
    assert value.get() == [[0, 1], [2, 3], True]
    assert coordinator.schedule(lambda batch: numbers(batch), args=(next(leases),)).get() == [4, 5]


@pytest.mark.parametrize(
    ("batch_size", "options", "orders"),
    [
        (8, {"shuffle": True, "seed": 3}, None),
        (8, {"shuffle": lambda epoch: reversed(range(ROWS)) if epoch else range(ROWS)}, [ALL, ALL[::-1], ALL[::-1]]),
        (7, {}, [ALL] * 3),
    ],
)
def test_an_epoch_has_every_row_once_and_a_shuffled_one_another_order(cluster, batch_size, options, orders) -> None:
    program = CountedRows(cluster, batch_size, **options)
    leased, found = program.leased, []
    for epoch in range(3):
        assert leased.epoch == epoch
        found.append(program.train())
        ledger = leased.ledger
        assert (ledger.epoch, ledger.rows, ledger.handed_out, ledger.finished) == (epoch, ROWS, ROWS, ROWS)
        assert (ledger.repeated, ledger.returned, ledger.lost) == (0, 0, 0)
        program.check(epoch + 1)
    assert all(sorted(order) == ALL for order in found)
    assert found == orders or (orders is None and found[0] != found[1] != found[2])


def test_drop_last_leaves_out_another_rest_each_time(cluster: FakeCluster) -> None:
    program = CountedRows(cluster, batch_size=30, shuffle=True, drop_last=True)
    assert len(program.leased) == 3
    orders = [program.train() for _ in range(2)]
    assert [len(order) for order in orders] == [90, 90]
    assert set(orders[0]) != set(orders[1])
    program.leased.ledger.check()
    assert program.leased.ledger.rows == 90


def test_the_size_of_batches_may_change_within_an_epoch(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    leases = iter(program.leased)
    taken = []
    for size in (8, 30, 1, 50, 50):
        program.leased.batch_size = size
        taken.append(next(leases))
    assert next(leases, None) is None
    assert [len(lease) for lease in taken] == [8, 30, 1, 50, 11]
    program.train(taken)
    program.check()


# -- what comes back --------------------------------------------------------------------------------------------------


def test_rows_of_a_lost_worker_are_finished_by_another_and_counted_once(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    gate, held, rest = program.queue("lost")  # the pushes of those that wait are made
    assert program.leased.ledger.scheduled == ROWS
    cluster.kill_worker(0)
    gate.set()
    program.join()
    assert rows_of_values([*held, *rest]) == ALL
    program.check()  # what ran twice was applied once
    ledger = program.leased.ledger
    assert (ledger.repeated, ledger.returned, ledger.lost) == (16, 0, 0), "what it ran, and what waited there"


def test_rows_of_cancelled_functions_come_again_in_the_next_for(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    gate, _, rest = program.queue("cancelled", fail)
    gate.set()
    with pytest.raises(KeyError):
        program.join()
    assert all(isinstance(error_of(value), CancelledError) for value in rest)
    ledger = program.leased.ledger
    assert (program.leased.epoch, ledger.returned, ledger.left) == (0, ROWS, ROWS)
    assert program.train() == ALL
    program.check()


def test_an_error_that_schedule_raises_leaves_the_lease_to_be_scheduled(coordinator: ts.ClusterCoordinator) -> None:
    leases = iter(coordinator.create_leased_dataset(Rows, 50))
    error_of(coordinator.schedule(fail, args=(next(leases),)))
    lease = next(leases)
    with pytest.raises(KeyError):
        coordinator.schedule(numbers, args=(lease,))
    assert coordinator.schedule(numbers, args=(lease,)).get() == list(lease.rows)


def test_a_lease_that_is_not_scheduled_is_lost_until_the_next_for(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    leases = list(program.leased)
    program.train(leases[:3] + leases[4:])
    ledger = program.leased.ledger
    assert (ledger.lost, ledger.lost_rows) == (8, tuple(range(24, 32)))
    with pytest.raises(LedgerError, match="8 rows were handed out in leases that were never scheduled: 24, 25, 26"):
        ledger.check()
    assert program.leased.epoch == 0
    assert program.train() == list(range(24, 32))
    program.check()
    with pytest.raises(ContextError, match=r"Lease 3: 8 rows of epoch 0> is void: .* another `for`"):
        program.schedule(leases[3])


def test_the_next_epoch_waits_for_the_functions_of_the_last(cluster: FakeCluster) -> None:
    program = CountedRows(cluster, batch_size=50)
    gate, _, _ = program.queue("waits")
    began = threading.Event()
    next_epoch: list[Lease] = []

    def go_on() -> None:
        leases = iter(program.leased)
        began.set()
        next_epoch.extend(leases)

    thread = threading.Thread(target=go_on)
    thread.start()
    assert not began.wait(0.05)
    assert program.leased.ledger.epoch == 0, "the ledger may be asked meanwhile"
    gate.set()
    thread.join(DEADLINE_SECONDS)
    assert [lease.epoch for lease in next_epoch] == [1, 1]


def test_the_next_epoch_raises_what_the_last_one_left(cluster: FakeCluster) -> None:
    program = CountedRows(cluster, batch_size=50)
    gate, _, _ = program.queue("failing", fail)
    gate.set()
    with pytest.raises(KeyError):
        iter(program.leased)
    assert [(lease.epoch, len(lease)) for lease in program.leased] == [(0, 50), (0, 50)]


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_lease_is_for_one_function(coordinator: ts.ClusterCoordinator) -> None:
    lease, other = itertools.islice(coordinator.create_leased_dataset(Rows, 8), 2)
    assert len(coordinator.schedule(numbers, args=(lease,)).get()) == 8
    with pytest.raises(InvalidArgumentError, match=r"<Lease 0: 8 rows of epoch 0> was scheduled before, with func.* 0"):
        coordinator.schedule(numbers, args=(lease,))
    with pytest.raises(InvalidArgumentError, match="Lease 0"):
        coordinator.schedule(lambda *batches: None, args=(other, lease))
    assert coordinator.schedule(numbers, args=(other,)).get() == list(range(8, 16)), "the failed call left it alone"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda made, leased, lease: made.schedule(lambda: lease), "Pass it in schedule"),
        (lambda made, leased, lease: made.schedule(functools.partial(numbers, lease)), "Pass it in schedule"),
        (lambda made, leased, lease: made.create_per_worker_resource(lambda: lease), "Pass it in schedule"),
        (lambda made, leased, lease: made.schedule(lambda: len(leased)), "dataset Rows hands rows out"),
    ],
)
def test_neither_travels_but_a_lease_among_the_arguments(coordinator: Any, use: Any, message: str) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8)
    lease = next(iter(leased))
    with pytest.raises(NotSendableError, match=message):
        use(coordinator, leased, lease)
    assert coordinator.schedule(numbers, args=(lease,)).get() == list(range(8))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_leases_are_not_copied(coordinator: ts.ClusterCoordinator, duplicate: Callable[[Any], Any]) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8)
    with pytest.raises(WrongTypeError, match=r"a lease becomes a batch where.*\(fn, args=\(lease,\)\), not in the"):
        duplicate(next(iter(leased)))
    with pytest.raises(WrongTypeError, match="hands rows out on the coordinator and cannot travel"):
        duplicate(leased)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def locked() -> Callable[[], Rows]:
    lock = threading.Lock()
    return lambda: lock and Rows()


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Numbers, "gives Numbers, whose rows have no numbers.*create_per_worker_dataset"),
        (Numbers(), "gives Numbers, whose rows have no numbers"),
        (lambda: DataLoader(Rows()), "gives a DataLoader; leases make the batches themselves. Return its dataset"),
        (lambda: {"a": 1}, "gives dict, whose rows have no numbers"),
        (lambda: iter([1]), "gives list_iterator, whose rows have no numbers"),
        (Endless, "gives Endless, which has no __len__"),
        (5, "gives int, whose rows have no numbers"),
        (lambda path: Rows(), "create_leased_dataset has every worker call the function without arg"),
        (locked(), r"closure variable 'lock' \(a _thread.lock\)"),
    ],
)
def test_what_cannot_be_leased(coordinator: ts.ClusterCoordinator, dataset: Any, message: str) -> None:
    others = {"create_leased_dataset has": WrongTypeError, "closure variable": NotSendableError}
    with pytest.raises(others.get(" ".join(message.split()[:2]), InvalidArgumentError), match=message):
        coordinator.create_leased_dataset(dataset, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be"),
        ({"batch_size": 2.0}, "batch_size=2.0 must be"),
        ({"batch_size": True}, "batch_size=True must be"),
        ({"shuffle": 1}, "shuffle=1 must be True, False, or a function"),
        ({"seed": "a"}, "seed='a' must be a whole number"),
        ({"seed": 2**64}, "torch.manual_seed"),
        ({"rows": -1}, "rows=-1 must be the number of rows"),
        ({"rows": 2.5}, "rows=2.5 must be the number of rows"),
        ({"collate_fn": 3}, "collate_fn"),
    ],
)
def test_arguments_that_mean_nothing(coordinator: ts.ClusterCoordinator, options: Any, message: str) -> None:
    with pytest.raises(WrongTypeError if "collate_fn" in options else InvalidArgumentError, match=message):
        coordinator.create_leased_dataset(Rows, **{"batch_size": 8, **options})


def test_a_size_and_an_order_that_are_none(coordinator: ts.ClusterCoordinator) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8, shuffle=lambda epoch: [0, 1, 2, 2])
    with pytest.raises(InvalidArgumentError, match="batch_size=-3"):
        leased.batch_size = -3
    with pytest.raises(InvalidArgumentError, match="row 2 twice in epoch 0"):
        next(iter(leased))
    leased.ledger.check(complete=False)


def test_an_order_that_is_being_drawn_or_cannot_be_leaves_all_as_it_is(coordinator: ts.ClusterCoordinator) -> None:
    """Its function is the program's: while it runs, other threads may look; where it raises, nothing has begun."""
    looked: list[int] = []

    def order(epoch: int) -> list[int]:
        if epoch == 2:
            raise OSError("no order")
        if epoch:
            other = threading.Thread(target=lambda: looked.append(leased.ledger.epoch), daemon=True)
            other.start()
            other.join(DEADLINE_SECONDS)
        return list(range(ROWS))

    leased = coordinator.create_leased_dataset(Rows, 50, shuffle=order, seed=3)
    state = leased.state_dict()
    for lease in leased:
        coordinator.schedule(numbers, args=(lease,))
    coordinator.join(DEADLINE_SECONDS)
    iter(leased)
    assert (looked, leased.ledger.epoch) == ([0], 1)
    leased.load_state_dict({**state, "epoch": 1})
    assert (looked, leased.ledger.epoch) == ([0, 1], 1)
    at = leased.state_dict()
    with pytest.raises(OSError, match="no order"):
        leased.load_state_dict({**state, "epoch": 2, "seed": 5})
    assert leased.state_dict() == at


def test_another_size_of_batches_draws_no_order_again(coordinator: ts.ClusterCoordinator) -> None:
    drawn: list[int] = []
    leased = coordinator.create_leased_dataset(
        Rows, 8, shuffle=lambda epoch: drawn.append(epoch) or range(ROWS), drop_last=True
    )
    leased.batch_size = 30
    assert drawn == [0]
    assert [list(lease.rows) for lease in leased] == [list(range(at, at + 30)) for at in (0, 30, 60)]


class Broken(Rows):
    def __getitem__(self, index: int) -> int:
        raise OSError(f"row {index} cannot be read")


@pytest.mark.parametrize(
    ("make", "rows", "error", "message"),
    [
        (
            lambda worker: Rows(90 + worker()),
            100,
            ClosureInputError,
            r"has 9(\d) rows on worker \1, and 100 on the coord",
        ),
        (lambda worker: Numbers(), 10, ClosureInputError, r"gives Numbers on worker \d, whose rows have no numbers"),
        (lambda worker: Broken(), None, OSError, "row 0 cannot be read"),
    ],
    ids=["other rows", "no numbers", "a row that cannot be read"],
)
def test_what_a_worker_cannot_read_is_the_functions_error(coordinator, make, rows, error, message) -> None:
    leased = coordinator.create_leased_dataset(lambda: make(coordinator.get_current_worker_index), 8, rows=rows)
    with pytest.raises(error, match=message):
        coordinator.schedule(numbers, args=(next(iter(leased)),)).get()
    assert leased.ledger.returned == 8


# -- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 8, 13, 200])
def test_a_resumed_epoch_hands_out_exactly_the_rest(cluster: FakeCluster, tmp_path: Path, batch_size: int) -> None:
    before = CountedRows(cluster, shuffle=True, seed=5)
    before.train()
    before.half(skip=15)
    before.checkpoint.save(tmp_path / "checkpoint")
    before.strategy.close()
    with FakeCluster(workers=1, ps=3) as another:
        after = CountedRows(another, batch_size=batch_size, shuffle=True, seed=77)
        after.checkpoint.restore(tmp_path / "checkpoint")
        leased = after.leased
        assert (leased.epoch, leased.ledger.finished, leased.ledger.left) == (1, 32, 68)
        assert len(after.train()) == 68
        after.check(2)
        assert leased.ledger.handed_out == ROWS
        # The epochs after it are those that an undisturbed run would have.
        undisturbed = after.coordinator.create_leased_dataset(Rows, 8, shuffle=True, seed=5)
        undisturbed.load_state_dict({**undisturbed.state_dict(), "epoch": 2})
        assert after.train() == rows_of(undisturbed)


def test_a_position_is_plain_data(coordinator: ts.ClusterCoordinator) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8, shuffle=True, seed=9)
    assert repr(leased) == "<the leased dataset Rows: 100 rows, epoch 0>"
    assert (type(leased), leased.batch_size, len(leased)) == (LeasedDataset, 8, 13)
    assert leased.state_dict() == {
        "epoch": 0,
        "seed": 9,
        "shuffle": "shuffled",
        "dataset_rows": ROWS,
        "rows": ROWS,
        "finished": [],
        "repeated": 0,
        "returned": 0,
    }
    for lease in leased:
        coordinator.schedule(numbers, args=(lease,))
    coordinator.join(DEADLINE_SECONDS)
    state = json.loads(json.dumps(leased.state_dict()))
    assert state["finished"] == [[0, ROWS]]
    other = coordinator.create_leased_dataset(Rows, 8, shuffle=True)
    other.load_state_dict(state)
    assert other.epoch == 1, "the epoch is over"
    assert [lease.epoch for lease in itertools.islice(other, 1)] == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_rows": 99}, "its rows is 100, and was 99 when it was saved"),
        ({"shuffle": "shuffled"}, "its order is 'as stored', and was 'shuffled' when it was saved"),
        ({"epoch": None}, "it has no epoch, only seed"),
    ],
)
def test_a_position_that_does_not_fit(coordinator, changes, message) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8)
    lease = next(iter(leased))
    state = {**leased.state_dict(), **changes}
    with pytest.raises(InvalidArgumentError, match=message):
        leased.load_state_dict({key: value for key, value in state.items() if value is not None})
    assert coordinator.schedule(numbers, args=(lease,)).get() == list(range(8)), "nothing has changed"


def test_the_position_does_not_change_under_functions(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    gate, _, _ = program.queue("position")
    with pytest.raises(ContextError, match=r"cannot go to another position while functions run: call coordinator.join"):
        program.leased.load_state_dict(program.leased.state_dict())
    gate.set()
    program.join()
    program.leased.load_state_dict(program.leased.state_dict())


def test_leases_from_before_a_restore_are_void(cluster: FakeCluster, tmp_path: Path) -> None:
    program = CountedRows(cluster)
    program.half()
    assert program.leased.state_dict()["finished"] == [(0, 16), (24, 40)]
    program.checkpoint.save(tmp_path / "checkpoint")
    held, *others = program.leased
    program.train(others)
    program.checkpoint.restore(tmp_path / "checkpoint")
    with pytest.raises(ContextError, match=r"rows of epoch 0> is void: .* went to the position of a checkpoint"):
        program.schedule(held)
    assert program.train() == [*range(16, 24), *range(40, ROWS)]
    program.check()


def test_an_iterator_goes_on_from_a_restored_position_to_the_end_of_its_epoch(cluster, tmp_path) -> None:
    program = CountedRows(cluster, batch_size=20)
    program.half(leases=2, skip=1)
    program.checkpoint.save(tmp_path / "checkpoint")
    program.train()
    seen = []
    for lease in program.leased:  # epoch 1
        program.schedule(lease).get()
        seen.append((lease.epoch, int(lease.rows[0])))
        if len(seen) == 2:
            program.checkpoint.restore(tmp_path / "checkpoint")
    rest_of_0, whole_of_1 = ([(epoch, row) for row in range(20 * (1 - epoch), 100, 20)] for epoch in (0, 1))
    assert seen == [(1, 0), (1, 20), *rest_of_0, *whole_of_1]
    program.check(2)
    assert program.leased.epoch == 2


def test_a_loop_over_leases_lives_through_restores_that_it_does_not_ask_for(cluster, tmp_path) -> None:
    """The lease that the loop has in its hands when the servers go back is cancelled with everything else."""
    program = CountedRows(cluster, on_server_loss="restore")
    with ts.CheckpointManager(tmp_path) as manager:
        manager.save(program.checkpoint, 0)
        restored: list[int] = []
        program.coordinator.restore_on_server_loss(manager, program.checkpoint, on_restored=restored.append)
        cancelled = 0
        while program.leased.epoch < 2:
            for lease in program.leased:
                if lease.number in (5, 20):  # in the middle of either epoch
                    manager.save(program.checkpoint, lease.number)
                if lease.number in (8, 23):
                    cluster.kill_server(1)
                    cluster.start_server(1)
                    program.join()  # restores; the lease is outdated now
                cancelled += isinstance(error_of(program.schedule(lease)), CancelledByServerLossError)
            program.join()
        program.check(2)
    assert restored == [5, 20]
    assert cancelled == 2
