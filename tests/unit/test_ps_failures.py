"""Workers and servers that die at chosen moments, on a network that can be held there.

Workers that leave or are removed are in test_ps_batches.py; stopped ones and real processes in tests/faults.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.gates import await_arrivals, close_gate, pass_gate
from torchstrat.errors import (
    CommunicationTimeoutError,
    FunctionSetAsideError,
    InvalidArgumentError,
    NotSendableError,
    ParameterServerUnavailable,
    RepeatedFunctionError,
)
from torchstrat.testing.fake_cluster import FakeCluster

WAIT = 60


class Counters(nn.Module):
    """Three vectors on two servers; function i adds 1 at place i of each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(3))


class Job:
    """A coordinator's program on a cluster that it ends."""

    def __init__(self, cluster: FakeCluster, size: int) -> None:
        self.cluster, self.strategy = cluster, cluster.strategy()
        with self.strategy.scope():
            self.model = model = Counters(size)
            self.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            self.counter = counter = ts.Variable(0.0, name="counter")
        self.coordinator = coordinator = ts.ClusterCoordinator(self.strategy)

        def add_one(place: int) -> int:
            optimizer.zero_grad()
            sum(-vector[place] for vector in model.vectors).backward()
            optimizer.step()
            return place

        def increment_and_pass(gate: str) -> int:
            counter.assign_add(1.0)
            pass_gate(gate)
            return coordinator.get_current_worker_index()

        self.add_one, self.increment_and_pass = add_one, increment_and_pass

    def add(self, *places: int) -> list[ts.RemoteValue[int]]:
        return [self.coordinator.schedule(self.add_one, args=(place,)) for place in places]

    def assert_counts(self, wanted: float = 1.0) -> None:
        for value in self.model.state_dict().values():
            assert torch.equal(value, torch.full_like(value, wanted))


@contextmanager
def job_of(workers: int, ps: int, size: int = 6) -> Iterator[Job]:
    with FakeCluster(workers=workers, ps=ps) as cluster:
        yield Job(cluster, size)


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_that_dies_around_a_push(server: int, when: Any) -> None:
    with job_of(2, 2) as job:
        with job.cluster.network.hold(job.cluster.peer("ps", server), "ps.push", when) as held:
            results = job.add(*range(6))
            held.wait_until_reached()
            job.cluster.kill_worker(held.caller.task.index)
        job.coordinator.join(timeout=WAIT)
        assert job.coordinator.fetch(results) == list(range(6))
        job.assert_counts()


def test_a_worker_that_dies_inside_a_function_or_idle() -> None:
    with job_of(2, 2) as job:
        gate = close_gate("inside")
        values = [job.coordinator.schedule(job.increment_and_pass, ("inside",)) for _ in range(2)]
        await_arrivals("inside", 2)
        job.cluster.kill_worker(0)
        gate.set()
        job.coordinator.join(timeout=WAIT)
        assert job.coordinator.fetch(values) == [1, 1]
        assert job.counter.read_value() == 2.0  # the function that ran twice has counted once
        job.cluster.start_worker(0)
        job.cluster.kill_worker(1)
        values = [job.coordinator.schedule(job.increment_and_pass, ("inside",)) for _ in range(2)]
        assert [value.fetch(timeout=WAIT) for value in values] == [0, 0]
        assert job.counter.read_value() == 4.0


def test_a_function_that_ends_its_workers_is_set_aside_by_name_and_the_others_go_on() -> None:
    with job_of(2, 2) as job:
        gate = close_gate("poison")

        def poison() -> None:
            pass_gate("poison")

        bad, others = job.coordinator.schedule(poison), job.add(*range(6))
        for attempt in range(5):
            await_arrivals("poison", 1)
            if attempt == 4:
                assert [value.get(timeout=WAIT) for value in others] == list(range(6))
            found = re.search(r"runs on worker (\d)", repr(bad))
            assert found is not None
            job.cluster.wait_until_lost(job.cluster.kill_worker(int(found[1])))
            job.cluster.start_worker(int(found[1]))
        with pytest.raises(FunctionSetAsideError, match=r"function 0 \(.*poison\) is set aside: it was run 5 times"):
            job.coordinator.join(timeout=WAIT)
        with pytest.raises(FunctionSetAsideError):
            bad.get()
        gate.set()
        job.assert_counts()
        assert job.coordinator.schedule(lambda: 7).get(timeout=WAIT) == 7


def test_a_worker_on_which_a_function_takes_too_long_is_given_up() -> None:
    with job_of(4, 1) as job:
        gate = close_gate("hangs")
        hangs = job.coordinator.schedule(pass_gate, args=("hangs",), timeout=0.1, max_attempts=3)
        quick = [job.coordinator.schedule(int, timeout=30) for _ in range(20)]
        with pytest.raises(
            FunctionSetAsideError, match=r"run 3 times.*\(pass_gate\) ran for more than 0.1 s, its timeout"
        ):
            hangs.get(timeout=WAIT)
        gate.set()
        with pytest.raises(FunctionSetAsideError):
            job.coordinator.join(timeout=WAIT)
        assert [value.get(timeout=WAIT) for value in quick] == [0] * 20
        job.cluster.kill_worker(0)  # as a process does that is given up
        job.cluster.start_worker(0)
        assert job.coordinator.schedule(int, timeout=timedelta(seconds=30)).get(timeout=WAIT) == 0
        with pytest.raises(InvalidArgumentError, match="timeout=0 must be more than 0 seconds"):
            job.coordinator.schedule(int, timeout=0)
        with pytest.raises(InvalidArgumentError, match="max_attempts=2 must be at least 3"):
            job.coordinator.schedule(int, max_attempts=2)


def test_a_worker_that_is_started_again_gets_everything_anew() -> None:
    with job_of(1, 2, size=4) as job:
        coordinator, add_one = job.coordinator, job.add_one
        iterator = iter(coordinator.create_per_worker_dataset(lambda: torch.utils.data.DataLoader(range(4))))
        resource = coordinator.create_per_worker_resource(dict)

        def from_data(iterator: Any, store: dict[str, int]) -> tuple[int, int]:
            store["calls"] = store.get("calls", 0) + 1
            return add_one(int(next(iterator))), store["calls"]

        values = [coordinator.schedule(from_data, args=(iterator, resource)) for _ in range(2)]
        coordinator.join(timeout=WAIT)
        assert coordinator.fetch(values) == [(0, 1), (1, 2)]
        job.cluster.wait_until_lost(job.cluster.kill_worker(0))
        third = coordinator.schedule(from_data, args=(iterator, resource))
        assert "waits for a worker" in repr(third)
        with pytest.raises(CommunicationTimeoutError, match=r"1 functions are queued, workers \[\]"):
            coordinator.join(timeout=0.05)
        assert not coordinator.done()
        job.cluster.start_worker(0)
        assert third.fetch(timeout=WAIT) == (0, 1)  # its own copy of the data, from the start
        coordinator.join(timeout=WAIT)
        assert [vector[:2].tolist() for vector in job.model.state_dict().values()] == [[2.0, 1.0]] * 3


def test_what_a_worker_cannot_be_sent_when_it_is_started_again_is_an_error_of_functions() -> None:
    with job_of(1, 1) as job:
        for place in range(3):  # what was captured before has gone to all workers, and is made anew for later ones
            job.add(place)
            job.coordinator.join(timeout=WAIT)
        job.cluster.wait_until_lost(job.cluster.kill_worker(0))
        (queued,) = job.add(3)
        job.model.lock = threading.Lock()  # type: ignore[assignment]
        job.cluster.start_worker(0)
        with pytest.raises(NotSendableError, match=r"Counters\.lock .* cannot travel to a worker"):
            job.coordinator.join(timeout=WAIT)
        with pytest.raises(NotSendableError):
            queued.get(timeout=WAIT)
        del job.model.lock
        job.add(3, 4, 5)
        job.coordinator.join(timeout=WAIT)
        job.assert_counts()


class OnlyHere:
    """Workers cannot unpickle it."""

    def __reduce__(self) -> Any:
        return made_here, ()


def made_here() -> OnlyHere:
    if threading.current_thread() is not threading.main_thread():
        raise ImportError("not on a worker")
    return OnlyHere()


def test_a_worker_that_could_not_take_in_a_batch_is_replaced() -> None:
    with job_of(1, 1) as job:
        (group,) = job.optimizer.param_groups
        group["own"] = OnlyHere()
        first = job.cluster.peer("worker", 0)
        job.add(0)
        with pytest.raises(ImportError, match="not on a worker"):
            job.coordinator.join(timeout=WAIT)
        job.cluster.wait_until_lost(first, WAIT)
        job.cluster.kill_worker(0)
        job.cluster.start_worker(0)
        del group["own"]
        job.add(*range(6))
        job.coordinator.join(timeout=WAIT)
        job.assert_counts()


def test_a_worker_that_cannot_reach_a_server_is_given_up_and_not_the_server() -> None:
    with job_of(2, 2) as job:
        with job.cluster.network.hold(job.cluster.peer("ps", 0), "ps.push") as held:  # server 1 may have its half
            results = job.add(*range(6))
            held.wait_until_reached()
            victim = held.caller
            job.cluster.cut_off(victim.task.index, 0)
        job.coordinator.join(timeout=WAIT)
        assert job.coordinator.fetch(results) == list(range(6))
        job.assert_counts()
        job.cluster.wait_until_lost(victim)


def test_a_stopped_worker_is_replaced_and_its_late_push_refused() -> None:
    with job_of(2, 1, size=2) as job:
        with job.cluster.network.hold(job.cluster.peer("ps", 0), "ps.push") as held:
            job.add(0)
            held.wait_until_reached()
            stopped = held.caller
            job.cluster.network.stop(stopped)
            job.cluster.network.advance(10)  # past the deadline; the watchers have been told
        job.coordinator.join(timeout=WAIT)
        job.cluster.network.resume(stopped)
        job.add(1)[0].fetch(timeout=WAIT)
        job.assert_counts()


def test_a_server_that_no_process_of_a_task_can_reach_is_lost_in_the_end() -> None:
    """The network does not allow it: somebody must be told."""
    with job_of(1, 1) as job:
        job.add(0)[0].fetch(timeout=WAIT)
        with job.cluster.network.hold(job.cluster.peer("ps", 0), "ps.push") as held:
            (result,) = job.add(1)
            for time in (1, 2):
                held.wait_until_reached(time)
                job.cluster.cut_off(0, 0)
                job.cluster.wait_until_lost(job.cluster.peer("worker", 0))
                assert job.counter.read_value() == 0.0  # the server is not taken for lost
                job.cluster.kill_worker(0)
                job.cluster.start_worker(0)
            held.wait_until_reached(3)
            job.cluster.cut_off(0, 0)
            reason = r"worker 0.* could not reach it, nor could 2 processes .* look at the network"
            with pytest.raises(ParameterServerUnavailable, match=reason):
                job.coordinator.join(timeout=WAIT)
        with pytest.raises(ParameterServerUnavailable, match="was removed"):
            result.fetch(timeout=WAIT)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_repeated_function_that_takes_another_branch_is_refused(when: Any) -> None:
    """But not where nothing of its first run was applied: then there is only one."""
    with FakeCluster(workers=2, ps=2) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            a, b = ts.Variable(0, name="a"), ts.Variable(0, name="b")  # on ps 0 and ps 1
        coordinator = ts.ClusterCoordinator(strategy)

        def balance() -> None:
            (a if int(a.read_value()) == int(b.read_value()) else b).assign_add(1)

        with cluster.network.hold(cluster.peer("ps", 0), "ps.push", when) as held:
            coordinator.schedule(balance)
            held.wait_until_reached()
            cluster.kill_worker(held.caller.task.index)
        if when == "after":
            with pytest.raises(RepeatedFunctionError, match=r"function 0 runs again.* push 0 has changed a on ps 0"):
                coordinator.join(timeout=WAIT)
        coordinator.join(timeout=WAIT)
        assert (int(a.read_value()), int(b.read_value())) == (1, 0)


# -- servers -----------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Job, Any], Any]] = {
    "join": lambda job, running: job.coordinator.join(timeout=WAIT),
    "done": lambda job, running: job.coordinator.done(),
    "schedule": lambda job, running: job.add(2),
    "fetch": lambda job, running: running.fetch(timeout=WAIT),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_lost_server_is_named_and_functions_that_wait_for_it_are_cancelled(call: str) -> None:
    with job_of(2, 2) as job:
        job.add(0)[0].fetch(timeout=WAIT)
        gate = close_gate("server")
        finishes = job.coordinator.schedule(pass_gate, ("server",))
        await_arrivals("server", 1)  # the other worker could be held by all that follows, and this one never begin
        with job.cluster.network.hold(job.cluster.peer("ps", 1), "ps.push") as held:
            results = job.add(*range(4))
            held.wait_until_reached()
            job.cluster.wait_until_lost(job.cluster.kill_server(1))
        with pytest.raises(ParameterServerUnavailable, match="server 1"):
            job.model.state_dict()
        gate.set()
        with pytest.raises(ParameterServerUnavailable, match="parameter server 1") as caught:
            CALLS[call](job, results[0])
        assert str(caught.value.task) == "ps 1"
        assert finishes.fetch(timeout=WAIT) == "through"
        for result in results:
            with pytest.raises(ParameterServerUnavailable, match="server 1"):
                result.fetch(timeout=WAIT)
        with pytest.raises(ParameterServerUnavailable):
            job.add(2)
