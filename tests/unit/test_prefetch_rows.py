"""`ts.prefetch_rows`: which rows a lookup then takes, what they miss, and that asking for them waits for nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.gates import await_arrivals, close_gate, pass_gate
from tests.support.parameter_servers import WAIT, Program, Tables, on_servers, states_are_close
from torchstrat.errors import InvalidArgumentError, ParameterServerUnavailable, WrongTypeError
from torchstrat.testing import contract

ROWS, WIDTH = 24, 2


class Counted(nn.Embedding):
    """Row i is i, and its optimizer adds 1 to a row for a loss of -sum."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ROWS, WIDTH, **options)
        with torch.no_grad():
            self.weight.copy_(torch.arange(float(ROWS))[:, None])
        self.optimizer = torch.optim.SGD(self.parameters(), 1.0)

    def backward(self, *ids: int) -> None:
        """Of rows that it reads."""
        self.optimizer.zero_grad()
        (-self(torch.tensor(ids)).sum()).backward()

    def look_up(self, *ids: int) -> list[float]:
        return self(torch.tensor(ids))[:, 0].tolist()

    def ask(self, *ids: int) -> None:
        ts.prefetch_rows(self, torch.tensor(ids))


class Job:
    def __init__(self, program: Program) -> None:
        self.program, self.table, self.cluster = program, program.made, program.cluster
        self.run, self.coordinator = program.run, program.coordinator
        self._messages = self.cluster.network.record("ps.read_rows")

    @property
    def asked(self) -> list[list[int]]:
        """The local ids of each request for rows, in the order in which they were asked for."""
        calls = [message.value for message in self._messages if message.kind == "call"]
        return [request.ids.tolist() for requests in calls for request in requests]

    def hold(self, when: Any = "before", method: str = "ps.read_rows", ps: int = 0) -> Any:
        return self.cluster.network.hold(self.cluster.peer("ps", ps), method, when)


@contextmanager
def job(shards: int = 1, make: Callable[[], Any] = Counted, **options: Any) -> Iterator[Job]:
    with on_servers(make, shards, **{"ps": 1, **options}) as program:
        yield Job(program)


# ---- that it waits for nobody ----------------------------------------------------------------------------------------


def test_the_request_is_under_way_while_backward_runs() -> None:
    with job() as one:
        looked_up, in_backward = close_gate("looked up"), close_gate("in backward")

        def step(table: Counted) -> list[float]:
            rows = table(torch.tensor([1, 2]))
            rows.register_hook(lambda _gradient: pass_gate("in backward") and None)
            pass_gate("looked up")
            table.ask(7, 8)
            (-rows.sum()).backward()
            table.optimizer.step()
            return table.look_up(7, 8)

        result = one.coordinator.schedule(step, args=(one.table,))
        await_arrivals("looked up", 1)
        with one.hold() as held:
            looked_up.set()
            held.wait_until_reached()
            await_arrivals("in backward", 1)  # the server has been asked, has not answered, and backward runs
            in_backward.set()
        assert result.fetch(timeout=WAIT) == [7.0, 8.0]


# ---- which rows a lookup takes ---------------------------------------------------------------------------------------


def test_rows_are_as_of_the_gather_and_are_used_once() -> None:
    """And a gradient of old rows is applied to the new ones: rows 1 and 3 end with the sum of both steps."""
    with job() as one:
        to_be_held, gathered = close_gate("to be held"), close_gate("gathered")

        def step(table: Counted) -> list[list[float]]:
            table.backward(1, 2, 3)
            pass_gate("to be held")
            table.ask(3, 1, 3, 3)
            pass_gate("gathered")
            table.optimizer.step()  # adds 1 to rows 1, 2 and 3
            before = table(torch.tensor([3, 1, 3, 3]))
            after = table.look_up(3, 1, 3, 3)
            table.optimizer.zero_grad()
            (-before[:2].sum()).backward()
            table.optimizer.step()
            return [before[:, 0].tolist(), after]

        result = one.coordinator.schedule(step, args=(one.table,))
        await_arrivals("to be held", 1)
        with one.hold("after") as held:
            to_be_held.set()
            held.wait_until_reached()  # the rows are read, and not yet there
        gathered.set()
        before, after = result.fetch(timeout=WAIT)
        assert before == [3.0, 1.0, 3.0, 3.0], "as of the gather: without this worker's own push"
        assert after == [4.0, 2.0, 4.0, 4.0]
        assert one.asked == [[1, 2, 3], [1, 3], [1, 3]]
        assert one.table.state_dict()["weight"][:5, 0].tolist() == [0.0, 3.0, 3.0, 5.0, 4.0]


def several(table: Counted, ahead: list[list[int]], lookups: list[list[int]], dtype: Any) -> list[list[float]]:
    for ids in ahead:
        ts.prefetch_rows(table.weight, torch.tensor(ids, dtype=dtype))
    return [table(torch.tensor(ids, dtype=torch.int64))[:, 0].tolist() for ids in lookups]


@pytest.mark.parametrize(
    ("ahead", "lookups", "asked"),
    [
        ([[1, 2, 3], [3, 2, 5, 6]], [[1, 2, 3], [3, 2, 5, 6]], [[1, 2, 3], [2, 3, 5, 6]]),
        ([[1, 2, 3], [3, 2, 5, 6]], [[3, 2, 5, 6], [1, 2, 3]], [[1, 2, 3], [2, 3, 5, 6]]),
        # The same rows, but not the same ids.
        ([[1, 2, 3], [3, 2, 5, 6]], [[3, 2, 1, 1], [2, 3, 5, 6, 6]], [[1, 2, 3], [2, 3, 5, 6]]),
        ([[1, 2, 3], [3, 2, 5, 6]], [[2, 3, 5, 6, 6], [3, 2, 1, 1]], [[1, 2, 3], [2, 3, 5, 6]]),
        ([[4, 5]], [[5, 6]], [[4, 5], [6]]),
        ([[1, 2]], [[9, 3, 0, 9], [1, 2]], [[1, 2], [0, 3, 9]]),
        ([[1, 2]], [[], [2, 1]], [[1, 2]]),
    ],
    ids=["in order", "in another order", "near", "near, in another order", "one of two", "none of them", "no ids"],
)
def test_each_lookup_takes_the_request_that_has_most_of_it(ahead: Any, lookups: Any, asked: list[list[int]]) -> None:
    with job() as one:
        found = one.run(several, one.table, ahead, lookups, torch.int64)
        assert found == [[float(number) for number in ids] for ids in lookups]
        assert [ids for ids in one.asked if ids] == asked


def test_ids_that_were_not_asked_for_are_read_as_usual_from_every_shard() -> None:
    with job(3, ps=2) as one:
        [found] = one.run(several, one.table, [[0, 9, 20, 23]], [[23, 4, 9, 17, 9, 20]], torch.int32)
        assert found == [23.0, 4.0, 9.0, 17.0, 9.0, 20.0]
        assert sorted(map(tuple, one.asked)) == [(0,), (1,), (1,), (4,), (4, 7)], "of shards that have 8 rows each"


def test_another_tables_rows_are_not_taken_and_ids_may_be_changed_afterwards() -> None:
    with job(make=lambda: nn.ModuleList([Counted(), Counted()])) as one:

        def step(tables: nn.ModuleList) -> list[float]:
            ids = torch.tensor([4, 5])
            ts.prefetch_rows(tables[1], ids)
            ids.copy_(torch.tensor([5, 6]))
            return tables[0](ids)[:, 0].tolist() + tables[1](ids)[:, 0].tolist()

        assert one.run(step, one.table) == [5.0, 6.0, 5.0, 6.0]
        assert one.asked == [[4, 5], [5, 6], [6]]


@pytest.mark.parametrize(("later", "requests"), [(1, [[7, 8]]), (2, [[7, 8], [7, 8]])])
def test_the_next_function_may_take_them_and_the_one_after_it_not(later: int, requests: list[list[int]]) -> None:
    with job() as one:
        scheduled = close_gate("scheduled")

        def function(table: Counted, number: int) -> list[float]:
            if number == 0:
                table.ask(7, 8)
                pass_gate("scheduled")
            return table.look_up(7, 8) if number == later else []

        results = [one.coordinator.schedule(function, args=(one.table, number)) for number in range(3)]
        scheduled.set()
        assert results[later].fetch(timeout=WAIT) == [7.0, 8.0]
        one.coordinator.join(timeout=WAIT)
        assert one.asked == requests


def test_after_a_join_everything_is_read_anew() -> None:
    with job() as one:
        one.coordinator.schedule(Counted.ask, args=(one.table, 7, 8))
        one.coordinator.join(timeout=WAIT)
        one.table.load_state_dict({"weight": torch.zeros(ROWS, WIDTH)})
        assert one.run(Counted.look_up, one.table, 7, 8) == [0.0, 0.0]


# ---- the numbers of training -----------------------------------------------------------------------------------------


class Bags(Tables):
    make_optimizer = torch.optim.Adagrad

    def train_on(self, batches: list[torch.Tensor], *, ahead: bool) -> list[float]:
        losses = []
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            self.optimizer.zero_grad()
            loss = self(batch).pow(2).mean()
            if ahead and following is not None:
                ts.prefetch_rows(self.table, following)
                ts.prefetch_rows(self.bag, following)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_where_no_row_is_in_two_batches_in_a_row_the_numbers_are_those_of_one_device(shards: int) -> None:
    generator = torch.Generator().manual_seed(1)
    half = 10  # of its rows
    batches = [torch.randint(0, half, (4, 3), generator=generator) + half * (step % 2) for step in range(6)]
    plain = Bags()
    wanted = plain.train_on(batches, ahead=False)
    with job(shards, Bags, ps=2) as one:
        found = one.run(partial(Bags.train_on, ahead=True), one.table, batches)
        assert found == pytest.approx(wanted, abs=1e-9)
        states_are_close(one.table.state_dict(), plain.state_dict())
        assert shards > 1 or len(one.asked) == 2 * len(batches), "no row was asked for twice"


@pytest.mark.deadline(240)
def test_a_compiled_part_of_a_step_asks_too() -> None:
    with job() as one:

        def step(table: Counted) -> list[float]:
            def ask(ids: torch.Tensor) -> torch.Tensor:
                following = ids + 4
                ts.prefetch_rows(table, following)
                return following * 2

            doubled = torch.compile(ask, backend="eager")(torch.tensor([1, 2]))
            assert doubled.tolist() == [10, 12]
            return table.look_up(5, 6)

        assert one.run(step, one.table) == [5.0, 6.0]
        assert one.asked == [[5, 6]], "once: what was asked for served the lookup"


# ---- where it does nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["module", "weight"])
def test_lookups_with_max_norm_read_everything_anew(by: str) -> None:
    with job(make=partial(Counted, max_norm=100.0)) as one:

        def step(table: Counted) -> list[float]:
            table.backward(5)
            ts.prefetch_rows(table if by == "module" else table.weight, torch.tensor([5]))
            table.optimizer.step()
            return table.look_up(5)

        assert one.run(step, one.table) == [6.0], "with the push: it may be written back"
        assert one.asked == [[5]] * (2 if by == "module" else 3)


def test_a_table_that_is_used_whole_is_not_asked_for_rows() -> None:
    with job(2, ps=2) as one:

        def step(table: Counted) -> float:
            total = table.weight.sum()
            table.ask(1, 20)
            return (total + table(torch.tensor([1, 20])).sum()).item()

        assert one.run(step, one.table) == sum(range(ROWS)) * WIDTH + 21 * WIDTH
        assert one.asked == []


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_evaluation(guard: Any) -> None:
    """Rows asked for in evaluation may be taken by training, and the other way round."""
    with job() as one:

        def step(table: Counted) -> list[float]:
            with guard():
                table.eval().ask(3, 4)
            loss = -table.train()(torch.tensor([3, 4])).sum()
            table.ask(3, 5)
            with guard():
                values = table.eval().look_up(3, 5)
            loss.backward()
            table.optimizer.step()
            return values

        assert one.run(step, one.table) == [3.0, 5.0]
        assert one.asked == [[3, 4], [3, 5]]
        assert one.table.state_dict()["weight"][:, 0].tolist() == [0, 1, 2, 4, 5, *range(5, ROWS)]


@pytest.mark.parametrize("row", [None, *contract.IN_PROCESS.values()], ids=lambda row: row.name if row else "none")
def test_under_every_other_strategy_the_step_is_the_same(row: contract.Row | None) -> None:
    def losses(ahead: bool) -> list[float]:
        batches = [torch.arange(12).reshape(4, 3) + step for step in range(3)]
        if row is None:
            return Bags().train_on(batches, ahead=ahead)
        strategy = row.make()
        with strategy.scope():
            model = Bags()
        found = strategy.run(lambda: model.train_on(batches, ahead=ahead))
        strategy.close()
        return [loss for local in strategy.local_results(found) for loss in local]

    assert losses(ahead=True) == losses(ahead=False)


def test_on_the_coordinator_nobody_is_asked() -> None:
    """Where its copy is behind, too: what reads that one has all of the table sent."""
    with job() as one:
        one.run(lambda table: table.backward(1) or table.optimizer.step(), one.table)
        whole = one.cluster.network.record("ps.read")
        ts.prefetch_rows(one.table, torch.tensor([1, 2]))
        ts.prefetch_rows(one.table.weight, torch.tensor([1, 2]))
        assert whole == []
        assert one.asked == [[1]]
        assert one.table.weight[1].tolist() == [2.0, 2.0]
        assert whole != [], "the copy was behind"


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_an_id_that_is_not_in_the_table_is_told_before_anything_is_asked(wrong: int) -> None:
    with job() as one:
        one.coordinator.schedule(Counted.ask, args=(one.table, 3, wrong))
        with pytest.raises(InvalidArgumentError, match=f"id {wrong} is not in table .* rows 0 to {ROWS - 1}"):
            one.coordinator.join(timeout=WAIT)
        assert one.asked == []


@pytest.mark.parametrize(
    ("table", "ids", "says"),
    [
        (nn.Linear(2, 2), torch.tensor([1]), "got a Linear as table"),
        (nn.Embedding(3, 2), [1, 2], "got a list as ids"),
        (nn.Embedding(3, 2), torch.tensor([True]), "got a tensor of torch.bool as ids"),
    ],
)
def test_other_types_are_refused_everywhere(table: Any, ids: Any, says: str) -> None:
    with pytest.raises(WrongTypeError, match=says):
        ts.prefetch_rows(table, ids)


def test_a_server_that_is_lost_meanwhile_is_an_error_of_the_lookup() -> None:
    with job(2, ps=2) as one:
        lost = close_gate("asked for")
        close_gate("told at the lookup").set()

        def step(table: Counted) -> None:
            table.ask(1, 20)
            pass_gate("asked for")
            with pytest.raises(ParameterServerUnavailable, match=r"parameter server 1 is unavailable \(ps.read_rows"):
                table.look_up(1, 20)
            pass_gate("told at the lookup")

        with one.hold(ps=1) as held:
            one.coordinator.schedule(step, args=(one.table,))
            held.wait_until_reached()
            await_arrivals("asked for", 1)
            one.cluster.kill_server(1)
            lost.set()
            await_arrivals("told at the lookup", 1)
            with pytest.raises(ParameterServerUnavailable, match="parameter server 1"):
                one.coordinator.join(timeout=WAIT)


def test_a_function_runs_again_elsewhere_and_reads_for_itself() -> None:
    with job(workers=2) as one:

        def step(table: Counted) -> list[float]:
            table.backward(1)
            table.ask(5, 6)
            table.optimizer.step()
            return table.look_up(5, 6)

        with one.hold("after", "ps.push") as held:
            result = one.coordinator.schedule(step, args=(one.table,))
            held.wait_until_reached()
            one.cluster.kill_worker(held.caller.task.index)
        assert result.fetch(timeout=WAIT) == [5.0, 6.0]
        assert one.table.state_dict()["weight"][1].tolist() == [2.0, 2.0], "applied once"
