"""Parameter servers."""

import threading
from datetime import timedelta

import torch
from torch import nn

import torchstrat as ts
from tests.mistakes.table import Area, Place, loader, step_of
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

area = Area("Parameter servers")


@area.raises(
    "a coordinator of another strategy",
    WrongTypeError,
    given="<MirroredStrategy",
    needed="needs a Param",
    change="strategy.run",
)
def _(place: Place) -> None:
    ts.ClusterCoordinator(place.mirrored())  # type: ignore[arg-type]


@area.raises(
    "a server that is missing", CommunicationTimeoutError, given="ps 0", needed="join within 0.1 s", change="Start them"
)
def _(place: Place) -> None:
    cluster = place.enter(FakeCluster(workers=1, ps=1))
    cluster.kill_server(0)
    ts.ClusterCoordinator(cluster.strategy(timeout=timedelta(seconds=0.1)))


@area.raises(
    "a number for a partitioner",
    WrongTypeError,
    given="int 2",
    needed="one of ts.partitioners",
    change=r"FixedShards\w+\(2\)",
)
def _(place: Place) -> None:
    place.cluster(variable_partitioner=2)


@area.raises(
    "a partitioner into nothing",
    InvalidArgumentError,
    given=r"\[0, 1\]",
    needed="at least 1 shard",
    change=r"such as \[2, 1\]",
)
def _(place: Place) -> None:
    place.cluster(variable_partitioner=ts.partitioners.FixedShardsPartitioner(0))


@area.raises(
    "an unknown policy", InvalidArgumentError, given="'ignore'", needed="must be", change='"raise" or "restore"'
)
def _(place: Place) -> None:
    place.cluster(on_server_loss="ignore")


@area.raises(
    "a lock in a closure", NotSendableError, given="variable 'lock'", needed="cannot travel", change="need none"
)
def _(place: Place) -> None:
    lock = threading.Lock()

    def function() -> int:
        with lock:
            return 1

    place.cluster().coordinator.schedule(function)


@area.raises(
    "a generator as a result", NotSendableError, given="a generator", needed="cannot travel", change="Create it inside"
)
def _(place: Place) -> None:
    coordinator = place.cluster().coordinator
    coordinator.schedule(lambda: (number for number in range(3)))
    coordinator.join()


@area.raises(
    "a RemoteValue as an argument",
    InvalidArgumentError,
    given="a RemoteValue",
    needed="cannot take",
    change=r"fetch\(value\)",
)
def _(place: Place) -> None:
    coordinator = place.cluster().coordinator
    coordinator.schedule(lambda x: x, args=(coordinator.schedule(lambda: 1),))


@area.raises(
    "a RemoteValue as a number",
    WrongTypeError,
    given="the result of function 0",
    needed="as a number",
    change=r"fetch\(\)",
)
def _(place: Place) -> None:
    float(place.cluster().coordinator.schedule(lambda: 1.0))


@area.raises(
    "a sum of RemoteValues", WrongTypeError, given="the result of function 0", needed="as a number", change=r"fetch\(\)"
)
def _(place: Place) -> None:
    coordinator = place.cluster().coordinator
    sum([coordinator.schedule(lambda: 1.0)])


@area.raises(
    "a called function scheduled", WrongTypeError, given="got int", needed="needs a function", change="function itself"
)
def _(place: Place) -> None:
    place.cluster().coordinator.schedule(1)


@area.raises(
    "a tensor for args", WrongTypeError, given="got Tensor", needed="a list or a tuple", change=r"args=\(value,\)"
)
def _(place: Place) -> None:
    place.cluster().coordinator.schedule(lambda x: x, args=torch.ones(1))


@area.raises(
    "a dataset function with arguments",
    WrongTypeError,
    given="needs some",
    needed="without arguments",
    change="partial",
)
def _(place: Place) -> None:
    place.cluster().coordinator.create_per_worker_dataset(lambda context: loader())


@area.raises(
    "a list for a per-worker dataset",
    InvalidArgumentError,
    given=r"got list",
    needed="or a dataset",
    change="DataLoader",
)
def _(place: Place) -> None:
    place.cluster().coordinator.create_per_worker_dataset([torch.ones(2)])


@area.raises(
    "a dataset function that returns a list",
    ClosureInputError,
    given="a list",
    needed="return a DataLoader",
    change="batch_size=None",
)
def _(place: Place) -> None:
    coordinator = place.cluster().coordinator
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [torch.ones(2)]))
    coordinator.schedule(lambda iterator: next(iterator), args=(iterator,))
    coordinator.join()


@area.raises(
    "next on the coordinator", UnsupportedError, given="per-worker iterator", needed="on the workers", change="in fn"
)
def _(place: Place) -> None:
    next(iter(place.cluster().coordinator.create_per_worker_dataset(loader)))


@area.raises(
    "a loop over distributed data on the coordinator",
    InvalidArgumentError,
    given="distributed by",
    needed="on the workers",
    change="create_per",
)
def _(place: Place) -> None:
    next(iter(place.cluster().strategy.distribute_dataset(loader())))


@area.raises(
    "more functions than batches",
    OutOfRangeError,
    given="no more batches",
    needed="for every pass",
    change=r"iter\(per",
)
def _(place: Place) -> None:
    coordinator = place.cluster().coordinator
    iterator = iter(coordinator.create_per_worker_dataset(lambda: loader(8)))
    for _ in range(2):
        coordinator.schedule(lambda iterator: next(iterator), args=(iterator,))
    coordinator.join()


@area.raises(
    "a module outside of the scope", InvalidArgumentError, given="a Linear", needed="on the parameter", change="scope"
)
def _(place: Place) -> None:
    model = nn.Linear(3, 1)
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    place.cluster().coordinator.schedule(step, args=((torch.ones(2, 3), torch.ones(2, 1)),))


@area.raises(
    "a bug in a scheduled function", ZeroDivisionError, given="division", needed="earlier function", change="cancelled"
)
def _(place: Place) -> None:
    coordinator = place.cluster().coordinator
    coordinator.schedule(lambda: 1 / 0)
    coordinator.join()


@area.raises(
    "a variable made in a scheduled function",
    InvalidArgumentError,
    given="Variable was",
    needed="live on",
    change="scope",
)
def _(place: Place) -> None:
    coordinator = place.cluster().coordinator
    coordinator.schedule(lambda: ts.Variable(1.0))
    coordinator.join()


@area.raises(
    "a scope in a scheduled function",
    ContextError,
    given=r"scope\(\) was",
    needed="The coordinator",
    change="functions use",
)
def _(place: Place) -> None:
    made = place.cluster()
    strategy = made.strategy

    def function() -> None:
        with strategy.scope():
            pass

    made.coordinator.schedule(function)
    made.coordinator.join()


@area.raises(
    "a function that schedules", ContextError, given="coordinator.schedule", needed="do not schedule", change="return"
)
def _(place: Place) -> None:
    coordinator = place.cluster().coordinator
    coordinator.schedule(lambda: coordinator.schedule(lambda: 1))
    coordinator.join()


@area.raises(
    "a worker's index on the coordinator",
    ContextError,
    given="get_current_worker_index",
    needed="inside",
    change="where",
)
def _(place: Place) -> None:
    place.cluster().coordinator.get_current_worker_index()


@area.raises(
    "schedule after close", ContextError, given="was closed", needed="its job is over", change="Make a new strategy"
)
def _(place: Place) -> None:
    made = place.cluster()
    made.strategy.close()
    made.coordinator.schedule(lambda: 1)


@area.raises(
    "scope after close", ContextError, given="was closed", needed="its job is over", change="Make a new strategy"
)
def _(place: Place) -> None:
    strategy = place.cluster().strategy
    strategy.close()
    with strategy.scope():
        pass


@area.raises(
    "data after close", ContextError, given="was closed", needed="its job is over", change="Make a new strategy"
)
def _(place: Place) -> None:
    strategy = place.cluster().strategy
    strategy.close()
    strategy.distribute_dataset(loader())


@area.raises(
    "restoring that was not asked for",
    InvalidArgumentError,
    given="on_server_loss='raise'",
    needed="leaves",
    change="make it with",
)
def _(place: Place) -> None:
    made = place.cluster()
    with ts.CheckpointManager(place.folder) as manager:
        made.coordinator.restore_on_server_loss(manager, ts.Checkpoint(model=made.model))


@area.warns(
    "run on the coordinator", given="on the coordinator", needed="changes no variable", change=r"coordinator\.schedule"
)
def _(place: Place) -> None:
    made = place.cluster()
    made.strategy.run(lambda: made.model(torch.ones(1, 3)))


@area.right("a second coordinator", "`ClusterCoordinator`: one per strategy; calling the class again returns the same.")
def _(place: Place) -> None:
    made = place.cluster()
    assert ts.ClusterCoordinator(made.strategy) is made.coordinator


@area.right("state_dict after close", "`ParameterServerStrategy.close`: modules keep the values that were last read.")
def _(place: Place) -> None:
    made = place.cluster()
    batch = (torch.ones(2, 3), torch.ones(2, 1))
    made.coordinator.schedule(made.step, args=(batch,))
    made.coordinator.join()
    read = {name: value.clone() for name, value in made.model.state_dict().items()}
    made.strategy.close()
    assert all(torch.equal(value, read[name]) for name, value in made.model.state_dict().items())
