"""Scopes and runs."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from tests.mistakes.table import Area, each, loader, raises, right, step_of, warns
from torchstrat.errors import (
    ContextError,
    InvalidArgumentError,
    ReplicaDivergenceError,
    StrategyMixingError,
    StructureMismatchError,
    UnsupportedError,
    WrongTypeError,
)

_steps = 0


def _count_step() -> None:
    global _steps
    _steps += 1


class Yielding:
    """Steps that compute nothing where they are called."""

    def __call__(self) -> Iterator[float]:
        yield 1.0

    async def awaited(self) -> float:
        return 1.0

    async def draws(self) -> Any:
        yield 1.0


FUNCTION = "a function that computes when it is called"
RUNS_NONE = (WrongTypeError, FUNCTION, "is a generator function", "Take the yield out")
AWAITS_NONE = (WrongTypeError, FUNCTION, "is an async function", "asyncio.run")
RAN_NONE = (WrongTypeError, "returned the (generator|coroutine)", "on no replica", "Return what it computes")


class Steps(Area):
    title = "Scopes and steps"

    @raises(StrategyMixingError, "in the scope of", "one strategy", "leave the inner")
    def a_scope_in_that_of_another(self) -> None:
        with self.mirrored().scope(), self.mirrored().scope():
            pass

    @raises(WrongTypeError, "2 positional", r"step\(batch\)", r"args=\(batch,\)")
    def a_batch_for_args(self) -> None:
        strategy = self.mirrored()
        step = self.trained(strategy).step
        for batch in strategy.distribute_dataset(loader()):
            strategy.run(step, args=batch)

    @raises(InvalidArgumentError, "Tensor", "a list or a tuple", r"args=\(value,\)")
    def a_tensor_for_args(self) -> None:
        self.mirrored().run(lambda x: x, args=torch.ones(2))

    @raises(InvalidArgumentError, "got Tensor", "list or a tuple", r"\(value,\)")
    def arguments_as_those_of_run(self) -> None:
        self.mirrored().run(lambda x, y: x, torch.ones(2), torch.ones(2))

    @raises(WrongTypeError, "0 positional", r"step\(batch\)", "entry of args")
    def too_few_arguments(self) -> None:
        strategy = self.mirrored()
        strategy.run(self.trained(strategy).step)

    @raises(WrongTypeError, "got list", "a dict", r"\{'name'")
    def a_list_of_keywords(self) -> None:
        self.mirrored().run(lambda x: x, kwargs=["x"])

    @raises(WrongTypeError, "got Tensor", "needs a function", "function itself")
    def a_called_step(self) -> None:
        self.mirrored().run(torch.ones(1))

    @each(
        ("a step with a yield", Yielding.__call__, *RUNS_NONE),
        ("a partial of a step with a yield", functools.partial(Yielding.__call__, Yielding()), *RUNS_NONE),
        ("an object whose call has a yield", Yielding(), *RUNS_NONE),
        ("an asynchronous step", Yielding().awaited, *AWAITS_NONE),
        ("an asynchronous step with a yield", Yielding().draws, *AWAITS_NONE),
        ("a step that returns a generator", lambda: [(number for number in range(3))], *RAN_NONE),
        ("a step that returns a coroutine", lambda: {"loss": Yielding().awaited()}, *RAN_NONE),
    )
    def unfinished(self, step: Any) -> None:
        self.mirrored().run(step)

    @each(
        ("a yield in what is merged", ts.ReplicaContext.merge_call, *RUNS_NONE),
        ("a yield in an update", lambda here, fn: here.strategy.extended.update(None, fn), *RUNS_NONE),
    )
    def unfinished_in_a_step(self, call: Any) -> None:
        self.mirrored().run(lambda: call(ts.get_replica_context(), Yielding.__call__))

    @right("`distribute_datasets_from_function`: what its function yields is its dataset.")
    def a_yield_in_a_dataset_function(self) -> None:
        def batches(context: ts.data.InputContext) -> Iterator[torch.Tensor]:
            yield torch.ones(2)

        assert len(list(self.mirrored().distribute_datasets_from_function(batches))) == 1

    @raises(WrongTypeError, "got dict", "RunOptions", "or None")
    def options_of_another_call(self) -> None:
        self.mirrored().run(lambda: 1, options={"a": 1})

    @raises(ContextError, "replica 0 of a run", "outside of run", "all_reduce")
    def run_within_run(self) -> None:
        strategy = self.mirrored()
        strategy.run(lambda: strategy.run(lambda: 1))

    @raises(ContextError, "replica 0", "outside of run", "all_reduce")
    def reduce_within_run(self) -> None:
        strategy = self.mirrored()
        strategy.run(lambda: strategy.reduce("sum", torch.ones(1)))

    @raises(ContextError, "scope was called", "outside of run", "merge_call")
    def scope_within_run(self) -> None:
        strategy = self.mirrored()

        def step() -> None:
            with strategy.scope():
                nn.Linear(1, 1)

        strategy.run(step)

    @raises(InvalidArgumentError, "inside a replica", "outside", r"args=\(next")
    def next_within_run(self) -> None:
        strategy = self.mirrored()
        iterator = iter(strategy.distribute_dataset(loader()))
        strategy.run(lambda: next(iterator))

    @raises(ReplicaDivergenceError, r"replica 0 called all_reduce\(sum\)", "Every replica has to", "look for a branch")
    def a_collective_that_one_replica_leaves_out(self) -> None:
        def step() -> None:
            here = ts.get_replica_context()
            if here.replica_id_in_sync_group == 0:
                here.all_reduce("sum", torch.ones(1))

        self.mirrored().run(step)

    @raises(StructureMismatchError, "a list of 1", "the same structure", "leaves")
    def results_of_different_lengths(self) -> None:
        self.mirrored().run(lambda: [1] * (1 + ts.get_replica_context().replica_id_in_sync_group))

    @raises(ZeroDivisionError, "division", "replica 0", "Raised on replica 0 of 2")
    def a_bug_in_the_step(self) -> None:
        self.mirrored().run(lambda: 1 / 0)

    @raises(InvalidArgumentError, "divides by the global batch", "averages gradients", "gradient_reduce_op='sum'")
    def a_loss_that_is_divided_twice(self) -> None:
        strategy = self.mirrored()
        made = self.trained(strategy)

        def step(batch: list[torch.Tensor]) -> None:
            x, y = batch
            ts.compute_average_loss(((made.model(x) - y) ** 2).mean(1), global_batch_size=4).backward()

        strategy.run(step, args=(next(iter(strategy.distribute_dataset(loader()))),))

    @raises(StrategyMixingError, "2 replicas", "another strategy", "by the")
    def a_batch_of_another_strategy(self) -> None:
        batch = next(iter(self.mirrored(2).distribute_dataset(loader())))
        self.mirrored(3).run(lambda batch: batch[0].sum(), args=(batch,))

    @raises(ContextError, "not the running one", "inside each run", "anew")
    def a_context_of_a_run_that_is_over(self) -> None:
        kept: list[ts.ReplicaContext] = []
        strategy = self.mirrored()
        strategy.run(lambda: kept.append(ts.get_replica_context()))
        strategy.run(lambda: kept[0].all_reduce("sum", torch.ones(1)))

    @raises(UnsupportedError, "is not trained", "optimizer", r"torch\.nn\.Parameter")
    def a_variable_that_trains(self) -> None:
        with self.mirrored().scope():
            ts.Variable(0.0, trainable=True)

    @raises(ValueError, "'avg'", "VariableAggregation", r"\.SUM")
    def an_unknown_aggregation(self) -> None:
        with self.mirrored().scope():
            ts.Variable(0.0, aggregation="avg")

    @raises(InvalidArgumentError, "2 parts", "1 logical device", "product")
    def a_cut_without_logical_devices(self) -> None:
        strategy = self.mirrored()
        strategy.run(lambda: strategy.split_to_logical_devices(torch.ones(4, 4), [2, 1]))

    @warns("a Linear", "has not seen", r"with strategy\.scope\(\)")
    def a_module_made_outside_of_the_scope(self) -> None:
        strategy = self.mirrored()
        model = nn.Linear(3, 1)
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        strategy.run(step, args=(next(iter(strategy.distribute_dataset(loader()))),))

    @raises(UnsupportedError, r"gradient of shape \(1, 3\)", "under no_sync", "means have no such limit")
    def a_sum_scaled_in_the_midst_of_its_accumulation(self) -> None:
        strategy = self.mirrored(gradient_reduce_op="sum")
        trained = self.trained(strategy)
        backward = lambda: trained.model(torch.ones(2, 3)).sum().backward()  # noqa: E731

        def scale_and_step() -> None:
            backward()
            for parameter in trained.model.parameters():
                parameter.grad.mul_(0.5)
            trained.optimizer.step()

        strategy.run(backward)
        with strategy.no_sync():
            strategy.run(scale_and_step)

    @raises(UnsupportedError, r"Linear\.weight \(1, 3\)", "changed between runs", r"in a step \(Strategy\.run\)")
    def a_part_of_a_gradient_scaled_between_runs(self) -> None:
        strategy = self.mirrored()
        trained = self.trained(strategy)
        backward = lambda: trained.model(torch.ones(2, 3)).sum().backward()  # noqa: E731
        with strategy.no_sync():
            strategy.run(backward)
        for parameter in trained.model.parameters():
            parameter.grad.mul_(0.5)
        strategy.run(trained.optimizer.step)

    @raises(WrongTypeError, "leave must be a tuple of classes", "BatchNorm1d", r"leave=\(nn\.BatchNorm2d,\)")
    def a_class_of_layers_to_leave(self) -> None:
        ts.convert_sync_batchnorm(nn.BatchNorm1d(3), leave=nn.BatchNorm1d)  # type: ignore[arg-type]

    @warns("a bare parameter of shape", "has not seen", r"put a bare parameter into one")
    def a_bare_parameter(self) -> None:
        strategy = self.mirrored()
        with strategy.scope():
            weight = nn.Parameter(torch.ones(3))
        strategy.run(lambda: weight.sum())

    @warns(r"Trainer\.steps has grown by 2", "share it", r"outside of Strategy\.run")
    def a_count_of_steps_in_an_object(self) -> None:
        class Trainer:
            def __init__(self) -> None:
                self.steps = 0

            def step(self) -> None:
                self.steps += 1

        self.mirrored().run(Trainer().step)

    @warns(r"steps of the function around step\(\) has grown by 2", "share it", r"outside of Strategy\.run")
    def a_count_of_steps_in_a_closure(self) -> None:
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1

        self.mirrored().run(step)

    @warns("the global _steps has grown by 2", "share it", r"outside of Strategy\.run")
    def a_count_of_steps_in_a_global(self) -> None:
        self.mirrored().run(_count_step)

    @warns(r"'steps' of a dict has grown by 2", "share it", r"outside of Strategy\.run")
    def a_count_of_steps_in_a_dictionary(self) -> None:
        counts = {"steps": 0}
        self.mirrored().run(lambda: counts.update(steps=counts["steps"] + 1))

    @warns(r"itertools\.count\(\) has grown by 2", "share it", r"outside of Strategy\.run")
    def a_count_of_steps_by_itertools(self) -> None:
        steps = itertools.count()
        self.mirrored().run(lambda: next(steps))

    @warns("the position of a range_iterator has grown by 2", "share it", r"outside of Strategy\.run")
    def a_value_for_each_step_of_an_iterator(self) -> None:
        values = iter(range(10))
        self.mirrored().run(lambda: next(values))

    @warns(r"DataLoader's iterator has grown by 2", "share it", r"give the step each replica's rows")
    def a_batch_that_the_step_takes_from_an_iterator(self) -> None:
        unlabelled = iter(loader())
        self.mirrored().run(lambda: len(next(unlabelled)))

    @warns(r"DataLoader's iterator has grown by 2", "share it", r"give the step each replica's rows")
    def a_batch_that_the_step_takes_from_a_generator(self) -> None:
        def repeated() -> Iterator[Any]:
            while True:
                yield from loader(2)

        unlabelled = repeated()
        next(unlabelled)
        self.mirrored().run(lambda: len(next(unlabelled)))

    @raises(
        ReplicaDivergenceError,
        r"replica 0 put another Linear in the place of Sequential\.0",
        "and replica 1 did not",
        "an argument of the step",
    )
    def a_layer_that_one_replica_replaces(self) -> None:
        strategy = self.mirrored()
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 1))
        is_replaced = [False]

        def step() -> torch.Tensor:
            if not is_replaced[0]:
                is_replaced[0], model[0] = True, nn.Linear(3, 1)
            return model(torch.ones(2, 3)).sum()

        strategy.run(step)

    @right("It is found in the step, before it steps: the model is what counts.")
    def an_optimizer_made_outside_of_the_scope(self) -> None:
        strategy = self.mirrored()
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

    @right("As in TensorFlow: every replica sees all of what is no distributed value.")
    def a_batch_that_is_not_distributed(self) -> None:
        strategy = self.mirrored()
        assert [len(x) for x in strategy.local_results(strategy.run(lambda x: x + 0, args=(torch.ones(4),)))] == [4, 4]

    @right("As in TensorFlow: it is the default strategy's, of one replica.")
    def get_replica_context_outside_of_any_scope(self) -> None:
        assert ts.get_replica_context().num_replicas_in_sync == 1

    @right("As in TensorFlow: None, since a scope is in no replica.")
    def get_replica_context_in_a_scope(self) -> None:
        with self.mirrored().scope():
            assert ts.get_replica_context() is None

    @right("It is called on each replica; a model's results are `PerReplica` values.")
    def the_model_passed_to_run(self) -> None:
        strategy = self.mirrored()
        results = strategy.run(self.trained(strategy).model, args=(torch.ones(4, 3),))
        assert isinstance(results, ts.PerReplica)
