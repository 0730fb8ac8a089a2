"""Workers and servers that die at chosen moments, on a network that can be held there."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.parameter_server.server import applied
from torchstrat.testing.fake_cluster import FakeCluster

WAIT = 60


class Counters(nn.Module):
    """Three vectors on two servers; function i adds 1 at place i of each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(3))


def counting(cluster: FakeCluster, size: int):
    strategy = cluster.strategy()
    with strategy.scope():
        model = Counters(size)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    coordinator = ts.ClusterCoordinator(strategy)

    def add_one(place: int) -> int:
        optimizer.zero_grad()
        sum(-vector[place] for vector in model.vectors).backward()
        optimizer.step()
        return place

    return model, coordinator, add_one


def assert_counts(model: nn.Module, wanted: float) -> None:
    for value in model.state_dict().values():
        assert torch.equal(value, torch.full_like(value, wanted))


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_that_dies_around_a_push(server, when):
    with FakeCluster(workers=2, ps=2) as cluster:
        model, coordinator, add_one = counting(cluster, 6)
        with cluster.network.hold(cluster.peer("ps", server), "ps.push", when) as held:
            results = [coordinator.schedule(add_one, args=(place,)) for place in range(6)]
            held.wait_until_reached()
            victim = held.caller.task.index
            cluster.kill_worker(victim)
        coordinator.join(timeout=WAIT)
        assert coordinator.fetch(results) == list(range(6))
        assert_counts(model, 1.0)


def test_without_the_records_the_same_death_counts_twice(monkeypatch):
    """The control: what the test above rests on is the servers' memory of what they applied."""
    monkeypatch.setattr(applied.AppliedRecords, "_is_applied", lambda *_: False)
    with FakeCluster(workers=2, ps=2) as cluster:
        model, coordinator, add_one = counting(cluster, 6)
        with cluster.network.hold(cluster.peer("ps", 0), "ps.push", "after") as held:
            for place in range(6):
                coordinator.schedule(add_one, args=(place,))
            held.wait_until_reached()
            cluster.kill_worker(held.caller.task.index)
        coordinator.join(timeout=WAIT)
        assert max(float(value.max()) for value in model.state_dict().values()) == 2.0


def test_a_worker_that_is_started_again_gets_everything_anew():
    with FakeCluster(workers=1, ps=2) as cluster:
        model, coordinator, add_one = counting(cluster, 4)
        iterator = iter(coordinator.create_per_worker_dataset(lambda: torch.utils.data.DataLoader(range(4))))

        def from_data(iterator):
            return add_one(int(next(iterator)))

        coordinator.schedule(from_data, args=(iterator,))
        coordinator.schedule(from_data, args=(iterator,))
        coordinator.join(timeout=WAIT)
        cluster.kill_worker(0)
        third = coordinator.schedule(from_data, args=(iterator,))
        assert not coordinator.done()
        cluster.start_worker(0)
        assert third.fetch(timeout=WAIT) == 0  # its own copy of the data, from the start
        coordinator.join(timeout=WAIT)
        assert [vector[:2].tolist() for vector in model.state_dict().values()] == [[2.0, 1.0]] * 3


def test_with_no_worker_at_all_join_says_who_is_missing():
    with FakeCluster(workers=1, ps=1) as cluster:
        _, coordinator, add_one = counting(cluster, 2)
        cluster.kill_worker(0)
        result = coordinator.schedule(add_one, args=(0,))
        with pytest.raises(ts.errors.CommunicationTimeoutError, match=r"1 functions are queued, workers \[\]"):
            coordinator.join(timeout=0.05)
        assert "waits for a worker" in repr(result)


@pytest.mark.parametrize("call", ["join", "schedule", "fetch"])
def test_a_lost_server_is_named(call):
    with FakeCluster(workers=2, ps=2) as cluster:
        _, coordinator, add_one = counting(cluster, 4)
        coordinator.schedule(add_one, args=(0,)).fetch(timeout=WAIT)
        with cluster.network.hold(cluster.peer("ps", 1), "ps.push") as held:
            result = coordinator.schedule(add_one, args=(1,))
            held.wait_until_reached()
            cluster.kill_server(1)
        calls = {
            "join": lambda: coordinator.join(timeout=WAIT),
            "schedule": lambda: coordinator.schedule(add_one, args=(2,)),
            "fetch": lambda: result.fetch(timeout=WAIT),
        }
        coordinator._dispatcher.wait(WAIT)
        with pytest.raises(ts.errors.ParameterServerUnavailable, match="parameter server 1") as caught:
            calls[call]()
        assert str(caught.value.task) == "ps 1"
        if call != "schedule":
            with pytest.raises(ts.errors.ParameterServerUnavailable):
                coordinator.schedule(add_one, args=(2,))


def test_a_worker_that_cannot_reach_a_server_is_given_up_and_not_the_server():
    with FakeCluster(workers=2, ps=2) as cluster:
        model, coordinator, add_one = counting(cluster, 6)
        with cluster.network.hold(cluster.peer("ps", 0), "ps.push") as held:  # so that server 1 may have its half
            results = [coordinator.schedule(add_one, args=(place,)) for place in range(6)]
            held.wait_until_reached()
            victim = held.caller
            cluster.cut_off(victim.task.index, 0)
        coordinator.join(timeout=WAIT)
        assert coordinator.fetch(results) == list(range(6))
        assert_counts(model, 1.0)
        assert victim.incarnation not in coordinator._dispatcher._workers


def test_a_server_that_no_process_of_a_task_can_reach_is_lost_in_the_end():
    """The network does not allow it: somebody must be told."""
    with FakeCluster(workers=1, ps=1) as cluster:
        _, coordinator, add_one = counting(cluster, 2)
        coordinator.schedule(add_one, args=(0,)).fetch(timeout=WAIT)
        dispatcher = coordinator._dispatcher
        with cluster.network.hold(cluster.peer("ps", 0), "ps.push") as held:
            result = coordinator.schedule(add_one, args=(1,))
            for time in (1, 2):
                held.wait_until_reached(time)
                cluster.cut_off(0, 0)
                assert dispatcher.wait_released(0, WAIT)
                assert dispatcher.loss is None
                cluster.kill_worker(0)
                cluster.start_worker(0)
            held.wait_until_reached(3)
            cluster.cut_off(0, 0)
            with pytest.raises(
                ts.errors.ParameterServerUnavailable,
                match=r"worker 0.* could not reach it, nor could 2 processes .* look at the network",
            ):
                coordinator.join(timeout=WAIT)
        with pytest.raises(ts.errors.ParameterServerUnavailable, match="was removed"):
            result.fetch(timeout=WAIT)


def test_functions_that_wait_for_a_lost_server_are_cancelled():
    with FakeCluster(workers=1, ps=2) as cluster:
        _, coordinator, add_one = counting(cluster, 4)
        with cluster.network.hold(cluster.peer("ps", 0), "ps.push") as held:
            results = [coordinator.schedule(add_one, args=(place,)) for place in range(4)]
            held.wait_until_reached()
            cluster.kill_server(0)
        with pytest.raises(ts.errors.ParameterServerUnavailable):
            coordinator.join(timeout=WAIT)
        for result in results:
            with pytest.raises(ts.errors.ParameterServerUnavailable):
                result.fetch(timeout=WAIT)


def test_a_stopped_worker_is_replaced_and_its_late_push_refused():
    with FakeCluster(workers=2, ps=1) as cluster:
        model, coordinator, add_one = counting(cluster, 2)
        with cluster.network.hold(cluster.peer("ps", 0), "ps.push") as held:
            coordinator.schedule(add_one, args=(0,))
            held.wait_until_reached()
            stopped = held.caller
            cluster.network.stop(stopped)
            cluster.network.advance(10)  # past the deadline; the watchers have been told
        coordinator.join(timeout=WAIT)
        cluster.network.resume(stopped)
        coordinator.schedule(add_one, args=(1,)).fetch(timeout=WAIT)
        assert_counts(model, 1.0)


def test_a_worker_is_drained():
    with FakeCluster(workers=2, ps=1) as cluster:
        _, coordinator, add_one = counting(cluster, 8)
        coordinator.remove_worker(1, timeout=WAIT)
        where = [coordinator.schedule(lambda: coordinator.get_current_worker_index()) for _ in range(4)]
        assert coordinator.fetch(where) == [0] * 4
        cluster.start_worker(5)
        cluster.kill_worker(0)
        assert coordinator.schedule(lambda: coordinator.get_current_worker_index()).fetch(timeout=WAIT) == 5
        assert coordinator.schedule(add_one, args=(3,)).fetch(timeout=WAIT) == 3


def test_a_leaving_worker_finishes_what_it_runs():
    with FakeCluster(workers=1, ps=1) as cluster:
        model, coordinator, add_one = counting(cluster, 3)
        with cluster.network.hold(cluster.peer("ps", 0), "ps.push") as held:
            results = [coordinator.schedule(add_one, args=(place,)) for place in range(3)]
            held.wait_until_reached()
            leaving = threading.Thread(target=cluster.service("worker", 0).drain, args=(WAIT,))
            leaving.start()
        leaving.join(WAIT)
        assert results[0].fetch(timeout=WAIT) == 0
        cluster.start_worker(1)
        assert coordinator.fetch(results) == [0, 1, 2]
        assert_counts(model, 1.0)
