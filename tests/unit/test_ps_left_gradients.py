"""Gradients that functions leave on workers, for later functions to use: allowed with one worker, else refused."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.errors import UnsupportedError
from torchstrat.testing.fake_cluster import FakeCluster


class Program:
    """A model with one weight, zero at first; its gradient is 1 for each backward pass, and the rate is 1."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.workers = len(cluster.spec.task_indices("worker"))
        strategy = cluster.strategy()
        with strategy.scope():
            self.model = model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            self.begun = ts.Variable(torch.tensor(0), name="begun")
        self.calls = 0
        self.coordinator = ts.ClusterCoordinator(strategy)
        x = torch.ones(1, 1)
        self.parts: dict[str, Callable[[], Any]] = {
            "backward": lambda: model(x).sum().backward(),
            "create_graph": lambda: (model(x) + 0 * model(x) ** 2).sum().backward(create_graph=True),
            "step": optimizer.step,
            "clear": optimizer.zero_grad,
            "set to zero": lambda: optimizer.zero_grad(set_to_none=False),
            "fill": lambda: model.weight.grad.fill_(0),
            "assign": lambda: setattr(model.weight, "grad", torch.ones(1, 1)),
            "halve": lambda: model.weight.grad.mul_(0.5),
            "look": lambda: float(model.weight.grad),
            "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 100.0),
        }

    def run(self, worker: int, names: str) -> Any:
        """These, in one function, on that worker."""
        self.calls += self.workers
        coordinator, begun, all_of_them = self.coordinator, self.begun, self.calls
        parts = [self.parts[name] for name in names.split(", ")]

        def function() -> Any:
            begun.assign_add(1)
            while int(begun.read_value()) < all_of_them:  # so each worker has one
                time.sleep(0.001)
            return [part() for part in parts][-1] if coordinator.get_current_worker_index() == worker else None

        values = [self.coordinator.schedule(function) for _ in range(self.workers)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, of create_graph
            self.coordinator.join()
        return next((value.get() for value in values if value.get() is not None), None)

    def weight(self) -> float:
        return float(self.model.state_dict()["weight"])


@contextmanager
def program_of(workers: int) -> Iterator[tuple[Program, FakeCluster]]:
    with FakeCluster(workers=workers, ps=1) as cluster:
        yield Program(cluster), cluster


@pytest.mark.parametrize(
    "functions",
    [
        ["clear, backward, step"] * 3,
        ["backward, step, clear"] * 3,
        ["set to zero, backward, step"] * 3,
        ["backward, step, set to zero"] * 3,
        ["clear, backward", "clear, backward, step, clear", "clear", "backward, step, clear", "backward, step"],
        ["clear, backward, backward, clip, step", "clear, backward, look, step"],
        ["backward, fill, backward, step", "set to zero, backward, step", "clear, backward, step"],
        ["backward", "assign, step, clear", "clear, backward, step, clear", "backward, step"],
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_each_function_clears_may_run_anywhere(workers: int, functions: list[str]) -> None:
    with program_of(workers) as (program, _):
        for number, names in enumerate(functions):
            program.run(number % workers, names)
        assert program.weight() == -3.0


@pytest.mark.parametrize(
    "functions",
    [
        ["backward", "step"],
        ["backward", "backward, step"],
        ["clear, backward, step", "backward, step"],
        ["backward", "create_graph, step"],
        ["backward", "halve"],
        ["backward", "look"],
        ["backward", "clip"],
        ["set to zero", "backward", "step"],
    ],
)
def test_what_another_function_left_is_refused_on_its_worker(functions: list[str]) -> None:
    *before, last = functions
    with program_of(2) as (two, _):
        for names in before:
            two.run(0, names.replace("set to zero", "backward, set to zero"))
        weight = two.weight()
        with pytest.raises(UnsupportedError, match=r"an earlier function left on a worker.*zero_grad"):
            two.run(0, last)
        assert two.weight() == weight
        two.run(0, "clear, backward, step")
        assert two.weight() == weight - 1


@pytest.mark.parametrize("last", ["step", "backward, step"])
def test_what_is_left_on_another_worker_is_missed(last: str) -> None:
    with program_of(2) as (two, _):
        two.run(0, "backward")
        with pytest.raises(UnsupportedError, match="an earlier function left on a worker"):
            two.run(1, last)
        for worker, names in ((1, "clear, backward, step"), (0, "clear"), (1, "clear"), (1, "backward, step")):
            two.run(worker, names)
        assert two.weight() == -2.0


def test_with_one_worker_gradients_are_accumulated_over_functions_until_a_second_one_comes() -> None:
    with program_of(1) as (program, cluster):
        for names in ["backward"] * 4 + ["step, clear"]:
            program.run(0, names)
        assert program.weight() == -4.0
        program.run(0, "backward")
        assert program.run(0, "look") == 1.0
        cluster.start_worker(1)
        program.workers = 2
        with pytest.raises(UnsupportedError, match="an earlier function left on a worker"):
            program.run(0, "step")
