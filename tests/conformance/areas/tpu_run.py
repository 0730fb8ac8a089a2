"""Which functions `TPUStrategy.run` takes: any, since nothing has to be traced by hand first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.areas.run import integer
from tests.conformance.harness import Case, Difference, opened
from torchstrat.testing.fake_tpu import fake_tpu_strategy


class Step:
    """An object that is called."""

    def __init__(self) -> None:
        self.called = False

    def __call__(self) -> None:
        self.called = True


def run_object(_: Case) -> Any:
    step = Step()
    result = opened(fake_tpu_strategy()).run(step)
    assert step.called
    return result


def run_function(_: Case) -> Any:
    inputs: list[torch.Tensor] = []
    result = opened(fake_tpu_strategy()).run(inputs.append, args=(integer(1),))
    assert len(inputs) == 1
    return result


OPS: dict[str, Callable[[Case], Any]] = {
    "inside_tf_function_python_ok": lambda _: opened(fake_tpu_strategy()).run(lambda: integer(1)),
    "object_with_tf_function_call_accepted": run_object,
    "tf_function_accepted": run_function,
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
