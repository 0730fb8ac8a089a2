"""What leases rest on, without processes: sets of positions, orders of rows, one epoch, its ledger."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchstrat as ts
from torchstrat import Ledger
from torchstrat.errors import InvalidArgumentError, LedgerError
from torchstrat.parameter_server.leases.epoch import DrawnOrder, Epoch, InOrder, Intervals, ShuffledOrder, rows_at, size
from torchstrat.testing.fake_cluster import FakeCluster


def numbers(intervals: Iterable[tuple[int, int]]) -> set[int]:
    """Which are in, after a look at how few intervals that takes."""
    pairs = list(intervals)
    assert all(start < stop for start, stop in pairs)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(pairs)), "not in order, or not apart"
    return {number for start, stop in pairs for number in range(start, stop)}


def test_intervals_compare_by_contents_and_nothing_is_no_part_of_them() -> None:
    intervals = Intervals([(0, 2), (2, 5), (7, 7)])
    intervals.remove(3, 3)
    assert intervals == Intervals([(0, 5)])
    assert intervals != Intervals([(0, 4)])


class TestOrder:
    @pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 64, 4095, 4096, 4097, 10_000])
    def test_a_shuffled_epoch_has_every_row_once_and_any_part_may_be_asked_for(self, rows: int) -> None:
        for epoch in range(3):
            order = ShuffledOrder(rows, 3, epoch)
            whole = order.rows(0, rows)
            assert sorted(whole.tolist()) == list(range(rows))
            edges = [edge for edge in (0, 1, 5, 10, 4_000, 4_095, 4_097, 4_200, 9_000, rows) if edge <= rows]
            for start, stop in itertools.combinations_with_replacement(sorted(edges), 2):
                assert np.array_equal(order.rows(start, stop), whole[start:stop])

    def test_it_is_this_order_on_every_machine_for_all_time(self) -> None:
        """A checkpoint is resumed by other versions of everything; what is finished must be the same rows there."""
        assert ShuffledOrder(10, 0, 0).rows(0, 10).tolist() == [4, 5, 8, 1, 7, 6, 9, 0, 3, 2]
        rows = ShuffledOrder(1_000_000_007, 42, 7).rows(999_999_999, 1_000_000_003)
        assert rows.tolist() == [298678446, 831869603, 319095003, 7940022]

    def test_seeds_and_epochs_have_orders_of_their_own(self) -> None:
        keys = [(seed, epoch) for seed in (0, 1, -1, 2**63) for epoch in range(3)]
        assert len({tuple(ShuffledOrder(50, *key).rows(0, 50).tolist()) for key in keys}) == len(keys)

    def test_all_orders_of_a_few_rows_are_about_equally_frequent(self) -> None:
        """Chi-square of 120 orders in 1,200 epochs: 119 ± 15 for a fair shuffle."""
        counts = Counter(tuple(ShuffledOrder(5, 11, epoch).rows(0, 5).tolist()) for epoch in range(1_200))
        chi_square = sum((counts[order] - 10) ** 2 / 10 for order in itertools.permutations(range(5)))
        assert abs(chi_square - 119) < 4 * 15

    def test_in_order_and_several_intervals(self) -> None:
        assert rows_at(InOrder(), ((3, 5), (9, 10))).tolist() == [3, 4, 9]
        assert rows_at(InOrder(), ()).dtype == np.int64

    def test_an_order_of_the_users_own_is_drawn_as_it_is_needed(self) -> None:
        drawn: list[int] = []

        def draw():
            for row in reversed(range(10)):
                drawn.append(row)
                yield row

        order = DrawnOrder(draw(), 10, 0)
        assert drawn == []
        assert order.rows(0, 3).tolist() == [9, 8, 7]
        assert drawn == [9, 8, 7]
        order.forget(0, 1)
        assert order.rows(1, 3).tolist() == [8, 7], "handed out again"
        assert order.rows(6, 10).tolist() == [3, 2, 1, 0], "what was finished before a resume is passed over"
        assert len(order._kept) == 2 + 4

    @pytest.mark.parametrize(
        ("order", "message"),
        [
            ([0, 1, 2], "has 3 of the dataset's 4 rows in epoch 6"),
            ([0, 1, 2, 3, 0], "has more than the dataset's 4 rows in epoch 6"),
            ([0, 1, 1, 2], "has row 1 twice in epoch 6"),
            ([0, 4, 1, 2], "has row 4, and the dataset has rows 0 to 3 in epoch 6"),
            ([-1, 0, 1, 2], "has row -1, and"),
        ],
    )
    def test_an_order_that_is_none(self, order: list[int], message: str) -> None:
        drawn = DrawnOrder(order, 4, 6)
        for _ in range(2):  # it stays none
            with pytest.raises(InvalidArgumentError, match=message):
                drawn.rows(0, 4)


def ledger_of(epoch: Epoch) -> Ledger:
    return Ledger(
        epoch.number,
        epoch.rows,
        handed_out=epoch.handed_out,
        finished=len(epoch.finished),
        scheduled=len(epoch.scheduled),
        left=len(epoch.left),
        repeated=epoch.repeated,
        returned=epoch.returned,
        lost=len(epoch.lost),
        twice=len(epoch.twice),
    )


class TestEpoch:
    @given(st.integers(0, 40), st.data())
    def test_whatever_happens_every_row_is_finished_once(self, rows: int, data: st.DataObject) -> None:
        epoch, numbers_of_leases, ended = Epoch(0, rows), itertools.count(), Counter[int]()
        held: dict[int, list[int]] = {}
        scheduled: set[int] = set()
        kinds = st.sampled_from(["hand out", "schedule", "finish", "back", "repeat", "new for"])
        steps = data.draw(st.lists(kinds, max_size=60))
        for step in [*steps, "new for", *["hand out", "schedule", "finish"] * (rows + len(held) + 1)]:
            if step == "hand out":
                lease, count, left = next(numbers_of_leases), data.draw(st.integers(1, 9)), sorted(numbers(epoch.left))
                handed_out = numbers(epoch.hand_out(lease, count))
                assert sorted(handed_out) == left[:count], "what came back comes first, filled up with what is new"
                if handed_out:
                    held[lease] = sorted(handed_out)
            elif step == "new for":
                epoch.give_back_unscheduled()
                held = {lease: held[lease] for lease in scheduled}
            elif step == "schedule" and held.keys() - scheduled:
                lease = min(held.keys() - scheduled)
                epoch.schedule(lease)
                scheduled.add(lease)
            elif scheduled:
                lease = data.draw(st.sampled_from(sorted(scheduled)))
                if step == "repeat":
                    epoch.repeat(lease)
                else:
                    (epoch.finish if step == "finish" else epoch.give_back)(lease)
                    scheduled.discard(lease)
                    positions_of_lease = held.pop(lease)
                    ended.update(positions_of_lease if step == "finish" else ())
            assert all(epoch.holds(lease) for lease in held)
            assert numbers(epoch.scheduled) == {place for lease in scheduled for place in held[lease]}
            ledger = ledger_of(epoch)
            replace(ledger, lost=0, scheduled=ledger.scheduled + ledger.lost).check(complete=False)
            assert numbers(epoch.finished) == set(ended)
            assert ledger.finished == len(set(ended))
            in_leases = {place for places in held.values() for place in places}
            assert numbers(epoch.left) == set(range(rows)) - set(ended) - in_leases
            assert numbers(epoch.lost) == {place for lease in held.keys() - scheduled for place in held[lease]}
        for lease in sorted(scheduled):
            epoch.finish(lease)
            ended.update(held[lease])
        assert ended == Counter(range(rows))
        ledger_of(epoch).check()
        assert epoch.is_complete

    def test_a_huge_epoch_takes_no_memory(self) -> None:
        epoch = Epoch(0, 10**12)
        order = ShuffledOrder(10**12, 0, 0)
        for lease in range(200):
            positions = epoch.hand_out(lease, 64)
            epoch.schedule(lease)
            assert len(rows_at(order, positions)) == size(positions) == 64
        for lease in range(0, 200, 2):
            epoch.finish(lease)
        assert len(pickle.dumps((epoch, order))) < 100_000

    def test_a_row_that_is_finished_twice_is_noticed(self) -> None:
        epoch = Epoch(0, 4)
        epoch.hand_out(0, 4)
        epoch.schedule(0)
        epoch.finished.add(1, 3)  # what no call of an epoch does
        epoch.finish(0)
        with pytest.raises(LedgerError, match=r"epoch 0 of 4 rows: 2 rows were finished twice\."):
            ledger_of(epoch).check()


def test_leases_are_small_on_their_way() -> None:
    with FakeCluster(workers=2, ps=1) as cluster:
        coordinator = ts.ClusterCoordinator(cluster.strategy())
        leased = coordinator.create_leased_dataset(lambda: range(10**9), 64, shuffle=True, collate_fn=len)
        messages = cluster.network.record("worker.run")
        values = [coordinator.schedule(lambda batch: batch, args=(lease,)) for lease in itertools.islice(leased, 20)]
        assert coordinator.fetch(values) == [64] * 20
    calls = [one.value.functions for one in messages if one.kind == "call"]
    sent = {function: arguments for functions in calls for function, _, arguments, *_ in functions}
    assert len(sent) == 20, "some go twice, where a worker is recalled what another one could run"
    assert max(len(pickle.dumps(arguments)) for arguments in sent.values()) < 64 * 8 + 500


class TestLedger:
    WHOLE = Ledger(3, 100, handed_out=130, finished=100, scheduled=0, left=0, repeated=20, returned=30, lost=0)

    def test_a_whole_epoch(self) -> None:
        assert self.WHOLE.is_complete
        self.WHOLE.check()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"finished": 90, "lost": 10, "lost_rows": (4, 5, 6)},
                r"10 rows were handed out in leases that were never scheduled: 4, 5, 6, …\.",
            ),
            (
                {"finished": 99, "lost": 1, "lost_rows": (4,)},
                r"1 row was handed out in leases that were never scheduled: 4\.",
            ),
            ({"finished": 99}, "99 finished, 0 with functions, 0 to be handed out and 0 lost do not make 100"),
            ({"handed_out": 129}, "129 were handed out, and 100 finished, 0 with functions, 0 lost and 30 returned"),
            ({"twice": 1}, "1 row was finished twice"),
            (
                {"finished": 60, "scheduled": 30, "left": 10, "handed_out": 120},
                "40 rows were not finished: 30 with functions .*join.*, 10 to be handed out",
            ),
        ],
    )
    def test_what_does_not_add_up(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(LedgerError, match=message) as caught:
            replace(self.WHOLE, **changes).check()  # type: ignore[arg-type]
        assert str(caught.value).startswith("epoch 3 of 100 rows: ")

    def test_in_the_middle_of_an_epoch(self) -> None:
        middle = replace(self.WHOLE, finished=60, scheduled=30, left=10, handed_out=120)
        assert not middle.is_complete
        middle.check(complete=False)
        with pytest.raises(LedgerError, match="2 rows were handed out in leases"):
            replace(middle, scheduled=28, lost=2).check(complete=False)
