"""Parameter servers."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from tests.mistakes.table import Area, loader, raises, right, step_of, warns
from torchstrat.errors import (
    ClosureInputError,
    CommunicationTimeoutError,
    ContextError,
    InvalidArgumentError,
    NotSendableError,
    OutOfRangeError,
    UnsupportedError,
    WrongTypeError,
)
from torchstrat.testing.fake_cluster import FakeCluster


class Servers(Area):
    title = "Parameter servers"

    def run(self, function: Callable[[], Any]) -> None:
        """On a worker of a cluster."""
        coordinator = self.cluster().coordinator
        coordinator.schedule(function)
        coordinator.join()

    @raises(WrongTypeError, "<MirroredStrategy", "needs a Param", "strategy.run")
    def a_coordinator_of_another_strategy(self) -> None:
        ts.ClusterCoordinator(self.mirrored())  # type: ignore[arg-type]

    @raises(CommunicationTimeoutError, "ps 0", "join within 0.1 s", "Start them")
    def a_server_that_is_missing(self) -> None:
        cluster = self.enter_context(FakeCluster(workers=1, ps=1))
        cluster.kill_server(0)
        ts.ClusterCoordinator(cluster.strategy(timeout=timedelta(seconds=0.1)))

    @raises(WrongTypeError, "int 2", "one of ts.partitioners", r"FixedShards\w+\(2\)")
    def a_number_for_a_partitioner(self) -> None:
        self.cluster(variable_partitioner=2)

    @raises(InvalidArgumentError, r"\[0, 1\]", "at least 1 shard", r"such as \[2, 1\]")
    def a_partitioner_into_nothing(self) -> None:
        self.cluster(variable_partitioner=ts.partitioners.FixedShardsPartitioner(0))

    @raises(InvalidArgumentError, "'ignore'", "must be", '"raise" or "restore"')
    def an_unknown_policy(self) -> None:
        self.cluster(on_server_loss="ignore")

    @raises(NotSendableError, "variable 'lock'", "cannot travel", "need none")
    def a_lock_in_a_closure(self) -> None:
        lock = threading.Lock()
        self.cluster().coordinator.schedule(lambda: lock.locked())

    @raises(NotSendableError, "a generator", "cannot travel", "Create it inside")
    def a_generator_as_a_result(self) -> None:
        self.run(lambda: (number for number in range(3)))

    @raises(InvalidArgumentError, "a RemoteValue", "cannot take", r"fetch\(value\)")
    def a_remote_value_as_an_argument(self) -> None:
        coordinator = self.cluster().coordinator
        coordinator.schedule(lambda x: x, args=(coordinator.schedule(lambda: 1),))

    @raises(WrongTypeError, "the result of function 0", "as a number", r"fetch\(\)")
    def a_remote_value_as_a_number(self) -> None:
        float(self.cluster().coordinator.schedule(lambda: 1.0))

    @raises(WrongTypeError, "the result of function 0", "as a number", r"fetch\(\)")
    def a_sum_of_remote_values(self) -> None:
        coordinator = self.cluster().coordinator
        sum([coordinator.schedule(lambda: 1.0)])

    @raises(WrongTypeError, "got int", "needs a function", "function itself")
    def a_called_function_scheduled(self) -> None:
        self.cluster().coordinator.schedule(1)

    @raises(ContextError, r"within `with strategy\.scope", "on the servers when it ends", "keep the loop .* outside")
    def schedule_within_the_scope(self) -> None:
        made = self.cluster()
        with made.strategy.scope():
            made.coordinator.schedule(lambda: 1)

    @raises(WrongTypeError, "a generator function", "computes when it is called", "Take the yield out")
    def a_yield_in_a_scheduled_function(self) -> None:
        def function() -> Iterator[float]:
            yield 1.0

        self.cluster().coordinator.schedule(function)

    @raises(WrongTypeError, "got Tensor", "a list or a tuple", r"args=\(value,\)")
    def a_tensor_for_args(self) -> None:
        self.cluster().coordinator.schedule(lambda x: x, args=torch.ones(1))

    @raises(WrongTypeError, "str 'a'", "the index of a worker", "remove_worker")
    def the_name_of_a_worker(self) -> None:
        self.cluster().coordinator.remove_worker("a")

    @raises(WrongTypeError, "needs some", "without arguments", "partial")
    def a_dataset_function_with_arguments(self) -> None:
        self.cluster().coordinator.create_per_worker_dataset(lambda context: loader())

    @raises(InvalidArgumentError, r"got list", "or a dataset", "DataLoader")
    def a_list_for_a_per_worker_dataset(self) -> None:
        self.cluster().coordinator.create_per_worker_dataset([torch.ones(2)])

    @raises(ClosureInputError, "a list", "return a DataLoader", "batch_size=None")
    def a_dataset_function_that_returns_a_list(self) -> None:
        coordinator = self.cluster().coordinator
        iterator = iter(coordinator.create_per_worker_dataset(lambda: [torch.ones(2)]))
        coordinator.schedule(lambda iterator: next(iterator), args=(iterator,))
        coordinator.join()

    @raises(UnsupportedError, "per-worker iterator", "on the workers", "in fn")
    def next_on_the_coordinator(self) -> None:
        next(iter(self.cluster().coordinator.create_per_worker_dataset(loader)))

    @raises(InvalidArgumentError, "distributed by", "on the workers", "create_per")
    def a_loop_over_distributed_data_on_the_coordinator(self) -> None:
        next(iter(self.cluster().strategy.distribute_dataset(loader())))

    @raises(OutOfRangeError, "no more batches", "for every pass", r"iter\(per")
    def more_functions_than_batches(self) -> None:
        coordinator = self.cluster().coordinator
        iterator = iter(coordinator.create_per_worker_dataset(lambda: loader(8)))
        for _ in range(2):
            coordinator.schedule(lambda iterator: next(iterator), args=(iterator,))
        coordinator.join()

    @raises(InvalidArgumentError, "a Linear", "on the parameter", "scope")
    def a_module_outside_of_the_scope(self) -> None:
        model = nn.Linear(3, 1)
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.cluster().coordinator.schedule(step, args=((torch.ones(2, 3), torch.ones(2, 1)),))

    @raises(ZeroDivisionError, "division", "earlier function", "cancelled")
    def a_bug_in_a_scheduled_function(self) -> None:
        self.run(lambda: 1 / 0)

    @raises(InvalidArgumentError, "Variable was", "live on", "scope")
    def a_variable_made_in_a_scheduled_function(self) -> None:
        self.run(lambda: ts.Variable(1.0))

    @raises(ContextError, r"scope\(\) was", "The coordinator", "functions use")
    def a_scope_in_a_scheduled_function(self) -> None:
        made = self.cluster()
        strategy = made.strategy

        def function() -> None:
            with strategy.scope():
                pass

        made.coordinator.schedule(function)
        made.coordinator.join()

    @raises(ContextError, "coordinator.schedule", "do not schedule", "return")
    def a_function_that_schedules(self) -> None:
        coordinator = self.cluster().coordinator
        coordinator.schedule(lambda: coordinator.schedule(lambda: 1))
        coordinator.join()

    @raises(ContextError, "get_current_worker_index", "inside", "where")
    def the_index_of_a_worker_on_the_coordinator(self) -> None:
        self.cluster().coordinator.get_current_worker_index()

    @raises(ContextError, "was closed", "its job is over", "Make a new strategy")
    def schedule_after_close(self) -> None:
        made = self.cluster()
        made.strategy.close()
        made.coordinator.schedule(lambda: 1)

    @raises(ContextError, "was closed", "its job is over", "Make a new strategy")
    def scope_after_close(self) -> None:
        strategy = self.cluster().strategy
        strategy.close()
        with strategy.scope():
            pass

    @raises(ContextError, "was closed", "its job is over", "Make a new strategy")
    def data_after_close(self) -> None:
        strategy = self.cluster().strategy
        strategy.close()
        strategy.distribute_dataset(loader())

    @raises(InvalidArgumentError, "on_server_loss='raise'", "leaves", "make it with")
    def restoring_that_was_not_asked_for(self) -> None:
        made = self.cluster()
        with ts.CheckpointManager(self.folder) as manager:
            made.coordinator.restore_on_server_loss(manager, ts.Checkpoint(model=made.model))

    @warns("on the coordinator", "is written to the servers", r"coordinator\.schedule")
    def run_on_the_coordinator(self) -> None:
        made = self.cluster()
        weight = made.model.weight
        before = weight.detach().clone()
        made.strategy.run(made.step, args=((torch.ones(2, 3), torch.ones(2, 1)),))
        there = torch.as_tensor(made.coordinator.schedule(lambda: weight.detach().clone()).fetch())
        assert torch.equal(there, weight)
        assert not torch.equal(there, before)

    @right("`ClusterCoordinator`: one per strategy; calling the class again returns the same.")
    def a_second_coordinator(self) -> None:
        made = self.cluster()
        assert ts.ClusterCoordinator(made.strategy) is made.coordinator

    @right("`ParameterServerStrategy.close`: modules keep the values that were last read.")
    def state_dict_after_close(self) -> None:
        made = self.cluster()
        batch = (torch.ones(2, 3), torch.ones(2, 1))
        made.coordinator.schedule(made.step, args=(batch,))
        made.coordinator.join()
        read = {name: value.clone() for name, value in made.model.state_dict().items()}
        made.strategy.close()
        assert all(torch.equal(value, read[name]) for name, value in made.model.state_dict().items())
