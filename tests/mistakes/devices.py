"""Making a strategy."""

import copy
import pickle
from typing import Any

import torchstrat as ts
from tests.mistakes.table import Area, each, raises, right
from torchstrat.errors import ContextError, DeviceError, InvalidArgumentError, UnsupportedError, WrongTypeError


class Devices(Area):
    title = "Making a strategy"

    @each(
        ("a device with a typo", ["gpuu:0"], DeviceError, "'gpuu:0'", "kind of device", "write 'cpu:1'"),
        ("an absent device", ["cuda:77"], DeviceError, "'cuda:77'", "on this machine", "choose one"),
        ("a string of devices", "cpu:0", DeviceError, "one string", "a list", r"devices=\['cpu:0'\]"),
        ("devices in one string", "cpu:0, cpu:1", DeviceError, "'cpu:0, cpu:1'", "a list", r"=\['cpu:0', 'cpu:1'\]"),
        ("an empty string", "", DeviceError, "devices='' is one", "a list", r"devices=\['cpu:0'\]"),
        ("bytes", b"cpu", WrongTypeError, "bytes b'cpu'", "a list", r"\['cpu:0', 'cpu:1'\]"),
        ("a device twice", ["cpu:0", "cpu:0"], DeviceError, "cpu:0 more than once", "of its own", "'cpu:0', 'cpu:1'"),
        ("numbers of devices", [0, 1], WrongTypeError, "got int 0", "a string", "Write 'cpu:0'"),
        ("the number of devices", 2, WrongTypeError, "int 2", "a list", r"devices=\['cpu:0', 'cpu:1'"),
        ("no devices", [], DeviceError, "is empty", "at least one", "None for all local ones"),
    )
    def devices(self, devices: Any) -> None:
        ts.MirroredStrategy(devices)

    @raises(TypeError, "Strategy is an", "implementations", "Mirrored")
    def the_interface_itself(self) -> None:
        ts.Strategy()

    @raises(InvalidArgumentError, "'miror'", "there are", "mirrored")
    def the_name_of_a_strategy_with_a_typo(self) -> None:
        ts.registry.create("miror")

    @raises(WrongTypeError, "was given replicas", "it takes", "devices")
    def an_option_of_another_strategy(self) -> None:
        ts.registry.create("mirrored", replicas=2)

    @raises(InvalidArgumentError, "logical_devices_per_replica=2", "a process for each", "torchrun")
    def several_logical_devices_in_one_process(self) -> None:
        ts.MirroredStrategy(logical_devices_per_replica=2)

    @raises(InvalidArgumentError, "'nccl'", "choose|one of", "'auto'")
    def an_unknown_way_to_talk(self) -> None:
        ts.MirroredStrategy(["cpu:0"], collectives="nccl")

    @raises(UnsupportedError, "cross_device_ops='nccl'", "takes None", "Leave it out")
    def cross_device_ops(self) -> None:
        ts.MirroredStrategy(["cpu:0"], cross_device_ops="nccl")  # type: ignore[arg-type]

    @raises(AttributeError, "'NcclAllReduce'", "chooses how devices", "leave cross_device_ops out")
    def a_class_of_tensorflow_that_is_not_there(self) -> None:
        ts.NcclAllReduce()

    @raises(WrongTypeError, "CommunicationImpl", "a cluster resolver", "_options")
    def how_to_talk_for_a_resolver(self) -> None:
        ts.MultiWorkerMirroredStrategy(ts.experimental.CollectiveCommunication.AUTO)

    @raises(ContextError, "is not a context manager", "with", r"\.scope\(\)")
    def a_strategy_in_with(self) -> None:
        with self.mirrored():
            pass

    @raises(ContextError, "copy.copy", "must not share", "copy.deepcopy")
    def a_copied_strategy(self) -> None:
        copy.copy(self.mirrored())

    @raises(WrongTypeError, "MirroredStrategy", "this process", "in each process")
    def a_pickled_strategy(self) -> None:
        pickle.dumps(self.mirrored())

    @right("`Strategy.close`: one whose replicas are in this process may be used again.")
    def a_strategy_used_after_close(self) -> None:
        strategy = self.mirrored()
        strategy.close()
        assert strategy.run(lambda: 3) == 3
