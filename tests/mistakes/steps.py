"""Scopes and runs."""

import torch
from torch import nn

import torchstrat as ts
from tests.mistakes.table import Area, Place, loader, step_of
from torchstrat.errors import (
    ContextError,
    InvalidArgumentError,
    ReplicaDivergenceError,
    StrategyMixingError,
    StructureMismatchError,
    UnsupportedError,
    WrongTypeError,
)

area = Area("Scopes and steps")


@area.raises(
    "a scope in another's",
    StrategyMixingError,
    given="in the scope of",
    needed="one strategy",
    change="leave the inner",
)
def _(place: Place) -> None:
    with place.mirrored().scope(), place.mirrored().scope():
        pass


@area.raises(
    "a batch for args", WrongTypeError, given="2 positional", needed=r"step\(batch\)", change=r"args=\(batch,\)"
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    step = place.trained(strategy).step
    for batch in strategy.distribute_dataset(loader()):
        strategy.run(step, args=batch)


@area.raises(
    "a tensor for args", InvalidArgumentError, given="Tensor", needed="a list or a tuple", change=r"args=\(value,\)"
)
def _(place: Place) -> None:
    place.mirrored().run(lambda x: x, args=torch.ones(2))


@area.raises(
    "arguments as run's own", InvalidArgumentError, given="got Tensor", needed="list or a tuple", change=r"\(value,\)"
)
def _(place: Place) -> None:
    place.mirrored().run(lambda x, y: x, torch.ones(2), torch.ones(2))


@area.raises("too few arguments", WrongTypeError, given="0 positional", needed=r"step\(batch\)", change="entry of args")
def _(place: Place) -> None:
    strategy = place.mirrored()
    strategy.run(place.trained(strategy).step)


@area.raises("a list of keywords", WrongTypeError, given="got list", needed="a dict", change=r"\{'name'")
def _(place: Place) -> None:
    place.mirrored().run(lambda x: x, kwargs=["x"])


@area.raises("a called step", WrongTypeError, given="got Tensor", needed="needs a function", change="function itself")
def _(place: Place) -> None:
    place.mirrored().run(torch.ones(1))


@area.raises("options of another call", WrongTypeError, given="got dict", needed="RunOptions", change="or None")
def _(place: Place) -> None:
    place.mirrored().run(lambda: 1, options={"a": 1})


@area.raises("run within run", ContextError, given="replica 0 of a run", needed="outside of run", change="all_reduce")
def _(place: Place) -> None:
    strategy = place.mirrored()
    strategy.run(lambda: strategy.run(lambda: 1))


@area.raises("reduce within run", ContextError, given="replica 0", needed="outside of run", change="all_reduce")
def _(place: Place) -> None:
    strategy = place.mirrored()
    strategy.run(lambda: strategy.reduce("sum", torch.ones(1)))


@area.raises("scope within run", ContextError, given="scope was called", needed="outside of run", change="merge_call")
def _(place: Place) -> None:
    strategy = place.mirrored()

    def step() -> None:
        with strategy.scope():
            nn.Linear(1, 1)

    strategy.run(step)


@area.raises("next within run", InvalidArgumentError, given="inside a replica", needed="outside", change=r"args=\(next")
def _(place: Place) -> None:
    strategy = place.mirrored()
    iterator = iter(strategy.distribute_dataset(loader()))
    strategy.run(lambda: next(iterator))


@area.raises(
    "a collective that one replica leaves out",
    ReplicaDivergenceError,
    given=r"replica 0 called all_reduce\(sum\)",
    needed="Every replica has to",
    change="look for a branch",
)
def _(place: Place) -> None:
    def step() -> None:
        here = ts.get_replica_context()
        if here.replica_id_in_sync_group == 0:
            here.all_reduce("sum", torch.ones(1))

    place.mirrored().run(step)


@area.raises(
    "results of different lengths",
    StructureMismatchError,
    given="a list of 1",
    needed="the same structure",
    change="leaves",
)
def _(place: Place) -> None:
    place.mirrored().run(lambda: [1] * (1 + ts.get_replica_context().replica_id_in_sync_group))


@area.raises(
    "a bug in the step", ZeroDivisionError, given="division", needed="replica 0", change="Raised on replica 0 of 2"
)
def _(place: Place) -> None:
    place.mirrored().run(lambda: 1 / 0)


@area.raises(
    "a loss that is divided twice",
    InvalidArgumentError,
    given="divides by the global batch",
    needed="averages gradients",
    change="gradient_reduce_op='sum'",
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    made = place.trained(strategy)

    def step(batch: list[torch.Tensor]) -> None:
        x, y = batch
        ts.compute_average_loss(((made.model(x) - y) ** 2).mean(1), global_batch_size=4).backward()

    strategy.run(step, args=(next(iter(strategy.distribute_dataset(loader()))),))


@area.raises(
    "a batch of another strategy", StrategyMixingError, given="2 replicas", needed="another strategy", change="by the"
)
def _(place: Place) -> None:
    batch = next(iter(place.mirrored(2).distribute_dataset(loader())))
    place.mirrored(3).run(lambda batch: batch[0].sum(), args=(batch,))


@area.raises(
    "a context of a run that is over",
    ContextError,
    given="not the running one",
    needed="inside each run",
    change="anew",
)
def _(place: Place) -> None:
    kept: list[ts.ReplicaContext] = []
    strategy = place.mirrored()
    strategy.run(lambda: kept.append(ts.get_replica_context()))
    strategy.run(lambda: kept[0].all_reduce("sum", torch.ones(1)))


@area.raises(
    "a variable that trains",
    UnsupportedError,
    given="is not trained",
    needed="optimizer",
    change=r"torch\.nn\.Parameter",
)
def _(place: Place) -> None:
    with place.mirrored().scope():
        ts.Variable(0.0, trainable=True)


@area.raises("an unknown aggregation", ValueError, given="'avg'", needed="VariableAggregation", change=r"\.SUM")
def _(place: Place) -> None:
    with place.mirrored().scope():
        ts.Variable(0.0, aggregation="avg")


@area.raises(
    "a cut without logical devices", InvalidArgumentError, given="2 parts", needed="1 logical device", change="product"
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    strategy.run(lambda: strategy.split_to_logical_devices(torch.ones(4, 4), [2, 1]))


@area.warns(
    "a module made outside of the scope", given="a Linear", needed="has not seen", change=r"with strategy\.scope\(\)"
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    model = nn.Linear(3, 1)
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    strategy.run(step, args=(next(iter(strategy.distribute_dataset(loader()))),))


@area.warns(
    "a bare parameter",
    given="a bare parameter of shape",
    needed="has not seen",
    change=r"put a bare parameter into one",
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    with strategy.scope():
        weight = nn.Parameter(torch.ones(3))
    strategy.run(lambda: weight.sum())


@area.right(
    "an optimizer made outside of the scope", "It is found in the step, before it steps: the model is what counts."
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    with strategy.scope():
        model = nn.Linear(3, 1)
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    plain_step = step_of(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for batch, rows in zip(strategy.distribute_dataset(loader()), loader(), strict=True):
        strategy.run(step, args=(batch,))
        plain_step(rows)
    assert torch.allclose(model.weight, plain.weight, rtol=1e-5)


@area.right(
    "a batch that is not distributed", "As in TensorFlow: every replica sees all of what is no distributed value."
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    assert [len(x) for x in strategy.local_results(strategy.run(lambda x: x + 0, args=(torch.ones(4),)))] == [4, 4]


@area.right(
    "get_replica_context outside of any scope", "As in TensorFlow: it is the default strategy's, of one replica."
)
def _(place: Place) -> None:
    assert ts.get_replica_context().num_replicas_in_sync == 1


@area.right("get_replica_context in a scope", "As in TensorFlow: None, since a scope is in no replica.")
def _(place: Place) -> None:
    with place.mirrored().scope():
        assert ts.get_replica_context() is None


@area.right("the model passed to run", "It is called on each replica; a model's results are `PerReplica` values.")
def _(place: Place) -> None:
    strategy = place.mirrored()
    results = strategy.run(place.trained(strategy).model, args=(torch.ones(4, 3),))
    assert isinstance(results, ts.PerReplica)
