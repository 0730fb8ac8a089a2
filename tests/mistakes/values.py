"""What run returns, and how it is combined."""

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import torchstrat as ts
from tests.mistakes.table import Area, each, loader, raises, right
from torchstrat.errors import InvalidArgumentError, WrongTypeError

A_VALUE = ("per replica", "strategy.reduce")
ONE_VALUE = ("one value per replica", "strategy.reduce")


class Arguments(Area):
    """Calls with one argument of another kind than theirs."""

    title = "Arguments"

    @each(
        (
            "a name for a dtype",
            lambda: ts.Variable(1.0, dtype="float32"),
            WrongTypeError,
            "str 'float32'",
            "a torch.dtype",
            r"torch\.float32",
        ),
        (
            "a dtype of NumPy",
            lambda: ts.Variable(1.0, dtype=np.float32),
            WrongTypeError,
            "float32",
            "a torch.dtype",
            r"torch\.float32",
        ),
        (
            "a number for a shape",
            lambda: ts.Variable(torch.ones(3), shape=3),
            WrongTypeError,
            "int 3",
            "a tuple of sizes",
            r"shape=\(3,\)",
        ),
        (
            "a variable of no value",
            lambda: ts.Variable(torch.ones(3, device="meta")),
            InvalidArgumentError,
            "on meta",
            "an initial value",
            r"torch\.zeros",
        ),
        (
            "the name of a strategy to set",
            lambda: ts.experimental_set_strategy("mirrored"),
            WrongTypeError,
            "str 'mirrored'",
            "a strategy or None",
            r"registry\.create",
        ),
        (
            "one signal",
            lambda: ts.PreemptionHandler(signals=signal.SIGTERM),
            WrongTypeError,
            "SIGTERM",
            "a tuple of signals",
            r"signals=\(.*,\)",
        ),
        (
            "a strategy without its argument",
            lambda: ts.registry.create("parameter_server"),
            WrongTypeError,
            "'parameter_server'",
            "missing a required argument: 'cluster_resolver'",
            "Pass it by its name",
        ),
        (
            "a list for a name",
            lambda: ts.registry.get(["mirrored"]),
            WrongTypeError,
            "list",
            "is a string",
            "There are one_device",
        ),
        (
            "no rate",
            lambda: ts.Ftrl([torch.nn.Parameter(torch.ones(1))], lr=None),
            WrongTypeError,
            "NoneType None",
            "must be a number",
            "lr",
        ),
        (
            "a string for a penalty",
            lambda: ts.Ftrl([torch.nn.Parameter(torch.ones(1))], l1="x"),
            WrongTypeError,
            "str 'x'",
            "must be a number",
            "l1",
        ),
        ("one value for all", lambda: ts.PerReplica(3), WrongTypeError, "int 3", "a list of values", r"PerReplica\(\["),
        (
            "no path to consolidate",
            lambda: ts.consolidate(None, "x.pt"),
            WrongTypeError,
            "NoneType None",
            "a path",
            "consolidate\\(",
        ),
        (
            "no number of shards",
            lambda: ts.partitioners.FixedShardsPartitioner(None),
            WrongTypeError,
            "NoneType",
            "a whole number",
            "num_shards",
        ),
        (
            "a path that no system has",
            lambda: ts.Checkpoint(model=torch.nn.Linear(1, 1)).save("a\0b"),
            InvalidArgumentError,
            "x00b",
            "of a folder",
            "of its own",
        ),
        ("a number for an environment", lambda: ts.launch.Cluster(env=3), WrongTypeError, "env=3", "a dict", "env="),
        (
            "a word for restarting",
            lambda: ts.launch.Cluster(restart="x"),
            WrongTypeError,
            "'x'",
            "must be True",
            "a RestartPolicy",
        ),
        (
            "a word for seconds",
            lambda: ts.launch.Cluster(grace_seconds="x"),
            WrongTypeError,
            "'x'",
            "a number",
            "of seconds",
        ),
        (
            "seconds before",
            lambda: ts.launch.Cluster(grace_seconds=-1),
            InvalidArgumentError,
            "=-1",
            "must be",
            "0 or more",
        ),
        (
            "no program",
            lambda: ts.launch.Cluster(server_command=()),
            WrongTypeError,
            r"\(\)",
            "a program and its arguments",
            "my_server",
        ),
    )
    def alone(self, call: Callable[[], Any]) -> None:
        call()

    @each(
        (
            "weights for weighted",
            lambda s, v: s.reduce("mean", v, weighted=torch.ones(2)),
            WrongTypeError,
            "got Tensor",
            "True or False",
            "set_weight",
        ),
        (
            "a number for pairs",
            lambda s, v: s.extended.batch_reduce_to("sum", 3),
            WrongTypeError,
            "int 3",
            "a list of pairs",
            r"\[\(value, dest",
        ),
        (
            "values without destinations",
            lambda s, v: s.extended.batch_reduce_to("sum", [v]),
            WrongTypeError,
            "PerReplica",
            "a list of pairs",
            r"\[\(value, dest",
        ),
        (
            "a tensor of arguments of update",
            lambda s, v: s.extended.update(v, print, args=torch.ones(2)),
            InvalidArgumentError,
            "got Tensor",
            "a list or a tuple",
            r"args=\(value,\)",
        ),
        (
            "a list of keywords of update",
            lambda s, v: s.extended.update(v, print, kwargs=[1]),
            WrongTypeError,
            "got list",
            "a dict",
            r"\{'name'",
        ),
        (
            "a tensor for update_non_slot",
            lambda s, v: s.extended.update_non_slot([v], print, args=torch.ones(2)),
            InvalidArgumentError,
            "got Tensor",
            "a list or a tuple",
            r"args=\(value,\)",
        ),
        (
            "a tensor for each replica",
            lambda s, v: s.extended.call_for_each_replica(print, args=torch.ones(2)),
            InvalidArgumentError,
            "got Tensor",
            "a list or a tuple",
            r"args=\(value,\)",
        ),
        (
            "a tensor that is merged",
            lambda s, v: s.run(lambda: ts.get_replica_context().merge_call(print, args=torch.ones(2))),
            InvalidArgumentError,
            "got Tensor",
            "a list or a tuple",
            r"args=\(value,\)",
        ),
        (
            "a word for a weight",
            lambda s, v: s.run(lambda: ts.get_replica_context().set_weight("x")),
            WrongTypeError,
            "str 'x'",
            "needs a number",
            "len",
        ),
        (
            "the name of an optimizer",
            lambda s, v: s.extended.estimate(torch.nn.Linear(1, 1), "adam"),
            WrongTypeError,
            "str 'adam'",
            "an optimizer over",
            r"Adam\(model",
        ),
        (
            "a list of buffers",
            lambda s, v: s.extended.set_aggregation(torch.nn.BatchNorm1d(1), ["x"], "sum"),
            InvalidArgumentError,
            r"\['x'\]",
            "it has",
            "running_mean",
        ),
    )
    def of_a_strategy(self, call: Callable[[ts.Strategy, Any], Any]) -> None:
        strategy = self.mirrored()
        call(strategy, strategy.run(lambda: torch.rand(2)))


class Results(Area):
    title = "Results"

    def result(self, *shape: int) -> tuple[ts.Strategy, ts.PerReplica]:
        strategy = self.mirrored()
        return strategy, strategy.run(lambda: torch.rand(shape))

    @each(
        (
            "an unknown operation",
            {"reduce_op": "max"},
            InvalidArgumentError,
            "'max'",
            "unknown reduce_op",
            "'sum' or 'mean'",
        ),
        ("no operation", {"reduce_op": None}, WrongTypeError, "NoneType", "'sum', 'mean'", r"reduce\('mean', value\)"),
        ("a list of axes", {"axis": [0]}, WrongTypeError, r"list \[0\]", "a tuple of ints", "None combines"),
        ("an axis of scalars", {"shape": (), "axis": 0}, InvalidArgumentError, "axis=0", "have no axis", "axis=None"),
        (
            "weights and an axis",
            {"axis": 0, "weighted": True},
            InvalidArgumentError,
            "weighted",
            "mean",
            "leave weighted out",
        ),
    )
    def reduced(self, options: dict[str, Any]) -> None:
        strategy, value = self.result(*options.get("shape", (1,)))
        given = {name: given for name, given in options.items() if name != "shape"}
        strategy.reduce(**{"reduce_op": "mean", "value": value, **given})

    @raises(WrongTypeError, "got PerReplica", "'sum', 'mean'", "first argument")
    def arguments_of_reduce_exchanged(self) -> None:
        strategy, value = self.result(1)
        strategy.reduce(value, "mean")

    @raises(InvalidArgumentError, r"\(2, 3\)", "equal", "gather")
    def reduce_without_axis_over_uneven_batches(self) -> None:
        strategy = self.mirrored()
        batch = next(iter(strategy.distribute_dataset(loader(3))))
        strategy.reduce("mean", strategy.run(lambda batch: batch[0], args=(batch,)))

    @raises(InvalidArgumentError, "a Tensor", "value per replica", "run returned")
    def the_sum_of_what_is_no_result(self) -> None:
        self.mirrored().reduce("sum", torch.ones(1))

    @raises(InvalidArgumentError, "a str", "value per replica", "run returned")
    def a_string_reduced(self) -> None:
        self.mirrored().reduce("sum", "loss")

    @raises(InvalidArgumentError, "scalars", "axis", r"reshape them to \(1,\)")
    def gather_of_scalars(self) -> None:
        strategy, value = self.result()
        strategy.gather(value, axis=0)

    @raises(InvalidArgumentError, "Got None", "the dimension", "write gather")
    def gather_along_no_axis(self) -> None:
        strategy, value = self.result(2)
        strategy.gather(value, axis=None)

    @raises(InvalidArgumentError, r"\(2, 1\)", "all dimensions", "pad them")
    def gather_of_shapes_that_do_not_fit(self) -> None:
        strategy = self.mirrored()
        value = strategy.run(lambda: torch.rand(2, 1 + ts.get_replica_context().replica_id_in_sync_group))
        strategy.gather(value, axis=0)

    @each(
        ("a PerReplica in torch", torch.mean, InvalidArgumentError, "a PerReplica", *A_VALUE),
        ("a PerReplica in NumPy", np.asarray, InvalidArgumentError, "a PerReplica", *A_VALUE),
        ("float of a PerReplica", float, WrongTypeError, r"float\(\)", *ONE_VALUE),
        ("arithmetic with a PerReplica", lambda value: 0.0 + value, WrongTypeError, r"\+ was given", *ONE_VALUE),
        ("a PerReplica compared", lambda value: value < 1, WrongTypeError, "< was given", *ONE_VALUE),
        ("a PerReplica in an f-string", "{:.3f}".format, WrongTypeError, "format '.3f'", *ONE_VALUE),
        ("a loop over a PerReplica", list, WrongTypeError, r"iteration, or \[\] was given", *ONE_VALUE),
        ("an item of a PerReplica", lambda value: value[0], WrongTypeError, r"\[\] was given", *ONE_VALUE),
        ("the length of a PerReplica", len, WrongTypeError, r"len\(\) was given", *ONE_VALUE),
        ("a tensor of a PerReplica", torch.tensor, WrongTypeError, "was given", *ONE_VALUE),
        ("item of a PerReplica", lambda value: value.item(), AttributeError, r"\.item was asked", *ONE_VALUE),
        ("backward of a PerReplica", lambda value: value.backward(), AttributeError, r"\.backward was", *ONE_VALUE),
        ("the shape of a PerReplica", lambda value: value.shape, AttributeError, r"\.shape was asked", *ONE_VALUE),
    )
    def used(self, use: Callable[[ts.PerReplica], Any]) -> None:
        use(self.result(1)[1])

    @raises(InvalidArgumentError, "PerReplica", "per replica", "inside strategy.run")
    def the_model_called_without_run(self) -> None:
        strategy = self.mirrored()
        made = self.trained(strategy)
        x, _y = next(iter(strategy.distribute_dataset(loader())))
        made.model(x)

    @right("As in TensorFlow: the mean of equal values is that value.")
    def mean_of_what_is_no_result(self) -> None:
        assert self.mirrored().reduce("mean", torch.ones(1)) == 1

    @right("As in TensorFlow: a tuple of that one value.")
    def local_results_of_a_tensor(self) -> None:
        assert self.mirrored().local_results(3) == (3,)
