"""`ts.Checkpoint` of what lives on parameter servers: they write and read it, and come back from being killed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrat as ts
from tests.unit.checkpoints import contents, flip, same
from torchstrat import Checkpoint
from torchstrat.checkpoint import files
from torchstrat.checkpoint.manifest import NAME
from torchstrat.errors import (
    CommunicationTimeoutError,
    ContextError,
    FencedError,
    InvalidArgumentError,
    ParameterServerUnavailable,
    PeerUnavailableError,
    UnsupportedError,
)
from torchstrat.parameter_server.messages import Push
from torchstrat.parameter_server.server import checkpoint_shards
from torchstrat.parameter_server.server.checkpoint_shards import CheckpointShards
from torchstrat.parameter_server.server.store import VariableStore
from torchstrat.parameter_server.variables.checkpoint_orders import AdoptOrder, ReadOrder, WriteOrder
from torchstrat.parameter_server.variables.server_group import ServerGroup
from torchstrat.partitioners import FixedShardsPartitioner
from torchstrat.testing.fake_cluster import FakeCluster

ROWS = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.norm(self.table(ids).mean(1)))
        return output


def make(seed: int = 0, optimizer: Any = torch.optim.Adam) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net().double()
    own = optimizer(model.parameters(), lr=0.05)
    return {
        "model": model,
        "optimizer": own,
        "scheduler": torch.optim.lr_scheduler.StepLR(own, 2, 0.5),
        "seen": ts.Variable(0.0, name="seen"),
    }


def train(objects: dict[str, Any], step: int) -> torch.Tensor:
    """Every row of the table in every step, so that the rule for rows is that for whole tables."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randperm(ROWS, generator=generator).reshape(4, 3)
    labels = torch.randint(0, 3, (4,), generator=generator)
    objects["optimizer"].zero_grad()
    loss = F.cross_entropy(objects["model"](ids), labels)
    loss.backward()
    objects["optimizer"].step()
    objects["seen"].assign_add(1.0)
    return loss.detach()


class Job:
    """A coordinator's program on a cluster of threads."""

    def __init__(self, cluster: FakeCluster, shards: int | None, *, seed: int = 0, **options: Any) -> None:
        self.cluster = cluster
        partitioner = FixedShardsPartitioner(shards) if shards else None
        self.strategy = cluster.strategy(variable_partitioner=partitioner, rows_only=True, **options)
        with self.strategy.scope():
            self.objects = make(seed)
        self.coordinator = ts.ClusterCoordinator(self.strategy)
        self.checkpoint = Checkpoint(**self.objects)

    def train(self, steps: range) -> list[float]:
        strategy, objects = self.strategy, {k: v for k, v in self.objects.items() if k != "scheduler"}

        def step(number: int) -> Any:
            return strategy.run(lambda: train(objects, number))

        results = []
        for number in steps:
            results.append(self.coordinator.schedule(step, args=(number,)))
            self.objects["scheduler"].step()
        self.coordinator.join(timeout=30)
        return [float(result.fetch()) for result in results]

    def state(self) -> dict[str, Any]:
        """Everything, as the program sees it."""
        named = {name: value for name, value in self.objects.items() if name != "seen"}
        return {**contents(named), "seen": float(self.objects["seen"])}


@contextmanager
def job(ps: int = 2, shards: int | None = 2, **options: Any) -> Iterator[Job]:
    with FakeCluster(workers=1, ps=ps) as cluster:
        yield Job(cluster, shards, **options)


def plain(path: Path) -> dict[str, Any]:
    """What an ordinary program restores from ``path``."""
    objects = make(seed=7)
    Checkpoint(**objects).restore(path)
    return objects


def state_of(objects: dict[str, Any]) -> dict[str, Any]:
    return {**contents({k: v for k, v in objects.items() if k != "seen"}), "seen": float(objects["seen"])}


# -- there and back ---------------------------------------------------------------------------------------------------


def test_training_goes_on_from_a_checkpoint_with_the_same_numbers(tmp_path: Path) -> None:
    with job() as running:
        first = running.train(range(3))
        running.checkpoint.save(tmp_path / "saved")
        saved = running.state()
        undisturbed = running.train(range(3, 6))
        assert not same(saved, running.state())
        running.checkpoint.restore(tmp_path / "saved")
        assert same(saved, running.state())
        assert running.train(range(3, 6)) == undisturbed
        # The control: from other values there come other numbers.
        assert running.train(range(3, 6)) != undisturbed
        assert len(first) == 3


def test_every_server_writes_its_own_shards(tmp_path: Path) -> None:
    with job(ps=2) as running:
        running.train(range(1))
        running.checkpoint.save(tmp_path / "saved")
        here = (tmp_path / "saved" / "__0_0.distcp").stat().st_size
        written = [(tmp_path / "saved" / f"__{1 + server}_0.distcp").stat().st_size for server in range(2)]
        assert min(written) > 0
        assert here > 0
        names = sorted(os.listdir(tmp_path / "saved"))
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "torchstrat.json"]
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize(("ps", "shards"), [(1, None), (1, 2), (3, 5), (2, 1)])
def test_another_number_of_servers_and_shards(ps: int, shards: int | None, tmp_path: Path) -> None:
    with job(ps=2, shards=2) as before:
        before.train(range(3))
        before.checkpoint.save(tmp_path / "saved")
        saved = before.state()
        undisturbed = before.train(range(3, 6))
    with job(ps=ps, shards=shards, seed=5) as after:
        assert not same(saved, after.state())
        after.checkpoint.restore(tmp_path / "saved")
        assert same(saved, after.state())
        assert after.train(range(3, 6)) == pytest.approx(undisturbed, abs=1e-12)


def test_from_servers_to_a_plain_program_and_back(tmp_path: Path) -> None:
    with job(ps=2, shards=3) as running:
        running.train(range(3))
        running.checkpoint.save(tmp_path / "servers")
        objects = plain(tmp_path / "servers")
        assert same(running.state(), state_of(objects))
        undisturbed = [float(train(objects, 3))]
        objects["scheduler"].step()
        Checkpoint(**objects).save(tmp_path / "plain")
        assert running.train(range(3, 4)) == pytest.approx(undisturbed, abs=1e-12)
        running.checkpoint.restore(tmp_path / "plain")
        assert same(running.state(), state_of(objects))


@pytest.mark.parametrize("kind", [ts.MirroredStrategy, ts.CentralStorageStrategy])
def test_from_a_synchronous_strategy_and_back(kind: Any, tmp_path: Path) -> None:
    strategy = kind(["cpu:0", "cpu:1"])
    with strategy.scope():
        synchronous = make(3)
    synchronous["optimizer"].zero_grad()
    strategy.run(lambda: (synchronous["model"](torch.arange(12).reshape(4, 3)).sum().backward(), None)[1])
    strategy.run(lambda: synchronous["optimizer"].step())
    synchronous["seen"].assign(4.0)
    Checkpoint(**synchronous).save(tmp_path / "synchronous")
    with job(ps=3, shards=3) as running:
        running.checkpoint.restore(tmp_path / "synchronous")
        assert same(running.state(), state_of(synchronous))
        running.train(range(2))
        running.checkpoint.save(tmp_path / "servers")
        Checkpoint(**synchronous).restore(tmp_path / "servers")
        assert same(running.state(), state_of(synchronous))
    strategy.close()


def test_state_under_a_word(tmp_path: Path) -> None:
    """What an optimizer has in its ``state`` that is of no parameter."""
    objects = make()
    objects["optimizer"].state["schedule"] = {"warmed": 7}
    Checkpoint(**objects).save(tmp_path / "plain")
    with job() as running:
        running.checkpoint.restore(tmp_path / "plain")
        assert running.objects["optimizer"].state["schedule"] == {"warmed": 7}
        running.checkpoint.save(tmp_path / "servers")
    assert plain(tmp_path / "servers")["optimizer"].state["schedule"] == {"warmed": 7}


class Counting(torch.optim.SGD):
    """Its ``state_dict()`` has more than PyTorch's."""

    seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]
        super().load_state_dict({key: one for key, one in state_dict.items() if key != "seen"})


def test_what_a_class_adds_to_its_state_dict(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Counting]:
        model = nn.Linear(2, 2)
        return model, Counting(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made()
    optimizer.seen = 5
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "plain")
    with FakeCluster(workers=1, ps=2) as cluster:
        with cluster.strategy().scope():
            on_servers, stepped = made()
        Checkpoint(model=on_servers, optimizer=stepped).restore(tmp_path / "plain")
        assert stepped.seen == 5
        assert same(stepped.state_dict(), optimizer.state_dict())
        Checkpoint(model=on_servers, optimizer=stepped).save(tmp_path / "servers")
    model, restored = made()
    Checkpoint(model=model, optimizer=restored).restore(tmp_path / "servers")
    assert same(restored.state_dict(), optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@pytest.mark.parametrize("kind", ["quantized", "sparse"])
def test_variables_that_are_more_than_numbers_are_refused_by_name(kind: str) -> None:
    dense = torch.eye(2)
    table = dense.to_sparse() if kind == "sparse" else torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)

    def make(strategy: ts.Strategy) -> None:
        with strategy.scope():
            module = nn.Linear(2, 2)
            module.register_buffer("table", table)

    with FakeCluster(workers=1, ps=1) as cluster:
        strategy = cluster.strategy()
        with pytest.raises(UnsupportedError, match=f"'table of module 0' is .*{kind}.* Make it dense"):
            make(strategy)


def test_only_some_objects(tmp_path: Path) -> None:
    with job() as running:
        running.train(range(2))
        running.checkpoint.save(tmp_path / "saved")
        model = {k: v.clone() for k, v in running.objects["model"].state_dict().items()}
        running.train(range(2, 3))
        Checkpoint(model=running.objects["model"]).restore(tmp_path / "saved")
        assert same(model, dict(running.objects["model"].state_dict()))
        assert float(running.objects["seen"]) == 3.0
        assert float(running.objects["optimizer"].state_dict()["state"][0]["step"]) == 3.0


def test_a_sharded_variable_is_one_tensor(tmp_path: Path) -> None:
    values = torch.arange(14.0).reshape(7, 2)
    for ps, shards in [(2, 3), (3, 2), (1, None)]:
        with FakeCluster(workers=1, ps=ps) as cluster:
            strategy = cluster.strategy(
                variable_partitioner=FixedShardsPartitioner(shards) if shards else None, rows_only=True
            )
            with strategy.scope():
                table = ts.Variable(torch.zeros(7, 2), name="table")
            if shards == 3:
                table.assign(values)
                Checkpoint(table=table).save(tmp_path / "table")
            else:
                Checkpoint(table=table).restore(tmp_path / "table")
            assert torch.equal(torch.as_tensor(table) if shards else table.read_value(), values)
            with strategy.scope():
                longer = ts.Variable(torch.zeros(8, 2))
            with pytest.raises(InvalidArgumentError, match=r"table is torch.float32 \(7, 2\) in the checkpoint"):
                Checkpoint(table=longer).restore(tmp_path / "table")


def test_state_of_shards_that_no_step_has_touched(tmp_path: Path) -> None:
    with FakeCluster(workers=1, ps=3) as cluster:
        strategy = cluster.strategy(variable_partitioner=FixedShardsPartitioner(3), rows_only=True)
        with strategy.scope():
            table = nn.Embedding(6, 2)
            optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1, initial_accumulator_value=0.5)
        coordinator = ts.ClusterCoordinator(strategy)

        def step() -> None:
            def train() -> None:
                optimizer.zero_grad()
                table(torch.tensor([2, 3])).sum().backward()
                optimizer.step()

            strategy.run(train)

        coordinator.schedule(step)
        coordinator.join(timeout=30)
        Checkpoint(table=table, optimizer=optimizer).save(tmp_path / "table")
    whole = nn.Embedding(6, 2)
    other = torch.optim.Adagrad(whole.parameters(), lr=0.1)
    Checkpoint(table=whole, optimizer=other).restore(tmp_path / "table")
    assert other.state[whole.weight]["sum"][:, 0].tolist() == [0.5, 0.5, 1.5, 1.5, 0.5, 0.5]


SPARSE = {
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
    "sparse adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize("name", SPARSE)
def test_optimizers_that_step_rows_go_on_on_other_servers(name: str, tmp_path: Path) -> None:
    """With accumulators and moments of the rows that were touched, those that were not, and the number of steps."""

    def go_on(ps: int, shards: int | None, seed: int, steps: range, restore: bool) -> tuple[Any, Any]:
        """The state where it starts, and where it ends."""
        with FakeCluster(workers=1, ps=ps) as cluster:
            partitioner = FixedShardsPartitioner(shards) if shards else None
            strategy = cluster.strategy(variable_partitioner=partitioner, rows_only=True)
            torch.manual_seed(seed)
            with strategy.scope():
                table = nn.Embedding(20, 3, sparse=name == "sparse adam", dtype=torch.float64)
                optimizer = SPARSE[name](table.parameters())
            coordinator, objects = ts.ClusterCoordinator(strategy), {"table": table, "optimizer": optimizer}

            def train(rows: list[int]) -> None:
                optimizer.zero_grad()
                table(torch.tensor(rows)).square().sum().backward()
                optimizer.step()

            if restore:
                Checkpoint(**objects).restore(tmp_path / "saved")
            first = {key: value.clone() for key, value in table.state_dict().items()}, optimizer.state_dict()["state"]
            for step in steps:
                coordinator.schedule(lambda rows: strategy.run(lambda: train(rows)), args=([step, step + 1, 7],))
                coordinator.join(timeout=30)
            if not restore:
                Checkpoint(**objects).save(tmp_path / "saved")
            return first, (dict(table.state_dict()), optimizer.state_dict()["state"])

    _, saved = go_on(2, 3, 0, range(4), restore=False)
    assert saved[1], "there is state to be lost"
    start, undisturbed = go_on(2, 3, 1, range(4, 9), restore=True)
    assert same(start, saved)
    for ps, shards in ((3, 5), (1, None)):
        start, end = go_on(ps, shards, 2, range(4, 9), restore=True)
        assert same(start, saved)
        assert not same(end, saved)
        # A table that is in one piece is no table of rows to Adam and momentum: they step all of it.
        assert same(end, undisturbed) == (shards is not None or name in ("adagrad", "sparse adam"))


def test_tables_on_meta_stay_there(tmp_path: Path) -> None:
    def make_table(cluster: FakeCluster, shards: int) -> tuple[Any, nn.Embedding]:
        strategy = cluster.strategy(variable_partitioner=FixedShardsPartitioner(shards), rows_only=True)
        torch.manual_seed(shards)
        with strategy.scope():
            table = nn.Embedding(10, 3, device="meta")
        return strategy, table

    with FakeCluster(workers=1, ps=2) as cluster:
        strategy, table = make_table(cluster, 2)
        Checkpoint(model=table).save(tmp_path / "table")
        values = strategy._job.access.read([strategy._job.variables.spec_of(table.weight)])[0]
        assert table.weight.is_meta
    with FakeCluster(workers=1, ps=3) as cluster:
        strategy, table = make_table(cluster, 3)
        assert not torch.equal(values, strategy._job.access.read([strategy._job.variables.spec_of(table.weight)])[0])
        Checkpoint(model=table).restore(tmp_path / "table")
        assert torch.equal(values, strategy._job.access.read([strategy._job.variables.spec_of(table.weight)])[0])
        assert table.weight.is_meta
    with pytest.raises(InvalidArgumentError, match=r"model\.weight is on meta and has no value"):
        Checkpoint(model=nn.Embedding(10, 3, device="meta")).save(tmp_path / "other")


# -- a server was lost ------------------------------------------------------------------------------------------------


def test_a_lost_server_comes_back(tmp_path: Path) -> None:
    with job(ps=2, shards=2) as running:
        running.train(range(3))
        running.checkpoint.save(tmp_path / "saved")
        saved = running.state()
        undisturbed = running.train(range(3, 6))
        worker, survivor = running.cluster.peer("worker", 0), running.cluster.peer("ps", 0)
        running.cluster.kill_server(1)
        with pytest.raises(ParameterServerUnavailable, match="parameter server 1"):
            running.train(range(6, 8))
        running.cluster.start_server(1)
        running.checkpoint.restore(tmp_path / "saved")
        assert same(saved, running.state())
        assert running.train(range(3, 6)) == undisturbed
        assert (worker, survivor) == (running.cluster.peer("worker", 0), running.cluster.peer("ps", 0))
        # And once more, the other one.
        running.cluster.kill_server(0)
        with pytest.raises(ParameterServerUnavailable, match="parameter server 0"):
            running.train(range(6, 8))
        running.cluster.start_server(0)
        running.checkpoint.restore(tmp_path / "saved")
        assert running.train(range(3, 6)) == undisturbed


def test_a_death_that_only_a_worker_has_noticed_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that a function brings back can be there before the coordinator's own connection has broken."""
    with job(ps=2, shards=2) as running:
        running.checkpoint.save(tmp_path / "saved")
        saved = running.state()
        running.train(range(2))
        dead = running.cluster.peer("ps", 1)
        ask_all, given_up, asked = ServerGroup.ask_all, [], []

        def first_unreachable(group: ServerGroup, method: str, payload: Any = None) -> Any:
            asked.append(method)
            if len(asked) == 1:
                group._raise_unavailable(1, method, PeerUnavailableError("its connection broke", dead))
            return ask_all(group, method, payload)

        monkeypatch.setattr(ServerGroup, "ask_all", first_unreachable)
        monkeypatch.setattr(
            running.strategy._job.membership, "give_up", lambda peer, reason: given_up.append((peer, reason))
        )
        running.checkpoint.restore(tmp_path / "saved")
        assert given_up == [(dead, "its connection broke")]
        assert same(saved, running.state())


def test_all_servers_were_lost(tmp_path: Path) -> None:
    with job(ps=2, shards=2) as running:
        running.train(range(2))
        running.checkpoint.save(tmp_path / "saved")
        undisturbed = running.train(range(2, 4))
        for index in range(2):
            running.cluster.kill_server(index)
        with pytest.raises(ParameterServerUnavailable):
            running.train(range(4, 6))
        for index in range(2):
            running.cluster.start_server(index)
        running.checkpoint.restore(tmp_path / "saved")
        assert running.train(range(2, 4)) == undisturbed


def test_a_server_that_does_not_come_back_is_named(tmp_path: Path) -> None:
    with job(ps=2, timeout=timedelta(seconds=0.3)) as running:
        running.checkpoint.save(tmp_path / "saved")
        running.cluster.kill_server(1)
        with pytest.raises(ParameterServerUnavailable):
            running.train(range(1))
        with pytest.raises(CommunicationTimeoutError, match="ps 1 did not join"):
            running.checkpoint.restore(tmp_path / "saved")
        with pytest.raises(ParameterServerUnavailable, match="parameter server 1"):
            running.checkpoint.save(tmp_path / "other")
        assert os.listdir(tmp_path) == ["saved"]


def test_no_function_runs_before_the_restore_has_succeeded(tmp_path: Path) -> None:
    with job(ps=2) as running:
        running.train(range(2))
        running.checkpoint.save(tmp_path / "good")
        running.checkpoint.save(tmp_path / "bad")
        undisturbed = running.train(range(2, 4))
        flip(tmp_path / "bad" / "__2_0.distcp")
        running.cluster.kill_server(1)
        with pytest.raises(ParameterServerUnavailable):
            running.train(range(4, 6))
        running.cluster.start_server(1)
        with pytest.raises(InvalidArgumentError, match=r"__2_0\.distcp is damaged"):
            running.checkpoint.restore(tmp_path / "bad")
        with pytest.raises((ParameterServerUnavailable, ContextError)):
            running.train(range(1))
        running.checkpoint.restore(tmp_path / "good")
        assert running.train(range(2, 4)) == undisturbed


def test_what_the_checkpoint_lacks_is_said(tmp_path: Path) -> None:
    with job(ps=1) as running:
        running.train(range(2))
        Checkpoint(model=running.objects["model"], optimizer=running.objects["optimizer"]).save(tmp_path / "most")
        running.cluster.kill_server(0)
        with pytest.raises(ParameterServerUnavailable):
            running.train(range(1))
        running.cluster.start_server(0)
        checkpoint = Checkpoint(model=running.objects["model"], optimizer=running.objects["optimizer"])
        with pytest.warns(UserWarning, match="seen: lost with the parameter server, and not in the checkpoint"):
            checkpoint.restore(tmp_path / "most")
        assert float(running.objects["seen"]) == 0.0
        running.train(range(1))
        assert float(running.objects["seen"]) == 1.0


# -- one cut ----------------------------------------------------------------------------------------------------------


def test_a_save_while_functions_run_has_no_half_of_a_push(tmp_path: Path) -> None:
    """Both tensors change by the same in every push to the one server that holds them."""
    with FakeCluster(workers=2, ps=1) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            pair = nn.ParameterList([nn.Parameter(torch.zeros(50_000)) for _ in range(2)])
            optimizer = torch.optim.SGD(pair.parameters(), lr=1.0)
        coordinator = ts.ClusterCoordinator(strategy)

        def step() -> None:
            def train() -> None:
                optimizer.zero_grad()
                (-(pair[0] + pair[1])).sum().backward()
                optimizer.step()

            strategy.run(train)

        for _ in range(40):
            coordinator.schedule(step)
        restored = []
        for number in range(4):
            Checkpoint(pair=pair).save(tmp_path / str(number))
            copy = nn.ParameterList([nn.Parameter(torch.zeros(50_000)) for _ in range(2)])
            Checkpoint(pair=copy).restore(tmp_path / str(number))
            assert torch.equal(copy[0], copy[1])
            assert bool((copy[0] == copy[0][0]).all())
            restored.append(copy[0][0].item())
        coordinator.join(timeout=30)
        assert restored == sorted(restored)


def test_restore_waits_for_the_functions_that_run(tmp_path: Path) -> None:
    go, inside = threading.Event(), threading.Event()
    _events["go"], _events["inside"] = go, inside
    with job() as running:
        running.checkpoint.save(tmp_path / "saved")
        seen = running.objects["seen"]

        def slow() -> None:
            from tests.unit.test_ps_checkpoint import _events

            _events["inside"].set()
            assert _events["go"].wait(30)
            seen.assign_add(100.0)

        running.coordinator.schedule(slow)
        assert inside.wait(30)
        threading.Timer(0.05, go.set).start()
        running.checkpoint.restore(tmp_path / "saved")
        assert float(seen) == 0.0


_events: dict[str, threading.Event] = {}


def test_records_of_pushes_are_saved_and_not_put_back(tmp_path: Path) -> None:
    with job(ps=2) as running:
        running.train(range(3))
        running.checkpoint.save(tmp_path / "saved")
        records = json.loads((tmp_path / "saved" / NAME).read_text())["servers"]
        assert [records[index]["next_function"] for index in "01"] == [3, 3]
        running.train(range(3, 5))
        running.checkpoint.restore(tmp_path / "saved")
        store = running.cluster.service("ps", 0).store
        assert store.catalog()["next_function"] == 5
        with pytest.raises(FencedError, match="finished all functions below 5"):
            store.push(Push(4, 0, "a worker that was given up"))
        assert store.push(Push(5, 0, "worker")).applied


# -- what is refused --------------------------------------------------------------------------------------------------


def unchanged(running: Job, restore: Callable[[], None], error: type[Exception], message: str) -> None:
    before = running.state()
    with pytest.raises(error, match=message):
        restore()
    assert same(before, running.state())


def test_what_does_not_fit_changes_no_server(tmp_path: Path) -> None:
    with job() as running:
        running.train(range(1))
        other = make()
        other["model"].head = nn.Linear(4, 5).double()
        other["optimizer"] = torch.optim.Adam(other["model"].parameters(), lr=0.05)
        Checkpoint(**other).save(tmp_path / "other")
        message = r"model\.head\.weight is torch.float64 \(5, 4\) in the checkpoint and torch.float64 \(3, 4\)"
        unchanged(running, lambda: running.checkpoint.restore(tmp_path / "other"), InvalidArgumentError, message)
        nothing = lambda: running.checkpoint.restore(tmp_path / "nothing")  # noqa: E731
        unchanged(running, nothing, InvalidArgumentError, "no such folder")


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"])
def test_a_damaged_file_changes_no_server(file: str, tmp_path: Path) -> None:
    with job() as running:
        running.train(range(1))
        running.checkpoint.save(tmp_path / "saved")
        running.train(range(1, 2))
        flip(tmp_path / "saved" / file)
        bad = lambda: running.checkpoint.restore(tmp_path / "saved")  # noqa: E731
        unchanged(running, bad, InvalidArgumentError, f"{file} is damaged")
        running.train(range(2, 3))


def test_a_path_that_a_server_cannot_see(tmp_path: Path) -> None:
    shards = CheckpointShards(VariableStore("ps 3 on another machine"))
    for call in (
        lambda: shards.write(WriteOrder(str(tmp_path / "elsewhere"), 1)),
        lambda: shards.read(ReadOrder(str(tmp_path / "elsewhere"), "token")),
    ):
        with pytest.raises(InvalidArgumentError, match=r"ps 3 on another machine does not see .*elsewhere"):
            call()
    with pytest.raises(InvalidArgumentError, match="ps 3 on another machine has not read the checkpoint"):
        shards.adopt(AdoptOrder("token", 0))


def test_a_server_that_cannot_write_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job() as running:
        running.checkpoint.save(tmp_path / "saved")
        saved = running.state()
        running.train(range(1))

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_shards, "write_part", full)
            with pytest.raises(InvalidArgumentError, match=r"ps \d.* cannot write its part .*No space left"):
                running.checkpoint.save(tmp_path / "saved")
        assert os.listdir(tmp_path) == ["saved"]
        running.checkpoint.restore(tmp_path / "saved")
        assert same(saved, running.state())


def test_a_file_that_the_coordinator_cannot_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(folder: Path, *rest: Any) -> Any:
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        return files.write_part(tmp_path / "elsewhere", *rest)

    monkeypatch.setattr(checkpoint_shards, "write_part", elsewhere)
    with job() as running, pytest.raises(InvalidArgumentError, match="is not to be seen by the coordinator"):
        running.checkpoint.save(tmp_path / "saved")


def test_not_in_a_scheduled_function(tmp_path: Path) -> None:
    with job() as running:
        path = str(tmp_path / "inside")
        model = running.objects["model"]

        def inside() -> None:
            Checkpoint(model=model).save(path)

        running.coordinator.schedule(inside)
        with pytest.raises(ContextError, match="in a scheduled function"):
            running.coordinator.join(timeout=30)
