"""What run returns, and how it is combined."""

import numpy as np
import torch

import torchstrat as ts
from tests.mistakes.table import Area, Place, loader
from torchstrat.errors import InvalidArgumentError, WrongTypeError

area = Area("Results")


def per_replica(place: Place, *shape: int) -> tuple[ts.Strategy, ts.PerReplica]:
    strategy = place.mirrored()
    return strategy, strategy.run(lambda: torch.rand(shape))


@area.raises(
    "an unknown operation", InvalidArgumentError, given="'max'", needed="unknown reduce_op", change="'sum' or 'mean'"
)
def _(place: Place) -> None:
    strategy, value = per_replica(place, 1)
    strategy.reduce("max", value)


@area.raises(
    "reduce's arguments exchanged",
    WrongTypeError,
    given="got PerReplica",
    needed="'sum', 'mean'",
    change="first argument",
)
def _(place: Place) -> None:
    strategy, value = per_replica(place, 1)
    strategy.reduce(value, "mean")


@area.raises(
    "no operation", WrongTypeError, given="NoneType", needed="'sum', 'mean'", change=r"reduce\('mean', value\)"
)
def _(place: Place) -> None:
    strategy, value = per_replica(place, 1)
    strategy.reduce(None, value)


@area.raises("a list of axes", WrongTypeError, given=r"list \[0\]", needed="a tuple of ints", change="None combines")
def _(place: Place) -> None:
    strategy, value = per_replica(place, 1)
    strategy.reduce("mean", value, axis=[0])


@area.raises("an axis of scalars", InvalidArgumentError, given="axis=0", needed="have no axis", change="axis=None")
def _(place: Place) -> None:
    strategy, value = per_replica(place)
    strategy.reduce("mean", value, axis=0)


@area.raises(
    "reduce without axis over uneven batches", InvalidArgumentError, given=r"\(2, 3\)", needed="equal", change="gather"
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    batch = next(iter(strategy.distribute_dataset(loader(3))))
    strategy.reduce("mean", strategy.run(lambda batch: batch[0], args=(batch,)))


@area.raises(
    "the sum of what is no result",
    InvalidArgumentError,
    given="a Tensor",
    needed="value per replica",
    change="run returned",
)
def _(place: Place) -> None:
    place.mirrored().reduce("sum", torch.ones(1))


@area.raises("a string reduced", InvalidArgumentError, given="a str", needed="value per replica", change="run returned")
def _(place: Place) -> None:
    place.mirrored().reduce("sum", "loss")


@area.raises(
    "weighted with an axis", InvalidArgumentError, given="weighted", needed="mean", change="leave weighted out"
)
def _(place: Place) -> None:
    strategy, value = per_replica(place, 2)
    strategy.reduce("mean", value, axis=0, weighted=True)


@area.raises(
    "gather of scalars", InvalidArgumentError, given="scalars", needed="axis", change=r"reshape them to \(1,\)"
)
def _(place: Place) -> None:
    strategy, value = per_replica(place)
    strategy.gather(value, axis=0)


@area.raises(
    "gather along no axis", InvalidArgumentError, given="Got None", needed="the dimension", change="write gather"
)
def _(place: Place) -> None:
    strategy, value = per_replica(place, 2)
    strategy.gather(value, axis=None)


@area.raises(
    "gather of shapes that do not fit",
    InvalidArgumentError,
    given=r"\(2, 1\)",
    needed="all dimensions",
    change="pad them",
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    value = strategy.run(lambda: torch.rand(2, 1 + ts.get_replica_context().replica_id_in_sync_group))
    strategy.gather(value, axis=0)


@area.raises(
    "a PerReplica in torch", InvalidArgumentError, given="a PerReplica", needed="per replica", change="strategy.reduce"
)
def _(place: Place) -> None:
    torch.mean(per_replica(place, 1)[1])


@area.raises(
    "a PerReplica in NumPy", InvalidArgumentError, given="a PerReplica", needed="per replica", change="strategy.reduce"
)
def _(place: Place) -> None:
    np.asarray(per_replica(place, 1)[1])


@area.raises(
    "the model called without run",
    InvalidArgumentError,
    given="PerReplica",
    needed="per replica",
    change="inside strategy.run",
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    made = place.trained(strategy)
    x, _y = next(iter(strategy.distribute_dataset(loader())))
    made.model(x)


@area.raises(
    "float of a PerReplica",
    WrongTypeError,
    given=r"float\(\)",
    needed="one value per replica",
    change="strategy.reduce",
)
def _(place: Place) -> None:
    float(per_replica(place, 1)[1])


@area.raises(
    "arithmetic with a PerReplica",
    WrongTypeError,
    given=r"\+ was given",
    needed="one value per replica",
    change="strategy.reduce",
)
def _(place: Place) -> None:
    0.0 + per_replica(place, 1)[1]


@area.raises(
    "a PerReplica compared",
    WrongTypeError,
    given=r"< was given",
    needed="one value per replica",
    change="strategy.reduce",
)
def _(place: Place) -> None:
    bool(per_replica(place, 1)[1] < 1)


@area.raises(
    "a PerReplica in an f-string",
    WrongTypeError,
    given=r"format '.3f'",
    needed="one value per replica",
    change="strategy.reduce",
)
def _(place: Place) -> None:
    str.format("{:.3f}", per_replica(place, 1)[1])


@area.raises(
    "item of a PerReplica",
    AttributeError,
    given=r"\.item was asked",
    needed="one value per replica",
    change="strategy.reduce",
)
def _(place: Place) -> None:
    per_replica(place, 1)[1].item()


@area.raises(
    "backward of a PerReplica",
    AttributeError,
    given=r"\.backward was asked",
    needed="one value per replica",
    change="strategy.reduce",
)
def _(place: Place) -> None:
    per_replica(place, 1)[1].backward()


@area.raises(
    "the shape of a PerReplica",
    AttributeError,
    given=r"\.shape was asked",
    needed="one value per replica",
    change="strategy.reduce",
)
def _(place: Place) -> None:
    per_replica(place, 1)[1].shape


@area.right("mean of what is no result", "As in TensorFlow: the mean of equal values is that value.")
def _(place: Place) -> None:
    assert place.mirrored().reduce("mean", torch.ones(1)) == 1


@area.right("local_results of a tensor", "As in TensorFlow: a tuple of that one value.")
def _(place: Place) -> None:
    assert place.mirrored().local_results(3) == (3,)
