"""`ts.prefetch_rows`: which rows a lookup then takes, what they miss, and that asking for them waits for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.gates import await_arrivals, close_gate, pass_gate
from tests.unit.ps_clusters import doubles
from torchstrat.errors import InvalidArgumentError, ParameterServerUnavailable, WrongTypeError
from torchstrat.parameter_server.messages import RowsRequest, Shard, VariableSpec
from torchstrat.parameter_server.server.store import VariableStore
from torchstrat.parameter_server.worker.table_rows import TableRows
from torchstrat.testing.fake_cluster import FakeCluster

ROWS, WIDTH = 24, 2
WAIT = 60


@pytest.fixture(autouse=True)
def _in_doubles() -> Iterator[None]:
    with doubles():
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The local ids of each request for rows, in the order in which servers answered them."""
    requests: list[list[int]] = []
    read_rows = VariableStore.read_rows

    def noted(store: VariableStore, wanted: list[RowsRequest], *memory: Any) -> Any:
        answer = read_rows(store, wanted, *memory)
        requests.extend(request.ids.tolist() for request in wanted)
        return answer

    monkeypatch.setattr(VariableStore, "read_rows", noted)
    return requests


def on_servers(cluster: FakeCluster, shards: int = 1, **options: Any) -> tuple[Any, Any, ts.ClusterCoordinator]:
    """A table whose row i is i, and its optimizer, which adds 1 to a row for a loss of -sum."""
    strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(shards))
    with strategy.scope():
        table = nn.Embedding(ROWS, WIDTH, **options)
        with torch.no_grad():
            table.weight.copy_(torch.arange(ROWS).double()[:, None])
        optimizer = torch.optim.SGD(table.parameters(), 1.0)
    return table, optimizer, ts.ClusterCoordinator(strategy)


# ---- that it waits for nobody ----------------------------------------------------------------------------------------


def test_the_request_is_under_way_while_backward_runs() -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        table, optimizer, coordinator = on_servers(cluster)
        looked_up, in_backward = close_gate("looked up"), close_gate("in backward")

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            rows = table(torch.tensor([1, 2]))
            rows.register_hook(lambda _gradient: pass_gate("in backward") and None)
            pass_gate("looked up")
            ts.prefetch_rows(table, torch.tensor([7, 8]))
            (-rows.sum()).backward()
            optimizer.step()
            return table(torch.tensor([7, 8])).detach()

        result = coordinator.schedule(step)
        await_arrivals("looked up", 1)
        with cluster.network.hold(cluster.peer("ps", 0), "ps.read_rows") as held:
            looked_up.set()
            held.wait_until_reached()
            await_arrivals("in backward", 1)  # the server has been asked, has not answered, and backward runs
            in_backward.set()
        assert result.fetch(timeout=WAIT)[:, 0].tolist() == [7.0, 8.0]


# ---- which rows a lookup takes ---------------------------------------------------------------------------------------


def test_rows_are_as_of_the_gather_and_are_used_once(asked: list[list[int]]) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        table, optimizer, coordinator = on_servers(cluster)
        to_be_held, gathered = close_gate("to be held"), close_gate("gathered")

        def step() -> list[list[float]]:
            ids = torch.tensor([[3, 1], [3, 3]])
            optimizer.zero_grad()
            (-table(torch.tensor([1, 2, 3])).sum()).backward()
            pass_gate("to be held")
            ts.prefetch_rows(table, ids)
            pass_gate("gathered")
            optimizer.step()  # adds 1 to rows 1, 2 and 3
            return [table(ids)[..., 0].flatten().tolist() for _ in range(2)]

        result = coordinator.schedule(step)
        await_arrivals("to be held", 1)
        with cluster.network.hold(cluster.peer("ps", 0), "ps.read_rows", "after") as held:
            to_be_held.set()
            held.wait_until_reached()  # the rows are read, and not yet there
        gathered.set()
        before, after = result.fetch(timeout=WAIT)
        assert before == [3.0, 1.0, 3.0, 3.0], "as of the gather: without this worker's own push"
        assert after == [4.0, 2.0, 4.0, 4.0]
        assert asked == [[1, 2, 3], [1, 3], [1, 3]]


def test_ids_that_were_not_asked_for_are_read_as_usual(asked: list[list[int]]) -> None:
    with FakeCluster(workers=1, ps=2) as cluster:
        table, _, coordinator = on_servers(cluster, shards=3)

        def step() -> list[float]:
            ts.prefetch_rows(table, torch.tensor([0, 9, 20, 23], dtype=torch.int32))
            return table(torch.tensor([23, 4, 9, 17, 9, 20]))[:, 0].tolist()

        assert coordinator.schedule(step).fetch(timeout=WAIT) == [23.0, 4.0, 9.0, 17.0, 9.0, 20.0]
        assert sorted(map(tuple, asked)) == [(0,), (1,), (1,), (4,), (4, 7)], "of shards that have 8 rows each"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_lookup_takes_the_request_that_was_for_it(order: tuple[int, int], asked: list[list[int]]) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        table, _, coordinator = on_servers(cluster)
        batches = [torch.tensor([1, 2, 3]), torch.tensor([3, 2, 5, 6])]
        near = [torch.tensor([3, 2, 1, 1]), torch.tensor([2, 3, 5, 6, 6])]  # the same rows, but not the same ids

        def step(lookups: list[torch.Tensor]) -> list[list[float]]:
            for batch in batches:
                ts.prefetch_rows(table.weight, batch)
            return [table(ids)[:, 0].tolist() for ids in lookups]

        for ids in (batches, near):
            wanted = [ids[number] for number in order]
            assert coordinator.schedule(step, args=(wanted,)).fetch(timeout=WAIT) == [one.tolist() for one in wanted]
            assert sorted(asked) == [[1, 2, 3], [2, 3, 5, 6]]
            asked.clear()


def test_ids_may_be_changed_afterwards(asked: list[list[int]]) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        table, _, coordinator = on_servers(cluster)

        def step() -> list[float]:
            ids = torch.tensor([4, 5])
            ts.prefetch_rows(table, ids)
            ids.copy_(torch.tensor([5, 6]))
            return table(ids)[:, 0].tolist()

        assert coordinator.schedule(step).fetch(timeout=WAIT) == [5.0, 6.0]
        assert sorted(asked) == [[4, 5], [6]]


@pytest.mark.parametrize(("later", "requests"), [(1, [[7, 8]]), (2, [[7, 8], [7, 8]])])
def test_the_next_function_may_take_them_and_the_one_after_it_not(
    later: int, requests: list[list[int]], asked: list[list[int]]
) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        table, _, coordinator = on_servers(cluster)
        scheduled = close_gate("scheduled")

        def function(number: int) -> list[float]:
            if number == 0:
                ts.prefetch_rows(table, torch.tensor([7, 8]))
                pass_gate("scheduled")
            return table(torch.tensor([7, 8]))[:, 0].tolist() if number == later else []

        results = [coordinator.schedule(function, args=(number,)) for number in range(3)]
        scheduled.set()
        assert results[later].fetch(timeout=WAIT) == [7.0, 8.0]
        coordinator.join(timeout=WAIT)
        assert asked == requests


def test_after_a_join_everything_is_read_anew(asked: list[list[int]]) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        table, _, coordinator = on_servers(cluster)

        def ahead() -> None:
            ts.prefetch_rows(table, torch.tensor([7, 8]))

        def look_up() -> list[float]:
            return table(torch.tensor([7, 8]))[:, 0].tolist()

        coordinator.schedule(ahead)
        coordinator.join(timeout=WAIT)
        table.load_state_dict({"weight": torch.zeros(ROWS, WIDTH)})
        assert coordinator.schedule(look_up).fetch(timeout=WAIT) == [0.0, 0.0]


# ---- the numbers of training -----------------------------------------------------------------------------------------


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 3, padding_idx=2)
        self.bag = nn.EmbeddingBag(ROWS, 3, mode="mean")
        self.out = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.table(ids).mean(1) + self.bag(ids)))


def steps_of(model: Any, optimizer: Any, batches: Any, *, ahead: bool) -> list[float]:
    losses = []
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        if ahead and following is not None:
            ts.prefetch_rows(model.table, following)
            ts.prefetch_rows(model.bag, following)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_where_no_row_is_in_two_batches_in_a_row_the_numbers_are_those_of_one_device(
    shards: int, asked: list[list[int]]
) -> None:
    generator = torch.Generator().manual_seed(1)
    half = ROWS // 2
    batches = [torch.randint(0, half, (4, 3), generator=generator) + half * (step % 2) for step in range(6)]
    torch.manual_seed(0)
    plain = Bags()
    wanted = steps_of(plain, torch.optim.Adagrad(plain.parameters(), 0.1), batches, ahead=False)
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(shards))
        with strategy.scope():
            torch.manual_seed(0)
            model = Bags()
            optimizer = torch.optim.Adagrad(model.parameters(), 0.1)

        def train() -> list[float]:
            return steps_of(model, optimizer, batches, ahead=True)

        coordinator = ts.ClusterCoordinator(strategy)
        assert coordinator.schedule(train).fetch(timeout=WAIT) == pytest.approx(wanted, abs=1e-9)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=0.0, atol=1e-9)
    if shards == 1:
        assert len(asked) == 2 * len(batches), "no row was asked for twice"


def test_a_gradient_of_old_rows_is_applied_to_the_new_ones() -> None:
    """Rows gathered before a push, stepped after it: the sum of both steps."""
    with FakeCluster(workers=1, ps=1) as cluster:
        table, optimizer, coordinator = on_servers(cluster)
        gathered = close_gate("before the push")

        def step() -> None:
            ids = torch.tensor([5])
            for number in range(2):
                optimizer.zero_grad()
                (-table(ids).sum()).backward()
                if number == 0:
                    ts.prefetch_rows(table, ids)
                    pass_gate("before the push")
                optimizer.step()

        coordinator.schedule(step)
        await_arrivals("before the push", 1)
        gathered.set()
        coordinator.join(timeout=WAIT)
        assert table.state_dict()["weight"][5].tolist() == [7.0, 7.0]


@pytest.mark.deadline(240)
def test_a_compiled_part_of_a_step_asks_too(asked: list[list[int]]) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        table, _, coordinator = on_servers(cluster)

        def step() -> list[float]:
            def ask(ids: torch.Tensor) -> torch.Tensor:
                following = ids + 4
                ts.prefetch_rows(table, following)
                return following * 2

            doubled = torch.compile(ask, backend="eager")(torch.tensor([1, 2]))
            assert doubled.tolist() == [10, 12]
            return table(torch.tensor([5, 6]))[:, 0].tolist()

        assert coordinator.schedule(step).fetch(timeout=WAIT) == [5.0, 6.0]
        assert asked == [[5, 6]], "once: what was asked for served the lookup"


# ---- where it does nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["module", "weight"])
def test_lookups_with_max_norm_read_everything_anew(by: str, asked: list[list[int]]) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        table, optimizer, coordinator = on_servers(cluster, max_norm=100.0)

        def step() -> list[float]:
            optimizer.zero_grad()
            (-table(torch.tensor([5])).sum()).backward()
            ts.prefetch_rows(table if by == "module" else table.weight, torch.tensor([5]))
            optimizer.step()
            return table(torch.tensor([5]))[0].tolist()

        assert coordinator.schedule(step).fetch(timeout=WAIT) == [6.0, 6.0], "with the push: it may be written back"
        assert asked == [[5]] * (2 if by == "module" else 3)


def test_a_table_that_is_used_whole_is_not_asked_for_rows(asked: list[list[int]]) -> None:
    with FakeCluster(workers=1, ps=2) as cluster:
        table, _, coordinator = on_servers(cluster, shards=2)

        def step() -> float:
            total = table.weight.sum()
            ts.prefetch_rows(table, torch.tensor([1, 20]))
            return (total + table(torch.tensor([1, 20])).sum()).item()

        assert coordinator.schedule(step).fetch(timeout=WAIT) == sum(range(ROWS)) * WIDTH + 21 * WIDTH
        assert asked == []


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_evaluation(guard: Any, asked: list[list[int]]) -> None:
    """Rows asked for in evaluation may be taken by training, and the other way round."""
    with FakeCluster(workers=1, ps=1) as cluster:
        table, optimizer, coordinator = on_servers(cluster)

        def step() -> list[float]:
            ids = torch.tensor([3, 4])
            with guard():
                ts.prefetch_rows(table.eval(), ids)
            loss = -table.train()(ids).sum()
            ts.prefetch_rows(table, torch.tensor([3, 5]))
            with guard():
                values = table.eval()(torch.tensor([3, 5]))[:, 0].tolist()
            loss.backward()
            optimizer.step()
            return values

        assert coordinator.schedule(step).fetch(timeout=WAIT) == [3.0, 5.0]
        assert asked == [[3, 4], [3, 5]]
        assert table.state_dict()["weight"][:, 0].tolist() == [0, 1, 2, 4, 5, *range(5, ROWS)]


STRATEGIES: dict[str, Any] = {
    "none": lambda: None,
    "one_device": lambda: ts.OneDeviceStrategy("cpu"),
    "mirrored": lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central_storage": lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_under_every_other_strategy_the_step_is_the_same(name: str) -> None:
    def losses(ahead: bool) -> list[float]:
        strategy = STRATEGIES[name]()
        batches = [torch.arange(12).reshape(4, 3) + step for step in range(3)]
        torch.manual_seed(0)
        if strategy is None:
            model = Bags()
            return steps_of(model, torch.optim.SGD(model.parameters(), 0.1), batches, ahead=ahead)
        with strategy.scope():
            model = Bags()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = strategy.run(lambda: steps_of(model, optimizer, batches, ahead=ahead))
        strategy.close()
        return [loss for local in strategy.local_results(found) for loss in local]

    assert losses(ahead=True) == losses(ahead=False)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_an_id_that_is_not_in_the_table_is_told_before_anything_is_asked(wrong: int, asked: list[list[int]]) -> None:
    with FakeCluster(workers=1, ps=1) as cluster:
        table, _, coordinator = on_servers(cluster)

        def step() -> None:
            ts.prefetch_rows(table, torch.tensor([3, wrong]))

        coordinator.schedule(step)
        with pytest.raises(InvalidArgumentError, match=f"id {wrong} is not in table .* rows 0 to {ROWS - 1}"):
            coordinator.join(timeout=WAIT)
        assert asked == []


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
    with FakeCluster(workers=1, ps=2) as cluster:
        table, _, coordinator = on_servers(cluster, shards=2)
        lost = close_gate("asked for")
        close_gate("told at the lookup").set()

        def step() -> None:
            ts.prefetch_rows(table, torch.tensor([1, 20]))
            pass_gate("asked for")
            with pytest.raises(ParameterServerUnavailable, match=r"parameter server 1 is unavailable \(ps.read_rows"):
                table(torch.tensor([1, 20]))
            pass_gate("told at the lookup")

        with cluster.network.hold(cluster.peer("ps", 1), "ps.read_rows") as held:
            coordinator.schedule(step)
            held.wait_until_reached()
            await_arrivals("asked for", 1)
            cluster.kill_server(1)
            lost.set()
            await_arrivals("told at the lookup", 1)
            with pytest.raises(ParameterServerUnavailable, match="parameter server 1"):
                coordinator.join(timeout=WAIT)


def test_a_function_runs_again_elsewhere_and_reads_for_itself() -> None:
    with FakeCluster(workers=2, ps=1) as cluster:
        table, optimizer, coordinator = on_servers(cluster)

        def step() -> list[float]:
            ids = torch.tensor([5, 6])
            optimizer.zero_grad()
            (-table(torch.tensor([1])).sum()).backward()
            ts.prefetch_rows(table, ids)
            optimizer.step()
            return table(ids)[:, 0].tolist()

        with cluster.network.hold(cluster.peer("ps", 0), "ps.push", "after") as held:
            result = coordinator.schedule(step)
            held.wait_until_reached()
            cluster.kill_worker(held.caller.task.index)
        assert result.fetch(timeout=WAIT) == [5.0, 6.0]
        assert table.state_dict()["weight"][1].tolist() == [2.0, 2.0], "applied once"


# ---- what waits on a worker ------------------------------------------------------------------------------------------


class Access:
    """Answers for rows whenever it is told to; counts what was asked."""

    def __init__(self) -> None:
        self.peers: dict[int, str] = {0: "one"}
        self.servers = SimpleNamespace(peers=lambda: dict(self.peers))
        self.started: list[list[int]] = []

    def start_reading_rows(self, spec: VariableSpec, ids: torch.Tensor) -> Any:
        self.started.append(ids.tolist())
        answer: Future[torch.Tensor] = Future()
        answer.set_result(ids.double()[:, None].expand(-1, WIDTH).clone())
        return SimpleNamespace(wait=answer.result)

    def read_rows(self, spec: VariableSpec, ids: torch.Tensor) -> torch.Tensor:
        return self.start_reading_rows(spec, ids).wait()


SPEC = VariableSpec(0, "table", (ROWS, WIDTH), torch.float64, "parameter", (Shard(0, 0, ROWS),), by_rows=True)
ROW_BYTES = WIDTH * 8


def waiting(rows: TableRows) -> list[list[int]]:
    return [one.ids.tolist() for one in rows._ahead]


def test_what_was_asked_for_first_makes_room() -> None:
    access = Access()
    rows = TableRows(access, limit_bytes=5 * ROW_BYTES)  # type: ignore[arg-type]
    for ids in ([1, 2], [3, 4], [5, 6]):
        rows.prefetch(SPEC, torch.tensor(ids))
    assert waiting(rows) == [[3, 4], [5, 6]]
    rows.prefetch(SPEC, torch.arange(6))
    assert waiting(rows) == [[3, 4], [5, 6]], "what can never fit throws nothing out"
    rows.prefetch(SPEC, torch.arange(5))
    assert waiting(rows) == [[0, 1, 2, 3, 4]]
    rows.prefetch(SPEC, torch.empty(0, dtype=torch.int64))
    assert access.started == [[1, 2], [3, 4], [5, 6], [0, 1, 2, 3, 4]], "and what is not kept is not asked for"


def test_rows_of_servers_that_were_replaced_are_not_taken() -> None:
    access = Access()
    rows = TableRows(access)  # type: ignore[arg-type]
    ids = torch.tensor([1, 2])
    rows.prefetch(SPEC, ids)
    access.peers = {0: "another"}
    assert rows.read(SPEC, ids).values[:, 0].tolist() == [1.0, 2.0]
    assert access.started == [[1, 2], [1, 2]]
    assert waiting(rows) == []


def test_another_tables_rows_are_not_taken() -> None:
    access = Access()
    rows = TableRows(access)  # type: ignore[arg-type]
    other = VariableSpec(1, "other", SPEC.shape, SPEC.dtype, "parameter", SPEC.shards, by_rows=True)
    rows.prefetch(other, torch.tensor([1, 2]))
    rows.read(SPEC, torch.tensor([1, 2]))
    assert access.started == [[1, 2], [1, 2]]
    assert waiting(rows) == [[1, 2]]


def test_a_lookup_that_has_none_of_the_ids_leaves_them() -> None:
    access = Access()
    rows = TableRows(access)  # type: ignore[arg-type]
    rows.prefetch(SPEC, torch.tensor([1, 2]))
    found = rows.read(SPEC, torch.tensor([[9, 3], [0, 9]]))
    assert found.ids.tolist() == found.values[:, 0].tolist() == [0, 3, 9]
    assert found.places.tolist() == [[2, 1], [0, 2]]
    assert waiting(rows) == [[1, 2]]
    assert rows.read(SPEC, torch.empty(0, dtype=torch.int64)).values.shape == (0, WIDTH)
