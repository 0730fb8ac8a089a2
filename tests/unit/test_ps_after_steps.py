"""After a step of a program's own optimizer, in a function: what cannot come from a server, and what it sets itself.

That what comes is right is a row of ``tests/matrix/ps_objects.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.errors import UnsupportedError
from torchstrat.testing.fake_cluster import FakeCluster


class Plain(torch.optim.Optimizer):
    """Gradient descent."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


class Counter:
    """Of the program's own: what is in it cannot be compared from outside."""

    def __init__(self) -> None:
        self.count = 0


class Keeping(Plain):
    """Keeps what no message has, and returns it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counter, self.untouched = Counter(), Counter()
        self.by_parameter: dict[torch.Tensor, int] = {}
        self.sum = 0.0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        self.counter.count += 1
        for p in self.param_groups[0]["params"]:
            self.by_parameter[p] = self.by_parameter.get(p, 0) + 1
        self.sum += 1.5
        return self.counter


class Returning(Plain):
    """Each element for itself, and returns something of all that it has stepped."""

    def step(self, closure: Any = None) -> float:  # type: ignore[override]
        super().step()
        return float(sum(p.sum() for group in self.param_groups for p in group["params"]))


def call(make: Callable[[Any], Any], function: Callable[[Any], object], **options: Any) -> Any:
    """What ``function(optimizer)`` returns when a worker calls it with gradients."""
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(**options)
        with strategy.scope():
            model = nn.Linear(8, 2)
            optimizer = make(model.parameters())

        def scheduled() -> object:
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            return function(optimizer)

        return ts.ClusterCoordinator(strategy).schedule(scheduled).get(60)


def reading(name: str) -> Callable[[Any], object]:
    def step_and_read(optimizer: Any) -> object:
        optimizer.step()
        optimizer.step()
        assert optimizer.sum == 3.0
        return len(str(getattr(optimizer, name)))

    return step_and_read


@pytest.mark.parametrize("name", ["counter", "by_parameter"])
def test_an_attribute_that_steps_change_and_that_cannot_come_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"attribute '{name}' of Keeping after steps, which have changed it"):
        call(Keeping, reading(name))


def test_an_attribute_that_no_step_changes_is_the_workers() -> None:
    assert call(Keeping, reading("untouched"))


def read_result(optimizer: Any) -> object:
    found = optimizer.step()
    return found.count


def test_a_result_that_cannot_come_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"what .*Keeping.step.. returns, .* is of Counter"):
        call(Keeping, read_result)


def test_a_result_of_parts_is_refused() -> None:
    def read(optimizer: Any) -> object:
        return optimizer.step()

    with pytest.raises(
        UnsupportedError, match=r"Returning.step.. returns. elementwise_optimizers.*Leave the class out"
    ):
        call(Returning, read, elementwise_optimizers=[Returning])


def test_what_a_function_sets_after_a_step_holds() -> None:
    def step_and_set(optimizer: Any) -> tuple[float, float]:
        optimizer.step()
        optimizer.sum = 7.0
        optimizer.param_groups[0]["lr"] = 0.5
        found = optimizer.sum, copy.deepcopy(optimizer.param_groups[0])["lr"]
        del optimizer.sum
        assert not hasattr(optimizer, "sum")
        optimizer.sum = 7.0
        return found

    with pytest.warns(UserWarning, match="a scheduled function set"):
        assert call(Keeping, step_and_set) == (7.0, 0.5)
