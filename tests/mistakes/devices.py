"""Making a strategy."""

import copy
import pickle

import torchstrat as ts
from tests.mistakes.table import Area, Place
from torchstrat.errors import ContextError, DeviceError, InvalidArgumentError, UnsupportedError, WrongTypeError

area = Area("Making a strategy")


@area.raises("a device with a typo", DeviceError, given="'gpuu:0'", needed="kind of device", change="write 'cpu:1'")
def _(place: Place) -> None:
    ts.MirroredStrategy(["gpuu:0"])


@area.raises("an absent device", DeviceError, given="'cuda:77'", needed="on this machine", change="choose one")
def _(place: Place) -> None:
    ts.MirroredStrategy(["cuda:77"])


@area.raises("a string of devices", DeviceError, given="one string", needed="a list", change=r"devices=\['cpu:0'\]")
def _(place: Place) -> None:
    ts.MirroredStrategy("cpu:0")


@area.raises(
    "a device twice", DeviceError, given="cpu:0 more than once", needed="of its own", change="'cpu:0', 'cpu:1'"
)
def _(place: Place) -> None:
    ts.MirroredStrategy(["cpu:0", "cpu:0"])


@area.raises("numbers of devices", WrongTypeError, given="got int 0", needed="a string", change="Write 'cpu:0'")
def _(place: Place) -> None:
    ts.MirroredStrategy([0, 1])


@area.raises(
    "the number of devices", WrongTypeError, given="int 2", needed="a list", change=r"devices=\['cpu:0', 'cpu:1'"
)
def _(place: Place) -> None:
    ts.MirroredStrategy(2)


@area.raises("no devices", DeviceError, given="is empty", needed="at least one", change="None for all local ones")
def _(place: Place) -> None:
    ts.MirroredStrategy([])


@area.raises("the interface itself", TypeError, given="Strategy is an", needed="implementations", change="Mirrored")
def _(place: Place) -> None:
    ts.Strategy()


@area.raises(
    "a strategy's name with a typo", InvalidArgumentError, given="'miror'", needed="there are", change="mirrored"
)
def _(place: Place) -> None:
    ts.registry.create("miror")


@area.raises(
    "an option of another strategy", WrongTypeError, given="was given replicas", needed="it takes", change="devices"
)
def _(place: Place) -> None:
    ts.registry.create("mirrored", replicas=2)


@area.raises(
    "several logical devices in one process",
    InvalidArgumentError,
    given="logical_devices_per_replica=2",
    needed="a process for each",
    change="torchrun",
)
def _(place: Place) -> None:
    ts.MirroredStrategy(logical_devices_per_replica=2)


@area.raises("an unknown way to talk", InvalidArgumentError, given="'nccl'", needed="choose|one of", change="'auto'")
def _(place: Place) -> None:
    ts.MirroredStrategy(["cpu:0"], collectives="nccl")


@area.raises(
    "cross_device_ops", UnsupportedError, given="cross_device_ops='nccl'", needed="takes None", change="Leave it out"
)
def _(place: Place) -> None:
    ts.MirroredStrategy(["cpu:0"], cross_device_ops="nccl")  # type: ignore[arg-type]


@area.raises(
    "a class of TensorFlow's that is not there",
    AttributeError,
    given="'NcclAllReduce'",
    needed="chooses how devices",
    change="leave cross_device_ops out",
)
def _(place: Place) -> None:
    ts.NcclAllReduce()


@area.raises(
    "how to talk for a resolver",
    WrongTypeError,
    given="CommunicationImpl",
    needed="a cluster resolver",
    change="_options",
)
def _(place: Place) -> None:
    ts.MultiWorkerMirroredStrategy(ts.experimental.CollectiveCommunication.AUTO)


@area.raises(
    "a strategy in `with`", ContextError, given="is not a context manager", needed="with", change=r"\.scope\(\)"
)
def _(place: Place) -> None:
    with place.mirrored():
        pass


@area.raises("a copied strategy", ContextError, given="copy.copy", needed="must not share", change="copy.deepcopy")
def _(place: Place) -> None:
    copy.copy(place.mirrored())


@area.raises(
    "a pickled strategy", WrongTypeError, given="MirroredStrategy", needed="this process", change="in each process"
)
def _(place: Place) -> None:
    pickle.dumps(place.mirrored())


@area.right(
    "a strategy used after close", "`Strategy.close`: one whose replicas are in this process may be used again."
)
def _(place: Place) -> None:
    strategy = place.mirrored()
    strategy.close()
    assert strategy.run(lambda: 3) == 3
