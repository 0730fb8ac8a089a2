"""What run returns, and how it is combined."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import torchstrat as ts
from tests.mistakes.table import Area, each, loader, raises, right
from torchstrat.errors import InvalidArgumentError, WrongTypeError

A_VALUE = ("per replica", "strategy.reduce")
ONE_VALUE = ("one value per replica", "strategy.reduce")


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
