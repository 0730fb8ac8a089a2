"""`ClusterCoordinator.create_leased_dataset` over a cluster of threads: batches, losses, errors, positions."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import torchstrat as ts
from tests.unit.gates import DEADLINE_SECONDS, await_arrivals, close_gate, pass_gate
from torchstrat import Lease, LeasedDataset
from torchstrat.errors import (
    CancelledByServerLossError,
    CancelledError,
    ClosureInputError,
    ContextError,
    InvalidArgumentError,
    LedgerError,
    NotSendableError,
    ParameterServerUnavailable,
    WrongTypeError,
)
from torchstrat.testing.fake_cluster import FakeCluster

ROWS = 100


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

        self._count = count

    def schedule(self, lease: Lease, gate: str | None = None) -> ts.RemoteValue:
        return self.coordinator.schedule(self._count, args=(lease, gate))

    def train(self) -> list[int]:
        """What is left of the epoch: the rows, in the order of the functions."""
        values = [self.schedule(lease) for lease in self.leased]
        self.coordinator.join(DEADLINE_SECONDS)
        return [row for value in values for row in value.get()]

    def counts(self) -> list[int]:
        return [int(count) for count in self.table.state_dict()["weight"].flatten()]


def numbers(batch: torch.Tensor) -> list[int]:
    found: list[int] = batch.tolist()
    return found


def fail(batch: Any) -> None:
    raise KeyError("a row that nobody understands")


def rows_of(leases: Iterator[Lease] | list[Lease]) -> list[int]:
    return [int(row) for lease in leases for row in lease.rows]


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


def test_a_function_gets_the_batch_that_a_data_loader_would_give(coordinator: ts.ClusterCoordinator) -> None:
    leased = coordinator.create_leased_dataset(Pairs, 4)
    assert len(leased) == 3
    values = [coordinator.schedule(lambda batch: batch, args=(lease,)) for lease in leased]
    for value, expected in zip(values, DataLoader(Pairs(), batch_size=4), strict=True):
        found = value.get()
        assert found.keys() == expected.keys()
        assert torch.equal(found["x"], expected["x"])
        assert torch.equal(found["y"], expected["y"])
        assert found["y"].dtype == expected["y"].dtype


def test_many_rows_may_be_read_at_once(coordinator: ts.ClusterCoordinator) -> None:
    (lease,) = itertools.islice(coordinator.create_leased_dataset(InOneRead, 3), 1)
    assert coordinator.schedule(lambda batch: batch["x"].tolist(), args=(lease,)).get() == [[0, 1, 2]] * 3


def test_a_collate_function_of_the_users(coordinator: ts.ClusterCoordinator) -> None:
    offset = 1000
    leased = coordinator.create_leased_dataset(Rows, 3, collate_fn=lambda rows: [row + offset for row in rows])
    lease = next(iter(leased))
    assert coordinator.schedule(lambda batch: batch, args=(lease,)).get() == [1000, 1001, 1002]


@pytest.mark.parametrize("dataset", [Rows(12), list(range(12)), TensorDataset(torch.arange(12)), lambda: Rows(12)])
def test_what_may_be_leased(coordinator: ts.ClusterCoordinator, dataset: Any) -> None:
    collected = [
        coordinator.schedule(lambda batch: torch.as_tensor(batch[0]).numel(), args=(lease,)).get()
        for lease in coordinator.create_leased_dataset(dataset, 5, collate_fn=lambda rows: [torch.tensor(rows)])
    ]
    assert collected == [5, 5, 2]


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


def test_an_epoch_has_every_row_once_and_the_next_one_another_order(cluster: FakeCluster) -> None:
    program = CountedRows(cluster, shuffle=True, seed=3)
    leased = program.leased
    orders = []
    for epoch in range(3):
        assert leased.epoch == epoch
        orders.append(program.train())
        ledger = leased.ledger
        assert (ledger.epoch, ledger.rows, ledger.handed_out, ledger.finished) == (epoch, ROWS, ROWS, ROWS)
        assert (ledger.repeated, ledger.returned, ledger.lost) == (0, 0, 0)
        ledger.check()
        assert program.counts() == [epoch + 1] * ROWS
    assert all(sorted(order) == list(range(ROWS)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_the_order_is_that_of_the_seed(coordinator: ts.ClusterCoordinator) -> None:
    def order(seed: int) -> list[int]:
        return rows_of(list(coordinator.create_leased_dataset(Rows, 7, shuffle=True, seed=seed)))

    assert order(1) == order(1) != order(2)
    assert rows_of(list(coordinator.create_leased_dataset(Rows, 7))) == list(range(ROWS))


def test_an_order_of_the_users(cluster: FakeCluster) -> None:
    program = CountedRows(cluster, shuffle=lambda epoch: reversed(range(ROWS)) if epoch else range(ROWS))
    assert program.train() == list(range(ROWS))
    assert program.train() == list(range(ROWS))[::-1]
    assert program.counts() == [2] * ROWS


def test_an_order_that_is_none_is_an_error_of_the_iterator(coordinator: ts.ClusterCoordinator) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8, shuffle=lambda epoch: [0, 1, 2, 2])
    with pytest.raises(InvalidArgumentError, match="row 2 twice in epoch 0"):
        next(iter(leased))
    leased.ledger.check(complete=False)


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
    sizes = []
    for size in (8, 30, 1, 50, 50):
        program.leased.batch_size = size
        lease = next(leases)
        sizes.append(len(lease))
        program.schedule(lease)
    assert next(leases, None) is None
    program.coordinator.join(DEADLINE_SECONDS)
    assert sizes == [8, 30, 1, 50, 11]
    program.leased.ledger.check()
    assert program.counts() == [1] * ROWS


def test_leases_are_small_on_their_way(coordinator: ts.ClusterCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    submit = coordinator._dispatcher.submit
    monkeypatch.setattr(
        coordinator._dispatcher,
        "submit",
        lambda make: submit(lambda number: sent.append((work := make(number)).arguments.nbytes) or work),
    )
    leased = coordinator.create_leased_dataset(lambda: range(10**9), 64, shuffle=True, collate_fn=len)
    values = [coordinator.schedule(lambda batch: batch, args=(lease,)) for lease in itertools.islice(leased, 20)]
    assert coordinator.fetch(values) == [64] * 20
    assert max(sent) < 64 * 8 + 500


# -- what comes back --------------------------------------------------------------------------------------------------


def test_rows_of_a_lost_worker_are_finished_by_another_and_counted_once(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    gate = close_gate("lost")
    leases = iter(program.leased)
    held = [program.schedule(next(leases), "lost") for _ in range(2)]  # one on each worker, their pushes made
    rest = [program.schedule(lease) for lease in leases]
    await_arrivals("lost", 2)
    assert program.leased.ledger.scheduled == ROWS
    cluster.kill_worker(0)
    gate.set()
    program.coordinator.join(DEADLINE_SECONDS)
    assert rows_of_values([*held, *rest]) == list(range(ROWS))
    assert program.counts() == [1] * ROWS, "what ran twice was applied once"
    ledger = program.leased.ledger
    assert (ledger.repeated, ledger.returned, ledger.lost) == (16, 0, 0), "what it ran, and what waited there"
    ledger.check()


def rows_of_values(values: list[ts.RemoteValue]) -> list[int]:
    return [row for value in values for row in value.get()]


def test_rows_of_a_function_that_raised_come_again(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    coordinator, leased = program.coordinator, program.leased
    leases = iter(leased)
    first = next(leases)
    coordinator.schedule(fail, args=(first,))
    with pytest.raises(KeyError, match="nobody understands"):
        coordinator.join(DEADLINE_SECONDS)
    assert leased.ledger.returned == 8
    with pytest.raises(LedgerError, match="100 rows were not finished: 0 with functions"):
        leased.ledger.check()
    again = next(leases)
    assert again.rows.tolist() == first.rows.tolist()
    assert again.number != first.number
    program.schedule(again)
    program.train()
    leased.ledger.check()
    assert (leased.ledger.handed_out, leased.ledger.returned) == (ROWS + 8, 8)
    assert program.counts() == [1] * ROWS


def test_rows_of_cancelled_functions_come_again_in_the_next_for(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    coordinator, leased = program.coordinator, program.leased
    gate = close_gate("cancelled")
    leases = iter(leased)

    def fail_later(batch: Any) -> None:
        pass_gate("cancelled")
        fail(batch)

    values = [coordinator.schedule(fail_later, args=(next(leases),)) for _ in range(2)]
    await_arrivals("cancelled", 2)
    values += [program.schedule(lease) for lease in leases]
    gate.set()
    with pytest.raises(KeyError):
        coordinator.join(DEADLINE_SECONDS)
    cancelled = sum(isinstance(error_of(value), CancelledError) for value in values)
    assert cancelled == len(values) - 2
    assert leased.ledger.returned == ROWS
    assert (leased.epoch, leased.ledger.left) == (0, ROWS)
    assert program.train() == list(range(ROWS))
    leased.ledger.check()
    assert program.counts() == [1] * ROWS


def error_of(value: ts.RemoteValue) -> Exception | None:
    try:
        value.get(DEADLINE_SECONDS)
    except Exception as error:
        return error
    return None


def test_an_error_that_schedule_raises_leaves_the_lease_to_be_scheduled(coordinator: ts.ClusterCoordinator) -> None:
    leases = iter(coordinator.create_leased_dataset(Rows, 50))
    error_of(coordinator.schedule(fail, args=(next(leases),)))
    lease = next(leases)
    with pytest.raises(KeyError):
        coordinator.schedule(numbers, args=(lease,))
    assert coordinator.schedule(numbers, args=(lease,)).get() == list(lease.rows)


def test_a_lease_that_is_not_scheduled_is_lost_until_the_next_for(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    leased = program.leased
    for number, lease in enumerate(leased):
        if number == 3:
            forgotten = lease
        else:
            program.schedule(lease)
    program.coordinator.join(DEADLINE_SECONDS)
    ledger = leased.ledger
    assert (ledger.lost, ledger.lost_rows) == (8, tuple(range(24, 32)))
    with pytest.raises(LedgerError, match="8 rows were handed out in leases that were never scheduled: 24, 25, 26"):
        ledger.check()
    assert leased.epoch == 0
    assert program.train() == list(range(24, 32))
    leased.ledger.check()
    assert program.counts() == [1] * ROWS
    with pytest.raises(ContextError, match=r"Lease 3: 8 rows of epoch 0> is void: .* another `for`"):
        program.schedule(forgotten)


def test_a_loop_that_is_left_goes_on_with_the_lease_that_it_had_drawn(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    for lease in program.leased:
        if lease.number == 4:
            break
        program.schedule(lease)
    assert program.train() == list(range(32, ROWS))
    program.leased.ledger.check()
    assert program.counts() == [1] * ROWS


def test_the_next_epoch_waits_for_the_functions_of_the_last(cluster: FakeCluster) -> None:
    program = CountedRows(cluster, batch_size=50)
    gate = close_gate("waits")
    for lease in program.leased:
        program.schedule(lease, "waits")
    await_arrivals("waits", 2)
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


def test_the_next_epoch_raises_what_the_last_one_left(coordinator: ts.ClusterCoordinator) -> None:
    leased = coordinator.create_leased_dataset(Rows, ROWS)
    gate = close_gate("failing")

    def fail_later(batch: Any) -> None:
        pass_gate("failing")
        fail(batch)

    for lease in leased:
        coordinator.schedule(fail_later, args=(lease,))
    gate.set()
    with pytest.raises(KeyError):
        iter(leased)
    assert [(lease.epoch, len(lease)) for lease in leased] == [(0, ROWS)]


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
    "schedule",
    [
        lambda coordinator, lease: coordinator.schedule(lambda: lease),
        lambda coordinator, lease: coordinator.schedule(functools.partial(numbers, lease)),
        lambda coordinator, lease: coordinator.create_per_worker_resource(lambda: lease),
    ],
    ids=["a closure", "a partial", "a resource"],
)
def test_a_lease_elsewhere_than_among_the_arguments(coordinator: ts.ClusterCoordinator, schedule: Any) -> None:
    lease = next(iter(coordinator.create_leased_dataset(Rows, 8)))
    with pytest.raises(NotSendableError, match=r"Pass it in schedule\(fn, args=\(lease,\)\), not in the"):
        schedule(coordinator, lease)
    assert coordinator.schedule(numbers, args=(lease,)).get() == list(range(8))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_leases_are_not_copied(coordinator: ts.ClusterCoordinator, duplicate: Callable[[Any], Any]) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8)
    with pytest.raises(WrongTypeError, match="a lease becomes a batch where it is an argument"):
        duplicate(next(iter(leased)))
    with pytest.raises(WrongTypeError, match="hands rows out on the coordinator and cannot travel"):
        duplicate(leased)


def test_the_leased_dataset_itself_stays_here(coordinator: ts.ClusterCoordinator) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8)
    with pytest.raises(NotSendableError, match="the leased dataset Rows hands rows out on the coordinator"):
        coordinator.schedule(lambda: len(leased))


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


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
    ],
)
def test_what_cannot_be_leased(coordinator: ts.ClusterCoordinator, dataset: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        coordinator.create_leased_dataset(dataset, 8)


@pytest.mark.parametrize(
    ("batch_size", "options", "message"),
    [
        (0, {}, "batch_size=0 must be"),
        (2.0, {}, "batch_size=2.0 must be"),
        (True, {}, "batch_size=True must be"),
        (8, {"shuffle": 1}, "shuffle=1 must be True, False, or a function"),
        (8, {"seed": "a"}, "seed='a' must be a whole number"),
        (8, {"seed": 2**64}, "torch.manual_seed"),
        (8, {"rows": -1}, "rows=-1 must be the number of rows"),
        (8, {"rows": 2.5}, "rows=2.5 must be the number of rows"),
    ],
)
def test_arguments_that_mean_nothing(
    coordinator: ts.ClusterCoordinator, batch_size: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        coordinator.create_leased_dataset(Rows, batch_size, **options)


def test_functions_that_are_none_or_need_arguments(coordinator: ts.ClusterCoordinator) -> None:
    with pytest.raises(WrongTypeError, match="create_leased_dataset has every worker call the function without arg"):
        coordinator.create_leased_dataset(lambda path: Rows(), 8)
    with pytest.raises(WrongTypeError, match="collate_fn"):
        coordinator.create_leased_dataset(Rows, 8, collate_fn=3)  # type: ignore[arg-type]
    lock = threading.Lock()
    with pytest.raises(NotSendableError, match=r"closure variable 'lock' \(a _thread.lock\)"):
        coordinator.create_leased_dataset(lambda: lock and Rows(), 8)
    leased = coordinator.create_leased_dataset(Rows, 8)
    with pytest.raises(InvalidArgumentError, match="batch_size=-3"):
        leased.batch_size = -3


def test_a_worker_with_other_rows_is_named(coordinator: ts.ClusterCoordinator) -> None:
    def make() -> Rows:
        return Rows(90 + coordinator.get_current_worker_index())

    leased = coordinator.create_leased_dataset(make, 8, rows=100)
    value = coordinator.schedule(numbers, args=(next(iter(leased)),))
    with pytest.raises(ClosureInputError, match=r"has 9(\d) rows on worker \1, and 100 on the coordinator"):
        value.get()
    assert leased.ledger.returned == 8


def test_a_worker_whose_rows_have_no_numbers_is_named(coordinator: ts.ClusterCoordinator) -> None:
    leased = coordinator.create_leased_dataset(Numbers, 8, rows=10)
    with pytest.raises(ClosureInputError, match=r"gives Numbers on worker \d, whose rows have no numbers"):
        coordinator.schedule(numbers, args=(next(iter(leased)),)).get()


def test_with_its_length_given_the_dataset_is_made_on_workers_only(coordinator: ts.ClusterCoordinator) -> None:
    def make() -> Rows:
        coordinator.get_current_worker_index()  # fails here
        return Rows()

    with pytest.raises(ContextError):
        coordinator.create_leased_dataset(make, 8)
    leased = coordinator.create_leased_dataset(make, 8, rows=ROWS)
    assert coordinator.schedule(numbers, args=(next(iter(leased)),)).get() == list(range(8))


def test_asking_for_the_length_disturbs_no_randomness(coordinator: ts.ClusterCoordinator) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    coordinator.create_leased_dataset(lambda: TensorDataset(torch.rand(10)), 8)
    assert torch.equal(torch.rand(1), expected)


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        raise OSError(f"row {index} cannot be read")


def test_a_row_that_cannot_be_read_is_the_functions_error(coordinator: ts.ClusterCoordinator) -> None:
    leased = coordinator.create_leased_dataset(Broken, 2)
    value = coordinator.schedule(numbers, args=(next(iter(leased)),))
    with pytest.raises(OSError, match="row 0 cannot be read"):
        value.get()
    assert leased.ledger.returned == 2


@pytest.mark.parametrize("options", [{"batch_size": 8, "rows": 0}, {"batch_size": 101, "drop_last": True}])
def test_an_epoch_without_rows(coordinator: ts.ClusterCoordinator, options: dict[str, Any]) -> None:
    leased = coordinator.create_leased_dataset(Rows, **options)
    assert list(leased) == []
    leased.ledger.check()


# -- positions --------------------------------------------------------------------------------------------------------


def half_of(program: CountedRows, leases: int = 5, skip: int = 2) -> None:
    """Train on some leases of an epoch, with a gap."""
    for lease in itertools.islice(program.leased, leases):
        if lease.number != skip:
            program.schedule(lease)
    program.coordinator.join(DEADLINE_SECONDS)


@pytest.mark.parametrize("batch_size", [1, 8, 13, 200])
def test_a_resumed_epoch_hands_out_exactly_the_rest(cluster: FakeCluster, tmp_path: Path, batch_size: int) -> None:
    before = CountedRows(cluster, shuffle=True, seed=5)
    before.train()
    half_of(before, skip=15)
    before.checkpoint.save(tmp_path / "checkpoint")
    before.strategy.close()
    with FakeCluster(workers=1, ps=3) as another:
        after = CountedRows(another, batch_size=batch_size, shuffle=True, seed=77)
        after.checkpoint.restore(tmp_path / "checkpoint")
        leased = after.leased
        assert leased.epoch == 1
        assert (leased.ledger.finished, leased.ledger.left) == (32, 68)
        rest = after.train()
        assert len(rest) == 68
        leased.ledger.check()
        assert after.counts() == [2] * ROWS
        assert leased.ledger.handed_out == ROWS
        # The epochs after it are those that an undisturbed run would have.
        undisturbed = after.coordinator.create_leased_dataset(Rows, 8, shuffle=True, seed=5)
        undisturbed.load_state_dict({**undisturbed.state_dict(), "epoch": 2})
        assert after.train() == rows_of(iter(undisturbed))


def test_a_position_is_plain_data(coordinator: ts.ClusterCoordinator) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8, shuffle=True, seed=9)
    state = leased.state_dict()
    assert state == {
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


def test_an_order_of_the_users_is_drawn_again(cluster: FakeCluster) -> None:
    program = CountedRows(cluster, shuffle=lambda epoch: reversed(range(ROWS)))
    half_of(program)
    state = program.leased.state_dict()
    assert state["finished"] == [(0, 16), (24, 40)]
    again = program.coordinator.create_leased_dataset(Rows, 100, shuffle=lambda epoch: reversed(range(ROWS)))
    again.load_state_dict(state)
    assert rows_of(iter(again)) == [*range(83, 75, -1), *range(59, -1, -1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_rows": 99}, "its rows is 100, and was 99 when it was saved"),
        ({"shuffle": "shuffled"}, "its order is 'as stored', and was 'shuffled' when it was saved"),
        ({"epoch": None}, "it has no epoch, only seed"),
    ],
)
def test_a_position_that_does_not_fit(
    coordinator: ts.ClusterCoordinator, changes: dict[str, Any], message: str
) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8)
    lease = next(iter(leased))
    state = {**leased.state_dict(), **changes}
    with pytest.raises(InvalidArgumentError, match=message):
        leased.load_state_dict({key: value for key, value in state.items() if value is not None})
    assert coordinator.schedule(numbers, args=(lease,)).get() == list(range(8)), "nothing has changed"


def test_the_position_does_not_change_under_functions(cluster: FakeCluster) -> None:
    program = CountedRows(cluster)
    gate = close_gate("position")
    program.schedule(next(iter(program.leased)), "position")
    await_arrivals("position", 1)
    with pytest.raises(ContextError, match=r"cannot go to another position while functions run: call coordinator.join"):
        program.leased.load_state_dict(program.leased.state_dict())
    gate.set()
    program.coordinator.join(DEADLINE_SECONDS)
    program.leased.load_state_dict(program.leased.state_dict())


def test_leases_from_before_a_restore_are_void(cluster: FakeCluster, tmp_path: Path) -> None:
    program = CountedRows(cluster)
    half_of(program)
    program.checkpoint.save(tmp_path / "checkpoint")
    leases = iter(program.leased)
    held = next(leases)
    for lease in leases:
        program.schedule(lease)
    program.coordinator.join(DEADLINE_SECONDS)
    program.checkpoint.restore(tmp_path / "checkpoint")
    with pytest.raises(ContextError, match=r"rows of epoch 0> is void: .* went to the position of a checkpoint"):
        program.schedule(held)
    assert program.train() == [*range(16, 24), *range(40, ROWS)]
    program.leased.ledger.check()
    assert program.counts() == [1] * ROWS


def test_an_iterator_goes_on_from_a_restored_position_to_the_end_of_its_epoch(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    program = CountedRows(cluster, batch_size=20)
    half_of(program, leases=2, skip=1)
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
    assert program.counts() == [2] * ROWS
    assert program.leased.epoch == 2


def test_what_a_failed_job_had_queued_does_not_count_in_the_restored_one(cluster: FakeCluster, tmp_path: Path) -> None:
    """Functions that an error will cancel still have leases when the position is restored."""
    program = CountedRows(cluster)
    program.checkpoint.save(tmp_path / "checkpoint")
    gate = close_gate("failed")
    leases = iter(program.leased)

    def fail_later(batch: Any) -> None:
        pass_gate("failed")
        fail(batch)

    failing = [program.coordinator.schedule(fail_later, args=(next(leases),)) for _ in range(2)]
    queued = [program.schedule(lease) for lease in leases]
    await_arrivals("failed", 2)
    gate.set()
    assert all(isinstance(error_of(value), KeyError) for value in failing)
    program.checkpoint.restore(tmp_path / "checkpoint")
    before = program.leased.ledger
    with pytest.raises(KeyError):
        program.coordinator.join(DEADLINE_SECONDS)
    assert all(isinstance(error_of(value), CancelledError) for value in queued)
    assert program.leased.ledger == before
    assert program.train() == list(range(ROWS))
    assert program.counts() == [1] * ROWS


def test_a_lost_server_and_a_checkpoint(cluster: FakeCluster, tmp_path: Path) -> None:
    program = CountedRows(cluster)
    half_of(program)
    program.checkpoint.save(tmp_path / "checkpoint")
    gate = close_gate("server")
    leases = iter(program.leased)
    held = [program.schedule(next(leases), "server") for _ in range(2)]
    await_arrivals("server", 2)
    queued = [program.schedule(lease) for lease in leases]
    cluster.kill_server(1)
    assert isinstance(error_of(queued[-1]), CancelledByServerLossError)
    gate.set()
    with pytest.raises(ParameterServerUnavailable):
        program.coordinator.join(DEADLINE_SECONDS)
    *in_the_workers_batches, another, _ = (type(error_of(value)) for value in queued)
    assert {*in_the_workers_batches, another} <= {type(None), CancelledByServerLossError}
    assert another is CancelledByServerLossError
    assert len(held) == 2
    cluster.start_server(1)
    program.checkpoint.restore(tmp_path / "checkpoint")
    program.train()
    program.leased.ledger.check()
    assert program.counts() == [1] * ROWS


def test_a_loop_over_leases_lives_through_restores_that_it_does_not_ask_for(
    cluster: FakeCluster, tmp_path: Path
) -> None:
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
                    program.coordinator.join(DEADLINE_SECONDS)  # restores; the lease is outdated now
                cancelled += isinstance(error_of(program.schedule(lease)), CancelledByServerLossError)
            program.coordinator.join(DEADLINE_SECONDS)
        program.leased.ledger.check()
    assert restored == [5, 20]
    assert cancelled == 2
    assert program.counts() == [2] * ROWS


def test_it_says_what_it_is(coordinator: ts.ClusterCoordinator) -> None:
    leased = coordinator.create_leased_dataset(Rows, 8)
    assert repr(leased) == "<the leased dataset Rows: 100 rows, epoch 0>"
    assert isinstance(leased, LeasedDataset)
    assert leased.batch_size == 8
    assert Counter(type(lease) for lease in leased) == {Lease: 13}
