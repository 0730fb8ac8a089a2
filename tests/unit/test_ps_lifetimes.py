"""What a program drops goes from servers and workers: when no function that was scheduled before can name it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.gates import await_arrivals, close_gate, pass_gate
from torchstrat.testing.fake_cluster import FakeCluster

WAIT = 20


# -- jobs -------------------------------------------------------------------------------------------------------------


class Layer(nn.Linear):
    """Counted by its class: the coordinator's and each worker's."""


class Normed(nn.Module):
    """With buffers, and in a cycle, as a module that knows its parent is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Layer(3, 3), nn.BatchNorm1d(3)
        object.__setattr__(self, "itself", self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def layers() -> int:
    gc.collect()
    return sum(type(one) is Layer for one in gc.get_objects())


def variables_on(cluster: FakeCluster) -> int:
    return sum(cluster.service("ps", index).status()["variables"] for index in range(2))


def until(condition: Callable[[], bool]) -> None:
    """Collecting each time: a result is told before the thread that tells it lets go of the function."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, f"{layers()} layers in this process"
        gc.collect()
        time.sleep(0.005)


class Job:
    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster, self.strategy = cluster, cluster.strategy()
        with self.strategy.scope():
            self.kept = Layer(2, 2)
        self.coordinator = ts.ClusterCoordinator(self.strategy)

    def trial(self, model_of: Callable[[], nn.Module], steps: int = 3) -> list[float]:
        with self.strategy.scope():
            model = model_of()
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

        def step() -> float:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).pow(2).mean()
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        values = [self.coordinator.schedule(step) for _ in range(steps)]
        return [value.get(timeout=WAIT) for value in values]


@contextmanager
def job_of(workers: int = 2) -> Iterator[Job]:
    with FakeCluster(workers=workers, ps=2) as cluster:
        yield Job(cluster)


@pytest.mark.parametrize("kind", [Normed, lambda: Layer(3, 3)])
def test_trials_leave_nothing(kind: Any) -> None:
    with job_of() as job:
        for _ in range(4):
            job.trial(kind)
            gc.collect()
        until(lambda: variables_on(job.cluster) == 2)
        until(lambda: layers() == 3)  # the kept one, and the workers' of it
        assert job.trial(kind, 1)


def test_nothing_goes_while_an_earlier_function_has_no_outcome() -> None:
    with job_of() as job:
        gate = close_gate("earlier")
        earlier = job.coordinator.schedule(lambda: pass_gate("earlier"))
        await_arrivals("earlier", 1)
        job.trial(lambda: Layer(3, 3))
        gc.collect()
        job.trial(lambda: Layer(3, 3), 1)
        held = variables_on(job.cluster)
        gate.set()
        earlier.get(timeout=WAIT)
        assert held == 6
        gc.collect()
        until(lambda: variables_on(job.cluster) == 2)


@pytest.fixture
def collected_by_hand() -> Iterator[None]:
    """What a test leaves goes when the test says so, and not before."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collected_by_hand")
def test_functions_come_after_what_an_idle_worker_is_told() -> None:
    """A worker brings two batches into their order, whatever order they come in, and not three."""
    with job_of(1) as job:
        job.trial(lambda: Layer(3, 3))
        sent = job.cluster.network.record("worker.run")
        with job.cluster.network.hold(job.cluster.peer("worker", 0), "worker.run", "before") as held:
            gc.collect()
            held.wait_until_reached()
            values = [job.coordinator.schedule(int) for _ in range(3)]
            calls = [message.kind for message in sent if message.kind == "call"]  # and results of the trial's
            assert len(calls) == 1
        assert [value.get(timeout=WAIT) for value in values] == [0] * 3


def test_who_comes_later_gets_what_is_alive() -> None:
    with job_of(1) as job:
        job.trial(lambda: Layer(3, 3))
        gc.collect()
        kept = job.kept

        def use() -> float:
            return float(kept(torch.ones(1, 2)).sum().detach())

        value = job.coordinator.schedule(use).get(timeout=WAIT)
        job.cluster.wait_until_lost(job.cluster.kill_worker(0))
        gc.collect()
        until(lambda: variables_on(job.cluster) == 2)
        before = layers()  # of the killed one, too
        job.cluster.start_worker(0)
        assert job.coordinator.schedule(use).get(timeout=WAIT) == value
        assert layers() <= before + 1


def test_optimizers_that_are_dropped_take_their_state_along() -> None:
    with job_of() as job:
        kept, store = job.kept, [job.cluster.service("ps", index).store for index in range(2)]
        before = sum(one.total_bytes for one in store)

        def train() -> None:
            with job.strategy.scope():
                optimizer = torch.optim.Adagrad(kept.parameters(), lr=0.1)

            def step() -> None:
                kept(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            job.coordinator.schedule(step).get(timeout=WAIT)
            assert sum(one.total_bytes for one in store) > before

        for _ in range(2):
            train()
            gc.collect()
            until(lambda: sum(one.total_bytes for one in store) == before)


def test_a_buffer_that_outlives_its_module_is_read() -> None:
    data, alone = torch.arange(12.0).reshape(4, 3), nn.BatchNorm1d(3)
    alone(data)
    with job_of() as job:

        def train() -> Any:
            with job.strategy.scope():
                norm = nn.BatchNorm1d(3)
            job.coordinator.schedule(lambda: norm(data).sum().item()).get(timeout=WAIT)
            return norm.running_mean

        mean = train()
        gc.collect()
        job.coordinator.schedule(int).get(timeout=WAIT)
        assert torch.equal(mean.clone(), alone.running_mean)
        del mean
        gc.collect()
        until(lambda: variables_on(job.cluster) == 2)


def test_variables_and_per_worker_values_go_with_their_last_handle() -> None:
    with job_of() as job:
        with job.strategy.scope():
            counter = ts.Variable(torch.zeros(3), name="counter")

        class Data:
            def __iter__(self) -> Iterator[int]:
                return iter(range(5))

        dataset = job.coordinator.create_per_worker_dataset(Data)
        iterator = iter(dataset)

        def use(iterator: Any) -> int:
            counter.assign_add(torch.ones(3))  # noqa: F821  # deleted below
            return int(next(iterator))

        assert job.coordinator.schedule(use, args=(iterator,)).get(timeout=WAIT) == 0
        assert variables_on(job.cluster) == 3
        del counter, dataset, iterator, use
        gc.collect()
        until(lambda: variables_on(job.cluster) == 2)
        until(lambda: gc.collect() >= 0 and not any(type(one) is Data for one in gc.get_objects()))


# -- release ----------------------------------------------------------------------------------------------------------


def test_what_is_released_goes_though_the_program_has_it() -> None:
    with job_of() as job:
        with job.strategy.scope():
            model = Normed()
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
            counter = ts.Variable(0, name="counter")

        def step() -> None:
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()

        job.coordinator.schedule(step).get(timeout=WAIT)
        assert variables_on(job.cluster) == 10
        weight = model.state_dict()["layer.weight"].clone()
        job.coordinator.release(model, optimizer, counter)
        until(lambda: variables_on(job.cluster) == 2)
        until(lambda: layers() == 4)  # the two here, and the workers' kept ones
        assert torch.equal(model.state_dict()["layer.weight"], weight)
        optimizer.state_dict()
        for _ in range(2):
            with pytest.raises(ts.errors.InvalidArgumentError, match="a Normed that was released"):
                job.coordinator.schedule(step)
        with pytest.raises(ts.errors.InvalidArgumentError, match=r"not on this strategy's servers or workers \(any"):
            job.coordinator.release(model)
        assert job.coordinator.schedule(lambda: 1).get(timeout=WAIT) == 1


def test_what_is_needed_is_not_released() -> None:
    with job_of() as job:
        with job.strategy.scope():
            model = nn.Sequential(Layer(3, 3), Layer(3, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        dataset = job.coordinator.create_per_worker_dataset(lambda: iter(range(3)))
        iterator = iter(dataset)
        refused = [
            ((model,), "Sequential: still needed by a SGD"),
            ((model[0], optimizer, scheduler), "still needed by a Sequential"),
            ((optimizer, model), "still needed by a StepLR"),
            ((dataset,), "still needed by <PerWorkerIterator"),
        ]
        for objects, message in refused:
            with pytest.raises(ts.errors.InvalidArgumentError, match=message):
                job.coordinator.release(*objects)
        with pytest.raises(ts.errors.WrongTypeError, match="release takes modules"):
            job.coordinator.release(7)
        gate = close_gate("needs")

        def use(iterator: Any) -> None:
            model[1].weight.sum()
            pass_gate("needs")

        value = job.coordinator.schedule(use, args=(iterator,))
        for objects in ((model, optimizer, scheduler), (dataset, iterator)):
            with pytest.raises(ts.errors.InvalidArgumentError, match=r"function 0 \(.*use\), which has not ended"):
                job.coordinator.release(*objects)
        gate.set()
        value.get(timeout=WAIT)
        job.coordinator.release(model, optimizer, scheduler, iterator, dataset)
        until(lambda: variables_on(job.cluster) == 2)
